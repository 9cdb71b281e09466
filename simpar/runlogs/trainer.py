"""Console of Hugging Face's Trainer (and TRL, axolotl, LLaMA-Factory, torchtune), Lightning and NeMo: dictionaries, progress bars.

transformers' trainer_callback.py and trainer.py (4.x prints floats, 5.x quoted ones), tqdm's format, NeMo's ProgressPrinter and
TimingCallback, Lightning's TQDMProgressBar.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Final

from simpar.runlogs.lines import Line, OtherLanguage, number_of
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import Interval

_BAR: Final = re.compile(r"(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d\d)<[^,]*,\s*([\d.,]+|\?)\s*(s/it|it/s)(.*)")
_RICH: Final = re.compile(r"(\d+)/(-?\d+) +\d+:\d\d:\d\d • [\d:-]+ +([\d.,]+)it/s")
_DICT: Final = re.compile(r"\{'[^{}]*'[^{}]*\}")
_KEYS: Final = ("train_runtime", "loss", "eval_loss", "eval_runtime")
_TIMING: Final = re.compile(r"train_step_timing in s[=:]\s*([\d.,eE+-]+?)(?=[,\s|\]]|$)")
_GLOBAL: Final = re.compile(r"global_step[=:]\s*([\d.]+)(?!e)")
_PRINTED: Final = re.compile(r"iteration (\d+)/(\d+) \|")
_NEMO_MEMORY: Final = re.compile(r"max_memory_(reserved|allocated)[=:]\s*([\d.]+)")
_AXOLOTL: Final = (
    ("memory/max_allocated (GiB)", "allocated"), ("memory/max_active (GiB)", "active"),
    ("memory/device_reserved (GiB)", "reserved"),
    ("memory/max_mem_active(gib)", "active"), ("memory/max_mem_allocated(gib)", "allocated"),
    ("memory/device_mem_reserved(gib)", "reserved"),
)  # fmt: skip


class Trainer(Parser):
    """Progress bars give a step's time, dictionaries losses, evaluation and the mean of the whole run."""

    name = "transformers"
    anchors = ("'loss'", "'train_runtime'", "'eval_loss'", "'eval_runtime'", "s/it", "it/s", "Saving model checkpoint")

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._bars: dict[int, list[tuple[int, float, frozenset[str]]]] = {}
        self._marked: set[str] = set()
        self._losses = 0

    def read(self, line: Line) -> None:
        """As the base."""
        text = line.text
        if "Epoch " in text and _BAR.search(text):
            return  # Lightning's
        for found in _DICT.finditer(text):
            if any(f"'{key}'" in found[0] for key in _KEYS):
                self._dictionary(found[0])
        if "Saving model checkpoint" in text:
            self._marked.add("checkpoint")
        self._losses += "|Loss: " in text  # in front of torchtune's bar
        for found in _BAR.finditer(text):
            self._bar(found)

    def _bar(self, found: re.Match[str]) -> None:
        done, total = int(found[1]), int(found[2])
        if found[6] == "?" or not done:
            return
        rate = number_of(found[6])
        seconds = rate if found[7] == "s/it" else 1.0 / rate
        self._bars.setdefault(total, []).append((done, seconds, frozenset(self._marked)))
        self._marked.clear()

    def _dictionary(self, text: str) -> None:
        try:
            table: dict[str, Any] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError("cut") from None
        if "eval_loss" in table or "eval_runtime" in table:
            self._marked.add("evaluation")
        if "loss" in table:
            self._losses += 1
            for key, kind in _AXOLOTL:
                if key in table:
                    self.memory(kind, float(table[key]) * 2.0**30, None)  # type: ignore[arg-type]
        if "train_runtime" in table:
            for key in ("train_runtime", "train_steps_per_second", "train_samples_per_second"):
                if key in table:
                    self.reading.stated[key] = number_of(str(table[key]))

    def finish(self) -> None:
        """As the base: the training bar is the one with the most updates over different steps."""
        bars = max(self._bars.values(), key=lambda b: len({n for n, _, _ in b}), default=[])
        if self._losses or "train_runtime" in self.reading.stated or self.chosen:
            for done, seconds, contains in bars:
                self.interval(Interval(done, seconds=seconds, count=1, contains=contains))
        elif len(bars) > 1:
            self.hint = "if its progress bars are those of the training: --format transformers"
        rate = self.reading.stated.get("train_steps_per_second")
        if not self.reading.intervals and rate:
            self.reading.notes.append("no progress bar: the mean of the whole run, with warm-up, evaluation and saving")
            steps = max(round(rate * self.reading.stated.get("train_runtime", 1.0)), 1)
            self._last[None] = 0  # the only figure there is: no start to be left out
            self.interval(Interval(steps, seconds=1.0 / rate, count=steps))


class Lightning(Parser):
    """Lightning's bar, or NeMo's timing in it or in its printed lines."""

    name = "lightning"
    anchors = ("Epoch ", "Training epoch", "train_step_timing in s")

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._validating = False

    def read(self, line: Line) -> None:
        """As the base."""
        text = line.text
        if "Validation" in text or "Validating" in text:
            self._validating = True
            return
        bar, timing, rich = _BAR.search(text), _TIMING.search(text), _RICH.search(text)
        if rich is not None and timing is None:
            epoch = re.search(r"Epoch (\d+)", text)
            total = max(int(rich[2]), 0)
            self.interval(Interval(int(rich[1]) + (int(epoch[1]) * total if epoch else 0), seconds=1.0 / number_of(rich[3])))
            return
        step = self._step(text, bar)
        if step is None or (bar is None and timing is None):
            return
        contains = frozenset({"evaluation"}) if self._validating and timing is None else frozenset()
        self._validating = False
        if timing is not None:
            if "," in timing[1]:
                raise OtherLanguage(timing[1])
            self.interval(Interval(step, seconds=number_of(timing[1])))
        elif bar is not None and bar[6] != "?" and step:
            rate = number_of(bar[6])
            self.interval(Interval(step, seconds=rate if bar[7] == "s/it" else 1.0 / rate, contains=contains))
        for kind, value in _NEMO_MEMORY.findall(text):
            self.memory(kind, number_of(value), None)

    def _step(self, text: str, bar: re.Match[str] | None) -> int | None:
        if bar is not None:
            epoch = re.search(r"Epoch (\d+)", text)
            return int(bar[1]) + (int(epoch[1]) * int(bar[2]) if epoch else 0)
        found = _PRINTED.search(text) or _GLOBAL.search(text)
        return int(float(found[1])) + 1 if found else None
