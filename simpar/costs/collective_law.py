"""The one law every collective follows: t(S) = alpha + S beta + gamma sqrt(S), the fastest of a few candidates.

alpha is latency (set-up and hops), beta the seconds per byte of the slowest medium, gamma the pipeline fill: a message
cut into k chunks over a pipeline of depth d takes (k + d)(o + S beta / k) with an overhead o per chunk; the best k gives
alpha + S beta + 2 sqrt(d o S beta). Each candidate grows with S, and so does the least of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Law:
    """One algorithm and protocol for one placed group.

    Attributes:
        algorithm, protocol: NCCL's names.
        alpha_s: latency.
        beta_s_per_byte: inverse of the algorithm bandwidth.
        gamma_s_per_sqrt_byte: pipeline fill.
        channels: thread blocks it runs at full size.
    """

    algorithm: str
    protocol: str
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_sqrt_byte: float = 0.0
    channels: int = 16

    def seconds(self, bytes_: float) -> float:
        """Duration for a message of `bytes_`."""
        return self.alpha_s + bytes_ * self.beta_s_per_byte + sqrt(bytes_) * self.gamma_s_per_sqrt_byte


def fastest(laws: Sequence[Law], bytes_: float) -> Law:
    """The law that takes least for `bytes_`."""
    return min(laws, key=lambda law: law.seconds(bytes_))


def seconds_of(laws: Sequence[Law], bytes_: NDArray[np.float64]) -> NDArray[np.float64]:
    """Durations [messages] of the fastest law for each of `bytes_` [messages]."""
    alpha = np.array([law.alpha_s for law in laws])[:, None]
    beta = np.array([law.beta_s_per_byte for law in laws])[:, None]
    gamma = np.array([law.gamma_s_per_sqrt_byte for law in laws])[:, None]
    return np.asarray((alpha + beta * bytes_ + gamma * np.sqrt(bytes_)).min(axis=0))


def fill(overhead_s: float, beta_s_per_byte: float, depth: float = 1.0) -> float:
    """gamma of a pipeline `depth` deep whose chunks cost `overhead_s` each on a medium of `beta_s_per_byte`."""
    return 2.0 * sqrt(depth * overhead_s * beta_s_per_byte)
