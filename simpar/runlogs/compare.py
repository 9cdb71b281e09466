"""What a log says of its job against what the scenario says: a run of another job is refused, with what differs."""

from __future__ import annotations

from simpar.errors import InputError, Violation
from simpar.runlogs.formats import WRITTEN_BY
from simpar.runlogs.records import LogReading
from simpar.specs.counts import resolved_dp
from simpar.specs.framework import canonical_name
from simpar.specs.scenario import Scenario

OF_NO_FRAMEWORK = frozenset({"plain"})
"""Scenarios that name no framework: any log may be theirs."""
_ARGUMENTS = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "world_size": "world_size", "seq_length": "sequence_length", "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size", "num_layers": "num_layers", "hidden_size": "hidden_size",
}  # fmt: skip


def stated_of(reading: LogReading) -> dict[str, int]:
    """Facts of the job that the log states, by the names of `_said`."""
    found = {
        name: int(value)
        for name, value in reading.stated.items()
        if isinstance(value, int) and not isinstance(value, bool) and name != "total_parameters"
    }
    for argument, name in _ARGUMENTS.items():
        text = str(reading.stated.get("arguments", {}).get(argument, ""))
        if text.isdigit():
            found.setdefault(name, int(text))
    batches = {b for b in reading.scalars.get("global batch size", []) if b > 0}
    if len(batches) == 1:
        found.setdefault("global_batch_size", int(batches.pop()))
    return found


def _said(scenario: Scenario) -> dict[str, tuple[str, int]]:
    plan, training = scenario.plan, scenario.training
    found = {
        "world_size": ("cluster", scenario.world_size), "tp": ("plan.tp", plan.tp), "pp": ("plan.pp", plan.pp),
        "cp": ("plan.cp", plan.cp), "dp": ("plan.dp", resolved_dp(scenario)),
        "sequence_length": ("training.sequence_length", training.sequence_length),
        "global_batch_size": ("training.global_batch_size", training.global_batch_size),
        "micro_batch_size": ("training.micro_batch_size", training.micro_batch_size),
    }  # fmt: skip
    for name, field in (("num_layers", "num_hidden_layers"), ("hidden_size", "hidden_size")):
        if (value := getattr(scenario.model, field, None)) is not None:
            found[name] = (f"model.{field}", value)
    return found


def check_same_job(reading: LogReading, scenario: Scenario) -> None:
    """That the log is of a run of `scenario`.

    Raises:
        InputError: it is of another framework, or states other sizes; with all of them.
    """
    written = WRITTEN_BY.get(reading.format)
    framework = canonical_name(scenario.framework)
    if written and framework not in written and framework not in OF_NO_FRAMEWORK:
        rule = f"is a log of {reading.format}, which {scenario.framework} does not write"
        raise InputError(f"{reading.file}: {rule}; give the log of this scenario's run, or --set framework={written[0]}")
    said = _said(scenario)
    wrong = [
        Violation(said[name][0], said[name][1], f"the log {reading.file} says {value}", "the scenario of this run, or its log")
        for name, value in stated_of(reading).items()
        if name in said and said[name][1] != value
    ]
    if wrong:
        raise InputError(wrong)
