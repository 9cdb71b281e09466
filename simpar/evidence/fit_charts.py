"""Attention from published charts (FlashAttention-2/3/4, cuDNN): rates by length, and backward over forward time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import attention_seconds
from simpar.evidence.attention_charts import LENGTHS, ChartRow, chart_rows, chart_seconds, chart_shapes
from simpar.evidence.robust import soft_l1
from simpar.specs.kernel_constants import AttentionConstants, BackwardConstants, Band, FitRecord, HeadConstants

Array = NDArray[np.float64]
LATENCY_S = 6e-6
"""A training kernel's own start and end."""
READ_OFF = (0.93, 1.07)
"""Reading a chart, and boards of one type."""
FORWARD_SHARE = {64: 2.65, 128: 2.9, 256: 2.9}
"""Backward over forward time, to split charts of both passes together (FlashAttention-3 paper, Transformer Engine)."""


def _constants(kernel: str, causal: bool, heads: Sequence[HeadConstants]) -> AttentionConstants:
    return AttentionConstants(
        kernel=kernel,
        library="charts",
        mode="burst",
        causal=causal,
        heads=tuple(heads),
        latency_s=LATENCY_S,
        wave_beta=0.0,
        critical_share=0.0,
        bands=(Band(from_size=0.0, low=READ_OFF[0], high=READ_OFF[1]),),
    )


def _fit_head(row: ChartRow, forward: Array, sm_count: float) -> tuple[HeadConstants, Array]:
    """Rate and overhead of one chart row, and its log errors, from forward seconds at its lengths."""
    at = np.isfinite(forward)
    shapes = chart_shapes(row.head_dim, np.array(LENGTHS, dtype=float)[at])

    def constants(x: Array) -> AttentionConstants:
        head = HeadConstants(head_dim=row.head_dim, rate_flops_per_s=float(np.exp(x[0])), sequence_overhead=float(np.exp(x[1])))
        return _constants(row.kernel, row.causal, [head])

    def predict(x: Array) -> Array:
        return np.asarray(np.log(attention_seconds(constants(x), sm_count, shapes)))

    rate = float(np.nanmax(row.rates)) * 1e12
    mean = np.array([np.log(rate * 1.05), np.log(500.0 if row.causal else 200.0)])
    x = soft_l1(predict, np.log(forward[at]), mean, mean, np.array([0.3, 0.7]))
    return constants(x).heads[0], predict(x) - np.log(forward[at])


def forward_constants(path: Path, gpu: str, sm_count: float) -> tuple[AttentionConstants, ...]:
    """One set for each kernel and mask of the GPU's charts."""
    groups: dict[tuple[str, bool], dict[int, tuple[HeadConstants, Array]]] = defaultdict(dict)
    rows = [row for row in chart_rows(path) if row.gpu == gpu and np.isfinite(row.rates).sum() >= 3 and not row.fp8]
    for row in sorted(rows, key=lambda r: r.which != "fwd"):
        if row.which == "bwd" or row.head_dim in groups[row.kernel, row.causal]:
            continue
        seconds = chart_seconds(row)
        if row.which == "fwd+bwd":
            seconds = seconds / (1.0 + FORWARD_SHARE.get(row.head_dim, 2.9))
        groups[row.kernel, row.causal][row.head_dim] = _fit_head(row, seconds, sm_count)
    found = []
    for (kernel, causal), heads in sorted(groups.items()):
        if not heads:
            continue
        logs = np.concatenate([log for _, log in heads.values()])
        size = np.abs(np.expm1(logs))
        fit = FitRecord(
            source=path.name,
            rows=len(logs),
            median=round(float(np.median(size)), 5),
            p90=round(float(np.quantile(size, 0.9)), 5),
            bias=round(float(np.expm1(logs).mean()), 5),
        )
        own = _constants(kernel, causal, [heads[d][0] for d in sorted(heads)])
        found.append(own.model_copy(update={"fit": fit}))
    return tuple(found)


def backward_constants(path: Path, gpu: str) -> tuple[BackwardConstants, ...]:
    """Backward over forward time as ratio (s + s_b) / (s + s_f), where a chart has both passes of a kernel and head size."""
    rows = [row for row in chart_rows(path) if row.gpu == gpu and not row.causal and not row.fp8]
    forward = {(row.kernel, row.head_dim): row for row in rows if row.which == "fwd"}
    found = []
    for row in rows:
        pair = forward.get((row.kernel, row.head_dim))
        if row.which != "bwd" or pair is None:
            continue
        both = np.isfinite(row.rates) & np.isfinite(pair.rates)
        if both.sum() < 3:
            continue
        lengths = np.array(LENGTHS, dtype=float)[both]
        ratio = chart_seconds(row)[both] / chart_seconds(pair)[both]

        def predict(x: Array, s: Array = lengths) -> Array:
            return np.asarray(x[0] + np.log1p(np.exp(x[1]) / s))

        mean = np.array([np.log(ratio[-1]), np.log(100.0)])
        x = soft_l1(predict, np.log(ratio), mean, mean, np.array([0.2, 1.0]))
        found.append(
            BackwardConstants(
                kernel=row.kernel,
                head_dim=row.head_dim,
                ratio=float(np.exp(x[0])),
                short_sequence=float(np.exp(x[1])),
                source=path.name,
            )
        )
    return tuple(found)
