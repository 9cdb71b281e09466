"""Rows of `simumax_ops.csv`: training-layout GEMMs, grouped GEMMs and fused attention of one machine per GPU.

Layouts: TN = forward, NN = input gradient, NT with accumulate = weight gradient; m, n, k are each product's own. The fused
attention rows give s in column m, query heads in k and key/value heads in n; FLOP rates count the full square for a causal
mask, and backward counts 2.5 times the forward.

Each machine is in its own power state, so each gets its own set of GEMM constants: the forward rows refine the GPU's fitted
constants (same form, priors at those), and the input- and weight-gradient rows give the direction factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_seconds
from simpar.costs.compute import GemmShapes, gemm_seconds
from simpar.costs.gemm_tiles import geometry
from simpar.costs.kernels import SMALL_GEMM
from simpar.evidence.attention_fits import unfitted
from simpar.evidence.fit_gemm import Products, flops_of, law_of
from simpar.evidence.kernel_law import Law, Rows, bands, halves, interval, record
from simpar.evidence.kernel_tables import MICRO, read_rows
from simpar.evidence.robust import Array, Prior
from simpar.specs.kernel_constants import (
    AttentionConstants,
    DirectionConstants,
    GemmConstants,
    GroupedConstants,
)

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


LIBRARY = "transformer_engine"
STREAMS = (1, 2, 4)
"""Experts' GEMMs that may run beside each other."""
_SIGMA = {
    "rate_flops_per_s": 0.3,
    "size_exponent": 0.05,
    "wave_beta": 0.2,
    "wave_first": 0.2,
    "k_overhead": 0.4,
    "latency_s": 0.4,
    "overlap_power": 0.4,
    "bandwidth_bytes_per_s": 0.1,
    "unaligned": 0.03,
}


def _priors(parent: GemmConstants) -> list[Prior]:
    plain = ("size_exponent", "wave_beta", "wave_first", "unaligned")
    found = [Prior(name, getattr(parent, name), sigma, log=name not in plain) for name, sigma in _SIGMA.items()]
    found += [Prior(f"ridge.{i}", v, 0.04 if i < 3 else 0.015, log=False) for i, v in enumerate(parent.ridge)]
    return found + [Prior(f"tile_efficiency.{i}", v, 0.1) for i, v in enumerate(parent.tile_efficiency)]


def _rows(measured: list[TrainingRow], sm_count: float) -> Products:
    m, n, k = (np.array([getattr(r, name) for r in measured], dtype=float) for name in ("m", "n", "k"))
    out = np.array([r.output_bytes for r in measured])
    shapes = GemmShapes(m, n, k, output_bytes=float(out[0]))
    return Products(shapes, np.array([r.seconds for r in measured]), geometry("heuristic", sm_count, m, n, k))


def fit_machine(
    path: Path, machine: str, parent: GemmConstants, sm_count: float
) -> tuple[GemmConstants, DirectionConstants] | None:
    """(constants, direction factors) of one machine of the table, or None where it has no rows."""
    by = {d: gemm_rows(path, machine, d) for d in ("forward", "dgrad", "wgrad", "wgrad_accumulate")}
    if not by["forward"]:
        return None
    # The forward library's residual grid says nothing about these layouts.
    base = parent.model_copy(update={"library": LIBRARY, "mode": "sustained", "residual": ()})
    law, rows = law_of(base, _priors(base), sm_count), _rows(by["forward"] + by["dgrad"], sm_count)
    fitted, _ = law.fit(rows)
    mask = halves(rows.shapes.m, rows.shapes.n, rows.shapes.k)
    held = law.held_out(rows, (mask, ~mask))
    name = f"{path.name}:{machine}"
    reached = {"bands": bands(flops_of(rows), held), "fit": record(name, law.errors(fitted, rows), held), "derived": ""}
    fitted = fitted.model_copy(update=reached)
    factors: dict[str, float] = {}
    logs: list[Array] = []
    for direction, measured in by.items():
        if measured:
            log = law.errors(fitted, _rows(measured, sm_count))
            factors[direction] = float(np.exp(-np.median(log)))
            logs.append(log - np.median(log))
    scalar = float(np.exp(-np.median(law.errors(parent, rows))))
    directions = DirectionConstants(
        dgrad=factors.get("dgrad", 1.0) / factors["forward"],
        wgrad=factors.get("wgrad", 1.02 * factors["forward"]) / factors["forward"],
        wgrad_accumulate=factors.get("wgrad_accumulate", 1.03 * factors["forward"]) / factors["forward"],
        scale=scalar,
        machine=machine,
        fit=record(name, np.concatenate(logs), held),
    )
    return fitted, directions


