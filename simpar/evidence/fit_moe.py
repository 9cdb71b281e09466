"""Constants of fused expert operators from measured tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simpar.evidence.kernel_errors import bands, record
from simpar.evidence.kernel_law import Law, Rows, where
from simpar.evidence.kernel_tables import SIZES, columns, core, measured_rows, moe_name
from simpar.evidence.moe import moe_flops, moe_seconds, moe_shapes
from simpar.evidence.robust import Prior
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import MoeConstants

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
_HEIGHTS = ((-1.5, 0.4), (-1.0, 0.4), (-0.5, 0.3), (-0.2, 0.2))
"""Logarithms of the efficiency of tile heights, and their priors' widths; the largest is the unit."""
_RIDGE = (0.05, 0.05, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02)


def _priors(base: MoeConstants, hardware: HardwareProfile) -> list[Prior]:
    peak = hardware.peak_flops_per_s("fp8" if base.element_bytes == 1.0 else "bf16")
    bandwidth = 0.88 * hardware.gpu.memory_bandwidth.value
    triton = "triton" in base.library
    found = [
        Prior("rate_flops_per_s", 0.7 * peak, 0.4),
        Prior("k_overhead", 150.0, 0.5),
        Prior("bandwidth_bytes_per_s", bandwidth, 0.2),
        Prior("permute_bytes_per_s", 0.6 * bandwidth, 0.4),
        Prior("latency_s", 25e-6, 0.5),
        Prior("token_s", 1e-9, 1.0),
        Prior("routing_choice_s", 1e-9, 1.5),
        Prior("routing_expert_s", 1e-11, 1.5),
        Prior("overlap_power", 3.0, 0.5),
        Prior("wave_beta", 0.2, 0.3, log=False),
        Prior("reread", 0.5, 0.3, log=False),
    ]
    if (
        triton and not base.local_routing
    ):  # a Triton kernel keeps a row for every choice; the others drop those of experts elsewhere
        found.append(Prior("remote_share", 0.5, 0.3, log=False))
    found.append(Prior("column_exponent", 0.1, 0.15, log=False))
    if triton:
        found.append(Prior("unaligned", 0.0, 0.2, log=False))
    if base.tuned:
        widths = (("untuned", 0.5, 0.3), ("untuned_deep", 0.0, 0.1), ("untuned_wide", 0.0, 0.05))
        found += [Prior(*one, log=False) for one in widths]
    found += [Prior(f"height_efficiency.{i}", float(np.exp(mean)), sigma) for i, (mean, sigma) in enumerate(_HEIGHTS)]
    return found + [Prior(f"ridge.{i}", 0.0, sigma, log=False) for i, sigma in enumerate(_RIDGE)]


def fit_table(path: Path, hardware: HardwareProfile) -> MoeConstants:
    """Constants of one measured table."""
    gpu, dtype, library = moe_name(path)
    every = measured_rows("moe", columns(path, (*SIZES["moe"], "dist", "us")))
    table, few = (where(mask, every) for mask in (core(every), ~core(every)))
    local = library in LOCAL_ROUTING
    rows, small = (Rows(moe_shapes(part, part["alpha"], local_routing=local), part["seconds"]) for part in (table, few))
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
    law = Law(base, _priors(base, hardware), lambda c, rows: moe_seconds(c, sm_count, rows.shapes), scale=0.06)
    fitted, x = law.fit(rows)
    layers = np.stack([table["hidden"], table["inter"], table["experts"]], 1)
    # A whole layer at a time: every row is predicted by constants that never saw its model.
    held = law.held_out(rows, ((layers == layer).all(1) for layer in np.unique(layers, axis=0)), x)
    # Whole layers held out are harsher than the rows of known layers; the interval serves both.
    both = np.concatenate([held, law.errors(fitted, rows)])
    reached = {
        "bands": bands(np.tile(moe_flops(rows.shapes), 2), both),
        "bands_small": bands(moe_flops(small.shapes), law.errors(fitted, small)),
        "fit": record(path.name, law.errors(fitted, rows), held),
    }
    return fitted.model_copy(update=reached)
