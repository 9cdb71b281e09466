"""Which kernels stand for a block's ops: backwards, activations, products beside collectives, fp8 gradients."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args, get_type_hints

import pytest

from simpar.api.scenarios import make_scenario
from simpar.costs.block_price import category
from simpar.costs.kernel_choice import measured_memory
from simpar.costs.kernels import KernelModel
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.layout import Layout
from simpar.parallel.work import Gemm, LocalOp, MemoryWork, Work
from simpar.specs.hardware import load_hardware
from simpar.specs.kernel_constants import MeasuredPoint
from simpar.step import cost_models


def pricer_of(framework: str = "megatron-core", precision: str = "bf16", version: str | None = None, **plan: Any) -> LayoutPricer:
    chosen = make_scenario({
        "model": "llama3.1-8b", "framework": framework, "framework_version": version,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 1, **plan},
        "training": {"sequence_length": 4096, "global_batch_size": 8, "precision": precision},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    return LayoutPricer(layout, *cost_models(chosen, layout.hardware))


def ops_of(pricer: LayoutPricer) -> dict[str, LocalOp]:
    block = pricer.layout.stage_blocks[0][1]
    return {op.name: op for op in (*block.forward, *block.backward)}


def test_no_kind_of_work_can_be_taken_for_another_in_a_memo() -> None:
    """Named tuples of equal values are equal whatever they are called: kinds differ in their number of fields, or in one's type."""
    for one, other in combinations(get_args(Work), 2):
        first, second = (tuple(get_type_hints(kind).values()) for kind in (one, other))
        assert first != second, f"{one.__name__} and {other.__name__}"


def test_fused_blocks_price_backwards_at_their_own_rates() -> None:
    ops = ops_of(pricer_of())
    found = {name: (op.work.kernel, op.work.implementation) for name, op in ops.items() if isinstance(op.work, MemoryWork)}
    assert found["input_norm"] == ("norm", "tuned")
    assert found["input_norm.backward"] == ("norm_backward", "tuned")
    # Megatron's SwiGLU is compiled torch code.
    assert found["mlp/activation"] == ("gate", "framework")
    assert found["mlp/activation.backward"] == ("gate_backward", "framework")
    assert found["mlp_residual"][0] == found["mlp_residual.backward"][0] == "residual"


BIASED = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 512,
          "num_key_value_heads": 8, "head_dim": 128, "gated_mlp": False, "activation": "gelu", "norm": "layernorm",
          "attention_bias": True, "mlp_bias": True}  # fmt: skip


