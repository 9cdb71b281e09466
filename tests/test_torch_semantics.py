"""What torch does under torchtitan: casts to fp8 as kernels, tensor-parallel gathers in fp8, its ring attention; and facts of
frameworks that act on the step: all-reduces of the loss, the softmax of unfused attention."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.host import launch_seconds
from simpar.costs.kernels import KernelModel
from simpar.evidence.row_framework import precision_of
from simpar.evidence.row_machine import machine_of
from simpar.graph.casts import GATHERED, RECIPES, casts
from simpar.graph.masks import Mask
from simpar.graph.rematerialise import Recompute
from simpar.parallel import context
from simpar.parallel.degrees import Degrees
from simpar.parallel.layout import Layout
from simpar.parallel.work import AttentionWork, Collective, Gemm, LocalOp, MemoryWork, OpList
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate


def scenario(precision: str = "fp8", name: str = "torchtitan", **plan: Any) -> Scenario:
    """Llama 3 8B on 8 H100."""
    attention = plan.pop("attention_kernel", "auto")
    training = {"sequence_length": 8192, "global_batch_size": 8, "precision": precision, "compile": True,
                "attention_kernel": attention}  # fmt: skip
    fields = {"zero_stage": 3, "recompute": "none", **plan}
    cluster = {"hardware": "dgx-h100", "num_nodes": 1}
    return make_scenario({"model": "llama3.1-8b", "framework": name, "cluster": cluster, "plan": fields, "training": training})


def layer(chosen: Scenario) -> tuple[tuple[LocalOp, ...], tuple[LocalOp, ...]]:
    """Forward and backward op lists of one layer."""
    block = Layout.of(chosen, 1).stage_blocks[0][1]
    return block.forward, block.backward


def moved(recipe: str, tensor: str) -> float:
    """Bytes per element that all casts of a tensor move in a forward and backward."""
    return sum(c.bytes for direction in RECIPES[recipe].values() for c in direction if c.tensor == tensor)


# torchao/testing/training/roofline_utils.py, bf16 to fp8, no fusion with what comes before. One difference: where it writes both
# layouts of an input in one kernel (2 + 2 bytes), the forward here writes one and the backward reads again (3 + 3), as
# checkpointing keeps the 16-bit tensor.
@pytest.mark.parametrize(
    ("recipe", "tensor", "expected"),
    [("fp8", "input", 2 + 3 + 3), ("fp8", "gradient", 2 + 4), ("fp8", "weight", 2 + 3 + 3), ("fp8_row", "weight", 3 + 4 + 3),
     ("fp8_row", "input", 3 + 4 + 3), ("fp8_row", "gradient", 3 + 4 + 3), ("mxfp8", "input", 6 + 2 / 32), (GATHERED, "weight", 2),
     ("fp4", "input", 2 + 3.125), ("fp4", "weight", 2 + 3.125), ("fp4", "gradient", 2 + 3.125)],
)  # fmt: skip
def test_bytes_of_casts_are_those_that_torchao_counts(recipe: str, tensor: str, expected: float) -> None:
    assert moved(recipe, tensor) == pytest.approx(expected)


def test_a_cast_moves_its_tensor_and_kept_scales_are_not_made_again() -> None:
    assert [(c.tensor, c.bytes) for c in casts("fp8", "forward")] == [("input", 2), ("input", 3), ("weight", 2), ("weight", 3)]
    assert [(c.tensor, c.bytes) for c in casts("fp8", "forward", again=True)] == [("input", 3), ("weight", 3)]
    assert casts("", "forward") == casts("fp4", "wgrad") == ()
    forward, _ = layer(scenario("fp8-rowwise"))
    product = next(op.work for op in forward if op.name == "mlp/fc1")
    assert isinstance(product, Gemm)
    moved = [op.work.bytes_moved for op in forward if op.name == "mlp/fc1.cast" and isinstance(op.work, MemoryWork)]
    assert moved == [3.0 * product.m * product.k, 3.0 * product.n * product.k]


@pytest.mark.parametrize(
    ("framework", "version", "precision", "torchao"),
    [("plain", "2026-02", "fp8", True), ("torch-autocast", "2026-02", "fp8-rowwise", True), ("torch-te", "2026-02", "fp8", False),
     ("transformers", "2025-05", "fp8", False), ("transformers", "2025-06", "fp8", True),
     ("transformers", "2025-05", "fp8-rowwise", True), ("deepspeed", "2025-06", "fp8", False)],
)  # fmt: skip
def test_own_loops_and_accelerate_cast_with_torchao(framework: str, version: str, precision: str, torchao: bool) -> None:
    made = scenario(precision, framework, zero_stage=0).model_copy(update={"framework_version": version})
    options = Layout.of(made, 1).options
    assert options.casts == ({"fp8": "fp8", "fp8-rowwise": "fp8_row"}[precision] if torchao else "")
    assert (options.engine_casts is None) == (torchao or framework == "deepspeed")


@pytest.mark.parametrize(
    ("model", "version", "saved"),
    [("deepseek-v3", "2025-08", False), ("deepseek-v3", "2025-09", True), ("qwen3-30b-a3b", "2026-02", False),
     ("qwen3-30b-a3b", "2026-03", True)],
)  # fmt: skip
def test_exchanges_are_on_the_lists_of_saved_ops_model_by_model(model: str, version: str, saved: bool) -> None:
    """torchtitan PR 1672 (not in models/qwen3/infra/parallelize.py) and PR 2357."""
    made = make_scenario({
        "model": model, "framework": "torchtitan", "framework_version": version,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 3, "ep": 8, "recompute": {"granularity": "selective", "modules": ["op"]}},
        "training": {"sequence_length": 4096, "global_batch_size": 8},
    })  # fmt: skip
    assert ("op_exchanged" in Layout.of(made, 1).options.recompute.modules) == saved


def on_blackwell(precision: str, version: str = "2026-08", **training: Any) -> Layout:
    """Llama 3 8B on one node of GB200 under torchtitan's per-op checkpointing."""
    wanted = {"sequence_length": 2048, "global_batch_size": 16, "micro_batch_size": 4, "precision": precision, "compile": True}
    plan = {"zero_stage": 3, "recompute": {"granularity": "selective", "modules": ["op"]}}
    return Layout.of(make_scenario({
        "model": "llama3.1-8b", "framework": "torchtitan", "framework_version": version,
        "cluster": {"hardware": "gb200-nvl72", "num_nodes": 1}, "plan": plan, "training": {**wanted, **training},
    }), 1)  # fmt: skip


