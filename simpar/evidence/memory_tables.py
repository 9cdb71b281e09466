"""Rows of `membound.csv`: achieved bandwidth of memory-bound kernels, as class, implementation and share of the peak."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from simpar.evidence.kernel_tables import profile_of, read_rows

_CLASSES: Final = (
    ("clone", "copy"),
    ("add/mul", "copy"),
    ("unary", "copy"),
    ("residual", "residual"),
    ("softmax", "softmax"),
    ("cross-entropy", "cross_entropy"),
    ("amax", "amax"),
    ("cast_transpose", "quantize"),
    ("cast", "cast"),
    ("quant", "cast"),
    ("rope", "rope"),
    ("embedding", "embedding"),
    ("adam", "adam"),
    ("permute", "permute"),
)
_TUNED: Final = (
    "quack",
    "liger",
    "trtllm",
    "vllm 0",
    "torchao",
    "after",
    "llm.c",
    "te ",
    "any tuned",
    "fastlayernorm",
    "aiter",
    "lumen",
    "hipkittens",
)
_FRAMEWORK: Final = ("compile", "megatron", "jit", "vllm(2023)", "before")
_GPU_OF: Final = (
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("h200", "h200"),
    ("2400", "h100_500w"),
    ("h100", "h100"),
    ("a100-80g-pcie", "a100_pcie"),
    ("a100-40g", "a100_40gb"),
    ("a100", "a100"),
    ("mi300x", "mi300x"),
    ("mi355x", "mi355x"),
)
_PEAKS: Final = {"h100_500w": 2400.0, "a100_40gb": 1555.0}
"""GB/s of GPUs that share a short name with another."""
NOMINAL_BYTES: Final = 1e9
"""Rows are fits of a rate: they are compared at this traffic."""
_PLAIN: Final = ("copy", "residual", "softmax")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One measured rate.

    Attributes:
        line: in the file; gpu: short name; kernel: class; tier: tuned, framework, eager.
        latency_s: fitted start-up time, 0 where not given.
        bytes_per_s: achieved, None where the row states none; share: of the peak, None likewise or not told as one number.
    """

    line: int
    gpu: str
    name: str
    kernel: str
    implementation: str
    tier: str
    latency_s: float
    bytes_per_s: float | None
    share: float | None


def kernel_class(name: str) -> str:
    """Class of a kernel by its name in the table."""
    low = name.lower()
    for text, kernel in _CLASSES:
        if text in low:
            return kernel
    backward = "bwd" in low
    if "norm" in low:
        return "norm_backward" if backward else "norm"
    if "swiglu" in low or "silu_and_mul" in low:
        return "gate_backward" if backward else "gate"
    return "activation"


def tier_of(kernel: str, implementation: str) -> str:
    """Implementation class: plain torch counts as tuned where one kernel is all there is to do, as framework where it has one."""
    low = implementation.lower()
    if any(text in low for text in _FRAMEWORK):
        return "framework"
    if any(text in low for text in _TUNED):
        return "tuned"
    if kernel in ("norm", "norm_backward"):
        return "framework"
    return "tuned" if kernel in _PLAIN and "eager" not in low else "eager"


def _gpu(name: str) -> str:
    low = name.lower()
    return next((gpu for text, gpu in _GPU_OF if text in low), low)


def _peak(gpu: str) -> float | None:
    if gpu in _PEAKS:
        return _PEAKS[gpu] * 1e9
    profile = profile_of(gpu)
    return profile.gpu.memory_bandwidth.value if profile else None


def memory_rows(path: Path) -> list[MemoryRow]:
    """The table's rows."""
    found = []
    rows = list(read_rows(path))
    for line, row in enumerate(rows, 2):
        gpu, kernel = _gpu(row["gpu"]), kernel_class(row["kernel"])
        tier = tier_of(kernel, row["impl"])
        numbers = [float(v) for v in re.findall(r"\d+(?:\.\d+)?", (row["GBps"] or "").split("(")[0])]
        rate = sum(numbers) / len(numbers) * 1e9 if numbers else None
        if rate and "fwd+bwd" in row["kernel"]:
            rate = _backward_alone(row, rows, tier, rate)
        peak = _peak(gpu)
        share = rate / peak if rate and peak else None
        latency = float(row["t0_us"]) * 1e-6 if row["t0_us"] else 0.0
        found.append(MemoryRow(line, gpu, row["kernel"], kernel, row["impl"], tier, latency, rate, share))
    return found


def _backward_alone(row: Mapping[str, str], rows: Sequence[Mapping[str, str]], tier: str, rate: float) -> float | None:
    """Bytes per second of the backward in a row that times both passes: what is left without the forward of the same table.

    None where no row times that forward.
    """
    name = row["kernel"].replace("fwd+bwd", "fwd")
    for other in rows:
        same = other["kernel"] == name and other["gpu"] == row["gpu"] and tier_of("", other["impl"]) == tier
        if same and other["GBps"]:
            both, forward = float(row["bytes_per_element_model"]), float(other["bytes_per_element_model"])
            return (both - forward) / (both / rate - forward / (float(other["GBps"]) * 1e9))
    return None
