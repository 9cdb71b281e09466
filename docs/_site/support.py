"""The support matrix: asked of the code, never written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from simpar.specs.framework import POLICIES

YES, NO = "yes", ""
ABILITIES: Final = {
    "pure_bf16": "bf16 states",
    "optimizer_in_backward": "optimizer in backward",
    "narrow_optimizers": "8-bit optimizers",
    "quantised_base": "quantised base weights",
    "host_parameters": "parameters on the host",
    "fused_kernels": "Liger kernels",
}


def support_page() -> str:
    """Markdown of every table."""
    return "\n".join(
        (
            "# What supports what\n",
            "Made from the tables of the code when this site is built.\n",
            "## Frameworks\n",
            "A framework's behaviour holds from the month given and builds on the one it descends from; `framework_version` of a",
            "scenario takes a month or a release. Options that a framework lacks are refused with the ones that have them.\n",
            *table(["framework", "descends from", "newest behaviour", "launch files", *ABILITIES.values()], frameworks()),
            "## Policies\n",
            "A framework is composed of policies; each is in force since the month given, of the framework or the runtime named.\n",
            *table(["framework", *POLICIES], policies()),
            "## Schedules in launch files\n",
            "Asked of the exporters with a small model on 4 pipeline ranks. Every schedule can be simulated under every framework.\n",
            *table(["schedule", *formats()], schedules()),
            "## Machines\n",
            "How the figures of a profile are known, and which of its kernels and collectives are fitted to measurements.\n",
            *table(
                ["profile", "GPU", "measured", "published", "derived", "assumed", "kernels fitted", "collectives fitted"],
                machines(),
            ),
            "## Models\n",
            *table(["preset", "kind", "parameters", "active", "layers"], models()),
        )
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table."""
    heads = list(heads)
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def formats() -> list[str]:
    """Names of the export formats."""
    from simpar.interop.export import FORMATS

    return list(FORMATS)


def frameworks() -> Iterator[list[str]]:
    """A row for each framework that is not another name of one."""
    from simpar.searching.abilities import launched_as
    from simpar.specs.framework import framework
    from simpar.specs.framework_rows import FRAMEWORKS

    for name, (base, rows) in FRAMEWORKS.items():
        spec = framework(name)
        year, month = rows[-1].since
        yield [
            f"`{name}`", ", ".join(f"`{b}`" for b in ((base,) if isinstance(base, str) else base.values()) if b), f"{year}-{month:02}", launched_as(name),
            *(YES if ability in spec.conventions.abilities else NO for ability in ABILITIES),
        ]  # fmt: skip


def policies() -> Iterator[list[str]]:
    """A row for each framework: whose each of its newest policies is; empty = the default."""
    from simpar.specs.framework import framework
    from simpar.specs.framework_rows import FRAMEWORKS

    for name in FRAMEWORKS:
        spec = framework(name)
        yield [f"`{name}`", *(getattr(spec, part).policy for part in POLICIES)]


def schedules() -> Iterator[list[str]]:
    """A row for each schedule: the launch files that can be written for it."""
    from simpar.errors import InputError
    from simpar.interop.export import export_files
    from simpar.schedules import SCHEDULES
    from simpar.specs.scenario import make_scenario

    own = {"megatron": "megatron-core", "torchtitan": "torchtitan", "deepspeed": "deepspeed", "nanotron": "nanotron"}
    for name, family in SCHEDULES.items():
        virtual = family.virtual_stages or (2 if "interleaved" in name else 1)
        row = [f"`{name}`"]
        for form in formats():
            scenario: dict[str, Any] = {
                "name": name, "model": "llama3.1-8b", "framework": own.get(form, form), "cluster": {"hardware": "dgx-h100", "num_nodes": 2},
                "plan": {"tp": 1, "pp": 4, "schedule": name, "virtual_stages": virtual,},
                "training": {"sequence_length": 2048, "global_batch_size": 64},
            }  # fmt: skip
            try:
                export_files(form, make_scenario(scenario))
                row.append(YES)
            except InputError as error:
                # What the format refuses of the rest of the scenario says nothing about its schedules.
                refused = any(v.field in ("plan.schedule", "plan.virtual_stages") for v in error.violations)
                row.append(NO if refused else YES)
        yield row


def machines() -> Iterator[list[str]]:
    """A row for each profile: how many figures are known in which way."""
    from simpar.specs.hardware import load_hardware, profile_names

    for name in profile_names():
        profile = load_hardware(name)
        counts = dict.fromkeys(("measured", "published", "derived", "assumed"), 0)
        for part in (profile.gpu, profile.node, profile.scale_up, profile.nic, profile.fabric):
            for kind in kinds(part.model_dump()):
                counts[kind] = counts.get(kind, 0) + 1
        fitted = (bool(part.model_dump(exclude_defaults=True)) for part in (profile.kernels, profile.collectives))
        yield [f"`{name}`", profile.gpu.name, *(str(counts[k] or "") for k in ("measured", "published", "derived", "assumed")),
               *(YES if found else NO for found in fitted)]  # fmt: skip


def kinds(value: Any) -> Iterator[str]:
    """`kind` of every sourced number in a dumped spec."""
    if isinstance(value, dict):
        if {"value", "kind", "source"} <= set(value):
            yield value["kind"]
        else:
            for inner in value.values():
                yield from kinds(inner)


def models() -> Iterator[list[str]]:
    """A row for each preset."""
    from simpar.model.show import facts
    from simpar.specs.models_io import model_names

    for name in model_names():
        found = facts(name)
        counts = (found[key] for key in ("parameters", "active_parameters"))
        yield [f"`{name}`", found["kind"], *("" if n is None else f"{n:,}" for n in counts), str(found["layers"] or "")]
