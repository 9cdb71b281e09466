"""What a plan comes to as tables: the same on a terminal and in a page."""

from __future__ import annotations

from typing import Final

from simpar.planning.answer import Answer, Quantiles
from simpar.planning.questions import PlanReport
from simpar.planning.sensitivity import Tornado
from simpar.planning.study import Study
from simpar.report.tables import Table
from simpar.units import format_seconds

Row = tuple[str, ...]

HEADLINES: Final = (
    ("days", "days", "{:,.2f}"),
    ("gpu_hours", "GPU-hours", "{:,.0f}"),
    ("reserved_gpu_hours", "GPU-hours with spares", "{:,.0f}"),
    ("goodput", "goodput", "{:.1%}"),
    ("effective_training_time_ratio", "effective training time", "{:.1%}"),
    ("cost_usd", "cost, US$", "{:,.0f}"),
    ("usd_per_million_tokens", "US$ per million tokens", "{:,.4f}"),
    ("energy_kwh", "energy, kWh", "{:,.0f}"),
    ("carbon_kg", "CO2, kg", "{:,.0f}"),
    ("checkpoints", "checkpoints", "{:,.0f}"),
)
"""(field of the answer, title, format)."""
CLOSED_FORMS_TITLE: Final = "Closed forms (no shortage of spares, no slow nodes, no maintenance)"
STORAGE_TITLE: Final = "What checkpoints ask of the storage"
PUBLISHED_TITLE: Final = "Published figures (never inputs)"


def _cells(quantiles: Quantiles | None, form: str) -> tuple[str, str, str]:
    if quantiles is None:
        return "", "", ""
    return form.format(quantiles.p10), form.format(quantiles.p50), form.format(quantiles.p90)


def runs_title(answer: Answer) -> str:
    """What the quantiles are over."""
    return f"{answer.simulation.repetitions} simulated runs, seed {answer.simulation.seed}"


def headline_table(answer: Answer) -> Table:
    """The answer's quantities, and the days of each phase where there are several."""
    known = [(label, getattr(answer, name), form) for name, label, form in HEADLINES]
    rows: list[Row] = [(label, *_cells(quantiles, form)) for label, quantiles, form in known if quantiles is not None]
    phases = answer.phase_days.items() if len(answer.phase_days) > 1 else ()
    rows += [(f"  days of {phase}", *_cells(quantiles, "{:,.2f}")) for phase, quantiles in phases]
    return Table(("", "p10", "p50", "p90"), rows, (1, 2, 3))


def ledger_table(answer: Answer) -> Table:
    """Hours lost by cause."""
    wall = answer.days.p50 * 24.0 if answer.days else 1.0
    rows: list[Row] = []
    for cause, quantiles in answer.lost_time_s.items():
        if quantiles.p90 > 0:
            hours = Quantiles(quantiles.p10 / 3600, quantiles.p50 / 3600, quantiles.p90 / 3600)
            rows.append((cause.replace("_", " "), *_cells(hours, "{:,.2f}"), f"{hours.p50 / wall:.2%}"))
    return Table(("cause", "p10", "p50", "p90", "share of days (p50)"), rows, (1, 2, 3, 4))


def failure_rows(answer: Answer) -> list[Row]:
    """How many failures of each component."""
    return [(f"failures of {name} (count)", *_cells(counts, "{:,.0f}"), "") for name, counts in answer.failures.items()]


def closed_forms_table(answer: Answer) -> Table:
    """What the formulas say."""
    rows = [(_TITLES.get(name, name.replace("_", " ")), _number(name, value)) for name, value in answer.closed_forms.items()]
    return Table(("", ""), rows, (1,))


