"""Rows of measured collectives with their weights, grouped by what a law is made for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from simpar.costs.collective_defaults import key_of
from simpar.costs.collective_law import geometry
from simpar.evidence.collective_rows import LARGE, Cell, Row

LARGE_SHARE = 0.7
"""Weight of messages of at least 1 MiB in a series; the rest is for the smaller ones."""
VAGUE_SHARE = 0.1
"""Weight of a peak read off a slide, whose size is not stated."""


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
