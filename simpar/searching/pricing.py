"""Prices and bytes of the space's layouts, each computed once: the memo between the space and the models of costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from simpar.costs.pricer import LayoutPricer
from simpar.engine.effects import expected_load_factor
from simpar.graph.rematerialise import Recompute
from simpar.graph.types import Layer
from simpar.parallel.data import StateBytes, state_memory
from simpar.parallel.layout import Layout
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import HostCopy
from simpar.program.program import FloatArray
from simpar.program.waits import update_waits
from simpar.result.gathers import bucket_elements, head_gradient_bytes, update_bytes
from simpar.result.outside import outside_bytes, workspaces
from simpar.schedules import SCHEDULES
from simpar.searching import axes
from simpar.searching.blocks import (
    B,
    BlockTable,
    Column,
    F,
    Gathered,
    I,
    Kinds,
    W,
    block_kinds,
    column_of,
    encoder_kinds,
    has_experts,
    no_longer,
)
from simpar.searching.choice import EVEN, Choice, Group, Offload, Pipeline, State, Variant
from simpar.searching.floors import Floors
from simpar.searching.memo import kept
from simpar.searching.pipelines import Pipelines
from simpar.searching.sends import Sends
from simpar.searching.shapes import shape_of
from simpar.searching.sites import Sites
from simpar.searching.slow_ranks import SlowRanks
from simpar.searching.space import Space
from simpar.searching.stages import Pairs
from simpar.searching.state_prices import StatePricer
from simpar.specs.framework import FrameworkSpec, framework
from simpar.specs.scenario import Scenario
from simpar.step import cost_models

if TYPE_CHECKING:
    from simpar.searching.evaluation import Evaluation

ONE_STAGE = Pipeline(1, "1f1b", EVEN, None)
NOTHING = Offload(0.0, False)
Locals = dict[int, tuple[Layer, SplitOptions, bool]]
"""Each kind of block, how it is split, and whether the plan's recomputation is for it."""


