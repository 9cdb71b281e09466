"""Constants for machines without fitted ones: the nearest fitted machine's, or NCCL's published tables.

Published figures: NCCL src/graph/tuning.cc (2.30): base latencies 6.6 / 14 / 8.4 us and hops .6 / 1.9 / 3.4 us (NVLink),
1 / 2.5 / 5.7 us (PCIe), 2.7 / 4 / 14 us (network) for ring LL / LL128 / Simple; NVLS 25 us; network levels of a tree 14 us,
of NVLSTree 20.9 us. Efficiencies: bandwidth that NCCL's graph search grants over the raw link (370.8 of 450 GB/s).
"""

from __future__ import annotations

from functools import lru_cache

from simpar.costs.price import Provenance
from simpar.specs.base import data_dir, read_toml, validate
from simpar.specs.collective_constants import (
    CollectiveConstants,
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
GENERATIONS = {
    "fermi": "ada", "volta": "ampere", "ada": "ampere", "ampere": "hopper", "hopper": "blackwell", "blackwell": "hopper",
}
"""The generation whose constants stand in for a missing one."""
NETWORKS = {"roce": "infiniband", "ethernet": "tcpx", "none": "infiniband", "efa": "roce", "tcpx": "ethernet",
            "infiniband": "roce"}
WIDE = (TimeBand(scope="domain", from_bytes=0, low=0.6, high=1.6), TimeBand(scope="network", from_bytes=0, low=0.5, high=2.0))
"""Interval of a machine nobody measured: about the spread between generations."""


def published_scale_up(pcie: bool) -> ScaleUpConstants:
    """NCCL's own constants, for NVLink or PCIe."""
    hop = (1e-6, 2.5e-6, 5.7e-6) if pcie else (0.6e-6, 1.9e-6, 3.4e-6)
    efficiency = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"), 0.76 if pcie else 0.82)
    ring = RingConstants(
        ll_base_s=6.6e-6, ll_hop_s=hop[0], ll_efficiency=0.25, ll128_base_s=8e-6, ll128_hop_s=hop[1], ll128_efficiency=0.7,
        simple_base_s=8.4e-6, simple_hop_s=hop[2], efficiency=efficiency, fill_s=3e-6,
    )
    nvls = None if pcie else NvlsConstants(base_s=25e-6, hop_s=0.0, efficiency=0.6, fill_s=5e-6, min_ranks=5)
    peer = PeerConstants(
        base_s=7.5e-6, peer_s=0.6e-6, efficiency=0.75, local_copy=0.3, fill_s=2e-6, ll_efficiency=0.1, pair_base_s=8e-6,
        pair_efficiency=0.64, pair_few_efficiency=0.25, pair_floor_s=5e-4,
    )
    return ScaleUpConstants(machine="NCCL's tables", kind="published", ring=ring, nvls=nvls, peer=peer)


def published_network(latency_s: float) -> NetworkConstants:
    """NCCL's network constants for a fabric whose one-way latency is `latency_s` (2 us is inside its figures)."""
    more = max(0.0, latency_s - 2e-6)
    return NetworkConstants(
        machine="NCCL's tables", kind="published", ll_hop_s=5e-6 + more, ll128_hop_s=8.5e-6 + more,
        simple_hop_s=14e-6 + more, tree_base_s=0.0, tree_hop_s=20.9e-6 + more, ring_efficiency=0.9, tree_efficiency=0.92,
        fill_s=10e-6, fill_exponent=0.5, peer_base_s=20e-6 + more, peer_efficiency=0.92,
    )


def key_of(hardware: HardwareProfile) -> tuple[str, str, str]:
    """Generation, scale-up kind (switches in the node and in the rack told apart) and NIC kind: what constants depend on."""
    kind = hardware.scale_up.kind
    if kind == "nvswitch" and hardware.domain_size > hardware.gpus_per_node:
        kind = "nvrack"
    return hardware.gpu.architecture, kind, hardware.nic.kind


@lru_cache(maxsize=1)
def shipped() -> dict[tuple[str, str, str], CollectiveConstants]:
    """Fitted constants by (generation, scale-up kind, NIC kind), from the names of the files."""
    found = {}
    for path in sorted((data_dir("hardware_profiles") / "fitted").glob("*.collectives.toml")):
        parts = tuple(path.name.removesuffix(".collectives.toml").split("_"))
        if len(parts) == 3:
            found[parts] = validate(CollectiveConstants, read_toml(path), file=str(path))
    return found


def _nearest(key: tuple[str, str, str]) -> tuple[ScaleUpConstants | None, NetworkConstants | None]:
    """The scale-up constants of the same fabric kind, the generation nearest; the network constants of the NIC kind."""
    fits = shipped()
    generations, kinds = [key[0], GENERATIONS.get(key[0], "hopper")], [key[1], ALIKE.get(key[1], key[1])]
    up = next((c.scale_up for k in kinds for a in generations for name, c in fits.items()
               if c.scale_up is not None and name[:2] == (a, k)), None)
    nics = [key[2], NETWORKS.get(key[2], key[2])]
    net = next((c.network for nic in nics for a in (*generations, *GENERATIONS) for name, c in fits.items()
                if c.network is not None and (name[0], name[2]) == (a, nic)), None)
    return up, net


def constants_of(
    hardware: HardwareProfile,
) -> tuple[ScaleUpConstants, NetworkConstants, tuple[TimeBand, ...], Provenance]:
    """Scale-up and network constants of `hardware`, its intervals, and how well they are known."""
    own = hardware.collectives
    if own.scale_up is not None and own.network is not None:
        return own.scale_up, own.network, own.bands, Provenance.MODEL
    same = shipped().get(key_of(hardware))
    if own.scale_up is None and same is not None and same.scale_up is not None and same.network is not None:
        return same.scale_up, same.network, same.bands, Provenance.MODEL
    up, net = _nearest(key_of(hardware))
    up, net = own.scale_up or up, own.network or net
    provenance = Provenance.SCALED if up is not None and net is not None else Provenance.PUBLISHED
    up = up or published_scale_up(hardware.scale_up.kind in ("pcie", "none", "shared-memory"))
    return up, net or published_network(hardware.nic.latency.value), own.bands or WIDE, provenance


def kernels_of(hardware: HardwareProfile) -> CollectiveConstants:
    """Where the constants of expert-parallel and custom all-reduce kernels stand: the profile's own, or the nearest's."""
    own, key = hardware.collectives, key_of(hardware)
    if own.expert is not None or own.custom is not None:
        return own
    alike = [c for name, c in shipped().items() if name[0] == key[0] and (c.expert or c.custom)]
    same = [c for name, c in shipped().items() if name[:2] == key[:2] and (c.expert or c.custom)]
    return next(iter([*same, *alike]), CollectiveConstants())
