"""SimAI's workload text (AICB's HYBRID_TRANSFORMER_FWD_IN_BCKWD, a dialect of ASTRA-sim 1): a stage's layers as rows.

A row holds what runs up to a collective of the forward, and up to the backward's that answers it, weight gradients included.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from simpar.errors import InputError, Violation
from simpar.parallel.keys import BlockOp, Gather, Reduce
from simpar.parallel.pipeline import boundary_bytes
from simpar.parallel.traffic import calls_of
from simpar.result.interpret import Priced
from simpar.specs.scenario import Scenario
from simpar.step import prepare, run

_TYPES: Final = {"all_reduce": "ALLREDUCE", "all_gather": "ALLGATHER", "reduce_scatter": "REDUCESCATTER", "all_to_all": "ALLTOALL"}
_SUFFIX: Final = {"tp": "", "dp": "", "shard": "", "ep": "_EP", "edp": "_DP_EP", "expert_shard": "_DP_EP"}
_NONE: Final = ("NONE", 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """Compute up to a collective: nanoseconds, its type and its bytes."""

    compute_ns: int
    kind: str
    bytes: int


def export(scenario: Scenario) -> dict[str, str]:
    """File name -> text: the workload.

    Raises:
        InputError: parts of several kinds, or a dimension that the format has no group for.
    """
    scenario.check_one_kind("the format has one kind of rank")
    plan = scenario.plan
    if plan.cp > 1:
        raise InputError([Violation("plan.cp", plan.cp, "SimAI's workload has no group of context-parallel ranks", "1")])
    if plan.pp > 1:
        # Every stage is taken for the first one there.
        training = scenario.training
        own = {"plan.encoder_stages": plan.encoder_stages, "training.images.per_sample": training.images.per_sample,
               "training.audio.per_sample": training.audio.per_sample}  # fmt: skip
        rule = "SimAI's workload has the same layers on every stage, and encoders are on the first ones"
        if found := [Violation(path, value, rule, "0, or plan.pp = 1") for path, value in own.items() if value]:
            raise InputError(found)
    priced = prepare(scenario, detail="op")
    rows = [*_states(priced), *_layers(priced)]
    layout = priced.layout
    send = round(boundary_bytes(layout.boundary_bytes[0], plan)) if plan.pp > 1 else 0
    head = (
        f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {plan.tp} ep: {plan.ep} pp: {plan.pp} "
        f"vpp: {plan.virtual_stages} ga: {layout.num_microbatches} all_gpus: {layout.mesh.world_size} "
        f"checkpoints: 0 checkpoint_initiates: 0 pp_comm: {send}"
    )
    return {"simai.txt": "\n".join([head, str(len(rows)), *("\t".join(map(str, row)) for row in rows)]) + "\n"}


def _states(priced: Priced) -> list[tuple[object, ...]]:
    """Gathers of parameters and reductions of gradients of the first rank, once a step."""
    found: list[tuple[object, ...]] = []
    for key, count in _keys(priced).items():
        if isinstance(key, Gather | Reduce):
            name = "param_gather" if isinstance(key, Gather) else "grad_reduce"
            for call in calls_of(priced.layout, key):
                row = (name, -1, 1, *_NONE, 1, *_NONE, 1, _type(call.name, call.dimension), round(call.bytes), 100)
                found += [row] * count
    return found


def _keys(priced: Priced) -> dict[object, int]:
    program = priced.program
    found: dict[object, int] = defaultdict(int)
    for op in range(program.num_ops):
        if program.role[op] == 0:
            found[program.price_keys[program.price[op]]] += 1
    return found


def _layers(priced: Priced) -> list[tuple[object, ...]]:
    """Rows of the first rank's layers, for one micro-batch of every accumulation step."""
    program, timeline = priced.program, run(priced)
    passes: dict[tuple[int, int, str], list[tuple[int, float, object]]] = defaultdict(list)
    for op in range(program.num_ops):
        key = program.price_keys[program.price[op]]
        if program.role[op] == 0 and program.microbatch[op] == 0 and isinstance(key, BlockOp):
            phase = "F" if key.phase == "F" else "B"
            seconds = float(timeline.finish[op]) - float(timeline.start[op])
            passes[key.stage, key.block, phase].append((op, seconds, key))
    rows: list[tuple[object, ...]] = []
    for stage, block in dict.fromkeys((s, b) for s, b, _ in passes):
        forward = _segments(priced, passes[stage, block, "F"])
        backward = _segments(priced, passes[stage, block, "B"])
        empty = Segment(0, *_NONE)
        for index in range(max(len(forward), len(backward))):
            there = forward[index] if index < len(forward) else empty
            back = backward[-1 - index] if index < len(backward) else empty
            name = f"layer{stage}.{block}.{index}"
            rows.append((name, -1, there.compute_ns, there.kind, there.bytes, back.compute_ns, back.kind, back.bytes, 0, *_NONE, 0))
    return rows * priced.layout.num_microbatches


def _segments(priced: Priced, ops: list[tuple[int, float, object]]) -> list[Segment]:
    found, compute = [], 0.0
    for _, seconds, key in ops:
        calls = calls_of(priced.layout, key)
        if not calls:
            compute += seconds
            continue
        found.append(Segment(round(compute * 1e9), _type(calls[0].name, calls[0].dimension), round(calls[0].bytes)))
        compute = 0.0
    return [*found, Segment(round(compute * 1e9), *_NONE)] if compute or not found else found


def _type(name: str, dimension: str) -> str:
    return _TYPES.get(name, "ALLREDUCE") + _SUFFIX.get(dimension, "")
