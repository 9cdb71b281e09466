"""Measured kernels priced one by one: training layouts, published charts, memory-bound rates."""

from __future__ import annotations

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

PricedRow = tuple[int, float, Price, float, dict[str, float]]
"""Line, measured seconds, price, FLOPs, shape."""


def _block(what: Named, constants: str, rows: list[PricedRow], labels: dict[str, list[str]] | None = None) -> Block:
    """From single prices: (line, measured, price, flops, shape) each; a price of 0 seconds stands for none."""
    value = {f: np.array([getattr(r[2], f) for r in rows]) for f in ("seconds", "low", "high")}
    none = value["seconds"] <= 0
    for array in value.values():
        array[none] = np.nan
    return Block(
        *what,
        constants,
        shape={key: np.array([r[4][key] for r in rows], dtype=float) for key in rows[0][4]},
        lines=np.array([r[0] for r in rows], dtype=np.int64),
        measured=np.array([r[1] for r in rows]),
        predicted=value["seconds"],
        low=value["low"],
        high=value["high"],
        flops=np.array([r[3] for r in rows]),
        core=~none,
        labels=labels or {},
    )


def training_blocks(path: Path) -> list[Block]:
    """GEMMs, grouped GEMMs and fused attention of each machine of `simumax_ops.csv`."""
    found: list[Block] = []
    for machine in training_ops.machines(path):
        model = _trainingkernel_model(machine)
        if model is None:
            continue
        found += _training_gemms(path, machine, model) + _training_attention(path, machine, model)
    return found


def _trainingkernel_model(machine: str) -> KernelModel | None:
    """The machine's own constants; they are filed with the GPU whose constants they refine."""
    gpu = {"a100_pcie": "a100"}.get(machine, machine)
    return kernel_model(gpu, "transformer_engine", True)


def _training_gemms(path: Path, machine: str, model: KernelModel) -> list[Block]:
    found = []
    for direction in ("forward", "dgrad", "wgrad", "wgrad_accumulate"):
        which: Any = direction.removesuffix("_accumulate")
        accumulate = direction.endswith("accumulate")
        rows: list[PricedRow] = []
        for r in training_ops.gemm_rows(path, machine, direction):
            m, n, k = {"forward": (r.m, r.n, r.k), "dgrad": (r.m, r.k, r.n), "wgrad": (r.k, r.m, r.n)}[which]
            price = model.gemm(Gemm(m, n, k, direction=which, accumulate_fp32=accumulate))
            rows.append((r.line, r.seconds, price, 2.0 * m * n * k, {"m": float(m), "n": float(n), "k": float(k)}))
        if rows:
            found.append(_block((f"{path.name}:{machine}", "gemm_training", machine, "bf16"), direction, rows))
        grouped: list[PricedRow] = []
        for r in training_ops.grouped_rows(path, machine, direction) if direction in training_ops.STAGES else []:
            tokens, n, k = {"forward": (r.m, r.n, r.k), "dgrad": (r.m, r.k, r.n), "wgrad": (r.k, r.m, r.n)}[which]
            price = model.grouped_gemm(GroupedGemm(r.groups, tokens * r.groups, n, k, "bf16", which, accumulate))
            grouped.append(
                (
                    r.line,
                    r.seconds,
                    price,
                    2.0 * r.groups * r.m * r.n * r.k,
                    {"groups": float(r.groups), "m": float(tokens), "n": float(n), "k": float(k)},
                )
            )
        if grouped:
            found.append(_block((f"{path.name}:{machine}", "grouped_gemm", machine, "bf16"), direction, grouped))
    return found


def _training_attention(path: Path, machine: str, model: KernelModel) -> list[Block]:
    found = []
    for direction in ("forward", "backward"):
        rows: list[PricedRow] = []
        for r in training_ops.sdp_rows(path, machine, direction):
            work = AttentionWork(
                r.batch, r.m, r.m, r.heads, r.n, r.head_dim, r.v_head_dim, backward=direction == "backward", kernel="cudnn"
            )
            price = model.attention(work)
            sizes = {"b": float(r.batch), "s": float(r.m), "h": float(r.heads), "kv": float(r.n)}
            sizes |= {"d": float(r.head_dim), "v": float(r.v_head_dim)}
            rows.append((r.line, r.seconds, price, r.flops, sizes))
        if rows:
            found.append(_block((f"{path.name}:{machine}", "attention_training", machine, "bf16"), direction, rows))
    return found


