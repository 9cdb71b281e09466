"""Why a step takes what it takes: waterfall, what the interval hangs on, close neighbours, and what a measurement says.

Given measured values, the gap to the prediction is shared out over the parts in proportion to the variance that their intervals
give them: the most probable explanation if the parts err independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simpar.errors import InputError, SimparError, Violation
from simpar.result.result import Result
from simpar.simulate import simulate
from simpar.specs.scenario import Scenario, make_scenario
from simpar.units import format_bytes, format_seconds, parse

MEASURES = {"step_time": "seconds", "mem": "bytes"}


_DERIVED: Final = frozenset({"bubble", "interference"})
"""Categories that follow from others."""
_LEAST_SHARE: Final = 0.005
"""Parts that hold less of a gap have no row in the table."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A layout one change away: its step time and memory, or why it cannot run."""

    change: str
    step_time_s: float | None
    fits: bool
    reason: str = ""


def parse_measured(texts: list[str]) -> dict[str, float]:
    """"step_time=12.3s mem=71GiB" as SI values.

    Raises:
        InputError: an unknown name, or a value without a unit.
    """
    found: dict[str, float] = {}
    for text in (part for t in texts for part in t.split()):
        name, _, value = text.partition("=")
        if name not in MEASURES:
            raise InputError([Violation("--measured", text, f"{name!r} is not known", f"known: {', '.join(MEASURES)}")])
        try:
            found[name] = parse(value, MEASURES[name])
        except ValueError as error:
            raise InputError([Violation("--measured", text, str(error))]) from None
    return found


