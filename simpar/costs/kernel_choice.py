"""Which fitted constants price an op on a GPU, and how far they can be trusted.

A profile's `[kernels]` holds its own sets, or names a base with scales; a profile with neither is scaled from the nearest
fitted GPU of its generation by peak FLOP rate and bandwidth, and its prices say so. Points measured on this very machine come
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.costs.gemm_tiles import Array
from simpar.costs.price import Price, Provenance
from simpar.errors import InputError
from simpar.specs.base import data_dir, read_toml, validate
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.kernel_constants import (
    AttentionConstants,
    Band,
    GemmConstants,
    HeadConstants,
    KernelConstants,
    MeasuredPoint,
    MemoryClass,
)

NEAREST: Final = {
    "fermi": "a100",
    "volta": "a100",
    "turing": "a100",
    "ampere": "a100",
    "ada": "a100",
    "hopper": "h100",
    "blackwell": "b200",
    "blackwell-rtx": "a100",
    "cdna2": "a100",
    "cdna3": "h100",
    "cdna4": "b200",
    "tpu": "h100",
    "cpu": "a100",
}
FITTED_ON: Final = {"a100": "dgx-a100-80gb", "h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200", "gb200": "gb200-nvl72"}
"""Fitted file -> the profile whose GPU it was fitted on."""
SCALED_SPREAD: Final = 0.2
"""Extra log half width of peak-scaled constants (H100 constants scaled to A100, B200, GB200: 5-12 % median, 23 % p90)."""
BASED_SPREAD: Final = 0.08
"""The same for constants of a related GPU with stated scales."""
DERIVED_SPREAD: Final = 0.05
"""The same for a power mode derived from another."""
_ALIASES: Final = {"fp16": "bf16", "mxfp8": "fp8_block", "fp8_tensor": "fp8"}
ROWWISE_SHARE: Final = 0.95
"""Rate of torch's own kernel for scales per row over cuBLAS's for one scale: most shapes 0.9 to 1, a tail down to a half (pytorch
issue 147971, H100 with fast accumulation)."""
PROMOTED: Final = 1.15
"""Time of an fp8 product of Hopper whose sums are promoted to fp32 on their way, as gradients' are (TransformerEngine
use_split_accumulator, torchao Float8GemmConfig), over one with fast accumulation, which the tables have: 1.1 to 1.2 (pytorch/ao
issue 2377). What it costs on Ada is not published, and nothing is taken. Scales per row keep fast accumulation everywhere
(torchao/float8/config.py); Blackwell has no such mode (TransformerEngine PR 2748)."""
UNREAL: Final = ("uninit", "constW", "vllm0220")
"""Libraries measured on operands that draw little power: the collector that ran vLLM's products leaves its bf16 weights
uninitialised (ai-dynamo/aiconfigurator collector/vllm; such tables read 5 to 10 % fast). They serve where nothing else was
sustained."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The constants that apply to a GPU.

    Attributes:
        constants: sets at this GPU's scale.
        provenance: MODEL where they were fitted on this GPU type, SCALED where they come from another by peaks.
        spread: extra log half width of the 80 % interval.
        own: what the profile states itself, as a calibration does beside its base: fitted on this machine.
    """

    constants: KernelConstants
    provenance: Provenance
    spread: float
    own: KernelConstants

    def standing(self, found: GemmConstants | AttentionConstants | str) -> tuple[Provenance, float]:
        """Provenance and extra spread of a set of `constants`, or of a class of memory-bound kernels."""
        own = found in self.own.memory if isinstance(found, str) else any(found is c for c in (*self.own.gemm, *self.own.attention))
        return (Provenance.MODEL, 0.0) if own else (self.provenance, self.spread)


@lru_cache(maxsize=16)
def fitted(name: str) -> KernelConstants:
    """The shipped constants fitted/{name}.kernels.toml.

    Raises:
        InputError: no such file, or one that breaks a rule.
    """
    path = data_dir("hardware_profiles") / "fitted" / f"{name}.kernels.toml"
    return validate(KernelConstants, read_toml(path), file=str(path))


def _attention_scaled(a: AttentionConstants, compute: float, bandwidth: float) -> AttentionConstants:
    heads = tuple(h.model_copy(update={"rate_flops_per_s": h.rate_flops_per_s * compute}) for h in a.heads)
    return a.model_copy(
        update={
            "heads": heads,
            "cache_bytes_per_s": a.cache_bytes_per_s * bandwidth,
            "io_bytes_per_s": a.io_bytes_per_s * bandwidth,
        }
    )


def _gemm_scaled(c: GemmConstants, compute: float, bandwidth: float) -> GemmConstants:
    rates = {"rate_flops_per_s": compute, "bandwidth_bytes_per_s": bandwidth, "cast_bytes_per_s": bandwidth}
    return c.model_copy(update={name: getattr(c, name) * factor for name, factor in rates.items()})


def scaled(c: KernelConstants, compute: float, bandwidth: float) -> KernelConstants:
    """`c` with rates times `compute` and bandwidths times `bandwidth`."""
    if compute == 1.0 and bandwidth == 1.0:
        return c
    gemm = tuple(_gemm_scaled(g, compute, bandwidth) for g in c.gemm)
    attention = tuple(_attention_scaled(a, compute, bandwidth) for a in c.attention)
    return c.model_copy(update={"gemm": gemm, "attention": attention})


def _fp8_apart(base: KernelConstants, own: KernelConstants) -> KernelConstants:
    """`base` with fp8 products at the scale that `own` states of them."""
    ratio = (own.fp8_scale or own.compute_scale) / own.compute_scale
    return base.model_copy(update={"gemm": tuple(_gemm_scaled(g, ratio if "fp8" in g.dtype else 1.0, 1.0) for g in base.gemm)})


def _attention_apart(base: KernelConstants, unscaled: KernelConstants, own: KernelConstants) -> KernelConstants:
    """`base` with attention at the scales of its own that `own` states, of `unscaled`; a backward priced by its forward too."""
    forward = own.attention_scale or own.compute_scale
    backward = own.attention_backward_scale or forward
    attention = tuple(
        _attention_scaled(a, backward if a.direction == "backward" else forward, own.bandwidth_scale) for a in unscaled.attention
    )
    return base.model_copy(update={"attention": attention, "backward_over_forward": forward / backward})


def _memory_scaled(own: KernelConstants, base: KernelConstants) -> dict[str, MemoryClass]:
    """The classes of `base` at the share of the peak that a copy reaches on the GPU of `own`, where that was measured on both."""
    if own.memory_bandwidth_share is None or base.memory_bandwidth_share is None:
        return dict(base.memory)
    ratio = own.memory_bandwidth_share / base.memory_bandwidth_share
    tiers = ("tuned", "framework", "eager")
    return {
        name: shares.model_copy(update={tier: min(getattr(shares, tier) * ratio, 1.0) for tier in tiers})
        for name, shares in base.memory.items()
    }


def _merge(own: KernelConstants, base: KernelConstants) -> KernelConstants:
    """`own` first, then what only `base` has."""
    return base.model_copy(
        update={
            "gpu": own.gpu or base.gpu,
            "default_library": own.default_library or base.default_library,
            "gemm": own.gemm + base.gemm,
            "attention": own.attention + base.attention,
            "backward": own.backward + base.backward,
            "directions": own.directions or base.directions,
            "grouped": own.grouped or base.grouped,
            "memory": {**_memory_scaled(own, base), **own.memory},
            "memory_bandwidth_share": own.memory_bandwidth_share or base.memory_bandwidth_share,
            "fp32_over_bf16": own.fp32_over_bf16,
            "points": own.points,
        }
    )


def peak_scales(hardware: HardwareProfile, base: str) -> tuple[float, float]:
    """(bf16 peak, memory bandwidth) of `hardware` over those of the GPU that `base` was fitted on."""
    reference = load_hardware(FITTED_ON[base])
    compute = hardware.peak_flops_per_s("bf16") / reference.peak_flops_per_s("bf16")
    return compute, hardware.gpu.memory_bandwidth.value / reference.gpu.memory_bandwidth.value


def resolve(hardware: HardwareProfile) -> Resolved:
    """The constants of a GPU: its own, those of its base, or the nearest generation's scaled by peaks."""
    own = hardware.kernels
    if own.base:
        if own.base not in FITTED_ON:
            raise InputError(
                f"hardware {hardware.name!r}: kernels.base = {own.base!r}: no such fitted file; known: {', '.join(FITTED_ON)}"
            )
        base = _fp8_apart(scaled(fitted(own.base), own.compute_scale, own.bandwidth_scale), own)
        if own.attention_scale is not None:
            base = _attention_apart(base, fitted(own.base), own)
        return Resolved(_merge(own, base), Provenance.SCALED, BASED_SPREAD, own)
    if own.gemm:
        return Resolved(own, Provenance.MODEL, 0.0, own)
    name = NEAREST[hardware.gpu.architecture]
    base = scaled(fitted(name), *peak_scales(hardware, name))
    return Resolved(_merge(own, base), Provenance.SCALED, SCALED_SPREAD, own)