def chart_blocks(path: Path) -> list[Block]:
    """Published attention charts: one block per GPU and pass, one row per curve and length."""
    groups: dict[tuple[str, str], list[PricedRow]] = {}
    labels: dict[tuple[str, str], list[str]] = {}
    for line, row in enumerate(attention_charts.chart_rows(path), 2):
        model = kernel_model(row.gpu, "charts", False)
        seconds = attention_charts.chart_seconds(row)
        for s, measured in zip(attention_charts.LENGTHS, seconds, strict=True):
            if not np.isfinite(measured) or model is None:
                continue
            price = _chart_price(model, row, s)
            key = (row.gpu, row.which)
            flops = 4.0 * attention_charts.TOKENS * s * attention_charts.WIDTH * (0.5 if row.causal else 1.0)
            sizes = {"s": float(s), "d": float(row.head_dim), "causal": float(row.causal)}
            groups.setdefault(key, []).append((line, float(measured), price, flops, sizes))
            labels.setdefault(key, []).append(row.label)
    return [
        _block((path.name, "attention_chart", gpu, "bf16"), which, rows, {"impl": labels[gpu, which]})
        for (gpu, which), rows in groups.items()
    ]


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
    """Kernels that others measured, with their source: one block per GPU and kernel, or per dtype of products."""
    groups: dict[tuple[str, ...], list[PricedRow]] = {}
    sources: dict[tuple[str, ...], list[str]] = {}
    for line, row in enumerate(read_rows(path), 2):
        model = kernel_model(row["gpu"], None, False)
        if model is None:
            continue
        if "kernel" in row:
            b, h, kv, s, d = (int(row[name]) for name in ("b", "h", "kv", "s", "d"))
            causal, backward = row["causal"] == "1", row["direction"] == "backward"
            price = model.attention(AttentionWork(b, s, s, h, kv, d, d, causal, backward, row["kernel"], "bf16"))
            sizes: dict[str, float] = {"b": b, "h": h, "kv": kv, "s": s, "d": d, "causal": float(causal)}
            key, flops = (row["kernel"], row["gpu"], "bf16", row["direction"]), 4.0 * b * h * d * s * s * (0.5 if causal else 1.0)
        else:
            m, n, k = (int(row[name]) for name in ("m", "n", "k"))
            price = model.gemm(Gemm(m, n, k, dtype=row["dtype"]), 1)
            key, flops, sizes = ("gemm", row["gpu"], row["dtype"], "forward"), 2.0 * m * n * k, {"m": m, "n": n, "k": k}
        groups.setdefault(key, []).append((line, float(row["us"]) * MICRO, price, flops, sizes))
        sources.setdefault(key, []).append(row["source"])
    return [
        _block((path.name, kernel, gpu, dtype), direction, rows, {"source": sources[kernel, gpu, dtype, direction]})
        for (kernel, gpu, dtype, direction), rows in groups.items()
    ]


def memory_blocks(path: Path) -> list[Block]:
    """Achieved bandwidths, compared as the time of a gigabyte."""
    found: dict[str, list[PricedRow]] = {}
    labels: dict[str, list[str]] = {}
    none = ZERO
    for row in memory_tables.memory_rows(path):
        gpu = row.gpu
        model = _memorykernel_model(gpu)
        measured = memory_tables.NOMINAL_BYTES / row.bytes_per_s + row.latency_s if row.bytes_per_s else float("nan")
        price = none
        if model is not None and row.bytes_per_s:
            implementation: Any = row.tier
            price = model.memory_bound(row.kernel, memory_tables.NOMINAL_BYTES, implementation=implementation)
        if np.isfinite(measured):
            found.setdefault(gpu, []).append((row.line, measured, price, 0.0, {}))
            labels.setdefault(gpu, []).append(f"{row.name} [{row.implementation}]")
    merged = [r for rows in found.values() for r in rows]
    names = [text for values in labels.values() for text in values]
    gpus = [gpu for gpu, rows in found.items() for _ in rows]
    return (
        [_block((path.name, "memory_bound", "all", "mixed"), "classes", merged, {"kernel": names, "gpu_name": gpus})]
        if merged
        else []
    )


def _memorykernel_model(gpu: str) -> KernelModel | None:
    special = {"h100_500w": "dgx-h100-96gb-500w", "a100_40gb": "dgx-a100-40gb"}
    if gpu in special:
        return KernelModel(load_hardware(special[gpu]))
    return kernel_model(gpu, None, True)
