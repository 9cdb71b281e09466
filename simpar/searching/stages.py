"""The stages of one cut of the layers under many recomputations at once: seconds, bytes and weights as arrays.

Most stages of a cut are alike (the same kinds of blocks in the same order), so everything is computed once per class of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simpar.costs.pricer import LayoutPricer
from simpar.parallel.pipeline import StageLayers
from simpar.program.program import FloatArray, IntArray
from simpar.result.gathers import full_buckets
from simpar.searching.blocks import B, BlockTable, F, Gathered, Kinds
from simpar.searching.choice import Group, Variant


@dataclass(frozen=True)
class StageBytes:
    """Bytes per micro-batch of classes of stages, float arrays [recomputations, classes].

    Attributes:
        kept: from the forward to the backward.
        deferred: from the input gradient to the weight gradient, where the two are apart.
        forward: beyond what is kept, while a forward goes through the stage.
        backward: beyond what is kept, while a backward goes through the stage and frees as it goes.
        input: the same of an input gradient that leaves what weight gradients need.
        outputs: of every forward run so far, to the end of the step.
    """

    kept: FloatArray
    deferred: FloatArray
    forward: FloatArray
    backward: FloatArray
    input: FloatArray
    outputs: FloatArray


@dataclass(frozen=True)
class Stages:
    """A cut of the layers under R recomputations.

    Attributes:
        which: class of each stage, int array [stages].
        orders: of each class, kinds of its blocks in order, int array [R, blocks].
        counts: blocks of each kind, int array [R, classes, kinds].
        ends: whether a class has the last stage.
    """

    which: IntArray
    orders: tuple[IntArray, ...]
    counts: IntArray
    ends: tuple[bool, ...]

    @classmethod
    def of(cls, kinds: Kinds, stages: Sequence[StageLayers], limits: Sequence[int | None]) -> Stages:
        """The cut `stages`, where of each stage only the first `limit` layers recompute (None: all)."""
        classes: dict[tuple[tuple[int, ...], bool], int] = {}
        which, samples = [], []
        for stage in stages:
            name = (tuple(kinds.sequence(stage, None)), stage.head)
            if name not in classes:
                classes[name] = len(classes)
                samples.append(stage)
            which.append(classes[name])
        orders = tuple(np.array([kinds.sequence(s, limit) for limit in limits], dtype=np.int64) for s in samples)
        counts = np.zeros((len(limits), len(samples), kinds.count), dtype=np.int64)
        for index, order in enumerate(orders):
            counts[:, index] = (order[:, :, None] == np.arange(kinds.count)).sum(axis=1)
        return cls(np.array(which, dtype=np.int64), orders, counts, tuple(s.head for s in samples))

    def take(self, rows: IntArray) -> Stages:
        """Some of the recomputations."""
        return Stages(self.which, tuple(o[rows] for o in self.orders), self.counts[rows], self.ends)

    def seconds(self, tables: Sequence[BlockTable], table: IntArray) -> FloatArray:
        """Durations [R, 4 phases, classes]: the device or the host, whichever takes longer over the stage, and the host's own.

        Args:
            table: int array [R], which of `tables` each recomputation has.
        """
        own = tables[0].pass_s * (self.counts.sum(axis=2) > 0)
        counts = self.counts.transpose(0, 2, 1)
        device = np.array([t.seconds for t in tables])[table] @ counts
        host = np.array([t.host for t in tables])[table] @ counts
        return np.asarray(np.maximum(device, host) + own[:, None, :])

    def in_pairs(self, tables: Sequence[BlockTable], table: IntArray) -> FloatArray:
        """What a pair takes no less of than both its passes, [2, R, 4 phases, classes]: compute kernels, and the host's time.

        Apart, as where the host takes longer than one of the passes, it may still take less than both.
        """
        own = tables[0].pass_s * (self.counts.sum(axis=2) > 0)
        both = np.array([[t.compute for t in tables], [t.host for t in tables]])[:, table] @ self.counts.transpose(0, 2, 1)
        return np.asarray(both + own[:, None, :])

    def bytes(
        self, tables: Sequence[BlockTable], table: IntArray, gathered: Gathered | None, sent: float, *, sharded: bool
    ) -> StageBytes:
        """What stages hold.

        Args:
            gathered: weights that come and go with their blocks.
            sent: bytes of a stage's output where it stays until the backward.
            sharded: weights are fully sharded.
        """
        columns = [
            _class_bytes(order, last, tables, table, gathered, sent, sharded=sharded)
            for order, last in zip(self.orders, self.ends, strict=True)
        ]
        return StageBytes(*(np.stack(column, axis=1) for column in zip(*columns, strict=True)))


@dataclass(frozen=True)
class Recomputations:
    """What the stages of a cut may recompute.

    Attributes:
        texts: of each recomputation.
        names: block tables that they need; table: int array [R], which of them each needs.
        stages: the cut under all of them.
    """

    texts: tuple[str, ...]
    names: tuple[str, ...]
    table: IntArray
    stages: Stages

    def take(self, rows: IntArray) -> Recomputations:
        """Some of them, with all block tables."""
        texts = tuple(self.texts[row] for row in rows.tolist())
        return Recomputations(texts, self.names, self.table[rows], self.stages.take(rows))


def _class_bytes(
    order: IntArray, last: bool, tables: Sequence[BlockTable], table: IntArray, gathered: Gathered | None, sent: float, *,
    sharded: bool,
) -> tuple[FloatArray, ...]:  # fmt: skip
    """The columns of `StageBytes` for one class, [R] each; the rules of `result.memory` over all recomputations at once."""
    rows = len(table)
    tables = [(t.sharded or t) if sharded else t for t in tables]
    if order.shape[1] == 0:
        zero = np.zeros(rows)
        return zero, zero, zero, zero, zero, zero

    def of(name: str) -> FloatArray:
        return np.asarray(np.array([getattr(t, name) for t in tables])[table[:, None], order])

    kept, logits, working, deferred = of("kept"), of("logits"), of("working"), of("deferred")
    passing = of("transient_sharded" if sharded else "transient")
    forward, stays = np.zeros_like(kept), kept + logits
    if not last:
        stays[:, -1] += sent
    freed = stays
    if gathered is not None:
        weights, root = of("dense") + of("expert"), of("root")
        trained = of("lora") if gathered.adapters else weights
        passes = weights * np.where(working > 0.0, 3.0, 2.0)
        forward, begin, end = _gathers(weights, trained, root, logits[:, -1] > 0, passes, gathered)
        passing = np.maximum(passing + begin, end - kept - logits - working)
        freed = stays - 2.0 * of("held")
    return (
        stays.sum(axis=1), deferred.sum(axis=1), _worst(forward, stays), _worst(working + passing, freed),
        _worst(working + passing, stays - deferred), of("outputs").sum(axis=1),
    )  # fmt: skip


def _worst(extra: FloatArray, freed: FloatArray) -> FloatArray:
    """Most bytes beyond what a stage keeps, [R]: `extra` while a block runs, without what blocks after it keep."""
    behind = np.cumsum(freed[:, ::-1], axis=1)[:, ::-1] - freed
    return np.asarray((extra - behind).max(axis=1))


def _gathers(
    held: FloatArray, trained: FloatArray, root: FloatArray, loss: np.ndarray, passes: FloatArray, gathered: Gathered
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Gathered weights and gradients [R, blocks] in the forward, at the begin and at the end of each block's backward.

    Args:
        passes: weights that all passes over a block meet.
    """
    own, rooted = 2.0 * trained, root > 0.0
    own[:, -1] *= np.where(loss, gathered.head / 2.0, 1.0)
    # Gradients of the head wait for those of the embedding.
    waiting = np.where(rooted, own, 0.0)[:, 1:].sum(axis=1, keepdims=True) * (np.arange(held.shape[1]) < held.shape[1] - 1)
    late = np.where(rooted, trained, 0.0).sum(axis=1)
    held, trained = np.where(rooted, 0.0, held), np.where(rooted, 0.0, trained)
    trained[:, 0] += np.where(rooted[:, 0], late, 0.0)
    stay = gathered.stays | (np.cumsum(passes[:, ::-1], axis=1)[:, ::-1] - passes < gathered.reuse)
    total, resting = (np.pad(np.cumsum(each, axis=1), ((0, 0), (1, 0))) for each in (held, held * stay))
    count, index = held.shape[1], np.arange(held.shape[1])
    whole = gathered.gather * root.sum(axis=1, keepdims=True)
    near = np.maximum(index - gathered.ahead, 0)
    forward = whole + gathered.gather * (
        resting[:, index] + total[:, np.minimum(index + gathered.ahead + 1, count)] - total[:, index]
    )
    weights = whole + gathered.gather * (resting[:, near] + total[:, index + 1] - total[:, near])
    behind, alone = np.concatenate([trained[:, 1:], np.zeros((len(held), 1))], axis=1), trained
    if gathered.bucket:
        behind, alone = np.array([full_buckets(row, gathered.bucket) for row in trained.tolist()]), np.zeros_like(trained)
    behind = gathered.reduce * behind
    begin = weights + behind + waiting
    # Nothing is prefetched before the loss is through.
    at_loss = whole[:, 0] + gathered.gather * (resting[:, -2] + held[:, -1])
    begin[:, -1] = np.where(loss, at_loss, begin[:, -1])
    end = weights + waiting + own + np.maximum(behind, gathered.reduce * alone)
    return forward, begin, end


