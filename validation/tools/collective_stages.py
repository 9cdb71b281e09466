"""The four fits: links of a scale-up fabric, benchmark programs, networks, exchanges. Each with the earlier ones fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TypeVar, cast

import numpy as np

from simpar.costs.collective_defaults import published_network, published_scale_up
from simpar.evidence.collective_rows import LARGE, Cell, Harnesses, Key, errors, predict
from simpar.evidence.robust import Array, nested
from simpar.specs.collective_constants import NetworkConstants, ScaleUpConstants
from validation.tools.minimise import Parameter, minimise

C = TypeVar("C", ScaleUpConstants, NetworkConstants, dict[str, float])
US = 1e-6
NO_NETWORK = published_network(2e-6)
"""Of groups inside one domain."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
THRESHOLDS = (0.24, 0.49, 0.99, 1.99, 3.99, 2.0**40)
"""MiB of the message per rank up to which rings take LL and LL128; the best is kept."""
TAKE_OVER = (0.99, 1.99, 3.99, 7.99)
"""MiB from which the switch may take over from rings."""
NETWORK_THRESHOLDS = (0.25, 0.5, 1.0, 4.0, 16.0, 2.0**40)
"""MiB of the message up to which trees across domains take LL and LL128."""
PEER_ACCESS = ("blackwell",)
"""Generations whose PCIe cards of the tables read each other's memory; the others stage through the host's."""
STAGED_EXPONENT = 2.0
"""A rank's bandwidth through the host's memory falls with the square of the ranks: two L40S reach 20 GB/s, four 4.9, eight 1.2-2"""
PAIR_EFFICIENCY = 0.6
"""Prior of what two ranks reach of the raw PCIe rate, within some 10 % (L40S 0.62-0.66, RTX PRO 6000 0.51-0.60)."""
NVLS_MIN_RANKS = {"hopper": 5, "blackwell": 6}
"""From runs with NVLS on and off by group size (ramp_h200, ramp_b200 of the tables): smaller groups keep rings."""


def fit(
    cells: Sequence[Cell], start: C, parameters: list[Parameter], model_of: Callable[[C], Callable[[Cell], Array]], steps: int = 60
) -> tuple[float, C]:
    """(Error of large messages and less so of small ones, `start` with the parameters closest to the measured times)."""
    measured = np.log(np.concatenate([c.measured_s for c in cells]))
    weights = np.concatenate([c.weights for c in cells])
    names = [p.name for p in parameters]

    def at(values: Array) -> C:
        return cast(C, nested(start, dict(zip(names, values.tolist(), strict=True))))

    def residuals(values: Array) -> Array:
        model = model_of(at(values))
        return np.asarray(np.log(np.concatenate([model(c) for c in cells])) - measured)

    found = at(minimise(residuals, parameters, weights / weights.sum(), steps=steps))
    large, small, _ = errors(cells, model_of(found))
    return large + 0.3 * small, found


def _span(name: str, start: float, factor: float = 30.0, high: float = 1e3, sigma: float = 2.0) -> Parameter:
    return Parameter(name, start, start / factor, min(start * factor, high), sigma)


def _rate(name: str, start: float) -> Parameter:
    """An efficiency of a NIC: known within some 10 % beforehand, which holds it where few node counts were measured."""
    return Parameter(name, start, 0.3, 1.0, 0.1)


