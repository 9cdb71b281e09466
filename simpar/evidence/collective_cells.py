"""Measured collectives as cells, what a law predicts for them, and the error by series.

A cell is the rows that share all but the size: one law is made for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simpar.boundary import read_records
from simpar.costs import nccl, point_to_point
from simpar.costs.collective_defaults import key_of
from simpar.costs.collective_geometry import Geometry, geometry
from simpar.costs.collective_law import seconds_of
from simpar.evidence.collective_rows import Row, parse
from simpar.evidence.robust import Array
from simpar.specs.collective_constants import NetworkConstants, ScaleUpConstants

LARGE = 2**20
LARGE_SHARE = 0.7
"""Weight of messages of at least 1 MiB in a series; the rest is for the smaller ones."""
VAGUE_SHARE = 0.1
"""Weight of a peak read off a slide, whose size is not stated."""
Key = tuple[str, ...]


@dataclass(slots=True)
class Cell:
    """Rows that share everything but the size."""

    collective: str
    geometry: Geometry
    nvls: bool
    sharp: bool
    harness: str
    key: Key
    series: tuple[str, int, str]
    nic_latency_s: float
    bytes_: Array
    measured_s: Array
    weights: Array


def read_rows(path: Path) -> list[Row]:
    """Rows of a table of measured collectives that can be priced and are meant for fitting."""
    rows = [parse(raw, f"{path.name}:{line}") for line, raw in enumerate(read_records(path), 2)]
    return [r for r in rows if not r.skipped and r.group.get("suggested_split", "fit") == "fit"]


def weights_of(rows: Sequence[Row]) -> dict[str, float]:
    """Row id -> weight; every series sums to the same."""
    counts: dict[tuple[tuple[str, int, str], bool], int] = defaultdict(int)
    for row in rows:
        counts[row.series, row.bytes_ >= LARGE] += 1
    found = {}
    for row in rows:
        large = row.bytes_ >= LARGE
        share = LARGE_SHARE if large else 1 - LARGE_SHARE
        vague = VAGUE_SHARE if "slide" in str(row.group.get("precision", "")) else 1.0
        found[row.row_id] = vague * share / counts[row.series, large]
    return found


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """The rows grouped by everything but the size, which is what a law is made for."""
    weights, groups = weights_of(rows), defaultdict(list)
    for row in rows:
        assert row.hardware is not None
        assert row.placement is not None
        g = geometry(row.hardware, row.placement)
        up = row.hardware.scale_up
        key = (*key_of(row.hardware), *([row.variant] if row.variant else []))
        options = (row.nvls and up.in_network_reduction, row.sharp, row.harness)
        latency = row.hardware.nic.latency.value
        groups[row.series, row.collective, g, (*options, latency), key].append(row)
    return [
        Cell(collective, g, options[0], options[1], options[2], key, series, options[3],
             np.array([r.bytes_ for r in found]), np.array([r.measured_s for r in found]),
             np.array([weights[r.row_id] for r in found]))
        for (series, collective, g, options, key), found in groups.items()
    ]  # fmt: skip


Harnesses = dict[str, tuple[float, float]]
"""Benchmark -> seconds it adds and the share of the rate it reaches."""


def predict(cell: Cell, up: ScaleUpConstants, net: NetworkConstants, harnesses: Harnesses) -> Array:
    """Predicted seconds [rows of the cell]."""
    if cell.collective in point_to_point.PEER_TO_PEER:
        found = point_to_point.laws(cell.collective, cell.geometry, up, net)
    else:
        found = nccl.laws(cell.collective, cell.geometry, up, net, nvls=cell.nvls, sharp=cell.sharp)
    added, rate = harnesses.get(cell.harness, (0.0, 1.0))
    return added + seconds_of(found, cell.bytes_) / rate


def errors(
    cells: Sequence[Cell], model: Callable[[Cell], Array]
) -> tuple[float, float, dict[tuple[str, int, str], tuple[float, float]]]:
    """Mean |predicted / measured - 1| over series for messages of at least 1 MiB and below, and by series (nan: no rows)."""
    large: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    small: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for cell in cells:
        error = np.abs(model(cell) / cell.measured_s - 1)
        large[cell.series] += error[cell.bytes_ >= LARGE].tolist()
        small[cell.series] += error[cell.bytes_ < LARGE].tolist()
    by_series = {s: (float(np.mean(large[s])) if large[s] else np.nan, float(np.mean(small[s])) if small[s] else np.nan)
                 for s in large}  # fmt: skip
    first, second = (np.array([v[i] for v in by_series.values()]) for i in (0, 1))
    mean = [float(np.nanmean(x)) if np.isfinite(x).any() else 0.0 for x in (first, second)]
    return mean[0], mean[1], by_series
