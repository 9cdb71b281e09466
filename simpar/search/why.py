"""Why not that layout? The best of a restricted corner of the space against the winner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simpar.result.result import Result
from simpar.search import axes
from simpar.search.answer import turning_points, waterfalls
from simpar.search.branch import Account
from simpar.search.choice import Choice
from simpar.search.find import find
from simpar.search.incumbents import Scored
from simpar.search.parts import Wish
from simpar.search.space import Space
from simpar.simulate import simulate
from simpar.specs.checks import check_scenario


@dataclass(frozen=True)
class Why:
    """The answer to "why not tp=4, pp=8?".

    Attributes:
        asked: the restriction as written.
        size: layouts with it.
        broken: rules that keep it out of the space altogether.
        account: where its layouts went.
        scored, result: its best layout; None where none fits.
        least_bytes: of its layouts with the least memory, where none fits.
        slower_by: fraction of the winner's step time.
        waterfall: (entry, winner's seconds, its seconds).
        would_win_if: see `turning_points`.
    """

    asked: str
    size: int
    broken: tuple[str, ...]
    account: Account
    scored: Scored | None
    result: Result | None
    slower_by: float | None
    waterfall: tuple[tuple[str, float, float], ...]
    would_win_if: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "asked": self.asked, "space_size": self.size, "broken_rules": list(self.broken),
            "rejected": {k: v for k, v in self.account.rejected.items() if v},
            "best": None if self.scored is None or self.result is None else {
                **self.result.to_json(), "text": str(self.scored.choice), "choice": self.scored.choice.flat(),
            },
            "slower_by": self.slower_by,
            "waterfall_s": {name: {"winner": a, "asked": b, "difference": b - a} for name, a, b in self.waterfall},
            "would_win_if": self.would_win_if,
        }  # fmt: skip


def why(space: Space, wish: Wish, asked: str, winner: Choice | None) -> Why:
    """Search the corner of `space` that `asked` ("tp=4,pp=8") names and hold its best against the winner.

    Raises:
        InputError: `asked` names no axis.
    """
    given = axes.parse_restrictions([], [asked])
    corner = replace(space, restrictions={**space.restrictions, **_intersection(space, given)})
    found = find(corner, replace(wish, keep=1, front=False))
    if not found.best:
        broken = _broken(space, given, winner) if corner.size == 0 else ()
        return Why(asked, corner.size, broken, found.account, None, None, None, (), {})
    scored = found.best[0]
    result = simulate(scored.choice.scenario(space.template))
    if winner is None:
        return Why(asked, corner.size, (), found.account, scored, result, None, (), {})
    best = simulate(winner.scenario(space.template))
    return Why(
        asked, corner.size, (), found.account, scored, result, result.step_time_s / best.step_time_s - 1.0,
        tuple(waterfalls(best, result)), turning_points(best, result),
    )  # fmt: skip


def _intersection(space: Space, given: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    known = space.restrictions
    return {axis: tuple(v for v in values if axis not in known or v in known[axis]) for axis, values in given.items()}


def _broken(space: Space, given: dict[str, tuple[Any, ...]], winner: Choice | None) -> tuple[str, ...]:
    """Rules that the winner with the asked values put in would break; what the framework cannot run."""
    found = []
    for axis, values in given.items():
        able = space._able.get(axis)
        if able is not None and not any(axes.matches(axis, v, able) for v in values):
            found.append(f"{space.framework} cannot run {axis} = {', '.join(map(str, values))}")
        known = space.restrictions.get(axis)
        if known is not None and not any(v in known for v in values):
            found.append(f"{axis} is restricted to {', '.join(map(str, known))}")
    if winner is not None:
        flat = {**winner.flat(), **{axis: values[0] for axis, values in given.items()}}
        group = (flat["tp"] * flat["cp"] * flat["pp"]) or 1
        if "dp" not in given:
            flat["dp"] = max(space.template.world_size // group, 1)
        if flat["ep"] == 1:
            flat["etp"] = flat["tp"]
        found += [str(v) for v in check_scenario(Choice.from_flat(flat).scenario(space.template))]
    return tuple(found)


__all__ = ["Why", "why"]
