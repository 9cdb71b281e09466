"""Fused expert operator: rows per expert, two grouped GEMMs in waves of tiles, permutes, routing.

    t = latency + c tokens topk + (rows (2 h + f) ... + tokens h) bytes / B_p + sum over both GEMMs of (compute^p + weights^p)^(1/p)

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
TILE_ROWS: Final = (64.0, 128.0, 256.0)
TILE_COLUMNS: Final = (128.0, 256.0)
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
        tokens, hidden, width, topk: [shapes]; width = expert feed-forward width over the tensor-parallel size.
        rows: token-expert rows of the rank; active: experts with at least a row.
        tiles: row tiles [shapes, heights] for each of TILE_ROWS.
    """

    tokens: Array
    hidden: Array
    width: Array
    topk: Array
    rows: Array
    active: Array
    tiles: Array


def moe_shapes(table: dict[str, Array], alphas: Array, *, local_routing: bool = False) -> MoeShapes:
    """Shapes of the columns tokens, hidden, inter, topk, experts, tp, ep of a measured table; alphas [shapes]."""
    count = len(table["tokens"])
    rows, active, tiles = np.empty(count), np.empty(count), np.empty((count, len(TILE_ROWS)))
    for i in range(count):
        ep = int(table["ep"][i])
        loads = np.array(
            rank_loads(int(table["experts"][i]), ep, int(table["topk"][i]), float(table["tokens"][i]), float(alphas[i]))
        )
        if local_routing:
            all_rows = float(table["tokens"][i] * table["topk"][i])
            loads = loads * min(float(table["topk"][i]), all_rows / loads.sum())
        rows[i], active[i] = loads.sum(), np.minimum(loads, 1.0).sum()
        tiles[i] = [np.ceil(np.maximum(loads, _SMALLEST) / height).sum() for height in TILE_ROWS]
    width = np.ceil(table["inter"] / table["tp"])
    return MoeShapes(table["tokens"], table["hidden"], width, table["topk"], rows, active, tiles)


def _grouped(c: MoeConstants, sm_count: float, a: MoeShapes, n: Array, k: Array) -> Array:
    best: Array | None = None
    for i, height in enumerate(TILE_ROWS):
        for columns in TILE_COLUMNS:
            x = a.tiles[:, i] * np.ceil(n / columns) / sm_count
            area = height * columns
            slow = (32768.0 / area) ** c.tile_exponent
            each = 2.0 * area * (k + c.k_overhead) * sm_count / c.rate_flops_per_s * slow
            seconds = waves_cost(x, c.wave_beta, 0.0) * each
            best = seconds if best is None else np.minimum(best, seconds)
    assert best is not None
    weights = a.active * n * k * c.element_bytes / c.bandwidth_bytes_per_s
    larger, smaller = np.maximum(best, weights), np.minimum(best, weights)
    return np.asarray(larger * (1.0 + (smaller / larger) ** c.overlap_power) ** (1.0 / c.overlap_power))


def moe_seconds(c: MoeConstants, sm_count: float, a: MoeShapes) -> Array:
    """Seconds [shapes] of the fused operator."""
    gemms = _grouped(c, sm_count, a, 2.0 * a.width, a.hidden) + _grouped(c, sm_count, a, a.hidden, a.width)
    rows, width = np.log2(np.maximum(a.rows, 1.0) / 8192.0), np.log2(a.width / 1024.0)
    hidden, active = np.log2(a.hidden / 4096.0), np.log2(np.maximum(a.active, 1.0) / 32.0)
    parts = (rows, width, hidden, active, rows * rows, width * width, active * active, rows * active)
    smooth = sum(w * p for w, p in zip(c.ridge, parts, strict=True))
    moved = a.rows * (a.hidden * (2.0 * c.element_bytes + 4.0) + a.width * (4.0 + 2.0 * c.element_bytes))
    moved = moved + 4.0 * a.tokens * a.hidden
    routing = c.latency_s + c.token_s * a.tokens * a.topk
    return np.asarray(gemms * np.exp(smooth) + moved / c.permute_bytes_per_s + routing)


def moe_flops(a: MoeShapes) -> Array:
    """FLOPs [shapes] of the gated expert MLPs of the rank."""
    return np.asarray(6.0 * a.rows * a.hidden * a.width)
