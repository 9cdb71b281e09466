"""Rows of `simumax_ops.csv`: training-layout GEMMs, grouped GEMMs and fused attention of one machine per GPU.

Layouts: TN = forward, NN = input gradient, NT with accumulate = weight gradient; m, n, k are each product's own. The fused
attention rows give s in column m, query heads in k and key/value heads in n; FLOP rates count the full square for a causal
mask, and backward counts 2.5 times the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from simpar.evidence.kernel_tables import MICRO, read_rows

LAYOUTS: Final = {"forward": ("TN", "False"), "dgrad": ("NN", "False"), "wgrad": ("NT", "True"), "wgrad_accumulate": ("NT", "True")}
STAGES: Final = {"forward": "fwd", "dgrad": "bwd_grad_act", "wgrad": "bwd_grad_w", "wgrad_accumulate": "bwd_grad_w"}
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


def gemm_rows(path: Path, machine: str, direction: str) -> list[TrainingRow]:
    """GEMMs of one layout; `wgrad` adds into bf16, `wgrad_accumulate` into fp32."""
    layout, accumulate = LAYOUTS[direction]
    dtype = {"wgrad": "bf16", "wgrad_accumulate": "fp32"}.get(direction)
    traffic = {"wgrad": 4.0, "wgrad_accumulate": 8.0}.get(direction, 2.0)
    return [
        TrainingRow(line, 1, int(r["m"]), int(r["n"]), int(r["k"]), float(r["us"]) * MICRO, traffic)
        for line, r in enumerate(_table(path), 2)
        if r["gpu"] == machine
        and r["op"] == "matmul"
        and r["layout_or_stage"] == layout
        and r["accumulate"] == accumulate
        and r["us"]
        and (dtype is None or r["out_dtype"] == dtype)
    ]


def grouped_rows(path: Path, machine: str, direction: str) -> list[TrainingRow]:
    """Grouped GEMMs of one direction, as products of the direction's own m, n, k for each group.

    The table does not say what a weight gradient adds into. Where it lists a shape twice, the slower row added into fp32 and
    the faster one into bf16: at few rows per group both move 5.0-5.4 TB/s, of 8 and of 4 bytes per weight.
    """
    found = []
    for line, r in enumerate(_table(path), 2):
        if r["gpu"] != machine or r["op"] != "group_matmul" or r["layout_or_stage"] != STAGES[direction] or not r["us"]:
            continue
        m, n, k = int(r["m"]), int(r["n"]), int(r["k"])
        own = {"forward": (m, n, k), "dgrad": (m, k, n)}.get(direction, (n, k, m))
        traffic = {"wgrad": 4.0, "wgrad_accumulate": 8.0}.get(direction, 2.0)
        found.append(TrainingRow(line, int(r["b"]), *own, float(r["us"]) * MICRO, traffic))
    return found if not direction.startswith("wgrad") else _added_into(found, narrow=direction == "wgrad")


def _added_into(rows: list[TrainingRow], *, narrow: bool) -> list[TrainingRow]:
    """Of shapes listed twice the faster rows (`narrow`), else the slower ones and those listed once."""
    slowest: dict[tuple[int, ...], float] = {}
    for r in rows:
        key = (r.groups, r.m, r.n, r.k)
        slowest[key] = max(slowest.get(key, 0.0), r.seconds)
    return [r for r in rows if (r.seconds < slowest[r.groups, r.m, r.n, r.k]) == narrow]


def sdp_rows(path: Path, machine: str, direction: str) -> list[TrainingRow]:
    """Fused attention rows (contiguous operands), seconds from the stated rate."""
    op = {"forward": "sdp_fwd", "backward": "sdp_bwd"}[direction]
    found = []
    for line, r in enumerate(_table(path), 2):
        if r["gpu"] != machine or r["op"] != op or not r["tflops"]:
            continue
        extra = dict(part.split("=") for part in r["extra"].split(";") if "=" in part)
        query, value = int(extra.get("qk", 128)), int(extra.get("v", 128))
        s, heads, batch = int(r["m"]), int(r["k"]), int(r["b"])
        square = FULL_SQUARE * batch * heads * float(s) * s * (query + value) / 2.0 * (1.0 if direction == "forward" else 2.5)
        seconds = square / (float(r["tflops"]) * 1e12)
        found.append(
            TrainingRow(line, 1, s, int(r["n"]), (query + value) // 2, seconds, 2.0, square / 2.0, batch, heads, query, value)
        )
    return found
