"""Kernel constants of a CPU from its own measurements: its products and its attention follow no GPU's law.

A product of one core takes a fixed time, a cost for each output (packing, the epilogue) and its FLOPs over a rate:
t = c + 2 m n (k + k0) / R, fitted to the relative error. The GPU constants of the base count waves over multiprocessors and a
prologue of hundreds of steps of k; scaled to a CPU they are off by a fifth.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from simpar.live.store import Record

Table = dict[str, Any]
Shape = tuple[float, float, float]
LEAST = 3
"""Products of a dtype from which its constants are fitted."""


def product(record: Mapping[str, Any]) -> Shape:
    """(m, n, k) of the product that a direction really runs."""
    m, n, k = record["shape"]
    return {"dgrad": (m, k, n), "wgrad": (n, k, m)}.get(record["direction"], (m, n, k))


def fit(products: Sequence[tuple[Shape, float]]) -> tuple[float, float, float]:
    """(seconds a FLOP, seconds an output, seconds a call), none negative, of least squares of the relative error."""
    columns = np.array([[2.0 * m * n * k / s, 2.0 * m * n / s, 1.0 / s] for (m, n, k), s in products])
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            if 0 not in chosen:
                continue
            found = np.zeros(3)
            found[list(chosen)] = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)[0]
            error = float(np.sum((columns @ found - 1.0) ** 2))
            if (found >= 0.0).all() and error < least:
                best, least = found, error
    return float(best[0]), float(best[1]), float(best[2])


def seconds(constants: tuple[float, float, float], shape: Shape) -> float:
    """What the fit says."""
    m, n, k = shape
    return 2.0 * m * n * (constants[0] * k + constants[1]) + constants[2]


def _left_out(products: Sequence[tuple[Shape, float]]) -> list[float]:
    """Relative errors on each product of a fit to the others."""
    found = []
    for i, (shape, measured) in enumerate(products):
        found.append(abs(seconds(fit([*products[:i], *products[i + 1 :]]), shape) / measured - 1.0))
    return found


def gemms(records: Sequence[Record], bandwidth_bytes_per_s: float, source: str) -> tuple[list[Table], Table]:
    """(a set of constants for each dtype, factors of the gradients' layouts) from the measured products of a CPU."""
    sets: list[Table] = []
    factors: Table = {}
    for dtype in dict.fromkeys(r["dtype"] for r in records):
        own = [r for r in records if r["dtype"] == dtype]
        forward = [(product(r), r["seconds"]) for r in own if r["direction"] == "forward"]
        if len(forward) < LEAST:
            continue
        constants = fit(forward)
        if not constants[0] > 0.0:
            continue
        errors = [abs(seconds(constants, shape) / s - 1.0) for shape, s in forward]
        held_out = _left_out(forward)
        width, size = max(1.5 * statistics.median(held_out), 0.05), {"fp32": 4.0}.get(dtype, 2.0)
        sets.append(
            {
                "library": "torch-cpu", "mode": "sustained", "dtype": dtype, "rate_flops_per_s": 1.0 / constants[0],
                "bandwidth_bytes_per_s": bandwidth_bytes_per_s, "latency_s": constants[2],
                "k_overhead": constants[1] / constants[0], "wave_beta": 0.0, "split_k_cost": 1.0, "input_bytes": size,
                "output_bytes": size, "bands": [{"from_size": 0.0, "low": 1.0 / (1.0 + width), "high": 1.0 + width}],
                "fit": {
                    "source": source, "rows": len(forward), "median": statistics.median(errors), "p90": max(errors),
                    "held_out_median": statistics.median(held_out), "held_out_p90": max(held_out),
                },
            }
        )  # fmt: skip
        # One set of factors for all dtypes: that of the first, which trains.
        for direction in ("dgrad", "wgrad", "wgrad_accumulate") if not factors else ():
            ratios = [r["seconds"] / seconds(constants, product(r)) for r in own if r["direction"] == direction]
            if ratios:
                factors[direction] = statistics.median(ratios)
    if "wgrad" in factors:
        # A store of before 2026-11 holds weight gradients with their addition under the plain name.
        factors.setdefault("wgrad_accumulate", factors["wgrad"])
    return sets, factors


def attention(records: Sequence[Record], source: str) -> list[Table]:
    """One rate by direction and head size, over the causal pairs."""
    rates: dict[str, dict[int, list[float]]] = {}
    for r in records:
        b, s, t, h, _, d = r["shape"]
        # The price model counts the forward's work in both directions.
        work = 4.0 * b * h * s * d * (t - (s - 1) / 2)
        rates.setdefault(r["direction"], {}).setdefault(d, []).append(work / r["seconds"])
    return [
        {
            "kernel": "fa2", "library": "torch-cpu", "mode": "sustained", "causal": True, "direction": direction, "latency_s": 0.0,
            "derived": source,
            "heads": [
                {"head_dim": d, "rate_flops_per_s": statistics.median(found), "sequence_overhead": 0.0}
                for d, found in sorted(by_head.items())
            ],
        }
        for direction, by_head in rates.items()
    ]  # fmt: skip
