"""Slurm's topology.conf and topology.yaml (tree and block) to the fabric part of a profile.

Formats: Slurm man pages topology.conf(5), topology.yaml(5). A tree says which switches are joined, not by how many cables, so
oversubscription follows only where LinkSpeed tells the layers apart (below).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from simpar.boundary import parse_yaml, read_text, reader
from simpar.errors import InputError
from simpar.interop.profile_parts import Part

_PAIR: Final = re.compile(r"(\w+)\s*=\s*(\S+)")
_BRACKET: Final = re.compile(r"\[([^\]]*)\]")
MOST_NODES: Final = 1_000_000
_LINES: Final = "SwitchName= with Nodes= or Switches=, BlockName= with Nodes=, or BlockSizes="


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch: its nodes or the switches below it."""

    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...]
    link_speed: float
    line: int


def hostlist(text: str, where: str = "") -> tuple[str, ...]:
    """The names of a Slurm host list: "n[1-3,07],m" -> n1 n2 n3 n07 m.

    Raises:
        InputError: brackets or ranges that do not close.
    """
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        item = item.strip()
        outside = _BRACKET.sub("", item)
        if not item or "[" in outside or "]" in outside:
            raise InputError(f"{where}: {text!r} is no host list; expected names such as node[1-4,7],login1")
        choices = [_range(inner, where) for inner in _BRACKET.findall(item)]
        parts = re.split(r"\[[^\]]*\]", item)
        for chosen in product(*choices):
            names.append("".join(a + b for a, b in zip(parts, (*chosen, ""), strict=True)))
            if len(names) > MOST_NODES:
                raise InputError(f"{where}: {text!r} has more than {MOST_NODES} names")
    return tuple(names)


def _range(inner: str, where: str) -> list[str]:
    found = []
    for piece in inner.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{where}: [{inner}] is no range of numbers; expected such as [1-4,7] or [001-128]")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first > MOST_NODES:
            raise InputError(f"{where}: [{inner}] has more than {MOST_NODES} names")
        found += [f"{i:0{len(match[1])}d}" for i in range(first, last + 1)]
    return found


def _speed(text: object, where: str) -> float:
    try:
        return float(str(text))
    except ValueError:
        raise InputError(f"{where}: LinkSpeed = {text!r}: expected a number") from None


def _conf(text: str, file: str) -> tuple[list[Switch], list[tuple[str, tuple[str, ...]]], list[int]]:
    """Switches, blocks and block sizes of a topology.conf."""
    switches, blocks, sizes = [], [], []
    wrong: list[str] = []
    joined = re.sub(r"\\\n", " ", text)
    for number, raw in enumerate(joined.splitlines(), 1):
        line, where = raw.split("#")[0].strip(), f"{file}:{number}"
        if not line:
            continue
        pairs = {key.lower(): value for key, value in _PAIR.findall(line)}
        try:
            if "switchname" in pairs and ("nodes" in pairs) != ("switches" in pairs):
                nodes = hostlist(pairs["nodes"], where) if "nodes" in pairs else ()
                below = hostlist(pairs["switches"], where) if "switches" in pairs else ()
                switches.append(Switch(pairs["switchname"], nodes, below, _speed(pairs.get("linkspeed", 0), where), number))
            elif "blockname" in pairs and "nodes" in pairs:
                blocks.append((pairs["blockname"], hostlist(pairs["nodes"], where)))
            elif "blocksizes" in pairs:
                sizes = [int(size) for size in pairs["blocksizes"].split(",")]
            else:
                wrong.append(f"{where}: {line[:60]!r}: expected {_LINES}")
        except InputError as error:
            wrong.append(str(error))
        except ValueError:
            wrong.append(f"{where}: BlockSizes = {pairs['blocksizes']!r}: expected whole numbers such as 18,36")
    if wrong:
        raise InputError("\n".join(wrong))
    return switches, blocks, sizes


def _chosen(topologies: Any, file: str) -> Mapping[str, Any]:
    """The default topology of a topology.yaml, else its first."""
    listed = topologies if isinstance(topologies, list) else [topologies]
    if not all(isinstance(t, dict) and "topology" in t for t in listed):
        raise InputError(f"{file}: expected a list of `- topology: name`, each with tree:, block: or flat:")
    found: Mapping[str, Any] = next((t for t in listed if t.get("cluster_default") is True), listed[0])
    return found


def _yaml(text: str, file: str) -> tuple[list[Switch], list[tuple[str, tuple[str, ...]]], list[int]]:
    """The same of the default topology of a topology.yaml."""
    topology = _chosen(parse_yaml(text, file), file)
    where = f"{file}: topology {topology['topology']!r}"
    tree, block = topology.get("tree"), topology.get("block")
    try:
        if isinstance(tree, dict):
            return [
                Switch(str(s["switch"]), hostlist(str(s["nodes"]), where) if "nodes" in s else (),
                       hostlist(str(s["children"]), where) if "children" in s else (), 0.0, 0)
                for s in tree["switches"]
            ], [], []  # fmt: skip
        if isinstance(block, dict):
            sizes = block.get("block_sizes") or []
            blocks = [(str(b["block"]), hostlist(str(b["nodes"]), where)) for b in block["blocks"]]
            return [], blocks, [int(s) for s in sizes]
    except (KeyError, TypeError, ValueError) as error:
        right = "tree: switches: [- switch, children or nodes]; block: block_sizes and blocks: [- block, nodes]"
        raise InputError(f"{where}: {error} is missing or wrong; expected {right}") from None
    kind = "flat, which says nothing of the network" if topology.get("flat") else "neither tree nor block"
    raise InputError(f"{where} is {kind}; expected tree: or block:")


