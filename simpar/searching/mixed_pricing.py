"""Prices of layouts over several kinds of machines, and what a bound needs of them: seconds and bytes of each part's ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from simpar.costs.mixed import MixedPricer
from simpar.costs.pricer import LayoutPricer
from simpar.engine.effects import expected_load_factor
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.data import state_memory
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray
from simpar.result.memory import block_bytes
from simpar.result.outside import outside_bytes
from simpar.result.result import Result
from simpar.searching.choice import Choice, Offload, State, Variant
from simpar.searching.in_flight import held_by_chunk
from simpar.searching.mixed_space import PLAIN, MixedSpace
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario
from simpar.specs.stage_plan import Host, alike
from simpar.step import layout_of, pricer_of, schedule_of, simulate

_REMEMBERED: Final = 256
"""Results that are kept: the best are asked for again when the answer is written."""


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


__all__ = ["Layers", "MixedEvaluation", "MixedPricing", "PartCosts"]
