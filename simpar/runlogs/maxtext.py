"""Logs of MaxText (src/maxtext/common/metric_logger.py, of 2023 to 2026)."""

from __future__ import annotations

import re
from typing import Final

from simpar.runlogs.lines import Line, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Contains, Interval

_STEP: Final = re.compile(r"completed step: (\d+), seconds: (\S+),\s")
_PAUSE: Final = re.compile(r"Saved a (checkpoint) at step (\d+)|(?:Completed eval after train step|eval metrics after step:) (\d+)")
_DISPATCHED: Final = 2
"""Steps after the first whose time is that of their dispatch: a step's end is seen while later ones are under way."""


class MaxText(Parser):
    """`completed step:` lines; the clock runs on, so evaluation and a checkpoint lie in the step after them."""

    name = "maxtext"
    anchors = ("completed step:", "Saved a checkpoint at step", "Completed eval after", "eval metrics after step:")

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._lines = 0
        self._pauses: dict[int, Contains] = {}

    def read(self, line: Line) -> None:
        """As the base."""
        if pause := _PAUSE.search(line.text):
            self._pauses[int(pause[2] or pause[3]) + 1] = "checkpoint" if pause[1] else "evaluation"
        elif (step := _STEP.search(line.text)) and "Rampup Batch Size" not in line.text:
            number, seconds = int(step[1]), number_of(step[2])
            contains: frozenset[str] = frozenset({self._pauses[number]} if number in self._pauses else ())
            if not 1 <= self._lines <= _DISPATCHED:
                self.interval(Interval(number, 1, seconds, contains=contains))
            self._lines += 1

    def restart(self) -> None:
        """As the base; the first steps of every start are alike."""
        super().restart()
        self._lines = 0
