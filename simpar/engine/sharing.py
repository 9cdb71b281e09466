"""Who shares which links at the moment, and at what rate.

Each group of ranks that communicates is one session: its rate is the bytes per second over the narrowest link it uses,
and its other links carry their share in step (the hops of a ring advance together). Sessions are max-min fair.

Only hot links matter: a link on which even all peak rates together fit holds nobody back. Rates are therefore
recomputed only for the sessions connected through hot links to what started or ended; on a fabric that does not block,
never.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simpar.engine.contention import Contention
from simpar.engine.max_min import max_min_rates
from simpar.engine.pressure import SLACK, pressures
from simpar.program.program import FloatArray, IntArray, Program


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
        self._pressure = pressures(contention, program, seconds)
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
        hot = self._wanted[links] > self._capacity[links] * SLACK
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
        self._hot[link] = bool(self._wanted[link] > self._capacity[link] * SLACK) and bool(self._members.get(link))
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
        pressure = self._pressure[op]
        total = pressure.transfer_s + pressure.latency_s
        stretch = (pressure.latency_s / total, pressure.transfer_s / total)
        return _Session(pressure.loads.links, pressure.demand(self._nominal), pressure.peak, stretch)

    def _cool(self, links: list[int]) -> bool:
        """After a departure from hot links: everyone left on them gets a new rate."""
        for link in links:
            members = self._members[link]
            self._dirty.update(members)
            if not members:
                self._wanted[link] = 0.0
            self._hot[link] = bool(self._wanted[link] > self._capacity[link] * SLACK)
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
