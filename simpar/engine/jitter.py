"""Random durations: how much ops and ranks vary from their price, with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp
from statistics import NormalDist

import numpy as np

from simpar.program.program import FloatArray, Program


@dataclass(frozen=True, slots=True)
class Noise:
    """Lognormal factors with mean 1 on the seconds of ops.

    Two parts multiply: one drawn afresh for every op (clocks, caches, network), one drawn once per rank and run (the
    chip's own speed at its power cap and temperature). A role that stands for n ranks takes the slowest of n draws,
    because the collectives that join the ranks wait for it; its collectives keep their price.

    Attributes:
        compute_sigma: standard deviation of the logarithm, per op on a compute stream.
        communication_sigma: the same for ops on communication streams only.
        rank_sigma: the same per rank, on its compute ops.
    """

    compute_sigma: float = 0.0
    communication_sigma: float = 0.0
    rank_sigma: float = 0.0

    def op_factors(self, program: Program, seed: int, repetition: int = 0) -> FloatArray:
        """Factor of each op in repetition `repetition` of seed `seed`: float array [ops]."""
        generator = np.random.default_rng((seed, repetition))
        on_compute = compute_ops(program)
        sigma = np.where(on_compute, self.compute_sigma, self.communication_sigma)
        factors = np.exp(sigma * generator.standard_normal(program.num_ops) - 0.5 * sigma * sigma)
        if self.rank_sigma > 0.0:
            per_role = self._role_factors(program, generator)
            factors[on_compute] *= per_role[program.role[on_compute]]
        return factors

    def _role_factors(self, program: Program, generator: np.random.Generator) -> FloatArray:
        """Slowest rank of each role: float array [roles]. The maximum of n normal draws has the quantile u^(1/n)."""
        count = 1 + int(max(program.role.max(initial=-1), len(program.rank_count) - 1))
        ranks = np.ones(count)
        ranks[: len(program.rank_count)] = np.maximum(program.rank_count, 1)
        quantiles = np.exp(np.log1p(-generator.random(count)) / ranks)
        normal = NormalDist()
        # 1 - 2^-53 keeps the quantile finite for a role of very many ranks.
        draws = np.array([normal.inv_cdf(min(float(q), 1.0 - 2.0**-53)) for q in np.maximum(quantiles, 2.0**-1022)])
        return np.exp(self.rank_sigma * draws - 0.5 * self.rank_sigma**2)


@lru_cache(maxsize=4096)
def expected_slowest(sigma: float, ranks: int) -> float:
    """Mean factor of the slowest of so many ranks, each drawn with mean 1 and `rank_sigma` = `sigma`: a lower bound of it."""
    normal, steps = NormalDist(), 1000
    # The left end of every step of the quantile: no more than the mean.
    draws = [normal.inv_cdf((step / steps) ** (1.0 / ranks)) for step in range(1, steps)]
    return max(1.0, sum(exp(sigma * draw - 0.5 * sigma**2) for draw in draws) / steps)


def compute_ops(program: Program) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which ops occupy a compute stream: bool array [ops]."""
    on_compute = np.zeros(program.num_ops, dtype=bool)
    is_compute = np.array([stream.kind == "compute" for stream in program.streams], dtype=bool)
    owner = np.repeat(np.arange(len(program.streams)), np.diff(program.stream_ptr))
    on_compute[program.stream_ops[is_compute[owner]]] = True
    return on_compute
