"""Constants of fused expert operators from measured tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpar.calibration.kernel_errors import bands, halves, record
from simpar.calibration.soft_l1 import soft_l1
from simpar.costs.kernel_tables import MICRO, alpha_of, columns, moe_name, read_rows, usable
from simpar.costs.moe import MoeShapes, moe_flops, moe_seconds, moe_shapes
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import Band, MoeConstants

Array = NDArray[np.float64]
CORE = 512
"""Fitted region: tokens of at least this."""
SIZES = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
_RIDGE = (0.05, 0.05, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02)
LOCAL_ROUTING = ("sglang_triton",)
"""Collectors that route every token to the rank's own experts."""


def read_table(path: Path, smallest: float) -> tuple[dict[str, Array], Array]:
    """(columns with `seconds`, alphas) of the rows with at least `smallest` tokens."""
    table = columns(path, (*SIZES, "dist", "us"))
    alphas = np.array([alpha_of(row["dist"]) for row in read_rows(path)])
    ok = usable(table, SIZES, "us") & (table["tokens"] >= smallest) & np.isfinite(alphas)
    return {**{name: table[name][ok] for name in SIZES}, "seconds": table["us"][ok] * MICRO}, alphas[ok]


def _subset(a: MoeShapes, mask: NDArray[np.bool_]) -> MoeShapes:
    return MoeShapes(**{name: getattr(a, name)[mask] for name in MoeShapes.__dataclass_fields__})


def _unpack(base: MoeConstants, x: Array) -> MoeConstants:
    rate, depth, bandwidth, permute, latency, token, power = (float(v) for v in np.exp(x[:7]))
    return base.model_copy(
        update={
            "rate_flops_per_s": rate,
            "k_overhead": depth,
            "bandwidth_bytes_per_s": bandwidth,
            "permute_bytes_per_s": permute,
            "latency_s": latency,
            "token_s": token,
            "overlap_power": float(np.clip(power, 0.5, 20.0)),
            "wave_beta": float(x[7]),
            "tile_exponent": float(x[8]),
            "ridge": tuple(float(v) for v in x[9:]),
        }
    )


def _fit(
    base: MoeConstants, shapes: MoeShapes, seconds: Array, hardware: HardwareProfile, first: Array | None = None
) -> tuple[MoeConstants, Array]:
    peak = hardware.peak_flops_per_s("fp8" if base.element_bytes == 1.0 else "bf16")
    bandwidth = 0.88 * hardware.gpu.memory_bandwidth.value
    mean = np.array(
        [
            np.log(0.7 * peak),
            np.log(150.0),
            np.log(bandwidth),
            np.log(0.6 * bandwidth),
            np.log(25e-6),
            np.log(1e-9),
            np.log(3.0),
            0.2,
            0.1,
            *([0.0] * len(_RIDGE)),
        ]
    )
    sigma = np.array([0.4, 0.5, 0.2, 0.4, 0.5, 1.0, 0.5, 0.3, 0.15, *_RIDGE])

    def predict(x: Array) -> Array:
        return np.asarray(np.log(moe_seconds(_unpack(base, x), float(hardware.gpu.sm_count.value), shapes)))

    x, _ = soft_l1(predict, np.log(seconds), mean if first is None else first, mean, sigma, scale=0.06)
    return _unpack(base, x), x


def fit_table(path: Path, hardware: HardwareProfile) -> MoeConstants:
    """Constants of one measured table."""
    _, dtype, library = moe_name(path)
    table, alphas = read_table(path, CORE)
    local = library in LOCAL_ROUTING
    shapes = moe_shapes(table, alphas, local_routing=local)
    base = MoeConstants(
        library=library,
        mode="burst",
        dtype=dtype,
        local_routing=local,
        rate_flops_per_s=1e12,
        k_overhead=0.0,
        bandwidth_bytes_per_s=1e12,
        permute_bytes_per_s=1e12,
        latency_s=0.0,
        token_s=0.0,
        wave_beta=0.0,
        tile_exponent=0.0,
        overlap_power=3.0,
        element_bytes=1.0 if dtype.startswith("fp8") else 2.0,
    )
    sm_count = float(hardware.gpu.sm_count.value)

    def errors(c: MoeConstants, at: NDArray[np.bool_]) -> Array:
        return np.asarray(np.log(moe_seconds(c, sm_count, _subset(shapes, at))) - np.log(table["seconds"][at]))

    fitted, x = _fit(base, shapes, table["seconds"], hardware)
    everything = np.ones(len(alphas), dtype=bool)
    held = np.empty(len(alphas))
    mask = halves(table["hidden"] + table["inter"], table["experts"], table["tp"], table["ep"])
    for half in (mask, ~mask):
        other, _ = _fit(base, _subset(shapes, ~half), table["seconds"][~half], hardware, x)
        held[half] = errors(other, half)
    fit = record(path.name, errors(fitted, everything), held)
    every, every_alpha = read_table(path, 1.0)
    few = every["tokens"] < CORE
    below: tuple[Band, ...] = ()
    if few.any():
        small = _subset(moe_shapes(every, every_alpha, local_routing=local), few)
        logs = np.log(moe_seconds(fitted, sm_count, small)) - np.log(every["seconds"][few])
        below = bands(moe_flops(small), logs)
    return fitted.model_copy(update={"bands": bands(moe_flops(shapes), held), "bands_small": below, "fit": fit})
