"""A row of a table of measured collectives (nccl-tests style columns) in simpar's terms: machine, placed group, size, options.

The tables name machines in free text; `MACHINES` is the one place that maps it to a profile. A fabric text such as
"4x100G EFAv1" overrides the profile's NICs. For fits, rows that share all but the size are a cell: one law is made for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from simpar.boundary import read_records
from simpar.costs import nccl, point_to_point
from simpar.costs.collective_law import Geometry, packed, seconds_of
from simpar.costs.collectives import ALIASES, COLLECTIVES
from simpar.evidence.robust import Array
from simpar.specs.base import data_dir, read_toml
from simpar.specs.collective_constants import CollectiveConstants, NetworkConstants, ScaleUpConstants
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.topology.placement import GroupPlacement


@dataclass(frozen=True, slots=True)
class MachineRule:
    """Hardware text -> profile.

    Attributes:
        pattern: regular expression, searched in "hardware | fabric", case-insensitive; the first rule that matches holds.
        profile: shipped profile, the nearest where there is none of its own.
        architecture, link_bytes_per_s, pcie_bytes_per_s: what differs from the profile.
        variant: a fourth part of the name of the fitted file, for fabrics that NIC kinds do not tell apart.
    """

    pattern: str
    profile: str
    architecture: str = ""
    link_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0
    variant: str = ""


MACHINES = (
    MachineRule(r"GB300", "gb300-nvl72"),
    MachineRule(r"GB200", "gb200-nvl72"),
    MachineRule(r"B300.*(p6|EFA)", "aws-p6-b300"),
    MachineRule(r"B300", "dgx-b300"),
    MachineRule(r"B200.*(p6|EFA)", "aws-p6-b200"),
    MachineRule(r"B200", "dgx-b200"),
    MachineRule(r"GH200", "gh200"),
    MachineRule(r"H200 NVL", "h200-nvl"),
    MachineRule(r"H200.*p5en|H200.*EFA", "aws-p5en-h200"),
    MachineRule(r"H200", "dgx-h200"),
    MachineRule(r"H100 PCIe|H100 NVL", "h100-pcie"),
    MachineRule(r"H100.*TCPX(?!O)", "gcp-a3-mega-h100", variant="a3high"),
    MachineRule(r"H100.*(A3.?Mega|TCPXO)", "gcp-a3-mega-h100"),
    MachineRule(r"H100.*(p5|EFA)", "aws-p5-h100"),
    MachineRule(r"H100", "dgx-h100"),
    MachineRule(r"H800", "hgx-h800"),
    MachineRule(r"H20\b", "hgx-h20"),
    MachineRule(r"A800", "hgx-a800"),
    MachineRule(r"A100 PCIe", "a100-pcie"),
    MachineRule(r"A100.*40", "dgx-a100-40gb"),
    MachineRule(r"A100", "dgx-a100-80gb"),
    MachineRule(r"V100", "dgx-a100-40gb", architecture="volta", link_bytes_per_s=150e9),
    MachineRule(r"L40S|L4\b|L40\b", "l40s"),
    MachineRule(r"RTX.?PRO|RTX.?6000", "l40s", architecture="blackwell", link_bytes_per_s=63e9, pcie_bytes_per_s=63e9),
    MachineRule(r"RTX|4090", "rtx-4090"),
    MachineRule(r"MI35\d", "mi300x", link_bytes_per_s=535.5e9),
    MachineRule(r"MI3\d\d", "mi300x"),
    MachineRule(r"TPU.?v5p", "tpu-v5p"),
    MachineRule(r"TPU", "tpu-v4"),
    MachineRule(r"gloo|CPU", "cpu-gloo"),
)
NIC_KINDS = (("EFA", "efa"), ("TCPX", "tcpx"), ("RoCE", "roce"), ("InfiniBand|\\bIB\\b|NDR|HDR|XDR", "infiniband"))
_NICS = re.compile(r"(\d+)\s*x\s*(\d+)\s*G", re.IGNORECASE)

HARNESSES = (
    ("xla", r"NCCL via XLA"),
    ("pytorch", r"PyTorch"),
    ("superbench", r"superbench"),
)
"""Benchmark programs whose own cost is in the measured time, by a pattern in algo, note, source or set."""
NOT_NCCL = re.compile(r"MSCCL|not NCCL|contrib/custom|DeepEP|NVSHMEM", re.IGNORECASE)
XLA_FLOOR_BYTES = 64 * 1024
_PAIRS = re.compile(r"(\d+) pairs, first pair target: (\d+)")
_OUTLIER = re.compile(r"(\d+)\s*([MG])i?B point is an outlier", re.IGNORECASE)


@lru_cache(maxsize=1)
def harness_costs() -> dict[str, tuple[float, float]]:
    """Benchmark program -> seconds it adds to a collective and the share of the rate it reaches (fitted)."""
    path = data_dir("hardware_profiles") / "fitted" / "benchmark_programs.toml"
    if not path.is_file():
        return {}
    return {name: (float(t["added_s"]), float(t["rate"])) for name, t in read_toml(path).items() if isinstance(t, dict)}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured collective.

    Attributes:
        hardware, placement, collective, bytes_: what to price.
        measured_s: the time.
        series: (hardware text, nodes, collective).
        harness: the benchmark whose overhead is in the time, or "".
        nvls, sharp: options of the run.
        skipped: why the row cannot be priced, or "".
    """

    row_id: str
    group: dict[str, Any] = field(hash=False)
    measured_s: float
    series: tuple[str, int, str]
    collective: str = ""
    bytes_: float = 0.0
    hardware: HardwareProfile | None = None
    placement: GroupPlacement | None = None
    harness: str = ""
    nvls: bool = True
    sharp: bool = False
    variant: str = ""
    skipped: str = ""


