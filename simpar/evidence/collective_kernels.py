"""Constants of expert-parallel kernels by GPU generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from simpar.boundary import read_records
from simpar.costs import expert_parallel
from simpar.evidence.kernel_rows import KernelRow, expert_rows
from simpar.evidence.robust import Array, Parameter, minimise
from simpar.evidence.tables import there
from simpar.specs.collective_constants import CollectiveFit, ExpertConstants, Scope, TimeBand

NORMAL, LOW_LATENCY = "ep_deepep_normal.csv", "ep_deepep_lowlatency.csv"
MOST_NODES = 4
"""Larger exchanges of the normal-mode table are congested (8 nodes reach half the rate that DeepEP's authors report for
64 GPUs, 51 GB/s): they are not fitted."""
EVERY = 3
"""Rows used: every third one."""


def _rows(path: Path) -> Iterator[KernelRow]:
    table = read_records(path) if there(path) else ()
    for line, raw in enumerate(table, 2):
        yield from expert_rows(raw, f"{path.name}:{line}")


def _by_generation(rows: Iterable[KernelRow]) -> dict[str, list[KernelRow]]:
    found: dict[str, list[KernelRow]] = defaultdict(list)
    for row in rows:
        if not row.skipped:
            found[row.on[0].gpu.architecture].append(row)
    return found


def _adjust(
    start: ExpertConstants, names: Sequence[str], measured: Array, model: Callable[[ExpertConstants], Array]
) -> ExpertConstants:
    """`start` with the constants `names` fitted."""

    def parameter(name: str) -> Parameter:
        value = float(getattr(start, name))
        most = 1.0 if name.endswith(("efficiency", "share")) else np.inf
        return Parameter(name, value, value / 30, min(value * 30, most))

    def at(values: Array) -> ExpertConstants:
        return start.model_copy(update=dict(zip(names, values.tolist(), strict=True)))

    weights = np.full(len(measured), 1 / len(measured))
    found = minimise(lambda v: np.log(model(at(v)) / measured), [parameter(n) for n in names], weights, steps=30)
    return at(found)


def _expert_seconds(rows: Sequence[KernelRow], k: ExpertConstants) -> Array:
    found = []
    for row in rows:
        law = expert_parallel.normal_s if row.dispatcher == "deepep" else expert_parallel.low_latency_s
        found.append(sum(law(row.exchange, row.geometry, k)))
    return np.array(found)


def fit_expert(data: Path) -> dict[str, tuple[ExpertConstants, TimeBand]]:
    """GPU generation -> constants and their interval."""
    normal, quick = (_by_generation(_rows(data / name)) for name in (NORMAL, LOW_LATENCY))
    found = {}
    names = [n for n in ExpertConstants.model_fields if n != "fit"]
    for generation in sorted({*normal, *quick}):
        k, every = expert_parallel.PUBLISHED, []
        for rows, picked in ((normal, [n for n in names if not n.startswith("ll_")]),
                             (quick, [n for n in names if n.startswith("ll_")])):  # fmt: skip
            mine = rows.get(generation, [])
            fitted = [r for r in mine if r.group["nodes"] <= MOST_NODES or r.dispatcher != "deepep"]
            if fitted := fitted[::EVERY]:
                measured = np.array([r.measured_s for r in fitted])
                k = _adjust(k, picked, measured, lambda k, rows=fitted: _expert_seconds(rows, k))  # type: ignore[misc]
            every += mine
        ratio = np.array([r.measured_s for r in every]) / _expert_seconds(every, k)
        error = float(np.mean(np.abs(1 / ratio - 1)))
        record = CollectiveFit(source=f"{NORMAL}, {LOW_LATENCY}", rows=len(every), mape_large=round(error, 4))
        found[generation] = (k.model_copy(update={"fit": record}), band("expert", ratio))
    return found


def band(scope: Scope, ratio: Sequence[float] | Array, from_bytes: float = 0.0) -> TimeBand:
    """The 80 % interval of measured / predicted [rows]."""
    low, high = np.quantile(np.asarray(ratio), [0.1, 0.9])
    return TimeBand(scope=scope, from_bytes=from_bytes, low=round(float(min(low, 0.99)), 4), high=round(float(max(high, 1.01)), 4))
