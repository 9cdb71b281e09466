"""Measured kernels priced one by one: training layouts, published charts, memory-bound rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simpar.costs.kernels import KernelModel
from simpar.costs.price import ZERO, Price
from simpar.evidence import attention_charts, memory_tables, training_ops
from simpar.evidence.kernel_blocks import Block, Named, kernel_model
from simpar.evidence.kernel_tables import MICRO, read_rows
from simpar.parallel.work import AttentionWork, Gemm, GroupedGemm
from simpar.specs.hardware import load_hardware


@dataclass(frozen=True, slots=True)
class PricedRow:
    """One measured kernel beside its price, which is 0 seconds where there is none."""

    line: int
    seconds: float
    price: Price
    flops: float = 0.0
    shape: Mapping[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def _block(what: Named, constants: str, rows: list[PricedRow]) -> Block:
    value = {f: np.array([getattr(r.price, f) for r in rows]) for f in ("seconds", "low", "high")}
    none = value["seconds"] <= 0
    for array in value.values():
        array[none] = np.nan
    return Block(
        *what,
        shape={key: np.array([r.shape[key] for r in rows], dtype=float) for key in rows[0].shape},
        lines=np.array([r.line for r in rows], dtype=np.int64),
        measured=np.array([r.seconds for r in rows]),
        predicted=value["seconds"],
        low=value["low"],
        high=value["high"],
        flops=np.array([r.flops for r in rows]),
        core=~none,
        constants=constants,
        labels={key: [r.labels[key] for r in rows] for key in rows[0].labels},
    )


def training_blocks(path: Path) -> list[Block]:
    """GEMMs, grouped GEMMs and fused attention of each machine of `simumax_ops.csv`."""
    found: list[Block] = []
    for machine in training_ops.machines(path):
        # A machine's own constants are filed with the GPU whose constants they refine.
        model = kernel_model({"a100_pcie": "a100"}.get(machine, machine), "transformer_engine", True)
        if model is None:
            continue
        products = ((direction, op) for direction in training_ops.LAYOUTS for op in (_gemms, _grouped))
        for direction, op in (*products, ("forward", _attention), ("backward", _attention)):
            if rows := op(path, machine, direction, model):
                found.append(_block((f"{path.name}:{machine}", OPS[op], machine, "bf16"), direction, rows))
    return found


def _of_forward(r: training_ops.TrainingRow, direction: str) -> tuple[int, int, int]:
    """The forward product's m, n, k of a direction's own."""
    return {"forward": (r.m, r.n, r.k), "dgrad": (r.m, r.k, r.n)}.get(direction, (r.k, r.m, r.n))


def _gemms(path: Path, machine: str, direction: str, model: KernelModel) -> list[PricedRow]:
    which: Any = direction.removesuffix("_accumulate")
    rows = []
    for r in training_ops.gemm_rows(path, machine, direction):
        m, n, k = _of_forward(r, direction)
        price = model.gemm(Gemm(m, n, k, direction=which, accumulate_fp32=which != direction))
        rows.append(PricedRow(r.line, r.seconds, price, 2.0 * m * n * k, {"m": m, "n": n, "k": k}))
    return rows


def _grouped(path: Path, machine: str, direction: str, model: KernelModel) -> list[PricedRow]:
    which: Any = direction.removesuffix("_accumulate")
    rows = []
    for r in training_ops.grouped_rows(path, machine, direction):
        tokens, n, k = _of_forward(r, direction)
        price = model.grouped_gemm(GroupedGemm(r.groups, tokens * r.groups, n, k, "bf16", which, which != direction))
        shape = {"groups": r.groups, "m": tokens, "n": n, "k": k}
        rows.append(PricedRow(r.line, r.seconds, price, 2.0 * r.groups * r.m * r.n * r.k, shape))
    return rows


def _attention(path: Path, machine: str, direction: str, model: KernelModel) -> list[PricedRow]:
    rows = []
    for r in training_ops.sdp_rows(path, machine, direction):
        sizes = (r.batch, r.m, r.m, r.heads, r.n, r.head_dim, r.v_head_dim)
        price = model.attention(AttentionWork(*sizes, backward=direction == "backward", kernel="cudnn"))
        shape = {"b": r.batch, "s": r.m, "h": r.heads, "kv": r.n, "d": r.head_dim, "v": r.v_head_dim}
        rows.append(PricedRow(r.line, r.seconds, price, r.flops, shape))
    return rows


OPS = {_gemms: "gemm_training", _grouped: "grouped_gemm", _attention: "attention_training"}


def chart_blocks(path: Path) -> list[Block]:
    """Published attention charts: one block per GPU and pass, one row per curve and length."""
    groups: dict[tuple[str, str], list[PricedRow]] = defaultdict(list)
    for line, row in enumerate(attention_charts.chart_rows(path), 2):
        model = kernel_model(row.gpu, "charts", False)
        seconds = attention_charts.chart_seconds(row)
        for s, measured in zip(attention_charts.LENGTHS, seconds.tolist(), strict=True):
            if not np.isfinite(measured) or model is None:
                continue
            flops = 4.0 * attention_charts.TOKENS * s * attention_charts.WIDTH * (0.5 if row.causal else 1.0)
            sizes = {"s": s, "d": row.head_dim, "causal": row.causal}
            priced = PricedRow(line, measured, _chart_price(model, row, s), flops, sizes, {"impl": row.label})
            groups[row.gpu, row.which].append(priced)
    return [_block((path.name, "attention_chart", gpu, "bf16"), which, rows) for (gpu, which), rows in groups.items()]


def _chart_price(model: KernelModel, row: attention_charts.ChartRow, s: int) -> Price:
    heads = attention_charts.WIDTH // row.head_dim
    backward = {"fwd": (False,), "bwd": (True,), "fwd+bwd": (False, True)}[row.which]
    d, dtype = row.head_dim, "fp8" if row.fp8 else "bf16"
    prices = [
        model.attention(AttentionWork(attention_charts.TOKENS // s, s, s, heads, heads, d, d, row.causal, way, row.kernel, dtype))
        for way in backward
    ]
    return Price(sum(p.seconds for p in prices), sum(p.low for p in prices), sum(p.high for p in prices), prices[0].provenance)


def published_blocks(path: Path) -> list[Block]:
    """Kernels that others measured, with their source: one block per GPU and kernel, or per dtype of products.

    Shown but not judged: of many libraries and machines, some of one GPU's rows lie 30 % apart.
    """
    groups: dict[tuple[str, str, str, str], list[PricedRow]] = defaultdict(list)
    for line, row in enumerate(read_rows(path), 2):
        model = kernel_model(row["gpu"], None, False)
        if model is None:
            continue
        sizes: dict[str, float]
        if "kernel" in row:
            b, h, kv, s, d = (int(row[name]) for name in ("b", "h", "kv", "s", "d"))
            causal, backward = row["causal"] == "1", row["direction"] == "backward"
            price = model.attention(AttentionWork(b, s, s, h, kv, d, d, causal, backward, row["kernel"], "bf16"))
            sizes = {"b": b, "h": h, "kv": kv, "s": s, "d": d, "causal": causal}
            key, flops = (row["kernel"], row["gpu"], "bf16", row["direction"]), 4.0 * b * h * d * s * s * (0.5 if causal else 1.0)
        else:
            m, n, k = (int(row[name]) for name in ("m", "n", "k"))
            price = model.gemm(Gemm(m, n, k, dtype=row["dtype"]), 1)
            key, flops, sizes = ("product", row["gpu"], row["dtype"], "forward"), 2.0 * m * n * k, {"m": m, "n": n, "k": k}
        groups[key].append(PricedRow(line, float(row["us"]) * MICRO, price, flops, sizes, {"source": row["source"]}))
    return [_block((path.name, kernel, gpu, dtype), direction, rows) for (kernel, gpu, dtype, direction), rows in groups.items()]


def memory_blocks(path: Path) -> list[Block]:
    """Achieved bandwidths, compared as the time of a gigabyte."""
    found: dict[str, list[PricedRow]] = defaultdict(list)
    for row in memory_tables.memory_rows(path):
        if not row.bytes_per_s:
            continue
        special = {"h100_500w": "dgx-h100-96gb-500w", "a100_40gb": "dgx-a100-40gb"}.get(row.gpu)
        model = KernelModel(load_hardware(special)) if special else kernel_model(row.gpu, None, True)
        implementation: Any = row.tier
        bytes_moved = memory_tables.NOMINAL_BYTES
        price = ZERO if model is None else model.memory_bound(row.kernel, bytes_moved, implementation=implementation)
        labels = {"kernel": f"{row.name} [{row.implementation}]", "gpu_name": row.gpu}
        found[row.gpu].append(PricedRow(row.line, bytes_moved / row.bytes_per_s + row.latency_s, price, labels=labels))
    rows = [row for of_gpu in found.values() for row in of_gpu]
    return [_block((path.name, "memory_bound", "all", "mixed"), "classes", rows)] if rows else []
