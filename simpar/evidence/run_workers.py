"""Processes that share a list of tasks, and the progress of it on standard error."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Final, Self, TypeVar

from simpar.errors import SimparError
from simpar.host import follow_parent, interrupts_held

EVERY_S: Final = 10.0
"""Between lines of progress where standard error is not a terminal."""
Task = TypeVar("Task")
Done = TypeVar("Done")


def in_workers(function: Callable[[Task], Done], tasks: Sequence[Task], workers: int) -> Iterator[tuple[int, Done]]:
    """(index of the task, what `function` made of it) as they are done; an interruption ends the workers at once.

    One worker is this process itself.

    Raises:
        SimparError: a worker was killed from outside.
    """
    if workers == 1 or len(tasks) <= 1:
        yield from ((index, function(task)) for index, task in enumerate(tasks))
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(workers, len(tasks)), initializer=follow_parent)
    try:
        with interrupts_held():
            waiting = {pool.submit(function, task): index for index, task in enumerate(tasks)}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BrokenProcessPool:
        raise SimparError("a worker process was killed, most probably for lack of memory") from None
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(function: Callable[[Task], Done], tasks: Sequence[Task], workers: int, bar: Bar, chunk: int = 1) -> list[Done]:
    """What `function` makes of each task, in their order; `chunk` neighbours share a worker, so that its caches help.

    Raises:
        SimparError: as `in_workers`.
    """
    chunks = [tasks[i : i + chunk] for i in range(0, len(tasks), chunk)]
    found: dict[int, list[Done]] = {}
    with bar:
        for index, done in in_workers(partial(_each, function), chunks, workers):
            found[index] = done
            bar.advance(len(done))
    return [one for index in range(len(chunks)) for one in found[index]]


def _each(function: Callable[[Task], Done], tasks: Sequence[Task]) -> list[Done]:
    return [function(task) for task in tasks]


class Bar:
    """How many of `total` are done: a bar on a terminal, a line now and then elsewhere, or nothing."""

    def __init__(self, total: int, show: bool, what: str = "runs") -> None:
        self.total, self.show, self.what, self.done = total, show, what, 0
        self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self.show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(self.what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(self.what, total=self.total)
        return self

    def advance(self, count: int) -> None:
        """`count` more are done."""
        self.done += count
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], count)
        elif self.show and time.monotonic() - self._said > EVERY_S:
            self._said = time.monotonic()
            sys.stderr.write(f"simpar: {self.done} of {self.total} {self.what}\n")
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
