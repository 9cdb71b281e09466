"""Parts of a hardware profile that importers read from a machine's own files, and how they join a base profile.

A part says only what its file says: tables laid over the profile (`profile`), measured collectives (`collectives`, which
replace the base's efficiencies), an architecture it must agree with, facts for people, and notes on what was not taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpar.boundary import reader
from simpar.errors import InputError, Violation
from simpar.interop.tune_collectives import CollectiveSeries, tune
from simpar.specs.base import read_toml, validate
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.toml import toml

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What one file says of a machine.

    Attributes:
        kind: the importer's name.
        source: the file.
        profile: tables and fields of a hardware profile, as its TOML writes them.
        collectives: measured collectives.
        architecture: the GPU generation the file shows; empty = it does not say.
        facts: everything read, for people and programs; no profile field.
        notes: what was assumed or could not be taken.
    """

    kind: str
    source: str
    profile: Table = field(default_factory=dict)
    collectives: tuple[CollectiveSeries, ...] = ()
    architecture: str = ""
    facts: Table = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> Table:
        """The part as one JSON object; also the layout of its TOML file."""
        head: Table = {"kind": self.kind, "source": self.source, "notes": list(self.notes)}
        if self.architecture:
            head["architecture"] = self.architecture
        return {
            "part": head, "profile": self.profile, "facts": self.facts,
            "collective": [series.to_json() for series in self.collectives],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Merged:
    """A profile made of a base and parts, and what the parts could not settle."""

    profile: HardwareProfile
    notes: tuple[str, ...]


def measured(value: object, source: str, kind: str = "measured") -> Table:
    """A sourced number as a profile writes it."""
    return {"value": value, "kind": kind, "source": source}


def _is_number(value: Mapping[str, Any]) -> bool:
    return set(value) == {"value", "kind", "source"}


def toml_of(table: Mapping[str, Any]) -> str:
    """`table` as TOML; a sourced number stays on its line."""
    return toml(table, inline=lambda _, value: _is_number(value))


def write_toml(table: Mapping[str, Any], path: Path, comment: str = "") -> None:
    """Write `table` at `path`.

    Raises:
        InputError: the file cannot be written.
    """
    text = "".join(f"# {line}\n" for line in comment.splitlines()) + toml_of(table)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def write_part(part: Part, path: Path) -> None:
    """`part` as TOML at `path`."""
    write_toml(part.to_json(), path, f"Written by `simpar import {part.kind}`; join it with `simpar import merge`.")


@reader("path", "a part that `simpar import ... --out` wrote")
def read_part(path: str | Path) -> Part:
    """The part that `write_part` wrote at `path`.

    Raises:
        InputError: not such a file.
    """
    path = Path(path)
    table = read_toml(path)
    head = table.get("part")
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        right = "give a file that `simpar import ... --out` wrote"
        raise InputError([Violation("part.kind", None, "is required", right, str(path))])
    known = {"part", "profile", "facts", "collective"}
    if more := sorted(set(table) - known):
        right = f"known: {', '.join(sorted(known))}"
        raise InputError([Violation(name, "...", "unknown table", right, str(path)) for name in more])
    rows = table.get("collective", [])
    series = tuple(CollectiveSeries.from_json(row, f"{path}: collective[{i}]") for i, row in enumerate(rows))
    return Part(
        head["kind"], str(head.get("source", path)), table.get("profile", {}), series, str(head.get("architecture", "")),
        table.get("facts", {}), tuple(head.get("notes", ())),
    )  # fmt: skip


def _overlay(base: Table, over: Mapping[str, Any]) -> Table:
    """`over` laid on `base`, table by table; measured kernel points are added to those there are."""
    joined = dict(base)
    for name, value in over.items():
        if name == "points":
            joined[name] = [*joined.get(name, ()), *value]
        elif isinstance(value, Mapping) and not _is_number(value) and isinstance(joined.get(name), Mapping):
            joined[name] = _overlay(joined[name], value)
        else:
            joined[name] = value
    return joined


def _links(base: HardwareProfile, part: Part) -> tuple[Table, list[str]]:
    """The part's tables with what follows from its scale-up links under this base, and notes."""
    over = dict(part.profile)
    up = dict(over.get("scale_up", {}))
    notes: list[str] = []
    if not up:
        return over, notes
    old, links = base.scale_up, up.get("links_per_gpu", 0)
    if up.get("kind") == "nvswitch" and old.kind == "nvswitch" and base.domain_size > base.gpus_per_node:
        up["domain_size"] = old.domain_size
        notes.append(f"{part.source}: one node's view; the scale-up domain of {old.domain_size} GPUs is the base's")
    if "bandwidth" not in up and links and links != old.links_per_gpu:
        if old.links_per_gpu:
            rate = old.bandwidth.value / old.links_per_gpu
            why = f"{links} links ({part.source}) x {rate / 1e9:g} GB/s, a link of {base.name}"
            up["bandwidth"] = measured(f"{links * rate!r} B/s", why, "derived")
        else:
            notes.append(f"{part.source}: {links} NVLinks a GPU, but {base.name} has no rate of a link; its bandwidth is kept")
    elif "bandwidth" not in up and not links and old.links_per_gpu:
        pcie = over.get("node", {}).get("pcie_bandwidth") or {
            "value": f"{base.node.pcie_bandwidth.value!r} B/s",
            "source": base.node.pcie_bandwidth.source,
        }
        up["bandwidth"] = measured(pcie["value"], f"no NVLink ({part.source}): the PCIe link, {pcie['source']}", "derived")
    over["scale_up"] = up
    return over, notes


def _disagreements(base: HardwareProfile, parts: Sequence[Part]) -> list[Violation]:
    found = []
    for part in parts:
        if part.architecture and part.architecture != base.gpu.architecture:
            rule = f"the file shows a {part.architecture} GPU, the base profile {base.name!r} is {base.gpu.architecture}"
            found.append(Violation("architecture", part.architecture, rule, "choose a base of that generation", part.source))
    return found


def merge(base_profile_name: str, parts: Sequence[Part | str | Path]) -> Merged:
    """The profile `base_profile_name` with `parts` laid over it in order, then its collective efficiencies refitted.

    Args:
        base_profile_name: a shipped profile or a path.
        parts: parts, or files that hold them.

    Raises:
        InputError: unknown base, a bad part, a part of another GPU generation, or a result that breaks a profile's rules.
    """
    base = load_hardware(base_profile_name)
    read = [part if isinstance(part, Part) else read_part(part) for part in parts]
    if wrong := _disagreements(base, read):
        raise InputError(wrong)
    table: Table = base.model_dump(exclude_none=True)
    notes = [note for part in read for note in part.notes]
    for part in read:
        over, more = _links(base, part)
        table, notes = _overlay(table, over), notes + more
    sources = ", ".join(part.source for part in read)
    table["name"] = f"{base.name}+measured"
    table["description"] = f"{base.description} With measurements of {sources}.".strip()
    profile = validate(HardwareProfile, table, file=f"{base_profile_name} with {sources}")
    series = [s for part in read for s in part.collectives]
    if series:
        profile, more = tune(profile, series)
        notes += more
    return Merged(profile, tuple(dict.fromkeys(notes)))


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """`profile` as TOML at `path`; `load_hardware` reads the same profile back."""
    write_toml(profile.model_dump(exclude_none=True), path, "Written by `simpar import merge`.")
