"""Bytes on the wire of one layer: per collective, direction, dimension, recomputation and context-parallel style.

Figures are written out for a small model; `wire` reads them off the op lists of a rank, the one thing here that knows how
work is represented.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import Gather, Reduce, Send
from simpar.parallel.traffic import send_collectives, state_collectives
from simpar.parallel.work import AttentionWork, Collective, ExpertExchange
from simpar.specs.notes import scenario_notes
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, simulate

S, H, HEADS, KV, D, F, V = 4096, 512, 8, 4, 64, 1024, 32000
E, TOP, WIDTH = 8, 2, 768
X: Final = 2 * S * H
"""Bytes of one activation of the whole micro-batch, in 16 bits."""
PAIR: Final = 2 * S * KV * 2 * D
"""Bytes of all keys and values."""
DENSE: Final = {
    "hidden_size": H, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": D, "vocab_size": V,
}  # fmt: skip
EXPERTS: Final = {**DENSE, "moe": {"num_experts": E, "num_experts_per_tok": TOP, "moe_intermediate_size": WIDTH}}
Wire = dict[tuple[str, str], float]
"""(dimension, collective) -> bytes of the whole tensor, as nccl-tests count them."""


def scenario(plan: dict[str, Any], model: dict[str, Any] = DENSE, *, nodes: int = 2, **more: Any) -> Scenario:
    training = {"sequence_length": S, "global_batch_size": 16 * nodes, "routing": {"kind": "balanced"}, **more.pop("training", {})}
    cluster = {"hardware": "dgx-h100", "num_nodes": nodes, **more.pop("cluster", {})}
    return make_scenario(
        {"model": model, "framework": "megatron-core", "cluster": cluster, "plan": plan, "training": training, **more}
    )


def layer_of(found: Scenario) -> LocalBlock:
    """One transformer layer on one rank."""
    blocks = [b for stage in prepare(found).layout.stage_blocks for b in stage]
    return next(b for b in blocks if not b.outside_layers)


def moved(ops: Any) -> Wire:
    """What these ops put on the wire."""
    found: Counter[tuple[str, str]] = Counter()
    for op in ops:
        if isinstance(op.work, Collective):
            found[op.work.dimension, op.work.name] += op.work.bytes * op.work.repeat
        elif isinstance(op.work, ExpertExchange):
            name = "combine" if op.work.combine else "dispatch"
            found["ep", name] += op.work.bytes
    return dict(found)


def wire(found: Scenario) -> tuple[Wire, Wire]:
    """Forward and backward of one layer."""
    layer = layer_of(found)
    return moved(layer.forward), moved(layer.backward)


AG, RS, AR, A2A, P2P = "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"

TABLE: Final[dict[str, tuple[dict[str, Any], dict[str, Any], Wire, Wire]]] = {
    # name: plan, model, forward, backward
    "alone": ({}, DENSE, {}, {}),
    "tp": ({"tp": 4, "sequence_parallel": False}, DENSE, {("tp", AR): 2 * X}, {("tp", AR): 2 * X}),
    "tp, sequence": ({"tp": 4}, DENSE, {("tp", AG): 2 * X, ("tp", RS): 2 * X}, {("tp", AG): 4 * X, ("tp", RS): 2 * X}),
    "tp and cp": ({"tp": 4, "cp": 2}, DENSE, {("tp", AG): X, ("tp", RS): X, ("cp", P2P): PAIR / 2 / 4},
                  {("tp", AG): 2 * X, ("tp", RS): X, ("cp", P2P): 2 * PAIR / 2 / 4}),
    # A rank's part of keys and values, cp - 1 times; backward their gradients as well.
    "cp, ring": ({"cp": 4, "cp_style": "ring"}, DENSE, {("cp", P2P): 3 * PAIR / 4}, {("cp", P2P): 2 * 3 * PAIR / 4}),
    "cp, gathered": ({"cp": 4, "cp_style": "all_gather"}, DENSE, {("cp", AG): PAIR}, {("cp", AG): PAIR, ("cp", RS): PAIR}),
    # Queries, keys and values of a rank's part there, the output back; the gradients the other way.
    "cp, by heads": ({"cp": 4, "cp_style": "ulysses"}, DENSE, {("cp", A2A): (X + PAIR + X) / 4}, {("cp", A2A): (X + PAIR + X) / 4}),
    # Eight ranks and four heads of keys and values: every rank has one head of them, a quarter and not an eighth.
    "cp, heads twice": ({"tp": 8, "cp": 2}, DENSE, {("tp", AG): X, ("tp", RS): X, ("cp", P2P): PAIR / 2 / 4},
                        {("tp", AG): 2 * X, ("tp", RS): X, ("cp", P2P): 2 * PAIR / 2 / 4}),
    "ep": ({"ep": 4}, EXPERTS, {("ep", "dispatch"): TOP * X, ("ep", "combine"): TOP * X},
           {("ep", "dispatch"): TOP * X, ("ep", "combine"): TOP * X}),
    # Under sequence parallelism each tensor rank sends its own part of the tokens.
    "ep and tp": ({"ep": 4, "tp": 2}, EXPERTS,
                  {("tp", AG): X, ("tp", RS): X, ("ep", "dispatch"): TOP * X / 2, ("ep", "combine"): TOP * X / 2},
                  {("tp", AG): 2 * X, ("tp", RS): X, ("ep", "dispatch"): TOP * X / 2, ("ep", "combine"): TOP * X / 2}),
    # ... and gathers what came for the experts it shares.
    "ep, tp and etp": ({"ep": 4, "tp": 2, "etp": 2}, EXPERTS,
                       {("tp", AG): X, ("tp", RS): X, ("ep", "dispatch"): TOP * X / 2, ("ep", "combine"): TOP * X / 2,
                        ("etp", AG): TOP * X, ("etp", RS): TOP * X},
                       {("tp", AG): 2 * X, ("tp", RS): X, ("ep", "dispatch"): TOP * X / 2, ("ep", "combine"): TOP * X / 2,
                        ("etp", AG): TOP * X, ("etp", RS): TOP * X}),
    "ep and cp": ({"ep": 4, "cp": 2}, EXPERTS,
                  {("cp", P2P): PAIR / 2, ("ep", "dispatch"): TOP * X / 2, ("ep", "combine"): TOP * X / 2},
                  {("cp", P2P): PAIR, ("ep", "dispatch"): TOP * X / 2, ("ep", "combine"): TOP * X / 2}),
}  # fmt: skip


def added(first: Wire, second: Wire) -> Wire:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {*first, *second}}


@pytest.mark.parametrize("name", TABLE)
def test_bytes_of_a_layer(name: str) -> None:
    plan, model, forward, backward = TABLE[name]
    found = wire(scenario(plan, model))
    assert found == (pytest.approx(forward), pytest.approx(backward))


@pytest.mark.parametrize("name", TABLE)
def test_full_recomputation_repeats_the_forward(name: str) -> None:
    plan, model, forward, backward = TABLE[name]
    found = wire(scenario({**plan, "recompute": "full"}, model))
    assert found == (pytest.approx(forward), pytest.approx(added(forward, backward)))


@pytest.mark.parametrize("name", TABLE)
def test_a_split_backward_moves_what_a_whole_one_does(name: str) -> None:
    plan, model, _, backward = TABLE[name]
    layer = layer_of(scenario(plan, model))
    assert added(moved(layer.input_gradient), moved(layer.weight_gradient)) == pytest.approx(backward)


@pytest.mark.parametrize("name", TABLE)
def test_wide_numbers_are_twice_the_bytes(name: str) -> None:
    plan, model, forward, backward = TABLE[name]
    found = wire(scenario(plan, model, training={"precision": "fp32"}))
    twice = [{key: 2 * amount for key, amount in part.items()} for part in (forward, backward)]
    assert found == (pytest.approx(twice[0]), pytest.approx(twice[1]))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("switch", ["overlap_tp", "overlap_ep"])
def test_overlap_moves_the_same_bytes(name: str, switch: str) -> None:
    plan, model, forward, backward = TABLE[name]
    found = wire(scenario({**plan, switch: True}, model))
    assert found == (pytest.approx(forward), pytest.approx(backward))


# -- recomputed modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "plan", "model", "key", "once"),
    [
        ("mlp", {"tp": 4}, DENSE, ("tp", AG), X),
        ("attention", {"tp": 4}, DENSE, ("tp", AG), X),
        ("moe", {"ep": 4}, EXPERTS, ("ep", "dispatch"), TOP * X),
        ("moe", {"ep": 4, "tp": 2, "etp": 2}, EXPERTS, ("etp", AG), TOP * X),
    ],
)
def test_a_recomputed_module_repeats_its_collectives(
    module: str, plan: dict[str, Any], model: dict[str, Any], key: tuple[str, str], once: float
) -> None:
    again = scenario({**plan, "recompute": {"granularity": "selective", "modules": [module]}}, model)
    assert wire(again)[1].get(key, 0.0) == pytest.approx(wire(scenario(plan, model))[1].get(key, 0.0) + once)


@pytest.mark.parametrize("style", ["ring", "all_gather", "ulysses"])
def test_recomputed_core_attention_repeats_what_brings_its_keys(style: str) -> None:
    plan = {"cp": 4, "cp_style": style}
    forward, backward = wire(scenario(plan))
    again = wire(scenario({**plan, "recompute": "selective"}))[1]
    assert again == pytest.approx(added(forward, backward))


@pytest.mark.parametrize("module", ["layernorm", "core_attn"])
def test_recomputing_between_the_collectives_moves_nothing(module: str) -> None:
    plan = {"tp": 4, "recompute": {"granularity": "selective", "modules": [module]}}
    assert wire(scenario(plan)) == wire(scenario({"tp": 4}))


# -- ends of the model, pipeline, data parallelism ---------------------------------------------------------------------


def test_embedding_and_head() -> None:
    blocks = prepare(scenario({"tp": 4})).layout.stage_blocks[0]
    embedding, head = blocks[0], blocks[-1]
    assert moved(embedding.forward) == {("tp", RS): X}
    assert moved(embedding.backward) == {("tp", AG): X}
    # Two all-reduces of one fp32 value a token: the maximum; sum of exponentials and the target's logit together.
    assert moved(head.forward) == {("tp", AG): X, ("tp", AR): 2 * 4 * S}
    assert moved(head.backward) == {("tp", AG): X, ("tp", RS): X}


@pytest.mark.parametrize(
    ("plan", "split"), [({"pp": 2}, 1), ({"pp": 2, "tp": 4}, 4), ({"pp": 2, "tp": 4, "sequence_parallel": False}, 1),
                        ({"pp": 2, "cp": 2}, 2), ({"pp": 2, "tp": 2, "cp": 2}, 4)],
)  # fmt: skip
def test_boundaries_of_a_pipeline(plan: dict[str, Any], split: int) -> None:
    layout = prepare(scenario(plan)).layout
    for backward in (False, True):
        key = Send(0, 1, backward) if not backward else Send(1, 0, backward)
        assert [(c.name, c.bytes) for c in send_collectives(layout, key)] == [(P2P, X / split)]


LAYER = H * (2 * HEADS + 2 * KV) * D + 3 * H * F + 2 * H
WEIGHTS = 2 * LAYER + H + 2 * V * H


@pytest.mark.parametrize(
    ("plan", "gathered", "reduced"),
    [
        # fp32 gradients, bf16 weights
        ({"zero_stage": 0}, {("dp", AG): 2 * WEIGHTS}, {("dp", AR): 4 * WEIGHTS}),
        ({"zero_stage": 1}, {("dp", AG): 2 * WEIGHTS}, {("dp", RS): 4 * WEIGHTS}),
        ({"zero_stage": 3}, {("dp", AG): 2 * WEIGHTS}, {("dp", RS): 4 * WEIGHTS}),
        (
            {"zero_stage": 3, "shard_size": 8},
            {("shard", AG): 2 * WEIGHTS},
            {("shard", RS): 4 * WEIGHTS, ("replica", AR): WEIGHTS / 2},
        ),
    ],
)
def test_states(plan: dict[str, Any], gathered: Wire, reduced: Wire) -> None:
    layout = prepare(scenario(plan)).layout
    blocks = len(layout.stage_blocks[0])
    for key, expected in ((Gather(0, 0, blocks), gathered), (Reduce(0, 0, blocks), reduced)):
        found: Counter[tuple[str, str]] = Counter()
        for c in state_collectives(layout, key):
            found[c.dimension, c.name] += c.bytes * c.repeat
        assert dict(found) == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "owners"), [(1, 8), (8, 2 * 6 + 3)])
def test_weights_that_are_dealt_to_ranks_are_broadcast_one_after_the_other(nodes: int, owners: int) -> None:
    """InternEvo: one broadcast for each rank that owns a tensor; a layer has six (gate and up as one), the ends three."""
    found = scenario({"zero_stage": 1}, nodes=nodes).model_copy(update={"framework": "internevo", "framework_version": "2023-07"})
    layout = prepare(found).layout
    blocks = len(layout.stage_blocks[0])
    [sent] = state_collectives(layout, Gather(0, 0, blocks))
    assert (sent.name, sent.repeat) == ("broadcast", pytest.approx(owners))
    assert sent.bytes * sent.repeat == pytest.approx(2 * WEIGHTS)
    [summed] = state_collectives(layout, Reduce(0, 0, blocks))
    assert (summed.name, summed.bytes) == ("all_reduce", 2 * WEIGHTS)
    assert layout.overlap_grad_reduce
    assert not layout.overlap_param_gather


def times(found: Scenario, kind: type) -> float:
    """How often a step gathers (or reduces) all weights, in weights over the model's."""
    priced = prepare(found, detail="op")
    total = 0.0
    for index in priced.program.price:
        key = priced.program.price_keys[index]
        if isinstance(key, kind):
            total += sum(priced.layout.block_parameters(key.stage, key.first, key.last))  # type: ignore[attr-defined]
    return total / WEIGHTS


