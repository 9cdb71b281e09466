"""validation/CONSTANTS.md: the registry of fitted numbers, what each means and what it gains on unseen sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from simpar.evidence.report_tables import markdown
from simpar.specs.base import checkout_dir, data_dir
from simpar.specs.calibration import ANY, KNOWN, Constant, Unseen, constants, unseen

FAMILIES: Final = {
    "megatron-core": "Megatron-LM, NeMo, Megatron-Bridge, others built on it", "torchtitan": "torchtitan, torchtune, prime-rl",
    "deepspeed": "DeepSpeed", "llm-foundry": "torch FSDP", "maxtext": "MaxText", "plain": "own loops in plain torch",
}  # fmt: skip
"""Families by the names of frameworks in them."""
CHIPS: Final = {"cdna3": "CDNA3", "cdna4": "CDNA4", "blackwell-rtx": "Blackwell RTX"}
"""Architectures of GPUs that are not written like a name."""
MARKS: Final = ("<!-- unseen -->", "<!-- /unseen -->")
"""Around README's table."""
LEAST_ROWS: Final = 8
"""Fewest runs of a line in README's table."""


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
        "it, each source left out of the fit; a constant whose gain does not exceed its standard error is not kept, and one that "
        "pays for all together does not hold for a family that it does not help. Factors of nested groups multiply; a width is "
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


def readme_table(rows: Sequence[Unseen]) -> list[str]:
    """The lines of README's table: all runs, and families of at least `LEAST_ROWS`, by architecture where several sources are."""
    listed = [row for row in rows if row.source == ANY and row.rows >= LEAST_ROWS]
    split = {row.family for row in listed if row.architecture != ANY}
    kept = [row for row in listed if row.family == ANY or row.architecture != ANY or row.family not in split]
    lines = []
    for row in kept:
        name = "all" if row.family == ANY else FAMILIES.get(row.family, row.family)
        chips = "all" if row.architecture == ANY else CHIPS.get(row.architecture, row.architecture.capitalize())
        errors = (f"{value:.0%}".replace("%", " %") for value in (row.neutral_median, row.median, row.mean, row.coverage))
        lines.append((name, chips, str(row.rows), str(row.sources), *errors))
    head = ("runs", "sources", "median error, nothing fitted", "median error, unseen", "mean", "coverage")
    return markdown(("unseen sources", "GPUs"), head, lines)


def write_readme(rows: Sequence[Unseen], path: Path | None = None) -> None:
    """The table of README.md between its marks, in a checkout."""
    folder = checkout_dir("validation")
    path = path or (folder.parent / "README.md" if folder else None)
    if path is None or not path.is_file():
        return
    before, _, rest = path.read_text(encoding="utf-8").partition(f"{MARKS[0]}\n")
    _, mark, after = rest.partition(MARKS[1])
    if mark:
        path.write_text("\n".join([f"{before}{MARKS[0]}", *readme_table(rows), f"{mark}{after}"]), encoding="utf-8")


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
