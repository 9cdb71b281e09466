"""Bounds on large sets of layouts: everything on a mesh, in a variant of its blocks, in a pipeline."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.searching.blocks import B, F, I, W
from simpar.searching.choice import Group, Variant
from simpar.searching.memo import kept
from simpar.searching.memory_floors import least_states
from simpar.searching.pricing import Pricing
from simpar.searching.shapes import shape_of
from simpar.searching.slow_ranks import Slow
from simpar.searching.space import Space


class SetBounds:
    """Bounds of sets, with memos of what sets share."""

    def __init__(self, space: Space, pricing: Pricing) -> None:
        self.space, self.pricing = space, pricing
        self._compute: dict[object, float] = {}
        self._variants: dict[tuple[tuple[int, ...], int], dict[str, Passes]] = {}
        kinds = pricing.kinds
        self._blocks = [k + kinds.layers for k in kinds.layer]
        # Over the average rank a tied matrix counts once, which keeps bounds ones.
        self._blocks += [k for k in (kinds.embedding, kinds.shared_head if kinds.shared_head >= 0 else kinds.head) if k >= 0]
        self._blocks += [k for k in (kinds.mtp, kinds.mtp_head) if k >= 0] * kinds.mtp_count

    # -- meshes --------------------------------------------------------------------------------------------------------

    def mesh_seconds(self, group: Group, batch: int, m: int) -> float:
        """Compute of the best pipeline of a mesh, in any variant; infinite without pipelines."""
        slow = self.pricing.slow_ranks.of(group)[0]
        key = (group.tp, group.cp, group.pp, group.ep, group.etp, batch, m, slow)
        if key not in self._compute:
            forward, backward = self.pricing.floors.compute(group, batch)[:, None]
            host = self.pricing.floors.host
            own = Passes(forward, backward, forward + backward, host)
            passes = {"full": own, "split": own, "pairs": own._replace(host=host.sum(axis=0, keepdims=True))}
            self._compute[key] = float(self._serial_seconds(group, m, passes).min(initial=np.inf))
        return self._compute[key]

    @kept
    def least_bytes(self, group: Group) -> float:
        """Bytes of the average rank under the thinnest sharding, without any activation."""
        variant = self.space.variants(group)[0]
        table = self.pricing.weights(group, variant)
        weights = table.dense[self._blocks].sum(), table.expert[self._blocks].sum()
        least = float(least_states(self.pricing, self.space, group, variant, weights))
        return least / group.pp * self.pricing.framework.allocator.fragmentation + self.pricing.outside_bytes(group)

    # -- variants ------------------------------------------------------------------------------------------------------

    def variant_seconds(self, group: Group, batch: int, m: int) -> FloatArray:
        """Serial work of the best pipeline in each variant of a mesh, float array [variants]; infinite without pipelines."""
        key = (self.pricing.sites.of(group), batch)
        if key not in self._variants:
            # Meshes share them whose ranks sit alike inside a block.
            floors = np.array([self.pricing.floors.block(group, batch, v) for v in self.space.variants(group)])
            forward, backward, behind, ahead, both = floors.transpose(1, 0, 2)
            host = self.pricing.floors.host
            self._variants[key] = {
                "full": Passes(forward, backward, both, host), "split": Passes(forward, behind, forward + behind, host),
                "pairs": Passes(ahead, behind, ahead + behind, host.sum(axis=0, keepdims=True)),
            }  # fmt: skip
        return np.asarray(self._serial_seconds(group, m, self._variants[key]).min(axis=1, initial=np.inf))

    def pipeline_seconds(self, group: Group, batch: int, m: int, variant: Variant) -> FloatArray:
        """Every pipeline of a variant without recomputation, sharding and update, float array [pipelines]."""
        table = self.pricing.table(group, batch, variant, "none")
        device, compute, host = table.seconds[:, None], table.compute[:, None], table.host
        passes = {
            "full": Passes(device[F], device[B], device[F] + device[B], host[[F, B]]),
            "split": Passes(device[F], device[I] + device[W], device[F] + device[I] + device[W],
                            np.stack([host[F], host[I] + host[W]])),
            "pairs": Passes(compute[F], compute[B], compute[F] + compute[B], self.pricing.floors.host.sum(axis=0, keepdims=True)),
        }  # fmt: skip
        return np.asarray(self._serial_seconds(group, m, passes)[0])

    def _serial_seconds(self, group: Group, m: int, passes: dict[str, Passes]) -> FloatArray:
        """A step of every pipeline by what its ranks run one after the other, float array [variants, pipelines]."""
        slow, pipelines = self.pricing.slow_ranks.of(group)[0], self.space.pipelines(group.pp, m)
        found = np.zeros((len(passes["full"].both), len(pipelines)))
        for style, (whole, before, pipeline, cut) in self._stacks(group.pp, m, slow).items():
            own = passes[style]
            # A pass takes as long as the device or the host; one host launches both passes of a pair.
            each = (own.forward, own.backward) if len(own.host) > 1 else (own.both,)
            work = sum(np.maximum(whole @ s.T, (whole @ h)[:, :, None]) for s, h in zip(each, own.host, strict=True))
            seconds = m * np.maximum(whole @ own.both.T, work)
            if self.pricing.waits(style):
                seconds = seconds + before @ (own.forward + own.backward if style == "full" else own.forward).T
            found[:, pipeline] = seconds.max(axis=1)[cut].T
        return found

    @kept
    def _stacks(self, pp: int, m: int, slow: Slow) -> dict[str, tuple[FloatArray, FloatArray, IntArray, IntArray]]:
        """Distinct cuts of the pipelines of each style: blocks per rank, blocks before it, as [cuts, ranks, kinds], slow ones as
        more; positions of the pipelines, and the cut of each."""
        cuts: dict[str, dict[object, tuple[int, FloatArray, FloatArray]]] = {}
        places: dict[str, list[tuple[int, int]]] = {}
        for index, pipeline in enumerate(self.space.pipelines(pp, m)):
            shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule, slow)
            name, known = (shape.stages, pipeline.split, shape.stage_to_rank), cuts.setdefault(shape.style, {})
            if name not in known:
                counts = self.pricing.pipelines.composition(pipeline, pp, 0).counts
                known[name] = (len(known), shape.share @ counts, shape.before @ counts)
            places.setdefault(shape.style, []).append((index, known[name][0]))
        return {
            style: (np.array([c[1] for c in known.values()]), np.array([c[2] for c in known.values()]), *np.array(places[style]).T)
            for style, known in cuts.items()
        }


class Passes(NamedTuple):
    """Seconds of forwards, backwards and both together of each kind of block in some variants, float arrays [variants, kinds].

    Attributes:
        host: to launch each, float array [2, kinds]; of both together [1, kinds].
    """

    forward: FloatArray
    backward: FloatArray
    both: FloatArray
    host: FloatArray


__all__ = ["SetBounds"]
