"""Slow ranks as a search sees them: how much longer each pipeline rank computes, of the pipelines of a mesh that hold one."""

from __future__ import annotations

from typing import Final

from simpar.engine.jitter import expected_slowest
from simpar.program.units import joined_replicas
from simpar.searching.choice import Group
from simpar.searching.memo import kept
from simpar.specs.effects import EffectsSpec
from simpar.specs.scenario import Scenario
from simpar.topology.mesh import Mesh

Slow = tuple[float, ...]
"""Factor on the compute seconds of each pipeline rank; () = all run at their prices."""
NOBODY: Final[tuple[Slow, ...]] = ((),)


class SlowRanks:
    """Where the slow ranks of a scenario are, in any mesh.

    Ranks without streams of their own stand for pipeline ranks. Those with streams of their own are GPUs: ranks in lockstep run at
    the pace of the slowest of them, and pipelines of other replicas, which run the same, only wait for it.
    """

    def __init__(self, template: Scenario) -> None:
        effects = template.effects
        # A rank faster than its price is no lower bound of anything.
        self.factors = {r: f for r, f in effects.slow_ranks.items() if f != 1.0} if only_slower(effects) else {}
        self.expand = effects.expand
        self.rank_sigma = 0.0 if effects.expand or not only_slower(effects) else effects.rank_sigma

    @kept
    def of(self, group: Group) -> tuple[Slow, ...]:
        """Factors of the pipelines that are slow, without those that another is as slow as everywhere; the slowest first.

        No step is shorter than that of each of these pipelines by itself, and with one pipeline it is as long. Where ranks' speeds
        are drawn, each is as slow as the slowest of the GPUs that it stands for is on average.
        """
        if not (self.factors or self.rank_sigma):
            return NOBODY
        found: dict[int, list[float]] = {} if self.factors else {0: [1.0] * group.pp}
        for rank, factor in self.factors.items():
            copy, place = self._place(group, rank) if self.expand else (0, rank)
            factors = found.setdefault(copy, [1.0] * group.pp)
            if place < group.pp:  # else the mesh has no such pipeline rank, which its simulation refuses
                factors[place] = max(factors[place], factor)
        drawn = expected_slowest(self.rank_sigma, group.tp * group.cp * group.dp)
        ordered = sorted({tuple(drawn * f for f in factors) for factors in found.values()}, key=lambda each: (-sum(each), each))
        kept_: list[Slow] = []
        for each in ordered:
            if not any(all(a >= b for a, b in zip(other, each, strict=True)) for other in kept_):
                kept_.append(each)
        return tuple(kept_)

    def folded(self, scenario: Scenario, group: Group) -> Scenario:
        """The scenario of a layout with one set of streams for each pipeline rank, where that takes as long as one for each GPU.

        So a slow GPU among many thousands needs no streams for each of these.
        """
        found = self.of(group)
        alike = not scenario.cluster.parts and not group.stage_tp
        if not (self.expand and alike and len(found) == 1 and are_searched(scenario.effects)):
            return scenario
        effects = EffectsSpec(slow_ranks={rank: factor for rank, factor in enumerate(found[0]) if factor > 1.0})
        return scenario.model_copy(update={"effects": effects})

    @staticmethod
    def _place(group: Group, rank: int) -> tuple[int, int]:
        """The pipeline that a GPU is in, and its pipeline rank."""
        mesh = Mesh(group.tp, group.cp, group.dp, group.pp, group.ep, group.etp if group.ep > 1 else None, group.placement)
        at = mesh.coordinates(rank)
        return at["dp"] // joined_replicas(mesh), at["pp"]


def only_slower(effects: EffectsSpec) -> bool:
    """Whether no rank is faster than its price."""
    return all(factor >= 1.0 for factor in effects.slow_ranks.values())


def searched(effects: EffectsSpec) -> EffectsSpec:
    """Those of the effects that a search knows."""
    return EffectsSpec(slow_ranks=effects.slow_ranks, expand=effects.expand) if only_slower(effects) else EffectsSpec()


def are_searched(effects: EffectsSpec) -> bool:
    """Whether a search knows all of the effects."""
    return effects.model_copy(update={"seed": 0, "repetitions": 1}) == searched(effects)


__all__ = ["NOBODY", "Slow", "SlowRanks", "are_searched", "only_slower", "searched"]
