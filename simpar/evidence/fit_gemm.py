"""GEMM constants from one time column of a measured table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simpar.costs.compute import TILE_FIELDS, GemmShapes, compute_seconds, seconds_on
from simpar.costs.gemm_tiles import Geometry, geometry
from simpar.evidence.fit_residual import fit_grid
from simpar.evidence.kernel_errors import bands, halves, record, where
from simpar.evidence.kernel_tables import MICRO, Source, usable
from simpar.evidence.robust import Prior, fit_law
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import GemmConstants

Array = NDArray[np.float64]
CORE = 512
"""Fitted region: m, n, k of at least this."""
CAST_COLUMNS = 2048.0
"""Columns of a row that vLLM's per-token cast takes in one pass (steps of its time at 2048 and 4096)."""
FEWEST_ROWS = 200
MOST_HELD_OUT = 1500
"""Rows that a held-out fit is thinned to, about."""
_REACHED = {"ampere": 0.86, "ada": 0.85, "hopper": 0.88, "blackwell": 0.77}
"""Prior of the achieved share of the peak bandwidth (docs/formulas_kernels.md, memory-bound kernels)."""
_CLASSES = {"heuristic": (0.86, 0.86, 0.82, 0.74, 0.6), "cluster": (), "min_waves_sm90": (0.84, 0.9, 0.4)}


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured rows: shapes, geometry, seconds."""

    shapes: GemmShapes
    geometry: Geometry
    seconds: Array


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


def measured(
    table: dict[str, Array],
    column: str,
    source: Source,
    schedule: str,
    sm_count: float,
    keep: Callable[[Array, Array, Array], NDArray[np.bool_]],
) -> Rows:
    """The rows of `column` for which `keep(m, n, k)`."""
    ok = usable(table, ("m", "n", "k"), column)
    ok &= keep(table["m"], table["n"], table["k"])
    m, n, k = (table[name][ok] for name in ("m", "n", "k"))
    shapes = GemmShapes(m, n, k, quantize=source.quantized)
    return Rows(shapes, geometry(schedule, sm_count, m, n, k), table[column][ok] * MICRO)


def fit_rows(
    base: GemmConstants, priors: list[Prior], rows: Rows, sm_count: float, *, first: Array | None = None
) -> tuple[GemmConstants, Array]:
    """Constants fitted on `rows`, and their parameters."""
    kept: dict[tuple[Any, ...], Array] = {}

    def seconds(c: GemmConstants) -> Array:
        key = tuple(getattr(c, name) for name in TILE_FIELDS)
        if key not in kept:  # most of the work, and half of the parameters leave it as it is
            kept.clear()
            kept[key] = compute_seconds(c, rows.geometry, sm_count)
        return seconds_on(c, rows.geometry, sm_count, rows.shapes, tensor_s=kept[key])

    return fit_law(base, priors, seconds, rows.seconds, first=first)


def errors(c: GemmConstants, rows: Rows, sm_count: float) -> Array:
    """log(predicted / measured) [rows]."""
    return np.asarray(np.log(seconds_on(c, rows.geometry, sm_count, rows.shapes)) - np.log(rows.seconds))


def fit_column(table: dict[str, Array], column: str, source: Source, hardware: HardwareProfile, name: str) -> GemmConstants | None:
    """Constants of one time column, or None where too few rows are measured."""
    sm_count = float(hardware.gpu.sm_count.value)
    schedule = schedule_of(source, hardware.gpu.architecture)
    rows = measured(table, column, source, schedule, sm_count, lambda m, n, k: (m >= CORE) & (n >= CORE) & (k >= CORE))
    if len(rows.seconds) < FEWEST_ROWS:
        return None
    base, priors = start_constants(source, schedule), priors_of(source, hardware, schedule)
    law, first = fit_rows(base, priors, rows, sm_count)
    # Twofold by (n, k) pair: every row is predicted by constants that saw neither its n, k nor any other m of that pair.
    pair = halves(rows.shapes.n, rows.shapes.k)
    by_m = halves(rows.shapes.m)
    laws, grids = zip(*(_held_out(base, priors, rows, mask, sm_count, first) for mask in (pair, by_m)), strict=True)
    # The residual grid stays only where it also helps for pairs, and for values of m, that it did not see.
    helps = all(np.median(np.abs(g)) < np.median(np.abs(h)) for g, h in zip(grids, laws, strict=True))
    fitted = _with_grid(law, rows, sm_count) if helps else law
    held, held_m = grids if helps else laws
    flops = 2.0 * rows.shapes.m * rows.shapes.n * rows.shapes.k
    log = errors(fitted, rows, sm_count)
    small = measured(table, column, source, schedule, sm_count, lambda m, n, k: (m < CORE) | (n < CORE) | (k < CORE))
    below = errors(fitted, small, sm_count)
    return fitted.model_copy(
        update={
            "bands": bands(flops, held),
            "bands_small": bands(2.0 * small.shapes.m * small.shapes.n * small.shapes.k, below),
            "fit": record(f"{name}:{column}", log, held, held_m),
        }
    )


def _with_grid(c: GemmConstants, rows: Rows, sm_count: float) -> GemmConstants:
    s = rows.shapes
    return c.model_copy(update={"residual": fit_grid(s.m, s.n, s.k, -errors(c, rows, sm_count))})


def _held_out(
    base: GemmConstants, priors: list[Prior], rows: Rows, mask: NDArray[np.bool_], sm_count: float, first: Array
) -> tuple[Array, Array]:
    """Log errors [rows] of constants fitted on the other half, by the law alone and with its residual grid."""
    logs, better = np.empty(len(rows.seconds)), np.empty(len(rows.seconds))
    for half in (mask, ~mask):
        seen = np.flatnonzero(~half)
        # Every second row of the other half is enough: it tells the constants as well, in half the time.
        thinned = np.zeros(len(mask), dtype=bool)
        thinned[seen[:: max(1, len(seen) // MOST_HELD_OUT)]] = True
        other, _ = fit_rows(base, priors, where(thinned, rows), sm_count, first=first)
        logs[half] = errors(other, where(half, rows), sm_count)
        better[half] = errors(_with_grid(other, where(~half, rows), sm_count), where(half, rows), sm_count)
    return logs, better