def dtype_key(dtype: str) -> str:
    """The dtype whose constants serve `dtype`."""
    return _ALIASES.get(dtype, dtype)


def pick_gemm(c: KernelConstants, dtype: str, *, library: str | None, sustained: bool) -> GemmConstants | None:
    """The set of a dtype: the named library's, else the first of the power mode, else the first."""
    sets = [g for g in c.gemm if g.dtype == dtype]
    if library is not None:
        named = [g for g in sets if g.library == library]
        if named:
            exact = [g for g in named if (g.mode == "sustained") == sustained]
            return (exact or named)[0]
        sets = [g for g in sets if library.split("_")[0] in g.library] or sets
    real = [g for g in sets if not any(word in g.library for word in UNREAL)] or sets
    mode = [g for g in sets if (g.mode == "sustained") == sustained]
    return next(iter([g for g in mode if g in real] or mode or real), None)


def _distance(a: AttentionConstants, head_dim: int) -> float:
    return min(abs(math.log2(h.head_dim / head_dim)) for h in a.heads)


def pick_attention(
    sets: Iterable[AttentionConstants],
    kernels: Sequence[str],
    *,
    causal: bool,
    head_dim: int,
    direction: str,
    sustained: bool,
    library: str | None = None,
) -> AttentionConstants | None:
    """The best set for one of `kernels`, in that order; with the other mask, converted, where there is no better."""
    own = [a for a in sets if a.direction == direction and a.kernel in kernels]
    if not own:
        return None

    def rank(a: AttentionConstants) -> tuple[int, int, int, float, int]:
        return (
            int(library is not None and a.library != library),
            kernels.index(a.kernel),
            int(a.causal != causal),
            round(_distance(a, head_dim), 1),
            int((a.mode == "sustained") != sustained),
        )

    best = min(own, key=rank)
    return best if best.causal == causal else other_mask(best, causal=causal)


