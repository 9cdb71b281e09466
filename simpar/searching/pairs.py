"""Prices of a forward and a backward that run as one, by kinds of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simpar.costs.pricer import LayoutPricer
from simpar.program.program import FloatArray, IntArray
from simpar.searching.blocks import B, BlockTable, F
from simpar.searching.choice import Group, Variant
from simpar.searching.stages import Stages

if TYPE_CHECKING:
    from simpar.searching.pricing import Pricing


class Pairs:
    """Of all blocks of a variant of a mesh under one recomputation, each priced when it is first asked for."""

    def __init__(self, pricing: Pricing, group: Group, batch: int, variant: Variant, recompute: str) -> None:
        order = pricing.orders(variant)[-1]
        layouts = [pricing.probe(group, batch, variant, recompute, state, order) for state in pricing.kinds_of_states(variant)]
        self._pricers = [LayoutPricer(layout, pricing.kernels, pricing.collectives) for layout in layouts]
        self._blocks = [{k: each.split(b, o) for k, (b, o, _) in pricing.locals(each).items()} for each in layouts]
        self._seconds: dict[tuple[int, int], float] = {}

    def seconds(self, forward: int, backward: int) -> float:
        """Seconds of two blocks of these kinds; the least of any sharding of the weights."""
        key = (forward, backward)
        if key not in self._seconds:
            each = (p.pair(own[forward], own[backward]).seconds for p, own in zip(self._pricers, self._blocks, strict=True))
            self._seconds[key] = min(each)
        return self._seconds[key]


def stage_pairs(
    pairs: Sequence[Pairs], tables: Sequence[BlockTable], table: IntArray, stages: Stages, asked: np.ndarray
) -> FloatArray:
    """Seconds of a forward of one class of stages beside a backward of another, [R, C, C]; 0 where not asked.

    Blocks run two by two in the order in which they meet, then what one pass has more.

    Args:
        pairs, tables: of blocks under each kind of recomputation; table: int array [R], which of these each of `stages` has.
        asked: bool array [C, C].
    """
    found = np.zeros((len(table), *asked.shape))
    for f, b in zip(*np.nonzero(asked), strict=True):
        rows = zip(table.tolist(), stages.orders[f].tolist(), stages.orders[b][:, ::-1].tolist(), strict=True)
        for row, (name, forward, backward) in enumerate(rows):
            common, alone = min(len(forward), len(backward)), tables[name].seconds
            both = sum(map(pairs[name].seconds, forward[:common], backward[:common]))
            rest = alone[F, forward[common:]].sum() + alone[B, backward[common:]].sum()
            found[row, f, b] = both + rest + 2.0 * tables[name].pass_s * bool(common)
    return found


__all__ = ["Pairs", "stage_pairs"]
