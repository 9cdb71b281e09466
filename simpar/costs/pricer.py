"""Seconds for a layout's symbolic prices: kernels, collectives and launches put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest

from simpar.costs import scans
from simpar.costs.block_price import BlockPrice, category, hidden_share, price_list, price_pair, without_hidden, worst
from simpar.costs.collectives import CollectiveModel
from simpar.costs.expert_parallel import TRAINED_SMS, Exchange
from simpar.costs.gloo import check_seconds
from simpar.costs.held_sms import by_exchanges, loads, slowed
from simpar.costs.host import HostTimes, launch_gaps
from simpar.costs.kernels import KernelModel, piece_of
from simpar.costs.key_price import LAUNCH, KeyPrice, handled, scaled
from simpar.costs.memory_bound import STREAM
from simpar.costs.price import ZERO, Price, Provenance
from simpar.costs.update_price import update_price
from simpar.errors import InternalError
from simpar.parallel.beside import hides_exchanges, ops_of
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import (
    BlockOp,
    Compute,
    Gather,
    Key,
    LaunchGap,
    Offload,
    OptimizerStep,
    Overlapped,
    Reduce,
    Send,
    TiedReduce,
)  # fmt: skip
from simpar.parallel.layout import Layout
from simpar.parallel.modules import counts, module_experts
from simpar.parallel.traffic import send_collectives, state_collectives
from simpar.parallel.work import (
    AttentionWork,
    Collective,
    ExpertExchange,
    Gemm,
    GroupedGemm,
    HostCopy,
    KernelWork,
    LocalOp,
    MemoryWork,
    OptimizerWork,
)  # fmt: skip
from simpar.specs.model import MoeSpec
from simpar.topology.placement import GroupPlacement

_PLACED = (Collective, ExpertExchange, HostCopy)
"""Work whose price depends on where its ranks sit; all layouts on a GPU share the prices of its kernels."""


class LayoutPricer:
    """Prices the keys of programs lowered from `layout`."""

    def __init__(self, layout: Layout, kernels: KernelModel, collectives: CollectiveModel) -> None:
        self.layout, self.kernels, self.collectives = layout, kernels, collectives
        self._placed: dict[object, Price] = {}
        self._kernels = kernels.in_steps(layout.calibration)
        self._blocks: dict[tuple[LocalBlock, str], BlockPrice] = {}
        self._lists: dict[tuple[Sequence[LocalOp], bool], BlockPrice] = {}
        self._pairs: dict[tuple[LocalBlock, LocalBlock], BlockPrice] = {}
        self._hidden: dict[LocalBlock, float] = {}
        self._keys: dict[Key, KeyPrice] = {}
        self._slowed: dict[int, float] = {}
        self._gaps: dict[tuple[int, str, bool], list[float]] = {}
        self.host = HostTimes(layout, self.block)

    def like(self, other: LayoutPricer, slowed: dict[int, float] | None = None) -> LayoutPricer:
        """This one with the op lists that `other` has priced, whose ops cost the same: only pipelines and states may differ, and
        what runs again; and with what pricers of the same blocks and pipeline have found `slowed`."""
        self._placed, self._lists = other._placed, other._lists
        self._slowed = self._slowed if slowed is None else slowed
        return self

    def price(self, key: Key) -> KeyPrice:
        """The price of one key."""
        if (found := self._keys.get(key)) is None:
            found = self._keys[key] = self._price(key)
        return found

    def _price(self, key: Key) -> KeyPrice:
        if isinstance(key, Compute):
            return self._compute(key)
        if isinstance(key, BlockOp):
            return self._block_op(key)
        if isinstance(key, LaunchGap):
            return self._launch_gap(key)
        if isinstance(key, Overlapped):
            return self._overlapped(key)
        if isinstance(key, OptimizerStep):
            return self._optimizer(key)
        if isinstance(key, Send):
            return self._sequence("pp", send_collectives(self.layout, key))
        if isinstance(key, Gather | Reduce):
            return self._state(key)
        if isinstance(key, TiedReduce):
            tied = self.layout.tied_extra * self.layout.state_bytes.reduce
            return KeyPrice.of("pp", self._timed("all_reduce", tied, self._hop("pp")))
        if isinstance(key, Offload):
            blocks = self.layout.stage_blocks[key.stage][key.first : key.last]
            every = self.layout.framework.data.offload_blocks_compute
            moved = sum(b.saved_bytes if every else b.offloadable_bytes for b in blocks)
            return KeyPrice.of("offload", self._work(HostCopy(self.layout.plan.offload.activations * moved)))
        raise InternalError(f"no price for {key!r}")

    # -- compute ---------------------------------------------------------------------------------------------------

    def op_price(self, op: LocalOp) -> Price:
        """Price of one local op."""
        work = op.work
        known = self._placed if isinstance(work, _PLACED) else self._kernels
        if (found := known.get(work)) is None:
            found = known[work] = scaled(self._work(work), self._factor(work))
        return found

    def foresee(self, ops: Iterable[LocalOp]) -> None:
        """Price the products of an op list together."""
        self.kernels.foresee(work for op in ops if (work := op.work) not in self._kernels)

    def _factor(self, work: object) -> float:
        """How much slower this kind of work is inside a training step than alone (specs/calibration.py)."""
        calibration = self.layout.calibration
        if isinstance(work, Gemm | GroupedGemm | AttentionWork | KernelWork):
            return calibration.compute
        if isinstance(work, MemoryWork) and (work.kernel.startswith("cast") or work.kernel == STREAM):
            return 1.0  # listed one by one; casts at rates measured inside compiled graphs
        if isinstance(work, MemoryWork | OptimizerWork):
            return calibration.memory
        if isinstance(work, ExpertExchange) and work.dispatcher == "alltoall":
            return calibration.communication
        return 1.0  # DeepEP's rates were measured as a training framework calls it

    def _work(self, work: object) -> Price:
        kernels = self.kernels
        if isinstance(work, Gemm):
            piece = kernels.gemm(piece_of(work))
            sms = kernels.sm_count
            return scaled(piece, work.pieces * sms / max(sms - work.held_sms, 1.0)) if work.pieces > 1 else piece
        if isinstance(work, GroupedGemm):
            return kernels.grouped_gemm(work)
        if isinstance(work, AttentionWork):
            return kernels.attention(work)
        if isinstance(work, MemoryWork):
            return kernels.memory_bound(work.kernel, work.bytes_moved, implementation=work.implementation, launches=work.launches)
        if isinstance(work, KernelWork):
            return scans.price(kernels, work)
        if isinstance(work, OptimizerWork):
            return kernels.adam(work.parameters, bytes_per_parameter=work.bytes_per_parameter, implementation=work.implementation)
        if isinstance(work, Collective):
            return self._collective(work)
        if isinstance(work, ExpertExchange):
            return self._exchange(work)
        if isinstance(work, HostCopy):
            link = self.layout.hardware.node.host_device_bandwidth or self.layout.hardware.node.pcie_bandwidth
            seconds = work.bytes / link.value
            return Price(seconds, seconds, seconds * 1.3, Provenance.PUBLISHED)
        raise InternalError(f"no price for {work!r}")

    def _collective(self, work: Collective) -> Price:
        return scaled(self._timed(work.name, work.bytes, self._placement(work)), work.repeat)

    def _exchange(self, work: ExpertExchange) -> Price:
        placement, moe = self.layout.placement("ep"), work.moe
        exchange = Exchange(
            "combine" if work.combine else "dispatch", work.tokens, work.hidden * work.element_bytes, moe.num_experts_per_tok,
            moe.num_experts, sms=TRAINED_SMS.get(work.dispatcher, 0), nodes_limit=self._nodes_reached(moe, placement),
            in_turn=self.layout.training.routing.dealt_in_turn(self.layout.framework.conventions.balances_in_turn),
        )  # fmt: skip
        return self.collectives.exchange(exchange, placement, work.dispatcher)

    def _slowed_by_exchanges(self, block: LocalBlock) -> float:
        placement, sms = self.layout.placement("ep"), self.layout.hardware.gpu.sm_count.value
        return by_exchanges(block.forward, sms, lambda sent: self._held_sms("all_to_all", sent, placement))

    def _nodes_reached(self, moe: MoeSpec, placement: GroupPlacement) -> int | None:
        """Nodes that a token may reach where its experts come from so many groups; none = no limit."""
        if not moe.topk_group:
            return None
        return moe.topk_group * max(math.ceil(placement.num_nodes / max(moe.n_group, 1)), 1)

    def block(self, block: LocalBlock, phase: str) -> BlockPrice:
        """Price of one block in one phase."""
        key = (block, phase)
        if key not in self._blocks:
            found = self._alone(block, phase)
            if hides_exchanges(self.layout, block, phase):
                found = without_hidden(found, self.hidden_share(block))
            self._blocks[key] = replace(found, **counts(block, module_experts(self.layout)))
        return self._blocks[key]

    def _alone(self, block: LocalBlock, phase: str) -> BlockPrice:
        """Price of one block's ops in one phase beside nothing else."""
        key = (ops_of(self.layout, block, phase), phase != "F")
        if key not in self._lists:
            self.foresee(key[0])
            self._lists[key] = price_list(key[0], self.op_price, backward=key[1])
        return self._lists[key]

    def hidden_share(self, block: LocalBlock) -> float:
        """Share of a block's exposed exchanges that another micro-batch's compute hides, where `hides_exchanges`."""
        if (found := self._hidden.get(block)) is None:
            pair = price_pair(block.forward, block.backward, self.op_price, self._slowed_by_exchanges(block))
            found = self._hidden[block] = hidden_share([self._alone(block, phase) for phase in "FB"], pair)
        return found

    def layer_seconds(self, stage: int) -> list[float]:
        """Forward and backward of one micro-batch of embedding, every layer and head (0 where there is none), as if they were on
        this stage; encoders without stages of their own count with the embedding."""
        return self._layer_seconds

    @cached_property
    def _layer_seconds(self) -> list[float]:
        both = [[sum(self._block_seconds(b, phase) for phase in "FB") for b in part] for part in self.layout.blocks_in_order]
        return [sum(both[0]), *both[1], sum(both[2])]

    def _block_seconds(self, block: LocalBlock, phase: str) -> float:
        seconds = self.block(block, phase).seconds
        return seconds + sum(self._late([seconds], [self.host.seconds(block, phase)]))

    def _compute(self, key: Compute) -> KeyPrice:
        blocks = self.layout.stage_blocks[key.stage][key.first : key.last]
        gap = sum(self._gap(key.stage, block, key.phase, cut=key.cut) for block in range(key.first, key.last))
        return KeyPrice.of_blocks([self.block(b, key.phase) for b in blocks], gap)

    def _gap(self, stage: int, block: int, phase: str, *, cut: bool) -> float:
        """Seconds by which the host is late after a block of its stage's pass; behind the last one with its own time of a pass."""
        count = len(self.layout.stage_blocks[stage])
        place = block if phase == "F" else count - 1 - block
        gap = self._pass_gaps(stage, phase, cut=cut)[place]
        return gap + self.layout.calibration.pass_s if place == count - 1 else gap

    def _pass_gaps(self, stage: int, phase: str, *, cut: bool = False) -> list[float]:
        key = (self._first_alike[stage], phase, cut)
        if key not in self._gaps:
            self._gaps[key] = self._late(*self._device_and_host(stage, phase), cut=cut)
        return self._gaps[key]

    @cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """Of each stage, the first that has the same blocks."""
        first: dict[tuple[LocalBlock, ...], int] = {}
        return tuple(first.setdefault(blocks, stage) for stage, blocks in enumerate(self.layout.stage_blocks))

    def _late(self, device: Sequence[float], host: Sequence[float], *, cut: bool = False) -> list[float]:
        return launch_gaps(device, host, blocking=self.layout.training.launch_blocking, cut=cut)

    def _device_and_host(self, stage: int, phase: str) -> tuple[list[float], list[float]]:
        """Device and host seconds of each block of a stage's pass, in the order in which they run."""
        blocks = self.layout.stage_blocks[stage]
        blocks = blocks if phase == "F" else blocks[::-1]
        return [self.block(b, phase).seconds for b in blocks], [self.host.seconds(b, phase) for b in blocks]

    def _block_op(self, key: BlockOp) -> KeyPrice:
        """One op inside a block; its interference is already in the block's own order, so none is charged."""
        block = self.layout.stage_blocks[key.stage][key.block]
        op = ops_of(self.layout, block, key.phase)[key.index]
        name = category(op, backward=key.phase != "F") if op.stream == "compute" else op.stream
        return KeyPrice.of(name, scaled(self.op_price(op), self.exchange_share(key)))

    def exchange_share(self, key: BlockOp) -> float:
        """Of an op's work, what `key` stands for: 1, or the part of an exchange that is waited for or beside other compute."""
        block = self.layout.stage_blocks[key.stage][key.block]
        if key.part == "whole":
            return 1.0
        hidden = self.hidden_share(block)
        return hidden if key.part == "beside" else 1.0 - hidden

    def _launch_gap(self, key: LaunchGap) -> KeyPrice:
        gap = self._gap(key.stage, key.block, key.phase, cut=key.cut)
        return KeyPrice.of(LAUNCH, Price(gap, 0.7 * gap, 1.3 * gap, Provenance.MODEL))

    def _overlapped(self, key: Overlapped) -> KeyPrice:
        forward = self.layout.stage_blocks[key.forward_stage]
        backward = self.layout.stage_blocks[key.backward_stage][::-1]
        common = min(len(forward), len(backward))
        found = [self.pair(f, b) for f, b in zip(forward, backward, strict=False)]
        found += [self.block(b, "F") for b in forward[common:]]
        found += [self.block(b, "B") for b in backward[common:]]
        # One host launches both passes while the device runs them beside each other.
        own, other = (self._device_and_host(*one)[1] for one in ((key.forward_stage, "F"), (key.backward_stage, "B")))
        host = [f + b for f, b in zip_longest(own, other, fillvalue=0.0)]
        gap = sum(self._late([p.seconds for p in found], host))
        return KeyPrice.of_blocks(found, gap + 2.0 * self.layout.calibration.pass_s)

    def pair(self, forward: LocalBlock, backward: LocalBlock) -> BlockPrice:
        """Price of a forward of one block beside a backward of another."""
        if (key := (forward, backward)) not in self._pairs:
            halves = (ops_of(self.layout, forward, "F"), ops_of(self.layout, backward, "B"))
            self._pairs[key] = price_pair(*halves, self.op_price, self._slowed_by_exchanges(forward))
        return self._pairs[key]

    # -- communication ---------------------------------------------------------------------------------------------

    def slowed(self, held: int) -> float:
        """How much longer compute takes beside a collective on `held` SMs."""
        if held not in self._slowed:
            gpu = self.layout.hardware.gpu
            work, together = loads(self.layout, self.op_price), self.layout.framework.kernels.experts_in_one_kernel
            self._slowed[held] = slowed(work, gpu.sm_count.value, held, gpu.architecture, self._idle_s, one_kernel=together)
        return self._slowed[held]

    @cached_property
    def _idle_s(self) -> float:
        """Seconds by which the host is late over forward and backward of every stage."""
        passes = [(stage, phase) for stage in range(self.layout.num_stages) for phase in "FB"]
        return math.fsum(gap for one in passes for gap in self._pass_gaps(*one))

    def _held_sms(self, name: str, amount: float, placement: GroupPlacement) -> int:
        return self.collectives.sms(name, amount, placement) if placement.size > 1 and amount > 0 else 0

    def _hop(self, dimension: str, pair: int = -1) -> GroupPlacement:
        """Where two consecutive members sit: a pair of the pipeline, or the slowest there is."""
        layout = self.layout
        name = {"dp": "dp_cp"}.get(dimension, dimension)
        if layout.placement(dimension).size == 1:
            return layout.placement(dimension)
        if dimension == "pp" and pair >= 0:
            return layout.pipeline_pairs[pair]
        return layout.mesh.hops(name, layout.hardware, layout.scenario.cluster.num_nodes)[0][0]

    def _state(self, key: Gather | Reduce) -> KeyPrice:
        return handled(self._sequence("dp", state_collectives(self.layout, key)), key, self.layout, self._work)

    def _sequence(self, dimension: str, calls: Sequence[Collective]) -> KeyPrice:
        """Collectives one after the other on one stream, and what they do to compute beside them."""
        found = self.unslowing(dimension, calls)
        return replace(found, interference=self.slowed(found.held_sms)) if calls else found

    def unslowing(self, dimension: str, calls: Sequence[Collective]) -> KeyPrice:
        """Collectives one after the other on one stream, but for what they do to compute beside them: no block is priced."""
        if not calls:
            return KeyPrice(0.0, (), (), 0.0, (), ())
        prices = [self._collective(c) for c in calls]
        alone = sum(p.seconds for p in prices)
        seconds = alone + self._checks_s(calls)
        spread = ((dimension, sum(p.high for p in prices) - alone, alone - sum(p.low for p in prices)),)
        held = max(self._held_sms(c.name, c.bytes, self._placement(c)) for c in calls)
        kind = worst([p.provenance for p in prices])
        latency = sum(c.repeat * self._timed(c.name, 1.0, self._placement(c)).seconds for c in calls)
        return KeyPrice(
            seconds, ((dimension, seconds),), spread, 0.0, (), ((dimension, kind),), min(latency, seconds), held_sms=held
        )

    def _checks_s(self, calls: Sequence[Collective]) -> float:
        """Seconds for which collectives of a whole stage wait for their ranks' comparisons; those of one layer are its host's."""
        if not self.layout.training.collective_checks or self.layout.gathers_by_layer:
            return 0.0
        return sum(c.repeat * check_seconds(self._placement(c).size) for c in calls if c.name != "send_recv")

    def _placement(self, work: Collective) -> GroupPlacement:
        return self._hop(work.dimension, work.pair) if work.name == "send_recv" else self.layout.placement(work.dimension)

    def _timed(self, name: str, amount: float, placement: GroupPlacement) -> Price:
        if placement.size == 1:
            return ZERO
        return scaled(self.collectives.time(name, amount, placement), self.layout.calibration.communication)

    def _optimizer(self, key: OptimizerStep) -> KeyPrice:
        stages = self.stages_of_rank[key.rank]
        return update_price(self.layout, stages, self._work, self.norm_s, self._host_lead_s(stages))

    def _host_lead_s(self, stages: Sequence[int]) -> float:
        """Seconds by which the host is ahead of the device when it begins the update: what it gained over the last backward."""
        if self.layout.framework.host.drains_before_update or self.layout.training.launch_blocking or not stages:
            return 0.0
        device, host = self._device_and_host(stages[0], "B")
        return max(sum(device) + sum(self._pass_gaps(stages[0], "B")) - sum(host), 0.0)

    @cached_property
    def norm_s(self) -> float:
        """Seconds of the all-reduce of the gradients' norm."""
        layout = self.layout
        check_s = check_seconds(layout.mesh.world_size) if layout.training.collective_checks else 0.0
        return self._timed("all_reduce", 4.0, layout.placement("world")).seconds + check_s if layout.mesh.world_size > 1 else 0.0

    @cached_property
    def stages_of_rank(self) -> dict[int, list[int]]:
        """Model stages held by each pipeline rank, as the schedule places them (set by the caller for V placements)."""
        p = self.layout.plan.pp
        return {r: [s for s in range(self.layout.num_stages) if s % p == r] for r in range(p)}

    def bind(self, stage_to_rank: Sequence[int], model_stage: Sequence[int]) -> LayoutPricer:
        """Tell which rank holds which model stage; returns itself."""
        held: dict[int, list[int]] = {r: [] for r in range(self.layout.plan.pp)}
        for stage, rank in enumerate(stage_to_rank):
            held[rank].append(model_stage[stage])
        self.stages_of_rank = held
        return self
