"""What a rank's part of a layer moves, sends and holds, by hand: traffic of kernels, key/value heads, exchanges, rings, waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simpar.graph.kernel_types import Kernel, KernelPlan
from simpar.graph.kernels import kernels
from simpar.graph.rematerialise import Recompute
from simpar.graph.shard import Placement, Shards
from simpar.graph.types import Elementwise, Layer
from simpar.model.layered import token_network
from simpar.parallel.blocks import split_block
from simpar.parallel.degrees import Degrees
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import Collective, ExpertExchange, Gemm, LocalOp, MemoryWork
from simpar.specs.framework import framework
from simpar.specs.framework_policies import Kernels
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model

TOKENS, HIDDEN, FFN, HEADS, KV, DIM = 64, 4096, 14336, 32, 8, 128
"""Llama 3.1 8B."""
PLAN = KernelPlan()


def preset(name: str = "llama3.1-8b") -> TransformerSpec:
    """A transformer by name."""
    found = load_model(name)
    assert isinstance(found, TransformerSpec)
    return found


def layer_of(name: str = "llama3.1-8b") -> Layer:
    """One layer of a preset."""
    return token_network(preset(name), 1, TOKENS).layers[-1]


def moved(layer: Layer, plan: KernelPlan) -> dict[str, tuple[float, float, int]]:
    """Node -> bytes forward and backward per token, launches; memory-bound ones alone."""
    found = {}
    for kernel in kernels(layer, plan):
        if kernel.price:
            both = (_bytes(layer, kernel, backward=b) / TOKENS for b in (False, True))
            found[kernel.node.name] = (*both, kernel.launches)
    return found


def _bytes(layer: Layer, kernel: Kernel, *, backward: bool) -> float:
    return sum(layer.volume(axes) * each for axes, each in (kernel.backward if backward else kernel.forward))


def test_traffic_of_a_fused_layer() -> None:
    heads = (HEADS + KV) * DIM
    assert moved(layer_of(), PLAN) == {
        "input_norm": (4 * HIDDEN, 6 * HIDDEN, 1), "attention/rope": (4 * heads, 4 * heads, 2),
        "attention_residual": (6 * HIDDEN, 6 * HIDDEN, 1), "mlp_norm": (4 * HIDDEN, 6 * HIDDEN, 1),
        "mlp/activation": (6 * FFN, 10 * FFN, 1), "mlp_residual": (6 * HIDDEN, 6 * HIDDEN, 1),
    }  # fmt: skip


def test_traffic_of_an_eager_layer_with_dropout() -> None:
    plan = KernelPlan(Kernels(fused_activation=False, fused_residual=False, fused_norm=False, fused_rope=False), dropout=0.1)
    heads = (HEADS + KV) * DIM
    assert moved(layer_of(), plan) == {
        "input_norm": (36 * HIDDEN, 95 * HIDDEN, 8), "attention/rope": (21 * heads, 27 * heads, 8),
        "attention_residual": (11 * HIDDEN, 11 * HIDDEN, 2), "mlp_norm": (36 * HIDDEN, 95 * HIDDEN, 8),
        "mlp/activation": (10 * FFN, 18 * FFN, 2), "mlp_residual": (11 * HIDDEN, 11 * HIDDEN, 2),
    }  # fmt: skip


def test_a_sum_without_dropout_is_one_kernel_anywhere() -> None:
    fused, apart = (moved(layer_of(), KernelPlan(Kernels(fused_residual=one))) for one in (True, False))
    assert fused == apart
    assert apart["mlp_residual"] == (6 * HIDDEN, 6 * HIDDEN, 1)


def test_traffic_of_experts() -> None:
    """Eight rows of 2,048 a token, 128 experts: scores in fp32, rows read and written once each way."""
    found = moved(layer_of("qwen3-30b-a3b"), PLAN)
    assert found["moe/topk"] == (16 * 128, 16 * 128, 6)
    assert found["moe/permute"] == found["moe/unpermute"] == (4 * 8 * 2048, 4 * 8 * 2048, 2)


def test_traffic_of_gates_that_megatron_does_not_fuse() -> None:
    """Silu (4 bytes), the sum with an offset (4), the product (6); an expert's is weighed, in fp32 (6) with a cast back (6)."""
    plan = KernelPlan(Kernels(gate_chains="offset"))
    assert moved(layer_of(), plan)["mlp/activation"] == (14 * FFN, 26 * FFN, 3)
    found = moved(layer_of("deepseek-v3"), plan)
    assert found["moe/activation"] == (26 * 8 * 2048, 56 * 8 * 2048, 5)
    narrow = moved(layer_of("deepseek-v3"), replace(plan, row_probability_bytes=2.0))["moe/activation"]
    assert narrow == (18 * 8 * 2048, 38 * 8 * 2048, 4)
    assert found["shared_experts/activation"] == (14 * 2048, 26 * 2048, 3)
    assert moved(layer_of("gpt3-175b"), plan) == moved(layer_of("gpt3-175b"), PLAN)  # no gate


