"""The one law every collective follows: t(S) = alpha + S beta + gamma sqrt(S), the fastest of a few candidates.

alpha is latency (set-up and hops), beta the seconds per byte of the slowest medium, gamma the pipeline fill: a message
cut into k chunks over a pipeline of depth d takes (k + d)(o + S beta / k) with an overhead o per chunk; the best k gives
alpha + S beta + 2 sqrt(d o S beta). Each candidate grows with S and those with a limit only drop out, so the least of
them grows with S too. `Geometry` says what a group of ranks means for it: hops, and the bytes per second that it gets on each
medium.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import GroupPlacement, Tier


@dataclass(frozen=True, slots=True)
class Law:
    """One algorithm and protocol for one placed group.

    Attributes:
        algorithm, protocol: NCCL's names.
        alpha_s: latency.
        beta_s_per_byte: inverse of the algorithm bandwidth.
        gamma_s_per_sqrt_byte: pipeline fill.
        channels: thread blocks it runs at full size.
        floor_s: least time of the transfer (messages too small to open all channels).
        full_bytes: from this size chunks are as large as the buffers allow and the fill grows no more.
        max_bytes: the tuner takes it up to this size; one law at least has none.
    """

    algorithm: str
    protocol: str
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_sqrt_byte: float = 0.0
    channels: int = 16
    floor_s: float = 0.0
    max_bytes: float = inf
    full_bytes: float = inf

    def seconds(self, bytes_: float) -> float:
        """Duration for a message of `bytes_`."""
        return self.alpha_s + self.transfer_s(bytes_) + self.fill_s(bytes_)

    def transfer_s(self, bytes_: float) -> float:
        """Time on the slowest medium."""
        return max(self.floor_s, bytes_ * self.beta_s_per_byte)

    def fill_s(self, bytes_: float) -> float:
        """Time to fill and drain the pipeline."""
        return sqrt(min(bytes_, self.full_bytes)) * self.gamma_s_per_sqrt_byte


def fastest(laws: Sequence[Law], bytes_: float) -> Law:
    """The law that takes least for `bytes_`."""
    return min(laws, key=lambda law: law.seconds(bytes_) if bytes_ <= law.max_bytes else inf)


def seconds_of(laws: Sequence[Law], bytes_: NDArray[np.float64]) -> NDArray[np.float64]:
    """Durations [messages] of the fastest law for each of `bytes_` [messages]."""
    found = np.full(bytes_.shape, inf)
    for law in laws:
        transfer = np.maximum(law.floor_s, law.beta_s_per_byte * bytes_)
        seconds = law.alpha_s + transfer + law.gamma_s_per_sqrt_byte * np.sqrt(np.minimum(bytes_, law.full_bytes))
        found = np.minimum(found, np.where(bytes_ <= law.max_bytes, seconds, inf))
    return found


def fill(overhead_s: float, beta_s_per_byte: float, depth: float = 1.0) -> float:
    """gamma of a pipeline `depth` deep whose chunks cost `overhead_s` each on a medium of `beta_s_per_byte`."""
    return 2.0 * sqrt(depth * overhead_s * beta_s_per_byte)


SWITCHES = {"pod": 2, "core": 4}
"""Switches passed beyond the first, by the widest tier crossed: leaf-spine-leaf adds two, the core two more."""
MOST_CHANNELS = 16
"""Rings that a search finds at most, opened twice: what eight NICs give."""
RCCL_CHANNELS = {"cdna3": {2: 32, 4: 24, 8: 56}, "cdna4": {2: 14, 4: 28, 8: 56}}
"""Compute units that RCCL takes for a group of so many GPUs of one full mesh. MI300X: one a channel, of eight GPUs 28 rings opened
twice (ROCm/rccl src/graph/rome_models.cc, model 79; src/init.cc of two and four). MI350X: half of ROCm 7.0's 112 since WarpSpeed,
February 2026, runs four channels on each (rccl PR 1596 and 2073, rocm-systems PR 3134)."""
RCCL_NETWORK_CHANNELS = 64
"""The same across nodes (src/graph/connect.cc, ncclTopoPostset; model 81 of eight MI300X and their NICs has 64 rings)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A placed group in the terms of the laws.

    Attributes:
        size: ranks.
        domains: scale-up domains touched.
        per_domain: ranks in the fullest of them.
        fewest_per_domain: ranks in the emptiest.
        link_bytes_per_s: raw rate of one rank into its domain, one direction.
        domain_out_bytes_per_s: raw rate out of the tightest domain for this group, one direction, all its NICs together,
            after sharing with concurrent groups and oversubscription; infinite in one domain.
        rank_out_bytes_per_s: the same for one rank of the tightest domain when every rank sends.
        pair_out_bytes_per_s: the same for one rank sending alone.
        extra_latency_s: one way through the switches beyond the first.
        over_network: the domains are joined by NICs; else by PCIe inside one host.
        channels: thread blocks that the library opens for the group; none = as many as the law says.
    """

    size: int
    domains: int
    per_domain: int
    fewest_per_domain: int
    link_bytes_per_s: float
    domain_out_bytes_per_s: float
    rank_out_bytes_per_s: float
    pair_out_bytes_per_s: float
    extra_latency_s: float
    over_network: bool
    channels: int | None


def _outward(hardware: HardwareProfile, placement: GroupPlacement) -> tuple[float, float, float]:
    """Raw bytes/s out of the tightest domain: all its ranks of the group together, per rank, and one rank alone."""
    node, nic = hardware.node, hardware.nic
    if placement.num_nodes == 1 or nic.count == 0:
        pcie = node.pcie_bandwidth.value
        return pcie * min(placement.ranks_per_domain), pcie, pcie
    rate = nic.bandwidth.value / placement.oversubscription
    nics_per_gpu = max(1.0, nic.count / node.gpus_per_node)
    share = nic.count / max(1, placement.concurrent_groups)
    per_node = max(placement.ranks_per_node)
    nics = [min(ranks * nics_per_gpu, share * max(1.0, ranks / per_node)) for ranks in placement.ranks_per_domain]
    tightest = min(nics)
    busiest = min(n / r for n, r in zip(nics, placement.ranks_per_domain, strict=True))
    return rate * tightest, rate * busiest, rate * min(nics_per_gpu, share)


def _channels(hardware: HardwareProfile, placement: GroupPlacement, *, over_network: bool) -> int | None:
    """SMs that NCCL or RCCL holds for a group, one a channel.

    NCCL across nodes: each ring of its search leaves through one NIC and is opened twice; from compute capability 9 on, while there
    are fewer than 16, twice more (NVIDIA/nccl src/graph/connect.cc, ncclTopoPostset). A group with one rank per node uses one NIC.
    """
    rccl = RCCL_CHANNELS.get(hardware.gpu.architecture)
    if rccl is not None:
        return RCCL_NETWORK_CHANNELS if over_network else rccl.get(placement.size)
    if not over_network:
        return None
    nics_per_gpu = max(1.0, hardware.nic.count / hardware.node.gpus_per_node)
    per_node = min(float(hardware.nic.count), max(placement.ranks_per_node) * nics_per_gpu)
    nodes_in_domain = max(placement.ranks_per_domain) / max(placement.ranks_per_node)
    channels = 2 * max(1, round(per_node * max(1.0, nodes_in_domain)))
    if hardware.gpu.architecture in ("hopper", "blackwell") and channels < MOST_CHANNELS:
        channels *= 2
    return min(channels, MOST_CHANNELS)


def _share_of_mesh(hardware: HardwareProfile, placement: GroupPlacement) -> float:
    """Of a GPU's links into a full mesh, the share that leads to other ranks of the group: a pair has one of seven, or a third.

    A switch gives a group of any size all of them.
    """
    peers, up = hardware.domain_size - 1, hardware.scale_up
    if up.kind not in ("xgmi", "nvlink-mesh") or peers < 1 or up.links_per_gpu < peers:
        return 1.0
    return max(min(max(placement.ranks_per_domain) - 1, peers), 1) / peers


def geometry(hardware: HardwareProfile, placement: GroupPlacement) -> Geometry:
    """The geometry of `placement` on `hardware`."""
    link = hardware.scale_up.bandwidth.value * _share_of_mesh(hardware, placement)
    if hardware.domain_size <= 1:
        link = hardware.node.pcie_bandwidth.value
    multi = placement.num_domains > 1
    together, busiest, alone = _outward(hardware, placement) if multi else (inf, inf, inf)
    over_network = multi and placement.num_nodes > 1
    switches = SWITCHES.get(placement.tier, 0) if over_network else 0
    if over_network and not placement.same_rail and hardware.fabric.kind == "rail-optimized":
        switches = max(switches, 2)
    return Geometry(
        placement.size,
        placement.num_domains,
        max(placement.ranks_per_domain),
        min(placement.ranks_per_domain),
        link,
        together,
        busiest,
        alone,
        switches * hardware.fabric.switch_latency.value,
        over_network,
        _channels(hardware, placement, over_network=over_network),
    )


def packed(hardware: HardwareProfile, size: int, nodes: int) -> GroupPlacement:
    """`size` consecutive ranks on `nodes` hosts, as evenly as they go."""
    per_node = tuple(size // nodes + (i < size % nodes) for i in range(nodes))
    nodes_per_domain = max(1, hardware.domain_size // hardware.gpus_per_node)
    if hardware.domain_size < hardware.gpus_per_node:
        whole, rest = divmod(size, hardware.domain_size)
        per_domain = (hardware.domain_size,) * whole + ((rest,) if rest else ())
    else:
        per_domain = tuple(sum(per_node[i : i + nodes_per_domain]) for i in range(0, nodes, nodes_per_domain))
    if size == 1:
        return GroupPlacement(1, (1,), (1,), "device")
    tier: Tier = "node" if nodes == 1 else "domain" if len(per_domain) == 1 else "leaf"
    if len(per_domain) > 1 and nodes > 1:
        fabric = hardware.fabric
        leaf = fabric.nodes_per_leaf_group
        tier = "leaf" if nodes <= leaf else "pod" if nodes <= leaf * fabric.leaf_groups_per_pod else "core"
    return GroupPlacement(size, per_domain, per_node, tier)