def _moves(scenario: Scenario) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(what changes, plan changes, training changes) one step away from the scenario."""
    plan, training = scenario.plan, scenario.training
    for name in ("tp", "pp", "cp"):
        value = getattr(plan, name)
        yield f"{name} {value} -> {value * 2}", {name: value * 2, "dp": None}, {}
        if value > 1:
            yield f"{name} {value} -> {value // 2}", {name: value // 2, "dp": None}, {}
    if plan.pp > 1:
        v = plan.virtual_stages
        yield f"virtual_stages {v} -> {v * 2}", {"virtual_stages": v * 2, "schedule": "interleaved"}, {}
        if v > 1:
            yield f"virtual_stages {v} -> {v // 2}", {"virtual_stages": v // 2, "schedule": "auto" if v == 2 else plan.schedule}, {}
    m = training.micro_batch_size
    yield f"micro_batch_size {m} -> {m * 2}", {}, {"micro_batch_size": m * 2}
    if m > 1:
        yield f"micro_batch_size {m} -> {m // 2}", {}, {"micro_batch_size": m // 2}
    for granularity in ("none", "selective", "full"):
        if granularity != plan.recompute:
            yield f"recompute {granularity}", {"recompute": granularity}, {}


def neighbours(scenario: Scenario) -> list[Neighbour]:
    """Every layout one change away, fastest first, those that cannot run last with the reason."""
    found = []
    for change, plan, training in _moves(scenario):
        table = scenario.model_dump(exclude={"file"}, exclude_none=True)
        table["plan"].update({k: v for k, v in plan.items() if v is not None})
        for gone in (k for k, v in plan.items() if v is None):
            table["plan"].pop(gone, None)
        table["training"].update(training)
        table["model"] = scenario.model.model_dump()
        try:
            result = simulate(make_scenario(table, file=scenario.file), detail="stage")
        except SimparError as error:
            found.append(Neighbour(change, None, False, str(error).splitlines()[0].split(": ", 1)[-1]))
            continue
        needed, there = result.worst_rank.device_bytes, result.device_memory_bytes
        reason = "" if result.fits else f"needs {format_bytes(needed)} of {format_bytes(there)}"
        found.append(Neighbour(change, result.step_time_s, result.fits, reason))
    return sorted(found, key=lambda n: (n.step_time_s is None, not n.fits, n.step_time_s or 0.0))


def blame(result: Result, measured_s: float) -> list[tuple[str, float, float]]:
    """(part, seconds of the gap it most probably holds, share of the gap), largest first.

    A part's share follows its variance: its own interval's, and of the calibration's (which is no part of a step) what it would
    hold if every part were off by a factor of its own, alike and independent.
    """
    gap = measured_s - result.step_time_s
    widths = dict(result.step_interval.dominated_by)
    parts = {name: seconds for name, seconds in result.breakdown.items() if name not in _DERIVED and seconds > 0.0}
    norm = sum(seconds**2 for seconds in parts.values())
    unseen = widths.pop("calibration", 0.0) ** 2
    weights = {name: widths.get(name, 0.0) ** 2 + (unseen * parts.get(name, 0.0) ** 2 / norm if norm else 0.0)
               for name in {**parts, **widths}}  # fmt: skip
    total = sum(weights.values())
    found = [(name, gap * w / total, w / total) for name, w in weights.items()] if total else []
    return sorted(found, key=lambda row: -row[2])


def explain(result: Result, measured: dict[str, float]) -> dict[str, Any]:
    """Everything `simpar explain` says, as one JSON object."""
    interval = result.step_interval
    found: dict[str, Any] = {
        "waterfall_s": dict(result.waterfall()),
        "interval": {"low": interval.low, "high": interval.high, "dominated_by": dict(interval.dominated_by)},
        "neighbours": [
            {"change": n.change, "step_time_s": n.step_time_s, "fits": n.fits, "reason": n.reason}
            for n in neighbours(result.layout.scenario)
        ],
    }  # fmt: skip
    if "step_time" in measured:
        seconds = measured["step_time"]
        found["measured"] = {
            "step_time_s": seconds, "predicted_s": result.step_time_s, "inside_interval": interval.low <= seconds <= interval.high,
            "explanation": [{"part": n, "seconds": s, "share": f} for n, s, f in blame(result, seconds)],
        }  # fmt: skip
    if "mem" in measured:
        worst = result.worst_rank
        found["measured_memory"] = {
            "bytes": measured["mem"], "allocated": worst.allocated_bytes, "reserved": worst.reserved_bytes,
            "device": worst.device_bytes,
            "closest": min(("allocated", "reserved", "device"), key=lambda k: abs(getattr(worst, f"{k}_bytes") - measured["mem"])),
        }  # fmt: skip
    return found


def explain_report(result: Result, found: dict[str, Any]) -> RenderableType:
    """The same as tables."""
    from simpar.report.step_table import waterfall_table

    parts: list[RenderableType] = [Text(result.layout.scenario.name, style="bold underline"), waterfall_table(result), Text("")]
    widest = Table("the 80 % interval hangs on", "seconds either way", box=None)
    for name, seconds in found["interval"]["dominated_by"].items():
        widest.add_row(name, f"{seconds:.4g}")
    near = Table("one change away", "step time", "against now", "", box=None)
    for row in found["neighbours"]:
        seconds = row["step_time_s"]
        time = format_seconds(seconds) if seconds else "-"
        change = f"{seconds / result.step_time_s - 1:+.1%}" if seconds else ""
        near.add_row(row["change"], time, change, row["reason"][:90])
    parts += [widest, Text(""), near]
    if "measured" in found:
        m = found["measured"]
        inside = "inside" if m["inside_interval"] else "outside"
        text = f"\nmeasured {format_seconds(m['step_time_s'])}, predicted {format_seconds(m['predicted_s'])}: {inside} the interval"
        table = Table("the gap most probably lies in", "seconds", "share", box=None)
        for row in (r for r in m["explanation"] if r["share"] >= _LEAST_SHARE):
            table.add_row(row["part"], f"{row['seconds']:+.4g}", f"{row['share']:.0%}")
        parts += [Text(text, style="bold"), table]
    if "measured_memory" in found:
        m = found["measured_memory"]
        figures = ", ".join(f"{k} {format_bytes(m[k])}" for k in ("allocated", "reserved", "device"))
        text = f"\nmeasured memory {format_bytes(m['bytes'])}; predicted {figures} (closest: {m['closest']})"
        parts.append(Text(text, style="bold"))
    return Group(*parts)