def test_traffic_of_gates_before_there_was_an_offset() -> None:
    """Silu (4 bytes) and the product (6); two products (12), silu (6) and the halves joined (8). Silu's output is kept."""
    plan = KernelPlan(Kernels(gate_chains="halves"))
    assert moved(layer_of(), plan)["mlp/activation"] == (10 * FFN, 26 * FFN, 2)
    kept, fused = (dict(split_block(layer_of(), SplitOptions(Degrees(), each)).saved) for each in (plan, PLAN))
    assert set(kept) - set(fused) == {"mlp/activation_gate"}


@pytest.mark.parametrize(("name", "prefix", "halves"), [("llama3.1-8b", "mlp", 2), ("qwen3-30b-a3b", "moe", 3)])
def test_what_gates_that_megatron_does_not_fuse_keep(name: str, prefix: str, halves: int) -> None:
    """Beside the input the non-linearity, the other half and what is weighed; recomputation of the activation drops them all."""

    def saved(*modules: str) -> list[dict[str, float]]:
        plans, again = (PLAN, KernelPlan(Kernels(gate_chains="offset"))), Recompute(modules=frozenset(modules))
        options = (SplitOptions(Degrees(), plan, recompute=again, moe=preset(name).moe) for plan in plans)
        return [dict(split_block(layer_of(name), each).saved) for each in options]

    fused, whole = saved()
    assert set(whole) - set(fused) == {f"{prefix}/activation_{part}" for part in ("gate", "other", "product")[:halves]}
    more = sum(whole.values()) - sum(fused.values())
    assert more == pytest.approx(halves * fused[f"{prefix}/activation_in"] / 2)
    fused, whole = saved("moe_act")
    assert (fused == whole) is (prefix == "moe")


def test_fp32_moves_and_keeps_twice_as_much_but_for_statistics() -> None:
    narrow, wide = moved(layer_of(), PLAN), moved(layer_of(), KernelPlan(element=4.0, linear_input_bytes=4.0))
    assert wide == {name: (2 * forward, 2 * backward, count) for name, (forward, backward, count) in narrow.items()}
    kept = [split_block(layer_of(), SplitOptions(Degrees(), plan)).saved for plan in (PLAN, KernelPlan(element=4.0))]
    sizes = [dict(saved) for saved in kept]
    assert sizes[1]["input_norm_stats"] == sizes[0]["input_norm_stats"] == 4.0 * TOKENS
    assert sizes[1]["mlp/activation_in"] == 2 * sizes[0]["mlp/activation_in"]


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_fewer_key_value_heads_than_ranks_are_replicated(tp: int, heads: int) -> None:
    shards = Shards(layer_of(), Placement(tensor=tp))
    assert shards.extent("qkv", "tensor") == (HEADS / tp + 2 * heads) * DIM
    assert shards.weight("attention/qkv.weight") == HIDDEN * (HEADS / tp + 2 * heads) * DIM


def test_positions_are_split_outside_tensor_parallel_regions() -> None:
    shards = Shards(layer_of(), Placement(tensor=4, context=2, sequence_parallel=True))
    assert shards.local(("batch", "sequence", "hidden")) == TOKENS / 8 * HIDDEN
    assert shards.local(("batch", "sequence", "ffn")) == TOKENS / 2 * FFN / 4
    assert shards.local(("batch", "sequence", "hidden"), "tensor") == TOKENS / 2 * HIDDEN


