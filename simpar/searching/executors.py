"""Who does the parts: this process, processes of this machine, or the workers of a Dask cluster. All give the same answer."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.host import follow_parent, interrupts_held, rarely_collected
from simpar.searching.incumbents import Followers, Incumbents, Limits, Scored
from simpar.searching.nodes import Node
from simpar.searching.parts import PartResult, Wish, solve_part, survey_part
from simpar.searching.space import Space

RETRIES: Final = 3
"""Workers that may be lost before a search gives up: one that dies is likely to die again."""
EVERY_S: Final = 0.5
ALONE_S: Final = 20.0
"""CPU seconds that a search may take in one process before it is dealt to more."""


_POINTS: Final = 512
"""Layouts of a front that are told at most; the fastest."""


class SharedLimits:
    """What layouts must beat, written by one process and read by others."""

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("d", inf)
        # Of a front: its number, how many points, the points, its number again.
        self._front = context.RawArray("d", 2 * _POINTS + 3)
        self._seen, self._points = 0.0, Limits().points

    def write(self, limits: Limits) -> None:
        """Replace it."""
        self._value.value = limits.value
        points = limits.points[:_POINTS]
        if points != self._points:
            self._points, number = points, self._front[0] + 1.0
            self._front[0] = number
            self._front[1] = len(points)
            self._front[2 : 2 + 2 * len(points)] = [x for point in points for x in point]
            self._front[-1] = number

    def read(self) -> Limits:
        """The last that was whole."""
        return Limits(self._value.value, self._told())

    def _told(self) -> tuple[tuple[float, float], ...]:
        """The last front that was whole."""
        number = self._front[-1]
        if number != self._seen:
            flat = self._front[2 : 2 + 2 * int(self._front[1])]
            if self._front[0] == number:
                self._seen, self._points = number, tuple(zip(flat[::2], flat[1::2], strict=True))
        return self._points


@dataclass
class Task:
    """What an executor works on.

    Attributes:
        space, wish: of the search.
        parts: number -> nodes, those still to do; who hears of a result strikes its part out.
        incumbents: the best layouts found so far.
        on_scored: told every simulated layout.
        on_bound: told (part, bound) now and then.
        surveyed: parts whose bounds are known.
    """

    space: Space
    wish: Wish
    parts: dict[int, list[Node]]
    incumbents: Incumbents
    on_scored: Callable[[Scored], None]
    on_bound: Callable[[int, float], None]
    surveyed: frozenset[int] = frozenset()


class Now:
    """Calls a function with the bound, not more often than anybody wants to know."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell, self._told = tell, 0.0

    def __call__(self, bound: float) -> None:
        now = time.monotonic()
        if now - self._told > EVERY_S:
            self._told = now
            self._tell(bound)