def test_products_in_four_bits_run_again_and_the_last_layers_stay_in_sixteen() -> None:
    narrow, wide = (on_blackwell(precision).stage_blocks[0] for precision in ("nvfp4", "bf16"))
    names = [op.name for op in narrow[1].backward]
    for product in ("attention/qkv", "attention/proj", "mlp/fc1"):
        assert product in names  # none of torchao's products is among what the policy saves
    assert "attention/core" not in names
    assert sum(b for _, b in narrow[1].saved) < 0.45 * sum(b for _, b in wide[1].saved)
    dtypes = [{op.work.dtype for op in b.forward if isinstance(op.work, Gemm)} for b in narrow[1:-1]]
    assert dtypes == [{"fp4"}] * 27 + [{"bf16"}] * 5  # 85 % of 32 layers (torchtitan nvfp4.md)
    assert narrow[-2].saved == wide[-2].saved


def test_cudnn_attention_ran_again_until_the_policy_listed_it() -> None:
    """torchtitan PR 2095 of December 2025; flash attention was on the list from the start."""
    before, after = (on_blackwell("bf16", month).stage_blocks[0][1] for month in ("2025-11", "2025-12"))
    assert "attention/core" in [op.name for op in before.backward]
    assert "attention/core" not in [op.name for op in after.backward]
    assert sum(b for _, b in before.saved) < sum(b for _, b in after.saved)
    flash = on_blackwell("bf16", "2025-11", attention_kernel="fa2").stage_blocks[0][1]
    assert "attention/core" not in [op.name for op in flash.backward]


