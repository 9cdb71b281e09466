"""Who shares which links at the moment, and at what rate.

Each group of ranks that communicates is one session: its rate is the bytes per second over the narrowest link it uses,
and its other links carry their share in step (the hops of a ring advance together). Sessions are max-min fair.

Only hot links matter: a link on which even all peak rates together fit holds nobody back. Rates are therefore
recomputed only for the sessions connected through hot links to what started or ended; on a fabric that does not block,
never.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpar.engine.contention import Contention, LinkLoads
from simpar.engine.max_min import max_min_rates
from simpar.errors import InternalError
from simpar.program.program import FloatArray, IntArray, Program

_SLACK = 1.0 + 1e-9
"""A link is hot when wanted beyond its capacity by more than rounding."""

_NEGLIGIBLE_S = 1e-12
"""A transfer shorter than this is over before it could share anything."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pressure:
    """Loads of a transfer on the links that can become hot.

    Attributes:
        loads: on those links only.
        unit_bytes: bytes of one group over its narrowest link, whether or not that one can become hot.
        unit_capacity: nominal capacity of that link, bytes/s.
    """

    loads: LinkLoads
    unit_bytes: float
    unit_capacity: float


class _Session:
    """A transfer under way (all its groups together)."""

    __slots__ = ("demand", "link_list", "links", "peak", "stretch", "weight")

    def __init__(self, links: IntArray, demand: FloatArray, peak: float, stretch: tuple[float, float]) -> None:
        self.links = links
        self.link_list: list[int] = links.tolist()
        self.demand = demand
        """Bytes per second on each link at the peak rate."""
        self.peak = peak
        """Bytes per second of one group over its narrowest link."""
        self.weight = demand / peak
        self.stretch = stretch
        """(latency, transfer) as fractions of the price."""

    def speed(self, rate: float) -> float:
        """Progress of the whole op when its transfer runs at `rate`."""
        if rate >= self.peak:
            return 1.0
        latency, transfer = self.stretch
        return rate / (latency * rate + transfer * self.peak) if rate > 0.0 else 0.0


