"""What each transfer puts on the network, reduced to the links that can decide anything.

Before a replay most links drop out, exactly:

- a link that could not become hot even if every stream used it at its hardest holds nobody back;
- of links that carry the same bytes of the same transfers (a GPU's PCIe port and its NIC; all NICs of a symmetric, folded
  job) the narrowest fills first, so the others follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from simpar.engine.contention import Contention, LinkLoads
from simpar.errors import InternalError
from simpar.program.program import FloatArray, Program, Transfer

SLACK = 1.0 + 1e-9
"""A link is hot when wanted beyond its capacity by more than rounding."""

_NEGLIGIBLE_S = 1e-12
"""A transfer shorter than this is over before it could share anything."""

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Pressure:
    """A transfer on the links that can decide its rate.

    Attributes:
        loads: on those links.
        unit_bytes: bytes of one group over the narrowest of all its links.
        unit_capacity: nominal capacity of that link, bytes/s.
        transfer_s: the part of the price that bandwidth sets.
        latency_s: the rest.
    """

    loads: LinkLoads
    unit_bytes: float
    unit_capacity: float
    transfer_s: float
    latency_s: float

    def demand(self, nominal: FloatArray) -> FloatArray:
        """Bytes per second on each link at the rate that the price implies: float array [links of `loads`]."""
        return _demand(self.loads, self.transfer_s, nominal)

    @property
    def peak(self) -> float:
        """Bytes per second of one group over its narrowest link at that rate."""
        return min(self.unit_bytes / self.transfer_s, self.unit_capacity)


def pressures(contention: Contention, program: Program, seconds: FloatArray) -> dict[int, Pressure]:
    """Op -> its pressure, for the transfers that may have to share a link; all others run at their price.

    Args:
        contention: the network and the latency part of prices.
        program: its `transfers`.
        seconds: of each op without contention, float array [ops].
    """
    transfer_s, latency_s = _split(contention, program, seconds)
    nominal = np.asarray(contention.network.capacity_bytes_per_s, dtype=np.float64)
    loads = _all_loads(contention.network.loads, program, transfer_s)
    contested = _contested(program, loads, transfer_s, nominal)
    varying = [s.link for s in contention.schedules]
    contested[varying] = True
    distinct = list(dict.fromkeys(loads.values()))
    deciding = contested & _narrowest_of_alike(distinct, contested, nominal, varying)
    reduced = {load: (_kept(load, deciding), *_measure(load, nominal)) for load in distinct}
    return {
        op: Pressure(*reduced[load], transfer_s[op], latency_s[op]) for op, load in loads.items() if len(reduced[load][0].links)
    }


def _split(contention: Contention, program: Program, seconds: FloatArray) -> tuple[list[float], list[float]]:
    """Transfer and latency part of every op's seconds."""
    if contention.latency_s is None:
        return seconds.tolist(), [0.0] * program.num_ops
    latency = np.asarray(contention.latency_s, dtype=np.float64)
    if latency.shape != (len(program.price_keys),):
        raise InternalError(f"{program.name} has {len(program.price_keys)} prices, latency_s {latency.shape}")
    by_op = np.minimum(latency[program.price], seconds)
    return (seconds - by_op).tolist(), by_op.tolist()


def _all_loads(find: Callable[[Transfer], LinkLoads], program: Program, transfer_s: list[float]) -> dict[int, LinkLoads]:
    """Loads of every transfer that takes time; those of equal transfers computed once and shared."""
    known: dict[object, LinkLoads] = {}
    loads = {}
    for op, transfer in program.transfers.items():
        key = (transfer.collective, transfer.bytes, transfer.groups)
        if key not in known:
            known[key] = find(transfer)
        if transfer_s[op] > _NEGLIGIBLE_S:
            loads[op] = known[key]
    return loads


def _contested(program: Program, loads: dict[int, LinkLoads], transfer_s: list[float], nominal: FloatArray) -> BoolArray:
    """Links that could ever become hot: bool array [links].

    Ops of one stream never overlap, so a link is never wanted for more than the sum over streams of the most that any op
    of the stream wants.
    """
    ptr, streams = program.op_streams[0].tolist(), program.op_streams[1].tolist()
    fastest: dict[tuple[int, LinkLoads], float] = {}
    for op, load in loads.items():
        stream = streams[ptr[op]] if ptr[op] < ptr[op + 1] else -1 - op
        key = (stream, load)
        fastest[key] = min(fastest.get(key, inf), transfer_s[op])
    if not fastest:
        return np.zeros(len(nominal), dtype=bool)
    owners = np.unique([stream for stream, _ in fastest], return_inverse=True)[1]
    link = np.concatenate([load.links for _, load in fastest])
    owner = np.repeat(owners, [len(load.links) for _, load in fastest])
    demand = np.concatenate([_demand(load, seconds, nominal) for (_, load), seconds in fastest.items()])
    order = np.lexsort((link, owner))
    first = np.flatnonzero(np.diff(owner[order] * len(nominal) + link[order], prepend=-1))
    most = np.maximum.reduceat(demand[order], first)
    together = np.bincount(link[order][first], weights=most, minlength=len(nominal))
    return np.asarray(together > nominal * SLACK)


def _narrowest_of_alike(loads: list[LinkLoads], contested: BoolArray, nominal: FloatArray, varying: Collection[int]) -> BoolArray:
    """One link of each class that carries the same bytes of the same groups: bool array [links].

    Each link stands for itself where its capacity varies.
    """
    chosen = np.zeros(len(nominal), dtype=bool)
    chosen[list(varying)] = True
    if not loads:
        return chosen
    link = np.concatenate([load.links for load in loads])
    entries = np.empty((len(link), 3))
    entries[:, 0] = np.repeat(np.arange(len(loads)), [len(load.links) for load in loads])
    entries[:, 1] = np.concatenate([load.bytes for load in loads])
    entries[:, 2] = np.concatenate([load.groups for load in loads])
    keep = contested[link] & ~chosen[link]
    order = np.argsort(link[keep], kind="stable")
    link, entries = link[keep][order], entries[keep][order]
    first = np.flatnonzero(np.diff(link, prepend=-1))
    narrowest: dict[bytes, int] = {}
    for begin, end in pairwise([*first.tolist(), len(link)]):
        candidate = int(link[begin])
        alike = entries[begin:end].tobytes()
        if alike not in narrowest or nominal[candidate] < nominal[narrowest[alike]]:
            narrowest[alike] = candidate
    chosen[list(narrowest.values())] = True
    return chosen


def _kept(load: LinkLoads, deciding: BoolArray) -> LinkLoads:
    keep = deciding[load.links] & (load.bytes > 0.0)
    return LinkLoads(load.links[keep], load.bytes[keep], load.groups[keep])


def _measure(load: LinkLoads, nominal: FloatArray) -> tuple[float, float]:
    """Bytes of one group over its narrowest link (the busiest of equals), and that link's capacity."""
    used = load.bytes > 0.0
    if not used.any():
        return 0.0, 0.0
    unit, capacity = (load.bytes / load.groups)[used], nominal[load.links[used]]
    narrowest = float(capacity.min())
    return float(unit[capacity <= narrowest].max()), narrowest


def _demand(loads: LinkLoads, transfer_s: float, nominal: FloatArray) -> FloatArray:
    """One group alone never wants more than a link nominally carries: where price and link disagree, the price holds."""
    return np.minimum(loads.bytes / transfer_s, loads.groups * nominal[loads.links])