class Pricing:
    """All memos of one search in one process."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.template = space.template
        self.kernels, self.collectives = cost_models(space.template, space.template.hardware)
        self._tables: dict[object, BlockTable] = {}
        self._columns: dict[object, tuple[Column, Column]] = {}
        self._pairs: dict[object, Pairs] = {}
        self._held: dict[object, dict[str, FloatArray]] = {}
        self._kept: dict[object, FloatArray] = {}
        self._again: dict[tuple[str, bool], dict[str, Recompute]] = {}
        self._weights: dict[object, BlockTable] = {}
        self._by_state: dict[str, tuple[State, ...]] = {}
        self._state_prices: dict[object, StatePricer] = {}
        self._casts: dict[tuple[str, int], float] = {}
        self._pricers: dict[object, LayoutPricer] = {}
        self._plain: dict[object, list[LayoutPricer]] = {}
        self.pipelines, self.sites, self.floors, self.sends = Pipelines(self), Sites(space), Floors(self), Sends(self)
        self.slow_ranks = SlowRanks(space.template)
        self.evaluation: Evaluation | None = None

    # -- layouts ---------------------------------------------------------------------------------------------------

    def layout(self, choice: Choice) -> Layout:
        """The layout of a choice, as `simulate` would make it."""
        shape = shape_of(choice.group.pp, choice.pipeline.virtual_stages, choice.pipeline.schedule)
        return self._layout(choice.scenario(self.template), shape.stages, shape.replicas, ends_meet=shape.ends_meet)

    def _layout(self, scenario: Scenario, stages: int, replicas: int, *, ends_meet: bool = False) -> Layout:
        return Layout.of(scenario, stages, replicas, expected_load_factor(scenario), ends_meet=ends_meet)

    def probe(
        self, group: Group, batch: int, variant: Variant, recompute: str = "none", state: State | None = None, order: str = "1f1b"
    ) -> Layout:
        """A layout for what does not depend on the pipeline: one stage, whatever pp is; `order`: a schedule, see `orders`."""
        state = state or State(0, None, True, True, True)
        choice = Choice(group, batch, variant, replace(ONE_STAGE, schedule=order), recompute, state, NOTHING)
        return self._layout(choice.scenario(self.template), 1, 1)

    @cached_property
    def kinds(self) -> Kinds:
        """Distinct blocks; the same for all layouts of a model."""
        group = self.space.first_group
        variant = self.space.variants(group)[0]
        return Kinds.of(self.probe(group, 1, variant).network)

    @cached_property
    def model_flops(self) -> float:
        """Model FLOPs of one step, forward and backward; the same for all layouts."""
        group = self.space.first_group
        return self.probe(group, 1, self.space.variants(group)[0]).model_flops

    # -- blocks ----------------------------------------------------------------------------------------------------

    def table(self, group: Group, batch: int, variant: Variant, recompute: str) -> BlockTable:
        """Numbers of every kind of block."""
        recompute = "full" if recompute.startswith("full") else recompute
        return self._table(group, batch, variant, recompute, (F, B, I, W) if self.splits else (F, B))

    def _table(self, group: Group, batch: int, variant: Variant, recompute: str, phases: tuple[int, ...]) -> BlockTable:
        key = (self._column_name(group, batch, variant, experts=self.has_experts), recompute, phases)
        if key not in self._tables:
            orders, shared = self.orders(variant), self.kinds.shared_head
            unlike = product(self.kinds_of_states(variant), orders)
            layouts = [self.probe(group, batch, variant, recompute, state, order) for state, order in unlike]
            pricers = [LayoutPricer(layout, self.kernels, self.collectives) for layout in layouts]
            layout = layouts[0]
            if recompute == "none" and phases:
                self._plain[key[0]] = pricers
            elif key[0] in self._plain:
                pricers = [pricer.like(plain) for pricer, plain in zip(pricers, self._plain[key[0]], strict=True)]
            columns: list[tuple[Column, Column] | None] = [None] * self.kinds.count
            split = [self.locals(each) for each in layouts]
            for kind, (block, _, recomputes) in split[0].items():
                same = kind - self.kinds.layers if self.kinds.layers <= kind < 2 * self.kinds.layers else kind
                where = self._column_name(group, batch, variant, experts=has_experts(block))
                name = (same, *where, recompute if recomputes else "none", phases)
                if name not in self._columns:
                    found = [
                        column_of(p.layout, p, p.layout.split(block, own[kind][1]), phases, sharded=self.shards)
                        for p, own in zip(pricers, split, strict=True)
                    ]
                    less = found[0]["dense"] if kind == self.kinds.mtp_head else layout.tied_extra if kind == shared else 0.0
                    self._columns[name] = no_longer([c | {"dense": c["dense"] - less} if less else c for c in found], -len(orders))
                columns[kind] = self._columns[name]
            self._tables[key] = BlockTable.of(columns, layout.calibration.pass_s)
        return self._tables[key]

    def pairs(self, group: Group, batch: int, variant: Variant, recompute: str) -> Pairs:
        """Seconds of passes that run in pairs."""
        recompute = "full" if recompute.startswith("full") else recompute
        key = (self._column_name(group, batch, variant, experts=self.has_experts), recompute)
        if key not in self._pairs:
            self._pairs[key] = Pairs(self, group, batch, variant, recompute)
        return self._pairs[key]

    def orders(self, variant: Variant) -> list[str]:
        """Schedules between which the op lists of blocks differ: DualPipe has orders of its own for hidden expert exchanges."""
        names = self.space.values("schedule", axes.SCHEDULES) if variant.overlap_ep else ()
        return ["1f1b", *(name for name in names if name.startswith("dualpipe"))][:2]

    @staticmethod
    def holding(variant: Variant) -> tuple[object, ...]:
        """What of a variant decides what its blocks keep: not what runs beside what."""
        return variant.sequence_parallel, variant.cp_style, variant.ep_dispatcher, variant.precision

    def held(self, group: Group, batch: int, variant: Variant, recompute: str) -> FloatArray:
        """Bytes that blocks of each kind keep from forward to backward, whatever runs beside what and wherever ranks sit."""
        of = (group.tp, group.cp, group.pp > 1, batch, self.holding(variant))
        known = self._held.setdefault((*of, group.ep, group.etp), {})
        if recompute not in known:
            whole = recompute not in ("none", *self.space.selections) or bool(self.kinds.encoders)
            layout = self.probe(group, batch, variant, recompute if whole else "none", self.kinds_of_states(variant)[-1])
            # Selected modules change what runs again and nothing else (`Job.options`): blocks are looked at once for all of them.
            again = {} if whole else self._selected(group, batch, variant)
            found = np.zeros((len(again) or 1, self.kinds.count))
            for kind, (block, options, recomputes) in self.locals(layout).items():
                name = (kind, *of, *((group.ep, group.etp) if has_experts(block) else ()), whole and recompute)
                if name not in self._kept:
                    every = tuple(again.values()) if again and recomputes else (options.recompute,)
                    self._kept[name] = LocalLayer(block, options).saved_bytes(every)
                found[:, kind] = self._kept[name]
            known |= zip(again or (recompute,), found, strict=True)
        return known[recompute]

    def _selected(self, group: Group, batch: int, variant: Variant) -> dict[str, Recompute]:
        """What runs again of every set of modules, the same on all meshes but for exchanges of experts."""
        key = (variant.precision, group.ep > 1)
        if key not in self._again:
            names = dict.fromkeys(("none", *self.space.selections))
            self._again[key] = {name: self.probe(group, batch, variant, name).options.recompute for name in names}
        return self._again[key]

    def locals(self, layout: Layout) -> Locals:
        """Every kind of block and how it is split."""
        kinds, lasting = block_kinds(layout.network, self.kinds), self._lasting(layout)
        found = {kind: (block, layout.options if again else lasting, again) for kind, block, again in kinds}
        encoders = encoder_kinds(layout.network, self.kinds).items()
        return found | {kind: (e.layer, layout.encoder_options(e), True) for kind, e in encoders}

    def _column_name(self, group: Group, batch: int, variant: Variant, *, experts: bool) -> tuple[object, ...]:
        """What the numbers of a block depend on: all of it, or all but expert parallelism where it has no experts."""
        if experts:
            return (self.sites.with_batch(group, batch, variant), batch, variant)
        return self.sites.dense(self.sites.with_host(group), batch, variant)

    def slowed(self, group: Group, batch: int, variant: Variant, held: int) -> float:
        """How much longer the kernels of blocks without recomputation take at least beside what holds so many SMs."""
        self.table(group, batch, variant, "none")
        return self._plain[self._column_name(group, batch, variant, experts=self.has_experts)][0].slowed(held)

    @staticmethod
    def _lasting(layout: Layout) -> SplitOptions:
        """Options of blocks that never recompute."""
        return layout.options if layout.options.recompute == Recompute() else replace(layout.options, recompute=Recompute())

    def kinds_of_states(self, variant: Variant) -> tuple[State, ...]:
        """Shardings of the states between which the work of a block differs; under the last blocks keep no more than under others.

        Where weights are gathered in the precision of the matmuls, full sharding leaves out their casts.
        """
        if variant.precision not in self._by_state:
            states = [State(0, None, True, True, True), State(3, None, True, True, True)]
            group = self.space.first_group
            plain, sharded = (self.probe(group, 1, variant, state=state).options for state in states)
            # What stands for weight gradients is no work, and tables have it both ways.
            same = replace(
                sharded, weight_gradients=plain.weight_gradients, grouped_weight_gradients=plain.grouped_weight_gradients
            )
            both = same != plain and self.shards
            self._by_state[variant.precision] = tuple(states if both else states[:1])
        return self._by_state[variant.precision]

    def weights(self, group: Group, variant: Variant) -> BlockTable:
        """A table without seconds in which the weights of blocks are those of this mesh; they depend on little else."""
        key = (group.tp, group.ep, group.etp, variant.precision)
        if key not in self._weights:
            self._weights[key] = self._table(group, 1, variant, "none", ())
        return self._weights[key]

    @cached_property
    def splits(self) -> bool:
        """Whether a schedule of the space runs input and weight gradients apart."""
        return any(SCHEDULES[name].splits_backward for name in self.space.values("schedule", axes.SCHEDULES))

    @cached_property
    def shards(self) -> bool:
        """Whether weights may be fully sharded in the space."""
        return 3 in self.space.values("zero_stage", (0, 1, 2, 3))

    @property
    def has_experts(self) -> bool:
        """Whether the model has expert layers."""
        return getattr(self.template.model, "moe", None) is not None

    # -- what ranks hold -------------------------------------------------------------------------------------------

    @kept
    def outside_bytes(self, group: Group) -> float:
        """Context and communicators of one rank."""
        return sum(amount for _, amount in outside_bytes(self.probe(group, 1, self.space.variants(group)[0])))

    @cached_property
    def workspace_bytes(self) -> float:
        """Workspaces of matrix products of one rank, inside the allocator."""
        return sum(workspaces(self.framework, self.template.hardware.gpu.architecture))

    def stays_gathered(self, group: Group, state: State) -> bool:
        """Whether fully sharded weights rest gathered, with unsharded gradients, on the ranks of a pipeline."""
        resting = group.pp > 1 and self.template.training.optimizer != "none"
        return resting and state.zero_stage == 3 and group.dp * group.cp > 1

    def gathered(self, group: Group, variant: Variant, state: State) -> Gathered | None:
        """How weights come and go with their blocks under full sharding; None where they do not."""
        alone = group.dp * group.cp == 1 and not state.offload_parameters
        if state.zero_stage != 3 or alone or self.template.training.optimizer == "none":
            return None
        if self.stays_gathered(group, state):
            return None
        layout = self._stated(group, variant, state)
        bytes_, ahead = layout.state_bytes, self.framework.data.fsdp_prefetch_groups
        adapters = self.template.training.trainable == "lora"
        stays, reuse = not state.reshard_after_forward, (self.framework.data.fsdp_reuse_weights, bucket_elements(layout))
        return Gathered(bytes_.gather, bytes_.reduce, ahead, adapters, head_gradient_bytes(layout), stays, *reuse)

    def per_weight(self, group: Group, variant: Variant, state: State) -> StateBytes:
        """Bytes per weight of each kind of state."""
        return self._stated(group, variant, state).state_bytes

    def kept_casts(self, group: Group, variant: Variant, state: State) -> float:
        """Bytes per trained weight of autocast's 16-bit copies, which rest where nothing is recomputed."""
        key = (variant.precision, state.zero_stage)
        if key not in self._casts:
            found = 0.0
            if self.framework.optimizer.autocast:
                full = self.probe(group, 1, variant, "full", state)
                found = self._stated(group, variant, state).state_bytes.parameter - full.state_bytes.parameter
            self._casts[key] = found
        return self._casts[key]

    def _stated(self, group: Group, variant: Variant, state: State) -> Layout:
        """A layout with the states of `variant` and `state`."""
        key = ("bytes", variant.precision, state.zero_stage, state.offload_parameters, group.dp * group.cp > 1, group.pp > 1)
        if key not in self._pricers:
            self._pricers[key] = self.state_layout(group, variant, state)
        return self._pricers[key].layout

    @cached_property
    def framework(self) -> FrameworkSpec:
        """Semantics of the framework."""
        return framework(self.template.framework, self.template.framework_version)

    # -- states ----------------------------------------------------------------------------------------------------

    def state_layout(self, group: Group, variant: Variant, state: State) -> LayoutPricer:
        """A pricer whose layout shards the states this way (pipeline and micro-batch do not matter to it)."""
        key = (group, variant.precision, state)
        if key not in self._pricers:
            layout = self.probe(group, 1, variant, state=state)
            self._pricers[key] = LayoutPricer(layout, self.kernels, self.collectives)
        return self._pricers[key]

    def state_prices(self, group: Group, variant: Variant, state: State) -> StatePricer:
        """What a spread costs; what of it is hidden does not matter."""
        key = (group, variant.precision, state.zero_stage, state.shard_size, state.offload_parameters)
        if key not in self._state_prices:

            def offloaded() -> LayoutPricer:
                choice = Choice(group, 1, variant, ONE_STAGE, "none", state, Offload(0.0, True))
                return LayoutPricer(self._layout(choice.scenario(self.template), 1, 1), self.kernels, self.collectives)

            table = self.weights(group, variant)
            pricer = self.state_layout(group, variant, state)
            self._state_prices[key] = StatePricer(pricer, offloaded, table.dense, table.expert)
        return self._state_prices[key]

    def state_bytes(
        self, group: Group, variant: Variant, state: State, *, passing: bool = False
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Resting bytes per dense and per expert weight: (parameters and gradients, optimizer) each, without `kept_casts`.

        `passing`: gradients may exist from the only backward to the update alone; then a bound leaves them out.
        """
        persist = not passing or self.framework.optimizer.persist(state.zero_stage)
        own, away = self.per_weight(group, variant, state), state.offload_parameters
        kept = 0.0 if away else own.parameter - self.kept_casts(group, variant, state)
        moments = 0.0 if self._stated(group, variant, state).optimizer.paged else own.moments
        bytes_ = replace(own, gradients_persist=persist, parameter=kept, moments=moments)
        if self.stays_gathered(group, state):
            bytes_ = replace(bytes_, gradient=0.0)  # the shards come as the unsharded gradients go
        if away and self.framework.optimizer.states_follow_parameters:
            bytes_ = replace(bytes_, gradient=0.0, master=0.0, moments=0.0)
        ranks = group.dp * group.cp
        shards = state.shard_size or ranks
        edp = group.tp * group.cp * group.dp // (group.etp * group.ep)
        a = state_memory(1.0, bytes_, state.zero_stage, shards)
        b = state_memory(1.0, bytes_, state.zero_stage, max(edp // (ranks // shards), 1))
        if self.template.training.optimizer == "none":
            return (a.parameters, 0.0), (b.parameters, 0.0)
        if self.framework.optimizer.gradients_to_host:  # they go where the states go
            return (a.parameters, a.optimizer + a.gradients), (b.parameters, b.optimizer + b.gradients)
        return (a.parameters + a.gradients, a.optimizer), (b.parameters + b.gradients, b.optimizer)

    def update_share(self, group: Group, variant: Variant, state: State) -> float:
        """What an update needs for itself over what rests with the optimizer (`state_bytes`)."""
        share = update_bytes(self.state_layout(group, variant, state).layout, 1.0)
        each = state_memory(1.0, self.per_weight(group, variant, state), state.zero_stage, state.shard_size or group.dp * group.cp)
        beside = each.gradients if self.framework.optimizer.gradients_to_host else 0.0
        return share * each.optimizer / (each.optimizer + beside) if share else 0.0

    def waits(self, style: str) -> bool:
        """Whether every rank waits for all gradients before its update."""
        return update_waits(self.template.plan, self.framework, splits=style != "full")

    @cached_property
    def host_seconds_per_byte(self) -> float:
        """A byte over one GPU's host link."""
        group = self.space.first_group
        layout = self.probe(group, 1, self.space.variants(group)[0])
        return LayoutPricer(layout, self.kernels, self.collectives)._work(HostCopy(1e9)).seconds / 1e9


__all__ = ["NOTHING", "ONE_STAGE", "Pricing"]
