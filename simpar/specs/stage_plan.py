"""The stage plan: which machines and degrees each pipeline rank, or each replica, has.

A pipeline over several kinds of machines is described by hosts. A host's scenario is the one in which every stage, and every
replica, is like those that it holds: one kind of machine, one plan. What holds for it holds for them, so a layout, a price or a
rule of one kind of machine serves a mixed cluster without knowing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from simpar.errors import InputError, Violation
from simpar.specs.cluster import ClusterSpec, MachinesSpec, PartsNetworkSpec
from simpar.specs.hardware import GpuSpec, HardwareProfile, NicSpec, Sourced
from simpar.specs.scenario import Scenario


@dataclass(frozen=True)
class Host:
    """What holds alike pipeline ranks, or alike replicas.

    Attributes:
        scenario: all of the job on machines like these.
        hardware: of the part; no scale-up domain reaches out of it.
        link: the same with the adapters that reach other parts.
        ranks: pipeline ranks that it holds.
        replicas: pipelines that it holds.
    """

    scenario: Scenario
    hardware: HardwareProfile
    link: HardwareProfile
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


def hosts(scenario: Scenario) -> tuple[Host, ...]:
    """The hosts of a scenario whose rules hold (`part_rules`), in the order of its parts; none where all ranks are alike."""
    cluster, plan, first = scenario.cluster, scenario.plan, 0
    if not cluster.parts:
        return ()
    world, found = scenario.world_size, []
    stages = cluster.parts_hold == "stages"
    each = world // plan.pp if stages else plan.tp * plan.cp * plan.pp
    dp = world // (plan.tp * plan.cp * plan.pp)
    for index, part in enumerate(cluster.parts):
        held = range(first, first + part.own_gpus // each)
        first = held.stop
        profile, link = _profiles(part, cluster.parts_network)
        ranks, replicas = (held, range(dp)) if stages else (range(plan.pp), held)
        alone = _like_all(scenario, part, profile)
        found.append(Host(alone if stages else _of_replica(alone, index, dp), profile, link, ranks, replicas))
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


def _like_all(scenario: Scenario, part: MachinesSpec, profile: HardwareProfile) -> Scenario:
    """`scenario` as if all its GPUs were those of `part`."""
    world, per_node = scenario.world_size, profile.gpus_per_node
    machines = {name: getattr(part, name) for name in MachinesSpec.model_fields}
    machines |= {"num_nodes": -(-world // per_node), "sharp": scenario.cluster.sharp}
    if world % per_node:
        machines["num_gpus"] = world
    return scenario.model_copy(update={"cluster": ClusterSpec(**machines)})


def joint_profile(found: tuple[Host, ...], cluster: ClusterSpec) -> HardwareProfile:
    """What all parts are together, for totals and titles: names joined, peaks and powers the mean GPU's, memory the smallest."""
    profiles = [host.hardware for host in found]
    shares = [part.own_gpus for part in cluster.parts]
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
        return
    if cluster.hardware or cluster.num_nodes != sum(part.num_nodes for part in cluster.parts):
        name = "hardware" if cluster.hardware else "num_nodes"
        yield Violation(f"cluster.{name}", getattr(cluster, name), "stands in each of cluster.parts", "leave it out")
    own = [n for n in (*MachinesSpec.model_fields, "num_gpus") if n not in ("hardware", "num_nodes")]
    for name in own:
        if getattr(cluster, name) != ClusterSpec.model_fields[name].default:
            right = "whole nodes" if name == "num_gpus" else f"cluster.parts.0.{name} and so on"
            yield Violation(f"cluster.{name}", getattr(cluster, name), "belongs to one kind of machine", right)
    if len(cluster.parts) == 1:
        right = "cluster.hardware and cluster.num_nodes"
        yield Violation("cluster.parts", "1 part", "machines of one kind are no parts", right)
    if scenario.site is not None:
        yield Violation("site", "given", "what a site learned holds for one kind of machine", "leave it out")
    if scenario.effects.needs_network:
        rule = "shared and broken links are not simulated over parts of several kinds"
        yield Violation("effects", "contention, dead_rails or link_faults", rule, "leave them out")
    if scenario.effects.expand and cluster.parts_hold == "replicas":
        rule = 'ranks one by one are those of one kind of replica, and cluster.parts_hold = "replicas" has several'
        yield Violation("effects.expand", True, rule, "false")
    yield from _holding(scenario)
    yield from _microbatches(scenario)


def _holding(scenario: Scenario) -> Iterator[Violation]:
    cluster, plan, world = scenario.cluster, scenario.plan, scenario.world_size
    stages = cluster.parts_hold == "stages"
    if stages and plan.pp < len(cluster.parts):
        rule = f"{len(cluster.parts)} parts hold at least a pipeline rank each"
        yield Violation("plan.pp", plan.pp, rule, f'at least {len(cluster.parts)}, or cluster.parts_hold = "replicas"')
        return
    each, what = world // plan.pp, f"a pipeline rank (1/{plan.pp} of all {world})"
    if stages and world % plan.pp:
        return  # said of the plan
    if not stages:
        each = plan.tp * plan.cp * plan.pp
        what = f"a replica (tp x cp x pp = {each})"
    if stages and not plan.placement.endswith("pp"):
        yield Violation("plan.placement", plan.placement, "stages lie on parts one after the other", "pp as the last")
    for index, part in enumerate(cluster.parts):
        if part.own_gpus % each:
            rule = f"its {part.own_gpus} GPUs are no whole number of times the {each} of {what}"
            yield Violation(f"cluster.parts.{index}.num_nodes", part.num_nodes, rule, f"nodes with a multiple of {each} GPUs")
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


def check_one_kind(scenario: Scenario, why: str) -> None:
    """Raise unless the cluster has machines of one kind.

    Raises:
        InputError: it has parts; `why` says what is in their way.
    """
    if scenario.cluster.parts:
        value, right = f"{len(scenario.cluster.parts)} parts", "cluster.hardware and cluster.num_nodes"
        raise InputError([Violation("cluster.parts", value, why, right, scenario.file)])


def part_notes(scenario: Scenario) -> Iterator[str]:
    """How the parts of a scenario are taken, one sentence each."""
    cluster = scenario.cluster
    if not cluster.parts:
        return
    found = hosts(scenario)
    names = "; ".join(
        f"{h.hardware.gpu.name} ({h.hardware.name}, {part.num_nodes} node{'s' * (part.num_nodes > 1)}): "
        + (_listed("pipeline rank", h.ranks) if cluster.parts_hold == "stages" else _listed("replica", h.replicas))
        for h, part in zip(found, cluster.parts, strict=True)
    )
    yield f"parts hold {cluster.parts_hold}: {names}"
    if cluster.parts_network is None:
        rates = ", ".join(
            f"{h.hardware.name} {h.hardware.nic.count} x {h.hardware.nic.bandwidth.value / 1e9:.4g} GB/s" for h in found
        )
        yield f"between parts the slower of the two networks counts (adapters of a node: {rates}); state cluster.parts_network"


def _listed(what: str, held: range) -> str:
    return f"{what} {held.start}" if len(held) == 1 else f"{what}s {held.start} to {held.stop - 1}"


__all__ = ["Host", "check_one_kind", "hosts", "joint_profile", "part_notes", "part_rules"]
