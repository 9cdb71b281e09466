"""Fitted collective constants of a machine, as `python -m validation.tools.fit collectives` writes them.

Numbers are plain SI floats (the files are written by a script); the laws they enter stand in docs/formulas_collectives.md.
Efficiencies are fractions of the raw rate of the profile's link or NIC, so that constants carry over to a machine with
other rates.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from simpar.specs.base import Evidence, Spec

Positive = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""Infinite where a limit does not apply."""
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Scope = Literal["domain", "network", "expert"]
"""Inside one scale-up domain, across domains, expert-parallel kernels."""


class CollectiveFit(Spec):
    """What a set of constants was fitted on and the error it reached, |predicted / measured - 1| as fractions.

    MAPE is averaged over series (hardware, nodes, collective) with equal weight.
    """

    source: str = ""
    rows: Annotated[int, Field(ge=0)] = 0
    series: Annotated[int, Field(ge=0)] = 0
    mape_large: NonNegative = 0.0
    """Rows of at least 1 MiB."""
    mape_small: NonNegative = 0.0
    bias: float = 0.0
    held_out_mape_large: NonNegative = 0.0
    """Each node count (or group size, inside a domain) predicted from the others."""


class TimeBand(Spec):
    """80 % interval of measured / predicted for messages of at least `from_bytes`."""

    scope: Scope
    from_bytes: NonNegative
    low: Positive
    high: Positive


class RingConstants(Spec):
    """Rings (and chains) inside one scale-up domain, by protocol."""

    ll_base_s: NonNegative
    ll_hop_s: NonNegative
    ll_efficiency: Fraction
    """Bus bandwidth of LL over the raw link: half the words are flags."""
    ll128_base_s: NonNegative
    ll128_hop_s: NonNegative
    ll128_efficiency: Fraction
    low_latency_bytes_per_rank: Positive = math.inf
    """Rings take LL and LL128 below this many bytes of the message per rank, whatever is faster (the tuner's choice)."""
    simple_base_s: NonNegative
    simple_hop_s: NonNegative
    efficiency: dict[str, Fraction]
    """Collective -> bus bandwidth of Simple over the raw link, for a long ring."""
    local_copy: dict[str, NonNegative] = Field(default_factory=dict)
    """Collective -> cost of the rank's own part, which crosses no link, relative to a part that does."""
    fill_s: NonNegative
    """Overhead of one pipeline chunk: the best chunking costs 2 sqrt(fill_s x transfer time)."""
    share_exponent: NonNegative = 0.0
    """Bandwidth falls as (2 / ranks) ** exponent where ranks share one root complex (PCIe without peer access)."""
    bridge_share: Fraction = 1.0
    """Share of a pair's bandwidth that rings of more ranks keep, which cross the host's bridges (PCIe with peer access)."""


class NvlsConstants(Spec):
    """All-reduce in the NVLink switch."""

    base_s: NonNegative
    hop_s: NonNegative
    """Per doubling of the ranks."""
    efficiency: Fraction
    """Bytes of the buffer per second over the raw link."""
    fill_s: NonNegative
    min_ranks: Annotated[int, Field(ge=2)]
    """Smaller groups take rings, as the tuner does."""
    take_over_bytes: Positive = math.inf
    """From this message on the tuner takes no ring where it may use the switch."""


class PeerConstants(Spec):
    """Grouped send and receive inside one scale-up domain."""

    base_s: NonNegative
    peer_s: NonNegative
    """Each peer beyond the 16 that one batch of channels serves."""
    efficiency: Fraction
    local_copy: NonNegative
    fill_s: NonNegative
    ll_efficiency: Fraction = 0.1
    share_exponent: NonNegative | None = None
    """Bandwidth falls as (2 / ranks) ** exponent where all ranks exchange over the host's bridges; None: as the rings'."""
    uneven_s: NonNegative = 0.0
    """Most that idle rounds cost where the ranks are more than one batch and no power of two."""
    pair_base_s: NonNegative
    pair_efficiency: Fraction
    """One pair, all channels open."""
    pair_few_efficiency: Fraction
    """One pair, a message too small to open more channels."""
    pair_floor_s: NonNegative
    """Least transfer time with all channels open."""


class ScaleUpConstants(Spec):
    """One GPU generation on one kind of scale-up fabric."""

    machine: str
    kind: Evidence
    ring: RingConstants
    nvls: NvlsConstants | None = None
    peer: PeerConstants
    fit: CollectiveFit = CollectiveFit()


class NetworkConstants(Spec):
    """One kind of NIC and fabric between domains."""

    machine: str
    kind: Evidence
    base_s: NonNegative = 0.0
    """Set-up of any ring or tree that leaves the domain (proxy threads), beyond its hops."""
    ll_hop_s: NonNegative
    ll128_hop_s: NonNegative
    simple_hop_s: NonNegative
    tree_base_s: NonNegative = 0.0
    """Extra set-up of a tree that leaves the domain, Simple protocol."""
    tree_hop_s: NonNegative
    """One level of the tree between domains, one way, Simple protocol."""
    ring_efficiency: Fraction
    """Of the raw NIC rate, ring over all NICs."""
    tree_efficiency: Fraction
    fill_s: NonNegative
    fill_exponent: NonNegative = 0.5
    """Pipeline fill grows as (levels) ** exponent."""
    full_bytes: Positive = math.inf
    """Message from which the fill grows no more: chunks are as large as the buffers."""
    low_latency_bytes: Positive = math.inf
    """Trees take LL and LL128 up to this message, whatever is faster (the tuner's choice)."""
    peer_base_s: NonNegative
    peer_pipeline_s: NonNegative = 0.0
    """Overhead of a chunk in the pipelines of an all-to-all, one for each rank in another domain."""
    peer_efficiency: Fraction
    peer_fill_s: NonNegative = 0.0
    fit: CollectiveFit = CollectiveFit()


class ExpertConstants(Spec):
    """DeepEP-style dispatch and combine: kernels that send a token once to each rank (and node) it visits."""

    dispatch_base_s: NonNegative
    combine_base_s: NonNegative
    node_s: NonNegative
    """Per doubling of the domains: counts and tails over the network."""
    dispatch_sm_bytes_per_s: Positive
    """What one SM moves over the links."""
    combine_sm_bytes_per_s: Positive
    far_sm_share: Fraction
    """An SM's rate where it also serves the network."""
    link_efficiency: Fraction
    nic_efficiency: Fraction
    fit: CollectiveFit = CollectiveFit()


class MeasuredCollective(Spec):
    """A collective of one host measured on this very machine; overrides the models for groups of as many ranks there."""

    collective: str
    ranks: Annotated[int, Field(gt=1)]
    bytes: Positive
    """As nccl-tests counts them."""
    seconds: Positive
    spread: NonNegative = 0.05
    """Half width of the 80 % interval over the value."""
    cores: NonNegative = 0.0
    """Cores of the host that each rank keeps busy meanwhile (gloo)."""


class CollectiveConstants(Spec):
    """Constants of the collective price models; empty ones are those of the nearest fitted machine, scaled by its links."""

    points: tuple[MeasuredCollective, ...] = ()

    scale_up: ScaleUpConstants | None = None
    network: NetworkConstants | None = None
    expert: ExpertConstants | None = None
    bands: tuple[TimeBand, ...] = ()
