"""Steps for the page: as `simulate` gives them, sooner.

A slider that leaves what waits for what as it is does not have it worked out again; and a step without effects is replayed by
the engine that needs no events, to the same numbers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import fields, replace

import numpy as np

from simpar.parallel.layout import Layout
from simpar.program.lower import lower, one_queue
from simpar.program.pipelines import Detail
from simpar.program.program import Program
from simpar.result.result import Result
from simpar.schedules import SCHEDULES, Schedule
from simpar.specs.effects import EffectsSpec
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import rank_gpus
from simpar.step import interpret, prepare, run, simulate

PRICES_ONLY = {
    "tp", "sequence_parallel", "cp", "cp_style", "ep", "etp", "dp", "shard_size", "recompute", "overlap_tp", "overlap_ep",
    "ep_dispatcher", "placement",
}  # fmt: skip
"""Fields of a plan that change what ops cost, not which there are and what they wait for, beyond what `shape_of` asks for."""
_KEPT = 8


def shape_of(layout: Layout, schedule: Schedule, detail: Detail) -> tuple[object, ...]:
    """Everything that `lower` reads of a folded layout, but how many ranks a role stands for."""
    scenario = layout.scenario
    stages = range(layout.num_stages)
    return (
        scenario.name, scenario.framework, scenario.framework_version, detail,
        layout.plan.model_dump_json(exclude=PRICES_ONLY), layout.num_stages, layout.replicas,
        schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.stage_to_rank,
        layout.training.optimizer, layout.data_ranks > 1, layout.network.tied, *(one_queue(layout.on(s)) for s in stages),
        tuple(len(b) for b in layout.stage_blocks),
        tuple(layout.buckets(s, bucketed=bucketed) for s in stages for bucketed in (False, True)),
    )  # fmt: skip


def with_ranks(program: Program, ranks: tuple[int, ...]) -> Program:
    """`program` where each role stands for another number of ranks; what was worked out about it is kept."""
    if program.rank_count == ranks:
        return program
    found = replace(program, rank_count=ranks)
    own = {field.name for field in fields(program)}
    found.__dict__.update({name: value for name, value in program.__dict__.items() if name not in own})
    return found


class Programs:
    """`lower`, remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[object, ...], Program] = OrderedDict()

    def __call__(self, layout: Layout, schedule: Schedule, detail: Detail = "layer", *, expand: bool = False) -> Program:
        """As `lower`."""
        name = layout.plan.schedule
        fixed = name == "auto" or (name in SCHEDULES and not SCHEDULES[name].wants_times)
        if not fixed or expand or detail == "op":  # a file's order, one that depends on prices, ops of the blocks' own
            return lower(layout, schedule, detail, expand=expand)
        key = shape_of(layout, schedule, detail)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = lower(layout, schedule, detail)
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return with_ranks(found, rank_gpus(layout.scenario))


def step_of(scenario: Scenario, lowering: Programs) -> Result:
    """`simulate(scenario, detail="stage")`: the same numbers, whichever engine gave them.

    Raises:
        InputError: the plan cannot be run at all.
    """
    if scenario.effects != EffectsSpec() or scenario.cluster.parts_hold == "replicas":
        return simulate(scenario, detail="stage", lowering=lowering)
    priced = prepare(scenario, detail="stage", lowering=lowering)
    slowed = bool(np.any(priced.table.interference > 0.0))
    return interpret(priced, run(priced, "discrete_event" if slowed else "longest_path"))
