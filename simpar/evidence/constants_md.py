"""validation/CONSTANTS.md: the registry of fitted numbers, what each means and what it gains on unseen sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpar.evidence.report_tables import markdown
from simpar.specs.base import data_dir
from simpar.specs.calibration import ANY, KNOWN, Constant, Unseen, constants, unseen


def constants_text(entries: Sequence[Constant], rows: Sequence[Unseen] = ()) -> str:
    """The page for `entries` and the errors on unseen sources."""
    known = [(name, k.meaning, *(f"{value:g}" for value in (k.neutral, *k.bounds))) for name, k in KNOWN.items()]
    lines = [
        "# Fitted numbers",
        "",
        "Every number of simpar that was chosen by looking at published training runs, written from `simpar/specs/constants.toml` "
        "by `python -m validation.tools.fit_constants`; do not edit.",
        "",
        *markdown(("constant", "what it is"), ("neutral", "least", "most"), known),
        "",
        "Gain: the mean over the sources of its own group of the absolute relative error without the constant minus the error with "
        "it, each source left out of the fit; a constant whose gain does not exceed its standard error is not kept. Of one that "
        "pays for all together, a family takes a share of the logarithm: how probable it is that the constant helps the family's "
        "left-out sources (0.5: as likely as not; families not named take all). Factors of nested groups multiply; a width is "
        "that of the narrowest group.",
        "",
        "| constant | group | value | runs | sources | gain | standard error | status |",
        "|---|---|---:|---:|---:|---:|---:|---|",
        *map(_line, entries),
    ]  # fmt: skip
    if rows:
        lines += ["", "## Sources that no fit has seen", "", *unseen_lines(rows)]
    return "\n".join(lines) + "\n"


def unseen_lines(rows: Sequence[Unseen]) -> list[str]:
    """What was left out and how, the errors by family, then by source."""
    return [
        "Absolute relative error of the step time: with every constant neutral, and with candidates, fit and gate repeated without "
        "the run's source. Runs with stalled sends are left out. Coverage of 80 % intervals whose factors come from all other "
        "sources, and their interval score: width in log seconds plus ten times what lies outside, lower is better.",
        "",
        *_unseen_table([row for row in rows if row.source == ANY], ("family", "architecture")),
        "",
        "### By source",
        "",
        *_unseen_table([row for row in rows if row.source != ANY], ("source",)),
    ]


def _unseen_table(rows: Sequence[Unseen], keys: Sequence[str]) -> list[str]:
    figures = ("runs", "sources", "median, nothing fitted", "mean", "median, unseen", "mean", "coverage", "interval score")
    lines = []
    for row in rows:
        errors = (row.neutral_median, row.neutral_mean, row.median, row.mean)
        cells = [*(getattr(row, key) for key in keys), str(row.rows), str(row.sources), *(f"{e:.1%}" for e in errors)]
        lines.append([*cells, f"{row.coverage:.0%}", f"{row.interval_score:.2f}"])
    return markdown(keys, figures, lines)


def _line(entry: Constant) -> str:
    gains = ["", ""] if entry.status in ("interval", "read off") else [f"{entry.gain:.2%}", f"{entry.gain_se:.2%}"]
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
