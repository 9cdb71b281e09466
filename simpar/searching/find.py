"""One search from request to finding: seed, parts, executor, store; interruptible at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isclose, log
from typing import Any, Final

from simpar.searching.account import Account
from simpar.searching.decision import Rival, decide
from simpar.searching.executors import EVERY_S, Task, alone_first, in_process, processes
from simpar.searching.incumbents import Followers, Incumbents, Scored
from simpar.searching.mixed_space import MixedSpace
from simpar.searching.nodes import Node
from simpar.searching.parts import AnyBranch, AnyPricing, PartResult, Wish, branch_for, parts_of, pricing_of
from simpar.searching.space import Space
from simpar.searching.store import SEED, Store

FINEST = 1_000_000
"""Parts wanted where each is to be as small as it can: the meshes that share prices."""
SAME = 1e-6
"""Relative difference below which two times are the same."""
SEED_FROM = 100_000
"""Spaces larger than this are seeded."""


@dataclass(eq=False)
class Found:
    """What a search found.

    Attributes:
        space: that was searched.
        wish: what was wanted.
        best: simulated layouts, best first (or the front, fastest first).
        account: where every layout went.
        size: layouts in the space.
        bound: nothing in the space has a smaller value than this, or than the best.
        finished: every part was searched.
        seconds: it took.
    """

    space: Space
    wish: Wish
    best: list[Scored]
    account: Account
    size: int
    bound: float
    finished: bool
    seconds: float

    @property
    def gap(self) -> float | None:
        """(best - bound) / best: of a finished search what `Wish.tolerance` left out, 0 without; None when nothing was found. Of a
        front its slowest layout counts."""
        if not self.best:
            return 0.0 if self.finished else None
        value = (max if self.wish.both else min)(s.value for s in self.best)
        return max(0.0, 1.0 - min(self.bound, value) / value)


@dataclass
class Watch:
    """Progress as it is shown: the incumbent, the gap, parts done."""

    best: Scored | None
    bound: float
    done: int
    parts: int
    simulated: int
    seconds: float
    slowest: Scored | None = None
    """Of a front."""
    chance: Callable[[], float | None] = lambda: None
    """That `best` is the best of those found, by the errors that meshes and layouts do not share; None where there is one. Worked
    out when it is asked for: it costs more than the rest."""

    @property
    def gap(self) -> float | None:
        """As in `Found`."""
        against = self.slowest or self.best
        return max(0.0, 1.0 - min(self.bound / against.value, 1.0)) if against else None


Listener = Callable[[Watch], None]


@dataclass
class _State:
    incumbents: Incumbents
    account: Account = field(default_factory=Account)
    bounds: dict[int, float] = field(default_factory=dict)
    done: int = 0
    simulated: int = 0


def find(
    space: Space,
    wish: Wish,
    *,
    workers: int | None = 1,
    scheduler: str | None = None,
    store: Store | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Found:
    """Search a space.

    Args:
        workers: processes; 1 = this one, none = this one, and one per core where it takes long.
        scheduler: address of a Dask cluster that does it instead.
        store: where every finished layout and part goes at once.
        resume: go on from what the store holds of this search; else it starts anew.
        listener: told the progress.

    Returns:
        What was found; after Ctrl-C what was found until then, `finished` False.

    Raises:
        InputError: the executor cannot work.
    """
    started = time.monotonic()
    if not space.groups:
        return Found(space, wish, [], Account(), 0, inf, True, time.monotonic() - started)
    pricing = pricing_of(space)
    branch = branch_for(space, wish, pricing)
    cut = parts_of(branch, _part_count(scheduler, workers, store is not None))
    if store is not None and (begun := store.begin(len(cut), resume=resume)) != len(cut):
        # Parts are known by their numbers: a search goes on with the parts that it began with, whoever does them now.
        cut = parts_of(branch, begun)
    parts = dict(enumerate(cut))
    state = _State(replace(branch.incumbents, best=[]))
    recalled = _recall(store, state, parts) if store is not None else set()
    fresh: dict[int, float] = {}
    written = [time.monotonic()]
    seeded = len(state.incumbents.best) >= wish.keep or (store is not None and SEED in store.parts())

    def scored(found: Scored) -> None:
        state.simulated += 1
        state.incumbents.add(found)
        if store is not None:
            store.add(found)

    compared: dict[tuple[Scored, ...], float] = {}

    def chance() -> float | None:
        rivals = tuple(state.incumbents.best)
        if len(rivals) < 2 or wish.front or wish.by_memory:
            return None
        if rivals not in compared:
            compared.clear()
            seen = decide([Rival(log(s.value), {}, s.choice.mesh_key) for s in rivals])
            compared[rivals] = float(seen.best_probability[0])
        return compared[rivals]

    def tell() -> None:
        if listener is not None:
            best = state.incumbents.best[0] if state.incumbents.best else None
            bound = min((state.bounds.get(p, 0.0) for p in parts), default=best.value if best else 0.0)
            slowest = state.incumbents.best[-1] if best and wish.both else None
            seconds, count = time.monotonic() - started, state.done + len(parts)
            listener(Watch(best, bound, state.done, count, state.simulated, seconds, slowest, chance))

    def bounded(part: int, bound: float) -> None:
        state.bounds[part] = fresh[part] = bound
        if store is not None and time.monotonic() - written[0] > EVERY_S:
            store.bounded(fresh)
            fresh.clear()
            written[0] = time.monotonic()
        tell()

    finished = True
    try:
        task = Task(space, wish, parts, state.incumbents, scored, bounded, frozenset(state.bounds))
        if space.size > SEED_FROM and not wish.front and not seeded and not isinstance(space, MixedSpace):
            _seed(task, pricing)
            if store is not None:
                store.part_done(SEED, {})
        tell()
        for result in _executor(task, workers, scheduler, lambda count: parts_of(branch, count)):
            for found in result.best:
                state.incumbents.add(found)
            state.account.merge(result.account)
            state.done += 1
            del parts[result.part]
            if store is not None:
                store.part_done(result.part, result.account.to_json())
            tell()
    except KeyboardInterrupt:
        finished = False
    bound = min(state.account.skipped, min((state.bounds.get(p, 0.0) for p in parts), default=inf))
    best = state.incumbents.best
    if store is not None and best and str(best[0].choice) in recalled:
        _check_winner(store, branch, best[0])
    seconds = time.monotonic() - started
    return Found(space, wish, best, state.account, space.size, bound, finished, seconds)


def _executor(
    task: Task, workers: int | None, scheduler: str | None, cut: Callable[[int], list[list[Node]]]
) -> Iterator[PartResult]:
    if scheduler is not None:
        from simpar.searching.cluster import dask  # few searches need what it imports

        return dask(task, scheduler)
    if workers is None:
        return alone_first(task, cut)
    return in_process(task) if workers == 1 else processes(task, workers)


def _recall(store: Store, state: _State, parts: dict[int, Any]) -> set[str]:
    """Take over what the store holds; the layouts by name."""
    names = set()
    state.bounds = store.bounds()
    for scored in store.layouts():
        state.incumbents.add(scored)
        names.add(str(scored.choice))
    for part, account in store.parts().items():
        if parts.pop(part, None) is not None:
            state.account.merge(Account.from_json(account))
            state.done += 1
    return names


def _check_winner(store: Store, branch: AnyBranch, winner: Scored) -> None:
    """Simulate the winner again where its figures come from the store.

    Raises:
        InputError: they are others.
    """
    seconds, device_bytes, _ = branch.evaluation.in_full(winner.choice)
    if not (isclose(seconds, winner.step_time_s, rel_tol=SAME) and isclose(device_bytes, winner.device_bytes, rel_tol=SAME)):
        raise store.doubted(f"{winner.choice} takes {seconds:.6g} s when simulated again, {winner.step_time_s:.6g} s as stored")


def _part_count(scheduler: str | None, workers: int | None, stored: bool) -> int:
    """As few parts as keep everybody busy: a part prunes best when it is large. With a store as many as there can be, so that
    little is lost with the part that was not done; they cost about 5 % more bounds."""
    if stored:
        return FINEST
    return workers or 1 if scheduler is None else 16


def _seed(task: Task, pricing: AnyPricing) -> None:
    """The best of a small corner of the space, so that there is something to show and to beat from the start."""
    corner, wish = seed_space(task.space), task.wish
    if corner.groups and 0 < corner.size < task.space.size / 4:
        first = replace(wish, keep=1, reach=1.0) if wish.fold else wish
        branch = branch_for(corner, first, pricing, followers=Followers(task.on_scored))
        for scored in task.incumbents.best:
            branch.incumbents.add(scored)
        branch.run()


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
        if found := tuple(v for v in restrictions.get(axis, values) if v in values and space.can(axis, v)):
            restrictions[axis] = found
    return Space(space.template, restrictions, space.framework)


def find_over(spaces: Sequence[Space], wish: Wish, *, store: Store | None = None, **options: Any) -> list[Found]:
    """The same search on several cluster sizes; with `num_gpus` as objective the smallest that can, then no more."""
    found: list[Found] = []
    for space in sorted(spaces, key=lambda s: s.template.world_size):
        kept = store.of(" ".join(filter(None, (str(space.template.world_size), space.recipe)))) if store is not None else None
        found.append(find(space, wish, store=kept, **options))
        if not found[-1].finished or (wish.objective == "num_gpus" and found[-1].best):
            break
    return found


__all__ = ["Found", "Watch", "find", "find_over"]
