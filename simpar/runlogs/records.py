"""What a reader of logs returns, before anything is chosen or averaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Contains = Literal["start", "evaluation", "checkpoint", "skipped", "profiler"]
MemoryKind = Literal["allocated", "reserved", "active", "device"]


@dataclass(frozen=True, slots=True)
class Interval:
    """One line that says how long steps took.

    Attributes:
        step: last optimizer step of the interval.
        count: steps that the figure averages over; 0 = the line does not say.
        seconds: per step, where the line says so.
        tokens_per_s_per_gpu, samples_per_s: rates of lines that state no time (a sample is a sequence).
        contains: what else lies inside the interval and is in its figure.
        rank: global rank that printed it; none = unknown, or the whole job.
        segment: number of the start of the job that it belongs to (a restart begins the next).
        wall_s: clock of the line, seconds of some epoch.
    """

    step: int
    count: int = 0
    seconds: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    contains: frozenset[str] = frozenset()
    rank: int | None = None
    segment: int = 0
    wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """A peak that a rank reported, bytes; that of the job's first step before its moments were made, or of later ones."""

    kind: MemoryKind
    peak_bytes: float
    rank: int | None = None
    first_step: bool = False


@dataclass
class LogReading:
    """Everything one log or store says.

    Attributes:
        file: read.
        format: name in `formats.FORMATS`.
        intervals: in the order of the file.
        memory: peaks by rank and kind.
        loss_scale: (step, scale) wherever it changes.
        skipped: steps whose update was skipped.
        scalars: other figures by name (auxiliary losses of routers, timers), in the order of the file.
        stated: what the log says of the job: world_size, global_batch_size, sequence_length, tp, pp, cp, dp, gpu, arguments.
        notes: what was left out and why.
    """

    file: str
    format: str
    intervals: list[Interval] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    loss_scale: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    scalars: dict[str, list[float]] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def segments(self) -> int:
        """Starts of the job in the file."""
        return max((i.segment for i in self.intervals), default=-1) + 1
