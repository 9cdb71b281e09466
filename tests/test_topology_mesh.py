"""The mesh: groups against enumeration, placements by arithmetic against placements by listing every rank."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.plan import PlanSpec
from simpar.topology.levels import levels
from simpar.topology.mesh import Mesh
from simpar.topology.placement import GroupPlacement

H100 = load_hardware("dgx-h100")


def machine(
    gpus_per_node: int, domain: int, nodes_per_leaf: int, leaves_per_pod: int, over: float = 2.0, pod_over: float = 7.0
) -> HardwareProfile:
    """A DGX H100 with other sizes, so that small worlds cross every layer."""
    fabric = H100.fabric.model_copy(
        update={
            "nodes_per_leaf_group": nodes_per_leaf,
            "leaf_groups_per_pod": leaves_per_pod,
            "oversubscription": over,
            "pod_oversubscription": pod_over,
        }
    )
    node = H100.node.model_copy(update={"gpus_per_node": gpus_per_node})
    scale_up = H100.scale_up.model_copy(update={"domain_size": domain})
    return H100.model_copy(update={"fabric": fabric, "node": node, "scale_up": scale_up})


MACHINES = [
    machine(8, 8, 2, 2),
    machine(4, 72, 36, 2),
    machine(4, 16, 8, 2),
    machine(8, 2, 2, 3),
    machine(3, 3, 2, 2),
    machine(6, 12, 4, 2),
]


def brute_force(group: tuple[int, ...], groups: list[tuple[int, ...]], world: int, hw: HardwareProfile) -> GroupPlacement:
    """The placement read off the explicit ranks, straight from the definitions in `GroupPlacement`."""
    sizes = levels(hw)
    nodes = Counter(r // sizes.node for r in group)
    domains = Counter(r // sizes.domain for r in group)

    def inside(unit: int) -> bool:
        return len({r // unit for r in group}) == 1

    if len(group) == 1:
        tier, over = "device", 1.0
    elif inside(sizes.node):
        tier, over = "node", 1.0
    elif inside(sizes.domain):
        tier, over = "domain", 1.0
    elif inside(sizes.leaf):
        tier, over = "leaf", 1.0
    elif inside(sizes.pod):
        tier, over = "pod", hw.fabric.oversubscription
    else:
        tier, over = "core", hw.fabric.oversubscription * hw.fabric.pod_oversubscription
    owner = {r: i for i, members in enumerate(groups) for r in members}
    concurrent = max(len({owner.get(r, -1 - r) for r in range(n * sizes.node, min((n + 1) * sizes.node, world))}) for n in nodes)
    rails = {frozenset(r % sizes.node for r in group if r // sizes.node == n) for n in nodes}
    return GroupPlacement(
        size=len(group),
        ranks_per_domain=tuple(domains[d] for d in sorted(domains)),
        ranks_per_node=tuple(nodes[n] for n in sorted(nodes)),
        tier=tier,
        concurrent_groups=concurrent,
        oversubscription=over,
        stride=group[1] - group[0] if len(group) > 1 else 1,
        same_rail=len(rails) == 1,
    )


def enumerate_groups(mesh: Mesh, dims: set[str]) -> list[tuple[int, ...]]:
    """Groups of ranks that differ only in `dims`: all ranks as an array, one axis a dimension, slowest first."""
    order = [*mesh.order.split("-")]
    order += [n for n in ("tp", "cp", "ep", "dp", "pp") if n not in order]
    degrees = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp, "ep": 1}
    if dims & {"etp", "ep", "edp"}:
        if mesh.ep == 1 and mesh.expert_tp == mesh.tp:  # no experts to place: edp is dp and cp
            dims = {d for n in dims for d in {"etp": {"tp"}, "edp": {"dp", "cp"}, "ep": {"ep"}}.get(n, {n})}
        else:
            degrees = {"tp": mesh.expert_tp, "cp": 1, "dp": mesh.edp, "pp": mesh.pp, "ep": mesh.ep}
            dims = {{"etp": "tp", "edp": "dp"}.get(n, n) for n in dims}
    ranks = np.arange(mesh.world_size).reshape([degrees[n] for n in reversed(order)])
    inside = [axis for axis, n in enumerate(reversed(order)) if n in dims]
    outside = [axis for axis in range(ranks.ndim) if axis not in inside]
    groups = ranks.transpose(outside + inside).reshape(-1, math.prod(ranks.shape[a] for a in inside))
    return sorted(tuple(sorted(g)) for g in groups.tolist())


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Small meshes in any order that Megatron would accept, expert parallelism included."""
    degree = st.sampled_from([1, 1, 2, 2, 3, 4, 8])
    tp, cp, dp, pp = (draw(degree) for _ in range(4))
    inside = tp * cp * dp
    ep = draw(st.sampled_from([d for d in range(1, min(inside, 16) + 1) if inside % d == 0]))
    etp = draw(st.sampled_from([None, *[d for d in range(1, 5) if (inside // ep) % d == 0]]))
    order = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
    try:
        return Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order="-".join(order))
    except InputError:
        order.remove("pp")
        return (
            Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=None, order="-".join([*order, "pp"]))
            if inside % (ep * (tp if ep == 1 else 1)) == 0
            else Mesh(tp=tp, cp=cp, dp=dp, pp=pp)
        )


@settings(max_examples=300, deadline=None)
@given(
    mesh=meshes(),
    hw=st.sampled_from(MACHINES),
    dim=st.sampled_from(
        ["tp", "cp", "dp", "pp", "etp", "ep", "edp", "dp_cp", "tp_cp", "tp_pp", "tp_dp", "cp_pp", "etp_ep", "world"]
    ),
)
def test_structural_placement_equals_enumeration(mesh: Mesh, hw: HardwareProfile, dim: str) -> None:
    node = hw.gpus_per_node
    names = {"tp", "cp", "dp", "pp"} if dim == "world" else set(dim.split("_"))
    groups = enumerate_groups(mesh, names)
    assert [tuple(g) for g in mesh.groups(dim).tolist()] == groups
    whole_nodes = mesh.world_size % node == 0 or mesh.world_size <= node
    expected = Counter(brute_force(g, groups, mesh.world_size, hw) for g in groups)
    found = dict(mesh.placements(dim, hw, -(-mesh.world_size // node)))
    if whole_nodes:
        assert found == dict(expected)
    else:  # a half-filled last node is stood for by the full ones: only its NIC sharing may differ

        def strip(kinds: dict[GroupPlacement, int]) -> Counter[object]:
            result: Counter[object] = Counter()
            for p, n in kinds.items():
                result[(p.ranks_per_node, p.ranks_per_domain, p.tier, p.stride, p.same_rail)] += n
            return result

        assert strip(found) == strip(dict(expected))


@settings(max_examples=120, deadline=None)
@given(mesh=meshes(), hw=st.sampled_from(MACHINES), dim=st.sampled_from(["tp", "cp", "dp", "pp", "dp_cp", "tp_pp", "edp"]))
def test_hops_equal_enumeration(mesh: Mesh, hw: HardwareProfile, dim: str) -> None:
    nodes = -(-mesh.world_size // hw.gpus_per_node)
    expected: Counter[tuple[object, ...]] = Counter()
    for group in mesh.groups(dim).tolist():
        pairs = list(pairwise(group)) + ([(group[0], group[-1])] if len(group) > 2 else [])
        for pair in pairs:
            p = brute_force(tuple(pair), [tuple(pair)], mesh.world_size, hw)
            expected[(p.ranks_per_node, p.ranks_per_domain, p.tier, p.stride, p.same_rail, p.oversubscription)] += 1
    found: Counter[tuple[object, ...]] = Counter()
    for p, n in mesh.hops(dim, hw, nodes):
        found[(p.ranks_per_node, p.ranks_per_domain, p.tier, p.stride, p.same_rail, p.oversubscription)] += n
    assert found == expected


@settings(max_examples=120, deadline=None)
@given(mesh=meshes(), hw=st.sampled_from(MACHINES), dim=st.sampled_from(["tp", "cp", "dp", "pp", "dp_cp"]))
def test_every_pair_is_the_slowest_of_its_kind(mesh: Mesh, hw: HardwareProfile, dim: str) -> None:
    nodes = -(-mesh.world_size // hw.gpus_per_node)
    groups = mesh.groups(dim).tolist()
    found = mesh.pairs(dim, hw, nodes)
    if len(groups[0]) == 1:
        assert found == ()
        return
    assert len(found) == len(groups[0])
    tiers = ("device", "node", "domain", "leaf", "pod", "core")
    slowest = []
    for position in range(len(found)):
        pairs = [(g[position], g[position + 1]) if position + 1 < len(g) else (g[0], g[-1]) for g in groups]
        placed = [brute_force(pair, [pair], mesh.world_size, hw) for pair in pairs]
        slowest.append((max(tiers.index(p.tier) for p in placed), max(p.num_nodes for p in placed)))
    between = [tier for tier, node_count in slowest if node_count > 1]
    for placement, (tier, node_count) in zip(found, slowest, strict=True):
        if between and node_count == 1:
            assert placement.num_nodes == 2
            assert tiers.index(placement.tier) <= max(between)
        else:
            assert (tiers.index(placement.tier), placement.num_nodes) == (tier, node_count)
    kinds = {kind for kind, _ in mesh.hops(dim, hw, nodes)}
    assert set(found) <= kinds


@settings(max_examples=100, deadline=None)
@given(mesh=meshes())
def test_coordinates_and_groups_are_consistent(mesh: Mesh) -> None:
    seen = set()
    for rank in range(mesh.world_size):
        c = mesh.coordinates(rank)
        assert mesh.rank(tp=c["tp"], cp=c["cp"], dp=c["dp"], pp=c["pp"]) == rank
        seen.add((c["etp"], c["ep"], c["edp"], c["pp"]))
        for dim in ("tp", "dp_cp", "pp", "ep", "edp"):
            group = mesh.group_of(rank, dim)
            assert group[mesh.index_in_group(rank, dim)] == rank
    assert len(seen) == mesh.world_size
    assert mesh.edp * mesh.expert_tp * mesh.ep * mesh.pp == mesh.world_size
    for dim in ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "dp_cp"):
        assert sorted(mesh.groups(dim).ravel().tolist()) == list(range(mesh.world_size))
    assert mesh.size("dp_cp") == mesh.dp * mesh.cp
    assert mesh.size("edp") == mesh.edp


def test_megatron_example_of_sixteen_gpus() -> None:
    """The worked example in the docstring of Megatron-LM's initialize_model_parallel: tp 2, pp 4, 16 GPUs."""
    mesh = Mesh(tp=2, pp=4, dp=2)
    assert mesh.groups("tp").tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    assert mesh.groups("dp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert mesh.groups("pp").tolist() == [[i, i + 4, i + 8, i + 12] for i in range(4)]


def test_parallel_folding_moves_experts_across_tp_and_cp() -> None:
    """ep 8 with etp 1 under tp 4 x cp 2: the eight ranks of a node are one expert group."""
    mesh = Mesh(tp=4, cp=2, dp=4, ep=8, etp=1)
    assert mesh.groups("ep")[0].tolist() == list(range(8))
    assert mesh.edp == 4
    assert mesh.groups("edp")[0].tolist() == [0, 8, 16, 24]


@pytest.mark.parametrize("shard", [1, 2, 4, 8, 16])
def test_hsdp_splits_dp_cp(shard: int) -> None:
    mesh = Mesh(tp=2, cp=2, dp=8, order="tp-cp-dp-pp")
    inner, outer = mesh.groups("shard", shard), mesh.groups("replica", shard)
    assert inner.shape[1] == shard
    assert outer.shape[1] == 16 // shard
    for group in inner.tolist():
        whole = mesh.group_of(group[0], "dp_cp")
        assert set(group) <= set(whole)
        assert [whole.index(r) for r in group] == list(range(whole.index(group[0]), whole.index(group[0]) + shard))
    assert {(r, s) for s in range(shard) for r in inner[:, s].tolist()} == {
        (r, mesh.index_in_group(r, "shard", shard)) for r in range(mesh.world_size)
    }


def test_hsdp_over_axes_that_do_not_touch() -> None:
    """cp inside tp inside dp: a shard group takes all of cp first, then part of dp."""
    mesh = Mesh(tp=4, cp=2, dp=8, order="cp-tp-dp-pp")
    assert mesh.group_of(0, "shard", 4) == (0, 1, 8, 9)
    assert mesh.group_of(0, "replica", 4) == (0, 16, 32, 48)
    with pytest.raises(InputError, match="shard_size"):
        mesh.axes("shard", 3)


def test_expert_hsdp_keeps_the_number_of_replicas() -> None:
    mesh = Mesh(tp=1, cp=1, dp=64, ep=8)
    assert (mesh.size("expert_shard", 32), mesh.size("expert_replica", 32)) == (4, 2)
    with pytest.raises(InputError, match="shard_size"):
        mesh.axes("expert_shard", 4)


def test_placement_of_the_405b_layout() -> None:
    """tp 8 in the node, cp 2 and dp on the rails, pp in strides of whole racks."""
    mesh = Mesh(tp=8, cp=2, pp=16, dp=64)
    llama = load_hardware("grand-teton-h100-roce")
    tp = mesh.placement("tp", llama, 2048)
    assert (tp.ranks_per_node, tp.tier, tp.concurrent_groups) == ((8,), "node", 1)
    cp = mesh.placement("cp", llama, 2048)
    assert (cp.ranks_per_node, cp.tier, cp.concurrent_groups, cp.same_rail) == ((1, 1), "leaf", 8, True)
    dp = mesh.placement("dp_cp", llama, 2048)
    assert (dp.size, dp.num_nodes, dp.tier, dp.oversubscription) == (128, 128, "pod", 1.0)
    pp = mesh.placement("pp", llama, 2048)
    assert (pp.tier, pp.oversubscription) == ("core", 7.0)
    # Stages are 1,024 GPUs apart and a pod holds 3,072: of 15 neighbours 5 change pods, as does the closing pair.
    tiers = Counter[str]()
    for hop, amount in mesh.hops("pp", llama, 2048):
        tiers[hop.tier] += amount
    assert tiers == {"pod": 10 * 1024, "core": 6 * 1024}


def test_two_nodes_under_one_uneven_group() -> None:
    """12 neighbours on nodes of 8: every second group straddles the other way."""
    kinds = Mesh(tp=12, dp=2).placements("tp", H100, 3)
    assert {p.ranks_per_node for p, _ in kinds} == {(8, 4), (4, 8)}
    assert all(p.concurrent_groups == 2 and not p.same_rail for p, _ in kinds)


def test_rack_is_the_domain() -> None:
    rack = load_hardware("gb200-nvl72")
    ep = Mesh(ep=64, dp=576).placement("ep", rack, 144)
    assert ep.tier in ("leaf", "domain")
    assert Mesh(ep=72, dp=576).placement("ep", rack, 144).ranks_per_domain == (72,)
    assert Mesh(tp=64).placement("tp", rack, 16).tier == "domain"
    assert Mesh(tp=144).placement("tp", rack, 36).ranks_per_domain == (72, 72)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tp": 0}, "plan.tp"),
        ({"tp": 2, "order": "cp-dp-pp"}, "leaves out tp"),
        ({"order": "tp-xp-dp"}, "'xp' is no dimension"),
        ({"order": "tp-tp-dp"}, "named twice"),
        ({"tp": 2, "dp": 2, "ep": 8}, "must divide"),
        ({"tp": 2, "cp": 2, "dp": 4, "pp": 2, "ep": 2, "etp": 1, "order": "tp-cp-ep-pp-dp"}, "pipeline ranks"),
    ],
)
def test_bad_meshes_say_what_is_wrong(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Mesh(**arguments)  # type: ignore[arg-type]


def test_too_few_nodes_and_no_network() -> None:
    with pytest.raises(InputError, match="at least 3 nodes"):
        Mesh(dp=24).placement("dp", H100, 2)
    with pytest.raises(InputError, match="no network"):
        Mesh(dp=4).placement("dp", load_hardware("gtx-580-pair"), 2)
    with pytest.raises(InputError, match="unknown parallel dimension"):
        Mesh(dp=4).axes("xp")


def test_mesh_of_a_plan() -> None:
    assert Mesh.of(PlanSpec(tp=8, pp=4), 256).dp == 8
    with pytest.raises(InputError, match="world size"):
        Mesh.of(PlanSpec(tp=8, pp=3), 256)


def test_placement_is_cheap_at_200k() -> None:
    """A search asks thousands of times: fresh layouts cost milliseconds, repeated ones microseconds."""
    layouts = [
        Mesh(tp=tp, cp=cp, pp=pp, dp=200_704 // (tp * cp * pp), order="-".join([*o, "pp"]))
        for (tp, cp, pp), o in product(
            product((1, 2, 4, 8), (1, 2, 4), (1, 4, 7, 14, 16)), permutations(["tp", "cp", "ep", "dp"], 4)
        )
        if o[0] == "tp"
    ]
    start = time.perf_counter()
    for mesh in layouts:
        for dim in ("tp", "cp", "dp_cp", "pp"):
            mesh.placement(dim, H100, 25_088)
    per_call = (time.perf_counter() - start) / (4 * len(layouts))
    assert per_call < 5e-3


def test_a_rack_cut_in_pieces_takes_experts_over_the_network() -> None:
    """64 GPUs of a rack exchange over NVLink; those of nodes whose links between them are off send through their adapters."""
    from simpar.api.scenarios import make_scenario
    from simpar.costs.pricer import LayoutPricer
    from simpar.errors import InputError
    from simpar.parallel.layout import Layout
    from simpar.step import cost_models

    def exchange_s(**cluster: int) -> float:
        chosen = make_scenario({
            "model": "mixtral-8x7b", "framework": "megatron-core",
            "cluster": {"hardware": "gb200-nvl72", "num_nodes": 16, **cluster}, "plan": {"ep": 8},
            "training": {"sequence_length": 2048, "global_batch_size": 64},
        })  # fmt: skip
        layout = Layout.of(chosen, 1)
        block = LayoutPricer(layout, *cost_models(chosen, layout.hardware)).block(layout.stage_blocks[0][1], "F")
        return dict(block.communication_s)["ep"]

    whole, halves, nodes = exchange_s(), exchange_s(domain_size=32), exchange_s(domain_size=4)
    assert halves == whole
    assert nodes > 2.0 * whole
    for wrong in (6, 144):
        with pytest.raises(InputError, match=r"cluster\.domain_size"):
            exchange_s(domain_size=wrong)