def _common(counts: Sequence[int]) -> int:
    """The commonest count, the larger where two are as common."""
    seen = Counter(counts)
    return max(seen, key=lambda n: (seen[n], n))


def _check(switches: Sequence[Switch], file: str) -> dict[str, int]:
    """Height of every switch over the nodes (1 = leaf)."""
    by_name = {s.name: s for s in switches}
    wrong = [f"{file}:{s.line}: switch {s.name!r} stands twice" for s in switches if by_name[s.name] is not s]
    below = [(s, name) for s in switches for name in s.switches]
    wrong += [f"{file}:{s.line}: switch {c!r} below {s.name!r} is not defined" for s, c in below if c not in by_name]
    if wrong:
        raise InputError("\n".join(wrong))
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise InputError(f"{file}: switches in a circle: {' -> '.join([*above, name])}; expected a tree")
        if name not in heights:
            heights[name] = 1 + max((height(c, (*above, name)) for c in by_name[name].switches), default=0)
        return heights[name]

    for switch in switches:
        height(switch.name, ())
    return heights


def _oversubscription(leaves: Sequence[Switch], parents: Sequence[Switch]) -> float | None:
    """Downlinks over uplink of a leaf where LinkSpeed gives both: the parent's must exceed the leaf's, else it is one cable's."""
    ratios: list[float] = []
    for parent in parents:
        known = [leaf for leaf in leaves if leaf.name in parent.switches and parent.link_speed > leaf.link_speed > 0]
        ratios += [max(1.0, len(leaf.nodes) * leaf.link_speed / parent.link_speed) for leaf in known]
    return max(ratios) if ratios else None


def _tree_part(switches: Sequence[Switch], file: str) -> Part:
    heights, notes = _check(switches, file), []
    leaves = [s for s in switches if s.nodes]
    if not leaves:
        raise InputError(f"{file}: no switch with nodes; expected SwitchName=... Nodes=...")
    spines = [s for s in switches if heights[s.name] == 2]
    sizes = [len(s.nodes) for s in leaves]
    homes = Counter(node for s in leaves for node in s.nodes)
    rails = _common(list(homes.values()))
    tiers = max(heights.values())
    fabric: dict[str, Any] = {"nodes_per_leaf_group": _common(sizes)}
    groups = max(1, (_common([len(s.switches) for s in spines]) if spines else len(leaves)) // rails)
    fabric["leaf_groups_per_pod"] = groups
    if rails > 1:
        fabric["kind"] = "rail-optimized"
        notes.append(f"{file}: nodes under {rails} leaf switches each: one a rail")
    elif len(leaves) == 1:
        fabric["kind"] = "single-switch"
    else:
        notes.append(f"{file}: a Slurm tree does not tell rails from a plain tree; the base's kind of fabric is kept")
    if len(set(sizes)) > 1:
        notes.append(f"{file}: leaves of {min(sizes)} to {max(sizes)} nodes; the commonest, {_common(sizes)}, is taken")
    ratio = _oversubscription(leaves, spines)
    if ratio is None:
        notes.append(f"{file}: cables between switches are not counted in it; the base's oversubscription is kept")
    else:
        fabric["oversubscription"] = ratio
    facts = {
        "nodes": len(homes), "leaves": len(leaves), "tiers": tiers, "rails": rails, "nodes_per_leaf": sizes,
        "switches_per_tier": [sum(h == t for h in heights.values()) for t in range(1, tiers + 1)],
        "oversubscription": ratio,
    }  # fmt: skip
    return Part("slurm", file, {"fabric": fabric}, (), "", facts, tuple(notes))


def _block_part(blocks: Sequence[tuple[str, tuple[str, ...]]], sizes: Sequence[int], file: str) -> Part:
    counts = [len(nodes) for _, nodes in blocks]
    if not counts:
        raise InputError(f"{file}: no blocks; expected BlockName=... Nodes=... or blocks: in topology.yaml")
    fabric = {"nodes_per_leaf_group": _common(counts), "leaf_groups_per_pod": max(1, len(blocks))}
    notes = []
    if len(sizes) > 1 and min(sizes) > 0:
        fabric["leaf_groups_per_pod"] = max(1, max(sizes) // min(sizes))
    if sizes and min(sizes) > min(counts):
        notes.append(f"{file}: a block of {min(counts)} nodes is smaller than the block size {min(sizes)}")
    notes.append(f"{file}: a block may be one NVLink domain; the base's scale-up domain and kind of fabric are kept")
    facts = {"nodes": sum(counts), "blocks": len(blocks), "nodes_per_block": counts, "block_sizes": list(sizes)}
    return Part("slurm", file, {"fabric": fabric}, (), "", facts, tuple(notes))


@reader("path", "Slurm's topology.conf or topology.yaml")
def read(path: str | Path) -> Part:
    """The fabric in the Slurm topology file at `path`; YAML by its ending (.yaml, .yml).

    Raises:
        InputError: not such a file; every wrong line together.
    """
    file, text = str(path), read_text(path)
    parse = _yaml if Path(path).suffix in (".yaml", ".yml") else _conf
    switches, blocks, sizes = parse(text, file)
    if not switches and not blocks:
        raise InputError(f"{file}: neither switches nor blocks; expected SwitchName=... Nodes=... or BlockName=... Nodes=...")
    return _tree_part(switches, file) if switches else _block_part(blocks, sizes, file)
