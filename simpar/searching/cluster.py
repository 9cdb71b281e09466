"""Parts of a search on the workers of a Dask cluster, here or elsewhere."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.searching.choice import Choice
from simpar.searching.executors import RETRIES, Now, Task
from simpar.searching.incumbents import Followers, Limits, Scored
from simpar.searching.nodes import Node
from simpar.searching.parts import PartResult, Wish, solve_part
from simpar.searching.space import Space

_CONNECT_S = 10.0
"""How long to try to reach the scheduler."""
_WORKERS_S = 30.0
"""How long to wait for the first worker."""
_SILENCE_S: Final = 10.0
"""After so long without a word the scheduler is asked whether it is still there."""


def _cluster_part(space: Space, wish: Wish, part: int, nodes: Sequence[Node], known: Sequence[Scored], topic: str) -> PartResult:
    """A part on a worker: layouts and bounds go to the client as events, what must be beaten comes as a shared variable."""
    from distributed import Variable, get_client, get_worker

    worker, limits = get_worker(), [Limits()]
    best = Variable(topic, client=get_client())

    def scored(found: Scored) -> None:
        row = (found.choice.flat(), found.step_time_s, found.device_bytes, found.value)
        worker.log_event(topic, {"part": part, "scored": row})

    def tell(bound: float) -> None:
        worker.log_event(topic, {"part": part, "bound": bound})
        with suppress(Exception):  # A lost message only costs pruning.
            value, points = best.get(timeout="2s")
            limits[0] = Limits(value, tuple((v, b) for v, b in points))

    return solve_part(space, wish, part, nodes, known, lambda: limits[0], Followers(scored, Now(tell)))


def dask(task: Task, scheduler: str) -> Iterator[PartResult]:
    """Parts on the workers of the Dask cluster at `scheduler`; Dask itself does a lost worker's parts again.

    Raises:
        InputError: Dask is not installed, nobody answers there, or its workers cannot do the work.
    """
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
                known = task.incumbents.best
                future = client.submit(_cluster_part, task.space, task.wish, part, nodes, known, topic, pure=False, retries=RETRIES)
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


__all__ = ["dask"]