def scale_up_parameters(start: ScaleUpConstants, cells: Sequence[Cell]) -> list[Parameter]:
    """What stage 1 fits: only constants that some cell depends on."""
    seen = {c.collective for c in cells}
    ring, peer = start.ring, start.peer
    found: list[Parameter] = []
    if seen & set(_COLLECTIVES):
        ring_names = ("ll_base_s", "ll_hop_s", "ll128_base_s", "ll128_hop_s", "fill_s")
        found += [_span(f"ring.{name}", getattr(ring, name)) for name in ring_names]
        # Simple synchronises through memory fences: it starts no sooner than NCCL's figures by much, or it would pose as LL.
        found += [Parameter("ring.simple_base_s", ring.simple_base_s, 0.8 * ring.simple_base_s, 30 * ring.simple_base_s),
                  Parameter("ring.simple_hop_s", ring.simple_hop_s, 0.4 * ring.simple_hop_s, 30 * ring.simple_hop_s)]  # fmt: skip
        found += [_span("ring.ll_efficiency", ring.ll_efficiency, high=0.5)]
        found += [_span("ring.ll128_efficiency", ring.ll128_efficiency, high=0.9)]
    for name in _COLLECTIVES:
        if name in seen:
            found += [_ring_rate(name, start)]
            if not _on_pcie(start):
                found.append(_span(f"ring.local_copy.{name}", 0.3, 10))
    if "all_to_all" in seen:
        names = ("base_s", "peer_s", "fill_s") if _on_pcie(start) else ("base_s", "peer_s", "fill_s", "local_copy")
        found += [_span(f"peer.{name}", getattr(peer, name)) for name in names]
        found += [_pair_rate("peer.efficiency") if _on_pcie(start) else _span("peer.efficiency", peer.efficiency, high=1.0)]
        found += [_span("peer.ll_efficiency", peer.ll_efficiency)]
        if any(c.geometry.size > 16 and c.geometry.size & (c.geometry.size - 1) for c in cells):
            found.append(Parameter("peer.uneven_s", 300 * US, 1 * US, 3000 * US))
    if "send_recv" in seen:
        found += [_span("peer.pair_base_s", peer.pair_base_s), _span("peer.pair_floor_s", peer.pair_floor_s)]
        found += [_span("peer.pair_efficiency", peer.pair_efficiency, high=1.0),
                  # Four channels: some 25 GB/s each on any generation.
                  Parameter("peer.pair_few_efficiency", max(peer.pair_few_efficiency, 0.25), 0.02, 1.0)]  # fmt: skip
    if start.nvls is not None and any(c.nvls and c.collective == "all_reduce" for c in cells):
        switch_names = ("base_s", "hop_s", "fill_s")
        found += [_span(f"nvls.{name}", getattr(start.nvls, name) or 2 * US) for name in switch_names]
        found.append(_span("nvls.efficiency", start.nvls.efficiency, high=0.9))
    if start.peer.share_exponent is not None:
        found += [Parameter("ring.bridge_share", start.ring.bridge_share, 0.1, 1.0, 0.3),
                  Parameter("peer.share_exponent", start.peer.share_exponent, 0.1, 2.0, 0.2)]  # fmt: skip
    return found


def _on_pcie(start: ScaleUpConstants) -> bool:
    return bool(start.ring.share_exponent) or start.peer.share_exponent is not None


def _ring_rate(collective: str, start: ScaleUpConstants) -> Parameter:
    name = f"ring.efficiency.{collective}"
    return _pair_rate(name) if _on_pcie(start) else Parameter(name, 0.82, 0.02, 1.0)


def _pair_rate(name: str) -> Parameter:
    return Parameter(name, PAIR_EFFICIENCY, 0.02, 1.0, 0.1)


def _start_scale_up(key: Key) -> ScaleUpConstants:
    pcie = key[1] == "pcie"
    start = published_scale_up(pcie)
    if pcie:
        # A copy inside the device memory costs nothing beside PCIe.
        free = dict.fromkeys(start.ring.local_copy, 0.0)
        peers = key[0] in PEER_ACCESS
        ring = {"local_copy": free, "share_exponent": 0.0 if peers else STAGED_EXPONENT, "bridge_share": 0.7 if peers else 1.0}
        peer = {"local_copy": 0.0, "share_exponent": 0.5 if peers else None}
        start = start.model_copy(update={"ring": start.ring.model_copy(update=ring), "peer": start.peer.model_copy(update=peer)})
    if start.nvls is None or key[0] not in NVLS_MIN_RANKS or key[1] not in ("nvswitch", "nvrack"):
        return start.model_copy(update={"nvls": None})
    minimum = {"min_ranks": NVLS_MIN_RANKS[key[0]]}
    return start.model_copy(update={"nvls": start.nvls.model_copy(update=minimum)})


def fit_scale_up(key: Key, cells: Sequence[Cell], harnesses: Harnesses, like: ScaleUpConstants | None = None) -> ScaleUpConstants:
    """Stage 1: the links of one generation and scale-up kind, from groups inside one domain.

    Thresholds are tried one by one, or taken from `like`.
    """
    begin, rings, switch = _start_scale_up(key), "ring.low_latency_bytes_per_rank", "nvls.take_over_bytes"

    def model_of(up: ScaleUpConstants) -> Callable[[Cell], Array]:
        return lambda cell: predict(cell, up, NO_NETWORK, harnesses)

    def best(thresholds: Iterable[dict[str, float]]) -> ScaleUpConstants:
        starts = [nested(begin, each) for each in thresholds]
        tried = (fit(cells, one, scale_up_parameters(one, cells), model_of, 40) for one in starts)
        return min(tried, key=itemgetter(0))[1]

    if like is not None:
        return best([{rings: like.ring.low_latency_bytes_per_rank} | ({switch: like.nvls.take_over_bytes} if like.nvls else {})])
    found = best({rings: threshold * LARGE} for threshold in THRESHOLDS)
    if found.nvls is None:
        return found
    # The tuner does hand over to the switch (at 2 MiB on H200): one of these it must be.
    own = found.ring.low_latency_bytes_per_rank
    return best({rings: own, switch: threshold * LARGE} for threshold in TAKE_OVER)


