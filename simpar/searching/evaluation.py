"""Layouts as programs, programs shared between layouts of one shape, prices shared between layouts of one part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simpar.costs.host import passes_join
from simpar.costs.key_price import KeyPrice
from simpar.costs.pricer import LayoutPricer
from simpar.engine.slowed_paths import makespans, timeline
from simpar.parallel.keys import Compute, Gather, Offload, OptimizerStep, Overlapped, Reduce, Send
from simpar.parallel.layout import Layout
from simpar.program.lower import lower
from simpar.program.pipelines import Detail
from simpar.program.program import FloatArray, PriceTable, Program, Stream
from simpar.program.shared import program_key, with_ranks
from simpar.program.waits import optimizer_waits
from simpar.result.accounting import account
from simpar.result.allocations import Known, Replays, passes_of
from simpar.result.memory import memory_over_time
from simpar.result.requests import Pass
from simpar.result.result import Result
from simpar.schedules import Schedule
from simpar.searching.choice import Choice
from simpar.searching.pricing import Pricing
from simpar.searching.shapes import shape_of, style_of
from simpar.searching.slow_ranks import Slow
from simpar.searching.swept import Columns, Swept
from simpar.specs.stage_plan import rank_gpus
from simpar.step import interpret, prepare

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Step:
    """A step's program, shared by all layouts of one shape; prices are filled in per layout.

    Attributes:
        program: ops and what they wait for.
        schedule: it came from.
    """

    program: Program
    schedule: Schedule

    @cached_property
    def held(self) -> dict[int, list[int]]:
        """Pipeline rank -> model stages."""
        schedule = self.schedule
        return {r: [schedule.model_stage(s) for s in schedule.stages_of(r)] for r in range(schedule.num_ranks)}


class Evaluation:
    """Programs, prices and longest paths of one search in one process."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._steps: dict[object, Step] = {}
        self._known: dict[object, Step] = {}
        self._columns: dict[object, Columns] = {}
        self._swept: dict[object, Swept] = {}
        self._needs: dict[object, float] = {}
        self._peaks: dict[Choice, Known] = {}
        self.swept = 0
        self._numbers: dict[object, int] = {}
        self._prices: dict[tuple[int, int], tuple[float, int]] = {}
        self._slowed: dict[object, dict[int, float]] = {}
        self._rises: dict[tuple[int, int], dict[str, float]] = {}
        self._pricers: dict[object, LayoutPricer] = {}
        self._in_full: dict[Choice, tuple[float, float, float]] = {}

    @classmethod
    def of(cls, pricing: Pricing) -> Evaluation:
        """The one of these prices: programs are lowered, prices asked for and layouts swept once for all who share them."""
        if pricing.evaluation is None:
            pricing.evaluation = cls(pricing)
        return pricing.evaluation

    # -- programs ----------------------------------------------------------------------------------------------------

    def microbatches(self, choice: Choice) -> int:
        """Micro-batches per step of a choice."""
        return self.pricing.template.training.global_batch_size // (choice.micro_batch_size * choice.group.dp)

    def step(self, choice: Choice) -> Step:
        """The program of a choice; layouts of one shape share it."""
        known = (choice.group, choice.micro_batch_size, choice.pipeline, choice.state, choice.offload.activations > 0)
        if known not in self._known:
            m = self.microbatches(choice)
            schedule = self.pricing.pipelines.schedule(choice.pipeline, choice.group.pp, m)
            layout, detail = self.pricing.layout(choice), self.detail(choice)
            key = program_key(layout, schedule, detail)
            if key not in self._steps:
                self._steps[key] = Step(lower(layout, schedule, detail), schedule)
            self._known[known] = self._steps[key]
        return self._known[known]

    @staticmethod
    def detail(choice: Choice) -> Detail:
        """Offloaded activations travel layer by layer; everything else is the same by the stage."""
        return "layer" if choice.offload.activations > 0 else "stage"

    # -- prices ------------------------------------------------------------------------------------------------------

    def _columns_of(self, step: Step, choice: Choice) -> Columns:
        limit = int(choice.recompute[5:]) if choice.recompute.startswith("full:") else None
        key = (step, choice.pipeline.split, limit)
        if key not in self._columns:
            self._columns[key] = self._describe(step, choice, limit)
        return self._columns[key]

    def _describe(self, step: Step, choice: Choice, limit: int | None) -> Columns:
        orders = self.pricing.pipelines.composition(choice.pipeline, choice.group.pp, limit).orders
        n, leads = self.pricing.kinds.layers, self.pricing.framework.host.optimizer_tensor_cpu_s > 0

        def weights(order: Sequence[int]) -> tuple[int, ...]:
            return tuple(k - n if n <= k < 2 * n else k for k in order)

        def part(key: object) -> tuple[str, object]:
            if isinstance(key, Compute) and key.cut:
                # Each block by itself; behind the last one of a pass is what the host takes for the pass.
                ends = key.last == len(orders[key.stage]) if key.phase == "F" else key.first == 0
                return "block", (key.phase, orders[key.stage][key.first : key.last], ends)
            if isinstance(key, Compute):
                # The host's gaps belong to the whole stage.
                return "block", (key.phase, orders[key.stage], key.first, key.last)
            if isinstance(key, Overlapped):
                return "block", ("pair", orders[key.forward_stage], orders[key.backward_stage])
            if isinstance(key, Offload):
                return "host", (key.to_host, orders[key.stage][key.first : key.last])
            if isinstance(key, Gather | Reduce):
                return "state", (type(key).__name__, weights(orders[key.stage][key.first : key.last]))
            if isinstance(key, OptimizerStep) and leads:
                # The host comes to its tensors ahead of the device, by what the last backward leaves.
                return "other", ("step", tuple(orders[s] for s in step.held[key.rank]))
            if isinstance(key, OptimizerStep):
                return "state", ("step", tuple(weights(orders[s]) for s in step.held[key.rank]))
            if isinstance(key, Send) and self.pricing.template.model.kind == "transformer":
                return "send", key.pair
            return "other", key

        index: dict[tuple[str, object], int] = {}
        keys: list[object] = []
        columns = []
        for key in step.program.price_keys:
            description = part(key)
            if description not in index:
                index[description] = len(index)
                keys.append(key)
            columns.append(index[description])
        parts = tuple((scope, self._number(description)) for scope, description in index)
        return Columns(parts, tuple(keys), np.array(columns, dtype=np.int64))

    def _number(self, value: object) -> int:
        """Of a value that memos ask for all the time: long tuples are slow to hash."""
        return self._numbers.setdefault(value, len(self._numbers))

    def prices(self, choice: Choice) -> tuple[Step, PriceTable]:
        """The program of a choice with its prices."""
        step, scopes = self.step(choice), self._scopes(choice)
        pairs = self._each(choice, scopes, self._prices, lambda price: (price.seconds, price.held_sms))
        slowed = self._beside(choice, scopes)
        if missing := {held for _, held in pairs} - slowed.keys():
            pricer = self.pricer(choice, step)
            for sms in missing:
                pricer.slowed(sms)
        found = np.array([(seconds, slowed[held]) for seconds, held in pairs])[self._columns_of(step, choice).index]
        return step, PriceTable(found[:, 0], found[:, 1])

    def raised(self, choice: Choice) -> tuple[Step, FloatArray]:
        """The program of a choice with its prices, float array [1 + categories, prices]: as they are, and each category of seconds
        at the upper end of its interval."""
        step, table = self.prices(choice)
        rises = self._each(choice, self._scopes(choice), self._rises, _rise)
        categories = sorted({category for each in rises for category, up in each.items() if up})
        moved = np.array([[0.0] * len(rises), *([each.get(c, 0.0) for each in rises] for c in categories)])
        return step, np.maximum(table.seconds + moved[:, self._columns_of(step, choice).index], 0.0)

    def _each(
        self, choice: Choice, scopes: dict[str, int], known: dict[tuple[int, int], T], read: Callable[[KeyPrice], T]
    ) -> list[T]:
        """What is to be read of each distinct price of a choice; what is `known` is not priced again."""
        step, found = self.step(choice), []
        columns = self._columns_of(step, choice)
        pricer: LayoutPricer | None = None
        for (scope, part), key in zip(columns.parts, columns.keys, strict=True):
            name = (scopes[scope], part)
            if name not in known:
                pricer = pricer or self.pricer(choice, step)
                known[name] = read(pricer.price(key))  # type: ignore[arg-type]
            found.append(known[name])
        return found

    def _scopes(self, choice: Choice) -> dict[str, int]:
        """What each kind of price depends on, besides its description, as a number."""
        site = self.pricing.sites.with_batch(choice.group, choice.micro_batch_size, choice.variant)
        recompute = "full" if choice.recompute.startswith("full") else choice.recompute
        sharded = choice.state.zero_stage == 3 and len(self.pricing.kinds_of_states(choice.variant)) > 1
        # DualPipe hides expert exchanges its own way, see `parallel.beside`.
        own = choice.variant.overlap_ep and choice.pipeline.schedule.startswith("dualpipe")
        p = choice.pipeline
        joined = passes_join(choice.group.pp, p.virtual_stages, p.schedule, p.overlap_p2p, self.pricing.framework.pipeline)
        ahead = joined and self.pricing.gathered(choice.group, choice.variant, choice.state) is None
        block = self._number(("block", site, choice.micro_batch_size, choice.variant, recompute, sharded, own, ahead))
        # What of a spread is hidden does not matter to its prices.
        spread = (choice.state.zero_stage, choice.state.shard_size, choice.state.offload_parameters)
        v = choice.variant
        # Gradients that add up on the host go there and back with each micro-batch.
        away = choice.micro_batch_size if choice.offload.optimizer else 0
        state = self._number(("state", choice.group, v.precision, spread, away))
        send = self._number(("send", choice.group, choice.micro_batch_size, v.sequence_parallel, v.precision))
        host, other = self._number(("host", block, choice.offload.activations)), self._number(("other", block, state, send))
        return {"block": block, "state": state, "send": send, "host": host, "other": other}

    def pricer(self, choice: Choice, step: Step) -> LayoutPricer:
        """The pricer that `simulate` would use."""
        layout, scopes, schedule = self.pricing.layout(choice), self._scopes(choice), step.schedule
        model = tuple(schedule.model_stage(s) for s in range(schedule.num_stages))
        found = LayoutPricer(layout, self.pricing.kernels, self.pricing.collectives).bind(schedule.stage_to_rank, model)
        return found.like(self._pricers.setdefault(scopes["block"], found), self._beside(choice, scopes))

    def _beside(self, choice: Choice, scopes: dict[str, int]) -> dict[int, float]:
        """How much collectives slow the compute of a choice, by the SMs that they hold; its pricers fill it in."""
        p = choice.pipeline
        shape = shape_of(choice.group.pp, p.virtual_stages, p.schedule)
        return self._slowed.setdefault((scopes["block"], choice.recompute, shape.stages, shape.ends_meet, p.split), {})

    # -- step times ---------------------------------------------------------------------------------------------------

    def longest_paths(self, choices: Sequence[Choice], *, alone: bool = False) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Step times [choices], in batches by program, and which of them are lower bounds only.

        Dearer prices never make a step of the same program shorter (see `engine.slowed_paths`): of layouts that share a program
        only those that no other undercuts in every price are swept; the rest take the time of one that does, as a lower bound.

        Args:
            alone: each is swept, whatever others take.
        """
        found, bound = np.empty(len(choices)), np.zeros(len(choices), dtype=bool)
        if alone:
            return np.array([self.longest_path(choice) for choice in choices]), bound
        for program, known, members, prices in self._by_program(choices):
            chosen, below = known.sort_out(prices)
            if len(chosen):
                values = self._makespans(program, choices[members[0]], prices[chosen])
                known.add(prices[chosen], values)
                found[np.array(members)[chosen]] = values
            for row, dominator in below.items():
                found[members[row]] = known.values[dominator]
                bound[members[row]] = bool((known.rows[dominator] < prices[row]).any())
        return found, bound

    def _by_program(self, choices: Sequence[Choice]) -> list[tuple[Program, Swept, list[int], FloatArray]]:
        """Programs of layouts, what is known of them, the layouts' positions, and their prices, float array [positions, seconds and
        interference]."""
        groups: dict[object, tuple[Program, list[int], list[FloatArray]]] = {}
        for index, choice in enumerate(choices):
            step, table = self.prices(choice)
            name = (step.program, self.pricing.slow_ranks.of(choice.group))
            _, members, rows = groups.setdefault(name, (step.program, [], []))
            members.append(index)
            rows.append(np.concatenate([table.seconds, table.interference]))
        known = {name: self._swept.setdefault(name, Swept(2 * len(p.price_keys))) for name, (p, *_) in groups.items()}
        return [(program, known[name], members, np.array(rows)) for name, (program, members, rows) in groups.items()]

    def _makespans(self, program: Program, like: Choice, prices: FloatArray) -> FloatArray:
        """Step times of rows of prices of a program, all of layouts with the program and slow ranks of the layout `like`."""
        half = prices.shape[1] // 2
        self.swept += len(prices)
        waits = self.pricing.waits(style_of(like.pipeline))
        seconds, slowed, slow_ranks = prices[:, :half], prices[:, half:], self.pricing.slow_ranks.of(like.group)
        return np.asarray(np.max([makespans(program, seconds, slowed, waits=waits, slow=slow) for slow in slow_ranks], axis=0))

    def least_path(self, choices: Sequence[Choice], reach: float) -> FloatArray:
        """Lower bounds of step times [choices]: of those that are not known to take `reach`, one longest path for all that share a
        program, at the least of each of their prices."""
        found = np.empty(len(choices))
        for program, known, members, prices in self._by_program(choices):
            values = np.array([known.bound(row) for row in prices])
            if (open_ := values < reach).any():
                least = prices[open_].min(axis=0, keepdims=True)
                if known.bound(least[0]) < reach:
                    known.add(least, self._makespans(program, choices[members[0]], least))
                values[open_] = np.maximum(values[open_], known.bound(least[0]))
            found[members] = values
        return found

    def longest_path(self, choice: Choice) -> float:
        """The step time of one layout, swept whatever others with the same program are known to take."""
        [(program, known, _, prices)] = self._by_program([choice])
        same = np.flatnonzero((known.rows == prices).all(axis=1))
        if not len(same):
            known.add(prices, self._makespans(program, choice, prices))
        return float(known.values[same[0] if len(same) else -1])

    def device_bytes(self, choice: Choice, allocated: FloatArray | None) -> float | None:
        """What the fullest device uses, the allocator's view included; None where that depends on time.

        Args:
            allocated: peak allocated bytes of every rank, None where they depend on time.
        """
        if allocated is None:
            return None
        key = (choice.requested, allocated.tobytes(), self.pricing.outside_bytes(choice.group))
        found = self._needs[key] = self._needs.get(key) or self._device_bytes(choice, allocated)
        return found

    def _device_bytes(self, choice: Choice, allocated: FloatArray) -> float:
        step, layout = self.step(choice), self.pricing.layout(choice)

        def passes(rank: int) -> list[Pass]:
            prices = step.program.price[step.program.ops_of(Stream(rank, "compute"))].tolist()
            return passes_of([step.program.price_keys[price] for price in prices], layout.stage_blocks)

        replays = Replays(layout, step.held, passes, self._peaks_like(choice))
        each = dict(enumerate(allocated.tolist()))
        replays.choose(each)
        outside = self.pricing.outside_bytes(choice.group)
        room, fragmentation = layout.hardware.gpu.memory.value - outside, layout.framework.allocator.fragmentation
        return max(replays.reserved_bytes(rank, amount, fragmentation, room) for rank, amount in each.items()) + outside

    def _peaks_like(self, choice: Choice) -> Known:
        """What is known of the allocator where ranks ask for the same as those of a choice, if they run the same."""
        return self._peaks.setdefault(choice.requested, {})

    def _slowest(self, choice: Choice) -> Slow:
        return self.pricing.slow_ranks.of(choice.group)[0]

    def replayed(self, choice: Choice) -> Result:
        """Everything that a layout's own program says of it."""

        def shared(layout: Layout, schedule: Schedule, detail: Detail, *, expand: bool = False) -> Program:
            del detail, expand
            return with_ranks(self.step(choice).program, rank_gpus(layout.scenario))

        priced = prepare(choice.scenario(self.pricing.template), detail=self.detail(choice), lowering=shared)
        return interpret(priced, timeline(priced.program, priced.table, self._slowest(choice)), self._peaks_like(choice))

    def result(self, choice: Choice) -> Result:
        """Everything that `simulate` says of a layout."""
        if self.detail(choice) == "stage":
            return self.replayed(choice)
        priced = prepare(choice.scenario(self.pricing.template), detail="stage")
        return interpret(priced, timeline(priced.program, priced.table, self._slowest(choice)))

    def in_full(self, choice: Choice, allows: Callable[[float], bool] = lambda _: True) -> tuple[float, float, float]:
        """The step time, what the fullest device uses, and what of it the allocator keeps without a tensor.

        Args:
            allows: whether a device may need at least so many bytes. Where tensors alone need more, nothing else is found: the
                allocator's view takes longest.
        """
        if choice not in self._in_full:
            (step, table), layout = self.prices(choice), self.pricing.layout(choice)
            ran = timeline(step.program, table, self._slowest(choice))
            roles = {rank: rank for rank in step.held}
            ranks = memory_over_time(layout, step.program, ran, step.held, roles, self._peaks_like(choice))
            least = max(r.allocated_bytes + sum(amount for _, amount in r.outside) for r in ranks)
            if not allows(least):
                return inf, least, 0.0
            fullest = max(ranks, key=lambda r: r.device_bytes)
            waits = optimizer_waits(layout, step.schedule)
            cached = fullest.reserved_bytes - fullest.allocated_bytes
            self._in_full[choice] = (account(step.program, ran, waits=waits).makespan, fullest.device_bytes, cached)
        return self._in_full[choice]


def _rise(price: KeyPrice) -> dict[str, float]:
    """How far each category of a price may rise."""
    found = dict.fromkeys((category for category, _ in price.terms), 0.0)
    for category, up, _ in price.spread:
        found[category] = found.get(category, 0.0) + up
    return found


__all__ = ["Evaluation", "Step"]
