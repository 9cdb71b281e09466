"""validation/CONSTANTS.md: the global constants, what each means, and the error with and without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpar.specs.base import data_dir
from simpar.specs.calibration import BOUNDS, NEUTRAL, RunCalibration, calibrations


def constants_text(entries: Sequence[RunCalibration]) -> str:
    """The page for `entries`."""
    names = list(BOUNDS)
    lines = [
        "# Global constants",
        "",
        "Written from `simpar/specs/run_calibration.toml`; do not edit. Fitted by `python -m simpar.validation.fit_runs`.",
        "",
        "| constant | what it is | without it | least | most |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [f"| {n} | {_meaning(n)} | {getattr(NEUTRAL, n):g} | {BOUNDS[n][0]:g} | {BOUNDS[n][1]:g} |" for n in names]
    lines += [
        "",
        "Errors are medians of |predicted / measured - 1| over the runs of a group: without any constant, with all of them, and "
        "cross-validated (the run's source left out of every fit; of a framework's only source, a fifth of its models). The last "
        f"{len(names)} columns are cross-validated too, each with one constant left at its neutral value; * marks those that are "
        "lower than with it by more than a tenth.",
        "",
        f"| framework | chip | since | {' | '.join(names)} | runs | sources | none | fitted | cross-validated | "
        + " | ".join(f"no {name}" for name in names) + " |",
        "|---|---|---|" + "---:|" * (5 + 2 * len(names)),
    ]  # fmt: skip
    return "\n".join([*lines, *map(_line, entries)]) + "\n"


def _meaning(name: str) -> str:
    return " ".join(str(RunCalibration.model_fields[name].description).split())


def _line(entry: RunCalibration) -> str:
    crossed = entry.median_cross_validated
    values = [f"{getattr(entry, name):.3g}" for name in BOUNDS]
    errors = [f"{error:.1%}" for error in (entry.median_before, entry.median_after, crossed)]
    found = [entry.without.get(name) for name in BOUNDS]
    without = ["-" if e is None else f"{e:.1%}{'*' if e < 0.9 * crossed else ''}" for e in found]
    cells = [entry.framework, entry.architecture, entry.since, *values, str(entry.rows), str(len(entry.sources)), *errors, *without]
    return f"| {' | '.join(cells)} |"


def write_constants(path: Path | None = None, entries: Sequence[RunCalibration] | None = None) -> None:
    """CONSTANTS.md of the checkout; nothing where the shipped data cannot be written to."""
    path = path or data_dir("validation") / "CONSTANTS.md"
    try:
        path.write_text(constants_text(calibrations() if entries is None else entries), encoding="utf-8")
    except PermissionError:
        return
