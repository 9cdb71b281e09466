"""An op whose speed changes while it runs."""

from __future__ import annotations

from math import inf


class Running:
    """An elastic op between its start and its finish: work left, in seconds at full speed, and the speed now."""

    __slots__ = ("due", "left", "op", "pending", "since", "speed", "watched")

    def __init__(self, op: int, now: float, seconds: float) -> None:
        self.op = op
        self.left = seconds
        """Seconds of work left at full speed, at time `since`."""
        self.since = now
        self.speed = 1.0
        self.due = now + seconds
        self.pending = inf
        """Due time for which the event that counts is scheduled; infinite without one."""
        self.watched = True
        """Has an event at or before its due time."""

    def set_speed(self, speed: float, now: float) -> None:
        """From `now` on the op progresses at `speed`."""
        if speed != self.speed:
            self.left = max(self.left - (now - self.since) * self.speed, 0.0)
            self.since, self.speed = now, speed
            self.due = now + self.left / speed if speed > 0.0 else inf
