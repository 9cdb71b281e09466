"""All-reduce, all-gather, reduce-scatter, broadcast and reduce as NCCL runs them: the laws of ring, tree, NVLS, CollNet, PAT.

Which algorithms a collective may take and how each one's latency and traffic add up: NCCL src/graph/tuning.cc (2.30);
the constants are fitted (docs/formulas_collectives.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf, log2

from simpar.costs.collective_law import Geometry, Law, fill
from simpar.specs.collective_constants import NetworkConstants, NvlsConstants, ScaleUpConstants

REDUCTIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
PAYLOAD = {"LL": 0.5, "LL128": 120 / 128, "Simple": 1.0}
"""Share of the wire's bytes that is data (src/include/device.h)."""
_NO_COPY = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """What an algorithm is asked for: a collective in a geometry, on links, with what the machine switches on."""

    collective: str
    g: Geometry
    up: ScaleUpConstants
    net: NetworkConstants
    nvls: bool
    sharp: bool

    @property
    def switched(self) -> NvlsConstants | None:
        """NVLS, where the ranks and the machine allow it."""
        g, found = self.g, self.up.nvls
        if self.collective != "all_reduce" or not self.nvls or found is None or g.fewest_per_domain < 2:
            return None
        return found if g.domains > 1 or g.size >= found.min_ranks else None


def traffic(collective: str, n: int) -> float:
    """Bytes each rank sends per byte of the message: nccl-tests' bus bandwidth factor."""
    if collective == "all_reduce":
        return 2.0 * (n - 1) / n
    return 1.0 if collective in ("broadcast", "reduce") else (n - 1) / n


def _share(up: ScaleUpConstants, ranks: int) -> float:
    """Share of its link that a rank of a ring of `ranks` keeps (less than one on PCIe)."""
    ring = up.ring
    return float((2.0 / max(2, ranks)) ** ring.share_exponent * (ring.bridge_share if ranks > 2 else 1.0))


def _link_beta(collective: str, g: Geometry, up: ScaleUpConstants, ranks: int) -> float:
    """Seconds per byte of a Simple ring of `ranks` over the links of a domain, traffic of one rank = 1."""
    ring = up.ring
    efficiency = ring.efficiency.get(collective, ring.efficiency["all_gather"])
    efficiency *= _share(up, ranks)
    copy = ring.local_copy.get(collective, _NO_COPY) / max(1, ranks - 1)
    return (1.0 + copy) / (efficiency * g.link_bytes_per_s)


def _low_latency(r: Request) -> Iterator[tuple[str, float, float, float, float]]:
    """Protocol, base and hop inside a domain, hop between domains, and efficiency of the two low-latency protocols."""
    ring, net = r.up.ring, r.net
    yield "LL", ring.ll_base_s, ring.ll_hop_s, net.ll_hop_s, ring.ll_efficiency
    yield "LL128", ring.ll128_base_s, ring.ll128_hop_s, net.ll128_hop_s, ring.ll128_efficiency


def _ring(r: Request) -> Iterator[Law]:
    """Ring: n - 1 hops (all-reduce twice), one hop out of each domain; in one domain NVLS takes over from a size on."""
    collective, g, up, net = r.collective, r.g, r.up, r.net
    ring, n = up.ring, g.size
    most = r.switched.take_over_bytes if r.switched is not None and g.domains == 1 else inf
    rounds = 2 if collective == "all_reduce" else 1
    between = rounds * (g.domains - 1)
    within = rounds * (n - 1) - between
    wire, extra = traffic(collective, n), net.base_s if between else 0.0
    out = wire / (net.ring_efficiency * g.domain_out_bytes_per_s)
    share = _share(up, n)
    for protocol, base, hop, far, efficiency in _low_latency(r):
        beta = max(wire / (efficiency * share * g.link_bytes_per_s), out / PAYLOAD[protocol])
        limit = ring.low_latency_bytes_per_rank * n if g.domains == 1 else inf
        if g.domains > 1 and collective == "all_reduce":
            limit = net.low_latency_bytes
        alpha = base + extra + within * hop + between * (far + g.extra_latency_s)
        yield Law("Ring", protocol, alpha, beta, max_bytes=min(limit, most))
    alpha = ring.simple_base_s + extra + within * ring.simple_hop_s + between * (net.simple_hop_s + g.extra_latency_s)
    inner = wire * _link_beta(collective, g, up, n if g.domains == 1 else max(2, g.per_domain))
    gamma = fill(ring.fill_s, inner) + (fill(net.fill_s, out) if between else 0.0)
    full = net.full_bytes if between else inf
    yield Law("Ring", "Simple", alpha, max(inner, out), gamma, 24 if g.domains == 1 else 16, max_bytes=most, full_bytes=full)


