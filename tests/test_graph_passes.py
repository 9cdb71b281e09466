"""The passes by hand and by law: what is sent is sent under every overlap, what is dropped is made again with its collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.block_price import hidden_share, price_list, price_pair, without_hidden
from simpar.costs.price import Price, Provenance
from simpar.graph.build import LayerBuilder
from simpar.graph.casts import holds_norm
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.masks import BIDIRECTIONAL, Mask
from simpar.graph.rematerialise import Recompute, cut
from simpar.graph.types import Attention, Axis, Einsum, Layer
from simpar.model.layered import token_network
from simpar.model.network import simple_network
from simpar.parallel.blocks import LocalBlock, split_block
from simpar.parallel.context import pairs
from simpar.parallel.degrees import Degrees
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import AttentionWork, Collective, ExpertExchange, GroupedGemm, KernelWork, LocalOp, MemoryWork
from simpar.specs.framework_policies import Kernels
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.plan import MODULES

TOKENS = 4096
PLAN = KernelPlan()


def model(name: str = "llama3.1-8b", **changes: Any) -> TransformerSpec:
    """A preset with changes."""
    found = load_model(name)
    assert isinstance(found, TransformerSpec)
    return found.model_copy(update=changes)


def split(
    name: str, degrees: Degrees, *modules: str, plan: KernelPlan = PLAN, full: bool = False, stops: bool = False
) -> LocalBlock:
    """One layer of a preset on one rank."""
    spec = model(name)
    layer = token_network(spec, 1, TOKENS).layers[-1]
    recompute = Recompute(full, frozenset(modules), stops)
    return split_block(layer, SplitOptions(degrees, plan, recompute, moe=spec.moe))


def sent(ops: tuple[LocalOp, ...], dimension: str = "tp") -> dict[str, float]:
    """Bytes by collective."""
    found: dict[str, float] = {}
    for op in ops:
        if isinstance(op.work, Collective) and op.work.dimension == dimension:
            found[op.work.name] = found.get(op.work.name, 0.0) + op.work.bytes * op.work.repeat
    return found


def exchanges(ops: tuple[LocalOp, ...]) -> list[bool]:
    """Whether each exchange is a combine."""
    return [op.work.combine for op in ops if isinstance(op.work, ExpertExchange)]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(("llama3.1-8b", "deepseek-v3", "gpt3-175b")), st.sampled_from((2, 4, 8)), st.booleans(),
    st.sampled_from(((), ("mlp",), ("attention",), ("layernorm",))), st.booleans(),
)  # fmt: skip
def test_overlap_sends_as_much(name: str, tp: int, sequence: bool, modules: tuple[str, ...], full: bool) -> None:
    degrees = Degrees(tp=tp, sequence_parallel=sequence)
    plain, beside = (split(name, replace(degrees, overlap_tp=on), *modules, full=full) for on in (False, True))
    for phase in ("forward", "backward"):
        one, other = sent(getattr(plain, phase)), sent(getattr(beside, phase))
        assert one.keys() == other.keys()
        assert all(one[key] == pytest.approx(other[key]) for key in one)


def test_what_runs_beside_a_product_is_waited_for_after_it() -> None:
    ops = split("llama3.1-8b", Degrees(tp=4, sequence_parallel=True, overlap_tp=True)).forward
    for index, op in enumerate(ops):
        if op.name.endswith(".rest"):
            later = [o for o in ops[index + 1 :] if o.stream == "compute"]
            assert index not in later[0].deps
            assert index in later[1].deps
            assert op.kernels == 0


@pytest.mark.parametrize(
    ("module", "gathers", "reductions"),
    [("core_attn", 0, 0), ("layernorm", 0, 0), ("mlp", 1, 0), ("attention", 1, 0)],
)
def test_recomputation_repeats_the_collectives_on_its_way(module: str, gathers: int, reductions: int) -> None:
    degrees = Degrees(tp=4, sequence_parallel=True)
    whole = 2.0 * TOKENS * 4096
    none, again = (sent(split("llama3.1-8b", degrees, *modules).backward) for modules in ((), (module,)))
    assert again["all_gather"] - none["all_gather"] == gathers * whole
    assert again["reduce_scatter"] - none["reduce_scatter"] == reductions * whole


def test_recomputed_experts_are_dispatched_again_and_not_combined() -> None:
    degrees = Degrees(ep=8)
    assert exchanges(split("qwen3-30b-a3b", degrees).backward) == [False, True]
    assert exchanges(split("qwen3-30b-a3b", degrees, "moe").backward) == [False, False, True]
    assert exchanges(split("qwen3-30b-a3b", degrees, "moe_act").backward) == [False, True]
    assert exchanges(split("qwen3-30b-a3b", degrees, full=True).backward) == [False, True, False, True]


def test_a_gathered_input_that_torch_keeps_is_gathered_again_once_it_is_dropped() -> None:
    degrees, torch = Degrees(tp=2, sequence_parallel=True), KernelPlan(Kernels(saves_gathered_input=True))
    none, again = (sent(split("llama3.1-8b", degrees, *modules, plan=torch).backward) for modules in ((), ("layernorm",)))
    assert again["all_gather"] - none["all_gather"] == 2 * 2.0 * TOKENS * 4096


def repeated(name: str, *modules: str) -> tuple[str, ...]:
    """Nodes that run again."""
    spec = model(name)
    layer = token_network(spec, 1, TOKENS).layers[-1]
    return cut(layer, PLAN, Recompute(modules=frozenset(modules))).repeated


def test_nodes_that_run_again_follow_from_the_edges() -> None:
    assert repeated("llama3.1-8b", "core_attn") == ("attention/core",)
    assert repeated("llama3.1-8b", "layernorm") == ("input_norm", "mlp_norm")
    assert repeated("llama3.1-8b", "mlp", "layernorm") == ("input_norm", "mlp_norm", "mlp/fc1", "mlp/activation")
    assert repeated("llama3.1-8b", "attention") == ("attention/qkv", "attention/rope", "attention/core")
    assert repeated("deepseek-v3", "mla_up_proj") == ("attention/q_up", "attention/kv_up", "attention/rope")
    assert repeated("deepseek-v3", "shared_experts") == ("shared_experts/fc1", "shared_experts/activation")
    assert repeated("qwen3-30b-a3b", "moe")[:3] == ("moe/router", "moe/topk", "moe/permute")
    assert "moe/fc2" not in repeated("qwen3-30b-a3b", "moe")
    # The latents are inside the module: they are made again too.
    assert "attention/kv_down" in repeated("deepseek-v3", "attention")


def test_per_op_checkpointing_saves_every_second_linear() -> None:
    """torchtitan's activation_checkpoint.py on its Llama: x, wq, wv, attention, w1 and, run eagerly, w2."""

    def stays(name: str, *more: str) -> dict[str, float]:
        local = split(name, Degrees(ep=8 if "op_exchanged" in more else 1), "op", *more, plan=torch)
        return {tensor: amount / TOKENS for tensor, amount in local.saved if "stats" not in tensor}

    torch = KernelPlan(Kernels(fused_norm=False, fused_activation=False, fused_rope=False))
    wide = 2.0 * 4096
    dense = {"input_norm_in": wide, "attention/qkv_out": wide * 1.25, "attention/out": wide, "attention/lse": 128.0,
             "mlp/activation_in": 2.0 * 14336, "mlp/fc2.out": wide}  # fmt: skip
    assert stays("llama3.1-8b") == dense
    del dense["mlp/fc2.out"]
    assert stays("llama3.1-8b", "op_compiled") == dense
    # Grouped products are no op that is saved: routed experts run again from the layer's input, or from what was exchanged.
    assert not any("moe/" in name for name in stays("qwen3-30b-a3b"))
    rows = 8 * 2.0 * 2048
    assert {k: v for k, v in stays("qwen3-30b-a3b", "op_exchanged").items() if "moe/" in k} == {
        "moe/fc1_in": rows,
        "moe/fc2.out": rows,
    }
    # wq_a, wkv_a and wo of latent attention, in the order of its code; queries and keys of all heads are made again.
    latent = stays("deepseek-v3", "op_exchanged")
    assert {k: v for k, v in latent.items() if "attention/" in k and k != "attention/lse"} == {
        "attention/q_down.out": 2.0 * 1536, "attention/kv_down.out": 2.0 * 576, "attention/out": 2.0 * 128 * 128,
        "attention/proj.out": 2.0 * 7168,
    }  # fmt: skip
    # Its third linear of a gated pair is the seventh: of the shared expert the second one is saved.
    assert latent["shared_experts/activation_in"] == 2.0 * 2048


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(("llama3.1-8b", "deepseek-v3", "qwen3-30b-a3b", "gpt3-175b")), st.sets(st.sampled_from(sorted(MODULES))))
def test_a_cut_keeps_or_makes_again_everything(name: str, modules: set[str]) -> None:
    """What stays and what is alive in the backward alone add up; nothing dropped is left to no node."""
    local, plain = split(name, Degrees(), *modules), split(name, Degrees())
    assert local.saved_bytes + local.working == pytest.approx(plain.saved_bytes)
    assert local.working >= 0
    assert bool(local.working) == bool(cut(local.layer, PLAN, local.options.recompute).repeated)


