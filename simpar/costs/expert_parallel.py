"""Expert-parallel dispatch and combine: plain all-to-all, or DeepEP, which sends a token once to each place it visits.

With tokens routed to k of E experts spread evenly over m equal groups (ranks, domains), a token visits
u(m) = m (1 - C(E - E/m, k) / C(E, k)) of them on average: the hypergeometric chance of hitting each. Benchmarks that deal
experts in turn give a token k consecutive ones, which lie on one rank or a few.

DeepEP's normal mode (deepseek-ai/DeepEP): each SM of the kernel moves a fixed rate over the links, up to the link; between domains
one copy for each domain visited passes the NIC and is forwarded inside. Its low-latency mode serves decoding and is not priced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, gcd, lgamma, log2

from simpar.costs.collective_law import Geometry
from simpar.specs.collective_constants import ExpertConstants

DISPATCHERS = ("alltoall", "deepep", "hybridep")
DEFAULT_SMS = 24
"""What DeepEP's own tables are measured with."""
TRAINED_SMS = {"deepep": 20, "hybridep": 32}
"""SMs that a dispatcher holds in training: Megatron-Core's moe_deepep_num_sms and DeepSeek-V3's report (3.2.2); what NVIDIA's
benchmark recipes set for HybridEP (Megatron-Bridge perf_recipes/_common.py)."""
PUBLISHED = ExpertConstants(
    dispatch_base_s=26e-6, combine_base_s=48e-6, node_s=30e-6, dispatch_sm_bytes_per_s=15.8e9, combine_sm_bytes_per_s=16.5e9,
    far_sm_share=0.75, link_efficiency=0.63, nic_efficiency=0.91,
)  # fmt: skip
"""Read off the tables of DeepEP on H100 (NVLink and 400 Gb/s NICs)."""
HYBRID_EP = {"dispatch_sm_bytes_per_s": 28.5e9, "combine_sm_bytes_per_s": 26.7e9, "link_efficiency": 0.53}
"""hybridep moves tokens by asynchronous bulk copies (TMA). Its tables as called from torch, GB200, 8-36 ranks of one domain (4,096
tokens of 7,168 values to 8 experts; deepseek-ai/DeepEP docs/README_Hybrid-EP.md), less the rows that stay on their rank: 16 SMs
dispatch 423-481 and combine 407-470 GB/s, 32 SMs 466-490 and 436-498 of the link's 900; the kernels alone reach 530-660."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One dispatch or combine of one rank.

    Attributes:
        direction: dispatch or combine.
        tokens: of this rank.
        row_bytes: one token on the wire, scales included.
        topk, experts: routing.
        sms: SMs the kernel is given.
        nodes_limit: most domains a token may visit (group-limited routing), or none.
        in_turn: experts are dealt in turn, so that those of a token are consecutive.
    """

    direction: str
    tokens: float
    row_bytes: float
    topk: int
    experts: int
    sms: int = DEFAULT_SMS
    nodes_limit: int | None = None
    in_turn: bool = False


def _log_choose(n: float, k: float) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


@lru_cache(maxsize=4096)
def groups_visited(groups: int, topk: int, experts: int) -> float:
    """Expected distinct groups out of `groups` that the k experts of a token live on."""
    away = experts - experts / groups
    if groups <= 1 or away < topk:
        return float(min(groups, topk))
    return groups * (1.0 - exp(_log_choose(away, topk) - _log_choose(experts, topk)))


@lru_cache(maxsize=4096)
def groups_in_turn(groups: int, topk: int, experts: int) -> float:
    """Mean of the groups that hold k consecutive experts, of tokens that take the next k each."""
    each = experts // groups
    starts = range(0, experts, gcd(topk, experts))
    return sum(min((start % each + topk - 1) // each + 1, groups) for start in starts) / len(starts)


def _visits(x: Exchange, g: Geometry) -> tuple[float, float]:
    """Copies of a token over the links (its own rank left out) and over the NIC (its own domain left out)."""
    visited = groups_in_turn if x.in_turn else groups_visited
    ranks = visited(g.size, x.topk, x.experts)
    domains = visited(g.domains, x.topk, x.experts)
    if x.in_turn:
        return ranks * (g.size - 1) / g.size, domains * (g.domains - 1) / g.domains
    if x.nodes_limit is not None and x.nodes_limit < domains:
        ranks = min(ranks, g.size * x.nodes_limit / g.domains)
        domains = float(x.nodes_limit)
    return ranks * (g.size - 1) / g.size, domains * (g.domains - 1) / g.domains


def dispatched_s(x: Exchange, g: Geometry, k: ExpertConstants) -> tuple[float, float]:
    """Latency and transfer of an exchange by a dispatcher's kernels, seconds."""
    dispatch = x.direction == "dispatch"
    near, far = (copies * x.tokens * x.row_bytes for copies in _visits(x, g))
    per_sm = k.dispatch_sm_bytes_per_s if dispatch else k.combine_sm_bytes_per_s
    rate = min(x.sms * per_sm * (k.far_sm_share if g.domains > 1 else 1.0), k.link_efficiency * g.link_bytes_per_s)
    transfer = near / rate
    if g.domains > 1:
        transfer = max(transfer, far / (k.nic_efficiency * g.rank_out_bytes_per_s))
    base = k.dispatch_base_s if dispatch else k.combine_base_s
    return base + (k.node_s + g.extra_latency_s) * log2(g.domains), transfer
