"""What the software below every framework takes of the device and brings, as dated rows: CUDA context, NCCL's buffers, cuBLAS's
workspaces, torch's attention on AMD's GPUs and its sums of rows.

The rows of framework_rows.py come on top; a framework whose container is ahead of torch's wheels says so there.
"""

from __future__ import annotations

from typing import Any, Final

from simpar.specs.framework_releases import FrameworkRow as Row

MiB: Final = 2.0**20

LAZY_CONNECTIONS: Final[dict[str, Any]] = {"nccl_pair_bytes": 544 * MiB / 3.5, "nccl_group_bytes": 688 * MiB / 3.5}
"""Of NCCL 2.22 and later: connections are made by the first collective that needs them; with one algorithm (rings) in use,
buffers take 3.5 times less than with all of them connected (NVIDIA's announcement of NCCL 2.22, 2024-09)."""

RUNTIME: Final = (
    Row(
        (2020, 1),
        {"context_bytes": 1.5 * 2**30, "nccl_pair_bytes": 544 * MiB, "nccl_group_bytes": 688 * MiB, "nccl_peer_bytes": 448 * MiB},
        "Context: before CUDA 11.7 all kernels are loaded with the library, over 1,000 MB (pytorch issue 107667), 1.3 to 1.6 GB on "
        "the A100s of BLOOM's chronicles. NCCL: issue 964 (A100, NVLink: 544 MB of two ranks, 688 of more, rings and trees "
        "connected); issue 1685 (8 H100: 1.06 GB, 4.34 after the first all-to-all: 32 channels with each of 7 peers, 14 MiB each, "
        "are 3.29)",
    ),
    Row(
        (2022, 10),
        {"context_bytes": 426 * MiB},
        "torch 1.13 loads modules lazily (PR 86509: 287 for 667 MB after one tensor); 426 MiB with torch 2.10 and CUDA 13 "
        "(unsloth-zoo PR 1053), about 400 with earlier ones (pytorch issue 109888); 1.13 came out in 2022-10",
    ),
    Row(
        (2023, 3),
        {"blas_workspace_bytes": (("", 8_519_680.0), ("hopper", 32 * MiB))},
        "torch 2.0 takes cuBLAS's workspaces from its own allocator (pytorch issue 95668, PR 89027: :4096:2:16:8, on Hopper "
        "32 MiB), one for each host thread and stream that multiplies: the caller's and autograd's",
    ),
    Row(
        (2024, 4),
        {"rocm_sdpa": "aotriton"},
        "torch 2.3 comes with AOTriton 0.4b (compatibility table of ROCm/aotriton README.md). That its backward was slower by far "
        "before 0.7b of torch 2.5 (pytorch issue 135431) is not priced",
    ),
    Row((2025, 4), LAZY_CONNECTIONS, "torch 2.7's wheels come with NCCL 2.26, those before with 2.21"),
    Row(
        (2025, 10),
        {"rocm_sdpa": "aotriton0.11"},
        "torch 2.9 comes with AOTriton 0.11b, whose backward is AITER's on gfx942 and gfx950 where it takes the inputs (pytorch PR "
        "161754; v3python/rules/op_database of 2025-08: the fastest at every square size)",
    ),
    Row(
        (2026, 3),
        {"blas_workspace_bytes": (("", 8_519_680.0), ("hopper", 32 * MiB), ("blackwell", 32 * MiB))},
        "pytorch PR 175344: 32 MiB on Blackwell as well",
    ),
    Row(
        (2026, 8),
        {"bulk_row_adds": True},
        "torch 2.13: scatter_add reduces whole rows by TMA from Hopper on (pytorch PR 182675, torch/_native/ops/scatter_add)",
    ),
)
"""The rows in order of time."""
