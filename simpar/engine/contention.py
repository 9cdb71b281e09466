"""The network that transfers share: links, what a transfer puts on them, and how their capacity varies.

A transfer is a flow that presses on links. While nothing holds it back it takes its price; where flows together want
more than a link carries, their rates are max-min fair (sharing.py), and the bandwidth part of the price stretches:

    seconds = latency + (price - latency) / (rate / peak rate).

The peak rate is what the price implies, so contention can only slow a transfer down, and a price that already assumes
sharing (siblings on one NIC, an oversubscribed layer) is not charged for it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from simpar.errors import InputError, Violation
from simpar.program.program import FloatArray, IntArray, Transfer


@dataclass(frozen=True, slots=True, eq=False)
class LinkLoads:
    """What one op puts on the network.

    Attributes:
        links: distinct link indices, int array [n].
        bytes: what the op moves over each of them in all, float array [n].
        groups: how many of the op's groups use each link, int array [n] (1 unless the op stands for several groups).
    """

    links: IntArray
    bytes: FloatArray
    groups: IntArray


class Network(Protocol):
    """What the contention model needs to know about a topology."""

    @property
    def capacity_bytes_per_s(self) -> FloatArray:
        """Nominal capacity of each directed link, float array [links]."""

    def loads(self, transfer: Transfer) -> LinkLoads:
        """The links that `transfer` uses and the bytes it moves over each; empty where it leaves no GPU."""

    def describe(self, link: int) -> str:
        """A name of `link` for messages."""


@dataclass(frozen=True, slots=True)
class LinkSchedule:
    """Capacity of one link over time: a factor on its nominal capacity, constant between changes.

    Attributes:
        link: index of the link.
        times_s: when the factor changes; ascending, the first at or after 0. Before the first the factor is 1.
        factors: the factor from each of these times on; 0 is down, 0.5 half speed.
        period_s: the pattern repeats with this period (a flapping link); None: it happens once.
    """

    link: int
    times_s: tuple[float, ...]
    factors: tuple[float, ...]
    period_s: float | None = None

    def after(self, index: int) -> tuple[float, float] | None:
        """(time, factor) of the `index`-th change, None when there are no more."""
        turn, step = divmod(index, len(self.times_s))
        if turn and self.period_s is None:
            return None
        return self.times_s[step] + turn * (self.period_s or 0.0), self.factors[step]


@dataclass(frozen=True, slots=True, eq=False)
class Contention:
    """A network, and what is known about the transfers on it.

    Attributes:
        network: links and routes.
        latency_s: the part of each price that does not depend on bandwidth, float array [prices]; None: none of it.
        schedules: links whose capacity varies.
    """

    network: Network
    latency_s: FloatArray | None = None
    schedules: Sequence[LinkSchedule] = ()

    def __post_init__(self) -> None:
        links = [schedule.link for schedule in self.schedules]
        found = [
            Violation("contention.schedules.link", link, "has two schedules", "join them into one")
            for link in sorted({link for link in links if links.count(link) > 1})
        ]
        if found:
            raise InputError(found)


def merged_loads(parts: Sequence[tuple[IntArray, FloatArray]]) -> LinkLoads:
    """Loads of an op from those of its groups, each (distinct links, bytes)."""
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return LinkLoads(none, np.zeros(0), none)
    links, inverse, groups = np.unique(np.concatenate([links for links, _ in parts]), return_inverse=True, return_counts=True)
    size = np.bincount(inverse, weights=np.concatenate([size for _, size in parts]), minlength=len(links))
    return LinkLoads(links.astype(np.int64), size.astype(np.float64), groups.astype(np.int64))
