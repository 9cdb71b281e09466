"""Why a step takes what it takes: waterfall, what the interval hangs on, close neighbours, and what a measurement says.

Given measured values, the gap to the prediction is shared out over the parts in proportion to the variance that their intervals
give them: the most probable explanation if the parts err independently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simpar.errors import InputError, SimparError, Violation
from simpar.result.result import Result
from simpar.specs.architecture import has_experts
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate
from simpar.units import format_bytes, parse

MEASURES: Final = {"step_time": "seconds", "mem": "bytes", "allocated": "bytes", "reserved": "bytes", "device": "bytes"}
"""What may be measured; mem is memory whose kind is not known."""
KINDS: Final = ("allocated", "reserved", "device")
_DERIVED: Final = frozenset({"bubble", "interference", "skew"})
"""Categories that follow from others."""
CLOSE: Final = 0.05
"""A layout one change away is close if its step time is within this share of the scenario's."""
_CAUSES: Final = 2
"""Parts of the step that are named as the reason why a neighbour is slower or faster."""
MEMORY_SPREAD: Final = {"parameters": 0.01, "gradients": 0.02, "optimizer": 0.01, "activations": 0.05, "fragmentation": 0.5}
"""How far parts of a predicted peak may be off (assumed): weights and states are counted, activations depend on what kernels save,
what the allocator keeps on the order of its requests."""
OTHER_SPREAD: Final = 0.25
"""Of every other part: buffers and workspaces."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A layout one change away: its step time and memory, or why it cannot run.

    Attributes:
        change: what differs.
        step_time_s: None where it cannot run.
        device_bytes: of the fullest rank.
        fits: whether it runs in the memory there is.
        reason: why it cannot run or does not fit, "" where it does.
        causes: (part of the waterfall, seconds more), the largest differences first.
    """

    change: str
    step_time_s: float | None
    device_bytes: float | None
    fits: bool
    reason: str = ""
    causes: tuple[tuple[str, float], ...] = ()


def parse_measured(texts: list[str]) -> dict[str, float]:
    """ "step_time=12.3s mem=71GiB" as SI values.

    Raises:
        InputError: an unknown name, a value without a unit, not above 0 or given twice; all that is wrong together.
    """
    found: dict[str, float] = {}
    wrong: list[Violation] = []
    for text in texts:
        parts = re.split(r"\s+(?=\w+\s*=)", text.strip())
        for name, sign, value in (part.partition("=") for part in parts):
            name, value = name.strip(), value.strip()
            written = f"{name}{sign}{value}"
            if name not in MEASURES:
                wrong.append(Violation("--measured", written, f"{name!r} is not known", f"known: {', '.join(MEASURES)}"))
            elif name in found:
                wrong.append(Violation("--measured", written, f"{name} is given twice", "give it once"))
            else:
                try:
                    found[name] = parse(value, MEASURES[name])
                except ValueError as error:
                    wrong.append(Violation("--measured", written, str(error)))
                else:
                    if not found[name]:
                        wrong.append(Violation("--measured", written, "must be more than 0"))
    if wrong:
        raise InputError(wrong)
    return found


Move = tuple[str, dict[str, Any], dict[str, Any]]
"""What changes, in words; fields of the plan and of the training; None = back to the default."""


def _moves(scenario: Scenario) -> Iterator[Move]:
    """Everything one step away from the scenario."""
    plan, training = scenario.plan, scenario.training
    for name in ("tp", "pp", "cp") if plan.stage_tp is None else ():
        for value in _doubled_and_halved(getattr(plan, name)):
            again: dict[str, Any] = {name: value, "dp": None}
            if name == "pp":
                again["layers_per_stage"] = None
            yield f"{name} {getattr(plan, name)} -> {value}", again, {}
    if has_experts(scenario.model):
        for value in _doubled_and_halved(plan.ep):
            yield f"ep {plan.ep} -> {value}", {"ep": value}, {}
    for stage in (plan.zero_stage - 1, plan.zero_stage + 1):
        if 0 <= stage <= 3:
            yield f"zero_stage {plan.zero_stage} -> {stage}", {"zero_stage": stage}, {}
    if plan.tp > 1:
        yield f"sequence_parallel {not plan.sequence_parallel}", {"sequence_parallel": not plan.sequence_parallel}, {}
    if plan.pp > 1:
        yield from _pipeline_moves(scenario)
    for value in _doubled_and_halved(training.micro_batch_size):
        yield f"micro_batch_size {training.micro_batch_size} -> {value}", {}, {"micro_batch_size": value}
    for granularity in ("none", "selective", "full"):
        if granularity != plan.recompute:
            yield f"recompute {granularity}", {"recompute": granularity}, {}


