"""Seconds that a pipeline must spend on recomputation because its activations do not fit otherwise.

For each pipeline one moment of one rank is looked at: when it holds the most layers. Its resting states and the activations it
keeps then, under each recomputation, are no more than its peak, so a recomputation that does not fit there does not fit at all;
of those that may fit, the one that costs least bounds the pipeline. GPipe's, 1F1B's and the interleaved schedule are looked at; of
others nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray, IntArray
from simpar.searching.blocks import B, BlockTable, F
from simpar.searching.choice import Group, Variant
from simpar.searching.in_flight import held_by_chunk
from simpar.searching.memo import kept
from simpar.searching.pricing import Pricing
from simpar.searching.shapes import shape_of
from simpar.searching.space import Space

BoolArray = NDArray[np.bool_]
KNOWN = frozenset({"gpipe", "1f1b", "interleaved"})
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Fullest:
    """The fullest moments of the pipelines of one degree and number of micro-batches.

    Attributes:
        pipeline: position of each among all, int array [P].
        held: blocks of each kind whose activations the rank keeps, float array [P, kinds]; layers as if they recomputed.
        chunks: forwards that it keeps, float array [P].
        owned: layers of each kind that the rank has, float array [P, kinds].
        deepest: most layers of a stage, float array [P].
        counts: blocks of each kind in each class of stages, float array [classes, kinds].
        runs: classes of the stages of each distinct rank, int array [ranks, widest], of an empty class where there are fewer.
        starts: the first of these of each pipeline.
    """

    pipeline: IntArray
    held: FloatArray
    chunks: FloatArray
    owned: FloatArray
    deepest: FloatArray
    counts: FloatArray
    runs: IntArray
    starts: IntArray

    @classmethod
    def of(cls, space: Space, pricing: Pricing, pp: int, m: int) -> Fullest | None:
        """Of all pipelines whose schedules are known; None without any."""
        layers, width = pricing.kinds.layers, pricing.kinds.count
        rows: list[tuple[int, FloatArray, float, FloatArray, int]] = []
        counts, runs, starts = [np.zeros((1, width))], [], []
        ranks, base = 0, 1
        for index, pipeline in enumerate(space.pipelines(pp, m)):
            if pipeline.schedule not in KNOWN or pricing.template.plan.microbatch_group_size:
                continue
            stages, shape = pricing.pipelines.plain_stages(pipeline, pp), shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
            own = stages.counts[0].astype(np.float64)
            own[:, :layers] += own[:, layers : 2 * layers]
            own[:, layers : 2 * layers] = 0.0
            deep, found = own[:, :layers].sum(axis=1)[stages.which], []
            for rank in range(pp):
                moments = held_by_chunk(pipeline.schedule, pp, m, pipeline.virtual_stages, rank)
                full = moments @ deep[rank::pp]
                found.append((float(full.max()), rank, moments[int(full.argmax())]))
            _, rank, held = max(found, key=lambda each: each[0])
            share = shape.share[rank] @ own[stages.which]
            share[layers:] = 0.0
            deepest = space.deepest(pipeline, pp)
            rows.append((index, held @ own[stages.which[rank::pp]], float(held.sum()), share, deepest))
            each = np.unique([[stages.which[s] for s in held] for held in shape.held.values()], axis=0)
            starts.append(ranks)
            runs += [(base + row).tolist() for row in each]
            ranks, base = ranks + len(each), base + len(own)
            counts.append(own)
        if not rows:
            return None
        widest = max(len(run) for run in runs)
        padded = np.array([[*run, *[0] * (widest - len(run))] for run in runs], dtype=np.int64)
        places, held, chunks, owned, depths = zip(*rows, strict=True)
        return cls(
            np.array(places), np.array(held), np.array(chunks), np.array(owned), np.array(depths, dtype=np.float64),
            np.concatenate(counts), padded, np.array(starts, dtype=np.int64),
        )  # fmt: skip

    def least(self, per_class: FloatArray) -> FloatArray:
        """Of seconds per class of stages, those of the rank of each pipeline that has least, [P]."""
        return np.asarray(np.minimum.reduceat(per_class[self.runs].sum(axis=1), self.starts))


class MemoryFloors:
    """Seconds of recomputation that memory asks for, with memos of what variants share."""

    def __init__(self, space: Space, pricing: Pricing) -> None:
        self.space, self.pricing = space, pricing
        self._possible: dict[object, BoolArray] = {}
        self._rests: dict[object, FloatArray] = {}
        self._leaves = any(o.activations for o in space.offloads)

    def seconds(
        self, group: Group, batch: int, m: int, variant: Variant, capacity: float, wanted: BoolArray | None = None
    ) -> FloatArray | None:
        """Least seconds that each pipeline of a variant recomputes in a step, float array [pipelines]; infinite where nothing fits.

        None where nothing needs to, or where activations may go to the host instead.

        Args:
            wanted: pipelines to look at, bool array [pipelines]; none = all.
        """
        if self._leaves or self.pricing.template.training.optimizer == "none":
            return None
        full = self._fullest_of(group.pp, m)
        if full is None:
            return None
        plain = self.pricing.table(group, batch, variant, "none")
        mine = np.ones(len(full.pipeline), dtype=bool) if wanted is None else wanted[full.pipeline]
        room = self._room(group, variant, m, capacity)
        kept = (plain.sharded or plain).kept + plain.logits
        if "none" in self.space.selections and (full.held @ kept <= room)[mine].all():
            return None
        found = self._least(group, batch, variant, full, room, mine)
        return self._spread(full, m * found, len(self.space.pipelines(group.pp, m)))

    def possible(self, group: Group, batch: int, m: int, variant: Variant, capacity: float) -> BoolArray:
        """Which pipelines of a variant may fit, whatever they recompute, bool array [pipelines]; nothing is priced for it.

        Variants share it where they keep the same.
        """
        key = (group, batch, m, *self.pricing.holding(variant), self.space.merges(variant), capacity)
        if key not in self._possible:
            self._possible[key] = self._fitting(group, batch, m, variant, capacity)
        return self._possible[key]

    def _fitting(self, group: Group, batch: int, m: int, variant: Variant, capacity: float) -> BoolArray:
        every, full = np.ones(len(self.space.pipelines(group.pp, m)), dtype=bool), self._fullest_of(group.pp, m)
        if full is None or self._leaves or self.pricing.template.training.optimizer == "none":
            return every
        room = self._room(group, variant, m, capacity)
        # Whatever else recomputes keeps the inputs of layers too, which is all that full recomputation keeps.
        fits: BoolArray = full.held @ self.pricing.held(group, batch, variant, "full") <= room
        if fits.any() and (not any(self.space._full) or self.space.merges(variant)):
            each = (full.held @ self.pricing.held(group, batch, variant, name) <= room for name in self.space.selections)
            fits = np.logical_or.reduce([np.zeros_like(fits), *each])
        every[full.pipeline] = fits
        return every

    @kept
    def _fullest_of(self, pp: int, m: int) -> Fullest | None:
        return Fullest.of(self.space, self.pricing, pp, m)

    def _room(self, group: Group, variant: Variant, m: int, capacity: float) -> FloatArray:
        """Bytes that the states of the layers of each pipeline's fullest rank leave."""
        whole = (capacity - self.pricing.outside_bytes(group)) / self.pricing.framework.allocator.fragmentation
        key = (group, variant.precision, m)
        if key not in self._rests:
            full, table = self._fullest_of(group.pp, m), self.pricing.weights(group, variant)
            assert full is not None  # where no rank is known to be fullest, nobody asks what it has left
            weights = full.owned @ table.dense, full.owned @ table.expert
            self._rests[key] = least_states(self.pricing, self.space, group, variant, weights)
        return whole * (1.0 + _ROUNDING) - self._rests[key]

    @staticmethod
    def _spread(full: Fullest, found: FloatArray, pipelines: int) -> FloatArray:
        every = np.zeros(pipelines)
        every[full.pipeline] = found
        return every

    def _least(self, group: Group, batch: int, variant: Variant, full: Fullest, room: FloatArray, wanted: BoolArray) -> FloatArray:
        """Seconds of each pipeline per micro-batch on the rank that recomputes least; of those not wanted 0.

        What fits is known from bytes, which many variants share; only recomputations that fit somewhere are priced.
        """
        found = np.where(wanted, np.inf, 0.0)
        for name in self.space.selections:
            # Nothing costs less than nothing.
            fits = (found > 0.0) & (full.held @ self.pricing.held(group, batch, variant, name) <= room)
            if name == "none":
                found[fits] = 0.0
            elif fits.any():
                plain, table = (self.pricing.table(group, batch, variant, each) for each in ("none", name))
                before, slack = self._passes(plain, full.counts)
                more = full.least(np.maximum(sum(self._passes(table, full.counts)) - before - slack, 0.0))
                found = np.where(fits, np.minimum(found, more), found)
        if any(self.space._full) and not self.space.merges(variant):
            left = room - full.held @ self.pricing.held(group, batch, variant, "none")
            found = np.minimum(found, self._by_layers(group, batch, variant, full, left, found > 0.0))
        return found

    def _by_layers(
        self, group: Group, batch: int, variant: Variant, full: Fullest, room: FloatArray, wanted: BoolArray
    ) -> FloatArray:
        """The same where so many first layers of every stage recompute as must.

        Args:
            room: bytes left without recomputation, below 0 where it does not fit, [P].
        """
        layers = self.pricing.kinds.layers
        held = [self.pricing.held(group, batch, variant, name) for name in ("none", "full")]
        spared = np.maximum(held[0] - held[1], 0.0)[:layers]
        missing = np.maximum(-room, 0.0)
        fits = wanted & (full.held[:, :layers] @ spared >= missing)
        if not fits.any():
            return np.where(wanted, np.inf, 0.0)
        plain, whole = (self.pricing.table(group, batch, variant, name) for name in ("none", "full"))
        count = np.ceil(missing / np.maximum(full.chunks * spared.max(initial=0.0), 1.0) - 1e-6)
        share = np.minimum(count / np.maximum(full.deepest, 1.0), 1.0)
        each = (whole.seconds[F] + whole.seconds[B] - plain.seconds[F] - plain.seconds[B])[:layers]
        slack = self._passes(plain, full.counts)[1]
        deep = full.counts[:, :layers].sum(axis=1)
        # A stage has no fewer of its layers recomputed than this share, the cheapest of its kinds.
        cheapest = full.least(deep * max(float(each.min()), 0.0))
        idle = -full.least(-slack)
        return np.where(fits, np.maximum(share * cheapest - idle, 0.0), np.where(wanted, np.inf, 0.0))

    @staticmethod
    def _passes(table: BlockTable, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of a forward and a backward of every class of stages on the device, and what the host takes beyond them."""
        device = [counts @ table.seconds[phase] for phase in (F, B)]
        host = [counts @ table.host[phase] for phase in (F, B)]
        return sum(device), sum(np.maximum(h - d, 0.0) for h, d in zip(host, device, strict=True))


__all__ = ["Fullest", "MemoryFloors"]


def least_states(
    pricing: Pricing, space: Space, group: Group, variant: Variant, weights: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Bytes in which the states of (dense, expert) weights rest at least, in any layout of `space`; none of adapters."""
    if pricing.template.training.trainable == "lora":
        return np.zeros_like(weights[0])
    parts, found = 1 if any(o.optimizer for o in space.offloads) else 2, []
    for state in space.shardings(group):
        dense, expert = (sum(per[:parts]) for per in pricing.state_bytes(group, variant, state, passing=group.pp == 1))
        more = 0.0
        if pricing.stays_gathered(group, state):
            own = pricing.per_weight(group, variant, state)
            more = own.gather + own.reduce
        found.append(weights[0] * (dense + more) + weights[1] * (expert + more))
    return np.asarray(np.min(found, axis=0))
