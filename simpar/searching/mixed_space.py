"""The space of pipelines whose layers are dealt out by cost: over several kinds of machines, and on one where that is asked for.

As elsewhere, but for three things. Layers are dealt out by what they cost on the machine of each stage (`simpar.decide`), so that
there is no axis of cuts. Each part of a cluster may have a tensor parallelism of its own; its ranks are then as many as it has GPUs
for. And what is not asked for is as the plan says: published planners of such clusters (Metis, ATC 2024; Sailor, SOSP 2025) choose
stages, degrees, micro-batches and the cut, and every layout here is simulated, not bounded by closed forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Final

from simpar.errors import InputError, Violation
from simpar.searching import axes
from simpar.searching.choice import EVEN, Choice, Group, Offload, Pipeline, Split
from simpar.searching.shapes import style_of
from simpar.searching.space import Space
from simpar.specs.checks import check_scenario
from simpar.specs.counts import divisors
from simpar.specs.hardware import HardwareProfile
from simpar.specs.stage_plan import alike, joint_profile

OPEN: Final = frozenset({"tp", "pp", "dp", "ep", "etp", "virtual_stages", "micro_batch_size", "schedule", "recompute", "precision"})
"""Axes that are searched without being asked for."""
USUAL: Final = {"recompute": ("none", "selective:core_attn", "full"), "virtual_stages": (1, 2, 4)}
"""Values that are looked at without being asked for."""
AUTO: Final = "auto"
"""The value of `split` that asks for such layers on one kind of machine."""
PLAIN: Final = Pipeline(1, "1f1b", EVEN, None)


@dataclass(frozen=True)
class MixedSpace(Space):
    """What may be chosen around a template whose stages have the layers that cost gives them."""

    @property
    def machines(self) -> tuple[HardwareProfile, ...]:
        """Of each part."""
        return tuple(host.hardware for host in alike(self.template))

    @property
    def hardware(self) -> HardwareProfile:
        """All parts together: peaks and powers of the mean GPU, the smallest memory."""
        return joint_profile(alike(self.template))

    def signature(self, group: Group) -> tuple[object, ...]:
        """Every order is another one over parts: `_groups` leaves those that they can hold."""
        return (group,) if self.template.cluster.parts else super().signature(group)

    def _groups(self) -> Iterator[Group]:
        return (group for group in (*super()._groups(), *self._unlike()) if self._holds(group))

    def _unlike(self) -> Iterator[Group]:
        """Meshes in which parts differ in tensor parallelism; of dense models, since experts are shared out inside one mesh."""
        counts = [part.own_gpus for part in self.template.cluster.parts]
        if self._moe is not None or not counts:
            return
        batch, world = self.template.training.global_batch_size, self.template.world_size
        domain = min(machine.domain_size for machine in self.machines)
        tps = self.values("tp", [d for d in divisors(gcd(*counts)) if d <= domain])
        pps, dps = self.restrictions.get("pp"), self.restrictions.get("dp")
        for each, cp in product(product(tps, repeat=len(counts)), self.values("cp", self._default_cp(divisors(world)))):
            for dp in divisors(batch) if len(set(each)) > 1 else ():
                if any(count % (tp * cp * dp) for count, tp in zip(counts, each, strict=True)):
                    continue
                ranks = [count // (tp * cp * dp) for count, tp in zip(counts, each, strict=True)]
                pp = sum(ranks)
                if pp > self.layers + 2 or (pps and pp not in pps) or (dps and dp not in dps):
                    continue
                own = tuple(tp for tp, count in zip(each, ranks, strict=True) for _ in range(count))
                yield Group(each[0], cp, pp, dp, 1, each[0], axes.PLACEMENTS[0], own)

    def _holds(self, group: Group) -> bool:
        """Whether the parts hold whole ranks of a mesh; asked of the checks themselves."""
        variants, states, batches = self.variants(group), self.states(group), self.micro_batches(group)
        if not (variants and states and batches):
            return False
        choice = Choice(group, batches[0][0], variants[0], PLAIN, "none", states[0], Offload(0.0, False))
        return not check_scenario(choice.scenario(self.template))

    def _splits(self, stages: int) -> Iterator[Split]:
        if stages <= self.layers:
            yield EVEN

    def _pipelines(self, pp: int, m: int) -> Iterator[Pipeline]:
        # DualPipe's ranks hold two stages that must be alike.
        return (pipeline for pipeline in super()._pipelines(pp, m) if style_of(pipeline) != "pairs")

    def deepest(self, pipeline: Pipeline, pp: int) -> int:
        """Most layers that a stage may be dealt."""
        return self.layers


def check_parts(space: Space, given: dict[str, tuple[object, ...]]) -> None:
    """Raise unless stages can be laid over the parts of this cluster by a search.

    Raises:
        InputError: parts hold replicas, or an axis is asked for that such a pipeline has no values of.
    """
    cluster, wrong = space.template.cluster, []
    if cluster.parts_hold == "replicas":
        rule = "a search lays stages over parts; replicas of several kinds are compared with simpar.sweep"
        wrong.append(Violation("cluster.parts_hold", cluster.parts_hold, rule, "stages"))
    if given.get("split", (AUTO,)) != (AUTO,):
        rule = "layers are dealt out by their cost on the machines of each stage"
        wrong.append(Violation("--allow split", given["split"], rule, "split=auto, or leave it out"))
    if wrong:
        raise InputError([Violation(v.field, v.value, v.rule, v.right, space.template.file) for v in wrong])


__all__ = ["AUTO", "OPEN", "USUAL", "MixedSpace", "check_parts"]
