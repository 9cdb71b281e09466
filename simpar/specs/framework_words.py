"""The words that policies of frameworks are written in, other names of frameworks, and the work of the losses."""

from __future__ import annotations

from typing import Final, Literal

AttentionKernel = Literal["unfused", "fa1", "fa2", "fa3", "flex", "cudnn", "cudnn9.19", "aiter", "aotriton", "aotriton0.11"]
GradientDtype = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
Placeholders = Literal["none", "each", "shapes"]
Ability = Literal[
    "pure_bf16", "optimizer_in_backward", "narrow_optimizers", "quantised_base", "host_parameters", "fused_kernels"
]  # fmt: skip
LossKind = Literal["fused", "unfused", "half", "chunked", "linear", "tiled"]

LOSS_WORK: Final = (
    ("fused", "cross_entropy", 6.0, 6.0), ("unfused", "loss_chain", 18.0, 18.0), ("compiled", "cross_entropy", 4.0, 4.0),
    ("half", "loss_chain", 4.0, 8.0), ("chunked", "cross_entropy", 10.0, 10.0), ("linear", "cross_entropy", 6.0, 0.0),
    ("tiled", "cross_entropy", 4.0, 4.0),
)  # fmt: skip
"""Fused: TransformerEngine's and flash-attn's kernels (logits read twice and turned into their gradient in place, then scaled).
Unfused: torch's cross_entropy over a cast to fp32; half: over 16-bit logits as they are. Compiled: the 16-bit logits read twice,
and read and turned into their gradient. Linear: Liger's kernel on each piece of the logits, all of it in the forward
(liger_kernel/ops/cross_entropy.py). Tiled: log-probabilities tile by tile, the logits computed again in the backward (TRL; Apple's
cut cross-entropy in the matmul)."""

ALIASES: Final[dict[str, str]] = {
    "megatron": "megatron-core",
    "megatron-lm": "megatron-core",
    "megatron-swift": "megatron-core",
    "primus": "megatron-core",
    "fsdp": "torchtitan",
    "fms-fsdp": "torch-fsdp",
    "composer": "llm-foundry",
    "hagemann": "aa-scaling",
    "bloom": "megatron-deepspeed",
    "torch": "plain",
    "pytorch": "plain",
    "nanogpt": "torch-autocast",
    "accelerate": "transformers",
    "huggingface": "transformers",
    "axolotl": "transformers",
    "llama-factory": "transformers",
    "peft": "transformers",
    "ms-swift": "swift",
}
"""Other names -> canonical ones."""
