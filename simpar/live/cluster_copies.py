"""Bytes that the ranks copy beside their ops: around expert and sequence exchanges, attention in parts, fully sharded weights."""

from __future__ import annotations

from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import state_collectives
from simpar.parallel.work import AttentionWork, Collective, LocalOp

EXCHANGE_PASSES = 6
"""Reads and writes of a tensor around an all-to-all: three copies that pack and unpack it (cluster_attention.py)."""


def partial_passes(cp: int, *, backward: bool) -> float:
    """Reads and writes of one tensor of the size of a rank's queries in SplitAttention, counted in cluster_attention.py.

    Forward: keys and values stacked (4), zeros (1), and a visit rescales and adds its part (9). Backward: stacked again, the
    gradient made contiguous, zeros (7); own keys (9), a visitor's (9.25), and the pairs stacked for the way back (4 a rank).
    A visitor meets three quarters of the queries or keys on average.
    """
    if backward:
        return 16.0 + 9.25 * (cp - 1) + 4.0 * cp
    return 5.0 + 9.0 * (1.0 + 0.75 * (cp - 1))


def partial_launches(cp: int) -> int:
    """Small ops of SplitAttention beside its kernels, each way: four at its ends and fourteen a visit (cluster_attention.py)."""
    return 4 + 14 * cp


def context_bytes(layout: Layout, op: LocalOp) -> float:
    """Read and written beside an op of context-parallel attention; 0 for all others."""
    work = op.work
    if isinstance(work, AttentionWork) and layout.plan.cp > 1 and layout.plan.cp_style != "ulysses":
        passes = partial_passes(layout.plan.cp, backward=work.backward)
        return passes * 4.0 * work.batch * work.sequence_q * work.heads * work.head_dim
    if isinstance(work, Collective) and work.dimension == "cp" and work.name == "all_to_all":
        return EXCHANGE_PASSES * work.bytes
    return 0.0


def sharded_bytes(layout: Layout, key: Gather | Reduce) -> list[float]:
    """Read and written around each gather or reduction of full sharding.

    A gather: this rank's part into the buffer, the buffer into the parameters. A reduction: the gradients into the buffer, and
    this rank's part added to what earlier micro-batches left.
    """
    found = []
    for call in state_collectives(layout, key):
        n = layout.placement(call.dimension).size
        found.append(call.bytes * (2.0 + 2.0 / n if isinstance(key, Gather) else 2.0 + 3.0 / n))
    return found
