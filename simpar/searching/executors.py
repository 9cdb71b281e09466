"""Who does the parts: this process, processes of this machine, or the workers of a Dask cluster. All give the same answer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.host import follow_parent, interrupts_held
from simpar.searching.account import Progress
from simpar.searching.board import Board
from simpar.searching.branch import Node
from simpar.searching.choice import Choice
from simpar.searching.closed import Closed, Closing
from simpar.searching.incumbents import Incumbents, Limits, Scored
from simpar.searching.parts import PartResult, Wish, solve_part, survey_part
from simpar.searching.space import Space

_RETRIES: Final = 3
EVERY_S: Final = 0.5


@dataclass
class Task:
    """What an executor works on.

    Attributes:
        space, wish: of the search.
        parts: number -> nodes, those still to do.
        incumbents: the best layouts found so far.
        on_scored: told every simulated layout.
        on_bound: told (part, bound) now and then.
        surveyed: parts whose bounds are known.
        closed: part -> designs that were closed before; none = nobody wants to know which are.
        on_closed: told (part, designs closed since) now and then.
    """

    space: Space
    wish: Wish
    parts: dict[int, list[Node]]
    incumbents: Incumbents
    on_scored: Callable[[Scored], None]
    on_bound: Callable[[int, float], None]
    surveyed: frozenset[int] = frozenset()
    closed: dict[int, list[Closed]] | None = None
    on_closed: Callable[[int, list[Closed]], None] = lambda _part, _closed: None

    def closing(self, part: int) -> list[Closed] | None:
        """What a worker needs to know of a part's designs."""
        return None if self.closed is None else self.closed.get(part, [])

    def told(self, part: int, closed: list[Closed]) -> None:
        """A worker has closed designs of a part."""
        if self.closed is not None and closed:
            self.closed.setdefault(part, []).extend(closed)
            self.on_closed(part, closed)


class Now:
    """Calls a function with the bound and the designs closed since, not more often than anybody wants to know."""

    def __init__(self, tell: Callable[[float, list[Closed]], None], known: list[Closed] | None) -> None:
        self._tell, self._told = tell, 0.0
        self.closing = None if known is None else Closing(known)

    def __call__(self, state: Progress) -> None:
        now = time.monotonic()
        if now - self._told > EVERY_S:
            self._told = now
            self._tell(state.bound, [] if self.closing is None else self.closing.take())


def in_process(task: Task) -> Iterator[PartResult]:
    """All parts here, one after the other."""
    for part, nodes in task.parts.items() if len(task.parts) > 1 else ():
        if part not in task.surveyed:
            task.on_bound(part, survey_part(task.space, task.wish, nodes))
    for part, nodes in task.parts.items():

        def tell(bound: float, closed: list[Closed], part: int = part) -> None:
            task.on_bound(part, bound)
            task.told(part, closed)

        now = Now(tell, task.closing(part))
        yield solve_part(
            task.space, task.wish, part, nodes, task.incumbents.known, on_scored=task.on_scored, on_progress=now,
            closing=now.closing,
        )  # fmt: skip


# -- processes -------------------------------------------------------------------------------------------------------------


