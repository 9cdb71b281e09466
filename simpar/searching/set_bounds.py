"""Bounds on large sets of layouts: everything on a mesh, in a variant of its blocks, in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.searching import bounds
from simpar.searching.blocks import B, BlockTable, F, I, W
from simpar.searching.choice import Group, Pipeline, Variant
from simpar.searching.memo import kept
from simpar.searching.memory_floors import least_states
from simpar.searching.pricing import Pricing
from simpar.searching.shapes import shape_of, style_of
from simpar.searching.slow_ranks import Slow
from simpar.searching.space import Space


class SetBounds:
    """Bounds of sets, with memos of what sets share."""

    def __init__(self, space: Space, pricing: Pricing) -> None:
        self.space, self.pricing = space, pricing
        self._variants: dict[tuple[tuple[int, ...], int], FloatArray] = {}
        kinds = pricing.kinds
        self._blocks = [k + kinds.layers for k in kinds.layer]
        # Over the average rank a tied matrix counts once, which keeps bounds ones.
        self._blocks += [k for k in (kinds.embedding, kinds.shared_head if kinds.shared_head >= 0 else kinds.head) if k >= 0]
        self._blocks += [k for k in (kinds.mtp, kinds.mtp_head) if k >= 0] * kinds.mtp_count

    # -- meshes --------------------------------------------------------------------------------------------------------

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
            self._variants[key] = np.array([self.pricing.floors.block(group, batch, v) for v in self.space.variants(group)])
        return self._serial_seconds(group.pp, m, self._variants[key], self.pricing.slow_ranks.of(group)[0])

    def _serial_seconds(self, pp: int, m: int, floors: FloatArray, slow: Slow) -> FloatArray:
        """A step of the best cut, from floors of blocks [variants, as `Floors.block`, kinds]."""
        least, host = np.full(len(floors), np.inf), self.pricing.floors.host
        for whole, before, tails, style in self._stacks(pp, m, slow):
            forward = floors[:, 0] if style != "pairs" else floors[:, 3]
            backward = floors[:, 1] if style == "full" else floors[:, 2]
            both = floors[:, 4] if style == "full" else forward + backward
            # A pass takes as long as the device or the host; one host launches both passes of a pair.
            late = [whole @ each for each in (host if style != "pairs" else host.sum(axis=0, keepdims=True))]
            passes = (forward, backward) if style != "pairs" else (both,)
            work = sum(np.maximum(whole @ own.T, each[:, :, None]) for own, each in zip(passes, late, strict=True))
            found = m * np.maximum(whole @ both.T, work)
            if self.pricing.waits(style):
                found = found + before @ (forward + backward if tails else forward).T
            least = np.minimum(least, found.max(axis=1).min(axis=0))
        return least

    @kept
    def _stacks(self, pp: int, m: int, slow: Slow) -> list[tuple[FloatArray, FloatArray, bool, str]]:
        """Distinct cuts of the pipelines: blocks per rank, blocks before it, as [cuts, ranks, kinds], slow ones as more."""
        rows: dict[str, dict[object, tuple[FloatArray, FloatArray]]] = {}
        for pipeline in self.space.pipelines(pp, m):
            shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule, slow)
            name = (shape.stages, pipeline.split, shape.stage_to_rank)
            table = rows.setdefault(shape.style, {})
            if name not in table:
                counts = self.pricing.pipelines.composition(pipeline, pp, 0).counts
                table[name] = (shape.share @ counts, shape.before @ counts)
        return [
            (np.array([r[0] for r in table.values()]), np.array([r[1] for r in table.values()]), style == "full", style)
            for style, table in rows.items()
        ]

    # -- pipelines -----------------------------------------------------------------------------------------------------

    def pipeline_seconds(self, group: Group, batch: int, m: int, variant: Variant) -> FloatArray:
        """Every pipeline of a variant without recomputation, sharding and update, float array [pipelines]."""
        stack = self._stack(group.pp, m, self.pricing.slow_ranks.of(group)[0])
        send, found = self.pricing.sends.seconds(group, batch, variant), np.zeros(stack.pipelines)
        for style, part in stack.styles.items():
            table = self.pricing.table(group, batch, variant, "none")
            # The forms of a pipeline read the classes of its own cut.
            loss = self.pricing.sends.loss(group, batch, variant, style, least=True)[0]
            totals = part.sends * send + part.beside * (send * loss)
            for often, seconds in zip(part.passes, _passes(table, part.counts, style), strict=True):
                totals = totals + (often * seconds[part.classes]).sum(axis=1)
            found[part.pipeline] = np.maximum.reduceat(totals, part.starts)
        return found

    @kept
    def _stack(self, pp: int, m: int, slow: Slow) -> Stack:
        return Stack.of(self.pricing, self.space.pipelines(pp, m), m, slow or (1.0,) * pp)


def _passes(table: BlockTable, counts: FloatArray, style: str) -> list[FloatArray]:
    """Seconds of the passes of `bounds.Chains` through classes of stages, from blocks of each kind in them [classes, kinds]."""
    own = table.pass_s * (counts.sum(axis=1) > 0)[:, None]
    device, host = counts @ table.seconds.T, counts @ table.host.T
    each = np.maximum(device, host) + own
    if style == "full":
        return [each[:, F], each[:, B]]
    if style == "split":
        return [each[:, F], each[:, I] + each[:, W]]
    paired = counts @ table.compute.T + own
    return [each[:, F], paired[:, F], each[:, B], paired[:, B], each[:, I], each[:, W]]


@dataclass(frozen=True)
class Part:
    """The chains of all pipelines of one style.

    Attributes:
        counts: blocks of each kind in each class of stages, float array [classes, kinds].
        classes: of each chain, the classes of its cut, int array [chains, widest].
        passes: of a chain through each of these, float array [kinds of passes, chains, widest].
        sends: boundary tensors of each chain; beside: those beside its ops.
        pipeline: index of each pipeline; starts: its first chain.
    """

    counts: FloatArray
    classes: IntArray
    passes: FloatArray
    sends: FloatArray
    beside: FloatArray
    pipeline: IntArray
    starts: IntArray


@dataclass(frozen=True)
class Stack:
    """The chains of all pipelines of a pipeline degree and number of micro-batches, by style."""

    pipelines: int
    styles: dict[str, Part]

    @classmethod
    def of(cls, pricing: Pricing, pipelines: Sequence[Pipeline], m: int, slow: Slow) -> Stack:
        """Of these pipelines, `slow` of each rank."""
        styles: dict[str, list[int]] = {}
        for index, pipeline in enumerate(pipelines):
            styles.setdefault(style_of(pipeline), []).append(index)
        return cls(len(pipelines), {s: _part(pricing, [pipelines[i] for i in own], own, m, slow) for s, own in styles.items()})


def _part(pricing: Pricing, pipelines: Sequence[Pipeline], index: Sequence[int], m: int, slow: Slow) -> Part:
    pp = len(slow)
    counts: list[FloatArray] = []
    first: dict[object, int] = {}
    rows: list[tuple[FloatArray, FloatArray, FloatArray, int]] = []
    for pipeline in pipelines:
        shape, stages = shape_of(pp, pipeline.virtual_stages, pipeline.schedule, slow), pricing.pipelines.plain_stages(pipeline, pp)
        cut = (shape.stages, pipeline.split)
        if cut not in first:
            first[cut] = sum(len(c) for c in counts)
            counts.append(stages.counts[0].astype(np.float64))
        onto = np.zeros((shape.stages, stages.counts.shape[1]))
        onto[np.arange(shape.stages), stages.which] = 1.0
        paired, blocking = pricing.pipelines.passes(pipeline, pp, m), pricing.pipelines.blocking(pipeline, pp)
        beside = pricing.pipelines.sends_beside(pipeline, pp, m)
        found = bounds.chains(shape, paired, m, beside, blocking=blocking, waits=pricing.waits(shape.style))
        every_chain = np.unique(np.column_stack([*(each @ onto for each in found.passes), found.sends, found.beside]), axis=0)
        passes = every_chain[:, :-2].reshape(len(every_chain), len(found.passes), -1).transpose(1, 0, 2)
        rows.append((passes, every_chain[:, -2], every_chain[:, -1], first[cut]))
    widest, total = max(p.shape[2] for p, *_ in rows), sum(len(s) for _, s, *_ in rows)
    classes, sends, beside = np.zeros((total, widest), dtype=np.int64), np.zeros(total), np.zeros(total)
    every = np.zeros((len(rows[0][0]), total, widest))
    starts, at = [], 0
    for passes, own_sends, own_beside, base in rows:
        own, width = slice(at, at + len(own_sends)), passes.shape[2]
        starts.append(at)
        classes[own, :width] = base + np.arange(width)
        every[:, own, :width], sends[own], beside[own] = passes, own_sends, own_beside
        at += len(own_sends)
    numbers, first_chains = (np.array(each, dtype=np.int64) for each in (index, starts))
    return Part(np.concatenate(counts), classes, every, sends, beside, numbers, first_chains)


__all__ = ["SetBounds"]
