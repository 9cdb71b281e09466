"""Who does the parts: this process, processes of this machine, or the workers of a Dask cluster. All give the same answer."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from typing import Any

from simpar.errors import InputError
from simpar.search.branch import Node, Progress
from simpar.search.incumbents import Scored
from simpar.search.parts import PartResult, Wish, solve_part
from simpar.search.space import Space

_RETRIES = 3
_EVERY_S = 0.5


@dataclass
class Task:
    """What an executor works on.

    Attributes:
        space, wish: of the search.
        parts: number -> nodes, those still to do.
        known: asks for the best layouts found so far.
        on_scored: told every simulated layout.
        on_bound: told (part, bound) now and then.
    """

    space: Space
    wish: Wish
    parts: dict[int, list[Node]]
    known: Callable[[], Sequence[Scored]]
    on_scored: Callable[[Scored], None]
    on_bound: Callable[[int, float], None]

    @property
    def cutoff(self) -> float:
        """The value that anything must beat."""
        known = self.known()
        return known[self.wish.keep - 1].value if len(known) >= self.wish.keep and not self.wish.front else inf


def in_process(task: Task) -> Iterator[PartResult]:
    """All parts here, one after the other."""
    for part, nodes in task.parts.items():
        told = [0.0]

        def progress(state: Progress, part: int = part, told: list[float] = told) -> None:
            if time.monotonic() - told[0] > _EVERY_S:
                told[0] = time.monotonic()
                task.on_bound(part, state.bound)

        yield solve_part(
            task.space, task.wish, part, nodes, task.known(), on_scored=task.on_scored, on_progress=progress
        )


# -- processes -----------------------------------------------------------------------------------------------------------

_SHARED: Any = None
_OUT: Any = None


def _enter(shared: Any, out: Any) -> None:
    import signal

    # Ctrl-C is for the parent, which stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _SHARED, _OUT
    _SHARED, _OUT = shared, out


def _work(space: Space, wish: Wish, part: int, nodes: list[Node], known: list[Scored]) -> PartResult:
    shared, out = _SHARED, _OUT
    told = [0.0]

    def scored(found: Scored) -> None:
        out.put(("scored", part, found))

    def progress(state: Progress) -> None:
        if time.monotonic() - told[0] > _EVERY_S:
            told[0] = time.monotonic()
            out.put(("bound", part, state.bound))

    return solve_part(
        space, wish, part, nodes, known, shared=lambda: shared.value, on_scored=scored, on_progress=progress
    )


def processes(task: Task, workers: int | None = None) -> Iterator[PartResult]:
    """Parts on processes of this machine; a worker that dies is replaced and its part done again."""
    count = workers or os.cpu_count() or 1
    if count <= 1 or len(task.parts) <= 1:
        yield from in_process(task)
        return
    context = multiprocessing.get_context("spawn")
    left, failures = dict(task.parts), 0
    while left:
        shared, out = context.Value("d", task.cutoff), context.Queue()
        pool = ProcessPoolExecutor(min(count, len(left)), context, _enter, (shared, out))
        try:
            for result in _feed(pool, task, left, shared, out, count):
                del left[result.part]
                yield result
        except BrokenProcessPool:
            failures += 1
            if failures > _RETRIES:
                raise InputError(f"--executor local: workers died {failures} times; is there enough memory?") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()


def _feed(
    pool: ProcessPoolExecutor, task: Task, left: dict[int, list[Node]], shared: Any, out: Any, count: int
) -> Iterator[PartResult]:
    waiting = list(left.items())
    running: set[Future[PartResult]] = set()
    while waiting or running:
        while waiting and len(running) < count:
            part, nodes = waiting.pop(0)
            running.add(pool.submit(_work, task.space, task.wish, part, nodes, list(task.known())))
        done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
        _listen(task, shared, out)
        for future in done:
            yield future.result()


def _listen(task: Task, shared: Any, out: Any) -> None:
    while True:
        try:
            kind, part, found = out.get_nowait()
        except queue.Empty:
            break
        if kind == "scored":
            task.on_scored(found)
        else:
            task.on_bound(part, found)
    shared.value = task.cutoff


# -- Dask ----------------------------------------------------------------------------------------------------------------


def dask(task: Task, scheduler: str | None) -> Iterator[PartResult]:
    """Parts on the workers of the Dask cluster at `scheduler`; Dask itself does a lost worker's parts again.

    Raises:
        InputError: no address, Dask is not installed, or nobody answers there.
    """
    if not scheduler:
        raise InputError("--executor dask: give the scheduler's address, such as --scheduler tcp://10.0.0.1:8786")
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise InputError("--executor dask: Dask is not installed; pip install 'simpar[cluster]'") from None
    try:
        client = Client(scheduler, timeout="10s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(f"--scheduler {scheduler}: {error}") from None
    with client:
        waiting = list(task.parts.items())

        def submit() -> Any:
            part, nodes = waiting.pop(0)
            known = list(task.known())
            return client.submit(solve_part, task.space, task.wish, part, nodes, known, pure=False, retries=_RETRIES)

        threads = max(sum(client.nthreads().values()), 1)
        running = as_completed([submit() for _ in range(min(len(waiting), threads))])
        for future in running:
            result: PartResult = future.result()
            for scored in result.best:
                task.on_scored(scored)
            if waiting:
                running.add(submit())
            yield result


__all__ = ["Task", "dask", "in_process", "processes"]