def _worker(pipe: Connection, board: Board, space: Space, wish: Wish) -> None:
    """A process: takes parts from the pipe until it closes, to survey or to solve; sends layouts, bounds and results."""
    follow_parent()
    with suppress(EOFError, OSError):
        while True:
            part, nodes, known, closed = pipe.recv()
            try:
                if known is None:
                    pipe.send(("bound", survey_part(space, wish, nodes)))
                    pipe.send(("surveyed", None))
                    continue
                now = Now(lambda bound, closed: pipe.send(("progress", (bound, closed))), closed)
                result = solve_part(
                    space, wish, part, nodes, known, shared=board.read, closing=now.closing, on_progress=now,
                    on_scored=lambda scored: pipe.send(("scored", scored)),
                )  # fmt: skip
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
        self._board = Board(self._context)
        self._board.write(task.incumbents.limits)
        self._waiting = list(task.parts)
        # Parts that wait for a worker have no bound yet; a glance at them costs little.
        self._unseen = [p for p in self._waiting if p not in task.surveyed] if len(task.parts) > count else []
        self._workers = [self._hire() for _ in range(min(count, len(task.parts)))]

    def _hire(self) -> _Busy:
        mine, theirs = self._context.Pipe()
        arguments = (theirs, self._board, self.task.space, self.task.wish)
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
            ready = {id(pipe) for pipe in wait_for([w.pipe for w in self._workers], timeout=1.0)}
            for worker in [w for w in self._workers if id(w.pipe) in ready]:
                result = self._hear(worker)
                if result is not None:
                    del self.left[result.part]
                    yield result
            self._board.write(self.task.incumbents.limits)

    def _give(self, worker: _Busy) -> None:
        worker.surveys = bool(self._unseen)
        if worker.surveys:
            worker.part = part = self._unseen.pop(0)
            worker.seen.append(part)
        else:
            # What a worker has surveyed it need not price again.
            worker.part = part = next((p for p in self._waiting if p in worker.seen), self._waiting[0])
            self._waiting.remove(part)
        known = None if worker.surveys else self.task.incumbents.known
        with suppress(OSError):  # It died: its end of the pipe says so at the next look.
            worker.pipe.send((part, self.task.parts[part], known, self.task.closing(part)))

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
        elif kind == "progress" and worker.part is not None:
            self.task.on_bound(worker.part, content[0])
            self.task.told(worker.part, content[1])
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
        if self.deaths > _RETRIES:
            rule = f"{self.deaths} workers have died; is there enough memory?"
            raise InputError([Violation("--executor", "local", rule, "fewer --workers")])
        if worker.part is not None and not worker.surveys:
            self._waiting.insert(0, worker.part)
        self._workers.append(self._hire())


def processes(task: Task, workers: int | None = None) -> Iterator[PartResult]:
    """Parts on processes of this machine; a worker that dies is replaced and its part done again.

    Raises:
        InputError: workers keep dying.
    """
    count = workers or os.cpu_count() or 1
    if count <= 1 or len(task.parts) <= 1:
        yield from in_process(task)
        return
    pool = _Pool(task, count)
    try:
        yield from pool.results()
    finally:
        pool.stop()


# -- Dask ------------------------------------------------------------------------------------------------------------------

_CONNECT_S = 10.0
"""How long to try to reach the scheduler."""
_WORKERS_S = 30.0
"""How long to wait for the first worker."""
_SILENCE_S: Final = 10.0
"""After so long without a word the scheduler is asked whether it is still there."""


def _cluster_part(
    space: Space, wish: Wish, part: int, nodes: Sequence[Node], known: Sequence[Scored], closed: list[Closed] | None, topic: str
) -> PartResult:  # fmt: skip
    """A part on a worker: layouts and bounds go to the client as events, what must be beaten comes as a shared variable."""
    from distributed import Variable, get_client, get_worker

    worker, limits = get_worker(), [Limits()]
    best = Variable(topic, client=get_client())

    def scored(found: Scored) -> None:
        row = (found.choice.flat(), found.step_time_s, found.device_bytes, found.value)
        worker.log_event(topic, {"part": part, "scored": row})

    def tell(bound: float, closed: list[Closed]) -> None:
        worker.log_event(topic, {"part": part, "bound": bound, "closed": [(c.name, c.to_json()) for c in closed]})
        with suppress(Exception):  # A lost message only costs pruning.
            value, other, of, points = best.get(timeout="2s")
            limits[0] = Limits(value, other, tuple(of) if of else None, tuple((v, b) for v, b in points))

    now = Now(tell, closed)
    return solve_part(
        space, wish, part, nodes, known, shared=lambda: limits[0], on_scored=scored, on_progress=now, closing=now.closing
    )


