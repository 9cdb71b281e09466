"""Logs of DeepSpeed's engines (deepspeed/utils/timer.py, runtime/engine.py, runtime/pipe/engine.py, runtime/utils.py)."""

from __future__ import annotations

import re
from typing import Final

from simpar.runlogs.lines import Line, clock_of, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Interval

_RATE: Final = re.compile(r"(?:global_step=|\b\d+/)(\d+), RunningAvgSamplesPerSec=(\S+), CurrSamplesPerSec=([^\s]+?)(?:,\s(.*)|$)")
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
    anchors = ("CurrSamplesPerSec=", "iter time (s):", "Max_MA", "OVERFLOW!", "Overflow detected", ", skipped=", "time (ms) |")

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._steps: list[float] = []

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
            if peak := _PEAK.search(rate[4] or ""):
                self.memory("allocated", number_of(peak[1]) * 2.0**30, rank)
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


def _whole(parts: dict[str, str]) -> float:
    """Seconds of a step's forward, backward and update in a line of timers; 0 where it is of a micro-step."""
    for names in (("fwd", "bwd", "step"), ("forward", "backward", "step")):
        if all(name in parts for name in names):
            return sum(number_of(parts[name]) for name in names) / 1e3
    return 0.0


__all__ = ["DeepSpeed"]
