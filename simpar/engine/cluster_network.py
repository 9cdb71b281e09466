"""A cluster as the network that transfers share: which links each collective uses, and how many bytes on each.

Routes are the cluster's (topology/cluster.py): rails, PXN, shared NICs, oversubscribed uplinks, and dead
rails come from there. What is decided here is who sends how much to whom:

- ring collectives (all-reduce, all-gather, reduce-scatter, broadcast, reduce): the ring crosses from one scale-up
  domain to the next on every rail that the group has in both, as NCCL's channels do, and passes the members inside a
  domain. Trees load each uplink with nearly the same bytes (2 S against 2 (n-1)/n S for an all-reduce);
- all-to-all: every ordered pair carries its share of the buffer;
- gather and scatter: root and member; send/recv: first member to second, around the ring in larger groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from simpar.costs.nccl import REDUCTIONS, traffic
from simpar.engine.contention import LinkLoads, merged_loads
from simpar.errors import InternalError
from simpar.program.program import FloatArray, Groups, IntArray, Transfer
from simpar.topology.cluster import Cluster

Flow = tuple[int, int, float]
"""From GPU, to GPU, bytes per byte of the message."""


@dataclass(frozen=True, eq=False)
class ClusterNetwork:
    """The links of `cluster`, a wired machine whose GPU r is rank r's."""

    cluster: Cluster
    _known: dict[tuple[str, Groups], LinkLoads] = field(default_factory=dict, repr=False)

    @property
    def capacity_bytes_per_s(self) -> FloatArray:
        """Raw capacity of each one-way link, float array [links]."""
        return self.cluster.links.capacity_bytes_per_s

    def describe(self, link: int) -> str:
        """Such as "gpu:3>nvswitch:0"."""
        return self.cluster.name_of(link)

    def loads(self, transfer: Transfer) -> LinkLoads:
        """Links and bytes of all groups of `transfer`.

        Raises:
            InternalError: a collective this file does not know.
            InputError: more ranks than GPUs.
        """
        key = (transfer.collective, transfer.groups)
        if key not in self._known:
            parts = [self._group(transfer.collective, group) for group in transfer.groups]
            self._known[key] = merged_loads(parts)
        unit = self._known[key]
        return LinkLoads(unit.links, unit.bytes * transfer.bytes, unit.groups)

    def _group(self, collective: str, gpus: Sequence[int]) -> tuple[IntArray, FloatArray]:
        """Distinct links and bytes per byte of the message, for one group."""
        load: dict[int, float] = {}
        for src, dst, size in flows(collective, gpus, self.cluster.hardware.domain_size):
            for link in self.cluster.route(src, dst):
                load[link] = load.get(link, 0.0) + size
        return np.fromiter(load, np.int64, len(load)), np.fromiter(load.values(), np.float64, len(load))


def flows(collective: str, gpus: Sequence[int], domain_size: int) -> Iterator[Flow]:
    """Who sends how much to whom in one group, per byte of the message as nccl-tests counts it.

    Raises:
        InternalError: an unknown collective.
    """
    n = len(gpus)
    if n < 2:
        return
    if collective == "send_recv":
        yield from _around(gpus, 1.0) if n > 2 else ((gpus[0], gpus[1], 1.0),)
    elif collective in REDUCTIONS:
        yield from _ring(gpus, domain_size, traffic(collective, n))
    elif collective.startswith("all_to_all"):
        yield from ((a, b, 1.0 / n) for a in gpus for b in gpus if a != b)
    elif collective == "scatter":
        yield from ((gpus[0], gpu, 1.0 / n) for gpu in gpus[1:])
    elif collective == "gather":
        yield from ((gpu, gpus[0], 1.0 / n) for gpu in gpus[1:])
    else:
        raise InternalError(f"contention does not know the collective {collective!r}")


def _around(gpus: Sequence[int], size: float) -> Iterator[Flow]:
    """Each to the next, the last to the first."""
    if len(gpus) > 1:
        yield from ((gpu, gpus[(i + 1) % len(gpus)], size) for i, gpu in enumerate(gpus))


def _ring(gpus: Sequence[int], domain_size: int, size: float) -> Iterator[Flow]:
    """A ring of `size` bytes per hop through scale-up domains, one channel for each rail that two neighbours share."""
    domains = [list(members) for _, members in groupby(sorted(gpus), key=lambda gpu: gpu // domain_size)]
    if len(domains) == 1:
        yield from _around(gpus, size)
        return
    for here, there in zip(domains, [*domains[1:], domains[0]], strict=True):
        channels = min(len(here), len(there))
        yield from ((here[c], there[c], size / channels) for c in range(channels))
        # A channel enters at one member and leaves at another: it takes all but one of the hops around the members.
        yield from _around(here, size * (len(here) - 1) / len(here))
