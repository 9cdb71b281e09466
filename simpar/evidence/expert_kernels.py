"""Expert-parallel exchanges: rows of measured tables in simpar's terms, and constants fitted on them by GPU generation.

Format: `ep_deepep_normal.csv` (transmit and notify times of DeepEP's normal mode by SM count). A row gives two measured
values, its dispatch and its combine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from simpar.boundary import read_records
from simpar.costs.collective_law import Geometry, geometry, packed
from simpar.costs.collectives import CollectiveModel
from simpar.costs.expert_parallel import PUBLISHED, Exchange, dispatched_s
from simpar.costs.price import Price
from simpar.evidence.collective_rows import machine
from simpar.evidence.kernel_tables import there
from simpar.evidence.robust import Array, Parameter, minimise
from simpar.specs.collective_constants import CollectiveFit, ExpertConstants, Scope, TimeBand
from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import GroupPlacement

FP8_BYTES = 1 + 4 / 128
"""A value of an fp8 dispatch: one byte and a 4-byte scale for each 128."""
VALUE_BYTES = {"dispatch": FP8_BYTES, "combine": 2.0}


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One measured exchange.

    Attributes:
        exchange: what it moves.
        hardware, placement: where; None where `skipped` says why it cannot be priced.
    """

    row_id: str
    group: dict[str, Any] = field(hash=False)
    measured_s: float
    exchange: Exchange
    hardware: HardwareProfile | None = None
    placement: GroupPlacement | None = None
    skipped: str = ""

    @property
    def on(self) -> tuple[HardwareProfile, GroupPlacement]:
        """The machine and the group of a row that can be priced."""
        assert self.hardware is not None
        assert self.placement is not None
        return self.hardware, self.placement

    @property
    def geometry(self) -> Geometry:
        """The group as collective laws see it."""
        return geometry(*self.on)

    @property
    def keys(self) -> dict[str, Any]:
        """What identifies the row in reports, with its size and its ranks."""
        return {**self.group, "bytes": int(self.exchange.tokens * self.exchange.row_bytes), "gpus": self.on[1].size}

    def price(self, model: CollectiveModel) -> Price:
        """By `model`, which is of the row's machine."""
        return model.exchange(self.exchange, self.on[1], "deepep")

    def placed(self, hardware: HardwareProfile | None, ranks: int) -> KernelRow:
        """The row on the nodes that so many ranks fill, or why it cannot be priced."""
        if self.group["mode"] != "normal":
            return replace(self, skipped=f"DeepEP's {self.group['mode']} mode: training takes the normal one")
        if hardware is None:
            return replace(self, skipped=f"no profile is near {self.group['hardware']!r}")
        if ranks < 2:
            return replace(self, skipped="a group of one")
        # GB200 trays hold 4 GPUs; more ranks lie on more trays of the same domain.
        return replace(self, hardware=hardware, placement=packed(hardware, ranks, -(-ranks // hardware.gpus_per_node)))


def expert_rows(raw: Mapping[str, str], row_id: str) -> Iterator[KernelRow]:
    """Dispatch and combine of a row of a DeepEP table."""
    nodes, hardware = int(raw["node_num"]), machine(raw["hardware"].replace("_", " "), "")[0]
    names = ("hardware", "mode", "node_num", "hidden_size", "num_token", "num_topk", "num_experts")
    tokens, hidden, topk, experts = (int(raw[n]) for n in ("num_token", "hidden_size", "num_topk", "num_experts"))
    for direction, value_bytes in VALUE_BYTES.items():
        sms = int(raw[f"{direction}_sms"])
        group = {**{n: raw[n] for n in names}, "collective": f"expert_{direction}", "nodes": nodes, "sms": sms}
        seconds = (float(raw[f"{direction}_transmit_us"]) + float(raw[f"{direction}_notify_us"])) * 1e-6
        x = Exchange(direction, tokens, hidden * value_bytes, topk, experts, sms)
        row = KernelRow(f"{row_id}:{direction}", group, seconds, x)
        yield row.placed(hardware, hardware.gpus_per_node * nodes if hardware else 0)


TABLE = "ep_deepep_normal.csv"
MOST_NODES = 4
"""Larger exchanges of the table are congested (8 nodes reach half the rate that DeepEP's authors report for
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


def _seconds(rows: Sequence[KernelRow], k: ExpertConstants) -> Array:
    return np.array([sum(dispatched_s(row.exchange, row.geometry, k)) for row in rows])


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


def band(scope: Scope, ratio: Sequence[float] | Array, from_bytes: float = 0.0) -> TimeBand:
    """The 80 % interval of measured / predicted [rows]."""
    low, high = np.quantile(np.asarray(ratio), [0.1, 0.9])
    return TimeBand(scope=scope, from_bytes=from_bytes, low=round(float(min(low, 0.99)), 4), high=round(float(max(high, 1.01)), 4))
