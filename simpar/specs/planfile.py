"""A plan file: a whole training run, weeks long, as the user writes it for `simpar plan`.

Times are strings with a unit ("5 min"), token counts numbers or strings with a decimal suffix ("15.6T"), prices are in
US dollars.
The rules that span several tables stand in `plan_rules.py` of the planning package.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from simpar.errors import InputError
from simpar.specs.base import Spec, read_toml, validate
from simpar.specs.catalog import plan_path
from simpar.specs.reliability import MaintenanceWindow, ReliabilitySpec
from simpar.specs.scenario import Published
from simpar.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, Watts, parse

_COUNT = re.compile(r"^\s*(\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)\s*([kKMBGT]?)\s*$")
_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(value: object) -> float:
    """A positive count such as 15.6e12 or "15.6T" (k, M, B or G, T are decimal)."""
    if isinstance(value, str):
        match = _COUNT.match(value)
        if match is None:
            raise ValueError('not a count; write it as 15.6e12 or "15.6T"')
        value = float(match.group(1).replace("_", "")) * _SCALE[match.group(2)]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError('must be a positive count, such as 15.6e12 or "15.6T"')
    return float(value)


def _parse_interval(value: object) -> object:
    """A checkpoint interval: the word of a rule as it is, else seconds."""
    rules = ("optimal", "young", "daly")
    if value in rules:
        return value
    try:
        seconds = parse(value, "seconds")
    except ValueError as error:
        raise ValueError(f"{error}, or one of {', '.join(rules)}") from None
    if seconds <= 0:
        raise ValueError("must be longer than zero")
    return seconds


Count = Annotated[float, BeforeValidator(parse_count)]
Interval = Annotated[Literal["optimal", "young", "daly"] | float, BeforeValidator(_parse_interval)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class AchievedFlops(Spec):
    """A throughput published as FLOP/s per GPU; tokens/s follow from the FLOPs of one token.

    FLOPs per token = k * (active_parameters + attention), with k = 6, or 8 where the published FLOP/s count full
    activation recomputation (Narayanan et al. 2021, arXiv 2104.04473), and attention = layers * width * sequence_length
    (half as much when causal).
    """

    flops_per_s_per_gpu: FlopsPerSecond
    """As published."""
    active_parameters: Count
    """Parameters that a token passes through."""
    num_layers: NonNegative = 0
    """Layers with attention; 0 leaves the attention out."""
    attention_width: NonNegative = 0
    """Heads times the mean of query-key and value head size."""
    causal: bool = True
    """The published FLOP/s count half of the attention square."""
    counts_recompute: bool = False
    """The published FLOP/s include the second forward of full recomputation."""

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of one token, forward and backward, in the convention of the published rate."""
        attention = self.num_layers * self.attention_width * sequence_length * (1 if self.causal else 2)
        return (8 if self.counts_recompute else 6) * (self.active_parameters + attention)


