"""Steps for the page: as `simulate` gives them, sooner.

A slider that leaves what waits for what as it is does not have it worked out again; and a step without effects is replayed by
the engine that needs no events, to the same numbers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from simpar.parallel.layout import Layout
from simpar.program.lower import lower
from simpar.program.pipelines import Detail
from simpar.program.program import FloatArray, Program
from simpar.program.shared import program_key, with_ranks
from simpar.result.interpret import interpret
from simpar.result.result import Result
from simpar.schedules import SCHEDULES, Schedule
from simpar.specs.effects import EffectsSpec
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import rank_gpus
from simpar.step import prepare, run, simulate

_KEPT = 8


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
        key = program_key(layout, schedule, detail)
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
    return priced_step(scenario, lowering)[0]


def priced_step(scenario: Scenario, lowering: Programs) -> tuple[Result, FloatArray | None]:
    """`step_of`, and what each op takes when nothing slows it, float array [ops]; None where several programs or chance decide.

    Raises:
        InputError: as `step_of`.
    """
    if scenario.effects != EffectsSpec() or scenario.cluster.parts_hold == "replicas":
        return simulate(scenario, detail="stage", lowering=lowering), None
    priced = prepare(scenario, detail="stage", lowering=lowering)
    slowed = bool(np.any(priced.table.interference > 0.0))
    result = interpret(priced, run(priced, "discrete_event" if slowed else "longest_path"))
    return result, priced.table.seconds[priced.program.price]
