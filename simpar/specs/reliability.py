"""What goes wrong during a run, how often, and how long it takes to go on: the reliability part of a plan file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpar.specs.base import Spec
from simpar.units import Seconds

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FailureSource(Spec):
    """One component whose failures stop the job. Exactly one of the two rates."""

    component: str
    """A name for the ledger: gpu, hbm, nic, software."""
    rate_per_node_day: Rate | None = None
    """Failures per node and day; or:"""
    rate_per_gpu_day: Rate | None = None
    """failures per GPU and day."""
    replaces_node: bool = True
    """The node must be replaced (hardware); false: the job restarts on the same nodes (software)."""
    detection: Seconds | None = None
    """none = reliability.detection."""
    repair: Seconds | None = None
    """none = reliability.repair."""
    source: str = ""
    """Where the rate stands."""


class CorrelatedFailure(Spec):
    """Something that takes several nodes down at once: a leaf switch, a rack's power."""

    name: str
    """What reports call it."""
    nodes_per_group: Annotated[int, Field(gt=0)]
    """Nodes behind one such thing."""
    rate_per_group_day: Rate
    """Failures per such thing and day."""
    repair: Seconds
    """Until all its nodes are back."""
    source: str = ""
    """Where the rate stands."""


class SlowNodes(Spec):
    """Nodes that run on, but slower: in a synchronous step the slowest node sets the pace."""

    rate_per_node_day: Rate = 0.0
    """How often a node turns slow."""
    initial_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the nodes that are slow at the start."""
    slowdown: Annotated[float, Field(ge=1)] = 1.1
    """Step time with such a node over step time without."""
    detection: Seconds = 6 * 3600.0
    """Until it is found."""
    action: Literal["replace", "recover"] = "replace"
    """replace: a planned stop swaps it for a spare; recover: it becomes fast again by itself."""
    source: str = ""
    """Where the figures stand."""


class ReliabilitySpec(Spec):
    """Failures and the way back. Failures are Poisson in wall-clock time, those during recovery start it anew."""

    failures: tuple[FailureSource, ...] = (
        FailureSource(
            component="node",
            rate_per_gpu_day=1e-3,
            source="assumed: published fleets lie between 4.7e-4 (Llama 3) and 1.8e-3 (OPT-175B) per GPU-day",
        ),
    )
    """Components whose failures stop the job; an empty list for a run without failures."""
    correlated: tuple[CorrelatedFailure, ...] = ()
    """Things that take several nodes down at once."""
    slow_nodes: SlowNodes | None = None
    """Nodes that run on, but slower."""
    silent_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the failures that hang or corrupt without an error."""
    silent_detection: Seconds = 1800.0
    """Until a silent failure is found."""
    detection: Seconds = 120.0
    """Until a failure is found and diagnosed."""
    replacement: Seconds = 120.0
    """Hot spare in the place of a failed node."""
    cold_replacement: Seconds = 1800.0
    """Cold spare booted and in place."""
    restart: Seconds = 180.0
    """Rescheduling and starting the processes."""
    initialisation: Seconds = 60.0
    """Communicators, compilation, data loader."""
    repair: Seconds = 86400.0
    """Mean time until a failed node is back as a spare."""
    repair_distribution: Literal["fixed", "exponential"] = "exponential"
    """How repair times spread around their mean."""
    rate_uncertainty: Annotated[float, Field(ge=1)] = 1.0
    """Ends of the 80 % interval of all failure rates together, as a factor (1.5 = rate / 1.5 to rate * 1.5)."""


class MaintenanceWindow(Spec):
    """A planned stop: the job saves, waits, restarts."""

    name: str = "maintenance"
    """What reports call it."""
    first_day: Annotated[float, Field(ge=0)]
    """Days after the start of the run."""
    every_days: Annotated[float, Field(gt=0)] | None = None
    """Repeats until the end of the run; none = once."""
    duration: Seconds
    """How long the job stands still, besides its restart."""
