"""Measured kernel tables as blocks of arrays with their predictions: one block per table, time column and op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.costs.compute import GemmShapes
from simpar.costs.kernel_choice import pick_attention
from simpar.costs.kernel_points import band_arrays
from simpar.costs.kernels import KernelModel
from simpar.evidence.kernel_tables import (
    MICRO,
    alpha_of,
    attention_name,
    column_source,
    columns,
    gemm_name,
    moe_name,
    profile_of,
    read_rows,
    usable,
)
from simpar.evidence.moe import moe_flops, moe_seconds, moe_shapes
from simpar.specs.kernel_constants import AttentionConstants, MoeConstants

Array = NDArray[np.float64]
CORE: Final = {"gemm": 512, "attention": 1024, "moe": 512}
_FAR: Final = 0.1
"""Extra log half width where another library's constants price a column."""


Named = tuple[str, str, str, str]
"""Table, op, GPU and dtype of a block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table that share everything but their shape; every array [rows].

    Attributes:
        table: file, with the column after a colon where it has several; op: what was measured; gpu, dtype: of all rows.
        constants: library and mode of the set that priced it; "default" for another library's, "peak-scaled" likewise.
        shape: columns that identify a row; lines: of the file.
        measured, predicted, low, high: seconds; predicted is NaN where a row could not be priced.
        flops: for the size classes, 0 where they do not apply; core: rows in the stated region.
        skipped: why no row could be priced.
    """

    table: str
    op: str
    gpu: str
    dtype: str
    constants: str
    shape: dict[str, Array]
    lines: NDArray[np.int64]
    measured: Array
    predicted: Array
    low: Array
    high: Array
    flops: Array
    core: NDArray[np.bool_]
    skipped: str = ""
    labels: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.measured)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `simpar validate --json`."""
        names = list(self.shape)
        for i in range(len(self)):
            priced = bool(np.isfinite(self.predicted[i]))
            group: dict[str, Any] = {
                "table": self.table,
                "op": self.op,
                "gpu": self.gpu,
                "dtype": self.dtype,
                "constants": self.constants,
            }
            group.update({name: int(self.shape[name][i]) for name in names})
            group.update({name: values[i] for name, values in self.labels.items()})
            yield {
                "id": f"{self.table}:{int(self.lines[i])}",
                "metric": "time_s",
                "measured": float(self.measured[i]),
                "predicted": float(self.predicted[i]) if priced else None,
                "low": float(self.low[i]) if priced else None,
                "high": float(self.high[i]) if priced else None,
                "group": group,
                "skipped": None if priced else (self.skipped or "not priced"),
            }


@lru_cache(maxsize=64)
def kernel_model(gpu: str, library: str | None, sustained: bool) -> KernelModel | None:
    """The model of a GPU as tables name it, or None where no profile is shipped."""
    profile = profile_of(gpu)
    return None if profile is None else KernelModel(profile, library=library, sustained=sustained)


def _unpriced(what: Named, shape: dict[str, Array], lines: NDArray[np.int64], measured: Array, why: str) -> Block:
    nothing = np.full(len(measured), np.nan)
    zero = np.zeros(len(measured))
    return Block(*what, "none", shape, lines, measured, nothing, nothing, nothing, zero, zero.astype(bool), why)


def _lines(ok: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.flatnonzero(ok).astype(np.int64) + 2


def gemm_blocks(path: Path) -> list[Block]:
    """One block per time column of `gemm_{gpu}_{dtype}.csv`."""
    gpu, dtype = gemm_name(path)
    table = columns(path, ("m", "n", "k"))
    found = []
    for column in [c for c in table if c.startswith("us_") and not c.endswith("_W")]:
        source = column_source(gpu, dtype, column)
        ok = usable(table, ("m", "n", "k"), column)
        shape = {name: table[name][ok] for name in ("m", "n", "k")}
        measured, name = table[column][ok] * MICRO, f"{path.name}:{column}"
        model = kernel_model(gpu, source.library, source.mode == "sustained")
        if model is None:
            found.append(
                _unpriced((name, "gemm", gpu, source.dtype), shape, _lines(ok), measured, f"no hardware profile for {gpu}")
            )
            continue
        m, n, k = shape.values()
        c, _ = model.gemm_set(source.dtype)
        seconds, low, high = model.gemm_array(GemmShapes(m, n, k, quantize=source.quantized), source.dtype)
        own = c.library == source.library
        far = 1.0 if own else np.exp(_FAR)
        core = (m >= CORE["gemm"]) & (n >= CORE["gemm"]) & (k >= CORE["gemm"])
        found.append(
            Block(
                name,
                "gemm",
                gpu,
                source.dtype,
                f"{c.library}/{c.mode}" if own else "default",
                shape,
                _lines(ok),
                measured,
                seconds,
                low / far,
                high * far,
                2.0 * m * n * k,
                core,
            )
        )
    return found


def _own_attention(model: KernelModel, kernel: str, library: str, *, causal: bool, head_dim: float) -> AttentionConstants | None:
    named = [a for a in model.resolved.constants.attention if a.library == library and a.kernel == kernel and a.causal == causal]
    found = named[0] if named else None
    return found or pick_attention(
        model.resolved.constants.attention,
        (kernel, "fa2", "fa3", "trtllm-gen", "cudnn"),
        causal=causal,
        head_dim=int(head_dim),
        direction="forward",
        sustained="sustained" in library,
    )


def attention_blocks(path: Path) -> list[Block]:
    """One block for `attention_[full_]{gpu}_{kernel}_{library}.csv`, with its write of the serving cache."""
    gpu, kernel, library = attention_name(path)
    names = ("b", "s", "h", "kv", "d")
    table = columns(path, (*names, "causal", "us"))
    found = []
    for causal in (1.0, 0.0):
        ok = usable(table, names, "us") & (table["causal"] == causal)
        if not ok.any():
            continue
        shape = {name: table[name][ok] for name in (*names, "causal")}
        measured = table["us"][ok] * MICRO
        model = kernel_model(gpu, None, "sustained" in library)
        c = (
            None
            if model is None
            else _own_attention(model, kernel, library, causal=causal > 0, head_dim=float(np.median(shape["d"])))
        )
        if model is None or c is None:
            why = f"no hardware profile for {gpu}" if model is None else f"no constants for {kernel} on {gpu}"
            found.append(_unpriced((path.name, "attention", gpu, "bf16"), shape, _lines(ok), measured, why))
            continue
        a = AttentionShapes.of(shape)
        seconds = attention_seconds(c, model.sm_count, a)
        flops = attention_flops(a, causal=causal > 0)
        own = c.library == library
        core = shape["s"] >= CORE["attention"]
        low, high = band_arrays(c.bands, c.bands_small, core, flops, model.resolved.spread if own else _FAR)
        found.append(
            Block(
                path.name,
                "attention",
                gpu,
                "bf16",
                f"{c.library}/{c.mode}" if own else "default",
                shape,
                _lines(ok),
                measured,
                seconds,
                seconds * low,
                seconds * high,
                flops,
                core,
            )
        )
    return found


def _own_moe(sets: tuple[MoeConstants, ...], library: str, dtype: str) -> MoeConstants | None:
    exact = [m for m in sets if m.library == library and m.dtype == dtype]
    narrow = [m for m in sets if m.dtype.startswith("fp8") == dtype.startswith("fp8")]
    return next(iter(exact or narrow or sets), None)


def moe_blocks(path: Path) -> list[Block]:
    """One block for `moe_{gpu}_{dtype}_{library}.csv`."""
    gpu, dtype, library = moe_name(path)
    names = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
    table = columns(path, (*names, "dist", "us"))
    distribution = [row["dist"] for row in read_rows(path)]
    alphas = np.array([alpha_of(text) for text in distribution])
    ok = usable(table, names, "us") & np.isfinite(alphas)
    shape = {name: table[name][ok] for name in names}
    measured = table["us"][ok] * MICRO
    model = kernel_model(gpu, None, "sustained" in library)
    c = None if model is None else _own_moe(model.resolved.constants.moe, library, dtype)
    if model is None or c is None:
        why = f"no hardware profile for {gpu}" if model is None else f"no expert constants for {gpu}"
        return [_unpriced((path.name, "moe", gpu, dtype), shape, _lines(ok), measured, why)]
    shapes = moe_shapes(shape, alphas[ok], local_routing=c.local_routing)
    seconds, flops = moe_seconds(c, model.sm_count, shapes), moe_flops(shapes)
    own = c.library == library and c.dtype == dtype
    core = shape["tokens"] >= CORE["moe"]
    low, high = band_arrays(c.bands, c.bands_small, core, flops, model.resolved.spread if own else 2 * _FAR)
    labels = {"dist": [text for text, keep in zip(distribution, ok, strict=True) if keep]}
    return [
        Block(
            path.name,
            "moe",
            gpu,
            dtype,
            f"{c.library}/{c.mode}" if own else "default",
            shape,
            _lines(ok),
            measured,
            seconds,
            seconds * low,
            seconds * high,
            flops,
            core,
            labels=labels,
        )
    ]
