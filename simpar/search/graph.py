"""A step at stage detail as plain lists: the ops of `program.lower`, built without naming each of them.

`lower` writes programs for every detail and purpose and takes 30 us an op; a search needs thousands of programs of thousands of
ops. This builder covers what the search needs most (stage detail, whole stages, states gathered at most once a step) in about
3 us an op; the tests hold it against `lower` through the engine, bit by bit. Everything else goes through `lower`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from simpar.parallel.keys import Compute, Gather, OptimizerStep, Overlapped, Reduce, Send, TiedReduce
from simpar.program.program import Program
from simpar.schedules import Phase, Schedule

Segment = tuple[int, int]
_LETTER = {Phase.F: "F", Phase.B: "B", Phase.I: "I", Phase.W: "W"}


@dataclass(frozen=True)
class Flow:
    """What the lowering asks of a layout, when nothing is gathered or reduced every micro-batch and nothing is offloaded.

    Attributes:
        blocks: of each model stage.
        buckets: gradient buckets of each stage of the schedule, in the order of the backward; empty without data parallelism.
        gathers_at_start, gathers_at_end: parameters are gathered under the first forward, or after the update.
        overlaps_reduction: buckets are reduced as the last backward goes through them.
        blocking: sends hold the compute stream.
        tied, training: an embedding is tied across stages; there is an optimizer.
        waits: the update waits for the gradients of all ranks.
    """

    blocks: tuple[int, ...]
    buckets: tuple[tuple[Segment, ...], ...]
    gathers_at_start: bool
    gathers_at_end: bool
    overlaps_reduction: bool
    blocking: bool
    tied: bool
    training: bool
    waits: bool


@dataclass
class Graph:
    """Ops with what they wait for.

    Attributes:
        preds: of each op, dependencies and the op before it on each of its streams.
        price: index into `price_keys` of each op.
        compute: role whose compute stream it holds, -1 for none.
        beside: role whose compute it may slow, -1 for none.
        stream: what it runs on beside compute, -1 for nothing.
        role: whose it is.
        price_keys: as in a Program.
        exact: whatever may slow an op is triggered by its own role (see `replay`).
    """

    preds: list[list[int]] = field(default_factory=list)
    price: list[int] = field(default_factory=list)
    compute: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    role: list[int] = field(default_factory=list)
    price_keys: tuple[object, ...] = ()
    exact: bool = True

    @cached_property
    def order(self) -> list[int]:
        """A topological order in which communication comes before the compute ops that it may slow."""
        waiting = [len(p) for p in self.preds]
        successors: list[list[int]] = [[] for _ in self.preds]
        for op, preds in enumerate(self.preds):
            for pred in preds:
                successors[pred].append(op)
        compute = self.compute
        talk: deque[int] = deque()
        work: deque[int] = deque()
        for op, count in enumerate(waiting):
            if not count:
                (work if compute[op] >= 0 else talk).append(op)
        found = []
        while talk or work:
            op = talk.popleft() if talk else work.popleft()
            found.append(op)
            for successor in successors[op]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    (work if compute[successor] >= 0 else talk).append(successor)
        return found

    @cached_property
    def sinks(self) -> list[int]:
        """Ops that nothing waits for."""
        waited = {pred for preds in self.preds for pred in preds}
        return [op for op in range(len(self.preds)) if op not in waited]

    @classmethod
    def of(cls, program: Program) -> Graph:
        """The same of a lowered program."""
        program.check()
        ptr, preds = program.predecessors[0].tolist(), program.predecessors[1].tolist()
        graph = cls([preds[a:b] for a, b in itertools.pairwise(ptr)], program.price.tolist())
        sptr, streams = program.op_streams[0].tolist(), program.op_streams[1].tolist()
        for op in range(program.num_ops):
            own = streams[sptr[op] : sptr[op + 1]]
            held = [program.streams[s] for s in own]
            compute = [s.role for s in held if s.kind == "compute"]
            beside = {s.role for s in held} - set(compute)
            graph.compute.append(compute[0] if compute else -1)
            graph.beside.append(beside.pop() if len(beside) == 1 else -1)
            graph.stream.append(own[0] if len(own) == 1 and not compute else -1)
            graph.exact &= len(compute) <= 1 and not beside
        graph.role = program.role.tolist()
        graph.price_keys = program.price_keys
        graph.exact &= graph._own_triggers(program)
        return graph

    def _own_triggers(self, program: Program) -> bool:
        for op, role in enumerate(self.beside):
            if role >= 0:
                deps = program.dep_ops[program.dep_ptr[op] : program.dep_ptr[op + 1]].tolist()
                if any(self.compute[d] != role and self.beside[d] != role for d in deps):
                    return False
        return True


class _Builder:
    def __init__(self, schedule: Schedule, flow: Flow) -> None:
        self.schedule, self.flow, self.graph = schedule, flow, Graph()
        self.m = schedule.num_microbatches
        stages = schedule.num_stages
        self.rank_of = schedule.stage_to_rank
        self.model = [schedule.model_stage(s) for s in range(stages)]
        chains = [schedule.chain_of(s).stages for s in range(stages)]
        self.before = [s - 1 if s - 1 in chains[s] else -1 for s in range(stages)]
        self.after = [s + 1 if s + 1 in chains[s] else -1 for s in range(stages)]
        self.ends = [-1] * (3 * stages * self.m)
        self.sent = [-1] * (2 * stages * self.m)
        self.keys: dict[object, int] = {}
        self.passes: dict[tuple[int, Phase], int] = {}
        self.boundaries: dict[tuple[int, bool], int] = {}
        self.streams: dict[tuple[int, str], int] = {}
        self.numbers: dict[tuple[int, str], int] = {}
        self.later: list[tuple[int, int]] = []
        """(op, slot of `sent`): waits for a boundary tensor that another rank sends."""
        self.gathers: dict[Segment, int] = {}
        self.reductions: list[tuple[int, int]] = []
        self.first_forward: dict[int, int] = {}
        self.last_backward: dict[int, tuple[Phase, int]] = {}

    def add(self, key: object, rank: int, streams: Sequence[str], deps: list[int]) -> int:
        """One op on streams of one rank."""
        graph, op = self.graph, len(self.graph.preds)
        computes = False
        for kind in streams:
            computes |= kind == "compute"
            last = self.streams.get((rank, kind), -1)
            if last >= 0 and last not in deps:
                deps.append(last)
            self.streams[rank, kind] = op
        graph.preds.append(deps)
        graph.price.append(self.price(key))
        graph.compute.append(rank if computes else -1)
        graph.beside.append(-1 if computes else rank)
        graph.stream.append(-1 if computes else self.number(rank, streams[0]))
        graph.role.append(rank)
        return op

    def number(self, rank: int, kind: str) -> int:
        """Index of a stream."""
        return self.numbers.setdefault((rank, kind), len(self.numbers))

    def run(self) -> Graph:
        flow, schedule = self.flow, self.schedule
        for row in schedule.rows:
            for action in row:
                for leaf in action.leaves:
                    if leaf.phase is Phase.F:
                        self.first_forward.setdefault(leaf.stage, leaf.microbatch)
                    elif leaf.phase is not Phase.I:
                        self.last_backward[leaf.stage] = (leaf.phase, leaf.microbatch)
        if flow.gathers_at_start:
            for stage in range(schedule.num_stages):
                if self.model[stage] == stage or schedule.replicas == 1:
                    for first, last in sorted(flow.buckets[stage]):
                        self.gathers[stage, first] = self.add(
                            Gather(self.model[stage], first, last), self.rank_of[stage], ("dp",), []
                        )
        for rank, row in enumerate(schedule.rows):
            for action in row:
                if action.parts:
                    self.pair(rank, *action.leaves)
                else:
                    self.action(rank, action.stage, action.phase, action.microbatch)
        self.finish()
        for op, slot in self.later:
            needed = self.sent[slot]
            if needed not in self.graph.preds[op]:
                self.graph.preds[op].append(needed)
        self.graph.price_keys = tuple(self.keys)
        return self.graph

    # -- pieces ------------------------------------------------------------------------------------------------------

    def arrivals(self, op: int, stage: int, phase: Phase, microbatch: int) -> None:
        """What must come from another rank first; what the own rank runs comes before on its stream anyway."""
        if phase is Phase.F:
            source, forward = self.before[stage], 1
        elif phase is Phase.W:
            return
        else:
            source, forward = self.after[stage], 0
        if source >= 0 and self.rank_of[source] != self.rank_of[stage]:
            self.later.append((op, 2 * (source * self.m + microbatch) + forward))

    def cut(self, stage: int, phase: Phase, microbatch: int) -> bool:
        """Whether gathers or gradient buckets cut this pass."""
        if not self.flow.buckets:
            return False
        if phase is Phase.F:
            return self.flow.gathers_at_start and self.first_forward[stage] == microbatch
        return self.flow.overlaps_reduction and self.last_backward[stage] == (phase, microbatch)

    def price(self, key: object) -> int:
        """Index of a price key."""
        return self.keys.setdefault(key, len(self.keys))

    def action(self, rank: int, stage: int, phase: Phase, microbatch: int) -> None:
        if self.cut(stage, phase, microbatch):
            self.pieces(rank, stage, phase, microbatch)
            return
        known = self.passes.get((stage, phase))
        if known is None:
            model = self.model[stage]
            known = self.passes[stage, phase] = self.price(Compute(_LETTER[phase], model, 0, self.flow.blocks[model]))  # type: ignore[arg-type]
        graph, last = self.graph, self.streams.get((rank, "compute"), -1)
        op = len(graph.preds)
        graph.preds.append([last] if last >= 0 else [])
        graph.price.append(known)
        graph.compute.append(rank)
        graph.beside.append(-1)
        graph.stream.append(-1)
        graph.role.append(rank)
        self.streams[rank, "compute"] = op
        self.arrivals(op, stage, phase, microbatch)
        self.done(rank, stage, phase, microbatch, op)

    def pieces(self, rank: int, stage: int, phase: Phase, microbatch: int) -> None:
        """A pass cut by gathers or gradient buckets."""
        model, letter, forward = self.model[stage], _LETTER[phase], phase is Phase.F
        pieces = sorted(self.flow.buckets[stage], reverse=not forward) if self.flow.blocks[model] else [(0, 0)]
        op = -1
        for index, (first, last) in enumerate(pieces):
            deps: list[int] = []
            if forward:
                owner = stage if self.schedule.replicas == 1 else model
                deps = [self.gathers[owner, f] for f, z in self.flow.buckets[stage] if f <= first < z]
            op = self.add(Compute(letter, model, first, last), rank, ("compute",), deps)  # type: ignore[arg-type]
            if index == 0:
                self.arrivals(op, stage, phase, microbatch)
            if not forward:
                self.reduce(stage, first, op)
        self.done(rank, stage, phase, microbatch, op)

    def done(self, rank: int, stage: int, phase: Phase, microbatch: int, op: int) -> None:
        """The end of a pass, and its boundary tensor to the neighbour."""
        slot = stage * self.m + microbatch
        self.ends[3 * slot + (0 if phase is Phase.F else 2 if phase is Phase.W else 1)] = op
        if phase is Phase.W:
            return
        forward = phase is Phase.F
        target = self.after[stage] if forward else self.before[stage]
        if target < 0 or self.rank_of[target] == rank:
            return
        known = self.boundaries.get((stage, forward))
        if known is None:
            known = self.boundaries[stage, forward] = self.price(Send(self.model[stage], self.model[target], not forward))
        kind, graph = "pp_forward" if forward else "pp_backward", self.graph
        sent = len(graph.preds)
        last = self.streams.get((rank, kind), -1)
        graph.preds.append([op, last] if last >= 0 else [op])
        graph.price.append(known)
        blocking = self.flow.blocking
        graph.compute.append(rank if blocking else -1)
        graph.beside.append(-1 if blocking else rank)
        graph.stream.append(-1 if blocking else self.number(rank, kind))
        graph.role.append(rank)
        self.streams[rank, kind] = sent
        if blocking:
            # It follows the pass on the compute stream too.
            before = self.streams[rank, "compute"]
            if before not in graph.preds[sent]:
                graph.preds[sent].append(before)
            self.streams[rank, "compute"] = sent
        self.sent[2 * slot + forward] = sent

    def pair(self, rank: int, forward: object, backward: object) -> None:
        """A forward and a backward as one op."""
        f, b = forward, backward
        deps: list[int] = []
        if self.flow.buckets and self.flow.gathers_at_start and self.first_forward[f.stage] == f.microbatch:  # type: ignore[attr-defined]
            owner = self.model[f.stage] if self.schedule.replicas > 1 else f.stage  # type: ignore[attr-defined]
            deps = [self.gathers[owner, first] for first, _ in self.flow.buckets[f.stage]]  # type: ignore[attr-defined]
        key = Overlapped(self.model[f.stage], self.model[b.stage])  # type: ignore[attr-defined]
        op = self.add(key, rank, ("compute",), deps)
        for leaf in (f, b):
            self.arrivals(op, leaf.stage, leaf.phase, leaf.microbatch)  # type: ignore[attr-defined]
        for leaf in (f, b):
            self.done(rank, leaf.stage, leaf.phase, leaf.microbatch, op)  # type: ignore[attr-defined]
        if self.cut(b.stage, b.phase, b.microbatch):  # type: ignore[attr-defined]
            for first, _ in self.flow.buckets[b.stage]:  # type: ignore[attr-defined]
                self.reduce(b.stage, first, op)  # type: ignore[attr-defined]

    def reduce(self, stage: int, first: int, after: int) -> None:
        for begin, last in self.flow.buckets[stage]:
            if begin == first:
                rank = self.rank_of[stage]
                op = self.add(Reduce(self.model[stage], begin, last), rank, ("dp",), [after])
                self.reductions.append((rank, op))

    # -- end of the step -----------------------------------------------------------------------------------------------

    def stage_end(self, stage: int) -> int:
        phase, microbatch = self.last_backward[stage]
        return self.ends[3 * (stage * self.m + microbatch) + (2 if phase is Phase.W else 1)]

    def finish(self) -> None:
        flow, schedule = self.flow, self.schedule
        if flow.buckets and not flow.overlaps_reduction:
            for stage in sorted(self.last_backward):
                for first, _ in flow.buckets[stage]:
                    self.reduce(stage, first, self.stage_end(stage))
        last = schedule.stages_per_model - 1
        last_rank = self.rank_of[last]
        sync = [op for _, op in self.reductions]
        own = {rank: [op for owner, op in self.reductions if owner == rank] for rank in range(schedule.num_ranks)}
        if flow.tied and last_rank != 0:
            deps = [self.stage_end(0), self.stage_end(last)]
            deps += [op for rank, op in self.reductions if rank in (0, last_rank)]
            op = self.add(TiedReduce(), 0, ("pp_embedding",), list(dict.fromkeys(deps)))
            self.graph.beside[op] = self.graph.stream[op] = -1
            sync.append(op)
            for rank in (0, last_rank):
                own[rank].append(op)
        if not flow.training:
            return
        for rank in range(schedule.num_ranks):
            self.add(OptimizerStep(rank), rank, ("compute",), list(sync if flow.waits else own[rank]))
        if flow.gathers_at_end:
            for stage in range(schedule.num_stages):
                rank, model = self.rank_of[stage], self.model[stage]
                key = Gather(model, 0, flow.blocks[model])
                if flow.blocks[model]:
                    self.add(key, rank, ("dp",), [self.streams[rank, "compute"]])


def build(schedule: Schedule, flow: Flow) -> Graph:
    """The ops of one step of `schedule` under `flow`."""
    return _Builder(schedule, flow).run()


__all__ = ["Flow", "Graph", "build"]
