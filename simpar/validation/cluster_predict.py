"""The same layouts as scenarios: their prediction on a host whose cores the ranks share, and what of it can be measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from simpar.engine.host_cores import replay
from simpar.engine.timeline import Timeline
from simpar.parallel.keys import BlockOp, Gather, OptimizerStep, Reduce, Send
from simpar.parallel.layout import Layout
from simpar.parallel.split import LocalBlock
from simpar.parallel.traffic import send_collectives, state_collectives
from simpar.parallel.work import AttentionWork, Collective, ExpertExchange, LocalOp
from simpar.program.program import FloatArray, OpKind, Program
from simpar.result.interpret import interpret
from simpar.simulate import Priced, cost_models, prepare
from simpar.specs.scenario import Scenario, make_scenario
from simpar.validation.cluster_layouts import RunLayout
from simpar.workload.ops import volume

_PIPELINE = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OVERLAPPED,
             OpKind.COLLECTIVE)  # fmt: skip
_STATE = (OpKind.GATHER_PARAMETERS, OpKind.REDUCE_GRADIENTS)
Counts = dict[str, tuple[int, float]]
"""collective/ranks -> (calls, bytes) of one rank in a step."""


@dataclass(frozen=True)
class Setup:
    """What all layouts share.

    Attributes:
        models: "transformer" and "mlp" -> model table of a scenario.
        training: the same -> training table.
        hardware: profile, a name or a path.
        precision: fp32 on CPUs, bf16 on GPUs.
        in_step: (factor on kernels, seconds a launch) by which eager compute inside a step takes longer than its kernels alone.
    """

    models: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Mapping[str, Any]]
    hardware: str
    precision: str = "fp32"
    in_step: tuple[float, float] = (1.0, 0.0)

    def scenario(self, layout: RunLayout) -> Scenario:
        """`layout` as a scenario.

        Raises:
            InputError: the model or batch cannot be split so.
        """
        manual = layout.pp > 1 or layout.ep > 1
        plan: dict[str, Any] = {
            "tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp, "ep": layout.ep,
            "sequence_parallel": layout.sequence_parallel, "cp_style": layout.cp_style, "zero_stage": 3 if layout.fsdp else 0,
            "virtual_stages": layout.virtual_stages, "overlap_grad_reduce": not manual, "synchronous_optimizer": True,
        }  # fmt: skip
        if layout.pp > 1:
            plan["schedule"] = layout.schedule
        if layout.ep > 1:
            plan["etp"] = 1
        training = {**self.training[layout.model], "precision": self.precision, "optimizer": "adamw"}
        return make_scenario(
            {
                "name": layout.name, "model": dict(self.models[layout.model]), "plan": plan, "training": training,
                "framework": "torch-steps-fsdp" if layout.fsdp else "torch-steps",
                "cluster": {"hardware": self.hardware, "num_nodes": 1, "num_gpus": layout.world_size},
            }
        )  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """One layout predicted.

    Attributes:
        layout: the run.
        priced: its program and prices, every op and collective.
        timeline: of the replay.
    """

    layout: RunLayout
    priced: Priced
    timeline: Timeline

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.makespan

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Share of the pipeline phase that each pipeline rank neither computes nor takes part in a block's collective."""
        program, timeline = self.priced.program, self.timeline
        inside = np.isin(program.kind, [int(k) for k in _PIPELINE])
        end = float(timeline.finish[inside].max())
        lengths = timeline.finish - timeline.start
        return tuple(1.0 - float(lengths[inside & (program.role == r)].sum()) / end for r in range(self.layout.pp))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 80 % interval of the step time, relative to the folded step's own."""
        result = interpret(self.priced, self.timeline)
        low, high = result.step_interval.low, result.step_interval.high
        return low, high

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Peak allocated bytes of each pipeline rank."""
        return tuple(m.allocated_bytes for m in interpret(self.priced, self.timeline).memory)

    def collectives(self, pipeline_rank: int) -> Counts:
        """Calls and bytes of a rank's collectives in one step; sends are counted at the sender."""
        program = self.priced.program
        found: Counter[str] = Counter()
        bytes_: Counter[str] = Counter()
        for op in np.flatnonzero(program.role == pipeline_rank):
            for call in calls_of(self.priced.layout, program.price_keys[program.price[op]]):
                size = self.priced.layout.placement(call.dimension).size
                if size > 1:
                    key = f"{call.name}/{2 if call.name == 'send_recv' else size}"
                    found[key] += call.repeat
                    bytes_[key] += call.bytes * call.repeat  # type: ignore[assignment]
        if self.layout.sequence_parallel:
            # Norms between the tensor-parallel parts see a part of the sequence each: their gradients are summed once a step.
            for stage in self.priced.held[pipeline_rank]:
                found[f"all_reduce/{self.layout.tp}"] += 1
                bytes_[f"all_reduce/{self.layout.tp}"] += 4 * norm_weights(self.priced.layout, stage)
        if self.layout.world_size > 1:
            found[f"all_reduce/{self.layout.world_size}"] += 1
            bytes_[f"all_reduce/{self.layout.world_size}"] += 4
        return {key: (found[key], float(bytes_[key])) for key in found}

    @property
    def schedule_csv(self) -> str:
        """The pipeline schedule as torch reads it."""
        return "".join(",".join(str(action) for action in row) + "\n" for row in self.priced.schedule.rows)


