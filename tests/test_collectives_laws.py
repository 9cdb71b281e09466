"""The laws of collectives: closed forms, bounds, and what the topology must change."""

from __future__ import annotations

import time
from dataclasses import replace
from math import log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.collective_defaults import published_network, published_scale_up
from simpar.costs.collective_law import fastest, geometry, packed, seconds_of
from simpar.costs.collectives import COLLECTIVES, CollectiveModel
from simpar.costs.nccl import traffic
from simpar.costs.point_to_point import channels_of_a_pair
from simpar.errors import InputError
from simpar.specs.collective_constants import CollectiveConstants
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.scenario import read_scenario
from simpar.step import simulate
from simpar.topology.placement import GroupPlacement

MACHINES = ("dgx-h100", "dgx-a100-80gb", "gb200-nvl72", "mi300x", "l40s", "aws-p5-h100", "gh200", "h200-nvl", "tpu-v5p",
            "cpu-gloo")  # fmt: skip
MODELS = {name: CollectiveModel(load_hardware(name)) for name in MACHINES}


def bus_bandwidth(model: CollectiveModel, collective: str, size: float, placement: GroupPlacement) -> float:
    """nccl-tests' busbw, bytes/s."""
    return traffic(collective, placement.size) * size / model.time(collective, size, placement).seconds


SIZES = st.floats(1.0, 1e11)


def placement_of(hardware: HardwareProfile, nodes: int, per_node: int) -> GroupPlacement:
    """`per_node` ranks on each of `nodes` hosts, the other local ranks in sibling groups."""
    per_node = min(per_node, hardware.gpus_per_node)
    nodes = nodes if hardware.nic.count else 1
    return replace(packed(hardware, nodes * per_node, nodes), concurrent_groups=hardware.gpus_per_node // per_node)


def published(name: str, pipeline_s: float = 0.0) -> CollectiveModel:
    """A model with NCCL's own constants, whose numbers can be written down, and `peer_pipeline_s`."""
    network = published_network(2e-6).model_copy(update={"peer_pipeline_s": pipeline_s})
    constants = CollectiveConstants(scale_up=published_scale_up(False), network=network)
    return CollectiveModel(load_hardware(name).model_copy(update={"collectives": constants}))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", MACHINES)
def test_a_group_of_one_costs_nothing(name: str, collective: str) -> None:
    alone = GroupPlacement(1, (1,), (1,), "device")
    assert MODELS[name].time(collective, 1e9, alone).seconds == 0.0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(MACHINES), st.sampled_from(COLLECTIVES), st.integers(1, 12), st.integers(1, 8), SIZES,
       st.floats(1.0, 100.0))  # fmt: skip
def test_time_grows_with_bytes(name: str, collective: str, nodes: int, per_node: int, size: float, factor: float) -> None:
    model = MODELS[name]
    placement = placement_of(model.hardware, nodes, per_node)
    assert model.time(collective, size, placement).seconds <= model.time(collective, size * factor, placement).seconds


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([m for m in MACHINES if m != "tpu-v5p"]), st.sampled_from(COLLECTIVES), st.integers(1, 12),
       st.integers(1, 8), SIZES)  # fmt: skip
def test_never_below_the_wire(name: str, collective: str, nodes: int, per_node: int, size: float) -> None:
    """What must leave a rank passes its link at most at the raw rate; what must leave a domain, its NICs."""
    model = MODELS[name]
    placement = placement_of(model.hardware, nodes, per_node)
    if placement.size < 2:
        return
    g, n = geometry(model.hardware, placement), placement.size
    # In-network reduction lets all-reduce send the buffer once instead of 2 (n - 1)/n times.
    wire = 1.0 if collective == "all_reduce" else traffic(collective, n)
    seconds = model.time(collective, size, placement).seconds
    if g.domains == 1:
        assert seconds >= wire * size / g.link_bytes_per_s
    elif collective == "all_to_all":
        assert seconds >= size * (n - g.fewest_per_domain) / n / g.rank_out_bytes_per_s * (1 - 1e-9)
    elif collective not in ("send_recv", "gather", "scatter"):
        least = 1.0 if collective == "all_reduce" else wire * (n - g.per_domain) / n
        assert seconds >= least * size / g.domain_out_bytes_per_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MACHINES), st.sampled_from(COLLECTIVES), st.integers(1, 4), st.lists(SIZES, min_size=1, max_size=8))
