"""From a layout and a schedule to a program: the schedule's actions become ops, the dimensions add what they communicate.

Detail: "stage" keeps one op per action (search), "layer" one per block, so that memory, prefetch and bucketed gradient
reduction are seen block by block. Either way the first forward and the last backward of a stage are cut where a gather or a
gradient bucket needs it. The step is one period of a steady run: parameters gathered at its start are last step's update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from simpar.parallel.keys import Compute, Gather, Key, OptimizerStep, Overlapped, Reduce, Send, TiedReduce
from simpar.parallel.layout import Layout
from simpar.program.program import OpKind, Program, ProgramBuilder, Stream
from simpar.schedules import Action, Phase, Schedule

Detail = Literal["stage", "layer"]
Segment = tuple[int, int]

_KIND = {
    Phase.F: OpKind.FORWARD, Phase.B: OpKind.BACKWARD, Phase.I: OpKind.INPUT_GRADIENT, Phase.W: OpKind.WEIGHT_GRADIENT,
}  # fmt: skip


def p2p_blocks(layout: Layout, schedule: Schedule) -> bool:
    """Whether a send holds the sender's compute stream (batched isend/irecv waited for between steps)."""
    if layout.plan.overlap_p2p is not None:
        return not layout.plan.overlap_p2p
    spec = layout.framework
    if schedule.splits_backward or schedule.replicas > 1:
        return not spec.overlap_p2p_zero_bubble
    if len(schedule.stage_to_rank) > schedule.num_ranks:
        return not spec.overlap_p2p_interleaved
    return spec.p2p_blocking


