"""Rows of `simumax_ops.csv`: training-layout GEMMs, grouped GEMMs and fused attention of one machine per GPU.

Layouts: TN = forward, NN = input gradient, NT with accumulate = weight gradient; m, n, k are each product's own. The fused
attention rows give s in column m, query heads in k and key/value heads in n; FLOP rates count the full square for a causal
mask, and backward counts 2.5 times the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from simpar.evidence.kernel_tables import MICRO, read_rows

LAYOUTS: Final = {
    "forward": ("TN", "fwd", "", 2.0), "dgrad": ("NN", "bwd_grad_act", "", 2.0), "wgrad": ("NT", "bwd_grad_w", "bf16", 4.0),
    "wgrad_accumulate": ("NT", "bwd_grad_w", "fp32", 8.0),
}  # fmt: skip
"""Direction -> layout of its products, stage of its grouped ones, what they add into ("" = nothing), bytes per output element."""
FULL_SQUARE: Final = 4.0


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One measured op.

    Attributes:
        line: in the file; groups: of a grouped GEMM, else 1; m, n, k: sizes (attention: s, kv heads, mean head width).
        output_bytes: traffic per output element (accumulation reads it too).
        flops: attention only, causal counted as the triangle, backward 2.5 x.
    """

    line: int
    groups: int
    m: int
    n: int
    k: int
    seconds: float
    output_bytes: float = 2.0
    flops: float = 0.0
    batch: int = 1
    heads: int = 1
    head_dim: int = 0
    v_head_dim: int = 0


@lru_cache(maxsize=4)
def _table(path: Path) -> tuple[dict[str, str], ...]:
    return tuple(read_rows(path))


def machines(path: Path) -> list[str]:
    """Machines of the table."""
    return sorted({row["gpu"] for row in _table(path)})


def _timed(path: Path, machine: str, op: str, stage: str, figure: str = "us") -> Iterator[tuple[int, dict[str, str]]]:
    """(Line, row) of the rows of an op in a layout or stage ("" = any) that have this figure."""
    for line, r in enumerate(_table(path), 2):
        if r["gpu"] == machine and r["op"] == op and stage in ("", r["layout_or_stage"]) and r[figure]:
            yield line, r


def gemm_rows(path: Path, machine: str, direction: str) -> list[TrainingRow]:
    """GEMMs of one layout; `wgrad` adds into bf16, `wgrad_accumulate` into fp32."""
    layout, _, into, traffic = LAYOUTS[direction]
    return [
        TrainingRow(line, 1, int(r["m"]), int(r["n"]), int(r["k"]), float(r["us"]) * MICRO, traffic)
        for line, r in _timed(path, machine, "matmul", layout)
        if r["accumulate"] == str(bool(into)) and into in ("", r["out_dtype"])
    ]


def grouped_rows(path: Path, machine: str, direction: str) -> list[TrainingRow]:
    """Grouped GEMMs of one direction, as products of the direction's own m, n, k for each group.

    The table does not say what a weight gradient adds into. Where it lists a shape twice, the slower row added into fp32 and
    the faster one into bf16: at few rows per group both move 5.0-5.4 TB/s, of 8 and of 4 bytes per weight.
    """
    _, stage, into, traffic = LAYOUTS[direction]
    found = []
    for line, r in _timed(path, machine, "group_matmul", stage):
        m, n, k = int(r["m"]), int(r["n"]), int(r["k"])
        own = {"forward": (m, n, k), "dgrad": (m, k, n)}.get(direction, (n, k, m))
        found.append(TrainingRow(line, int(r["b"]), *own, float(r["us"]) * MICRO, traffic))
    return _added_into(found, narrow=into == "bf16") if into else found


def _added_into(rows: list[TrainingRow], *, narrow: bool) -> list[TrainingRow]:
    """Of shapes listed twice the faster rows (`narrow`), else the slower ones and those listed once."""
    slowest: dict[tuple[int, ...], float] = {}
    for r in rows:
        key = (r.groups, r.m, r.n, r.k)
        slowest[key] = max(slowest.get(key, 0.0), r.seconds)
    return [r for r in rows if (r.seconds < slowest[r.groups, r.m, r.n, r.k]) == narrow]


def sdp_rows(path: Path, machine: str, direction: str) -> list[TrainingRow]:
    """Fused attention rows (contiguous operands), seconds from the stated rate."""
    found = []
    for line, r in _timed(path, machine, {"forward": "sdp_fwd", "backward": "sdp_bwd"}[direction], "", "tflops"):
        extra = dict(part.split("=") for part in r["extra"].split(";") if "=" in part)
        query, value = int(extra.get("qk", 128)), int(extra.get("v", 128))
        s, heads, batch = int(r["m"]), int(r["k"]), int(r["b"])
        square = FULL_SQUARE * batch * heads * float(s) * s * (query + value) / 2.0 * (1.0 if direction == "forward" else 2.5)
        seconds = square / (float(r["tflops"]) * 1e12)
        found.append(
            TrainingRow(line, 1, s, int(r["n"]), (query + value) // 2, seconds, 2.0, square / 2.0, batch, heads, query, value)
        )
    return found
