"""What is shipped, shown and copied: the commands `simpar scenarios ...`, `models ...`, `profiles ...` and `constants`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from simpar.cli.options import JsonOption, model_completion, plan_completion, print_json, profile_completion, scenario_completion

scenarios_app = typer.Typer(no_args_is_help=False, invoke_without_command=True)


def _names(incomplete: str) -> list[str]:
    return scenario_completion(incomplete) + plan_completion(incomplete)


NameArgument = Annotated[str, typer.Argument(help="A shipped scenario or plan.", autocompletion=_names)]


@scenarios_app.callback()
def scenarios(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Scenarios (for simulate, search, ...) and plans (for plan) that come with simpar; without a subcommand, list them."""
    if ctx.invoked_subcommand is not None:
        return
    from simpar.specs.base import read_toml
    from simpar.specs.catalog import plan_names, plan_path, scenario_names, scenario_path

    runs = [_scenario_row(name, read_toml(scenario_path(name))) for name in scenario_names()]
    plans = [{"name": name, "about": read_toml(plan_path(name)).get("name", "")} for name in plan_names()]
    if as_json:
        print_json({"scenarios": runs, "plans": plans})
        return
    heads = ("scenario", "model", "machine", "nodes", "layout", "framework")
    print_table(heads, [tuple(str(row[head]) for head in ("name", *heads[1:])) for row in runs], texts=6)
    print()
    print_table(("plan", "about"), [(row["name"], row["about"]) for row in plans], texts=2)


def _scenario_row(name: str, table: dict[str, Any]) -> dict[str, Any]:
    model, plan, cluster = table["model"], table.get("plan", {}), table["cluster"]
    machines = cluster.get("parts", [cluster])
    degrees = [f"{key}{plan[key]}" for key in ("tp", "cp", "pp", "ep") if plan.get(key, 1) > 1]
    return {
        "name": name, "title": table.get("name", name), "model": model if isinstance(model, str) else model.get("name", "own"),
        "machine": " + ".join(m["hardware"] for m in machines), "nodes": sum(m["num_nodes"] for m in machines),
        "layout": " ".join(degrees) or "dp", "framework": table.get("framework", "megatron-core"),
    }  # fmt: skip


@scenarios_app.command("show")
def show_scenario(name: NameArgument, as_json: JsonOption = False) -> None:
    """The file of a shipped scenario or plan."""
    path = _shipped(name)
    if as_json:
        from simpar.specs.base import read_toml

        print_json(read_toml(path))
    else:
        print(path.read_text(encoding="utf-8"), end="")


@scenarios_app.command("copy")
def copy_scenario(
    name: NameArgument,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; without it NAME.toml in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Copy a shipped scenario or plan, to change it."""
    from simpar.cli.new import write_new

    source = _shipped(name)
    write_new(out or Path(source.name), source.read_text(encoding="utf-8"), force)


def _shipped(name: str) -> Path:
    from simpar.registry import unknown
    from simpar.specs.catalog import plan_names, plan_path, scenario_names, scenario_path

    if name in scenario_names():
        return scenario_path(name)
    if name in plan_names():
        return plan_path(name)
    raise unknown("scenario or plan", name, [*scenario_names(), *plan_names()], "simpar scenarios")


models_app = typer.Typer(no_args_is_help=False, invoke_without_command=True)


@models_app.callback()
def models(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Models that a scenario may name, with their size; without a subcommand, list them."""
    if ctx.invoked_subcommand is not None:
        return
    from simpar.model.show import facts
    from simpar.specs.models_io import model_names

    rows = [facts(name) for name in model_names()]
    if as_json:
        print_json(rows)
        return
    heads = ("model", "kind", "parameters", "active", "layers", "hidden", "heads", "experts")
    keys = ("name", "kind", "parameters", "active_parameters", "layers", "hidden_size", "heads", "experts")
    print_table(heads, [tuple(_cell(row[key]) for key in keys) for row in rows], texts=2)


@models_app.command("show")
def show_model(
    model: Annotated[
        str,
        typer.Argument(help="A preset, or a path to a Hugging Face config.json or a TOML table.", autocompletion=model_completion),
    ],
    as_json: JsonOption = False,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per document, for the FLOPs of attention.")] = 4096,
    approximate: Annotated[bool, typer.Option(help="Accept structural keys that are not read, with a note.")] = False,
) -> None:
    """Parameters, forward FLOPs per token and the pattern of layers of any model; with --json every field as well."""
    from simpar.model.show import describe_model

    found = describe_model(model, sequence_length, approximate=approximate)
    if as_json:
        print_json(found)
        return
    print(found["name"] or model)
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("parameters without embeddings", f"{found['parameters_without_embeddings']:,}"),
        ("active parameters", f"{found['active_parameters']:,}"),
        ("forward per token", f"{found['forward_flops_per_token'] / 1e9:,.2f} GFLOP (documents of {sequence_length:,} tokens)"),
    ]
    rows += [(f"{at['count']} x {at['stack']}/{at['layer']}", "; ".join(at["parts"])) for at in found["layers"]]
    print_table(("", ""), [*rows, *(("note", note) for note in found["notes"])], texts=2)


