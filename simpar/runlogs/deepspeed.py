"""Logs of DeepSpeed's engines (deepspeed/utils/timer.py, runtime/engine.py, runtime/pipe/engine.py, runtime/utils.py)."""

from __future__ import annotations

import re
from typing import Final

from simpar.runlogs.lines import Line, clock_of, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Interval

_RATE: Final = re.compile(r"(?:global_step=|\b\d+/)(\d+), RunningAvgSamplesPerSec=(\S+), CurrSamplesPerSec=([^\s]+?)(?:,\s(.*)|$)")
_AVERAGE: Final = re.compile(r"\b\d+/(\d+), SamplesPerSec=([^\s,]+)(?:,\s(.*)|$)")
"""Until 0.6 (2022): the mean since `_START`."""
_START: Final = 2
"""Micro-steps that the timer's mean leaves out (ThroughputTimer.start_step)."""
_PIPE: Final = re.compile(r"steps: (\d+) loss: \S+ .*?iter time \(s\): (\S+)\s+samples/sec: (\S+)")
_PEAK: Final = re.compile(r"MaxMemAllocated=([\d.]+)GB")
_SEEN: Final = re.compile(r"\bMax_MA ([\d.]+) GB\s+CA [\d.]+ GB\s+Max_CA ([\d.]+) GB")
_SKIP: Final = re.compile(r"(?:OVERFLOW!|Overflow detected).*Skipping step.*reducing to ([\d.]+)")
_LOGGED: Final = re.compile(r"\bstep=(\d+), skipped=(\d+), lr=")
_RANK: Final = re.compile(r"\[Rank (\d+)\]")
_TIMES: Final = re.compile(r"time \(ms\) \|(.*)")


class DeepSpeed(Parser):
    """Throughput timer lines, or the pipeline engine's; the timer leaves out what runs between micro-steps (data, evaluation)."""

    name = "deepspeed"
    anchors = ("SamplesPerSec=", "iter time (s):", "Max_MA", "OVERFLOW!", "Overflow detected", ", skipped=", "time (ms) |")

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._steps: list[float] = []
        self._mean = (0, 0.0)

    def finish(self) -> None:
        """As the base: without throughput lines a step is its forward, backward and update."""
        if not self.reading.intervals and self._steps:
            self.reading.notes.append(
                "no throughput lines: a step is the sum of its forward, backward and update, without data loading"
            )
            for step, seconds in enumerate(self._steps, 1):
                self.interval(Interval(step, seconds=seconds))

    def read(self, line: Line) -> None:
        """As the base."""
        text = line.text
        rank = int(found[1]) if (found := _RANK.search(text)) else line.rank
        if rate := _RATE.search(text):
            self.interval(Interval(int(rate[1]), samples_per_s=number_of(rate[3]), count=1, wall_s=clock_of(text[:40])))
            self._peak(rate[4], rank)
        elif mean := _AVERAGE.search(text):
            self._between(int(mean[1]), number_of(mean[2]), clock_of(text[:40]))
            self._peak(mean[3], rank)
        elif pipe := _PIPE.search(text):
            self.interval(Interval(int(pipe[1]), seconds=number_of(pipe[2])))
        elif seen := _SEEN.search(text):
            self.memory("allocated", number_of(seen[1]) * 2.0**30, rank if rank is not None else 0)
            self.memory("reserved", number_of(seen[2]) * 2.0**30, rank if rank is not None else 0)
        elif skip := _SKIP.search(text):
            self.reading.skipped += 1
            self.mark("skipped")
            self.scale(len(self.reading.loss_scale), number_of(skip[1]))
        elif times := _TIMES.search(text):
            parts = dict(re.findall(r"([a-z_]+): ([\d.]+)", times[1]))
            if (rank or 0) == 0 and (whole := _whole(parts)):
                self._steps.append(whole)
            for name, value in parts.items():
                self.reading.scalars.setdefault(f"timer {name} max (ms)", []).append(number_of(value))
        elif logged := _LOGGED.search(text):
            self.reading.skipped = max(self.reading.skipped, int(logged[2]))

    def _peak(self, rest: str | None, rank: int | None) -> None:
        if peak := _PEAK.search(rest or ""):
            self.memory("allocated", number_of(peak[1]) * 2.0**30, rank)

    def _between(self, step: int, mean: float, clock: float | None) -> None:
        """The rate since the line before, of two means: the timer's seconds, in those of one sample, are steps by rate."""
        if step <= _START or mean <= 0:
            return  # nothing was timed yet: -inf
        before, seconds = self._mean if step > self._mean[0] else (0, 0.0)
        self._mean = step, (step - _START) / mean
        rate = (step - max(before, _START)) / (self._mean[1] - seconds) if self._mean[1] > seconds else 0.0
        self.interval(Interval(step, samples_per_s=rate, wall_s=clock))


def _whole(parts: dict[str, str]) -> float:
    """Seconds of a step's forward, backward and update in a line of timers; 0 where it is of a micro-step."""
    for names in (("fwd", "bwd", "step"), ("forward", "backward", "step")):
        if all(name in parts for name in names):
            return sum(number_of(parts[name]) for name in names) / 1e3
    return 0.0