class _OverdueError(Exception):
    """This process has worked on its own for long enough; its last bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound


def in_process(task: Task, until_s: float = inf) -> Iterator[PartResult]:
    """All parts here, one after the other.

    Raises:
        _OverdueError: this process has used more than `until_s` CPU seconds.
    """
    parts = list(task.parts.items())
    for part, nodes in parts if len(parts) > 1 else ():
        if part not in task.surveyed:
            task.on_bound(part, survey_part(task.space, task.wish, nodes))
    for part, nodes in parts:

        def tell(bound: float, part: int = part) -> None:
            task.on_bound(part, bound)
            if time.process_time() > until_s:
                raise _OverdueError(bound)

        followers = Followers(task.on_scored, Now(tell))
        yield solve_part(task.space, task.wish, part, nodes, task.incumbents.best, followers=followers)


# -- processes -------------------------------------------------------------------------------------------------------------


@rarely_collected()
def _worker(pipe: Connection, shared: SharedLimits, space: Space, wish: Wish) -> None:
    """A process: takes parts from the pipe until it closes, to survey or to solve; sends layouts, bounds and results."""
    follow_parent()
    with suppress(EOFError, OSError):
        while True:
            part, nodes, known = pipe.recv()
            try:
                if known is None:
                    pipe.send(("bound", survey_part(space, wish, nodes)))
                    pipe.send(("surveyed", None))
                    continue
                now = Now(lambda bound: pipe.send(("bound", bound)))
                followers = Followers(lambda scored: pipe.send(("scored", scored)), now)
                result = solve_part(space, wish, part, nodes, known, shared.read, followers)
                pipe.send(("done", result))
            except (EOFError, OSError):
                raise
            except Exception as error:
                error.add_note(traceback.format_exc())
                pipe.send(("failed", error))


@dataclass
class _Busy:
    """A worker, the part that it has, whether only to survey it, and parts that it has surveyed."""

    process: BaseProcess
    pipe: Connection
    part: int | None = None
    surveys: bool = False
    seen: list[int] = field(default_factory=list)

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool:
    """Processes with a pipe each: one that dies, even in the middle of a message, disturbs no other."""

    def __init__(self, task: Task, count: int) -> None:
        self.task, self.left, self.deaths = task, dict(task.parts), 0
        self._context = multiprocessing.get_context("spawn")
        self._shared = SharedLimits(self._context)
        self._shared.write(task.incumbents.limits)
        self._waiting = list(task.parts)
        # Parts that wait for a worker have no bound yet; a glance at them costs little.
        self._unseen = [p for p in self._waiting if p not in task.surveyed] if len(task.parts) > count else []
        self._workers = [self._hire() for _ in range(min(count, len(task.parts)))]

    def _hire(self) -> _Busy:
        mine, theirs = self._context.Pipe()
        arguments = (theirs, self._shared, self.task.space, self.task.wish)
        process = self._context.Process(target=_worker, args=arguments, daemon=True)
        with interrupts_held():
            process.start()
        theirs.close()
        return _Busy(process, mine)

    def stop(self) -> None:
        """Kill all."""
        for worker in self._workers:
            worker.stop()

    def results(self) -> Iterator[PartResult]:
        """Parts as they are done.

        Raises:
            InputError: workers keep dying.
        """
        while self.left:
            for worker in self._workers:
                if worker.part is None and self._waiting:
                    self._give(worker)
            ready = wait_for([w.pipe for w in self._workers], timeout=1.0)
            for worker in [w for w in self._workers if w.pipe in ready]:
                result = self._hear(worker)
                if result is not None:
                    del self.left[result.part]
                    yield result
            self._shared.write(self.task.incumbents.limits)

    def _give(self, worker: _Busy) -> None:
        worker.surveys = bool(self._unseen)
        if worker.surveys:
            worker.part = part = self._unseen.pop(0)
            worker.seen.append(part)
        else:
            # What a worker has surveyed it need not price again.
            worker.part = part = next((p for p in self._waiting if p in worker.seen), self._waiting[0])
            self._waiting.remove(part)
        known = None if worker.surveys else self.task.incumbents.best
        with suppress(OSError):  # It died: its end of the pipe says so at the next look.
            worker.pipe.send((part, self.task.parts[part], known))

    def _hear(self, worker: _Busy) -> PartResult | None:
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return None
        if kind == "scored":
            self.task.on_scored(content)
        elif kind == "bound" and worker.part is not None:
            self.task.on_bound(worker.part, content)
        elif kind == "failed":
            raise content
        elif kind == "surveyed":
            worker.part = None
        elif kind == "done":
            worker.part = None
            found: PartResult = content
            return found
        return None

    def _replace(self, worker: _Busy) -> None:
        worker.stop()
        self._workers.remove(worker)
        self.deaths += 1
        if self.deaths > RETRIES:
            rule = f"{self.deaths} workers have died; is there enough memory?"
            raise InputError([Violation("--executor", "local", rule, "fewer --workers")])
        if worker.part is not None and not worker.surveys:
            self._waiting.insert(0, worker.part)
        self._workers.append(self._hire())


def processes(task: Task, count: int) -> Iterator[PartResult]:
    """Parts on processes of this machine; a worker that dies is replaced and its part done again.

    Raises:
        InputError: workers keep dying.
    """
    if count <= 1 or len(task.parts) <= 1:
        yield from in_process(task)
        return
    pool = _Pool(task, count)
    try:
        yield from pool.results()
    finally:
        pool.stop()


def alone_first(task: Task, cut: Callable[[int], list[list[Node]]]) -> Iterator[PartResult]:
    """This process for `ALONE_S`, then all cores.

    Each process prices for itself: two that share a search of ten seconds are done no sooner than one, and take half as long again
    of the cores. What this one had not finished is done again, with all that it had found to beat.

    Args:
        cut: the space in so many parts, where one part is all there is.
    """
    cores = os.cpu_count() or 1
    try:
        yield from in_process(task, time.process_time() + ALONE_S if cores > 1 else inf)
    except _OverdueError as overdue:
        if len(task.parts) == 1:
            task.parts.update(enumerate(cut(cores)))
            for part in task.parts:
                task.on_bound(part, overdue.bound)
        yield from processes(task, cores)


__all__ = ["EVERY_S", "RETRIES", "Now", "SharedLimits", "Task", "alone_first", "in_process", "processes"]