_TITLES: Final = {
    "mtti_s": "mean time to interrupt", "recovery_s": "mean recovery", "checkpoint_interval_s": "interval between checkpoints",
    "checkpoint_stall_s": "stall of a checkpoint", "young_interval_s": "best interval, first order (Young)",
    "daly_interval_s": "best interval, higher order (Daly)", "exact_interval_s": "best interval, exact",
    "goodput_first_order": "goodput, first order", "goodput_exact": "goodput, exact",
    "expected_ettr": "effective training time ratio", "spares_needed": "spares needed",
    "probability_spares_short": "probability that spares run short",
}  # fmt: skip


def _number(name: str, value: float) -> str:
    if name.endswith("_s"):
        return format_seconds(value)
    if name.startswith(("goodput", "expected")):
        return f"{value:.1%}"
    if name.startswith("probability"):
        return f"{value:.2%}" if value >= 1e-4 else "below 0.01%"
    return f"{value:,.4g}"


def storage_table(answer: Answer) -> Table:
    """What the checkpoints ask of the storage; no rows where that is not known."""
    found = answer.storage
    if not found:
        return Table(("", ""), ())
    rows: list[Row] = [
        ("one checkpoint, kept", f"{_bytes(found['checkpoint_bytes'])}, {_bytes(found['kept_bytes'])}"),
        ("bandwidth while one is written", f"{_bytes(found['write_bandwidth_bytes_per_s'])}/s"),
        ("bandwidth on average", f"{_bytes(found['mean_write_bandwidth_bytes_per_s'])}/s"),
        ("written to", f"{found['busy_fraction']:.1%} of the time"),
    ]
    if answer.written_bytes is not None:
        rows.insert(1, ("written over the run (p50)", _bytes(answer.written_bytes.p50)))
    return Table(("", ""), rows, (1,))


def _bytes(value: float) -> str:
    """Bytes in the decimal units that storage is sold in."""
    for unit, size in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:,.4g} {unit}"
    return f"{value:,.0f} B"


def plain(value: float) -> str:
    """Five digits without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.5g}"


def published_table(report: PlanReport) -> Table:
    """Published figures beside the predicted ones."""
    rows = [
        (c.metric.replace("_", " "), plain(c.published), "" if c.predicted is None else plain(c.predicted),
         "" if c.error is None else f"{c.error:+.1%}", "yes" if c.holds else "NO", f"{c.source}. {c.note}" if c.note else c.source)
        for c in report.published
    ]  # fmt: skip
    return Table(("metric", "published", "predicted", "error", "holds", "source"), rows, (1, 2, 3))


def study_table(study: Study) -> Table:
    """One per point."""
    rows: list[Row] = []
    for point in study.points:
        answer = point.answer
        rows.append((
            point.label,
            f"{answer.days.p50:,.2f}" if answer.days else "",
            f"{answer.goodput.p50:.1%}" if answer.goodput else "",
            f"{answer.cost_usd.p50:,.0f}" if answer.cost_usd else "",
            f"{point.mfu:.1%}" if point.mfu is not None else "",
            point.layout,
            "; ".join((*answer.binding, point.note) if point.note else answer.binding),
        ))  # fmt: skip
    return Table(("", "days", "goodput", "cost, US$", "MFU", "layout", "binds"), rows, (1, 2, 3, 4))


def tornado_table(tornado: Tornado) -> Table:
    """One per assumption, widest first."""
    rows: list[Row] = []
    for swing in tornado.swings:
        days = " to ".join("never" if d is None else f"{d:,.2f}" for d in swing.days)
        cost = " to ".join("" if c is None else f"{c / 1e6:,.4g}" for c in swing.cost_usd)
        ends = f"x{swing.low_factor:g} to x{swing.high_factor:g}"
        rows.append((swing.name, ends, days, "" if cost == " to " else cost))
    return Table(("assumption", "ends", "days", "cost, million US$"), rows, (1, 2, 3))


def assumption_table(answer: Answer) -> Table:
    """What the answer rests on."""
    return Table(("number", "value", "kind", "source"), [(a.name, a.value, a.kind, a.source) for a in answer.assumptions])
