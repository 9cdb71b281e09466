"""What a step contains, by numbers computed by hand: bytes of memory-bound kernels, what waits for what, who waited for whom."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import pytest

from simpar.costs.block_price import hidden_share, price_list, price_pair
from simpar.costs.price import Price, Provenance
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import OptimizerStep
from simpar.parallel.work import Collective, Gemm, LocalOp, MemoryWork
from simpar.program.builder import ProgramBuilder
from simpar.program.program import OpKind, PriceTable, Stream
from simpar.result.accounting import account, bubble_fraction
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models, prepare, run, simulate

S, H, HEADS, KV, D, F, V, E, TOP, WIDTH = 2048, 512, 8, 4, 64, 1024, 32000, 8, 2, 768
DENSE: Final = {
    "hidden_size": H, "intermediate_size": F, "num_hidden_layers": 4, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": D, "vocab_size": V,
}  # fmt: skip
EXPERTS: Final = {**DENSE, "moe": {"num_experts": E, "num_experts_per_tok": TOP, "moe_intermediate_size": WIDTH}}


def scenario(plan: dict[str, Any], model: dict[str, Any] = DENSE, *, gpus: int = 8, **more: Any) -> Scenario:
    nodes = max(gpus // 8, 1)
    cluster = {"hardware": "dgx-h100", "num_nodes": nodes, "num_gpus": gpus, **more.pop("cluster", {})}
    training = {"sequence_length": S, "global_batch_size": 4 * gpus, **more.pop("training", {})}
    table = {"model": model, "framework": "megatron-core", "cluster": cluster, "plan": plan, "training": training}
    return make_scenario({**table, **more})


def layer_of(found: Scenario) -> LocalBlock:
    blocks = [b for stage in prepare(found).layout.stage_blocks for b in stage]
    return next(b for b in blocks if not b.outside_layers)


def traffic(ops: Any) -> dict[str, float]:
    """Class of memory-bound kernels -> bytes."""
    found: Counter[str] = Counter()
    for op in ops:
        if isinstance(op.work, MemoryWork):
            found[op.work.kernel] += op.work.bytes_moved
    return dict(found)


T = S * H
QK = S * (HEADS + KV) * D


def test_bytes_of_a_dense_layer() -> None:
    layer = layer_of(scenario({}))
    # Two norms and two residual additions; each tensor of 16 bits: norm read and write, residual two reads and a write,
    # rotary embedding read and write, SwiGLU two halves read and one written.
    assert traffic(layer.forward) == {
        "norm": 2 * 4 * T,
        "residual": 2 * 6 * T,
        "rope": 4 * QK,
        "gate": 2 * S * 2 * F + 2 * S * F,
    }
    # Norm: gradient, input and result, as its measured rate counts them; residual: two gradients read and their sum written;
    # SwiGLU: both halves read and written, the gradient read.
    assert traffic(layer.backward) == {"norm_backward": 2 * 6 * T, "residual": 2 * 6 * T, "rope": 4 * QK,
                                       "gate_backward": 4 * S * 2 * F + 2 * S * F}  # fmt: skip


def test_bytes_of_routing() -> None:
    layer = layer_of(scenario({}, EXPERTS))
    rows = TOP * S
    # Rows are read and written on their way to the experts and on their way back, the same for their gradients.
    assert traffic(layer.forward)["permute"] == 2 * 4 * rows * H
    assert traffic(layer.backward)["permute"] == 2 * 4 * rows * H
    assert traffic(layer.forward)["softmax"] == traffic(layer.backward)["softmax"] == 16 * S * E
    assert traffic(layer.forward)["gate"] == 2 * rows * 2 * WIDTH + 2 * rows * WIDTH


def test_layernorm_keeps_two_statistics_rmsnorm_one() -> None:
    rms, layer = (layer_of(scenario({}, {**DENSE, "norm": norm})) for norm in ("rmsnorm", "layernorm"))
    assert layer.saved_bytes - rms.saved_bytes == 2 * 4 * S


def test_dropout_keeps_a_byte_mask() -> None:
    plain, dropped = (layer_of(scenario({}, training={"dropout": p})) for p in (0.0, 0.1))
    assert traffic(dropped.forward)["residual"] - traffic(plain.forward)["residual"] == 2 * T
    assert traffic(dropped.backward)["residual"] - traffic(plain.backward)["residual"] == 2 * 5 * T


def test_heads_of_keys_and_values_are_replicated_over_more_tensor_ranks() -> None:
    """Eight ranks, eight query heads, four of keys and values: one of each on every rank."""
    layer = layer_of(scenario({"tp": 8}))
    assert layer.dense_parameters == H * 3 * D + D * H + 3 * H * F // 8 + 2 * H


# -- what waits for what -----------------------------------------------------------------------------------------------


def test_weight_gradients_of_gathered_inputs_wait_for_them() -> None:
    """Under sequence parallelism queries, keys, values and the first feed-forward product gather their input again."""
    backward = layer_of(scenario({"tp": 4})).backward
    waiting = []
    for op in backward:
        if isinstance(op.work, Gemm) and op.work.direction == "wgrad":
            gathers = [d for d in op.deps if isinstance(backward[d].work, Collective) and backward[d].work.name == "all_gather"]
            waiting.append((op.work.k, len(gathers)))
    # Column-parallel products contract the hidden size; the row-parallel ones keep their own inputs.
    assert sorted(waiting) == sorted([(H, 1), (H, 1), (HEADS * D // 4, 0), (F // 4, 0)])


def test_every_rank_waits_for_the_norm_of_all_gradients() -> None:
    found = scenario({"zero_stage": 0}, cluster={})
    priced = prepare(found)
    layout = priced.layout
    pricer = LayoutPricer(layout, *cost_models(found, layout.hardware)).bind(
        priced.schedule.stage_to_rank, range(priced.schedule.num_stages)
    )
    alone = prepare(scenario({"zero_stage": 0}, gpus=1))
    single = LayoutPricer(alone.layout, *cost_models(found, layout.hardware)).bind((0,), (0,))
    # The same weights on one GPU and on eight: one all-reduce of a number more.
    more = pricer.price(OptimizerStep(0)).seconds - single.price(OptimizerStep(0)).seconds
    reduced = pricer.collectives.time("all_reduce", 4.0, layout.placement("world")).seconds * layout.calibration.communication
    assert more == pytest.approx(reduced)
    assert reduced > 1e-6


def op(name: str, seconds: float, *deps: int, stream: str = "compute") -> LocalOp:
    return LocalOp(name, stream, MemoryWork("copy", seconds), tuple(deps), 1)


def by_bytes(one: LocalOp) -> Price:
    assert isinstance(one.work, MemoryWork)
    return Price(one.work.bytes_moved, one.work.bytes_moved, one.work.bytes_moved, Provenance.MODEL)


def test_of_two_ready_passes_the_backward_goes_first() -> None:
    """Its exchange then runs beside the forward: 1 + 5 + 1 s; the other way round the forward's second comes on top."""
    backward = (op("a.dgrad", 1.0), op("exchange", 5.0, 0, stream="ep"), op("b.dgrad", 1.0, 1))
    forward = (op("c", 1.0),)
    assert price_pair(forward, backward, by_bytes).seconds == 7.0
    assert price_pair((op("c", 3.0),), backward, by_bytes).terms == (("memory_bound", 5.0), ("ep", 2.0))


