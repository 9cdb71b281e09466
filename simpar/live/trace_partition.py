"""Every second of a rank's step to one cause: the same rule for a predicted and a measured timeline.

At each moment the first that holds: a compute kernel runs (its class), a collective runs (its dimension: exposed), a copy runs,
the host is late ("launch"), the rank waits for another one ("bubble" in a pipeline, else "idle"). The causes add up to the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from simpar.live.trace_slices import COMPUTE, DIMENSIONS, Slice

ORDER: Final = (*COMPUTE, *DIMENSIONS, "copy", "launch")
_RANK: Final = {kind: i for i, kind in enumerate(ORDER)}
LONGEST_LAUNCH_S: Final = 20e-6
"""From the host's call to the kernel's start on an idle stream, at most (assumed; 3 to 10 us are usual)."""
SHORT_GAP_S: Final = 100e-6
"""Where the trace does not say when the host launched: a shorter gap is the host's, a longer one is a wait (assumed)."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Seconds of a window by cause.

    Attributes:
        seconds: cause -> seconds; they add up to the window.
        idle: intervals in which nothing ran and the host was not known to be late.
    """

    seconds: dict[str, float]
    idle: list[tuple[float, float]]

    @property
    def total(self) -> float:
        """Seconds of the window."""
        return sum(self.seconds.values())


def partition(slices: Sequence[Slice], begin: float, end: float, waits: str) -> Partition:
    """Seconds of [begin, end) by cause.

    Args:
        waits: what a moment is called in which nothing runs: "bubble" or "idle".
    """
    moments: list[tuple[float, int, int]] = []
    for item in slices:
        a, b = max(item.start_s, begin), min(item.end_s, end)
        if b > a and item.kind in _RANK:
            moments += [(a, 1, _RANK[item.kind]), (b, -1, _RANK[item.kind])]
    moments.sort()
    running = [0] * len(ORDER)
    seconds: dict[str, float] = defaultdict(float)
    idle: list[tuple[float, float]] = []
    at = begin
    for moment, change, kind in [*moments, (end, 0, 0)]:
        if moment > at:
            top = next((name for name, count in zip(ORDER, running, strict=True) if count), "")
            seconds[top or waits] += moment - at
            if not top:
                idle.append((at, moment))
            at = moment
        running[kind] += change
    return Partition(dict(seconds), idle)


def with_launch_gaps(slices: Sequence[Slice], begin: float, end: float) -> tuple[list[Slice], bool]:
    """Measured slices with a "launch" slice wherever nothing runs because the host had not yet issued what comes next.

    A kernel starts at the earliest the shortest observed delay after the host's call; where the trace holds no calls, gaps
    shorter than SHORT_GAP_S are taken for the host's. Returns also whether the calls were known.
    """
    work = sorted((s for s in slices if s.kind != "launch"), key=lambda s: s.start_s)
    known = [s for s in work if s.ready_s is not None]
    delay = min((s.start_s - s.ready_s for s in known if s.ready_s is not None), default=0.0)
    # A host that is always ahead shows only queueing: the delay itself is no longer than this.
    delay = min(max(delay, 0.0), LONGEST_LAUNCH_S)
    starts = [s.start_s for s in work]
    found: list[Slice] = []
    for a, b in partition(work, begin, end, "idle").idle:
        nearest = bisect_left(starts, b - 1e-12)
        if nearest >= len(work):
            continue
        following = work[nearest]
        if following.ready_s is not None:
            until = min(b, following.ready_s + delay)
        else:
            until = b if b - a < SHORT_GAP_S else a
        if until > a:
            found.append(Slice(a, until, "launch", f"before {following.name}", "host"))
    return sorted([*work, *found], key=lambda s: (s.start_s, s.end_s)), bool(known)


def with_waits(slices: Sequence[Slice], least: dict[float, float] | None = None) -> list[Slice]:
    """Sends and receives of a pipeline cut to their transfers: a kernel that waits for the other side runs until it comes.

    The transfer is the shortest time among those of the same bytes, at its end; what comes before is a wait.

    Args:
        least: predicted seconds by bytes, for sizes of which the trace holds too few to tell.
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for item in slices:
        if item.kind == "pp" and item.collective == "send_recv":
            groups[item.bytes].append(item.seconds)
    transfer = {}
    for size, times in groups.items():
        expected = (least or {}).get(size)
        transfer[size] = min(times) if len(times) >= 3 or expected is None else min(min(times), expected)
    return [
        replace(s, start_s=max(s.start_s, s.end_s - transfer[s.bytes])) if s.kind == "pp" and s.collective == "send_recv" else s
        for s in slices
    ]  # fmt: skip


def exposed(item: Slice, busy: Sequence[tuple[float, float]]) -> float:
    """Seconds of `item` outside the sorted disjoint intervals `busy`."""
    covered = 0.0
    for a, b in busy[bisect_right(busy, item.start_s, key=lambda interval: interval[1]) :]:
        if a >= item.end_s:
            break
        covered += max(min(b, item.end_s) - max(a, item.start_s), 0.0)
    return item.seconds - covered
