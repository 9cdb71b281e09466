"""How alike the runs of a cluster are: what is off in one run tells about another the more, the less the two differ.

What is left of a prediction's error once a site's factors are right is a Gaussian process over runs with the correlation

    k(a, b) = exp(-d(a, b) / reach - l(a, b) / layout_reach),    d = doublings between their jobs' sizes + 1 for another precision,
                                                                 l = doublings between the degrees of their layouts, and between
                                                                     their predicted seconds of a micro-batch

Whatever else sets two layouts apart (a dispatcher, recomputation, experts, waiting for the host) shows in those seconds.

(an Ornstein-Uhlenbeck process in each size; Rasmussen and Williams 2006, section 4.2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from simpar.specs.base import Spec

FloatArray = NDArray[np.float64]
JITTER: Final = 1e-6
"""Added to the diagonal of a matrix of correlations, so that kinds next to each other do not make it singular."""


class Reach(NamedTuple):
    """Doublings over which runs stop being alike: of their jobs' sizes, of their layouts."""

    job: float
    layout: float


class Kind(Spec):
    """What runs are one of: a job, and the degrees of its layout."""

    parameters: Annotated[float, Field(gt=0)] = 1.0
    """Of the model."""
    sequence_length: Annotated[int, Field(ge=1)] = 1
    """Tokens."""
    gpus: Annotated[int, Field(ge=1)] = 1
    """Of the job."""
    global_batch_size: Annotated[int, Field(ge=1)] = 1
    """Sequences."""
    precision: str = ""
    """And what is trained where that is not all: "bf16", "bf16 lora"."""
    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor parallel."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Context parallel."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Pipeline parallel."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Sequences of a micro-batch."""
    microbatch_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds of the step for each of its micro-batches, predicted without the site's runs."""

    @property
    def sizes(self) -> tuple[float, ...]:
        """Of the job, told apart by doublings."""
        return (self.parameters, float(self.sequence_length), float(self.gpus), float(self.global_batch_size))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Of the layout, told apart by doublings."""
        return (self.tp, self.cp, self.pp, self.micro_batch_size)

    @property
    def job(self) -> Kind:
        """Whatever the layout."""
        return self.model_copy(update={"tp": 1, "cp": 1, "pp": 1, "micro_batch_size": 1, "microbatch_s": 1.0})

    @property
    def name(self) -> str:
        """In words: "8.03B bf16, 8192 tokens x 64, 16 GPUs, tp 2"."""
        size = f"{self.parameters / 1e9:.3g}B" if self.parameters >= 1e8 else f"{self.parameters / 1e6:.3g}M"
        words = zip(("tp", "cp", "pp", "micro-batch"), self.degrees, strict=True)
        layout = "".join(f", {word} {degree}" for word, degree in words if degree > 1)
        return f"{size} {self.precision}, {self.sequence_length} tokens x {self.global_batch_size}, {self.gpus} GPUs{layout}"


UNKNOWN: Final = Kind()
"""A job that nothing is known of."""


def correlation(one: Sequence[Kind], other: Sequence[Kind], reach: Reach) -> FloatArray:
    """k(a, b) of every kind of `one` with every kind of `other` [one, other]."""
    a, b = (
        np.log2(np.array([(*kind.sizes, *kind.degrees, kind.microbatch_s) for kind in kinds]).reshape(-1, 1, 9))
        for kinds in (one, other)
    )
    doublings = np.abs(a - b.swapaxes(0, 1))
    jobs, layouts = doublings[..., :4].sum(-1), doublings[..., 4:].sum(-1)
    jobs = jobs + np.array([[k.precision != m.precision for m in other] for k in one]).reshape(jobs.shape)
    return np.asarray(np.exp(-jobs / reach.job - layouts / reach.layout))


def interpolated(wanted: Sequence[Kind], known: Sequence[Kind], reach: Reach) -> tuple[FloatArray, FloatArray]:
    """Weights [wanted, known] of what is known of some kinds in what is expected of others, and the correlation [wanted, wanted] of
    what stays unknown of those: none of a kind that is known."""
    between = correlation(wanted, wanted, reach)
    if not known:
        return np.zeros((len(wanted), 0)), between
    across = correlation(wanted, known, reach)
    weights = np.linalg.solve(correlation(known, known, reach) + JITTER * np.eye(len(known)), across.T).T
    same = np.array([[float(a == b) for b in known] for a in wanted]).reshape(across.shape)
    new = same.sum(1) == 0.0
    left = (between - weights @ across.T) * np.outer(new, new)
    return np.where(new[:, None], weights, same), left
