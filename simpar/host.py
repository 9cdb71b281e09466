"""Processes on this host: the cores that those which measure see, and workers that end with their parent.

Standard library only, for machines that have torch and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """For a worker process: Ctrl-C is for the parent, which ends its workers; a parent that was killed takes them with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


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
