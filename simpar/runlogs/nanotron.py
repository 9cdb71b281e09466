"""Logs of nanotron v0.1 to main of 2026 (src/nanotron/logging/base.py, trainer.py, helpers.py)."""

from __future__ import annotations

import re
from typing import Final

from simpar.runlogs.lines import Line, OtherLanguage, clock_of, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Interval

_ITERATION: Final = re.compile(r"iteration:\s*(\d+)\s*/\s*(\d+)")
_CELL: Final = re.compile(r"^\s*([\w ./()-]+?):\s*(\S+)\s*$")
_SUFFIX: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SIZE: Final = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_MEMORY: Final = re.compile(r"Peak (allocated|reserved):?\s*([\d.]+)\s*([KMGT]?i?B)", re.IGNORECASE)
_RANKS: Final = re.compile(r"\b(?:EP|CP|DP|PP|TP)=(\d+)")


def human(text: str) -> float:
    """A number of nanotron's human_format: three digits and a decimal suffix, 1.23K.

    Raises:
        OtherLanguage: 1,23K.
        ValueError: no such number.
    """
    found = re.fullmatch(r"(-?[\d.]+(?:[eE][-+]?\d+)?)([KMBTPE]?)", text)
    if found is None:
        if re.fullmatch(r"\d+,\d+[KMBTPE]?", text):
            raise OtherLanguage(text)
        raise ValueError(text)
    return number_of(found[1]) * _SUFFIX[found[2]]


class Nanotron(Parser):
    """`iteration:` lines; their figures have three digits."""

    name = "nanotron"
    anchors = ("time_per_iteration_ms:", "Memory usage", "Saving weights", "Saving checkpoint", "Peak allocated")

    def read(self, line: Line) -> None:
        """As the base."""
        text = line.text
        if found := _ITERATION.search(text):
            cells = {m[1].strip(): m[2] for part in text[found.end() :].split("|") if (m := _CELL.match(part))}
            key = next((k for k in ("time_per_iteration_ms", "elapsed_time_per_iteration_ms") if k in cells), "")
            if not key:
                raise ValueError("cut")
            self.interval(Interval(int(found[1]), seconds=human(cells[key]) / 1e3, count=1, wall_s=clock_of(text[:40])))
            if "global_batch_size" in cells:
                # Samples beside the older name of the time, tokens beside the newer one.
                unit = "sequences" if key.startswith("elapsed") else "tokens"
                self.reading.scalars.setdefault(f"global batch ({unit})", []).append(human(cells["global_batch_size"]))
            return
        for kind, value, unit in _MEMORY.findall(text):
            self.memory(kind.lower(), number_of(value) * _SIZE.get(unit, 2.0**20), self._rank(text))

    def _rank(self, text: str) -> int | None:
        """0 where every coordinate of the prefix is; others do not say their global rank."""
        found = _RANKS.findall(text)
        return 0 if found and set(found) == {"0"} else None
