"""`simpar diff` on a terminal: the difference by cause, then op by op."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from simpar.live.trace_diff import GROUPS, TraceDiff
from simpar.report.width import rich_table
from simpar.units import format_seconds

CAUSES = {
    "gemm": "matrix products", "attention": "attention", "memory_bound": "memory-bound kernels", "optimizer": "optimizer",
    "tp": "tensor parallel, exposed", "cp": "context parallel, exposed", "ep": "expert parallel, exposed",
    "dp": "data parallel, exposed", "pp": "pipeline sends, exposed", "other": "other collectives, exposed", "copy": "copies",
    "launch": "launch gaps: the host is late", "bubble": "bubble: waits for other stages", "idle": "idle",
}  # fmt: skip
_SHOWN = 12


def signed(seconds: float) -> str:
    """A difference with its sign."""
    if abs(seconds) < 1e-9:
        return "0 s"
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def ratio(predicted: float, measured: float) -> str:
    """Measured over predicted, as a change."""
    return f"{measured / predicted - 1:+.1%}" if predicted else ""


def headline(diff: TraceDiff) -> str:
    """One sentence: both steps, and what the difference is made of."""
    change = diff.measured_step_s - diff.predicted_step_s
    parts = [f"{name} {signed(diff.group(name))}" for name in GROUPS if abs(diff.group(name)) > 1e-9]
    text = f"measured {format_seconds(diff.measured_step_s)}, predicted {format_seconds(diff.predicted_step_s)}"
    return f"{text}: {signed(change)} ({ratio(diff.predicted_step_s, diff.measured_step_s)}) = {', '.join(parts) or 'nothing'}"


def cause_rows(diff: TraceDiff) -> list[tuple[str, ...]]:
    """(cause, predicted, measured, difference, share of the predicted step)."""
    step = diff.predicted_step_s or 1.0
    rows: list[tuple[str, ...]] = [
        (CAUSES[c.name], format_seconds(c.predicted_s), format_seconds(c.measured_s), signed(c.difference_s),
         f"{c.difference_s / step:+.1%}")
        for c in diff.causes
    ]  # fmt: skip
    change = diff.measured_step_s - diff.predicted_step_s
    rows.append(("step", format_seconds(diff.predicted_step_s), format_seconds(diff.measured_step_s), signed(change),
                 f"{change / step:+.1%}"))  # fmt: skip
    return rows


def op_table_rows(diff: TraceDiff, at_most: int = _SHOWN) -> list[tuple[str, ...]]:
    """(phase, op, count, predicted, measured, difference, ratio), the largest difference first."""
    return [
        (r.phase, r.name, f"{r.count:,}", format_seconds(r.predicted_s), format_seconds(r.measured_s),
         signed(r.measured_s - r.predicted_s), ratio(r.predicted_s, r.measured_s))
        for r in diff.ops[:at_most]
    ]  # fmt: skip


def collective_table_rows(diff: TraceDiff) -> list[tuple[str, ...]]:
    """(dimension, collective, counts, busy both, exposed both)."""
    return [
        (r.dimension, r.collective, f"{r.predicted_count:,}", f"{r.measured_count:,}", format_seconds(r.predicted_s),
         format_seconds(r.measured_s), format_seconds(r.predicted_exposed_s), format_seconds(r.measured_exposed_s))
        for r in diff.collectives
    ]  # fmt: skip


def late_rows(diff: TraceDiff) -> list[tuple[str, ...]]:
    """(dimension, collective, which, when, predicted, measured)."""
    return [
        (late.dimension, late.collective, f"{late.name} #{late.index}", format_seconds(late.start_s),
         format_seconds(late.predicted_s), format_seconds(late.measured_s))
        for late in diff.late
    ]  # fmt: skip


CAUSE_HEADS = ("cause", "predicted", "measured", "difference", "of the step")
OP_HEADS = ("phase", "op", "times", "predicted", "measured", "difference", "")
COLLECTIVE_HEADS = ("dimension", "collective", "predicted #", "measured #", "predicted busy", "measured busy", "predicted exposed",
                    "measured exposed")  # fmt: skip
LATE_HEADS = ("dimension", "collective", "which", "begins at", "predicted", "measured")


def diff_report(diff: TraceDiff) -> RenderableType:
    """Everything but the timelines."""
    about = f"{diff.scenario}: rank {diff.rank} (pipeline rank {diff.pipeline_rank}), {diff.steps} step(s) of {diff.file}"
    parts: list[RenderableType] = [Text(about), Text(headline(diff), style="bold"), Text("")]
    parts.append(rich_table("Seconds of this rank by cause (mean over the steps)", CAUSE_HEADS, cause_rows(diff)))
    if diff.ops:
        parts += [Text(""), rich_table("Compute, op by op (median step)", OP_HEADS, op_table_rows(diff), (0, 1))]
    if diff.collectives:
        parts += [Text(""), rich_table("Collectives (median step)", COLLECTIVE_HEADS, collective_table_rows(diff), (0, 1))]
    if diff.late:
        parts += [Text(""), rich_table("Late collectives", LATE_HEADS, late_rows(diff), range(3))]
    parts += [Text(f"note: {note}", style="yellow") for note in diff.notes]
    return Group(*parts)
