"""Step times from the simulator, each scenario simulated once; layouts searched by whoever is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING

from simpar.errors import InputError, SimparError
from simpar.planning.steps import StepEstimate, infeasible
from simpar.specs.checks import check_scenario
from simpar.specs.scenario import Scenario
from simpar.workload.parameters import total_parameters

if TYPE_CHECKING:
    from simpar.result.result import Result

Search = Callable[[Scenario], Scenario | None]
"""The scenario with its best layout, or None when none fits."""

_PIPELINES = (1, 2, 4, 8, 16, 32, 64)
_PROVENANCE = ("measured", "interpolated", "model", "published", "peak-scaled", "assumed")


class SimulatedSteps:
    """`StepModel` over `simpar.simulate`. `search` finds layouts; without it a small set of layouts is tried."""

    def __init__(self, search: Search | None = None) -> None:
        self._search = search
        self._known: dict[tuple[str, bool], StepEstimate] = {}

    def estimate(self, scenario: Scenario) -> StepEstimate:
        """The step of this scenario as it is laid out."""
        return self._remembered(scenario, False, lambda: _estimate(scenario))

    def best_layout(self, scenario: Scenario) -> StepEstimate:
        """The step under the fastest layout found."""
        return self._remembered(scenario, True, lambda: self._searched(scenario))

    def _remembered(self, scenario: Scenario, search: bool, make: Callable[[], StepEstimate]) -> StepEstimate:
        key = (scenario.model_dump_json(exclude={"name", "description", "published"}), search)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _searched(self, scenario: Scenario) -> StepEstimate:
        best = (self._search or try_layouts)(scenario)
        if best is None:
            return infeasible("no layout fits the memory and divides model, batch and cluster")
        return self.estimate(best)


def _estimate(scenario: Scenario) -> StepEstimate:
    from simpar.simulate import simulate

    violations = check_scenario(scenario)
    if violations:
        return infeasible(*(str(violation) for violation in violations))
    try:
        result = simulate(scenario)
    except InputError as error:
        return infeasible(str(error))
    return from_result(scenario, result)


def from_result(scenario: Scenario, result: Result) -> StepEstimate:
    """A simulated step as the planner needs it."""
    reasons = []
    if not result.fits:
        used, have = result.worst_rank.device_bytes / 2**30, result.device_memory_bytes / 2**30
        reasons.append(f"memory: {used:.1f} GiB of {have:.1f} GiB on pipeline rank {result.worst_rank.rank}")
    plan, mesh = result.layout.plan, result.layout.mesh
    worst = max(result.provenance.values(), key=lambda p: _PROVENANCE.index(p) if p in _PROVENANCE else 0, default="")
    return StepEstimate(
        step_time_s=result.step_time_s,
        low_s=min(result.step_interval.low, result.step_time_s),
        high_s=max(result.step_interval.high, result.step_time_s),
        world_size=result.world_size,
        parameters=float(total_parameters(scenario.model)),
        fits=result.fits,
        reasons=tuple(reasons),
        mfu=result.mfu,
        utilisation={"compute": float(result.accounting.busy.mean()) / result.step_time_s},
        layout=f"tp {plan.tp} cp {plan.cp} pp {plan.pp} ep {plan.ep} dp {mesh.dp}",
        provenance=worst,
    )


def try_layouts(scenario: Scenario) -> Scenario | None:
    """The fastest that fits of the layouts with powers of two in tp and pp, everything else as in `scenario`.

    A fallback: the real search looks at far more, and certifies what it finds.
    """
    from simpar.simulate import simulate

    best: tuple[float, Scenario] | None = None
    fitting: set[tuple[int, int, int]] = set()
    for candidate in candidates(scenario):
        shape = (candidate.plan.tp, candidate.plan.pp, candidate.plan.cp)
        if shape in fitting and candidate.plan.recompute == "full":
            continue  # it fits without recomputing everything, which is faster
        try:
            result = simulate(candidate, detail="stage", engine="longest_path")
        except SimparError:
            continue
        if result.fits:
            fitting.add(shape)
        if result.fits and (best is None or result.step_time_s < best[0]):
            best = (result.step_time_s, candidate)
    return best[1] if best else None


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """The layout as written where it suits, then others that divide model, batch and cluster."""
    if not check_scenario(scenario):
        yield scenario
    domain = scenario.hardware.domain_size
    contexts = sorted({1, scenario.plan.cp})
    for tp, pp, cp, recompute in product((1, 2, 4, 8), _PIPELINES, contexts, ("none", "full")):
        if tp > domain:
            continue
        changes = {
            "tp": tp, "pp": pp, "cp": cp, "dp": None, "recompute": recompute, "schedule": "auto", "virtual_stages": 1,
            "layers_per_stage": None, "first_stage_less_layers": 0, "last_stage_less_layers": 0,
            "embedding_alone": False, "shard_size": None,
        }  # fmt: skip
        plan = scenario.plan.model_copy(update=changes)
        candidate = scenario.model_copy(update={"plan": plan})
        if not check_scenario(candidate):
            yield candidate
