"""Attention constants from a measured table (forward)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.evidence.kernel_errors import bands, halves, record, where
from simpar.evidence.kernel_tables import MICRO, usable
from simpar.evidence.robust import Prior, fit_law
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import AttentionConstants, HeadConstants

Array = NDArray[np.float64]
Table = dict[str, Array]
CORE = 1024
"""Fitted region: sequences of at least this."""
_SIZES = ("b", "s", "h", "kv", "d")
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


def core_rows(table: Table, *, inside: bool = True) -> Table:
    """Rows inside (or outside) the fitted region, with `seconds`."""
    ok = usable(table, _SIZES, "us") & ((table["s"] >= CORE) == inside)
    return {**{name: table[name][ok] for name in _SIZES}, "seconds": table["us"][ok] * MICRO}


def fit_table(table: Table, kernel: str, library: str, hardware: HardwareProfile, name: str) -> AttentionConstants:
    """Forward constants of one measured table."""
    sm_count = float(hardware.gpu.sm_count.value)
    causal = bool(table["causal"][0] > 0)
    rows, small = core_rows(table), core_rows(table, inside=False)
    mode = "sustained" if "sustained" in library else "burst"
    base = AttentionConstants(kernel=kernel, library=library, mode=mode, causal=causal, heads=unfitted(np.unique(rows["d"])))
    priors = _priors(base, hardware)

    def fit(rows: Table, first: Array | None = None) -> tuple[AttentionConstants, Array]:
        shapes = AttentionShapes.of(rows)
        return fit_law(base, priors, lambda c: attention_seconds(c, sm_count, shapes), rows["seconds"], first=first)

    def errors(c: AttentionConstants, rows: Table) -> Array:
        return np.asarray(np.log(attention_seconds(c, sm_count, AttentionShapes.of(rows))) - np.log(rows["seconds"]))

    fitted, x = fit(rows)
    held = np.empty(len(rows["seconds"]))
    mask = halves(rows["h"], rows["kv"], rows["d"])
    for half in (mask, ~mask):
        held[half] = errors(fit(where(~half, rows), x)[0], where(half, rows))
    flops, few = (attention_flops(AttentionShapes.of(part), causal=causal) for part in (rows, small))
    fit_record = record(name, errors(fitted, rows), held)
    update = {"bands": bands(flops, held), "bands_small": bands(few, errors(fitted, small)), "fit": fit_record}
    return fitted.model_copy(update=update)
