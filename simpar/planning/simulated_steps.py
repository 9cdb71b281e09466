"""Step times from the simulator, each scenario simulated once; layouts searched by whoever is asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from simpar.errors import InputError
from simpar.model.ledger import total_parameters
from simpar.planning.steps import Search, StepEstimate, infeasible
from simpar.specs.checks import check_scenario
from simpar.specs.scenario import Scenario

if TYPE_CHECKING:
    from simpar.result.result import Result

_PROVENANCE = ("measured", "interpolated", "model", "published", "peak-scaled", "assumed")


class SimulatedSteps:
    """`StepModel` over `simpar.step`; `search` finds layouts where they are to be searched."""

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
        if self._search is None:
            return infeasible("layouts are not searched here")
        best = self._search(scenario)
        if best.scenario is None:
            return infeasible(*best.reasons)
        return replace(self.estimate(best.scenario), layout=best.layout, found=best.note, scenario=best.scenario)


def _estimate(scenario: Scenario) -> StepEstimate:
    from simpar.step import simulate

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
    worst = max(result.provenance.values(), key=lambda p: _PROVENANCE.index(p) if p in _PROVENANCE else 0, default="")
    return StepEstimate(
        step_time_s=result.step_time_s,
        low_s=min(result.step_interval.low, result.step_time_s),
        high_s=max(result.step_interval.high, result.step_time_s),
        parameters=float(total_parameters(scenario.model)),
        fits=result.fits,
        reasons=tuple(reasons),
        mfu=result.mfu,
        utilisation={"compute": float(result.accounting.busy.mean()) / result.step_time_s},
        layout=_layout_text(result),
        provenance=worst,
    )


def _layout_text(result: Result) -> str:
    """The layout in a line, only what is in use."""
    plan, mesh = result.layout.plan, result.layout.mesh
    words = [f"{name}{value}" for name, value in (("tp", plan.tp), ("cp", plan.cp), ("pp", plan.pp), ("ep", plan.ep)) if value > 1]
    words.append(f"dp{mesh.dp}")
    if plan.pp > 1:
        words.append(result.schedule_name + (f" v{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    recompute = plan.recompute if isinstance(plan.recompute, str) else "by module"
    words += [f"mbs{result.layout.training.micro_batch_size}", f"zero{plan.zero_stage}"]
    return " ".join([*words, *([f"recompute {recompute}"] if recompute != "none" else [])])
