"""Errors of predicted kernels by table, op and size, and the tolerances they are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simpar.evidence.kernel_blocks import Block

Array = NDArray[np.float64]
SIZES: Final = (
    (0.0, "< 1 GFLOP"),
    (1e9, "1-10 GFLOP"),
    (1e10, "10-100 GFLOP"),
    (1e11, "0.1-1 TFLOP"),
    (1e12, "1-10 TFLOP"),
    (1e13, ">= 10 TFLOP"),
)
"""Size classes by FLOPs of one op."""
CORE: Final = "core"
"""The region the tolerances are stated for: GEMM m, n, k >= 512; attention s >= 1024; experts tokens >= 512; others all rows."""

TOLERANCES: Final[dict[str, tuple[float, float]]] = {
    "gemm": (0.035, 0.10),
    "gemm_cold": (0.035, 0.14),
    "gemm_blackwell": (0.05, 0.14),
    "gemm_fp8": (0.04, 0.11),
    "gemm_fp8_block": (0.05, 0.21),
    "attention": (0.04, 0.11),
    "attention_sustained": (0.055, 0.14),
    "moe": (0.07, 0.25),
    "moe_bf16_cutlass": (0.07, 0.30),
    "gemm_training": (0.07, 0.35),
    "grouped_gemm": (0.25, 0.65),
    "attention_training": (0.10, 0.35),
    "attention_chart": (0.12, 0.35),
    "memory_bound": (0.05, 0.45),
}
"""Kind of table -> (median, p90) of |predicted / measured - 1| past which the command fails: what a price has to reach, and
where measurements of like shapes fall into two states (cold operands, block-scaled fp8, attention at the power cap, experts
whose library at times picks a slow kernel), what it reaches with a margin."""
BLACKWELL: Final = ("b200", "gb200", "b300", "gb300")
FEWEST: Final = 20
"""Rows that a group needs to be judged."""
UNJUDGED: Final = ("peak-scaled", "default")
"""Groups priced with other constants than their own are shown, not judged."""


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Errors of one group of rows.

    Attributes:
        key: table, op, gpu, dtype, size, constants.
        rows, skipped: with and without a prediction.
        mape, median, p90, bias, coverage: of predicted / measured - 1; coverage of the 80 % interval.
        allowed: (median, p90), None where the group is not judged.
    """

    key: dict[str, str]
    rows: int
    skipped: int
    mape: float | None
    median: float | None
    p90: float | None
    bias: float | None
    coverage: float | None
    allowed: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """Flat fields: the key's and the errors."""
        return {
            **self.key,
            "rows": self.rows,
            "skipped": self.skipped,
            "mape": self.mape,
            "median": self.median,
            "p90": self.p90,
            "bias": self.bias,
            "coverage": self.coverage,
            "tolerance": list(self.allowed) if self.allowed else None,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Blocks of predicted rows, their groups, and the groups past their tolerance."""

    blocks: tuple[Block, ...]
    groups: tuple[GroupErrors, ...]
    failures: tuple[str, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as `simpar validate --json` prints it."""
        for block in self.blocks:
            yield from block.rows()

    def as_json(self) -> dict[str, Any]:
        """The whole report; large folders have half a million rows."""
        return {"rows": list(self.rows()), "groups": [g.as_json() for g in self.groups], "failures": list(self.failures)}


def _errors(blocks: Sequence[Block], masks: Sequence[NDArray[np.bool_]], key: dict[str, str]) -> GroupErrors | None:
    predicted = np.concatenate([b.predicted[m] for b, m in zip(blocks, masks, strict=True)])
    measured = np.concatenate([b.measured[m] for b, m in zip(blocks, masks, strict=True)])
    low = np.concatenate([b.low[m] for b, m in zip(blocks, masks, strict=True)])
    high = np.concatenate([b.high[m] for b, m in zip(blocks, masks, strict=True)])
    ok = np.isfinite(predicted)
    if not ok.any():
        return GroupErrors(key, 0, int((~ok).sum()), None, None, None, None, None) if (~ok).any() else None
    error = predicted[ok] / measured[ok] - 1.0
    inside = (measured[ok] >= low[ok]) & (measured[ok] <= high[ok])
    size = np.abs(error)
    return GroupErrors(
        key,
        int(ok.sum()),
        int((~ok).sum()),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(error.mean()),
        float(inside.mean()),
    )


def _key(block: Block, size: str) -> dict[str, str]:
    return {
        "table": block.table,
        "op": block.op,
        "gpu": block.gpu,
        "dtype": block.dtype,
        "size": size,
        "constants": block.constants,
    }


def _allowed(block: Block, rows: int) -> tuple[float, float] | None:
    if rows < FEWEST or block.constants in UNJUDGED:
        return None
    return TOLERANCES.get(_kind(block))


def _kind(block: Block) -> str:
    """The key of TOLERANCES."""
    if block.op == "gemm" and block.dtype.startswith("fp8"):
        return "gemm_fp8_block" if block.dtype.endswith("block") else "gemm_fp8"
    if block.op == "gemm" and block.gpu in BLACKWELL:
        return "gemm_blackwell"
    if block.op == "gemm" and "_cold/" in block.constants:
        return "gemm_cold"
    if block.op == "attention" and block.constants.endswith("/sustained"):
        return "attention_sustained"
    if block.op == "moe" and block.dtype == "bf16" and block.constants.startswith("trtllm_cutlass"):
        return "moe_bf16_cutlass"
    return block.op


def summarise(blocks: Sequence[Block]) -> list[GroupErrors]:
    """Per block: the stated region, everything, and each size class."""
    found: list[GroupErrors] = []
    for block in blocks:
        everything = np.ones(len(block), dtype=bool)
        core = _errors([block], [block.core], _key(block, CORE)) if block.core.any() else None
        if core is not None:
            found.append(replace(core, allowed=_allowed(block, core.rows)))
        whole = _errors([block], [everything], _key(block, "all"))
        if whole is not None:
            found.append(whole)
        if not block.flops.any():
            continue
        for (edge, name), above in zip(SIZES, (*[e for e, _ in SIZES[1:]], np.inf), strict=True):
            mask = (block.flops >= edge) & (block.flops < above)
            part = _errors([block], [mask], _key(block, name)) if mask.any() else None
            if part is not None:
                found.append(part)
    return found


def judge(groups: Sequence[GroupErrors]) -> list[str]:
    """One line per group past its tolerance."""
    lines = []
    for g in groups:
        if g.allowed is None or g.median is None or g.p90 is None:
            continue
        if g.median > g.allowed[0] or g.p90 > g.allowed[1]:
            lines.append(
                f"{g.key['table']} {g.key['op']} {g.key['dtype']}: median {g.median:.1%}, p90 {g.p90:.1%} "
                f"past {g.allowed[0]:.0%} / {g.allowed[1]:.0%} ({g.rows} rows)"
            )
    return lines
