"""The one law every collective follows: t(S) = alpha + S beta + gamma sqrt(S), the fastest of a few candidates.

alpha is latency (set-up and hops), beta the seconds per byte of the slowest medium, gamma the pipeline fill: a message
cut into k chunks over a pipeline of depth d takes (k + d)(o + S beta / k) with an overhead o per chunk; the best k gives
alpha + S beta + 2 sqrt(d o S beta). Each candidate grows with S and those with a limit only drop out, so the least of
them grows with S too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

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
        floor_s: least time of the transfer (messages too small to open all channels).
        full_bytes: from this size chunks are as large as the buffers allow and the fill grows no more.
        max_bytes: the tuner takes it up to this size; one law at least has none.
    """

    algorithm: str
    protocol: str
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_sqrt_byte: float = 0.0
    channels: int = 16
    floor_s: float = 0.0
    max_bytes: float = inf
    full_bytes: float = inf

    def seconds(self, bytes_: float) -> float:
        """Duration for a message of `bytes_`."""
        return self.alpha_s + self.transfer_s(bytes_) + self.fill_s(bytes_)

    def transfer_s(self, bytes_: float) -> float:
        """Time on the slowest medium."""
        return max(self.floor_s, bytes_ * self.beta_s_per_byte)

    def fill_s(self, bytes_: float) -> float:
        """Time to fill and drain the pipeline."""
        return sqrt(min(bytes_, self.full_bytes)) * self.gamma_s_per_sqrt_byte


def fastest(laws: Sequence[Law], bytes_: float) -> Law:
    """The law that takes least for `bytes_`."""
    return min(laws, key=lambda law: law.seconds(bytes_) if bytes_ <= law.max_bytes else inf)


def seconds_of(laws: Sequence[Law], bytes_: NDArray[np.float64]) -> NDArray[np.float64]:
    """Durations [messages] of the fastest law for each of `bytes_` [messages]."""
    found = np.full(bytes_.shape, inf)
    for law in laws:
        transfer = np.maximum(law.floor_s, law.beta_s_per_byte * bytes_)
        seconds = law.alpha_s + transfer + law.gamma_s_per_sqrt_byte * np.sqrt(np.minimum(bytes_, law.full_bytes))
        found = np.minimum(found, np.where(bytes_ <= law.max_bytes, seconds, inf))
    return found


def fill(overhead_s: float, beta_s_per_byte: float, depth: float = 1.0) -> float:
    """gamma of a pipeline `depth` deep whose chunks cost `overhead_s` each on a medium of `beta_s_per_byte`."""
    return 2.0 * sqrt(depth * overhead_s * beta_s_per_byte)
