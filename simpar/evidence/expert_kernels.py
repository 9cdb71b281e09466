"""Expert-parallel exchanges: rows of measured tables in simpar's terms, and constants fitted on them by GPU generation.

Format: `ep_deepep_normal.csv` (transmit and notify times of DeepEP's normal mode by SM count). A row gives two measured
values, its dispatch and its combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simpar.costs.collective_law import Geometry, geometry, packed
from simpar.costs.collectives import CollectiveModel
from simpar.costs.expert_parallel import Exchange
from simpar.costs.price import Price
from simpar.evidence.collective_rows import machine
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
