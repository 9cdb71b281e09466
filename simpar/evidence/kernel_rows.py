"""Rows of tables of expert-parallel exchanges in simpar's terms.

Formats: `ep_deepep_normal.csv` (transmit and notify times by SM count), `ep_deepep_lowlatency.csv` (average times). A row
gives two measured values, its dispatch and its combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simpar.costs.collective_geometry import Geometry, geometry, packed
from simpar.costs.collectives import CollectiveModel
from simpar.costs.expert_parallel import DEFAULT_SMS, Exchange
from simpar.costs.price import Price
from simpar.evidence.collective_rows import machine
from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import GroupPlacement

FP8_BYTES = 1 + 4 / 128
"""A value of an fp8 dispatch: one byte and a 4-byte scale for each 128."""
VALUE_BYTES = {"dispatch": FP8_BYTES, "combine": 2.0}
DISPATCHERS = {"normal": "deepep", "low_latency": "deepep_low_latency"}


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One measured exchange.

    Attributes:
        exchange, dispatcher: what it moves, and how.
        hardware, placement: where; None where `skipped` says why it cannot be priced.
    """

    row_id: str
    group: dict[str, Any] = field(hash=False)
    measured_s: float
    exchange: Exchange
    dispatcher: str
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
        return model.exchange(self.exchange, self.on[1], self.dispatcher)

    def placed(self, hardware: HardwareProfile | None, ranks: int) -> KernelRow:
        """The row on the nodes that so many ranks fill, or why it cannot be priced."""
        if hardware is None:
            return replace(self, skipped=f"no profile is near {self.group['hardware']!r}")
        if ranks < 2:
            return replace(self, skipped="a group of one")
        # GB200 trays hold 4 GPUs; more ranks lie on more trays of the same domain.
        return replace(self, hardware=hardware, placement=packed(hardware, ranks, -(-ranks // hardware.gpus_per_node)))


def expert_rows(raw: Mapping[str, str], row_id: str) -> Iterator[KernelRow]:
    """Dispatch and combine of a row of a DeepEP table."""
    mode, nodes, hardware = raw["mode"], int(raw["node_num"]), machine(raw["hardware"].replace("_", " "), "")[0]
    names = ("hardware", "mode", "node_num", "hidden_size", "num_token", "num_topk", "num_experts")
    tokens, hidden, topk, experts = (int(raw[n]) for n in ("num_token", "hidden_size", "num_topk", "num_experts"))
    for direction, value_bytes in VALUE_BYTES.items():
        group = {**{n: raw[n] for n in names}, "collective": f"expert_{direction}", "nodes": nodes}
        sms = DEFAULT_SMS
        if "dispatch_avg_t_us" in raw:
            seconds = float(raw[f"{direction}_avg_t_us"]) * 1e-6
        else:
            seconds = (float(raw[f"{direction}_transmit_us"]) + float(raw[f"{direction}_notify_us"])) * 1e-6
            sms = group["sms"] = int(raw[f"{direction}_sms"])
        x = Exchange(direction, tokens, hidden * value_bytes, topk, experts, sms)
        row = KernelRow(f"{row_id}:{direction}", group, seconds, x, DISPATCHERS.get(mode, "deepep_low_latency"))
        yield row.placed(hardware, hardware.gpus_per_node * nodes if hardware else 0)


PUBLISHED_MODES = {"normal": 4096, "low_latency": 128}
"""Tokens of one rank in DeepEP's published tables (7168 values, top-8 of 256 experts, 4 groups at most)."""


def published_rows(raw: Mapping[str, str], row_id: str) -> Iterator[KernelRow]:
    """Dispatch and combine of a row of published figures; only DeepEP's times are comparable."""
    mode, ranks, library = raw["mode"], int(raw["ep"]), raw["library"]
    for direction, value_bytes in VALUE_BYTES.items():
        text = raw[f"{direction}_us"] or ""
        group = {"hardware": raw["hardware"], "library": library, "mode": mode, "gpus": ranks, "nodes": -(-ranks // 8),
                 "collective": f"expert_{direction}"}  # fmt: skip
        x = Exchange(direction, PUBLISHED_MODES[mode], 7168 * value_bytes, 8, 256, int(raw["sms"] or DEFAULT_SMS))
        row = KernelRow(f"{row_id}:{direction}", group, float(text or 0) * 1e-6, x, DISPATCHERS[mode])
        if not text:
            yield replace(row, skipped="a bandwidth of the library's own definition, no time")
        elif not library.startswith("DeepEP") or "pure RDMA" in library:
            yield replace(row, skipped="another library than DeepEP with NVLink")
        else:
            yield row.placed(machine(raw["hardware"], "")[0], ranks)
