"""Layouts of real training runs by name: "dp2tp2", "fsdp4", "pp2dp2-gpipe", "tp2sp", "cp2-allgather", "mlp-pp2".

Standard library only: the ranks of a run import this too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

SCHEDULES: Final = {
    "gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "bfs": "interleaved_bfs", "zbv": "zb-v",
    "izb": "interleaved_zb", "zbh1": "zb-h1", "zbh2": "zb-h2", "vhalf": "v-half", "vmin": "v-min", "dualpipev": "dualpipe-v",
}  # fmt: skip
"""Word in a layout's name -> simpar's schedule."""
HAS_CLASS: Final = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zb-v": "ScheduleZBVZeroBubble",
    "interleaved_bfs": "ScheduleLoopedBFS", "interleaved_zb": "ScheduleInterleavedZeroBubble",
}  # fmt: skip
"""simpar's schedule -> its class in torch.distributed.pipelining.schedules; the others run from the CSV that simpar writes."""
CHUNKS: Final = {"interleaved": 2, "interleaved_bfs": 2, "interleaved_zb": 2, "zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2}
"""Virtual stages of each rank; others have one."""
SPLIT_BACKWARD: Final = ("zb-v", "interleaved_zb", "zb-h1", "zb-h2", "v-half", "v-min")
"""Schedules whose backward runs in two parts."""
CP_STYLES: Final = {"ring": "ring", "allgather": "all_gather", "ulysses": "ulysses"}
OPTIONS: Final = {"recompute": "recompute", "compile": "compiled"}
"""Word in a layout's name -> field that it switches on."""
_PART = re.compile(r"(fsdp|dp|tp|pp|cp|ep)(\d+)|(sp)")


class LayoutError(ValueError):
    """A name that is no layout; the text says why and what would be right."""


@dataclass(frozen=True, slots=True)
class RunLayout:
    """One layout of a real run. Ranks count tp fastest, then cp, dp, pp.

    Attributes:
        name: as the user wrote it.
        model: "transformer", "moe" (with experts) or "mlp".
        tp, cp, dp, pp, ep: degrees.
        fsdp: parameters fully sharded over dp.
        sequence_parallel: activations outside the tensor-parallel parts are split along the sequence.
        cp_style: ring, all_gather or ulysses.
        schedule: simpar's name; virtual_stages: of each rank.
        recompute: layers run again in the backward. compiled: layers go through torch.compile.
        split: no step, but what a backward in two parts takes beyond a whole one.
    """

    name: str
    model: str = "transformer"
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    fsdp: bool = False
    sequence_parallel: bool = False
    cp_style: str = "all_gather"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: bool = False
    compiled: bool = False
    split: bool = False

    @property
    def world_size(self) -> int:
        """Processes it needs."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def folds_experts(self) -> bool:
        """Expert weights are on other ranks than the dense ones beside them: no wrapper reduces both."""
        return self.ep > 1 or (self.model == "moe" and self.tp > 1)

    @property
    def stages(self) -> int:
        """Virtual stages of the model."""
        return self.pp * self.virtual_stages

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands along each dimension."""
        found = {}
        for name in ("tp", "cp", "dp", "pp"):
            rank, found[name] = divmod(rank, getattr(self, name))
        return found

    def rank(self, *, tp: int, cp: int, dp: int, pp: int) -> int:
        """The rank at these coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def groups(self, *dimensions: str) -> Iterator[tuple[int, ...]]:
        """The groups of ranks that differ in `dimensions` only, in order of their first rank."""
        seen: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            seen.setdefault(tuple(v for k, v in at.items() if k not in dimensions), []).append(rank)
        for ranks in seen.values():
            yield tuple(ranks)

    def expert_groups(self, *, replicas: bool) -> Iterator[tuple[int, ...]]:
        """Groups over which experts are spread, or with `replicas` those that hold the same experts.

        Experts are not split by tensor parallelism: they live on consecutive ranks of tp, cp and dp together (Megatron's
        parallel folding with an expert tensor degree of 1).
        """
        for ranks in self.groups("tp", "cp", "dp"):
            if replicas:
                yield from (ranks[i :: self.ep] for i in range(self.ep))
            else:
                yield from (ranks[i : i + self.ep] for i in range(0, len(ranks), self.ep))

    def as_json(self) -> dict[str, Any]:
        """Field name -> value."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _degrees(name: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            rule = f"{text[at:]!r} is no degree; write such as dp2tp2, fsdp4, pp2dp2-gpipe, tp2sp or cp2-ulysses"
            raise LayoutError(f"{name}: {rule}")
        key, value = ("sequence_parallel", True) if part[3] else (part[1], int(part[2]))
        if key in found or (key == "dp" and found.get("fsdp")) or (key == "fsdp" and "dp" in found):
            raise LayoutError(f"{name}: {part[0]} says the same dimension again; give dp or fsdp, and each once")
        if value is not True and value < 1:
            raise LayoutError(f"{name}: {part[0]}: a degree is at least 1")
        if key == "fsdp":
            found |= {"fsdp": True, "dp": value}
        else:
            found[key] = value
        at = part.end()
    return found


def parse_layout(name: str) -> RunLayout:
    """The layout called `name`.

    Raises:
        LayoutError: it is none, or its parts cannot go together.
    """
    first, *words = name.strip().lower().split("-")
    fields: dict[str, Any] = {"name": name.strip()}
    if first in ("mlp", "moe"):
        fields["model"] = first
        first, *words = words or [""]
    fields |= _degrees(name, first) if first not in ("single", "") else {}
    for word in words:
        if word in SCHEDULES:
            fields["schedule"] = SCHEDULES[word]
        elif word in CP_STYLES:
            fields["cp_style"] = CP_STYLES[word]
        elif word in OPTIONS:
            fields[OPTIONS[word]] = True
        else:
            known = ", ".join([*SCHEDULES, *CP_STYLES, *OPTIONS])
            rule = f"{word!r} is neither a schedule, a style of context parallelism nor an option; known: {known}"
            raise LayoutError(f"{name}: {rule}")
    if fields.get("ep", 1) > 1:
        if fields.get("model") == "mlp":
            raise LayoutError(f"{name}: an MLP has no experts; leave out ep")
        fields["model"] = "moe"
    fields["virtual_stages"] = CHUNKS.get(fields.get("schedule", ""), 1)
    layout = RunLayout(**fields)
    if problems := impossible(layout):
        raise LayoutError(f"{name}: {'; '.join(problems)}")
    return layout


def impossible(layout: RunLayout) -> list[str]:
    """Why the ranks' program cannot run `layout`; empty where it can."""
    found = []
    inside = layout.tp * layout.cp * layout.dp
    if layout.ep > 1 and inside % layout.ep:
        found.append(f"ep = {layout.ep} must divide tp * cp * dp = {inside} (experts live on ranks of these)")
    if layout.sequence_parallel and layout.tp == 1:
        found.append("sp splits the sequence over tensor ranks; give tp > 1")
    if layout.virtual_stages > 1 and layout.pp == 1:
        found.append(f"schedule {layout.schedule} needs pp > 1")
    if layout.fsdp and layout.schedule in SPLIT_BACKWARD:
        found.append("fsdp reduces gradients after whole backwards; use gpipe, 1f1b, interleaved or bfs")
    if layout.model == "moe" and layout.tp > 1 and not layout.sequence_parallel:
        found.append("experts beside tensor parallelism see a part of the sequence each; write tpNsp")
    if layout.model == "moe" and layout.fsdp and (layout.ep > 1 or layout.tp > 1):
        found.append("experts that are spread over ranks run with dp; leave out fsdp or ep")
    if layout.model == "mlp" and (layout.cp > 1 or layout.ep > 1 or layout.sequence_parallel):
        found.append("an MLP has no sequence and no experts; use dp, fsdp, tp and pp")
    return found


def parse_layouts(text: str) -> tuple[RunLayout, ...]:
    """Layouts of a comma-separated list, each once.

    Raises:
        LayoutError: all wrong names, together.
    """
    found: dict[str, RunLayout] = {}
    wrong = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found[name] = parse_layout(name)
        except LayoutError as error:
            wrong.append(str(error))
    if wrong:
        raise LayoutError("\n".join(wrong))
    return tuple(found.values())


DEFAULT: Final[dict[int, Sequence[str]]] = {
    1: ("single", "single-recompute", "fsdp1", "mlp"),
    2: ("dp2", "fsdp2", "tp2", "tp2sp", "pp2", "pp2-gpipe", "pp2-interleaved", "pp2-zbv", "cp2-allgather", "cp2-ulysses",
        "ep2dp2", "mlp-dp2", "mlp-tp2", "mlp-pp2"),
    4: ("dp4", "fsdp4", "tp4", "dp2tp2", "fsdp2tp2", "pp4", "pp2dp2", "pp2fsdp2", "pp2tp2", "pp2tp2sp", "cp2dp2-allgather",
        "ep2dp2tp2sp", "mlp-dp4", "mlp-tp4", "mlp-pp4"),
}  # fmt: skip
"""Processes -> layouts that are run where none are named."""
