"""What waits in a branch and bound: sets of layouts, and what those share that are swept together."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from simpar.searching.choice import Choice, Group, Pipeline, Variant
from simpar.searching.evaluation import Evaluation
from simpar.searching.open_layouts import OpenLayouts

Waiting = tuple[float, int, float, OpenLayouts, int]
"""A layout that waits to be swept: rank, number, bound, table and its position there."""
Node = tuple[Group, int, int]
"""A mesh, sequences per micro-batch, micro-batches per step."""


class Shape(NamedTuple):
    """What layouts share that are swept together.

    Attributes:
        flags: ZeRO stage, whether gradients are reduced and parameters gathered beside compute.
        moves: activations are offloaded.
    """

    pp: int
    m: int
    pipeline: Pipeline
    flags: tuple[int, bool | None, bool | None]
    moves: bool


def by_shape(table: OpenLayouts, positions: Sequence[int], least_s: float) -> dict[Shape, list[tuple[float, OpenLayouts, int]]]:
    """Layouts at some positions of a table by what they share, each with its bound, none below `least_s`."""
    d, found = table.design, dict[Shape, list[tuple[float, OpenLayouts, int]]]()
    for at in positions:
        offload, pair = divmod(at, len(table.pairs))
        state = table.states[int(table.pairs[pair]) % len(table.states)]
        flags = (state.zero_stage, state.overlap_grad_reduce, state.overlap_param_gather)
        name = Shape(d.group.pp, d.m, d.pipeline, flags, table.offloads[offload].activations > 0)
        found.setdefault(name, []).append((max(float(table.time_s.flat[at]), least_s), table, at))
    return found


@dataclass(frozen=True, slots=True)
class Ranked:
    """The pipelines of a variant.

    Attributes:
        node: mesh, micro-batch, micro-batches, variant.
        order: their positions in the space, fastest first by their bounds; `seconds` of each.
        left: layouts of each and all after it.
    """

    node: tuple[Group, int, int, Variant]
    order: list[int]
    seconds: list[float]
    left: list[int]


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
    _apart: dict[tuple[Hashable, ...], float] = field(default_factory=dict)
    """What those that are alike reach together, where that was less than there is to beat."""

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
        reach, (_, tick, _, table, at) = min(self.fastest, cutoff), first
        heapq.heappush(pool, first)
        stands = False
        for alike in ALIKE:
            of = (alike(table.choice(at)), table.design.pipeline)
            leads = pool[0][1] == tick and pool[0][0] < reach < inf
            if leads and reach <= self._apart.get(of, inf) and (found := self._lift(pool, reach, alike, of[0])) < reach:
                self._apart[of] = found
                # The fewest together stay below: its own time may lower what there is to beat, which decides of the others.
                stands = alike is ALIKE[-1]
        own = next(each for each in pool if each[1] == tick)
        if (stands or own is pool[0]) and own[0] <= reach:
            pool.remove(own)
            heapq.heapify(pool)
            return False
        return True

    def _lift(self, pool: list[Waiting], reach: float, alike: Likeness, of: Hashable) -> float:
        """Raise the bounds of layouts below `reach` that are alike; the least of them now."""
        some = [
            (index, choice) for index, each in enumerate(pool) if each[0] < reach and alike(choice := each[3].choice(each[4])) == of
        ]
        values = self.evaluation.least_path([choice for _, choice in some], reach).tolist()
        for (index, _), value in zip(some, values, strict=True):
            rank, tick, time_s, table, at = pool[index]
            pool[index] = (max(rank, value), tick, max(time_s, value), table, at)
        heapq.heapify(pool)
        return float(min(values))


__all__ = ["Node", "Ranked", "Shape", "Together", "Waiting", "by_shape"]
