"""The network of a real machine under contention: rails, uplinks, dead rails, shared NICs, placement, folding."""

from __future__ import annotations

import pytest
from engine_programs import table, transfer_program

from simpar.engine.cluster_network import ClusterNetwork, flows
from simpar.engine.contention import Contention
from simpar.engine.discrete_event import Effects, run
from simpar.errors import InputError, InternalError
from simpar.program.program import Transfer
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.topology.cluster import Cluster

NIC = 50e9
SIZE = 1e9


def profile(**fabric) -> HardwareProfile:
    """A DGX H100 with small leaf groups: 2 nodes to a leaf, 2 leaf groups to a pod, so that 8 nodes show every tier."""
    base = load_hardware("dgx-h100")
    nic_count = fabric.pop("nic_count", base.nic.count)
    changed = base.fabric.model_copy(update={"nodes_per_leaf_group": 2, "leaf_groups_per_pod": 2, **fabric})
    return base.model_copy(update={"fabric": changed, "nic": base.nic.model_copy(update={"count": nic_count})})


def per_rail_rings(nodes: int, ranks_per_node: int = 8) -> tuple[tuple[int, ...], ...]:
    """One data-parallel group for each local index, over all nodes."""
    return tuple(tuple(range(i, nodes * ranks_per_node, ranks_per_node)) for i in range(ranks_per_node))


def ring_seconds(nodes: int, collective: str = "all_reduce") -> float:
    """A ring at the full rate of one NIC per rank."""
    return (2 if collective == "all_reduce" else 1) * (nodes - 1) / nodes * SIZE / NIC


def finishes(cluster: Cluster, transfers, seconds):
    program = transfer_program([(i, t, ()) for i, t in enumerate(transfers)])
    contention = Contention(ClusterNetwork(cluster))
    return run(program, table([seconds] * len(transfers)), Effects(contention=contention)).finish


def rings(groups, collective="all_reduce"):
    return [Transfer(collective, SIZE, (group,)) for group in groups]


def test_rail_rings_do_not_meet_on_a_rail_optimised_fabric():
    seconds = ring_seconds(8)
    found = finishes(Cluster(profile(), 8), rings(per_rail_rings(8)), seconds)
    assert found.tolist() == [seconds] * 8


@pytest.mark.parametrize("k", [2.0, 7.0])
def test_oversubscription_between_pods_slows_by_the_ratio(k):
    """Every GPU of one pod sends to its twin in the other; the core carries 1 / k of what the NICs send."""
    flat, tight = Cluster(profile(), 8), Cluster(profile(pod_oversubscription=k), 8)
    seconds = ring_seconds(8)
    across = per_rail_rings(8)
    assert finishes(flat, rings(across), seconds).tolist() == [seconds] * 8
    crossing = [Transfer("send_recv", SIZE, ((g, g + 32),)) for g in range(32)]
    alone = SIZE / NIC
    spread = finishes(flat, crossing, alone)
    slowed = finishes(tight, crossing, alone)
    assert spread == pytest.approx([alone] * 32, rel=1e-9)
    assert slowed == pytest.approx([k * alone] * 32, rel=1e-9)


def test_one_nic_for_two_gpus_halves_the_rate():
    found = finishes(Cluster(profile(nic_count=4), 8), rings(per_rail_rings(8)), ring_seconds(8))
    assert found == pytest.approx([2 * ring_seconds(8)] * 8, rel=1e-9)


def test_a_dead_rail_slows_the_rail_that_takes_over():
    cluster = Cluster(profile(), 8, dead_slots=frozenset({3}))
    seconds = ring_seconds(8)
    found = finishes(cluster, rings(per_rail_rings(8)), seconds)
    assert found == pytest.approx([2 * seconds if i in (3, 4) else seconds for i in range(8)], rel=1e-9)


def test_bad_placement_costs_bandwidth():
    """Pipeline neighbours beside each other, against the same job dealt out so that all send across the pods."""
    tight = Cluster(profile(pod_oversubscription=4.0), 8)
    near, far = ([Transfer("send_recv", SIZE, (pair,)) for pair in pairs] for pairs in (
        [(2 * i, 2 * i + 1) for i in range(32)], [(i, i + 32) for i in range(32)],
    ))  # fmt: skip
    alone = SIZE / NIC
    assert finishes(tight, near, alone).tolist() == [alone] * 32
    assert finishes(tight, far, alone) == pytest.approx([4 * alone] * 32, rel=1e-9)


def test_dimensions_share_a_nic():
    """A reduce-scatter and a pipeline send of the same GPU, both at the rate of its NIC: each gets half."""
    cluster = Cluster(profile(), 4)
    both = [
        Transfer("reduce_scatter", SIZE, ((0, 8, 16, 24),)),
        Transfer("send_recv", 0.75 * SIZE, ((0, 8),)),
    ]
    found = finishes(cluster, both, 0.75 * SIZE / NIC)
    assert found == pytest.approx([1.5 * SIZE / NIC] * 2, rel=1e-9)


def test_all_to_all_is_bound_by_the_nics():
    """EP over 2 nodes of 8: each NIC carries 8/16 of a rank's buffer; two such groups on the same GPUs take twice."""
    cluster = Cluster(profile(), 2)
    group = tuple(range(16))
    alone = SIZE * 8 / 16 / NIC
    one = Transfer("all_to_all", SIZE, (group,))
    assert finishes(cluster, [one], alone).tolist() == [alone]
    assert finishes(cluster, [one, one], alone) == pytest.approx([2 * alone] * 2, rel=1e-9)


@pytest.mark.parametrize("over", [1.0, 3.0])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_folded_equals_expanded(collective, over):
    """One op that stands for 8 symmetric groups takes as long as 8 ops with a group each."""
    cluster = Cluster(profile(oversubscription=over, pod_oversubscription=over), 8)
    groups = per_rail_rings(8)
    seconds = ring_seconds(8, collective)
    folded = finishes(cluster, [Transfer(collective, SIZE, groups)], seconds)[0]
    expanded = finishes(cluster, rings(groups, collective), seconds)
    assert expanded == pytest.approx([folded] * 8, rel=1e-9)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"])
def test_flows_move_what_the_collective_must(collective):
    """Bytes out of each GPU equal bytes into it, and leave each domain as the ring's traffic says."""
    gpus = [0, 1, 8, 9, 16, 17]
    out, into, leaving = {}, {}, {}
    for src, dst, size in flows(collective, gpus, 8):
        out[src] = out.get(src, 0) + size
        into[dst] = into.get(dst, 0) + size
        if src // 8 != dst // 8:
            leaving[src // 8] = leaving.get(src // 8, 0) + size
    expected = {
        "all_reduce": 10 / 6,
        "all_gather": 5 / 6,
        "reduce_scatter": 5 / 6,
        "all_to_all": 2 * 4 / 6,
        "send_recv": 1,
    }
    assert out == pytest.approx(into)
    assert leaving == pytest.approx(dict.fromkeys(range(3), expected[collective]))


def test_rooted_collectives_load_the_root():
    assert sum(size for _, dst, size in flows("gather", [0, 1, 2, 3], 8) if dst == 0) == 0.75
    assert sum(size for src, _, size in flows("scatter", [0, 1, 2, 3], 8) if src == 0) == 0.75
    assert list(flows("all_reduce", [5], 8)) == []
    with pytest.raises(InternalError):
        list(flows("gossip", [0, 1], 8))


def test_a_rank_without_a_gpu_is_refused():
    with pytest.raises(InputError):
        finishes(Cluster(profile(), 1), [Transfer("send_recv", 1.0, ((0, 99),))], 1.0)
