"""The scale-up domain: GPUs on a switch (NVSwitch, PCIe, shared memory), in a full mesh (xGMI, NVLink
bridge), or in a torus.

Each class numbers its one-way links from 0; `cluster.py` adds the offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simpar.specs.hardware import HardwareProfile

FloatArray = NDArray[np.float64]


class ScaleUp(Protocol):
    """What every kind of domain offers, GPUs and domains numbered cluster-wide."""

    @property
    def num_links(self) -> int:
        """One-way links."""

    def capacities(self) -> FloatArray:
        """Bytes per second, float array [links]; 0 for a link that is not there."""

    @property
    def latency_s(self) -> float:
        """Of each link, one way."""

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Links from GPU `src` to GPU `dst` of the same domain."""

    def ends(self, link: int) -> tuple[str, str]:
        """Vertices the link goes from and to."""

    def links_of(self, gpus: range) -> list[int]:
        """Links that start or, on a switch, end at `gpus`."""

    def bisection_bytes_per_s(self) -> float:
        """One direction across the middle of one domain."""


@dataclass(frozen=True, slots=True)
class Switched:
    """Each GPU has one link up to and one down from a switch that never blocks (an NVSwitch plane counts as
    one).
    """

    num_gpus: int
    domain: int
    bytes_per_s: float
    latency_s: float
    switch: str

    @property
    def num_links(self) -> int:
        """Up links, then down links."""
        return 2 * self.num_gpus

    def capacities(self) -> FloatArray:
        """All alike."""
        return np.full(self.num_links, self.bytes_per_s)

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Up and down."""
        return (src, self.num_gpus + dst)

    def ends(self, link: int) -> tuple[str, str]:
        """GPU and switch, or the reverse."""
        gpu = link % self.num_gpus
        pair = (f"gpu:{gpu}", f"{self.switch}:{gpu // self.domain}")
        return pair if link < self.num_gpus else (pair[1], pair[0])

    def links_of(self, gpus: range) -> list[int]:
        """Their up and down links."""
        return [*gpus, *(self.num_gpus + gpu for gpu in gpus)]

    def bisection_bytes_per_s(self) -> float:
        """Half of the domain sends."""
        return min(self.domain, self.num_gpus) // 2 * self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Meshed:
    """A link between each two GPUs of a domain, each an equal share of a GPU's bandwidth."""

    num_gpus: int
    domain: int
    bytes_per_s: float
    latency_s: float

    @property
    def num_links(self) -> int:
        """One for each ordered pair, and unused ones from a GPU to itself."""
        return self.num_gpus * self.domain

    def capacities(self) -> FloatArray:
        """A pair has 1 / (domain - 1) of a GPU's bandwidth."""
        result = np.full(self.num_links, self.bytes_per_s / max(1, self.domain - 1))
        gpus = np.arange(self.num_gpus)
        result[gpus * self.domain + gpus % self.domain] = 0.0
        return result

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """The direct link."""
        return (src * self.domain + dst % self.domain,)

    def ends(self, link: int) -> tuple[str, str]:
        """The two GPUs."""
        src, peer = divmod(link, self.domain)
        return f"gpu:{src}", f"gpu:{src // self.domain * self.domain + peer}"

    def links_of(self, gpus: range) -> list[int]:
        """The links that start at them."""
        return list(range(gpus.start * self.domain, gpus.stop * self.domain))

    def bisection_bytes_per_s(self) -> float:
        """Every pair across the middle."""
        size = min(self.domain, self.num_gpus)
        return (size // 2) * (size - size // 2) * self.bytes_per_s / max(1, self.domain - 1)


def slice_shape(chips: int, torus: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions of a slice of `chips` chips, as near to a cube as divisors allow; the whole torus where it
    fills it.

    >>> slice_shape(64, (16, 16, 16))
    (4, 4, 4)
    """
    if chips >= prod(torus):
        return torus
    best: tuple[int, ...] = ()

    def extend(rest: int, sizes: tuple[int, ...]) -> None:
        nonlocal best
        limit = torus[len(sizes)]
        if len(sizes) == len(torus) - 1:
            found = (*sizes, rest)
            if rest <= limit and (not best or (max(found), sum(found)) < (max(best), sum(best))):
                best = found
            return
        for size in range(1, min(rest, limit) + 1):
            if rest % size == 0:
                extend(rest // size, (*sizes, size))

    extend(chips, ())
    return tuple(sorted(best)) if best else (chips, *(1 for _ in torus[1:]))


@dataclass(frozen=True, slots=True)
class Torus:
    """Chips in a grid, each with a link in both directions of each dimension; rows of a multiple of 4 close
    to rings.

    Routing is dimension by dimension, the shorter way round. Source: jax-ml/scaling-book, tpus.
    """

    num_gpus: int
    shape: tuple[int, ...]
    link_bytes_per_s: float
    latency_s: float

    @property
    def num_links(self) -> int:
        """Two for each chip and dimension; the ones past an open edge have no capacity."""
        return self.num_gpus * 2 * len(self.shape)

    def capacities(self) -> FloatArray:
        """A link's bandwidth where there is a neighbour, else 0."""
        exists = [self._neighbour(link // self._degree, link % self._degree) is not None for link in range(self._slice_links)]
        one = np.where(exists, self.link_bytes_per_s, 0.0)
        return np.tile(one, -(-self.num_gpus // prod(self.shape)))[: self.num_links]

    @property
    def _degree(self) -> int:
        return 2 * len(self.shape)

    @property
    def _slice_links(self) -> int:
        return prod(self.shape) * self._degree

    def _neighbour(self, gpu: int, port: int) -> int | None:
        """The chip that `port` (2 * dimension, + 1 for the negative direction) of `gpu` leads to."""
        dim, negative = divmod(port, 2)
        size, stride = self.shape[dim], prod(self.shape[:dim])
        at = gpu // stride % size
        to = at + (-1 if negative else 1)
        if size == 1 or not (0 <= to < size or size % 4 == 0):
            return None
        return gpu + (to % size - at) * stride

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Along the first dimension, then the second, and so on."""
        links: list[int] = []
        for dim, size in enumerate(self.shape):
            stride = prod(self.shape[:dim])
            ahead = (dst // stride - src // stride) % size
            at, target = src // stride % size, dst // stride % size
            forward = ahead <= size - ahead if size % 4 == 0 else target > at
            for _ in range(min(ahead, size - ahead) if size % 4 == 0 else abs(target - at)):
                port = 2 * dim + (not forward)
                links.append(src * self._degree + port)
                step = self._neighbour(src, port)
                src = src if step is None else step
        return tuple(links)

    def ends(self, link: int) -> tuple[str, str]:
        """The two chips (the same one twice for a link past an open edge)."""
        gpu, port = divmod(link, self._degree)
        to = self._neighbour(gpu, port)
        return f"gpu:{gpu}", f"gpu:{gpu if to is None else to}"

    def links_of(self, gpus: range) -> list[int]:
        """The links that start at them."""
        return list(range(gpus.start * self._degree, gpus.stop * self._degree))

    def bisection_bytes_per_s(self) -> float:
        """Cut across the longest dimension; a ring is cut twice."""
        longest = max(self.shape)
        rings = 2 if longest % 4 == 0 else 1
        return rings * prod(self.shape) / longest * self.link_bytes_per_s if longest > 1 else 0.0


def scale_up(hardware: HardwareProfile, num_nodes: int) -> ScaleUp:
    """The scale-up domains of `num_nodes` nodes of `hardware`."""
    spec, gpus = hardware.scale_up, num_nodes * hardware.gpus_per_node
    bandwidth, hop = spec.bandwidth.value, spec.latency.value
    if spec.kind in ("xgmi", "nvlink-mesh"):
        return Meshed(gpus, spec.domain_size, bandwidth, hop)
    if spec.kind == "ici" and spec.torus:
        per_link = bandwidth / max(1, spec.links_per_gpu)
        return Torus(gpus, slice_shape(gpus, spec.torus), per_link, hop)
    switch = {"nvswitch": "nvswitch", "pcie": "pcie"}.get(spec.kind, "domain")
    return Switched(gpus, spec.domain_size, bandwidth, hop / 2, switch)  # half a hop up, half a hop down
