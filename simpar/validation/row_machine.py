"""From what a run says about its machine to a hardware profile and the cluster fields that differ from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from simpar.specs.hardware import load_hardware

Row = Mapping[str, Any]


class CannotExpress(Exception):  # noqa: N818 - a result with a reason, not an error
    """A run that simpar cannot express; the message is the reason."""


@dataclass(frozen=True, slots=True)
class MachineRule:
    """A profile and the runs it stands for.

    Attributes:
        gpu: pattern of the whole gpu name.
        profile: name in hardware_profiles/.
        text: pattern looked for in interconnect, notes and framework_version; "" = any.
        memory: nominal memory in GB from and to, both included; a run that does not say fits.
        gpus_per_node: 0 = any.
    """

    gpu: str
    profile: str
    text: str = ""
    memory: tuple[float, float] = (0.0, 1e9)
    gpus_per_node: int = 0


MACHINES: Final = (
    MachineRule("GB300.*", "gb300-nvl72"),
    MachineRule("GB200.*", "gb200-nvl72"),
    MachineRule("B300.*", "dgx-b300"),
    MachineRule("B200.*", "dgx-b200-750w", r"power[- ]limited"),
    MachineRule("B200.*", "dgx-b200"),
    MachineRule("GH200.*", "gh200"),
    MachineRule("H200[- ]?NVL", "h200-nvl"),
    MachineRule("H200.*", "aws-p5en-h200", r"\bEFA\b|\bp5en\b"),
    MachineRule("H200.*", "dgx-h200"),
    MachineRule("H800.*", "hgx-h800"),
    MachineRule("H20.*", "hgx-h20"),
    MachineRule("H100[- ]?(PCIe|NVL)", "h100-pcie"),
    MachineRule("H100.*", "h100-pcie", r"\bH100[ -]PCIe\b"),
    MachineRule("H100.*", "dgx-h100-96gb-500w", memory=(90, 100)),
    MachineRule("H100.*", "aws-p5-h100", r"\bEFA\b|\bp5\b|\bAWS\b"),
    MachineRule("H100.*", "gcp-a3-mega-h100", r"tcpx|a3[- ]mega|\bGCP\b|gpu-recipes"),
    MachineRule("H100.*", "grand-teton-h100-roce", r"grand teton|\bRoCE"),
    MachineRule("H100.*", "dgx-h100"),
    MachineRule("A800.*", "hgx-a800"),
    MachineRule("A100.*", "a100-pcie", r"A100[ -]PCIe|\bPCIe A100"),
    MachineRule("A100.*PCIe.*", "a100-pcie"),
    MachineRule("A100.*", "aws-p4d-a100", r"\bEFA\b|\bp4de?\b|\bAWS\b", memory=(30, 50)),
    MachineRule("A100.*", "aws-p4de-a100", r"\bEFA\b|\bp4de?\b|\bAWS\b"),
    MachineRule("A100.*", "dgx-a100-40gb", memory=(30, 50)),
    MachineRule("A100.*", "dgx-a100-80gb"),
    MachineRule("L40S", "l40s"),
    MachineRule("MI300X", "mi300x"),
    MachineRule("(RTX[- ]?)?4090", "rtx-4090"),
)
"""First match wins. Profiles: hardware_profiles/README and each file's own sources."""

_LINKS: Final = re.compile(
    r"(?:(\d+)\s*x\s*)?(?:[A-Za-z][\w/-]*[ -]\(?){0,5}?(\d+(?:\.\d+)?)\s*(?:Gb/s|Gbps|Gb|G)\b(?:/s)?"
    r"\s*(per GPU|per node|/node)?",
    re.IGNORECASE,
)
_NAMED_RATES: Final = {"HDR200": 200.0, "NDR400": 400.0, "HDR": 200.0, "NDR": 400.0, "EDR": 100.0, "XDR": 800.0}
_NAMED_LINKS: Final = re.compile(r"(\d+)\s*x\s*(HDR200|NDR400|HDR|NDR|EDR|XDR)|(HDR200|NDR400)\s*x\s*(\d+)", re.IGNORECASE)


