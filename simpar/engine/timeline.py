"""When every op ran: what both engines return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from simpar.errors import InternalError
from simpar.program.program import FloatArray, IntArray, Program


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Start and finish of every op of a program.

    Attributes:
        program: what ran.
        start: float array [ops], seconds since the step began; read-only.
        finish: float array [ops], seconds; read-only.
    """

    program: Program
    start: FloatArray
    finish: FloatArray

    def __post_init__(self) -> None:
        for name, array in (("start", self.start), ("finish", self.finish)):
            if array.shape != (self.program.num_ops,):
                raise InternalError(f"{name} of {self.program.name} has shape {array.shape}, not one value per op")
            array.setflags(write=False)

    @property
    def makespan(self) -> float:
        """Finish of the last op, seconds; 0 for an empty program."""
        return float(self.finish.max()) if len(self.finish) else 0.0

    @property
    def seconds(self) -> FloatArray:
        """How long each op ran, float array [ops]."""
        return self.finish - self.start

    def busy_s(self) -> FloatArray:
        """Seconds that each stream was held, float array [streams]."""
        program = self.program
        owner = np.repeat(np.arange(len(program.streams)), np.diff(program.stream_ptr))
        held = np.bincount(owner, weights=self.seconds[program.stream_ops], minlength=len(program.streams))
        return held.astype(np.float64)

    def stream_ops(self, role: int, kinds: Iterable[str] | None = None) -> IntArray:
        """Ops on the streams of `role` (all, or those of the given kinds), each once, sorted by start, then finish."""
        program, wanted = self.program, None if kinds is None else frozenset(kinds)
        parts = [
            program.ops_at(i) for i in program.role_streams.get(role, ()) if wanted is None or program.streams[i].kind in wanted
        ]
        ops = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)
        return ops[np.lexsort((self.finish[ops], self.start[ops]))]