def predict(layout: RunLayout, setup: Setup) -> Predicted:
    """`layout` on the host of `setup`.

    Raises:
        InputError: the plan cannot be run at all.
    """
    scenario = setup.scenario(layout)
    priced = prepare(scenario, detail="op")
    program = blocking(priced.program, _STATE) if layout.fsdp else priced.program
    priced = replace(priced, program=program)
    cores = scenario.hardware.node.cores
    seconds = step_seconds(priced, setup.in_step)[program.price]
    if cores is None:
        return Predicted(layout, priced, replay(program, seconds, np.zeros(program.num_ops), 1.0))
    return Predicted(layout, priced, replay(program, seconds, wanted_cores(priced), cores.value))


def step_seconds(priced: Priced, in_step: tuple[float, float]) -> FloatArray:
    """Seconds of each price inside a step: float array [prices].

    Kernels take `in_step`; fully sharded gathers and reductions also copy: fully_shard copies parameters into one buffer before
    a gather and out of it after, and gradients into one before a reduction (torch's _fsdp_collectives.py). So do the parts of
    context-parallel attention.
    """
    layout, (factor, launch_s) = priced.layout, in_step
    kernels, _ = cost_models(layout.scenario, layout.hardware)
    found = priced.table.seconds.copy()
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, BlockOp):
            op = op_of(layout, key)
            if op.stream == "compute":
                found[index] = factor * found[index] + launch_s * op.kernels
            if moved := context_bytes(layout, op):
                found[index] += kernels.memory_bound("permute", moved).seconds
        elif isinstance(key, Gather | Reduce) and layout.plan.zero_stage == 3:
            found[index] += sum(kernels.memory_bound("copy", copied_bytes(layout, c)).seconds for c in calls_of(layout, key))
    return found


PARTIAL_PASSES, EXCHANGE_PASSES = 14, 6
"""Reads and writes of one tensor: joining a partial attention (rescale, add, assign; zeros, sums and contiguous gradients
backward), and packing and unpacking around an all-to-all (three copies); counted in cluster_attention.py."""


def context_bytes(layout: Layout, op: LocalOp) -> float:
    """Read and written beside an op of context-parallel attention; 0 for all others."""
    work = op.work
    if isinstance(work, AttentionWork) and layout.plan.cp > 1 and layout.plan.cp_style != "ulysses":
        return PARTIAL_PASSES * 4.0 * work.batch * work.sequence_q * work.heads * work.head_dim
    if isinstance(work, Collective) and work.dimension == "cp" and work.name == "all_to_all":
        return EXCHANGE_PASSES * work.bytes
    return 0.0


def copied_bytes(layout: Layout, call: Collective) -> float:
    """Read and written around a gather or reduction of full sharding: the whole and this rank's part."""
    return 2.0 * call.bytes * (1.0 + 1.0 / layout.placement(call.dimension).size)


