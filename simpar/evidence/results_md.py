"""validation/RESULTS.md and the recorded bounds that keep the results from getting worse.

`python -m simpar.evidence.results_md` runs every case, writes RESULTS.md, and fails when a group is worse than its bound;
`--record` records bounds from what was found, with a margin: they are lowered, never raised.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from simpar.evidence.cases import CaseReport, chosen_cases, load_cases, run_cases
from simpar.evidence.constants_md import unseen_lines, write_constants
from simpar.evidence.report_tables import markdown, percent, table_of
from simpar.specs.base import checkout_dir, data_dir, read_toml
from simpar.specs.calibration import unseen
from simpar.statistics import Comparison
from simpar.toml import toml

MARGIN: Final = 1.1
"""A recorded bound over the error found when it was recorded."""
FLOOR: Final = 0.005
"""Smallest bound: below it a group is as good as exact."""
_TITLES: Final = {
    "step_time_s": "step time", "peak_memory_bytes": "peak memory", "state_memory_bytes": "model states",
    "bubble_fraction": "bubble (points)", "oom": "fits or not (share wrong)",
}  # fmt: skip


def bounds_path() -> Path:
    """Where the bounds are recorded."""
    return data_dir("validation") / "bounds.toml"


def load_bounds(path: Path | None = None) -> dict[tuple[str, str], float]:
    """(group, metric) -> the largest mean absolute error allowed; empty where none is recorded."""
    path = path or bounds_path()
    if not path.is_file():
        return {}
    return {(str(b["group"]), str(b["metric"])): float(b["mape"]) for b in read_toml(path).get("bound", [])}


def check_bounds(report: CaseReport, bounds: dict[tuple[str, str], float] | None = None) -> list[str]:
    """One sentence per group that is worse than its bound."""
    bounds = load_bounds() if bounds is None else bounds
    worse = []
    for key, summary in report.groups.items():
        bound = bounds.get(key)
        if bound is not None and summary.mape is not None and summary.mape > bound:
            worse.append(f"{key[0]}: {_TITLES.get(key[1], key[1])} error {summary.mape:.2%} is above its bound {bound:.2%}")
    return worse


def bounds_text(report: CaseReport, before: dict[tuple[str, str], float] | None = None) -> str:
    """bounds.toml for `report`; a bound of `before` stays where it is the lower one."""
    before, bounds = before or {}, []
    for (group, metric), summary in report.groups.items():
        if summary.mape is not None:
            bound = min(max(summary.mape * MARGIN, FLOOR), before.get((group, metric), inf))
            bounds.append({"group": group, "metric": metric, "mape": bound})
    head = "# Largest mean absolute error of each group of cases; a change that makes one worse fails CI.\n\n"
    return head + toml({"bound": bounds}, number="{:.4f}".format)


def results_text(report: CaseReport) -> str:
    """RESULTS.md for `report`."""
    bounds = load_bounds()
    lines = [
        "# Published measurements against predictions",
        "",
        "Written by `simpar validate`; do not edit. Errors are predicted / measured - 1 (bubbles: difference in points). "
        "Cases marked *fit* took part in fitting or in reading a framework's behaviour; *test* ones did not, but other runs of "
        "their source may have: cases are predicted with the shipped constants. No constant is set per case; "
        "[CONSTANTS.md](CONSTANTS.md) lists them. The first table is the honest one: whole sources left out.",
        "",
        "## Runs of sources that no fit has seen",
        "",
        *unseen_lines(unseen()),
        "",
        "## Cases by group, with the shipped constants",
        "",
    ]
    groups = [
        (key[0], _TITLES.get(key[1], key[1]), str(s.rows), *map(percent, (s.mape, s.median, s.max, s.bias, bounds.get(key))))
        for key, s in report.groups.items()
    ]
    lines += markdown(("group", "metric"), ("cases", "mean abs. error", "median", "worst", "bias", "bound"), groups)
    lines += ["", "## Every case", ""]
    figures = ("measured", "predicted", "80 % interval", "error")
    lines += markdown(("case", "where", "use", "metric"), figures, map(_case_cells, report.rows))
    if report.outside:
        lines += ["", "## Outside their tolerance", ""]
        lines += [
            f"- {row.id} ({_TITLES.get(row.metric, row.metric)}): {percent(row.error)}, tolerance "
            f"{percent(row.details['tolerance'])}" for row in report.outside
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _amount(metric: str, value: Any) -> str:
    if value is None:
        return "-"
    if metric == "oom":
        return "out of memory" if value else "fits"
    if metric.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.1%}" if metric == "bubble_fraction" else f"{value:.4g} s"


def _case_cells(row: Comparison) -> list[str]:
    interval = "-" if row.low is None else f"{_amount(row.metric, row.low)} to {_amount(row.metric, row.high)}"
    error = "-" if row.error is None else f"{row.error:+.1%}"
    amounts = (_amount(row.metric, value) for value in (row.measured, row.predicted))
    return [row.id, row.group["where"], row.group["use"], _TITLES.get(row.metric, row.metric), *amounts, interval, error]


def write_results(report: CaseReport, path: Path | None = None) -> None:
    """RESULTS.md of the checkout, and CONSTANTS.md beside it; nothing from an installed package or a read-only checkout."""
    if path is None:
        folder = checkout_dir("validation")
        if folder is None:
            return
        path = folder / "RESULTS.md"
        write_constants(folder / "CONSTANTS.md")
    try:
        path.write_text(results_text(report), encoding="utf-8")
    except PermissionError:
        return


def print_cases(report: CaseReport, worse: list[str]) -> None:
    """The groups as a table, then what is outside its tolerance or bound."""
    console = Console()
    lines = [
        (group, _TITLES.get(metric, metric), str(s.rows), *map(percent, (s.mape, s.max, s.bias, s.coverage)))
        for (group, metric), s in report.groups.items()
    ]
    head = ("cases", "mape", "worst", "bias", "in interval")
    console.print(table_of("Published cases", ("group", "metric"), head, lines))
    for row in report.outside:
        console.print(f"outside its tolerance: {row.id} {_TITLES.get(row.metric, row.metric)} {row.error:+.1%}")
    for sentence in worse:
        console.print(f"worse than recorded: {sentence}")
    console.print(f"{len(report.rows)} values in {report.seconds:.1f} s")


def validate_cases(as_json: bool = False, only: Sequence[str] = ()) -> int:
    """`simpar validate`: all published cases, or those chosen; returns the exit code.

    A full run writes validation/RESULTS.md of a checkout. The code is 1 when a case is outside its tolerance or, in a full run,
    a group is worse than its recorded bound.

    Args:
        only: groups, or ids of cases.

    Raises:
        InputError: a file that breaks a rule, or an unknown group or case.
    """
    every = load_cases()
    report = run_cases(chosen_cases(every, only) if only else every, os.cpu_count() or 1, progress=True)
    worse = [] if only else check_bounds(report)
    if as_json:
        sys.stdout.write(json.dumps({**report.as_json(), "worse_than_bound": worse}) + "\n")
    else:
        print_cases(report, worse)
    if not only:
        write_results(report)
    return 1 if worse or report.outside else 0


def main(arguments: list[str] | None = None) -> int:
    """Run every case, write RESULTS.md, check or (`--record`) record the bounds."""
    arguments = sys.argv[1:] if arguments is None else arguments
    report = run_cases(load_cases())
    if "--record" in arguments:
        bounds_path().write_text(bounds_text(report, load_bounds()), encoding="utf-8")
    worse = check_bounds(report)
    write_results(report)
    print_cases(report, worse)
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
