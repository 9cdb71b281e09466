"""The same layouts as scenarios: their prediction on a host whose cores the ranks share, and what of it can be measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from simpar.costs.collectives import CollectiveModel
from simpar.engine import host_ranks
from simpar.engine.timeline import Timeline
from simpar.graph.types import Norm
from simpar.live.cluster_copies import context_bytes, partial_launches, sharded_bytes
from simpar.live.cluster_in_step import InStep
from simpar.live.cluster_layouts import RunLayout
from simpar.live.cluster_memory import peaks
from simpar.parallel.beside import op_of
from simpar.parallel.keys import BlockOp, Gather, OptimizerStep, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import calls_of, state_collectives
from simpar.parallel.work import AttentionWork, Collective
from simpar.program.program import COMPUTE_KINDS, FloatArray, OpKind, Program
from simpar.result.interpret import Priced, interpret
from simpar.specs.calibration import uncalibrated
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models, prepare
from simpar.topology.placement import GroupPlacement

_PIPELINE = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.OVERLAPPED,
             OpKind.COLLECTIVE)  # fmt: skip
_STATE = (OpKind.GATHER_PARAMETERS, OpKind.REDUCE_GRADIENTS)
TIME_SLICE_S: Final = 4e-3
WAKE_S: Final = 1e-3
"""Of a Linux host whose profile does not say: a tick of 250 Hz, and assumed."""
Counts = dict[str, tuple[int, float]]
"""collective/ranks -> (calls, bytes) of one rank in a step."""


@dataclass(frozen=True)
class Setup:
    """What all layouts share.

    Attributes:
        models: "transformer" and "mlp" -> model table of a scenario.
        training: the same -> training table.
        hardware: profile, a name or a path.
        precision: fp32, bf16 or fp8.
        nodes: hosts that the launch has; processes_per_node: of each, where there are several.
        in_step: how eager compute inside a step differs from its kernels alone.
    """

    models: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Mapping[str, Any]]
    hardware: str
    precision: str = "fp32"
    nodes: int = 1
    processes_per_node: int = 0
    in_step: InStep = field(default_factory=InStep)

    def scenario(self, layout: RunLayout) -> Scenario:
        """`layout` as a scenario.

        Raises:
            InputError: the model or batch cannot be split so.
        """
        manual = layout.pp > 1 or layout.folds_experts
        plan: dict[str, Any] = {
            "tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp, "ep": layout.ep,
            "sequence_parallel": layout.sequence_parallel, "cp_style": layout.cp_style, "zero_stage": 3 if layout.fsdp else 0,
            "virtual_stages": layout.virtual_stages, "overlap_grad_reduce": not manual, "synchronous_optimizer": True,
        }  # fmt: skip
        if layout.pp > 1:
            plan["schedule"] = layout.schedule
        if layout.folds_experts:
            plan["etp"] = 1
        if layout.recompute:
            plan["recompute"] = "full"
        training = {**self.training[layout.model], "precision": self.precision, "optimizer": "adamw", "compile": layout.compiled}
        if layout.model == "moe":
            training["routing"] = {"kind": "balanced"}  # the ranks deal tokens out evenly
        cluster: dict[str, Any] = {"hardware": self.hardware, "num_nodes": 1, "num_gpus": layout.world_size}
        if self.nodes > 1:
            cluster["gpus_per_node"] = self.processes_per_node
            cluster["num_nodes"] = -(-layout.world_size // self.processes_per_node)
        return make_scenario(
            {
                "name": layout.name, "model": dict(self.models[layout.model]), "plan": plan, "training": training,
                "framework": "torch-steps-fsdp" if layout.fsdp else "torch-steps",
                "cluster": cluster,
            }
        )  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """One layout predicted.

    Attributes:
        layout: the run.
        priced: its program and prices, every op and collective.
        timeline: of the replay.
        held_s: seconds between start and finish of each op, the mean over its ranks: float array [ops].
        processor_s: of all ranks together in the step; cores: of the host; 0 where they are not shared.
    """

    layout: RunLayout
    priced: Priced
    timeline: Timeline
    held_s: FloatArray
    processor_s: float = 0.0
    cores: float = 0.0

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.makespan

    def beside(self, foreign: float) -> float:
        """Seconds of a step while other processes keep `foreign` cores busy: no less than its work over the cores that are left.

        What they take while ranks wait costs the step nothing.
        """
        left = self.cores - foreign
        return max(self.step_time_s, self.processor_s / left) if left > 0.0 else self.step_time_s

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Share of the pipeline phase that each pipeline rank neither computes nor takes part in a block's collective."""
        program, timeline = self.priced.program, self.timeline
        inside = np.isin(program.kind, [int(k) for k in _PIPELINE])
        end = float(timeline.finish[inside].max())
        return tuple(1.0 - float(self.held_s[inside & (program.role == r)].sum()) / end for r in range(self.layout.pp))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 80 % interval of the step time, relative to the folded step's own."""
        result = interpret(self.priced, self.timeline)
        low, high = result.step_interval.low, result.step_interval.high
        return low, high

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Peak allocated bytes of each pipeline rank."""
        return peaks(self.priced, interpret(self.priced, self.timeline), self.layout)

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
                    found[key] += round(call.repeat)
                    bytes_[key] += call.bytes * call.repeat  # type: ignore[assignment]
        if self.layout.sequence_parallel:
            # Weights between the tensor-parallel parts see a part of the sequence each: their gradients are summed once a step.
            for stage in self.priced.held[pipeline_rank]:
                found[f"all_reduce/{self.layout.tp}"] += 1
                bytes_[f"all_reduce/{self.layout.tp}"] += 4 * between_weights(self.priced.layout, stage)
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
    with uncalibrated():
        priced = prepare(scenario, detail="op", transfers=True)
    if layout.fsdp and scenario.hardware.gpu.vendor == "cpu":
        # Gloo's collectives return when they are done; NCCL's run beside the compute.
        priced = replace(priced, program=blocking(priced.program, _STATE))
    program, work = priced.program, step_work(priced, setup.in_step, layout.model)
    seconds = work.seconds[program.price]
    computes = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS])
    ranks = [tuple(r for r in range(layout.world_size) if layout.coordinates(r)["pp"] == p) for p in range(layout.pp)]
    cores = scenario.hardware.node.cores
    if cores is None:
        # A core for each rank, and talking costs none.
        alone = host_ranks.Scheduler(layout.world_size, TIME_SLICE_S, WAKE_S)
        found = host_ranks.replay(program, seconds, np.zeros(program.num_ops), computes.tolist(), ranks, alone)
        return Predicted(layout, priced, found.timeline, found.held_s)
    processor_s = float(seconds @ wanted_cores(priced, work, together=True))
    talks = wanted_cores(priced, work, together=False)
    found = host_ranks.replay(program, seconds, talks, computes.tolist(), ranks, _scheduler(scenario))
    return Predicted(layout, priced, found.timeline, found.held_s, processor_s=processor_s, cores=cores.value)


def _scheduler(scenario: Scenario) -> host_ranks.Scheduler:
    node = scenario.hardware.node
    assert node.cores is not None
    slice_s = node.time_slice.value if node.time_slice else TIME_SLICE_S
    wake_s = node.wake_delay.value if node.wake_delay else WAKE_S
    return host_ranks.Scheduler(max(1, int(node.cores.value)), slice_s, wake_s)


@dataclass(frozen=True)
class StepWork:
    """Seconds of each price inside a step, float array [prices], and how many of them are copies and host work beside it."""

    seconds: FloatArray
    beside: FloatArray


def step_work(priced: Priced, in_step: InStep, model: str) -> StepWork:
    """What each price takes inside a step of `model`.

    Kernels take `in_step`; fully sharded gathers and reductions also copy: fully_shard copies parameters into one buffer before
    a gather and out of it after, and gradients into one before a reduction (torch's _fsdp_collectives.py), and work on the host
    around both. Parts of context-parallel attention copy too. A layer's backward in two parts costs the host more than a whole one.
    """
    layout, factor = priced.layout, in_step.factor(model)
    kernels, _ = cost_models(layout.scenario, layout.hardware)
    seconds, beside = priced.table.seconds.copy(), np.zeros(len(priced.program.price_keys))
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, BlockOp):
            op = op_of(layout, key)
            if op.stream == "compute":
                seconds[index] = factor * seconds[index] + in_step.launch_s * op.kernels
            if moved := context_bytes(layout, op):
                launches = partial_launches(layout.plan.cp) if isinstance(op.work, AttentionWork) else 0
                beside[index] = kernels.memory_bound("permute", moved).seconds + in_step.launch_s * launches
            if key.phase == "I" and key.index == 0 and _is_split(layout, key):
                beside[index] += in_step.split_s.get(model, 0.0)
        elif isinstance(key, Gather | Reduce) and layout.plan.zero_stage == 3:
            copies = sum(kernels.memory_bound("copy", moved).seconds for moved in sharded_bytes(layout, key))
            beside[index] = copies + in_step.shard_s * (key.last - key.first)
    return StepWork(seconds + beside, beside)


def _is_split(layout: Layout, key: BlockOp) -> bool:
    """Whether the backward of a block is run in two parts: of layers, except on the first stage, whose inputs need no gradient
    (torch's PipelineStage.backward_one_chunk leaves the whole backward to the second part there)."""
    stage = layout.stages[key.stage]
    return key.stage > 0 and stage.embedding <= key.block < stage.embedding + stage.count


def between_weights(layout: Layout, stage: int) -> int:
    """Weights of the norms and routers of a stage."""
    nodes = [(b.layer, node) for b in layout.stage_blocks[stage] for node in b.layer.nodes]
    return sum(layer.weights(node) for layer, node in nodes if isinstance(node, Norm) or node.name.endswith("router"))


def kernel_counts(priced: Priced) -> tuple[float, int]:
    """(seconds of compute inside blocks, launches) of one rank's whole step."""
    program, seconds, launches = priced.program, 0.0, 0
    for price in program.price[program.role == 0]:
        key = program.price_keys[price]
        if isinstance(key, BlockOp) and op_of(priced.layout, key).stream == "compute":
            seconds += float(priced.table.seconds[price])
            launches += op_of(priced.layout, key).kernels
    return seconds, launches


def sharding(priced: Priced) -> tuple[int, float]:
    """(gathers and reductions of one rank's step, seconds of their copies where the group is the rank alone)."""
    layout, program, calls, moved = priced.layout, priced.program, 0, 0.0
    kernels, _ = cost_models(layout.scenario, layout.hardware)
    for price in program.price[program.role == 0]:
        key = program.price_keys[price]
        if isinstance(key, Gather | Reduce):
            calls += key.last - key.first
            # One read and write for a gather; into a buffer, through it, and an addition for a reduction.
            passes = 2.0 if isinstance(key, Gather) else 7.0
            moved += passes * sum(c.bytes for c in state_collectives(layout, key))
    return calls, kernels.memory_bound("copy", moved / max(calls, 1)).seconds * calls


def wanted_cores(priced: Priced, work: StepWork, *, together: bool) -> FloatArray:
    """Cores that each op keeps busy, 1 or the share of a core that its collective uses: float array [ops].

    Args:
        work: what each price takes; copies and host work use a whole core.
        together: of all its ranks; else of one.
    """
    program, layout = priced.program, priced.layout
    _, model = cost_models(layout.scenario, layout.hardware)
    each = np.ones(len(program.price_keys))
    for index, key in enumerate(program.price_keys):
        calls = calls_of(layout, key)
        if calls:
            places = [layout.placement(c.dimension) for c in calls]
            each[index] = max(_talks(model, c, p, together=together) for c, p in zip(calls, places, strict=True))
            if work.beside[index]:
                share = work.beside[index] / work.seconds[index]
                each[index] += share * (1.0 - each[index])
    ranks = np.array(program.rank_count, dtype=float) if together else np.ones(len(program.rank_count))
    return np.asarray(each[program.price] * ranks[program.role])


def _talks(model: CollectiveModel, call: Collective, placement: GroupPlacement, *, together: bool) -> float:
    """Cores busy for each rank, for both ends of a send where `together`."""
    if call.name == "send_recv":
        return (2.0 if together else 1.0) * model.cores(call.name, call.bytes, pair_of(placement))
    return model.cores(call.name, call.bytes, placement)


def pair_of(placement: GroupPlacement) -> GroupPlacement:
    """Two neighbours of a group, as a send sees them."""
    return replace(placement, size=2, ranks_per_domain=(2,), ranks_per_node=(2,))


def blocking(program: Program, kinds: tuple[OpKind, ...]) -> Program:
    """`program` with ops of these kinds on the compute stream too: calls that return when the collective is done."""
    also = np.isin(program.kind, [int(k) for k in kinds])
    lists = []
    for index, stream in enumerate(program.streams):
        ops = program.ops_at(index)
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
            dense, experts = layout.held_parameters(priced.held[key.rank], trainable=True)
            sharded = layout.plan.zero_stage >= 1
            found.append(dense / (layout.shard_ranks if sharded else 1) + experts / (layout.expert_shard_ranks if sharded else 1))
    return found
