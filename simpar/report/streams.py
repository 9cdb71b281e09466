"""The order in which reports show the streams of a rank: compute, block collectives, pipeline, data parallel."""

from __future__ import annotations

from simpar.program.program import Program

_ORDER = ("compute", "block_tp", "block_cp", "block_ep", "block_ep_beside", "pp_forward", "pp_backward", "pp_embedding", "dp")


def stream_position(kind: str) -> tuple[int, str]:
    """Sort key of a stream kind; unknown ones come last, by name."""
    return (_ORDER.index(kind), kind) if kind in _ORDER else (len(_ORDER), kind)


def ordered_streams(program: Program, role: int) -> list[int]:
    """Stream indices of a role, in the order shown."""
    return sorted(program.role_streams.get(role, ()), key=lambda i: stream_position(program.streams[i].kind))
