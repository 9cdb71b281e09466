"""Seconds per step of a run that prints nothing but TFLOP/s or MFU: the FLOPs that it says it counts, of its own model."""

from __future__ import annotations

import re
from typing import Final

from simpar.evidence.row_framework import framework_of
from simpar.evidence.row_values import Row
from simpar.parallel.layout import Layout, recomputed_flops
from simpar.result.ideal import mfu_peak_flops_per_s, uncounted_pairs_flops
from simpar.specs.framework_releases import Month, month_of
from simpar.specs.scenario import Scenario

_HARDWARE: Final = re.compile(r"hardware|\bhfu\b", re.IGNORECASE)
_AGAIN: Final = re.compile(r"(?<!no )(?<!without )recomput", re.IGNORECASE)
_WHOLE: Final = re.compile(r"non-?causal|full attention|whole (?:score|attention)|12\s*[*x·]?\s*l\b", re.IGNORECASE)
_CAUSAL: Final = re.compile(r"causal|\bmodel\b", re.IGNORECASE)
_UNCOUNTED: Final = (
    "TFLOP/s or MFU alone, and tflops_def or mfu_def does not say of what: model FLOPs, with causal or with full attention, or "
    "hardware FLOPs"
)


_MEGATRON: Final[tuple[tuple[Month, str], ...]] = (((0, 0), ""), ((2023, 11), "non-causal"), ((2025, 4), "causal"))
_LOGS: Final[dict[str, tuple[tuple[Month, str], ...]]] = {
    "megatron-core": _MEGATRON, "megatron-bridge": _MEGATRON, "torchtitan": (((0, 0), "non-causal"),),
}  # fmt: skip
"""Framework -> what its log counts, from a month on. Megatron-LM's --log-throughput and Megatron-Bridge's utils/flop_utils.py:
model FLOPs (training.py num_floating_point_operations: 2748e7c7 of 2023-11; half of the score matrix since 8873b55d of 2025-03,
latent attention's products since d4f9a6f7 of 2025-04). Torchtitan's: active weights but the input embedding, and the score matrix
whole (12 l h q t of its utils.py of 2024, models/utils.py get_moe_model_nparams_and_flops of 2026-08)."""
_LEAST_PERCENT: Final = 1.0
"""MFU is in percent; one of at most this may as well be a share of 1, so no step time is taken from it."""


def seconds_from_flops(row: Row, scenario: Scenario) -> float | None:
    """Seconds of a step whose FLOPs run at the stated rate; None where that counts others or does not say.

    Model FLOPs have causal attention, half of the score matrix, unless the row says that it is counted whole, as recent papers do,
    or names a log that does.
    Hardware FLOPs have it whole unless the row says causal, and layers that are recomputed once more, as Narayanan et al. 2021
    (arXiv 2104.04473, appendix) count them.
    """
    layout = Layout.of(scenario, scenario.plan.pp * scenario.plan.virtual_stages)
    rate, words = _rate(row, layout)
    words = _as_logged(words, scenario)
    hardware = _HARDWARE.search(words) is not None
    whole = _WHOLE.search(words) is not None or (hardware and not re.search(r"causal", words, re.IGNORECASE))
    if not rate or (not hardware and (_AGAIN.search(words) or not (whole or _CAUSAL.search(words)))):
        return None
    flops = layout.model_flops + (uncounted_pairs_flops(layout) if whole else 0.0)
    if hardware:
        if layout.recompute.granularity == "selective":
            return None
        flops += recomputed_flops(layout) + (uncounted_pairs_flops(layout, again=True) if whole else 0.0)
    return flops / (rate * scenario.world_size)


def _as_logged(words: str, scenario: Scenario) -> str:
    """`words`, or what the log counts that they name and say no more of."""
    if _HARDWARE.search(words) or _WHOLE.search(words) or _CAUSAL.search(words) or not words:
        return words
    name, _ = framework_of({"framework": words})
    if name not in _LOGS:
        return words
    month = month_of(scenario.framework, scenario.framework_version)
    return f"{words}: {next(counts for since, counts in reversed(_LOGS[name]) if month >= since)}"


def _rate(row: Row, layout: Layout) -> tuple[float, str]:
    """FLOP/s of a GPU that `row` states, as such or as a share of a peak, and what it says it counts."""
    if stated := row.get("tflops_per_gpu"):
        return stated * 1e12, str(row.get("tflops_def") or "")
    peak = (row.get("peak_tflops_used") or 0.0) * 1e12 or mfu_peak_flops_per_s(layout)
    share = row.get("mfu") or 0.0
    return (share / 100.0 * peak if share > _LEAST_PERCENT else 0.0), str(row.get("mfu_def") or "")


def uncounted(row: Row) -> str:
    """Why the FLOP/s or MFU of `row` tell no step time; "" where it states neither."""
    if not row.get("tflops_per_gpu") and 0.0 < (row.get("mfu") or 0.0) <= _LEAST_PERCENT:
        return f"mfu {row['mfu']:g} is in percent and too small for one; a share of 0.45 is written 45"
    return _UNCOUNTED if row.get("tflops_per_gpu") or row.get("mfu") else ""


__all__ = ["seconds_from_flops", "uncounted"]