def test_many_sizes_at_once_are_the_same(name: str, collective: str, nodes: int, sizes: list[float]) -> None:
    model = MODELS[name]
    placement = placement_of(model.hardware, nodes, 8)
    one_by_one = [model.time(collective, s, placement).seconds for s in sizes]
    np.testing.assert_allclose(seconds_of(model.laws(collective, placement), np.array(sizes)), one_by_one, rtol=1e-12)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_terms_sum_and_the_interval_encloses(collective: str) -> None:
    price = MODELS["dgx-h100"].time(collective, 3e7, packed(MODELS["dgx-h100"].hardware, 16, 2))
    assert sum(seconds for _, seconds in price.terms) == pytest.approx(price.seconds)
    assert price.low < price.seconds < price.high


def test_a_pair_starts_with_fewer_channels_in_a_larger_communicator() -> None:
    """32 channels over the ranks: 4 up to 8 ranks, 1 from 32 on, until 16 MiB a channel have them doubled."""
    assert [channels_of_a_pair(n) for n in (2, 3, 8, 9, 16, 18, 32, 64, 72)] == [4, 4, 4, 2, 2, 1, 1, 1, 1]
    model = MODELS["gb200-nvl72"]
    small, large = (packed(model.hardware, n, max(1, n // 4)) for n in (8, 64))
    assert large.num_domains == 1
    few, one = (np.array([model.time("send_recv", size, p).seconds for size in (2e6, 4e6)]) for p in (small, large))
    assert np.diff(one) / np.diff(few) == pytest.approx(4.0)
    assert 15e9 < 2e6 / float(np.diff(one)[0]) < 30e9
    for size in (3e8, 1e9):
        assert model.time("send_recv", size, large).seconds == model.time("send_recv", size, small).seconds


def test_ring_latency_is_a_sum_of_hops() -> None:
    """NCCL's LL ring: 6.6 us and, for all-gather, n - 1 hops, D - 1 of them over the network."""
    model, hardware = published("dgx-h100"), load_hardware("dgx-h100")
    one = model.time("all_gather", 8, packed(hardware, 8, 1)).seconds
    assert one == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-3)
    four = model.time("all_gather", 8, packed(hardware, 32, 4)).seconds
    assert four == pytest.approx(6.6e-6 + 28 * 0.6e-6 + 3 * 5e-6, rel=1e-3)


def test_tree_latency_is_logarithmic_in_nodes() -> None:
    model, hardware = published("dgx-a100-80gb"), load_hardware("dgx-a100-80gb")
    for nodes in (4, 16):
        seconds = model.time("all_reduce", 8, packed(hardware, 8 * nodes, nodes)).seconds
        assert seconds == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 2 * log2(nodes) * 5e-6, rel=1e-3)


def test_all_to_all_is_bound_by_the_nics() -> None:
    """busbw = NIC (n - 1)/(n - g): the law measured on 2 and 4 nodes."""
    model = MODELS["mi300x"]
    for nodes in (2, 4, 8):
        n = 8 * nodes
        bandwidth = bus_bandwidth(model, "all_to_all", 2**34, packed(model.hardware, n, nodes))
        nic = bandwidth * (n - 8) / (n - 1)
        assert 0.9 * 50e9 < nic <= 50e9


@pytest.mark.parametrize(("nodes", "fills_us"), [(2, 216.0), (4, 458.3), (16, 1145.9)])
def test_each_remote_rank_fills_a_pipeline_of_its_own(nodes: int, fills_us: float) -> None:
    """64 MiB at 2 us a chunk: (n - 8)/n of them at 46 GB/s last T, and n - 8 pipelines one after the other fill in
    2 sqrt((n - 8) 2 us T): 4 nodes 2 sqrt(24 x 2 us x 1094.2 us)."""
    plain, filled = published("dgx-h100"), published("dgx-h100", 2e-6)
    placement = packed(plain.hardware, 8 * nodes, nodes)
    times = [m.time("all_to_all", 2**26, placement).seconds for m in (plain, filled)]
    assert (times[1] - times[0]) * 1e6 == pytest.approx(fills_us, rel=1e-3)


def test_only_exchanges_over_nics_fill_pipelines() -> None:
    """Not those of one domain, nor of several in one host; nor other collectives, or one message."""
    plain, filled = published("dgx-h100"), published("dgx-h100", 2e-6)
    two = packed(plain.hardware, 16, 2)
    for collective in COLLECTIVES:
        same = plain.time(collective, 2**26, two) == filled.time(collective, 2**26, two)
        assert same == (collective != "all_to_all")
    one = packed(plain.hardware, 8, 1)
    assert plain.time("all_to_all", 2**26, one) == filled.time("all_to_all", 2**26, one)
    plain, filled = published("h100-nvl"), published("h100-nvl", 2e-6)
    bridged = packed(plain.hardware, 8, 1)
    assert bridged.num_domains > 1
    assert plain.time("all_to_all", 2**26, bridged) == filled.time("all_to_all", 2**26, bridged)


def test_a_tree_between_two_domains_loads_the_nics_half() -> None:
    """With two domains each NIC carries the buffer once, with more twice: 2 nodes are bound by the links, 4 by the NICs."""
    model = MODELS["dgx-h100"]
    two, four = (bus_bandwidth(model, "all_reduce", 2**34, packed(model.hardware, 8 * n, n)) for n in (2, 4))
    assert two > 440e9
    assert 340e9 < four < 400e9


def test_eight_groups_on_eight_nics_have_one_each() -> None:
    model = MODELS["dgx-h100"]
    eight = GroupPlacement(4, (1,) * 4, (1,) * 4, "leaf", concurrent_groups=8, stride=8)
    alone = GroupPlacement(4, (1,) * 4, (1,) * 4, "leaf", concurrent_groups=1, stride=8)
    sixteen = GroupPlacement(4, (1,) * 4, (1,) * 4, "leaf", concurrent_groups=16, stride=8)
    times = [model.time("all_gather", 2**32, p).seconds for p in (alone, eight, sixteen)]
    assert times[0] == pytest.approx(times[1])  # a rank drives its own NIC only
    assert times[2] == pytest.approx(2 * times[1], rel=0.02)  # two groups share a NIC
    assert bus_bandwidth(model, "all_gather", 2**32, eight) < 50e9


def test_one_nic_for_two_gpus_halves_the_rate() -> None:
    full, half = MODELS["dgx-a100-80gb"], CollectiveModel(load_hardware("a100-80gb-4nic"))
    times = [m.time("all_to_all", 2**31, packed(m.hardware, 32, 4)).seconds for m in (full, half)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.02)


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "send_recv"])
@pytest.mark.parametrize("ratio", [2.0, 7.0])
def test_oversubscription_slows_what_leaves_the_pod(collective: str, ratio: float) -> None:
    """Asymptotically by the ratio: NICs are the bottleneck across nodes."""
    model = MODELS["dgx-h100"]
    ranks, size = ((1, 1), 2) if collective == "send_recv" else ((8,) * 4, 32)
    plain = GroupPlacement(size, ranks, ranks, "core")
    tight = GroupPlacement(size, ranks, ranks, "core", oversubscription=ratio)
    wide, narrow = (model.laws(collective, p)[-1].beta_s_per_byte for p in (plain, tight))
    assert narrow == pytest.approx(ratio * wide, rel=0.2 if collective == "all_gather" else 1e-6)


