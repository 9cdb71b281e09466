"""From what a run says about its machine to a hardware profile and the cluster fields that differ from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from simpar.evidence.row_values import Row
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.node_size import with_gpus_per_node


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
    MachineRule("GB10|Spark", "gb10"),
    MachineRule("B300.*", "aws-p6-b300", r"\bEFA\b|\bp6\b|\bAWS\b"),
    MachineRule("B300.*", "dgx-b300"),
    MachineRule("B200.*", "dgx-b200-750w", r"power[- ]limited"),
    MachineRule("B200.*", "aws-p6-b200", r"\bEFA\b|\bp6\b|\bAWS\b"),
    MachineRule("B200.*", "dgx-b200"),
    MachineRule("GH200.*", "gh200-quad", gpus_per_node=4),
    MachineRule("GH200.*", "gh200"),
    MachineRule("H200[- ]?NVL.*", "h200-nvl"),
    MachineRule("H200.*", "aws-p5en-h200", r"\bEFA\b|\bp5en\b"),
    MachineRule("H200.*", "dgx-h200"),
    MachineRule("H800.*", "hgx-h800"),
    MachineRule("H20.*", "hgx-h20"),
    MachineRule("H100[- ]?NVL.*", "h100-nvl"),
    MachineRule("H100.*PCIe.*", "h100-pcie"),
    MachineRule("H100.*", "h100-pcie", r"\bH100[ -]PCIe\b"),
    MachineRule("H100.*", "dgx-h100-96gb-500w", memory=(90, 100)),
    MachineRule("H100.*", "hgx-h100-4gpu-64gb", memory=(60, 70), gpus_per_node=4),
    MachineRule("H100.*", "aws-p5-h100", r"\bEFA\b|\bp5\b|\bAWS\b"),
    MachineRule("H100.*", "gcp-a3-mega-h100", r"tcpx|a3[- ]mega|\bGCP\b|gpu-recipes"),
    MachineRule("H100.*", "grand-teton-h100-roce", r"grand teton|\bRoCE"),
    MachineRule("H100.*", "dgx-h100"),
    MachineRule("A800.*PCIe.*", "a100-pcie"),  # the A100's, but for its NVLink bridge
    MachineRule("A800.*", "hgx-a800"),
    MachineRule("A100.*", "a100-pcie", r"A100[ -]PCIe|\bPCIe A100"),
    MachineRule("A100.*PCIe.*", "a100-pcie"),
    MachineRule("A100.*", "aws-p4d-a100", r"\bEFA\b|\bp4de?\b|\bAWS\b", memory=(30, 50)),
    MachineRule("A100.*", "aws-p4de-a100", r"\bEFA\b|\bp4de?\b|\bAWS\b"),
    MachineRule("A100.*", "hgx-a100-4gpu-64gb", memory=(60, 70), gpus_per_node=4),
    MachineRule("A100.*", "hgx-a100-4gpu-40gb", memory=(30, 50), gpus_per_node=4),
    MachineRule("A100.*", "hgx-a100-4gpu-80gb", gpus_per_node=4),
    MachineRule("A100.*", "dgx-a100-40gb", memory=(30, 50)),
    MachineRule("A100.*", "dgx-a100-80gb"),
    MachineRule("L40S.*", "l40s"),
    MachineRule("L40", "l40"),
    MachineRule("A40", "a40"),
    MachineRule("L4", "l4"),
    MachineRule("A10G", "a10g"),
    MachineRule("A10", "a10"),
    MachineRule("T4", "t4"),
    MachineRule("(Quadro[- ]?)?RTX[- ]?8000.*", "rtx-8000"),
    MachineRule("V100.*", "dgx2-v100-32gb", gpus_per_node=16),
    MachineRule("V100.*", "dgx1-v100-16gb", memory=(10, 20)),
    MachineRule("V100.*", "dgx1-v100-32gb"),
    MachineRule("(RTX[- ]?)?5090(?!.*(laptop|mobile)).*", "rtx-5090"),
    MachineRule("(RTX[- ]?)?PRO[- ]?6000.*", "rtx-pro-6000"),
    MachineRule("(RTX[- ]?)?PRO[- ]?4000(?!.*SFF).*", "rtx-pro-4000"),
    MachineRule("(RTX[- ]?)?4090(?!.*(laptop|mobile)).*", "rtx-4090"),
    MachineRule("(RTX[- ]?)?4060[- ]?(Laptop|Mobile).*", "rtx-4060-laptop"),
    MachineRule("(RTX[- ]?)?3090[- ]?Ti.*", "rtx-3090-ti"),
    MachineRule("(RTX[- ]?)?3090.*", "rtx-3090"),
    MachineRule("(RTX[- ]?)?6000[- ]?Ada.*", "rtx-6000-ada"),
    MachineRule("(RTX[- ]?)?A6000", "rtx-a6000"),
    MachineRule("MI300X.*", "mi300x"),
    MachineRule("MI300", "mi300x", memory=(180, 200)),
    MachineRule("MI300", "mi300x", gpus_per_node=8),
    MachineRule("MI325(X.*)?", "mi325x"),
    MachineRule("MI350(X.*)?", "mi350x"),
    MachineRule("MI355(X.*)?", "mi355x"),
    MachineRule("MI100", "mi100"),
    MachineRule("MI210", "mi210"),
    MachineRule("MI250X?.*", "mi250x", memory=(50, 70)),
    MachineRule("MI250X?.*", "mi250x", gpus_per_node=8),
    MachineRule("TPU.*v6e.*|TPU.*Trillium.*", "tpu-v6e"),
    MachineRule("TPU.*v5p.*", "tpu-v5p"),
    MachineRule("TPU.*v5e.*", "tpu-v5e"),
    MachineRule("TPU.*v4.*", "tpu-v4"),
)
"""First match wins; a GPU without a rule is not taken for another: an MI300 of other memory, or fewer in a node, is an MI300A.
Sources: in each profile."""

OWN_BOARDS: Final = {"dgx-h100": "dgx-h100-96gb-500w", "dgx-b200": "dgx-b200-750w"}
"""A usual board -> that of the machines on which PyTorch is developed: H100 with 96 GB HBM2e of 2.4 TB/s at 500 W (torchtitan
docs/performance.md; torchao testing/training/roofline_utils.py, "Meta's H100 variant"), B200 limited to 750 W (torchao
docs/source/workflows/training.md). Its repositories' tables often name the GPU alone."""
USUAL_BOARDS: Final = {own: usual for usual, own in OWN_BOARDS.items()}
_PYTORCH: Final = re.compile(r"^(torchtitan|torchao|pytorch)\b(?! (blog|issue))", re.IGNORECASE)
"""Sources that are PyTorch's own repositories; its blog also tells of partners' clusters, issues of anyone's."""

