"""What a cluster is made of: counts by tier, bisection bandwidth, oversubscription, hops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.specs.base import read_toml
from simpar.specs.catalog import scenario_names, scenario_path
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.scenario import read_scenario
from simpar.specs.stage_plan import hosts
from simpar.topology.cluster import Cluster
from simpar.topology.graph import nvswitches
from simpar.topology.levels import levels


def bisection_bytes_per_s(cluster: Cluster) -> float:
    """What one half of the cluster can send to the other, cut where it is thinnest between whole domains.

    Inside one domain that is the domain's own middle. Else the NICs of one half, over the oversubscription of the
    layers that the widest traffic passes (downlink over uplink capacity, leaf by spine).
    """
    hw, net = cluster.hardware, cluster.net
    if cluster.num_gpus <= hw.domain_size:
        return cluster.domains.bisection_bytes_per_s()
    if cluster.num_nodes == 1:
        return hw.gpus_per_node // 2 * hw.node.pcie_bandwidth.value
    gpus = max(hw.domain_size, hw.gpus_per_node)
    half = cluster.num_gpus // gpus // 2 * gpus // hw.gpus_per_node or cluster.num_nodes // 2
    sizes = levels(hw)
    over = sizes.oversubscription(sizes.tier(0, cluster.num_gpus - 1))
    live = net.slots - len(cluster.dead_slots)
    return half * live * net.slot_bytes_per_s / over


def clusters_of(path: str | Path, num_nodes: int | None = None) -> list[tuple[HardwareProfile, int]]:
    """The machines, each with the number of nodes, that the file at `path`, a scenario or a hardware profile, describes: one kind,
    or those of a scenario's parts.

    Args:
        path: a TOML file, or the name of a shipped profile or scenario.
        num_nodes: for a profile (1 if not given); a scenario has its own, which this overrides.

    Raises:
        InputError: the file breaks a rule, fewer than one node, or a number of nodes for several parts.
    """
    if num_nodes is not None and num_nodes < 1:
        raise InputError([Violation("num_nodes", num_nodes, "must be at least 1")])
    file = Path(path)
    if str(path) in scenario_names():
        file = scenario_path(path)
    elif file.suffix != ".toml" and not file.is_file():
        return [(load_hardware(str(path)), num_nodes or 1)]
    if "gpu" in read_toml(file):
        return [(load_hardware(str(file)), num_nodes or 1)]
    scenario = read_scenario(file)
    parts = [(host.hardware, part.num_nodes) for host, part in zip(hosts(scenario), scenario.cluster.parts, strict=True)]
    if parts and num_nodes is not None:
        raise InputError([Violation("--num-nodes", num_nodes, "the scenario has parts, each with its own", "leave it out")])
    return parts or [(scenario.hardware, num_nodes or scenario.cluster.num_nodes)]


def summary(hardware: HardwareProfile | Cluster, num_nodes: int | None = None) -> dict[str, Any]:
    """Counts, capacities and hops of `num_nodes` nodes of `hardware` (or of a `Cluster`), for people and for JSON.

    Raises:
        InputError: a machine without a network on several nodes.
    """
    cluster = hardware if isinstance(hardware, Cluster) else Cluster(hardware, num_nodes or 1)
    hw, net = cluster.hardware, cluster.net
    domains = -(-cluster.num_gpus // hw.domain_size)
    sizes = levels(hw)
    tier = sizes.tier(0, cluster.num_gpus - 1)
    switches = {"leaf": 0, "pod": 3, "core": 5}
    return {
        "hardware": hw.name,
        "gpu": hw.gpu.name,
        "fabric": hw.fabric.kind,
        "num_nodes": cluster.num_nodes,
        "num_gpus": cluster.num_gpus,
        "scale_up_domains": domains,
        "gpus_per_domain": min(hw.domain_size, cluster.num_gpus),
        "nvswitches": domains * nvswitches(hw),
        "nics": cluster.num_nodes * hw.nic.count,
        "leaf_groups": net.num_groups if net.slots else 0,
        "pods": net.num_pods if net.slots else 0,
        "switches": {
            "leaf": net.num_leaves,
            "spine": net.num_pods * net.spines,
            "core": net.spines if net.has_core else 0,
        },
        "links": {
            "scale_up": cluster.offsets[1],
            "pcie": cluster.offsets[3] - cluster.offsets[1],
            "nic": cluster.offsets[5] - cluster.offsets[3],
            "leaf_spine": cluster.offsets[7] - cluster.offsets[5],
            "spine_core": cluster.offsets[9] - cluster.offsets[7],
        },
        "scale_up_bytes_per_s_per_gpu": hw.scale_up.bandwidth.value,
        "nic_bytes_per_s_per_gpu": net.slots * net.slot_bytes_per_s / hw.gpus_per_node,
        "leaf_uplink_bytes_per_s": net.leaf_uplink_bytes_per_s * net.spines,
        "bisection_bytes_per_s": bisection_bytes_per_s(cluster),
        "oversubscription": sizes.oversubscription(tier),
        "widest_tier": tier,
        "switches_on_longest_route": max(1, switches[tier]) if tier in switches else 0,
    }