def test_a_wider_tier_costs_switches() -> None:
    model = MODELS["dgx-h100"]
    times = [model.time("all_gather", 8, GroupPlacement(16, (8, 8), (8, 8), tier)).seconds for tier in ("leaf", "pod", "core")]
    assert times[1] - times[0] == pytest.approx(2 * 0.65e-6, rel=1e-3)
    assert times[2] - times[0] == pytest.approx(4 * 0.65e-6, rel=1e-3)


def test_uneven_straddling_is_bound_by_the_thinner_domain() -> None:
    """12 ranks as (8, 4) leave the second node by 4 NICs, as (6, 6) by 6."""
    model = MODELS["dgx-h100"]
    even, uneven = GroupPlacement(12, (6, 6), (6, 6), "leaf"), GroupPlacement(12, (8, 4), (8, 4), "leaf")
    slow, fast = (model.laws("all_gather", p)[-1].beta_s_per_byte for p in (uneven, even))
    assert slow == pytest.approx(1.5 * fast, rel=0.02)


def test_a_rack_is_one_domain() -> None:
    model = MODELS["gb200-nvl72"]
    inside, outside = packed(model.hardware, 64, 16), packed(model.hardware, 128, 32)
    assert inside.num_domains == 1
    assert outside.num_domains == 2
    assert bus_bandwidth(model, "all_reduce", 2**33, inside) > 850e9
    assert model.time("all_to_all", 2**30, outside).seconds > 4 * model.time("all_to_all", 2**30, inside).seconds