_RATE: Final = re.compile(
    r"(\d+(?:\.\d+)?)\s*-?(Tb/s|Tbps|Tb|T|GB/s|Gb/s|Gbps|Gbit/s|Gbit|GbE|Gb|G)(?![a-zA-Z])|[x×]\s*(\d{2,4})(?=\s*(?:IB\b|InfiniBand|RoCE|$))",
    re.IGNORECASE,
)
_NAMED: Final = (
    (r"HDR100|EDR|Omni-?Path|OPA|Slingshot[- ]?10", 100.0),
    (r"HDR-?200|NDR-?200|HDR|Slingshot", 200.0),
    (r"NDR-?400|NDR", 400.0),
    (r"XDR", 800.0),
    (r"FDR", 56.0),
)
"""Link names -> Gb/s of one port; the first that matches."""
_COUNT: Final = re.compile(
    r"(?<![\w.])(\d+)\s*[x×*](?!\s*(?:NVIDIA\s+)?(?:GPUs?\b|[ABHLV]\d{2,3}\b|GH\d00|GB\d00|MI\d))(?=\s*[\w(])"
    r"|(?<![\w.])(\d+)\s*-?(?:NICs?|HCAs?|adapters?|ports?|cards?|rails?)\b"
    rf"|(?:{'|'.join(names for names, _ in _NAMED)}|G|Gbps|Gb/s)\s*[x×*]\s*(\d+)\b",
    re.IGNORECASE,
)
_IN_BRACKETS: Final = re.compile(r"\(([^()]*)\)")
_PAIRS: Final = (("dual", 2), ("quad", 4))
_PIECES: Final = re.compile(r"\bdomains of (\d+) GPUs", re.IGNORECASE)
"""A job over pieces of several racks. That NCCL leaves the links between nodes alone (MNNVL off) cuts no rack: hybridep's buffers
are its own."""
_OF_A_GPU: Final = re.compile(r"(per|/|each)\s*GPU", re.IGNORECASE)
_OF_A_NODE: Final = re.compile(r"(per|/|each)\s*(node|server|host|machine|instance)", re.IGNORECASE)

_UNLINKED: Final = re.compile(
    r"\b(?:no|without|w/o|lacks?) (?:any |an? )?nv-?links?\b"
    r"|\bnv-?links? (?:is |are )?(?:not (?:used|available|present)|absent|off|disabled)\b",
    re.IGNORECASE,
)
"""That GPUs of one node have no links of their own."""

_MEMORY_LAST: Final = re.compile(r"[\s(,-]+\d+\s*G(?:i?B)?\)?$", re.IGNORECASE)