def test_compute_beside_an_exchange_lasts_longer_by_the_sms_that_it_holds() -> None:
    """1 + 5 + 1 s with 3 s of compute beside the exchange: with a quarter of the SMs less 0.25 x (5 - 2 s of waiting) more, of
    which the memory-bound kernels (2 s of 5) feel nothing."""
    backward = (op("a.dgrad", 1.0), op("exchange", 5.0, 0, stream="ep"), op("b.dgrad", 1.0, 1))
    product = LocalOp("c", "compute", Gemm(1, 1, 1, "forward", "bf16"), (), 1)

    def price_of(one: LocalOp) -> Price:
        return by_bytes(one) if one is not product else Price(3.0, 3.0, 3.0, Provenance.MODEL)

    pair = price_pair((product,), backward, price_of, 0.25)
    assert pair.seconds == pytest.approx(7.45)
    assert dict(pair.terms) == pytest.approx({"matmul": 3.0, "memory_bound": 2.0, "ep": 2.0, "interference": 0.45})
    # Alone 2 s of compute and 5 of waiting, and 3 s: of the 3 s that the pair would save 0.45 are lost.
    own = [price_list(ops, price_of, backward=later) for ops, later in (((product,), False), (backward, True))]
    assert hidden_share(own, pair) == pytest.approx((10.0 - 7.45) / 5.0)


