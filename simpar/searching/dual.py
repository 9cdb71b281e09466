"""What ranks run in DualPipe and DualPipeV: passes through each stage, counted by how they run, alone or in a pair."""

from __future__ import annotations

from typing import Final

import numpy as np

from simpar.program.program import FloatArray
from simpar.searching.shapes import Shape

F, PAIRED_F, B, PAIRED_B, I, W = range(6)  # noqa: E741 - the phases' names
COLUMNS: Final = 6


def dual_passes(shape: Shape, m: int) -> FloatArray:
    """Passes of every rank of a shape of style "pairs" with m micro-batches, float array [6, ranks, stages].

    Both schedules have the rows of `schedules.dualpipe_v.dual_row`: at depth d of D a rank enters stage d ("near") first and the
    stage on the other arm of the V, P - 1 - d of P ("far"), second.
    """
    depths, each = shape.stages // 2, m // shape.replicas
    rows = [_row(depth, depths, each, shape.stages) for depth in range(depths)]
    return np.stack([rows[first] for first in shape.first.tolist()], axis=1)


def _row(depth: int, depths: int, each: int, stages: int) -> FloatArray:
    """Passes of the rank at `depth`, with `each` micro-batches in each direction."""
    found = np.zeros((COLUMNS, stages))
    near, far = depth, stages - 1 - depth
    below, steps = depths - depth - 1, each - 2 * depths + depth + 1
    bottom = int(below == 0)  # its first pair is two ops
    odd, even = (depth + 1) // 2, depth // 2 + 1  # of the drain's unsplit backwards
    found[F, [near, far]] = 2 * below + depth + 1 + bottom, depth + 1 + below
    found[PAIRED_F, [near, far]] = steps - bottom, steps + below
    found[B, [near, far]] = odd, bottom + below + even
    found[PAIRED_B, [near, far]] = steps + below, steps - bottom
    found[I, [near, far]] = depth + 1 - odd + below, below + depth + 1 - even
    found[W] = found[I]
    return found


__all__ = ["COLUMNS", "dual_passes"]
