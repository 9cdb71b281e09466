"""`nvidia-smi topo -m` to the node, scale-up and NIC parts of a profile.

Legend of the tool: NV# = # NVLinks, PIX one PCIe bridge, PXB several, PHB a host bridge, NODE within a NUMA node, SYS between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from simpar.boundary import MOST_CONFIG_BYTES, read_text, reader
from simpar.errors import InputError
from simpar.interop.profile_parts import Part, measured

_CELL: Final = re.compile(r"^(X|SYS|NODE|PHB|PXB|PIX|NV\d+)$")
_GPU: Final = re.compile(r"^GPU\d+$")
_NEAR: Final = ("PIX", "PXB")
_LEGEND: Final = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
MOST_LINKS: Final = 18
"""NVLinks of a GPU to date (NVLink 4 and 5): more than this over all peers can only be a switch."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as its own files show it.

    Attributes:
        gpus: GPUs.
        peers: NVLinks between two GPUs [gpus][gpus], 0 = none; all of a GPU's where a switch joins them.
        switched: NVSwitches are known (True), absent (False), or not said (None).
        nics: names of the adapters that serve the GPUs.
        nic_kind: "" where the file does not say.
    """

    gpus: int
    peers: tuple[tuple[int, ...], ...]
    switched: bool | None
    nics: tuple[str, ...]
    nic_kind: str = ""


def _domain(peers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sizes of the sets of GPUs that NVLinks join."""
    left, sizes = set(range(len(peers))), []
    while left:
        seen, todo = set(), [left.pop()]
        while todo:
            i = todo.pop()
            seen.add(i)
            todo += [j for j, n in enumerate(peers[i]) if n and j not in seen]
        left -= seen
        sizes.append(len(seen))
    return tuple(sorted(sizes))


def nic_kind(names: Sequence[str]) -> str:
    """The kind of NIC its device names show; mlx5 stands for InfiniBand and RoCE alike, so it shows none."""
    stems = {re.sub(r"[\d_].*", "", name.lower()) for name in names}
    if stems and stems <= {"rdmap", "efa"}:
        return "efa"
    for prefix, kind in (("roce", "roce"), ("ib", "infiniband")):
        if stems and all(s.startswith(prefix) for s in stems):
            return kind
    return "ethernet" if stems and all(s.startswith(("eth", "ens", "eno", "enp")) for s in stems) else ""


def scale_up_of(facts: NodeFacts, notes: list[str], source: str) -> dict[str, Any]:
    """The scale-up table: what joins the GPUs, how many links each has."""
    sizes = _domain(facts.peers) if facts.gpus else ()
    if not sizes or sizes[-1] == 1:
        return {"kind": "pcie" if facts.gpus > 1 else "none", "domain_size": facts.gpus, "links_per_gpu": 0,
                "in_network_reduction": False}  # fmt: skip
    if sizes[0] != sizes[-1]:
        notes.append(f"{source}: NVLink joins GPUs in sets of {sizes}; the smallest is taken")
    rows = [[n for n in row if n] for row in facts.peers]
    switched = facts.switched
    if switched is None:
        switched = max(sum(row) for row in rows) > MOST_LINKS
    links = [max(row, default=0) if switched else sum(row) for row in rows]
    if min(links) != max(links):
        notes.append(f"{source}: GPUs with {min(links)} to {max(links)} NVLinks: links may be down; the fewest are taken")
    kind = "nvswitch" if switched else "nvlink-mesh"
    found: dict[str, Any] = {"kind": kind, "domain_size": sizes[0], "links_per_gpu": min(links)}
    if not switched:
        found["in_network_reduction"] = False
    return found


def part_of(facts: NodeFacts, kind: str, source: str, more: Mapping[str, Any], notes: list[str]) -> Part:
    """The part of a profile that `facts` settle, with further `more` facts for people."""
    profile: dict[str, Any] = {"node": {"gpus_per_node": facts.gpus}, "scale_up": scale_up_of(facts, notes, source)}
    if facts.nics:
        profile["nic"] = {"count": len(facts.nics)}
        chosen = facts.nic_kind or nic_kind(facts.nics)
        if chosen:
            profile["nic"]["kind"] = chosen
        else:
            notes.append(f"{source}: {facts.nics[0]} may be InfiniBand or RoCE; the base's kind of NIC is kept")
    else:
        notes.append(f"{source}: no NIC that serves a GPU; the base's are kept")
    return Part(kind, source, profile, (), "", dict(more), tuple(notes))


