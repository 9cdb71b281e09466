"""What each price of a simulated program is made of, term by term; priced again from the layout, as simulated."""

from __future__ import annotations

from simpar.parallel.keys import BlockOp, Compute, Key, LaunchGap, OptimizerStep, Overlapped
from simpar.program.program import Program
from simpar.report.shown import is_expanded
from simpar.result.result import Result
from simpar.step import pricer_of

Terms = tuple[tuple[str, float], ...]


def price_terms(result: Result) -> tuple[Terms, ...]:
    """Per price of the program: (category, seconds), which sum to the price: an op's length where nothing slows it.

    Programs whose prices have no symbolic key (not lowered from a layout) have no terms.
    """
    layout, program = result.layout, result.program
    if not all(isinstance(key, Key) for key in program.price_keys):
        return ((),) * len(program.price_keys)
    pricer = pricer_of(layout)
    if any(isinstance(key, OptimizerStep) for key in program.price_keys):
        pricer.bind(*_stages(result))
    return tuple(pricer.price(key).terms for key in program.price_keys)  # type: ignore[arg-type]


def _stages(result: Result) -> tuple[list[int], list[int]]:
    """(pipeline rank, model stage) of every virtual stage, read from the ops that run it."""
    program, mesh = result.program, result.layout.mesh
    expanded = is_expanded(result)
    found: dict[int, tuple[int, int]] = {}
    first_of_stage = _first_compute_ops(program)
    for stage, op in first_of_stage.items():
        key = program.price_keys[program.price[op]]
        role = int(program.role[op])
        rank = mesh.coordinates(role)["pp"] if expanded else role
        found[stage] = (rank, key.forward_stage if isinstance(key, Overlapped) else key.stage)
    stages = sorted(found)
    return [found[s][0] for s in stages], [found[s][1] for s in stages]


def _first_compute_ops(program: Program) -> dict[int, int]:
    """Virtual stage -> an op that computes on it."""
    found: dict[int, int] = {}
    compute = {i for i, k in enumerate(program.price_keys) if isinstance(k, Compute | BlockOp | LaunchGap | Overlapped)}
    for op, (stage, price) in enumerate(zip(program.stage.tolist(), program.price.tolist(), strict=True)):
        if stage >= 0 and stage not in found and price in compute:
            found[stage] = op
    return found
