"""Processes on this host: the cores that those which measure see, and workers that end with their parent.

Standard library only, for machines that have torch and nothing else.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import NoReturn

_ALLOCATIONS = 1_000_000
"""Objects between two searches for cycles; Python's own number is 700."""


def follow_parent() -> None:
    """For a worker process: Ctrl-C is for the parent, which ends its workers; a parent that was killed takes them with it."""
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def join_slurm(environment: MutableMapping[str, str] | None = None) -> None:
    """Under `srun` without torchrun: Slurm's variables as those that torch.distributed reads."""
    env = os.environ if environment is None else environment
    if "RANK" in env or "SLURM_PROCID" not in env or int(env.get("SLURM_NTASKS", "1")) < 2:
        return
    nodes = max(1, int(env.get("SLURM_NNODES", "1")))
    found = {
        "RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_NTASKS"], "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(int(env["SLURM_NTASKS"]) // nodes),
    }  # fmt: skip
    env.update(found)
    # A job's own script sets the address where its first node has another name on the network.
    env.setdefault("MASTER_ADDR", env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started here do not see Ctrl-C before they have said what to do about it; this process sees it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    # Started by the first process of this kind, it would let interrupts through again when it has.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """For work whose memos hold millions of objects and few cycles: looking for those again and again costs a tenth of it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def usable_cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def pin() -> None:
    """Each rank of a launch on a core of its own where there are enough of them; else the kernel shares all among all (Linux)."""
    cores = usable_cores()
    if hasattr(os, "sched_setaffinity") and 1 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= len(cores):
        os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0"))]})


def busy_s() -> float:
    """Seconds that all cores of this host were not idle since it started, stolen ones included (Linux; elsewhere 0)."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(v) for v in file.readline().split()[1:9]]  # user nice system idle iowait irq softirq steal
    except (OSError, ValueError):
        return 0.0
    # Interrupts are nobody's: most are those of the ranks' own messages.
    return (sum(fields) - sum(fields[3:7])) / os.sysconf("SC_CLK_TCK")


def end(code: int) -> NoReturn:
    """End this process as Python does, but without freeing what it holds object by object: after a search a tenth of its time."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process; where it is one rank of several, without Python's own end.

    Threads of communicators, closed ones too, can hang or abort an interpreter that is on its way out (gloo: "terminate called
    without an active exception", about one run in thirty), and the launcher would call a finished run a failed one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
