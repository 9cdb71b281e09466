"""What the readers of line formats share: steps that count on, restarts, and what lies between two lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from simpar.errors import InputError
from simpar.runlogs.lines import Line, OtherLanguage, number_of
from simpar.runlogs.records import Interval, LogReading, Memory, MemoryKind


class Parser(ABC):
    """Reads one format line by line; lines of other formats pass by.

    Attributes:
        name: in `formats.FORMATS`.
        anchors: texts of which a line of the format holds one; others are not looked at.
        chosen: whether the user named the format.
        hint: what would make steps of lines that say too little by themselves.
    """

    name: ClassVar[str]
    anchors: ClassVar[tuple[str, ...]]
    chosen = False
    hint = ""

    def __init__(self, file: str) -> None:
        self.reading = LogReading(file, self.name)
        self.segment = 0
        self._last: dict[int | None, int] = {}
        self._before: int | None = None
        self._pending: set[str] = set()
        self._seen: set[tuple[int | None, int, int]] = set()

    def feed(self, line: Line) -> None:
        """Read a line.

        Raises:
            InputError: a number of the format in another language's writing.
        """
        if not any(anchor in line.text for anchor in self.anchors):
            return
        try:
            self.read(line)
        except OtherLanguage as error:
            rule = f"{str(error)!r} has a decimal comma; expected numbers with a point, as {self.name} prints them"
            raise InputError(f"{self.reading.file}:{line.number}: {rule} (run with LC_ALL=C)") from None
        except (ValueError, IndexError):
            self.reading.notes.append(f"line {line.number} is cut or mixed with another and was left out")

    @abstractmethod
    def read(self, line: Line) -> None:
        """Read a line that holds an anchor; ValueError for one that is cut."""

    def finish(self) -> None:  # noqa: B027 - most formats need nothing
        """The file is read: add what only the whole says."""

    # -- what formats have in common -----------------------------------------------------------------------------------

    def mark(self, what: str) -> None:
        """Something besides steps happened: the next interval contains it."""
        self._pending.add(what)

    def restart(self) -> None:
        """The job starts anew: the next interval is the first of its segment."""
        if self.reading.intervals and self.reading.intervals[-1].segment == self.segment:
            self.segment += 1
        self._last.clear()
        self._before = None
        self._pending.clear()

    def interval(self, found: Interval) -> None:
        """Add an interval; a step that goes back is a restart, one that comes twice or late from another rank is left out.

        Its segment is that of the job's present start; a count that its line does not say runs from the interval before it.
        """
        step, rank, last = found.step, found.rank, self._last.get(found.rank)
        if rank is None and step == self._before:
            return
        if last is not None and step < last:
            self.restart()
            last = None
        if (rank, step, self.segment) in self._seen:
            return
        for value in (found.seconds, found.tokens_per_s_per_gpu, found.samples_per_s):
            if value is not None and not 0 < value < 1e12:
                raise ValueError(value)
        self._seen.add((rank, step, self.segment))
        contains = found.contains | (frozenset({"start"}) if last is None else frozenset()) | self._pending
        self._last[rank] = step
        self._before = last if rank is None else None
        if rank is None or rank == min((r for r in self._last if r is not None), default=rank):
            self._pending = set()
        count = found.count or (step - last if last is not None else max(step, 1))
        self.reading.intervals.append(replace(found, count=count, contains=contains, segment=self.segment))

    def memory(self, kind: MemoryKind, peak_bytes: float, rank: int | None, *, first_step: bool = False) -> None:
        """Add a peak."""
        if 0 < peak_bytes < 1e15:
            self.reading.memory.append(Memory(kind, peak_bytes, rank, first_step))

    def scale(self, step: int, value: float) -> None:
        """Note the loss scale where it changes."""
        if not self.reading.loss_scale or self.reading.loss_scale[-1][1] != value:
            self.reading.loss_scale.append((step, value))

    def scalar(self, name: str, text: str) -> None:
        """Keep a further figure."""
        self.reading.scalars.setdefault(name, []).append(number_of(text))