def test_full_recomputation_keeps_what_enters() -> None:
    spec = model("deepseek-v3")
    (layer,) = token_network(spec, 1, TOKENS).mtp
    local = split_block(layer, SplitOptions(Degrees(), PLAN, Recompute(full=True), moe=spec.moe))
    assert dict(local.saved) == {"mtp/hidden_norm_in": 2.0 * TOKENS * 7168, "mtp/embedding_norm_in": 2.0 * TOKENS * 7168}


@pytest.mark.parametrize("style", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("window", [None, 512, 2048])
def test_every_style_of_context_parallelism_attends_the_same_pairs(style: Any, window: int | None) -> None:
    layer = token_network(model(sliding_window=window), 1, 8192).layers[-1]

    def attended(degrees: Degrees) -> float:
        local = split_block(layer, SplitOptions(degrees, PLAN))
        works = [op.work for op in local.forward if isinstance(op.work, AttentionWork)]
        return sum(work.heads * pairs(work) for work in works)

    assert 4 * attended(Degrees(cp=4, cp_style=style)) == pytest.approx(attended(Degrees()), rel=0.002)


def test_encoders_see_everything_and_decoders_what_came_before() -> None:
    network = token_network(model("switch-base"), 1, 512)
    masks = [[node.mask for node in layer.nodes if isinstance(node, Attention)] for layer in network.layers]
    assert masks[0] == [BIDIRECTIONAL]
    assert masks[-1] == [Mask(), BIDIRECTIONAL]


def test_the_first_layer_has_no_gradient_of_its_input() -> None:
    mlp = load_model("mlp-4096x24")
    assert not isinstance(mlp, TransformerSpec)
    first, second = simple_network(mlp, 8, 1).layers[:2]
    names = [[op.name for op in split_block(layer, SplitOptions(Degrees(), PLAN)).backward] for layer in (first, second)]
    assert "mlp/layer_column.dgrad" not in names[0]
    assert "mlp/layer_row.dgrad" in names[1]


def frozen_layer(*, trained: bool) -> Layer:
    """Two products, the first of which may be frozen."""
    layer = LayerBuilder("frozen", [Axis("batch", 2), Axis("hidden", 8), Axis("ffn", 16, "tensor")])
    x = layer.linear("first", layer.input("x", "batch hidden"), "batch ffn")
    done = layer.done(layer.linear("second", x, "batch hidden"))
    return replace(done, tensors=tuple(replace(t, trained=trained) if t.name == "first.weight" else t for t in done.tensors))


def test_frozen_weights_have_no_gradient() -> None:
    for trained in (False, True):
        local = split_block(frozen_layer(trained=trained), SplitOptions(Degrees(), PLAN))
        assert ("first.wgrad" in [op.name for op in local.backward]) == trained
        assert ("x" in dict(local.saved)) == trained
        assert "first.dgrad" in [op.name for op in local.backward]


def mamba_layer() -> Layer:
    """A state-space mixer: projection, short convolution, scan, gated norm, projection."""
    layer = LayerBuilder("mamba", [
        Axis("batch", 1), Axis("sequence", TOKENS, "sequence"), Axis("hidden", 1024), Axis("heads", 32, "tensor"),
        Axis("channels", 64), Axis("groups", 8, "groups"), Axis("state", 128), Axis("taps", 4),
    ])  # fmt: skip
    layer.axis("inner", parts=("heads channels",))
    layer.axis("packed", parts=("heads channels", "heads channels", "groups state", "groups state", "heads"))
    layer.axis("mixed", parts=("heads channels", "groups state", "groups state"))
    x = layer.norm("norm", layer.input("hidden", "batch sequence hidden"))
    both = layer.linear("in_proj", x, "batch sequence packed", module="scan")
    gate, mixed = layer.view([both], ("gate", "batch sequence inner"), ("mixed", "batch sequence mixed"))
    mixed = layer.convolution("conv", mixed, "batch sequence mixed", ("taps", "mixed"), module="scan")
    y = layer.scan("ssd", [mixed], "batch sequence inner", value_dim="channels", groups="groups", chunk=128)
    y = layer.norm("gated_norm", y, gate=gate, module="scan")
    return layer.done(layer.residual("residual", layer.linear("out_proj", y, "batch sequence hidden", module="scan"), "hidden"))


@pytest.mark.parametrize("degrees", [Degrees(tp=4), Degrees(tp=2, sequence_parallel=True, cp=4), Degrees(cp=8)])
def test_a_scan_is_split_over_heads_and_its_sequence_is_exchanged(degrees: Degrees) -> None:
    one, part = (split_block(mamba_layer(), SplitOptions(d, PLAN)) for d in (Degrees(), degrees))

    def work(local: LocalBlock) -> float:
        return sum(op.work.flops for op in local.forward if isinstance(op.work, KernelWork))

    assert work(part) * degrees.tp * degrees.cp == pytest.approx(work(one))
    for ops in (part.forward, part.backward):
        assert len([op for op in ops if isinstance(op.work, Collective) and op.work.name == "all_to_all"]) == 2 * (degrees.cp > 1)
    kinds = {op.work.name for op in part.forward if isinstance(op.work, Collective) and op.work.dimension == "tp"}
    assert kinds == ({"all_gather", "reduce_scatter"} if degrees.sequence_parallel else {"all_reduce"} if degrees.tp > 1 else set())


def test_rows_are_exchanged_in_their_own_width() -> None:
    """Latent experts send the narrow rows that they multiply."""
    layer = LayerBuilder("latent", [
        Axis("batch", 1), Axis("sequence", 64, "sequence"), Axis("hidden", 32), Axis("latent", 8), Axis("scores", 8),
        Axis("experts", 8, "experts"), Axis("rows", 128, "rows"), Axis("width", 16, "expert_tensor"),
    ])  # fmt: skip
    x = layer.input("x", "batch sequence hidden")
    choice = layer.select("moe/topk", layer.linear("moe/router", x, "batch sequence scores", wide=True))
    rows = layer.permute("moe/permute", [layer.linear("moe/down", x, "batch sequence latent"), choice], "rows latent")
    rows = layer.grouped("experts", layer.linear("moe/fc1", rows, "rows width"))
    rows = layer.grouped("experts", layer.linear("moe/fc2", rows, "rows latent"))
    done = layer.done(layer.permute("moe/unpermute", [rows, choice], "batch sequence latent", back=True))
    local = split_block(done, SplitOptions(Degrees(ep=4), PLAN, moe=model("qwen3-30b-a3b").moe))
    assert [op.work.hidden for op in local.forward if isinstance(op.work, ExpertExchange)] == [8, 8]


def sorts(**degrees: Any) -> list[tuple[str, float]]:
    block = split("qwen3-30b-a3b", Degrees(**degrees))
    ops = (*block.forward, *block.backward)
    return [(op.name, op.work.bytes_moved) for op in ops if op.name.endswith(".sort") and isinstance(op.work, MemoryWork)]


def test_rows_of_an_all_to_all_are_put_in_the_order_of_the_local_experts() -> None:
    """Read and written once on either side of the experts, in both passes; 16 bits of 2048 values a row."""
    found = sorts(ep=8)
    assert [name for name, _ in found] == [
        "moe_dispatch.sort", "moe_combine.sort", "moe_combine.backward.sort", "moe_dispatch.backward.sort"
    ]  # fmt: skip
    grouped = next(op.work for op in split("qwen3-30b-a3b", Degrees(ep=8)).forward if isinstance(op.work, GroupedGemm))
    assert {moved for _, moved in found} == {4.0 * grouped.tokens * 2048}
    assert not sorts(ep=8, dispatcher="deepep")
    assert not sorts(ep=128)


def test_experts_wait_for_their_rows() -> None:
    ops = split("qwen3-30b-a3b", Degrees(ep=8, overlap_ep=True)).forward
    dispatch = next(index for index, op in enumerate(ops) if isinstance(op.work, ExpertExchange))
    assert dispatch in next(op for op in ops if op.name == "moe_dispatch.sort").deps


def test_an_exchange_hides_beside_another_micro_batch_and_no_compute_is_lost() -> None:
    local = split("qwen3-30b-a3b", Degrees(ep=8))

    def of(seconds: float) -> Price:
        return Price(seconds, seconds, seconds, Provenance.MODEL)

    for each in (0.5, 3.0, 50.0):
        prices = {True: of(each), False: of(1.0)}

        def price(op: LocalOp, prices: dict[bool, Price] = prices) -> Price:
            return prices[isinstance(op.work, ExpertExchange)]

        own = [price_list(ops, price, backward=backward) for ops, backward in ((local.forward, False), (local.backward, True))]
        for alone in own:
            beside = without_hidden(alone, hidden_share(own, price_pair(local.forward, local.backward, price)))
            compute = sum(s for name, s in alone.terms if name != "ep")
            assert compute <= beside.seconds < alone.seconds
            assert sum(s for _, s in beside.terms) == pytest.approx(beside.seconds)
            assert beside.communication_s == alone.communication_s


def test_a_linear_layer_holds_the_norm_that_it_alone_reads() -> None:
    def holding(name: str) -> set[str]:
        layer = token_network(model(name), 1, 16).layers[-1]
        return {node.name for node in layer.nodes if isinstance(node, Einsum) and holds_norm(layer, node)}

    assert holding("llama3.1-8b") == {"attention/qkv", "mlp/fc1"}
    assert holding("deepseek-v3") == {"attention/q_up", "attention/kv_up"}


def test_a_checkpoint_that_stops_early_leaves_out_the_last_product() -> None:
    whole, less = (split("llama3.1-8b", Degrees(tp=2, sequence_parallel=True), full=True, stops=stops) for stops in (False, True))
    assert whole.repeated_flops == whole.model_flops
    assert whole.repeated_flops - less.repeated_flops == pytest.approx(2.0 * TOKENS * 4096 * 14336)
    left_out = {op.name for op in whole.backward} - {op.name for op in less.backward}
    assert left_out == {"mlp/fc2", "mlp_out.reduce_scatter", "mlp_residual"}
    assert (less.saved, less.forward) == (whole.saved, whole.forward)
    # Scores that weigh what the experts put out read it in the backward: experts and the way back run again.
    after = replace(PLAN, library=replace(PLAN.library, expert_output_fp32=True))
    names = {op.name for op in split("mixtral-8x7b", Degrees(), plan=after, full=True, stops=True).backward}
    assert {"moe/fc2", "moe/unpermute"} <= names
    assert "moe/fc2" not in {op.name for op in split("mixtral-8x7b", Degrees(), full=True, stops=True).backward}