class BatchStep(Spec):
    """One step of a batch ramp."""

    tokens: Count
    """Tokens trained at this batch, counted from the end of the step before."""
    global_batch_size: Positive
    """Sequences per step."""
    relative_throughput: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Tokens/s against the phase's own, where the phase's throughput is given; a simulated phase computes it."""


class Phase(Spec):
    """A stretch of training at one sequence length. Its speed comes from exactly one of: scenario, tokens_per_s,
    tokens_per_s_per_gpu, step_time, flops, gpu_hours."""

    name: str = ""
    """What reports call it."""
    tokens: Count
    """Tokens of this phase."""
    starts_at_tokens: Annotated[float, Field(ge=0)] | None = None
    """Where it starts, to have it checked: it must be where the phase before ends."""
    scenario: str | None = None
    """Path of a scenario, relative to the plan file: its simulated step gives the speed."""
    set: tuple[str, ...] = ()
    """Overrides of that scenario, such as "plan.cp=16"."""
    layout: Literal["fixed", "search"] = "fixed"
    """fixed: the scenario's layout (data parallelism follows the cluster); search: the fastest one found."""
    sequence_length: Positive | None = None
    """Tokens per sequence; none = the scenario's."""
    global_batch_size: Positive | None = None
    """Sequences per step; none = the scenario's."""
    batch_ramp: tuple[BatchStep, ...] = ()
    """Smaller batches at the start of the phase."""
    tokens_per_s: PositiveFloat | None = None
    """Given throughput of rated_gpus GPUs; scaled with the number of GPUs."""
    tokens_per_s_per_gpu: PositiveFloat | None = None
    """Given throughput of one GPU."""
    step_time: Seconds | None = None
    """Given time of one step of global_batch_size * sequence_length tokens on rated_gpus GPUs."""
    flops: AchievedFlops | None = None
    """Given FLOP/s per GPU."""
    gpu_hours: PositiveFloat | None = None
    """Given productive GPU-hours of the whole phase (a small phase that is only known as such)."""
    rated_gpus: Positive | None = None
    """GPUs that tokens_per_s or step_time were measured on."""
    relative_uncertainty: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Half-width of the 80 % interval of a given speed, as a fraction; none = 0 for given speeds, the simulator's for
    simulated ones."""
    source: str = ""
    """Where given figures stand."""


class Expansion(Spec):
    """Nodes that join during the run, with a planned stop."""

    day: NonNegativeFloat | None = None
    """Days after the start; or:"""
    at_tokens: Count | None = None
    """Tokens trained."""
    add_nodes: Positive
    """How many."""


class FabricOverrides(Spec):
    """Changes of the scenario's network, for what-if questions."""

    oversubscription: Annotated[float, Field(ge=1)] | None = None
    """Leaf to spine."""
    pod_oversubscription: Annotated[float, Field(ge=1)] | None = None
    """Spine to core."""
    nics_per_node: Positive | None = None
    """Network adapters."""


class ClusterPlan(Spec):
    """The machines of the run."""

    num_nodes: Positive
    """Nodes that train; spares come on top."""
    hardware: str | None = None
    """A hardware profile; none = the scenarios'."""
    gpus_per_node: Positive | None = None
    """none = the profile's (8 where there is no profile)."""
    spares: NonNegative = 0
    """Hot spares: booted, idle, in place after reliability.replacement."""
    cold_spares: NonNegative = 0
    """Cold spares: in place after reliability.cold_replacement."""
    expansions: tuple[Expansion, ...] = ()
    """Nodes that join during the run; all by day or all by tokens."""
    fabric: FabricOverrides = FabricOverrides()
    """What if: changes of the network of simulated phases."""
    memory_scale: PositiveFloat = 1.0
    """What if: device memory, as a multiple of the profile's; concerns simulated phases."""
    scale_up_bandwidth_scale: PositiveFloat = 1.0
    """What if: links inside the scale-up domain."""
    nic_bandwidth_scale: PositiveFloat = 1.0
    """What if: each network adapter."""


class CheckpointPlan(Spec):
    """What is saved, how often, how fast."""

    interval: Interval = "optimal"
    """Training time between checkpoints, or the rule that chooses it: optimal (exact exponential form), young, daly."""
    least_interval: Seconds = 300.0
    """No rule chooses a shorter one: what a save costs beside the stall (wear and load of the storage, files, interference) is in
    no closed form. The shortest that is published for a shared storage: DeepSeek, "usually 5 minutes" (arXiv 2408.14158)."""
    mode: Literal["blocking", "asynchronous"] = "asynchronous"
    """blocking: training stands still until the data are stored; asynchronous: while they are copied to host memory."""
    bytes: Bytes | None = None
    """Size of one checkpoint; none = parameters * bytes_per_parameter."""
    parameters: Count | None = None
    """none = the scenario's model."""
    bytes_per_parameter: PositiveFloat = 14.0
    """bf16 weights 2 + fp32 master weights and two Adam moments 12."""
    write_bandwidth: BytesPerSecond | None = None
    """Of the whole storage."""
    read_bandwidth: BytesPerSecond | None = None
    """none = write_bandwidth."""
    snapshot_bandwidth: BytesPerSecond = 20e9
    """Device to host memory per GPU, for asynchronous saves."""
    save_time: Seconds | None = None
    """Until a checkpoint is stored; none = bytes / write_bandwidth."""
    load_time: Seconds | None = None
    """none = bytes / read_bandwidth."""
    stall: Seconds | None = None
    """How long training stands still; none = save_time (blocking), bytes per GPU / snapshot_bandwidth."""
    keep: Positive = 2
    """Checkpoints kept, for the size of the storage."""
    storage_capacity: Bytes | None = None
    """What the storage holds, to be checked against keep."""


