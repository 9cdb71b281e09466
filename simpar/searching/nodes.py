"""What waits in a branch and bound: sets of layouts, and what those share that are swept together."""

from __future__ import annotations

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


__all__ = ["Node", "Ranked", "Shape", "Waiting", "design_of", "on_device"]
