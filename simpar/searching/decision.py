"""Which designs are worth a trial: chances that each is the best, what it is expected to take, the few that hold the best.

Predicted step times are off by errors that layouts share (the same kernels, the same links: a category's seconds are all too low
or all too high) and by errors of their own. What all share moves every layout alike; what two layouts use differently does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from simpar.program.program import FloatArray
from simpar.readings import TENTH
from simpar.result.result import Result
from simpar.specs.calibration import registered

MESH_ERROR: Final = registered("search.mesh_error")
"""Standard deviation of the logarithm of an error that all layouts of one mesh and micro-batch share, and others do not."""
OWN_ERROR: Final = registered("search.own_error")
"""The same of a layout's own error. Both are measured on pairs of layouts of published sweeps that are predicted within a tenth
of each other, as are those that a search returns: further apart, predictions are further off (docs/search.md,
benchmarks/bench_regret.py)."""
SETTLED: Final = 0.9
"""Chance with which the designs to try contain one that is as good as the best."""
TOLD: Final = 0.01
"""What the model can tell, relatively: what is no more than this slower than the best is as good."""
DRAWS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Rival:
    """A design in comparison.

    Attributes:
        log_value: logarithm of its predicted value, less is better.
        moves: change of that logarithm per standard deviation of the shared error of each category of seconds.
        mesh: what it shares with rivals that differ in settings alone.
        fit_probability: chance that it fits the memory.
    """

    log_value: float
    moves: Mapping[str, float]
    mesh: Hashable = None
    fit_probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What the model can tell between rivals.

    Attributes:
        best_probability: of each that it is the best of them, given that it fits, float array [rivals].
        optimism: logarithm of what the chosen one will take over what is predicted for it: the least of several uncertain
            numbers is more often too low than too high.
        try_these: the fewest rivals of which one is the best, or as good (see `TOLD`), with `SETTLED`; what adds most first.
    """

    best_probability: FloatArray
    optimism: float
    try_these: tuple[int, ...]


def decide(rivals: Sequence[Rival], *, mesh_error: float = MESH_ERROR, own_error: float = OWN_ERROR) -> Decision:
    """Draw errors and count who wins."""
    if len(rivals) < 2:
        return Decision(np.ones(len(rivals)), 0.0, tuple(range(len(rivals))))
    draw = np.random.default_rng(0)
    names = sorted({name for rival in rivals for name in rival.moves})
    moves = np.array([[rival.moves.get(name, 0.0) for name in names] for rival in rivals])
    predicted = np.array([rival.log_value for rival in rivals])
    meshes = list(dict.fromkeys(rival.mesh for rival in rivals))
    of_mesh = draw.standard_normal((DRAWS, len(meshes)))[:, [meshes.index(rival.mesh) for rival in rivals]]
    errors = draw.standard_normal((DRAWS, len(names))) @ moves.T + mesh_error * of_mesh
    errors += own_error * draw.standard_normal((DRAWS, len(rivals)))
    # The memory of all is off in the same direction: what stands nearest to its limit fails first.
    fits = draw.random((DRAWS, 1)) < np.array([rival.fit_probability for rival in rivals])
    real = np.where(fits, predicted + errors, np.inf)
    wins = np.bincount(real.argmin(axis=1)[fits.any(axis=1)], minlength=len(rivals))
    chances = wins / max(wins.sum(), 1)
    # The same numbers turned round: what is seen is the truth and an error, and the least of what is seen is chosen.
    seen = (predicted + errors).argmin(axis=1)
    optimism = -float((errors - errors.mean(axis=1, keepdims=True))[np.arange(DRAWS), seen].mean())
    return Decision(chances, optimism, _fewest(real))


def _fewest(real: FloatArray) -> tuple[int, ...]:
    """Rivals of which, with `SETTLED`, one is no more than `TOLD` slower than the best: in turn the one that adds most.

    Args:
        real: logarithms of values that may be true, infinite where it does not fit, float array [draws, rivals].
    """
    good = real <= real.min(axis=1, keepdims=True) + np.log1p(TOLD)
    good = good[np.isfinite(real).any(axis=1)]
    chosen: list[int] = []
    while len(good) and (not chosen or good[:, chosen].any(axis=1).mean() < SETTLED):
        missing = good[~good[:, chosen].any(axis=1)] if chosen else good
        chosen.append(int(missing.sum(axis=0).argmax()))
    return tuple(chosen)


def moves_of(result: Result) -> dict[str, float]:
    """`Rival.moves` of a simulated layout: the half-widths of its interval by category; the calibration's is shared by all."""
    step = result.step_time_s
    widths = {name: width for name, width in result.step_interval.dominated_by if name != "calibration"}
    return {name: float(np.log1p(width / step)) / TENTH for name, width in widths.items()}


__all__ = ["DRAWS", "MESH_ERROR", "OWN_ERROR", "SETTLED", "TOLD", "Decision", "Rival", "decide", "moves_of"]
