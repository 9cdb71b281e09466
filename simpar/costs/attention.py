"""Flash-attention price: work limited by the sequence, tiles over the SMs, and the longest causal tile.

    work = 2 f b h s_q (d + d_v)/2 ... (s_kv + s0) / R_d    f = 1 causal, 2 full (the triangle or the square)
    causal: t = latency + (work^p + (c longest)^p)^(1/p) + cast of operands
    full:   t = latency + work waves'/x

`longest` is one tile of queries against all keys on one SM; where at most half of the SMs have a tile, its keys may be split.
Tile heights: 192 queries for head sizes up to 96, else 128 (FlashAttention-3 forward; the A100 kernels' 128 makes no difference).
Serving tables also write a key/value cache, which a training kernel does not: those terms are separate. All arrays are [shapes].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from simpar.costs.compute import waves_cost
from simpar.costs.gemm_tiles import Array
from simpar.specs.kernel_constants import AttentionConstants

SMALL_HEAD: Final = 96
HOT_S: Final = 4.5e-3
"""Length of a pass from which the power cap begins to slow it; twice as long is slowed in full."""


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Scaled dot-product attentions, every field [shapes].

    Attributes:
        batch, queries, keys, heads, kv_heads, head_dim, v_head_dim: sizes.
        cache_write: the measured time contains the write of a serving cache.
    """

    batch: Array
    queries: Array
    keys: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    v_head_dim: Array
    cache_write: bool = False

    @classmethod
    def of(cls, table: dict[str, Array]) -> AttentionShapes:
        """From the columns b, s, h, kv, d of a measured table."""
        s, d = table["s"], table["d"]
        return cls(table["b"], s, s, table["h"], table["kv"], d, d, cache_write=True)


def head_constants(c: AttentionConstants, head_dim: Array) -> tuple[Array, Array]:
    """(rate, s0) per shape; between measured head sizes by interpolation, outside the nearest."""
    sizes = np.array([h.head_dim for h in c.heads], dtype=float)
    rates = np.array([h.rate_flops_per_s for h in c.heads])
    extra = np.array([h.sequence_overhead for h in c.heads])
    return np.interp(head_dim, sizes, rates), np.interp(head_dim, sizes, extra)


def critical_shares(c: AttentionConstants, head_dim: Array) -> Array:
    """Share of the longest tile that cannot be hidden, per shape."""
    sizes = np.array([h.head_dim for h in c.heads], dtype=float)
    own = np.log([h.critical for h in c.heads])
    return np.asarray(c.critical_share * np.exp(np.interp(head_dim, sizes, own)))


def _smooth(c: AttentionConstants, a: AttentionShapes, work: Array) -> Array | float:
    if not any(c.ridge):
        return 0.0
    packed = np.log2(a.heads / a.kv_heads)
    ratio = np.minimum(packed, 4.0)
    # Query heads of a key/value head fill a tile's rows; other numbers than powers of two leave the fast loads.
    odd = (np.abs(packed - np.round(packed)) > 1e-6).astype(float)
    wide = np.clip(np.log2(a.head_dim / 128.0), -1.0, 2.0)
    hot = np.clip(np.log2(np.maximum(work, 1e-9) / HOT_S), 0.0, 1.0) * np.clip(wide + 1.0, 0.0, 1.0)
    parallel = np.clip(np.log2(a.batch * a.heads / 64.0), -6.0, 5.0)
    length = np.clip(np.log2(a.keys / 4096.0), -3.0, 4.0)
    single = (a.heads == a.kv_heads).astype(float)
    caches = np.log2(a.kv_heads)
    parts = (
        ratio,
        ratio**2,
        single,
        parallel,
        parallel**2,
        length,
        length**2,
        np.log1p(work / 1e-3),
        parallel * length,
        caches,
        np.log2(a.batch),
        single * length,
        single * caches,
        odd,
        hot,
        single * wide,
        ratio * wide,
        odd * wide,
    )
    return np.asarray(sum(w * p for w, p in zip(c.ridge, parts, strict=True)), dtype=float)


def attention_seconds(c: AttentionConstants, sm_count: float, a: AttentionShapes) -> Array:
    """Seconds [shapes] of one pass in the constants' direction."""
    rate, extra = head_constants(c, a.head_dim)
    heads = a.batch * a.heads
    width = (a.head_dim + a.v_head_dim) / 2.0
    tile = np.where(a.head_dim <= SMALL_HEAD, 192.0, 128.0)
    tiles = np.ceil(a.queries / tile)
    x = heads * tiles / sm_count
    # The mean number of keys of a query: all of them, or those up to the diagonal (aligned at the end).
    if c.causal:
        seen = np.maximum(a.keys - a.queries / 2.0, a.keys / 2.0)
        work = 4.0 * heads * width * a.queries * (seen + extra / 2.0) / rate
    else:
        work = 4.0 * heads * width * tiles * tile * (a.keys + extra) / rate
    # Ridge terms were fitted on equal widths.
    work = work * np.exp(_smooth(c, a, work))
    if c.causal:
        parts = np.maximum(np.floor(1.0 / np.minimum(x, 1.0)), 1.0)
        longest = (
            critical_shares(c, a.head_dim) / parts**c.occupancy_exponent * 4.0 * tile * width * (a.keys + extra) * sm_count / rate
        )
        larger, smaller = np.maximum(work, longest), np.minimum(work, longest)
        core = larger * (1.0 + (smaller / np.maximum(larger, 1e-30)) ** c.overlap_power) ** (1.0 / c.overlap_power)
    else:
        core = work * waves_cost(x, c.wave_beta, 0.0) / x * np.minimum(x, 1.0) ** c.occupancy_exponent
    total = c.latency_s + core
    if c.io_bytes_per_s:
        total = total + 4.0 * a.batch * a.queries * a.heads * width / c.io_bytes_per_s
    if a.cache_write and c.cache_bytes_per_s:
        total = total + 4.0 * a.batch * a.keys * a.kv_heads * width / c.cache_bytes_per_s
    if a.cache_write:
        total = total + a.batch * a.keys * c.token_s
    return np.asarray(total)


def attention_flops(a: AttentionShapes, *, causal: bool) -> Array:
    """Model FLOPs [shapes] of the forward pass; causal counts the triangle."""
    seen = np.maximum(a.keys - a.queries / 2.0, a.keys / 2.0) if causal else a.keys
    return np.asarray(2.0 * a.batch * a.heads * a.queries * seen * (a.head_dim + a.v_head_dim))