def rule_for(hardware: str, fabric: str) -> MachineRule | None:
    """The rule for a machine named in free text, or None."""
    text = f"{hardware} | {fabric}"
    return next((rule for rule in MACHINES if re.search(rule.pattern, text, re.IGNORECASE)), None)


@lru_cache(maxsize=512)
def machine(hardware: str, fabric: str) -> tuple[HardwareProfile | None, str]:
    """The profile of a machine named in free text, with the NICs its fabric text states, and the rule's variant."""
    rule = rule_for(hardware, fabric)
    if rule is None:
        return None, ""
    profile = load_hardware(rule.profile)
    parts: dict[str, Any] = {}
    if rule.architecture:
        parts["gpu"] = profile.gpu.model_copy(update={"architecture": rule.architecture})
    if rule.link_bytes_per_s:
        rate = profile.scale_up.bandwidth.model_copy(update={"value": rule.link_bytes_per_s})
        parts["scale_up"] = profile.scale_up.model_copy(update={"bandwidth": rate})
    if rule.pcie_bytes_per_s:
        pcie = profile.node.pcie_bandwidth.model_copy(update={"value": rule.pcie_bytes_per_s})
        parts["node"] = profile.node.model_copy(update={"pcie_bandwidth": pcie})
    nic: dict[str, Any] = {}
    if found := _NICS.search(fabric):
        rate = profile.nic.bandwidth.model_copy(update={"value": float(found.group(2)) * 1e9 / 8})
        nic = {"count": int(found.group(1)), "bandwidth": rate}
    kind = next((kind for pattern, kind in NIC_KINDS if re.search(pattern, fabric, re.IGNORECASE)), None)
    if kind is not None:
        nic["kind"] = kind
    if nic:
        parts["nic"] = profile.nic.model_copy(update=nic)
    if parts:  # another machine than the profile's: the constants of its own kind are looked up
        parts["collectives"] = CollectiveConstants()
    return (profile.model_copy(update=parts) if parts else profile), rule.variant


def harness_of(raw: Mapping[str, str]) -> str:
    """The benchmark program of a row, where its own cost is in the time."""
    text = " | ".join(str(raw.get(k) or "") for k in ("algo", "note", "source", "set"))
    return next((name for name, pattern in HARNESSES if re.search(pattern, text, re.IGNORECASE)), "")


def _reason(raw: Mapping[str, str], collective: str, bytes_: float, harness: str, gpus: int) -> str:
    text = f"{raw.get('algo') or ''} {raw.get('note') or ''}"
    if (raw.get("suggested_split") or "") == "exclude":
        return "marked exclude in the table (a misconfigured cluster)"
    if collective not in COLLECTIVES:
        return f"unknown collective {collective!r}"
    if NOT_NCCL.search(text):
        return "not an NCCL collective"
    if (outlier := _OUTLIER.search(text)) and bytes_ == int(outlier.group(1)) * (2**20 if outlier.group(2) in "Mm" else 2**30):
        return "noted as an outlier in the table"
    if "older plugin" in text:
        return "superseded network plugin: another software than the one modelled"
    if harness == "xla" and bytes_ < XLA_FLOOR_BYTES:
        return "below 64 KiB this table holds the host's overhead, not the collective"
    return "a group of one" if gpus < 2 else ""


def _ranks_of_permute(note: str, gpus: int) -> int:
    """Ranks of the communicator in which pairs exchange: 8 pairs whose first target is 1 are a ring of 8, 4 and 4 halves of 8."""
    found = _PAIRS.search(note)
    if found is None:
        return gpus
    pairs, target = int(found.group(1)), int(found.group(2))
    return pairs if target < pairs else pairs + target


def parse(raw: Mapping[str, str], row_id: str) -> Row:
    """A table row as `Row`; what cannot be priced says why in `skipped`."""
    hardware, fabric = str(raw.get("hardware") or ""), str(raw.get("fabric") or "")
    spelled = re.sub(r"_perf$", "", re.sub(r"[-\s]", "_", str(raw.get("collective") or "").lower()))
    collective = ALIASES.get(spelled, spelled)
    bytes_, gpus = float(raw.get("bytes") or 0), int(float(raw.get("gpus") or 0))
    nodes = int(float(raw.get("nodes") or 1))
    measured = float(raw.get("time_us") or 0) * 1e-6
    keys = ("set", "hardware", "nodes", "gpus", "fabric", "collective", "algo", "bytes", "precision", "suggested_split", "note")
    group: dict[str, Any] = {k: raw[k] for k in keys if raw.get(k) not in (None, "")}
    group.update(nodes=nodes, gpus=gpus, bytes=int(bytes_))
    series = (hardware, nodes, collective)
    harness = harness_of(raw)
    reason = _reason(raw, collective, bytes_, harness, gpus)
    if not reason and measured <= 0:
        reason = "no measured time"
    if reason:
        return Row(row_id, group, measured, series, skipped=reason)
    profile, variant = machine(hardware, fabric)
    if profile is None:
        return Row(row_id, group, measured, series, skipped=f"no profile is near {hardware!r}")
    ranks = gpus if collective != "send_recv" else _ranks_of_permute(str(raw.get("note") or ""), gpus)
    per_node = max(profile.gpus_per_node, -(-gpus // nodes))
    placement = packed(profile, ranks, max(min(nodes, ranks), -(-ranks // per_node)))
    algo = str(raw.get("algo") or "")
    return Row(
        row_id, group, measured, series, collective, bytes_, profile, placement, harness,
        nvls=not re.search(r"NVLS off|^Ring|^Tree", algo), sharp="CollNet" in algo, variant=variant,
    )  # fmt: skip


LARGE = 2**20
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