@pytest.mark.parametrize("detail_plan", [({"zero_stage": 1}, 1, 1), ({"zero_stage": 0}, 0, 1)])
def test_states_move_once_a_step(detail_plan: tuple[dict[str, Any], float, float]) -> None:
    plan, gathers, reductions = detail_plan
    found = scenario(plan, training={"global_batch_size": 64})
    assert (times(found, Gather), times(found, Reduce)) == (gathers, reductions)


def test_full_sharding_moves_weights_twice_a_micro_batch() -> None:
    found = scenario({"zero_stage": 3}, training={"global_batch_size": 64}, framework="torchtitan")
    head = (V * H + H) / WEIGHTS
    # Four micro-batches; the last group stays from its forward to its backward.
    assert times(found, Gather) == pytest.approx(4 * (2 - head))
    assert times(found, Reduce) == pytest.approx(4)
    kept = scenario({"zero_stage": 3, "reshard_after_forward": False}, training={"global_batch_size": 64}, framework="torchtitan")
    assert times(kept, Gather) == pytest.approx(4)


def test_deferred_gradients_are_reduced_once_a_step_and_add_up_whole_until_then() -> None:
    """torch FSDP2 under set_requires_gradient_sync(False): 16 bits and an fp32 sum read, the sum written, 32 bits a weight held."""
    plan, training = {"zero_stage": 3, "defer_reduction": True}, {"global_batch_size": 64}
    found = scenario(plan, training=training, framework="torchtitan")
    head = (V * H + H) / WEIGHTS
    assert times(found, Gather) == pytest.approx(4 * (2 - head))
    assert times(found, Reduce) == pytest.approx(1)
    layout = prepare(found, detail="op").layout
    plain = prepare(scenario({**plan, "defer_reduction": False}, training=training, framework="torchtitan"), detail="op").layout
    assert (layout.options.accumulation_bytes, plain.options.accumulation_bytes) == (10.0, 0.0)
    assert layout.options.reduce_copy_bytes == plain.options.reduce_copy_bytes / 4
    once = scenario(plan, training={"global_batch_size": 16}, framework="torchtitan")
    held = [dict(simulate(s).worst_rank.static).get("fsdp_buffers", 0.0) for s in (found, once)]
    assert held == [4.0 * WEIGHTS, 0.0]


