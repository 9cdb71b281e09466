"""The table of errors on unseen sources in README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from simpar.evidence.report_tables import markdown
from simpar.specs.base import checkout_dir
from simpar.specs.calibration import ANY, Unseen

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