if TYPE_CHECKING:
    from simpar.searching.pricing import Pricing


class Pairs:
    """Of all blocks of a variant of a mesh under one recomputation, each priced when it is first asked for.

    Attributes:
        known: seconds that were asked for, float array [kinds, kinds]; the rest is not a number.
    """

    def __init__(self, pricing: Pricing, group: Group, batch: int, variant: Variant, recompute: str) -> None:
        order = pricing.orders(variant)[-1]
        layouts = [pricing.probe(group, batch, variant, recompute, state, order) for state in pricing.kinds_of_states(variant)]
        self._pricers = [LayoutPricer(layout, pricing.kernels, pricing.collectives) for layout in layouts]
        self._blocks = [{k: each.split(b, o) for k, (b, o, _) in pricing.locals(each).items()} for each in layouts]
        self.known = np.full((pricing.kinds.count, pricing.kinds.count), np.nan)

    def seconds(self, forward: int, backward: int) -> float:
        """Seconds of two blocks of these kinds; the least of any sharding of the weights."""
        each = (p.pair(own[forward], own[backward]).seconds for p, own in zip(self._pricers, self._blocks, strict=True))
        self.known[forward, backward] = found = min(each)
        return found


def stage_pairs(
    pairs: Sequence[Pairs], tables: Sequence[BlockTable], table: IntArray, stages: Stages, asked: np.ndarray
) -> FloatArray:
    """Seconds of a forward of one class of stages beside a backward of another, [R, C, C]; 0 where not asked.

    Blocks run two by two in the order in which they meet, then what one pass has more.

    Args:
        pairs, tables: of blocks under each kind of recomputation; table: int array [R], which of these each of `stages` has.
        asked: bool array [C, C].
    """
    found = np.zeros((len(table), *asked.shape))
    known, alone = np.array([each.known for each in pairs]), np.array([each.seconds for each in tables])
    own, pass_s = table[:, None], np.array([each.pass_s for each in tables])[table]
    for f, b in zip(*np.nonzero(asked), strict=True):
        forward, backward = stages.orders[f], stages.orders[b][:, ::-1]
        common = min(forward.shape[1], backward.shape[1])
        met = np.broadcast_arrays(own, forward[:, :common], backward[:, :common])
        unknown = np.isnan(known[tuple(met)])
        for name, one, other in {*zip(*(each[unknown].tolist() for each in met), strict=True)}:
            known[name, one, other] = pairs[name].seconds(one, other)
        rest = alone[own, F, forward[:, common:]].sum(axis=1) + alone[own, B, backward[:, common:]].sum(axis=1)
        found[:, f, b] = known[tuple(met)].sum(axis=1) + rest + 2.0 * pass_s * bool(common)
    return found


__all__ = ["Pairs", "Recomputations", "StageBytes", "Stages", "stage_pairs"]