def test_gathered_logits_cost_a_gather_and_a_loss_over_the_whole_vocabulary() -> None:
    """torchtitan's disable_loss_parallel: no all-reduces of the loss, every tensor rank does all of it."""
    head = {}
    for parallel in (True, False):
        layout = prepare(scenario({"tp": 4}, training={"loss_parallel": parallel}, framework="torchtitan"), detail="op").layout
        block = layout.stage_blocks[-1][-1]
        head[parallel] = {op.name: op.work for op in block.forward}
    gather, loss = head[False]["loss.all_gather"], {p: w["head/loss"] for p, w in head.items()}
    tokens = layout.training.micro_batch_size * layout.training.sequence_length
    assert gather.bytes == 2.0 * tokens * V  # type: ignore[union-attr]
    assert loss[False].bytes_moved == 4 * loss[True].bytes_moved  # type: ignore[union-attr]
    assert "loss.all_reduce" in head[True]
    assert "loss.all_reduce" not in head[False]


# -- what edges and masks set right ------------------------------------------------------------------------------------


def scaled_links(plan: dict[str, Any], model: dict[str, Any], scale: float) -> float:
    cluster = {"scale_up_bandwidth_scale": scale, "nic_bandwidth_scale": scale}
    return simulate(scenario(plan, model, nodes=1, cluster=cluster)).step_time_s


