"""What one rank did in the traced steps: compute, communication, idle time, launches, and its collectives in order.

Built event by event: of a kernel only its span, class and launch stay.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_CALLS: Final = 500_000
"""Collectives that are kept of a rank."""
UPDATE: Final = re.compile(r"^Optimizer\.step#")
"""torch's own range around an optimizer's update: an annotation of Kineto, and of NVTX under emit_nvtx."""
_SHORT_S: Final = 20e-6
_ONE_UPDATE: Final = 0.05
"""Updates nearer to each other than this share of the longest time between two are of one step: a chain of optimizers."""

Mark = tuple[int, float, float]
"""Number of a step, and start and end of the host's range."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective on one rank.

    Attributes:
        group: its ranks as text, or the name of its process group.
        step: of the trace's.
        source: rank that a receive waits for.
    """

    group: str
    name: str
    step: int
    start_s: float
    end_s: float
    source: int | None = None


@dataclass(frozen=True, slots=True)
class StepOfRank:
    """Seconds of one step on one rank."""

    number: int
    length_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    kernels: int
    short: float
    """Share of the kernels below 20 us."""
    queue_s: float | None
    """Median time from a launch to its kernel's start: near 0 where the host keeps the device waiting."""


@dataclass
class RankTrace:
    """One rank.

    Attributes:
        device: "cuda", or "cpu" for a trace without kernels.
        calls: of its collectives, by start.
        counted: false where nothing says how many steps the trace holds: all of it stands as one.
    """

    file: str
    rank: int | None
    world_size: int | None
    device: str
    steps: list[StepOfRank]
    calls: list[Call]
    notes: list[str] = field(default_factory=list)
    counted: bool = True

    def mean(self, name: str) -> float:
        """Mean over its steps."""
        return float(sum(getattr(s, name) for s in self.steps)) / len(self.steps)

    def as_json(self) -> dict[str, Any]:
        """The public object."""
        queues = [s.queue_s for s in self.steps if s.queue_s is not None]
        exposed, whole = self.mean("exposed_s"), self.mean("communication_s")
        return {
            "rank": self.rank, "file": self.file, "device": self.device, "steps": [s.number for s in self.steps],
            "counted": self.counted,
            "step_s": median(s.length_s for s in self.steps), "compute_s": self.mean("compute_s"), "communication_s": whole,
            "exposed_communication_s": exposed, "overlap": 1.0 - exposed / whole if whole else None, "idle_s": self.mean("idle_s"),
            "kernels_per_step": self.mean("kernels"), "short_kernels": self.mean("short"),
            "launch_to_start_median_s": median(queues) if queues else None,
        }  # fmt: skip


class Spans:
    """Spans of device work as arrays: 29 bytes an event."""

    def __init__(self) -> None:
        self.starts, self.ends, self.launches = array("d"), array("d"), array("d")
        self.kinds = array("b")

    def add(self, start: float, end: float, communication: bool) -> None:
        """A span; its launch may come later."""
        self.starts.append(start)
        self.ends.append(end)
        self.kinds.append(communication)

    def steps(self, marks: Sequence[Mark], launched: Floats, *, on_device: bool) -> list[StepOfRank]:
        """The whole steps between `marks` (number, start, end of the host's range).

        Args:
            launched: when each span was launched, nan where that is not known.
            on_device: work belongs to the step that launched it, and a step begins with its first work.
        """
        starts, ends, kinds = np.asarray(self.starts), np.asarray(self.ends), np.asarray(self.kinds, dtype=bool)
        when = np.where(np.isnan(launched), starts, launched)
        bounds = np.array([start for _, start, _ in marks])
        place = np.searchsorted(bounds, when, side="right") - 1
        found = []
        begins = [float(starts[place == i].min()) if on_device and (place == i).any() else bounds[i] for i in range(len(marks))]
        for i, (number, _, end) in enumerate(marks):
            mine = place == i
            if not mine.any():
                continue
            if i + 1 < len(marks) and (not on_device or (place == i + 1).any()):
                last = begins[i + 1]
            else:
                last = float(ends[mine].max()) if on_device else max(end, float(ends[mine].max()))
            a, b = np.clip(starts[mine], begins[i], last), np.clip(ends[mine], begins[i], last)
            comm = kinds[mine]
            whole, work, wire = covered(a, b), covered(a[~comm], b[~comm]), covered(a[comm], b[comm])
            waits = starts[mine] - launched[mine]
            waits = waits[np.isfinite(waits)]
            length = last - begins[i]
            found.append(StepOfRank(
                number, length, work, wire, whole - work, max(length - whole, 0.0), int((~comm).sum()),
                float((b - a < _SHORT_S).mean()), float(np.median(waits)) if waits.size else None,
            ))  # fmt: skip
        return found


def between_updates(updates: Sequence[tuple[float, float]], begin: float) -> list[Mark]:
    """Steps of a trace whose steps nobody marked: from the end of one update (start, end) to the end of the next.

    Work before the first and after the last is of steps that the trace does not hold whole: the last mark, which only ends the
    step before it, is not a step. Empty where there are fewer than two updates.

    Args:
        begin: of the trace; what lies before the first update tells a chain of optimizers in one step from two steps.
    """
    ordered = sorted(updates)
    gaps = [after[0] - before for before, after in zip([begin, *(end for _, end in ordered)], ordered, strict=False)]
    apart = _ONE_UPDATE * max(gaps, default=0.0)
    ends = [end for (_, end), gap in zip(ordered, [*gaps[1:], float("inf")], strict=False) if gap > apart]
    return [*((n, a, b) for n, (a, b) in enumerate(pairwise(ends))), (len(ends) - 1, ends[-1], ends[-1])] if len(ends) > 1 else []


def steps_of(
    spans: Spans, named: Sequence[Mark], updates: Sequence[tuple[float, float]], launched: Floats, *, on_device: bool
) -> tuple[list[StepOfRank], list[Mark], bool]:
    """The whole steps, what they lie between, and whether anything says how many there are: marks, else updates, else nothing."""
    marks = [*named] or between_updates(updates, min(spans.starts))
    if not marks:
        everything = [(0, min(spans.starts), max(spans.ends))]
        return spans.steps(everything, launched, on_device=on_device), everything, False
    found = spans.steps(marks, launched, on_device=on_device)
    return (found if named else [s for s in found if s.number < marks[-1][0]]), marks, True


def covered(starts: Floats, ends: Floats) -> float:
    """Length of the union of spans."""
    if not starts.size:
        return 0.0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([[starts[0]], ends[:-1]])
    return float(np.maximum(ends - np.maximum(starts, before), 0.0).sum())


def launched_at(correlations: array[int], calls: Mapping[int, float]) -> Floats:
    """Launch time of each span by its correlation."""
    return np.array([calls.get(c, np.nan) for c in correlations], dtype=float)
