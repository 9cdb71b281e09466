"""Constants for machines without fitted ones: the nearest fitted machine's, or NCCL's published tables.

Published figures: NCCL src/graph/tuning.cc (2.30): base latencies 6.6 / 14 / 8.4 us and hops .6 / 1.9 / 3.4 us (NVLink),
1 / 2.5 / 5.7 us (PCIe), 2.7 / 4 / 14 us (network) for ring LL / LL128 / Simple; NVLS 25 us; network levels of a tree 14 us,
of NVLSTree 20.9 us. Efficiencies: bandwidth that NCCL's graph search grants over the raw link (370.8 of 450 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simpar.costs.price import Provenance
from simpar.specs.base import data_dir, read_toml, validate
from simpar.specs.collective_constants import (
    CollectiveConstants,
    ExpertConstants,
    NetworkConstants,
    NvlsConstants,
    PeerConstants,
    RingConstants,
    ScaleUpConstants,
    TimeBand,
)
from simpar.specs.hardware import HardwareProfile

ALIKE = {"nvrack": "nvswitch", "nvlink-mesh": "nvswitch", "none": "pcie", "shared-memory": "pcie", "ici": "nvswitch"}
"""Kinds of scale-up fabric that borrow each other's constants when their own have none."""
PCIE = ("pcie", "none")
GENERATIONS = {
    "fermi": "ada",
    "volta": "ampere",
    "ada": "ampere",
    "ampere": "hopper",
    "hopper": "blackwell",
    "blackwell": "hopper",
    "blackwell-rtx": "ada",
    "turing": "ampere",
    "cdna2": "cdna3",
    "cdna4": "cdna3",
}
"""The generation whose constants stand in for a missing one."""
NETWORKS = {"roce": "infiniband", "ethernet": "tcpx", "none": "infiniband", "efa": "roce", "tcpx": "ethernet", "infiniband": "roce"}
WIDE = (TimeBand(scope="domain", from_bytes=0, low=0.6, high=1.6), TimeBand(scope="network", from_bytes=0, low=0.5, high=2.0))
"""Interval of a machine nobody measured: about the spread between generations."""


def published_scale_up(pcie: bool) -> ScaleUpConstants:
    """NCCL's own constants, for NVLink or PCIe."""
    hop = (1e-6, 2.5e-6, 5.7e-6) if pcie else (0.6e-6, 1.9e-6, 3.4e-6)
    efficiency = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"), 0.76 if pcie else 0.82)
    ring = RingConstants(
        ll_base_s=6.6e-6,
        ll_hop_s=hop[0],
        ll_efficiency=0.25,
        ll128_base_s=8e-6,
        ll128_hop_s=hop[1],
        ll128_efficiency=0.7,
        simple_base_s=8.4e-6,
        simple_hop_s=hop[2],
        efficiency=efficiency,
        fill_s=3e-6,
    )
    nvls = None if pcie else NvlsConstants(base_s=25e-6, hop_s=0.0, efficiency=0.6, fill_s=5e-6, min_ranks=5)
    peer = PeerConstants(
        base_s=7.5e-6,
        peer_s=0.6e-6,
        efficiency=0.75,
        local_copy=0.3,
        fill_s=2e-6,
        ll_efficiency=0.1,
        pair_base_s=8e-6,
        pair_efficiency=0.64,
        pair_few_efficiency=0.25,
        pair_floor_s=5e-4,
    )
    return ScaleUpConstants(machine="NCCL's tables", kind="published", ring=ring, nvls=nvls, peer=peer)


def published_network(latency_s: float) -> NetworkConstants:
    """NCCL's network constants for a fabric whose one-way latency is `latency_s` (2 us is inside its figures)."""
    more = max(0.0, latency_s - 2e-6)
    return NetworkConstants(
        machine="NCCL's tables",
        kind="published",
        ll_hop_s=5e-6 + more,
        ll128_hop_s=8.5e-6 + more,
        simple_hop_s=14e-6 + more,
        tree_base_s=0.0,
        tree_hop_s=20.9e-6 + more,
        ring_efficiency=0.9,
        tree_efficiency=0.92,
        fill_s=10e-6,
        fill_exponent=0.5,
        peer_base_s=20e-6 + more,
        peer_efficiency=0.92,
    )


