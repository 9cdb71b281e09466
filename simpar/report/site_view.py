"""What a cluster's runs said, as tables: what moved, by how much, what it did to the interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from simpar.report.tables import rich_table
from simpar.site.learned import Adapted
from simpar.specs.site import TENTH
from simpar.units import format_bytes, format_seconds

MOST_LINES = 12
"""Runs that are shown; --json has all."""


def site_report(found: Adapted) -> RenderableType:
    """Factors before and after, the runs behind them, errors and intervals, and the runs that say nothing."""
    parts: list[RenderableType] = []
    if not found.runs:
        parts.append("No run to learn from: nothing changes.")
    else:
        parts += [_factors(found), "", _runs(found), "", *_changes(found)]
    if found.unused:
        reasons = Counter(run.reason for run in found.unused)
        parts.append(f"{len(found.unused)} runs say nothing:")
        parts += [f"  {count} x {reason}" for reason, count in reasons.most_common(5)]
    return Group(*parts)


def _factors(found: Adapted) -> Table:
    table = rich_table(f"{found.site.name}: what moved", ("", "factor", "80 % interval", "before the runs"))
    after = TENTH * np.sqrt(np.diag(found.posterior.covariance))
    before = TENTH * np.sqrt(np.diag(found.prior.usual_covariance))
    for index, (name, value) in enumerate(found.site.factors.items()):
        interval = f"{value * math.exp(-after[index]):.3f} to {value * math.exp(after[index]):.3f}"
        table.add_row(name, f"x {value:.3f}", interval, f"{math.exp(-before[index]):.3f} to {math.exp(before[index]):.3f}")
    for kind in found.site.kinds:
        table.add_row(f"all of {kind.name}", f"x {kind.factor:.3f}", "", "")
    for told in found.site.facts:
        table.add_row(told.fact, f"{told.factor:.2f} times as likely", "", "")
    extra = found.site.peak_memory_bytes
    if extra:
        table.add_row("memory on a device", f"{'+' if extra > 0 else '-'}{format_bytes(abs(extra))}", "", "")
    return table


def _runs(found: Adapted) -> Table:
    heads = ("run", "measured", "without site", "error", "with site", "error", "believed")
    table = rich_table("runs learned from", heads)
    for run in found.site.runs[:MOST_LINES]:
        errors = [f"{getattr(run, key) / run.measured_s - 1.0:+.1%}" for key in ("before_s", "after_s")]
        table.add_row(
            run.id, format_seconds(run.measured_s), format_seconds(run.before_s), errors[0], format_seconds(run.after_s), errors[1],
            f"{run.weight:.0%}",
        )  # fmt: skip
    if len(found.site.runs) > MOST_LINES:
        table.add_row(f"... and {len(found.site.runs) - MOST_LINES} more with --json")
    return table


def _changes(found: Adapted) -> list[str]:
    (error, better), (wide, narrow) = found.errors, found.widths
    lines = [
        f"Mean error of these runs: {error:.1%} without the site, {better:.1%} with it.",
        f"80 % interval of their steps: ± {wide:.1%} without the site, ± {narrow:.1%} with it.",
    ]
    if found.doubted:
        named = ", ".join(found.doubted[:5])
        lines.append(f"Runs that contradict the others and count little: {named}; look at their logs before trusting the rest.")
    return lines


def tuning_report(found: Mapping[str, Any]) -> RenderableType:
    """The trials of `simpar tune`, the best layout so far, and what comes next."""
    table = rich_table("trials", ("trial", "layout", "worth", "expected", "measured"), texts=(0, 1))
    for trial in found["trials"]:
        measured = trial["failed"] or ("" if trial["measured_s"] is None else format_seconds(trial["measured_s"]))
        row = (trial["folder"], trial["layout"], f"{trial['worth']:.1%}", format_seconds(trial["expected_s"]), measured)
        table.add_row(*row)
    best = found["best"]
    tried = "measured" if best["tried"] else "not run yet"
    interval = f"{format_seconds(best['low'])} to {format_seconds(best['high'])}"
    line = f"Best so far: {best['layout']}, {format_seconds(best['step_time_s'])} a step (80 %: {interval}; {tried})."
    return Group(table, "", line, f"Stopped: {found['why']}.")
