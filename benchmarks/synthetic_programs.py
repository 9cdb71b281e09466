"""Programs of realistic shape and any size, for measuring the engines: a pipeline, or every rank of a training job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.program.builder import ProgramBuilder
from simpar.program.program import OpKind, PriceTable, Program, Stream, Transfer
from simpar.schedules import Phase, build_schedule

FORWARD_S, BACKWARD_S = 0.030, 0.060
"""One microbatch through one stage of Llama 3.1 405B at tensor parallel 8, pipeline 16, to one digit."""
ACTIVATION_BYTES = 8192 * 16384 * 2 / 8
GRADIENT_BYTES = 2 * 405e9 / 16 / 8
NIC_BYTES_PER_S = 46e9


def pipeline(ranks: int, microbatches: int, virtual_stages: int = 1) -> tuple[Program, PriceTable]:
    """One role per pipeline rank: forward, backward and a send for each hop."""
    name = "1f1b" if virtual_stages == 1 else "interleaved"
    schedule = build_schedule(name, ranks, microbatches, None if virtual_stages == 1 else virtual_stages)
    builder = ProgramBuilder(f"{name} p{ranks} m{microbatches} v{virtual_stages}")
    for rank, row in enumerate(schedule.rows):
        for action in row:
            deps = []
            for before in schedule.prerequisites(action):
                sent = schedule.stage_to_rank[before.stage] != rank
                deps.append(("send" if sent else "do", before.stage, before.phase, before.microbatch))
            key = (action.stage, action.phase, action.microbatch)
            forward = action.phase is Phase.F
            builder.add(
                ("do", *key),
                kind=OpKind.FORWARD if forward else OpKind.BACKWARD,
                role=rank,
                streams=(Stream(rank, "compute"),),
                price=(action.phase, action.stage),
                deps=deps,
            )
            target = action.stage + (1 if forward else -1)
            if 0 <= target < schedule.num_stages and schedule.stage_to_rank[target] != rank:
                builder.add(
                    ("send", *key),
                    kind=OpKind.SEND_FORWARD if forward else OpKind.SEND_BACKWARD,
                    role=rank,
                    streams=(Stream(rank, "pp_forward" if forward else "pp_backward"),),
                    price=("send", action.stage),
                    deps=(("do", *key),),
                )
    program = builder.build()
    seconds = {Phase.F: FORWARD_S, Phase.B: BACKWARD_S, "send": ACTIVATION_BYTES / NIC_BYTES_PER_S}
    stages = np.array([1.0 + 0.01 * (k[1] % 7) for k in program.price_keys])
    base = np.array([seconds[k[0]] for k in program.price_keys]) / virtual_stages
    return program, PriceTable(base * stages, np.zeros(len(base)))


@dataclass(frozen=True)
class Job:
    """A training job with one role per rank; rank = tp + 8 * (dp + dp_degree * pp), as in Megatron's default order.

    Attributes:
        tp, dp, pp: degrees.
        microbatches: per step.
        segments: compute ops of one microbatch on one rank, each followed by a tensor-parallel collective that all
            ranks of the group enter together; 1 with `rendezvous` off: none of these collectives.
        buckets: gradient buckets, reduced under the last backward; as many parameter gathers under the first forward.
        rendezvous: tensor-parallel ranks wait for each other.
    """

    tp: int
    dp: int
    pp: int
    microbatches: int
    segments: int = 1
    buckets: int = 1
    rendezvous: bool = True

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def rank(self, tp: int, dp: int, pp: int) -> int:
        return tp + self.tp * (dp + self.dp * pp)

    def program(self) -> tuple[Program, PriceTable]:
        """The program and its prices; transfers carry their groups."""
        return _JobBuilder(self).build()


class _JobBuilder:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.builder = ProgramBuilder(f"{job.ranks} ranks, tp {job.tp} dp {job.dp} pp {job.pp}")
        self.streams = {
            kind: [Stream(rank, kind) for rank in range(job.ranks)] for kind in ("compute", "tp", "dp", "pp_forward", "pp_backward")
        }
        self.schedule = build_schedule("1f1b", job.pp, job.microbatches)

    def build(self) -> tuple[Program, PriceTable]:
        job = self.job
        for pp in range(job.pp):
            for dp_tp in range(job.tp):
                self.gradients("gather", pp, dp_tp)
        for pp, row in enumerate(self.schedule.rows):
            for action in row:
                for dp in range(job.dp):
                    self.action(action.phase, action.microbatch, dp, pp)
        for pp in range(job.pp):
            for dp_tp in range(job.tp):
                self.gradients("reduce", pp, dp_tp)
        program = self.builder.build()
        return program, self.prices(program)

    def action(self, phase: Phase, microbatch: int, dp: int, pp: int) -> None:
        """One microbatch through one stage on the `tp` ranks of one replica."""
        job, add = self.job, self.builder.add
        ranks = [job.rank(tp, dp, pp) for tp in range(job.tp)]
        forward = phase is Phase.F
        previous = pp + (-1 if forward else 1)
        for segment in range(job.segments):
            for rank in ranks:
                deps: list[object] = []
                if segment == 0 and 0 <= previous < job.pp:
                    deps.append(("send", phase, microbatch, self.twin(rank, pp, previous)))
                if segment and job.rendezvous:
                    deps.append(("tp", phase, microbatch, ranks[0], segment - 1))
                if forward and microbatch == 0 and segment < job.buckets:
                    deps.append(("gather", segment, self.dp_group(rank, pp)[0]))
                add(
                    ("do", phase, microbatch, rank, segment),
                    kind=OpKind.FORWARD if forward else OpKind.BACKWARD,
                    role=rank,
                    streams=(self.streams["compute"][rank],),
                    price=(phase, segment),
                    deps=deps,
                )
            if job.rendezvous:
                add(
                    ("tp", phase, microbatch, ranks[0], segment),
                    kind=OpKind.COLLECTIVE,
                    role=ranks[0],
                    streams=[self.streams["tp"][rank] for rank in ranks],
                    price="tp",
                    deps=[("do", phase, microbatch, rank, segment) for rank in ranks],
                )
        self.sends(phase, microbatch, ranks, pp)

    def sends(self, phase: Phase, microbatch: int, ranks: list[int], pp: int) -> None:
        job, last = self.job, self.job.segments - 1
        target = pp + (1 if phase is Phase.F else -1)
        if not 0 <= target < job.pp:
            return
        for rank in ranks:
            done = ("tp", phase, microbatch, ranks[0], last) if job.rendezvous else ("do", phase, microbatch, rank, last)
            index = self.builder.add(
                ("send", phase, microbatch, rank),
                kind=OpKind.SEND_FORWARD if phase is Phase.F else OpKind.SEND_BACKWARD,
                role=rank,
                streams=(self.streams["pp_forward" if phase is Phase.F else "pp_backward"][rank],),
                price="send",
                deps=(done,),
            )
            pair = (rank, self.twin(rank, pp, target))
            self.builder.transfers[index] = Transfer("send_recv", ACTIVATION_BYTES, (pair,))

    def gradients(self, what: str, pp: int, tp: int) -> None:
        """Buckets of one data-parallel group: gathers at the start, reductions behind the last backward."""
        job = self.job
        group = tuple(job.rank(tp, dp, pp) for dp in range(job.dp))
        groups = (group,)
        for bucket in range(job.buckets):
            deps: list[object] = []
            if what == "reduce":
                segment = min(bucket, job.segments - 1)
                deps = [("do", Phase.B, job.microbatches - 1, rank, segment) for rank in group]
            index = self.builder.add(
                (what, bucket, group[0]),
                kind=OpKind.GATHER_PARAMETERS if what == "gather" else OpKind.REDUCE_GRADIENTS,
                role=group[0],
                streams=[self.streams["dp"][rank] for rank in group],
                price="dp",
                deps=deps,
            )
            size = GRADIENT_BYTES / job.buckets
            collective = "all_gather" if what == "gather" else "reduce_scatter"
            self.builder.transfers[index] = Transfer(collective, size, groups)

    def dp_group(self, rank: int, pp: int) -> tuple[int, ...]:
        return (self.job.rank(rank % self.job.tp, 0, pp),)

    def twin(self, rank: int, pp: int, other: int) -> int:
        return rank + self.job.tp * self.job.dp * (other - pp)

    def prices(self, program: Program) -> PriceTable:
        job = self.job
        seconds = {
            Phase.F: FORWARD_S / job.segments,
            Phase.B: BACKWARD_S / job.segments,
            "tp": 0.0005,
            "send": ACTIVATION_BYTES / NIC_BYTES_PER_S,
            "dp": GRADIENT_BYTES / job.buckets * (job.dp - 1) / job.dp / NIC_BYTES_PER_S,
        }
        values = [seconds[key[0] if isinstance(key, tuple) else key] for key in program.price_keys]
        loud = [0.05 if key in ("dp", "send") else 0.0 for key in program.price_keys]
        return PriceTable(np.array(values), np.array(loud))
