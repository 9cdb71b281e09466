"""Does the predicted best layout win? Kendall's tau and regret over sweeps that differ only in layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simpar.statistics import Comparison

SWEEP_KEYS: Final = ("source", "model_name", "workload", "n_gpus", "global_batch", "seq_len", "gpu", "precision")
"""Runs that agree in these are one sweep; models of one name may differ in heads or layers, and routing is no layout."""
LAYOUT_KEYS: Final = (
    "tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero_stage", "micro_batch", "recompute", "pp_schedule", "styles"
)  # fmt: skip
"""What a layout is; runs of a sweep that agree in these too are repeats, of which the median counts. `styles` are those of a
design beside its degrees: how context and tokens of experts are exchanged, and what lives on the host."""
MIN_LAYOUTS: Final = 3


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings, ties corrected: (C - D) / sqrt((n0 - n1)(n0 - n2)).

    Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945). None for fewer than two items or when
    one ranking is all ties.
    """
    x, y = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    upper = np.triu_indices(x.size, k=1)
    a = np.sign(x[:, None] - x[None, :])[upper]
    b = np.sign(y[:, None] - y[None, :])[upper]
    scale = float(np.sqrt(np.count_nonzero(a) * float(np.count_nonzero(b))))
    return float((a * b).sum()) / scale if scale else None


def regret(measured: Sequence[float], predicted: Sequence[float], top: int = 1) -> float:
    """How much slower than the measured best is the best measured among the `top` layouts of the prediction."""
    times = np.asarray(measured, dtype=float)
    picked = np.argsort(np.asarray(predicted, dtype=float), kind="stable")[:top]
    return float(times[picked].min() / times.min() - 1.0)


@dataclass(frozen=True, slots=True)
class SweepRanking:
    """How one sweep is ranked.

    Attributes:
        key: what its runs share.
        layouts: distinct layouts.
        tau: Kendall's tau-b of predicted and measured step time.
        regret_1, regret_5: of the predicted best and of the best among the predicted five.
        spread: measured worst over best, minus one: what there is to gain.
    """

    key: Mapping[str, Any]
    layouts: int
    tau: float | None
    regret_1: float
    regret_5: float
    spread: float

    def as_json(self) -> dict[str, Any]:
        """Field name -> value."""
        return {**asdict(self), "key": dict(self.key)}


@dataclass(frozen=True, slots=True)
class RankingSummary:
    """Ranking quality over sweeps.

    Attributes:
        sweeps: number of sweeps.
        mean_tau, mean_regret_1, mean_regret_5: plain means over sweeps.
        worst_regret_1: the largest regret of a predicted best.
    """

    sweeps: int
    mean_tau: float | None
    mean_regret_1: float | None
    mean_regret_5: float | None
    worst_regret_1: float | None

    def as_json(self) -> dict[str, Any]:
        """Field name -> value."""
        return asdict(self)


def _layouts(rows: Sequence[Comparison]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Measured and predicted median step time per distinct layout."""
    times: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        assert row.predicted is not None
        layout = tuple(row.group.get(key) for key in LAYOUT_KEYS)
        times[layout].append((float(row.measured), float(row.predicted)))
    medians = np.array([np.median(np.array(values), axis=0) for values in times.values()])
    return medians[:, 0], medians[:, 1]


def rank_sweeps(comparisons: Sequence[Comparison]) -> list[SweepRanking]:
    """Every sweep of at least three layouts among the step-time `comparisons`, largest first."""
    groups: dict[tuple[Any, ...], list[Comparison]] = defaultdict(list)
    for row in comparisons:
        if row.metric == "step_time_s" and row.predicted is not None:
            groups[tuple(row.group.get(key) for key in SWEEP_KEYS)].append(row)
    ranked = []
    for values, rows in groups.items():
        measured, predicted = _layouts(rows)
        if measured.size < MIN_LAYOUTS:
            continue
        ranked.append(
            SweepRanking(
                dict(zip(SWEEP_KEYS, values, strict=True)),
                int(measured.size),
                kendall_tau(list(measured), list(predicted)),
                regret(list(measured), list(predicted)),
                regret(list(measured), list(predicted), top=5),
                float(measured.max() / measured.min() - 1.0),
            )
        )
    return sorted(ranked, key=lambda sweep: -sweep.layouts)


def summarize_rankings(sweeps: Sequence[SweepRanking]) -> RankingSummary:
    """Means over `sweeps`."""
    if not sweeps:
        return RankingSummary(0, None, None, None, None)
    taus = [sweep.tau for sweep in sweeps if sweep.tau is not None]
    return RankingSummary(
        len(sweeps),
        float(np.mean(taus)) if taus else None,
        float(np.mean([sweep.regret_1 for sweep in sweeps])),
        float(np.mean([sweep.regret_5 for sweep in sweeps])),
        max(sweep.regret_1 for sweep in sweeps),
    )
