"""A scenario: a model on a cluster under a plan. This file reads it, resolves names and has the whole checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from simpar.boundary import reader, toml_value
from simpar.errors import InputError, Violation
from simpar.specs.architecture import ModelSpec
from simpar.specs.base import Spec, read_toml, validate
from simpar.specs.catalog import scenario_path
from simpar.specs.cluster import ClusterSpec
from simpar.specs.effects import EffectsSpec
from simpar.specs.hardware import HardwareProfile
from simpar.specs.plan import PlanSpec
from simpar.specs.site import Site, site_beside
from simpar.specs.training import TrainingSpec


class Published(Spec):
    """What is published about a scenario, for comparison; never an input."""

    metric: str
    """step_time_s, tokens_per_s_per_gpu, mfu, model_flops_per_s_per_gpu, bubble_fraction."""
    value: float
    """In SI units; fractions for mfu and bubble_fraction."""
    source: str
    """Where it stands."""
    note: str = ""
    """How it was derived, if it was."""
    fitted: bool = False
    """The constants were fitted with this run, so that agreement with it is no evidence."""


class Scenario(Spec):
    """A model, a cluster, a plan and a training step, all resolved."""

    name: str
    """What reports call it."""
    description: str = ""
    """A sentence for people."""
    model: ModelSpec
    """What is trained: the name of a preset, the path of a Hugging Face config.json, or a table."""
    framework: str = "megatron-core"
    """Whose semantics: kernels, defaults, memory, host."""
    framework_version: str | None = None
    """A release (0.9.0), or a month (2024-10); none = the newest behaviour known."""
    cluster: ClusterSpec
    """On which machines."""
    plan: PlanSpec = PlanSpec()
    """How the work is laid out over ranks."""
    training: TrainingSpec
    """Batch, sequence, precision, optimizer."""
    effects: EffectsSpec = EffectsSpec()
    """What is not ideal: contention, slow ranks, faults, jitter."""
    published: tuple[Published, ...] = ()
    """Measured figures of this very run, for comparison; never an input."""
    site: str | Site | None = None
    """What `simpar adapt` learned from a cluster's own runs: a file, relative to the scenario's, or its table."""
    file: str = ""
    """Where it was read from, for messages."""

    @property
    def learned(self) -> Site | None:
        """The site, where one is named and any run is behind it."""
        found = site_beside(self.site, self.file)
        return found if found is not None and found.learned else None

    @property
    def hardware(self) -> HardwareProfile:
        """The cluster's profile, with the cluster's overrides applied.

        Raises:
            InputError: pipeline ranks or replicas are of several kinds (`specs/stage_plan.py` has the hardware of each).
        """
        from simpar.specs.stage_plan import check_one_kind

        check_one_kind(self, "only simpar simulate, explain, compare and simpar.sweep know pipelines of several kinds")
        gpus = self.cluster.num_gpus or self.cluster.own_gpus
        return self.cluster.profile(gpus)

    @property
    def world_size(self) -> int:
        """GPUs used."""
        return self.cluster.num_gpus or sum(part.own_gpus for part in self.cluster.parts or (self.cluster,))


def _preset_table(name: str, assignment: str) -> dict[str, Any]:
    """A shipped model as a table to change, without what is published of it.

    Raises:
        InputError: `name` is no shipped model.
    """
    from simpar.specs.models_io import load_model, model_names

    if name not in model_names():
        right = "write it as a [model] table, `simpar models show FILE --json` prints its fields"
        raise InputError([Violation("--set", assignment, f"model = {name!r} is no shipped model whose fields can be set", right)])
    found = load_model(name)
    kept = found.model_dump(exclude={"source", "published_parameters"})
    return {**kept, "name": f"{name}, changed"}


def apply_override(table: dict[str, Any], assignment: str) -> None:
    """Set one field of the raw `table`: "plan.pp=8" (values are TOML, bare words are strings).

    A field of a model that is named (`model = "llama3.1-8b"`) changes a copy of that preset.

    Raises:
        InputError: `assignment` is none, or what it goes through is no table.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {assignment}: write it as field=value, such as plan.pp=8")
    value = toml_value(text)
    *parents, last = path.strip().split(".")
    for parent in parents:
        nested = table.setdefault(parent, {})
        if isinstance(nested, str) and path.strip().startswith("model."):
            nested = table[parent] = _preset_table(nested, assignment)
        if not isinstance(nested, dict):
            raise InputError(f"--set {assignment}: {parent} is not a table")
        table = nested
    table[last] = value