def test_nvls_is_taken_where_the_tuner_takes_it() -> None:
    """H200: Ring LL to 1 MiB, NVLS from 2 MiB on 8 GPUs; rings on 4 GPUs at any size; never without the switch's help."""
    model = CollectiveModel(load_hardware("dgx-h200"))
    eight, four = packed(model.hardware, 8, 1), packed(model.hardware, 4, 1)
    assert fastest(model.laws("all_reduce", eight), 2**16).protocol.startswith("LL")
    assert fastest(model.laws("all_reduce", eight), 2**23).algorithm == "NVLS"
    assert fastest(model.laws("all_reduce", four), 2**33).algorithm == "Ring"
    assert fastest(CollectiveModel(model.hardware, nvls=False).laws("all_reduce", eight), 2**33).algorithm == "Ring"
    assert fastest(model.laws("all_gather", eight), 2**33).algorithm == "Ring"


def test_sharp_helps_large_all_reduce_across_nodes() -> None:
    hardware = load_hardware("dgx-h100")
    plain, sharp = CollectiveModel(hardware), CollectiveModel(hardware, sharp=True)
    placement = packed(hardware, 64, 8)
    assert bus_bandwidth(sharp, "all_reduce", 2**34, placement) > 1.15 * bus_bandwidth(plain, "all_reduce", 2**34, placement)
    assert sharp.time("all_gather", 2**30, placement) == plain.time("all_gather", 2**30, placement)


def test_pat_serves_one_rank_a_domain() -> None:
    model = MODELS["gh200"]
    assert fastest(model.laws("all_gather", packed(model.hardware, 128, 128)), 2**14).algorithm == "PAT"


@pytest.mark.parametrize(
    ("profile", "ranks_per_node", "channels"),
    [("dgx-a100-80gb", 8, 16), ("dgx-a100-80gb", 1, 2), ("a100-80gb-4nic", 8, 8), ("dgx-h100", 8, 16), ("dgx-h100", 1, 4)],
)
def test_channels_follow_the_nics_of_the_group(profile: str, ranks_per_node: int, channels: int) -> None:
    """Two channels a NIC, four from Hopper on (ncclTopoPostset): a group with one rank per node holds few SMs."""
    model = CollectiveModel(load_hardware(profile))
    assert model.sms("all_gather", 2**30, packed(model.hardware, 4 * ranks_per_node, 4)) == channels


@pytest.mark.parametrize(
    ("profile", "ranks", "nodes", "units"),
    [
        ("dgx-h100", 8, 1, 24), ("mi300x", 8, 1, 56), ("mi325x", 4, 1, 24), ("mi300x", 2, 1, 32), ("mi355x", 8, 1, 56),
        ("mi350x", 4, 1, 28), ("mi300x", 16, 2, 64), ("mi355x", 32, 4, 64), ("mi250x", 8, 1, 24),
    ],
)  # fmt: skip
def test_rccl_holds_more_compute_units_than_nccl_sms(profile: str, ranks: int, nodes: int, units: int) -> None:
    """28 rings of eight MI300X opened twice (rome_models.cc, model 79); 64 across nodes; a small message has few channels."""
    model = CollectiveModel(load_hardware(profile))
    placement = packed(model.hardware, ranks, nodes)
    assert model.sms("all_gather", 2**30, placement) == units
    assert model.sms("all_gather", 2**16, placement) <= 2


