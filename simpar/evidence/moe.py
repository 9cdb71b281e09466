"""Fused expert operator: rows per expert, two grouped GEMMs in waves of tiles, permutes, routing.

    t       = latency + routing + (rows (2 h + f) ... + tokens h) bytes / B_p + sum over both GEMMs of one tile height's time
    height  = (compute^p + weights^p)^(1/p),  weights = n k bytes (experts + reread (row tiles - experts)) / B
    routing = c tokens topk, and where the fused routing kernel does not apply c' tokens topk + c'' tokens experts

A further row tile of an expert reads its weights again, save for the share that the L2 cache keeps. The tile height is the
fastest one at even loads (libraries tuned once per number of tokens) or at the loads themselves.

Used to read the measured operator tables and by MoE what-ifs; training steps are lowered to grouped GEMMs, permutes and
collectives instead. All arrays are [shapes].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.costs.compute import waves_cost
from simpar.specs.kernel_constants import MoeConstants

Array = NDArray[np.float64]
TILE_ROWS: Final = (16.0, 32.0, 64.0, 128.0, 256.0)
TILE_COLUMNS: Final = (128.0, 256.0)
DEFAULT_TILE: Final = 2
"""Of TILE_ROWS: the height that Triton's expert kernel takes for a layer without a tuned configuration."""
VECTOR: Final = 16
"""Triton reads rows whose length is no multiple of this without vector loads."""
FUSED_EXPERTS: Final = 128
FUSED_CHOICES: Final = 8
"""TensorRT-LLM's fused routing kernel takes at most so many experts and choices; others are sorted by plain torch kernels."""
DRAWS: Final = 48
SEED: Final = 7
_SMALLEST: Final = 1e-9


