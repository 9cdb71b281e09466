"""The support matrix: asked of the code, never written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
            "## Families of models\n",
            "Asked with one preset of each family on 16 GPUs: a step with that kind of parallelism, the space of the search, and launch",
            "files for each format. Diffusion models are counted (`simpar models show`) but no step of theirs runs yet.\n",
            *table(["family", "asked with", *SPLITS, "search", *formats()], family_rows()),
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


FAMILIES: Final = {
    "dense decoder": "llama3.1-8b", "GPT of 2021, learned positions": "megatron-1.7b", "mixture of experts": "mixtral-8x7b",
    "latent attention with experts": "deepseek-v2", "sparse attention": "deepseek-v3.2", "sliding windows": "gemma3-1b",
    "state spaces": "mamba-2.8b", "state spaces and attention": "nemotron-3-nano-30b-a3b", "attention and state spaces in parallel": "falcon-h1-7b",
    "linear attention": "qwen3-next-80b-a3b", "gated delta rule": "gated-deltanet-1.3b", "vision and text": "qwen3-vl-2b",
    "encoder": "modernbert-base", "encoder and decoder": "t5-11b", "speech": "whisper-large-v3", "image diffusion": "flux-dev",
    "video diffusion": "wan-t2v-14b", "MLP": "mlp-4096x24", "CNN": "alexnet",
}  # fmt: skip
"""Family of models -> the preset that is asked."""
SPLITS: Final = {
    "simulate": {}, "`tp`": {"tp": 2}, "`pp`": {"pp": 2}, "`cp`": {"cp": 2}, "`ep`": {"ep": 2}, "ZeRO 3": {"zero_stage": 3},
    "recompute": {"recompute": "full"},
}  # fmt: skip


def family_rows() -> Iterator[list[str]]:
    """A row for each family: what can be simulated, searched and exported."""
    from simpar.interop.export import export_files
    from simpar.searching.space import Space
    from simpar.step import simulate

    for family, name in FAMILIES.items():
        row = [family, f"`{name}`"]
        row += [works(lambda scenario: simulate(scenario, detail="stage"), asked(name, "plain", plan)) for plan in SPLITS.values()]
        row.append(works(lambda scenario: Space(scenario, {}, None), asked(name, "plain", {})))
        for form in formats():
            own = {"megatron": "megatron-core", "huggingface": "transformers"}.get(form, form)
            # Frameworks shard in different ways: any that one takes will do.
            tables = (asked(name, own, {"zero_stage": stage}) for stage in (1, 3, 0))
            row.append(next((YES for table in tables if works(partial(export_files, form), table)), NO))
        yield row


def asked(model: str, framework: str, plan: dict[str, Any]) -> dict[str, Any]:
    """A small scenario on 16 GPUs."""
    return {
        "name": model, "model": model, "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 2}, "plan": plan,
        "training": {"sequence_length": 1024, "global_batch_size": 32},
    }  # fmt: skip


def works(call: Callable[[Any], Any], table: dict[str, Any]) -> str:
    """Whether `call` takes the scenario of a table."""
    from simpar.errors import InputError
    from simpar.specs.scenario import make_scenario

    try:
        call(make_scenario(table))
    except InputError:
        return NO
    return YES
