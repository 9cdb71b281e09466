"""Branch and bound over meshes, variants, pipelines and the rest, best bound first; exact, with the account of it.

A node of the tree is a set of layouts with a lower bound on their step times. The node with the least bound is opened next:
a mesh and micro-batch into variants, a variant into pipelines, a pipeline into layouts (bounds and memory of all of them in one
numpy call), layouts into their longest path (many of one shape together), and what still can win into SimPy. When the least bound
left is not below the value to beat, nothing left can win, and the best is proven.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from simpar.program.program import FloatArray
from simpar.searching.account import Account, Glimpse
from simpar.searching.choice import Choice, Group, Variant
from simpar.searching.design_bounds import DesignBounds, Outlook
from simpar.searching.evaluation import Evaluation
from simpar.searching.incumbents import Followers, Incumbents
from simpar.searching.memory_floors import MemoryFloors
from simpar.searching.nodes import Node, Ranked, Shape, Together, Waiting, by_shape
from simpar.searching.open_layouts import Design, OpenLayouts
from simpar.searching.pricing import Pricing
from simpar.searching.set_bounds import SetBounds
from simpar.searching.space import Space
from simpar.searching.tree import BOUND, CONSTRAINT, DOMINATED, MEMORY, SIMULATED_MEMORY, Tree

LARGEST = 256
"""Layouts that are swept together at most."""


class Branch(Tree):
    """The search over a space, or some meshes of it.

    Args:
        space: what may be chosen.
        keep: how many of the best are wanted.
        pricing: memo to share.
        incumbents: limits and what is known already; none = the `keep` fastest.
        followers: who follows it.
        least_headroom: bytes that must stay free on every device, as far as bounds of what it needs say.
        fits: whether a layout does that needs so many bytes, some of them cached without a tensor; none = as the bounds.
    """

    def __init__(
        self,
        space: Space,
        *,
        keep: int = 10,
        pricing: Pricing | None = None,
        incumbents: Incumbents | None = None,
        followers: Followers = Followers(),
        least_headroom: float = 0.0,
        fits: Callable[[float, float], bool] | None = None,
    ) -> None:
        super().__init__(incumbents or Incumbents(keep), followers)
        self.space = space
        self.pricing = pricing or Pricing(space)
        self.evaluation = Evaluation.of(self.pricing)
        self._swept_before = self.evaluation.swept
        self.tighten: Callable[[Choice, float], float] | None = None
        """A bound of the value of a layout that takes so long, where that is more than its time."""
        self.capacity = space.template.hardware.gpu.memory.value - least_headroom
        self.fits = fits or (lambda need, _: need <= self.capacity)
        self.set_bounds = SetBounds(space, self.pricing)
        self.memory_floors = MemoryFloors(space, self.pricing)
        self.design_bounds = DesignBounds(space, self.pricing, self.capacity)
        self.pools: dict[Shape, list[Waiting]] = {}
        self._until = inf
        self.together = Together(self.evaluation)
        self._scored: set[Choice] = set()

    def survey(self, nodes: Sequence[Node]) -> float:
        """What nothing on these meshes ranks before, by compute alone; costs little, and `run` need not do it again."""
        fit = [n for n in nodes if self.set_bounds.least_bytes(n[0]) <= self.capacity]
        ranks = (self.incumbents.rank(self.set_bounds.mesh_seconds(*n), self.set_bounds.least_bytes(n[0])) for n in fit)
        return min(ranks, default=inf)

    def run(self, nodes: Sequence[Node] | None = None) -> None:
        """Search until nothing can beat the best."""
        self.open(nodes)
        self.go_on()
        if self.incumbents.front:
            self._go_down(nodes)

    def _go_down(self, nodes: Sequence[Node] | None) -> None:
        """The rest of a front, from its fast end: in every pass devices may need less than the fastest layout of the last one.

        What has to fit less memory has to recompute more, which bounds know. Every layout was accounted for in the first pass.
        """
        account, known = self.account, len(self._scored)
        while (level := self.incumbents.next_level()) is not None:
            self._proven_s = max(self._proven_s, self.incumbents.cutoff())
            self.incumbents.level = self.capacity = self.design_bounds.capacity = level
            self.account, self._swept_before = Account(), self.evaluation.swept
            self.open(nodes)
            self.go_on()
            account.evaluated.update(self.account.evaluated)
        account.kept += len(self._scored) - known
        account.rejected[BOUND] -= len(self._scored) - known
        self.account = account

    def open(self, nodes: Sequence[Node] | None = None) -> None:
        """Let meshes and micro-batches wait to be searched; none = all of the space."""
        self.together.start()
        for node in self.space.nodes() if nodes is None else nodes:
            self.push(0.0, "mesh", node, self.space.count(node[0], node[2]))

    def go_on(self, until: float = inf) -> float:
        """Search until all that waits is behind `until`, or nothing can beat the best; the least of what is left, infinite then."""
        self._until = until
        return super().go_on(until)

    def _popped(self, kind: str) -> None:
        self.account.evaluated["longest_path"] = self.evaluation.swept - self._swept_before
        if kind in ("timed", "layout"):
            self.together.fastest = inf  # it may not count: what waited behind it is no longer behind anything

    def _forget(self) -> int:
        waiting = sum(int(table.weight[at]) for pool in self.pools.values() for *_, table, at in pool)
        self.pools.clear()
        return waiting + super()._forget()

    # -- sets ----------------------------------------------------------------------------------------------------------

    def open_mesh(self, bound: float, payload: Node, count: int) -> None:
        """Too large for the memory whatever else is chosen? Else bound it by its compute."""
        del bound
        if not count:
            return
        least = self.set_bounds.least_bytes(payload[0])
        if least > self.capacity:
            self.account.rejected[MEMORY] += count
            return
        self.push(self.set_bounds.mesh_seconds(*payload), "crude", payload, count, least)

    def open_crude(self, bound: float, payload: Node, count: int) -> None:
        """Bound every variant over every pipeline by serial work."""
        del bound, count
        group, batch, m = payload
        variants, least = self.space.variants(group), self.set_bounds.least_bytes(group)
        for variant, value in zip(variants, self.set_bounds.variant_seconds(group, batch, m).tolist(), strict=True):
            layouts = self.space.variant_count(group, m, variant)
            if layouts:
                self.push(value, "variant", (*payload, variant), layouts, least)

    def open_variant(self, bound: float, payload: tuple[Group, int, int, Variant], count: int) -> None:
        """Price the blocks of a variant exactly and bound every pipeline."""
        del bound
        # What blocks keep is known without prices.
        possible = self.memory_floors.possible(*payload, self.capacity)
        if not possible.any():
            self._settle(MEMORY, count)
            return
        seconds = np.where(possible, self.set_bounds.pipeline_seconds(*payload), np.inf)
        self.push(float(seconds.min()), "priced", (payload, seconds), count, self.set_bounds.least_bytes(payload[0]))

    def open_priced(self, bound: float, payload: tuple[tuple[Group, int, int, Variant], FloatArray], count: int) -> None:
        """Bound every pipeline of a variant by what the memory asks for too, which takes prices of what may be recomputed."""
        del bound, count
        node, seconds = payload
        group, _, m, variant = node
        least = self.set_bounds.least_bytes(group)
        inner = len(self.space.states(group)) * len(self.space.offloads)
        beaten = self.incumbents.beaten(seconds, np.full(len(seconds), least))
        more = self.memory_floors.seconds(*node, self.capacity, np.isfinite(seconds) & ~beaten)
        seconds = seconds if more is None else seconds + more
        counts = np.array(self.space.recompute_counts(group.pp, m, variant), dtype=np.int64) * inner
        order = np.argsort(seconds, kind="stable")
        order = order[counts[order] > 0]
        unfit = order[np.isinf(seconds[order])]
        self.account.rejected[MEMORY] += int(counts[unfit].sum())
        order = order[: len(order) - len(unfit)]
        left = np.cumsum(counts[order][::-1])[::-1].tolist()
        self._next_pipeline(Ranked(node, order.tolist(), seconds[order].tolist(), left), 0)

    def _next_pipeline(self, ranked: Ranked, at: int) -> None:
        """The pipelines of a variant from the one at `at` on wait together: the first bounds the rest."""
        if at < len(ranked.order):
            least = self.set_bounds.least_bytes(ranked.node[0])
            self.push(ranked.seconds[at], "pipeline", (ranked, at), ranked.left[at], least)

    def open_pipeline(self, bound: float, payload: tuple[Ranked, int], count: int) -> None:
        """Bound every spread of the states, without recomputation, of the first of these pipelines."""
        ranked, at = payload
        self._next_pipeline(ranked, at + 1)
        count -= ranked.left[at + 1] if at + 1 < len(ranked.left) else 0
        group, _, m, _ = ranked.node
        design = Design(*ranked.node, self.space.pipelines(group.pp, m)[ranked.order[at]])
        outlook = self.design_bounds.outlook(design)
        self.account.evaluated["bounds"] += count
        if len(outlook.columns):
            least = max(bound, float(outlook.least.min()))
            self.push(least, "shardings", outlook, count, self.set_bounds.least_bytes(group))
        else:
            # Not even the states fit, however they are spread.
            self._settle(MEMORY, count)

    def open_shardings(self, bound: float, payload: Outlook, count: int) -> None:
        """Bounds and memory of every recomputation x spread x offload at once."""
        del bound, count
        table = self.design_bounds.open_layouts(payload.design, self.incumbents, payload)
        for reason, number in zip((MEMORY, CONSTRAINT, BOUND), table.rejected, strict=True):
            self._settle(reason, number)
        if len(table.order):
            self._glimpse(table)
            self._wait(table, table.order.tolist(), 0.0)

    # -- layouts -------------------------------------------------------------------------------------------------------

    def _glimpse(self, table: OpenLayouts) -> None:
        """Remember the best of a design."""
        at = int(table.order[0])
        found = Glimpse(table.choice(at), float(table.time_s.flat[at]), float(table.bytes.flat[at]))
        pipeline = found.choice.pipeline
        name = (found.choice.group, pipeline.schedule, pipeline.virtual_stages)
        if name not in self.glimpses or found.bound_s < self.glimpses[name].bound_s:
            self.glimpses[name] = found

    def _wait(self, table: OpenLayouts, positions: Sequence[int], least_s: float) -> None:
        """Layouts at these positions, none faster than `least_s`, to be swept with others of their shape."""
        for name, layouts in by_shape(table, positions, least_s).items():
            self._pool(name, layouts)

    def _pool(self, name: Shape, layouts: Sequence[tuple[float, OpenLayouts, int]]) -> None:
        """Layouts of one shape, each with its bound, wait to be swept."""
        pool = self.pools.setdefault(name, [])
        for time_s, table, at in layouts:
            rank = self.incumbents.rank(time_s, float(table.bytes.flat[at]))
            heapq.heappush(pool, (rank, next(self._tick), time_s, table, at))
        if pool:
            heapq.heappush(self.heap, (pool[0][0], 0.0, next(self._tick), "shape", name, 0, pool[0][2]))

    def open_shape(self, bound: float, payload: Shape, count: int) -> None:
        """The longest paths of the best layouts of one shape."""
        del count, bound
        pool = self.pools.get(payload, [])
        popped: list[Waiting] = []
        # Where most settings of a design are not worth a look, one layout at a time decides about the others.
        most = 1 if self.incumbents.tolerance or self.incumbents.within else LARGEST
        together = self.incumbents.front and most == 1
        while pool and len(popped) < most and (not popped or pool[0][0] <= self._until):
            popped.append(heapq.heappop(pool))
        take = []
        for _, _, time_s, table, at in popped:
            need = float(table.bytes.flat[at])
            choice, reason = table.choice(at), self._reject(time_s, need)
            if not reason and (self.incumbents.outdone(time_s, need, choice) or self.incumbents.unpromising(time_s, choice)):
                reason = BOUND
            if not reason and self.incumbents.level < inf:
                need = max(need, self.evaluation.device_bytes(choice, self.design_bounds.allocated(choice)) or 0.0)
                reason = MEMORY if need > self.incumbents.level else ""
            if reason:
                self._settle(reason, int(table.weight[at]))
            elif not (together and self.together.waits(pool, popped[0], self.incumbents.cutoff())):
                take.append((choice, at, time_s, need, table))
        swept = self.evaluation.longest_paths([choice for choice, *_ in take], alone=together)
        for (choice, at, time_s, need, table), value, less in zip(take, *swept, strict=True):
            kind, weight, value = "undercut" if less else "timed", int(table.weight[at]), max(float(value), time_s)
            if not less:
                self.incumbents.timed(choice, time_s, value)
                self.together.fastest = min(self.together.fastest, value)
            # Of a front any layout within the tolerance will do: the first that is timed counts at once.
            counts = self.incumbents.within or self.incumbents.cutoff() < inf
            if most == 1 and counts and not less and not self._reject(value, need):
                self.open_timed(value, (choice, need, table, at), weight)
                self.together.fastest = inf
                continue
            self.push(value, kind, (choice, need, table, at), weight, need, choice.complexity)
        self._pool(payload, [])

    def open_undercut(self, bound: float, payload: tuple[Choice, float, OpenLayouts, int], count: int) -> None:
        """A layout that another undercuts in every price still is among the best: its own longest path."""
        choice, need, *_ = payload
        if self.incumbents.outdone(bound, need, choice):
            self._settle(BOUND, count)
        else:
            value = max(bound, self.evaluation.longest_path(choice))
            self.push(value, "timed", payload, count, need, choice.complexity)

    def open_timed(self, bound: float, payload: tuple[Choice, float, OpenLayouts, int], count: int) -> None:
        """A layout whose time is known: what it is ranked by, where that is more."""
        choice, need, *_ = payload
        if self.tighten is None:
            self.open_layout(bound, (*payload, bound), count)
        elif self.incumbents.outdone(bound, need, choice):
            self._settle(BOUND, count)
        else:
            value = max(bound, self.tighten(choice, bound))
            self.push(value, "layout", (*payload, bound), count, need, choice.complexity)

    def open_layout(self, bound: float, payload: tuple[Choice, float, OpenLayouts, int, float], count: int) -> None:
        """Simulate one layout; what moves more to the host waits for its outcome."""
        choice, need, table, at, time_s = payload
        if self.incumbents.outdone(bound, need, choice):
            self._settle(BOUND, count)
            return
        reason = self._simulate(choice, bound, time_s)
        self._settle(reason, 1)
        if reason:
            self._wait(table, table.children(at), time_s)
        else:
            self._settle(DOMINATED, count - 1)

    def _simulate(self, choice: Choice, bound: float, time_s: float) -> str:
        """Value a layout; why it does not count, or nothing. SimPy runs only where memory depends on time.

        Args:
            bound: of its value; with its memory it may say already that it cannot be wanted.
            time_s: its longest path, the time that SimPy finds too.
        """
        scored = next((s for s in self.best if s.choice == choice), None)
        if scored is not None:
            # Known from another part of the search.
            return ""
        allocated = self.design_bounds.allocated(choice)
        need = self.evaluation.device_bytes(choice, allocated)
        if need is not None and allocated is not None:
            cached = need - self.pricing.outside_bytes(choice.group) - float(allocated.max())
            if not self.fits(need, cached):
                return SIMULATED_MEMORY
        if need is not None and self.incumbents.beaten(np.array(bound), np.array(need)):
            return BOUND
        if need is None:
            self.account.evaluated["simulated"] += 1
            time_s, need, cached = self.evaluation.in_full(choice, lambda least: self.fits(least, 0.0))
            if not self.fits(need, cached):
                return SIMULATED_MEMORY
        if need > self.incumbents.level:
            return MEMORY
        if not (reason := self._found(choice, time_s, need)):
            self._scored.add(choice)
        return reason


__all__ = ["LARGEST", "Branch"]
