"""How much longer eager compute takes inside a step than its kernels alone, from steps without communication.

A reference step of each model runs on every core at once, alone on its rank. With P seconds of kernels and N launches it takes
T = f P + l N + U, U the update, measured as a whole. A model so small that its step is all launches gives l (without one, l and f
of the dense models follow by least squares of the relative error); then each model gets the f of its own step at that l, f >= 1
and l >= 0. What is in f: operands that other ops drove out of the caches, and for experts the ops of routing that have no price.

A further step with every layer fully sharded over one rank, the rank itself, has all the work of fully_shard on the host and
nothing to send: what it takes beyond the plain step and its copies, over its gathers and reductions, is the cost of a call.

Where a schedule has backwards in two parts, both kinds of backward run in turn over the layers of the model: what the two parts
take beyond the whole, a layer, is the host's search for the weights' gradients in the graph and a second pass of autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class InStep:
    """How compute inside a step differs from its kernels alone.

    Attributes:
        factors: on the kernels, by model; 1 for models that are not there.
        launch_s: seconds more for each launch.
        shard_s: of the host for each gather or reduction of fully_shard.
        split_s: more that a layer's backward takes in two parts, by model.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    shard_s: float = 0.0
    split_s: Mapping[str, float] = field(default_factory=dict)

    def factor(self, model: str) -> float:
        """On the kernels of `model`."""
        return self.factors.get(model, 1.0)

    def as_json(self) -> dict[str, object]:
        """For the report."""
        return {"factor": dict(self.factors), "launch_s": self.launch_s, "shard_s": self.shard_s, "split_s": dict(self.split_s)}


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference step: measured seconds, priced seconds of its kernels, launches, and the rest of the priced step."""

    measured_s: float
    kernels_s: float
    launches: int
    rest_s: float


TINY = "tiny"
"""The model whose step is all launches."""


def in_step(references: Mapping[str, Reference]) -> InStep:
    """Factors and launch time from the reference step of each model; one with experts does not vote on the launch time."""
    if (tiny := references.get(TINY)) is not None:
        launch = max((tiny.measured_s - tiny.rest_s - tiny.kernels_s) / tiny.launches, 0.0)
        references = {model: r for model, r in references.items() if model != TINY}
    else:
        dense = [r for model, r in references.items() if model != "moe"]
        _, launch = fit(dense or list(references.values()))
    left = {model: r.measured_s - r.rest_s - launch * r.launches for model, r in references.items()}
    return InStep({model: max(left[model] / r.kernels_s, 1.0) for model, r in references.items()}, launch)


def fit(references: Sequence[Reference]) -> tuple[float, float]:
    """(f, l); (1, 0) where there are no references, l = 0 where there is one only."""
    if not references:
        return 1.0, 0.0
    target = np.array([1.0 - r.rest_s / r.measured_s for r in references])
    columns = np.array([[r.kernels_s / r.measured_s, r.launches / r.measured_s] for r in references])
    candidates = [(_single(columns[:, 0], target, least=1.0), 0.0)]
    rest = target - columns[:, 0]
    candidates.append((1.0, _single(columns[:, 1], rest, least=0.0)))
    if len(references) > 1:
        f, launch = np.linalg.lstsq(columns, target, rcond=None)[0]
        if f >= 1.0 and launch >= 0.0:
            return float(f), float(launch)
    return min(candidates, key=lambda c: float(np.sum((columns @ np.array(c) - target) ** 2)))


def _single(column: np.ndarray, target: np.ndarray, *, least: float) -> float:
    return max(float(column @ target / (column @ column)), least)
