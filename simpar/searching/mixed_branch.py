"""The search over pipelines on several kinds of machines: bounds from the pricers of the parts, every layout left simulated whole.

A tree as in `branch`: mesh and micro-batch, variant, recomputation, layout; the node with the least bound is opened first. Bounds
hold for any cut of the layers, so they hold for the one that costs choose:

- Some rank takes as long as if all layers were spread so that no rank takes longer, each part at its own speed, whole layers, and
  not more on a rank than it has memory for. A step takes that many micro-batches long at least.
- Gradients that are reduced after the backward, and parameters that are gathered after the update, come on top.
- Before a rank's first forward a micro-batch passes the ranks before it, and after its last backward the last one comes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Final

import numpy as np

from simpar.errors import InputError
from simpar.program.program import FloatArray
from simpar.program.waits import update_waits
from simpar.readings import outcome_of
from simpar.schedules import SCHEDULES
from simpar.searching.account import Glimpse
from simpar.searching.choice import Choice, Offload, Variant, mesh_key
from simpar.searching.incumbents import Followers, Incumbents
from simpar.searching.mixed_pricing import MixedPricing, PartCosts
from simpar.searching.mixed_space import PLAIN, MixedSpace
from simpar.searching.nodes import Node
from simpar.searching.shapes import shape_of
from simpar.searching.tree import BOUND, MEMORY, SIMULATED_MEMORY, Tree
from simpar.specs.checks import check_scenario
from simpar.step import decided

REFUSED: Final = "cannot be simulated"
_HALVINGS: Final = 50
SEEDS: Final = 8
"""Meshes and micro-batches that are tried for a first answer."""


class MixedBranch(Tree):
    """The search over such a space, or some meshes of it; to those who call it as `branch.Branch`.

    Args:
        space: what may be chosen.
        pricing: memo to share.
        incumbents: limits and what is known already.
        examine: value of a simulated layout (None: it misses a constraint); none = its step time.
        fit_probability: chance that a layout must have to fit; none = the predicted bytes must fit.
        share: of the memory that a predicted peak may fill.
        followers: who follows it.
    """

    def __init__(
        self,
        space: MixedSpace,
        *,
        pricing: MixedPricing,
        incumbents: Incumbents,
        examine: Callable[[Choice, float, float], float | None] | None = None,
        fit_probability: float | None = None,
        share: float = 1.0,
        followers: Followers = Followers(),
    ) -> None:
        super().__init__(incumbents, followers)
        self.space, self.pricing = space, pricing
        self.evaluation = pricing.evaluation
        self.examine, self.fit_probability, self.share = examine, fit_probability, share
        cluster = space.template.cluster
        parts = tuple(part.model_copy(update={"memory_scale": part.memory_scale * share}) for part in cluster.parts)
        less = {"parts": parts} if parts else {"memory_scale": cluster.memory_scale * share}
        self._cautious = space.template.model_copy(update={"cluster": cluster.model_copy(update=less)})

    def survey(self, nodes: Sequence[Node]) -> float:
        """What nothing on these meshes ranks before, as far as is seen at a glance: nothing is."""
        del nodes
        return 0.0

    def run(self, nodes: Sequence[Node] | None = None) -> None:
        """Search until nothing can beat the best."""
        found = self.space.nodes() if nodes is None else list(nodes)
        if not self.best:
            self._seed(found)
        for node in found:
            self.push(0.0, "mesh", node, self.space.count(node[0], node[2]))
        self.go_on()

    def _reject(self, bound: float, device_bytes: float) -> str:
        return MEMORY if bound == inf else super()._reject(bound, device_bytes)

    def _rank(self, bound: float, device_bytes: float) -> float:
        # A front, and a rank by memory, want every layout that fits: these bounds say nothing of bytes.
        return 0.0 if self.incumbents.front or self.incumbents.by_memory else bound

    def _seed(self, nodes: Sequence[Node]) -> None:
        """The first that fits of what usually runs, so that there is something to show and to beat: wide tensor parallelism, few
        pipeline ranks, short micro-batches, nothing recomputed or else everything."""
        space = self.space
        for group, batch, m in sorted(nodes, key=lambda n: (bool(n[0].stage_tp), -n[0].tp, n[0].pp, n[1]))[:SEEDS]:
            state, offload = space.states(group)[0], space.offloads[0]
            for pipeline in space.pipelines(group.pp, m)[:1]:
                again = space.recomputes(space.deepest(pipeline, group.pp))
                for recompute in dict.fromkeys((again[0], again[-1])):
                    choice = Choice(group, batch, space.variants(group)[0], pipeline, recompute, state, offload)
                    bound = self.bound(choice, m)
                    if bound < inf and not self._simulate(choice, bound):
                        return

    # -- the tree ------------------------------------------------------------------------------------------------------

    def open_mesh(self, bound: float, node: Node, count: int) -> None:
        """Bound every variant without recomputation."""
        del bound, count
        group, batch, m = node
        for variant in self.space.variants(group):
            layouts = self.space.variant_count(group, m, variant)
            if layouts:
                choice = Choice(group, batch, variant, PLAIN, "none", self.space.states(group)[0], Offload(0.0, False))
                self.push(self._load(choice, "none") * m, "variant", (node, variant), layouts)

    def open_variant(self, bound: float, payload: tuple[Node, Variant], count: int) -> None:
        """Bound every layout."""
        del bound, count
        (group, batch, m), variant = payload
        space = self.space
        for pipeline in space.pipelines(group.pp, m):
            if not space.runs(variant, pipeline, group.pp):
                continue
            again = space.recomputes(space.deepest(pipeline, group.pp), merges=space.merges(variant))
            for recompute, state, offload in itertools.product(again, space.states(group), space.offloads):
                choice = Choice(group, batch, variant, pipeline, recompute, state, offload)
                self.account.evaluated["bounds"] += 1
                self.push(self.bound(choice, m), "layout", choice, 1)

    def open_layout(self, bound: float, choice: Choice, count: int) -> None:
        """Simulate one layout."""
        known, bound = self.incumbents, self._rank(bound, 0.0)
        reason = BOUND if known.outdone(bound, 0.0, choice) or known.unpromising(bound, choice) else self._simulate(choice, bound)
        self._settle(reason, count)

    # -- bounds --------------------------------------------------------------------------------------------------------

    def bound(self, choice: Choice, m: int) -> float:
        """No step of this layout is shorter, however its layers are dealt out; infinite where they do not fit the memory."""
        p, partly = choice.pipeline, choice.recompute.startswith("full:")
        splits = SCHEDULES[p.schedule].splits_backward
        costs = self.pricing.costs(choice, "none" if partly else choice.recompute, splits=splits)
        shape = shape_of(choice.group.pp, p.virtual_stages, p.schedule)
        ends = np.zeros(len(costs.total))
        ends[shape.stage_to_rank[0]] += costs.ahead[shape.stage_to_rank[0]]
        ends[shape.stage_to_rank[shape.stages - 1]] += costs.behind[shape.stage_to_rank[shape.stages - 1]]
        held = self.pricing.costs(choice, "full", splits=splits) if partly else costs
        flights = self.pricing.flights(choice, m) if not choice.offload.activations else np.zeros(len(costs.total))
        if shape.stage_to_rank[shape.stages - 1] != choice.group.pp - 1:
            # What ranks reduce is known where the head lies on the last one.
            costs = replace(costs, reduce=np.zeros_like(costs.reduce), gather=np.zeros_like(costs.gather))
        most = self._most(held, flights, optimizer=not choice.offload.optimizer)
        found = _even(costs, ends, most, self.space.layers, m)
        if not (splits or p.virtual_stages > 1):
            found = max(found, _filled(costs, ends, m))
        waits = update_waits(self.space.template.plan, self.pricing.framework, splits=splits)
        return found + self._last(costs) if waits else found

    def _last(self, costs: PartCosts) -> float:
        """Seconds after the last reduction: some rank holds as many layers as an even cut has, and gathers them."""
        share = self.space.layers / len(costs.total) / costs.layers
        return float((costs.gather * np.minimum(share, 1.0)).min())

    def _load(self, choice: Choice, recompute: str) -> float:
        """Seconds of a micro-batch on the slowest rank, whatever the schedule."""
        costs = self.pricing.costs(choice, recompute, splits=False)
        costs = replace(costs, reduce=np.zeros_like(costs.reduce))
        ends = np.zeros(len(costs.total))
        most = np.full(len(ends), float(self.space.layers))
        load = _even(costs, ends, most, self.space.layers, 1)
        if any(SCHEDULES[name].splits_backward for name in self.space.values("schedule", list(SCHEDULES))):
            load = min(load, _even(self.pricing.costs(choice, recompute, splits=True), ends, most, self.space.layers, 1))
        return load

    def _most(self, costs: PartCosts, flights: FloatArray, *, optimizer: bool) -> FloatArray:
        """Layers that each rank has memory for, float array [ranks]."""
        state = costs.state if optimizer else np.zeros_like(costs.state)
        each = state + flights * costs.kept
        room = costs.room * self.share
        found: FloatArray = np.divide(room, each, out=np.full(len(each), inf), where=each > 0.0)
        return np.minimum(found, float(self.space.layers))

    # -- layouts -------------------------------------------------------------------------------------------------------

    def _simulate(self, choice: Choice, bound: float) -> str:
        """Deal the layers out, simulate, value; why it does not count, or nothing."""
        known = (s for s in self.best if replace(s.choice, pipeline=replace(s.choice.pipeline, layers=())) == choice)
        if next(known, None) is not None:
            return ""
        self.account.evaluated["simulated"] += 1
        try:
            choice = self.dealt(choice)
            result = self.evaluation.result(choice)
        except InputError:
            return REFUSED
        likely = self.fit_probability is None or outcome_of(result).chance_to_fit >= self.fit_probability * (1.0 - 1e-9)
        if not (result.fits and likely):
            return SIMULATED_MEMORY
        time_s, need = result.step_time_s, result.worst_rank.device_bytes
        if not (reason := self._found(choice, time_s, need)):
            self.incumbents.timed(choice, bound, time_s)
            self.glimpses.setdefault(mesh_key(choice.group, choice.micro_batch_size), Glimpse(choice, time_s, need))
        return reason

    def dealt(self, choice: Choice) -> Choice:
        """The layout with its layers dealt out by cost, on devices of which it may fill `share`.

        Raises:
            InputError: a rule of the scenario is broken.
        """
        scenario = choice.scenario(self._cautious)
        open_cut = scenario.model_copy(update={"plan": scenario.plan.model_copy(update={"layers_per_stage": "auto"})})
        if wrong := check_scenario(open_cut):
            raise InputError(wrong)
        layers = decided(open_cut).plan.layers_per_stage
        assert isinstance(layers, tuple)
        return replace(choice, pipeline=replace(choice.pipeline, layers=layers if len(layers) > 1 else ()))


def _even(costs: PartCosts, ends: FloatArray, most: FloatArray, layers: int, m: int) -> float:
    """Seconds until the last rank has run m micro-batches and reduced its gradients, with the layers spread as evenly as can be;
    infinite where there is no room for all of them.

    A reduction of more bytes takes longer, and less long a byte: of n layers at least the even cut's times n over its own number.

    Args:
        ends: seconds of a micro-batch that ranks spend beside their layers.
        most: layers that ranks have room for.
    """
    most = np.floor(most + 1e-9)
    if most.sum() < layers:
        return inf
    even = np.maximum(costs.layers, 1.0)

    def covers(until_s: float) -> bool:
        free = np.maximum(until_s - m * ends, 0.0)
        few = free / (m * costs.least + costs.reduce / even)
        many = np.maximum(free - costs.reduce, 0.0) / (m * costs.least)
        held = np.where(few <= even, few, np.maximum(many, even))
        whole = np.minimum(np.floor(held * (1.0 + 1e-9) + 1e-9), most)
        return bool(whole.sum() >= layers and (free / costs.rate).sum() * (1.0 + 1e-9) >= m * costs.total[0])

    low, high = 0.0, float((m * (costs.total + ends) + costs.reduce * layers).max() * 2.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if covers(middle) else (middle, high)
    return low


def _filled(costs: PartCosts, ends: FloatArray, m: int) -> float:
    """A bound on the step of a pipeline without chunks that counts how it fills and empties.

    Rank r runs m micro-batches of x_r seconds, after the forward and before the backward of one on the ranks before it: the step is
    at least m x_r + sum of x_s over s < r, for each r. Weighed so that every x_s counts 1 / rate_s, these add up to the work.
    """
    weights, behind = np.zeros(len(ends)), 0.0
    for rank in reversed(range(len(ends))):
        weights[rank] = max((1.0 / costs.rate[rank] - behind) / m, 0.0)
        behind += weights[rank]
    return float((costs.total[0] + (ends / costs.rate).sum()) / weights.sum() * (1.0 - 1e-9))


__all__ = ["MixedBranch"]
