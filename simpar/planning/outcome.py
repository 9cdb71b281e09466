"""What one simulated repetition of a run came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """One incident on the timeline of a run: from, to (seconds), cause or kind, and what happened."""

    start_s: float
    end_s: float
    kind: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one repetition came to.

    Attributes:
        wall_s: from the start until the last token, or until it was given up.
        productive_s: time that the tokens take at full speed; wall_s = productive_s + sum(lost_s).
        lost_s: by cause.
        phase_s: wall-clock time in each phase.
        gpu_s: GPUs in the job, integrated over time.
        node_s: the same for nodes, spares included.
        busy: (phase, stage) -> clock time of training, for the energy.
        failures: by component.
        finished: the run ended; otherwise it was given up.
        marks, progress, spans: timeline, (time, tokens) pairs and (from, to) of training, where they were recorded.
    """

    wall_s: float
    productive_s: float
    lost_s: dict[str, float]
    phase_s: tuple[float, ...]
    gpu_s: float
    node_s: float
    busy: dict[tuple[int, int], float]
    stage_s: tuple[float, ...]
    failures: dict[str, int]
    checkpoints: int
    finished: bool
    marks: tuple[Mark, ...] = ()
    progress: tuple[tuple[float, float], ...] = ()
    spans: tuple[tuple[float, float], ...] = ()
