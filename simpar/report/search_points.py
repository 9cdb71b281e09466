"""Layouts that a search's page shows: those of the answer, and of other meshes the best that everyday choices give."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from simpar.result.categories import largest_loss, title_of
from simpar.result.interpret import interpret
from simpar.result.result import Result
from simpar.searching.answer import Answer
from simpar.searching.choice import Choice
from simpar.searching.find import Found, find
from simpar.searching.parts import Wish
from simpar.searching.why import narrowed
from simpar.step import prepare, run
from simpar.units import format_bytes, format_seconds

DESIGNS: Final = 60
"""Meshes of which the page shows the best layout that an everyday choice of everything else gives."""
DESIGNS_S: Final = 20.0
"""Time for them."""
_EVERYDAY: Final[dict[str, tuple[Any, ...]]] = {
    "schedule": ("1f1b", "interleaved"), "virtual_stages": (1, 2, 4), "recompute": ("none", "full"), "split": ("even",),
    "offload_activations": (0.0,), "offload_optimizer": (False,), "shard_size": (None,), "micro_batch_size": (1, 2, 4),
    "overlap_grad_reduce": (True,), "overlap_param_gather": (True,), "reshard_after_forward": (True,),
    "sequence_parallel": (True,), "placement": ("tp-cp-ep-dp-pp",),
}  # fmt: skip
"""Where the best layout of a design is looked for."""


@dataclass(frozen=True)
class Point:
    """One simulated layout of the page.

    Attributes:
        chosen: it is one of the answer's.
    """

    choice: Choice
    step_time_s: float
    device_bytes: float
    bottleneck: str
    mfu: float
    num_gpus: int
    chosen: bool = False

    @property
    def hover(self) -> str:
        """Shown under the pointer."""
        return (
            f"{self.choice}<br>{format_seconds(self.step_time_s)}, MFU {self.mfu:.1%}, {format_bytes(self.device_bytes)}"
            f"<br>{self.num_gpus:,} GPUs, most lost to: {title_of(self.bottleneck)}"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Time and memory."""
        return {"step_time_s": self.step_time_s, "peak_memory_bytes": self.device_bytes}


def points_of(answer: Answer) -> list[Point]:
    """The answer's layouts, and of other meshes the best that everyday choices give, as many as there is time for."""
    found = [_point(c.scored.choice, c.result, chosen=True) for c in answer.candidates]
    seen = {_mesh(p.choice) for p in found}
    until = time.monotonic() + DESIGNS_S
    for each, mesh in _meshes(answer):
        if len(found) >= DESIGNS + len(answer.candidates) or time.monotonic() > until:
            break
        if mesh not in seen:
            seen.add(mesh)
            found += _design(each, mesh)
    return [p for p in found if p.step_time_s > 0]


def _mesh(choice: Choice) -> tuple[int, ...]:
    g = choice.group
    return (g.tp, g.cp, g.pp, g.dp, g.ep)


def _meshes(answer: Answer) -> list[tuple[Found, tuple[int, ...]]]:
    """Meshes of all cluster sizes in turn, spread evenly over each."""
    columns = []
    for each in answer.found:
        every = sorted({(g.tp, g.cp, g.pp, g.dp, g.ep) for g in each.space.groups})
        step = max(len(every) * len(answer.found) / DESIGNS, 1.0)
        columns.append([(each, every[int(i * step)]) for i in range(int(len(every) / step))])
    return [pair for row in zip_longest(*columns) for pair in row if pair is not None]


def _design(found: Found, mesh: tuple[int, ...]) -> list[Point]:
    """The best layout of a mesh in the everyday corner; none where nothing there fits."""
    corner = {axis: (value,) for axis, value in zip(("tp", "cp", "pp", "dp", "ep"), mesh, strict=True)}
    space = narrowed(found.space, {**_EVERYDAY, **corner})
    best = find(space, Wish(keep=1)).best if space.size else []
    return [_point(s.choice, _simulated(found, s.choice)) for s in best]


def _simulated(found: Found, choice: Choice) -> Result:
    priced = prepare(choice.scenario(found.space.template), detail="stage")
    return interpret(priced, run(priced, interference=True))


def _point(choice: Choice, result: Result, *, chosen: bool = False) -> Point:
    bytes_ = result.worst_rank.device_bytes
    return Point(choice, result.step_time_s, bytes_, largest_loss(result.breakdown), result.mfu, result.world_size, chosen)
