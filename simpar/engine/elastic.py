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
from simpar.engine.sharing import Sharing
from simpar.engine.timeline import Timeline
from simpar.errors import InputError, Violation
from simpar.program.program import FloatArray, PriceTable, Program

_TIE = 1.0 + 1e-12
"""Due times that differ by less than this, relatively, are the same moment but for rounding."""


class _Running:
    """An elastic op between its start and its finish."""

    __slots__ = ("due", "left", "pending", "since", "speed", "watched")

    def __init__(self, now: float, seconds: float) -> None:
        self.left = seconds
        """Seconds of work left at full speed, at time `since`."""
        self.since = now
        self.speed = 1.0
        self.due = now + seconds
        self.pending = self.due
        """Due time for which the event that counts is scheduled; infinite without one."""
        self.watched = True
        """Has an event at or before its due time."""

    def set_speed(self, speed: float, now: float) -> None:
        """From `now` on the op progresses at `speed`."""
        if speed != self.speed:
            self.left = max(self.left - (now - self.since) * self.speed, 0.0)
            self.since, self.speed = now, speed
            self.due = now + self.left / speed if speed > 0.0 else inf


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
        self._running: dict[int, _Running] = {}
        self._sharing = None if contention is None else Sharing(contention, program, seconds)
        sharing: frozenset[int] | set[int] = self._sharing.ops if self._sharing else frozenset()
        self._interference = Interference(program, prices, sharing) if interference else None
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
        seconds = self._durations[op]
        sharing, interference = self._sharing, self._interference
        shares = sharing is not None and op in sharing.ops
        yields = interference is not None and op in interference.slowed
        if not (shares or yields):
            self._env.timeout(seconds, op).callbacks.append(self._end_plain)
        else:
            state = self._running[op] = _Running(now, seconds)
            self._env.timeout(seconds, (op, state.due)).callbacks.append(self._check)
            if shares and sharing is not None and sharing.start(op):
                self._request_settling()
            if yields and interference is not None:
                interference.start_compute(op)
        if interference is not None and op in interference.loud:
            interference.start_communication(op)

    def _end_plain(self, event: Event) -> None:
        self._end(event.value)

    def _check(self, event: Event) -> None:
        """An elastic op may be due: finish it, or look again at its new due time."""
        op, due = event.value
        state = self._running.get(op)
        if state is None or state.pending != due:
            return
        state.pending = inf
        if state.due <= due:
            del self._running[op]
            self._end(op)
        elif state.watched:
            self._watch(op, state)

    def _watch(self, op: int, state: _Running) -> None:
        """Have an event at or before the op's due time."""
        if state.due < state.pending:
            state.pending = state.due
            self._env.timeout(max(state.due - self._env.now, 0.0), (op, state.due)).callbacks.append(self._check)

    def _end(self, op: int) -> None:
        now = self._finish[op] = self._env.now
        self._left -= 1
        sharing, interference = self._sharing, self._interference
        if sharing is not None and op in sharing.ops and sharing.end(op):
            self._request_settling()
        if interference is not None:
            interference.end(op)
        waiting = self._waiting
        for successor in self._successors[self._ptr[op] : self._ptr[op + 1]]:
            waiting[successor] -= 1
            if not waiting[successor]:
                self._begin(successor, now)
        self._settle_interference(now)

    def _settle_interference(self, now: float) -> None:
        """Compute ops of roles whose communication changed take their new speed; once per finished op."""
        if self._interference is not None:
            for op, speed in self._interference.changes():
                state = self._running[op]
                state.set_speed(speed, now)
                self._watch(op, state)

    def _request_settling(self) -> None:
        """New rates, once for all that starts or ends at this instant: events already due now come first."""
        if not self._settling:
            self._settling = True
            self._env.timeout(0.0).callbacks.append(self._settle_rates)

    def _settle_rates(self, _: Event) -> None:
        self._settling = False
        now = self._env.now
        for sessions in self._sharing.changes() if self._sharing is not None else ():
            states = [(op, self._running[op]) for op, _ in sessions]
            for (_, state), (_, speed) in zip(states, sessions, strict=True):
                state.set_speed(speed, now)
            first = min(state.due for _, state in states) * _TIE
            for op, state in states:
                state.watched = state.due <= first
                if state.watched:
                    self._watch(op, state)

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
                for op, state in list(self._running.items())[:4]
                if state.due == inf
            ]
        )
