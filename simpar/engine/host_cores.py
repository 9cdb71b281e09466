"""Processes that share the cores of one host: ops progress together at the speed that the cores allow.

Every running op wants some cores: one for each rank that computes, a measured share of one for each rank that talks through
gloo (its copies run on the same cores). While all together want more cores than there are, all progress at cores / wanted of
their speed; else at full speed. This is processor sharing, as the kernel's fair scheduler does it; ops that want nothing keep
their price. Without contention the finish times are those of the other engines.
"""

from __future__ import annotations

import heapq

import numpy as np

from simpar.engine.timeline import Timeline
from simpar.program.program import FloatArray, Program

_TIE = 1e-12


def replay(program: Program, seconds: FloatArray, wanted: FloatArray, cores: float) -> Timeline:
    """Replay `program` on a host of `cores`.

    Args:
        seconds: of each op alone, float array [ops].
        wanted: cores that each op keeps busy while it runs, float array [ops].
        cores: of the host.

    Raises:
        DeadlockError: the program has a cycle.
    """
    program.check()
    waiting = np.diff(program.predecessors[0]).tolist()
    ptr, successors = program.successors[0].tolist(), program.successors[1].tolist()
    start, finish = np.zeros(program.num_ops), np.zeros(program.num_ops)
    amounts, wants = seconds.tolist(), wanted.tolist()
    # `served` is the work done on an op that has run since 0: an op of s seconds that starts at served = a ends at a + s.
    now = served = busy = 0.0
    shared: list[tuple[float, int]] = []
    free: list[tuple[float, int]] = []

    def begin(op: int) -> None:
        nonlocal busy
        start[op] = now
        if wants[op] > 0.0:
            busy += wants[op]
            heapq.heappush(shared, (served + amounts[op], op))
        else:
            heapq.heappush(free, (now + amounts[op], op))

    for op in [op for op, count in enumerate(waiting) if not count]:
        begin(op)
    while shared or free:
        speed = min(1.0, cores / busy) if busy > cores else 1.0
        next_shared = now + (shared[0][0] - served) / speed if shared else np.inf
        next_free = free[0][0] if free else np.inf
        moment = max(min(next_shared, next_free), now)
        served += (moment - now) * speed
        now = moment
        ended = []
        while shared and shared[0][0] <= served * (1.0 + _TIE) + _TIE:
            ended.append(heapq.heappop(shared)[1])
            busy -= wants[ended[-1]]
        while free and free[0][0] <= now:
            ended.append(heapq.heappop(free)[1])
        if not shared:
            # No drift of a sum of floats over thousands of ops.
            busy = 0.0
        for op in ended:
            finish[op] = now
        for op in ended:
            for successor in successors[ptr[op] : ptr[op + 1]]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    begin(successor)
    return Timeline(program, start, finish)
