"""Attention constants from a measured table (forward)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.evidence.kernel_errors import bands, halves, record
from simpar.evidence.kernel_law import Law, Rows, where
from simpar.evidence.kernel_tables import SIZES, attention_name, columns, core, measured_rows
from simpar.evidence.robust import Prior
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import AttentionConstants, HeadConstants

Array = NDArray[np.float64]
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