def test_overlap_hides_behind_compute_and_nothing_else() -> None:
    """Links so slow that there is next to nothing to hide behind: overlap may save no more than the compute there is."""
    slow = scaled_links({"tp": 8}, DENSE, 0.001)
    compute = scaled_links({"tp": 8}, DENSE, 1000.0)
    assert scaled_links({"tp": 8, "overlap_tp": True}, DENSE, 0.001) >= slow - compute


def test_experts_wait_for_their_tokens() -> None:
    """One micro-batch on one stage has no other micro-batch to hide behind."""
    slow = {"nodes": 1, "training": {"global_batch_size": 8}, "cluster": {"scale_up_bandwidth_scale": 0.005}}
    plain = simulate(scenario({"ep": 8}, EXPERTS, **slow)).step_time_s
    asked = simulate(scenario({"ep": 8, "overlap_ep": True}, EXPERTS, **slow)).step_time_s
    assert asked == pytest.approx(plain)


def attention_flops(found: Scenario) -> float:
    """Forward score and value FLOPs of one rank's layer, by its attention ops."""
    total = 0.0
    for op in layer_of(found).forward:
        work = op.work
        if isinstance(work, AttentionWork):
            seen = 0.5 if work.causal else 1.0
            pairs = work.sequence_q * work.sequence_kv * seen
            if work.window:
                pairs = min(pairs, float(work.sequence_q * work.window))
            total += 2.0 * work.batch * work.heads * pairs * (work.head_dim + work.v_head_dim)
    return total