@lru_cache(maxsize=65536)
def rank_loads(experts: int, ep: int, topk: int, tokens: float, alpha: float) -> tuple[float, ...]:
    """Rows of each expert of the fullest of `ep` ranks, largest first.

    alpha = 0: balanced. Otherwise expert popularity follows a power law of that exponent between 1 and 0.8 tokens, as
    the measured tables draw it; no expert gets a token twice. The draw whose fullest rank is the median is taken.
    """
    local = max(experts // ep, 1)
    total = tokens * topk
    if alpha <= 0:
        return (total / experts,) * local
    rng = np.random.default_rng(SEED)
    power = 1.0 - alpha
    top = max(tokens * 0.8, 2.0) ** power
    shares = ((top - 1.0) * rng.random((DRAWS, experts)) + 1.0) ** (1.0 / power)
    rows = shares / shares.sum(1, keepdims=True) * total
    for _ in range(4):
        surplus = np.maximum(rows - tokens, 0.0).sum(1, keepdims=True)
        rows = np.minimum(rows, tokens)
        room = tokens - rows
        rows = rows + surplus * room / np.maximum(room.sum(1, keepdims=True), _SMALLEST)
    ranks = rows[:, : local * ep].reshape(DRAWS, -1, local)
    sums = ranks.sum(2)
    chosen = np.argsort(sums.max(1))[DRAWS // 2]
    return tuple(sorted(ranks[chosen, sums[chosen].argmax()].tolist(), reverse=True))


@dataclass(frozen=True, slots=True)
class MoeShapes:
    """Expert layers of one rank.

    Attributes:
        tokens, hidden, width, topk, experts: [shapes]; width = expert feed-forward width over the tensor-parallel size.
        local: experts of the rank; rows: token-expert rows of the rank; active: experts with at least a row.
        tiles: row tiles [shapes, heights] for each of TILE_ROWS; planned: the same at even loads.
    """

    tokens: Array
    hidden: Array
    width: Array
    topk: Array
    experts: Array
    local: Array
    rows: Array
    active: Array
    tiles: Array
    planned: Array


def moe_shapes(table: dict[str, Array], alphas: Array, *, local_routing: bool = False) -> MoeShapes:
    """Shapes of the columns tokens, hidden, inter, topk, experts, tp, ep of a measured table; alphas [shapes]."""
    count = len(table["tokens"])
    rows, active = np.empty(count), np.empty(count)
    tiles, planned = np.empty((count, len(TILE_ROWS))), np.empty((count, len(TILE_ROWS)))
    heights = np.array(TILE_ROWS)
    for i in range(count):
        experts, ep, topk, tokens = (float(table[name][i]) for name in ("experts", "ep", "topk", "tokens"))
        loads = np.array(rank_loads(int(experts), int(ep), int(topk), tokens, float(alphas[i])))
        if local_routing:
            loads = loads * min(topk, tokens * topk / loads.sum())
        rows[i], active[i] = loads.sum(), np.minimum(loads, 1.0).sum()
        tiles[i] = np.ceil(np.maximum(loads, _SMALLEST)[:, None] / heights).sum(0)
        even = tokens * topk / experts * (min(topk, ep) if local_routing else 1.0)
        # A random draw of the mean load: one standard deviation more rows.
        planned[i] = len(loads) * np.ceil((even + np.sqrt(even)) / heights)
    width, local = np.ceil(table["inter"] / table["tp"]), np.maximum(table["experts"] // table["ep"], 1.0)
    return MoeShapes(table["tokens"], table["hidden"], width, table["topk"], table["experts"], local, rows, active, tiles, planned)


def _heights(c: MoeConstants, sm_count: float, a: MoeShapes, tiles: Array, n: Array, k: Array) -> Array:
    """Seconds of one grouped GEMM [shapes, heights]."""
    heights = np.array(TILE_ROWS) / np.array(c.height_efficiency)
    best: Array | None = None
    for columns in TILE_COLUMNS:
        x = tiles * np.ceil(n / columns)[:, None] / sm_count
        slow = (256.0 / columns) ** c.column_exponent
        each = 2.0 * heights * columns * (k + c.k_overhead)[:, None] * sm_count / c.rate_flops_per_s * slow
        seconds = waves_cost(x, c.wave_beta, 0.0) * each
        best = seconds if best is None else np.minimum(best, seconds)
    assert best is not None
    active = np.minimum(a.active[:, None], tiles)
    reads = active + c.reread * (tiles - active)
    weights = reads * (n * k)[:, None] * c.element_bytes / c.bandwidth_bytes_per_s
    larger, smaller = np.maximum(best, weights), np.minimum(best, weights)
    return np.asarray(larger * (1.0 + (smaller / larger) ** c.overlap_power) ** (1.0 / c.overlap_power))


def _tuned(c: MoeConstants, a: MoeShapes) -> NDArray[np.bool_]:
    pairs = np.array(c.tuned, dtype=float)
    return np.asarray(((a.local[:, None] == pairs[:, 0]) & (a.width[:, None] == pairs[:, 1])).any(1))


def _grouped(c: MoeConstants, sm_count: float, a: MoeShapes, n: Array, k: Array) -> Array:
    seconds = _heights(c, sm_count, a, a.tiles, n, k)
    if c.plan == "even":
        chosen = _heights(c, sm_count, a, a.planned, n, k).argmin(1)
        found = seconds[np.arange(len(chosen)), chosen]
    else:
        found = seconds.min(1)
    if not c.tuned:
        return np.asarray(found)
    deep = np.maximum(np.log2(a.rows / a.active / 256.0), 0.0)
    wide = np.clip(np.log2(a.width / 512.0), -2.0, 5.0)
    default = seconds[:, DEFAULT_TILE] * np.exp(c.untuned + deep * (c.untuned_deep + c.untuned_wide * wide))
    return np.asarray(np.where(_tuned(c, a), found, default))


def _smooth(c: MoeConstants, a: MoeShapes) -> Array:
    rows, width = np.log2(np.maximum(a.rows, 1.0) / 8192.0), np.log2(a.width / 1024.0)
    hidden, active = np.log2(a.hidden / 4096.0), np.log2(np.maximum(a.active, 1.0) / 32.0)
    parts = (rows, width, hidden, active, rows * rows, width * width, active * active, rows * active)
    smooth = sum(w * p for w, p in zip(c.ridge, parts, strict=True))
    return np.asarray(smooth + np.where(np.mod(a.width, VECTOR) == 0, 0.0, c.unaligned))


def moe_seconds(c: MoeConstants, sm_count: float, a: MoeShapes) -> Array:
    """Seconds [shapes] of the fused operator."""
    gemms = _grouped(c, sm_count, a, 2.0 * a.width, a.hidden) + _grouped(c, sm_count, a, a.hidden, a.width)
    choices = a.tokens * a.topk
    # Kernels that keep a row for every choice also zero, activate and sum those of experts elsewhere.
    rows = a.rows + c.remote_share * np.maximum(choices - a.rows, 0.0)
    moved = rows * (a.hidden * (2.0 * c.element_bytes + 4.0) + a.width * (4.0 + 2.0 * c.element_bytes))
    moved = moved + 4.0 * a.tokens * a.hidden
    plain = (a.experts > FUSED_EXPERTS) | (a.topk > FUSED_CHOICES)
    sorting = c.routing_choice_s * choices + c.routing_expert_s * a.tokens * a.experts
    routing = c.latency_s + c.token_s * choices + np.where(plain, sorting, 0.0)
    return np.asarray(gemms * np.exp(_smooth(c, a)) + moved / c.permute_bytes_per_s + routing)


def moe_flops(a: MoeShapes) -> Array:
    """FLOPs [shapes] of the gated expert MLPs of the rank."""
    return np.asarray(6.0 * a.rows * a.hidden * a.width)
