"""Expert-parallel dispatch and combine: plain all-to-all, or DeepEP, which sends a token once to each node it visits.

With tokens routed to k of E experts spread evenly over R ranks in groups of g, a token visits
u(m) = m (1 - C(E - E/m, k) / C(E, k)) of m equal groups on average (the hypergeometric chance of hitting each).
"""

from __future__ import annotations

from functools import lru_cache
from math import lgamma
from typing import TYPE_CHECKING

from simpar.costs.price import ZERO, Price
from simpar.registry import unknown
from simpar.topology.placement import GroupPlacement

if TYPE_CHECKING:
    from simpar.costs.collectives import CollectiveModel

DISPATCHERS = ("alltoall", "deepep")
LAUNCH_S = 30e-6
"""Layout, notify and kernel start of a DeepEP normal-mode operation."""


def _log_choose(n: float, k: float) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


@lru_cache(maxsize=4096)
def groups_visited(groups: int, topk: int, experts: int) -> float:
    """Expected distinct groups (ranks, nodes) out of `groups` that the k experts of a token live on."""
    from math import exp

    away = experts - experts / groups
    if away < topk:
        return float(groups)
    return groups * (1.0 - exp(_log_choose(away, topk) - _log_choose(experts, topk)))


def price(
    model: CollectiveModel, direction: str, tokens: float, hidden: int, topk: int, experts: int, placement: GroupPlacement,
    dtype_bytes: float, dispatcher: str, nodes_limit: int | None,
) -> Price:
    """The price of one dispatch or combine of `tokens` tokens of each rank.

    Raises:
        InputError: unknown dispatcher.
    """
    if dispatcher not in DISPATCHERS:
        raise unknown("expert dispatcher", dispatcher, list(DISPATCHERS))
    n = placement.size
    if n <= 1 or tokens <= 0:
        return ZERO
    row = hidden * dtype_bytes
    if dispatcher == "alltoall":
        return model.time("all_to_all", tokens * topk * row, placement)
    g = model.geometry(placement)
    ranks = groups_visited(n, topk, experts)
    domains = groups_visited(g.domains, topk, experts) if g.domains > 1 else 1.0
    if nodes_limit:
        domains = min(domains, float(nodes_limit))
    near = tokens * row * ranks * (n - 1) / n / (0.4 * g.link_bytes_per_s)
    far = tokens * row * domains * (g.domains - 1) / g.domains / (0.9 * g.rank_out_bytes_per_s) if g.domains > 1 else 0.0
    seconds = LAUNCH_S + (50e-6 if g.domains > 1 else 0.0) + max(near, far)
    low, high = model.interval("expert", tokens * row)
    terms = ((f"expert_{direction}/deepep/launch", seconds - max(near, far)),
             (f"expert_{direction}/deepep/transfer", max(near, far)))
    return Price(seconds, seconds * low, seconds * high, model._provenance_of(), terms)
