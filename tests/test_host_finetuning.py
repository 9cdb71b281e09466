"""Host time of fine-tuning: weights that are dequantised, forwards that are repeated, tensors that are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simpar.costs.host import launch_seconds
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.layout import Layout
from simpar.parallel.modules import quantised, trained
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models, simulate

SLOW = 1.6
"""An x86 host of which no more is known."""
LINEARS = 7
"""Of a layer: queries, keys, values, output, gate, up, down."""


def scenario(recompute: str = "none", **training: Any) -> Scenario:
    """Qwen3 0.6B, one short sequence on one H100."""
    return make_scenario({
        "model": "qwen3-0.6b", "framework": "transformers", "framework_version": "2025-11",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1}, "plan": {"zero_stage": 0, "recompute": recompute},
        "training": {"sequence_length": 256, "global_batch_size": 1, **training},
    })  # fmt: skip


def pricer(recompute: str = "none", **training: Any) -> LayoutPricer:
    chosen = scenario(recompute, **training)
    layout = Layout.of(chosen, 1)
    return LayoutPricer(layout, *cost_models(chosen, layout.hardware))


def lora(base: str = "auto", modules: str = "all", **training: Any) -> dict[str, Any]:
    return {"trainable": "lora", "lora_modules": modules, "base_weights": base, **training}


@pytest.mark.parametrize(("base", "forward", "backward"), [("auto", 0.0, 0.0), ("nf4", 46e-6, 61e-6), ("nf4-double", 65e-6, 82e-6)])
def test_linears_of_bitsandbytes_hold_the_host(base: str, forward: float, backward: float) -> None:
    """In a forward, in its repetition and in a backward; neither the head's, nor a compiled layer's."""

    def more(phase: str, recompute: str = "none", block: int = 1, **training: Any) -> float:
        found = pricer(recompute, **lora(base, **training))
        price = found.block(found.layout.stage_blocks[0][block], phase)
        return launch_seconds(found.layout, price, phase) - launch_seconds(found.layout, replace(price, quantised=0), phase)

    assert more("F") == pytest.approx(SLOW * LINEARS * forward)
    assert more("B") == pytest.approx(SLOW * LINEARS * backward)
    assert more("B", "full") == pytest.approx(SLOW * LINEARS * (forward + backward))
    assert more("F", block=-1) == more("F", block=0) == more("F", compile=True) == 0.0


def test_only_frozen_weights_in_fewer_bits_are_dequantised() -> None:
    def count(**training: Any) -> int:
        return quantised(pricer(**training).layout.stage_blocks[0][1])

    assert [count(**lora(base)) for base in ("auto", "fp32", "int8", "nf4")] == [0, 0, LINEARS, LINEARS]
    assert count() == 0
    layer = pricer(**lora("nf4")).layout.stage_blocks[0][1]
    for ops in (layer.forward, layer.backward):  # a kernel for each linear, though three read one input
        assert sum(op.kernels for op in ops if op.name.endswith(".dequantise")) == LINEARS


def test_autocast_narrows_pairs_beside_quantised_weights() -> None:
    """A and B of fp32, as peft leaves them there, to 16 bits in each pass, one kernel and 6 bytes a weight; no input is cast."""

    def casts(base: str, recompute: str = "none", zero: int = 0, **training: Any) -> list[tuple[int, float]]:
        chosen = scenario(recompute, **lora(base, **training))
        layer = Layout.of(chosen.model_copy(update={"plan": chosen.plan.model_copy(update={"zero_stage": zero})}), 1).stage_blocks[
            0
        ][1]
        own = [[op for op in ops if ".lora.cast" in op.name] for ops in (layer.forward, layer.backward)]
        return [(sum(op.kernels for op in ops), sum(op.work.bytes_moved for op in ops) / layer.lora_parameters) for ops in own]

    assert casts("nf4") == casts("nf4-double") == casts("int8") == [(2 * LINEARS, 6.0)] * 2
    assert casts("nf4", "full") == [(2 * LINEARS, 6.0), (4 * LINEARS, 12.0)]
    for none in (casts("nf4", compile=True), casts("nf4", zero=3), casts("fp32")):
        assert none == [(0, 0.0)] * 2
    assert casts("nf4", pure_bf16=True)[0][0] == LINEARS  # without autocast each input is turned into fp32, no weight


@pytest.mark.torch
def test_torch_narrows_them_once_a_pass() -> None:
    torch = pytest.importorskip("torch")
    mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
    casts: list[tuple[int, ...]] = []

    class Seen(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::_to_copy":
                casts.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(8, 16, dtype=torch.bfloat16, requires_grad=True)
    a, b = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 16), (24, 4)))
    with Seen():
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.nn.functional.linear(torch.nn.functional.linear(x, a), b)
        assert sorted(casts) == [(4, 16), (24, 4)]
        out.backward(torch.zeros_like(out))
    assert sorted(casts) == [(4, 16)] * 2 + [(24, 4)] * 2


def test_a_repeated_forward_comes_from_python() -> None:
    """Its kernels take the host as long as the first forward's, 9 us and not 6 where nothing slows it."""
    found = pricer("full")
    layer = found.layout.stage_blocks[0][1]
    first, second = found.block(layer, "F"), found.block(layer, "B")
    kept = pricer()
    assert first.repeated_kernels == kept.block(kept.layout.stage_blocks[0][1], "B").repeated_kernels == 0
    assert second.repeated_kernels == first.kernels
    once = launch_seconds(found.layout, replace(second, repeated_kernels=0), "B")
    assert launch_seconds(found.layout, second, "B") - once == pytest.approx(SLOW * first.kernels * 3e-6)


@pytest.mark.parametrize(("modules", "tensors"), [("all", 14), ("qv", 4)])
def test_an_update_handles_the_tensors_that_are_trained(modules: str, tensors: int) -> None:
    """Two of each pair, not the ten weights of a layer, at 9 us each (a fused kernel and clipping) beside 2 ms; bitsandbytes waits
    for the device after each."""

    def update_s(optimizer: str) -> float:
        return simulate(scenario(**lora(modules=modules), optimizer=optimizer)).breakdown["optimizer"]

    host = 2e-3 + 28 * tensors * 9e-6
    assert update_s("adamw") == pytest.approx(host, rel=0.01)
    assert update_s("adamw-8bit") == pytest.approx(host + 28 * tensors * 50e-6, rel=0.01)
    assert trained(pricer().layout.stage_blocks[0][1]) == 10


@pytest.mark.parametrize(("version", "each"), [("2023-07", 115e-6), ("2024-06", 17e-6), ("2025-11", 9e-6)])
def test_an_update_takes_the_host_as_long_as_its_kind_of_kernel(version: str, each: float) -> None:
    """A loop over the weights, lists of operations, one fused kernel, each with clipping."""
    chosen = scenario(**lora(modules="all")).model_copy(update={"framework_version": version})
    found = simulate(chosen).breakdown["optimizer"]
    assert found == pytest.approx(2e-3 + 28 * 14 * each, rel=0.01)