def _header(lines: Sequence[str], file: str) -> tuple[int, list[str]]:
    for number, line in enumerate(lines):
        names = line.split()
        if names and _GPU.match(names[0]):
            cut = next((i for i, name in enumerate(names) if name in ("CPU", "NUMA")), len(names))
            return number, names[:cut]
    raise InputError(f"{file}:1: no topology matrix; expected the header of `nvidia-smi topo -m`: GPU0 GPU1 ... CPU Affinity")


def _matrix(lines: Sequence[str], start: int, names: Sequence[str], file: str) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    wrong = []
    for number, line in enumerate(lines[start + 1 :], start + 2):
        cells = line.split()
        if not cells or cells[0].startswith("Legend"):
            if rows and cells:
                break
            continue
        if cells[0] not in names:
            continue
        values = cells[1 : len(names) + 1]
        bad = next((v for v in values if not _CELL.match(v)), None)
        if len(values) != len(names):
            wrong.append(f"{file}:{number}: {cells[0]} has {len(values)} cells; expected {len(names)}, one a column")
        elif bad is not None:
            wrong.append(f"{file}:{number}: {bad!r} is no connection; expected X, NV#, PIX, PXB, PHB, NODE or SYS")
        else:
            rows[cells[0]] = values
    missing = [name for name in names if name not in rows and not any(f" {name} has " in w or name in w for w in wrong)]
    if missing and not wrong:
        wrong.append(f"{file}: no line of {', '.join(missing)}; expected one for every column")
    if wrong:
        raise InputError("\n".join(wrong))
    return rows


@reader("path", "the output of nvidia-smi topo -m")
def read(path: str | Path) -> Part:
    """The node that the output of `nvidia-smi topo -m` at `path` shows.

    Raises:
        InputError: not such output, with the line and what was expected.
    """
    file = str(path)
    lines = re.sub(r"\x1b\[[\d;]*m", "", read_text(path, MOST_CONFIG_BYTES)).splitlines()
    start, names = _header(lines, file)
    rows = _matrix(lines, start, names, file)
    gpus = [name for name in names if _GPU.match(name)]
    nics = [name for name in names if not _GPU.match(name)]
    legend = {m[1]: m[2] for line in lines if (m := _LEGEND.match(line))}
    column = {name: i for i, name in enumerate(names)}
    peers = tuple(tuple(int(c[2:]) if (c := rows[a][column[b]]).startswith("NV") else 0 for b in gpus) for a in gpus)
    to_nic = {nic: [rows[gpu][column[nic]] for gpu in gpus] for nic in nics}
    near = [nic for nic in nics if any(cell in _NEAR for cell in to_nic[nic])]
    notes: list[str] = []
    if nics and not near:
        notes.append(f"{file}: no NIC shares a PCIe switch with a GPU; all {len(nics)} are counted")
    elif len(near) < len(nics):
        far = ", ".join(legend.get(n, n) for n in nics if n not in near)
        notes.append(f"{file}: {far} share no PCIe switch with a GPU and are not counted (storage, management)")
    used = near or nics
    facts = {
        "gpus": len(gpus), "nvlinks": [list(row) for row in peers],
        "nics": {legend.get(nic, nic): {"counted": nic in used, "to_gpus": to_nic[nic]} for nic in nics},
        "gpu_to_gpu": sorted({rows[a][column[b]] for a in gpus for b in gpus if a != b}),
    }  # fmt: skip
    node = NodeFacts(len(gpus), peers, None, tuple(legend.get(nic, nic) for nic in used))
    return part_of(node, "nvidia-topo", file, facts, notes)


def rate(value: float, source: str, kind: str = "measured") -> dict[str, Any]:
    """A sourced rate in bytes per second."""
    return measured(f"{value!r} B/s", source, kind)