def node_gigabits(text: str, gpus_per_node: int) -> float | None:
    """Network bandwidth of one node that `text` states, in Gb/s and one direction, or None.

    Only part of the text that speaks of compute links counts; storage and management links are left out. A rate alone, which may
    be one adapter's, is all that a node of one GPU has.

    >>> node_gigabits("4 x 100Gb RoCE per node", 8)
    400.0
    >>> node_gigabits("NVL72 NVLink5, 800G per GPU", 4)
    3200.0
    >>> node_gigabits("2 x dual HDR100 InfiniBand", 4)
    400.0
    >>> node_gigabits("2 x dual-port HDR100 (4 x 100 Gb/s) InfiniBand per node", 4)
    400.0
    >>> node_gigabits("24.6 Gbps Ethernet", 1), node_gigabits("24.6 Gbps Ethernet", 8)
    (24.6, None)
    """
    # A count with a rate in brackets says the same once more.
    if (again := _IN_BRACKETS.search(text)) is not None and _COUNT.search(again[1]) and _RATE.search(again[1]):
        return node_gigabits(f"{again[1]} per node", gpus_per_node)
    parts = re.split(r"[,;+]|\band\b", text)
    other = r"storage|management|nvlink|pcie"
    if re.search(r"infiniband|connectx|\bIB\b", text, re.IGNORECASE):
        other += "|ethernet"
    totals = [total for part in parts if not re.search(other, part, re.IGNORECASE) if (total := _part(part, gpus_per_node))]
    return max(totals) if totals else None


