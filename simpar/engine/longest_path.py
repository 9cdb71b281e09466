"""The engine without a clock: finish times are longest paths, in numpy, for many candidates at once.

An op starts when its last predecessor (dependency or stream neighbour) has finished, so

    finish[op] = max(finish of predecessors, 0) + seconds[op],

the recurrence that the discrete-event engine replays event by event. Maximum and one addition per op are the same
floating-point operations there and here: the results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simpar.engine.durations import SlowFactors, op_seconds
from simpar.engine.jitter import Noise
from simpar.engine.timeline import Timeline
from simpar.errors import InternalError
from simpar.program.program import FloatArray, IntArray, PriceTable, Program

_WIDE_LEVEL = 48
"""Ops per level from which numpy calls per level are cheaper than a Python loop over ops (measured, benchmarks/)."""

_BLOCK_BYTES = 256 * 2**20
"""Candidates are swept in blocks whose finish times fit in this."""


def longest_path(
    program: Program,
    prices: PriceTable,
    *,
    slow_factors: SlowFactors | None = None,
    noise: Noise | None = None,
    seed: int = 0,
    repetition: int = 0,
) -> Timeline:
    """The timeline of `program`, without contention and interference.

    Raises:
        DeadlockError: the program has a cycle.
    """
    seconds = op_seconds(program, prices, slow_factors, noise, seed=seed, repetition=repetition)
    levels = program.topological_levels
    if program.num_ops > _WIDE_LEVEL * len(levels):
        sweep = Sweep.of(program)
        finish = sweep.in_op_order(sweep.finish(lambda ops: seconds[ops, None], 1))[:, 0]
        return Timeline(program, start_of(program, finish), finish)
    return _sweep_in_python(program, seconds)


def longest_path_batch(program: Program, seconds: FloatArray, *, finish: bool = False) -> FloatArray:
    """Makespans of one program under many price vectors.

    Args:
        program: what waits for what.
        seconds: float array [candidates, prices].
        finish: return the finish of every op instead, float array [candidates, ops].

    Returns:
        Makespans in seconds, float array [candidates] (or the finish times).

    Raises:
        DeadlockError: the program has a cycle.
        InternalError: `seconds` does not fit the program.
    """
    table = np.asarray(seconds, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != len(program.price_keys):
        raise InternalError(f"{program.name} has {len(program.price_keys)} prices, the batch {table.shape}")
    if not (np.isfinite(table).all() and (table >= 0.0).all()):
        raise InternalError(f"{program.name}: a price in the batch is negative or not finite")
    by_price = np.ascontiguousarray(table.T)
    price = program.price

    def block(first: int, last: int) -> Callable[[IntArray], FloatArray]:
        columns = np.ascontiguousarray(by_price[:, first:last])
        return lambda ops: columns[price[ops]]

    return _in_blocks(program, len(table), block, finish)


def longest_path_by_op(program: Program, seconds: Callable[[int], FloatArray], repetitions: int) -> FloatArray:
    """Makespans of runs whose ops take `seconds(repetition)`, float array [ops]: float array [repetitions]."""

    def block(first: int, last: int) -> Callable[[IntArray], FloatArray]:
        columns = np.stack([seconds(r) for r in range(first, last)], axis=1)
        return lambda ops: columns[ops]

    return _in_blocks(program, repetitions, block, finish=False)


def _in_blocks(
    program: Program, count: int, block: Callable[[int, int], Callable[[IntArray], FloatArray]], finish: bool
) -> FloatArray:
    sweep = Sweep.of(program)
    width = max(1, _BLOCK_BYTES // (8 * max(program.num_ops, 1)))
    parts = []
    for first in range(0, count, width):
        last = min(first + width, count)
        times = sweep.finish(block(first, last), last - first)
        parts.append(sweep.in_op_order(times).T if finish else times.max(axis=0, initial=0.0))
    empty = np.zeros((0, program.num_ops) if finish else 0)
    return np.concatenate(parts) if parts else empty


@dataclass(frozen=True, slots=True)
class Sweep:
    """A program prepared for level-by-level sweeps.

    Ops are renumbered by position (level by level, most predecessors first within a level), so that a level writes one
    contiguous slice and the k-th predecessors of a level are those of a prefix of it.

    Attributes:
        order: op at each position, int array [ops].
        levels: per level its first and last position, and for k = 0, 1, ... the positions of the k-th predecessors.
    """

    order: IntArray
    levels: tuple[tuple[int, int, tuple[IntArray, ...]], ...]

    @classmethod
    def of(cls, program: Program) -> Sweep:
        """The sweep of `program`, prepared once and kept with it.

        Raises:
            DeadlockError: the program has a cycle.
        """
        return program.worked_out(cls._prepare)

    @classmethod
    def _prepare(cls, program: Program) -> Sweep:
        ptr, ops = program.predecessors
        degree, levels = np.diff(ptr), program.topological_levels
        order = np.concatenate(levels) if levels else np.zeros(0, dtype=np.int64)
        level = np.repeat(np.arange(len(levels)), [len(each) for each in levels])
        order = order[np.lexsort((-degree[order], level))]
        position = np.empty(program.num_ops, dtype=np.int64)
        position[order] = np.arange(program.num_ops)
        # All levels at once, as they are often a few ops wide.
        gathers: list[list[IntArray]] = [[] for _ in levels]
        at, k = np.flatnonzero(degree[order] > 0), 0
        while len(at):
            waited, of = position[ops[ptr[order[at]] + k]], level[at]
            begins = np.flatnonzero(np.diff(of, prepend=-1))
            for number, begin, end in zip(of[begins].tolist(), begins.tolist(), [*begins[1:].tolist(), len(at)], strict=True):
                gathers[number].append(waited[begin:end])
            k += 1
            at = at[degree[order[at]] > k]
        ends = np.cumsum([len(each) for each in levels]).tolist()
        prepared = zip([0, *ends[:-1]], ends, map(tuple, gathers), strict=False)
        return cls(order, tuple(prepared))

    def finish(self, seconds: Callable[[IntArray], FloatArray], width: int) -> FloatArray:
        """Finish times by position: float array [ops, width]; `seconds(ops)` gives the durations [len(ops), width]."""
        times = np.empty((len(self.order), width))
        for first, last, gathers in self.levels:
            out = times[first:last]
            if gathers:
                np.take(times, gathers[0], axis=0, out=out)
                for gather in gathers[1:]:
                    np.maximum(out[: len(gather)], times[gather], out=out[: len(gather)])
                out += seconds(self.order[first:last])
            else:
                out[:] = seconds(self.order[first:last])
        return times

    def in_op_order(self, times: FloatArray) -> FloatArray:
        """`times` by position -> by op."""
        by_op = np.empty_like(times)
        by_op[self.order] = times
        return by_op


def start_of(program: Program, finish: FloatArray) -> FloatArray:
    """Start of each op, float array [ops]: the latest finish among its predecessors."""
    ptr, ops = program.predecessors
    start = np.zeros(program.num_ops)
    waits = np.flatnonzero(np.diff(ptr) > 0)
    if len(waits):
        start[waits] = np.maximum.reduceat(finish[ops], ptr[waits])
    return start


def _sweep_in_python(program: Program, seconds: FloatArray) -> Timeline:
    """The same recurrence op by op: faster for one candidate on a deep, narrow program."""
    ptr, successors = program.successors[0].tolist(), program.successors[1].tolist()
    durations = seconds.tolist()
    start, finish = [0.0] * program.num_ops, [0.0] * program.num_ops
    for op in np.concatenate(program.topological_levels).tolist() if program.num_ops else ():
        end = finish[op] = start[op] + durations[op]
        for successor in successors[ptr[op] : ptr[op + 1]]:
            if start[successor] < end:
                start[successor] = end
    return Timeline(program, np.array(start), np.array(finish))
