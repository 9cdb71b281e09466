"""Layouts with the scenario's effects: the search itself knows slow ranks; with others its best are simulated again and ranked by
that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from simpar.errors import InputError, Violation
from simpar.result.result import Result
from simpar.searching.choice import Choice, mesh_key
from simpar.searching.find import Found
from simpar.searching.incumbents import Scored
from simpar.searching.mixed_space import MixedSpace
from simpar.searching.slow_ranks import SlowRanks, are_searched, only_slower
from simpar.searching.space import Space
from simpar.specs.effects import EffectsSpec
from simpar.specs.scenario import Scenario
from simpar.step import simulate

POOL: Final = 32
"""Layouts that are first simulated again with effects: so many of the best, and as many of the best of other meshes."""
LARGEST_POOL: Final = 512
"""Twice as many are looked at until no other can be faster, up to this many: minutes of simulation. The gap says what is left."""


def has_effects(scenario: Scenario) -> bool:
    """Whether the scenario asks for anything but a step of ideal ranks and links."""
    return scenario.effects.model_copy(update={"seed": 0, "repetitions": 1}) != EffectsSpec()


def leaves_out(space: Space, *, robust: bool = False) -> bool:
    """Whether the scenario has effects without which the search values layouts.

    It knows slow ranks, by the step time alone. Where they are in pipelines of several replicas it knows the step of each alone.
    """
    effects, slow = space.template.effects, SlowRanks(space.template)
    if not has_effects(space.template):
        return False
    if not are_searched(effects) or robust or isinstance(space, MixedSpace):
        return True
    return any(len(slow.of(group)) > 1 for group in space.groups)


def only_slows(scenario: Scenario) -> bool:
    """Whether no layout can be faster with the effects than without: then the search's bounds hold for both.

    Noise has factors with mean 1, and a step is a longest path: on average over draws it is no shorter than without.
    """
    return scenario.effects.interference and only_slower(scenario.effects)


def check_slow_ranks(spaces: Sequence[Space]) -> None:
    """Raise unless every layout has the ranks that are slow.

    Raises:
        InputError: they are pipeline ranks, of which some layouts have fewer, or GPUs that are not there.
    """
    effects, meshes = spaces[0].template.effects, [group.pp for space in spaces for group in space.groups]
    if not effects.slow_ranks or not meshes:
        return
    gpus = min(space.template.world_size for space in spaces)
    if effects.expand and max(effects.slow_ranks) >= gpus:
        rule, right = f"GPU {max(effects.slow_ranks)} is slow, and there are {gpus}", f"0 to {gpus - 1}"
        raise InputError([Violation("effects.slow_ranks", effects.slow_ranks, rule, right, spaces[0].template.file)])
    if effects.expand:
        return
    last, least = max(effects.slow_ranks), min(meshes)
    if last >= least:
        rule = f"pipeline rank {last} is slow, and layouts of this space have {least} pipeline rank{'s' * (least > 1)} or more"
        right = f"effects.expand = true, where ranks are GPUs, or --allow pp=... with {last + 1} or more"
        raise InputError([Violation("effects.slow_ranks", effects.slow_ranks, rule, right, spaces[0].template.file)])


def pool_of(found: Found) -> Iterator[Scored]:
    """The layouts worth a second look: the best found, and of every other mesh and micro-batch the one with the least bound."""
    seen = {mesh_key(s.choice.group, s.choice.micro_batch_size) for s in found.best}
    yield from found.best
    others = 0
    for glimpse in sorted(found.account.glimpses, key=lambda g: g.bound_s):
        design = mesh_key(glimpse.choice.group, glimpse.choice.micro_batch_size)
        if design not in seen and others < POOL:
            seen.add(design)
            others += 1
            yield Scored(glimpse.choice, glimpse.bound_s, glimpse.device_bytes, glimpse.bound_s)


def simulated(space: Space, choice: Choice) -> Result:
    """A layout of a space as `simulate` has it, with the scenario's effects."""
    return simulate(SlowRanks(space.template).folded(choice.scenario(space.template), choice.group))


def step_of(result: Result) -> float:
    """Seconds of a step that may be drawn at random: the median of its draws."""
    return result.step_time_s if result.repetitions is None else result.repetitions.p50


def gap_with_effects(found: Found, best_s: float) -> float | None:
    """How much faster, relatively, a layout may be that was not simulated with the effects; None where nothing is known.

    Nothing outside the best found takes less than the last of them even without the effects that the search leaves out.
    """
    if not found.finished or not only_slows(found.space.template):
        return None
    least_s = max(s.step_time_s for s in found.best) if len(found.best) >= max(found.wish.keep, found.wish.pool) else best_s
    return max(0.0, 1.0 - least_s / best_s)


__all__ = [
    "LARGEST_POOL", "POOL", "check_slow_ranks", "gap_with_effects", "has_effects", "leaves_out", "only_slows", "pool_of",
    "simulated", "step_of",
]  # fmt: skip
