"""The commands `simpar profiles ...`: machines that a scenario may name, and the first draft of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from simpar.cli.listing import print_table
from simpar.cli.options import JsonOption, print_json, profile_completion

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

    rows = [facts(name, read_profile(name, constants=False)) for name in profile_names()]
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


def facts(name: str, profile: Any) -> dict[str, Any]:
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
def show(name: ProfileArgument, as_json: JsonOption = False) -> None:
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
def new(
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
