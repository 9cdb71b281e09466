"""Fitted kernel constants of a GPU, as `python -m simpar.calibration.fit kernels` writes them.

Numbers are plain SI floats (the file is written by a script); the forms they enter stand in docs/formulas_kernels.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpar.specs.base import Spec

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Mode = Literal["sustained", "burst"]
"""Sustained: at the power cap, as in training. Burst: a few launches on a cool GPU."""


class FitRecord(Spec):
    """What the constants were fitted on and the error they reached, |predicted / measured - 1| as fractions."""

    source: str = ""
    rows: Annotated[int, Field(ge=0)] = 0
    median: NonNegative = 0.0
    p90: NonNegative = 0.0
    bias: float = 0.0
    held_out_median: NonNegative = 0.0
    """On shape groups that the fit did not see."""
    held_out_p90: NonNegative = 0.0


class Band(Spec):
    """80 % interval of measured / predicted for ops of at least `from_size` (FLOPs or bytes)."""

    from_size: NonNegative
    low: Positive
    high: Positive


class GemmConstants(Spec):
    """One GEMM library on one GPU in one power mode; form: docs/formulas_kernels.md, section GEMM."""

    library: str
    mode: Mode
    dtype: str
    """bf16, fp8 (per tensor or row) or fp8_block (128 x 128)."""
    includes_quantization: bool = False
    """The measured times contain the dynamic cast of the activations."""
    rate_flops_per_s: Positive
    bandwidth_bytes_per_s: Positive
    latency_s: Positive
    k_overhead: NonNegative
    wave_beta: NonNegative
    overlap_power: Positive
    split_k_cost: NonNegative
    tile_efficiency: tuple[Positive, Positive, Positive, Positive]
    quantize_bytes_per_s: NonNegative = 0.0
    input_bytes: Positive = 2.0
    output_bytes: Positive = 2.0
    bands: tuple[Band, ...] = ()
    fit: FitRecord = FitRecord()


class AttentionConstants(Spec):
    """One attention kernel at one head size."""

    kernel: str
    library: str
    mode: Mode
    head_dim: Annotated[int, Field(gt=0)]
    causal: bool
    rate_flops_per_s: Positive
    sequence_overhead: NonNegative
    latency_s: NonNegative
    bands: tuple[Band, ...] = ()
    fit: FitRecord = FitRecord()


class KernelConstants(Spec):
    """Constants of the kernel price models; see docs/formulas_kernels.md."""

    gpu: str = ""
    """The GPU the constants were fitted on."""
    gemm: tuple[GemmConstants, ...] = ()
    attention: tuple[AttentionConstants, ...] = ()