@pytest.mark.parametrize(("tp", "etp", "cp"), [(1, 1, 1), (2, 1, 1), (4, 2, 2)])
def test_a_rank_sends_its_own_tokens_to_experts(tp: int, etp: int, cp: int) -> None:
    spec = preset("qwen3-30b-a3b")
    options = SplitOptions(Degrees(tp=tp, etp=etp, cp=cp, ep=4), PLAN, moe=spec.moe, load_factor=1.5)
    local = split_block(layer_of("qwen3-30b-a3b"), options)
    sent = [op.work for op in (*local.forward, *local.backward) if isinstance(op.work, ExpertExchange)]
    assert [(work.tokens, work.hidden, work.moe.num_experts_per_tok) for work in sent] == [(1.5 * TOKENS / (tp * cp), 2048, 8)] * 4
    gathered = [op.work.bytes for op in local.forward if isinstance(op.work, Collective) and op.work.dimension == "etp"]
    assert gathered == ([2.0 * 1.5 * 8 * TOKENS / (tp * cp) * etp * 2048] * 2 if etp > 1 else [])


def test_a_ring_sends_keys_and_values_and_backward_their_gradients_too() -> None:
    local = split_block(layer_of(), SplitOptions(Degrees(cp=4), PLAN))
    each = 2.0 * TOKENS / 4 * KV * 2 * DIM
    for ops, times in ((local.forward, 1), (local.backward, 2)):
        sends = [op.work.bytes for op in ops if isinstance(op.work, Collective) and op.work.name == "send_recv"]
        assert sends == [times * each] * 3


def position(ops: tuple[LocalOp, ...], name: str) -> int:
    """Index of an op by name."""
    return next(index for index, op in enumerate(ops) if op.name == name)


def test_a_weight_gradient_waits_for_its_input_and_the_layer_for_the_reduction() -> None:
    ops = split_block(layer_of(), SplitOptions(Degrees(tp=4, sequence_parallel=True), PLAN)).backward
    weight = ops[position(ops, "mlp/fc1.wgrad")]
    assert position(ops, "mlp_in.regather") in weight.deps
    assert position(ops, "mlp_in.reduce_scatter") in ops[position(ops, "mlp_norm.backward")].deps
    assert position(ops, "mlp_in.reduce_scatter") not in weight.deps
    blocking = Degrees(tp=4, sequence_parallel=True, async_tp=False)
    ops = split_block(layer_of(), SplitOptions(blocking, PLAN)).backward
    assert position(ops, "mlp_in.reduce_scatter") in ops[position(ops, "mlp/fc1.wgrad")].deps


