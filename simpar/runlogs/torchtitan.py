"""Logs of torchtitan of 2024 to main of 2026 (torchtitan/components/metrics.py, train.py)."""

from __future__ import annotations

import re
from typing import Final

from simpar.runlogs.lines import Line, OtherLanguage, clock_of, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Interval

_STEP: Final = re.compile(r"(?<!validate )\bstep:\s*(\d+)\s+loss:\s*(\S+)")
_TPS: Final = re.compile(r"\b[tw]ps:\s*(\S+)")
_MEMORY: Final = re.compile(r"\bmemory:\s*([\d.,]+)GiB\(")
_START: Final = re.compile(
    r"Training starts at step (\d+)(?:, with local batch size (\d+), global batch size (\d+)"
    r"(?:, gradient accumulation steps \d+)?, sequence length (\d+))?"
)
_RETRIES: Final = re.compile(r"(\d+) CUDA memory allocation retries")
_SIZE: Final = re.compile(r"size: ([\d,]+) total parameters")
_CAPACITY: Final = re.compile(r"CUDA capacity: (.+?) with ([\d.]+)GiB")


class Torchtitan(Parser):
    """`step:` lines; the rate is one of each device, so a step's time follows from the batch."""

    name = "torchtitan"
    anchors = (
        "tps:", "wps:", "Training starts at step",
        "saving the checkpoint", "Saving the checkpoint", "Saving a ", "umping profiler traces",
        "memory allocation retries", "total parameters", "CUDA capacity:",
    )  # fmt: skip

    def read(self, line: Line) -> None:
        """As the base."""
        text = line.text
        if (step := _STEP.search(text)) and ("tps:" in text or "wps:" in text):  # wps until November 2024
            self._step(int(step[1]), line)
        elif start := _START.search(text):
            self.restart()
            for name, value in zip(("global_batch_size", "sequence_length"), (start[3], start[4]), strict=True):
                if value:
                    self.reading.stated[name] = int(value)
        elif "aving the checkpoint" in text or "Saving a " in text:
            self.mark("checkpoint")  # inside the interval: the clock runs on
        elif "umping profiler traces" in text:
            self.mark("profiler")
        elif retries := _RETRIES.search(text):
            self.reading.scalars.setdefault("allocator retries", []).append(float(retries[1]))
        elif size := _SIZE.search(text):
            self.reading.stated["total_parameters"] = int(size[1].replace(",", ""))
        elif capacity := _CAPACITY.search(text):
            self.reading.stated["gpu"] = capacity[1]

    def _step(self, step: int, line: Line) -> None:
        rate = _TPS.search(line.text)
        if rate is None:
            raise ValueError("cut")
        if not re.fullmatch(r"\d{1,3}(,\d{3})*|\d+", rate[1]):
            if re.fullmatch(r"\d{1,3}([.' ]\d{3})+", rate[1]):
                raise OtherLanguage(rate[1])
            raise ValueError(rate[1])
        self.interval(
            Interval(step, tokens_per_s_per_gpu=float(rate[1].replace(",", "")), rank=line.rank, wall_s=clock_of(line.text[:60]))
        )
        if memory := _MEMORY.search(line.text):
            self.memory("reserved", number_of(memory[1]) * 2.0**30, line.rank)