class RentPrice(Spec):
    """Machines by the hour."""

    usd_per_gpu_hour: NonNegativeFloat
    """Of every GPU that is held, busy or not."""
    by_hardware: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Other prices by hardware profile, for comparisons."""
    includes_spares: bool = True
    """Spares are paid for as well."""


class OwnPrice(Spec):
    """Machines bought: straight-line amortisation over their life, plus energy and people."""

    usd_per_gpu: NonNegativeFloat
    """The accelerator alone."""
    by_hardware: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Other prices by hardware profile, for comparisons."""
    server_overhead: Annotated[float, Field(ge=1)] = 1.5
    """Server over accelerator cost (1.3 to 2.1)."""
    interconnect_overhead: Annotated[float, Field(ge=1)] = 1.2
    """With the network over without (1.07 to 1.32)."""
    lifetime_years: PositiveFloat = 4.0
    """Until the machines are written off."""
    utilisation_of_life: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the life in which the machines are used at all."""
    usd_per_kwh: NonNegativeFloat = 0.08
    """Electricity."""
    staff_usd_per_year: NonNegativeFloat = 0.0
    """People who run the machines."""


class PriceSpec(Spec):
    """Rented or owned: exactly one."""

    rent: RentPrice | None = None
    """Machines by the hour; or:"""
    own: OwnPrice | None = None
    """machines bought."""


class PowerSpec(Spec):
    """Power by utilisation: idle + (busy - idle) * utilisation, per GPU; plus the rest of the node; times PUE."""

    gpu_busy: Watts | None = None
    """none = the profile's board power limit."""
    gpu_idle: Watts | None = None
    """none = the profile's, else 15 % of gpu_busy."""
    node_other: Watts | None = None
    """Everything in a node but its GPUs; none = the profile's, else 0."""
    utilisation: Fraction | None = None
    """Share of gpu_busy - gpu_idle drawn while training; none = the simulated busy share, 1 for given speeds."""
    pue: Annotated[float, Field(ge=1)] = 1.2
    """Power usage effectiveness of the building."""
    carbon_kg_per_kwh: NonNegativeFloat = 0.4
    """Of the electricity."""


class PlanFile(Spec):
    """A whole training run."""

    name: str
    """What reports call it."""
    description: str = ""
    """A sentence for people."""
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    """What is trained, one after another."""
    cluster: ClusterPlan
    """On what."""
    reliability: ReliabilitySpec = ReliabilitySpec()
    """What fails, and the way back."""
    checkpoints: CheckpointPlan = CheckpointPlan()
    """What is saved, how often, how fast."""
    maintenance: tuple[MaintenanceWindow, ...] = ()
    """Planned stops."""
    prices: PriceSpec = PriceSpec()
    """Rent or ownership; none = no cost is given."""
    power: PowerSpec = PowerSpec()
    """Power, PUE and carbon."""
    restart_between_phases: bool = True
    """A phase change saves, restarts and loads (another layout); otherwise training runs on."""
    deadline: Seconds | None = None
    """The wall-clock time that the run should not exceed."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Probability with which deadlines are met and spares suffice."""
    published: tuple[Published, ...] = ()
    """Published figures of this run, for comparison; never an input."""
    file: str = ""
    """Where it was read from."""


def read_plan_table(path: str | Path) -> dict[str, Any]:
    """The raw table of the plan file at `path`, or of the shipped plan of that name.

    Raises:
        InputError: the file cannot be read.
    """
    file = plan_path(path)
    table = read_toml(file)
    if "phases" not in table and "plan" in table:
        raise InputError(f"{file}: is a scenario, not the plan of a whole run; `simpar simulate {path}` predicts its step")
    return {**table, "name": table.get("name", file.stem), "file": str(file)}


def make_plan(table: dict[str, Any]) -> PlanFile:
    """The checked plan file in a raw `table`.

    Raises:
        InputError: all violations, together.
    """
    return validate(PlanFile, table, file=str(table.get("file", "")))
