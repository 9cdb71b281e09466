"""The dated rows of frameworks whose step XLA compiles as a whole: MaxText and PAX. See framework_rows.py."""

from __future__ import annotations

from typing import Any, Final

from simpar.specs.framework_releases import Base
from simpar.specs.framework_releases import FrameworkRow as Row
from simpar.specs.framework_torch import TORCH

_PIPELINE: Final[dict[str, Any]] = {
    "schedule": "gpipe", "schedules": ("gpipe", "interleaved_bfs"), "overlap_p2p_interleaved": False,
}  # fmt: skip
"""A pipeline as one loop over micro-batches that JAX differentiates: the forwards of all come before the first backward; with
several layers of stages on a rank all micro-batches pass one of them before the next; stages advance together, and what they hand
on travels between two iterations (google/praxis praxis/layers/pipeline.py, LayerwiseShardablePipelined and
CircularLayerwiseShardablePipelined: micro-batches x circular_repeat + stages - 1 iterations, a shifting buffer; MaxText
layers/pipeline.py, num_pipeline_repeats and the same count). That embedding and head run on the ranks of all stages (paxml
tasks/lm/params model_params.py, batch_dims with the stage axis; MaxText base.yml activation_embed_and_logits_batch) is not
modelled: they are the first and last stage's."""

XLA: Final[dict[str, tuple[Base, tuple[Row, ...]]]] = {
    "maxtext": (
        "",
        (Row((2023, 6),
             {**TORCH, "benchmarked": False, "compile": True, "triton_from_python": False,
              "abilities": (), "fused_activation": True, "fused_residual": True, "fused_rope": True,
              "zero_stage_default": 3, "parameter_bytes": 0.0, "static_routing": True, "dense_experts": ("nvidia",),
              "separate_casts": "delayed", "fsdp_wide_experts": True,
              "fsdp_reduce_dtype": "bf16", "logits_fp32_copies_compiled": 0.5, "planned": True, "fragmentation": 1.0,
              "attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn")), **_PIPELINE},
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
    "pax": (
        "maxtext-unpipelined",
        (Row((2023, 4),
             {"attention": (("", "unfused"),), "fused_softmax": True,
              "parameter_bytes": 2.0, "bucket_bytes": 51_200.0,
              "recompute_default": "full", "selective_recompute": ("core_attn", "layernorm"),
              "sequence_parallel_default": True, "layer_rounding": "equal",
              "lacks": ("context_parallelism", "dropless_experts", "partial_sharding")},
             "google/paxml and google/praxis on GPUs as NVIDIA's JAX-Toolbox runs them. The step is one jitted function, as "
             "MaxText's, so kernels, loss, gradients in 16 bits and planned memory are its. paxml trainer_lib.py _loss_fn casts "
             "all variables to bf16 before the model sees them, so that the loop over layers reads a 16-bit copy of each shard "
             "beside the fp32 weights (MaxText casts inside a layer). XLA's flags of JAX-Toolbox rosetta/projects/pax (README.md, "
             "xla_flags/common.env, 2023 to 2025): the latency-hiding scheduler, no pipelined collectives, all-reduces joined up "
             "to 51,200 bytes. paxml tasks/lm/model_params.py: CHECKPOINT_POLICY is SAVE_NOTHING, layers are a multiple of stages "
             "x CIRCULAR_REPEAT; SAVE_DOT_WITH_NO_BATCH_DIM, which contrib/gpu/scripts_gpu/configs.py sets for GPT5B, keeps the "
             "products with weights. praxis layers/transformer_models.py set_sharding_params_v1: weights lie over data and model "
             "axes, their states with them; activations between layers over the model axis too (training_optimized), along the "
             "width where Megatron's sequence parallelism cuts the tokens, so that as many bytes move and stay; no axis for a "
             "sequence. praxis layers/transformers.py TransformerFeedForwardMoe: experts have a capacity, but with a gating meant "
             "for decoding. praxis layers/attentions.py: logits, softmax in fp32, product with the values"),
         Row((2023, 10), {"te_scaling": "delayed", "separate_casts": False},
             "JAX-Toolbox rosetta/projects/pax README.md, changelog of 2023-10-26: TransformerEngine's layers by default, fp8 with "
             "its delayed scaling"),
         Row((2024, 4), {"attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn"))},
             "The same, 2024-04-26: TransformerEngine's flash attention (cuDNN's) by default; the 126M model does without")),
    ),
    "pax-unrolled": (
        "pax",
        (Row((2023, 4), {"fsdp_prefetch_groups": 1, "recompute_default": "none"},
             "praxis under USE_REPEATED_LAYER = False, as paxml/contrib/gpu/scripts_gpu has it for Llama (run_llama_boolq.sh) and "
             "GPT 126M (configs.py): layers are one graph and no loop, all over which the latency-hiding scheduler moves gathers "
             "and reductions; model_params.py sets CHECKPOINT_POLICY for repeated layers alone"),),
    ),
}  # fmt: skip
"""Canonical name -> (what it builds on, its rows in order of time), as in framework_rows.py."""
