"""Uneven expert load: tokens per expert drawn from a distribution, per layer and microbatch.

A step waits for the fullest expert-parallel rank of each layer, so what counts is the load factor: tokens of the
fullest rank over the mean. Without drops it multiplies that rank's expert time, dispatch and combine, and activation
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from simpar.program.program import FloatArray, IntArray, PriceTable, Program

Distribution = Literal["uniform", "lognormal", "zipf", "counts"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts.

    Attributes:
        num_experts: routed experts of a layer.
        top_k: experts per token.
        distribution: "uniform": every expert is as likely (a router balanced by its loss; what is left is chance).
            "zipf": the r-th most popular expert is chosen in proportion to r^-exponent; which one that is differs from
            layer to layer. "lognormal": popularities are the quantiles of a lognormal law, placed alike. "counts": in proportion to
            measured token counts.
        exponent: of the Zipf law.
        spread: standard deviation of the lognormal popularities over their mean.
        counts: measured tokens per expert, one per expert.
        capacity_factor: an expert takes at most ceil(capacity_factor x mean) tokens and drops the rest; None: dropless.
    """

    num_experts: int
    top_k: int
    distribution: Distribution = "uniform"
    exponent: float = 0.0
    counts: tuple[float, ...] = ()
    capacity_factor: float | None = None
    spread: float = 0.0

    def inclusion(self) -> FloatArray:
        """Probability that a token has each expert among its top k: float array [experts], sums to top_k.

        A token takes an expert at most once, so no probability exceeds 1; the excess goes to the others in proportion.
        """
        weights = {
            "uniform": np.ones(self.num_experts),
            "lognormal": self._lognormal(),
            "zipf": np.arange(1, self.num_experts + 1, dtype=np.float64) ** -self.exponent,
            "counts": np.asarray(self.counts, dtype=np.float64),
        }[self.distribution]
        sure = np.zeros(self.num_experts, dtype=bool)
        while True:
            open_weight = weights[~sure].sum()
            left = self.top_k - int(sure.sum())
            chances = np.where(sure, 1.0, weights * (left / open_weight if open_weight > 0.0 else 0.0))
            over = (chances >= 1.0) & ~sure
            if not over.any():
                return chances
            sure |= over

    def _lognormal(self) -> FloatArray:
        """Popularities at the quantiles of a lognormal law whose standard deviation is `spread` times its mean."""
        normal, sigma = NormalDist(), float(np.sqrt(np.log1p(self.spread**2)))
        at = [normal.inv_cdf((i + 0.5) / self.num_experts) for i in range(self.num_experts)]
        weights: FloatArray = np.exp(sigma * np.array(at))
        return weights

    def rank_tokens(self, tokens: int, ep: int, layers: int, draws: int, seed: tuple[int, ...]) -> FloatArray:
        """Tokens that reach each expert-parallel rank: float array [layers, draws, ep].

        The popular experts keep their places within a layer from draw to draw (the router's habits change slowly); the
        counts around their means are multinomial.

        Args:
            tokens: that the ranks of the group route together in one microbatch.
            ep: expert-parallel ranks; rank r holds the r-th block of num_experts / ep experts.
            layers: MoE layers.
            draws: microbatches.
            seed: of the generator.
        """
        generator = np.random.default_rng(seed)
        chances = self.inclusion()
        per_rank = np.empty((layers, draws, ep))
        limit = np.inf
        if self.capacity_factor is not None:
            limit = np.ceil(self.capacity_factor * tokens * self.top_k / self.num_experts)
        for layer in range(layers):
            placed = chances if self.distribution == "counts" else generator.permutation(chances)
            taken = np.minimum(_draw_counts(generator, placed, tokens, draws), limit)
            per_rank[layer] = taken.reshape(draws, ep, -1).sum(axis=2)
        return per_rank

    def load_factors(self, tokens: int, ep: int, layers: int, draws: int, seed: tuple[int, ...]) -> FloatArray:
        """Fullest rank over the mean of what was routed, drops included: float array [layers, draws].

        With a capacity factor it is at most about that factor; without drops at least 1.
        """
        mean = tokens * self.top_k / ep
        return self.rank_tokens(tokens, ep, layers, draws, seed).max(axis=2) / mean


def _draw_counts(generator: np.random.Generator, chances: FloatArray, tokens: int, draws: int) -> IntArray:
    """Tokens per expert: int array [draws, experts], each row tokens x top_k in all and no entry above `tokens`.

    Multinomial over the experts that are not certain; where an expert is drawn more often than there are tokens, the
    surplus is drawn again among the others.
    """
    sure = chances >= 1.0
    counts = np.zeros((draws, len(chances)), dtype=np.int64)
    counts[:, sure] = tokens
    left = round(tokens * float(chances[~sure].sum()))
    if left:
        weights = chances[~sure] / chances[~sure].sum()
        drawn = generator.multinomial(left, weights, size=draws)
        for row in np.flatnonzero((drawn > tokens).any(axis=1)):
            while (surplus := int(np.maximum(drawn[row] - tokens, 0).sum())) > 0:
                drawn[row] = np.minimum(drawn[row], tokens)
                room = np.where(drawn[row] < tokens, np.maximum(weights, 1e-300), 0.0)
                drawn[row] += generator.multinomial(surplus, room / room.sum())
        counts[:, ~sure] = drawn
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class Imbalance:
    """Uneven expert load in the runs of one program.

    Attributes:
        routing: how tokens choose experts.
        tokens: that one expert-parallel group routes together in a microbatch.
        ep: its ranks.
        loaded: the program's prices at load factor 2; between 1 and it, and beyond, prices are linear.
        layers_per_op: MoE layers in an op that stands for several (stage detail): its load is their mean.
    """

    routing: Routing
    tokens: int
    ep: int
    loaded: PriceTable
    layers_per_op: int = 1

    def op_loads(self, program: Program, seed: int, repetition: int = 0) -> FloatArray:
        """Load factor of each op: float array [ops]; 1 for ops of no microbatch.

        Forward and backward of a microbatch through the same layer saw the same tokens, so they share a draw.
        """
        loads = np.ones(program.num_ops)
        moe = np.flatnonzero((program.microbatch >= 0) & (program.stage >= 0))
        if not len(moe):
            return loads
        place = np.stack([program.stage[moe], program.layer[moe]], axis=1)
        layers, where = np.unique(place, axis=0, return_inverse=True)
        draws = int(program.microbatch[moe].max()) + 1
        factors = self.routing.load_factors(self.tokens, self.ep, len(layers) * self.layers_per_op, draws, (seed, repetition, 1))
        mean = factors.reshape(len(layers), self.layers_per_op, draws).mean(axis=1)
        loads[moe] = mean[where.reshape(-1), program.microbatch[moe]]
        return loads

    def op_seconds(self, program: Program, balanced: FloatArray, seed: int, repetition: int = 0) -> FloatArray:
        """Seconds of each op under the drawn loads; `balanced` [prices] are the prices at load factor 1."""
        slope = np.asarray(self.loaded.seconds, dtype=np.float64) - balanced
        loads = self.op_loads(program, seed, repetition)
        return np.maximum(balanced[program.price] + slope[program.price] * (loads - 1.0), 0.0)
