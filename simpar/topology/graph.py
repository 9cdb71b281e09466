"""The cluster as a networkx graph, for drawing, for checking routes, and for whoever wants a graph.

Prices and the contention engine use `Cluster` (cluster.py), whose ids and routes are arithmetic; no path is
ever searched here. Vertices are named "kind:index": gpu, nvswitch, pcie, domain (shared memory), nic, leaf,
spine, core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, Literal

import networkx as nx

from simpar.specs.hardware import HardwareProfile
from simpar.topology.cluster import Cluster

Detail = Literal["auto", "gpu", "node"]
GPU_DETAIL_LIMIT = 4096
"""GPUs up to which "auto" draws every one of them."""

Edge = tuple[str, str, dict[str, Any]]


def build_graph(
    hardware: HardwareProfile | Cluster,
    num_nodes: int | None = None,
    detail: Detail = "auto",
    expand: Collection[int] = (),
) -> nx.Graph[str]:
    """The graph of `num_nodes` nodes of `hardware` (or of a `Cluster`).

    Args:
        hardware: a profile, or a cluster already made.
        num_nodes: hosts; needed with a profile.
        detail: "gpu" has a vertex for every GPU, switch and NIC. "node" has one vertex for each node, for
            each leaf group's leaves, for each pod's spines and for the core, whose `count` says how many it
            stands for, and so builds 200,000 GPUs in about a second. "auto" takes the former up to 4,096
            GPUs.
        expand: with "node", nodes to show GPU by GPU.

    Returns:
        An undirected graph. Vertices carry `kind` and `count`; edges carry `bandwidth_bytes_per_s` (one
        direction, all the links they stand for), `latency_s`, `count`, and at GPU detail `links`, the ids in
        `Cluster.links` of the two directions, in the order of the edge's `ends`.

    Raises:
        InputError: a machine without a network on several nodes.
    """
    cluster = hardware if isinstance(hardware, Cluster) else Cluster(hardware, num_nodes or 1)
    if detail == "auto":
        detail = "gpu" if cluster.num_gpus <= GPU_DETAIL_LIMIT else "node"
    graph: nx.Graph[str] = nx.Graph(name=cluster.hardware.name, detail=detail)
    if detail == "gpu":
        graph.add_edges_from(_gpu_edges(cluster, range(cluster.num_links)))
        graph.add_nodes_from(f"gpu:{gpu}" for gpu in range(cluster.num_gpus))
    else:
        graph.add_edges_from(_bundle_edges(cluster, frozenset(expand)))
        graph.add_nodes_from(f"node:{n}" for n in range(cluster.num_nodes) if n not in expand)
        for node in expand:
            graph.add_edges_from(_expanded_edges(cluster, node))
    _label(graph, cluster)
    return graph


def _gpu_edges(cluster: Cluster, links: Collection[int]) -> Iterator[Edge]:
    """One edge for each pair of opposite links among `links`; NIC links become two edges, to the NIC and from
    it.
    """
    table, forward = cluster.links, dict[tuple[str, str], int]()
    for link in links:
        path = cluster.path_of(link)
        for a, b in pairwise(path):
            if a == b:
                continue
            back = forward.pop((b, a), None)
            if back is None:
                forward[a, b] = link
                continue
            yield (
                a,
                b,
                {
                    "bandwidth_bytes_per_s": float(table.capacity_bytes_per_s[link]),
                    "latency_s": float(table.latency_s[link]) / (len(path) - 1),
                    "count": 1,
                    "ends": (b, a),
                    "links": (back, link),
                },
            )


def _bundle(bandwidth: float, latency: float, count: int) -> dict[str, Any]:
    return {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency, "count": count}


def _bundle_edges(cluster: Cluster, skip: frozenset[int]) -> Iterator[Edge]:
    """Node to domain (where it spans nodes) and leaf group, leaf group to spines, spines to core."""
    net, hw = cluster.net, cluster.hardware
    per_node = hw.gpus_per_node
    if hw.domain_size > per_node:
        up = _bundle(per_node * hw.scale_up.bandwidth.value, hw.scale_up.latency.value / 2, per_node)
        for node in range(cluster.num_nodes):
            if node not in skip:
                yield f"node:{node}", f"nvswitch:{node * per_node // hw.domain_size}", up
    if not net.slots:
        return
    nics = _bundle(net.slots * net.slot_bytes_per_s, hw.nic.latency.value / 2, net.slots)
    for node in range(cluster.num_nodes):
        if node not in skip:
            yield f"node:{node}", f"leaves:{node // net.nodes_per_group}", nics
    if net.spines:
        yield from _upper_edges(cluster)


def _upper_edges(cluster: Cluster) -> Iterator[Edge]:
    net, latency = cluster.net, cluster.hardware.fabric.switch_latency.value
    cables = net.leaves_per_group * net.spines
    for group in range(net.num_groups):
        pod = group // net.groups_per_pod
        yield f"leaves:{group}", f"spines:{pod}", _bundle(cables * net.leaf_uplink_bytes_per_s, latency, cables)
    if net.has_core:
        for pod in range(net.num_pods):
            up = _bundle(net.spines * net.spine_uplink_bytes_per_s, latency, net.spines)
            yield f"spines:{pod}", "core:0", up


def _expanded_edges(cluster: Cluster, node: int) -> Iterator[Edge]:
    """The GPU-level edges of one node, its NICs joined to the leaf group's bundle."""
    per_node, slots, offsets = cluster.hardware.gpus_per_node, cluster.net.slots, cluster.offsets
    gpus, nics = range(node * per_node, (node + 1) * per_node), range(node * slots, (node + 1) * slots)
    links = [offsets[k] + g for k in (1, 2) for g in gpus if offsets[3] > offsets[1]]
    links += [offsets[k] + i for k in (3, 4) for i in nics]
    links += cluster.domains.links_of(gpus)
    for a, b, data in _gpu_edges(cluster, links):
        bundled = [f"leaves:{node // cluster.net.nodes_per_group}" if v.startswith("leaf:") else v for v in (a, b)]
        yield bundled[0], bundled[1], data


def _label(graph: nx.Graph[str], cluster: Cluster) -> None:
    """`kind` and `count` of every vertex."""
    net, hw = cluster.net, cluster.hardware
    counts = {"node": hw.gpus_per_node, "leaves": net.leaves_per_group, "spines": net.spines, "core": net.spines}
    counts["nvswitch"] = nvswitches(hw)
    bundled = graph.graph["detail"] == "node"
    for vertex, data in graph.nodes.items():
        kind = str(vertex).partition(":")[0]
        data["kind"] = kind
        data["count"] = counts.get(kind, 1) if bundled or kind == "nvswitch" else 1


def nvswitches(hardware: HardwareProfile) -> int:
    """NVSwitch chips of one scale-up domain: 6 in a DGX A100, 4 H100, 2 B200, 18 in an NVL72 rack; 0
    without.
    """
    if hardware.scale_up.kind != "nvswitch":
        return 0
    if hardware.domain_size >= 36:
        return 18
    return {"volta": 6, "ampere": 6, "hopper": 4, "blackwell": 2}.get(hardware.gpu.architecture, 1)
