"""Fitted kernel constants of a GPU, as `python -m validation.tools.fit kernels` writes them.

Numbers are plain SI floats (the files are written by a script); the forms they enter stand in docs/formulas_kernels.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from simpar.hashed import HashedOnce
from simpar.specs.base import Spec

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1.5)]
"""Of a data-sheet peak; kernels whose operands stay in the L2 cache can exceed it."""
Mode = Literal["sustained", "burst"]
"""Sustained: at the power cap, as in training. Burst: a few launches on a cool GPU."""
Schedule = Literal["heuristic", "cluster", "min_waves_sm90", "min_waves_sm100"]
"""How a GEMM library chooses its tile; see costs/gemm_tiles.py."""


class FitRecord(Spec):
    """What the constants were fitted on and the error they reached, |predicted / measured - 1| as fractions."""

    source: str = ""
    rows: Annotated[int, Field(ge=0)] = 0
    median: NonNegative = 0.0
    p90: NonNegative = 0.0
    bias: float = 0.0
    held_out_median: NonNegative = 0.0
    """On groups of shapes that the fit did not see: (n, k) pairs, (heads, key/value heads, head size)."""
    held_out_p90: NonNegative = 0.0
    held_out_m_median: NonNegative = 0.0
    """GEMMs only: on values of m that the fit did not see."""
    held_out_m_p90: NonNegative = 0.0


class Band(Spec):
    """80 % interval of measured / predicted for ops of at least `from_size` (floating-point operations)."""

    from_size: NonNegative
    low: Positive
    high: Positive


class GemmConstants(Spec):
    """One GEMM library on one GPU in one power mode; form: docs/formulas_kernels.md, section GEMM."""

    library: str
    mode: Mode
    dtype: str
    """bf16, fp8 (per tensor or row) or fp8_block (128 x 128)."""
    schedule: Schedule = "heuristic"
    includes_quantization: bool = False
    """The measured times contain the dynamic cast of the activations; the cast terms below describe it."""
    derived: str = ""
    """Where the constants do not come from a fit of their own: from what and how."""
    rate_flops_per_s: Positive
    """Of the best tile at 4096 x 4096 x 4096, without the fixed costs."""
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative
    k_overhead: NonNegative = 100.0
    """Prologue and epilogue of a tile, in steps of k."""
    wave_beta: float = 0.15
    """Share of the idle part of the last wave that costs time."""
    wave_first: float = 0.0
    """What `wave_beta` gains when there are few waves, times 1 / waves."""
    overlap_power: Positive = 4.0
    """Compute and memory time join as the norm of this power; large = maximum."""
    split_k_cost: NonNegative = 1.0
    tile_efficiency: tuple[Positive, ...] = ()
    """Rate of the tile classes over that of the best one."""
    size_exponent: float = 0.0
    """Power throttling: compute time grows as (1 + FLOPs / 1e12) to this power."""
    ridge: tuple[float, ...] = (0.0,) * 9
    """Powers of m, n, k over 4096, then of their squared logarithms, then of the products mn, mk, nk (base 2)."""
    unaligned: float = 0.0
    """Natural logarithm of the extra compute time where m is no multiple of 16, at m = 4096."""
    unaligned_octave: float = 0.0
    """What it gains with each doubling of m."""
    cast_latency_s: NonNegative = 0.0
    cast_bytes_per_s: NonNegative = 0.0
    cast_granularity: NonNegative = 0.0
    """Groups of 128 that a cast block wants at once; fewer (odd m) slow the cast in proportion. 0: does not matter."""
    cast_columns: NonNegative = 0.0
    """Columns that a block of the cast takes in one pass; 0: does not matter."""
    cast_idle: NonNegative = 0.0
    """Share of its time that the idle part of a last pass costs."""
    residual: Annotated[tuple[float, ...], AfterValidator(HashedOnce)] = ()
    """Natural logarithms of measured over priced time on octaves of m, n, k (costs/gemm_residual.py); empty: none."""
    input_bytes: Positive = 2.0
    output_bytes: Positive = 2.0
    bands: tuple[Band, ...] = ()
    """Inside the fitted region."""
    bands_small: tuple[Band, ...] = ()
    """Outside it: some size below the smallest one fitted."""
    fit: FitRecord = FitRecord()


class HeadConstants(Spec):
    """Attention at one head size."""

    head_dim: Annotated[int, Field(gt=0)]
    rate_flops_per_s: Positive
    sequence_overhead: NonNegative
    """Keys that each query tile costs beyond its own (s0 in rate = R s / (s + s0))."""
    critical: Positive = 1.0
    """The kernel's `critical_share` times this, at this head size."""


