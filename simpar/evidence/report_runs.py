"""The report of `simpar validate runs` for a terminal and as JSON. Its page is report/runs_view.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from simpar.evidence.report_tables import percent, table_of
from simpar.evidence.runs import Report
from simpar.output import finite
from simpar.ranking import SweepRanking, summarize_rankings
from simpar.statistics import ABSOLUTE_METRICS, LABEL_METRICS, ErrorSummary, Group

METRIC_TITLES: Final = {
    "step_time_s": "Step time", "peak_memory_bytes": "Peak memory", "bubble_fraction": "Bubble fraction",
    "oom": "Out of memory",
}  # fmt: skip
NAMED: Final = 6
"""Ids of one reason in the terminal; JSON and page have all."""
ERROR_HEAD: Final = ("rows", "skipped", "mape", "median", "p90", "bias", "in interval")
RANKING_HEAD: Final = ("source", "sweeps", "layouts", "mean tau", "mean regret", "of five", "worst regret")


def print_report(report: Report, as_json: bool) -> None:
    """The report on standard output, as JSON or as tables."""
    if as_json:
        sys.stdout.write(json.dumps(finite(report.as_json())) + "\n")
        return
    console = Console()
    for metric in dict.fromkeys(group.metric for group in report.groups):
        if metric not in LABEL_METRICS:
            console.print(_table(metric, [group for group in report.groups if group.metric == metric]))
    fits = report.fits
    if fits.rows:
        console.print(
            f"Out of memory: {fits.accuracy:.1%} of {fits.rows} labelled runs told right "
            f"(ran, called fitting {fits.fits_called_fits}; ran, called OOM {fits.fits_called_oom}; "
            f"OOM, called OOM {fits.oom_called_oom}; OOM, called fitting {fits.oom_called_fits})"
        )
        bands = "; ".join(
            f"{band.low:.0%} to {band.high:.0%}: {band.ran} of {band.ran + band.out_of_memory}" for band in report.by_chance
        )
        console.print(f"Runs that ran, by their chance to fit: {bands}")
    if report.impossible:
        _print_named(console, "called impossible by their memory", {"ran all the same": report.impossible})
    ranking = report.ranking
    if ranking.sweeps and ranking.mean_tau is not None and ranking.mean_regret_1 is not None:
        title = "Ranking of layouts (each sweep: --json, --html)"
        console.print(table_of(title, RANKING_HEAD[:1], RANKING_HEAD[1:], ranking_lines(report.sweeps)))
        console.print(
            f"Ranking over {ranking.sweeps} sweeps: Kendall tau {ranking.mean_tau:.3f}, regret of the predicted best "
            f"{ranking.mean_regret_1:.2%}, of the best of five {ranking.mean_regret_5:.2%}"
        )
    _print_named(console, "not expressed", report.not_expressed)
    _print_named(console, "excluded by the data", report.excluded)
    if report.repeated:
        _print_named(console, "several runs each", {"have one id": report.repeated})
    console.print(f"{len(report.rows)} values of {report.runs} runs in {report.seconds:.1f} s")


def _print_named(console: Console, title: str, reasons: Mapping[str, Sequence[str]]) -> None:
    for reason, ids in reasons.items():
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        console.print(f"{title}: {len(ids)} x {reason}: {', '.join(ids[:NAMED])}{more}", markup=False, soft_wrap=True)


def ranking_lines(sweeps: Sequence[SweepRanking]) -> list[tuple[str, ...]]:
    """Ranking quality by source, the columns of RANKING_HEAD."""
    lines = []
    for source in dict.fromkeys(str(sweep.key.get("source")) for sweep in sweeps):
        mine = [sweep for sweep in sweeps if str(sweep.key.get("source")) == source]
        s = summarize_rankings(mine)
        tau = "-" if s.mean_tau is None else f"{s.mean_tau:.3f}"
        layouts = str(sum(sweep.layouts for sweep in mine))
        lines.append((source, str(s.sweeps), layouts, tau, *map(percent, (s.mean_regret_1, s.mean_regret_5, s.worst_regret_1))))
    return lines


def error_cells(s: ErrorSummary) -> list[str]:
    """The columns of ERROR_HEAD."""
    return [str(s.rows), str(s.skipped), *map(percent, (s.mape, s.median, s.p90, s.bias, s.coverage))]


def _table(metric: str, groups: Sequence[Group]) -> Table:
    unit = " (points)" if metric in ABSOLUTE_METRICS else ""
    labels = [", ".join(f"{key} {value}" for key, value in group.by.items()) or "all" for group in groups]
    lines = [(label, *error_cells(group.summary)) for label, group in zip(labels, groups, strict=True)]
    return table_of(METRIC_TITLES.get(metric, metric) + unit, ("group",), ERROR_HEAD, lines)
