"""A layout that runs today, and the best changes of one axis, and of two at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations
from math import inf
from typing import Any, Final

from simpar.host import rarely_collected
from simpar.model.kind import of_jobs
from simpar.result.result import Result
from simpar.searching.abilities import limit_of
from simpar.searching.branch import Branch
from simpar.searching.choice import Choice
from simpar.searching.incumbents import Incumbents, Scored
from simpar.searching.parts import Wish, branch_for
from simpar.searching.pricing import Pricing
from simpar.searching.request import choice_of
from simpar.searching.slow_ranks import searched
from simpar.searching.space import Space
from simpar.specs.scenario import Scenario
from simpar.step import simulate

AXES: Final = (
    "tp", "cp", "pp", "ep", "etp", "micro_batch_size", "virtual_stages", "schedule", "split", "recompute", "zero_stage",
    "shard_size", "sequence_parallel", "cp_style", "overlap_tp", "overlap_ep", "ep_dispatcher", "overlap_grad_reduce",
    "overlap_param_gather", "overlap_p2p", "reshard_after_forward", "offload_activations", "offload_optimizer",
    "offload_parameters", "placement",
)  # fmt: skip
"""Axes that may change; dp follows from the others."""

_EQUAL: Final = 1e-6
"""A smaller gain is none."""
_STRIDE: Final = 1.01
"""How far beyond the next pair's least bound one pair is searched before it is that pair's turn."""

# Virtual stages and the schedule change together where one asks for the other.
_TOGETHER: Final = {"virtual_stages": ("virtual_stages", "schedule"), "schedule": ("virtual_stages", "schedule"),
                    "zero_stage": ("zero_stage", "shard_size")}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One proposal.

    Attributes:
        axes: what changes: axis -> (from, to).
        scored: the layout.
        gain: of the step time, as a fraction of today's; below 0 only where today's layout does not fit.
        memory_bytes: that the fullest device needs more than today.
    """

    axes: dict[str, tuple[Any, Any]]
    scored: Scored
    gain: float
    memory_bytes: float

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "changes": {axis: {"from": a, "to": b} for axis, (a, b) in self.axes.items()}, "text": str(self.scored.choice),
            "choice": self.scored.choice.flat(), "step_time_s": self.scored.step_time_s,
            "peak_memory_bytes": self.scored.device_bytes, "gain": self.gain, "memory_change_bytes": self.memory_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Improvements:
    """Today's layout and what would make it faster (or let it fit)."""

    today: Result
    choice: Choice
    singles: tuple[Change, ...]
    doubles: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "today": {**self.today.to_json(), "text": str(self.choice), "choice": self.choice.flat()},
            "single_changes": [c.to_json() for c in self.singles], "double_changes": [c.to_json() for c in self.doubles],
        }  # fmt: skip


