"""Where a search finds its first values to beat: a small corner of the space in which good layouts usually lie."""

from __future__ import annotations

from typing import Any, Final

from simpar.searching.space import Space

CORNER: Final[dict[str, tuple[Any, ...]]] = {
    "micro_batch_size": (1, 2), "overlap_tp": (True,), "overlap_ep": (True,), "split": ("even",), "cp_style": ("ring",),
    "ep_dispatcher": ("deepep",), "placement": ("tp-cp-ep-dp-pp",), "sequence_parallel": (True,),
    "schedule": ("1f1b", "interleaved"), "cp": (1, 2, 4), "offload_activations": (0.0,), "offload_optimizer": (False,),
    "virtual_stages": (1, 2, 4, 8, 16), "overlap_p2p": (None,), "etp": (1, 8), "ep": (1, 8, 16, 32, 64),
    "overlap_grad_reduce": (True,), "overlap_param_gather": (True,),
}  # fmt: skip
"""Axis -> values that training runs usually have; axes that cost a search little are left free."""


def seed_space(space: Space) -> Space:
    """The corner of a space; where the space leaves none of an axis' usual values, all of them."""
    restrictions = dict(space.restrictions)
    for axis, values in CORNER.items():
        given = restrictions.get(axis)
        if given is None:
            restrictions[axis] = values
        elif found := tuple(v for v in given if v in values):
            restrictions[axis] = found
    return Space(space.template, restrictions, space.framework)


__all__ = ["CORNER", "seed_space"]
