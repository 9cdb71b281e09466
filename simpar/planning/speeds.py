"""How fast each phase runs on a cluster size: from a simulated step, or from a published figure scaled to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.planning.notes import Notes, kind_of
from simpar.planning.run_model import Piece
from simpar.planning.steps import StepEstimate, StepModel
from simpar.specs.base import data_dir, read_toml
from simpar.specs.planfile import BatchStep, Phase, PlanFile
from simpar.specs.scenario import Scenario, apply_override, make_scenario

SCALES = ("memory_scale", "scale_up_bandwidth_scale", "nic_bandwidth_scale")
"""What-if fields that plan and scenario share."""


def phase_name(plan: PlanFile, index: int) -> str:
    """The name of a phase, or its number."""
    return plan.phases[index].name or f"phase {index + 1}"


def scenario_path(plan: PlanFile, name: str) -> Path:
    """The file of scenario `name`: beside the plan, or among the shipped ones.

    Raises:
        InputError: there is none.
    """
    beside = Path(plan.file).parent / name
    if beside.is_file() or Path(name).is_absolute():
        return beside
    shipped = data_dir("scenarios")
    for candidate in (shipped / name, shipped / f"{name}.toml"):
        if candidate.is_file():
            return candidate
    right = f"looked at {beside} and in {shipped}"
    raise InputError([Violation("phases.scenario", name, "no such scenario", right, plan.file)])


def phase_scenario(plan: PlanFile, phase: Phase, nodes: int | None = None, batch: int | None = None) -> Scenario:
    """The scenario of `phase` on the plan's cluster of `nodes` nodes (none = the plan's), at its own batch or `batch`.

    Data parallelism follows the cluster.

    Raises:
        InputError: the scenario breaks a rule.
    """
    path = scenario_path(plan, str(phase.scenario))
    table: dict[str, Any] = read_toml(path)
    cluster = _cluster_changes(plan, nodes)
    training = {"sequence_length": phase.sequence_length, "global_batch_size": batch or phase.global_batch_size}
    training = {name: value for name, value in training.items() if value}
    if phase.layout == "search":
        for assignment in phase.set:
            apply_override(table, assignment)
        # The layout as written need not suit this cluster or batch: it is only where the search starts.
        written = make_scenario(table, file=str(path))
        changes = {
            "cluster": written.cluster.model_copy(update=cluster | {"num_gpus": None}),
            "training": written.training.model_copy(update=training),
            "plan": written.plan.model_copy(update={"dp": None}),
        }
        return written.model_copy(update=changes)
    table["cluster"] = {k: v for k, v in table.get("cluster", {}).items() if k != "num_gpus"} | cluster
    table["training"] = dict(table.get("training", {})) | training
    table["plan"] = {key: value for key, value in table.get("plan", {}).items() if key != "dp"}
    for assignment in phase.set:
        apply_override(table, assignment)
    return make_scenario(table, file=str(path))


def _cluster_changes(plan: PlanFile, nodes: int | None) -> dict[str, Any]:
    """Fields of a scenario's cluster that the plan decides."""
    changes: dict[str, Any] = {"num_nodes": nodes or plan.cluster.num_nodes}
    if plan.cluster.hardware:
        changes["hardware"] = plan.cluster.hardware
    changes |= plan.cluster.fabric.model_dump(exclude_none=True)
    return changes | {name: scale for name in SCALES if (scale := getattr(plan.cluster, name)) != 1.0}