class _Lowering:
    """One pipeline (one representative rank per pipeline rank) turned into ops."""

    def __init__(self, layout: Layout, schedule: Schedule, detail: Detail) -> None:
        self.layout, self.schedule, self.detail = layout, schedule, detail
        self.builder = ProgramBuilder(layout.scenario.name)
        self.blocking = p2p_blocks(layout, schedule)
        self.zero = layout.plan.zero_stage
        self.data_parallel = layout.data_ranks > 1 and layout.training.optimizer != "none"
        unsharded_pipeline = schedule.num_ranks > 1 and layout.framework.fsdp_unsharded_with_pp
        self.gather_always = self.zero == 3 and not unsharded_pipeline and self.data_parallel
        self.reduce_always = self.data_parallel and (self.gather_always or (self.zero == 2 and schedule.num_ranks == 1))
        self.ends: dict[tuple[int, int, str], object] = {}
        """(stage, microbatch, F | B) -> key of the op that produces the boundary tensor."""
        self.reductions: list[object] = []
        self.last_backward: dict[int, Action] = {}
        self.first_forward: dict[int, Action] = {}
        self._find_ends()

    def _find_ends(self) -> None:
        for row in self.schedule.rows:
            for action in row:
                for leaf in action.leaves:
                    if leaf.phase is Phase.F:
                        self.first_forward.setdefault(leaf.stage, leaf)
                    elif leaf.phase in (Phase.B, Phase.W):
                        self.last_backward[leaf.stage] = leaf

    # -- helpers ---------------------------------------------------------------------------------------------------

    def rank_of(self, stage: int) -> int:
        return self.schedule.stage_to_rank[stage]

    def model_stage(self, stage: int) -> int:
        return self.schedule.model_stage(stage)

    def blocks(self, stage: int) -> int:
        return len(self.layout.stage_blocks[self.model_stage(stage)])

    def buckets(self, stage: int) -> tuple[Segment, ...]:
        """Gradient buckets of a stage, in the order of the backward."""
        layout = self.layout
        if self.gather_always or self.reduce_always:
            return tuple((i, i + 1) for i in range(self.blocks(stage) - 1, -1, -1))
        bucketed = layout.overlap_grad_reduce
        if layout.framework.buckets_on_first_pipeline_rank_only and stage != 0:
            bucketed = False
        return layout.buckets(self.model_stage(stage), bucketed=bucketed)

    def segments(self, stage: int, leaf: Action) -> list[Segment]:
        """How an action is cut into ops, in the order of execution."""
        count = self.blocks(stage)
        forward = leaf.phase is Phase.F
        if count == 0:
            return [(0, 0)]
        if self.detail == "layer" or self.gather_always:
            pieces = [(i, i + 1) for i in range(count)]
        elif self._cut(stage, leaf):
            pieces = sorted(self.buckets(stage))
        else:
            pieces = [(0, count)]
        return pieces if forward else pieces[::-1]

    def _cut(self, stage: int, leaf: Action) -> bool:
        if not self.data_parallel:
            return False
        if leaf.phase is Phase.F:
            return leaf == self.first_forward[stage] and self.gathers_at_start
        if self.reduce_always:
            return leaf.phase in (Phase.B, Phase.W)
        return leaf == self.last_backward[stage] and self.layout.overlap_grad_reduce

    @property
    def gathers_at_start(self) -> bool:
        """Parameters are gathered under the first forward (sharded optimizer with overlap, or FSDP under a pipeline)."""
        if not self.data_parallel or self.gather_always:
            return False
        return self.zero == 3 or (self.zero >= 1 and self.layout.overlap_param_gather)

    def stream(self, rank: int, kind: str) -> Stream:
        return Stream(rank, kind)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def start_gathers(self) -> None:
        """Parameter gathers of the step's start, bucket by bucket in the order of the forward."""
        if not self.gathers_at_start:
            return
        for stage in range(self.schedule.num_stages):
            if self.model_stage(stage) != stage and self.schedule.replicas > 1:
                continue
            for first, last in sorted(self.buckets(stage)):
                self.gather(("gather", stage, first), stage, first, last, ())

    def gather(self, key: object, stage: int, first: int, last: int, deps: Iterable[object]) -> None:
        rank = self.rank_of(stage)
        self.builder.add(
            key, kind=OpKind.GATHER_PARAMETERS, role=rank, streams=(self.stream(rank, "dp"),),
            price=Gather(self.model_stage(stage), first, last), deps=tuple(deps), stage=stage, layer=first,
        )  # fmt: skip

    def run(self) -> Program:
        self.start_gathers()
        for rank, row in enumerate(self.schedule.rows):
            for action in row:
                if action.parts:
                    self.overlapped(rank, action)
                else:
                    self.action(rank, action)
        self.finish()
        counts = tuple(self.layout.mesh.world_size // self.schedule.num_ranks for _ in range(self.schedule.num_ranks))
        return self.builder.build(rank_count=counts)

    def inputs(self, leaf: Action) -> list[object]:
        """Keys of what must have arrived before `leaf` (its prerequisites, through sends where ranks differ)."""
        found: list[object] = []
        for needed in self.schedule.prerequisites(leaf):
            letter = "F" if needed.phase is Phase.F else ("W" if needed.phase is Phase.W else "B")
            crossing = self.rank_of(needed.stage) != self.rank_of(leaf.stage)
            if crossing:
                found.append(("send", needed.stage, leaf.stage, needed.microbatch, letter))
            else:
                found.append(("end", needed.stage, needed.microbatch, letter))
        return found

    def action(self, rank: int, leaf: Action) -> None:
        stage, microbatch = leaf.stage, leaf.microbatch
        pieces = self.segments(stage, leaf)
        inputs = self.inputs(leaf)
        letter = "F" if leaf.phase is Phase.F else ("W" if leaf.phase is Phase.W else "B")
        compute = self.stream(rank, "compute")
        for index, (first, last) in enumerate(pieces):
            final = index == len(pieces) - 1
            key = ("end", stage, microbatch, letter) if final else ("part", stage, microbatch, letter, first)
            deps = list(inputs) if index == 0 else []
            deps += self.parameter_deps(leaf, pieces, index)
            self.builder.add(
                key, kind=_KIND[leaf.phase], role=rank, streams=(compute,), deps=tuple(deps), stage=stage,
                microbatch=microbatch, layer=first if self.detail == "layer" or len(pieces) > 1 else -1,
                price=Compute(leaf.phase.value, self.model_stage(stage), first, last),
            )  # fmt: skip
            self.after_piece(leaf, first, last, key)
        self.send(rank, leaf)

    # -- parameters ------------------------------------------------------------------------------------------------

    def parameter_deps(self, leaf: Action, pieces: list[Segment], index: int) -> list[object]:
        """Gathers that the piece waits for; under full sharding this also issues them, a bounded number ahead."""
        stage, (first, _last) = leaf.stage, pieces[index]
        if self.gathers_at_start and leaf == self.first_forward.get(stage):
            covering = [f for f, l in self.buckets(stage) if f <= first < l]
            return [("gather", stage if self.schedule.replicas == 1 else self.model_stage(stage), f) for f in covering]
        if not self.gather_always or leaf.phase is Phase.W:
            return []
        letter = leaf.phase.value
        ahead = self.layout.framework.fsdp_prefetch_groups
        if index == 0:
            for position in range(min(ahead + 1, len(pieces))):
                self.issue_gather(leaf, pieces, position, letter)
        elif index + ahead < len(pieces):
            self.issue_gather(leaf, pieces, index + ahead, letter)
        key = ("gather", stage, pieces[index][0], leaf.microbatch, letter)
        return [key] if key in self.builder else []

    def issue_gather(self, leaf: Action, pieces: list[Segment], position: int, letter: str) -> None:
        """The gather of the piece at `position`; it may start once the piece `ahead + 1` before it has finished."""
        stage, (first, last) = leaf.stage, pieces[position]
        kept = not self.layout.plan.reshard_after_forward or last == self.blocks(stage)
        if letter != "F" and kept:
            # Not freed after the forward: the last group always stays (its backward is next).
            return
        ahead = self.layout.framework.fsdp_prefetch_groups
        deps: list[object] = []
        before = position - ahead - 1
        if before >= 0:
            earlier_first = pieces[before][0]
            deps.append(("part", stage, leaf.microbatch, "F" if letter == "F" else "B", earlier_first))
        self.gather(("gather", stage, first, leaf.microbatch, letter), stage, first, last, deps)

    def after_piece(self, leaf: Action, first: int, last: int, key: object) -> None:
        """Gradient reduction once a piece of the backward has finished."""
        if not self.data_parallel or leaf.phase in (Phase.F, Phase.I):
            return
        stage = leaf.stage
        final = leaf == self.last_backward[stage]
        if not (final or self.reduce_always):
            return
        if self.layout.overlap_grad_reduce or self.reduce_always:
            for bucket_first, bucket_last in self.buckets(stage):
                if bucket_first == first:
                    self.reduce(stage, bucket_first, bucket_last, leaf.microbatch, key)

    def reduce(self, stage: int, first: int, last: int, microbatch: int, after: object) -> None:
        rank = self.rank_of(stage)
        key = ("reduce", stage, first, microbatch)
        self.builder.add(
            key, kind=OpKind.REDUCE_GRADIENTS, role=rank, streams=(self.stream(rank, "dp"),), deps=(after,),
            price=Reduce(self.model_stage(stage), first, last), stage=stage, layer=first,
        )  # fmt: skip
        self.reductions.append(key)

    # -- pipeline --------------------------------------------------------------------------------------------------

    def send(self, rank: int, leaf: Action) -> None:
        """The boundary tensor to the neighbour stage, where it is on another rank."""
        if leaf.phase is Phase.W:
            return
        forward = leaf.phase is Phase.F
        target = leaf.stage + (1 if forward else -1)
        chain = self.schedule.chain_of(leaf.stage).stages
        if target not in chain or self.rank_of(target) == rank:
            return
        letter = "F" if forward else "B"
        streams = [self.stream(rank, "pp_forward" if forward else "pp_backward")]
        if self.blocking:
            streams.append(self.stream(rank, "compute"))
        self.builder.add(
            ("send", leaf.stage, target, leaf.microbatch, letter),
            kind=OpKind.SEND_FORWARD if forward else OpKind.SEND_BACKWARD, role=rank, streams=streams,
            deps=(("end", leaf.stage, leaf.microbatch, letter),), stage=leaf.stage, microbatch=leaf.microbatch,
            price=Send(self.model_stage(leaf.stage), self.model_stage(target), not forward),
        )  # fmt: skip

    def overlapped(self, rank: int, action: Action) -> None:
        """A forward and a backward as one op; both results leave when it ends."""
        forward, backward = action.leaves
        deps = [*self.inputs(forward), *self.inputs(backward)]
        if self.gathers_at_start and forward == self.first_forward.get(forward.stage):
            stage = self.model_stage(forward.stage) if self.schedule.replicas > 1 else forward.stage
            deps += [("gather", stage, f) for f, _ in self.buckets(forward.stage)]
        key = ("pair", forward.stage, forward.microbatch, backward.stage, backward.microbatch)
        compute = self.stream(rank, "compute")
        self.builder.add(
            key, kind=OpKind.OVERLAPPED, role=rank, streams=(compute,), deps=tuple(deps), stage=forward.stage,
            microbatch=forward.microbatch,
            price=Overlapped(self.model_stage(forward.stage), self.model_stage(backward.stage)),
        )  # fmt: skip
        index = self.builder[key]
        self.builder.pairs[index] = (backward.stage, backward.microbatch)
        for leaf in (forward, backward):
            letter = "F" if leaf.phase is Phase.F else "B"
            self.builder.alias(("end", leaf.stage, leaf.microbatch, letter), key)
            self.send(rank, leaf)
        if backward == self.last_backward.get(backward.stage):
            for first, last in self.buckets(backward.stage):
                self.after_piece(backward, first, last, key)

    # -- end of the step -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reductions that did not overlap, the tied embedding, the update, gathers that do not overlap."""
        layout, schedule = self.layout, self.schedule
        training = layout.training.optimizer != "none"
        if self.data_parallel and not (layout.overlap_grad_reduce or self.reduce_always):
            for stage, leaf in sorted(self.last_backward.items()):
                letter = "W" if leaf.phase is Phase.W else "B"
                for first, last in self.buckets(stage):
                    self.reduce(stage, first, last, leaf.microbatch, ("end", stage, leaf.microbatch, letter))
        last_rank = self.rank_of(schedule.stages_per_model - 1)
        sync = list(self.reductions)
        if layout.network.tied and last_rank != 0:
            ends = [self._stage_end(0), self._stage_end(schedule.stages_per_model - 1)]
            self.builder.add(
                ("tied",), kind=OpKind.COLLECTIVE, role=0,
                streams=(self.stream(0, "pp_embedding"), self.stream(last_rank, "pp_embedding")),
                deps=tuple(ends + self.reductions_of(0) + self.reductions_of(last_rank)), price=TiedReduce(),
            )  # fmt: skip
            sync.append(("tied",))
        if not training:
            return
        # The global gradient norm makes every rank wait for all reductions.
        for rank in range(schedule.num_ranks):
            self.builder.add(
                ("optimizer", rank), kind=OpKind.OPTIMIZER, role=rank, streams=(self.stream(rank, "compute"),),
                deps=tuple(sync), price=OptimizerStep(rank),
            )  # fmt: skip
        if self.data_parallel and self.zero in (1, 2) and not layout.overlap_param_gather:
            for stage in range(schedule.num_stages):
                if self.blocks(stage):
                    deps = (("optimizer", self.rank_of(stage)),)
                    self.gather(("gather_end", stage), stage, 0, self.blocks(stage), deps)

    def reductions_of(self, rank: int) -> list[object]:
        """Keys of the gradient reductions of one rank."""
        return [k for k in self.reductions if isinstance(k, tuple) and self.rank_of(k[1]) == rank]

    def _stage_end(self, stage: int) -> object:
        leaf = self.last_backward[stage]
        return ("end", stage, leaf.microbatch, "W" if leaf.phase is Phase.W else "B")


def lower(layout: Layout, schedule: Schedule, detail: Detail = "layer") -> Program:
    """The program of one step of `layout` under `schedule`, one role per pipeline rank."""
    return _Lowering(layout, schedule, detail).run()
