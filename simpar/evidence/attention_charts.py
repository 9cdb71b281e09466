"""Published charts of attention (FlashAttention-2/3/4, cuDNN): TFLOP/s by length at 16k tokens and hidden size 2048."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from simpar.evidence.kernel_tables import read_rows
from simpar.evidence.robust import Array

LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS: Final = 16384
WIDTH: Final = 2048
PASS_FLOPS: Final = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
"""FLOPs of a pass over the forward's, as the charts count them."""
_GPUS: Final = {"a100-sxm4-80": "a100", "h100-sxm5": "h100", "b200": "b200", "b300?": "b300"}


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One curve.

    Attributes:
        gpu: short name; label: the chart's own; kernel: fa2, fa3, fa4, cudnn; which: fwd, bwd, fwd+bwd.
        rates: TFLOP/s at LENGTHS, NaN where not shown.
    """

    gpu: str
    label: str
    kernel: str
    which: str
    head_dim: int
    causal: bool
    fp8: bool
    rates: Array


def _kernel(text: str) -> str:
    low = text.lower()
    return "cudnn" if low.startswith("cudnn") else low[:3]


def chart_rows(path: Path) -> list[ChartRow]:
    """The curves of `flash_attention_charts.csv`; rows with an unreadable head size or pass are left out."""
    found = []
    for row in read_rows(path):
        if row.get("pass") not in PASS_FLOPS or not (row.get("head_dim") or "").isdigit():
            continue
        rates = np.array([float(row[f"s{s}"]) if row.get(f"s{s}") else np.nan for s in LENGTHS])
        found.append(
            ChartRow(
                _GPUS.get(row["gpu"].lower(), row["gpu"].lower().split("-")[0]),
                row["impl"],
                _kernel(row["impl"]),
                row["pass"],
                int(row["head_dim"]),
                row["causal"] == "1",
                "fp8" in row["impl"].lower(),
                rates,
            )
        )
    return found


def chart_seconds(row: ChartRow) -> Array:
    """Seconds of the row's pass at LENGTHS (NaN where not shown)."""
    lengths = np.array(LENGTHS, dtype=float)
    flops = 4.0 * TOKENS * lengths * WIDTH * (0.5 if row.causal else 1.0) * PASS_FLOPS[row.which]
    return np.asarray(flops / (row.rates * 1e12))
