"""Prices and bytes of the space's layouts, each computed once: the memo between the space and the models of costs."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simpar.costs.collectives import CollectiveModel
from simpar.costs.kernels import KernelModel
from simpar.costs.pricer import KeyPrice, LayoutPricer
from simpar.engine.effects import expected_load_factor
from simpar.parallel.data import state_memory
from simpar.parallel.keys import Gather, OptimizerStep, Reduce, Send
from simpar.parallel.layout import Layout
from simpar.parallel.pipeline import boundary_bytes, split_layers
from simpar.parallel.split import LocalBlock
from simpar.parallel.work import HostCopy
from simpar.program.program import FloatArray
from simpar.search.blocks import BlockTable, Composition, Gathered, Kinds, block_table, plain_blocks, serial_seconds
from simpar.search.choice import EVEN, Choice, Group, Offload, Pipeline, State, Variant
from simpar.search.residency import RankResidency, residencies
from simpar.search.shapes import shape_of
from simpar.search.space import Space
from simpar.simulate import cost_models, schedule_of
from simpar.specs.framework import FrameworkSpec
from simpar.specs.scenario import Scenario

ONE_STAGE = Pipeline(1, "1f1b", EVEN, None)
NOTHING = Offload(0.0, False)


@dataclass(frozen=True)
class StatePrices:
    """Seconds and bytes per weight of one spread of the states.

    Attributes:
        gather, reduce: float arrays [kinds], seconds for one block's weights.
        dense_bytes, expert_bytes: resting bytes per weight (parameters + gradients, optimizer).
    """

    gather: FloatArray
    reduce: FloatArray
    dense_bytes: tuple[float, float]
    expert_bytes: tuple[float, float]


class Pricing:
    """All memos of one search in one process."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.template = space.template
        self.kernels: KernelModel
        self.collectives: CollectiveModel
        self.kernels, self.collectives = cost_models(space.template, space.template.hardware)
        self._tables: dict[object, BlockTable] = {}
        self._floors: dict[object, FloatArray] = {}
        self._lists: dict[object, dict[int, LocalBlock]] = {}
        self._compositions: dict[object, Composition] = {}
        self._residencies: dict[tuple[str, int, int, int], tuple[RankResidency, ...]] = {}
        self._states: dict[object, StatePrices] = {}
        self._sites: dict[Group, tuple[object, ...]] = {}
        self._pricers: dict[object, LayoutPricer] = {}
        self._sends: dict[object, float] = {}
        self._amounts: dict[object, float] = {}

    # -- layouts ---------------------------------------------------------------------------------------------------

    def layout(self, choice: Choice) -> Layout:
        """The layout of a choice, as `simulate` would make it."""
        shape = shape_of(choice.group.pp, choice.pipeline.virtual_stages, choice.pipeline.schedule)
        return self._layout(choice.scenario(self.template), shape.stages, shape.replicas)

    def _layout(self, scenario: Scenario, stages: int, replicas: int) -> Layout:
        return Layout.of(scenario, stages, replicas, expected_load_factor(scenario))

    def _probe(self, group: Group, batch: int, variant: Variant, recompute: str = "none", state: State | None = None) -> Layout:
        """A layout for what does not depend on the pipeline: one stage, whatever pp is."""
        state = state or State(0, None, True, True, True)
        choice = Choice(group, batch, variant, ONE_STAGE, recompute, state, NOTHING)
        return self._layout(choice.scenario(self.template), 1, 1)

    @cached_property
    def kinds(self) -> Kinds:
        """Distinct blocks; the same for all layouts of a model."""
        group = self.space.groups[0]
        variant = self.space.variants(group)[0]
        return Kinds.of(self._probe(group, 1, variant).network)

    @cached_property
    def model_flops(self) -> float:
        """Model FLOPs of one step, forward and backward; the same for all layouts."""
        group = self.space.groups[0]
        return self._probe(group, 1, self.space.variants(group)[0]).model_flops

    def site(self, group: Group) -> tuple[object, ...]:
        """Where the groups that communicate inside a block sit: all of a mesh that block prices depend on."""
        if group not in self._sites:
            mesh, hardware, nodes = self.space.mesh(group), self.template.hardware, self.template.cluster.num_nodes
            places: list[object] = [mesh.placement(d, hardware, nodes) for d in ("tp", "cp", "ep", "etp")]
            if group.cp > 1:
                places.append(mesh.hops("cp", hardware, nodes)[0][0])
            self._sites[group] = (group.tp, group.cp, group.ep, group.etp, *places)
        return self._sites[group]

    # -- blocks ----------------------------------------------------------------------------------------------------

    def table(self, group: Group, batch: int, variant: Variant, recompute: str, *, split: bool) -> BlockTable:
        """Numbers of every kind of block."""
        recompute = "full" if recompute.startswith("full") else recompute
        key = (self.site(group), batch, variant, recompute, split)
        if key not in self._tables:
            layout = self._probe(group, batch, variant, recompute)
            pricer = LayoutPricer(layout, self.kernels, self.collectives)
            self._tables[key] = block_table(layout, pricer, self.kinds, split=split)
        return self._tables[key]

    def floor(self, group: Group, batch: int, variant: Variant) -> FloatArray:
        """Lower bounds on seconds [forward, backward, backward and forward without communication; kinds].

        The dense part of a block does not depend on expert parallelism, nor the expert part on the context-parallel style: each
        is priced once per combination that it does depend on, and both are added (see `serial_seconds`).
        """
        total = self._dense_floor(group, batch, variant)
        return total + self._expert_floor(group, batch, variant) if self.has_experts else total

    def compute_floor(self, group: Group, batch: int) -> FloatArray:
        """Compute alone, [forward, backward; kinds], a bound for every variant of a mesh and micro-batch."""
        key = ("compute", self.site(group), batch)
        if key not in self._floors:
            found = []
            variants = self.space.variants(group)
            for precision, style in dict.fromkeys((v.precision, v.cp_style) for v in variants):
                sequence = any(v.sequence_parallel for v in variants)
                found.append(self.floor(group, batch, Variant(sequence, style, False, False, "alltoall", precision))[[3, 2]])
            self._floors[key] = np.minimum.reduce(found)
        return self._floors[key]

    @property
    def has_experts(self) -> bool:
        """Whether the model has expert layers."""
        return getattr(self.template.model, "moe", None) is not None

    def _dense_floor(self, group: Group, batch: int, variant: Variant) -> FloatArray:
        site = self.site(group)
        v = variant
        key = ("dense", site[0], site[1], site[4], site[5], site[8:], batch, v.sequence_parallel, v.cp_style, v.overlap_tp, v.precision)  # noqa: E501
        if key not in self._floors:
            flat = Group(group.tp, group.cp, group.pp, group.dp, 1, group.tp, group.placement)
            plain = Variant(v.sequence_parallel, v.cp_style, v.overlap_tp, False, "alltoall", v.precision)
            layout = self._probe(flat, batch, plain)
            blocks = plain_blocks(layout, self.kinds, experts_only=False)
            self._floors[key] = self._floor_of(layout, blocks, expert=False, hidden=False)
        return self._floors[key]

    def _expert_floor(self, group: Group, batch: int, variant: Variant) -> FloatArray:
        v, tokens = variant, batch / (group.cp * group.tp)
        router = tokens if v.sequence_parallel else batch / group.cp
        site = self.site(group)
        key = ("expert", tokens, router, site[2], site[3], site[6], site[7], v.overlap_ep, v.ep_dispatcher, v.precision)
        if key not in self._floors:
            layout = self._probe(group, batch, Variant(v.sequence_parallel, "ring", False, False, v.ep_dispatcher, v.precision))
            lists = (tokens, router, group.ep, group.etp, v.ep_dispatcher, v.precision)
            if lists not in self._lists:
                self._lists[lists] = plain_blocks(layout, self.kinds, experts_only=True)
            self._floors[key] = self._floor_of(layout, self._lists[lists], expert=True, hidden=v.overlap_ep)
        return self._floors[key]

    def _floor_of(self, layout: Layout, blocks: dict[int, LocalBlock], *, expert: bool, hidden: bool) -> FloatArray:
        pricer = LayoutPricer(layout, self.kernels, self.collectives)
        found = np.zeros((4, self.kinds.count))
        for kind, block in blocks.items():
            for row, ops in enumerate((block.forward, block.backward)):
                found[row, kind] = serial_seconds(ops, pricer.op_price, hidden=hidden)[expert]
            for row, ops in ((2, block.backward), (3, block.forward)):
                own = (op for op in ops if op.stream == "compute" and op.name.startswith("moe") == expert)
                found[row, kind] = sum(pricer.op_price(op).seconds for op in own)
        n = self.kinds.layers
        found[:, :n] = found[:, n : 2 * n]
        return found

    # -- pipeline --------------------------------------------------------------------------------------------------

    def composition(self, pipeline: Pipeline, pp: int, limit: int | None) -> Composition:
        """Blocks of every stage."""
        stages = shape_of(pp, pipeline.virtual_stages, pipeline.schedule).stages
        key = (stages, pipeline.split, limit)
        if key not in self._compositions:
            first, last, alone = pipeline.split
            plan = self.template.plan.model_copy(
                update={"first_stage_less_layers": first, "last_stage_less_layers": last, "embedding_alone": alone,
                        "layers_per_stage": None}
            )  # fmt: skip
            layers = split_layers(len(self.kinds.layer), stages, plan)
            self._compositions[key] = Composition.of(self.kinds, layers, limit)
        return self._compositions[key]

    def residency(self, pipeline: Pipeline, pp: int, m: int) -> tuple[RankResidency, ...]:
        """What each rank holds at its worst moments."""
        key = (pipeline.schedule, pipeline.virtual_stages, pp, m)
        if key not in self._residencies:
            plan = self.template.plan.model_copy(
                update={"pp": pp, "schedule": pipeline.schedule, "virtual_stages": pipeline.virtual_stages}
            )
            schedule = schedule_of(self.template.model_copy(update={"plan": plan}), m)
            self._residencies[key] = residencies(schedule, outputs=self.framework.keeps_last_outputs and pp > 1)
        return self._residencies[key]

    def send(self, group: Group, batch: int, variant: Variant) -> float:
        """Seconds of a boundary tensor; 0 where boundaries differ (then only a bound)."""
        if group.pp == 1:
            return 0.0
        key = (group, batch, variant.sequence_parallel)
        if key not in self._sends:
            layout = self._probe(group, batch, variant)
            same = len(set(layout.network.boundary_bytes)) == 1
            pricer = LayoutPricer(layout, self.kernels, self.collectives)
            self._sends[key] = pricer.price(Send(0, 0, backward=False)).seconds if same else 0.0
        return self._sends[key]

    def sent_bytes(self, group: Group, batch: int, variant: Variant) -> float:
        """Bytes of a stage's output where it stays until the backward; 0 where boundaries differ (then only a bound)."""
        if group.pp == 1 or not self.framework.keeps_stage_outputs:
            return 0.0
        layout = self._probe(group, batch, variant)
        sizes = set(layout.network.boundary_bytes)
        return boundary_bytes(sizes.pop(), layout.plan) if len(sizes) == 1 else 0.0

    def gathered(self, group: Group, variant: Variant, state: State) -> Gathered | None:
        """How weights come and go with their blocks under full sharding; None where they do not."""
        layout = self.state_layout(group, variant, state).layout
        stays = group.pp > 1 and layout.framework.fsdp_unsharded_with_pp
        if state.zero_stage != 3 or layout.data_ranks == 1 or stays or layout.training.optimizer == "none":
            return None
        bytes_ = layout.state_bytes
        return Gathered(bytes_.gather, bytes_.reduce, layout.framework.fsdp_prefetch_groups)

    def blocking(self, pipeline: Pipeline, pp: int) -> bool:
        """Whether sends hold the compute stream; the rule of `program.lower.p2p_blocks`."""
        if pipeline.overlap_p2p is not None:
            return not pipeline.overlap_p2p
        shape, spec = shape_of(pp, pipeline.virtual_stages, pipeline.schedule), self.framework
        if shape.style != "full" or shape.replicas > 1:
            return not spec.overlap_p2p_zero_bubble
        return not spec.overlap_p2p_interleaved if shape.stages > pp else spec.p2p_blocking

    @cached_property
    def framework(self) -> FrameworkSpec:
        """Semantics of the framework."""
        group = self.space.groups[0]
        return self._probe(group, 1, self.space.variants(group)[0]).framework

    # -- states ----------------------------------------------------------------------------------------------------

    def state_layout(self, group: Group, variant: Variant, state: State) -> LayoutPricer:
        """A pricer whose layout spreads the states this way (pipeline and micro-batch do not matter to it)."""
        key = (group, variant.precision, state)
        if key not in self._pricers:
            layout = self._probe(group, 1, variant, state=state)
            self._pricers[key] = LayoutPricer(layout, self.kernels, self.collectives)
        return self._pricers[key]

    def states(self, group: Group, variant: Variant, state: State) -> StatePrices:
        """Seconds per block and bytes per weight of a spread."""
        key = (group, variant.precision, state)
        if key not in self._states:
            layout = self.state_layout(group, variant, state).layout
            table = self.table(group, 1, variant, "none", split=False)
            data = layout.data_ranks > 1 and layout.training.optimizer != "none"
            gather, reduce = (
                np.array([self.data_seconds(group, variant, state, name, d, e) if data else 0.0
                          for d, e in zip(table.dense, table.expert, strict=True)])
                for name in ("gather", "reduce")
            )  # fmt: skip
            pairs = self.state_bytes(group, variant, state)
            self._states[key] = StatePrices(gather, reduce, *pairs)
        return self._states[key]

    def state_bytes(
        self, group: Group, variant: Variant, state: State, *, passing: bool = False
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Resting bytes per dense and per expert weight: (parameters and gradients, optimizer) each.

        `passing`: gradients may exist from the only backward to the update alone; then a bound leaves them out.
        """
        key = ("bytes", variant.precision, state.zero_stage)
        if key not in self._pricers:
            self._pricers[key] = self.state_layout(group, variant, state)
        persist = self.framework.gradients_persist or not passing
        bytes_ = replace(self._pricers[key].layout.state_bytes, gradients_persist=persist)
        ranks = group.dp * group.cp
        shards = state.shard_size or ranks
        edp = group.tp * group.cp * group.dp // (group.etp * group.ep)
        a = state_memory(1.0, bytes_, state.zero_stage, shards)
        b = state_memory(1.0, bytes_, state.zero_stage, max(edp // (ranks // shards), 1))
        if self.template.training.optimizer == "none":
            return (a.parameters, 0.0), (b.parameters, 0.0)
        return (a.parameters + a.gradients, a.optimizer), (b.parameters + b.gradients, b.optimizer)

    def data_seconds(self, group: Group, variant: Variant, state: State, what: str, dense: float, expert: float) -> float:
        """Seconds to gather (or reduce) these weights over the data-parallel ranks, as the pricer counts them."""
        key = (group, variant.precision, state.zero_stage, state.shard_size, what, dense, expert)
        if key not in self._amounts:
            pricer = self.state_layout(group, variant, state)
            whole = Gather(0, 0, 1) if what == "gather" else Reduce(0, 0, 1)
            self._amounts[key] = _with_weights(pricer, dense, expert, whole).seconds
        return self._amounts[key]

    def loss(self, group: Group, variant: Variant, state: State, *, gathers: bool) -> float:
        """Share of the time beside data-parallel traffic in which compute makes no progress: f / (1 + f) of the least f."""
        key = (group, variant.precision, state.zero_stage, state.shard_size, "loss", gathers)
        if key not in self._amounts:
            pricer, table = self.state_layout(group, variant, state), self.table(group, 1, variant, "none", split=False)
            keys = [Reduce(0, 0, 1), *([Gather(0, 0, 1)] if gathers else [])]
            least = float(table.dense[table.dense > 0].min(initial=np.inf))
            found = [_with_weights(pricer, least, 0.0, key_).interference for key_ in keys if np.isfinite(least)]  # type: ignore[arg-type]
            factor = min(found, default=0.0)
            self._amounts[key] = factor / (1.0 + factor)
        return self._amounts[key]

    def optimizer_seconds(self, group: Group, variant: Variant, state: State, dense: float, expert: float, offloaded: bool) -> float:  # noqa: E501
        """Seconds of a rank's update."""
        key = (group, variant.precision, state.zero_stage, state.shard_size, "step", dense, expert, offloaded)
        if key not in self._amounts:
            choice = Choice(group, 1, variant, ONE_STAGE, "none", state, Offload(0.0, offloaded))
            pricer = self.state_layout(group, variant, state)
            if offloaded:
                layout = self._layout(choice.scenario(self.template), 1, 1)
                pricer = LayoutPricer(layout, self.kernels, self.collectives)
            self._amounts[key] = _with_weights(pricer, dense, expert, OptimizerStep(0)).seconds
        return self._amounts[key]

    def waits(self, style: str) -> bool:
        """Whether every rank waits for all gradients before its update; the rule of `program.lower.optimizer_waits`."""
        if self.template.plan.synchronous_optimizer is not None:
            return self.template.plan.synchronous_optimizer
        return not (self.framework.optimizer_post_validation and style != "full")

    @cached_property
    def host_seconds_per_byte(self) -> float:
        """A byte over one GPU's host link."""
        group = self.space.groups[0]
        layout = self._probe(group, 1, self.space.variants(group)[0])
        return LayoutPricer(layout, self.kernels, self.collectives)._work(HostCopy(1e9)).seconds / 1e9


def _with_weights(pricer: LayoutPricer, dense: float, expert: float, key: Gather | Reduce | OptimizerStep) -> KeyPrice:
    """The price of `key` if the one stage of the pricer's layout held these weights: the pricer's own formulas.

    Under low-rank adaptation nothing is known of the trained weights: they count as none, which keeps bounds ones.
    """
    layout = copy.copy(pricer.layout)
    lora = bool(layout.options.lora_rank)

    def block_parameters(stage: int, first: int, last: int, *, trainable: bool = False) -> tuple[float, float]:
        return (0.0, 0.0) if lora and trainable else (dense, expert)

    layout.__dict__["block_parameters"] = block_parameters
    other = copy.copy(pricer)
    other.layout = layout
    other.__dict__["stages_of_rank"] = {0: [0]}
    return other._price(key)


__all__ = ["NOTHING", "ONE_STAGE", "Pricing", "StatePrices"]
