"""The stage plan: which machines and degrees each pipeline rank, or each replica, has.

A pipeline over several kinds of machines is described by hosts. A host's scenario is the one in which every stage, and every
replica, is like those that it holds: one kind of machine, one plan. What holds for it holds for them, so a layout, a price or a
rule of one kind of machine serves a mixed cluster without knowing of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

from simpar.errors import Violation
from simpar.specs.cluster import ClusterSpec, MachinesSpec, PartsNetworkSpec
from simpar.specs.hardware import GpuSpec, HardwareProfile, NicSpec, Sourced
from simpar.specs.scenario_spec import Scenario


@dataclass(frozen=True)
class Host:
    """What holds alike pipeline ranks, or alike replicas.

    Attributes:
        scenario: all of the job on machines like these.
        hardware: of the part; no scale-up domain reaches out of it.
        link: the same with the adapters that reach other parts.
        part: index of the part that it lies in.
        gpus: of its ranks.
        ranks: pipeline ranks that it holds.
        replicas: pipelines that it holds.
    """

    scenario: Scenario
    hardware: HardwareProfile
    link: HardwareProfile
    part: int
    gpus: int
    ranks: range
    replicas: range


@lru_cache(maxsize=64)
def _profiles(part: MachinesSpec, network: PartsNetworkSpec | None) -> tuple[HardwareProfile, HardwareProfile]:
    """A part's profile, and the same with the adapters that reach other parts."""
    gpus = part.own_gpus
    profile = part.profile(gpus)
    if profile.domain_size > gpus:
        profile = profile.model_copy(update={"scale_up": profile.scale_up.model_copy(update={"domain_size": gpus})})
    return profile, profile if network is None else _linked(profile, network)


def _linked(profile: HardwareProfile, network: PartsNetworkSpec) -> HardwareProfile:
    nic, fabric = profile.nic, profile.fabric
    count = max(nic.count, 1)
    rate = Sourced[float](value=network.bandwidth / count, kind="assumed", source="cluster.parts_network")
    changes: dict[str, Any] = {"count": count, "bandwidth": rate}
    if nic.kind == "none":
        changes["kind"] = "ethernet"
    kind = "single-switch" if fabric.kind == "none" else fabric.kind
    return profile.model_copy(update={
        "nic": NicSpec.model_copy(nic, update=changes), "fabric": fabric.model_copy(update={"kind": kind}),
    })  # fmt: skip


def is_mixed(scenario: Scenario) -> bool:
    """Whether pipeline ranks or replicas differ."""
    return bool(scenario.cluster.parts) or scenario.plan.stage_tp is not None


def machines_of(cluster: ClusterSpec) -> tuple[MachinesSpec, ...]:
    """The parts of a cluster; a cluster of one kind is one part."""
    return cluster.parts or (MachinesSpec(**{name: getattr(cluster, name) for name in MachinesSpec.model_fields}),)


