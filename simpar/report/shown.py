"""Which roles of a program a report shows: every pipeline rank once, from the pipelines worth seeing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simpar.program.program import Program
from simpar.result.result import Result
from simpar.units import format_seconds

MAX_ROLES = 256
"""More pipeline ranks than this in one report help nobody."""


@dataclass(frozen=True, slots=True)
class ShownRole:
    """One role of the program as a report shows it.

    Attributes:
        role: of the program's streams.
        pipeline_rank: position in its pipeline.
        pipeline: 0, or 1 for the slowest pipeline of an expanded program.
        title: for people.
    """

    role: int
    pipeline_rank: int
    pipeline: int
    title: str


def is_expanded(result: Result) -> bool:
    """Whether the program has one role per global rank, rather than one per pipeline rank."""
    counts = result.program.rank_count
    return len(counts) == result.world_size and result.world_size > result.layout.mesh.pp


def compute_stream(program: Program, role: int) -> int | None:
    """Index of the compute stream of a role."""
    return next((i for i in program.role_streams.get(role, ()) if program.streams[i].kind == "compute"), None)


def shown_roles(result: Result) -> tuple[ShownRole, ...]:
    """Roles in pipeline order: all of a folded program; of an expanded one the first pipeline and the slowest."""
    mesh, program = result.layout.mesh, result.program
    if not is_expanded(result):
        counts = program.rank_count or (1,) * mesh.pp
        found = [
            ShownRole(r, r, 0, f"pipeline rank {r} ({counts[r]:,} GPU{'s' if counts[r] > 1 else ''})")
            for r in range(mesh.pp)
            if r in program.role_streams
        ]
        return tuple(found[:MAX_ROLES])
    pipelines = [(0, 0, 0)]
    slowest = _slowest(result)
    if slowest not in pipelines:
        pipelines.append(slowest)
    found = []
    for index, (tp, cp, dp) in enumerate(pipelines):
        for p in range(mesh.pp):
            rank = mesh.rank(tp=tp, cp=cp, dp=dp, pp=p)
            found.append(ShownRole(rank, p, index, f"pipeline rank {p}, GPU {rank} (dp {dp}, cp {cp}, tp {tp})"))
    return tuple(found[:MAX_ROLES])


def _slowest(result: Result) -> tuple[int, int, int]:
    """(tp, cp, dp) of the rank that computes longest; the first pipeline's where it is not slower than that by a ns."""
    program, mesh = result.program, result.layout.mesh
    busy = result.timeline.busy_s()
    compute = [i for i, s in enumerate(program.streams) if s.kind == "compute"]
    longest = max(compute, key=lambda i: busy[i])
    at = mesh.coordinates(program.streams[longest].role)
    first = compute_stream(program, mesh.rank(pp=at["pp"]))
    if first is None or busy[longest] - busy[first] < 1e-9 + 1e-6 * float(np.abs(busy[longest])):
        return (0, 0, 0)
    return at["tp"], at["cp"], at["dp"]


def subset_note(result: Result, roles: tuple[ShownRole, ...]) -> str:
    """What of the program is shown, where it is not all of it; else empty."""
    total = len(result.program.role_streams)
    if len(roles) == total:
        return ""
    if not is_expanded(result):
        return f"The first {len(roles)} of {total} pipeline ranks are shown."
    slow = ", and the pipeline of the slowest rank" if any(r.pipeline for r in roles) else "; no other rank is slower"
    return f"Of {total:,} simulated ranks the first pipeline is shown (dp 0, cp 0, tp 0){slow}."


def drawn_s(result: Result) -> float:
    """Seconds of the timeline: less than the step where only some of many alike micro-batches were simulated."""
    return result.timeline.makespan if _is_short(result) else result.step_time_s


def drawn_note(result: Result) -> str:
    """What a timeline that is shorter than the step shows; "" for a whole one."""
    if not _is_short(result):
        return ""
    every, shown = result.layout.num_microbatches, int(result.program.microbatch.max(initial=-1)) + 1
    more = (result.step_time_s - result.timeline.makespan) / max(every - shown, 1)
    return (
        f"The timeline shows {shown} of {every:,} micro-batches, {format_seconds(result.timeline.makespan)} of the step; "
        f"each of the others adds {format_seconds(more)} of the same steady pattern in its middle."
    )


def _is_short(result: Result) -> bool:
    return int(result.program.microbatch.max(initial=-1)) + 1 < result.layout.num_microbatches
