"""The command `simpar calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[Path | None, typer.Option(help="The hardware profile to write, TOML.")] = None,
    budget: Annotated[str, typer.Option(help="Time for all measurements.")] = "120s",
    resume: Annotated[Path | None, typer.Option(help="Continue this .jsonl of an earlier run.")] = None,
    base: Annotated[str, typer.Option(help="Shipped profile to start from; empty = the nearest.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Of each process on a CPU.")] = 1,
    timeout: Annotated[str, typer.Option(help="Longest wait for another rank.")] = "60s",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, to try the command.")] = False,
    shapes: Annotated[Path | None, typer.Option(help="Measure what this JSON lists (validate cluster writes it).")] = None,
) -> None:
    """Measure this machine and write its hardware profile; under torchrun also its collectives."""
    from simpar.errors import InputError
    from simpar.host import leave
    from simpar.live.calibrate import Options, checked, run, seconds
    from simpar.live.store import CalibrationError

    try:
        asked = Options(
            out, seconds(budget), base=base, device=device, threads=threads, timeout_s=seconds(timeout), tiny=tiny, shapes=shapes
        )
        options = checked(asked, resume)
    except CalibrationError as error:
        raise InputError(str(error)) from None
    leave(run(options))
