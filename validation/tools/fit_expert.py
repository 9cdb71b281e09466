"""Constants of expert-parallel exchanges by GPU generation, from the tables of DeepEP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from simpar.boundary import read_records
from simpar.costs.expert_parallel import PUBLISHED, dispatched_s
from simpar.evidence.expert_kernels import KernelRow, expert_rows
from simpar.evidence.kernel_tables import there
from simpar.evidence.robust import Array
from simpar.specs.collective_constants import CollectiveFit, ExpertConstants, Scope, TimeBand
from validation.tools.minimise import Parameter, minimise

TABLE = "ep_deepep_normal.csv"
MOST_NODES = 4
"""Larger exchanges of the table are congested (8 nodes reach half the rate that DeepEP's authors report for
64 GPUs, 51 GB/s): they are not fitted."""


def _rows(path: Path) -> Iterator[KernelRow]:
    table = read_records(path) if there(path) else ()
    for line, raw in enumerate(table, 2):
        yield from expert_rows(raw, f"{path.name}:{line}")


def _seconds(rows: Sequence[KernelRow], k: ExpertConstants) -> Array:
    return np.array([sum(dispatched_s(row.exchange, row.geometry, k)) for row in rows])


def band(scope: Scope, ratio: Sequence[float] | Array, from_bytes: float = 0.0) -> TimeBand:
    """The 80 % interval of measured / predicted [rows]."""
    low, high = np.quantile(np.asarray(ratio), [0.1, 0.9])
    return TimeBand(scope=scope, from_bytes=from_bytes, low=round(float(min(low, 0.99)), 4), high=round(float(max(high, 1.01)), 4))


EVERY = 3
"""Rows used: every third one."""


def _by_generation(rows: Iterable[KernelRow]) -> dict[str, list[KernelRow]]:
    found: dict[str, list[KernelRow]] = defaultdict(list)
    for row in rows:
        if not row.skipped:
            found[row.on[0].gpu.architecture].append(row)
    return found


def _fitted(rows: Sequence[KernelRow]) -> ExpertConstants:
    """The published constants fitted to `rows`."""
    start = {name: value for name, value in PUBLISHED.model_dump().items() if name != "fit"}
    measured, weights = np.array([row.measured_s for row in rows]), np.full(len(rows), 1 / len(rows))

    def parameter(name: str, value: float) -> Parameter:
        most = 1.0 if name.endswith(("efficiency", "share")) else np.inf
        return Parameter(name, value, value / 30, min(value * 30, most))

    def at(values: Array) -> ExpertConstants:
        return PUBLISHED.model_copy(update=dict(zip(start, values.tolist(), strict=True)))

    parameters = [parameter(*one) for one in start.items()]
    return at(minimise(lambda v: np.log(_seconds(rows, at(v)) / measured), parameters, weights, steps=30))


def fit_expert(data: Path) -> dict[str, tuple[ExpertConstants, TimeBand]]:
    """GPU generation -> constants and their interval."""
    found = {}
    for generation, rows in sorted(_by_generation(_rows(data / TABLE)).items()):
        few = [row for row in rows if row.group["nodes"] <= MOST_NODES][::EVERY]
        k = _fitted(few) if few else PUBLISHED
        ratio = np.array([row.measured_s for row in rows]) / _seconds(rows, k)
        error = float(np.mean(np.abs(1 / ratio - 1)))
        record = CollectiveFit(source=TABLE, rows=len(rows), mape_large=round(error, 4))
        found[generation] = (k.model_copy(update={"fit": record}), band("expert", ratio))
    return found
