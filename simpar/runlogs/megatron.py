"""Logs of Megatron-LM and what grew from it: Megatron-Bridge, gpt-neox, Megatron-DeepSpeed, Primus.

Lines: megatron/training/training.py (training_log, print_rank_last), megatron/core/timers.py, megatron/training/utils.py
(report_memory), of v1.0 to core 0.19; Megatron-Bridge's train_utils.py of 0.6; gpt-neox's megatron/logging.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from simpar.runlogs.lines import Line, clock_of, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Interval

_ITERATION: Final = re.compile(r"iteration:?\s+(\d+)\s*/\s*(\d+)\s*\|")
_CELL: Final = re.compile(r"^\s*(.+?):\s+(\S+)(?:\s+\(avg [^)]*\))?\s*$")
_MEMORY: Final = re.compile(r"\[Rank (\d+)\]\s*\(after (\d+) iterations\) memory \((MB|GB)\) \|(.*?)(?=\[Rank|$)")
_STEP_TIME: Final = re.compile(r"Step Time\s*:\s*([\d.,]+)s")
_WORLD: Final = re.compile(r"using world size:\s*(\d+)(.*)")
_DEGREES: Final = {
    "data-parallel": "dp", "context-parallel": "cp", "tensor-model-parallel": "tp", "pipeline-model-parallel": "pp",
}  # fmt: skip
_PARAMETERS: Final = re.compile(r"number of parameters on \([^)]*\) model parallel rank \(([\d, ]+)\):\s*(\d+)")
_TIMER: Final = re.compile(r"^\s*([a-z][a-z0-9-]+)\s?\.*:\s*\(?([\d.]+)(?:,\s*([\d.]+)\))?\s*$")
_ARGUMENT: Final = re.compile(r"^\s{2}([A-Za-z_]\w*)\s\.*\s?(.*)$")
_TIME: Final = "elapsed time per iteration (ms)"
_SPOKEN: Final = re.compile(r"elapsed time per iteration \(ms\):\s+\S+\s")
_MOST_BROKEN: Final = 400
"""Characters from the start of an iteration's line to its time, at most."""
_SAVES: Final = ("saving checkpoint at iteration", "saved checkpoint", "saving checkpoint")
_ROUTER: Final = re.compile(r"load_balancing|z_loss|moe|expert|mtp_", re.IGNORECASE)


class Megatron(Parser):
    """Iteration lines, memory, timers and the argument table."""

    name = "megatron"
    anchors = (
        _TIME, "Step Time", "memory (MB)", "memory (GB)", "validation loss at iteration", "saving checkpoint", "saved checkpoint",
        "using world size:", "number of parameters on", " arguments ---", "(min, max) time across ranks", "max time across ranks",
        "setting number of micro", "mem usage/free/total/usage_ratio",
    )  # fmt: skip

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._table = self._timers = False
        self._arguments: dict[str, str] = {}
        self._stamped = False
        self._broken = ""

    def feed(self, line: Line) -> None:
        """As the base; inside a table every line belongs to it."""
        if self._table and " end of arguments " not in line.text:
            if found := _ARGUMENT.match(line.text):
                self._arguments[found[1]] = found[2].strip()
            return
        if self._timers:
            if found := _TIMER.match(line.text):
                low = number_of(found[2])
                high = number_of(found[3]) if found[3] else low
                self.reading.scalars.setdefault(f"timer {found[1]} max (ms)", []).append(high)
                self.reading.scalars.setdefault(f"timer {found[1]} min (ms)", []).append(low)
                return
            self._timers = False
        super().feed(self._unwrapped(line))

    def _unwrapped(self, line: Line) -> Line:
        """The line, behind the start of its own that a terminal broke off before the time."""
        starts = "iteration" in line.text and _ITERATION.search(line.text) is not None
        if self._broken and not starts:
            line = replace(line, text=f"{self._broken} {line.text}")
        still = (starts or self._broken) and len(line.text) < _MOST_BROKEN and not _SPOKEN.search(line.text)
        self._broken = line.text if still else ""
        return line

    def read(self, line: Line) -> None:
        """As the base."""
        text = line.text
        if _TIME in text and (found := _ITERATION.search(text)):
            self._iteration(found, line)
        elif _MEMORY.search(text):
            for memory in _MEMORY.finditer(text):  # ranks write into one stream, often into one line
                self._memory(memory)
        elif "time across ranks" in text:
            self._timers = True
        elif "validation loss at iteration" in text:
            self._outside("evaluation")
        elif any(words in text for words in _SAVES):
            self._outside("checkpoint")
        elif " end of arguments " in text:
            self._table = False
            self.reading.stated["arguments"] = dict(self._arguments)
        elif " arguments ---" in text:
            self._table, self._arguments = True, {}
            self.restart()
        elif world := _WORLD.search(text):
            self.reading.stated["world_size"] = int(world[1])
            for name, value in re.findall(r"([a-z-]+)[ -]size:\s*(\d+)", world[2]):
                if name in _DEGREES:
                    self.reading.stated[_DEGREES[name]] = int(value)
        elif parameters := _PARAMETERS.search(text):
            self.reading.stated.setdefault("parameters", {})[parameters[1].replace(" ", "")] = int(parameters[2])
        elif step := _STEP_TIME.search(text):
            number_of(step[1])

    def _outside(self, what: str) -> None:
        """From core 0.5 on, whose lines have a stamp from 0.6 on, the timer stops for it; before, the interval holds it."""
        if not self._stamped:
            self.mark(what)

    def _iteration(self, found: re.Match[str], line: Line) -> None:
        step = int(found[1])
        self._stamped = bool(re.search(r"\[\d{4}-\d\d-\d\d", line.text[: found.start()]))
        cells = {m[1].strip(): m[2].split("/")[0] for part in line.text[found.end() :].split("|") if (m := _CELL.match(part))}
        if _TIME not in cells:
            raise ValueError("cut")
        skipped = sum(int(number_of(cells.get(f"number of {kind} iterations", "0"))) for kind in ("skipped", "nan"))
        self.reading.skipped += skipped
        self.interval(
            Interval(
                step,
                seconds=number_of(cells[_TIME]) / 1e3,
                wall_s=clock_of(line.text[: found.start()]),
                contains=frozenset({"skipped"}) if skipped else frozenset(),
            )
        )
        for name, value in cells.items():
            if name == "loss scale":
                self.scale(step, number_of(value))
            elif name == "global batch size":
                self.reading.scalars.setdefault("global batch size", []).append(number_of(value))
            elif name.startswith(("hip mem usage", "rocm mem usage")) and (used := re.match(r"([\d.]+)GB", value)):
                self.memory("device", number_of(used[1]) * 2.0**30, None)
            elif _ROUTER.search(name):
                self.scalar(name, value)

    def _memory(self, found: re.Match[str]) -> None:
        unit = 2.0**20 if found[3] == "MB" else 1e9  # Megatron says MB and means MiB; Megatron-Bridge counts decimal gigabytes
        cells = {m[1].strip(): number_of(m[2]) for part in found[4].split("|") if (m := _CELL.match(part))}
        rank = int(found[1])
        for name, value in cells.items():
            plain = name.replace("mem-", "").replace("-gigabytes", "").replace("-", " ")
            if plain in ("max allocated", "max reserved", "max active"):
                self.memory(plain.removeprefix("max "), value * unit, rank, first_step=found[2] == "1")  # type: ignore[arg-type]
        if retries := cells.get("mem-alloc-retires"):
            self.reading.scalars.setdefault("allocator retries", []).append(retries)
