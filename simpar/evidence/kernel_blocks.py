"""Measured kernel tables as blocks of arrays with their predictions: one block per table, time column and op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simpar.costs.attention import AttentionShapes, attention_flops, attention_seconds
from simpar.costs.compute import GemmShapes
from simpar.costs.kernel_choice import band_arrays, pick_attention
from simpar.costs.kernels import KernelModel
from simpar.evidence.kernel_law import where
from simpar.evidence.kernel_tables import (
    SIZES,
    Table,
    attention_name,
    column_source,
    columns,
    core,
    gemm_name,
    measured_rows,
    profile_of,
    time_columns,
)
from simpar.evidence.robust import Array
from simpar.specs.kernel_constants import AttentionConstants, GemmConstants
from simpar.statistics import Comparison

_FAR: Final = 0.1
"""Extra log half width where another library's constants price a column."""


Named = tuple[str, str, str, str]
"""Table, op, GPU and dtype of a block."""
Priced = tuple[Array, Array, Array]
"""Seconds, and the ends of their intervals."""
Constants = GemmConstants | AttentionConstants


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table that share everything but their shape; every array [rows].

    Attributes:
        table: file, with the column after a colon where it has several; op: what was measured; gpu, dtype: of all rows.
        shape: columns that identify a row; lines: of the file.
        measured, predicted, low, high: seconds; predicted is NaN where a row could not be priced.
        flops: for the size classes, 0 where they do not apply; core: rows in the stated region.
        constants: library and mode of the set that priced it; "default" for another library's, "peak-scaled" likewise.
        skipped: why no row could be priced.
    """

    table: str
    op: str
    gpu: str
    dtype: str
    shape: dict[str, Array]
    lines: NDArray[np.int64]
    measured: Array
    predicted: Array
    low: Array
    high: Array
    flops: Array
    core: NDArray[np.bool_]
    constants: str = "none"
    skipped: str = ""
    labels: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.measured)

    @classmethod
    def of(cls, what: Named, names: tuple[str, ...], rows: Table, skipped: str) -> Block:
        """The `measured_rows` of a table, which the columns `names` identify, without a price."""
        count = len(rows["seconds"])
        nothing, zero = np.full(count, np.nan), np.zeros(count)
        shape, lines = {name: rows[name] for name in names}, rows["line"].astype(np.int64)
        return cls(*what, shape, lines, rows["seconds"], nothing, nothing, nothing, zero, zero.astype(bool), skipped=skipped)

    @property
    def key(self) -> dict[str, str]:
        """What all rows share."""
        return {name: getattr(self, name) for name in ("table", "op", "gpu", "dtype", "constants")}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `simpar validate --json`."""
        key = self.key
        for i, line in enumerate(self.lines.tolist()):
            columns = {name: int(values[i]) for name, values in self.shape.items()}
            group = {**key, **columns, **{name: values[i] for name, values in self.labels.items()}}
            name, measured = f"{self.table}:{line}", float(self.measured[i])
            if np.isfinite(self.predicted[i]):
                ends = float(self.low[i]), float(self.high[i])
                yield Comparison(name, "time_s", measured, float(self.predicted[i]), *ends, group).as_json()
            else:
                why = self.skipped or "not priced"
                yield Comparison(name, "time_s", measured, None, group=group, skipped=why).as_json()


@lru_cache(maxsize=64)
def kernel_model(gpu: str, library: str | None, sustained: bool) -> KernelModel | None:
    """The model of a GPU as tables name it, or None where no profile is shipped."""
    profile = profile_of(gpu)
    return None if profile is None else KernelModel(profile, library=library, sustained=sustained)


def gemm_blocks(path: Path) -> Iterator[Block]:
    """One block per time column of `gemm_{gpu}_{dtype}.csv`."""
    gpu, dtype = gemm_name(path)
    table = columns(path, SIZES["gemm"])
    for column in time_columns(table):
        source, rows = column_source(gpu, dtype, column), measured_rows("gemm", table, column)
        block = Block.of(
            (f"{path.name}:{column}", "gemm", gpu, source.dtype), SIZES["gemm"], rows, f"no hardware profile for {gpu}"
        )
        model = kernel_model(gpu, source.library, source.mode == "sustained")
        if model is not None:
            m, n, k = block.shape.values()
            c, _ = model.gemm_set(source.dtype)
            priced = model.gemm_array(GemmShapes(m, n, k, quantize=source.quantized), source.dtype)
            far = 1.0 if c.library == source.library else np.exp(_FAR)
            block = _priced(block, c, source.library, (priced[0], priced[1] / far, priced[2] * far), 2.0 * m * n * k, core(rows))
        yield block


def _priced(block: Block, c: Constants, library: str, seconds: Priced, flops: Array, inside: NDArray[np.bool_]) -> Block:
    """The block with seconds and their ends, by `c`, which is the constants of its own `library` or of another."""
    predicted, low, high = seconds
    constants = f"{c.library}/{c.mode}" if c.library == library else "default"
    return replace(block, constants=constants, predicted=predicted, low=low, high=high, flops=flops, core=inside, skipped="")


def _own_attention(model: KernelModel, kernel: str, library: str, *, causal: bool, head_dim: float) -> AttentionConstants | None:
    sets = model.resolved.constants.attention
    named = [a for a in sets if a.library == library and a.kernel == kernel and a.causal == causal]
    order = (kernel, "fa2", "fa3", "trtllm-gen", "cudnn")
    if named:
        return named[0]
    at, sustained = int(head_dim), "sustained" in library
    return pick_attention(sets, order, causal=causal, head_dim=at, direction="forward", sustained=sustained)


def attention_blocks(path: Path) -> Iterator[Block]:
    """One block for `attention_[full_]{gpu}_{kernel}_{library}.csv`, with its write of the serving cache."""
    gpu, kernel, library = attention_name(path)
    names = (*SIZES["attention"], "causal")
    every = measured_rows("attention", columns(path, (*names, "us")))
    model = kernel_model(gpu, None, "sustained" in library)
    why = f"no hardware profile for {gpu}" if model is None else f"no constants for {kernel} on {gpu}"
    for causal in (True, False):
        rows = where(every["causal"] == causal, every)
        if not len(rows["seconds"]):
            continue
        block = Block.of((path.name, "attention", gpu, "bf16"), names, rows, why)
        head_dim = float(np.median(block.shape["d"]))
        c = None if model is None else _own_attention(model, kernel, library, causal=causal, head_dim=head_dim)
        if model is not None and c is not None:
            a, inside = AttentionShapes.of(block.shape), core(rows)
            flops, seconds = attention_flops(a, causal=causal), attention_seconds(c, model.sm_count, a)
            spread = model.resolved.spread if c.library == library else _FAR
            low, high = band_arrays(c.bands, c.bands_small, inside, flops, spread)
            block = _priced(block, c, library, (seconds, seconds * low, seconds * high), flops, inside)
        yield block