def fit_harnesses(cells: Sequence[Cell], ups: dict[Key, ScaleUpConstants]) -> Harnesses:
    """Stage 2: what each benchmark program adds, and the share of the rate it reaches."""
    found: Harnesses = {}
    parameters = [Parameter("added_s", 15 * US, 0.1 * US, 200 * US), Parameter("rate", 0.95, 0.5, 1.05)]
    for name in sorted({c.harness for c in cells} - {""}):
        mine = [c for c in cells if c.harness == name and c.key[:2] in ups]

        def model_of(program: dict[str, float], name: str = name) -> Callable[[Cell], Array]:
            one = {name: (program["added_s"], program["rate"])}
            return lambda cell: predict(cell, ups[cell.key[:2]], NO_NETWORK, one)

        _, program = fit(mine, {"added_s": 0.0, "rate": 1.0}, parameters, model_of)
        found[name] = (program["added_s"], program["rate"])
    return found


def network_parameters(start: NetworkConstants, cells: Sequence[Cell]) -> list[Parameter]:
    """What stage 3 fits: only constants that some cell depends on."""
    seen = {c.collective for c in cells}
    rings, trees = bool(seen & {"all_gather", "reduce_scatter"}), "all_reduce" in seen
    found = []
    if rings or trees:
        # With one node count measured, what a hop costs and what starting costs cannot be told apart: the hop stays near
        # NCCL's own figure (plus the NIC's latency) and the start takes the rest.
        found += [_span("ll_hop_s", start.ll_hop_s, sigma=0.3), _span("ll128_hop_s", start.ll128_hop_s, sigma=0.3)]
        found += [Parameter("base_s", 2 * US, 0.01 * US, 1000 * US, 4.0), _span("fill_s", start.fill_s, 300)]
        found.append(_rate("ring_efficiency", start.ring_efficiency))
    if rings:
        found.append(_span("simple_hop_s", start.simple_hop_s, sigma=0.3))
    if trees:
        found += [_span("tree_hop_s", start.tree_hop_s, sigma=0.3), _rate("tree_efficiency", start.tree_efficiency)]
        found += [Parameter("tree_base_s", 5 * US, 0.1 * US, 1000 * US, 4.0), Parameter("fill_exponent", 0.3, 0.02, 1.0, 0.7)]
        found.append(Parameter("full_bytes", 64 * LARGE, LARGE, 2**36))
    if "all_to_all" in seen:
        found += [_span("peer_base_s", start.peer_base_s), _rate("peer_efficiency", start.peer_efficiency)]
        found.append(Parameter("peer_fill_s", 1 * US, 0.001 * US, 100 * US))
    return found


def fit_network(cells: Sequence[Cell], ups: dict[Key, ScaleUpConstants], harnesses: Harnesses) -> NetworkConstants:
    """Stage 3: one NIC kind, from groups across domains."""
    start = published_network(float(np.median([c.nic_latency_s for c in cells])))
    trees = any(c.collective == "all_reduce" for c in cells)
    thresholds = NETWORK_THRESHOLDS if trees else NETWORK_THRESHOLDS[-1:]
    starts = [start.model_copy(update={"low_latency_bytes": threshold * LARGE * 0.99}) for threshold in thresholds]

    def model_of(net: NetworkConstants) -> Callable[[Cell], Array]:
        return lambda cell: predict(cell, ups[cell.key[:2]], net, harnesses)

    return min((fit(cells, one, network_parameters(one, cells), model_of) for one in starts), key=itemgetter(0))[1]


def fit_pipelines(
    cells: Sequence[Cell], ups: dict[Key, ScaleUpConstants], nets: dict[Key, NetworkConstants], harnesses: Harnesses
) -> dict[str, float]:
    """Stage 4: NIC kind -> `peer_pipeline_s`, from all-to-alls of several node counts."""
    found = {}
    for kind in sorted({c.key[2] for c in cells}):

        def model_of(one: dict[str, float]) -> Callable[[Cell], Array]:
            return lambda cell: predict(cell, ups[cell.key[:2]], nested(nets[cell.key], one), harnesses)

        parameter = Parameter("peer_pipeline_s", 0.1 * US, 0.001 * US, 100 * US)
        mine = [c for c in cells if c.key[2] == kind]
        found[kind] = fit(mine, {"peer_pipeline_s": 0.0}, [parameter], model_of)[1]["peer_pipeline_s"]
    return found
