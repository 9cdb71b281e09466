"""Rows of frameworks whose steps XLA compiles."""

from __future__ import annotations

from typing import Final

from simpar.specs.framework_releases import Base
from simpar.specs.framework_releases import FrameworkRow as Row
from simpar.specs.framework_torch import TORCH

XLA: Final[dict[str, tuple[Base, tuple[Row, ...]]]] = {
    "maxtext": (
        "",
        (Row((2023, 6),
             {**TORCH, "benchmarked": False, "compile": True,
              "abilities": (), "fused_activation": True, "fused_residual": True, "fused_rope": True,
              "zero_stage_default": 3, "parameter_bytes": 0.0, "static_routing": True, "dense_experts": ("nvidia",),
              "fsdp_reduce_dtype": "bf16", "logits_fp32_copies_compiled": 0.5, "planned": True, "fragmentation": 1.0,
              "attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn"))},
             "MaxText on XLA (SPMD FSDP), fusions assumed equal to a compiled torch graph, that of the loss included, as part "
             "of the one jitted step (train.py, loss_fn); BufferAssignment packs the step's temporaries into one allocation "
             "(openxla/xla service/buffer_assignment.h, heap_simulator.h); layers/moe.py dense_matmul: with a "
             "capacity_factor einsums of each sequence with its mask, without a buffer for the worst case (ROCm blog, 2026-06); "
             "without one jax.lax.ragged_dot, which XLA expands to one product over all experts on NVIDIA GPUs (marin issue 7012: "
             "[262144, 2560] x [64, 2560, 1280] as [262144, 163840] through cuBLAS, jaxlib 0.10.1 and NGC 26.05), while hipBLASLt "
             "has a grouped one (openxla/xla PR 38732); "
             "layers/linears.py casts weights to the dtype of activations before their product, whose gradient is scattered in it; "
             "attention: cudnn_flash_te on every NVIDIA GPU (configs of Google's gpu-recipes for A3 and A4)"),),
    ),
    "maxtext-unpipelined": (
        "maxtext",
        (Row((2023, 6), {"fsdp_prefetch_groups": 0},
             "JAX docs, GPU performance tips: pipelined collectives overlap the next layer's all-gather and reduce-scatter with a "
             "layer's computation; off by default. Recipes of Google and NVIDIA set --xla_gpu_enable_pipelined_all_gather and "
             "_reduce_scatter (gpu-recipes training/a4/*/values.yaml), ROCm's images do not (AMD-AGI/maxtext-slurm train_env.sh); "
             "without, what an iteration of the scan over layers gathers and reduces ends within it"),),
    ),
}  # fmt: skip
"""Canonical name -> (what it builds on, its rows in order of time), as in framework_rows.py."""
