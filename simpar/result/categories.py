"""What the categories of a step's time, and the parts of a rank's memory, are called in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TITLES: Final = {
    "expert_matmul": "matmuls of the experts", "memory_bound": "memory-bound kernels", "cast": "casts",
    "recompute": "recomputation", "launch": "launch gaps", "tp": "tensor parallel", "cp": "context parallel",
    "ep": "expert parallel", "pp": "pipeline sends", "bubble": "pipeline bubble", "dp": "data parallel",
    "skew": "waits for other ranks' reductions", "interference": "compute slowed by collectives", "host": "offload to the host",
    "calibration": "constants fitted on other runs", "unexplained": "no part of the step",
    "fsdp_buffers": "buffers of full sharding", "fragmentation": "reserved, not allocated", "nccl": "NCCL",
    "context": "CUDA context", "workspaces": "workspaces of matrix products",
}  # fmt: skip
PRODUCTS: Final = ("matmul", "attention", "expert_matmul")
"""Categories of useful work; every other one is a loss against the peak."""


def title_of(category: str) -> str:
    """A category in words."""
    return _TITLES.get(category, category.replace("_", " "))


def largest_loss(breakdown: Mapping[str, float]) -> str:
    """The category that takes most of a step's seconds beside its products; empty where nothing else takes any."""
    losses = {name: seconds for name, seconds in breakdown.items() if name not in PRODUCTS}
    return max(losses, key=losses.__getitem__, default="")