def dask(task: Task, scheduler: str | None) -> Iterator[PartResult]:
    """Parts on the workers of the Dask cluster at `scheduler`; Dask itself does a lost worker's parts again.

    Raises:
        InputError: no address, Dask is not installed, nobody answers there, or its workers cannot do the work.
    """
    if not scheduler:
        right = "--scheduler tcp://10.0.0.1:8786"
        raise InputError([Violation("--executor", "dask", "needs the scheduler's address", right)])
    try:
        from distributed import Client
    except ImportError:
        raise InputError([Violation("--executor", "dask", "is not installed", "pip install 'simpar[cluster]'")]) from None
    try:
        # A client that cannot connect complains on its own when it is collected: first see whether anybody answers.
        asyncio.run(_knock(scheduler))
        client = Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError, TypeError) as error:
        right = "the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786"
        rule = f"cannot be reached: {error or f'no answer within {_CONNECT_S:g} s'}".splitlines()[0]
        raise InputError([Violation("--scheduler", scheduler, rule, right)]) from None
    with client:
        yield from _on_cluster(task, client, scheduler)


async def _knock(address: str) -> None:
    from distributed.comm import connect

    comm = await asyncio.wait_for(connect(address, timeout=_CONNECT_S), _CONNECT_S)
    await comm.close()


def _on_cluster(task: Task, client: Any, scheduler: str) -> Iterator[PartResult]:
    from distributed import KilledWorker, Variable

    try:
        client.wait_for_workers(1, timeout=_WORKERS_S)
    except TimeoutError:
        rule = f"has had no worker for {_WORKERS_S:.0f} s"
        raise InputError([Violation("--scheduler", scheduler, rule, f"start some: dask worker {scheduler}")]) from None
    except OSError:
        raise _lost(scheduler) from None
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    topic = f"simpar-{os.urandom(6).hex()}"
    shared = Variable(topic, client=client)
    shared.set(tuple(task.incumbents.limits))
    client.subscribe_topic(topic, lambda event: events.put(event[1]))
    waiting, running = list(task.parts.items()), set[Any]()
    try:
        while waiting or running:
            while waiting and len(running) < max(sum(client.nthreads().values()), 1):
                part, nodes = waiting.pop(0)
                known, closed = task.incumbents.known, task.closing(part)
                future = client.submit(
                    _cluster_part, task.space, task.wish, part, nodes, known, closed, topic, pure=False, retries=_RETRIES
                )
                running.add(future)
                # Runs in another thread; everything is done in this one.
                future.add_done_callback(events.put)
            before = task.incumbents.limits
            try:
                event = events.get(timeout=_SILENCE_S)
            except queue.Empty:
                _ask(client, scheduler)
                continue
            if not isinstance(event, dict):
                running.discard(event)
                result: PartResult = event.result()
                yield result
            elif "scored" in event:
                flat, seconds, device_bytes, value = event["scored"]
                task.on_scored(Scored(Choice.from_flat(flat), seconds, device_bytes, value))
            else:
                task.on_bound(event["part"], event["bound"])
                task.told(event["part"], [Closed.from_json(name, data) for name, data in event["closed"]])
            if task.incumbents.limits != before:
                shared.set(tuple(task.incumbents.limits))
    except (CancelledError, OSError):
        raise _lost(scheduler) from None
    except (KilledWorker, ImportError) as error:
        rule = f"its workers cannot do the work: {error}"
        raise InputError([Violation("--scheduler", scheduler, rule, "install the same simpar there, with enough memory")]) from None
    finally:
        with suppress(Exception):  # The scheduler may be gone; nothing is lost by that.
            client.unsubscribe_topic(topic)
            client.cancel(list(running))
            shared.delete()


def _ask(client: Any, scheduler: str) -> None:
    """Raise if nobody is there any more.

    Raises:
        InputError: the scheduler does not answer.
    """
    try:
        client.sync(client.scheduler.identity, callback_timeout=_SILENCE_S)
    except (OSError, TimeoutError, CancelledError):
        raise _lost(scheduler) from None


def _lost(scheduler: str) -> InputError:
    return InputError([Violation("--scheduler", scheduler, "has gone away", "start it again; with --store, --resume goes on")])


__all__ = ["EVERY_S", "Now", "Task", "dask", "in_process", "processes"]
