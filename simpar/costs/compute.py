"""GEMM price: tiles in waves over the SMs, joined with the memory traffic, plus latency and casts.

    t    = latency + (compute^p + memory^p)^(1/p) + cast
    compute = min over tiles and splits of waves' * 2 area (k/s + k0) SMs / (R e_tile) + [s > 1] split cost
    waves'  = max(1, x) + beta_x (ceil x - x) [x > 1],  beta_x = clip(beta + beta_1 / x, 0, 1)
    memory  = (b_in (m k + n k) + b_out m n) / B

times smooth terms for power throttling and for what the tile set does not say, and a residual grid
(docs/formulas_kernels.md, section GEMM).
All arrays are [shapes]; a scalar call is an array of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.costs.gemm_residual import correction
from simpar.costs.gemm_tiles import Geometry, geometry
from simpar.specs.kernel_constants import GemmConstants

Array = NDArray[np.float64]
_CENTRE: Final = 4096.0
_LOW, _HIGH = -3.0, 4.0
"""Range of log2(size / 4096) in which the smooth terms were fitted; they stay constant outside."""
CHUNK: Final = 4096


@dataclass(frozen=True, slots=True)
class GemmShapes:
    """Products of (m, k) by (k, n), `batch` of each.

    Attributes:
        m, n, k: [shapes]; output_bytes: written (and read) per output element, None = the constants'.
        quantize: the dynamic cast of the activations is part of the price.
    """

    m: Array
    n: Array
    k: Array
    batch: Array | float = 1.0
    output_bytes: float | None = None
    quantize: bool = False


def waves_cost(x: Array, beta: float, first: float) -> Array:
    """Waves that x = tiles / SMs cost: at least one; part of the idle last wave."""
    share = np.clip(beta + first / np.maximum(x, 1.0), 0.0, 1.0)
    return np.maximum(x, 1.0) + np.where(x > 1.0, share * (np.ceil(x) - x), 0.0)


def smooth_terms(c: GemmConstants, m: Array, n: Array, k: Array) -> Array:
    """Natural logarithm of the smooth corrections of compute time."""
    logs = [np.clip(np.log2(v / _CENTRE), _LOW, _HIGH) for v in (m, n, k)]
    a, b, d = logs
    parts = (a, b, d, a * a, b * b, d * d, a * b, a * d, b * d)
    total = c.size_exponent * np.log1p(2.0 * m * n * k / 1e12)
    for weight, part in zip(c.ridge, parts, strict=True):
        if weight:
            total = total + weight * part
    if c.unaligned:
        total = total + np.where(np.mod(m, 16) == 0, 0.0, c.unaligned)
    return np.asarray(total, dtype=float)


def _efficiency(c: GemmConstants, g: Geometry) -> Array | float:
    if not c.tile_efficiency:
        return 1.0
    if c.schedule.startswith("min_waves"):
        odd, halving, single = c.tile_efficiency
        return np.asarray(odd**g.odd * single**g.single * halving ** np.log2(32768.0 / np.minimum(g.area, 32768.0)))
    return np.array([1.0, *c.tile_efficiency])[g.kind]


def compute_seconds(c: GemmConstants, g: Geometry, sm_count: float) -> Array:
    """Time of the tensor cores alone [shapes], before the smooth terms."""
    work = 2.0 * g.area * (g.depth + c.k_overhead) * (sm_count / c.rate_flops_per_s) / _efficiency(c, g)
    seconds = waves_cost(g.waves, c.wave_beta, c.wave_first) * work
    if g.splits.size > 1:
        merge = c.split_k_cost * 8.0 * g.splits * (g.m * g.n)[:, None] / c.bandwidth_bytes_per_s
        seconds = np.where(g.allowed, seconds + np.where(g.splits > 1, merge, 0.0), np.inf)
    return np.asarray(seconds.min(axis=1))


def cast_seconds(c: GemmConstants, m: Array, k: Array) -> Array:
    """Dynamic quantisation of the activations: amax and cast, 5 bytes per element."""
    if not c.cast_bytes_per_s:
        return np.zeros_like(m)
    slow: Array | float = 1.0
    if c.cast_granularity:
        groups = np.maximum(m * k / 128.0, 1.0).astype(np.int64)
        together = np.minimum(groups & -groups, 16)
        slow = np.maximum(1.0, c.cast_granularity / together)
    return np.asarray(c.cast_latency_s + 5.0 * m * k / c.cast_bytes_per_s * slow)


def seconds_on(c: GemmConstants, g: Geometry, sm_count: float, shapes: GemmShapes) -> Array:
    """Seconds [shapes] for a geometry computed before."""
    batch = np.asarray(shapes.batch, dtype=float)
    compute = compute_seconds(c, g, sm_count) * np.exp(smooth_terms(c, g.m, g.n, g.k))
    out = c.output_bytes if shapes.output_bytes is None else shapes.output_bytes
    traffic = batch * (c.input_bytes * (g.m * g.k + g.n * g.k) + out * g.m * g.n)
    memory = traffic / c.bandwidth_bytes_per_s
    larger, smaller = np.maximum(compute, memory), np.minimum(compute, memory)
    core = larger * (1.0 + (smaller / larger) ** c.overlap_power) ** (1.0 / c.overlap_power)
    total = c.latency_s + core
    if shapes.quantize:
        total = total + cast_seconds(c, batch * g.m, g.k)
    if c.residual:
        # Measured on single products; batches have other waves.
        total = total * np.where(batch == 1.0, np.exp(correction(c.residual, g.m, g.n, g.k)), 1.0)
    return np.asarray(total)


def gemm_seconds(c: GemmConstants, sm_count: float, shapes: GemmShapes) -> Array:
    """Seconds [shapes] of the products."""
    m, n, k = (np.atleast_1d(np.asarray(v, dtype=float)) for v in (shapes.m, shapes.n, shapes.k))
    batch = np.broadcast_to(np.asarray(shapes.batch, dtype=float), m.shape)
    parts = []
    for start in range(0, len(m), CHUNK):
        at = slice(start, start + CHUNK)
        g = geometry(c.schedule, sm_count, m[at], n[at], k[at], batch[at])
        parts.append(seconds_on(c, g, sm_count, replace(shapes, m=m[at], n=n[at], k=k[at], batch=batch[at])))
    return np.concatenate(parts) if parts else np.zeros(0)