def other_mask(a: AttentionConstants, *, causal: bool) -> AttentionConstants:
    """Constants fitted under one mask for the other: the diagonal costs about three times the overhead of a full row."""
    factor = 3.0 if causal else 1.0 / 3.0
    heads = tuple(
        HeadConstants(head_dim=h.head_dim, rate_flops_per_s=h.rate_flops_per_s, sequence_overhead=h.sequence_overhead * factor)
        for h in a.heads
    )
    bands = tuple(widened(b, BASED_SPREAD) for b in a.bands)
    return a.model_copy(update={"causal": causal, "heads": heads, "bands": bands, "wave_beta": 0.5})


def widened(band: Band, spread: float) -> Band:
    """`band` with `spread` added in quadrature to both logarithmic half widths."""
    low = math.exp(-math.hypot(math.log(band.low), spread) if band.low < 1 else -spread)
    high = math.exp(math.hypot(math.log(band.high), spread) if band.high > 1 else spread)
    return Band(from_size=band.from_size, low=low, high=high)


def band_at(bands: Sequence[Band], size: float, spread: float) -> tuple[float, float]:
    """(low, high) of measured / predicted for an op of `size`, widened by `spread`."""
    found = Band(from_size=0.0, low=0.9, high=1.12)
    for band in bands:
        if band.from_size <= size:
            found = band
    if spread > 0:
        found = widened(found, spread)
    return found.low, found.high


def banded(seconds: float, band: tuple[float, float], provenance: Provenance, terms: tuple[tuple[str, float], ...]) -> Price:
    """A price with the interval `band` (measured / predicted), which always holds the price itself."""
    return Price(seconds, seconds * min(band[0], 1.0), seconds * max(band[1], 1.0), provenance, terms)


def measured_memory(points: Sequence[MeasuredPoint]) -> dict[str, tuple[MeasuredPoint, ...]]:
    """Memory-bound points of each kernel class, by size. Calibrations that know no `loss_chain` measured it as cross_entropy."""
    classes = {p.kernel for p in points if p.op == "memory"}
    found = {c: tuple(sorted((p for p in points if p.op == "memory" and p.kernel == c), key=lambda p: p.shape)) for c in classes}
    return {"loss_chain": found["cross_entropy"], **found} if "cross_entropy" in found else found


def between(points: Sequence[MeasuredPoint], bytes_moved: float) -> Price:
    """Between the measured sizes by a power law, past them in proportion (above) or at the smallest one's time (below)."""
    sizes = [float(p.shape[0]) for p in points]
    at = next((i for i, size in enumerate(sizes) if size >= bytes_moved * (1.0 - 1e-6)), len(points))
    exact = at < len(points) and sizes[at] <= bytes_moved * (1.0 + 1e-6)
    if exact or at == 0:
        return measured(points[min(at, len(points) - 1)])
    left, right = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        s = left.seconds * bytes_moved / sizes[-1]
    else:
        share = math.log(bytes_moved / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
        s = left.seconds ** (1.0 - share) * right.seconds**share
    spread = max(left.spread, right.spread)
    return Price(s, s * (1 - spread), s * (1 + spread), Provenance.INTERPOLATED, (("interpolated", s),))


def measured(point: MeasuredPoint) -> Price:
    """The point's own time."""
    s = point.seconds
    return Price(s, s * (1 - point.spread), s * (1 + point.spread), Provenance.MEASURED, (("measured", s),))


def band_arrays(
    bands: Sequence[Band], small: Sequence[Band], inside: NDArray[np.bool_], sizes: Array, spread: float
) -> tuple[Array, Array]:
    """(low, high) [shapes] of measured / predicted, by size and by being inside the fitted region."""
    low, high = np.empty(sizes.shape), np.empty(sizes.shape)
    for own, region in ((bands, inside), (small or bands, ~inside)):
        for i, edge in enumerate([b.from_size for b in own] or [0.0]):
            here = region & (sizes >= edge) if i else region
            low[here], high[here] = band_at(own, edge, spread)
    return low, high
