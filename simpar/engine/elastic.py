"""Ops whose speed changes while they run: compute beside communication, transfers beside transfers.

An elastic op has work left, in seconds at full speed, and a speed between 0 and 1. A change of speed moves its due
time. Events are never cancelled: when the due time moves later, the event already scheduled finds the op unfinished and
schedules its successor; when it moves earlier than that event, a new one is scheduled and the old one is ignored. Of
transfers that share links only the first to finish is watched: its end sets the rates, and so the due times, of the
others anew. An op that was never slowed finishes exactly at start + seconds, as without this file.
"""

from __future__ import annotations

from math import inf

import numpy as np
from simpy import Environment, Event

from simpar.engine.contention import Contention
from simpar.engine.interference import Interference
from simpar.engine.running import Running
from simpar.engine.sharing import Sharing
from simpar.engine.timeline import Timeline
from simpar.errors import InputError, Violation
from simpar.program.program import FloatArray, PriceTable, Program

_TIE = 1.0 + 1e-12
"""Due times that differ by less than this, relatively, are the same moment but for rounding."""


_SHARES, _YIELDS, _LOUD = 1, 2, 4
"""What is special about an op: it may have to share a link; communication slows it; it slows compute."""


class ElasticReplay:
    """One replay of a program with interference, contention or both."""

    def __init__(
        self,
        env: Environment,
        program: Program,
        prices: PriceTable,
        seconds: FloatArray,
        interference: bool,
        contention: Contention | None,
    ) -> None:
        self._env, self._program = env, program
        self._durations: list[float] = seconds.tolist()
        self._waiting: list[int] = np.diff(program.predecessors[0]).tolist()
        self._ptr: list[int] = program.successors[0].tolist()
        self._successors: list[int] = program.successors[1].tolist()
        self._start, self._finish = [0.0] * program.num_ops, [0.0] * program.num_ops
        self._left = program.num_ops
        self._sharing = None if contention is None else Sharing(contention, program, seconds)
        shares: frozenset[int] = self._sharing.ops if self._sharing else frozenset()
        quiet = PriceTable(prices.seconds, np.zeros_like(prices.interference))
        self._beside = Interference(program, prices if interference else quiet, shares)
        self._traits = _traits(program.num_ops, shares, self._beside)
        self._transfers: dict[int, Running] = {}
        """Transfers under way that may have to share a link."""
        self._fresh: list[Running] = []
        """Compute ops that start at this instant and have no event yet: their speed is not known."""
        self._settling = False

    def run(self) -> Timeline:
        """Replay to the end.

        Raises:
            InputError: a transfer waits for ever on a link that is down.
        """
        sharing = self._sharing
        if sharing:
            for index in range(len(sharing.schedules)):
                self._plan_capacity(index, 0)
        for op in [op for op, count in enumerate(self._waiting) if not count]:
            self._begin(op, 0.0)
        self._settle_interference(0.0)
        self._env.run()
        if self._left:
            self._report_stall()
        return Timeline(self._program, np.array(self._start), np.array(self._finish))

    def _begin(self, op: int, now: float) -> None:
        self._start[op] = now
        trait = self._traits[op]
        if not trait & (_SHARES | _YIELDS):
            self._env.timeout(self._durations[op], op).callbacks.append(self._end_plain)
        else:
            state = Running(op, now, self._durations[op])
            if trait & _YIELDS:
                self._fresh.append(state)
                self._beside.start_compute(state)
            else:
                self._transfers[op] = state
                self._watch(state)
                assert self._sharing is not None
                if self._sharing.start(op):
                    self._request_settling()
        if trait & _LOUD:
            self._beside.start_communication(op)

    def _end_plain(self, event: Event) -> None:
        self._end(event.value)

    def _check(self, event: Event) -> None:
        """An elastic op may be due: finish it, or look again at its new due time."""
        state, due = event.value
        if state.pending == due:
            state.pending = inf
            if state.due <= due:
                self._end(state.op)
            elif state.watched:
                self._watch(state)

    def _watch(self, state: Running) -> None:
        """Have an event at or before the op's due time."""
        due, now = state.due, self._env.now
        if due < state.pending:
            state.pending = due
            # Of an op that just started its own seconds: the difference could be off by a bit.
            delay = state.left if state.since == now and state.speed == 1.0 else max(due - now, 0.0)
            self._env.timeout(delay, (state, due)).callbacks.append(self._check)

    def _end(self, op: int) -> None:
        now = self._finish[op] = self._env.now
        self._left -= 1
        trait = self._traits[op]
        if trait & _YIELDS:
            self._beside.end_compute(op)
        if trait & _SHARES:
            del self._transfers[op]
            assert self._sharing is not None
            if self._sharing.end(op):
                self._request_settling()
        if trait & _LOUD:
            self._beside.end_communication(op)
        waiting = self._waiting
        for successor in self._successors[self._ptr[op] : self._ptr[op + 1]]:
            waiting[successor] -= 1
            if not waiting[successor]:
                self._begin(successor, now)
        if self._fresh or self._beside.changed:
            self._settle_interference(now)

    def _settle_interference(self, now: float) -> None:
        """Compute ops of roles whose communication changed take their new speed; once per finished op."""
        for state, speed in self._beside.changes():
            state.set_speed(speed, now)
            self._watch(state)
        if self._fresh:
            for state in self._fresh:
                self._watch(state)
            self._fresh.clear()

    def _request_settling(self) -> None:
        """New rates, once for all that starts or ends at this instant: events already due now come first."""
        if not self._settling:
            self._settling = True
            self._env.timeout(0.0).callbacks.append(self._settle_rates)

    def _settle_rates(self, _: Event) -> None:
        self._settling = False
        now = self._env.now
        for sessions in self._sharing.changes() if self._sharing is not None else ():
            states = [self._transfers[op] for op, _ in sessions]
            for state, (_, speed) in zip(states, sessions, strict=True):
                state.set_speed(speed, now)
            first = min(state.due for state in states) * _TIE
            for state in states:
                state.watched = state.due <= first
                if state.watched:
                    self._watch(state)

    def _plan_capacity(self, schedule: int, index: int) -> None:
        """The next change of one link's capacity; one at a time, and none after the last op."""
        assert self._sharing is not None
        change = self._sharing.schedules[schedule].after(index)
        if change is not None:
            timeout = self._env.timeout(max(change[0] - self._env.now, 0.0), (schedule, index, change[1]))
            timeout.callbacks.append(self._change_capacity)

    def _change_capacity(self, event: Event) -> None:
        schedule, index, factor = event.value
        sharing = self._sharing
        if sharing is None or not self._left:
            return
        if sharing.set_factor(sharing.schedules[schedule].link, factor):
            self._request_settling()
        self._plan_capacity(schedule, index + 1)

    def _report_stall(self) -> None:
        assert self._sharing is not None
        raise InputError(
            [
                Violation(
                    f"contention: transfer {self._program.label(op)}",
                    self._sharing.describe_block(op),
                    "waits for ever on a link that is down",
                    "route around it, or let the link come back",
                )
                for op, state in list(self._transfers.items())[:4]
                if state.due == inf
            ]
        )


def _traits(num_ops: int, shares: frozenset[int], beside: Interference) -> bytearray:
    """One byte per op: a sum of the flags above."""
    found = bytearray(
        (_LOUD if loud else 0) + (_YIELDS if slowed else 0) for loud, slowed in zip(beside.loud, beside.slowed, strict=True)
    )
    for op in shares:
        found[op] += _SHARES
    return found
