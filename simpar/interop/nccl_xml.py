"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE) to the node, scale-up and NIC parts of a profile.

Elements and attributes: NCCL src/graph/xml.cc, topo.cc: `<net speed>` in Mb/s; `<nvlink target count tclass>`, where class
0x068000 is a switch; `<pci link_speed link_width>` as sysfs writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from simpar.boundary import MOST_CONFIG_BYTES, read_text, reader
from simpar.errors import InputError
from simpar.interop.nvidia_topo import NodeFacts, part_of, rate
from simpar.interop.profile_parts import Part

Element = ElementTree.Element

_GENERATION: Final = {
    70: "volta",
    80: "ampere",
    86: "ampere",
    89: "ada",
    90: "hopper",
    100: "blackwell",
    103: "blackwell",
    120: "blackwell-rtx",
    121: "blackwell-rtx",
}
_LINK_BYTES_PER_S: Final = {70: 25e9, 80: 25e9, 90: 25e9, 100: 50e9, 103: 50e9}
"""One NVLink, one direction: NVLink 2 to 4 25 GB/s, NVLink 5 50 GB/s (NVIDIA white papers of V100, A100, H100, B200)."""
_SWITCH_CLASS: Final = "0x0680"
_CPU: Final = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


def _number(element: Element, name: str, file: str, wrong: list[str], default: int | None = None) -> int:
    text = element.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "", 0)
    except ValueError:
        wrong.append(f"{file}: <{element.tag}> {name} = {text!r}: must be a whole number")
        return 0


def _walk(element: Element, above: tuple[Element, ...] = ()) -> Iterator[tuple[Element, tuple[Element, ...]]]:
    """Every element with those that hold it, outermost first."""
    yield element, above
    for child in element:
        yield from _walk(child, (*above, element))


def pcie_bytes_per_s(speed: str | None, width: str | None) -> float | None:
    """One direction of a PCIe link: "32.0 GT/s PCIe" and "16" to 63 GB/s; None where the file does not say.

    Line code 8b/10b up to 5 GT/s, 128b/130b up to 32, 242/256 flits at 64 (PCI Express base specifications).
    """
    found = re.match(r"\s*([\d.]+)\s*GT/s", speed or "")
    lanes = int(width) if width and width.isdigit() else 0
    if found is None or not lanes:
        return None
    transfers = float(found[1])
    code = 0.8 if transfers <= 5 else 128 / 130 if transfers <= 32 else 242 / 256
    return transfers * 1e9 * lanes * code / 8


def _root(path: str | Path) -> Element:
    file = str(path)
    text = read_text(path, MOST_CONFIG_BYTES)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{file}: declares entities; expected plain <system><cpu>... of NCCL_TOPO_DUMP_FILE")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(f"{file}:{error.position[0]}: not XML: {error}; expected the file of NCCL_TOPO_DUMP_FILE") from None
    if root.tag != "system" or root.find("cpu") is None:
        raise InputError(f"{file}:1: <{root.tag}>: expected <system> with <cpu> elements, the file of NCCL_TOPO_DUMP_FILE")
    return root


def _links(gpus: list[tuple[Element, tuple[Element, ...]]], file: str, wrong: list[str]) -> tuple[list[dict[str, int]], bool]:
    """Links of each GPU by target (bus id, or "switch"), and whether there are switches."""
    found, switched = [], False
    for gpu, _ in gpus:
        mine: dict[str, int] = {}
        for link in gpu.iter("nvlink"):
            is_switch = (link.get("tclass") or "").startswith(_SWITCH_CLASS)
            switched |= is_switch
            target = "switch" if is_switch else (link.get("target") or "").lower()
            mine[target] = mine.get(target, 0) + _number(link, "count", file, wrong)
        found.append(mine)
    return found, switched


