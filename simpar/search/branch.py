"""Branch and bound over meshes, variants, pipelines and the rest, best bound first; exact, with the account of it.

A node of the tree is a set of layouts with a lower bound on their step times. The node with the least bound is opened next:
a mesh and micro-batch into variants, a variant into pipelines, a pipeline into layouts (bounds and memory of all of them in one
numpy call), layouts into their longest path, and what still can win into SimPy. When the least bound left is not below the
value to beat, nothing left can win, and the best is proven.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpar.program.program import FloatArray
from simpar.search import bounds
from simpar.search.blocks import BlockTable, Composition
from simpar.search.choice import Choice, Group, Offload, Pipeline, State, Variant
from simpar.search.pricing import Pricing
from simpar.search.shapes import shape_of, style_of
from simpar.search.space import Space
from simpar.search.tiers import Tiers

MEMORY, BOUND, DOMINATED, SIMULATED_MEMORY = "does not fit the memory", "cannot beat the best", "needs less offload", "does not fit when simulated"
BATCH = 64
_SLACK = 1e-9
"""Relative slack of bound comparisons, for sums in another order."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A layout that was simulated."""

    choice: Choice
    step_time_s: float
    device_bytes: float


@dataclass
class Account:
    """Where every layout of the space went."""

    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Account) -> None:
        """Add another part's account."""
        self.rejected.update(other.rejected)
        self.evaluated.update(other.evaluated)


@dataclass
class Progress:
    """What a search reports while it runs."""

    incumbent: Scored | None
    bound: float
    open_nodes: int
    simulated: int
    seconds: float

    @property
    def gap(self) -> float:
        """(incumbent - bound) / incumbent; infinite without an incumbent."""
        if self.incumbent is None:
            return float("inf")
        return max(0.0, 1.0 - self.bound / self.incumbent.step_time_s)