def _tree(r: Request) -> Iterator[Law]:
    """Tree all-reduce across domains: up and down a chain in each domain and a double binary tree between them.

    Each NIC carries the buffer twice (to the parent, to the children), with two domains once.
    """
    g, up, net, ring = r.g, r.up, r.net, r.up.ring
    if r.collective != "all_reduce" or g.domains == 1:
        return
    depth = log2(g.domains)
    out = (1.0 if g.domains == 2 else 2.0) / (net.tree_efficiency * g.domain_out_bytes_per_s)
    wire = traffic("all_reduce", g.size)
    chain = 2.0 * (g.per_domain - 1)
    for protocol, base, hop, far, efficiency in _low_latency(r):
        beta = max(wire / (efficiency * g.link_bytes_per_s), out / PAYLOAD[protocol])
        alpha = base + net.base_s + chain * hop + 2 * depth * (far + g.extra_latency_s)
        yield Law("Tree", protocol, alpha, beta, max_bytes=net.low_latency_bytes)
    inner = wire * _link_beta("all_reduce", g, up, max(2, g.per_domain))
    alpha = ring.simple_base_s + net.base_s + net.tree_base_s + chain * ring.simple_hop_s
    alpha += 2 * depth * (net.tree_hop_s + g.extra_latency_s)
    gamma = fill(ring.fill_s, inner) + fill(net.fill_s, out, depth ** (2 * net.fill_exponent))
    yield Law("Tree", "Simple", alpha, max(inner, out), gamma, full_bytes=net.full_bytes)


def _nvls(r: Request) -> Iterator[Law]:
    """The switch of each domain reduces; between domains a tree (NVLSTree), or the network's switches (SHARP)."""
    g, net, nvls = r.g, r.net, r.switched
    if nvls is None:
        return
    inner = 1.0 / (nvls.efficiency * g.link_bytes_per_s)
    alpha, gamma = nvls.base_s + nvls.hop_s * log2(g.per_domain), fill(nvls.fill_s, inner)
    if g.domains == 1:
        yield Law("NVLS", "Simple", alpha, inner, gamma)
        return
    alpha += net.base_s + net.tree_base_s
    if r.sharp:
        out = 1.0 / (net.tree_efficiency * g.domain_out_bytes_per_s)
        rise = net.tree_hop_s + g.extra_latency_s
        yield Law("NVLS", "Simple", alpha + rise, max(inner, out), gamma + fill(net.fill_s, out))
    depth = log2(g.domains)
    out = (1.0 if g.domains == 2 else 2.0) / (net.tree_efficiency * g.domain_out_bytes_per_s)
    alpha += 2 * depth * (net.tree_hop_s + g.extra_latency_s)
    gamma += fill(net.fill_s, out, depth ** (2 * net.fill_exponent))
    yield Law("NVLSTree", "Simple", alpha, max(inner, out), gamma, full_bytes=net.full_bytes)


def _collnet(r: Request) -> Iterator[Law]:
    """CollNetDirect: ranks of a domain exchange directly, the network's switches reduce; NIC traffic once each way."""
    g, up, net = r.g, r.up, r.net
    if not r.sharp or r.collective != "all_reduce" or g.domains == 1:
        return
    inner = 2.0 * _link_beta("all_reduce", g, up, max(2, g.per_domain))
    out = 1.0 / (net.tree_efficiency * g.domain_out_bytes_per_s)
    alpha = up.ring.simple_base_s + 2 * up.ring.simple_hop_s * min(1, g.per_domain - 1)
    alpha += net.base_s + net.tree_base_s + net.tree_hop_s + g.extra_latency_s
    gamma = fill(up.ring.fill_s, inner) + fill(net.fill_s, out)
    yield Law("CollNetDirect", "Simple", alpha, max(inner, out), gamma)


def _pat(r: Request) -> Iterator[Law]:
    """PAT: logarithmic all-gather / reduce-scatter for one rank per domain; three quarters of the ring's bandwidth."""
    g, up, net = r.g, r.up, r.net
    if r.collective not in ("all_gather", "reduce_scatter") or g.domains == 1 or g.per_domain != 1:
        return
    out = traffic(r.collective, g.size) / (0.75 * net.ring_efficiency * g.domain_out_bytes_per_s)
    alpha = up.ring.simple_base_s + net.base_s + log2(g.size) * (net.simple_hop_s / 3.5 + g.extra_latency_s) + 2.8e-6 * log2(g.size)
    yield Law("PAT", "Simple", alpha, out, fill(net.fill_s, out))


ALGORITHMS: dict[str, Callable[[Request], Iterator[Law]]] = {
    "ring": _ring, "pat": _pat, "tree": _tree, "collnet": _collnet, "nvls": _nvls,
}  # fmt: skip
"""Algorithm -> the laws it offers for a request (none where it does not apply). A new one is a function and a line here."""


def laws(
    collective: str, g: Geometry, up: ScaleUpConstants, net: NetworkConstants, *, nvls: bool = True, sharp: bool = False
) -> list[Law]:
    """Every law NCCL may take for `collective` in this geometry, on the channels that it opens there."""
    request = Request(collective, g, up, net, nvls, sharp)
    found = [law for offered in ALGORITHMS.values() for law in offered(request)]
    return found if g.channels is None else [replace(law, channels=g.channels) for law in found]
