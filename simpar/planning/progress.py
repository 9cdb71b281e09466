"""Training between two interruptions, in closed form: any number of checkpoint cycles costs one event.

Work is measured in seconds at full speed. A cycle is `interval_s` of work (longer on the clock when a node is slow),
then a stall of `stall_s`. A checkpoint can be loaded `durable_s` after its stall began.
"""

from __future__ import annotations

import math


class Progress:
    """Work done since the last restart, and what a failure would lose.

    Attributes:
        work_s: position, seconds of work at full speed.
        training_s: clock time spent training, slow or fast, kept or lost.
        stall_s: clock time stalled in checkpoints.
        lost_s: clock time of training that failures threw away.
        checkpoints: checkpoints begun.
    """

    __slots__ = (
        "_before",
        "_cycle",
        "_cycle_clock",
        "_snapshot_at",
        "_stall_left",
        "checkpoints",
        "durable_s",
        "interval_s",
        "lost_s",
        "slowdown",
        "stall_each_s",
        "stall_s",
        "training_s",
        "work_s",
    )

    def __init__(self, interval_s: float, stall_s: float, durable_s: float) -> None:
        self.configure(interval_s, stall_s, durable_s)
        self.work_s = self.training_s = self.stall_s = self.lost_s = 0.0
        self.checkpoints = 0
        self.slowdown = 1.0
        self.restored()

    def configure(self, interval_s: float, stall_s: float, durable_s: float) -> None:
        """Other checkpoint settings, from now on."""
        self.interval_s, self.stall_each_s, self.durable_s = interval_s, stall_s, durable_s

    def restored(self) -> None:
        """Training goes on from a loaded (or just stored) checkpoint."""
        self._cycle = self._cycle_clock = 0.0  # work and clock time since the last checkpoint began
        self._before = (0.0, 0.0)  # the same of the cycle before it, lost as well while the checkpoint is not durable
        self._snapshot_at = -math.inf
        self._stall_left = 0.0

    def time_to(self, target_s: float) -> float:
        """Clock time until position `target_s`, with all checkpoints on the way."""
        remaining = target_s - self.work_s
        return max(0.0, self._stall_left + remaining * self.slowdown + self._cycles_in(remaining) * self.stall_each_s)

    def _cycles_in(self, remaining: float) -> int:
        """Checkpoints begun strictly before `remaining` more work is done."""
        if math.isinf(self.interval_s):
            return 0
        return max(0, math.ceil((self._cycle + remaining) / self.interval_s - 1e-9) - 1)

    def finish(self, target_s: float, now: float) -> None:
        """`target_s` was reached at clock time `now`, without interruption."""
        remaining = target_s - self.work_s
        count = self._cycles_in(remaining)
        self.stall_s += self._stall_left + count * self.stall_each_s
        self._stall_left = 0.0
        self._train(remaining, count)
        if count:
            self._snapshot_at = now - self._cycle_clock - self.stall_each_s
        self.work_s = target_s

    def interrupt(self, elapsed: float, now: float) -> None:
        """`elapsed` clock time passed since the last call; training stops (or changes speed) at `now`."""
        waited = min(elapsed, self._stall_left)
        self._stall_left -= waited
        self.stall_s += waited
        elapsed -= waited
        first = (self.interval_s - self._cycle) * self.slowdown
        if self._stall_left > 0 or elapsed < first:
            self._train(elapsed / self.slowdown, 0)
            return
        count, rest = divmod(elapsed - first, self.interval_s * self.slowdown + self.stall_each_s)
        in_stall = min(rest, self.stall_each_s)
        self.stall_s += count * self.stall_each_s + in_stall
        self._stall_left = self.stall_each_s - in_stall
        work = self.interval_s - self._cycle + count * self.interval_s + (rest - in_stall) / self.slowdown
        self._train(work, 1 + int(count))
        self._snapshot_at = now - rest

    def _train(self, work: float, checkpoints: int) -> None:
        """Account `work`, in which `checkpoints` checkpoints were begun."""
        self.work_s += work
        self.training_s += work * self.slowdown
        if checkpoints == 0:
            self._cycle += work
            self._cycle_clock += work * self.slowdown
            return
        self.checkpoints += checkpoints
        rest = max(0.0, self._cycle + work - checkpoints * self.interval_s)
        if checkpoints > 1:
            self._before = (self.interval_s, self.interval_s * self.slowdown)
        else:
            self._before = (self.interval_s, self._cycle_clock + (self.interval_s - self._cycle) * self.slowdown)
        self._cycle, self._cycle_clock = rest, rest * self.slowdown

    def roll_back(self, now: float) -> float:
        """A failure at `now`: back to the last durable checkpoint. Returns the work lost, seconds at full speed."""
        work, clock = self._cycle, self._cycle_clock
        if now - self._snapshot_at < self.durable_s - 1e-9 and self._snapshot_at > -math.inf:
            work, clock = work + self._before[0], clock + self._before[1]
        self.work_s -= work
        self.lost_s += clock
        self.restored()
        return work
