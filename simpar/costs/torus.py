"""Collectives on a torus of direct links (TPU ICI): every axis of the group moves data both ways round its rings.

Formulas: jax-ml/scaling-book, chapter on sharding: all-gather over one axis takes V / (2 W), W the one-way rate of a link;
k axes share the work; without wraparound only one way counts; all-reduce is twice that, all-to-all a quarter.
"""

from __future__ import annotations

from math import prod

from simpar.costs.collective_law import Law
from simpar.costs.nccl import traffic
from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import GroupPlacement

LINK_EFFICIENCY = 0.95
"""Assumed share of a link's rate that large transfers reach."""
LAUNCH_S = 5e-6
"""Assumed cost of starting a collective."""


def axes_of(torus: tuple[int, ...], size: int, stride: int) -> list[tuple[int, bool]]:
    """Extent of the group along each axis it covers, and whether it closes the ring (the whole axis)."""
    found, below, left = [], 1, size
    for extent in torus:
        if stride < below * extent and left > 1:
            inside = max(1, extent * below // max(stride, below))
            taken = min(left, inside)
            if taken > 1:
                found.append((taken, taken == extent))
            left = -(-left // taken)
        below *= extent
    if left > 1:
        found.append((left, False))
    return found or [(size, False)]


def laws(collective: str, hardware: HardwareProfile, placement: GroupPlacement) -> list[Law]:
    """The law of `collective` over the axes the group covers."""
    up, n = hardware.scale_up, placement.size
    link = LINK_EFFICIENCY * up.bandwidth.value / max(1, up.links_per_gpu)
    axes = axes_of(up.torus or (n,), n, placement.stride)
    ways = sum(2 if closed else 1 for _, closed in axes)
    hops = sum(extent // 2 if closed else extent - 1 for extent, closed in axes)
    if collective == "all_to_all":
        extent, closed = max(axes)
        rounds = extent * prod(1 for _ in axes) / 8 if closed else extent / 4
        beta = rounds / link
    elif collective == "send_recv":
        beta, hops = 1.0 / link, 1
    elif collective in ("gather", "scatter"):
        beta = (n - 1) / n / (ways * link)
    else:
        beta = traffic(collective, n) / (ways * link)
    if collective == "all_reduce":
        hops *= 2
    return [Law("Torus", "ICI", LAUNCH_S + hops * up.latency.value, beta, channels=0)]
