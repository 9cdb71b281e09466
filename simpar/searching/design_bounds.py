"""All layouts of one pipeline at once: bounds on time and memory of every recomputation x sharding of the states x offload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import FloatArray, IntArray
from simpar.result.gathers import beside_update
from simpar.searching import bounds
from simpar.searching.blocks import BlockTable, Gathered
from simpar.searching.choice import Choice, Offload, Pipeline, State
from simpar.searching.incumbents import Incumbents
from simpar.searching.memo import kept
from simpar.searching.open_layouts import Design, OpenLayouts, parents, with_parents
from simpar.searching.pricing import Pricing
from simpar.searching.shapes import shape_of
from simpar.searching.slow_ranks import Slow
from simpar.searching.space import Space
from simpar.searching.stages import Recomputations, StageBytes, Stages, stage_pairs
from simpar.searching.state_sharding import Cut, Shardings, StateBound, StateBytes

BoolArray = NDArray[np.bool_]
_LARGEST_MEMO = 20_000


@dataclass(frozen=True)
class Outlook:
    """What is known of a design before its recomputations and offloads are looked at.

    Attributes:
        columns: shardings whose states fit at rest, int array [D].
        least: seconds of each without recomputation, optimizer on the device and offloaded, float array [D, 2]: no layout of it
            is faster; infinite where it does not fit or is not in the space.
        sharding: what they add; None without any.
    """

    design: Design
    columns: IntArray
    least: FloatArray
    sharding: StateBound | None


class DesignBounds:
    """Makes design_bounds, with memos of what designs share."""

    def __init__(self, space: Space, pricing: Pricing, capacity: float) -> None:
        self.space, self.pricing, self.capacity = space, pricing, capacity
        self._recomputations: dict[object, Recomputations] = {}
        self._tables: dict[object, list[BlockTable]] = {}
        self._cuts: dict[object, Cut] = {}
        self._shardings: dict[object, Shardings] = {}
        self._bounds: dict[object, StateBound] = {}
        self._resting: dict[object, StateBytes] = {}
        self._peaks: dict[object, FloatArray] = {}
        self._stage_bytes: dict[object, StageBytes] = {}
        self._holds: dict[bytes, int] = {}
        self._outlooks: dict[tuple[Design, bytes], Outlook] = {}

    def recomputations(self, pipeline: Pipeline, pp: int, *, merges: bool = False) -> Recomputations:
        """What the stages of a pipeline may recompute (see `Space.merges`)."""
        deepest = self.space.deepest(pipeline, pp)
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
        key = (shape.stages, shape.ends_meet, pipeline.split, deepest, merges)
        if key not in self._recomputations:
            texts = tuple(self.space.recomputes(deepest, merges=merges))
            limits = [int(t[5:]) if t.startswith("full:") else None for t in texts]
            each = ["full" if t.startswith("full") else t for t in texts]
            names = tuple(dict.fromkeys(each))
            table = np.array([names.index(name) for name in each], dtype=np.int64)
            layers = self.pricing.pipelines.stage_layers(pipeline, pp)
            self._recomputations[key] = Recomputations(texts, names, table, Stages.of(self.pricing.kinds, layers, limits))
        return self._recomputations[key]

    def tables(self, design: Design, names: Sequence[str]) -> list[BlockTable]:
        """The block tables of these recomputations."""
        of = (design.group, design.batch, design.variant)
        if (key := (*of, *names)) not in self._tables:
            self._tables[key] = [self.pricing.table(*of, name) for name in names]
        return self._tables[key]

    def pipe(self, design: Design, again: Recomputations, tables: Sequence[BlockTable]) -> bounds.PipelineBound:
        """Chains of a design for every recomputation."""
        stages, slow = again.stages, self.pricing.slow_ranks.of(design.group)[0]
        shape = shape_of(design.group.pp, design.pipeline.virtual_stages, design.pipeline.schedule, slow)
        seconds = stages.seconds(tables, again.table)[:, :, stages.which]
        paired = stages.in_pairs(tables, again.table)[..., stages.which] if shape.style == "pairs" else seconds[None]
        pipeline, pp = (design.pipeline, design.group.pp)
        passes = self.pricing.pipelines.passes(pipeline, pp, design.m)
        sends = bounds.Sends(
            self.pricing.sends.seconds(design.group, design.batch, design.variant), self.pricing.pipelines.blocking(pipeline, pp),
            self.pricing.pipelines.sends_beside(pipeline, pp, design.m),
            *self.pricing.sends.loss(design.group, design.batch, design.variant, shape.style),
            self.pricing.pipelines.rank_blocks(pipeline, pp),
        )  # fmt: skip
        around = self._ways(pipeline, pp, design.m, slow)
        found = bounds.pipeline_bound(shape, passes, seconds, paired, design.m, sends, around)
        if not self.pricing.waits(shape.style):
            return found.alone()
        if (shape.style == "full" or shape.group(design.m)) and not (slow and shape.stages > pp):
            return found
        paths = self.pricing.pipelines.paths(pipeline, pp, design.m, slow)
        pairs = [self.pricing.pairs(design.group, design.batch, design.variant, name) for name in again.names]
        both = stage_pairs(pairs, tables, again.table, stages, np.asarray(paths.pairs.any(axis=0)))
        ways = paths.seconds(stages.seconds(tables, again.table), both, sends.seconds)
        return replace(found, ways=ways, first=paths.first, last=paths.last)

    @kept
    def _ways(self, pipeline: Pipeline, pp: int, m: int, slow: Slow) -> bounds.Ways:
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule, slow)
        beside = self.pricing.pipelines.sends_beside(pipeline, pp, m)
        return bounds.ways(shape, m, beside, blocking=self.pricing.pipelines.blocking(pipeline, pp))

    def outlook(self, design: Design) -> Outlook:
        """Which shardings of a design rest in memory, and how fast each can be at best."""
        rests = self._rests(design)
        # A front looks at a design again and again, under less and less memory.
        if (key := (design, rests.tobytes())) not in self._outlooks:
            if len(self._outlooks) > _LARGEST_MEMO:
                self._outlooks.clear()
            self._outlooks[key] = self._outlook(design, rests)
        return self._outlooks[key]

    def _outlook(self, design: Design, rests: BoolArray) -> Outlook:
        columns = np.flatnonzero(rests.any(axis=1))
        if not len(columns):
            return Outlook(design, columns, np.zeros((0, 2)), None)
        key = ("plain", design.shape.stages, design.pipeline.split)
        if key not in self._recomputations:
            stages = self.pricing.pipelines.plain_stages(design.pipeline, design.group.pp)
            self._recomputations[key] = Recomputations(("none",), ("none",), np.zeros(1, dtype=np.int64), stages)
        plain = self._recomputations[key]
        pipe = self.pipe(design, plain, self.tables(design, plain.names))
        sharding = self.state_bound(design, columns)
        least = bounds.combine(pipe, sharding)[:, 0].T
        return Outlook(design, columns, np.where(rests[columns], least, np.inf), sharding)

    def open_layouts(self, design: Design, incumbents: Incumbents, outlook: Outlook | None = None) -> OpenLayouts:
        """The layouts of a design that `incumbents` leave open."""
        again = self.recomputations(design.pipeline, design.group.pp, merges=self.space.merges(design.variant))
        states, offloads = self.space.states(design.group), self.space.offloads
        outlook = outlook or self.outlook(design)
        columns = outlook.columns
        inner = len(again.texts) * len(offloads)
        counts = np.array([(len(states) - len(columns)) * inner, 0, 0])
        late, beaten = self._hopeless(outlook.least.min(axis=1), np.zeros(len(columns)), incumbents)
        counts += [0, late.sum() * inner, beaten.sum() * inner]
        some = ~late & ~beaten
        columns, sharding = columns[some], outlook.sharding
        if sharding is None or not len(columns):
            return _empty(design, again, states, offloads, counts)
        sharding = sharding.take(np.flatnonzero(some))
        inner = len(columns) * len(offloads)
        tables = self.tables(design, again.names)
        pipe = self.pipe(design, again, tables)
        late, beaten = self._hopeless(pipe.least, np.zeros(len(pipe.least)), incumbents)
        rows = np.flatnonzero(~late & ~beaten)
        counts += [0, late.sum() * inner, beaten.sum() * inner]
        if not len(rows):
            return _empty(design, again, states, offloads, counts)
        time_s = self._times(design, again.take(rows), tables, pipe.take(rows), sharding)
        late, beaten = self._hopeless(time_s, np.zeros(time_s.shape), incumbents)
        hopeful = ~late & ~beaten
        counts += [0, late.sum(), beaten.sum()]
        # Only what may still win is asked for its memory.
        each, r, d = (np.flatnonzero(hopeful.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1)))
        if not len(each):
            return _empty(design, again, states, offloads, counts)
        rows, columns, time_s, hopeful = rows[r], columns[d], time_s[:, r][:, :, d], hopeful[:, r][:, :, d]
        need = np.full(time_s.shape, np.inf)
        need[each] = self.needs(design, again, tables, rows, columns, [offloads[k] for k in each.tolist()])
        fits = hopeful & (need <= self.capacity)
        late, beaten = self._hopeless(time_s, need, incumbents)
        alive = fits & ~late & ~beaten
        if incumbents.front or incumbents.by_memory:
            parent = np.full(alive.shape, -1)
        else:
            parent = parents(offloads, fits, sharding.moving_costs[d])
            alive &= with_parents(alive, parent)
        counts += [(hopeful & ~fits).sum(), (fits & late).sum(), (fits & ~late & ~alive).sum()]
        r, d = np.nonzero(alive.any(axis=0))
        return OpenLayouts(
            design, again.texts, states, offloads, rows[r] * len(states) + columns[d], time_s[:, r, d], need[:, r, d],
            alive[:, r, d], parent[:, r, d], tuple(counts.tolist()),
        )  # fmt: skip

    @kept
    def every_layout(self, design: Design) -> OpenLayouts:
        """The layouts of a design that fit, however slow."""
        return self.open_layouts(design, Incumbents(by_memory=True))

    @staticmethod
    def _hopeless(time_s: FloatArray, need: FloatArray, incumbents: Incumbents) -> tuple[BoolArray, BoolArray]:
        late = incumbents.late(time_s)
        return late, incumbents.beaten(time_s, need) & ~late

    def _times(
        self, design: Design, again: Recomputations, tables: Sequence[BlockTable], pipe: bounds.PipelineBound,
        sharding: StateBound,
    ) -> FloatArray:  # fmt: skip
        """Lower bounds on step times, [offloads, R, states]."""
        least = bounds.combine(pipe, sharding)
        found = {0.0: least}
        for share in {o.activations for o in self.space.offloads} - {0.0}:
            path = self._host_path(design, again, tables, pipe, share)
            found[share] = np.maximum(least, path[:, None] + sharding.end.T[:, None])
        return np.array([found[o.activations][int(o.optimizer)] for o in self.space.offloads])

    def _host_path(
        self, design: Design, again: Recomputations, tables: Sequence[BlockTable], pipe: bounds.PipelineBound, share: float
    ) -> FloatArray:
        """`bounds.host_path` of a share of the activations, [R]; of pairs, which move nothing, no time."""
        if design.shape.style == "pairs":
            return np.zeros(len(again.texts))
        stages = again.stages
        moved = (np.array([t.offloadable for t in tables])[again.table][:, None] * stages.counts).sum(axis=2)
        slow = self.pricing.slow_ranks.of(design.group)[0]
        shape = shape_of(design.group.pp, design.pipeline.virtual_stages, design.pipeline.schedule, slow)
        seconds = stages.seconds(tables, again.table)[:, :, stages.which] * shape.through
        turn = self.pricing.pipelines.backwards(design.pipeline, design.group.pp, design.m)
        return bounds.host_path(pipe, turn, seconds, share * self.pricing.host_seconds_per_byte * moved[:, stages.which])

    def cut(self, design: Design) -> tuple[object, Cut]:
        """How a design cuts the layers over ranks, and its name."""
        group, pipeline, shape = design.group, design.pipeline, design.shape
        key = (group, design.variant.precision, shape.stages, pipeline.split, shape.stage_to_rank, shape.style)
        if key not in self._cuts:
            self._cuts[key] = Cut.of(self.pricing, group, design.variant, pipeline)
        return key, self._cuts[key]

    def shardings(self, design: Design) -> Shardings:
        """All shardings of a design's mesh."""
        key = (design.group, design.variant.precision)
        if key not in self._shardings:
            self._shardings[key] = Shardings(self.pricing, design.group, design.variant, self.space.states(design.group))
        return self._shardings[key]

    def state_bound(self, design: Design, columns: IntArray) -> StateBound:
        """Bounds of the shardings that rest in memory, shared by all micro-batches, variants and schedules of one cut."""
        (name, cut), shardings = self.cut(design), self.shardings(design)
        # Only where data-parallel traffic repeats with every micro-batch does their number matter.
        key = (name, columns.tobytes(), design.m if shardings.reduces_always.any() else 0)
        if key not in self._bounds:
            self._bounds[key] = shardings.seconds(cut, design.m, columns)
        found = self._bounds[key]
        return found if self.pricing.waits(design.shape.style) else found.alone()

    def resting(self, design: Design) -> StateBytes:
        """Resting bytes of all shardings."""
        name, cut = self.cut(design)
        key = (name, design.m == 1 and design.group.pp == 1)
        if key not in self._resting:
            self._resting[key] = self.shardings(design).bytes(cut, design.m)
        return self._resting[key]

    # -- memory --------------------------------------------------------------------------------------------------------

    def needs(
        self, design: Design, again: Recomputations, tables: Sequence[BlockTable], rows: IntArray, columns: IntArray,
        offloads: Sequence[Offload],
    ) -> FloatArray:  # fmt: skip
        """Peak use of the fullest device, [offloads, rows, columns]: what is allocated, or a lower bound of it.

        Without offloaded activations it is the peak itself where gradients rest in memory; the allocator may reserve more.
        """
        group, every, sharding = design.group, self.space.states(design.group), self.resting(design)
        states = [every[index] for index in columns.tolist()]
        outside, fragmentation = self.pricing.outside_bytes(group), self.pricing.framework.allocator.fragmentation
        modes = [(self.pricing.gathered(group, design.variant, state), state.zero_stage == 3) for state in states]
        found = np.empty((len(offloads), len(rows), len(states)))
        shares = dict.fromkeys(o.activations for o in offloads)
        for (gathered, sharded), share in product(set(modes), shares):
            which = np.flatnonzero([mode == (gathered, sharded) for mode in modes])
            peaks = self.activation_peaks(design, again, tables, gathered, sharded, share)
            peaks = peaks + self._kept_casts(design, again, states[which[0]])
            own, peaks = columns[which], peaks[rows]
            for index in (i for i, o in enumerate(offloads) if o.activations == share):
                resting = sharding.resting[own] + (0.0 if offloads[index].optimizer else 1.0) * sharding.optimizer[own]
                found[index][:, which] = bounds.device_bytes(peaks, resting, fragmentation, outside)
        return found

    def allocated(self, choice: Choice) -> FloatArray | None:
        """Peak allocated bytes of every rank, or None where that depends on time: offloaded activations, gradients that pass."""
        group, state = choice.group, choice.state
        m = self.space.template.training.global_batch_size // (choice.micro_batch_size * group.dp)
        passing = m == 1 and group.pp == 1 and not self.pricing.framework.optimizer.persist(state.zero_stage)
        data = self.pricing.framework.data
        passing |= data.fsdp_fp32 and state.zero_stage == 3
        passing |= group.pp == 1 and data.gradient_buffers_late and state.zero_stage in data.gradient_buffers[:-1]
        if choice.offload.activations or passing:
            return None
        design = Design(group, choice.micro_batch_size, m, choice.variant, choice.pipeline)
        again = self.recomputations(choice.pipeline, group.pp, merges=self.space.merges(choice.variant))
        sharding, mode = self.resting(design), (self.pricing.gathered(group, choice.variant, state), state.zero_stage == 3)
        peaks = self.activation_peaks(design, again, self.tables(design, again.names), *mode, 0.0)
        at = self.space.states(group).index(state)
        optimizer = 0.0 if choice.offload.optimizer else sharding.optimizer[at]
        share = self.pricing.update_share(group, choice.variant, state) * optimizer
        trained = self.shardings(design).trained(self.cut(design)[1])
        own = self.pricing.framework.optimizer.autocast  # whether casts rest depends on what is recomputed
        layout = self.pricing.layout(choice) if own else self.pricing.state_layout(group, choice.variant, state).layout
        update = np.array([beside_update(layout, *each) for each in zip(share + 0.0 * trained, trained, strict=True)])
        row = again.texts.index(choice.recompute)
        resting = sharding.resting[at] + self._kept_casts(design, again, state)[row]
        return np.asarray(np.maximum(peaks[row], update) + resting + optimizer)

    def _kept_casts(self, design: Design, again: Recomputations, state: State) -> FloatArray:
        """Bytes of autocast's copies of weights, [R, ranks]."""
        each = self.pricing.kept_casts(design.group, design.variant, state)
        weights = self.shardings(design).trained(self.cut(design)[1])
        return np.outer(np.array([each if text == "none" else 0.0 for text in again.texts]), weights)

    def _rests(self, design: Design) -> BoolArray:
        """Under which shardings the resting states fit, with the optimizer on the device and offloaded, [states, 2]."""
        sharding, asked = self.resting(design), [any(o.optimizer is kind for o in self.space.offloads) for kind in (False, True)]
        rank = np.stack([(sharding.resting + sharding.optimizer).max(axis=1), sharding.resting.max(axis=1)], axis=1)
        need = rank * self.pricing.framework.allocator.fragmentation + self.pricing.outside_bytes(design.group)
        return np.asarray((need <= self.capacity) & asked)

    def activation_peaks(
        self, design: Design, again: Recomputations, tables: Sequence[BlockTable], gathered: Gathered | None, sharded: bool,
        away: float,
    ) -> FloatArray:  # fmt: skip
        """Peak bytes of each rank beyond the resting state, [R, ranks]; a lower bound where a fraction is `away`."""
        group, pipeline, shape = design.group, design.pipeline, design.shape
        sent = self.pricing.sends.bytes_kept(group, design.batch, design.variant)
        buffers = self.pricing.sends.buffers(group, design.batch, design.variant, pipeline, design.m)
        held = tuple(self._holds.setdefault(t.holds, len(self._holds)) for t in tables)
        of = (held, again.names, shape.stages, shape.ends_meet, pipeline.split, gathered, sharded, sent)
        key = (of, group.pp, pipeline.schedule, design.m, away, buffers is None or buffers.tobytes())
        if key not in self._peaks:
            if len(self._peaks) > _LARGEST_MEMO:
                self._peaks.clear()
                self._stage_bytes.clear()
            if of not in self._stage_bytes:
                self._stage_bytes[of] = again.stages.bytes(tables, again.table, gathered, sent, sharded=sharded)
            found = self.pricing.pipelines.in_flight(pipeline, group.pp, design.m).peaks(self._stage_bytes[of], away)
            self._peaks[key] = found if buffers is None else found + buffers
        return self._peaks[key]


def _empty(
    design: Design, again: Recomputations, states: tuple[State, ...], offloads: tuple[Offload, ...], counts: np.ndarray
) -> OpenLayouts:
    none, index = np.zeros((len(offloads), 0)), np.zeros((len(offloads), 0), dtype=np.int64)
    return OpenLayouts(design, again.texts, states, offloads, index[0], none, none, none > 0, index, tuple(counts.tolist()))


__all__ = ["DesignBounds", "Outlook", "Recomputations"]
