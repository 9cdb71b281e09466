"""GEMM price: tiles in waves over the SMs, joined with the memory traffic, plus latency and casts.

    t    = latency + (compute^p + memory^p)^(1/p) + cast
    compute = min over tiles and splits of waves' * 2 area (k/s + k0) SMs / (R e_tile) + [s > 1] split cost
    waves'  = max(1, x) + beta_x (ceil x - x) [x > 1],  beta_x = clip(beta + beta_1 / x, 0, 1)
    memory  = (b_in (m k + n k) + b_out m n) / B

times smooth terms for power throttling and for what the tile set does not say, and a residual grid
(docs/formulas_kernels.md, section GEMM).
All arrays are [shapes]; a scalar call is an array of one.

Rows of operands that do not start on 16 bytes cost more (`unaligned`). Rows are n or k elements long in memory (x [m, k], W [n, k],
y [m, n] and their gradients), whatever the direction. Kernels for tensor cores load 16 bytes at once and asynchronously (PTX
cp.async: 16, 8 or 4 bytes); rows of an odd number of 16-bit elements leave 2, so that cuBLAS falls back to kernels of the
generation before, named ..._75_..._align1 in traces on an A100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from simpar.costs.gemm_residual import correction
from simpar.costs.gemm_tiles import Array, Geometry, geometry, tile_set
from simpar.specs.calibration import constant
from simpar.specs.kernel_constants import GemmConstants

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
    least = np.maximum(x, 1.0)
    share = np.minimum(np.maximum(beta + first / least, 0.0), 1.0)
    return np.asarray(least + share * (np.ceil(least) - least))


def smooth_terms(c: GemmConstants, m: Array, n: Array, k: Array) -> Array:
    """Natural logarithm of the smooth corrections of compute time."""
    a, b, d = np.minimum(np.maximum(np.log2(np.array((m, n, k)) / _CENTRE), _LOW), _HIGH)
    r = c.ridge
    smooth = a * (r[0] + r[3] * a + r[6] * b + r[7] * d) + b * (r[1] + r[4] * b + r[8] * d) + d * (r[2] + r[5] * d)
    total = smooth + c.size_exponent * np.log1p(2e-12 * m * n * k)
    if c.unaligned:
        total = total + (c.unaligned + c.unaligned_octave * a) * (np.mod(m, 16.0) != 0.0)
    return np.asarray(total, dtype=float)


@lru_cache(maxsize=256)
def _weight(schedule: str, tile_efficiency: tuple[float, ...]) -> Array:
    """Outputs of one SM over the efficiency of its tile [1, candidates], of a schedule that searches."""
    tiles = tile_set(schedule)
    efficiency = np.array([1.0, *tile_efficiency])[tiles.kind] if tile_efficiency else 1.0
    return np.asarray(tiles.area / efficiency)[None, :]


def _weights(c: GemmConstants, g: Geometry) -> Array:
    if not c.schedule.startswith("min_waves"):
        return _weight(c.schedule, c.tile_efficiency)
    if not c.tile_efficiency:
        return g.area
    odd, halving, single = c.tile_efficiency
    return np.asarray(g.area / (odd**g.odd * single**g.single * halving ** np.log2(32768.0 / np.minimum(g.area, 32768.0))))


TILE_FIELDS: Final = (
    "rate_flops_per_s", "bandwidth_bytes_per_s", "k_overhead", "wave_beta", "wave_first", "split_k_cost", "tile_efficiency",
)  # fmt: skip
"""Constants that `compute_seconds` depends on."""


def compute_seconds(c: GemmConstants, g: Geometry, sm_count: float) -> Array:
    """Time of the tensor cores alone [shapes], before the smooth terms."""
    work = _weights(c, g) * ((g.depth + c.k_overhead) * (2.0 * sm_count / c.rate_flops_per_s))
    seconds = waves_cost(g.waves, c.wave_beta, c.wave_first) * work
    if g.merges.size > 1:
        merge = g.merges * (c.split_k_cost * 8.0 / c.bandwidth_bytes_per_s * g.m * g.n)[:, None]
        seconds = np.where(g.allowed, seconds + merge, np.inf)
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
    if c.cast_columns:
        k = k + c.cast_idle * (np.ceil(k / c.cast_columns) * c.cast_columns - k)
    return np.asarray(c.cast_latency_s + 5.0 * m * k / c.cast_bytes_per_s * slow)


def seconds_on(c: GemmConstants, g: Geometry, sm_count: float, shapes: GemmShapes, *, tensor_s: Array | None = None) -> Array:
    """Seconds [shapes] for a geometry computed before; `tensor_s` = `compute_seconds` where that is known."""
    batch = np.asarray(shapes.batch, dtype=float)
    tensor_s = compute_seconds(c, g, sm_count) if tensor_s is None else tensor_s
    compute = tensor_s * np.exp(smooth_terms(c, g.m, g.n, g.k))
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
        total = total * np.exp(correction(c.residual, g.m, g.n, g.k) * (batch == 1.0))
    return np.asarray(total)


def gemm_seconds(c: GemmConstants, sm_count: float, shapes: GemmShapes) -> Array:
    """Seconds [shapes] of the products."""
    m, n, k = (np.atleast_1d(np.asarray(v, dtype=float)) for v in (shapes.m, shapes.n, shapes.k))
    if len(m) <= CHUNK:
        return seconds_on(c, geometry(c.schedule, sm_count, m, n, k, shapes.batch), sm_count, shapes)
    batch = np.broadcast_to(np.asarray(shapes.batch, dtype=float), m.shape)
    parts = []
    for start in range(0, len(m), CHUNK):
        at = slice(start, start + CHUNK)
        g = geometry(c.schedule, sm_count, m[at], n[at], k[at], batch[at])
        parts.append(seconds_on(c, g, sm_count, replace(shapes, m=m[at], n=n[at], k=k[at], batch=batch[at])))
    return np.concatenate(parts)


ASYNC_BYTES: Final = 4.0
"""Least that an asynchronous copy moves."""
ODD_ROWS: Final = "kernels.odd_rows"
"""Rows that start on 2 bytes; from the traced heads of vTrain (A100, rows of 50,257 words). At 2.5, GPT-2 124M in torch gains 22
% on an A100 from 50,304 words instead of 50,257; nanoGPT's
author measured about 25 % (A. Karpathy, 2023-02-03)."""
LEAST: Final = 64.0
"""Narrower products are not what tensor cores are used for (routers of few experts, gates)."""


def unaligned(n: Array, k: Array, element_bytes: float) -> Array:
    """Factor on the time of products with rows of n and of k elements [shapes]."""
    n, k = np.asarray(n, dtype=float), np.asarray(k, dtype=float)

    def off(step: float) -> Array:
        return np.asarray((np.mod(n * element_bytes, step) != 0.0) | (np.mod(k * element_bytes, step) != 0.0))

    factor = np.where(off(ASYNC_BYTES), constant(ODD_ROWS), 1.0)
    return np.asarray(np.where(np.minimum(n, k) < LEAST, 1.0, factor))