def fit_grouped(path: Path, machine: str, c: GemmConstants, d: DirectionConstants, sm_count: float) -> GroupedConstants | None:
    """How many experts' GEMMs run beside each other, and the factor on top by direction, on sizes of at least SMALL_GEMM (smaller
    ones are no training sizes); the interval is that of all rows."""
    tried = [_grouped_with(streams, path, machine, c, d, sm_count) for streams in STREAMS]
    return min((g for g in tried if g is not None), key=lambda g: g.fit.median, default=None)


def _grouped_with(
    streams: int, path: Path, machine: str, c: GemmConstants, d: DirectionConstants, sm_count: float
) -> GroupedConstants | None:
    medians: dict[str, float] = {}
    left: list[Array] = []
    large: list[NDArray[np.bool_]] = []
    for direction in ("forward", "dgrad", "wgrad_accumulate"):
        measured = grouped_rows(path, machine, direction)
        m, n, k, groups = (np.array([getattr(r, name) for r in measured], dtype=float) for name in ("m", "n", "k", "groups"))
        big = np.minimum(np.minimum(m, n), k) >= SMALL_GEMM
        if not big.any():
            return None
        beside = np.minimum(groups, streams)
        shapes = GemmShapes(m, n, k, batch=beside, output_bytes=measured[0].output_bytes)
        factor = {"dgrad": d.dgrad, "wgrad_accumulate": d.wgrad_accumulate}.get(direction, 1.0)
        predicted = factor * groups / beside * gemm_seconds(c, sm_count, shapes)
        logs = np.log(np.array([r.seconds for r in measured]) / predicted)
        centre = np.median(logs[big])
        medians[direction] = float(np.exp(centre))
        left.append(logs - centre)
        large.append(big)
    rest, inside = np.concatenate(left), np.concatenate(large)
    ends = interval(-rest)
    fit = record(f"{path.name}:{machine}", -rest[inside], -rest)
    source = f"{path.name}: {machine}"
    return GroupedConstants(**medians, streams=streams, low=ends.low, high=ends.high, source=source, fit=fit)


def _sdp_shapes(measured: list[TrainingRow]) -> AttentionShapes:
    def column(name: str) -> Array:
        return np.array([getattr(r, name) for r in measured], dtype=float)

    s = column("m")
    return AttentionShapes(column("batch"), s, s, column("heads"), column("n"), column("head_dim"), column("v_head_dim"))


def fit_sdp(path: Path, machine: str, sm_count: float) -> tuple[AttentionConstants, ...]:
    """Fused attention of the machine, forward and backward, by head size of queries (192 with values of 128: latent attention)."""
    found = []
    for direction in ("forward", "backward"):
        measured = sdp_rows(path, machine, direction)
        if not measured:
            continue
        heads = sorted({r.head_dim for r in measured})
        shapes, seconds = _sdp_shapes(measured), np.array([r.seconds for r in measured])
        share = 1.0 if direction == "forward" else 2.5
        rates = [float(np.max([r.flops / r.seconds for r in measured if r.head_dim == d])) / share for d in heads]
        priors = [Prior("latency_s", 8e-6, 0.5), Prior("critical_share", 0.6, 0.4), Prior("overlap_power", 2.0, 0.5)]
        priors += [Prior(f"heads.{i}.rate_flops_per_s", rate, 0.3) for i, rate in enumerate(rates)]
        priors += [Prior(f"heads.{i}.sequence_overhead", 300.0, 0.6) for i in range(len(heads))]
        own = {"kernel": "cudnn", "library": LIBRARY, "mode": "sustained", "causal": True, "direction": direction}
        base = AttentionConstants(**own, heads=unfitted(np.array(heads)))
        law, rows = Law(base, priors, lambda c, rows: attention_seconds(c, sm_count, rows.shapes)), Rows(shapes, seconds)
        fitted, _ = law.fit(rows)
        logs = law.errors(fitted, rows)
        reached = {"fit": record(f"{path.name}:{machine}", logs, logs), "bands": (interval(logs),)}
        found.append(fitted.model_copy(update=reached))
    return tuple(found)
