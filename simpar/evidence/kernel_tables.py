"""Tables of measured kernels (CSV) as arrays, and what their names say: GPU, library, power mode, dtype.

File names: `gemm_{gpu}_{dtype}.csv`, `attention_[full_]{gpu}_{kernel}.csv`, `simumax_ops.csv`,
`flash_attention_charts.csv`, `published_{attention,gemm}.csv`, `membound.csv`. Times are in microseconds. A table may be packed
as `x.csv.gz`, which readers open by the name without `.gz`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.boundary import read_records
from simpar.errors import InputError, Violation
from simpar.evidence.robust import Array
from simpar.specs.hardware import HardwareProfile, load_hardware, profile_names

Table = dict[str, Array]
"""Column -> values [rows]."""
PROFILES: Final = {
    "a100": "dgx-a100-80gb",
    "a100_pcie": "a100-pcie",
    "a800": "hgx-a800",
    "h100": "dgx-h100",
    "h100_pcie": "h100-pcie",
    "h200": "dgx-h200",
    "h200_nvl": "h200-nvl",
    "gh200": "gh200",
    "h20": "hgx-h20",
    "h800": "hgx-h800",
    "b200": "dgx-b200",
    "gb200": "gb200-nvl72",
    "b300": "dgx-b300",
    "gb300": "gb300-nvl72",
    "l40s": "l40s",
    "rtx4090": "rtx-4090",
    "mi250x": "mi250x",
    "mi300x": "mi300x",
    "mi325x": "mi325x",
    "mi350x": "mi350x",
    "mi355x": "mi355x",
}
"""GPU as a table names it -> shipped profile."""
KERNELS: Final = {"fa1": "fa1", "fa2": "fa2", "fa3": "fa3", "fa4": "fa4", "trtllmgen": "trtllm-gen", "cudnn": "cudnn"}
MICRO: Final = 1e-6
SIZES: Final = {
    "gemm": ("m", "n", "k"),
    "attention": ("b", "s", "h", "kv", "d"),
}
"""Op -> the columns that are sizes."""
BESIDE: Final = {"attention": ("causal",)}
"""Op -> columns of numbers beside them."""
CORE: Final = {"m": 512, "n": 512, "k": 512, "s": 1024}
"""Size -> the least one of the fitted region."""


@dataclass(frozen=True, slots=True)
class Source:
    """What the name of a time column says."""

    gpu: str
    dtype: str
    library: str
    mode: str
    quantized: bool


def gpu_key(name: str) -> str:
    """The GPU of a table by its short name ("h100_sxm" -> "h100")."""
    return name.lower().replace("-", "_").removesuffix("_sxm")


def profile_of(gpu: str) -> HardwareProfile | None:
    """The shipped profile of a GPU as tables name it, or None."""
    key = gpu_key(gpu)
    name = PROFILES.get(key) or PROFILES.get(key.split("_")[0])
    return load_hardware(name) if name in profile_names() else None


def column_source(gpu: str, dtype: str, column: str) -> Source:
    """What column `us_...` of table `gemm_{gpu}_{dtype}` holds."""
    library = column.removeprefix("us_")
    mode = "sustained" if "sustained" in library else "burst"
    block = dtype.startswith("fp8") and ("block" in library or "deepgemm" in library)
    quantized = dtype.startswith("fp8") and "prequant" not in library
    return Source(gpu, "fp8_block" if block else dtype, library, mode, quantized)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        InputError: the file cannot be read or has no rows.
    """
    rows = list(read_records(path, empty=True))
    if not rows:
        raise InputError([Violation("rows", 0, "the table is empty", "a header and at least one row", str(path))])
    return rows


def _number(text: str | None) -> float:
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")


def columns(path: Path, needed: tuple[str, ...] = ()) -> dict[str, Array]:
    """Every numeric column of a CSV file (NaN where empty), [rows].

    Raises:
        InputError: unreadable, or a column of `needed` is missing (all of them are named).
    """
    rows = read_rows(path)
    missing = [name for name in needed if name not in rows[0]]
    if missing:
        raise InputError([Violation(name, None, "column is missing", f"has {', '.join(rows[0])}", str(path)) for name in missing])
    return {name: np.array([_number(row.get(name)) for row in rows]) for name in rows[0] if name}


def time_columns(table: dict[str, Array]) -> list[str]:
    """The columns of a GEMM table that hold times."""
    return [name for name in table if name.startswith("us_") and not name.endswith("_W")]


def gemm_name(path: Path) -> tuple[str, str]:
    """(gpu, dtype) of `gemm_{gpu}_{dtype}.csv`."""
    gpu, _, dtype = path.stem.removeprefix("gemm_").rpartition("_")
    return gpu or dtype, dtype


def attention_name(path: Path) -> tuple[str, str, str]:
    """(gpu, kernel, library) of `attention_[full_]{gpu}_{kernel}_{library}.csv`."""
    parts = path.stem.removeprefix("attention_").removeprefix("full_").split("_")
    at = next((i for i, part in enumerate(parts) if part in KERNELS), 1)
    kernel = KERNELS.get(parts[at], "fa2") if at < len(parts) else "fa2"
    return "_".join(parts[:at]), kernel, "_".join(parts[at + 1 :])


def measured_rows(op: str, table: Table, time: str = "us") -> Table:
    """Sizes, `seconds` and `line` of the rows of a table whose sizes and times are all positive numbers."""
    ok = np.isfinite(table[time]) & (table[time] > 0)
    for name in SIZES[op]:
        ok &= np.isfinite(table[name]) & (table[name] > 0)
    for name in BESIDE.get(op, ()):
        ok &= np.isfinite(table[name])
    kept = {name: table[name][ok] for name in (*SIZES[op], *BESIDE.get(op, ()))}
    return {**kept, "seconds": table[time][ok] * MICRO, "line": np.flatnonzero(ok).astype(float) + 2.0}


def core(rows: Table) -> NDArray[np.bool_]:
    """Rows inside the region that is fitted, and that tolerances are stated for."""
    return np.asarray(np.logical_and.reduce([rows[name] >= least for name, least in CORE.items() if name in rows]))


def tables(folder: Path, pattern: str) -> list[Path]:
    """Files in `folder` whose name, without a `.gz`, matches `pattern`, by that name."""
    packed = (path.with_suffix("") for path in folder.glob(f"{pattern}.gz"))
    return sorted({*folder.glob(pattern), *packed})


def there(path: Path) -> bool:
    """Whether the table at `path` is there, packed or not."""
    return bool(tables(path.parent, path.name))
