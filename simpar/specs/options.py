"""The few options that change a scenario or stand for one: model, machines, batch, framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.specs.catalog import scenario_path
from simpar.specs.scenario import as_published, overridden, read_table


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line may give beside a scenario, or instead of one.

    Attributes:
        model: a preset, or the path of a config.json.
        hardware: a profile's name or path.
        sequence_length: tokens per sequence.
        global_batch: sequences per step.
        framework: whose semantics.
    """

    model: str | None = None
    hardware: str | None = None
    num_nodes: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    framework: str | None = None

    def table(self, scenario: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
        """The raw table of a scenario and its file ("" = none): `scenario` with the options laid over it, or the options alone,
        then with `overrides`.

        Raises:
            InputError: no scenario, and an option that one needs is missing; or a file or an override that cannot be read.
        """
        file = ""
        if scenario is None:
            table = option_table(self.model, self.hardware, self.num_nodes, self.sequence_length, self.global_batch, self.framework)
        elif isinstance(scenario, Mapping):
            file = str(scenario.get("file", ""))
            table = self._over({k: v for k, v in scenario.items() if k != "file"})
        else:
            file = str(scenario_path(scenario))
            read = read_table(scenario)
            table = as_published(self._over(read), read)
        return overridden(table, overrides), file

    def _over(self, table: dict[str, Any]) -> dict[str, Any]:
        cluster = {"hardware": self.hardware, "num_nodes": self.num_nodes}
        training = {"sequence_length": self.sequence_length, "global_batch_size": self.global_batch}
        named = {"model": self.model, "framework": self.framework}
        changed = {**table, **{name: value for name, value in named.items() if value is not None}}
        for name, values in (("cluster", cluster), ("training", training)):
            given = {key: value for key, value in values.items() if value is not None}
            if given:
                kept = dict(table.get(name) or {})
                if "num_nodes" in given:
                    kept.pop("num_gpus", None)  # part of a node, of another cluster
                changed[name] = {**kept, **given}
        return changed


def option_table(
    model: str | None,
    hardware: str | None,
    num_nodes: int | None,
    sequence_length: int | None,
    global_batch: int | None,
    framework: str | None,
) -> dict[str, Any]:
    """The raw table of a scenario, without a plan, from options of the command line.

    Raises:
        InputError: what is missing, all together.
    """
    needed = {"--model": model, "--hardware": hardware, "--num-nodes": num_nodes, "--global-batch": global_batch}
    right = "give it, or a scenario: a file, or a name of `simpar scenarios`"
    missing = [Violation(name, None, "is required", right) for name, value in needed.items() if value is None]
    if missing:
        raise InputError(missing)
    training: dict[str, Any] = {"global_batch_size": global_batch}
    if sequence_length is not None:
        training["sequence_length"] = sequence_length
    table: dict[str, Any] = {
        "name": f"{model} on {num_nodes} x {hardware}", "model": model, "cluster": {"hardware": hardware, "num_nodes": num_nodes},
        "training": training,
    }  # fmt: skip
    if framework is not None:
        table["framework"] = framework
    return table
