"""Which designs are worth a trial: chances that each is the best, what it is expected to take, the few that hold the best.

Predicted step times are off by errors that layouts share (the same kernels, the same links: a category's seconds are all too low
or all too high) and by errors of their own. What all share moves every layout alike; what two layouts use differently does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from simpar.program.program import FloatArray
from simpar.readings import TENTH
from simpar.result.result import Result

OWN_ERROR: Final = 0.04
"""Standard deviation of the logarithm of a layout's own error. Within one published sweep (one model, cluster and batch) the
ratio of measured to predicted step time scatters by 3 % around the sweep's own (docs/search.md, benchmarks/bench_regret.py)."""
SETTLED: Final = 0.9
"""Chance with which the designs to try contain the best."""
DRAWS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Rival:
    """A design in comparison.

    Attributes:
        log_value: logarithm of its predicted value, less is better.
        moves: change of that logarithm per standard deviation of the shared error of each category of seconds.
        fit_probability: chance that it fits the memory.
    """

    log_value: float
    moves: Mapping[str, float]
    fit_probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What the model can tell between rivals.

    Attributes:
        best_probability: of each that it is the best of them, given that it fits, float array [rivals].
        optimism: logarithm of what the chosen one will take over what is predicted for it: the least of several uncertain
            numbers is more often too low than too high.
        try_these: rivals that contain the best with `SETTLED`, likeliest first.
    """

    best_probability: FloatArray
    optimism: float
    try_these: tuple[int, ...]


def decide(rivals: Sequence[Rival], own: float = OWN_ERROR) -> Decision:
    """Draw errors and count who wins.

    Args:
        own: standard deviation of each rival's own error.
    """
    if len(rivals) < 2:
        return Decision(np.ones(len(rivals)), 0.0, tuple(range(len(rivals))))
    draw = np.random.default_rng(0)
    names = sorted({name for rival in rivals for name in rival.moves})
    moves = np.array([[rival.moves.get(name, 0.0) for name in names] for rival in rivals])
    predicted = np.array([rival.log_value for rival in rivals])
    errors = draw.standard_normal((DRAWS, len(names))) @ moves.T + own * draw.standard_normal((DRAWS, len(rivals)))
    # The memory of all is off in the same direction: what stands nearest to its limit fails first.
    fits = draw.random((DRAWS, 1)) < np.array([rival.fit_probability for rival in rivals])
    real = np.where(fits, predicted + errors, np.inf)
    wins = np.bincount(real.argmin(axis=1)[fits.any(axis=1)], minlength=len(rivals))
    chances = wins / max(wins.sum(), 1)
    # The same numbers turned round: what is seen is the truth and an error, and the least of what is seen is chosen.
    seen = (predicted + errors).argmin(axis=1)
    optimism = -float((errors - errors.mean(axis=1, keepdims=True))[np.arange(DRAWS), seen].mean())
    return Decision(chances, optimism, _smallest(chances))


def _smallest(chances: FloatArray) -> tuple[int, ...]:
    """The fewest that add up to `SETTLED`."""
    order = np.argsort(-chances, kind="stable")
    count = int(np.searchsorted(np.cumsum(chances[order]), SETTLED - 1e-9)) + 1
    return tuple(int(i) for i in order[:count])


def moves_of(result: Result) -> dict[str, float]:
    """`Rival.moves` of a simulated layout: the half-widths of its interval by category; the calibration's is shared by all."""
    step = result.step_time_s
    widths = {name: width for name, width in result.step_interval.dominated_by if name != "calibration"}
    return {name: float(np.log1p(width / step)) / TENTH for name, width in widths.items()}


__all__ = ["DRAWS", "OWN_ERROR", "SETTLED", "Decision", "Rival", "decide", "moves_of"]
