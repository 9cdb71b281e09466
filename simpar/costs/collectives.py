"""The price of a collective on a placed group: the facade over NCCL, torus, gloo and expert-parallel laws."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from simpar.costs import expert_parallel, gloo, nccl, point_to_point, torus
from simpar.costs.collective_defaults import constants_of, expert_of
from simpar.costs.collective_law import Geometry, Law, fastest, geometry
from simpar.costs.expert_parallel import Exchange
from simpar.costs.price import ZERO, Price, Provenance
from simpar.errors import InputError
from simpar.registry import unknown
from simpar.specs.collective_constants import MeasuredCollective, Scope
from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import GroupPlacement

COLLECTIVES = (*nccl.REDUCTIONS, *point_to_point.PEER_TO_PEER)
ALIASES = {
    "alltoall": "all_to_all", "sendrecv": "send_recv", "allreduce": "all_reduce", "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
}  # fmt: skip
"""nccl-tests' spellings in tables."""
NONE = Law("none", "none", 0.0, 0.0, channels=0)


class CollectiveModel:
    """Prices of collectives on one machine; every answer is kept.

    Args:
        hardware: the machine.
        nvls: NVLink SHARP may be used where the domain has it.
        sharp: the fabric's in-network reduction is switched on for the job.
    """

    def __init__(self, hardware: HardwareProfile, *, nvls: bool = True, sharp: bool = False) -> None:
        self.hardware = hardware
        known = constants_of(hardware)
        self._scale_up, self._network, self._bands = known.scale_up, known.network, known.bands
        self._provenance = {False: known.within, True: known.between}
        self._dispatch = expert_of(hardware)
        self._nvls = nvls and hardware.scale_up.in_network_reduction
        self._sharp = sharp and hardware.fabric.in_network_reduction
        self._prices: dict[tuple[str, float, GroupPlacement], Price] = {}
        self._laws: dict[tuple[str, GroupPlacement], tuple[Law, ...]] = {}
        self._geometries: dict[GroupPlacement, Geometry] = {}
        self._points = MeasuredTimes.of(hardware.collectives.points)
        self._expert: dict[tuple[Exchange, GroupPlacement, str], Price] = {}

    def laws(self, collective: str, placement: GroupPlacement) -> tuple[Law, ...]:
        """The laws that compete for `collective` on `placement`.

        Raises:
            InputError: unknown collective.
        """
        found = self._laws.get((collective, placement))
        if found is None:
            if collective not in COLLECTIVES:
                raise unknown("collective", collective, list(COLLECTIVES))
            found = self._laws[collective, placement] = self._find(collective, placement)
        return found

    def _find(self, collective: str, placement: GroupPlacement) -> tuple[Law, ...]:
        if placement.size <= 1:
            return (NONE,)
        g, kind = self.geometry(placement), self.hardware.scale_up.kind
        if self.hardware.gpu.vendor == "cpu" or kind == "shared-memory":
            return tuple(gloo.laws(collective, self.hardware, g))
        if kind == "ici" and g.domains == 1:
            return tuple(torus.laws(collective, self.hardware, placement))
        if collective in point_to_point.PEER_TO_PEER:
            return tuple(point_to_point.laws(collective, g, self._scale_up, self._network))
        return tuple(nccl.laws(collective, g, self._scale_up, self._network, nvls=self._nvls, sharp=self._sharp))

    def geometry(self, placement: GroupPlacement) -> Geometry:
        """Hops and rates of `placement`."""
        found = self._geometries.get(placement)
        if found is None:
            found = self._geometries[placement] = geometry(self.hardware, placement)
        return found

    def time(self, collective: str, bytes_: float, placement: GroupPlacement) -> Price:
        """The price of `collective`.

        Args:
            collective: broadcast, scatter, gather, reduce, all_gather, reduce_scatter, all_reduce, all_to_all, send_recv.
            bytes_: as nccl-tests count: the buffer of all-reduce, broadcast, reduce; the total output of all-gather and gather;
                the total input of reduce-scatter and scatter; the send buffer of one rank of all-to-all; the message of
                send_recv.
            placement: the group.

        Raises:
            InputError: unknown collective, negative size.
        """
        key = (collective, bytes_, placement)
        price = self._prices.get(key)
        if price is None:
            if not bytes_ >= 0:
                raise InputError(f"bytes = {bytes_!r}: a collective needs a size of 0 or more bytes")
            price = self._prices[key] = self._price(collective, bytes_, placement)
        return price

    def _price(self, collective: str, bytes_: float, placement: GroupPlacement) -> Price:
        law = fastest(self.laws(collective, placement), bytes_)
        if placement.size <= 1 or bytes_ == 0:
            return ZERO
        if placement.num_nodes == 1 and self._points.has(collective, placement.size):
            return self._points.price(collective, placement.size, bytes_)
        latency, transfer, fill = law.alpha_s, law.transfer_s(bytes_), law.fill_s(bytes_)
        prefix = f"{collective}/{law.algorithm}/{law.protocol}"
        terms = ((f"{prefix}/latency", latency), (f"{prefix}/transfer", transfer), (f"{prefix}/fill", fill))
        seconds = latency + transfer + fill
        low, high = self.interval("network" if placement.num_domains > 1 else "domain", bytes_)
        return Price(seconds, seconds * low, seconds * high, self._provenance_of(placement), terms)

    def cores(self, collective: str, bytes_: float, placement: GroupPlacement) -> float:
        """Cores of the host that each rank of `placement` keeps busy during `collective`; 0 where it was not measured."""
        if placement.num_nodes > 1 or not self._points.has(collective, placement.size):
            return 0.0
        return self._points.cores(collective, placement.size, bytes_)

    def _provenance_of(self, placement: GroupPlacement) -> Provenance:
        if self.hardware.gpu.vendor == "cpu" or self.hardware.scale_up.kind == "ici":
            link = self.hardware.scale_up
            here = placement.num_nodes == 1 and link.bandwidth.kind == link.latency.kind == "measured"
            return Provenance.MODEL if here else Provenance.PUBLISHED
        return self._provenance[placement.num_domains > 1]

    def interval(self, scope: Scope, bytes_: float) -> tuple[float, float]:
        """Ends of the 80 % interval of measured / predicted."""
        bands = [b for b in self._bands if b.scope == scope and b.from_bytes <= bytes_]
        if not bands:
            return 0.6, 1.6
        band = max(bands, key=lambda b: b.from_bytes)
        return band.low, band.high

    def sms(self, collective: str, bytes_: float, placement: GroupPlacement) -> int:
        """SMs that a message of `bytes_` holds, one a channel; they slow the compute beside it."""
        law = fastest(self.laws(collective, placement), bytes_)
        # A channel is used once it has 64 bytes for each of 512 threads (NCCL's Simple threshold); small messages use few.
        return max(1, min(law.channels, int(bytes_ // (64 * 512)))) if law.channels else 0

    def exchange(self, x: Exchange, placement: GroupPlacement, dispatcher: str = "alltoall") -> Price:
        """Tokens of each rank to the ranks of their experts, or the experts' outputs back.

        Args:
            placement: the expert-parallel group, over which the experts are spread evenly.
            dispatcher: alltoall (every copy travels), deepep and hybridep (once to each rank and domain).

        Raises:
            InputError: unknown dispatcher.
        """
        key = (x, placement, dispatcher)
        price = self._expert.get(key)
        if price is None:
            price = self._expert[key] = self._exchange_price(x, placement, dispatcher)
        return price

    def _exchange_price(self, x: Exchange, placement: GroupPlacement, dispatcher: str) -> Price:
        if dispatcher not in expert_parallel.DISPATCHERS:
            raise unknown("expert dispatcher", dispatcher, list(expert_parallel.DISPATCHERS))
        if placement.size <= 1 or x.tokens <= 0:
            return ZERO
        if dispatcher == "alltoall":
            return self.time("all_to_all", x.tokens * x.topk * x.row_bytes, placement)
        fitted = self._dispatch
        constants = fitted or expert_parallel.PUBLISHED
        if dispatcher == "hybridep":
            fitted, constants = None, constants.model_copy(update=expert_parallel.HYBRID_EP)
        latency, transfer = expert_parallel.dispatched_s(x, self.geometry(placement), constants)
        seconds = latency + transfer
        low, high = self.interval("expert", x.tokens * x.row_bytes)
        prefix = f"expert_{x.direction}/{dispatcher}"
        terms = ((f"{prefix}/latency", latency), (f"{prefix}/transfer", transfer))
        provenance = Provenance.MODEL if fitted else Provenance.SCALED
        return Price(seconds, seconds * low, seconds * high, provenance, terms)


_SAME = 1.0 + 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Points by (collective, ranks), each list by size."""

    tables: dict[tuple[str, int], tuple[MeasuredCollective, ...]]

    @classmethod
    def of(cls, points: Sequence[MeasuredCollective]) -> MeasuredTimes:
        """The points sorted."""
        keys = {(p.collective, p.ranks) for p in points}
        return cls({k: tuple(sorted((p for p in points if (p.collective, p.ranks) == k), key=lambda p: p.bytes)) for k in keys})

    def has(self, collective: str, ranks: int) -> bool:
        """Whether that collective was measured on as many ranks."""
        return (collective, ranks) in self.tables

    def _around(self, collective: str, ranks: int, bytes_: float) -> tuple[MeasuredCollective, MeasuredCollective, float]:
        """The neighbours of a size and how far between them it lies (0..1 on a logarithmic scale)."""
        points = self.tables[collective, ranks]
        at = bisect_left([p.bytes for p in points], bytes_ / _SAME)
        if at == len(points) or at == 0 or points[at].bytes <= bytes_ * _SAME:
            same = points[min(at, len(points) - 1)]
            return same, same, 0.0
        left, right = points[at - 1], points[at]
        return left, right, log(bytes_ / left.bytes) / log(right.bytes / left.bytes)

    def price(self, collective: str, ranks: int, bytes_: float) -> Price:
        """Seconds: a power law between neighbours, the largest one's rate above, the smallest one's time below."""
        left, right, share = self._around(collective, ranks, bytes_)
        s = left.seconds ** (1.0 - share) * right.seconds**share
        exact = left is right and left.bytes / _SAME <= bytes_ <= left.bytes * _SAME
        if left is right and bytes_ > left.bytes * _SAME:
            s *= bytes_ / left.bytes
        spread = max(left.spread, right.spread)
        kind = Provenance.MEASURED if exact else Provenance.INTERPOLATED
        return Price(s, s * (1.0 - spread), s * (1.0 + spread), kind, ((f"{collective}/measured", s),))

    def cores(self, collective: str, ranks: int, bytes_: float) -> float:
        """Cores that a rank keeps busy."""
        left, right, share = self._around(collective, ranks, bytes_)
        return left.cores + share * (right.cores - left.cores)
