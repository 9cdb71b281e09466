"""Constants of fused expert operators from measured tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simpar.evidence.kernel_errors import bands, record
from simpar.evidence.kernel_tables import MICRO, alpha_of, columns, moe_name, read_rows, usable
from simpar.evidence.moe import MoeShapes, moe_flops, moe_seconds, moe_shapes
from simpar.evidence.robust import soft_l1
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import Band, MoeConstants

Array = NDArray[np.float64]
CORE = 512
"""Fitted region: tokens of at least this."""
SIZES = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
LOCAL_ROUTING = ("sglang_triton",)
"""Collectors that route every token to the rank's own experts."""
TUNED = {
    "a100": (
        *((1, width) for width in (1792, 3584, 7168, 14336)),
        *((8, width) for width in (1792, 2048, 3584, 4096, 7168)),
        *((16, width) for width in (1344, 2688, 3072, 7168, 14336)),
        (64, 1280),
        (128, 192),
    )
}
"""(Local experts, width) for which the Triton expert kernel of serving stacks ships a bf16 configuration for a GPU: names of the
files in vllm-project/vllm, model_executor/layers/fused_moe/configs. H100 rows show no difference."""
_LOGS = (
    "rate_flops_per_s",
    "k_overhead",
    "bandwidth_bytes_per_s",
    "permute_bytes_per_s",
    "latency_s",
    "token_s",
    "routing_choice_s",
    "routing_expert_s",
    "overlap_power",
)
_PLAIN = ("wave_beta", "reread", "remote_share", "column_exponent", "unaligned", "untuned", "untuned_deep", "untuned_wide")
_HEIGHTS = 4
"""Fitted tile heights; the largest is the unit."""
_RIDGE = (0.05, 0.05, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02)


def read_table(path: Path, smallest: float) -> tuple[dict[str, Array], Array]:
    """(columns with `seconds`, alphas) of the rows with at least `smallest` tokens."""
    table = columns(path, (*SIZES, "dist", "us"))
    alphas = np.array([alpha_of(row["dist"]) for row in read_rows(path)])
    ok = usable(table, SIZES, "us") & (table["tokens"] >= smallest) & np.isfinite(alphas)
    return {**{name: table[name][ok] for name in SIZES}, "seconds": table["us"][ok] * MICRO}, alphas[ok]


def _subset(a: MoeShapes, mask: NDArray[np.bool_]) -> MoeShapes:
    return MoeShapes(**{name: getattr(a, name)[mask] for name in MoeShapes.__dataclass_fields__})


def _unpack(base: MoeConstants, x: Array) -> MoeConstants:
    first, second = len(_LOGS), len(_LOGS) + len(_PLAIN)
    update: dict[str, Any] = dict(zip(_LOGS, (float(v) for v in np.exp(x[:first])), strict=True))
    update |= dict(zip(_PLAIN, (float(v) for v in x[first:second]), strict=True))
    update["overlap_power"] = float(np.clip(update["overlap_power"], 0.5, 20.0))
    update["reread"] = float(np.clip(update["reread"], 0.0, 1.5))
    update["remote_share"] = max(update["remote_share"], 0.0)
    heights = np.exp(x[second : second + _HEIGHTS])
    update["height_efficiency"] = (*(float(v) for v in heights), 1.0)
    update["ridge"] = tuple(float(v) for v in x[second + _HEIGHTS :])
    return base.model_copy(update=update)


def _priors(base: MoeConstants, hardware: HardwareProfile) -> tuple[Array, Array]:
    """(mean, sigma) of the parameters, in the order of `_unpack`."""
    peak = hardware.peak_flops_per_s("fp8" if base.element_bytes == 1.0 else "bf16")
    bandwidth = 0.88 * hardware.gpu.memory_bandwidth.value
    logs = (0.7 * peak, 150.0, bandwidth, 0.6 * bandwidth, 25e-6, 1e-9, 1e-9, 1e-11, 3.0)
    log_sigma = (0.4, 0.5, 0.2, 0.4, 0.5, 1.0, 1.5, 1.5, 0.5)
    triton, untuned = "triton" in base.library, bool(base.tuned)
    # A Triton kernel keeps a row for every choice; the others drop those of experts elsewhere.
    keeps = triton and not base.local_routing
    plain = (0.2, 0.5, 0.5 if keeps else 0.0, 0.1, 0.0, 0.5 if untuned else 0.0, 0.0, 0.0)
    plain_sigma = (0.3, 0.3, 0.3 * keeps, 0.15, 0.2 * triton, 0.3 * untuned, 0.1 * untuned, 0.05 * untuned)
    heights, height_sigma = (-1.5, -1.0, -0.5, -0.2), (0.4, 0.4, 0.3, 0.2)
    mean = np.array([*np.log(logs), *plain, *heights, *([0.0] * len(_RIDGE))])
    return mean, np.array([*log_sigma, *plain_sigma, *height_sigma, *_RIDGE])


def _fit(
    base: MoeConstants, shapes: MoeShapes, seconds: Array, hardware: HardwareProfile, first: Array | None = None
) -> tuple[MoeConstants, Array]:
    mean, sigma = _priors(base, hardware)

    def predict(x: Array) -> Array:
        return np.asarray(np.log(moe_seconds(_unpack(base, x), float(hardware.gpu.sm_count.value), shapes)))

    x = soft_l1(predict, np.log(seconds), mean if first is None else first, mean, sigma, scale=0.06)
    return _unpack(base, x), x


def fit_table(path: Path, hardware: HardwareProfile) -> MoeConstants:
    """Constants of one measured table."""
    gpu, dtype, library = moe_name(path)
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
        plan="even" if "trtllm" in library else "exact",
        tuned=TUNED.get(gpu, ()) if "triton" in library else (),
        overlap_power=3.0,
        element_bytes=1.0 if dtype.startswith("fp8") else 2.0,
    )
    sm_count = float(hardware.gpu.sm_count.value)

    def errors(c: MoeConstants, at: NDArray[np.bool_]) -> Array:
        return np.asarray(np.log(moe_seconds(c, sm_count, _subset(shapes, at))) - np.log(table["seconds"][at]))

    fitted, x = _fit(base, shapes, table["seconds"], hardware)
    everything = np.ones(len(alphas), dtype=bool)
    held = np.empty(len(alphas))
    layers = np.stack([table["hidden"], table["inter"], table["experts"]], 1)
    # A whole layer at a time: every row is predicted by constants that never saw its model.
    for layer in np.unique(layers, axis=0):
        own = (layers == layer).all(1)
        other, _ = _fit(base, _subset(shapes, ~own), table["seconds"][~own], hardware, x)
        held[own] = errors(other, own)
    fit = record(path.name, errors(fitted, everything), held)
    every, every_alpha = read_table(path, 1.0)
    few = every["tokens"] < CORE
    below: tuple[Band, ...] = ()
    if few.any():
        small = _subset(moe_shapes(every, every_alpha, local_routing=local), few)
        logs = np.log(moe_seconds(fitted, sm_count, small)) - np.log(every["seconds"][few])
        below = bands(moe_flops(small), logs)
    # Whole layers held out are harsher than the rows of known layers; the interval serves both.
    both = np.concatenate([held, errors(fitted, everything)])
    own_bands = bands(np.tile(moe_flops(shapes), 2), both)
    return fitted.model_copy(update={"bands": own_bands, "bands_small": below, "fit": fit})