class Sharing:
    """The state of the network during one replay.

    Attributes:
        ops: transfers that may have to share a link; all others run at their price.
        schedules: links whose capacity varies.
    """

    def __init__(self, contention: Contention, program: Program, seconds: FloatArray) -> None:
        self.schedules = contention.schedules
        self._network = contention.network
        self._nominal = np.asarray(contention.network.capacity_bytes_per_s, dtype=np.float64)
        self._capacity = self._nominal.copy()
        self._transfer_s, self._latency_s = _split(contention, program, seconds)
        loads = self._all_loads(contention, program)
        contested = self._contested(program, loads)
        self._pressure = {op: p for op, p in self._restricted(loads, contested) if len(p.loads.links)}
        self.ops = frozenset(self._pressure)
        self._wanted = np.zeros(len(self._nominal))
        self._hot = np.zeros(len(self._nominal), dtype=bool)
        self._members: dict[int, dict[int, None]] = {}
        self._sessions: dict[int, _Session] = {}
        self._dirty: dict[int, None] = {}

    def start(self, op: int) -> bool:
        """A transfer starts; True when rates have to be set anew."""
        session = self._sessions[op] = self._session(op)
        for link in session.link_list:
            self._members.setdefault(link, {})[op] = None
        links = session.links
        self._wanted[links] += session.demand
        hot = self._wanted[links] > self._capacity[links] * _SLACK
        if not hot.any():
            return False
        self._hot[links] = hot
        self._dirty[op] = None
        return True

    def end(self, op: int) -> bool:
        """A transfer ends; True when rates have to be set anew."""
        session = self._sessions.pop(op)
        self._dirty.pop(op, None)
        links = session.links
        for link in session.link_list:
            del self._members[link][op]
        self._wanted[links] = np.maximum(self._wanted[links] - session.demand, 0.0)
        hot = self._hot[links]
        if not hot.any():
            return False
        return self._cool(links[hot].tolist())

    def set_factor(self, link: int, factor: float) -> bool:
        """A link's capacity becomes `factor` of its nominal one; True when rates have to be set anew."""
        self._capacity[link] = self._nominal[link] * factor
        was = bool(self._hot[link])
        self._hot[link] = bool(self._wanted[link] > self._capacity[link] * _SLACK) and bool(self._members.get(link))
        if was or self._hot[link]:
            self._dirty.update(self._members.get(link, {}))
        return bool(self._dirty)

    def changes(self) -> Iterator[list[tuple[int, float]]]:
        """(op, speed) of the sessions that what happened since the last call can have changed.

        In lists of those that share links, directly or through others: complete ones, so that whatever ends next among
        them changes only them.
        """
        while self._dirty:
            yield self._solve(self._component(next(iter(self._dirty))))

    def describe_block(self, op: int) -> str:
        """The links that hold `op` back completely."""
        down = [link for link in self._sessions[op].link_list if self._capacity[link] <= 0.0]
        return ", ".join(self._network.describe(link) for link in down[:3])

    def _session(self, op: int) -> _Session:
        pressure, transfer_s, latency_s = self._pressure[op], self._transfer_s[op], self._latency_s[op]
        demand = _demand(pressure.loads, transfer_s, self._nominal)
        peak = min(pressure.unit_bytes / transfer_s, pressure.unit_capacity)
        total = transfer_s + latency_s
        return _Session(pressure.loads.links, demand, peak, (latency_s / total, transfer_s / total))

    def _cool(self, links: list[int]) -> bool:
        """After a departure from hot links: everyone left on them gets a new rate."""
        for link in links:
            members = self._members[link]
            self._dirty.update(members)
            if not members:
                self._wanted[link] = 0.0
            self._hot[link] = bool(self._wanted[link] > self._capacity[link] * _SLACK)
        return bool(self._dirty)

    def _component(self, op: int) -> list[int]:
        """Sessions connected to `op` through hot links; they are no longer dirty."""
        found, frontier, seen_links = {op: None}, [op], set()
        while frontier:
            session = self._sessions[frontier.pop()]
            for link in session.links[self._hot[session.links]].tolist():
                if link not in seen_links:
                    seen_links.add(link)
                    fresh = [o for o in self._members[link] if o not in found]
                    found.update(dict.fromkeys(fresh))
                    frontier += fresh
        for member in found:
            self._dirty.pop(member, None)
        return list(found)

    def _solve(self, ops: list[int]) -> list[tuple[int, float]]:
        sessions = [self._sessions[op] for op in ops]
        links = np.concatenate([s.links for s in sessions])
        hot = self._hot[links]
        flow = np.repeat(np.arange(len(ops)), [len(s.link_list) for s in sessions])[hot]
        weight = np.concatenate([s.weight for s in sessions])[hot]
        used, link = np.unique(links[hot], return_inverse=True)
        peak = np.array([s.peak for s in sessions])
        rates = max_min_rates(peak, flow, link, weight, self._capacity[used])
        return [(op, s.speed(rate)) for op, s, rate in zip(ops, sessions, rates.tolist(), strict=True)]

    def _all_loads(self, contention: Contention, program: Program) -> dict[int, LinkLoads]:
        """Loads of every transfer; those of equal transfers computed once."""
        known: dict[tuple[str, float, int], LinkLoads] = {}
        loads = {}
        for op, transfer in program.transfers.items():
            key = (transfer.collective, transfer.bytes, id(transfer.groups))
            if key not in known:
                known[key] = contention.network.loads(transfer)
            if self._transfer_s[op] > _NEGLIGIBLE_S:
                loads[op] = known[key]
        return loads

    def _contested(self, program: Program, loads: dict[int, LinkLoads]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Links that could ever become hot: bool array [links].

        Ops of one stream never overlap, so a link is never wanted for more than the sum over streams of the most that
        any op of the stream wants.
        """
        ptr, streams = program.op_streams
        fastest: dict[tuple[int, int], tuple[float, LinkLoads]] = {}
        for op, load in loads.items():
            key = (int(streams[ptr[op]]) if ptr[op] < ptr[op + 1] else -1 - op, id(load))
            if key not in fastest or self._transfer_s[op] < fastest[key][0]:
                fastest[key] = (self._transfer_s[op], load)
        contested = np.zeros(len(self._nominal), dtype=bool)
        if fastest:
            owners = np.unique([stream for stream, _ in fastest], return_inverse=True)[1]
            parts = list(fastest.values())
            link = np.concatenate([load.links for _, load in parts])
            owner = np.repeat(owners, [len(load.links) for _, load in parts])
            demand = np.concatenate([_demand(load, seconds, self._nominal) for seconds, load in parts])
            order = np.lexsort((link, owner))
            code = owner[order] * len(self._nominal) + link[order]
            first = np.flatnonzero(np.diff(code, prepend=-1))
            most = np.maximum.reduceat(demand[order], first)
            together = np.bincount(link[order][first], weights=most, minlength=len(contested))
            contested |= together > self._nominal * _SLACK
        contested[[s.link for s in self.schedules]] = True
        return contested

    def _restricted(
        self, loads: dict[int, LinkLoads], contested: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> Iterator[tuple[int, _Pressure]]:
        """Each transfer's loads on the contested links, and the measure of its rate; equal ones share an object."""
        known: dict[int, _Pressure] = {}
        for op, load in loads.items():
            if id(load) not in known:
                keep = contested[load.links] & (load.bytes > 0.0)
                kept = LinkLoads(load.links[keep], load.bytes[keep], load.groups[keep])
                known[id(load)] = _Pressure(kept, *self._measure(load))
            yield op, known[id(load)]

    def _measure(self, load: LinkLoads) -> tuple[float, float]:
        """Bytes of one group over its narrowest link (the busiest of equals), and that link's capacity."""
        used = load.bytes > 0.0
        if not used.any():
            return 0.0, 0.0
        unit, nominal = (load.bytes / load.groups)[used], self._nominal[load.links[used]]
        narrowest = float(nominal.min())
        return float(unit[nominal <= narrowest].max()), narrowest


def _demand(loads: LinkLoads, transfer_s: float, nominal: FloatArray) -> FloatArray:
    """Bytes per second on each link at the rate that the price implies.

    One group alone never wants more than a link nominally carries: where price and link disagree, the price holds.
    """
    return np.minimum(loads.bytes / transfer_s, loads.groups * nominal[loads.links])


def _split(contention: Contention, program: Program, seconds: FloatArray) -> tuple[list[float], list[float]]:
    """Transfer and latency part of every op's seconds."""
    if contention.latency_s is None:
        return seconds.tolist(), [0.0] * program.num_ops
    latency = np.asarray(contention.latency_s, dtype=np.float64)
    if latency.shape != (len(program.price_keys),):
        raise InternalError(f"{program.name} has {len(program.price_keys)} prices, latency_s {latency.shape}")
    by_op = np.minimum(latency[program.price], seconds)
    return (seconds - by_op).tolist(), by_op.tolist()
