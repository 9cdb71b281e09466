"""What `simpar explain` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simpar.report.explain import CLOSE, KINDS
from simpar.report.step_table import advice, waterfall_table
from simpar.result.categories import title_of
from simpar.result.result import Result
from simpar.units import format_bytes, format_seconds

_LEAST_SHARE: Final = 0.005
"""Parts that hold less of a gap have no row in the table."""
_TENSORS: Final = 8
"""Names of tensors that are shown."""
FAR: Final = 2.0
"""Beyond so many half-widths of the interval, what the scenario does not say is likelier than a price."""


def explain_report(result: Result, found: dict[str, Any]) -> RenderableType:
    """The same as tables."""
    interval, memory = found["interval"], found["memory"]
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    head = Text(
        f"predicted {format_seconds(result.step_time_s)} (80 %: {format_seconds(interval['low'])} to "
        f"{format_seconds(interval['high'])}); {format_bytes(memory['device'])} of {format_bytes(memory['device_memory_bytes'])} "
        f"on the fullest rank: {verdict}", style="" if memory["fits"] else "bold red",
    )  # fmt: skip
    parts: list[RenderableType] = [Text(result.layout.scenario.name, style="bold underline"), head]
    if not memory["fits"]:
        parts += [Text(advice(result)), *_tensor_lines(memory["tensors_at_peak"])]
    parts += [Text(""), waterfall_table(result), Text("")]
    widest = Table("the 80 % interval hangs on (added in quadrature)", "seconds either way", box=None)
    for name, seconds in interval["dominated_by"].items():
        widest.add_row(title_of(name), f"{seconds:.3g}")
    parts += [widest, Text(""), _near_table(result, found["neighbours"])]
    if "measured" in found:
        parts += _gap_lines(found["measured"])
    for m in found.get("measured_memory_kinds", [found["measured_memory"]] if "measured_memory" in found else []):
        parts += _memory_lines(m)
    if "measured_memory" in found and memory["fits"]:
        parts += _tensor_lines(memory["tensors_at_peak"])
    for run in found.get("runs", ()):
        parts += _run_lines(run)
    return Group(*parts)


_LIKELY: Final = 0.05
"""Causes below this probability are not shown."""


def _run_lines(run: Mapping[str, Any]) -> list[RenderableType]:
    """One run: its causes by probability, what shows them, what to check and what it would gain."""
    title = Text(f"\nrun {run['id']}", style="bold")
    if run["skipped"]:
        return [title, Text(run["skipped"])]
    off = run["measured_s"] / run["predicted_s"] - 1.0
    head = Text(f"measured {format_seconds(run['measured_s'])}, predicted {format_seconds(run['predicted_s'])} ({off:+.1%})")
    table = Table("cause", "probability", "holds", "step without it", "shown by", box=None)
    likely = [cause for cause in run["causes"] if cause["probability"] >= _LIKELY]
    for cause in likely:
        held = cause["extra_s"] > 0.0
        signs = ", ".join(f"{name} {value:+.2g}" for name, value in cause["signs"].items())
        table.add_row(
            cause["cause"], f"{cause['probability']:.0%}", format_seconds(cause["extra_s"]) if held else "",
            f"{format_seconds(cause['step_time_without_s'])} ({cause['gain']:+.0%} tokens/s)" if held else "", signs,
        )  # fmt: skip
    checks = [Text(f"next, {cause['cause']}: {cause['check']}") for cause in likely[:2]]
    return [title, head, table, *checks]


def _tensor_lines(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """The largest of what comes and goes."""
    table = Table("largest tensors at the peak", "alive", "GiB", "held for", box=None)
    for row in rows[:_TENSORS]:
        table.add_row(row["tensor"], str(row["count"]), f"{row['bytes'] / 2**30:.2f}", format_seconds(row["mean_life_s"]))
    return [Text(""), table] if rows else []


def _near_table(result: Result, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("one change away", "step time", "against now", "why", box=None)
    for row in rows:
        seconds = row["step_time_s"]
        change = f"{seconds / result.step_time_s - 1:+.1%}" if seconds else ""
        causes = [f"{part.removesuffix(', exposed')} {amount:+.3g} s" for part, amount in
                  ((cause["part"], cause["seconds"]) for cause in row["causes"])]  # fmt: skip
        why = [row["reason"], ", ".join(causes)] if seconds else [row["reason"]]
        style = "bold" if row["close"] and row["fits"] else ""
        table.add_row(row["change"], format_seconds(seconds) if seconds else "-", change, "; ".join(filter(None, why)) or "no part "
                      "changes by 0.1 % of the step", style=style)  # fmt: skip
    table.caption = f"bold: fits and within {CLOSE:.0%}"
    table.caption_justify = "left"
    return table


def _gap_lines(m: Mapping[str, Any]) -> list[RenderableType]:
    inside = "inside" if m["inside_interval"] else "outside"
    text = f"\nmeasured {format_seconds(m['step_time_s'])}, predicted {format_seconds(m['predicted_s'])}: {inside} the interval"
    table = Table("the gap most probably lies in", "seconds", "share", "predicted", "would take", box=None)
    for row in (r for r in m["explanation"] if r["share"] >= _LEAST_SHARE):
        now, then = row["predicted_s"], row["predicted_s"] + row["seconds"]
        known = row["part"] != "unexplained"
        table.add_row(title_of(row["part"]), f"{row['seconds']:+.3g}", f"{row['share']:.0%}", f"{now:.3g}" if known else "",
                      f"{then:.3g}" if known else "")  # fmt: skip
    parts: list[RenderableType] = [Text(text, style="bold"), table]
    if m["below_ideal"]:
        parts.append(Text("The measured step is shorter than its model FLOPs take at peak: look for another precision, batch, "
                          "model or number of GPUs than the scenario has."))  # fmt: skip
    elif m["half_widths"] and m["half_widths"] > FAR:
        parts.append(Text(f"{m['half_widths']:.1f} half-widths of the interval away: something that the scenario does not say "
                          "(another layout, a slow node, data loading) is likelier than a wrong price."))  # fmt: skip
    closer = (f"One change away comes closer: {row['change']}, {format_seconds(row['step_time_s'])}" for row in m["like"])
    return [*parts, *map(Text, closer)]


def _memory_lines(m: Mapping[str, Any]) -> list[RenderableType]:
    figures = ", ".join(f"{kind} {format_bytes(m[kind])}" for kind in KINDS)
    kind = m["closest"] if m["kind_known"] else f"closest: {m['closest']}"
    text = f"\nmeasured memory {format_bytes(m['bytes'])}; predicted {figures} ({kind})"
    table = Table(f"the gap of {m['gap'] / 2**30:+.2f} GiB most probably lies in", "GiB", "share", "predicted", box=None)
    for row in (r for r in m["explanation"] if r["share"] >= _LEAST_SHARE):
        known = row["part"] != "unexplained"
        table.add_row(title_of(row["part"]), f"{row['bytes'] / 2**30:+.2f}", f"{row['share']:.0%}",
                      f"{row['predicted'] / 2**30:.2f}" if known else "")  # fmt: skip
    return [Text(text, style="bold"), table]
