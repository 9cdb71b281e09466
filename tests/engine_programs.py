"""Random and hand-made programs for the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from simpar.program.builder import ProgramBuilder
from simpar.program.program import OpKind, PriceTable, Program, Stream, Transfer

COMPUTE = "compute"


def table(seconds: Sequence[float], interference: Sequence[float] | None = None) -> PriceTable:
    return PriceTable(np.array(seconds, float), np.array(interference or [0.0] * len(seconds), float))


def chain(name: str, ops: Sequence[tuple[object, Sequence[tuple[int, str]], Sequence[object]]]) -> ProgramBuilder:
    """Ops given as (key, streams, dependencies); every op has its own price."""
    builder = ProgramBuilder(name)
    for key, streams, deps in ops:
        builder.add(
            key,
            kind=OpKind.FORWARD,
            role=streams[0][0],
            streams=[Stream(*s) for s in streams],
            price=("price", key),
            deps=deps,
        )
    return builder


def transfer_program(transfers: Sequence[tuple[object, Transfer, Sequence[object]]], name: str = "transfers") -> Program:
    """Ops (key, transfer, dependencies), each on a stream of its own."""
    builder = chain(name, [(key, [(i, "net")], deps) for i, (key, _, deps) in enumerate(transfers)])
    for key, transfer, _ in transfers:
        builder.transfers[builder[key]] = transfer
    return builder.build()


def send(*ranks: int, size: float = 1.0) -> Transfer:
    return Transfer("send_recv", size, (ranks,))


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 40, acyclic: bool | None = None) -> Program:
    """Programs with multi-stream ops and arbitrary dependencies; cyclic ones too unless `acyclic`."""
    num_ops = draw(st.integers(0, max_ops))
    roles = draw(st.integers(1, 4))
    pool = [Stream(role, kind) for role in range(roles) for kind in (COMPUTE, "tp", "dp")]
    forward_only = acyclic if acyclic is not None else draw(st.booleans())
    builder = ProgramBuilder("random")
    for op in range(num_ops):
        chosen = draw(st.lists(st.sampled_from(pool), min_size=0, max_size=3, unique=True))
        last = op - 1 if forward_only else num_ops - 1
        deps = draw(st.lists(st.integers(0, last), max_size=3)) if last >= 0 else []
        builder.add(
            op,
            kind=OpKind.FORWARD,
            role=chosen[0].role if chosen else 0,
            streams=chosen,
            price=draw(st.integers(0, 7)),
            deps=[d for d in deps if d != op],
        )
    return builder.build()


@st.composite
def prices(draw: st.DrawFn, program: Program, zero: bool = True) -> PriceTable:
    low = 0.0 if zero else 1e-6
    values = st.one_of(st.floats(low, 10.0), st.sampled_from([low, 0.1, 0.2, 0.3, 1.0]))
    count = len(program.price_keys)
    return table(
        draw(st.lists(values, min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0]), min_size=count, max_size=count)),
    )