@pytest.mark.parametrize("style", ["ring", "all_gather", "ulysses"])
def test_causal_attention_is_shared_out_evenly(style: str) -> None:
    assert attention_flops(scenario({"cp": 4, "cp_style": style})) == pytest.approx(attention_flops(scenario({})) / 4)


def test_a_window_is_the_same_under_every_context_parallel_style() -> None:
    windowed = {**DENSE, "sliding_window": 128}
    whole = attention_flops(scenario({}, windowed))
    shares = [attention_flops(scenario({"cp": 4, "cp_style": style}, windowed)) for style in ("ring", "all_gather", "ulysses")]
    assert shares == pytest.approx([whole / 4] * 3, rel=0.05)


def test_model_flops_count_the_window() -> None:
    windowed = prepare(scenario({}, {**DENSE, "sliding_window": 128})).layout
    pairs = S * 128 - 128 * 127 / 2
    forward = 2 * 2 * HEADS * D * pairs * windowed.network.layers.__len__()
    assert windowed.attention_model_flops == pytest.approx(3 * forward * 32, rel=0.01)


def test_an_encoder_sees_both_sides() -> None:
    model = {**DENSE, "num_key_value_heads": HEADS, "num_decoder_layers": 2}
    encoder = next(op.work for op in layer_of(scenario({}, model)).forward if isinstance(op.work, AttentionWork))
    assert not encoder.causal


@pytest.mark.parametrize(
    ("plan", "model", "said"),
    [
        ({"ep": 4, "overlap_ep": True}, EXPERTS, "plan.overlap_ep: exchanges are hidden as if"),
        ({"delay_wgrad": True}, DENSE, "plan.delay_wgrad is not modelled"),
    ],
)
def test_what_is_simplified_is_said(plan: dict[str, Any], model: dict[str, Any], said: str) -> None:
    notes = scenario_notes(scenario(plan, model))
    assert any(said in note for note in notes)
    assert not [note for note in scenario_notes(scenario({}, DENSE)) if said in note]
    assert not [note for note in scenario_notes(scenario({"overlap_tp": True, "overlap_ep": True}, DENSE)) if "overlap" in note]


# -- laws over random layouts ------------------------------------------------------------------------------------------

plans = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2, 4]), "cp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2, 4]),
     "sequence_parallel": st.booleans(), "cp_style": st.sampled_from(["ring", "all_gather", "ulysses"])}
)  # fmt: skip