def test_split_logits_are_reduced_once_per_statistic() -> None:
    head = token_network(preset(), 1, TOKENS).head
    assert head is not None
    local = split_block(head, SplitOptions(Degrees(tp=8), KernelPlan(loss_all_reduces=2)))
    reduced = [op.work for op in local.forward if isinstance(op.work, Collective)]
    assert [(work.name, work.bytes, work.repeat) for work in reduced] == [("all_reduce", 4.0 * TOKENS, 2)]
    product = next(op.work for op in local.forward if isinstance(op.work, Gemm))
    assert (product.m, product.n, product.k) == (TOKENS, 128256 // 8, HIDDEN)


def test_gradients_that_kernels_add_pass_every_weight_once() -> None:
    local = split_block(layer_of(), SplitOptions(Degrees(tp=2), PLAN, accumulation_bytes=10.0))
    work = local.backward[-1].work
    assert isinstance(work, MemoryWork)
    assert work.bytes_moved == 10.0 * local.dense_parameters
    assert local.backward[-1].kernels == 6  # two norms, four products


def test_complex_numbers_turn_no_queries_that_are_normed_or_scaled() -> None:
    """Six kernels of 20 bytes each way whatever else is fused; torchtitan's Qwen3 and GPT-OSS turn halves, its DeepSeek-V3 not."""
    plan, name = KernelPlan(Kernels(complex_rope=True)), "attention/rope"
    heads = (HEADS + KV) * DIM
    assert moved(layer_of(), plan)[name] == (20 * heads, 20 * heads, 6)
    scaled = token_network(load_model("gpt-oss-120b"), 1, TOKENS).layers[-1]
    assert any(isinstance(node, Elementwise) and node.op == "scaled_rope" for node in scaled.nodes)
    for layer in (layer_of("qwen3-30b-a3b"), scaled):
        assert moved(layer, plan) == moved(layer, PLAN)
    chain = KernelPlan(Kernels(fused_rope=False))
    assert moved(layer_of("deepseek-v3"), plan)[name] == moved(layer_of("deepseek-v3"), chain)[name]


def sums(name: str, *apart: str, **degrees: Any) -> dict[str, MemoryWork]:
    """Node -> the sums of gradients behind its own."""
    plan = KernelPlan(Kernels(linears_apart=apart))
    ops = split_block(layer_of(name), SplitOptions(Degrees(**degrees), plan, moe=preset(name).moe)).backward
    return {op.name.removesuffix(".sum.backward"): op.work for op in ops if op.name.endswith(".sum.backward")}  # type: ignore[misc]


def test_gradients_of_linears_side_by_side_are_added_up() -> None:
    """Two kernels behind queries, keys and values, one behind gate and up, none behind what a library packs."""
    each = 6.0 * TOKENS * HIDDEN
    found = sums("llama3.1-8b", "attention", "mlp")
    assert {name: (work.bytes_moved, work.launches) for name, work in found.items()} == {
        "mlp/fc1": (each, 1), "attention/qkv": (2 * each, 2),
    }  # fmt: skip
    assert sums("llama3.1-8b", "mlp").keys() == {"mlp/fc1"}
    assert not sums("llama3.1-8b")
    assert sums("llama3.1-8b", "mlp", tp=4, sequence_parallel=True)["mlp/fc1"].bytes_moved == each  # of what was gathered
    rows = 8 * TOKENS
    assert sums("qwen3-30b-a3b", "moe")["moe/fc1"].bytes_moved == 6.0 * rows * 2048
    # Queries, keys and values that are normed whole have products of their own, so has what latents are made of.
    assert sums("deepseek-v3", "attention")["attention/q_down"].launches == 1


def test_keys_and_values_are_copied_for_every_head() -> None:
    """32 heads of 8, read and written in 16 bits; backward their gradients are summed."""
    local = split_block(layer_of(), SplitOptions(Degrees(tp=2), KernelPlan(Kernels(repeats_keys=True))))
    for ops, suffix in ((local.forward, ""), (local.backward, ".backward")):
        (work,) = [op.work for op in ops if op.name == f"attention/core.repeat{suffix}"]
        assert work == MemoryWork("copy", 2.0 * TOKENS * 2 * (HEADS + KV) / 2 * DIM, 2)
    plain = split_block(layer_of("gpt3-175b"), SplitOptions(Degrees(), KernelPlan(Kernels(repeats_keys=True))))
    assert not [op for op in plain.forward if op.name.endswith("repeat")]


def test_heads_come_first_in_copies_of_queries_keys_and_values() -> None:
    """Read and written in 16 bits, forward; a compiled rotary embedding writes them so; repeated after that."""
    first, graph = Kernels(fused_rope=False, heads_first=True), Kernels(fused_rope=True, heads_first=True)

    def work(library: Kernels, suffix: str) -> list[Any]:
        local = split_block(layer_of(), SplitOptions(Degrees(tp=2), KernelPlan(library)))
        ops = local.backward if suffix else local.forward
        return [op.work for op in ops if op.name == f"attention/core.repeat{suffix}"]

    def copies(heads: int, launches: int) -> list[Any]:
        return [MemoryWork("copy", 2.0 * TOKENS * heads / 2 * DIM, launches)]

    assert work(first, "") == copies(2 * (HEADS + 2 * KV), 3)
    assert work(replace(first, repeats_keys=True), "") == copies(4 * HEADS + 6 * KV, 5)
    assert work(replace(first, repeats_keys=True), ".backward") == copies(2 * (HEADS + KV), 2)
    assert work(first, ".backward") == work(graph, "") == []


@pytest.mark.parametrize(
    ("name", "month", "turned", "apart"),
    [("torchtitan", "2025-06", True, True), ("torchtitan", "2026-07", True, False), ("kempnerforge", "2026-04", False, True),
     ("olmo-core", "2026-07", False, True), ("transformers", "2026-01", False, True), ("llm-foundry", "2024-01", False, False),
     ("megatron-core", "2026-01", False, False)],
)  # fmt: skip
def test_which_frameworks_turn_complex_numbers_and_keep_queries_apart(name: str, month: str, turned: bool, apart: bool) -> None:
    own = framework(name, month).kernels
    assert (own.complex_rope, "attention" in own.linears_apart) == (turned, apart)
