"""From a layout and a schedule to a program: the schedule's actions become ops, the dimensions add what they communicate.

Detail: "stage" keeps one op per action (search), "layer" one per block, so that memory, prefetch and bucketed gradient
reduction are seen block by block; "op" one per kernel and collective inside the blocks. At every detail the first forward and
the last backward of a stage are cut where a gather or a gradient bucket needs it. The step is one period of a steady run:
parameters gathered at its start are last step's update.

Folded (the default), one role stands for all ranks of a pipeline rank. Expanded, every rank has its own streams: ranks joined by
tensor, context or expert collectives share their compute ops (each holds the compute stream of all of them), data-parallel
collectives hold the streams of every rank that takes part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from simpar.parallel.beside import hides_exchanges, ops_of
from simpar.parallel.keys import (
    BlockOp,
    Compute,
    Gather,
    LaunchGap,
    Offload,
    OptimizerStep,
    Overlapped,
    PhaseLetter,
    Reduce,
    Send,
    TiedReduce,
    pair_of,
)  # fmt: skip
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import stays_gathered
from simpar.program.builder import Place, Stamp
from simpar.program.pipelines import Detail, Pipelines, Segment
from simpar.program.program import OpKind, Program
from simpar.program.units import Units
from simpar.program.waits import one_queue, optimizer_waits, p2p_blocks, reductions_block
from simpar.schedules import Action, Phase, Schedule
from simpar.specs.stage_plan import rank_gpus

_KIND = {
    Phase.F: OpKind.FORWARD, Phase.B: OpKind.BACKWARD, Phase.I: OpKind.INPUT_GRADIENT, Phase.W: OpKind.WEIGHT_GRADIENT,
}  # fmt: skip


_LETTER: dict[Phase, PhaseLetter] = {Phase.F: "F", Phase.B: "B", Phase.I: "I", Phase.W: "W"}
_ENDS = {Phase.F: "F", Phase.B: "B", Phase.I: "B", Phase.W: "W"}
"""What the end of a pass is known by: others wait for a gradient of the input, whole backward or not."""


class _Lowering(Pipelines):
    """Pipelines turned into ops."""

    def __init__(self, layout: Layout, schedule: Schedule, detail: Detail, units: Units) -> None:
        super().__init__(layout, schedule, detail, units)
        self.blocking = p2p_blocks(layout, schedule)
        self.reductions: list[object] = []

    def start_gathers(self) -> None:
        """Parameter gathers of the step's start, bucket by bucket in the order of the forward."""
        if not self.gathers_at_start:
            return
        for stage in range(self.schedule.num_stages):
            if self.model_stage[stage] != stage and self.schedule.replicas > 1:
                continue
            for first, last in sorted(self.buckets[stage]):
                self.gather(("gather", stage, first), stage, first, last, ())

    def gather(self, key: object, stage: int, first: int, last: int, deps: Iterable[object]) -> None:
        rank = self.rank_of[stage]
        if key in self.builder:
            # Shared by all copies; the first one put it.
            return
        self.builder.add(
            key, kind=OpKind.GATHER_PARAMETERS, role=self.role(rank), streams=self.all_streams(rank, "dp"),
            price=Gather(self.model_stage[stage], first, last), deps=tuple(deps), place=Place(stage, layer=first),
        )  # fmt: skip

    def run(self) -> Program:
        self.start_gathers()
        for self.copy in range(self.units.copies):
            for rank, row in enumerate(self.schedule.rows):
                self.passed(rank, row)
        self.builder.begins.append(self.builder.num_ops)
        self.copy = 0
        self.finish()
        counts = rank_gpus(self.layout.scenario) if not self.units.expanded else (1,) * self.layout.mesh.world_size
        return self.builder.build(rank_count=counts)

    def inputs(self, leaf: Action) -> list[object]:
        """Keys of what must have arrived before `leaf` (its prerequisites, through sends where ranks differ)."""
        found: list[object] = []
        for needed in self.schedule.prerequisites(leaf):
            crossing = self.rank_of[needed.stage] != self.rank_of[leaf.stage]
            name = ("send", needed.stage, leaf.stage) if crossing else ("end", needed.stage)
            found.append(self.local((*name, needed.microbatch, _ENDS[needed.phase])))
        return found

    def passed(self, rank: int, row: Sequence[Action]) -> None:
        """The actions of a rank: the first of its stages and phase op by op, those like it as that one was."""
        builder, each, alone, stamps = self.builder, self._each_by_itself, self._alone, dict[tuple[object, ...], Stamp]()
        for action in row:
            stage, phase, microbatch, parts = action
            begin = builder.num_ops
            builder.begins.append(begin)
            if parts:
                numbers, kind = tuple([leaf.microbatch for leaf in parts]), (phase, *[leaf.stage for leaf in parts])
                # Two equal numbers do not tell which of them a key holds.
                apart = each or len(set(numbers)) < len(numbers) or not alone.isdisjoint(parts)
            else:
                numbers, kind, apart = (microbatch,), (phase, stage), each or action in alone
            if not apart and (stamp := stamps.get(kind)) is not None:
                stamp.put(numbers)
                if parts:
                    builder.pairs[begin] = (parts[1].stage, numbers[1])
                continue
            (self.overlapped if parts else self.action)(rank, action)
            if not apart:
                stamps[kind] = Stamp(builder, begin, numbers)

    @cached_property
    def stays_gathered(self) -> list[list[bool]]:
        """Which blocks of each model stage keep their gathered weights for the backward."""
        return [stays_gathered(self.layout, blocks) for blocks in self.layout.stage_blocks]

    @cached_property
    def _each_by_itself(self) -> bool:
        """Whether something hangs on every action besides its sends: a gather, a reduction, a copy to the host."""
        return self.detail == "op" or self.gather_always or self.reduce_always or self.offloads

    @cached_property
    def _alone(self) -> frozenset[Action]:
        """Actions on which something of the kind hangs."""
        first = self.first_forward.values() if self.gathers_at_start else ()
        last = self.last_backward.values() if self.data_parallel else ()
        return frozenset((*first, *last, *self.launched_after))

    def action(self, rank: int, leaf: Action) -> None:
        stage, microbatch = leaf.stage, leaf.microbatch
        pieces = self.segments(stage, leaf)
        inputs = self.inputs(leaf)
        letter = _ENDS[leaf.phase]
        for index, (first, last) in enumerate(pieces):
            final = index == len(pieces) - 1
            name: tuple[object, ...] = ("end", stage, microbatch, letter)
            if not final:
                name = ("part", stage, microbatch, letter, first)
            deps = list(inputs) if index == 0 else []
            deps += self.parameter_deps(leaf, pieces, index)
            deps += self.reload(rank, leaf, pieces, index)
            if self.offloads_in_turn and leaf.phase is Phase.F and index:
                deps.append(self.local(("offload", stage, microbatch, pieces[index - 1][0])))
            if self.detail == "op" and last > first:
                self.block_ops(rank, leaf, first, name, deps)
            else:
                self.builder.add(
                    self.local(name), kind=_KIND[leaf.phase], role=self.role(rank), streams=self.streams(rank, "compute"),
                    deps=tuple(deps),
                    place=Place(stage, microbatch, first if self.detail == "layer" or len(pieces) > 1 else -1),
                    price=Compute(_LETTER[leaf.phase], self.model_stage[stage], first, last, self.is_cut(stage, leaf)),
                )  # fmt: skip
            self.after_piece(leaf, first, name)
            if self.offloads and leaf.phase is Phase.F:
                self.offload(rank, leaf, first, last, name)
        self.launch_reductions(leaf)
        self.send(rank, leaf)

    def block_ops(self, rank: int, leaf: Action, block: int, name: tuple[object, ...], inputs: list[object]) -> None:
        """Every op of one block; the key `name` is its last compute op, which waits for everything in the block."""
        phase, stage = _LETTER[leaf.phase], self.model_stage[leaf.stage]
        local = self.layout.stage_blocks[stage][block]
        ops, hides = ops_of(self.layout, local, phase), hides_exchanges(self.layout, local, phase)
        used: set[int] = set()
        place = Place(leaf.stage, leaf.microbatch, block)
        keys = [self.local(("op", leaf.stage, leaf.microbatch, phase, block, i)) for i in range(len(ops))]
        for index, op in enumerate(ops):
            used.update(op.deps)
            first_on_stream = not any(o.stream == op.stream for o in ops[:index])
            deps: list[object] = [*(keys[d] for d in op.deps), *(inputs if first_on_stream else ())]
            compute = op.stream == "compute"
            kind = _KIND[leaf.phase] if compute else OpKind.COLLECTIVE
            parts: list[tuple[object, str, BlockOp]] = [(keys[index], op.stream, BlockOp(phase, stage, block, index))]
            if hides and op.stream == "ep":
                beside = self.local(("beside", leaf.stage, leaf.microbatch, phase, block, index))
                parts = [
                    (keys[index], op.stream, BlockOp(phase, stage, block, index, "waited")),
                    (beside, f"{op.stream}_beside", BlockOp(phase, stage, block, index, "beside")),
                ]
            for key, stream, price in parts:
                self.builder.add(
                    key, kind=kind, role=self.role(rank), deps=tuple(deps), place=place,
                    streams=self.streams(rank, stream if compute else f"block_{stream}"), price=price,
                )  # fmt: skip
                self.builder.labels[self.builder[key]] = f"{leaf}/l{block} {op.name}@r{self.role(rank)}"
        ends: list[object] = [keys[i] for i in range(len(ops)) if i not in used]
        ends = ends or inputs
        self.builder.add(
            self.local(name), kind=_KIND[leaf.phase], role=self.role(rank), streams=self.streams(rank, "compute"), deps=tuple(ends),
            place=place, price=LaunchGap(phase, stage, block, self.is_cut(leaf.stage, leaf)),
        )  # fmt: skip

    # -- host ------------------------------------------------------------------------------------------------------

    def offload(self, rank: int, leaf: Action, first: int, last: int, after: tuple[object, ...]) -> None:
        """Copy a piece's activations to the host once its forward has run."""
        self.builder.add(
            self.local(("offload", leaf.stage, leaf.microbatch, first)), kind=OpKind.OFFLOAD, role=self.role(rank),
            streams=self.streams(rank, "host_down"), deps=(self.local(after),),
            place=Place(leaf.stage, leaf.microbatch, first), price=Offload(self.model_stage[leaf.stage], first, last, to_host=True),
        )  # fmt: skip

    def reload(self, rank: int, leaf: Action, pieces: list[Segment], index: int) -> list[object]:
        """Bring a piece's activations back, one piece ahead of the backward that needs them (none where nothing runs beside it)."""
        if not self.offloads or leaf.phase not in (Phase.B, Phase.I):
            return []
        ahead = 0 if self.offloads_in_turn else 1
        for position in range(ahead + 1) if index == 0 else (index + ahead,):
            if position < len(pieces):
                first, last = pieces[position]
                deps = [self.local(("offload", leaf.stage, leaf.microbatch, f)) for f in range(first, max(last, first + 1))]
                deps = [d for d in deps if d in self.builder]
                if position > ahead:
                    deps.append(self.local(("part", leaf.stage, leaf.microbatch, "B", pieces[position - 1 - ahead][0])))
                self.builder.add(
                    self.local(("reload", leaf.stage, leaf.microbatch, first)), kind=OpKind.OFFLOAD, role=self.role(rank),
                    streams=self.streams(rank, "host_up"), deps=tuple(deps), place=Place(leaf.stage, leaf.microbatch, first),
                    price=Offload(self.model_stage[leaf.stage], first, last, to_host=False),
                )  # fmt: skip
        return [self.local(("reload", leaf.stage, leaf.microbatch, pieces[index][0]))]

    # -- parameters ------------------------------------------------------------------------------------------------

    def parameter_deps(self, leaf: Action, pieces: list[Segment], index: int) -> list[object]:
        """Gathers that the piece waits for; under full sharding this also issues them, a bounded number ahead."""
        stage, (first, _last) = leaf.stage, pieces[index]
        if self.gathers_at_start and leaf == self.first_forward.get(stage):
            owner = stage if self.schedule.replicas == 1 else self.model_stage[stage]
            return [("gather", owner, self.bucket_of(stage, first))] if self.blocks(stage) else []
        if not self.gather_always or leaf.phase is Phase.W:
            return []
        letter = leaf.phase.value
        ahead = self.layout.framework.data.fsdp_prefetch_groups
        if index == 0:
            for position in range(min(ahead + 1, len(pieces))):
                self.issue_gather(leaf, pieces, position, letter)
        elif index + ahead < len(pieces):
            self.issue_gather(leaf, pieces, index + ahead, letter)
        waits: list[object] = [("gather", stage, pieces[index][0], leaf.microbatch, letter)]
        if reductions_block(self.layout.on(self.model_stage[stage])) and letter != "F" and index:
            waits.append(("reduce", stage, pieces[index - 1][0], leaf.microbatch))
        return [key for key in waits if key in self.builder]

    def issue_gather(self, leaf: Action, pieces: list[Segment], position: int, letter: str) -> None:
        """The gather of the piece at `position`; it may start once the piece `ahead + 1` before it has finished."""
        stage, (first, last) = leaf.stage, pieces[position]
        if letter != "F" and all(self.stays_gathered[self.model_stage[stage]][first:last]):
            return  # not freed after the forward
        ahead = self.layout.framework.data.fsdp_prefetch_groups
        if letter == "F" and one_queue(self.layout.on(self.model_stage[stage])):
            ahead = 0
        deps: list[object] = []
        before = position - ahead - 1
        if before >= 0:
            earlier_first = pieces[before][0]
            deps += self.everywhere(("part", stage, leaf.microbatch, "F" if letter == "F" else "B", earlier_first))
        self.gather(("gather", stage, first, leaf.microbatch, letter), stage, first, last, deps)

    def after_piece(self, leaf: Action, first: int, name: tuple[object, ...]) -> None:
        """Gradient reduction once a piece of the backward has finished."""
        if not self.data_parallel or leaf.phase in (Phase.F, Phase.I):
            return
        stage = leaf.stage
        if stage in self.launched_late:
            return
        final = leaf == self.last_backward[stage]
        if not (final or self.reduce_always):
            return
        last = self.bucket_ends[stage].get(first)
        if last is not None and self.reduces_beside:
            self.reduce(stage, first, last, leaf.microbatch, name)

    def launch_reductions(self, leaf: Action) -> None:
        """Gradient reductions of the stages whose turn is after this backward (`launched_after`)."""
        for stage in self.launched_after.get(leaf, ()):
            for first, last in self.buckets[stage]:
                self.reduce(stage, first, last, self.last_backward[stage].microbatch, ("end", leaf.stage, leaf.microbatch, "B"))

    def reduce(self, stage: int, first: int, last: int, microbatch: int, after: tuple[object, ...]) -> None:
        rank = self.rank_of[stage]
        key = ("reduce", stage, first, microbatch)
        if key in self.builder:
            return
        streams = self.all_streams(rank, "dp")
        if self.reduces_alone:
            streams += self.all_streams(rank, "compute")
        self.builder.add(
            key, kind=OpKind.REDUCE_GRADIENTS, role=self.role(rank), streams=streams, deps=tuple(self.everywhere(after)),
            price=Reduce(self.model_stage[stage], first, last), place=Place(stage, layer=first),
        )  # fmt: skip
        self.reductions.append(key)

    # -- pipeline --------------------------------------------------------------------------------------------------

    def send(self, rank: int, leaf: Action) -> None:
        """The boundary tensor to the neighbour stage, where it is on another rank."""
        if leaf.phase is Phase.W:
            return
        forward = leaf.phase is Phase.F
        target = leaf.stage + (1 if forward else -1)
        chain = self.chains[leaf.stage]
        if target not in chain or self.rank_of[target] == rank:
            return
        letter = "F" if forward else "B"
        streams = list(self.streams(rank, "pp_forward" if forward else "pp_backward"))
        if self.blocking:
            streams += self.streams(rank, "compute")
        self.builder.add(
            self.local(("send", leaf.stage, target, leaf.microbatch, letter)),
            kind=OpKind.SEND_FORWARD if forward else OpKind.SEND_BACKWARD, role=self.role(rank), streams=streams,
            deps=(self.local(("end", leaf.stage, leaf.microbatch, letter)),), place=Place(leaf.stage, leaf.microbatch),
            price=Send(self.model_stage[leaf.stage], self.model_stage[target], not forward,
                       pair_of(rank, self.rank_of[target], self.schedule.num_ranks)),
        )  # fmt: skip

    def overlapped(self, rank: int, action: Action) -> None:
        """A forward and a backward as one op; both results leave when it ends."""
        forward, backward = action.leaves
        deps = [*self.inputs(forward), *self.inputs(backward)]
        if self.gathers_at_start and forward == self.first_forward.get(forward.stage):
            stage = self.model_stage[forward.stage] if self.schedule.replicas > 1 else forward.stage
            deps += [("gather", stage, f) for f, _ in self.buckets[forward.stage]]
        key, end = (self.local(("end", leaf.stage, leaf.microbatch, letter)) for leaf, letter in ((forward, "F"), (backward, "B")))
        self.builder.add(
            key, kind=OpKind.OVERLAPPED, role=self.role(rank), streams=self.streams(rank, "compute"), deps=tuple(deps),
            place=Place(forward.stage, forward.microbatch),
            price=Overlapped(self.model_stage[forward.stage], self.model_stage[backward.stage]),
        )  # fmt: skip
        self.builder.alias(end, key)
        self.builder.pairs[self.builder[key]] = (backward.stage, backward.microbatch)
        for leaf in (forward, backward):
            self.send(rank, leaf)
        if backward == self.last_backward.get(backward.stage):
            for first, _ in self.buckets[backward.stage]:
                self.after_piece(backward, first, ("end", backward.stage, backward.microbatch, "B"))
        self.launch_reductions(backward)

    # -- end of the step -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reductions that did not overlap, the tied embedding, the update, gathers that do not overlap."""
        layout, schedule = self.layout, self.schedule
        training = layout.training.optimizer != "none"
        if self.data_parallel and not self.reduces_beside:
            for stage, leaf in sorted(self.last_backward.items()):
                for first, last in self.buckets[stage]:
                    self.reduce(stage, first, last, leaf.microbatch, ("end", stage, leaf.microbatch, _ENDS[leaf.phase]))
        first, last = layout.embedding_stage, schedule.stages_per_model - 1
        first_rank, last_rank = self.rank_of[first], self.rank_of[last]
        sync = list(self.reductions)
        if layout.network.tied and last_rank != first_rank:
            ends = [*self._stage_end(first), *self._stage_end(last)]
            self.builder.add(
                ("tied",), kind=OpKind.COLLECTIVE, role=self.role(first_rank),
                streams=(*self.all_streams(first_rank, "pp_embedding"), *self.all_streams(last_rank, "pp_embedding")),
                deps=tuple(ends + self.reductions_of(first_rank) + self.reductions_of(last_rank)), price=TiedReduce(),
            )  # fmt: skip
            sync.append(("tied",))
        if not training:
            return
        # The global gradient norm makes every rank wait for all reductions, unless it is checked after the update.
        waits = optimizer_waits(layout, schedule)
        for self.copy in range(self.units.copies):
            for rank in range(schedule.num_ranks):
                own = self.reductions_of(rank) + [("tied",)] * (sync[-1:] == [("tied",)] and rank in (first_rank, last_rank))
                self.builder.add(
                    self.local(("optimizer", rank)), kind=OpKind.OPTIMIZER, role=self.role(rank),
                    streams=self.streams(rank, "compute"), deps=tuple(sync if waits else own), price=OptimizerStep(rank),
                )  # fmt: skip
        self.copy = 0
        if self.data_parallel and self.zero in (1, 2) and not layout.overlap_param_gather:
            for stage in range(schedule.num_stages):
                if self.blocks(stage):
                    deps = self.everywhere(("optimizer", self.rank_of[stage]))
                    self.gather(("gather_end", stage), stage, 0, self.blocks(stage), deps)

    def reductions_of(self, rank: int) -> list[object]:
        """Keys of the gradient reductions of one rank."""
        return [k for k in self.reductions if isinstance(k, tuple) and self.rank_of[k[1]] == rank]

    def _stage_end(self, stage: int) -> list[object]:
        leaf = self.last_backward[stage]
        return self.everywhere(("end", stage, leaf.microbatch, _ENDS[leaf.phase]))


def lower(layout: Layout, schedule: Schedule, detail: Detail = "layer", *, expand: bool = False) -> Program:
    """The program of one step of `layout` under `schedule`: one role per pipeline rank, or per rank with `expand`."""
    return _Lowering(layout, schedule, detail, Units.of(layout, expand=expand)).run()