@given(plan=plans, moe=st.booleans())
@settings(max_examples=60, deadline=None)
def test_directions_split_and_recomputation_conserve(plan: dict[str, Any], moe: bool) -> None:
    plan = plan if moe else {**plan, "ep": 1}
    model = EXPERTS if moe else DENSE
    layer = layer_of(scenario(plan, model))
    forward, backward = moved(layer.forward), moved(layer.backward)
    assert added(moved(layer.input_gradient), moved(layer.weight_gradient)) == pytest.approx(backward)
    assert wire(scenario({**plan, "recompute": "full"}, model))[1] == pytest.approx(added(forward, backward))
    # What an exchange brings, its backward takes back.
    assert backward.get(("ep", "dispatch"), 0.0) == forward.get(("ep", "combine"), 0.0)
    assert sum(amount for _, amount in backward.items()) >= sum(amount for _, amount in forward.items())


# -- torch's own collectives -------------------------------------------------------------------------------------------


@pytest.mark.torch
class TestTorch:
    """DTensor on a fake process group: torch decides which collectives the layouts need, both ways."""

    CP = 4

    @pytest.fixture
    def mesh(self) -> Any:
        torch = pytest.importorskip("torch")
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from simpar.live.rank_parallel import stop

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.CP)
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (self.CP,), mesh_dim_names=("cp",))
        stop()

    def moved(self, heads: tuple[int, ...], route: Any) -> tuple[Wire, Wire]:
        """Bytes by collective while `route` takes tensors [1, S / CP, heads, D] along, and their gradients back."""
        import torch
        from torch_llama import Collectives

        parts = [torch.zeros(1, S // self.CP, count, D, dtype=torch.bfloat16, requires_grad=True) for count in heads]
        with Collectives() as there:
            taken = [route(part) for part in parts]
        with Collectives() as back:
            for part in taken:
                part.backward(torch.ones_like(part))

        def wire_of(found: Any) -> Wire:
            return {("cp", kind): float(found.total(kind)) for kind in (AG, RS, A2A) if found.count(kind)}

        return wire_of(there), wire_of(back)

    def test_keys_and_values_gathered(self, mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
        from torch.distributed.tensor.debug import CommDebugMode

        def gathered(local: Any) -> Any:
            whole = DTensor.from_local(local, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()])

        with CommDebugMode() as seen:
            found = self.moved((KV, KV), gathered)
        assert {str(kind).rsplit(".", 1)[-1]: count for kind, count in seen.get_comm_counts().items()} == {
            "all_gather_into_tensor": 2, "reduce_scatter_tensor": 2,
        }  # fmt: skip
        _, _, forward, backward = TABLE["cp, gathered"]
        # The backward of the gather reduces; simpar's second gather is of keys and values that were not kept.
        assert found == (forward, {("cp", RS): backward["cp", RS]})

    def test_heads_for_sequence(self, mesh: Any) -> None:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        found = self.moved((HEADS, KV, KV, HEADS), lambda local: all_to_all_single_autograd(local.flatten(), None, None, mesh))
        assert found == TABLE["cp, by heads"][2:]

    def test_full_recomputation_under_sequence_parallelism(self, mesh: Any) -> None:
        """All gathers of a layer whose forward runs again."""
        import torch
        from torch.distributed.tensor.debug import CommDebugMode
        from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
        from torch_llama import Collectives, Shape, build

        from simpar.live.rank_parallel import tensor_parallel

        shape = Shape(H, 1, HEADS, KV, F, 1024)
        model = build(shape, first=False)
        tensor_parallel(model, mesh, sequence=True)
        x = torch.zeros(1, 256 // self.CP, H, dtype=torch.bfloat16, requires_grad=True)
        with CommDebugMode() as seen, Collectives() as on_wire, set_checkpoint_early_stop(False):
            checkpoint(model.layers["0"], x, use_reentrant=False).sum().backward()
        # torchtitan keeps gathered inputs, as torch's autograd does.
        found = scenario(
            {"tp": self.CP, "recompute": "full"}, shape.table(), training={"sequence_length": 256}, framework="torchtitan"
        )
        forward, backward = wire(found)
        assert on_wire.total("all_gather") == forward["tp", AG] + backward["tp", AG]
        assert seen.get_total_counts() >= on_wire.count("all_gather")
