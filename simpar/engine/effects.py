"""A scenario's effects (specs/effects.py) as what the engines take: shared links, faults, noise, uneven experts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from simpar.engine.cluster_network import ClusterNetwork
from simpar.engine.contention import Contention, LinkSchedule
from simpar.engine.imbalance import Imbalance, Routing
from simpar.engine.jitter import Noise
from simpar.errors import InputError, Violation
from simpar.program.program import FloatArray, PriceTable
from simpar.specs.effects import LinkFault
from simpar.specs.reference import expert_model
from simpar.specs.scenario import Scenario
from simpar.specs.training import spread_of
from simpar.topology.cluster import Cluster


def engine_effects(scenario: Scenario, latency_s: FloatArray) -> dict[str, Any]:
    """Fields of `discrete_event.Effects`; `latency_s` [prices] is the part of each price that no bandwidth changes."""
    wanted = scenario.effects
    found: dict[str, Any] = {"interference": wanted.interference, "slow_factors": wanted.slow_ranks or None}
    if wanted.needs_network:
        found["contention"] = contention_of(scenario, latency_s)
    if wanted.is_random:
        found["noise"] = Noise(wanted.compute_sigma, wanted.communication_sigma, wanted.rank_sigma)
    return found


def contention_of(scenario: Scenario, latency_s: FloatArray) -> Contention:
    """The cluster's links as the network that a program's transfers share, faults included."""
    wanted = scenario.effects
    cluster = Cluster(scenario.hardware, scenario.cluster.num_nodes, dead_slots=frozenset(wanted.dead_rails))
    faults = [_schedule_of(cluster, fault) for fault in wanted.link_faults]
    return Contention(ClusterNetwork(cluster), latency_s=latency_s, schedules=faults)


def _schedule_of(cluster: Cluster, fault: LinkFault) -> LinkSchedule:
    """The capacity of a bad link (by name or index) over time: less for good, or for the bad part of every period.

    Raises:
        InputError: no such link, or a period without its bad part.
    """
    link = fault.link
    if link.isdigit() and int(link) < cluster.num_links:
        index = int(link)
    elif (index := next((i for i in range(cluster.num_links) if cluster.name_of(i) == link), -1)) < 0:
        some = ", ".join(cluster.name_of(i) for i in range(0, cluster.num_links, max(cluster.num_links // 6, 1)))
        rule = f"the cluster has no such link, or index below {cluster.num_links}"
        raise InputError([Violation("effects.link_faults.link", link, rule, f"names look like {some}")])
    if (fault.period is None) != (fault.down is None):
        raise InputError([Violation("effects.link_faults", link, "a flapping link needs both period and down")])
    if fault.period is None or fault.down is None:
        return LinkSchedule(index, (0.0,), (fault.factor,))
    if not 0.0 < fault.down < fault.period:
        rule = "must exceed down, the bad part of it"
        raise InputError([Violation("effects.link_faults.period", fault.period, rule, f"> {fault.down}")])
    return LinkSchedule(index, (0.0, fault.down), (fault.factor, 1.0), fault.period)


def routing_law(scenario: Scenario) -> Routing | None:
    """How tokens choose experts, where the scenario says that they do not spread evenly."""
    model, routing = expert_model(scenario), scenario.training.routing
    if model is None or model.moe is None or routing.kind == "balanced":
        return None
    return Routing(model.moe.num_experts, model.moe.num_experts_per_tok, routing.kind, routing.alpha, routing.counts,
                   routing.capacity_factor, spread=spread_of(routing, model, model.moe))  # fmt: skip


def _routed_tokens(scenario: Scenario) -> int:
    return scenario.training.micro_batch_size * scenario.training.sequence_length * scenario.plan.ep


def expected_load_factor(scenario: Scenario) -> float:
    """Mean over draws of the fullest expert rank's tokens over the mean, as the scenario's routing implies."""
    law = routing_law(scenario)
    return 1.0 if law is None or scenario.plan.ep == 1 else _expected(law, _routed_tokens(scenario), scenario.plan.ep)


@lru_cache(maxsize=4096)
def _expected(law: Routing, tokens: int, ep: int) -> float:
    return float(law.load_factors(tokens, ep, 16, 8, (0,)).mean())


def memory_loads(scenario: Scenario, layers: int, in_flight: int) -> FloatArray:
    """Load factor that decides a run's peak memory: float array [repetitions].

    Activations of all a rank's expert layers and micro-batches in flight are alive together, so a rank's mean load over
    them counts, and the fullest rank of the group sets the peak.
    """
    law, wanted = routing_law(scenario), scenario.effects
    if law is None:
        return np.ones(wanted.repetitions)
    tokens, ep = _routed_tokens(scenario), scenario.plan.ep
    mean = tokens * law.top_k / ep
    found = [
        law.rank_tokens(tokens, ep, layers, in_flight, (wanted.seed, r, 2)).mean(axis=(0, 1)).max() / mean
        for r in range(wanted.repetitions)
    ]
    return np.array(found)


def imbalance_of(scenario: Scenario, loaded: PriceTable, layers_per_op: int = 1) -> Imbalance | None:
    """Expert load drawn per layer and micro-batch; `loaded` holds the prices at load factor 2."""
    law = routing_law(scenario)
    if law is None:
        return None
    return Imbalance(law, _routed_tokens(scenario), scenario.plan.ep, loaded, layers_per_op=layers_per_op)
