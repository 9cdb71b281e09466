"""validation/CONSTANTS.md: the registry of fitted numbers, what each means and what it gains on unseen sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpar.specs.base import data_dir
from simpar.specs.calibration import BOUNDS, MEANING, NEUTRAL, Constant, Unseen, constants, unseen


def constants_text(entries: Sequence[Constant], rows: Sequence[Unseen] = ()) -> str:
    """The page for `entries` and the errors on unseen sources."""
    lines = [
        "# Fitted numbers",
        "",
        "Every number of simpar that was chosen by looking at published training runs, written from `simpar/specs/constants.toml` "
        "by `python -m simpar.evidence.fit_constants`; do not edit.",
        "",
        "| constant | what it is | neutral | least | most |",
        "|---|---|---:|---:|---:|",
        *(f"| {name} | {MEANING[name]} | {NEUTRAL[name]:g} | {low:g} | {high:g} |" for name, (low, high) in BOUNDS.items()),
        "",
        "Gain: the mean over sources of the absolute relative error without the constant minus the error with it, each source left "
        "out of every fit; a constant whose gain does not exceed its standard error is not kept. Factors of nested groups "
        "multiply, seconds add; the expected error is that of the narrowest group.",
        "",
        "| constant | group | value | runs | sources | gain | standard error | status |",
        "|---|---|---:|---:|---:|---:|---:|---|",
        *map(_line, entries),
    ]  # fmt: skip
    if rows:
        lines += [
            "",
            "## Sources that no fit has seen",
            "",
            "Absolute relative error of the step time: with every constant neutral, and with the whole choice and fit repeated "
            "without the run's source. Runs with stalled sends are left out. Coverage: of the 80 % interval of the expected error.",
            "",
            "| family | architecture | runs | sources | median, nothing fitted | mean | median, unseen | mean | coverage |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            *map(_unseen_line, rows),
        ]
    return "\n".join(lines) + "\n"


def _unseen_line(row: Unseen) -> str:
    errors = (row.neutral_median, row.neutral_mean, row.median, row.mean)
    cells = [row.family, row.architecture, str(row.rows), str(row.sources), *(f"{e:.1%}" for e in errors), f"{row.coverage:.0%}"]
    return f"| {' | '.join(cells)} |"


def _line(entry: Constant) -> str:
    gains = ["", ""] if entry.status == "interval" else [f"{entry.gain:.2%}", f"{entry.gain_se:.2%}"]
    cells = [entry.name, entry.group, f"{entry.value:.4g}", str(entry.rows), str(len(entry.sources)), *gains, entry.status]
    return f"| {' | '.join(cells)} |"


def write_constants(
    path: Path | None = None, entries: Sequence[Constant] | None = None, rows: Sequence[Unseen] | None = None
) -> None:
    """CONSTANTS.md of the checkout; nothing where the shipped data cannot be written to."""
    path = path or data_dir("validation") / "CONSTANTS.md"
    try:
        path.write_text(
            constants_text(constants() if entries is None else entries, unseen() if rows is None else rows), encoding="utf-8"
        )
    except PermissionError:
        return