def _peers(links: list[dict[str, int]], buses: list[str]) -> tuple[tuple[int, ...], ...]:
    rows = []
    for i, mine in enumerate(links):
        row = [mine.get(bus, 0) for bus in buses]
        if "switch" in mine:
            row = [mine["switch"] if j != i and "switch" in links[j] else n for j, n in enumerate(row)]
        rows.append(tuple(row))
    return tuple(rows)


def _nets(root: Element, file: str, wrong: list[str]) -> dict[str, int]:
    """Speed in Mb/s of each adapter by name; ports that a plug-in reports twice count once."""
    return {net.get("name") or f"net{i}": _number(net, "speed", file, wrong, 0) for i, net in enumerate(root.iter("net"))}


def _pcie(gpus: list[tuple[Element, tuple[Element, ...]]]) -> float | None:
    """The slowest link on the way from each GPU to its CPU, the same for all or the least."""
    rates = []
    for _, above in gpus:
        way = [r for e in above if e.tag == "pci" and (r := pcie_bytes_per_s(e.get("link_speed"), e.get("link_width")))]
        if way:
            rates.append(min(way))
    return min(rates) if rates else None


@reader("path", "the file of NCCL_TOPO_DUMP_FILE")
def read(path: str | Path) -> Part:
    """The node in the NCCL topology file at `path`.

    Raises:
        InputError: not such a file; every wrong attribute together.
    """
    file = str(path)
    root = _root(path)
    wrong: list[str] = []
    notes: list[str] = []
    placed = list(_walk(root))
    gpus = [(e, above) for e, above in placed if e.tag == "gpu"]
    if not gpus:
        raise InputError(f"{file}: no <gpu>; expected <system><cpu><pci><gpu dev= sm=>, dumped by a job that uses the GPUs")
    generations = sorted({_number(e, "sm", file, wrong) for e, _ in gpus})
    links, switched = _links(gpus, file, wrong)
    buses = [(above[-1].get("busid") or "").lower() for _, above in gpus]
    nets = _nets(root, file, wrong)
    if wrong:
        raise InputError("\n".join(wrong))
    sm = generations[0]
    if len(generations) > 1:
        notes.append(f"{file}: GPUs of compute capability {generations}; the first is taken")
    hosts = root.findall("cpu")
    cpu = "grace" if (hosts[0].get("arch") or "").startswith("arm") else _CPU.get(hosts[0].get("vendor") or "", "other")
    pcie = _pcie(gpus)
    facts = {
        "gpus": len(gpus), "sm": sm, "numa_nodes": len(hosts), "cpu": cpu, "nvlinks": [sum(m.values()) for m in links],
        "nvswitch": switched, "nics": {name: {"speed_bits_per_s": mb * 1e6} for name, mb in nets.items()},
        "pcie_bytes_per_s": pcie,
    }  # fmt: skip
    node = NodeFacts(len(gpus), _peers(links, buses), switched, tuple(nets))
    part = part_of(node, "nccl-xml", file, facts, notes)
    _complete(part.profile, node, sm, pcie, cpu, list(nets.values()), file)
    return replace(part, architecture=_GENERATION.get(sm, ""))


def _complete(
    profile: dict[str, Any], node: NodeFacts, sm: int, pcie: float | None, cpu: str, speeds: list[int], file: str
) -> None:
    """Rates that this file gives and a matrix of connections does not."""
    profile["node"]["cpu"] = cpu
    source = f"NCCL topology {file}"
    if pcie is not None:
        profile["node"]["pcie_bandwidth"] = rate(pcie, f"{source}: link_speed x link_width")
    links = profile["scale_up"].get("links_per_gpu", 0)
    if links and sm in _LINK_BYTES_PER_S:
        each = _LINK_BYTES_PER_S[sm]
        profile["scale_up"]["bandwidth"] = rate(links * each, f"{source}: {links} NVLinks x {each / 1e9:g} GB/s", "derived")
    if speeds and min(speeds) > 0:
        profile["nic"]["bandwidth"] = rate(min(speeds) * 1e6 / 8, f"{source}: slowest <net speed>")