def key_of(hardware: HardwareProfile) -> tuple[str, str, str]:
    """Generation, scale-up kind (switches in the node and in the rack told apart) and NIC kind: what constants depend on."""
    kind: str = hardware.scale_up.kind
    if kind == "nvswitch" and hardware.domain_size > hardware.gpus_per_node:
        kind = "nvrack"
    return hardware.gpu.architecture, kind, hardware.nic.kind


@lru_cache(maxsize=1)
def shipped() -> dict[tuple[str, ...], CollectiveConstants]:
    """Fitted constants by (generation, scale-up kind, NIC kind), from the names of the files.

    A fourth part names a fabric that its NIC kind does not tell apart.
    """
    found = {}
    for path in sorted((data_dir("hardware_profiles") / "fitted").glob("*.collectives.toml")):
        parts = tuple(path.name.removesuffix(".collectives.toml").split("_"))
        found[parts] = validate(CollectiveConstants, read_toml(path), file=str(path))
    return found


def _alike_scale_up(key: tuple[str, str, str]) -> CollectiveConstants | None:
    """Fitted constants of the same kind of fabric: of this generation, else of the nearest."""
    # PCIe boxes differ by their host, not by the GPU: a sound one stands for those that were not measured themselves.
    generations = ("blackwell",) if key[1] in PCIE else (key[0], GENERATIONS.get(key[0], "hopper"))
    order = [(a, k) for k in (key[1], ALIKE.get(key[1], key[1])) for a in generations]
    fits = shipped()
    return next((c for pair in order for name, c in fits.items() if name[:2] == pair and c.scale_up is not None), None)


def _alike_network(key: tuple[str, str, str]) -> NetworkConstants | None:
    """Fitted constants of the same kind of NIC (else the nearest kind): of this generation, else of any."""
    generations = dict.fromkeys((key[0], GENERATIONS.get(key[0], "hopper"), *GENERATIONS))
    order = [(a, nic) for nic in (key[2], NETWORKS.get(key[2], key[2])) for a in generations]
    fits = {name: c.network for name, c in shipped().items() if len(name) == 3 and c.network is not None}
    return next((net for pair in order for name, net in fits.items() if (name[0], name[2]) == pair), None)


@dataclass(frozen=True, slots=True)
class Known:
    """Constants that hold for a machine, their intervals, and how well those inside and between domains are known."""

    scale_up: ScaleUpConstants
    network: NetworkConstants
    bands: tuple[TimeBand, ...]
    within: Provenance
    between: Provenance


def constants_of(hardware: HardwareProfile) -> Known:
    """What is known of `hardware`: its profile's own constants, those fitted on its kind, the nearest kind's, NCCL's tables."""
    key = key_of(hardware)
    exact = hardware.collectives if hardware.collectives.scale_up or hardware.collectives.network else shipped().get(key)
    exact = exact or CollectiveConstants()
    up, within = exact.scale_up, Provenance.MODEL
    bands = exact.bands
    if up is None:
        alike = _alike_scale_up(key)
        same_links = alike is not None and alike.scale_up is not None and alike.scale_up.machine == " ".join(key[:2])
        up, within = (alike.scale_up, Provenance.SCALED) if alike is not None else (None, Provenance.PUBLISHED)
        if alike is not None and same_links:
            bands, within = tuple(b for b in alike.bands if b.scope == "domain"), Provenance.MODEL
    net, between = exact.network, within
    if net is None:
        net = _alike_network(key)
        between = Provenance.SCALED if net is not None else Provenance.PUBLISHED
        bands = tuple(b for b in bands if b.scope != "network")
    scopes = {b.scope for b in bands}
    bands = (*bands, *(b for b in WIDE if b.scope not in scopes))
    up = up or published_scale_up(hardware.scale_up.kind in ("pcie", "none", "shared-memory"))
    return Known(up, net or published_network(hardware.nic.latency.value), bands, within, between)


def expert_of(hardware: HardwareProfile) -> ExpertConstants | None:
    """Constants of expert-parallel kernels: the profile's own, or those fitted on its GPU generation."""
    fits = (c.expert for name, c in shipped().items() if name[0] == hardware.gpu.architecture)
    return hardware.collectives.expert or next((found for found in fits if found is not None), None)