def node_gigabits(text: str, gpus_per_node: int) -> float | None:
    """Network bandwidth of one node that `text` states, in Gb/s and one direction, or None.

    Only part of the text that speaks of compute links counts; storage and management links are left out.

    >>> node_gigabits("4 x 100Gb RoCE per node", 8)
    400.0
    >>> node_gigabits("NVL72 NVLink5, 800G per GPU", 4)
    3200.0
    """
    parts = re.split(r"[,;+]", text)
    other = r"storage|management|nvlink|pcie"
    if re.search(r"infiniband|connectx|\bIB\b", text, re.IGNORECASE):
        other += "|ethernet"
    compute = [part for part in parts if not re.search(other, part, re.IGNORECASE)]
    totals: list[float] = []
    for part in compute:
        if named := _NAMED_LINKS.search(part):
            count = float(named[1] or named[4])
            totals.append(count * _NAMED_RATES[(named[2] or named[3]).upper()])
            continue
        found = _LINKS.search(part)
        if not found:
            continue
        rate, scope = float(found[2]), (found[3] or "").lower()
        if scope == "per gpu":
            totals.append(rate * gpus_per_node)
        elif found[1] or scope or "per node" in part.lower():
            totals.append(rate * float(found[1] or 1))
    return max(totals) if totals else None


@dataclass(frozen=True, slots=True)
class Machine:
    """The cluster table of a scenario and what was assumed to get it."""

    cluster: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def machine_of(row: Row) -> Machine:
    """The cluster that `row` ran on.

    Raises:
        CannotExpress: no GPU or no number of them stated, no profile for it, or a node size the profile does not have.
    """
    gpu = str(row.get("gpu") or "").strip()
    if not gpu:
        raise CannotExpress("the GPU is not stated")
    if gpu.upper().startswith("TPU"):
        raise CannotExpress("TPU runs under XLA are outside the scope of this validation")
    if not row.get("n_gpus"):
        raise CannotExpress("the number of GPUs is not stated")
    text = " ".join(str(row.get(k) or "") for k in ("interconnect", "notes", "framework_version", "source"))
    memory = row.get("gpu_mem_gb")
    profile = next((rule.profile for rule in MACHINES if _matches(rule, gpu, text, memory, row)), None)
    if profile is None:
        raise CannotExpress(f"no hardware profile for GPU {gpu!r}")
    return _cluster(row, profile)


def _matches(rule: MachineRule, gpu: str, text: str, memory: float | None, row: Row) -> bool:
    low, high = rule.memory
    stated = low <= memory <= high if memory is not None else rule.memory == (0.0, 1e9)
    per_node = not rule.gpus_per_node or row.get("gpus_per_node") == rule.gpus_per_node
    named = not rule.text or re.search(rule.text, text, re.IGNORECASE) is not None
    return re.fullmatch(rule.gpu, gpu, re.IGNORECASE) is not None and stated and per_node and named


def _cluster(row: Row, profile: str) -> Machine:
    hardware = load_hardware(profile)
    per_node = hardware.gpus_per_node
    gpus = int(row["n_gpus"])
    stated = row.get("gpus_per_node")
    if stated and stated != per_node and gpus > min(stated, per_node):
        raise CannotExpress(f"no profile of {row['gpu']} nodes with {stated} GPUs (profile {profile} has {per_node})")
    cluster: dict[str, Any] = {"hardware": profile, "num_nodes": -(-gpus // per_node)}
    if gpus % per_node:
        cluster["num_gpus"] = gpus
    notes = []
    total = node_gigabits(str(row.get("interconnect") or ""), per_node)
    if total and hardware.nic.count and gpus > per_node:
        one = hardware.nic.bandwidth.value * 8e-9
        # A different total is expressed as a different number of the profile's adapters.
        if abs(total / (one * hardware.nic.count) - 1) > 0.2:
            cluster["nics_per_node"] = max(1, round(total / one))
            notes.append(f"{total:g} Gb/s per node as {cluster['nics_per_node']} adapters of {one:g} Gb/s")
    if not row.get("interconnect") and gpus > per_node:
        notes.append(f"network not stated: that of {profile}")
    return Machine(cluster, notes)