def _cell(value: Any) -> str:
    """A number for people: parameters as 70.6B."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000_000:
        # Three figures of 999.9M are a billion.
        size, unit = next((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if value >= 0.9995 * s)
        return f"{value / size:.3g}{unit}"
    return str(value)


profiles_app = typer.Typer(no_args_is_help=False, invoke_without_command=True)
ProfileArgument = Annotated[
    str, typer.Argument(help="A shipped profile, or the path of one.", autocompletion=profile_completion)
]  # fmt: skip


@profiles_app.callback()
def profiles(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Machines that a scenario may name; without a subcommand, list them.

    Of each GPU: memory and its bandwidth, 16-bit peak. Of each node: GPUs, the links between them (one GPU, one direction; of how
    many GPUs, if not the node's), network adapters.
    """
    if ctx.invoked_subcommand is not None:
        return
    from simpar.specs.hardware import profile_names, read_profile

    rows = [machine_facts(name, read_profile(name, constants=False)) for name in profile_names()]
    if as_json:
        print_json(rows)
        return
    heads = ("profile", "GPU", "GiB", "TB/s", "TFLOP/s", "GPUs", "scale-up GB/s", "NICs Gb/s")
    print_table(heads, [_row(row) for row in rows], texts=2)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    nics = row["nics_per_node"]
    network = f"{nics} x {row['nic_bytes_per_s'] * 8 / 1e9:.0f} {row['network']}" if nics else "none"
    wide = "" if row["domain_size"] == row["gpus_per_node"] else f" of {row['domain_size']}"
    links = f"{row['scale_up_bytes_per_s'] / 1e9:.0f} {row['scale_up']}{wide}"
    scale_up = "-" if row["scale_up"] == "none" else links
    peak = row["peak_flops_per_s"] / 1e12
    return (
        row["name"], row["gpu"], f"{row['memory_bytes'] / 2**30:.1f}", f"{row['memory_bytes_per_s'] / 1e12:.2f}",
        f"{peak:,.3g}" if peak < 1000 else f"{peak:,.0f}", str(row["gpus_per_node"]), scale_up, network,
    )  # fmt: skip


def machine_facts(name: str, profile: Any) -> dict[str, Any]:
    """What a person chooses a machine by, SI."""
    gpu, node, scale_up, nic = profile.gpu, profile.node, profile.scale_up, profile.nic
    return {
        "name": name, "gpu": gpu.name, "architecture": gpu.architecture, "memory_bytes": gpu.memory.value,
        "memory_bytes_per_s": gpu.memory_bandwidth.value, "peak_flops_per_s": profile.peak_flops_per_s("bf16"),
        "power_w": gpu.power.value, "gpus_per_node": node.gpus_per_node, "scale_up": scale_up.kind,
        "domain_size": scale_up.domain_size, "scale_up_bytes_per_s": scale_up.bandwidth.value, "network": nic.kind,
        "nics_per_node": nic.count, "nic_bytes_per_s": nic.bandwidth.value, "fabric": profile.fabric.kind,
        "description": profile.description,
    }  # fmt: skip


@profiles_app.command("show")
def show_profile(name: ProfileArgument, as_json: JsonOption = False) -> None:
    """A profile in full: every number with how it is known and where it stands."""
    from simpar.specs.base import read_toml
    from simpar.specs.hardware import profile_path, read_profile

    profile = read_profile(name, constants=False)
    if as_json:
        constants = {key: v for key, v in read_toml(profile_path(name)).items() if key in ("kernels", "collectives")}
        print_json({**profile.model_dump(mode="json", exclude={"kernels", "collectives"}, exclude_none=True), **constants})
        return
    print_table(("field", "value", "known", "source"), list(_numbers(read_toml(profile_path(name)), profile.model_dump())), texts=4)


def _numbers(written: dict[str, Any], read: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(field, value, kind, source) of every entry, as written; the kind and source of a bare value as `read`."""
    for key, value in written.items():
        known = read.get(key) if isinstance(read, dict) else None
        if isinstance(value, dict) and "value" not in value and (prefix or key not in ("kernels", "collectives")):
            yield from _numbers(value, known, f"{prefix}{key}.")
            continue
        told = known if isinstance(known, dict) and "kind" in known else {}
        text = value["value"] if told and isinstance(value, dict) else value
        shown = "fitted constants, in this file" if isinstance(text, dict) else str(text)
        yield f"{prefix}{key}", shown, told.get("kind", ""), told.get("source", "")


@profiles_app.command("new")
def new_profile(
    base: Annotated[str, typer.Option("--from", help="The profile to start from.", autocompletion=profile_completion)],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Another value: 'gpu.memory=192 GB'; it counts as assumed. Repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a profile of your own machine, every field explained, with the values of a shipped one."""
    from simpar.cli.new import write_new
    from simpar.interop.profile_text import profile_text

    write_new(out, profile_text(base, out.stem, overrides or []), force)
    print(f'then: simpar topology {out} --num-nodes 16; in a scenario: cluster.hardware = "{out}"')


def constants(as_json: JsonOption = False) -> None:
    """Numbers fitted on published runs, with their groups, sources and gain on left-out sources."""
    from simpar.specs.calibration import constants as registry

    entries = registry()
    if as_json:
        print_json({"count": len(entries), "constants": [entry.as_json() for entry in entries]})
        return
    heads = ("constant", "group", "value", "neutral", "runs", "sources", "gain", "status")
    rows = [
        (
            entry.name, entry.group, f"{entry.value:.4g}", f"{entry.neutral:g}", f"{entry.rows:,}", str(len(entry.sources)),
            "" if entry.status in ("interval", "read off") else f"{entry.gain:.2%} ± {entry.gain_se:.2%}", entry.status,
        )
        for entry in entries
    ]  # fmt: skip
    print_table(heads, rows, texts=2)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> None:
    """Print rows under heads (none, where they are empty); the first `texts` columns are set to the left, the others to the right.

    On a terminal the table keeps to its width; a pipe gets a line per row.
    """
    if not sys.stdout.isatty():
        shown = [tuple(heads), *map(tuple, rows)] if any(heads) else [*map(tuple, rows)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for line in shown:
            cells = (text.ljust(w) if i < texts else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < texts else "right", no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False, markup=False)