def rank_gpus(scenario: Scenario) -> tuple[int, ...]:
    """GPUs of each pipeline rank."""
    plan = scenario.plan
    if plan.stage_tp is None:
        return (scenario.world_size // plan.pp,) * plan.pp
    return tuple(tp * plan.cp * (plan.dp or 1) for tp in plan.stage_tp)


def hosts(scenario: Scenario) -> tuple[Host, ...]:
    """The hosts of a scenario whose rules hold (`part_rules`), in the order of its ranks; none where all ranks are alike."""
    cluster, plan = scenario.cluster, scenario.plan
    if not is_mixed(scenario):
        return ()
    parts, found = machines_of(cluster), []
    if cluster.parts_hold == "replicas":
        each, first = plan.tp * plan.cp * plan.pp, 0
        dp = scenario.world_size // each
        for index, part in enumerate(parts):
            held = range(first, first + part.own_gpus // each)
            first = held.stop
            profile, link = _profiles(part, cluster.parts_network)
            alone = _of_replica(_like_all(scenario, part, profile, plan.tp), index, dp)
            found.append(Host(alone, profile, link, index, part.own_gpus, range(plan.pp), held))
        return tuple(found)
    sizes = rank_gpus(scenario)
    ends = list(accumulate(part.own_gpus for part in parts))
    begins = [0, *accumulate(sizes)]
    kinds = [(bisect_right(ends, begins[rank]), plan.stage_tp[rank] if plan.stage_tp else plan.tp) for rank in range(plan.pp)]
    for (index, tp), group in groupby(range(plan.pp), key=lambda rank: kinds[rank]):
        ranks = list(group)
        profile, link = _profiles(parts[index], cluster.parts_network)
        alone = _like_all(scenario, parts[index], profile, tp)
        dp = sizes[ranks[0]] // (tp * plan.cp)
        gpus = sizes[ranks[0]] * len(ranks)
        found.append(Host(alone, profile, link, index, gpus, range(ranks[0], ranks[-1] + 1), range(dp)))
    return tuple(found)


def alike(scenario: Scenario) -> tuple[Host, ...]:
    """One host for each part, whatever the plan lays on it: all of the job on machines of that part."""
    found = []
    for index, part in enumerate(machines_of(scenario.cluster)):
        profile, link = _profiles(part, scenario.cluster.parts_network)
        alone = _like_all(scenario, part, profile, scenario.plan.tp)
        found.append(Host(alone, profile, link, index, part.own_gpus, range(0), range(0)))
    return tuple(found)


def _of_replica(alone: Scenario, part: int, dp: int) -> Scenario:
    """`alone` with the batch of which every replica has as much as those of a part."""
    training, given = alone.training, alone.plan.replica_microbatches
    each = training.global_batch_size // (training.micro_batch_size * dp) if given == "auto" else given[part]
    batch = max(each, 1) * training.micro_batch_size * dp
    return alone.model_copy(update={
        "training": training.model_copy(update={"global_batch_size": batch}),
        "plan": alone.plan.model_copy(update={"replica_microbatches": "auto"}),
    })  # fmt: skip


def _like_all(scenario: Scenario, part: MachinesSpec, profile: HardwareProfile, tp: int) -> Scenario:
    """`scenario` as if all its ranks were on machines like `part` and had this tensor parallelism."""
    plan, per_node = scenario.plan, profile.gpus_per_node
    world = scenario.world_size if plan.stage_tp is None else tp * plan.cp * plan.pp * (plan.dp or 1)
    machines = {name: getattr(part, name) for name in MachinesSpec.model_fields}
    machines |= {"num_nodes": -(-world // per_node), "sharp": scenario.cluster.sharp}
    if world % per_node:
        machines["num_gpus"] = world
    alike = plan.model_copy(update={"tp": tp, "stage_tp": None})
    return scenario.model_copy(update={"cluster": ClusterSpec(**machines), "plan": alike})


def joint_profile(found: tuple[Host, ...]) -> HardwareProfile:
    """What all hosts are together, for totals and titles: names joined, peaks and powers the mean GPU's, memory the smallest."""
    profiles = [host.hardware for host in found]
    shares = [host.gpus for host in found]
    first = profiles[0]
    names = " + ".join(dict.fromkeys(p.name for p in profiles))
    peaks = {dtype: _mean([p.peak_flops_per_s(dtype) for p in profiles], shares) for dtype in first.gpu.peak_flops}
    gpu = GpuSpec.model_copy(first.gpu, update={
        "name": " + ".join(dict.fromkeys(p.gpu.name for p in profiles)),
        "peak_flops": {dtype: _derived(value) for dtype, value in peaks.items()},
        "power": _derived(_mean([p.gpu.power.value for p in profiles], shares)),
        "memory": min((p.gpu.memory for p in profiles), key=lambda m: m.value),
    })  # fmt: skip
    calibrated = first.calibrated if all(p.calibrated for p in profiles) else ""
    return first.model_copy(update={"name": names, "gpu": gpu, "calibrated": calibrated})


def _derived(value: float) -> Sourced[float]:
    return Sourced[float](value=value, kind="derived", source="mean over the GPUs of all parts")


def _mean(values: list[float], shares: list[int]) -> float:
    if len(set(values)) == 1:
        return values[0]
    return sum(v * n for v, n in zip(values, shares, strict=True)) / sum(shares)


# -- rules ---------------------------------------------------------------------------------------------------------------


def part_rules(scenario: Scenario) -> Iterator[Violation]:
    """What is wrong with the parts of a scenario; nothing where they hold what the plan lays on them."""
    cluster, given = scenario.cluster, scenario.plan.replica_microbatches
    if given != "auto" and not (cluster.parts and cluster.parts_hold == "replicas"):
        right = 'leave it out, or cluster.parts_hold = "replicas"'
        yield Violation("plan.replica_microbatches", given, "belongs to replicas on machines of several kinds", right)
    if not cluster.parts:
        for name in ("parts_hold", "parts_network"):
            if getattr(cluster, name) != ClusterSpec.model_fields[name].default:
                yield Violation(f"cluster.{name}", getattr(cluster, name), "belongs to cluster.parts", "leave it out")
    else:
        yield from _machines(cluster)
    if not is_mixed(scenario):
        return
    if scenario.site is not None:
        yield Violation("site", "given", "what a site learned holds for stages of one kind", "leave it out")
    if scenario.effects.needs_network:
        rule = "shared and broken links are not simulated over stages or replicas of several kinds"
        yield Violation("effects", "contention, dead_rails or link_faults", rule, "leave them out")
    if scenario.effects.expand and (cluster.parts_hold == "replicas" or scenario.plan.stage_tp):
        rule = "ranks one by one are those of one kind of replica and one tensor parallelism (cluster.parts_hold, plan.stage_tp)"
        yield Violation("effects.expand", True, rule, "false")
    found = [*_degrees(scenario)]
    yield from found or _holding(scenario)
    yield from _microbatches(scenario)


def _machines(cluster: ClusterSpec) -> Iterator[Violation]:
    """What is said of one kind of machine beside parts."""
    if cluster.hardware or cluster.num_nodes != sum(part.num_nodes for part in cluster.parts):
        name = "hardware" if cluster.hardware else "num_nodes"
        yield Violation(f"cluster.{name}", getattr(cluster, name), "stands in each of cluster.parts", "leave it out")
    for name in (*MachinesSpec.model_fields, "num_gpus"):
        if name not in ("hardware", "num_nodes") and getattr(cluster, name) != ClusterSpec.model_fields[name].default:
            right = "whole nodes" if name == "num_gpus" else f"cluster.parts.0.{name} and so on"
            yield Violation(f"cluster.{name}", getattr(cluster, name), "belongs to one kind of machine", right)
    if len(cluster.parts) == 1:
        right = "cluster.hardware and cluster.num_nodes"
        yield Violation("cluster.parts", "1 part", "machines of one kind are no parts", right)


def _degrees(scenario: Scenario) -> Iterator[Violation]:
    """What is wrong with a tensor parallelism of each pipeline rank's own."""
    plan, cluster, world = scenario.plan, scenario.cluster, scenario.world_size
    if plan.stage_tp is None:
        return
    field, given = "plan.stage_tp", plan.stage_tp
    if len(given) != plan.pp:
        yield Violation(field, given, f"one degree for each of {plan.pp} pipeline ranks", f"{plan.pp} numbers")
    elif plan.tp != 1:
        yield Violation("plan.tp", plan.tp, "plan.stage_tp says it for every pipeline rank", "leave it out")
    elif cluster.parts_hold == "replicas":
        yield Violation(field, given, 'a replica has one tensor parallelism (cluster.parts_hold = "replicas")', "plan.tp")
    elif plan.dp is None:
        right = f"world size / (cp x sum of stage_tp) = {world // (plan.cp * sum(given))}"
        yield Violation("plan.dp", None, "is needed with plan.stage_tp", right)
    elif sum(rank_gpus(scenario)) != world:
        rule = f"({' + '.join(map(str, given))}) x cp {plan.cp} x dp {plan.dp} = {sum(rank_gpus(scenario))} GPUs, of {world}"
        yield Violation(field, given, rule, "degrees whose sum times cp x dp is the cluster")
    elif world <= machines_of(cluster)[0].profile(world).gpus_per_node:
        yield Violation(field, given, "ranks of unequal tensor parallelism inside one node are not simulated", "plan.tp")


def _holding(scenario: Scenario) -> Iterator[Violation]:
    """What is wrong with what lies on which part."""
    cluster, plan, world = scenario.cluster, scenario.plan, scenario.world_size
    stages = cluster.parts_hold == "stages"
    if stages and not plan.placement.endswith("pp"):
        yield Violation("plan.placement", plan.placement, "stages lie on parts one after the other", "pp as the last")
    if stages and plan.pp < len(cluster.parts):
        rule = f"{len(cluster.parts)} parts hold at least a pipeline rank each"
        yield Violation("plan.pp", plan.pp, rule, f'at least {len(cluster.parts)}, or cluster.parts_hold = "replicas"')
        return
    if stages and plan.stage_tp is None and world % plan.pp:
        return  # said of the plan
    if not stages:
        each = plan.tp * plan.cp * plan.pp
        sizes, what = (each,) * (world // each), f"replicas (tp x cp x pp = {each} GPUs each)"
    else:
        sizes = rank_gpus(scenario)
        what = f"pipeline ranks ({', '.join(map(str, dict.fromkeys(sizes)))} GPUs each)"
    fitting, end = {0, *accumulate(sizes)}, 0
    for index, part in enumerate(cluster.parts):
        begin, end = end, end + part.own_gpus
        if not {begin, end} <= fitting:
            rule = f"GPUs {begin} to {end - 1} hold no whole number of {what}"
            yield Violation(f"cluster.parts.{index}.num_nodes", part.num_nodes, rule, "parts that end where one of them does")
        profile, link = _profiles(part, cluster.parts_network)
        if link.fabric.kind == "none":
            rule = f"{profile.name} has no network to reach the other parts"
            yield Violation(f"cluster.parts.{index}.hardware", part.hardware, rule, "state cluster.parts_network")


def _microbatches(scenario: Scenario) -> Iterator[Violation]:
    """Micro-batches of replicas that differ must be those of the batch."""
    cluster, plan, training = scenario.cluster, scenario.plan, scenario.training
    given, each = plan.replica_microbatches, plan.tp * plan.cp * plan.pp
    if cluster.parts_hold != "replicas" or any(part.own_gpus % each for part in cluster.parts):
        return
    counts = [part.own_gpus // each for part in cluster.parts]
    batch, size = training.global_batch_size, training.micro_batch_size
    if batch % size or batch < size * sum(counts):
        rule = f"must be a multiple of micro_batch_size {size}, with a micro-batch for each of {sum(counts)} replicas"
        yield Violation("training.global_batch_size", batch, rule, f"such as {max(batch // size, sum(counts)) * size}")
    elif given != "auto" and len(given) != len(counts):
        yield Violation("plan.replica_microbatches", given, f"one number for each of {len(counts)} parts", "or auto")
    elif given != "auto" and (total := sum(n * m for n, m in zip(counts, given, strict=True))) * size != batch:
        text = " + ".join(f"{n} x {m}" for n, m in zip(counts, given, strict=True))
        rule = f"{text} = {total} micro-batches, and training.global_batch_size {batch} has {batch // size}"
        yield Violation("plan.replica_microbatches", given, rule, "replicas x micro-batches must add up to it, or auto")


def part_notes(scenario: Scenario) -> Iterator[str]:
    """How the parts of a scenario are taken, one sentence each."""
    cluster, plan, found = scenario.cluster, scenario.plan, hosts(scenario)
    names = "; ".join(
        f"{h.hardware.gpu.name} ({h.hardware.name}, {h.gpus} GPUs): "
        + (_listed("pipeline rank", h.ranks) if cluster.parts_hold == "stages" else _listed("replica", h.replicas))
        + (f" with tp {h.scenario.plan.tp}" if plan.stage_tp else "")
        for h in found
    )
    if found:
        yield f"{'parts hold ' if cluster.parts else ''}{cluster.parts_hold}: {names}"
    if cluster.parts and cluster.parts_network is None:
        each = {h.hardware.name: f"{h.hardware.nic.count} x {h.hardware.nic.bandwidth.value / 1e9:.4g} GB/s" for h in found}
        rates = ", ".join(f"{name} {rate}" for name, rate in each.items())
        yield f"between parts the slower of the two networks counts (adapters of a node: {rates}); state cluster.parts_network"


def _listed(what: str, held: range) -> str:
    return f"{what} {held.start}" if len(held) == 1 else f"{what}s {held.start} to {held.stop - 1}"
