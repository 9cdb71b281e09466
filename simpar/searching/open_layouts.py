"""A design and those of its layouts that may still be wanted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray, IntArray
from simpar.searching.choice import Choice, Group, Offload, Pipeline, State, Variant
from simpar.searching.shapes import Shape, shape_of

BoolArray = NDArray[np.bool_]


@lru_cache(maxsize=256)
def _less(offloads: tuple[Offload, ...], offload: Offload) -> list[int]:
    """Offloads that move less than this one, to be preferred in this order."""
    order = sorted(
        (o for o in offloads if o != offload and o.activations <= offload.activations and o.optimizer <= offload.optimizer),
        key=lambda o: (o.optimizer != offload.optimizer, -o.activations),
    )
    return [offloads.index(o) for o in order]


def parents(offloads: tuple[Offload, ...], fits: BoolArray, moving_costs: BoolArray) -> IntArray:
    """An offload that moves less and fits too, of each layout; -1 where there is none.

    Copies to the host only add waiting, so a layout that moves what need not move is never faster than its parent.

    Args:
        fits: [offloads, recomputations, states].
        moving_costs: [states], whether an update on the host takes longer than one on the device.
    """
    found = np.full(fits.shape, -1)
    for index, offload in enumerate(offloads):
        for other in reversed(_less(offloads, offload)):
            slower = moving_costs if offloads[other].optimizer != offload.optimizer else np.ones_like(moving_costs)
            found[index] = np.where(fits[other] & slower, other, found[index])
    return found


def with_parents(alive: BoolArray, parent: IntArray) -> BoolArray:
    """Which layouts' ancestors are all alive: one that is no faster than a hopeless one is hopeless."""
    found = alive.copy()
    for _ in range(len(alive)):
        above = np.take_along_axis(found, np.maximum(parent, 0), axis=0)
        found = np.where(parent >= 0, found & above, found)
    return found


@dataclass(frozen=True, slots=True)
class Design:
    """A pipeline in a variant of a mesh: what is left to choose is recomputation, sharding and offload."""

    group: Group
    batch: int
    m: int
    variant: Variant
    pipeline: Pipeline

    @property
    def shape(self) -> Shape:
        """Of its schedule."""
        return shape_of(self.group.pp, self.pipeline.virtual_stages, self.pipeline.schedule)


@dataclass(frozen=True)
class OpenLayouts:
    """The layouts of a design that may still be wanted.

    Attributes:
        design: what they share.
        texts, states, offloads: values of the axes.
        pairs: recomputation x len(states) + sharding, int array [P].
        time_s, bytes: lower bounds, float arrays [offloads, P].
        alive: bool array [offloads, P].
        parent: int array [offloads, P], an offload that moves less and seems to fit too; -1 for none.
        rejected: (does not fit, misses a limit, cannot beat the best), layouts.
    """

    design: Design
    texts: tuple[str, ...]
    states: tuple[State, ...]
    offloads: tuple[Offload, ...]
    pairs: IntArray
    time_s: FloatArray
    bytes: FloatArray
    alive: BoolArray
    parent: IntArray
    rejected: tuple[int, ...]

    @cached_property
    def order(self) -> IntArray:
        """Layouts without a living parent, fastest first, as positions in the flattened [offloads, P]."""
        roots = np.flatnonzero((self.alive & (self.parent < 0)).ravel())
        return roots[np.argsort(self.time_s.ravel()[roots], kind="stable")]

    def children(self, position: int) -> list[int]:
        """Positions of the layouts that wait for the one at `position`."""
        offload, pair = divmod(position, len(self.pairs))
        own = np.flatnonzero(self.alive[:, pair] & (self.parent[:, pair] == offload))
        return [int(o) * len(self.pairs) + pair for o in own]

    @cached_property
    def weight(self) -> IntArray:
        """Layouts that stand or fall with one, itself included, flattened [offloads, P]."""
        found = self.alive.astype(np.int64)
        columns = np.arange(len(self.pairs))
        for offload in range(len(self.offloads) - 1, -1, -1):
            has = self.parent[offload] >= 0
            np.add.at(found, (self.parent[offload][has], columns[has]), found[offload][has])
        return found.ravel()

    def choice(self, position: int) -> Choice:
        """The layout at a position."""
        offload, pair = divmod(position, len(self.pairs))
        again, state = divmod(int(self.pairs[pair]), len(self.states))
        d = self.design
        return Choice(d.group, d.batch, d.variant, d.pipeline, self.texts[again], self.states[state], self.offloads[offload])
