"""Which tiles a GEMM library can choose from, and what each costs in waves: the geometry of the GEMM price.

- heuristic (cuBLAS): the fastest of a tile set and of split-k factors.
- cluster (CUTLASS fp8 kernels of serving stacks): a pair of 128 x 128 tiles on two SMs, the one shape taken for m > 128.
- min_waves_sm90 / sm100 (DeepGEMM): the tile with the fewest waves, then the fullest last one; a rule, not a search.
  Source of the rule: deepseek-ai/DeepGEMM, csrc/jit_kernels/heuristics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_CLASSES: Final = (
    (0, ((256, 128), (128, 256))),
    (1, ((192, 128), (128, 192))),
    (2, ((128, 128),)),
    (3, ((64, 256), (256, 64))),
    (4, ((64, 128), (128, 64))),
    (5, ((64, 64),)),
)
_SPLITS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_CLUSTER: Final = ((256, 128, 2, 0),)
_NONE: Final = np.zeros((1, 1))
MIN_SPLIT_DEPTH: Final = 256
"""Smallest k of one split."""


@dataclass(frozen=True, slots=True)
class TileSet:
    """Candidate tiles as columns.

    Attributes:
        rows, columns: output tile [candidates]; splits: parts of k; kind: efficiency class; sms: SMs that share one tile.
        area: outputs that one SM computes; merges: splits where there is more than one, else 0.
    """

    rows: Array
    columns: Array
    splits: Array
    kind: NDArray[np.int64]
    sms: Array
    area: Array
    merges: Array


@lru_cache(maxsize=8)
def tile_set(schedule: str) -> TileSet:
    """The candidates of a schedule."""
    if schedule == "heuristic":
        table = [(a, b, s, kind, 1) for kind, tiles in _CLASSES for a, b in tiles for s in _SPLITS if s == 1 or a * b >= 8192]
    elif schedule == "cluster":
        table = [(a, b, 1, kind, sms) for a, b, sms, kind in _CLUSTER]
    elif schedule == "min_waves_sm90":
        widths = [*range(16, 129, 16), 144, 160, 192]
        table = [(a, b, 1, 0, 1) for a in (64, 128, 256) for b in widths if a <= 128 or b <= 128]
    else:
        table = [(128, b, 1, 0, 1) for b in range(32, 257, 32)]
    data = np.array(table, dtype=float)
    a, b, splits, kind, sms = data.T.copy()
    return TileSet(a, b, splits, kind.astype(np.int64), sms, a * b / sms, np.where(splits > 1, splits, 0.0))


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes beside the tiles they may use.

    Attributes:
        m, n, k: [shapes].
        waves: tiles (and splits) over SMs [shapes, candidates].
        area, depth: outputs of one SM and k of one split, broadcast against it.
        merges: split factor of the candidates that split, else 0.
        allowed: which candidates a library would consider.
        odd, single: min_waves only: widths that do not divide well, and a single wave of a large tile.
    """

    m: Array
    n: Array
    k: Array
    waves: Array
    area: Array
    depth: Array
    merges: Array
    allowed: NDArray[np.bool_]
    odd: Array
    single: Array


def geometry(schedule: str, sm_count: float, m: Array, n: Array, k: Array, batch: Array | float = 1.0) -> Geometry:
    """Waves of every candidate tile for shapes m, n, k [shapes], each `batch` times."""
    tiles = tile_set(schedule)
    m, n, k = (np.atleast_1d(np.asarray(v, dtype=float)) for v in (m, n, k))
    batches = np.asarray(batch, dtype=float)
    blocks = np.ceil(m[:, None] / tiles.rows) * np.ceil(n[:, None] / tiles.columns)
    blocks *= tiles.sms * (batches[:, None] if batches.ndim else batches)
    if schedule.startswith("min_waves"):
        return _fewest_waves(tiles, sm_count, m, n, k, blocks)
    waves = blocks * (tiles.splits / sm_count)
    depth = k[:, None] / tiles.splits
    allowed = (tiles.merges == 0) | ((depth >= MIN_SPLIT_DEPTH) & (blocks < 2 * sm_count))
    return Geometry(m, n, k, waves, tiles.area[None, :], depth, tiles.merges[None, :], allowed, _NONE, _NONE)


def _fewest_waves(tiles: TileSet, sm_count: float, m: Array, n: Array, k: Array, blocks: Array) -> Geometry:
    columns = np.ceil(n[:, None] / tiles.columns)
    rounds = np.ceil(blocks / sm_count)
    last = blocks - (rounds - 1) * sm_count
    # A wider tile of the same height that makes no fewer columns is never preferred.
    same = np.zeros_like(blocks, dtype=bool)
    same[:, 1:] = (tiles.rows[1:] == tiles.rows[:-1]) & (columns[:, 1:] == columns[:, :-1])
    score = rounds * 1e6 - last * 1e3 - tiles.columns + np.where(same, 1e12, 0.0)
    best = np.argmin(score, axis=1)
    pick = np.arange(len(m))
    a, b, w = tiles.rows[best], tiles.columns[best], rounds[pick, best]
    odd = ((b % 64 != 0) & (b != 96) & (b != 160)).astype(float)
    tail = np.mod(m, 256)
    large = ((a == 128) & (b == 192)) | ((a == 256) & (b == 96)) | ((a == 256) & (b == 128) & ((tail == 0) | (tail > 64)))
    single = ((w == 1) & large).astype(float)
    waves = blocks[pick, best] / sm_count
    shape = (len(m), 1)
    return Geometry(
        m,
        n,
        k,
        waves.reshape(shape),
        (a * b).reshape(shape),
        k.reshape(shape),
        _NONE,
        np.ones(shape, dtype=bool),
        odd.reshape(shape),
        single.reshape(shape),
    )
