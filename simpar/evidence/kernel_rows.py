"""Rows of tables of expert-parallel exchanges and custom all-reduce kernels in simpar's terms.

Formats: `ep_deepep_normal.csv` (transmit and notify times by SM count), `ep_deepep_lowlatency.csv` (average times),
`custom_allreduce.csv` (one kernel, one size). A DeepEP row gives two measured values, its dispatch and its combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpar.costs.collective_geometry import packed
from simpar.costs.expert_parallel import DEFAULT_SMS
from simpar.evidence.collective_rows import machine
from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import GroupPlacement

FP8_BYTES = 1 + 4 / 128
"""A value of an fp8 dispatch: one byte and a 4-byte scale for each 128."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One measured kernel; `skipped` says why it cannot be priced."""

    row_id: str
    group: dict[str, Any] = field(hash=False)
    measured_s: float
    hardware: HardwareProfile | None = None
    placement: GroupPlacement | None = None
    direction: str = ""
    mode: str = ""
    tokens: int = 0
    hidden: int = 0
    value_bytes: float = 2.0
    topk: int = 0
    experts: int = 0
    sms: int = DEFAULT_SMS
    bytes_: float = 0.0
    kernel: str = ""
    graph: bool = True
    skipped: str = ""


def _hardware(text: str) -> HardwareProfile | None:
    return machine(text.replace("_", " "), "")[0]


def expert_rows(raw: Mapping[str, str], row_id: str) -> Iterator[KernelRow]:
    """Dispatch and combine of a row of a DeepEP table."""
    mode, nodes = str(raw["mode"]), int(raw["node_num"])
    hardware = _hardware(str(raw["hardware"]))
    low_latency = "dispatch_avg_t_us" in raw
    names = ("hardware", "mode", "node_num", "hidden_size", "num_token", "num_topk", "num_experts")
    for direction in ("dispatch", "combine"):
        group = {**{n: raw[n] for n in names}, "collective": f"expert_{direction}", "nodes": nodes}
        if low_latency:
            seconds, sms = float(raw[f"{direction}_avg_t_us"]) * 1e-6, DEFAULT_SMS
        else:
            seconds = (float(raw[f"{direction}_transmit_us"]) + float(raw[f"{direction}_notify_us"])) * 1e-6
            sms = int(raw[f"{direction}_sms"])
            group["sms"] = sms
        one = f"{row_id}:{direction}"
        if hardware is None:
            yield KernelRow(one, group, seconds, skipped=f"no profile is near {raw['hardware']!r}")
            continue
        placement = packed(hardware, hardware.gpus_per_node * nodes, nodes)
        yield KernelRow(
            one, group, seconds, hardware, placement, direction, mode, int(raw["num_token"]), int(raw["hidden_size"]),
            FP8_BYTES if direction == "dispatch" else 2.0, int(raw["num_topk"]), int(raw["num_experts"]), sms,
        )  # fmt: skip


def custom_row(raw: Mapping[str, str], row_id: str) -> KernelRow:
    """A row of a table of custom all-reduce kernels."""
    gpus, seconds = int(raw["gpus"]), float(raw["time_us"]) * 1e-6
    names = ("hardware", "framework", "kernel", "gpus", "bytes")
    group = {**{n: raw[n] for n in names}, "collective": "custom_all_reduce", "nodes": 1}
    group["gpus"], group["bytes"] = gpus, int(raw["bytes"])
    hardware, name = _hardware(str(raw["hardware"])), str(raw["kernel"]).lower()
    if hardware is None:
        return KernelRow(row_id, group, seconds, skipped=f"no profile is near {raw['hardware']!r}")
    kernel = next((k for k in ("trtllm", "vllm", "sglang") if k in name), "vllm")
    # GB200 trays hold 4 GPUs; more ranks lie on more trays of the same domain.
    placement = packed(hardware, gpus, -(-gpus // hardware.gpus_per_node))
    return KernelRow(row_id, group, seconds, hardware, placement, bytes_=float(raw["bytes"]), kernel=kernel,
                     graph="eager" not in name)  # fmt: skip


PUBLISHED_MODES = {"normal": 4096, "low_latency": 128}
"""Tokens of one rank in DeepEP's published tables (7168 values, top-8 of 256 experts, 4 groups at most)."""


def published_rows(raw: Mapping[str, str], row_id: str) -> Iterator[KernelRow]:
    """Dispatch and combine of a row of published figures; only DeepEP's times are comparable."""
    mode, ranks, library = str(raw["mode"]), int(raw["ep"]), str(raw["library"])
    hardware, _ = machine(str(raw["hardware"]), "")
    for direction in ("dispatch", "combine"):
        one, text = f"{row_id}:{direction}", str(raw[f"{direction}_us"] or "")
        group = {"hardware": raw["hardware"], "library": library, "mode": mode, "gpus": ranks, "nodes": -(-ranks // 8),
                 "collective": f"expert_{direction}"}  # fmt: skip
        reason = ""
        if not text:
            reason = "a bandwidth of the library's own definition, no time"
        elif not library.startswith("DeepEP") or "pure RDMA" in library:
            reason = "another library than DeepEP with NVLink"
        elif hardware is None:
            reason = f"no profile is near {raw['hardware']!r}"
        if reason or hardware is None:
            yield KernelRow(one, group, float(text or 0) * 1e-6, skipped=reason)
            continue
        placement = packed(hardware, ranks, -(-ranks // hardware.gpus_per_node))
        yield KernelRow(
            one, group, float(text) * 1e-6, hardware, placement, direction, mode, PUBLISHED_MODES[mode], 7168,
            FP8_BYTES if direction == "dispatch" else 2.0, 8, 256, int(raw["sms"] or DEFAULT_SMS),
        )  # fmt: skip
