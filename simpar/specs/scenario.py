"""A scenario: a model on a cluster under a plan. This file reads it, resolves names and has the whole checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from simpar.boundary import reader, toml_value
from simpar.errors import InputError, Violation
from simpar.specs.architecture import ModelSpec
from simpar.specs.base import Spec, read_toml, validate
from simpar.specs.catalog import scenario_path
from simpar.specs.effects import EffectsSpec
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.node_size import with_gpus_per_node
from simpar.specs.plan import PlanSpec
from simpar.specs.site import Site, site_beside
from simpar.specs.training import TrainingSpec

Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
"""What if: a multiple."""


class ClusterSpec(Spec):
    """Which machines, how many."""

    hardware: str
    """A name in hardware_profiles/ or a path to a profile."""
    num_nodes: Annotated[int, Field(gt=0)]
    """Machines."""
    num_gpus: Annotated[int, Field(gt=0)] | None = None
    """Fewer than all the nodes' GPUs, for part of a node; none = all."""
    gpus_per_node: Annotated[int, Field(gt=0)] | None = None
    """Overrides the profile's; adapters follow with their number per GPU, and so does a scale-up domain of one node."""
    oversubscription: Annotated[float, Field(ge=1)] | None = None
    """Overrides the fabric's leaf-to-spine ratio."""
    pod_oversubscription: Annotated[float, Field(ge=1)] | None = None
    """Overrides the ratio between pods."""
    nics_per_node: Annotated[int, Field(gt=0)] | None = None
    """Overrides the number of adapters."""
    sharp: bool = False
    """The network's switches reduce (SHARP, NCCL_COLLNET_ENABLE=1): a licence and a setting of the job, off by default."""
    memory_scale: Scale = 1.0
    """What if: device memory, as a multiple of the profile's."""
    scale_up_bandwidth_scale: Scale = 1.0
    """What if: links inside the scale-up domain, as a multiple of the profile's."""
    nic_bandwidth_scale: Scale = 1.0
    """What if: each adapter, as a multiple of the profile's."""


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
        """The cluster's profile, with the cluster's overrides applied."""
        profile = load_hardware(self.cluster.hardware)
        if self.cluster.gpus_per_node:
            profile = with_gpus_per_node(profile, self.cluster.gpus_per_node)
        fabric = {
            key: value for key in ("oversubscription", "pod_oversubscription") if (value := getattr(self.cluster, key)) is not None
        }
        changes: dict[str, Any] = {}
        if fabric:
            changes["fabric"] = profile.fabric.model_copy(update=fabric)
        if self.cluster.nics_per_node:
            changes["nic"] = profile.nic.model_copy(update={"count": self.cluster.nics_per_node})
        for part, field, scale in (
            ("gpu", "memory", self.cluster.memory_scale),
            ("scale_up", "bandwidth", self.cluster.scale_up_bandwidth_scale),
            ("nic", "bandwidth", self.cluster.nic_bandwidth_scale),
        ):
            if scale != 1.0:
                old = changes.get(part, getattr(profile, part))
                number = getattr(old, field)
                source = f"{number.source}, times {scale:g}"
                number = number.model_copy(update={"value": number.value * scale, "kind": "assumed", "source": source})
                changes[part] = old.model_copy(update={field: number})
        domain = filled_domain(profile, self.cluster.num_gpus or self.cluster.num_nodes * profile.gpus_per_node)
        if domain != profile.domain_size:
            scale_up = changes.get("scale_up", profile.scale_up)
            changes["scale_up"] = scale_up.model_copy(update={"domain_size": domain})
        return profile.model_copy(update=changes) if changes else profile

    @property
    def world_size(self) -> int:
        """GPUs used."""
        return self.cluster.num_gpus or self.cluster.num_nodes * self.hardware.gpus_per_node


def filled_domain(profile: HardwareProfile, world_size: int) -> int:
    """GPUs of each scale-up domain that a job of `world_size` uses.

    A job larger than a rack-wide domain takes as many nodes of every rack, so that its groups do not straddle racks: the most
    whole nodes whose GPUs divide the job (64 of an NVL72 for 512 GPUs). Domains of one node, and jobs inside one rack, fill up.
    """
    domain, node = profile.domain_size, profile.gpus_per_node
    if domain <= node or world_size <= domain or profile.scale_up.torus:
        return domain
    return next((d for d in range(domain - domain % node, node, -node) if world_size % d == 0), domain)


def apply_override(table: dict[str, Any], assignment: str) -> None:
    """Set one field of the raw `table`: "plan.pp=8" (values are TOML, bare words are strings)."""
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {assignment}: write it as field=value, such as plan.pp=8")
    value = toml_value(text)
    *parents, last = path.strip().split(".")
    for parent in parents:
        nested = table.setdefault(parent, {})
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
    cluster = table.get("cluster")
    if isinstance(cluster, dict) and str(cluster.get("hardware", "")).endswith(".toml"):
        relative = base / str(cluster["hardware"])
        if relative.is_file():
            table["cluster"] = {**cluster, "hardware": str(relative)}
    table.setdefault("name", Path(file).stem if file else "scenario")
    try:
        scenario = validate(Scenario, {**table, "file": file}, file=file)
    except InputError as error:
        raise InputError([*wrong_model, *error.violations]) from None
    violations = wrong_model or [v for v in check_scenario(scenario) if not v.field.startswith(undecided)]
    if violations:
        raise InputError(violations)
    return scenario


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
