"""The cluster's links and routes: against networkx, against closed forms, and at 200,000 GPUs."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.specs.hardware import HardwareProfile, load_hardware, profile_names
from simpar.topology.clos import fabric_shape
from simpar.topology.cluster import Cluster
from simpar.topology.describe import bisection_bytes_per_s, clusters_of, summary
from simpar.topology.graph import build_graph
from simpar.topology.levels import levels
from simpar.topology.scaleup import slice_shape

GB = 1e9


def with_fabric(name: str, **changes: Any) -> HardwareProfile:
    """A shipped profile with another fabric."""
    hw = load_hardware(name)
    return hw.model_copy(update={"fabric": hw.fabric.model_copy(update=changes)})


SMALL = {
    "nodes_per_leaf_group": 2,
    "leaf_groups_per_pod": 2,
    "oversubscription": 2.0,
    "pod_oversubscription": 7.0,
}
SMALL_FABRICS = {
    "rails": with_fabric("dgx-h100", **SMALL),
    "rails, PXN over xGMI": with_fabric("mi300x", **SMALL),
    "rails, a NIC for two GPUs": with_fabric("a100-80gb-4nic", **{**SMALL, "kind": "rail-optimized"}),
    "rails, no PXN": with_fabric("a100-pcie", **{**SMALL, "kind": "rail-optimized"}),
    "plain tree": with_fabric("aws-p5-h100", **SMALL),
    "PCIe box": with_fabric("l40s", **SMALL),
    "RoCE pod": with_fabric("grand-teton-h100-roce", **SMALL),
    "bridged": with_fabric("h200-nvl", **SMALL),
    "one GPU a node": with_fabric("gh200", **SMALL),
    "Ethernet": load_hardware("rtx-4090"),
    "racks": with_fabric("gb200-nvl72", nodes_per_leaf_group=18, leaf_groups_per_pod=1),
}


def walk(cluster: Cluster, src: int, dst: int) -> list[str]:
    """The vertices of a route, checking that each link starts where the last one ended."""
    vertices = [f"gpu:{src}"]
    for link in cluster.route(src, dst):
        path = cluster.path_of(link)
        assert path[0] == vertices[-1]
        vertices.extend(path[1:])
        assert cluster.links.capacity_bytes_per_s[link] > 0
    assert vertices[-1] == f"gpu:{dst}"
    return vertices


@pytest.mark.parametrize("name", SMALL_FABRICS)
def test_every_route_is_a_path_of_the_graph(name: str) -> None:
    cluster = Cluster(SMALL_FABRICS[name], 9)
    graph = build_graph(cluster, detail="gpu")
    gpus = range(cluster.num_gpus)
    for src in gpus[::3]:
        for dst in gpus:
            vertices = walk(cluster, src, dst)
            assert nx.is_path(graph, vertices)
            assert len(set(vertices)) == len(vertices), "a route meets no vertex twice"


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_builds_and_routes(name: str) -> None:
    hw = load_hardware(name)
    nodes = 1 if hw.fabric.kind == "none" else 3
    cluster = Cluster(hw, nodes)
    graph = build_graph(cluster)
    assert nx.is_connected(graph)
    assert sum(d["kind"] == "gpu" for d in graph.nodes.values()) == cluster.num_gpus
    for dst in range(cluster.num_gpus):
        assert nx.is_path(graph, walk(cluster, 0, dst)) or dst == 0
    assert cluster.num_links == len(cluster.links.capacity_bytes_per_s)
    assert cluster.name_of(0).startswith("gpu:0>")


def switches(vertices: list[str]) -> Counter[str]:
    return Counter(v.partition(":")[0] for v in vertices if v.partition(":")[0] in ("leaf", "spine", "core", "nvswitch"))


def test_hops_of_a_superpod() -> None:
    """One switch on the same rail, NVLink first to another rail, three across units, five across pods."""
    cluster = Cluster(load_hardware("dgx-h100"), 300)
    node = 8

    def hops(src: int, dst: int) -> Counter[str]:
        return switches(walk(cluster, src, dst))

    assert hops(0, 5) == {"nvswitch": 1}
    assert hops(0, 31 * node) == {"leaf": 1}
    assert hops(0, 31 * node + 3) == {"nvswitch": 1, "leaf": 1}
    assert hops(0, 32 * node) == {"leaf": 2, "spine": 1}
    assert hops(0, 127 * node + 7) == {"nvswitch": 1, "leaf": 2, "spine": 1}
    assert hops(0, 128 * node) == {"leaf": 2, "spine": 2, "core": 1}


def test_hops_of_llama_and_of_racks() -> None:
    llama = Cluster(load_hardware("grand-teton-h100-roce"), 1000)
    assert switches(walk(llama, 0, 15)) == {"leaf": 1}
    assert switches(walk(llama, 0, 16)) == {"leaf": 2, "spine": 1}
    assert switches(walk(llama, 0, 3072)) == {"leaf": 2, "spine": 2, "core": 1}
    racks = Cluster(load_hardware("gb200-nvl72"), 36)
    assert switches(walk(racks, 0, 71)) == {"nvswitch": 1}
    assert switches(walk(racks, 0, 72)) == {"leaf": 1}


def test_latency_of_a_route_is_the_measured_one() -> None:
    """1.85 us over one switch, 3.15 us over three, as ib_write_lat reports."""
    cluster = Cluster(load_hardware("dgx-h100"), 64)

    def latency(src: int, dst: int) -> float:
        return float(cluster.links.latency_s[list(cluster.route(src, dst))].sum())

    assert latency(0, 8) == pytest.approx(1.85e-6)
    assert latency(0, 32 * 8) == pytest.approx(3.15e-6)
    assert latency(0, 1) == pytest.approx(0.65e-6)


@pytest.mark.parametrize(("units", "leaves", "spines"), [(1, 8, 4), (2, 16, 8), (3, 24, 12), (4, 32, 16)])
def test_superpod_switch_counts(units: int, leaves: int, spines: int) -> None:
    """Switches of DGX H100 SuperPODs of 1 to 4 scalable units."""
    found = summary(load_hardware("dgx-h100"), 32 * units)["switches"]
    assert found == {"leaf": leaves, "spine": spines, "core": 0}


def test_llama_cluster() -> None:
    """24,576 GPUs: 8 pods of 192 racks, 1:7 above them (arXiv 2407.21783)."""
    found = summary(load_hardware("grand-teton-h100-roce"), 3072)
    assert (found["num_gpus"], found["pods"], found["switches"]["leaf"]) == (24_576, 8, 8 * 192)
    assert found["bisection_bytes_per_s"] == pytest.approx(24_576 / 2 * 50 * GB / 7)
    one_pod = summary(load_hardware("grand-teton-h100-roce"), 384)
    assert one_pod["bisection_bytes_per_s"] == pytest.approx(3072 / 2 * 50 * GB)


def max_flow(cluster: Cluster) -> float:
    """Bytes per second that networkx pushes from the first half of the GPUs to the second."""
    flow = nx.DiGraph()
    for link in range(cluster.num_links):
        path = cluster.path_of(link)
        if path[0] != path[-1]:
            capacity = float(cluster.links.capacity_bytes_per_s[link])
            for a, b in pairwise(path):
                flow.add_edge(a, b, capacity=capacity)
    half = cluster.num_gpus // 2
    for gpu in range(cluster.num_gpus):
        if gpu < half:
            flow.add_edge("source", f"gpu:{gpu}")
        else:
            flow.add_edge(f"gpu:{gpu}", "sink")
    return float(nx.maximum_flow_value(flow, "source", "sink"))


@pytest.mark.parametrize(
    ("name", "nodes"),
    [(n, k) for n in SMALL_FABRICS if n not in ("Ethernet", "racks") for k in (2, 4, 8)] + [("Ethernet", 4), ("racks", 36)],
)
def test_bisection_equals_max_flow(name: str, nodes: int) -> None:
    """2 nodes stay under a leaf, 4 cross the spines (2:1), 8 the core (14:1)."""
    cluster = Cluster(SMALL_FABRICS[name], nodes)
    assert max_flow(cluster) == pytest.approx(bisection_bytes_per_s(cluster), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dgx-h100", 4 * 450 * GB),
        ("mi300x", 16 * 64 * GB),
        ("hgx-h800", 4 * 200 * GB),
        ("gtx-580-pair", 8 * GB),
    ],
)
def test_bisection_inside_a_node(name: str, expected: float) -> None:
    cluster = Cluster(load_hardware(name), 1)
    assert bisection_bytes_per_s(cluster) == pytest.approx(expected)
    within = {f"gpu:{g}" for g in range(cluster.num_gpus // 2)}
    crossing = 0.0
    for link in range(cluster.offsets[1]):
        a, b = cluster.domains.ends(link)
        crossing += float(cluster.links.capacity_bytes_per_s[link]) * (a in within and b not in within)
    assert crossing == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "shape"), [(16, (4, 4, 4)), (4, (2, 2, 4)), (1024, (16, 16, 16))])
def test_torus_bisection_and_distance(nodes: int, shape: tuple[int, ...]) -> None:
    """A ring is cut twice, an open row once; a route is as long as the Manhattan distance the short way round."""
    hw = load_hardware("tpu-v4")
    cluster = Cluster(hw, nodes)
    assert slice_shape(cluster.num_gpus, hw.scale_up.torus) == shape
    area = cluster.num_gpus / max(shape)
    assert bisection_bytes_per_s(cluster) == pytest.approx(2 * area * 45 * GB)
    if cluster.num_gpus <= 64:
        graph = build_graph(cluster, detail="gpu")
        ici = graph.subgraph([v for v in graph if v.startswith("gpu:")])
        for dst in range(cluster.num_gpus):
            assert len(cluster.route(0, dst)) == nx.shortest_path_length(ici, "gpu:0", f"gpu:{dst}")


@settings(max_examples=60, deadline=None)
@given(
    src=st.integers(0, 199_999),
    dst=st.integers(0, 199_999),
    name=st.sampled_from(["dgx-h100", "grand-teton-h100-roce", "gb200-nvl72", "aws-p5-h100", "tpu-v5p"]),
)
def test_routes_at_200k_follow_the_tiers(src: int, dst: int, name: str) -> None:
    """Structural routing and structural placement agree about which layers a pair crosses."""
    hw = load_hardware(name)
    cluster = cached_cluster(name)
    tier = levels(hw).tier(min(src, dst), max(src, dst))
    seen = switches(walk(cluster, src, dst))
    expected = {"device": 0, "node": 0, "domain": 0, "leaf": 1, "pod": 3, "core": 5}[tier]
    assert seen["leaf"] + seen["spine"] + seen["core"] == expected


_CLUSTERS: dict[str, Cluster] = {}


def cached_cluster(name: str) -> Cluster:
    if name not in _CLUSTERS:
        hw = load_hardware(name)
        _CLUSTERS[name] = Cluster(hw, -(-200_000 // hw.gpus_per_node))
    return _CLUSTERS[name]


@pytest.mark.parametrize("name", ["dgx-h100", "grand-teton-h100-roce", "gb200-nvl72"])
def test_200k_gpus_build_in_seconds(name: str) -> None:
    hw = load_hardware(name)
    start = time.perf_counter()
    cluster = Cluster(hw, -(-200_000 // hw.gpus_per_node))
    table = cluster.links
    graph = build_graph(cluster)
    assert time.perf_counter() - start < 10
    assert len(table.capacity_bytes_per_s) > 1_000_000
    assert sum(d["count"] for d in graph.nodes.values() if d["kind"] == "node") == cluster.num_gpus
    assert nx.is_connected(graph)


def test_bundled_graph_carries_the_same_capacity() -> None:
    """Leaf-to-spine and spine-to-core capacity is the same at both details, and an expanded node shows its GPUs."""
    cluster = Cluster(SMALL_FABRICS["rails"], 8)

    def capacity(detail: Any, *kinds: str) -> float:
        graph = build_graph(cluster, detail=detail)
        return sum(
            d["bandwidth_bytes_per_s"]
            for a, b, d in graph.edges(data=True)
            if {graph.nodes[a]["kind"], graph.nodes[b]["kind"]} == set(kinds)
        )

    assert capacity("gpu", "leaf", "spine") == pytest.approx(capacity("node", "leaves", "spines"))
    assert capacity("gpu", "spine", "core") == pytest.approx(capacity("node", "spines", "core"))
    assert capacity("gpu", "nic", "leaf") == pytest.approx(capacity("node", "node", "leaves"))
    graph = build_graph(cluster, detail="node", expand=(3,))
    assert sum(d["kind"] == "gpu" for d in graph.nodes.values()) == 8
    assert "node:3" not in graph
    assert nx.is_connected(graph)


@pytest.mark.parametrize("over", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("name", ["dgx-h100", "aws-p5-h100", "grand-teton-h100-roce"])
def test_oversubscription_is_downlink_over_uplink(name: str, over: float) -> None:
    hw = with_fabric(name, oversubscription=over)
    net = fabric_shape(hw, 1000)
    down = hw.fabric.nodes_per_leaf_group * hw.nic.count * hw.nic.bandwidth.value
    up = net.leaves_per_group * net.spines * net.leaf_uplink_bytes_per_s
    assert down / up == pytest.approx(over)


def test_shift_patterns_do_not_collide_on_spines() -> None:
    """Each node of one unit to the same node of the next, on every rail: no uplink carries more than it can."""
    cluster = Cluster(load_hardware("dgx-h100"), 128)
    load = Counter[int]()
    for gpu in range(32 * 8):
        load.update(cluster.route(gpu, gpu + 32 * 8))
    for link, flows in load.items():
        assert flows * 50 * GB <= cluster.links.capacity_bytes_per_s[link] * (1 + 1e-9)


def test_nic_shared_by_two_gpus() -> None:
    cluster = Cluster(load_hardware("a100-80gb-4nic"), 2)
    first, second = cluster.route(0, 8), cluster.route(1, 9)
    shared = set(first) & set(second)
    assert {cluster.name_of(i).split(">")[1].partition(":")[0] for i in shared} == {"nic"}
    assert not set(first) & set(cluster.route(2, 10))


def test_many_nics_of_a_gpu_are_one_slot() -> None:
    cluster = Cluster(load_hardware("aws-p5-h100"), 2)
    assert cluster.net.slots == 8
    assert cluster.net.slot_bytes_per_s == pytest.approx(50 * GB)


@pytest.mark.parametrize("name", ["rails", "plain tree", "rails, a NIC for two GPUs", "PCIe box"])
def test_a_dead_rail_moves_its_traffic(name: str) -> None:
    cluster = Cluster(SMALL_FABRICS[name], 8, dead_slots=frozenset({1}))
    graph = build_graph(cluster, detail="gpu")
    for src in range(cluster.hardware.gpus_per_node):
        for dst in range(8, cluster.num_gpus, 3):
            vertices = walk(cluster, src, dst)
            assert nx.is_path(graph, vertices)
            assert not any(v.startswith("nic:") and v.endswith(".1") for v in vertices)
    alive = Cluster(SMALL_FABRICS[name], 8)
    slots = alive.net.slots
    assert bisection_bytes_per_s(cluster) == pytest.approx(bisection_bytes_per_s(alive) * (slots - 1) / slots)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Cluster(load_hardware("gtx-580-pair"), 2), "no network"),
        (lambda: Cluster(load_hardware("dgx-h100"), 0), "at least 1"),
        (lambda: Cluster(load_hardware("dgx-h100"), 2, dead_slots=frozenset(range(8))), "no network is left"),
        (lambda: Cluster(load_hardware("dgx-h100"), 2, dead_slots=frozenset({9})), "slots 0 to 7"),
        (lambda: Cluster(load_hardware("dgx-h100"), 2).route(0, 16), "0 to 15"),
        (lambda: Cluster(load_hardware("dgx-h100"), 2).path_of(10**9), "link 1000000000"),
    ],
)
def test_bad_clusters_say_what_is_wrong(make: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()


def test_summary_is_plain_data() -> None:
    import json

    found = summary(load_hardware("dgx-h100"), 25_000)
    assert json.loads(json.dumps(found)) == found
    assert found["num_gpus"] == 200_000
    assert found["widest_tier"] == "core"
    assert found["switches_on_longest_route"] == 5


def test_clusters_of_a_profile_and_of_a_scenario(tmp_path: Path) -> None:
    assert clusters_of("dgx-h100", 4) == [(load_hardware("dgx-h100"), 4)]
    assert clusters_of("dgx-h100")[0][1] == 1
    shipped = Path(__file__).resolve().parents[1] / "hardware_profiles" / "gb200-nvl72.toml"
    assert clusters_of(shipped, 18)[0][0].domain_size == 72
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        '[model]\nkind = "mlp"\ndepth = 4\nwidth = 256\n'
        '[cluster]\nhardware = "dgx-h100"\nnum_nodes = 3\noversubscription = 2.0\n'
        '[training]\nglobal_batch_size = 24\nprecision = "bf16"\n'
    )
    ((hw, nodes),) = clusters_of(scenario)
    assert (nodes, hw.fabric.oversubscription) == (3, 2.0)
    with pytest.raises(InputError, match="at least 1"):
        clusters_of(shipped, 0)
