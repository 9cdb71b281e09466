"""GEMM constants from one time column of a measured table, with the residual grid of its library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simpar.costs.compute import TILE_FIELDS, GemmShapes, compute_seconds, seconds_on
from simpar.costs.gemm_residual import LARGEST, NODES, corners
from simpar.costs.gemm_tiles import Geometry, geometry
from simpar.evidence.kernel_law import Law, Rows, bands, halves, record, where
from simpar.evidence.kernel_tables import SIZES, Source, Table, core, measured_rows
from simpar.evidence.robust import Array, Prior
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import GemmConstants

CAST_COLUMNS = 2048.0
"""Columns of a row that vLLM's per-token cast takes in one pass (steps of its time at 2048 and 4096)."""
FEWEST_ROWS = 200
MOST_HELD_OUT = 1500
"""Rows that a held-out fit is thinned to, about."""
_REACHED = {"ampere": 0.86, "ada": 0.85, "hopper": 0.88, "blackwell": 0.77}
"""Prior of the achieved share of the peak bandwidth (docs/formulas_kernels.md, memory-bound kernels)."""
_CLASSES = {"heuristic": (0.86, 0.86, 0.82, 0.74, 0.6), "cluster": (), "min_waves_sm90": (0.84, 0.9, 0.4)}


@dataclass(frozen=True)
class Products(Rows[GemmShapes]):
    """Measured products, with the tiles that they may use."""

    geometry: Geometry


def schedule_of(source: Source, architecture: str) -> str:
    """Which tile rule the library follows."""
    if "deepgemm" in source.library:
        return "min_waves_sm90" if architecture == "hopper" else "min_waves_sm100"
    if source.dtype.startswith("fp8") and "cutlass" in source.library:
        return "cluster"
    return "heuristic"


def priors_of(source: Source, hardware: HardwareProfile, schedule: str) -> list[Prior]:
    """Parameters with priors: peaks for the rates, usual values for the rest."""
    architecture = hardware.gpu.architecture
    peak = hardware.peak_flops_per_s("fp8" if source.dtype.startswith("fp8") else "bf16")
    bandwidth = hardware.gpu.memory_bandwidth.value * _REACHED.get(architecture, 0.8)
    found = [
        Prior("rate_flops_per_s", 0.75 * peak, 0.3),
        Prior("bandwidth_bytes_per_s", bandwidth, 0.15),
        Prior("latency_s", 2.4e-6, 0.3),
        Prior("k_overhead", 100.0, 0.5),
        Prior("wave_beta", 0.7 if architecture == "ampere" else 0.15, 0.3, log=False),
        Prior("wave_first", 0.0, 0.3, log=False),
        Prior("overlap_power", 3.0, 0.5),
        Prior("size_exponent", 0.0, 0.05, log=False),
        Prior("unaligned", 0.0, 0.05, log=False),
    ]
    found += [Prior(f"ridge.{i}", 0.0, 0.05 if i < 3 else 0.02, log=False) for i in range(9)]
    if schedule == "heuristic":
        found.append(Prior("split_k_cost", 0.8, 0.7))
    if schedule == "cluster":
        found.append(Prior("unaligned_octave", 0.0, 0.02, log=False))
    classes = _CLASSES.get(schedule, _CLASSES["min_waves_sm90"])
    found += [Prior(f"tile_efficiency.{i}", e, 0.15 if e > 0.5 else 0.4) for i, e in enumerate(classes)]
    if source.quantized:
        found += [Prior("cast_latency_s", 4e-6, 0.7), Prior("cast_bytes_per_s", bandwidth, 0.4)]
        if schedule.startswith("min_waves"):
            found.append(Prior("cast_granularity", 9.0, 0.3))
        if source.library.startswith("vllm_cutlass"):
            found.append(Prior("cast_idle", 0.5, 0.7))
    return found


