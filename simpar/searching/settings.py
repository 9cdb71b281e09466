"""Settings of a design that are free: what may be chosen otherwise without a difference that the model could tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from simpar.searching.choice import Choice
from simpar.searching.design_bounds import DesignBounds
from simpar.searching.designs import design_key
from simpar.searching.open_layouts import Design
from simpar.searching.space import Space

FREE: Final = 0.01
"""A setting that changes the step by less, relatively, is free: within one published sweep the ratio of predicted to measured step
time scatters by about 3 % from layout to layout, so that nothing closer can be told apart."""


def settings(space: Space, choice: Choice, m: int) -> Iterator[tuple[str, Any, Choice]]:
    """(axis, value, layout) of every layout of the same design that differs in one setting."""
    key, seen = design_key(choice), {choice}

    def changed(part: Any, other: Any, **found: Any) -> Iterator[tuple[str, Any, Choice]]:
        names = [f.name for f in fields(part) if getattr(part, f.name) != getattr(other, f.name)]
        layout = replace(choice, **found)
        if len(names) == 1 and layout not in seen and design_key(layout) == key:
            seen.add(layout)
            yield names[0], layout.flat()[names[0]], layout

    for group in space.groups:
        if replace(group, placement=choice.group.placement) == choice.group:
            yield from changed(choice.group, group, group=group)
    for variant in space.variants(choice.group):
        if space.runs(variant, choice.pipeline, choice.group.pp):
            yield from changed(choice.variant, variant, variant=variant)
    for pipeline in space.pipelines(choice.group.pp, m):
        if space.runs(choice.variant, pipeline, choice.group.pp):
            yield from changed(choice.pipeline, pipeline, pipeline=pipeline)
    for state in space.states(choice.group):
        yield from changed(choice.state, state, state=state)


def free_choices(design_bounds: DesignBounds, choice: Choice) -> dict[str, list[Any]]:
    """Axis -> the values that a layout may take without losing more than `FREE`, its own first; axes with one value are left out.

    Each setting is changed by itself; times and bytes are the search's bounds, of both layouts. A device may need the capacity of
    the bounds.
    """
    space, capacity = design_bounds.space, design_bounds.capacity
    m = space.template.training.global_batch_size // (choice.micro_batch_size * choice.group.dp)
    own = estimate(design_bounds, choice, m)
    found: dict[str, list[Any]] = {}
    for axis, value, other in settings(space, choice, m):
        near = estimate(design_bounds, other, m)
        if near is not None and own is not None and near[0] <= own[0] * (1.0 + FREE) and near[1] <= max(capacity, own[1]):
            found.setdefault(axis, [choice.flat()[axis]]).append(value)
    return found


def estimate(design_bounds: DesignBounds, choice: Choice, m: int) -> tuple[float, float] | None:
    """Lower bounds on a layout's seconds and bytes; None where it does not fit."""
    design = Design(choice.group, choice.micro_batch_size, m, choice.variant, choice.pipeline)
    table = design_bounds.every_layout(design)
    if choice.recompute not in table.texts or choice.offload not in table.offloads:
        return None
    pair = table.texts.index(choice.recompute) * len(table.states) + table.states.index(choice.state)
    at, offload = np.flatnonzero(table.pairs == pair), table.offloads.index(choice.offload)
    if not len(at) or not table.alive[offload, at[0]]:
        return None
    return float(table.time_s[offload, at[0]]), float(table.bytes[offload, at[0]])


__all__ = ["FREE", "estimate", "free_choices", "settings"]
