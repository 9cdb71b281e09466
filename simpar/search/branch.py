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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpar.program.program import FloatArray
from simpar.search import bounds
from simpar.search.blocks import BlockTable, Composition
from simpar.search.choice import Choice, Group, Offload, Pipeline, Variant
from simpar.search.incumbents import SLACK, Incumbents, Scored
from simpar.search.pricing import Pricing
from simpar.search.shapes import shape_of, style_of
from simpar.search.space import Space
from simpar.search.tiers import Tiers

MEMORY, BOUND, DOMINATED = "does not fit the memory", "cannot beat the best", "offloads more than it needs"
SIMULATED_MEMORY, CONSTRAINT = "does not fit when simulated", "misses a constraint"
BATCH = 64
Node = tuple[Group, int, int]
"""A mesh, sequences per micro-batch, micro-batches per step."""


@dataclass
class Account:
    """Where every layout of the space went."""

    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    """Simulated and neither rejected for memory nor for a constraint: with `rejected` they add up to the space."""

    def merge(self, other: Account) -> None:
        """Add another part's account."""
        self.rejected.update(other.rejected)
        self.evaluated.update(other.evaluated)
        self.kept += other.kept


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The fastest layout of a pipeline that fits, by its bounds: the space as a page shows it."""

    choice: Choice
    bound_s: float
    device_bytes: float


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
        return max(0.0, 1.0 - self.bound / self.incumbent.value)


class Branch:
    """The search over a space, or some meshes of it.

    Args:
        space: what may be chosen.
        keep: how many of the best are wanted.
        pricing: memo to share.
        incumbents: limits and what is known already; none = the `keep` fastest.
        examine: value of a simulated layout (None: it misses a constraint); none = its step time.
        least_headroom: bytes that must stay free on every device.
    """

    def __init__(
        self,
        space: Space,
        *,
        keep: int = 10,
        pricing: Pricing | None = None,
        incumbents: Incumbents | None = None,
        examine: Callable[[Choice, float, float], float | None] | None = None,
        on_scored: Callable[[Scored], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        least_headroom: float = 0.0,
    ) -> None:
        self.space = space
        self.pricing = pricing or Pricing(space)
        self.tiers = Tiers(self.pricing)
        self.account = Account()
        self.incumbents = incumbents or Incumbents(keep)
        self.examine = examine
        self.on_scored, self.on_progress = on_scored, on_progress
        self.capacity = space.template.hardware.gpu.memory.value - least_headroom
        self.heap: list[tuple[float, int, str, Any, int, float]] = []
        self._tick = itertools.count()
        self._cuts: dict[object, Any] = {}
        self._started = time.monotonic()
        self._state_bounds: dict[object, bounds.StateBound] = {}
        self.glimpses: dict[object, Glimpse] = {}

    # -- the tree ----------------------------------------------------------------------------------------------------

    @property
    def best(self) -> list[Scored]:
        """The best so far, best first."""
        return self.incumbents.best

    def push(self, bound: float, kind: str, payload: Any, count: int, device_bytes: float = 0.0) -> None:
        """A set of `count` layouts, none faster than `bound` nor smaller than `device_bytes`."""
        reason = self._reject(bound, device_bytes)
        if reason:
            self.account.rejected[reason] += count
        else:
            key = self.incumbents.rank(bound, device_bytes)
            heapq.heappush(self.heap, (key, next(self._tick), kind, payload, count, bound))

    def _reject(self, bound: float, device_bytes: float) -> str:
        if self.incumbents.late(np.array(bound)):
            return CONSTRAINT
        return BOUND if self.incumbents.beaten(np.array(bound), np.array(device_bytes)) else ""

    def nodes(self, groups: Sequence[Group] | None = None) -> list[Node]:
        """Every mesh and micro-batch."""
        found = self.space.groups if groups is None else groups
        return [(g, b, m) for g in found for b, m in self.space.micro_batches(g)]

    def run(self, nodes: Sequence[Node] | None = None) -> None:
        """Search until nothing can beat the best."""
        for node in self.nodes() if nodes is None else nodes:
            self.push(0.0, "mesh", node, self.space.count(node[0], node[2]))
        openers: dict[str, Callable[[float, Any, int], None]] = {
            "mesh": self.open_mesh, "crude": self.open_crude, "variant": self.open_variant, "pipeline": self.open_pipeline,
            "layouts": self.open_layouts, "undercut": self.open_undercut, "layout": self.open_layout,
        }  # fmt: skip
        single = not self.incumbents.front
        while self.heap:
            key, _, kind, payload, count, bound = heapq.heappop(self.heap)
            self.account.evaluated["longest_path"] = self.tiers.swept
            if single and key * (1.0 - SLACK) >= self.incumbents.cutoff:
                self.account.rejected[BOUND] += count + sum(entry[4] for entry in self.heap)
                self.heap.clear()
                break
            openers[kind](bound, payload, count)
            if self.on_progress is not None:
                self.on_progress(self.progress(key))

    def progress(self, bound: float) -> Progress:
        """Where the search stands."""
        best = self.best[0] if self.best else None
        simulated = self.account.evaluated["discrete_event"]
        return Progress(best, bound, len(self.heap), simulated, time.monotonic() - self._started)

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
        self.push(m * total / group.pp, "crude", payload, count, self.least_bytes(group))

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
                per_dense, per_expert = self.pricing.state_bytes(group, variant, state, passing=group.pp == 1)
                column = slice(0, 1) if offloaded else slice(0, 2)
                least = min(least, dense * sum(per_dense[column]) + expert * sum(per_expert[column]))  # type: ignore[call-overload]
            spec = self.pricing.framework
            self._cuts[key] = least / group.pp * spec.fragmentation + self.outside_bytes(group)
        return float(self._cuts[key])

    def outside_bytes(self, group: Group) -> float:
        """Context and communicators of one rank."""
        spec = self.pricing.framework
        groups = sum(s > 1 for s in (group.tp, group.cp, group.pp, group.dp * group.cp, group.ep))
        groups += spec.communicators if groups else 0
        return float(spec.context_bytes + groups * spec.nccl_bytes_per_group)

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
            self.push(float(value), "variant", (group, batch, m, variant), each, self.least_bytes(group))

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
            payload_ = (group, batch, m, variant, pipeline)
            self.push(float(pipe.least[0]), "pipeline", payload_, count, self.least_bytes(group))

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
        times, needs = [], []
        for offload in offloads:
            bytes_ = self._device_bytes(group, batch, m, variant, pipeline, items, spread, offload)
            found = bounds.combine(pipe, spread, int(offload.optimizer))
            if offload.activations:
                found = np.maximum(found, self._host_load(group, pipeline, items, m, offload)[:, None])
            times.append(found)
            needs.append(bytes_)
        time_s, need = np.array(times), np.array(needs)  # [offloads, recomputes, states]
        self.account.evaluated["bounds"] += time_s.size
        fits = need <= self.capacity
        if fits.any():
            self._glimpse((group, batch, variant, pipeline, recomputes, states, offloads), np.where(fits, time_s, np.inf), need)
        dominated = self._dominated(offloads, fits, time_s)
        self.account.rejected[MEMORY] += int((~fits).sum())
        self.account.rejected[DOMINATED] += int(dominated.sum())
        open_ = fits & ~dominated
        late = open_ & self.incumbents.late(time_s)
        beaten = open_ & ~late & self.incumbents.beaten(time_s, need)
        self.account.rejected[CONSTRAINT] += int(late.sum())
        self.account.rejected[BOUND] += int(beaten.sum())
        left = np.flatnonzero((open_ & ~beaten & ~late).ravel())
        if len(left):
            values = (need if self.incumbents.by_memory else time_s).ravel()[left]
            order = left[np.argsort(values, kind="stable")]
            key = (group, batch, variant, pipeline, recomputes, states, offloads)
            self._push_layouts(key, order, time_s.ravel(), need.ravel(), 0)

    def _device_bytes(
        self, group: Group, batch: int, m: int, variant: Variant, pipeline: Pipeline,
        items: Sequence[tuple[BlockTable, Composition]], spread: bounds.StateBound, offload: Offload,
    ) -> FloatArray:  # fmt: skip
        """Peak use of the fullest device, [R, D]: exact, or a lower bound that the simulation checks."""
        sent, states = self.pricing.sent_bytes(group, batch, variant), self.space.states(group)
        modes = [(self.pricing.gathered(group, variant, state), state.zero_stage == 3) for state in states]
        found = np.empty((len(items), len(states)))
        for mode in set(modes):
            which = np.array([each == mode for each in modes])
            gathered, sharded = mode
            peaks = bounds.activation_peaks(
                self.pricing, group, pipeline, m, items, offload.activations, gathered, sent, sharded=sharded
            )
            every = bounds.device_bytes(self.pricing, peaks, spread, offload, self.outside_bytes(group))
            found[:, which] = every[:, which]
        return found

    def _glimpse(self, key: Any, time_s: FloatArray, need: FloatArray) -> None:
        """Remember the best of a design."""
        at = int(np.argmin(time_s))
        name = (key[0], key[3].schedule, key[3].virtual_stages)
        bound = float(time_s.ravel()[at])
        if name not in self.glimpses or bound < self.glimpses[name].bound_s:
            self.glimpses[name] = Glimpse(self.choice(key, at), bound, float(need.ravel()[at]))

    def _push_layouts(self, key: Any, order: np.ndarray, time_s: FloatArray, need: FloatArray, first: int) -> None:
        if first < len(order):
            payload = (key, order, time_s, need, first)
            rest = order[first:]
            bound, least = float(time_s[rest].min()), float(need[rest].min())
            self.push(bound, "layouts", payload, len(rest), least)

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
        batch = order[first : first + BATCH]
        late = self.incumbents.late(time_s[batch])
        hopeless = ~late & self.incumbents.beaten(time_s[batch], need[batch])
        self.account.rejected[CONSTRAINT] += int(late.sum())
        self.account.rejected[BOUND] += int(hopeless.sum())
        take = batch[~late & ~hopeless]
        choices = [self.choice(key, int(i)) for i in take]
        for choice, value, only_bound, index in zip(choices, *self.tiers.longest_paths(choices), take, strict=True):
            kind = "undercut" if only_bound else "layout"
            space_s, bytes_ = max(float(value), float(time_s[index])), float(need[index])
            self.push(space_s, kind, (choice, bytes_), 1, bytes_)
        self._push_layouts(key, order, time_s, need, first + len(batch))

    def open_undercut(self, bound: float, payload: tuple[Choice, float], count: int) -> None:
        """A layout that another undercuts in every price still is among the best: its own longest path."""
        self.push(max(bound, self.tiers.longest_path(payload[0])), "layout", payload, count, payload[1])

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
        choice, _ = payload
        self.account.evaluated["discrete_event"] += 1
        time_s, need = self.tiers.discrete_event(choice)
        if need > self.capacity:
            self.account.rejected[SIMULATED_MEMORY] += 1
            return
        value = time_s if self.examine is None else self.examine(choice, time_s, need)
        if value is None or self.incumbents.late(np.array(time_s)):
            self.account.rejected[CONSTRAINT] += 1
            return
        if self.examine is None:
            value = self.incumbents.rank(time_s, need)
        scored = Scored(choice, time_s, need, value)
        self.account.kept += 1
        if self.on_scored is not None:
            self.on_scored(scored)
        self.incumbents.add(scored)


__all__ = ["BOUND", "CONSTRAINT", "DOMINATED", "MEMORY", "SIMULATED_MEMORY", "Account", "Branch", "Glimpse", "Node", "Progress", "Scored"]  # noqa: E501