def start_constants(source: Source, schedule: str) -> GemmConstants:
    """Constants with everything that is not fitted."""
    narrow = source.dtype.startswith("fp8")
    empty = {"rate_flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e12, "latency_s": 0.0}
    return GemmConstants(
        library=source.library,
        mode="sustained" if source.mode == "sustained" else "burst",
        dtype=source.dtype,
        schedule=schedule,
        includes_quantization=source.quantized,
        input_bytes=1.0 if narrow else 2.0,
        tile_efficiency=_CLASSES.get(schedule, _CLASSES["min_waves_sm90"]),
        cast_columns=CAST_COLUMNS if source.library.startswith("vllm_cutlass") else 0.0,
        **empty,
    )


def law_of(base: GemmConstants, priors: Sequence[Prior], sm_count: float) -> Law[GemmConstants]:
    """The law of products, which keeps the time of the tensor cores at the last constants."""
    kept: list[Any] = [None, None, None]

    def seconds(c: GemmConstants, rows: Products) -> Array:
        fields = [getattr(c, name) for name in TILE_FIELDS]
        if kept[0] is not rows or kept[1] != fields:  # most of the work, and half of the parameters leave it as it is
            kept[:] = rows, fields, compute_seconds(c, rows.geometry, sm_count)
        return seconds_on(c, rows.geometry, sm_count, rows.shapes, tensor_s=kept[2])

    return Law(base, priors, seconds)


def fit_column(table: Table, column: str, source: Source, hardware: HardwareProfile, name: str) -> GemmConstants | None:
    """Constants of one time column, or None where too few rows are measured."""
    sm_count = float(hardware.gpu.sm_count.value)
    schedule = schedule_of(source, hardware.gpu.architecture)
    every = measured_rows("gemm", table, column)

    def products(inside: NDArray[np.bool_]) -> Products:
        m, n, k = (every[name][inside] for name in SIZES["gemm"])
        shapes = GemmShapes(m, n, k, quantize=source.quantized)
        return Products(shapes, every["seconds"][inside], geometry(schedule, sm_count, m, n, k))

    rows = products(core(every))
    if len(rows.seconds) < FEWEST_ROWS:
        return None
    law = law_of(start_constants(source, schedule), priors_of(source, hardware, schedule), sm_count)
    plain, first = law.fit(rows)
    # Twofold by (n, k) pair: every row is predicted by constants that saw neither its n, k nor any other m of that pair.
    masks = (halves(rows.shapes.n, rows.shapes.k), halves(rows.shapes.m))
    laws, grids = zip(*(_held_out(law, rows, mask, first) for mask in masks), strict=True)
    # The residual grid stays only where it also helps for pairs, and for values of m, that it did not see.
    helps = all(np.median(np.abs(g)) < np.median(np.abs(h)) for g, h in zip(grids, laws, strict=True))
    fitted = _with_grid(law, plain, rows) if helps else plain
    held, held_m = grids if helps else laws
    small = products(~core(every))
    return fitted.model_copy(
        update={
            "bands": bands(flops_of(rows), held),
            "bands_small": bands(flops_of(small), law.errors(fitted, small)),
            "fit": record(f"{name}:{column}", law.errors(fitted, rows), held, held_m),
        }
    )


def flops_of(rows: Products) -> Array:
    """Of each product [rows]."""
    return 2.0 * rows.shapes.m * rows.shapes.n * rows.shapes.k


def _with_grid(law: Law[GemmConstants], c: GemmConstants, rows: Products) -> GemmConstants:
    s = rows.shapes
    return c.model_copy(update={"residual": fit_grid(s.m, s.n, s.k, -law.errors(c, rows))})


def _held_out(law: Law[GemmConstants], rows: Products, mask: NDArray[np.bool_], first: Array) -> tuple[Array, Array]:
    """Log errors [rows] of constants fitted on the other half, by the law alone and with its residual grid."""
    logs, better = np.empty(len(rows.seconds)), np.empty(len(rows.seconds))
    for half in (mask, ~mask):
        seen, own = np.flatnonzero(~half), where(half, rows)
        # Every second row of the other half is enough: it tells the constants as well, in half the time.
        thinned = np.zeros(len(mask), dtype=bool)
        thinned[seen[:: max(1, len(seen) // MOST_HELD_OUT)]] = True
        other, _ = law.fit(where(thinned, rows), first)
        logs[half] = law.errors(other, own)
        better[half] = law.errors(_with_grid(law, other, where(~half, rows)), own)
    return logs, better


SMOOTH = 0.1
"""Weight of the squared difference of neighbouring nodes, in rows."""
SHRINK = 0.1
"""Weight of the squared value of a node, in rows."""
SCALE = 0.04
"""Error at which the loss turns linear."""
STEPS = 8


def _roughness() -> Array:
    nodes = np.arange(np.prod(NODES)).reshape(NODES)
    found = np.zeros((nodes.size, nodes.size))
    for axis, count in enumerate(NODES):
        a, b = (np.take(nodes, range(s, count - 1 + s), axis).ravel() for s in (0, 1))
        for first, second, sign in ((a, a, 1.0), (b, b, 1.0), (a, b, -1.0), (b, a, -1.0)):
            np.add.at(found, (first, second), sign)
    return found


def fit_grid(m: Array, n: Array, k: Array, logs: Array) -> tuple[float, ...]:
    """The grid that takes most of `logs` = log(measured / priced) [rows]; outliers count little."""
    indices, weights = corners(m, n, k)
    size = int(np.prod(NODES))
    pairs = (indices[:, :, None] * size + indices[:, None, :]).ravel()
    products = weights[:, :, None] * weights[:, None, :]
    penalty = SMOOTH * _roughness() + SHRINK * np.eye(size)
    grid: Array = np.zeros(size)
    for _ in range(STEPS):
        left = logs - (grid[indices] * weights).sum(1)
        row = 1.0 / np.sqrt(1.0 + (left / SCALE) ** 2)
        normal = np.bincount(pairs, (products * row[:, None, None]).ravel(), size * size).reshape(size, size)
        right = np.bincount(indices.ravel(), (weights * (row * logs)[:, None]).ravel(), size)
        grid = np.asarray(np.linalg.solve(normal + penalty, right), dtype=float)
    return tuple(round(float(v), 4) for v in np.clip(grid, -LARGEST, LARGEST))