def given_tokens_per_s(phase: Phase, gpus: int) -> float:
    """Throughput of a phase with a given speed, scaled linearly to `gpus` GPUs."""
    if phase.tokens_per_s_per_gpu is not None:
        return phase.tokens_per_s_per_gpu * gpus
    if phase.flops is not None:
        return phase.flops.flops_per_s_per_gpu * gpus / phase.flops.flops_per_token(phase.sequence_length or 1)
    if phase.gpu_hours is not None:
        return phase.tokens / (phase.gpu_hours * 3600.0) * gpus
    share = gpus / (phase.rated_gpus or gpus)
    if phase.tokens_per_s is not None:
        return phase.tokens_per_s * share
    return (phase.global_batch_size or 0) * (phase.sequence_length or 0) / (phase.step_time or 1.0) * share


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of a plan on one cluster size."""

    plan: PlanFile
    nodes: int
    gpus: int
    steps: StepModel
    notes: Notes

    def pieces(self) -> tuple[Piece, ...]:
        """The whole training: for every phase its ramp, then the rest of it."""
        result = []
        for index, phase in enumerate(self.plan.phases):
            left = phase.tokens
            for ramp in phase.batch_ramp:
                result.append(self._piece(index, ramp.tokens, ramp))
                left -= ramp.tokens
            if left > 0:
                result.append(self._piece(index, left))
        return tuple(result)

    def _piece(self, index: int, tokens: float, ramp: BatchStep | None = None) -> Piece:
        if self.plan.phases[index].scenario is None:
            return self._given(index, tokens, ramp)
        return self._simulated(index, tokens, ramp)

    def _given(self, index: int, tokens: float, ramp: BatchStep | None) -> Piece:
        phase = self.plan.phases[index]
        speed = given_tokens_per_s(phase, self.gpus) * (ramp.relative_throughput if ramp else 1.0)
        if ramp is None:
            value = f"{speed:.6g} tokens/s on {self.gpus} GPUs"
            source = phase.source or "the plan file"
            self.notes.assume(phase_name(self.plan, index), value, source, kind_of(phase.source))
        utilisation = self.plan.power.utilisation
        low, high = _spread(phase.relative_uncertainty or 0.0)
        step = None
        if phase.global_batch_size and phase.sequence_length:
            batch = ramp.global_batch_size if ramp else phase.global_batch_size
            step = batch * phase.sequence_length / speed
        return Piece(index, tokens, speed, 1.0 if utilisation is None else utilisation, step, low, high)

    def _simulated(self, index: int, tokens: float, ramp: BatchStep | None) -> Piece:
        plan, phase = self.plan, self.plan.phases[index]
        name = f"{phase_name(plan, index)}, {self.nodes} nodes"
        try:
            scenario = phase_scenario(plan, phase, self.nodes, ramp.global_batch_size if ramp else None)
        except InputError as error:
            if not error.violations or self.nodes == _written_nodes(plan, phase):
                raise  # wrong as written; otherwise only this cluster size does not suit it
            self.notes.impossible(f"{name}: {error}")
            return Piece(index, tokens, 1.0, 0.0)
        name = f"{name}, batch {scenario.training.global_batch_size}"
        estimate = self._searched(phase, scenario) if phase.layout == "search" else self.steps.estimate(scenario)
        self.notes.steps.append((name, estimate))
        if not estimate.fits:
            self.notes.impossible(f"{name}: no layout runs: {'; '.join(estimate.reasons)}")
            return Piece(index, tokens, 1.0, 0.0)
        self.notes.parameters = self.notes.parameters or estimate.parameters
        times = f"step {estimate.step_time_s:.4g} s ({estimate.low_s:.4g} to {estimate.high_s:.4g})"
        source = f"simulated, provenance of prices: {estimate.provenance}"
        if estimate.found:
            source += f"; layout: {estimate.found}"
        self.notes.assume(name, f"{times}, {estimate.layout}", source, "simulated")
        low, high = estimate.low_s / estimate.step_time_s, estimate.high_s / estimate.step_time_s
        if phase.relative_uncertainty is not None:
            low, high = _spread(phase.relative_uncertainty)
        utilisation = plan.power.utilisation
        if utilisation is None:
            utilisation = min(1.0, estimate.utilisation.get("compute", 1.0))
        speed = estimate.tokens_per_s(scenario)
        return Piece(index, tokens, speed, utilisation, estimate.step_time_s, low, high)

    def _searched(self, phase: Phase, scenario: Scenario) -> StepEstimate:
        """The best layout of the phase; its batch ramp keeps that layout where it can, as real runs do."""
        whole = phase_scenario(self.plan, phase, self.nodes)
        batch = scenario.training.global_batch_size
        best = self.steps.best_layout(whole)
        if batch == whole.training.global_batch_size:
            return best
        if best.scenario is not None:
            training = best.scenario.training.model_copy(update={"global_batch_size": batch})
            kept = self.steps.estimate(best.scenario.model_copy(update={"training": training}))
            if kept.fits:
                return replace(kept, layout=best.layout, found="that of the whole batch")
        return self.steps.best_layout(scenario)


def _spread(relative: float) -> tuple[float, float]:
    """Ends of an 80 % interval of the step time, as factors, for a relative half-width of the speed."""
    return 1.0 - relative, 1.0 / (1.0 - relative)


def _written_nodes(plan: PlanFile, phase: Phase) -> int | None:
    """The cluster size that the scenario was written for."""
    table = read_toml(scenario_path(plan, str(phase.scenario)))
    nodes = table.get("cluster", {}).get("num_nodes")
    return nodes if isinstance(nodes, int) else None