def _pipeline_moves(scenario: Scenario) -> Iterator[Move]:
    v, schedule = scenario.plan.virtual_stages, scenario.plan.schedule
    usual = schedule in ("auto", "1f1b", "interleaved")
    for value in _doubled_and_halved(v):
        name = "auto" if value == 1 else "interleaved"
        text = f"virtual_stages {v} -> {value}" + ("" if usual else ", 1f1b" if value == 1 else ", interleaved")
        yield text, {"virtual_stages": value, "schedule": name, "layers_per_stage": None}, {}
    if not usual:
        yield f"schedule {schedule} -> {'1f1b' if v == 1 else 'interleaved'}", {"schedule": "auto"}, {}
    elif v == 1:
        yield "schedule zb-h1", {"schedule": "zb-h1"}, {}


def _doubled_and_halved(value: int) -> tuple[int, ...]:
    return (value * 2, value // 2) if value > 1 else (value * 2,)


def neighbours(now: Result) -> list[Neighbour]:
    """Every layout one change away from `now`, fastest first, those that do not fit behind, those that cannot run last."""
    scenario, here = now.layout.scenario, dict(now.waterfall())
    found = []
    for change, plan, training in _moves(scenario):
        table = scenario.model_dump(exclude={"file"}, exclude_none=True)
        table["plan"].update({k: v for k, v in plan.items() if v is not None})
        for gone in (k for k, v in plan.items() if v is None):
            table["plan"].pop(gone, None)
        table["training"].update(training)
        table["plan"].pop("replica_microbatches", None)  # shared out anew
        table["model"] = scenario.model.model_dump()
        try:
            result = simulate(make_scenario(table, file=scenario.file), detail="stage")
        except SimparError as error:
            found.append(Neighbour(change, None, None, False, str(error).splitlines()[0].split(": ", 1)[-1]))
            continue
        needed, there = result.worst_rank.device_bytes, result.device_memory_bytes
        reason = "" if result.fits else f"needs {format_bytes(needed)} of {format_bytes(there)}"
        other = dict(result.waterfall())
        more = ((name, other.get(name, 0.0) - here.get(name, 0.0)) for name in {**here, **other})
        causes = sorted((pair for pair in more if abs(pair[1]) > 1e-3 * now.step_time_s), key=lambda pair: -abs(pair[1]))
        found.append(Neighbour(change, result.step_time_s, needed, result.fits, reason, tuple(causes[:_CAUSES])))
    return sorted(found, key=lambda n: (n.step_time_s is None, not n.fits, n.step_time_s or 0.0))


Share = tuple[str, float, float]
"""A part, the amount of a gap that it most probably holds, the share of it."""


def shared(gap: float, weights: Mapping[str, float], there: Mapping[str, float]) -> list[Share]:
    """`gap` over parts in proportion to `weights`, largest first. A part cannot shrink by more than is `there`; what no part can
    hold is "unexplained"."""
    amounts = dict.fromkeys(weights, 0.0)
    left, free = gap, {name for name, weight in weights.items() if weight > 0.0}
    while free and abs(left) > 1e-12 * abs(gap):
        total = sum(weights[name] for name in free)
        wanted = {name: amounts[name] + left * weights[name] / total for name in free}
        full = {name for name in free if wanted[name] < -there.get(name, 0.0)}
        for name in full or free:
            amounts[name] = -there.get(name, 0.0) if full else wanted[name]
        left = gap - sum(amounts.values())
        free = free - full if full else set()
    if gap and abs(left) > 1e-9 * abs(gap):
        amounts["unexplained"] = left
    found = [(name, amount, amount / gap if gap else 0.0) for name, amount in amounts.items()]
    return sorted(found, key=lambda row: -row[2])


def blame(result: Result, measured_s: float) -> list[Share]:
    """(part, seconds of the gap it most probably holds, share of the gap), largest first.

    A part's share follows its variance: its own interval's, and of the calibration's (which is no part of a step) what it would
    hold if every part were off by a factor of its own, alike and independent.
    """
    widths = dict(result.step_interval.dominated_by)
    parts = {name: seconds for name, seconds in result.breakdown.items() if name not in _DERIVED and seconds > 0.0}
    norm = sum(seconds**2 for seconds in parts.values())
    unseen = widths.pop("calibration", 0.0) ** 2
    weights = {name: widths.get(name, 0.0) ** 2 + (unseen * parts.get(name, 0.0) ** 2 / norm if norm else 0.0)
               for name in {**parts, **widths}}  # fmt: skip
    return shared(measured_s - result.step_time_s, weights, parts)


def memory_parts(result: Result, kind: str) -> dict[str, float]:
    """Bytes of the fullest rank at its peak by part, of a `kind` of memory."""
    worst = result.worst_rank
    parts = dict(worst.at_peak)
    if kind != "allocated":
        parts["fragmentation"] = worst.reserved_bytes - worst.allocated_bytes
    if kind == "device":
        parts |= {name: parts.get(name, 0.0) + amount for name, amount in worst.outside}
    return parts


def blame_memory(result: Result, kind: str, measured: float) -> list[Share]:
    """(part, bytes of the gap it most probably holds, share of the gap), largest first, see MEMORY_SPREAD."""
    parts = memory_parts(result, kind)
    weights = {name: (MEMORY_SPREAD.get(name, OTHER_SPREAD) * amount) ** 2 for name, amount in parts.items()}
    return shared(measured - sum(parts.values()), weights, parts)


def _measured_memory(result: Result, kind: str, measured: float) -> dict[str, Any]:
    """What `explain` says of a measured peak; `kind` "mem": the one that comes closest."""
    worst = result.worst_rank
    figures = {name: getattr(worst, f"{name}_bytes") for name in KINDS}
    closest = min(KINDS, key=lambda name: abs(figures[name] - measured)) if kind == "mem" else kind
    parts = memory_parts(result, closest)
    return {
        "bytes": measured, **figures, "closest": closest, "kind_known": kind != "mem", "gap": measured - figures[closest],
        "explanation": [{"part": n, "bytes": b, "share": f, "predicted": parts.get(n, 0.0)}
                        for n, b, f in blame_memory(result, closest, measured)],
    }  # fmt: skip


def _like(result: Result, near: Sequence[Neighbour], measured_s: float) -> list[dict[str, Any]]:
    """Neighbours that run and meet the measured step time at least twice as well as the scenario does, best first."""
    own = abs(result.step_time_s / measured_s - 1.0)
    found = sorted((abs(n.step_time_s / measured_s - 1.0), n.change, n.step_time_s) for n in near if n.step_time_s and n.fits)
    return [{"change": change, "step_time_s": seconds} for off, change, seconds in found if off < 0.5 * own][:_CAUSES]


def explain(result: Result, measured: dict[str, float]) -> dict[str, Any]:
    """Everything `simpar explain` says, as one JSON object."""
    interval, worst = result.step_interval, result.worst_rank
    near = neighbours(result)
    found: dict[str, Any] = {
        "step_time_s": result.step_time_s,
        "waterfall_s": dict(result.waterfall()),
        "interval": {"low": interval.low, "high": interval.high, "dominated_by": dict(interval.dominated_by)},
        "memory": {"fits": result.fits, "device_memory_bytes": result.device_memory_bytes,
                   **{kind: getattr(worst, f"{kind}_bytes") for kind in KINDS}, "parts": memory_parts(result, "device"),
                   "tensors_at_peak": result.tensors_at_peak()},
        "neighbours": [
            {"change": n.change, "step_time_s": n.step_time_s, "device_bytes": n.device_bytes, "fits": n.fits,
             "close": n.step_time_s is not None and abs(n.step_time_s / result.step_time_s - 1.0) <= CLOSE,
             "reason": n.reason, "causes": [{"part": part, "seconds": seconds} for part, seconds in n.causes]}
            for n in near
        ],
    }  # fmt: skip
    if "step_time" in measured:
        seconds = measured["step_time"]
        half = interval.high - result.step_time_s if seconds > result.step_time_s else result.step_time_s - interval.low
        found["measured"] = {
            "step_time_s": seconds, "predicted_s": result.step_time_s, "inside_interval": interval.low <= seconds <= interval.high,
            "half_widths": abs(seconds - result.step_time_s) / half if half else None,
            "below_ideal": seconds < result.waterfall()[0][1],
            "explanation": [{"part": n, "seconds": s, "share": f, "predicted_s": result.breakdown.get(n, 0.0)}
                            for n, s, f in blame(result, seconds)],
            "like": [] if interval.low <= seconds <= interval.high else _like(result, near, seconds),
        }  # fmt: skip
    memory = [_measured_memory(result, kind, measured[kind]) for kind in ("mem", *KINDS) if kind in measured]
    if memory:
        found["measured_memory"] = memory[0]
    if len(memory) > 1:
        found["measured_memory_kinds"] = memory
    return found