def _part(text: str, gpus_per_node: int) -> float | None:
    """Gb/s of a node that one clause states: a rate or a link's name, and of how many adapters, GPUs or nodes it is."""
    rate = _rate(text)
    if rate is None:
        return None
    if _OF_A_GPU.search(text):
        return rate * gpus_per_node
    counts = [float(next(filter(None, found.groups()))) for found in _COUNT.finditer(text)]
    counts += [float(number) for word, number in _PAIRS if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    if not counts and not _OF_A_NODE.search(text) and gpus_per_node > 1:
        return None
    for count in counts:
        rate *= count
    return rate


def _rate(text: str) -> float | None:
    if found := _RATE.search(text):
        unit = found[2]
        if unit is None:
            return float(found[3])
        return float(found[1]) * (1000.0 if unit[0] in "Tt" else 8.0 if unit == "GB/s" else 1.0)
    return next((rate for names, rate in _NAMED if re.search(rf"\b(?:{names})", text, re.IGNORECASE)), None)


def chip_name(text: str) -> str:
    """The GPU's name without a leading number, makers' and product lines' names, and a memory at its end.

    >>> chip_name("8 x NVIDIA A100-SXM4-40GB"), chip_name("RTX A6000 (48 GB)")
    ('A100-SXM4', 'RTX A6000')
    """
    words = r"(?:\d+\s*[x×]\s*|(?:NVIDIA|AMD|Google|Cloud|Tesla|Instinct|GeForce|Quadro|Radeon|HGX|DGX)\b[\s-]*)+"
    name = re.sub(f"^{words}", "", text.strip(), flags=re.IGNORECASE)
    return _MEMORY_LAST.sub("", name).strip() or name.strip()


def _named_memory(text: str) -> int | None:
    """GB of memory in a GPU's name, of which an A10G says none and a GH200 480GB its CPU's (Grace Hopper data sheet: 120, 240 or
    480 of LPDDR5X, 96 or 144 of HBM)."""
    sizes = [int(size) for size in re.findall(r"(?<![a-z\d])(\d+)\s*G(?:i?B)?\b", text, re.IGNORECASE)]
    grace = re.search("GH200", text, re.IGNORECASE) is not None
    return next((size for size in sizes if not (grace and size in (120, 240, 480))), None)


def machine_of(row: Row) -> tuple[dict[str, Any], list[str]]:
    """The cluster that `row` ran on, as the table of a scenario, and what was assumed.

    Raises:
        CannotExpress: no GPU or no number of them stated, or no profile for it.
    """
    gpu = chip_name(str(row.get("gpu") or ""))
    if not gpu:
        raise CannotExpress("the GPU is not stated")
    if not row.get("n_gpus"):
        raise CannotExpress("the number of GPUs is not stated")
    if not row.get("gpu_mem_gb") and (named := _named_memory(str(row["gpu"]))):
        row = {**row, "gpu_mem_gb": named}
    profile = _profile_of(row, gpu)
    if profile is None:
        raise CannotExpress(f"no hardware profile for GPU {gpu!r}")
    if own := own_board(row):
        cluster, notes = _cluster({**row, "gpu_mem_gb": None}, own)
        return cluster, [*notes, f"board not stated: {own} rather than {profile}, as PyTorch's own machines"]
    return _cluster(row, profile)


def own_board(row: Row) -> str | None:
    """The board of PyTorch's own machines where a table of its repositories may be from them, else None."""
    if not _PYTORCH.search(str(row.get("source") or "")):
        return None
    return OWN_BOARDS.get(_profile_of(row, chip_name(str(row.get("gpu") or ""))) or "")


def _profile_of(row: Row, gpu: str) -> str | None:
    """The profile of the first rule that the row meets; its GPU goes by the name `gpu`."""
    text = " ".join(str(row.get(k) or "") for k in ("interconnect", "notes", "framework_version", "source"))
    return next((rule.profile for rule in MACHINES if _matches(rule, gpu, text, row.get("gpu_mem_gb"), row)), None)


def _matches(rule: MachineRule, gpu: str, text: str, memory: float | None, row: Row) -> bool:
    low, high = rule.memory
    stated = low <= memory <= high if memory is not None else rule.memory == (0.0, 1e9)
    per_node = not rule.gpus_per_node or row.get("gpus_per_node") == rule.gpus_per_node
    named = not rule.text or re.search(rule.text, text, re.IGNORECASE) is not None
    return re.fullmatch(rule.gpu, gpu, re.IGNORECASE) is not None and stated and per_node and named


def _cluster(row: Row, profile: str) -> tuple[dict[str, Any], list[str]]:
    hardware = load_hardware(profile)
    per_node = hardware.gpus_per_node
    gpus = int(row["n_gpus"])
    stated = int(row.get("gpus_per_node") or 0)
    notes: list[str] = []
    cluster: dict[str, Any] = {"hardware": profile, "num_nodes": -(-gpus // per_node)}
    if stated and stated != per_node and gpus > min(stated, per_node):
        notes.append(f"nodes of {stated} GPUs with the links and the adapters per GPU of {profile}, which has {per_node}")
        hardware, per_node = with_gpus_per_node(hardware, stated), stated
        cluster |= {"num_nodes": -(-gpus // stated), "gpus_per_node": stated}
    if gpus % per_node:
        cluster["num_gpus"] = gpus
    if gpus > per_node:
        cluster |= _network(row, hardware, notes)
    pieces = _PIECES.search(str(row.get("interconnect") or ""))
    if 0 < (domain := row.get("domain_size") or (int(pieces[1]) if pieces else 0)) < hardware.domain_size:
        cluster["domain_size"] = domain
    cluster |= _memory(row, hardware, notes) | _links(row, hardware, notes)
    return cluster, notes


def _network(row: Row, hardware: HardwareProfile, notes: list[str]) -> dict[str, Any]:
    """What differs from the profile's network: another bandwidth is another number of its adapters, else slower ones."""
    text = str(row.get("interconnect") or "")
    total = node_gigabits(text, hardware.gpus_per_node)
    if not text:
        notes.append(f"network not stated: that of {hardware.name}")
    if not total or not hardware.nic.count:
        return {}
    one = hardware.nic.bandwidth.value * 8e-9
    if abs(total / (one * hardware.nic.count) - 1) <= 0.2:
        return {}
    count = max(1, round(total / one))
    notes.append(f"{total:g} Gb/s per node as {count} adapters of {one:g} Gb/s")
    rest = total / (one * count)
    if abs(rest - 1) <= 0.2:
        return {"nics_per_node": count}
    notes[-1] += f" at {rest:.3g} of their rate"
    return {"nics_per_node": count, "nic_bandwidth_scale": rest}


def _links(row: Row, hardware: HardwareProfile, notes: list[str]) -> dict[str, Any]:
    """Boards of a profile with links of their own in a machine that says it has none: they meet over PCIe."""
    pcie = hardware.node.pcie_bandwidth.value
    own = hardware.scale_up.bandwidth.value
    if not 0 < pcie < own or not _UNLINKED.search(str(row.get("interconnect") or "")):
        return {}
    notes.append(f"no NVLink: GPUs meet at {pcie * 1e-9:g} GB/s of PCIe")
    return {"scale_up_bandwidth_scale": pcie / own}


def _memory(row: Row, hardware: HardwareProfile, notes: list[str]) -> dict[str, Any]:
    """A part with clearly more or less memory than the profile's: the same chip otherwise."""
    stated = row.get("gpu_mem_gb")
    if not stated:
        return {}
    share = float(stated) * 2.0**30 / hardware.gpu.memory.value
    if abs(share - 1) <= 0.15:
        return {}
    notes.append(f"a part with {stated:g} GB of memory; else as {hardware.gpu.name}")
    return {"memory_scale": share}