@pytest.mark.parametrize(("dispatcher", "sms"), [("deepep", 20), ("hybridep", 32), ("alltoall", 16)])
def test_a_dispatcher_holds_its_sms(dispatcher: str, sms: int) -> None:
    """Of an H100's 132: Megatron-Core's default, Megatron-Bridge's recipes, NCCL's channels for four ranks of a node."""
    found = scenario(
        {"tp": 1, "pp": 2, "ep": 4, "ep_dispatcher": dispatcher, "overlap_ep": True, "virtual_stages": 2}, model="mixtral-8x7b"
    )
    layout = prepare(found).layout
    pricer = LayoutPricer(layout, *cost_models(found, layout.hardware))
    block = next(b for blocks in layout.stage_blocks for b in blocks if "expert_matmul" in dict(pricer.block(b, "F").terms))
    assert pricer._slowed_by_exchanges(block) == pytest.approx(sms / (132 - sms))


def test_exposed_time_is_what_compute_waits() -> None:
    ops = (op("a", 1.0), op("x", 4.0, 0, stream="tp"), op("b", 3.0), op("c", 1.0, 1), op("y", 2.0, 3, stream="cp"))
    price = price_list(ops, by_bytes, backward=False)
    assert price.seconds == 8.0
    assert dict(price.terms) == {"memory_bound": 5.0, "tp": 1.0, "cp": 2.0}
    assert dict(price.communication_s) == {"tp": 4.0, "cp": 2.0}


def offloaded(fraction: float, link: float) -> Any:
    table = scenario({"offload": {"activations": fraction}}, {**DENSE, "num_hidden_layers": 6}, gpus=1,
                     training={"global_batch_size": 1})  # fmt: skip
    priced = prepare(table)
    seconds = priced.table.seconds.copy()
    for index, key in enumerate(priced.program.price_keys):
        if type(key).__name__ == "Offload":
            seconds[index] = link
    return priced.program, run(type(priced)(priced.layout, priced.schedule, priced.program, priced.prices,
                                            PriceTable(seconds, 0.0 * seconds), priced.held))  # fmt: skip


def test_reloads_run_one_layer_ahead() -> None:
    program, line = offloaded(1.0, 1e-5)
    loads = [i for i in range(program.num_ops) if program.kind[i] == OpKind.OFFLOAD and "up" in stream_of(program, i)]
    backwards = [i for i in range(program.num_ops) if program.kind[i] == OpKind.BACKWARD]
    assert len(loads) == len(backwards) >= 6
    for position, (load, backward) in enumerate(zip(loads, backwards, strict=True)):
        assert line.finish[load] <= line.start[backward]
        if position:
            # It is there when the backward before it ends: nothing waits for such a short transfer.
            assert line.finish[load] <= line.finish[backwards[position - 1]]
        if position > 1:
            # ... and no earlier than there is room, when the one before that has ended.
            assert line.start[load] >= line.finish[backwards[position - 2]]


def stream_of(program: Any, index: int) -> str:
    ptr, streams = program.op_streams
    return " ".join(program.streams[s].kind for s in streams[ptr[index] : ptr[index + 1]])


# -- who waited for whom -----------------------------------------------------------------------------------------------


def test_a_wait_for_a_reduction_is_no_longer_than_it_could_run() -> None:
    """Rank 1 ends after 1 s and waits for the sum with rank 0, which ends after 4 s: 3 s of bubble, 2 s of data parallelism."""
    builder = ProgramBuilder("two ranks")
    compute = [Stream(role, "compute") for role in (0, 1)]
    for role, seconds in ((0, 4.0), (1, 1.0)):
        builder.add(("b", role), kind=OpKind.BACKWARD, role=role, streams=[compute[role]], price=seconds)
    builder.add("reduce", kind=OpKind.REDUCE_GRADIENTS, role=0, streams=[Stream(0, "dp"), Stream(1, "dp")], price=2.0,
                deps=[("b", 0), ("b", 1)])  # fmt: skip
    for role in (0, 1):
        builder.add(("u", role), kind=OpKind.OPTIMIZER, role=role, streams=[compute[role]], price=0.5, deps=["reduce"])
    program = builder.build()
    prices = np.array([float(key) for key in program.price_keys])  # type: ignore[arg-type]
    from simpar.engine.longest_path import longest_path

    found = account(program, longest_path(program, PriceTable(prices, 0.0 * prices)))
    assert found.makespan == 6.5
    assert found.waits["dp"].tolist() == [2.0, 2.0]
    assert found.waits["bubble"].tolist() == [0.0, 3.0]
    assert found.busy.tolist() == [4.5, 1.5]