@reader("path", "a scenario, TOML")
def read_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """The scenario in the TOML file at `path`, or the shipped one of that name, with `overrides` ("plan.pp=8") applied, checked.

    Raises:
        InputError: all violations, together.
    """
    file = scenario_path(path)
    return make_scenario(read_table(file, overrides or []), file=str(file))


def read_table(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw table of a scenario's file, or of the shipped scenario of that name, with `overrides` applied.

    Raises:
        InputError: no such scenario, not TOML, or an override that is no assignment.
    """
    file = scenario_path(path)
    table = read_toml(file)
    if "phases" in table:
        raise InputError(f"{file}: is the plan of a whole run, not a scenario; answer it with `simpar plan {path}`")
    return overridden(table, overrides)


def overridden(table: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """The raw `table` of a scenario with `assignments` applied."""
    changed = deepcopy(table)
    for assignment in assignments:
        apply_override(changed, assignment)
    return as_published(changed, table)


def as_published(changed: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """`changed`, the raw `table` of a scenario or a plan file with changes, without what is published about that where they change
    what runs."""
    told = {"name", "description", "published", "effects", "deadline", "confidence", "prices", "file"}
    if {k: v for k, v in changed.items() if k not in told} != {k: v for k, v in table.items() if k not in told}:
        changed.pop("published", None)
    return changed


@reader("file", "a scenario")
def make_scenario(table: dict[str, Any], *, file: str = "", undecided: tuple[str, ...] = ()) -> Scenario:
    """A checked scenario from a raw `table`; `model` may be a preset's name, a path to a config.json, or a table.

    Args:
        undecided: beginnings of fields that do not matter yet, such as "plan" where a search is to find it; types are checked.

    Raises:
        InputError: all violations, together.
    """
    from simpar.specs.checks import check_scenario
    from simpar.specs.open_values import open_fields

    table = dict(table)
    if left_open := open_fields(table, file):
        rule = "is left open, which only `simpar simulate` and simpar.simulate answer"
        raise InputError([Violation(f.path, [v for v, _ in f.values], rule, "give one of these values", file) for f in left_open])
    base = Path(file).parent if file else Path()
    wrong_model: list[Violation] = []
    if "model" in table:
        table["model"], wrong_model = _model_table(table["model"], base, file)
    if isinstance(cluster := table.get("cluster"), dict):
        table["cluster"] = _beside(cluster, base)
        if isinstance(parts := cluster.get("parts"), list | tuple):
            table["cluster"]["parts"] = [_beside(part, base) if isinstance(part, dict) else part for part in parts]
    table.setdefault("name", Path(file).stem if file else "scenario")
    try:
        scenario = validate(Scenario, {**table, "file": file}, file=file)
    except InputError as error:
        raise InputError([*wrong_model, *error.violations]) from None
    violations = wrong_model or [v for v in check_scenario(scenario) if not v.field.startswith(undecided)]
    if violations:
        raise InputError(violations)
    return scenario


def _beside(machines: dict[str, Any], base: Path) -> dict[str, Any]:
    """A table of machines whose profile, where it is a file beside the scenario, is named by its path."""
    name = str(machines.get("hardware", ""))
    relative = base / name
    return {**machines, "hardware": str(relative)} if name.endswith(".toml") and relative.is_file() else dict(machines)


def _model_table(model: object, base: Path, file: str) -> tuple[dict[str, Any], list[Violation]]:
    """The model named or written by the user as a table, or a stand-in and what is wrong with it."""
    from simpar.specs.models_io import load_model, model_from_table

    stand_in = {"kind": "mlp", "width": 1, "depth": 1}
    try:
        if isinstance(model, str):
            return load_model(model, base=base).model_dump(), []
        if isinstance(model, dict):
            return model_from_table(model, file=file, prefix="model").model_dump(), []
    except InputError as error:
        return stand_in, list(error.violations) or [Violation("model", model, str(error), file=file)]
    rule = "must be a preset's name, a path, or a table"
    return stand_in, [Violation("model", model, rule, 'such as "llama3.1-8b"', file)]