@rarely_collected()
def improve(
    scenario: Scenario,
    *,
    framework: str | None = None,
    runs: Callable[[Scenario], str] = lambda _: "",
    keep: int = 10,
    on_pair: Callable[[int, int], None] | None = None,
    axes: Sequence[str] = AXES,
) -> Improvements:
    """The best single and double changes to a scenario's layout.

    Args:
        framework: keep to what this framework can run; none = the scenario's own, "any" = no limit. Today's layout runs: where it
            is not among what is known of the framework, nothing limits.
        runs: why a layout cannot be launched, which is then no proposal; "" = it can.
        on_pair: told (pairs done, pairs).
        axes: that may change, of AXES.

    Raises:
        InputError: the plan has a part that no axis covers.
    """
    scenario = of_jobs(scenario)
    scenario = scenario.model_copy(update={"effects": searched(scenario.effects)})
    if scenario.effects.slow_ranks and not scenario.effects.expand:
        # Slow pipeline ranks are there as long as there are as many.
        axes = tuple(axis for axis in axes if axis != "pp")
    result = simulate(scenario)
    today = _spelled_out(choice_of(scenario), result, Pricing(Space(scenario, {})))
    limit = result.step_time_s if result.fits else float("inf")
    flat = today.flat()
    framework = limit_of(framework, scenario.framework)
    if not Space(scenario, _around(flat, ()), framework).size:
        framework = None
    pricing = Pricing(Space(scenario, {}, framework))
    found: dict[Choice, Change] = {}
    sizes: dict[tuple[str, ...], int] = {}

    def opened(axes: tuple[str, ...]) -> Branch:
        space = Space(scenario, _around(flat, axes), framework)
        branch = branch_for(space, Wish(keep=3), pricing)
        assert isinstance(branch, Branch)
        branch.incumbents = Incumbents(3, largest_s=limit)
        branch.open()
        return branch

    def search(branch: Branch, axes: tuple[str, ...], until_s: float = inf) -> float:
        left_s = branch.go_on(until_s)
        for scored in branch.best:
            if scored.choice not in found:
                change = _change(flat, scored, result, _opened(axes))
                if change is not None and not runs(scored.choice.scenario(scenario)):
                    found[scored.choice] = change
        return left_s

    def changes(width: int) -> list[Change]:
        kept = sorted((c for c in found.values() if not _idle(c, found.values())), key=lambda c: c.scored.key)
        return [c for c in kept if _width(c) == width][:keep]

    # Axes that change together open the same space.
    every = {frozenset(_opened(names)): names for names in reversed([*((axis,) for axis in axes), *combinations(axes, 2)])}
    singles, pairs = ([names for names in reversed(every.values()) if len(names) == width] for width in (1, 2))
    count = len(singles) + len(pairs)
    for index, names in enumerate(singles):
        if on_pair is not None:
            on_pair(index, count)
        branch = opened(names)
        search(branch, names)
        sizes[names] = branch.space.size
    # All pairs together, least bound first: most need not be searched beyond the doubles that are printed. Where an axis adds
    # nothing to another, that one was searched alone.
    branches = ((number, opened(pair), [sizes.get((axis,)) for axis in pair]) for number, pair in enumerate(pairs))
    waiting = [(0.0, number, branch) for number, branch, alone in branches if branch.space.size not in alone]
    doubles, known = changes(2), len(found)
    while waiting:
        if on_pair is not None:
            on_pair(count - len(waiting), count)
        least_s, number, branch = heappop(waiting)
        if known < len(found):
            doubles, known = changes(2), len(found)
        if len(doubles) >= keep and least_s > doubles[-1].scored.step_time_s * (1.0 + 2.0 * _EQUAL):
            break
        left_s = search(branch, pairs[number], (waiting[0][0] if waiting else inf) * _STRIDE)
        if left_s < inf:
            heappush(waiting, (left_s, number, branch))
    return Improvements(result, today, tuple(changes(1)), tuple(changes(2)))


def _spelled_out(choice: Choice, today: Result, pricing: Pricing) -> Choice:
    """The choice with what the framework does by default as values, so that writing it down is no change."""
    layout, waits = today.layout, pricing.pipelines.blocking(choice.pipeline, choice.group.pp)
    pipeline = replace(choice.pipeline, overlap_p2p=not waits if choice.group.pp > 1 else None)
    state = replace(choice.state, overlap_grad_reduce=layout.overlap_grad_reduce, overlap_param_gather=layout.overlap_param_gather)
    return replace(choice, pipeline=pipeline, state=state)


def _idle(change: Change, changes: Iterable[Change]) -> bool:
    """Whether a part of a change alone does as well, in time and in memory."""
    mine = set(change.axes.items())
    return any(
        set(other.axes.items()) < mine
        and other.scored.step_time_s <= change.scored.step_time_s * (1.0 + _EQUAL)
        and other.scored.device_bytes <= change.scored.device_bytes * (1.0 + _EQUAL)
        for other in changes
    )


def _around(flat: dict[str, Any], free: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    opened = _opened(free)
    fixed = {axis: (flat[axis],) for axis in (*AXES, "precision") if axis not in opened}
    if "ep" in opened or "tp" in opened:
        fixed.pop("etp", None)
    return fixed


def _opened(free: tuple[str, ...]) -> set[str]:
    return {a for axis in free for a in _TOGETHER.get(axis, (axis,))}


def _change(flat: dict[str, Any], scored: Scored, today: Result, opened: set[str]) -> Change | None:
    """What of the axes that were free is another value: elsewhere the same layout may only be written in other words."""
    other = scored.choice.flat()
    changed: dict[str, tuple[Any, Any]] = {a: (flat[a], other[a]) for a in AXES if a in opened and flat[a] != other[a]}
    gain = 1.0 - scored.step_time_s / today.step_time_s
    if not changed or (today.fits and gain <= _EQUAL):
        return None
    return Change(changed, scored, gain, scored.device_bytes - today.worst_rank.device_bytes)


def _width(change: Change) -> int:
    """Changes that a person would count: what must change together is one."""
    axes = set(change.axes)
    if {"virtual_stages", "schedule"} <= axes:
        axes.discard("schedule")
    if {"zero_stage", "shard_size"} <= axes:
        axes.discard("shard_size")
    return len(axes)


__all__ = ["AXES", "Change", "Improvements", "improve"]