@pytest.mark.parametrize(("waits", "phase_s", "inside"), [(True, 2.0, [0.0, 1.0]), (False, 1.0, [0.0, 0.0])])
def test_idling_outside_the_pipeline_phase_is_no_bubble(waits: bool, phase_s: float, inside: list[float]) -> None:
    """Two forwards of 1 s; the first rank's update takes 5 s, the second's 1 s: of its 4 s of waits 1 s is the pipeline's."""
    builder = ProgramBuilder("two stages")
    compute = [Stream(role, "compute") for role in (0, 1)]
    builder.add("f0", kind=OpKind.FORWARD, role=0, streams=[compute[0]], price=1.0)
    builder.add("f1", kind=OpKind.FORWARD, role=1, streams=[compute[1]], price=1.0, deps=["f0"])
    builder.add("u0", kind=OpKind.OPTIMIZER, role=0, streams=[compute[0]], price=5.0)
    builder.add("u1", kind=OpKind.OPTIMIZER, role=1, streams=[compute[1]], price=1.0)
    program = builder.build()
    prices = np.array([float(key) for key in program.price_keys])  # type: ignore[arg-type]
    from simpar.engine.longest_path import longest_path

    found = account(program, longest_path(program, PriceTable(prices, 0.0 * prices)), waits=waits)
    assert found.waits["bubble"].tolist() == [0.0, 4.0]
    assert found.pipeline_s == phase_s
    assert found.phase_bubble.tolist() == inside
    assert bubble_fraction(found) == sum(inside) / 2 / phase_s


def test_bubbles_of_a_pipeline_are_no_data_parallel_time() -> None:
    """Links a thousand times as fast leave no data-parallel wait to speak of, and all of the bubble."""
    fast = {"scale_up_bandwidth_scale": 1000.0, "nic_bandwidth_scale": 1000.0}
    result = simulate(scenario({"pp": 4, "dp": 2, "overlap_grad_reduce": False}, cluster=fast, training={"global_batch_size": 8}))
    assert result.breakdown["bubble"] > 0.1 * result.step_time_s
    assert result.exposed_communication_s["dp"] < 0.05 * result.breakdown["bubble"]


# -- exchanges beside other compute --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("interleaved", 2), ("dualpipe", 1)])
def test_an_exchange_beside_other_compute_hides_alike_at_every_detail(schedule: str, virtual_stages: int) -> None:
    """Layer detail takes what is hidden off a block's price; at op detail the block's next product does not wait for it."""
    plan = {"pp": 2, "ep": 4, "etp": 1, "dp": 4, "schedule": schedule, "virtual_stages": virtual_stages}
    large = {"sequence_length": 8192, "micro_batch_size": 4, "global_batch_size": 128}  # so that the host is not the slower side
    waits = simulate(scenario(plan, EXPERTS, training=large), detail="layer")
    beside = scenario({**plan, "overlap_ep": True}, EXPERTS, training=large)
    layer, op = (simulate(beside, detail=detail) for detail in ("layer", "op"))
    busy = waits.communication_s["ep"]
    assert layer.communication_s["ep"] == pytest.approx(busy)
    assert op.communication_s["ep"] == pytest.approx(busy)
    assert op.exposed_communication_s["ep"] <= layer.exposed_communication_s["ep"] + 1e-9 * op.step_time_s
    assert layer.exposed_communication_s["ep"] < 0.8 * waits.exposed_communication_s["ep"]
    assert op.step_time_s <= layer.step_time_s * (1 + 1e-9) < waits.step_time_s