def norm_weights(layout: Layout, stage: int) -> int:
    """Weights of the norms of a stage."""
    blocks = layout.stage_blocks[stage]
    return sum(volume(axes, b.block.size) for b in blocks for op in b.block.ops if op.kernel == "norm" for axes in op.parameters)


def kernel_counts(priced: Priced) -> tuple[float, int]:
    """(seconds of compute inside blocks, launches) of one rank's whole step."""
    program, seconds, launches = priced.program, 0.0, 0
    for price in program.price[program.role == 0]:
        key = program.price_keys[price]
        if isinstance(key, BlockOp) and op_of(priced.layout, key).stream == "compute":
            seconds += float(priced.table.seconds[price])
            launches += op_of(priced.layout, key).kernels
    return seconds, launches


def wanted_cores(priced: Priced) -> FloatArray:
    """Cores that each op keeps busy: its ranks', times the share of a core that its collective uses: float array [ops]."""
    program, layout = priced.program, priced.layout
    _, model = cost_models(layout.scenario, layout.hardware)
    each = np.ones(len(program.price_keys))
    for index, key in enumerate(program.price_keys):
        calls = calls_of(layout, key)
        if calls:
            places = [layout.placement(c.dimension) for c in calls]
            each[index] = max(
                (2.0 if c.name == "send_recv" else 1.0) * model.cores(c.name, c.bytes, pair_of(p) if c.name == "send_recv" else p)
                for c, p in zip(calls, places, strict=True)
            )
    ranks = np.array(program.rank_count, dtype=float)
    return np.asarray(each[program.price] * ranks[program.role])


def pair_of(placement: Any) -> Any:
    """Two neighbours of a group, as a send sees them."""
    return replace(placement, size=2, ranks_per_domain=(2,), ranks_per_node=(2,))


def calls_of(layout: Layout, key: object) -> tuple[Collective, ...]:
    """Collectives behind a price; empty for compute."""
    if isinstance(key, Gather | Reduce):
        return tuple(state_collectives(layout, key))
    if isinstance(key, Send):
        return tuple(send_collectives(layout, key))
    if isinstance(key, BlockOp):
        work = op_of(layout, key).work
        if isinstance(work, Collective):
            return (work,)
        if isinstance(work, ExpertExchange):
            return (Collective("all_to_all", work.tokens * work.topk * work.hidden * work.element_bytes, "ep"),)
    return ()


def op_of(layout: Layout, key: BlockOp) -> LocalOp:
    """The op inside a block that a price stands for."""
    block: LocalBlock = layout.stage_blocks[key.stage][key.block]
    lists = {"F": block.forward, "B": block.backward, "I": block.input_gradient, "W": block.weight_gradient}
    return lists[key.phase][key.index]


def blocking(program: Program, kinds: tuple[OpKind, ...]) -> Program:
    """`program` with ops of these kinds on the compute stream too: calls that return when the collective is done."""
    also = np.isin(program.kind, [int(k) for k in kinds])
    lists = []
    for index, stream in enumerate(program.streams):
        ops = program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]]
        if stream.kind == "compute":
            ops = np.union1d(ops, np.flatnonzero(also & (program.role == stream.role)))
        lists.append(ops)
    ptr = np.concatenate([[0], np.cumsum([len(ops) for ops in lists])]).astype(np.int64)
    return replace(program, stream_ptr=ptr, stream_ops=np.concatenate(lists))


def optimizer_parameters(priced: Priced) -> list[float]:
    """Elements that each optimizer step of the program updates."""
    layout, found = priced.layout, []
    for key in priced.program.price_keys:
        if isinstance(key, OptimizerStep):
            dense = experts = 0.0
            for stage in priced.held[key.rank]:
                more, more_experts = layout.block_parameters(stage, 0, len(layout.stage_blocks[stage]), trainable=True)
                dense, experts = dense + more, experts + more_experts
            sharded = layout.plan.zero_stage >= 1
            found.append(dense / (layout.shard_ranks if sharded else 1) + experts / (layout.expert_shard_ranks if sharded else 1))
    return found