class Branch:
    """The search over some meshes of a space."""

    def __init__(
        self,
        space: Space,
        *,
        keep: int = 10,
        pricing: Pricing | None = None,
        on_scored: Callable[[Scored], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        largest_s: float = float("inf"),
        least_headroom: float = 0.0,
    ) -> None:
        self.space = space
        self.pricing = pricing or Pricing(space)
        self.tiers = Tiers(self.pricing)
        self.keep = keep
        self.account = Account()
        self.best: list[Scored] = []
        self.on_scored, self.on_progress = on_scored, on_progress
        self.largest_s = largest_s
        self.capacity = space.template.hardware.gpu.memory.value - least_headroom
        self.heap: list[tuple[float, int, str, Any, int]] = []
        self._tick = itertools.count()
        self._cuts: dict[object, Any] = {}
        self._started = time.monotonic()
        self._state_bounds: dict[object, bounds.StateBound] = {}

    # -- the tree ----------------------------------------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """What a layout must beat."""
        worst = self.best[-1].step_time_s if len(self.best) >= self.keep else float("inf")
        return min(worst, self.largest_s)

    def push(self, bound: float, kind: str, payload: Any, count: int) -> None:
        """A set of `count` layouts, none faster than `bound`."""
        if bound * (1.0 - _SLACK) >= self.cutoff:
            self.account.rejected[BOUND] += count
        else:
            heapq.heappush(self.heap, (bound, next(self._tick), kind, payload, count))

    def run(self, groups: Sequence[Group] | None = None) -> None:
        """Search until nothing can beat the best."""
        for group in self.space.groups if groups is None else groups:
            for batch, m in self.space.micro_batches(group):
                self.push(0.0, "mesh", (group, batch, m), self.space.count(group, m))
        openers: dict[str, Callable[[float, Any, int], None]] = {
            "mesh": self.open_mesh, "crude": self.open_crude, "variant": self.open_variant, "pipeline": self.open_pipeline,
            "layouts": self.open_layouts, "undercut": self.open_undercut, "layout": self.open_layout,
        }  # fmt: skip
        while self.heap:
            self.account.evaluated["longest_path"] = self.tiers.swept
            bound, _, kind, payload, count = heapq.heappop(self.heap)
            if bound * (1.0 - _SLACK) >= self.cutoff:
                self.account.rejected[BOUND] += count + sum(entry[4] for entry in self.heap)
                self.heap.clear()
                break
            openers[kind](bound, payload, count)
            if self.on_progress is not None:
                best = self.best[0] if self.best else None
                self.on_progress(
                    Progress(best, bound, len(self.heap), self.account.evaluated["discrete_event"], time.monotonic() - self._started)
                )

    # -- mesh and micro-batch ------------------------------------------------------------------------------------------

    def open_mesh(self, bound: float, payload: tuple[Group, int, int], count: int) -> None:
        """Too large for the memory whatever else is chosen? Else bound it by its compute."""
        del bound
        group, batch, m = payload
        if not count:
            return
        if self.least_bytes(group) > self.capacity:
            self.account.rejected[MEMORY] += count
            return
        floor = self.pricing.compute_floor(group, batch)
        per_kind = floor.sum(axis=0)
        total = float(per_kind[self._all_blocks()].sum())
        self.push(m * total / group.pp, "crude", payload, count)

    def _all_blocks(self) -> list[int]:
        if "all" not in self._cuts:
            kinds = self.pricing.kinds
            found = [k + kinds.layers for k in kinds.layer]
            found += [k for k in (kinds.embedding, kinds.head) if k >= 0]
            found += [k for k in (kinds.mtp, kinds.mtp_head) if k >= 0] * kinds.mtp_count
            self._cuts["all"] = found
        return list(self._cuts["all"])

    def least_bytes(self, group: Group) -> float:
        """Bytes of the average rank under the thinnest spread, without any activation."""
        key = ("least", group)
        if key not in self._cuts:
            variant = self.space.variants(group)[0]
            table = self.pricing.table(group, 1, variant, "none", split=False)
            blocks = self._all_blocks()
            dense, expert = float(table.dense[blocks].sum()), float(table.expert[blocks].sum())
            layout = self.pricing.state_layout(group, variant, self.space.states(group)[0]).layout
            dense -= layout.tied_extra
            offloaded = any(o.optimizer for o in self.space.offloads)
            least = float("inf")
            for state in self.space.states(group):
                per_dense, per_expert = self.pricing.state_bytes(group, variant, state)
                column = slice(0, 1) if offloaded else slice(0, 2)
                least = min(least, dense * sum(per_dense[column]) + expert * sum(per_expert[column]))
            spec = self.pricing.framework
            self._cuts[key] = least / group.pp * spec.fragmentation + self.outside_bytes(group)
        return float(self._cuts[key])

    def outside_bytes(self, group: Group) -> float:
        """Context and communicators of one rank."""
        spec = self.pricing.framework
        sizes = (group.tp, group.cp, group.pp, group.dp * group.cp, group.ep)
        return float(spec.context_bytes + sum(s > 1 for s in sizes) * spec.nccl_bytes_per_group)

    # -- variants ------------------------------------------------------------------------------------------------------

    def open_crude(self, bound: float, payload: tuple[Group, int, int], count: int) -> None:
        """Bound every variant over every pipeline by serial work."""
        del bound, count
        group, batch, m = payload
        pipelines = self.space.pipelines(group.pp, m)
        if not pipelines:
            return
        variants = self.space.variants(group)
        floors = np.array([self.pricing.floor(group, batch, v) for v in variants])
        least = np.full(len(variants), np.inf)
        for whole, before, tails, split in self._stacks(group.pp, pipelines):
            forward = floors[:, 0] if split != "pairs" else floors[:, 3]
            backward = floors[:, 1] if split == "full" else floors[:, 2]
            found = before @ forward.T + m * (whole @ (forward + backward).T)
            if tails:
                found = found + before @ backward.T
            least = np.minimum(least, found.max(axis=1).min(axis=0))
        each = self.space.count(group, m) // len(variants)
        for variant, value in zip(variants, least, strict=True):
            self.push(float(value), "variant", (group, batch, m, variant), each)

    def _stacks(self, pp: int, pipelines: tuple[Pipeline, ...]) -> list[tuple[FloatArray, FloatArray, bool, str]]:
        """Distinct cuts of the pipelines: blocks per rank, blocks before it, as [cuts, ranks, kinds]."""
        key = (pp, pipelines)
        if key not in self._cuts:
            rows: dict[str, dict[object, tuple[FloatArray, FloatArray]]] = {}
            for pipeline in pipelines:
                shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
                name = (shape.stages, pipeline.split, shape.stage_to_rank)
                table = rows.setdefault(shape.style, {})
                if name not in table:
                    counts = self.pricing.composition(pipeline, pp, 0).counts
                    table[name] = (shape.share @ counts, shape.before @ counts)
            self._cuts[key] = [
                (np.array([r[0] for r in table.values()]), np.array([r[1] for r in table.values()]), style == "full", style)
                for style, table in rows.items()
            ]
        return list(self._cuts[key])

    # -- pipelines -----------------------------------------------------------------------------------------------------

    def open_variant(self, bound: float, payload: tuple[Group, int, int, Variant], count: int) -> None:
        """Price the blocks of a variant exactly and bound every pipeline."""
        del bound, count
        group, batch, m, variant = payload
        send = self.pricing.send(group, batch, variant)
        inner = len(self.space.states(group)) * len(self.space.offloads)
        for pipeline in self.space.pipelines(group.pp, m):
            style = style_of(pipeline)
            table = self.pricing.table(group, batch, variant, "none", split=style != "full")
            composition = self.pricing.composition(pipeline, group.pp, 0)
            pipe = self._pipe(group, pipeline, [(table, composition)], m, send)
            count = self.space.recompute_count(group.pp, pipeline) * inner
            self.push(float(pipe.least[0]), "pipeline", (group, batch, m, variant, pipeline), count)

    def _pipe(
        self, group: Group, pipeline: Pipeline, items: Sequence[tuple[BlockTable, Composition]], m: int, send: float
    ) -> bounds.PipelineBound:
        shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
        seconds = np.array([c.seconds(t) for t, c in items])
        compute = np.array([c.compute(t) for t, c in items]) if shape.style == "pairs" else seconds
        return bounds.pipeline_bound(shape, seconds, compute, m, send, blocking=self.pricing.blocking(pipeline, group.pp))

    # -- layouts -------------------------------------------------------------------------------------------------------

    def open_pipeline(self, bound: float, payload: tuple[Group, int, int, Variant, Pipeline], count: int) -> None:
        """Bounds and memory of every recomputation x spread x offload at once."""
        del bound
        group, batch, m, variant, pipeline = payload
        recomputes = self.space.recomputes(self.space.deepest(pipeline, group.pp))
        states, offloads = self.space.states(group), self.space.offloads
        split = style_of(pipeline) != "full"
        items = []
        for text in recomputes:
            limit = int(text[5:]) if text.startswith("full:") else None
            table = self.pricing.table(group, batch, variant, text, split=split)
            items.append((table, self.pricing.composition(pipeline, group.pp, limit)))
        send = self.pricing.send(group, batch, variant)
        pipe = self._pipe(group, pipeline, items, m, send)
        spread = self.state_bound(group, variant, pipeline, m)
        outside = self.outside_bytes(group)
        times, needs = [], []
        for offload in offloads:
            peaks = bounds.activation_peaks(self.pricing, group, pipeline, m, items, offload.activations)
            found = bounds.combine(pipe, spread, int(offload.optimizer))
            if offload.activations:
                found = np.maximum(found, self._host_load(group, pipeline, items, m, offload)[:, None])
            times.append(found)
            needs.append(bounds.device_bytes(self.pricing, peaks, spread, offload, outside))
        time_s, need = np.array(times), np.array(needs)  # [offloads, recomputes, states]
        self.account.evaluated["bounds"] += time_s.size
        fits = need <= self.capacity
        dominated = self._dominated(offloads, fits, time_s)
        self.account.rejected[MEMORY] += int((~fits).sum())
        self.account.rejected[DOMINATED] += int(dominated.sum())
        open_ = fits & ~dominated
        beaten = open_ & (time_s * (1.0 - _SLACK) >= self.cutoff)
        self.account.rejected[BOUND] += int(beaten.sum())
        left = np.flatnonzero((open_ & ~beaten).ravel())
        if len(left):
            values = time_s.ravel()[left]
            order = left[np.argsort(values, kind="stable")]
            key = (group, batch, variant, pipeline, recomputes, states, offloads)
            self._push_layouts(key, order, time_s.ravel(), need.ravel(), 0)

    def _push_layouts(self, key: Any, order: np.ndarray, time_s: FloatArray, need: FloatArray, first: int) -> None:
        if first < len(order):
            self.push(float(time_s[order[first]]), "layouts", (key, order, time_s, need, first), len(order) - first)

    def _host_load(
        self, group: Group, pipeline: Pipeline, items: Sequence[tuple[BlockTable, Composition]], m: int, offload: Offload
    ) -> FloatArray:
        """Seconds that the busiest host link is busy with activations going one way, [R]."""
        shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
        kept = np.array([c.counts @ t.kept for t, c in items])
        return np.asarray((m * offload.activations * self.pricing.host_seconds_per_byte * (kept @ shape.share.T)).max(axis=1))

    def state_bound(self, group: Group, variant: Variant, pipeline: Pipeline, m: int) -> bounds.StateBound:
        """Bounds of the states' spreads, shared by all micro-batches, variants and schedules of one cut."""
        shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
        key = (group, variant.precision, shape.stages, pipeline.split, shape.stage_to_rank, shape.style, m if group.pp == 1 else 0)
        if key not in self._state_bounds:
            states = self.space.states(group)
            self._state_bounds[key] = bounds.state_bound(self.pricing, group, variant, states, pipeline, m)
        return self._state_bounds[key]

    def _dominated(self, offloads: Sequence[Offload], fits: np.ndarray, time_s: FloatArray) -> np.ndarray:
        """Layouts that move to the host what fits on the device: copies only add waiting."""
        found = np.zeros_like(fits)
        for i, more in enumerate(offloads):
            for j, less in enumerate(offloads):
                same = less.optimizer == more.optimizer and less.activations == 0.0 < more.activations
                moved = less.activations == more.activations and less.optimizer < more.optimizer
                if same or moved:
                    # A lower bound is not a fit: only what surely fits dominates.
                    sure = fits[j] if less.activations == 0.0 else np.zeros_like(fits[j])
                    found[i] |= sure & fits[i] & (time_s[j] <= time_s[i])
        return found

    def open_layouts(self, bound: float, payload: tuple[Any, np.ndarray, FloatArray, FloatArray, int], count: int) -> None:
        """The longest path of the next few layouts of a pipeline."""
        del bound, count
        key, order, time_s, need, first = payload
        cutoff = self.cutoff
        take = [i for i in order[first : first + BATCH] if time_s[i] * (1.0 - _SLACK) < cutoff]
        choices = [self.choice(key, int(i)) for i in take]
        for choice, value, only_bound, index in zip(choices, *self.tiers.longest_paths(choices), take, strict=True):
            kind = "undercut" if only_bound else "layout"
            self.push(max(float(value), float(time_s[index])), kind, (choice, float(need[index])), 1)
        done = first + len(take)
        if len(take) < min(BATCH, len(order) - first):
            self.account.rejected[BOUND] += len(order) - done
        else:
            self._push_layouts(key, order, time_s, need, done)

    def open_undercut(self, bound: float, payload: tuple[Choice, float], count: int) -> None:
        """A layout that another undercuts in every price still is among the best: its own longest path."""
        self.push(max(bound, self.tiers.longest_path(payload[0])), "layout", payload, count)

    @staticmethod
    def choice(key: Any, index: int) -> Choice:
        """The layout at a position of a pipeline's array."""
        group, batch, variant, pipeline, recomputes, states, offloads = key
        which, rest = divmod(index, len(recomputes) * len(states))
        again, state = divmod(rest, len(states))
        return Choice(group, batch, variant, pipeline, recomputes[again], states[state], offloads[which])

    def open_layout(self, bound: float, payload: tuple[Choice, float], count: int) -> None:
        """Simulate one layout."""
        del bound, count
        choice, need = payload
        self.account.evaluated["discrete_event"] += 1
        value, fits = self.tiers.discrete_event(choice)
        if not fits:
            self.account.rejected[SIMULATED_MEMORY] += 1
            return
        scored = Scored(choice, value, need)
        if self.on_scored is not None:
            self.on_scored(scored)
        self.best.append(scored)
        self.best.sort(key=lambda s: (s.step_time_s, s.choice.complexity))
        del self.best[self.keep :]


def states_of(space: Space, group: Group) -> Iterator[State]:
    """Spreads of a group, for tests."""
    return iter(space.states(group))


__all__ = ["Account", "Branch", "Progress", "Scored"]
