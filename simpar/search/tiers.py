"""Tiers 2 and 3: layouts as programs, programs shared between layouts of one shape, prices shared between layouts of one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpar.costs.pricer import KeyPrice, LayoutPricer
from simpar.engine import discrete_event
from simpar.engine.longest_path import longest_path_batch
from simpar.parallel.keys import Compute, Gather, Offload, OptimizerStep, Overlapped, Reduce, Send
from simpar.parallel.layout import Layout
from simpar.program.lower import lower
from simpar.program.program import FloatArray, IntArray, PriceTable, Program
from simpar.schedules import Schedule
from simpar.search.choice import Choice
from simpar.search.pricing import Pricing
from simpar.simulate import Priced, interpret, schedule_of


@dataclass(frozen=True)
class Lowered:
    """A program, and its prices reduced to those that can differ.

    Attributes:
        program: at stage detail (at layer detail where activations are offloaded).
        schedule: it came from.
    """

    program: Program
    schedule: Schedule
    num_microbatches: int


@dataclass(frozen=True)
class Columns:
    """Which of a program's prices are the same by construction.

    Attributes:
        parts: (memo scope, description) of each distinct price.
        keys: one price key of each.
        index: int array [price keys], the distinct price of each.
    """

    parts: tuple[tuple[str, object], ...]
    keys: tuple[object, ...]
    index: IntArray


class Tiers:
    """Programs and prices of one search in one process."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._schedules: dict[object, Schedule] = {}
        self._programs: dict[object, Lowered] = {}
        self._known: dict[object, Lowered] = {}
        self._columns: dict[object, Columns] = {}
        self._prices: dict[object, tuple[float, float]] = {}
        self._replayed: dict[object, float] = {}
        self.replays = 0

    # -- programs ----------------------------------------------------------------------------------------------------

    def schedule(self, choice: Choice, m: int) -> Schedule:
        """The schedule of a choice."""
        key = (choice.pipeline.schedule, choice.pipeline.virtual_stages, choice.group.pp, m)
        if key not in self._schedules:
            self._schedules[key] = schedule_of(choice.scenario(self.pricing.template), m)
        return self._schedules[key]

    def lowered(self, choice: Choice) -> Lowered:
        """The program of a choice; layouts of one shape share it."""
        offloads = choice.offload.activations > 0
        m = self.pricing.template.training.global_batch_size // (choice.micro_batch_size * choice.group.dp)
        known = (choice.group, m, choice.pipeline, choice.state, offloads)
        if known not in self._known:
            schedule, layout = self.schedule(choice, m), self.pricing.layout(choice)
            key = self._shape_key(choice, layout, m)
            if key not in self._programs:
                program = lower(layout, schedule, "layer" if offloads else "stage")
                self._programs[key] = Lowered(program, schedule, m)
            self._known[known] = self._programs[key]
        return self._known[known]

    def _shape_key(self, choice: Choice, layout: Layout, m: int) -> tuple[object, ...]:
        """Everything of a layout that the lowering looks at."""
        pipeline, data = choice.pipeline, layout.data_ranks > 1
        counts = tuple(len(blocks) for blocks in layout.stage_blocks)
        buckets: object = ()
        if data:
            buckets = tuple(layout.buckets(s, bucketed=layout.overlap_grad_reduce) for s in range(layout.num_stages))
        sends = self.pricing.blocking(pipeline, choice.group.pp)
        state = choice.state
        return (
            pipeline.schedule, pipeline.virtual_stages, choice.group.pp, m, sends, counts, buckets, data, state.zero_stage,
            layout.overlap_grad_reduce, layout.overlap_param_gather, state.reshard_after_forward,
            choice.offload.activations > 0,
        )  # fmt: skip

    # -- prices ------------------------------------------------------------------------------------------------------

    def _columns_of(self, lowered: Lowered, choice: Choice) -> Columns:
        limit = int(choice.recompute[5:]) if choice.recompute.startswith("full:") else None
        key = (id(lowered), choice.pipeline.split, limit)
        if key not in self._columns:
            self._columns[key] = self._describe(lowered, choice, limit)
        return self._columns[key]

    def _describe(self, lowered: Lowered, choice: Choice, limit: int | None) -> Columns:
        kinds = self.pricing.kinds
        orders = self.pricing.composition(choice.pipeline, choice.group.pp, limit).orders
        held: dict[int, list[int]] = {}
        for stage, rank in enumerate(lowered.schedule.stage_to_rank):
            held.setdefault(rank, []).append(lowered.schedule.model_stage(stage))

        def weights(order: Sequence[int]) -> tuple[int, ...]:
            n = kinds.layers
            return tuple(k - n if n <= k < 2 * n else k for k in order)

        def part(key: object) -> tuple[str, object]:
            if isinstance(key, Compute):
                return "block", (key.phase, orders[key.stage][key.first : key.last])
            if isinstance(key, Overlapped):
                return "block", ("pair", orders[key.forward_stage], orders[key.backward_stage])
            if isinstance(key, Offload):
                return "host", (key.to_host, orders[key.stage][key.first : key.last])
            if isinstance(key, Gather | Reduce):
                return "state", (type(key).__name__, weights(orders[key.stage][key.first : key.last]))
            if isinstance(key, OptimizerStep):
                return "state", ("step", tuple(weights(orders[s]) for s in held[key.rank]))
            if isinstance(key, Send) and self._same_boundaries(choice):
                return "send", ()
            return "other", key

        index: dict[tuple[str, object], int] = {}
        keys: list[object] = []
        columns = []
        for key in lowered.program.price_keys:
            description = part(key)
            if description not in index:
                index[description] = len(index)
                keys.append(key)
            columns.append(index[description])
        return Columns(tuple(index), tuple(keys), np.array(columns, dtype=np.int64))

    def _same_boundaries(self, choice: Choice) -> bool:
        return self.pricing.template.model.kind == "transformer"

    def prices(self, choice: Choice) -> tuple[Lowered, PriceTable]:
        """The program of a choice with its prices."""
        lowered = self.lowered(choice)
        columns = self._columns_of(lowered, choice)
        scopes = self._scopes(choice)
        pricer: LayoutPricer | None = None
        found = np.empty((len(columns.parts), 2))
        for row, ((scope, part), key) in enumerate(zip(columns.parts, columns.keys, strict=True)):
            name = (scopes[scope], part)
            pair = self._prices.get(name)
            if pair is None:
                pricer = pricer or self.pricer(choice, lowered)
                price = pricer.price(key)  # type: ignore[arg-type]
                pair = self._prices[name] = (price.seconds, price.interference)
            found[row] = pair
        return lowered, PriceTable(found[columns.index, 0], found[columns.index, 1])

    def _scopes(self, choice: Choice) -> dict[str, object]:
        """What each kind of price depends on, besides its description."""
        site = self.pricing.site(choice.group)
        recompute = "full" if choice.recompute.startswith("full") else choice.recompute
        block = ("block", site, choice.micro_batch_size, choice.variant, recompute)
        state = ("state", choice.group, choice.variant.precision, choice.state, choice.offload.optimizer)
        send = ("send", choice.group, choice.micro_batch_size, choice.variant.sequence_parallel, choice.variant.precision)
        return {
            "block": block, "state": state, "send": send, "host": (block, choice.offload.activations), "other": (block, state, send),
        }  # fmt: skip

    def pricer(self, choice: Choice, lowered: Lowered) -> LayoutPricer:
        """The pricer that `simulate` would use."""
        schedule = lowered.schedule
        model = tuple(schedule.model_stage(s) for s in range(schedule.num_stages))
        layout = self.pricing.layout(choice)
        return LayoutPricer(layout, self.pricing.kernels, self.pricing.collectives).bind(schedule.stage_to_rank, model)

    # -- tiers -------------------------------------------------------------------------------------------------------

    def longest_paths(self, choices: Sequence[Choice]) -> FloatArray:
        """Tier 2: step times [choices] without interference."""
        found = np.empty(len(choices))
        groups: dict[int, tuple[Program, list[int], list[FloatArray]]] = {}
        for index, choice in enumerate(choices):
            lowered, table = self.prices(choice)
            program = lowered.program
            _, members, rows = groups.setdefault(id(program), (program, [], []))
            members.append(index)
            rows.append(table.seconds)
        for program, members, rows in groups.values():
            found[members] = longest_path_batch(program, np.array(rows))
        return found

    def discrete_event(self, choice: Choice) -> float:
        """Tier 3: the step time on SimPy."""
        lowered, table = self.prices(choice)
        key = (id(lowered.program), table.seconds.tobytes(), table.interference.tobytes())
        if key not in self._replayed:
            self.replays += 1
            self._replayed[key] = discrete_event.run(lowered.program, table, interference=True).makespan
        return self._replayed[key]

    def fits(self, choice: Choice) -> bool:
        """Whether a layout fits by its timeline, for layouts whose memory depends on time."""
        lowered = self.lowered(choice)
        pricer = self.pricer(choice, lowered)
        prices: tuple[KeyPrice, ...] = tuple(pricer.price(k) for k in lowered.program.price_keys)  # type: ignore[arg-type]
        table = PriceTable(np.array([p.seconds for p in prices]), np.array([p.interference for p in prices]))
        timeline = discrete_event.run(lowered.program, table, interference=True)
        priced = Priced(pricer.layout, lowered.schedule, lowered.program, prices, table, pricer.stages_of_rank)
        return interpret(priced, timeline).fits


__all__ = ["Lowered", "Tiers"]
