"""Send/receive and what NCCL builds from it: all-to-all, gather and scatter (ncclGroup of sends and receives).

Rules: NCCL src/enqueue.cc, src/graph/paths.cc; inside a domain every rank drives its link, between domains every rank
drives its NIC (busbw = NIC (n-1)/(n-g), g ranks a domain: measured on 2 and 4 nodes, docs/formulas_collectives.md).
"""

from __future__ import annotations

from simpar.costs.collective_law import Geometry, Law, fill
from simpar.specs.collective_constants import NetworkConstants, ScaleUpConstants

PEER_TO_PEER = ("send_recv", "all_to_all", "gather", "scatter")
BATCH = 16
"""Peers that the channels of one batch serve: latency grows with the rest."""
CHANNELS = 32
"""That all peers of a communicator inside one domain share (NCCL src/init.cc, src/enqueue.cc)."""
FEW = 4
"""Channels that one of them starts with among the eight ranks of a node; `pair_few_efficiency` is what these reach."""


def _shared(g: Geometry, up: ScaleUpConstants) -> float:
    """Share of its link that a rank keeps when all exchange (less than one on PCIe)."""
    own = up.peer.share_exponent
    return float((2.0 / max(2, g.per_domain)) ** (up.ring.share_exponent if own is None else own))


def _all_to_all(g: Geometry, up: ScaleUpConstants, net: NetworkConstants) -> list[Law]:
    peer, n = up.peer, g.size
    late = peer.peer_s * max(0, n - BATCH)
    near = (g.per_domain - 1 + peer.local_copy) / n / (peer.efficiency * _shared(g, up) * g.link_bytes_per_s)
    gamma = fill(peer.fill_s, near)
    if g.domains == 1:
        base = peer.base_s + late
        slow = (n - 1) / n / (peer.ll_efficiency * _shared(g, up) * g.link_bytes_per_s)
        found = [Law("P2P", "LL", base, slow), Law("P2P", "Simple", base, near, gamma, min(32, 4 * n))]
        rounds = 1 << (n - 1).bit_length()
        if n > BATCH and rounds != n:
            # The rounds are laid out for the next power of two: ranks idle in some, until enough is in flight.
            idle = Law("P2P", "Simple", base, near * rounds / n, gamma * (rounds / n) ** 0.5, 32)
            found[1:] = [idle, Law("P2P", "Simple", base + peer.uneven_s, near, gamma, 32)]
        return found
    remote = n - g.fewest_per_domain
    out = remote / n / (net.peer_efficiency * g.rank_out_bytes_per_s)
    # Over NICs each remote rank's part fills a pipeline of its own, one after the other: as deep as there are remote ranks.
    gamma += fill(net.peer_fill_s, out) + fill(net.peer_pipeline_s, out, remote if g.over_network else 0)
    return [Law("P2P", "Simple", peer.base_s + net.peer_base_s + g.extra_latency_s, max(near, out), gamma, 16)]


def channels_of_a_pair(ranks: int) -> int:
    """Channels that a message to one peer starts with in a communicator of `ranks`: halved until all peers' fit.

    They double while each carries more than 16 MiB: the time of `pair_floor_s` whatever their number at the start. A pair
    is taken as part of a communicator of eight: frameworks send through that of the whole pipeline or context group.
    """
    return max(1, min(FEW, CHANNELS >> (ranks - 1).bit_length()))


def _pair(g: Geometry, up: ScaleUpConstants, net: NetworkConstants) -> list[Law]:
    peer = up.peer
    if g.domains == 1:
        channels = channels_of_a_pair(g.size)
        few = FEW / channels / (peer.pair_few_efficiency * g.link_bytes_per_s)
        beta = 1.0 / (peer.pair_efficiency * g.link_bytes_per_s)
        opened = Law("P2P", "Simple", peer.pair_base_s, beta, channels=CHANNELS, floor_s=peer.pair_floor_s)
        return [Law("P2P", "Simple", peer.pair_base_s, few, channels=channels), opened]
    beta = 1.0 / (net.ring_efficiency * g.pair_out_bytes_per_s)
    alpha = peer.pair_base_s + net.peer_base_s + g.extra_latency_s
    return [Law("P2P", "Simple", alpha, beta, fill(net.peer_fill_s, beta), 4)]


def _rooted(g: Geometry, up: ScaleUpConstants, net: NetworkConstants) -> list[Law]:
    """Gather / scatter: all the bytes pass the root's link, those of other domains its NIC."""
    peer, n = up.peer, g.size
    beta = (n - 1) / n / (peer.efficiency * g.link_bytes_per_s)
    alpha = peer.base_s + peer.peer_s * max(0, n - BATCH)
    if g.domains > 1:
        remote = (n - g.fewest_per_domain) / n
        beta = max(beta, remote / (net.peer_efficiency * g.pair_out_bytes_per_s))
        alpha += net.peer_base_s + g.extra_latency_s
    return [Law("P2P", "Simple", alpha, beta, fill(peer.fill_s, beta), 16)]


def laws(collective: str, g: Geometry, up: ScaleUpConstants, net: NetworkConstants) -> list[Law]:
    """The laws of a collective made of sends and receives."""
    if collective == "all_to_all":
        return _all_to_all(g, up, net)
    return _pair(g, up, net) if collective == "send_recv" else _rooted(g, up, net)
