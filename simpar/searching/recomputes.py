"""What may be recomputed: sets of modules, and whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

from simpar.searching import axes
from simpar.specs.architecture import TokenModel

EVERYTHING: Final = ("full", "full:*")


def selections(model: TokenModel, able: Sequence[Any] | None, given: Sequence[Any] | None) -> tuple[str, ...]:
    """Recomputations other than of whole layers: none, and the sets of up to two modules.

    Args:
        able: patterns that the framework can run; none = all.
        given: patterns that the user allows; none = the default range.
    """
    modules = list(axes.MOE_MODULES if model.moe else axes.DENSE_MODULES)
    if model.mla:
        modules += axes.MLA_MODULES
    if model.moe and not model.moe.shared_expert_intermediate_size:
        modules.remove("shared_experts")
    if any("op" in str(v) for v in able or ()):
        modules = ["op"]
    # All of an expert layer includes its activation.
    pairs = [(a, b) for a, b in combinations(modules, 2) if {a, b} != {"moe", "moe_act"}]
    found = ["none", *(f"selective:{'+'.join(c)}" for c in [(m,) for m in modules] + pairs)]
    if given is not None:
        found += [v for v in given if v.startswith("selective") and v not in found]
        found = [v for v in found if axes.matches("recompute", v, given)]
    if able is not None:
        found = [v for v in found if axes.matches("recompute", v, able)]
    return tuple(found)


def whole_layers(able: Sequence[Any] | None, given: Sequence[Any] | None) -> tuple[bool, bool, frozenset[int]]:
    """Whether whole layers may be recomputed: all of a stage, any number of its first ones, these numbers of them."""
    able, given = EVERYTHING if able is None else able, EVERYTHING if given is None else given
    both = [v for v in given if v in able or (v.startswith("full:") and "full:*" in able)]
    numbers = frozenset(int(v[5:]) for v in both if v.startswith("full:") and v[5:].isdigit())
    return "full" in both, "full:*" in both, numbers


__all__ = ["selections", "whole_layers"]
