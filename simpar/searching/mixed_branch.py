"""The search over pipelines on several kinds of machines: bounds from the pricers of the parts, every layout left simulated whole.

A tree as in `branch`: mesh and micro-batch, variant, recomputation, layout; the node with the least bound is opened first. Bounds
hold for any cut of the layers, so they hold for the one that costs choose:

- Some rank takes as long as if all layers were spread so that no rank takes longer, each part at its own speed, whole layers, and
  not more on a rank than it has memory for. A step takes that many micro-batches long at least.
- Gradients that are reduced after the backward, and parameters that are gathered after the update, come on top.
- Before a rank's first forward a micro-batch passes the ranks before it, and after its last backward the last one comes back.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np

from simpar.costs.mixed import MixedPricer
from simpar.costs.pricer import LayoutPricer
from simpar.engine.effects import expected_load_factor
from simpar.errors import InputError
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.data import state_memory
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray
from simpar.readings import outcome_of
from simpar.result.memory import block_bytes
from simpar.result.outside import outside_bytes
from simpar.result.result import Result
from simpar.schedules import SCHEDULES
from simpar.searching.account import Account, Glimpse, Progress
from simpar.searching.branch import BOUND, CONSTRAINT, MEMORY, SIMULATED_MEMORY
from simpar.searching.choice import Choice, Offload, State, Variant, mesh_key
from simpar.searching.closed import Closing
from simpar.searching.in_flight import held_by_chunk
from simpar.searching.incumbents import Incumbents, Scored
from simpar.searching.mixed_space import PLAIN, MixedSpace
from simpar.searching.nodes import Node
from simpar.searching.shapes import shape_of
from simpar.specs.checks import check_scenario
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import Host, alike
from simpar.step import decided, layout_of, pricer_of, schedule_of, simulate

REFUSED: Final = "cannot be simulated"
_REMEMBERED: Final = 256
"""Results that are kept: the best are asked for again when the answer is written."""
_HALVINGS: Final = 50
SEEDS: Final = 8
"""Meshes and micro-batches that are tried for a first answer."""


@dataclass(frozen=True)
class PartCosts:
    """What layers cost on the ranks of a mesh, one number per rank unless said.

    Attributes:
        total: seconds of all layers of a micro-batch, forward and backward.
        least: of the cheapest layer.
        ahead, behind: of what comes before the layers and after them, were it there.
        rate: seconds of a layer over the first rank's, of the layer for which that is least.
        room: bytes for states and activations; state, kept: of the smallest layer, at rest and of a micro-batch in flight.
        layers: of an even cut; reduce, gather: seconds after the backward, and after the update, of a rank that holds so many.
    """

    total: FloatArray
    least: FloatArray
    ahead: FloatArray
    behind: FloatArray
    rate: FloatArray
    room: FloatArray
    state: FloatArray
    kept: FloatArray
    layers: FloatArray
    reduce: FloatArray
    gather: FloatArray


@dataclass(frozen=True)
class Layers:
    """The layers of the model on one kind of rank.

    Attributes:
        seconds: of each, forward and backward of a micro-batch, float array [layers].
        ahead, behind: seconds of what comes before them and after them.
        kept: bytes of a micro-batch in flight that any of them keeps at least.
        weights: (dense, expert) weights of each kind of layer.
    """

    seconds: FloatArray
    ahead: float
    behind: float
    kept: float
    weights: tuple[tuple[float, float], ...]


class MixedEvaluation:
    """What the answer asks of layouts, by the same path as `simpar simulate`, at stage detail.

    Args:
        template: of the space.
    """

    def __init__(self, template: Scenario) -> None:
        self.template = template
        self._results: OrderedDict[Choice, Result] = OrderedDict()

    def result(self, choice: Choice) -> Result:
        """Everything that `simulate` says of a layout whose layers are dealt out."""
        if choice not in self._results:
            self._results[choice] = simulate(choice.scenario(self.template), detail="stage")
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
        self._results.move_to_end(choice)
        return self._results[choice]

    def in_full(self, choice: Choice) -> tuple[float, float, float]:
        """As in `Evaluation`."""
        result = self.result(choice)
        rank = result.worst_rank
        return result.step_time_s, rank.device_bytes, rank.reserved_bytes - rank.allocated_bytes


class MixedPricing:
    """Costs of the layers on every part, and what else the search asks of prices."""

    def __init__(self, space: MixedSpace) -> None:
        self.space, self.template = space, space.template
        self.evaluation = MixedEvaluation(space.template)
        self.framework = framework(space.template.framework, space.template.framework_version)
        self.has_experts = getattr(space.template.model, "moe", None) is not None
        self._costs: dict[object, PartCosts] = {}
        self._parts: dict[object, Layers] = {}
        self._flights: dict[object, FloatArray] = {}

    @property
    def model_flops(self) -> float:
        """Model FLOPs of one step, forward and backward."""
        group = self.space.first_group
        batch, _ = self.space.micro_batches(group)[0]
        return self.layout(self._plain(group, batch, self.space.variants(group)[0])).model_flops

    def _plain(self, group: Any, batch: int, variant: Variant, state: State | None = None) -> Choice:
        return Choice(group, batch, variant, PLAIN, "none", state or self.space.states(group)[0], Offload(0.0, False))

    def layout(self, choice: Choice) -> Layout:
        """The layout of a choice with layers cut evenly: what its blocks cost does not depend on the cut."""
        scenario = choice.scenario(self.template)
        return layout_of(scenario, schedule_of(scenario, 1), expected_load_factor(scenario))

    def costs(self, choice: Choice, recompute: str, *, splits: bool) -> PartCosts:
        """What layers cost in a mesh, micro-batch, variant and spread of the states, with a recomputation of all layers alike.

        Args:
            splits: input and weight gradients run apart.
        """
        key = (choice.group, choice.micro_batch_size, choice.variant, recompute, choice.state, splits)
        if key not in self._costs:
            plain = self._plain(choice.group, choice.micro_batch_size, choice.variant, choice.state)
            layout = self.layout(replace(plain, recompute=recompute))
            self._costs[key] = self._of_ranks(layout, ("F", "I", "W") if splits else ("F", "B"))
        return self._costs[key]

    def _of_ranks(self, layout: Layout, phases: Sequence[str]) -> PartCosts:
        alone, hosts = layout.alone or (layout,), layout.hosts or _alike(layout)
        priced = pricer_of(layout)
        pricers = priced.pricers if isinstance(priced, MixedPricer) else [priced]
        widths = tuple(own.plan.tp for own in alone)
        found = [
            self._layers(own, host.part, pricer, (*widths, own.plan.tp), phases)
            for own, host, pricer in zip(alone, hosts, pricers, strict=True)
        ]
        rows = []
        for own, host, layers, pricer in zip(alone, hosts, found, pricers, strict=True):
            room = own.hardware.gpu.memory.value - sum(amount for _, amount in outside_bytes(own))
            rate = float((layers.seconds / found[0].seconds).min())
            resting = min(_resting(own, *weights) for weights in layers.weights)
            each = (layers.seconds.sum(), layers.seconds.min(), layers.ahead, layers.behind, rate, room, resting, layers.kept)
            stage = host.ranks[len(host.ranks) // 2]
            after = _after(pricer, stage)
            rows += [(*each, float(own.stages[stage].count), *after)] * len(host.ranks)
        return PartCosts(*np.array(rows).T)

    def _layers(self, own: Layout, part: int, pricer: LayoutPricer, widths: tuple[int, ...], phases: Sequence[str]) -> Layers:
        """Layers on one kind of rank; what they depend on of a mesh is where its groups sit, as in `Sites`.

        Args:
            widths: tensor parallelism of all kinds of ranks, by which the vocabulary is padded, and of this one.
        """
        mesh, nodes = own.mesh, own.scenario.cluster.num_nodes
        places = tuple(own.placement(d) for d in ("tp", "cp", "ep", "etp"))
        ring = mesh.hops("cp", own.hardware, nodes)[0][0] if mesh.cp > 1 else None
        far = own.plan.pp > 1 and mesh.hops("pp", own.hardware, nodes)[0][0].num_nodes > 1
        plan, training = own.plan, own.training
        key = (
            part, places, ring, far, plan.pp > 1, own.num_microbatches == 1, plan.zero_stage, plan.sequence_parallel,
            plan.cp_style, plan.overlap_tp, plan.overlap_ep, plan.ep_dispatcher, str(plan.recompute), training.precision,
            training.micro_batch_size, widths, tuple(phases),
        )  # fmt: skip
        if key not in self._parts:

            def seconds(blocks: Sequence[LocalBlock]) -> list[float]:
                return [sum(pricer.block(block, phase).seconds for phase in phases) for block in blocks]

            ahead, layers, behind = own.blocks_in_order
            releases = own.framework.pipeline.input_gradient_releases
            self._parts[key] = Layers(
                np.array(seconds(layers)), sum(seconds(ahead)), sum(seconds(behind)),
                min(block_bytes(block, 0.0, 0.0, releases=releases)[0] for block in layers),
                tuple({(block.dense_parameters, block.expert_parameters) for block in layers}),
            )  # fmt: skip
        return self._parts[key]

    def flights(self, choice: Choice, m: int) -> FloatArray:
        """Micro-batches whose activations a rank keeps of all its layers at once, at least, float array [ranks]."""
        p, pp = choice.pipeline, choice.group.pp
        key = (p.schedule, pp, m, p.virtual_stages)
        if key not in self._flights:
            found = np.zeros(pp)
            if p.schedule in ("1f1b", "gpipe", "interleaved"):
                held = [held_by_chunk(p.schedule, pp, m, p.virtual_stages, rank) for rank in range(pp)]
                # However a rank's layers lie on its chunks: no less than at one moment, nor than on average over some.
                found = np.array([max(float(each.min(axis=1).max()), float(each.mean(axis=0).min())) for each in held])
            self._flights[key] = found
        return self._flights[key]


def _alike(layout: Layout) -> tuple[Host, ...]:
    """One host of all ranks of a layout of one kind."""
    (host,) = alike(layout.scenario)
    return (replace(host, ranks=range(layout.plan.pp)),)


def _after(pricer: LayoutPricer, stage: int) -> tuple[float, float]:
    """Seconds of what a stage reduces after all backwards, and of what it gathers after the update."""
    layout, zero = pricer.layout, pricer.layout.plan.zero_stage
    if layout.data_ranks == 1 or layout.training.optimizer == "none" or zero == 3:
        return 0.0, 0.0
    blocks = len(layout.stage_blocks[stage])
    reduces = zero < 2 and not layout.overlap_grad_reduce
    gathers = zero in (1, 2) and not layout.overlap_param_gather
    segments = layout.buckets(stage, bucketed=False) if reduces else ()
    reduce = sum(pricer.price(Reduce(stage, first, last)).seconds for first, last in segments)
    return reduce, pricer.price(Gather(stage, 0, blocks)).seconds if gathers else 0.0


def _resting(layout: Layout, dense: float, expert: float) -> float:
    """Bytes at rest of so many weights on a rank, with their gradients (over a pipeline they stay); 0 where not all of it is."""
    training, zero, away = layout.training, layout.plan.zero_stage, layout.states_away
    if training.trainable == "lora" or training.optimizer == "none":
        return 0.0
    one = state_memory(dense, layout.state_bytes, zero, layout.shard_ranks)
    other = state_memory(expert, layout.state_bytes, zero, layout.expert_shard_ranks)
    gradients = 0.0 if zero == 3 or away else one.gradients + other.gradients
    optimizer = 0.0 if away else one.optimizer + other.optimizer
    return one.parameters + other.parameters + gradients + optimizer


class MixedBranch:
    """The search over such a space, or some meshes of it; to those who call it as `branch.Branch`.

    Args:
        space: what may be chosen.
        pricing: memo to share.
        incumbents: limits and what is known already.
        examine: value of a simulated layout (None: it misses a constraint); none = its step time.
        fit_probability: chance that a layout must have to fit; none = the predicted bytes must fit.
        share: of the memory that a predicted peak may fill.
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
        on_scored: Callable[[Scored], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        closing: Closing | None = None,
    ) -> None:
        del closing  # A killed search goes on from the layouts in its store: nothing else is costly.
        self.space, self.pricing, self.incumbents = space, pricing, incumbents
        self.evaluation = pricing.evaluation
        self.examine, self.fit_probability, self.share = examine, fit_probability, share
        self.on_scored, self.on_progress = on_scored, on_progress
        self.account, self.glimpses = Account(), dict[object, Glimpse]()
        self.heap: list[tuple[float, int, str, Any, int]] = []
        self._tick, self._started = itertools.count(), time.monotonic()
        cluster = space.template.cluster
        parts = tuple(part.model_copy(update={"memory_scale": part.memory_scale * share}) for part in cluster.parts)
        less = {"parts": parts} if parts else {"memory_scale": cluster.memory_scale * share}
        self._cautious = space.template.model_copy(update={"cluster": cluster.model_copy(update=less)})

    @property
    def best(self) -> list[Scored]:
        """The best so far, best first."""
        return self.incumbents.best

    def nodes(self) -> list[Node]:
        """Every mesh and micro-batch."""
        return [(g, b, m) for g in self.space.groups for b, m in self.space.micro_batches(g)]

    def survey(self, nodes: Sequence[Node]) -> float:
        """What nothing on these meshes ranks before, as far as is seen at a glance: nothing is."""
        del nodes
        return 0.0

    def run(self, nodes: Sequence[Node] | None = None) -> None:
        """Search until nothing can beat the best."""
        found = self.nodes() if nodes is None else list(nodes)
        if not self.best:
            self._seed(found)
        for node in found:
            self._push(0.0, "mesh", node, self.space.count(node[0], node[2]))
        openers: dict[str, Callable[[float, Any, int], None]] = {
            "mesh": self._open_mesh,
            "variant": self._open_variant,
            "layout": self._open_layout,
        }
        while self.heap:
            key, _, kind, payload, count = heapq.heappop(self.heap)
            if self.incumbents.beats(key):
                self.account.rejected[BOUND] += count + sum(entry[-1] for entry in self.heap)
                self.heap.clear()
                break
            openers[kind](key, payload, count)
            if self.on_progress is not None:
                best = self.best[0] if self.best else None
                simulated = self.account.evaluated["simulated"]
                self.on_progress(Progress(best, key, len(self.heap), simulated, time.monotonic() - self._started))

    def _push(self, bound: float, kind: str, payload: Any, count: int) -> None:
        if not count:
            return
        if bound == inf:
            self.account.rejected[MEMORY] += count
        elif self.incumbents.late(np.array(bound)):
            self.account.rejected[CONSTRAINT] += count
        else:
            # A front, and a rank by memory, want every layout that fits: their bounds say nothing of bytes.
            least = 0.0 if self.incumbents.front or self.incumbents.by_memory else bound
            heapq.heappush(self.heap, (least, next(self._tick), kind, payload, count))

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

    def _open_mesh(self, bound: float, node: Node, count: int) -> None:
        """Bound every variant without recomputation."""
        del bound, count
        group, batch, m = node
        for variant in self.space.variants(group):
            layouts = self.space.variant_count(group, m, variant)
            if layouts:
                choice = Choice(group, batch, variant, PLAIN, "none", self.space.states(group)[0], Offload(0.0, False))
                self._push(self._load(choice, "none") * m, "variant", (node, variant), layouts)

    def _open_variant(self, bound: float, payload: tuple[Node, Variant], count: int) -> None:
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
                self._push(self.bound(choice, m), "layout", choice, 1)

    def _open_layout(self, bound: float, choice: Choice, count: int) -> None:
        """Simulate one layout."""
        known = self.incumbents
        reason = BOUND if known.outdone(bound, 0.0, choice) or known.unpromising(bound, choice) else self._simulate(choice, bound)
        if reason:
            self.account.rejected[reason] += count
        else:
            self.account.kept += count

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
        return found + self._last(costs) if self._waits(splits=splits) else found

    def _last(self, costs: PartCosts) -> float:
        """Seconds after the last reduction: some rank holds as many layers as an even cut has, and gathers them."""
        share = self.space.layers / len(costs.total) / costs.layers
        return float((costs.gather * np.minimum(share, 1.0)).min())

    def _waits(self, *, splits: bool) -> bool:
        """Whether every rank waits for all gradients before its update; the rule of `program.waits.optimizer_waits`."""
        plan, spec = self.space.template.plan, self.pricing.framework
        if plan.synchronous_optimizer is not None:
            return plan.synchronous_optimizer
        return not (spec.optimizer.optimizer_post_validation and splits)

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
        known = (s for s in self.incumbents.known if replace(s.choice, pipeline=replace(s.choice.pipeline, layers=())) == choice)
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
        value = self.incumbents.rank(time_s, need) if self.examine is None else self.examine(choice, time_s, need)
        if value is None or self.incumbents.late(np.array(time_s)):
            return CONSTRAINT
        self.incumbents.timed(choice, bound, time_s)
        scored = Scored(choice, time_s, need, value)
        self.glimpses.setdefault(mesh_key(choice.group, choice.micro_batch_size), Glimpse(choice, time_s, need))
        if self.on_scored is not None:
            self.on_scored(scored)
        self.incumbents.add(scored)
        return ""

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


__all__ = ["MixedBranch", "MixedEvaluation", "MixedPricing"]
