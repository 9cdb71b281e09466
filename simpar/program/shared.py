"""Which layouts have the same program: ops and what they wait for, whatever they cost."""

from __future__ import annotations

from dataclasses import replace

from simpar.parallel.layout import Layout
from simpar.program.pipelines import Detail
from simpar.program.program import Program
from simpar.program.waits import one_queue, reductions_block
from simpar.schedules import Schedule

PRICES_ONLY = {
    "tp", "sequence_parallel", "cp", "cp_style", "ep", "etp", "dp", "shard_size", "recompute", "overlap_tp", "overlap_ep",
    "ep_dispatcher", "placement", "offload", "first_stage_less_layers", "last_stage_less_layers", "embedding_alone",
    "layers_per_stage", "zero_stage",
}  # fmt: skip
"""Fields of a plan that change what ops cost, not which there are and what they wait for, beyond what `program_key` asks for."""


def program_key(layout: Layout, schedule: Schedule, detail: Detail) -> tuple[object, ...]:
    """Everything that `lower` reads of a folded layout, but how many ranks a role stands for."""
    scenario = layout.scenario
    stages, zero = range(layout.num_stages), layout.plan.zero_stage
    return (
        scenario.name, scenario.framework, scenario.framework_version, detail,
        layout.plan.model_dump_json(exclude=PRICES_ONLY), layout.num_stages, layout.replicas,
        schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.stage_to_rank,
        # Sharded gradients of a pipeline leave as sharded states' do.
        1 if zero == 2 and schedule.num_ranks > 1 else zero, layout.overlap_grad_reduce, layout.defers_reduction,
        layout.training.optimizer, layout.plan.offload.activations > 0, layout.shares_state,
        layout.network.tied, *((one_queue(layout.on(s)), reductions_block(layout.on(s))) for s in stages),
        tuple(len(b) for b in layout.stage_blocks),
        tuple(layout.buckets(s, bucketed=bucketed) for s in stages for bucketed in (False, True)),
    )  # fmt: skip


def with_ranks(program: Program, ranks: tuple[int, ...]) -> Program:
    """`program` where each role stands for another number of ranks; what was worked out about it is kept."""
    if program.rank_count == ranks:
        return program
    found = replace(program, rank_count=ranks)
    found.known.update(program.known)
    return found
