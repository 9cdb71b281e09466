"""What waits in a branch and bound: sets of layouts, and what those share that are swept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from simpar.searching.choice import Choice, Group, MeshKey, Offload, Pipeline, Variant
from simpar.searching.design_bounds import Outlook
from simpar.searching.open_layouts import Design, OpenLayouts

Waiting = tuple[float, int, float, OpenLayouts, int]
"""A layout that waits to be swept: rank, number, bound, table and its position there."""
Node = tuple[Group, int, int]
"""A mesh, sequences per micro-batch, micro-batches per step."""


class Shape(NamedTuple):
    """What layouts share that are swept together.

    Attributes:
        flags: ZeRO stage, whether gradients are reduced and parameters gathered beside compute.
        moves: activations are offloaded.
        on_device: they are bounded first by the same layout without that: copies to the host only add waiting. Its program is
            much smaller, and the same for all fractions.
    """

    pp: int
    m: int
    pipeline: Pipeline
    flags: tuple[int, bool | None, bool | None]
    moves: bool
    on_device: bool


def by_shape(table: OpenLayouts, positions: Sequence[int], least_s: float) -> dict[Shape, list[tuple[float, OpenLayouts, int]]]:
    """Layouts at some positions of a table by what they share, each with its bound, none below `least_s`."""
    d, found = table.design, dict[Shape, list[tuple[float, OpenLayouts, int]]]()
    for at in positions:
        offload, pair = divmod(at, len(table.pairs))
        state = table.states[int(table.pairs[pair]) % len(table.states)]
        flags = (state.zero_stage, state.overlap_grad_reduce, state.overlap_param_gather)
        moves = table.offloads[offload].activations > 0
        name = Shape(d.group.pp, d.m, d.pipeline, flags, moves, on_device=moves and not least_s)
        found.setdefault(name, []).append((max(float(table.time_s.flat[at]), least_s), table, at))
    return found


def on_device(choice: Choice) -> Choice:
    """The same layout with all activations on the device."""
    return replace(choice, offload=Offload(0.0, choice.offload.optimizer))


def design_of(kind: str, payload: Any) -> Design | None:
    """What a set of layouts is of, where all are of one design."""
    if kind == "shardings":
        return cast(Outlook, payload).design
    return cast(OpenLayouts, payload[2]).design if kind in ("undercut", "timed", "layout") else None


@dataclass(frozen=True, slots=True)
class Ranked:
    """The pipelines of a variant.

    Attributes:
        node: mesh, micro-batch, micro-batches, variant.
        order: their positions in the space, fastest first by their bounds; `seconds` of each.
        left: layouts of each and all after it.
    """

    node: tuple[Group, int, int, Variant]
    design: MeshKey
    order: list[int]
    seconds: list[float]
    left: list[int]


__all__ = ["Node", "Ranked", "Shape", "Waiting", "by_shape", "design_of", "on_device"]
