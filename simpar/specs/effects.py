"""What a real cluster adds to the ideal step: shared links, slow ranks, jitter, broken links, uneven experts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpar.specs.base import Spec
from simpar.units import Seconds

Sigma = Annotated[float, Field(ge=0, le=1)]


class LinkFault(Spec):
    """A link at less than its capacity."""

    link: str
    """Name as the topology gives it, such as "nic:3>leaf:0" (`simpar topology --json` lists the kinds), or its index."""
    factor: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the capacity while it is bad; 0 = down."""
    period: Seconds | None = None
    """A flapping link: bad for `down` at the start of every period."""
    down: Seconds | None = None
    """How long it is bad in each period."""


class EffectsSpec(Spec):
    """Effects that only the discrete-event engine has. Defaults: none but interference."""

    contention: bool = False
    """Concurrent transfers share the links of the topology, max-min fair."""
    interference: bool = True
    """Compute slows while a collective of the same rank holds SMs."""
    expand: bool = False
    """Every rank has streams of its own (needed for slow ranks other than whole pipeline ranks)."""
    slow_ranks: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=1e-6, le=1e6)]] = {}
    """Pipeline rank (global rank when expanded) -> factor on its compute seconds; 1.1 is 10 % slower."""
    dead_rails: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """NIC slots that are down in every node."""
    link_faults: tuple[LinkFault, ...] = ()
    """Links with less than their bandwidth, for good or at times."""
    compute_sigma: Sigma = 0.0
    """Standard deviation of the logarithm of each compute op's time, drawn anew for every op."""
    communication_sigma: Sigma = 0.0
    """The same of each transfer."""
    rank_sigma: Sigma = 0.0
    """The same, drawn once per rank and run (silicon, temperature); 0.02 is a typical node-to-node spread (assumed)."""
    repetitions: Annotated[int, Field(gt=0, le=1_000_000)] = 1
    """Independent draws; more than 1 gives p50, p90 and p99."""
    seed: int = 0
    """Of all that is drawn."""

    @property
    def needs_network(self) -> bool:
        """Whether the topology's links matter."""
        return self.contention or bool(self.dead_rails) or bool(self.link_faults)

    @property
    def is_random(self) -> bool:
        """Whether repetitions differ."""
        return self.compute_sigma > 0 or self.communication_sigma > 0 or self.rank_sigma > 0
