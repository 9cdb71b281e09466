"""How long each op takes in one run: its price under the drawn expert load, times slow factor, times noise.

Both engines take their durations from here, so that they agree to the last bit with stragglers and jitter too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpar.engine.imbalance import Imbalance
from simpar.engine.jitter import Noise
from simpar.errors import InputError, InternalError, Violation
from simpar.program.program import FloatArray, PriceTable, Program

SlowFactors = Mapping[int, float]
"""Role -> factor on the seconds of its compute ops; 1.05 is 5 % slower. Roles left out run at their price."""


def op_seconds(
    program: Program,
    prices: PriceTable,
    slow_factors: SlowFactors | None = None,
    noise: Noise | None = None,
    imbalance: Imbalance | None = None,
    seed: int = 0,
    repetition: int = 0,
) -> FloatArray:
    """Seconds of each op without contention or interference: float array [ops].

    Raises:
        InputError: a slow factor names a role that the program does not have.
        InternalError: a price is missing, negative or not finite.
    """
    by_price = check_prices(program, prices)
    if imbalance is None:
        seconds = by_price[program.price]
    else:
        check_prices(program, imbalance.loaded)
        seconds = imbalance.op_seconds(program, by_price, seed, repetition)
    if slow_factors:
        seconds = seconds * _slow_by_op(program, slow_factors)
    if noise is not None:
        seconds = seconds * noise.op_factors(program, seed, repetition)
    return seconds


def check_prices(program: Program, prices: PriceTable) -> FloatArray:
    """The seconds of the table, after a check that they fit the program."""
    seconds = np.asarray(prices.seconds, dtype=np.float64)
    if seconds.shape != (len(program.price_keys),):
        raise InternalError(f"{program.name} has {len(program.price_keys)} prices, the table {seconds.shape}")
    wrong = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0.0)))
    if len(wrong):
        key = program.price_keys[int(wrong[0])]
        raise InternalError(f"{program.name}: the price of {key!r} is {seconds[wrong[0]]} s")
    return seconds


def _slow_by_op(program: Program, slow_factors: SlowFactors) -> FloatArray:
    """Factor of each op: the worst among the roles whose compute stream it occupies; 1 off the compute streams."""
    found = [
        Violation(f"slow_factors[{role}]", factor, "the program has no such role", f"roles are {_roles(program)}")
        for role, factor in slow_factors.items()
        if role not in program.role_streams
    ]
    if found:
        raise InputError(found)
    factors = np.full(program.num_ops, -np.inf)
    for index, stream in enumerate(program.streams):
        if stream.kind == "compute":
            ops = program.ops_at(index)
            factors[ops] = np.maximum(factors[ops], slow_factors.get(stream.role, 1.0))
    return np.where(np.isfinite(factors), factors, 1.0)


def _roles(program: Program) -> str:
    roles = sorted(program.role_streams)
    return f"{roles[0]}..{roles[-1]}" if roles else "none"