@pytest.mark.parametrize(("usual", "slower"), [(1.0, 2.6), (1.6, 2.6 / 1.6)])
def test_a_slow_host_launches_slower(usual: float, slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grace takes 2.6 times what the Xeon of the benchmarks takes; an x86 host of which nothing is known takes 1.6 times that."""
    from simpar.costs import host
    from simpar.costs.pricer import LayoutPricer
    from simpar.step import cost_models

    assert host.USUAL_X86 == 1.6
    monkeypatch.setattr(host, "USUAL_X86", usual)
    found = {}
    for name in ("gb200-nvl72", "dgx-b200"):
        chosen = make_scenario({
            "model": "llama3.1-8b", "framework": "torchtitan", "cluster": {"hardware": name, "num_nodes": 1},
            "plan": {"zero_stage": 3}, "training": {"sequence_length": 2048, "global_batch_size": 8, "compile": False},
        })  # fmt: skip
        layout = Layout.of(chosen, 1)
        pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
        found[name] = launch_seconds(pricer.layout, pricer.block(layout.stage_blocks[0][1], "F"), "F")
    assert found["gb200-nvl72"] == pytest.approx(slower * found["dgx-b200"])


@pytest.mark.parametrize(("month", "slows"), [("2025-12", True), ("2026-01", False)])
def test_a_slower_core_does_not_lengthen_what_the_host_waits_for(month: str, slows: bool) -> None:
    """The wait for the tokens of each expert is the device's and other ranks' time; launches are 2.6 times as long, modules only
    until 2026."""
    from simpar.costs.host import ATTENTION_SHARE
    from simpar.costs.pricer import LayoutPricer
    from simpar.step import cost_models

    def launched(name: str, capacity: float | None) -> tuple[float, float]:
        chosen = make_scenario({
            "model": "mixtral-8x7b", "framework": "megatron-core", "framework_version": month,
            "cluster": {"hardware": name, "num_nodes": 2}, "plan": {"zero_stage": 1, "ep": 8},
            "training": {"sequence_length": 2048, "global_batch_size": 16, "routing": {"capacity_factor": capacity}},
        })  # fmt: skip
        layout = Layout.of(chosen, 1)
        pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
        seconds = launch_seconds(pricer.layout, pricer.block(layout.stage_blocks[0][1], "F"), "F")
        modules = ATTENTION_SHARE * layout.framework.host.layer_cpu_s + 0.71e-3 + 5e-6  # one of eight experts a rank
        return seconds, 0.0 if slows else modules

    x86, grace = ([launched(name, capacity) for capacity in (None, 1.0)] for name in ("dgx-b200", "gb200-nvl72"))
    assert x86[0][0] - x86[1][0] == pytest.approx(4.4e-3)
    assert grace[0][0] - grace[1][0] == pytest.approx(4.4e-3)
    beside = x86[1][1]
    assert (beside == 0.0) == slows
    assert beside < x86[1][0]
    assert grace[1][0] - beside == pytest.approx(2.6 * (x86[1][0] - beside))


@pytest.mark.parametrize(
    ("model", "plan", "training", "ahead"),
    [
        ("llama3.1-8b", {}, {}, True),
        ("llama3.1-8b", {"pp": 4, "virtual_stages": 2}, {}, True),
        ("llama3.1-8b", {"pp": 4, "virtual_stages": 2, "overlap_p2p": False}, {}, False),
        ("llama3.1-8b", {"pp": 4}, {}, False),
        ("llama3.1-8b", {"pp": 4, "schedule": "zb-1p"}, {}, False),
        ("llama3.1-8b", {}, {"launch_blocking": True}, False),
        ("mixtral-8x7b", {"ep": 8}, {}, False),
        ("mixtral-8x7b", {"ep": 8, "ep_dispatcher": "hybridep"}, {}, False),
        ("mixtral-8x7b", {"ep": 8}, {"routing": {"capacity_factor": 1.0}}, True),
        ("mixtral-8x7b", {"ep": 8, "ep_dispatcher": "deepep"}, {"routing": {"capacity_factor": 1.0}}, False),
    ],
)
def test_the_host_runs_ahead_from_pass_to_pass_where_nothing_stops_it(
    model: str, plan: dict[str, object], training: dict[str, object], ahead: bool
) -> None:
    """Megatron-LM synchronises after batched sends and receives, every dispatcher without a capacity in a layer's forward."""
    from simpar.costs.pricer import LayoutPricer
    from simpar.step import cost_models

    chosen = make_scenario({
        "model": model, "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 1, **plan}, "training": {"sequence_length": 2048, "global_batch_size": 32, **training},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    pricer, block = LayoutPricer(layout, *cost_models(chosen, layout.hardware)), layout.stage_blocks[0][1]
    own = [launch_seconds(pricer.layout, pricer.block(block, phase), phase) for phase in "FB"]
    found = [pricer.host.seconds(block, phase) for phase in "FB"]
    assert found == pytest.approx([sum(own) / 3, sum(own) * 2 / 3] if ahead else own)
    least = [pricer.host.least(block, phase) for phase in "FB"]
    assert all(low <= seconds for low, seconds in zip(least, found, strict=True))
    # Other pipelines change nothing where every launch or every dispatch is waited for.
    whatever = "launch_blocking" in training or (model == "mixtral-8x7b" and not ahead)
    assert least == pytest.approx(own if whatever else [min(own[0], sum(own) / 3), min(own[1], sum(own) * 2 / 3)])


@pytest.mark.parametrize(
    ("dispatcher", "capacity", "waits"),
    [("alltoall", None, True), ("alltoall", 1.0, False), ("hybridep", None, False), ("deepep", None, True), ("deepep", 1.0, True)],
)
def test_the_host_waits_for_the_tokens_of_each_expert_in_a_forward_alone(
    dispatcher: str, capacity: float | None, waits: bool
) -> None:
    """A layer with experts has router, dispatcher and experts for the modules of a dense feed-forward; a backward knows the counts
    of its forward, unless the exchange that brought them runs again; what discards its output runs again without the modules
    around it."""
    from dataclasses import replace

    from simpar.costs.host import ATTENTION_SHARE
    from simpar.costs.pricer import LayoutPricer
    from simpar.step import cost_models

    table = {
        "model": "mixtral-8x7b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 1, "ep": 8, "ep_dispatcher": dispatcher},
        "training": {"sequence_length": 2048, "global_batch_size": 8},
    }  # fmt: skip
    if capacity is not None:
        table["training"] |= {"routing": {"capacity_factor": capacity}}
    chosen = make_scenario(table)
    layout = Layout.of(chosen, 1)
    pricer, spec = LayoutPricer(layout, *cost_models(chosen, layout.hardware)), layout.framework
    price = pricer.block(layout.stage_blocks[0][1], "F")
    assert price.expert_kernels > 0

    def more(phase: str, repeats: bool, experts: bool = False) -> float:
        once = replace(price, repeats_modules=repeats, repeats_experts=experts)
        return launch_seconds(pricer.layout, once, phase) - launch_seconds(pricer.layout, replace(once, expert_kernels=0), phase)

    less, wait = (1.0 - ATTENTION_SHARE) * spec.host.layer_cpu_s, spec.host.expert_layer_cpu_s if waits else 0.0
    forward, backward = 0.71e-3 + 5e-6, 0.48e-3 + 12.5e-6  # one of eight experts a rank
    assert more("F", repeats=False) == pytest.approx(wait - less + forward)
    assert more("B", repeats=False) == pytest.approx(backward - less)
    assert more("B", repeats=True) == pytest.approx(backward - 2.0 * less)
    assert more("B", repeats=True, experts=True) == pytest.approx(wait - 2.0 * less + backward + forward)


def test_more_experts_a_rank_take_the_host_longer() -> None:
    """Mixtral's eight, all on one rank against one on each of eight: seven more, in a forward and in a backward."""
    from dataclasses import replace

    from simpar.costs.pricer import LayoutPricer
    from simpar.step import cost_models

    found = {}
    for ep in (1, 8):
        chosen = make_scenario({
            "model": "mixtral-8x7b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
            "plan": {"zero_stage": 1, "ep": ep}, "training": {"sequence_length": 2048, "global_batch_size": 8},
        })  # fmt: skip
        layout = Layout.of(chosen, 1)
        pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
        price = replace(pricer.block(layout.stage_blocks[0][1], "F"), kernels=0, collectives=0, called=())
        found[ep] = [launch_seconds(layout, price, phase) for phase in "FB"]
    one, eight = found[8], found[1]
    assert [b - a for a, b in zip(one, eight, strict=True)] == pytest.approx([7 * 5e-6, 7 * 12.5e-6])


@pytest.mark.parametrize(
    ("recompute", "modules", "experts"),
    [("none", False, False), (["moe_act", "layernorm"], False, False), (["attention"], True, False), (["moe"], True, True),
     ("full", True, True)],
)  # fmt: skip
def test_modules_run_again_where_their_products_do(recompute: str | list[str], modules: bool, experts: bool) -> None:
    """Megatron-LM's CheckpointWithoutOutput calls a norm or an activation again as a function."""
    from simpar.costs.pricer import LayoutPricer
    from simpar.step import cost_models

    asked = {"granularity": "selective", "modules": recompute} if isinstance(recompute, list) else recompute
    chosen = make_scenario({
        "model": "mixtral-8x7b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 1, "ep": 8, "recompute": asked},
        "training": {"sequence_length": 2048, "global_batch_size": 8},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    pricer, block = LayoutPricer(layout, *cost_models(chosen, layout.hardware)), layout.stage_blocks[0][1]
    forward, backward = (pricer.block(block, phase) for phase in ("F", "B"))
    assert (backward.repeats_modules, backward.repeats_experts) == (modules, experts)
    assert not forward.repeats_modules
    assert not forward.repeats_experts


def test_casts_stand_before_their_products_and_not_around_sixteen_bit_ones() -> None:
    forward, backward = layer(scenario("fp8-rowwise"))
    names = [op.name for op in forward]
    assert names.index("attention/qkv.cast") < names.index("attention/qkv")
    casts_of = [op.work for op in backward if op.name == "mlp/fc2.cast.backward"]
    assert all(isinstance(w, MemoryWork) for w in casts_of)
    assert len(casts_of) == 7  # gradient twice and its transposed copy, weight and input with theirs
    head = Layout.of(scenario("fp8-rowwise"), 1).stage_blocks[0][-1]
    assert not any(".cast" in op.name for op in (*head.forward, *head.backward))
    assert not any(".cast" in op.name for ops in layer(scenario("bf16")) for op in ops)
    assert not Layout.of(scenario("fp8", "megatron-core"), 1).options.casts


def test_full_recomputation_finds_the_maxima_again_and_per_op_checkpointing_keeps_them() -> None:
    def again(recompute: Any) -> list[float]:
        ops = layer(scenario(recompute=recompute))[1]
        return [op.work.bytes_moved for op in ops if op.name == "attention/proj.cast" and isinstance(op.work, MemoryWork)]

    whole, kept = again("full"), again({"granularity": "selective", "modules": ["op"]})
    assert sum(whole) == pytest.approx(sum(kept) / 3 * 5)  # weights arrive in fp8; an input is read for its maximum and cast


@pytest.mark.parametrize(
    ("name", "version", "compiled", "trainable", "stops"),
    [("torchtitan", "2024-12", False, "all", True), ("torchtitan", "2026-04", False, "all", False),
     ("torchtitan", "2026-04", True, "all", True), ("torchtitan", "2026-04", True, "lora", False),
     ("torch-fsdp", "2023-08", False, "all", False), ("torch-fsdp", "2024-06", False, "all", False),
     ("transformers", "2024-11", False, "all", False), ("transformers", "2026-03", False, "all", True),
     ("llm-foundry", "2023-09", False, "all", False), ("megatron-core", "2026-03", None, "all", False)],
)  # fmt: skip
def test_which_checkpoints_stop_early(name: str, version: str, compiled: bool | None, trainable: str, stops: bool) -> None:
    training = {"sequence_length": 8192, "global_batch_size": 8, "compile": compiled, "trainable": trainable}
    fields = {"model": "llama3.1-8b", "framework": name, "framework_version": version, "training": training,
              "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"recompute": "full"}}  # fmt: skip
    assert Layout.of(make_scenario(fields), 1).options.recompute == Recompute(full=True, stops=stops)


def test_scales_per_row_cost_more_than_one_scale_and_less_than_they_save() -> None:
    step = {p: simulate(scenario(p)).step_time_s for p in ("bf16", "fp8", "fp8-rowwise")}
    assert step["fp8"] < step["fp8-rowwise"] < step["bf16"]
    # torchao README, 8 H100 with 2.4 TB/s: rowwise 1.10 and tensorwise 1.25 times as fast as bf16.
    assert simulate(scenario("fp8-rowwise")).breakdown["cast"] > 1.5 * simulate(scenario("fp8")).breakdown["cast"]


def test_the_rowwise_kernel_is_slower_than_cublas() -> None:
    model = KernelModel(load_hardware("dgx-h100"))
    ratio = model.gemm(Gemm(8192, 8192, 8192, dtype="fp8_row")).seconds / model.gemm(Gemm(8192, 8192, 8192, dtype="fp8")).seconds
    assert 1.0 < ratio <= 1 / 0.9


def gathers(precision: str, *, overlap: bool = False) -> dict[str, float]:
    """Bytes of a layer's tensor-parallel gathers that compute waits for, by name."""
    chosen = scenario(precision, tp=8, sequence_parallel=True, overlap_tp=overlap)
    return {op.name: op.work.bytes for ops in layer(chosen) for op in ops
            if isinstance(op.work, Collective) and op.work.name == "all_gather" and not op.name.endswith(".rest")}  # fmt: skip


def test_tensors_with_one_scale_are_gathered_over_tensor_ranks_after_the_cast() -> None:
    wide, narrow, rows = gathers("bf16"), gathers("fp8"), gathers("fp8-rowwise")
    assert narrow == {name: amount / 2 for name, amount in wide.items()}
    assert rows == wide


def test_asynchronous_tensor_parallelism_does_not_take_in_gathers_of_rows_with_scales() -> None:
    chunked, whole = gathers("bf16", overlap=True), gathers("fp8-rowwise", overlap=True)
    assert sum(whole.values()) == pytest.approx(8 * sum(chunked.values()))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from((2, 4, 8)), st.booleans(), st.sampled_from(("ring", "all_gather")), st.sampled_from(("fused", "eager")))
def test_torch_ring_attends_as_much_as_the_other_and_sends_gradients_in_fp32(
    cp: int, backward: bool, style: Any, merges: Any
) -> None:
    whole = AttentionWork(1, 1024 * cp, 1024 * cp, 8, 2, 64, 64, True, backward, "fa2")

    def ops_of(degrees: Degrees) -> tuple[LocalOp, ...]:
        ops = OpList()
        context.attention("a", whole, Mask(), degrees, 1, ops)
        return ops.done()

    torch, other = ops_of(Degrees(cp=cp, cp_style=style, ring_merges=merges)), ops_of(Degrees(cp=cp))
    assert [o.work for o in torch if isinstance(o.work, AttentionWork)] == [
        o.work for o in other if isinstance(o.work, AttentionWork)
    ]
    values = 1024 * 8 * (64 + 64)  # of one rank, all query heads
    arriving = sum(o.work.bytes for o in torch if isinstance(o.work, Collective) and "gradients" not in o.name)
    assert arriving == (2.0 * values * cp if style == "all_gather" else 2.0 * values * (cp - 1))
    sent = [o.work.bytes for o in torch if "gradients" in o.name and isinstance(o.work, Collective)]
    assert sent == ([4.0 * values] * cp if backward else [])
    assert sum("merge" in o.name for o in torch) == (cp if backward else cp - 1)


@pytest.mark.parametrize("style", ["ring", "all_gather"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_compiled_ring_computes_nothing_beside_its_collectives(backward: bool, style: Any) -> None:
    def beside(merges: Any) -> int:
        """Compute that does not wait for a collective issued before it."""
        ops = OpList()
        whole = AttentionWork(1, 4096, 4096, 8, 2, 64, 64, True, backward, "fa2")
        context.attention("a", whole, Mask(), Degrees(cp=4, cp_style=style, ring_merges=merges), 1, ops)
        found, waited = 0, set[int]()
        for index, op in enumerate(ops.done()):
            waited.update(op.deps)
            sent = {i for i, other in enumerate(ops.done()[:index]) if isinstance(other.work, Collective)}
            found += op.stream == "compute" and not sent <= waited
        return found

    assert beside("fused") == 0 < beside("eager")


def test_the_loss_takes_two_all_reduces_where_it_is_fused() -> None:
    def calls(version: str, **training: Any) -> int:
        table = {"model": "llama3.1-8b", "framework": "megatron-core", "framework_version": version,
                 "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"tp": 8},
                 "training": {"sequence_length": 4096, "global_batch_size": 8, **training}}  # fmt: skip
        head = Layout.of(make_scenario(table), 1).stage_blocks[0][-1]
        return next(op.work.repeat for op in head.forward if op.name == "loss.all_reduce" and isinstance(op.work, Collective))

    assert (calls("2024-06"), calls("2024-06", cross_entropy="fused"), calls("2025-06")) == (3, 2, 2)


def test_runs_with_rows_of_scales_and_power_limits_are_told() -> None:
    assert precision_of({"precision": "fp8 rowwise + bf16"}, (2025, 6))[0] == "fp8-rowwise"
    assert precision_of({"precision": "fp8 (float8 tensorwise linear, fp8 all-gather) + bf16"}, (2024, 12))[0] == "fp8"
    row = {"gpu": "B200", "n_gpus": 8, "gpus_per_node": 8, "gpu_mem_gb": 180}
    assert machine_of({**row, "notes": "power limited B200"})[0]["hardware"] == "dgx-b200-750w"
    assert machine_of(row)[0]["hardware"] == "dgx-b200"
    limited, full = KernelModel(load_hardware("dgx-b200-750w")), KernelModel(load_hardware("dgx-b200"))
    assert limited.gemm(Gemm(8192, 8192, 8192)).seconds > full.gemm(Gemm(8192, 8192, 8192)).seconds


def test_a_softmax_of_torch_operations_costs_more_than_a_fused_one() -> None:
    model = KernelModel(load_hardware("dgx-a100-80gb"))
    for direction in ("forward", "backward"):
        fused, eager = (
            model.attention(AttentionWork(4, 2048, 2048, 16, 16, 128, 128, kernel=k, backward=direction == "backward"))
            for k in ("unfused", "eager")
        )
        assert fused.seconds < eager.seconds < 2.5 * fused.seconds
    for name, kernel in (("aa-scaling-torch-softmax", "eager"), ("megatron-core", "unfused")):
        chosen = scenario("bf16", name, zero_stage=1, attention_kernel="unfused")
        cores = [op.work for op in layer(chosen)[0] if isinstance(op.work, AttentionWork)]
        assert [work.kernel for work in cores] == [kernel]
