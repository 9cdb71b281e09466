"""Attention constants: forward ones from a measured table; both passes from published charts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.evidence.attention_charts import LENGTHS, TOKENS, WIDTH, ChartRow, chart_rows, chart_seconds
from simpar.evidence.kernel_law import Law, Rows, bands, halves, record, where
from simpar.evidence.kernel_tables import SIZES, attention_name, columns, core, measured_rows
from simpar.evidence.robust import Array, Prior
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import AttentionConstants, BackwardConstants, Band, HeadConstants


def chart_shapes(head_dim: int, lengths: Array) -> AttentionShapes:
    """The charts' setting at each length."""
    heads = np.full_like(lengths, WIDTH / head_dim)
    dims = np.full_like(lengths, float(head_dim))
    return AttentionShapes(TOKENS / lengths, lengths, lengths, heads, heads, dims, dims)


LATENCY_S = 6e-6
"""A training kernel's own start and end."""
READ_OFF = (0.93, 1.07)
"""Reading a chart, and boards of one type."""
FORWARD_SHARE = {64: 2.65, 128: 2.9, 256: 2.9}
"""Backward over forward time, to split charts of both passes together (FlashAttention-3 paper, Transformer Engine)."""


def _fit_head(row: ChartRow, forward: Array, sm_count: float) -> tuple[AttentionConstants, Array]:
    """Constants of one chart row, and its log errors, from forward seconds at its lengths."""
    at = np.isfinite(forward)
    shapes = chart_shapes(row.head_dim, np.array(LENGTHS, dtype=float)[at])
    base = AttentionConstants(
        kernel=row.kernel,
        library="charts",
        mode="burst",
        causal=row.causal,
        heads=unfitted(np.array([row.head_dim])),
        latency_s=LATENCY_S,
        wave_beta=0.0,
        critical_share=0.0,
        bands=(Band(from_size=0.0, low=READ_OFF[0], high=READ_OFF[1]),),
    )
    rate = Prior("heads.0.rate_flops_per_s", float(np.nanmax(row.rates)) * 1e12 * 1.05, 0.3)
    overhead = Prior("heads.0.sequence_overhead", 500.0 if row.causal else 200.0, 0.7)
    law, rows = Law(base, (rate, overhead), lambda c, rows: attention_seconds(c, sm_count, rows.shapes)), Rows(shapes, forward[at])
    fitted, _ = law.fit(rows)
    return fitted, law.errors(fitted, rows)


def forward_constants(path: Path, gpu: str, sm_count: float) -> tuple[AttentionConstants, ...]:
    """One set for each kernel and mask of the GPU's charts."""
    groups: dict[tuple[str, bool], dict[int, tuple[AttentionConstants, Array]]] = defaultdict(dict)
    rows = [row for row in chart_rows(path) if row.gpu == gpu and np.isfinite(row.rates).sum() >= 3 and not row.fp8]
    for row in sorted(rows, key=lambda r: r.which != "fwd"):
        if row.which == "bwd" or row.head_dim in groups[row.kernel, row.causal]:
            continue
        seconds = chart_seconds(row)
        if row.which == "fwd+bwd":
            seconds = seconds / (1.0 + FORWARD_SHARE.get(row.head_dim, 2.9))
        groups[row.kernel, row.causal][row.head_dim] = _fit_head(row, seconds, sm_count)
    found = []
    for _, heads in sorted(groups.items()):
        logs = np.concatenate([log for _, log in heads.values()])
        own = [heads[d][0] for d in sorted(heads)]
        update = {"heads": tuple(c.heads[0] for c in own), "fit": record(path.name, logs, np.empty(0))}
        found.append(own[0].model_copy(update=update))
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
        base = BackwardConstants(kernel=row.kernel, head_dim=row.head_dim, ratio=1.0, source=path.name)
        priors = (Prior("ratio", ratio[-1], 0.2), Prior("short_sequence", 100.0, 1.0))
        law = Law(base, priors, lambda c, rows: np.asarray(c.ratio * (1.0 + c.short_sequence / rows.shapes)))
        found.append(law.fit(Rows(lengths, ratio))[0])
    return tuple(found)


_RIDGE = (0.03, 0.015, 0.1, 0.03, 0.015, 0.03, 0.015, 0.03, 0.015, 0.03, 0.03, 0.03, 0.03, 0.05, 0.2, 0.05, 0.02, 0.05)


def unfitted(heads: Array) -> tuple[HeadConstants, ...]:
    """Constants of head sizes [heads], before the fit of them."""
    return tuple(HeadConstants(head_dim=int(d), rate_flops_per_s=1e12, sequence_overhead=0.0) for d in heads)


def _priors(base: AttentionConstants, hardware: HardwareProfile) -> list[Prior]:
    peak, bandwidth = hardware.peak_flops_per_s("bf16"), hardware.gpu.memory_bandwidth.value
    found = [
        Prior("latency_s", 8e-6, 0.5),
        Prior("cache_bytes_per_s", 0.4 * bandwidth, 0.5),
        Prior("token_s", 0.2e-9, 0.7),
        Prior("io_bytes_per_s", 2.5 * bandwidth, 0.5),
        Prior("overlap_power", 2.0, 0.5),
        Prior("critical_share", 0.5, 0.3) if base.causal else Prior("wave_beta", 0.5, 0.4, log=False),
        Prior("occupancy_exponent", 0.0, 0.15, log=False),
    ]
    found += [Prior(f"ridge.{i}", 0.0, sigma, log=False) for i, sigma in enumerate(_RIDGE)]
    for i, head in enumerate(base.heads):
        found.append(Prior(f"heads.{i}.rate_flops_per_s", peak * (0.65 if head.head_dim >= 128 else 0.5), 0.25))
        found.append(Prior(f"heads.{i}.sequence_overhead", 600.0 if base.causal else 200.0, 0.6))
        if base.causal:
            found.append(Prior(f"heads.{i}.critical", 1.0, 0.4))
    return found


def fit_table(path: Path, hardware: HardwareProfile) -> AttentionConstants:
    """Forward constants of one measured table."""
    _, kernel, library = attention_name(path)
    every = measured_rows("attention", columns(path, (*SIZES["attention"], "causal", "us")))
    table, causal = where(core(every), every), bool(every["causal"][0] > 0)
    rows, small = (Rows(AttentionShapes.of(part), part["seconds"]) for part in (table, where(~core(every), every)))
    mode = "sustained" if "sustained" in library else "burst"
    base = AttentionConstants(kernel=kernel, library=library, mode=mode, causal=causal, heads=unfitted(np.unique(table["d"])))
    sm_count = float(hardware.gpu.sm_count.value)
    law = Law(base, _priors(base, hardware), lambda c, rows: attention_seconds(c, sm_count, rows.shapes))
    fitted, x = law.fit(rows)
    mask = halves(table["h"], table["kv"], table["d"])
    held = law.held_out(rows, (mask, ~mask), x)
    flops, few = (attention_flops(part.shapes, causal=causal) for part in (rows, small))
    reached = record(path.name, law.errors(fitted, rows), held)
    update = {"bands": bands(flops, held), "bands_small": bands(few, law.errors(fitted, small)), "fit": reached}
    return fitted.model_copy(update=update)
