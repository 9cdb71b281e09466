"""The few options that change a scenario or stand for one: model, machines, batch, framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.specs.catalog import scenario_path
from simpar.specs.hardware import read_profile
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
        num_gpus: instead of nodes: part of a node, or as many nodes as they fill.
    """

    model: str | None = None
    hardware: str | None = None
    num_nodes: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    framework: str | None = None
    num_gpus: int | None = None

    def table(self, scenario: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
        """The raw table of a scenario and its file ("" = none): `scenario` with the options laid over it, or the options alone,
        then with `overrides`.

        Raises:
            InputError: no scenario, and an option that one needs is missing; or a file or an override that cannot be read.
        """
        file = ""
        if scenario is None:
            table = _alone(self)
        elif isinstance(scenario, Mapping):
            file = str(scenario.get("file", ""))
            table = self._over({k: v for k, v in scenario.items() if k != "file"})
        else:
            file = str(scenario_path(scenario))
            read = read_table(scenario)
            table = as_published(self._over(read), read)
        base = Path(file).parent if file or scenario is None else None
        return overridden(table, overrides, base), file

    def _over(self, table: dict[str, Any]) -> dict[str, Any]:
        hardware = self.hardware or dict(table.get("cluster") or {}).get("hardware")
        cluster = {"hardware": self.hardware, **self.machines(hardware)}
        training = {"sequence_length": self.sequence_length, "global_batch_size": self.global_batch}
        named = {"model": self.model, "framework": self.framework}
        changed = {**table, **{name: value for name, value in named.items() if value is not None}}
        for name, values in (("cluster", cluster), ("training", training)):
            given = {key: value for key, value in values.items() if value is not None}
            if given:
                kept = dict(table.get(name) or {})
                if "num_nodes" in given and name == "cluster":
                    kept.pop("num_gpus", None)  # part of a node, of another cluster
                changed[name] = {**kept, **given}
        return changed

    def machines(self, hardware: str | None) -> dict[str, int | None]:
        """Nodes, and GPUs where they are given, as a cluster has them; `num_gpus` alone fills nodes of `hardware`."""
        if self.num_gpus is None:
            return {"num_nodes": self.num_nodes}
        nodes = self.num_nodes
        if nodes is None and hardware is not None:
            nodes = -(-self.num_gpus // read_profile(hardware, constants=False).gpus_per_node)
        return {"num_nodes": nodes, "num_gpus": self.num_gpus}


def _alone(options: RunOptions) -> dict[str, Any]:
    """The raw table of a scenario, without a plan, from options of the command line.

    Raises:
        InputError: what is missing, all together; or a profile that is not there.
    """
    model, hardware, batch = options.model, options.hardware, options.global_batch
    size = options.num_gpus if options.num_nodes is None else options.num_nodes
    needed = {"--model": model, "--hardware": hardware, "--num-nodes": size, "--global-batch": batch}
    right = "give it, or a scenario: a file, or a name of `simpar scenarios`"
    missing = [Violation(name, None, "is required", right) for name, value in needed.items() if value is None]
    if missing:
        raise InputError(missing)
    training: dict[str, Any] = {"global_batch_size": batch}
    if options.sequence_length is not None:
        training["sequence_length"] = options.sequence_length
    cluster = {"hardware": hardware, **options.machines(hardware)}
    machines = f"{options.num_nodes} x {hardware}" if options.num_gpus is None else f"{options.num_gpus} of {hardware}"
    table: dict[str, Any] = {"name": f"{model} on {machines}", "model": model, "cluster": cluster, "training": training}
    if options.framework is not None:
        table["framework"] = options.framework
    return table
