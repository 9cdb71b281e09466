"""Attention constants from a measured table (forward) and from published charts and machines (backward)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.evidence.kernel_errors import bands, halves, record
from simpar.evidence.kernel_tables import MICRO, usable
from simpar.evidence.robust import soft_l1
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import AttentionConstants, HeadConstants

Array = NDArray[np.float64]
CORE = 1024
"""Fitted region: sequences of at least this."""
_SIZES = ("b", "s", "h", "kv", "d")
_RIDGE = (0.03, 0.015, 0.1, 0.03, 0.015, 0.03, 0.015, 0.03, 0.015, 0.03, 0.03, 0.03, 0.03, 0.05, 0.2, 0.05, 0.02, 0.05)
_FIXED = 8
_PER_HEAD = 3
KernelName = Literal["fa1", "fa2", "fa3", "cudnn", "trtllm-gen", "fa4", "unfused"]


def _priors(heads: Array, *, causal: bool, hardware: HardwareProfile) -> tuple[Array, Array]:
    peak = hardware.peak_flops_per_s("bf16")
    bandwidth = hardware.gpu.memory_bandwidth.value
    mean = [np.log(8e-6), np.log(0.4 * bandwidth), np.log(0.2e-9), np.log(2.5 * bandwidth), np.log(2.0), np.log(0.5), 0.5]
    sigma = [0.5, 0.5, 0.7, 0.5, 0.5, 0.3 if causal else 0.0, 0.0 if causal else 0.4]
    mean += [0.0, *([0.0] * len(_RIDGE))]
    sigma += [0.15, *_RIDGE]
    for head in heads:
        mean += [np.log(peak * (0.65 if head >= 128 else 0.5)), np.log(600.0 if causal else 200.0)]
        sigma += [0.25, 0.6]
        mean.append(0.0)
        sigma.append(0.4 if causal else 0.0)
    return np.array(mean), np.array(sigma)


def _unpack(base: AttentionConstants, heads: Array, x: Array) -> AttentionConstants:
    latency, cache, token, io, power, critical = (float(v) for v in np.exp(x[:6]))
    own = tuple(
        HeadConstants(
            head_dim=int(head),
            rate_flops_per_s=float(rate),
            sequence_overhead=float(extra),
            critical=float(own_share),
        )
        for head, (rate, extra, own_share) in zip(heads, np.exp(x[_FIXED + len(_RIDGE) :]).reshape(-1, _PER_HEAD), strict=True)
    )
    return base.model_copy(
        update={
            "latency_s": latency,
            "cache_bytes_per_s": cache,
            "token_s": token,
            "io_bytes_per_s": io,
            "overlap_power": float(np.clip(power, 0.5, 20.0)),
            "critical_share": critical,
            "wave_beta": float(x[6]),
            "occupancy_exponent": float(x[7]),
            "ridge": tuple(float(v) for v in x[_FIXED : _FIXED + len(_RIDGE)]),
            "heads": own,
        }
    )


def _fit(
    base: AttentionConstants, table: dict[str, Array], sm_count: float, hardware: HardwareProfile, first: Array | None = None
) -> tuple[AttentionConstants, Array]:
    heads = np.array([h.head_dim for h in base.heads], dtype=float)
    mean, sigma = _priors(heads, causal=base.causal, hardware=hardware)
    shapes = AttentionShapes.of(table)

    def predict(x: Array) -> Array:
        return np.asarray(np.log(attention_seconds(_unpack(base, heads, x), sm_count, shapes)))

    x = soft_l1(predict, np.log(table["seconds"]), mean if first is None else first, mean, sigma)
    return _unpack(base, heads, x), x


def _errors(c: AttentionConstants, table: dict[str, Array], sm_count: float) -> Array:
    return np.asarray(np.log(attention_seconds(c, sm_count, AttentionShapes.of(table))) - np.log(table["seconds"]))


def core_rows(table: dict[str, Array], *, inside: bool = True) -> dict[str, Array]:
    """Rows inside (or outside) the fitted region, with `seconds`."""
    ok = usable(table, _SIZES, "us") & ((table["s"] >= CORE) == inside)
    return {**{name: table[name][ok] for name in _SIZES}, "seconds": table["us"][ok] * MICRO}


def fit_table(table: dict[str, Array], kernel: str, library: str, hardware: HardwareProfile, name: str) -> AttentionConstants:
    """Forward constants of one measured table."""
    sm_count = float(hardware.gpu.sm_count.value)
    causal = bool(table["causal"][0] > 0)
    rows = core_rows(table)
    heads = np.unique(rows["d"])
    unset = tuple(HeadConstants(head_dim=int(d), rate_flops_per_s=1e12, sequence_overhead=0.0) for d in heads)
    base = AttentionConstants(
        kernel=kernel,
        library=library,
        mode="sustained" if "sustained" in library else "burst",
        causal=causal,
        heads=unset,
    )
    fitted, x = _fit(base, rows, sm_count, hardware)
    held = np.empty(len(rows["seconds"]))
    mask = halves(rows["h"], rows["kv"], rows["d"])
    for half in (mask, ~mask):
        seen = {k: v[~half] for k, v in rows.items()}
        unseen = {k: v[half] for k, v in rows.items()}
        held[half] = _errors(_fit(base, seen, sm_count, hardware, x)[0], unseen, sm_count)
    flops = attention_flops(AttentionShapes.of(rows), causal=causal)
    fit = record(name, _errors(fitted, rows, sm_count), held)
    small = core_rows(table, inside=False)
    small_flops = attention_flops(AttentionShapes.of(small), causal=causal)
    below = bands(small_flops, _errors(fitted, small, sm_count)) if len(small_flops) else ()
    return fitted.model_copy(update={"bands": bands(flops, held), "bands_small": below, "fit": fit})
