"""What a scenario leaves to its cost, decided from prices and short simulations: layers per stage, micro-batches per replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpar.costs.mixed import MixedPricer
from simpar.costs.pricer import LayoutPricer
from simpar.errors import InputError, Violation
from simpar.parallel.layout import Layout
from simpar.parallel.shares import shared_layers, shared_microbatches
from simpar.result.interpret import Priced
from simpar.result.result import Result
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import hosts

MEMORY_ROUNDS = 8
"""Most times that layers are moved away from stages that have no memory for them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What deciding asks of the main path (step.py), at stage detail and without effects.

    Attributes:
        prepare: a decided scenario and the part whose replicas are meant -> its priced program.
        pricer: of a layout.
        step: a priced program -> its step.
        allows: whether the schedule of a scenario can have so many micro-batches.
    """

    prepare: Callable[[Scenario, int], Priced]
    pricer: Callable[[Layout], LayoutPricer | MixedPricer]
    step: Callable[[Priced], Result]
    allows: Callable[[Scenario, int], bool]


def decided(scenario: Scenario, probe: Probe) -> Scenario:
    """`scenario` with everything stated.

    Raises:
        InputError: no whole micro-batches share out a batch.
    """
    if scenario.plan.layers_per_stage == "auto":
        scenario = _planned(scenario, layers_per_stage=_layers(scenario, probe))
    if scenario.cluster.parts_hold == "replicas" and scenario.plan.replica_microbatches == "auto":
        scenario = _planned(scenario, replica_microbatches=_microbatches(scenario, probe))
    return scenario


def _planned(scenario: Scenario, **changes: object) -> Scenario:
    return scenario.model_copy(update={"plan": scenario.plan.model_copy(update=changes)})


def _kinds(scenario: Scenario) -> range:
    """The parts whose replicas differ."""
    return range(len(scenario.cluster.parts) if scenario.cluster.parts_hold == "replicas" else 1)


def _layers(scenario: Scenario, probe: Probe) -> tuple[int, ...]:
    """Layers of each stage that make the stages' times even, fewer where a stage has no memory for them."""
    few = _planned(scenario, layers_per_stage=None)
    if scenario.cluster.parts_hold == "replicas":
        few = _planned(few, replica_microbatches=(few.plan.pp,) * len(few.cluster.parts))
    priced = probe.prepare(few, 0)
    layout, pricer = priced.layout, probe.pricer(priced.layout)
    seconds = [pricer.layer_seconds(stage) for stage in range(layout.num_stages)]
    layers = len(layout.network.layers)
    costs, ends = [row[1 : layers + 1] for row in seconds], [0.0] * layout.num_stages
    begins = layout.embedding_stage
    ends[begins], ends[-1] = ends[begins] + seconds[begins][0], ends[-1] + seconds[-1][-1]
    most = [0] * begins + [layers] * (layout.num_stages - begins)
    fastest = best = shared_layers(costs, ends, most) or ()
    for _ in range(MEMORY_ROUNDS):
        chosen = _planned(few, layers_per_stage=best)
        results = [probe.step(probe.prepare(chosen, kind)) for kind in _kinds(few)]
        full = [m for result in results for m in result.memory if m.device_bytes > m.capacity_bytes]
        if not full:
            return best
        for memory in full:
            for stage in priced.held[memory.rank]:
                room = int(best[stage] * memory.capacity_bytes / memory.device_bytes)
                most[stage] = max(min(most[stage], room, best[stage] - 1), 0)
        found = shared_layers(costs, ends, most)
        if found is None:
            break
        best = found
    # Nothing fits: what would be fastest shows how much is missing.
    return fastest


def _microbatches(scenario: Scenario, probe: Probe) -> tuple[int, ...]:
    """Micro-batches of each replica of every part that make the replicas' times even.

    Raises:
        InputError: no whole numbers add up to the batch.
    """
    plan, training, lines = scenario.plan, scenario.training, []
    for kind in _kinds(scenario):
        # A step is a line in its micro-batches once the pipeline is full.
        given = (_planned(scenario, replica_microbatches=(rounds * plan.pp,) * len(scenario.cluster.parts)) for rounds in (2, 3))
        few, more = (probe.step(probe.prepare(chosen, kind)).timeline.makespan for chosen in given)
        lines.append((few - 2 * (more - few), (more - few) / plan.pp))
    total = training.global_batch_size // training.micro_batch_size
    counts = [len(host.replicas) for host in hosts(scenario)]
    shared = shared_microbatches(counts, total, lines, lambda _, count: probe.allows(scenario, count))
    if shared is None:
        text = " + ".join(f"{count} x m{i}" for i, count in enumerate(counts))
        rule = f"no whole micro-batches m0, m1, ... of at least 1 that the schedule can run share it out: {text} = {total}"
        right = "another batch, or plan.replica_microbatches"
        raise InputError([Violation("training.global_batch_size", training.global_batch_size, rule, right, scenario.file)])
    return shared
