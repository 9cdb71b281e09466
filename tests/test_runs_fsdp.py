"""Fully sharded runs: launch order on one hardware queue, plain torch modules under FSDP, what chains of torch kernels move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simpar.costs.kernels import KernelModel
from simpar.engine.longest_path import longest_path
from simpar.evidence.row_framework import framework_of
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.kernels import kernels
from simpar.parallel.layout import Layout
from simpar.program.program import OpKind
from simpar.specs.framework import framework as framework_at
from simpar.specs.framework_policies import Kernels
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import make_scenario
from simpar.step import prepare


def scenario(framework: str = "megatron-core", version: str = "2025-04", hardware: str = "dgx-h100", **plan: Any) -> Any:
    return make_scenario(
        {
            "model": "llama3.1-8b",
            "framework": framework,
            "framework_version": version,
            "cluster": {"hardware": hardware, "num_nodes": 4},
            "plan": {"zero_stage": 3, **plan},
            "training": {"sequence_length": 4096, "global_batch_size": 32, "micro_batch_size": 1},
        }
    )


def overlap(**arguments: Any) -> dict[OpKind, float]:
    """Seconds during which a gather or a reduction runs beside compute, over its own seconds, by kind."""
    priced = prepare(scenario(**arguments))
    timeline = longest_path(priced.program, priced.table)
    kind = np.asarray(priced.program.kind)
    compute = np.isin(kind, [OpKind.FORWARD, OpKind.BACKWARD])
    found = {}
    for each in (OpKind.GATHER_PARAMETERS, OpKind.REDUCE_GRADIENTS):
        own = kind == each
        late = np.minimum(timeline.finish[own][:, None], timeline.finish[compute])
        beside = np.maximum(late - np.maximum(timeline.start[own][:, None], timeline.start[compute]), 0.0).sum()
        found[each] = float(beside / timeline.seconds[own].sum())
    return found


def test_one_queue_exposes_forward_gathers_and_reductions() -> None:
    """Half of the gathers, those of the backward, are launched before what they run beside; reductions hold the backward up."""
    free, queued = overlap(tp=1), overlap(tp=2)
    assert free[OpKind.GATHER_PARAMETERS] > 0.7
    assert free[OpKind.REDUCE_GRADIENTS] > 0.7
    assert queued[OpKind.GATHER_PARAMETERS] < 0.55
    assert queued[OpKind.REDUCE_GRADIENTS] < 0.2


@pytest.mark.parametrize(
    "other",
    [
        {"framework": "torchtitan"},
        {"version": "2025-11"},
        {"hardware": "dgx-b200"},
    ],
)
def test_one_queue_is_megatrons_before_megatron_fsdp_and_blackwell(other: dict[str, str]) -> None:
    assert overlap(tp=2, **other)[OpKind.REDUCE_GRADIENTS] > 2.0 * overlap(tp=2)[OpKind.REDUCE_GRADIENTS]


def test_xla_on_tpus_reduces_gradients_beside_nothing() -> None:
    """Its reduce-scatters are not asynchronous; its gathers are."""
    found = overlap(framework="maxtext", version="2025-06", hardware="tpu-v6e")
    assert found[OpKind.GATHER_PARAMETERS] > 0.7
    assert found[OpKind.REDUCE_GRADIENTS] < 0.2
    assert overlap(framework="maxtext", version="2025-06")[OpKind.REDUCE_GRADIENTS] > 0.7


def test_xla_without_pipelined_collectives_gathers_and_reduces_beside_nothing() -> None:
    """What an iteration of the scan over layers gathers and reduces ends within it."""
    found = overlap(framework="maxtext-unpipelined", version="2026-04", hardware="mi355x")
    assert max(found.values()) < 0.1
    assert min(overlap(framework="maxtext", version="2026-04", hardware="mi355x").values()) > 0.7


@pytest.mark.parametrize("hardware", ["dgx-h100", "dgx-b200"])
def test_maxtext_has_cudnns_attention_on_nvidia_and_reduces_in_16_bits(hardware: str) -> None:
    chosen = scenario(framework="maxtext", version="2026-04", hardware=hardware)
    layout = Layout.of(chosen, 1)
    assert dict(layout.framework.kernels.attention)[load_hardware(hardware).gpu.architecture] == "cudnn"
    assert layout.state_bytes.reduce == 2.0


def test_one_queue_only_delays() -> None:
    queued, free = prepare(scenario(tp=2)), prepare(scenario(tp=2, version="2025-11"))
    assert longest_path(queued.program, queued.table).makespan > longest_path(free.program, queued.table).makespan


@pytest.mark.parametrize(
    ("stated", "name"),
    [("fms-fsdp (IBM)", "torch-fsdp"), ("PyTorch FSDP", "torch-fsdp"), ("transformers + accelerate", "transformers"),
     ("PyTorch FSDP2", "torchtitan"), ("llm-foundry v0.4", "llm-foundry")],
)  # fmt: skip
def test_fsdp_runs_are_told_apart(stated: str, name: str) -> None:
    assert framework_of({"framework": stated})[0] == name


def test_composite_norm_and_rope_move_what_torch_counts() -> None:
    """Bytes of every tensor read and written per element, forward and backward, as the dispatcher sees them."""
    torch = pytest.importorskip("torch")
    from torch_traffic import traffic

    tokens, width, heads = 512, 256, 4
    weight = torch.ones(width, dtype=torch.bfloat16, requires_grad=True)
    real = torch.randn(tokens, 1, width // heads, dtype=torch.bfloat16)
    turn = torch.randn(tokens, 1, width // heads // 2, dtype=torch.complex64)

    def norm(x: Any) -> Any:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)

    def rope(x: Any) -> Any:
        pairs = torch.view_as_complex(x.view(tokens, heads, -1).float().reshape(tokens, heads, -1, 2))
        return torch.view_as_real(pairs * turn).flatten(2).type_as(x)

    def halves(x: Any) -> Any:
        x = x.view(tokens, heads, -1)
        first, second = x.chunk(2, -1)
        return x * real + torch.cat((-second, first), -1) * real

    layout = Layout.of(scenario("torch-fsdp"), 1)
    ops = {k.node.name: k for k in kernels(layout.stage_blocks[0][1].layer, layout.kernels)}
    for name, functions in (("input_norm", (norm,)), ("attention/rope", (rope, halves))):
        counted = np.array([traffic(function, tokens, width) for function in functions])
        op = ops[name]
        assert op.price == "composite"
        stated = np.array([op.forward[0][1], op.backward[0][1]])
        assert np.all(stated >= 0.95 * counted.min(axis=0)), (name, counted)
        assert np.all(stated <= 1.05 * counted.max(axis=0)), (name, counted)


def test_chains_of_elementary_kernels_run_at_the_rate_of_the_sms() -> None:
    """The same chip with another memory moves as much, one with a slow memory what a copy does."""
    found = {}
    for name in ("dgx-h100", "dgx-h200", "dgx-h100-96gb-500w", "dgx-b200"):
        model = KernelModel(load_hardware(name))
        found[name] = [4e9 / model.memory_bound(kernel, 4e9).seconds for kernel in ("composite", "copy")]
    assert found["dgx-h100"][0] == pytest.approx(found["dgx-h200"][0], rel=0.01)
    assert found["dgx-b200"][0] == pytest.approx(148 * 1.92 / (132 * 1.755) * found["dgx-h100"][0], rel=0.01)
    assert all(chain <= copy for chain, copy in found.values())
    turned = [KernelModel(load_hardware(name)).memory_bound("cast_column", 4e9, implementation="framework").seconds
              for name in ("dgx-h100", "dgx-h100-96gb-500w")]  # fmt: skip
    assert turned[0] == pytest.approx(turned[1], rel=0.01)


def test_torch_has_a_fused_rms_norm_since_2_9() -> None:
    assert [framework_at("torchtitan", month).kernels.fused_norm for month in ("2025-09", "2025-10")] == [False, True]
    prices = []
    for kind in ("rmsnorm", "layernorm"):
        run = scenario("torchtitan")
        run = run.model_copy(update={"model": run.model.model_copy(update={"norm": kind})})
        layer = Layout.of(run, 1).stage_blocks[0][1].layer
        eager = KernelPlan(library=Kernels(fused_norm=False))
        prices.append(next(k.price for k in kernels(layer, eager) if k.node.name == "input_norm"))
    assert prices == ["composite", "norm"]


def test_what_tensor_ranks_gather_along_the_sequence_is_copied_into_order() -> None:
    """torch _functional_collectives.py joins chunks along any axis but the first: 4 bytes per element of 16 bits."""

    def copied(framework: str, **plan: Any) -> list[float]:
        block = Layout.of(scenario(framework, tp=4, **plan), 1).stage_blocks[0][1]
        return [op.work.bytes_moved for op in (*block.forward, *block.backward) if ".layout" in op.name]

    assert copied("torchtitan", sequence_parallel=True) == [4.0 * 4096 * 4096] * 8
    assert copied("torchtitan", sequence_parallel=True, overlap_tp=True) == []
    assert copied("megatron-core", sequence_parallel=True) == []


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"gpu": "B200"}, "maxtext"),
        ({"gpu": "MI355X"}, "maxtext-unpipelined"),
        ({"gpu": "MI355X", "notes": "pipelined collectives in XLA_FLAGS"}, "maxtext"),
        ({"gpu": "AMD Instinct MI300X", "notes": "pipelined all-gather off"}, "maxtext-unpipelined"),
        ({"gpu": "H200", "notes": "XLA's default flags"}, "maxtext-unpipelined"),
        ({"gpu": "H200", "notes": "no pipelined collectives"}, "maxtext-unpipelined"),
        ({"gpu": "TPU v6e"}, "maxtext"),
    ],
)
def test_whether_xla_pipelines_collectives_is_read(row: dict[str, str], name: str) -> None:
    assert framework_of({"framework": "MaxText", **row})[0] == name
