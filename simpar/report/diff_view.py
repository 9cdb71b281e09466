"""`simpar diff` on a terminal: the difference by cause, then op by op."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from simpar.live.trace_diff import GROUPS, TraceDiff
from simpar.report.tables import Table
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


def cause_table(diff: TraceDiff) -> Table:
    """Each cause, and the step; the share is of the predicted step."""
    step = diff.predicted_step_s or 1.0
    rows: list[tuple[str, ...]] = [
        (CAUSES[c.name], format_seconds(c.predicted_s), format_seconds(c.measured_s), signed(c.difference_s),
         f"{c.difference_s / step:+.1%}")
        for c in diff.causes
    ]  # fmt: skip
    change = diff.measured_step_s - diff.predicted_step_s
    rows.append(("step", format_seconds(diff.predicted_step_s), format_seconds(diff.measured_step_s), signed(change),
                 f"{change / step:+.1%}"))  # fmt: skip
    return Table(("cause", "predicted", "measured", "difference", "of the step"), rows, (1, 2, 3, 4))


def op_table(diff: TraceDiff, at_most: int = _SHOWN) -> Table:
    """Compute, the largest difference first."""
    rows = [
        (r.phase, r.name, f"{r.count:,}", format_seconds(r.predicted_s), format_seconds(r.measured_s),
         signed(r.measured_s - r.predicted_s), ratio(r.predicted_s, r.measured_s))
        for r in diff.ops[:at_most]
    ]  # fmt: skip
    return Table(("phase", "op", "times", "predicted", "measured", "difference", ""), rows, (2, 3, 4, 5, 6))


def collective_table(diff: TraceDiff) -> Table:
    """Collectives by kind."""
    rows = [
        (r.dimension, r.collective, f"{r.predicted_count:,}", f"{r.measured_count:,}", format_seconds(r.predicted_s),
         format_seconds(r.measured_s), format_seconds(r.predicted_exposed_s), format_seconds(r.measured_exposed_s))
        for r in diff.collectives
    ]  # fmt: skip
    heads = ("dimension", "collective", "predicted #", "measured #", "predicted busy", "measured busy", "predicted exposed",
             "measured exposed")  # fmt: skip
    return Table(heads, rows, tuple(range(2, 8)))


def late_table(diff: TraceDiff) -> Table:
    """Collectives that stand out from the others of their kind."""
    rows = [
        (late.dimension, late.collective, f"{late.name} #{late.index}", format_seconds(late.start_s),
         format_seconds(late.predicted_s), format_seconds(late.measured_s))
        for late in diff.late
    ]  # fmt: skip
    return Table(("dimension", "collective", "which", "begins at", "predicted", "measured"), rows, (3, 4, 5))


def diff_report(diff: TraceDiff) -> RenderableType:
    """Everything but the timelines."""
    about = f"{diff.scenario}: rank {diff.rank} (pipeline rank {diff.pipeline_rank}), {diff.steps} step(s) of {diff.file}"
    parts: list[RenderableType] = [Text(about), Text(headline(diff), style="bold"), Text("")]
    parts.append(cause_table(diff).rich("Seconds of this rank by cause (mean over the steps)"))
    if diff.ops:
        parts += [Text(""), op_table(diff).rich("Compute, op by op (median step)")]
    if diff.collectives:
        parts += [Text(""), collective_table(diff).rich("Collectives (median step)")]
    if diff.late:
        parts += [Text(""), late_table(diff).rich("Late collectives")]
    parts += [Text(f"note: {note}", style="yellow") for note in diff.notes]
    return Group(*parts)
