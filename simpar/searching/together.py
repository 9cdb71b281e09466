"""Bounds of many layouts of one program at once: the longest path at the least of each of their prices."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from simpar.searching.choice import Choice
from simpar.searching.evaluation import Evaluation
from simpar.searching.nodes import Waiting

Likeness = Callable[[Choice], Hashable]
ALIKE: Final[tuple[Likeness, ...]] = (
    lambda choice: (choice.mesh_key, choice.variant),
    lambda choice: (choice.group, choice.micro_batch_size, choice.variant, choice.state, choice.offload),
)
"""What layouts of one shape have in common that are bounded together, the most of them first."""


@dataclass
class Together:
    """What a level of a front has to beat, and which of its layouts are too different from each other to be bounded together.

    Attributes:
        fastest: step time of the fastest layout that was timed in this level.
    """

    evaluation: Evaluation
    fastest: float = inf
    _apart: set[tuple[Hashable, ...]] = field(default_factory=set)

    def start(self) -> None:
        """Of another level nothing is known yet."""
        self.fastest = inf
        self._apart.clear()

    def waits(self, pool: list[Waiting], first: Waiting, cutoff: float) -> bool:
        """Whether the first layout of a pool waits again, behind others or what there is to beat.

        Its bound rises with those of all that it has most in common with; where some of them stay below, of fewer.

        Args:
            pool: the others; where it waits, it is back among them.
            cutoff: of the values of this level.
        """
        reach, (*_, table, at) = min(self.fastest, cutoff), first
        heapq.heappush(pool, first)
        for alike in ALIKE:
            of = (alike(table.choice(at)), table.design.pipeline)
            leads = pool[0][1] == first[1] and pool[0][0] < reach < inf
            if leads and of not in self._apart and not self._lift(pool, reach, alike, of[0]):
                self._apart.add(of)
        if pool[0][1] == first[1] and pool[0][0] <= reach:
            heapq.heappop(pool)
            return False
        return True

    def _lift(self, pool: list[Waiting], reach: float, alike: Likeness, of: Hashable) -> bool:
        """Raise the bounds of layouts below `reach` that are alike; whether all of them got there."""
        some = [
            (index, choice) for index, each in enumerate(pool) if each[0] < reach and alike(choice := each[3].choice(each[4])) == of
        ]
        values = self.evaluation.least_path([choice for _, choice in some], reach).tolist()
        for (index, _), value in zip(some, values, strict=True):
            rank, tick, time_s, table, at = pool[index]
            pool[index] = (max(rank, value), tick, max(time_s, value), table, at)
        heapq.heapify(pool)
        return bool(min(values) >= reach)


__all__ = ["Together"]
