"""Constants of one machine's training ops (`simumax_ops.csv`): products with factors by direction, grouped ones, fused attention.

Each machine is in its own power state, so each gets its own set of GEMM constants: the forward rows refine the GPU's fitted
constants (same form, priors at those), and the input- and weight-gradient rows give the direction factors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_seconds
from simpar.costs.compute import GemmShapes, gemm_seconds
from simpar.costs.gemm_tiles import geometry
from simpar.costs.kernels import SMALL_GEMM
from simpar.evidence.kernel_law import Law, Rows, bands, halves, interval, record
from simpar.evidence.robust import Array, Prior
from simpar.evidence.training_ops import TrainingRow, gemm_rows, grouped_rows, sdp_rows
from simpar.specs.kernel_constants import AttentionConstants, DirectionConstants, GemmConstants, GroupedConstants
from validation.tools.fit_attention import unfitted
from validation.tools.fit_gemm import Products, flops_of, law_of

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
