"""What one rank did in the traced steps: compute, communication, idle time, launches, and its collectives in order.

Built event by event: of a kernel only its span, class and launch stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_CALLS: Final = 500_000
"""Collectives that are kept of a rank."""
_SHORT_S: Final = 20e-6


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
    """

    file: str
    rank: int | None
    world_size: int | None
    device: str
    steps: list[StepOfRank]
    calls: list[Call]
    notes: list[str] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Mean over its steps."""
        return float(sum(getattr(s, name) for s in self.steps)) / len(self.steps)

    def as_json(self) -> dict[str, Any]:
        """The public object."""
        queues = [s.queue_s for s in self.steps if s.queue_s is not None]
        exposed, whole = self.mean("exposed_s"), self.mean("communication_s")
        return {
            "rank": self.rank, "file": self.file, "device": self.device, "steps": [s.number for s in self.steps],
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

    def steps(self, marks: list[tuple[int, float, float]], launched: Floats, *, on_device: bool) -> list[StepOfRank]:
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
            last = (
                begins[i + 1]
                if i + 1 < len(marks)
                else max(end, float(ends[mine].max()))
                if not on_device
                else float(ends[mine].max())
            )
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


__all__ = ["MOST_CALLS", "Call", "RankTrace", "Spans", "StepOfRank", "covered", "launched_at"]
