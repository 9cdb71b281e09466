"""Why not that layout? The best of a restricted corner of the space against the winner, or what keeps the corner out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simpar.readings import outcome_of
from simpar.result.result import Result
from simpar.searching import axes
from simpar.searching.account import Account
from simpar.searching.choice import Choice
from simpar.searching.effects import simulated
from simpar.searching.find import Listener, find
from simpar.searching.incumbents import Scored
from simpar.searching.mixed_space import MixedSpace
from simpar.searching.objective import SIMPLE, look_up
from simpar.searching.parts import Wish, measure_of, pricing_of
from simpar.searching.refusals import broken_rules, check_values, unused
from simpar.searching.runner_up import turning_points, waterfalls
from simpar.searching.space import Space

_MANY = 1e6
"""Factor on the device memory with which everything fits, to find the layout that needs least."""


@dataclass(frozen=True)
class Shortage:
    """Where nothing fits: the layout that needs least memory.

    Attributes:
        choice: the layout.
        needed_bytes, device_bytes: of its fullest device.
        by_category: bytes on that device.
    """

    choice: Choice
    needed_bytes: float
    device_bytes: float
    by_category: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "text": str(self.choice), "choice": self.choice.flat(), "needed_bytes": self.needed_bytes,
            "device_memory_bytes": self.device_bytes, "by_category": self.by_category,
        }  # fmt: skip


@dataclass(frozen=True)
class Why:
    """The answer to "why not tp=4, pp=8?".

    Attributes:
        asked: the restriction as written; empty = the whole space, where nothing in it will do.
        size: layouts with it.
        broken: rules that keep it out of the space altogether.
        account: where its layouts went.
        scored, result: its best layout; None where none will do.
        shortage: where no layout fits the memory.
        missed: limits that its best layout misses, with what it has: "step_time_s <= 5 (6.2)".
        slower_by: fraction of the winner's step time.
        in_space: its best layout is in the space that was searched: what is asked may go beyond the usual values.
        waterfall: (entry, winner's seconds, its seconds).
        would_win_if: see `turning_points`.
        finished: the corner was searched to the end.
    """

    asked: str
    size: int
    account: Account
    broken: tuple[str, ...] = ()
    scored: Scored | None = None
    result: Result | None = None
    shortage: Shortage | None = None
    missed: tuple[str, ...] = ()
    slower_by: float | None = None
    in_space: bool = True
    waterfall: tuple[tuple[str, float, float], ...] = ()
    would_win_if: dict[str, float] | None = None
    finished: bool = True

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "asked": self.asked, "space_size": self.size, "broken_rules": list(self.broken),
            "rejected": {k: v for k, v in self.account.rejected.items() if v},
            "best": None if self.scored is None or self.result is None else {
                **self.result.to_json(), "text": str(self.scored.choice), "choice": self.scored.choice.flat(),
            },
            "shortage": None if self.shortage is None else self.shortage.to_json(), "missed_constraints": list(self.missed),
            "slower_by": self.slower_by, "in_space": self.in_space,
            "waterfall_s": {name: {"winner": a, "asked": b, "difference": b - a} for name, a, b in self.waterfall},
            "would_win_if": self.would_win_if or {}, "finished": self.finished,
        }  # fmt: skip


def why(space: Space, wish: Wish, asked: str, winner: Choice | None, listener: Listener | None = None) -> Why:
    """Search the corner of `space` that `asked` ("tp=4,pp=8") names and hold its best against the winner.

    Limits that only a simulated step can be held against are left out of that search: where its best misses one of them, that is
    the answer (what keeps them all in the corner ranks behind it), without simulating all that lies between.

    Raises:
        InputError: `asked` names no axis, or a value of the wrong kind.
    """
    given = axes.parse_restrictions([], [asked])
    check_values(given)
    corner = narrowed(space, given)
    if corner.size == 0:
        return Why(asked, 0, Account(), broken=broken_rules(space, given, winner))
    if none := unused(corner, given):
        return Why(asked, 0, Account(), broken=tuple(str(v) for v in none))
    simple = tuple(c for c in wish.constraints if c.metric in SIMPLE)
    found = find(corner, replace(wish, keep=1, front=(), constraints=simple), listener=listener)
    if found.best:
        against = _against(asked, corner, found.account, found.best[0], winner)
        missed = _missed(corner, wish, found.best[0]) if simple != wish.constraints else ()
        return replace(against, missed=missed, in_space=inside(space, found.best[0].choice), finished=found.finished)
    if not found.finished:
        return Why(asked, corner.size, found.account, finished=False)
    return replace(why_nothing(corner, wish, found.account, winner), asked=asked)


def why_nothing(space: Space, wish: Wish, account: Account, winner: Choice | None = None) -> Why:
    """Why no layout of a searched space will do: memory, or the limits that the fastest that fits misses."""
    free = find(space, Wish(keep=1))
    if not free.best:
        return Why("", space.size, account, shortage=shortage(space))
    found, missed = _against("", space, account, free.best[0], winner), _missed(space, wish, free.best[0])
    if wish.fit_probability is not None and found.result is not None:
        chance = outcome_of(found.result).chance_to_fit
        missed += (f"fit_probability >= {wish.fit_probability:g} ({chance:.2g})",) if chance < wish.fit_probability else ()
    return replace(found, missed=missed)


def _against(asked: str, corner: Space, account: Account, scored: Scored, winner: Choice | None) -> Why:
    result = simulated(corner, scored.choice)
    if winner is None:
        return Why(asked, corner.size, account, scored=scored, result=result)
    best = simulated(corner, winner)
    behind = result.step_time_s / best.step_time_s - 1.0
    return Why(
        asked, corner.size, account, scored=scored, result=result, slower_by=behind, waterfall=tuple(waterfalls(best, result)),
        would_win_if=turning_points(best, result) if behind > 0.0 else {},
    )  # fmt: skip


def inside(space: Space, choice: Choice) -> bool:
    """Whether a layout is in a space."""
    group, pp = choice.group, choice.group.pp
    m = dict(space.micro_batches(group)).get(choice.micro_batch_size) if group in space.groups else None
    if m is None or choice.variant not in space.variants(group) or choice.pipeline not in space.pipelines(pp, m):
        return False
    again = space.recomputes(space.deepest(choice.pipeline, pp), merges=space.merges(choice.variant))
    rest = choice.recompute in again and choice.state in space.states(group) and choice.offload in space.offloads
    return rest and space.runs(choice.variant, choice.pipeline, pp)


def left_out(space: Space, choice: Choice) -> str:
    """The usual ranges that a layout leaves, and what takes it in; nothing where it leaves none."""
    found, largest, flat = [], axes.LARGEST, choice.flat()
    domain = min(machine.domain_size for machine in space.machines)
    if "tp" not in space.restrictions and choice.group.tp > domain:
        found.append(("tp", f"tp stays within a scale-up domain of {domain} GPUs"))
    others = (a for a in ("micro_batch_size", "virtual_stages") if a not in space.restrictions and flat[a] > largest[a])
    found += [(axis, f"{axis} stays within {largest[axis]}") for axis in others]
    rules = " and ".join(rule for _, rule in found)
    options = " ".join(f"--allow {axis}={flat[axis]}" for axis, _ in found)
    return f"{rules} unless values are given ({options} looks there)" if found else ""


def narrowed(space: Space, given: dict[str, tuple[Any, ...]]) -> Space:
    """The corner of a space with these values."""
    known = space.restrictions
    both = {axis: tuple(v for v in values if axis not in known or v in known[axis]) for axis, values in given.items()}
    return replace(space, restrictions={**known, **both})


def shortage(corner: Space) -> Shortage | None:
    """The layout of a corner that needs least memory, as if devices had plenty; None where all would have to be simulated."""
    if isinstance(corner, MixedSpace):
        return None
    template = corner.template
    cluster = template.cluster.model_copy(update={"memory_scale": template.cluster.memory_scale * _MANY})
    # Where everything fits nothing seems worth offloading; as much as allowed needs the least.
    most = {
        "offload_activations": (max(o.activations for o in corner.offloads),),
        "offload_optimizer": (max(o.optimizer for o in corner.offloads),),
    }
    roomy = Space(template.model_copy(update={"cluster": cluster}), {**corner.restrictions, **most}, corner.framework)
    found = find(roomy, Wish("memory_headroom", keep=1))
    if not found.best:
        return None
    choice = found.best[0].choice
    result = simulated(corner, choice)
    rank = result.worst_rank
    slack = {"allocator_slack": rank.reserved_bytes - rank.allocated_bytes}
    return Shortage(choice, rank.device_bytes, result.device_memory_bytes, {**rank.at_peak, **slack, **dict(rank.outside)})


def _missed(corner: Space, wish: Wish, scored: Scored) -> tuple[str, ...]:
    """Limits that the fastest layout of a corner does not keep, each with its own value."""
    measure = measure_of(corner, wish, pricing_of(corner))
    result = simulated(corner, scored.choice)
    seconds = result.step_interval.high if wish.robust else scored.step_time_s
    simple, detailed = measure.metrics(seconds, scored.device_bytes), result.to_json()
    return tuple(
        f"{c} ({look_up(simple if c.metric in SIMPLE else detailed, c.metric):.4g})"
        for c in wish.constraints
        if not c.holds(simple if c.metric in SIMPLE else detailed)
    )


__all__ = ["Shortage", "Why", "inside", "left_out", "narrowed", "shortage", "why", "why_nothing"]
