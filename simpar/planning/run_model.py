"""The run as numbers: what plan file, hardware profiles and step model come down to before anything is simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simpar.planning.closed_forms import DAY_S

CAUSES = (
    "checkpoint_stall",
    "lost_work",
    "detection",
    "replacement",
    "waiting_for_spare",
    "restart",
    "initialisation",
    "checkpoint_load",
    "slow_node",
    "maintenance",
)
"""Every cause of lost time, in the order of reports."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch at one speed: a step of a batch ramp, or the rest of a phase, on one cluster size."""

    phase: int
    tokens: float
    tokens_per_s: float
    utilisation: float
    """Share of the power between idle and busy that is drawn while training."""
    step_time_s: float | None = None
    low: float = 1.0
    high: float = 1.0
    """Ends of the 80 % interval of the step time, as factors."""

    @property
    def ideal_s(self) -> float:
        """Time at full speed without any loss."""
        return self.tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Stage:
    """The cluster between two expansions."""

    nodes: int
    gpus: int
    pieces: tuple[Piece, ...]
    """The whole training at this cluster size."""
    interval_s: float
    """Training time between checkpoints."""
    stall_s: float
    """How long one checkpoint stops training."""
    durable_s: float
    """From the start of a checkpoint until it can be loaded."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Nodes that join: at a day or at a number of tokens (the other is None)."""

    at_s: float | None
    at_tokens: float | None
    add_nodes: int


@dataclass(frozen=True, slots=True)
class Source:
    """One Poisson source of failures. A group source takes `nodes_hit` nodes at once."""

    name: str
    rate_per_node_s: float
    nodes_hit: int
    detection_s: float
    repair_s: float


@dataclass(frozen=True, slots=True)
class SlowNodeModel:
    """Slow nodes as numbers."""

    rate_per_node_s: float
    initial_fraction: float
    slowdown: float
    detection_s: float
    replace: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """The way back after a stop, seconds."""

    replacement_s: float
    cold_replacement_s: float
    restart_s: float
    initialisation_s: float
    load_s: float
    silent_fraction: float
    silent_detection_s: float
    fixed_repair: bool

    @property
    def process_s(self) -> float:
        """Restart, initialisation and load: what every stop costs."""
        return self.restart_s + self.initialisation_s + self.load_s


@dataclass(frozen=True, slots=True)
class Window:
    """A planned stop."""

    name: str
    start_s: float
    duration_s: float
    every_s: float | None


@dataclass(frozen=True, slots=True)
class RunModel:
    """A whole run, ready for the failure simulation."""

    phases: tuple[str, ...]
    stages: tuple[Stage, ...]
    growth: tuple[Growth, ...]
    sources: tuple[Source, ...]
    slow_nodes: SlowNodeModel | None
    recovery: Recovery
    windows: tuple[Window, ...]
    hot_spares: int
    cold_spares: int
    restart_between_phases: bool
    rate_uncertainty: float

    @property
    def ideal_s(self) -> float:
        """Time of the whole training at full speed on the first stage's cluster."""
        return sum(piece.ideal_s for piece in self.stages[0].pieces)

    @property
    def tokens(self) -> float:
        """All tokens."""
        return sum(piece.tokens for piece in self.stages[0].pieces)

    def failure_rate_per_s(self, stage: int = 0) -> float:
        """Rate of job failures with the nodes of `stage`."""
        return self.stages[stage].nodes * sum(source.rate_per_node_s for source in self.sources)

    def mtti_s(self, stage: int = 0) -> float:
        """Mean time to interrupt."""
        rate = self.failure_rate_per_s(stage)
        return 1.0 / rate if rate > 0 else float("inf")

    def mean_recovery_s(self) -> float:
        """Expected recovery time R when a spare is at hand."""
        total = sum(source.rate_per_node_s for source in self.sources)
        if total <= 0:
            return self.recovery.process_s
        silent = self.recovery.silent_fraction
        detection = sum(s.rate_per_node_s * s.detection_s for s in self.sources) / total
        swaps = sum(s.rate_per_node_s for s in self.sources if s.nodes_hit) / total
        cold = self.cold_spares and not self.hot_spares
        spare = self.recovery.cold_replacement_s if cold else self.recovery.replacement_s
        return (1 - silent) * detection + silent * self.recovery.silent_detection_s + swaps * spare + self.recovery.process_s

    def repair_rate_per_node_day(self) -> float:
        """Nodes that need a replacement, per node-day."""
        return DAY_S * sum(source.rate_per_node_s * source.nodes_hit for source in self.sources)

    def scaled(self, step_time: float, rates: float) -> RunModel:
        """The same run with all step times and failure rates multiplied (one draw of their uncertainty)."""
        if step_time == 1.0 and rates == 1.0:
            return self
        stages = tuple(
            replace(stage, pieces=tuple(replace(p, tokens_per_s=p.tokens_per_s / step_time) for p in stage.pieces))
            for stage in self.stages
        )
        sources = tuple(replace(source, rate_per_node_s=source.rate_per_node_s * rates) for source in self.sources)
        slow = self.slow_nodes and replace(self.slow_nodes, rate_per_node_s=self.slow_nodes.rate_per_node_s * rates)
        return replace(self, stages=stages, sources=sources, slow_nodes=slow)