@pytest.mark.parametrize(("framework", "compile_"), [("torchtitan", False), ("torchtitan", True), ("megatron-core", None)])
def test_an_activation_without_a_gate_moves_each_element_once(framework: str, compile_: bool | None) -> None:
    """GELU: read and written; backward its input and the gradient read, the gradient written. It runs at nearly a copy's rate."""
    chosen = make_scenario({
        "model": BIASED, "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"dp": 8},
        "training": {"sequence_length": 2048, "global_batch_size": 8, "compile": compile_},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    found = ops_of(pricer := LayoutPricer(layout, *cost_models(chosen, layout.hardware)))
    prices = KernelModel(pricer.layout.hardware)
    for name, each in (("mlp/activation", 4), ("mlp/activation.backward", 6)):
        work = found[name].work
        assert isinstance(work, MemoryWork)
        assert work.bytes_moved == each * 2048 * 4096
        assert prices.memory_bound(work.kernel, 1e9, implementation=work.implementation).seconds < 1.2 * 1e9 / 3.35e12
    # The gradient of a bias is a sum over rows, which reads its output's gradient.
    sums = {
        name: op.work.bytes_moved
        for name, op in found.items()
        if name.endswith(".bias.backward") and isinstance(op.work, MemoryWork)
    }
    assert sums["mlp/fc1.bias.backward"] == 2 * 2048 * 4096
    # It is no recomputation.
    assert {category(found[name], backward=True) for name in sums} == {"memory_bound"}
    assert sums["mlp/fc2.bias.backward"] == 2 * 2048 * 1024
    assert not [name for name in ops_of(pricer_of()) if name.endswith(".bias.backward")]


def test_the_gradient_of_a_bias_is_as_wide_as_activations() -> None:
    chosen = {p: make_scenario({
        "model": BIASED, "framework": "torchtitan", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"dp": 8},
        "training": {"sequence_length": 1024, "global_batch_size": 8, "precision": p},
    }) for p in ("bf16", "fp32")}  # fmt: skip
    moved = {}
    for precision, scenario in chosen.items():
        layout = Layout.of(scenario, 1)
        work = ops_of(LayoutPricer(layout, *cost_models(scenario, layout.hardware)))["mlp/fc1.bias.backward"].work
        assert isinstance(work, MemoryWork)
        moved[precision] = work.bytes_moved
    assert moved["fp32"] == 2 * moved["bf16"] > 0


@pytest.mark.parametrize(("compile_", "kernel", "forward", "backward"), [(True, "activation", 6, 10), (False, "stream", 10, 18)])
def test_gates_of_two_products_are_elementwise(compile_: bool, kernel: str, forward: int, backward: int) -> None:
    """Compiled one kernel in either direction, eager two and three over whole tensors, at nearly a copy's rate."""
    chosen = make_scenario({
        "model": "llama3.1-8b", "framework": "torchtitan", "framework_version": "2025-10",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"zero_stage": 3},
        "training": {"sequence_length": 4096, "global_batch_size": 8, "compile": compile_},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
    megatron = pricer.kernels.memory_bound("gate", 1e9, implementation="framework").seconds
    for name, each in (("mlp/activation", forward), ("mlp/activation.backward", backward)):
        work = ops_of(pricer)[name].work
        assert isinstance(work, MemoryWork)
        assert (work.kernel, work.bytes_moved) == (kernel, each * 4096 * 14336)
        assert pricer.kernels.memory_bound(kernel, 1e9, implementation=work.implementation).seconds < 0.75 * megatron


def test_a_norm_s_backward_is_priced_as_measured_in_steps_on_an_h100() -> None:
    """8,192 rows of 4,096, torch 2.11 (validation/measured/h100-2026-11, ranks/8b-fsdp8.json): two kernels of 105 and 58 us."""
    prices = KernelModel(load_hardware("dgx-h100"))
    found = prices.memory_bound("norm_backward", 6.0 * 8192 * 4096, implementation="framework").seconds
    assert found == pytest.approx(163e-6, rel=0.1)


FUSER = {"cuda_graphs": True}


@pytest.mark.parametrize(
    ("framework", "version", "model", "plan", "training", "tier"),
    [
        ("nemo", "2025-11", "llama3.1-8b", {}, FUSER, "tuned"),
        ("nemo", "2025-06", "llama3.1-8b", {}, FUSER, "framework"),
        ("nemo", "2025-11", "llama3.1-8b", {"tp": 2, "overlap_tp": True}, FUSER, "framework"),
        ("nemo", "2025-11", "llama3.1-8b", {}, {**FUSER, "cuda_graph_scope": "attention"}, "framework"),
        ("nemo", "2025-11", "llama3.1-8b", {}, {}, "framework"),
        ("megatron-bridge", "2026-06", "llama3.1-8b", {}, FUSER, "framework"),
        ("megatron-bridge", "2026-06", "llama3.1-8b", {}, {**FUSER, "precision": "nvfp4"}, "tuned"),
        ("megatron-bridge", "2026-06", "mixtral-8x7b", {"ep": 8}, FUSER, "tuned"),
        ("megatron-bridge", "2026-04", "mixtral-8x7b", {"ep": 8}, FUSER, "framework"),
    ],
)
def test_recipes_that_fuse_operations_have_hand_written_gates(
    framework: str, version: str, model: str, plan: dict[str, Any], training: dict[str, Any], tier: str
) -> None:
    chosen = make_scenario({
        "model": model, "framework": framework, "framework_version": version,
        "cluster": {"hardware": "dgx-b200", "num_nodes": 1}, "plan": {"zero_stage": 1, **plan},
        "training": {"sequence_length": 4096, "global_batch_size": 8, **training},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    works = [op.work for op in layout.stage_blocks[0][1].forward if isinstance(op.work, MemoryWork)]
    assert [work.implementation for work in works if work.kernel == "gate"] == [tier]


def test_the_sms_bound_compiled_gradients_of_gates() -> None:
    """Two boards of one chip take the same time whatever their memory; SMs and clock set the rate."""
    seconds = {}
    for name in ("dgx-h100", "dgx-h200", "dgx-b200"):
        model = KernelModel(load_hardware(name))
        seconds[name] = [model.memory_bound("gate_backward", 1e9, implementation=tier).seconds for tier in ("framework", "tuned")]
    assert seconds["dgx-h200"][0] == pytest.approx(seconds["dgx-h100"][0], rel=0.01)
    assert seconds["dgx-h200"][1] < 0.9 * seconds["dgx-h100"][1]
    assert seconds["dgx-h100"][0] / seconds["dgx-b200"][0] == pytest.approx(148 * 1.92 / (132 * 1.755), rel=0.01)


def test_chains_of_torch_kernels_have_one_rate() -> None:
    """Before torch had a fused RMSNorm; since then its backward has a rate of its own."""
    for version, backward in (("2025-01", set()), ("2025-10", {"norm_backward"})):
        ops = ops_of(pricer_of("torchtitan", version=version)).values()
        kinds = {op.work.kernel for op in ops if isinstance(op.work, MemoryWork)}
        assert {kind for kind in kinds if kind.endswith("_backward")} == backward


@pytest.mark.parametrize(("precision", "reduced"), [("bf16", (4, 16)), ("fp8", (4, 0))])
def test_products_beside_tensor_collectives_run_in_pieces(precision: str, reduced: tuple[int, int]) -> None:
    """A piece for each rank's part that arrives; a 16-bit product whose output is reduced in quarters, beside 16 SMs."""
    pricer = pricer_of(precision=precision, tp=4, sequence_parallel=True, overlap_tp=True)
    ops = ops_of(pricer)
    cut = {n: (op.work.pieces, op.work.held_sms) for n, op in ops.items() if isinstance(op.work, Gemm)}
    assert cut["attention/qkv"] == cut["mlp/fc1"] == cut["attention/proj.dgrad"] == cut["mlp/fc2.dgrad"] == (4, 0)
    assert cut["attention/proj"] == cut["mlp/fc2"] == reduced
    assert all(cut[name] == (1, 0) for name in cut if name.endswith("wgrad") or name in ("attention/qkv.dgrad", "mlp/fc1.dgrad"))
    work = ops["mlp/fc2"].work
    assert isinstance(work, Gemm)
    sms = pricer.layout.hardware.gpu.sm_count.value
    quarter = pricer.kernels.gemm(Gemm(work.m // 4, work.n, work.k, dtype=work.dtype)).seconds
    assert pricer._work(work).seconds == pytest.approx(4.0 * quarter * sms / (sms - reduced[1]))
    plain = ops_of(pricer_of(precision=precision, tp=4, sequence_parallel=True))
    assert all(op.work.pieces == 1 for op in plain.values() if isinstance(op.work, Gemm))


@pytest.mark.parametrize(("hardware", "dtype", "slower"), [
    ("dgx-h100", "fp8", True), ("dgx-h100", "fp8_row", False), ("dgx-h100", "bf16", False), ("dgx-b200", "fp8", False),
    ("l40s", "fp8", False),
])  # fmt: skip
def test_gradients_in_fp8_promote_their_sums_on_hopper(hardware: str, dtype: str, slower: bool) -> None:
    """A square product has the same shape in every direction."""
    model = KernelModel(load_hardware(hardware))
    forward, gradient = (model.gemm(Gemm(4096, 4096, 4096, dtype=dtype, direction=d)).seconds for d in ("forward", "dgrad"))
    free = model._directions.dgrad
    assert gradient == pytest.approx(forward * free * (1.15 if slower else 1.0))


def test_torchs_loss_runs_kernel_by_kernel_at_its_own_rate() -> None:
    """cross_entropy of 8,192 rows of 128,256 words, cast to fp32: 8.77 and 9.05 ms on an H100 (validation/measured/h100-2026-11)
    over 18 bytes a logit. A fused loss is one kernel. What was measured as cross_entropy holds for both."""
    logits, model = 8192 * 128256, KernelModel(load_hardware("dgx-h100"))
    price = model.memory_bound("loss_chain", 18.0 * logits, implementation="framework", launches=8)
    share = 0.63 * model.best_share / 0.89  # of 3.35 TB/s: copies are as fast as on that GPU
    assert price.seconds == pytest.approx(18.0 * logits / (share * 3.35e12) + 8 * 2e-6, rel=1e-6)
    assert price.seconds == pytest.approx((8.767e-3 + 9.045e-3) / 2, rel=0.02)

    def kernel(framework: str) -> str:
        pricer = pricer_of(framework, version="2024-01", zero_stage=0)
        works = (op.work for op in pricer.layout.stage_blocks[0][-1].forward if op.name == "head/loss")
        return next(work.kernel for work in works if isinstance(work, MemoryWork))

    assert (kernel("plain"), kernel("lit-gpt"), kernel("nemo")) == ("loss_chain", "loss_chain", "stream")
    point = MeasuredPoint(op="memory", kernel="cross_entropy", shape=(1000,), seconds=1e-3, direction="forward", dtype="bf16")
    assert measured_memory([point]) == {"cross_entropy": (point,), "loss_chain": (point,)}