class AttentionConstants(Spec):
    """One attention kernel on one GPU; form: docs/formulas_kernels.md, section Attention."""

    kernel: Literal["fa1", "fa2", "fa3", "cudnn", "trtllm-gen", "fa4", "aiter", "aotriton", "unfused"]
    library: str
    mode: Mode
    causal: bool
    direction: Literal["forward", "backward"] = "forward"
    derived: str = ""
    heads: Annotated[tuple[HeadConstants, ...], Field(min_length=1)]
    latency_s: NonNegative = 8e-6
    wave_beta: float = 0.5
    overlap_power: Positive = 4.0
    critical_share: NonNegative = 0.5
    """Share of the longest tile that the schedule cannot hide."""
    occupancy_exponent: float = 0.0
    """Where tiles leave SMs idle, the longest tile takes (tiles / SMs) to this power of its time (causal: the whole number of SMs
    per tile): positive where a GPU that is partly idle runs the rest faster or splits the keys."""
    cache_bytes_per_s: NonNegative = 0.0
    """Write of keys and values to a serving cache, in the measured tables only; a training kernel has none."""
    token_s: NonNegative = 0.0
    """Cost of a token in that write."""
    io_bytes_per_s: NonNegative = 0.0
    ridge: tuple[float, ...] = (0.0,) * 18
    bands: tuple[Band, ...] = ()
    """Inside the fitted region."""
    bands_small: tuple[Band, ...] = ()
    """Outside it: some size below the smallest one fitted."""
    fit: FitRecord = FitRecord()


class BackwardConstants(Spec):
    """Backward over forward time of an attention kernel: ratio (1 + short_sequence / s)."""

    kernel: Literal["fa1", "fa2", "fa3", "cudnn", "trtllm-gen", "fa4", "unfused"]
    head_dim: Annotated[int, Field(gt=0)]
    ratio: Positive
    short_sequence: NonNegative = 0.0
    source: str = ""


class DirectionConstants(Spec):
    """Training layouts over the forward layout, from measured triples."""

    dgrad: Positive = 1.0
    wgrad: Positive = 1.02
    wgrad_accumulate: Positive = 1.03
    """fp32 accumulation, besides its traffic of 8 bytes per element of the weight."""
    scale: Positive = 1.0
    """The one scalar of the machine the triples were measured on, over these constants."""
    machine: str = ""
    fit: FitRecord = FitRecord()


class GroupedConstants(Spec):
    """Grouped GEMM over batched GEMMs of `streams` experts one after another, in the same library."""

    forward: Positive = 1.0
    dgrad: Positive = 1.0
    wgrad_accumulate: Positive = 1.0
    streams: Annotated[int, Field(ge=1)] = 2
    low: Positive = 0.75
    high: Positive = 1.4
    source: str = ""
    fit: FitRecord = FitRecord()


class MemoryClass(Spec):
    """Achieved share of the peak bandwidth by implementation."""

    tuned: Fraction
    framework: Fraction
    eager: Fraction
    rows: Annotated[int, Field(ge=0)] = 0
    source: str = ""


class MeasuredPoint(Spec):
    """A shape measured on this very GPU; overrides the models."""

    op: Literal["gemm", "attention", "grouped_gemm", "memory"]
    shape: tuple[int, ...]
    """gemm: m, n, k; attention: batch, sequence_q, sequence_kv, heads, kv_heads, head_dim; grouped: groups, tokens, n, k;
    memory: bytes moved."""
    dtype: str = "bf16"
    direction: Literal["forward", "dgrad", "wgrad", "wgrad_accumulate", "backward"] = "forward"
    """wgrad_accumulate: the weight gradient is added to the one that is there."""
    kernel: str = ""
    """memory: the class of kernel."""
    causal: bool = True
    seconds: Positive
    spread: NonNegative = 0.02
    """Half width of the 80 % interval over the value."""


class KernelConstants(Spec):
    """Constants of the kernel price models; see docs/formulas_kernels.md."""

    gpu: str = ""
    """The GPU the constants were fitted on."""
    base: str = ""
    """A fitted file to start from ("h100" = fitted/h100.kernels.toml): related GPUs state only how they differ."""
    compute_scale: Positive = 1.0
    """Rates of the base times this."""
    bandwidth_scale: Positive = 1.0
    fp8_scale: Positive | None = None
    """Rates of the base's fp8 products times this; none = `compute_scale`."""
    attention_scale: Positive | None = None
    """Rates of the base's attention forward times this; none = `compute_scale`."""
    attention_backward_scale: Positive | None = None
    """The same of its backward; none = as forward."""
    fp32_over_bf16: Positive | None = None
    """Rate of fp32 products outside tensor cores over that of 16-bit ones, both measured; none = as their peaks."""
    source: str = ""
    """Why the base and the scales are right."""
    default_library: str = ""
    gemm: tuple[GemmConstants, ...] = ()
    """The first of a dtype and mode is the default."""
    attention: tuple[AttentionConstants, ...] = ()
    backward: tuple[BackwardConstants, ...] = ()
    backward_over_forward: Positive = 1.0
    """Attention: the ratio of the two times over that of the base's, where both scale apart."""
    directions: DirectionConstants | None = None
    grouped: GroupedConstants | None = None
    memory: dict[str, MemoryClass] = Field(default_factory=dict)
    memory_bandwidth_share: Fraction | None = None
    """Best achieved share of the peak bandwidth (copy)."""
    points: tuple[MeasuredPoint, ...] = ()
