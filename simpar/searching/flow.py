"""A step's graph at the search's own detail: the ops of `program.lower`, built without naming each of them.

`lower` writes programs for every detail and purpose and takes 30 us an op; a search needs thousands of programs of thousands of
ops. This builder takes about 3 us an op; the tests hold it against `lower` through the engine, bit by bit. Passes are one op each,
but for those that gathers, gradient buckets or copies to the host cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simpar.parallel.keys import Compute, Gather, Offload, OptimizerStep, Overlapped, PhaseLetter, Reduce, Send, TiedReduce, pair_of
from simpar.schedules import Action, Phase, Schedule
from simpar.searching.graph import Graph

Segment = tuple[int, int]
_LETTER: dict[Phase, PhaseLetter] = {Phase.F: "F", Phase.B: "B", Phase.I: "I", Phase.W: "W"}


@dataclass(frozen=True)
class Flow:
    """What the lowering asks of a layout.

    Attributes:
        blocks: of each model stage.
        buckets: gradient buckets of each stage of the schedule, in the order of the backward; empty without data parallelism.
        gathers_at_start, gathers_at_end: parameters are gathered under the first forward, or after the update.
        overlaps_reduction: buckets are reduced as the last backward goes through them.
        blocking: sends hold the compute stream.
        tied, training: an embedding is tied across stages; there is an optimizer.
        waits: the update waits for the gradients of all ranks.
        gathers_always, reduces_always: block by block in every pass and in every backward.
        keeps: gathered blocks stay from the forward to the backward.
        ahead: blocks that are gathered ahead of the one that runs.
        offloads: activations go to the host, block by block, and come back one block ahead of the backward.
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
    gathers_always: bool = False
    reduces_always: bool = False
    keeps: bool = False
    ahead: int = 0
    offloads: bool = False


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
        self.copies: dict[tuple[int, int, int], int] = {}
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

    def first(self, stage: int, phase: Phase, microbatch: int) -> bool:
        """Whether this is the forward under which the stage's parameters are gathered."""
        return self.flow.gathers_at_start and phase is Phase.F and self.first_forward[stage] == microbatch

    def reduces(self, stage: int, phase: Phase, microbatch: int) -> bool:
        """Whether gradient buckets are reduced as this pass goes through them."""
        if not self.flow.buckets or phase is Phase.F or phase is Phase.I:
            return False
        final = self.flow.overlaps_reduction and self.last_backward[stage] == (phase, microbatch)
        return final or self.flow.reduces_always

    def segments(self, stage: int, phase: Phase, microbatch: int) -> list[Segment]:
        """How gathers, gradient buckets or copies to the host cut this pass; nothing where they do not."""
        flow, count = self.flow, self.flow.blocks[self.model[stage]]
        cut = self.first(stage, phase, microbatch) or self.reduces(stage, phase, microbatch)
        if not (flow.offloads or flow.gathers_always or cut):
            return []
        if not count:
            return [(0, 0)]
        each = flow.offloads or flow.gathers_always
        found = [(i, i + 1) for i in range(count)] if each else sorted(flow.buckets[stage])
        return found if phase is Phase.F else found[::-1]

    def price(self, key: object) -> int:
        """Index of a price key."""
        return self.keys.setdefault(key, len(self.keys))

    def action(self, rank: int, stage: int, phase: Phase, microbatch: int) -> None:
        pieces = self.segments(stage, phase, microbatch)
        if pieces:
            self.pieces(rank, stage, phase, microbatch, pieces)
            return
        known = self.passes.get((stage, phase))
        if known is None:
            model = self.model[stage]
            known = self.passes[stage, phase] = self.price(Compute(_LETTER[phase], model, 0, self.flow.blocks[model]))
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

    def pieces(self, rank: int, stage: int, phase: Phase, microbatch: int, pieces: list[Segment]) -> None:
        """A pass in pieces."""
        flow, model, letter, forward = self.flow, self.model[stage], _LETTER[phase], phase is Phase.F
        starts, reduces = self.first(stage, phase, microbatch), self.reduces(stage, phase, microbatch)
        owner = stage if self.schedule.replicas == 1 else model
        always = flow.gathers_always and phase is not Phase.W
        loads = flow.offloads and phase in (Phase.B, Phase.I)
        ops: list[int] = []
        gathered: dict[int, int] = {}
        loaded: list[int] = []
        for index, (first, last) in enumerate(pieces):
            deps: list[int] = []
            if starts:
                deps += [self.gathers[owner, f] for f, z in flow.buckets[stage] if f <= first < z]
            if always:
                self.gather_ahead(rank, stage, pieces, ops, gathered, forward=forward)
                deps += [gathered[index]] if index in gathered else []
            if loads:
                self.load_ahead(rank, stage, microbatch, pieces, ops, loaded)
                deps.append(loaded[index])
            op = self.add(Compute(letter, model, first, last), rank, ("compute",), deps)
            ops.append(op)
            if index == 0:
                self.arrivals(op, stage, phase, microbatch)
            if reduces:
                self.reduce(stage, first, op)
            if flow.offloads and forward:
                key = Offload(model, first, last, to_host=True)
                self.copies[stage, microbatch, first] = self.add(key, rank, ("host_down",), [op])
        self.done(rank, stage, phase, microbatch, ops[-1])

    def gather_ahead(
        self, rank: int, stage: int, pieces: list[Segment], ops: list[int], gathered: dict[int, int], *, forward: bool
    ) -> None:
        """Gathers for the piece that comes after `ops` and for those that may be gathered ahead of it."""
        flow, model, index = self.flow, self.model[stage], len(ops)
        for position in range(index if index == 0 else index + flow.ahead, min(index + flow.ahead + 1, len(pieces))):
            first, last = pieces[position]
            # Of what is freed after the forward the last block stays: its backward is next.
            if not forward and (flow.keeps or last == flow.blocks[model]):
                continue
            before = position - flow.ahead - 1
            gathered[position] = self.add(Gather(model, first, last), rank, ("dp",), [ops[before]] if before >= 0 else [])

    def load_ahead(self, rank: int, stage: int, microbatch: int, pieces: list[Segment], ops: list[int], loaded: list[int]) -> None:
        """Copies from the host for the piece that comes after `ops` and for the next."""
        for position in range(len(loaded), min(len(ops) + 2, len(pieces))):
            first, last = pieces[position]
            copy = self.copies.get((stage, microbatch, first))
            deps = [] if copy is None else [copy]
            if position > 1:
                deps.append(ops[position - 2])
            loaded.append(self.add(Offload(self.model[stage], first, last, to_host=False), rank, ("host_up",), deps))

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
            pair = pair_of(rank, self.rank_of[target], self.schedule.num_ranks)
            known = self.boundaries[stage, forward] = self.price(Send(self.model[stage], self.model[target], not forward, pair))
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

    def pair(self, rank: int, forward: Action, backward: Action) -> None:
        """A forward and a backward as one op."""
        f, b = forward, backward
        deps: list[int] = []
        if self.flow.buckets and self.first(f.stage, f.phase, f.microbatch):
            owner = self.model[f.stage] if self.schedule.replicas > 1 else f.stage
            deps = [self.gathers[owner, first] for first, _ in self.flow.buckets[f.stage]]
        op = self.add(Overlapped(self.model[f.stage], self.model[b.stage]), rank, ("compute",), deps)
        for leaf in (f, b):
            self.arrivals(op, leaf.stage, leaf.phase, leaf.microbatch)
        for leaf in (f, b):
            self.done(rank, leaf.stage, leaf.phase, leaf.microbatch, op)
        if self.last_backward[b.stage] == (b.phase, b.microbatch) and self.reduces(b.stage, b.phase, b.microbatch):
            for first, _ in self.flow.buckets[b.stage]:
                self.reduce(b.stage, first, op)

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
        if flow.buckets and not (flow.overlaps_reduction or flow.reduces_always):
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


__all__ = ["Flow", "build"]