def test_torus_all_gather_over_a_whole_axis() -> None:
    """V / (2 W) over a closed axis of links of rate W (jax-ml/scaling-book), all-reduce twice that."""
    model = MODELS["tpu-v5p"]
    torus, up = model.hardware.scale_up.torus, model.hardware.scale_up
    axis = GroupPlacement(torus[0], (torus[0],), (4,) * (torus[0] // 4), "domain")
    link = up.bandwidth.value / up.links_per_gpu
    gather = model.time("all_gather", 1e10, axis).seconds
    assert gather == pytest.approx((torus[0] - 1) / torus[0] * 1e10 / (2 * link), rel=0.07)
    assert model.time("all_reduce", 1e10, axis).seconds == pytest.approx(2 * gather, rel=0.01)


def test_gloo_small_messages_take_a_fraction_of_a_millisecond() -> None:
    model = MODELS["cpu-gloo"]
    for collective in ("all_reduce", "all_gather", "broadcast", "send_recv"):
        assert 0.15e-3 <= model.time(collective, 8, packed(model.hardware, 2, 1)).seconds <= 0.35e-3


def test_wrong_names_say_what_is_right() -> None:
    model, pair = MODELS["dgx-h100"], packed(load_hardware("dgx-h100"), 2, 1)
    with pytest.raises(InputError, match="all_reduce"):
        model.time("allreduce", 8, pair)
    with pytest.raises(InputError, match="bytes"):
        model.time("all_reduce", float("nan"), pair)


def test_unfitted_machines_are_priced_with_a_wide_interval() -> None:
    price = MODELS["gh200"].time("all_reduce", 1e8, packed(MODELS["gh200"].hardware, 8, 8))
    assert price.provenance in ("peak-scaled", "published")
    assert price.high / price.low > 2


def test_answers_are_quick() -> None:
    hardware = load_hardware("dgx-h100")
    model, placement = CollectiveModel(hardware), packed(hardware, 64, 8)
    start = time.process_time()
    for size in range(1, 201):
        model.time("all_reduce", float(size * 1000), placement)
    miss = (time.process_time() - start) / 200
    start = time.process_time()
    for _ in range(2000):
        model.time("all_reduce", 1000.0, placement)
    hit = (time.process_time() - start) / 2000
    assert miss < 1e-3  # a few times what an idle machine needs
    assert hit < 60e-6


def test_a_job_may_switch_sharp_on() -> None:
    """Gradients all-reduced over eight nodes, one rank each: the switches reduce; a fabric that cannot is refused."""
    path = Path(__file__).parent.parent / "scenarios" / "llama3.1-70b_h100x64_tp4cp2pp4.toml"
    flat = ["plan.zero_stage=0", "plan.cp=1", "plan.pp=1", "plan.virtual_stages=1", "plan.tp=8", "plan.dp=8", "plan.schedule=auto"]
    off, on = (simulate(read_scenario(path, [*flat, f"cluster.sharp={text}"]), detail="stage") for text in ("false", "true"))
    assert on.communication_s["dp"] < 0.75 * off.communication_s["dp"]
    assert on.step_time_s < off.step_time_s
    with pytest.raises(InputError, match="do not reduce"):
        simulate(read_scenario(path, ["cluster.hardware=hgx-h800", "cluster.sharp=true"]), detail="stage")


@pytest.mark.parametrize(
    ("name", "share"), [("mi300x", 1 / 7), ("hgx-a100-4gpu-80gb", 1 / 3), ("dgx-h100", 1.0), ("dgx1-v100-16gb", 1.0)]
)
def test_a_pair_in_a_full_mesh_has_the_links_to_each_other_alone(name: str, share: float) -> None:
    """A switch gives any group all links; eight V100s with six links each are no full mesh."""
    hardware = load_hardware(name)
    whole = hardware.scale_up.bandwidth.value
    assert geometry(hardware, packed(hardware, 2, 1)).link_bytes_per_s == pytest.approx(share * whole)
    assert geometry(hardware, packed(hardware, hardware.gpus_per_node, 1)).link_bytes_per_s == whole


def test_rings_of_one_domain_end_where_nvls_takes_over() -> None:
    laws = MODELS["dgx-h100"].laws("all_reduce", GroupPlacement(8, (8,), (8,), "leaf"))
    ends = {law.algorithm: law.max_bytes for law in laws}
    assert set(ends) == {"Ring", "NVLS"}
    assert ends["Ring"] < ends["NVLS"] == float("inf")
