"""Constants of expert-parallel and custom all-reduce kernels by GPU generation and fabric kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from simpar.boundary import read_records
from simpar.costs import custom_allreduce, expert_parallel
from simpar.costs.collective_defaults import key_of
from simpar.costs.collectives import CollectiveModel
from simpar.evidence.collective_cells import Key
from simpar.evidence.kernel_rows import KernelRow, custom_row, expert_rows
from simpar.evidence.robust import Array, Parameter, minimise
from simpar.evidence.tables import there
from simpar.specs.collective_constants import CollectiveFit, CustomConstants, ExpertConstants, Scope, TimeBand

NORMAL, LOW_LATENCY, CUSTOM = "ep_deepep_normal.csv", "ep_deepep_lowlatency.csv", "custom_allreduce.csv"
MOST_NODES = 4
"""Larger exchanges of the normal-mode table are congested (8 nodes reach half the rate that DeepEP's authors report for
64 GPUs, 51 GB/s): they are not fitted."""
EVERY = 3
"""Rows used: every third one."""
C = TypeVar("C", ExpertConstants, CustomConstants)
Ratios = dict[Key, dict[Scope, list[float]]]


def _rows(path: Path, reader: Callable[[Mapping[str, str], str], Iterable[KernelRow]]) -> list[KernelRow]:
    table = read_records(path) if there(path) else ()
    return [row for line, raw in enumerate(table, 2) for row in reader(raw, f"{path.name}:{line}")]


def _by_key(rows: Sequence[KernelRow], length: int) -> dict[Key, list[KernelRow]]:
    found: dict[Key, list[KernelRow]] = defaultdict(list)
    for row in rows:
        if not row.skipped:
            found[key_of(row.on[0])[:length]].append(row)
    return found


def _adjust(start: C, names: Sequence[str], measured: Array, model: Callable[[C], Array]) -> C:
    """`start` with the constants `names` fitted."""

    def parameter(name: str) -> Parameter:
        value = float(getattr(start, name))
        most = 1.0 if name.endswith(("efficiency", "share")) else np.inf
        return Parameter(name, value, value / 30, min(value * 30, most))

    def at(values: Array) -> C:
        return start.model_copy(update=dict(zip(names, values.tolist(), strict=True)))

    weights = np.full(len(measured), 1 / len(measured))
    found = minimise(lambda v: np.log(model(at(v)) / measured), [parameter(n) for n in names], weights, steps=30)
    return at(found)


def _expert_seconds(rows: Sequence[KernelRow], k: ExpertConstants) -> Array:
    found = []
    for row in rows:
        assert row.exchange is not None
        law = expert_parallel.normal_s if row.dispatcher == "deepep" else expert_parallel.low_latency_s
        found.append(sum(law(row.exchange, row.geometry, k)))
    return np.array(found)


def fit_expert(data: Path) -> tuple[dict[str, ExpertConstants], Ratios]:
    """GPU generation -> constants, and measured / predicted of every row for the intervals."""
    normal, quick = (_rows(data / name, expert_rows) for name in (NORMAL, LOW_LATENCY))
    found: dict[str, ExpertConstants] = {}
    ratios: Ratios = {}
    names = [n for n in ExpertConstants.model_fields if n != "fit"]
    for key in sorted(_by_key(normal + quick, 1)):
        k, every = expert_parallel.PUBLISHED, []
        for rows, picked in ((normal, [n for n in names if not n.startswith("ll_")]),
                             (quick, [n for n in names if n.startswith("ll_")])):  # fmt: skip
            mine = _by_key(rows, 1).get(key, [])
            fitted = [r for r in mine if r.group["nodes"] <= MOST_NODES or r.dispatcher != "deepep"]
            if fitted := fitted[::EVERY]:
                measured = np.array([r.measured_s for r in fitted])
                k = _adjust(k, picked, measured, lambda k, rows=fitted: _expert_seconds(rows, k))  # type: ignore[misc]
            every += mine
        ratio = np.array([r.measured_s for r in every]) / _expert_seconds(every, k)
        error = float(np.mean(np.abs(1 / ratio - 1)))
        record = CollectiveFit(source=f"{NORMAL}, {LOW_LATENCY}", rows=len(every), mape_large=round(error, 4))
        found[key[0]] = k.model_copy(update={"fit": record})
        ratios[key] = {"expert": ratio.tolist()}
    return found, ratios


def _custom_seconds(rows: Sequence[KernelRow], nccl_s: Array, k: CustomConstants) -> Array:
    found = []
    for row, other in zip(rows, nccl_s.tolist(), strict=True):
        memory = row.on[0].gpu.memory_bandwidth.value
        found.append(custom_allreduce.seconds(row.bytes_, row.kernel, row.graph, row.geometry, k, other, memory))
    return np.array(found)


def fit_custom(data: Path) -> tuple[dict[Key, CustomConstants], Ratios]:
    """(GPU generation, fabric kind) -> constants; needs the fitted NCCL constants, which take over at large sizes."""
    rows = _rows(data / CUSTOM, custom_row)[::EVERY]
    found: dict[Key, CustomConstants] = {}
    ratios: Ratios = {}
    models: dict[str, CollectiveModel] = {}
    names = ["rank_s", "one_shot_efficiency", "two_shot_base_s", "two_shot_efficiency", "eager_s", "copy_efficiency"]
    for key, mine in sorted(_by_key(rows, 2).items()):
        nccl_s = []
        for row in mine:
            hardware, placement = row.on
            model = models.setdefault(hardware.name + key[0], CollectiveModel(hardware))
            nccl_s.append(model.time("all_reduce", row.bytes_, placement).seconds)
        k = custom_allreduce.PUBLISHED
        small = {name: [r.measured_s for r in mine if r.kernel == name and r.graph and r.bytes_ <= 4096 and
                        r.group["gpus"] == 2] for name in k.base_s}  # fmt: skip
        bases = {n: float(f"{np.median(v):.4g}") if v else k.base_s[n] for n, v in small.items()}
        k = k.model_copy(update={"base_s": bases})
        measured, other = np.array([r.measured_s for r in mine]), np.array(nccl_s)
        k = _adjust(k, names, measured, lambda k, mine=mine, other=other: _custom_seconds(mine, other, k))  # type: ignore[misc]
        ratio = measured / _custom_seconds(mine, other, k)
        error = float(np.mean(np.abs(1 / ratio - 1)))
        found[key] = k.model_copy(update={"fit": CollectiveFit(source=CUSTOM, rows=len(mine), mape_large=round(error, 4))})
        ratios[key] = {"custom": ratio.tolist()}
    return found, ratios


def band(scope: Scope, ratio: Sequence[float] | Array, from_bytes: float = 0.0) -> TimeBand:
    """The 80 % interval of measured / predicted [rows]."""
    low, high = np.quantile(np.asarray(ratio), [0.1, 0.9])
    return TimeBand(scope=scope, from_bytes=from_bytes, low=round(float(min(low, 0.99)), 4), high=round(float(max(high, 1.01)), 4))
