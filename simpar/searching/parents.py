"""Offloading without need: which layouts wait for one that moves less to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import IntArray
from simpar.searching.choice import Offload

BoolArray = NDArray[np.bool_]


def _less(offloads: Sequence[Offload], offload: Offload) -> list[int]:
    """Offloads that move less than this one, to be preferred in this order."""
    order = sorted(
        (o for o in offloads if o != offload and o.activations <= offload.activations and o.optimizer <= offload.optimizer),
        key=lambda o: (o.optimizer != offload.optimizer, -o.activations),
    )
    return [offloads.index(o) for o in order]


def parents(offloads: Sequence[Offload], fits: BoolArray, moving_costs: BoolArray) -> IntArray:
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


__all__ = ["parents", "with_parents"]
