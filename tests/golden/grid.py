"""What the golden net holds: every preset in a few shapes, about 40 plans, each on six hardware profiles."""

from __future__ import annotations

from typing import Any, Final

HARDWARE: Final = ("dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "hgx-h800", "gb200-nvl72")
GPUS_PER_NODE: Final = {"gb200-nvl72": 4}

_PART = {"granularity": "selective"}


def _case(model: str, framework: str, plan: dict[str, Any], version: str = "", **training: Any) -> dict[str, Any]:
    # Even loads, as benchmarks force them: what an expert layer costs does not hang on how a router spreads tokens.
    training = {"routing": {"kind": "balanced"}, **training}
    return {"model": model, "framework": framework, "framework_version": version, "plan": plan, "training": training}


PLANS: Final[dict[str, dict[str, Any]]] = {
    # Dense, Megatron: tensor, sequence, pipeline, context.
    "dense": _case("llama3.1-8b", "megatron-core", {"dp": 8}),
    "tp": _case("llama3.1-8b", "megatron-core", {"tp": 4, "dp": 2, "sequence_parallel": False}),
    "tp-sp": _case("llama3.1-8b", "megatron-core", {"tp": 4, "dp": 2}),
    "tp-sp-2022": _case("gpt3-175b", "megatron-core", {"tp": 8, "pp": 8}, "2022-05"),
    "tp-2021": _case("gpt3-175b", "megatron-core", {"tp": 8, "pp": 8, "sequence_parallel": False}, "2021-06", precision="fp16",
                     dropout=0.1),
    "overlap-tp": _case("llama3.1-8b", "megatron-core", {"tp": 8, "overlap_tp": True}),
    "tp16-kv8": _case("llama3.1-70b", "megatron-core", {"tp": 16, "pp": 2}),
    "pp": _case("llama3.1-70b", "megatron-core", {"tp": 2, "pp": 4, "dp": 2}),
    "interleaved": _case("llama3.1-70b", "megatron-core", {"tp": 2, "pp": 4, "virtual_stages": 4}),
    "zb-h1": _case("llama2-13b", "zero-bubble", {"pp": 8, "schedule": "zb-h1"}, micro_batch_size=1),
    "zb-v": _case("llama2-13b", "megatron-core", {"pp": 4, "tp": 2, "schedule": "zb-v"}),
    "dualpipe": _case("qwen3-30b-a3b", "megatron-core", {"pp": 4, "ep": 8, "dp": 8, "schedule": "dualpipe", "overlap_ep": True},
                      global_batch_size=128),
    "cp-ring": _case("llama3.1-8b", "megatron-core", {"cp": 4, "dp": 2}, sequence_length=32768),
    "cp-gather": _case("llama3.1-8b", "megatron-core", {"cp": 4, "tp": 2, "cp_style": "all_gather"}, sequence_length=32768),
    "cp-ulysses": _case("llama3.1-8b", "megatron-core", {"cp": 4, "tp": 2, "cp_style": "ulysses"}, sequence_length=32768),
    # Recomputation.
    "full": _case("llama3.1-8b", "megatron-core", {"tp": 4, "pp": 2, "recompute": "full"}),
    "full-first": _case("llama3.1-8b", "megatron-core",
                        {"pp": 2, "dp": 4, "recompute": {"granularity": "full", "num_layers": 5, "method": "block"}}),
    "core-attn": _case("gpt3-175b", "megatron-core", {"tp": 8, "pp": 8, "recompute": "selective"}, "2022-05", precision="fp16",
                       dropout=0.1),
    "layernorm": _case("llama3.1-8b", "megatron-core", {"tp": 2, "dp": 4, "recompute": {**_PART, "modules": ["layernorm"]}}),
    "mlp": _case("llama3.1-8b", "megatron-core", {"tp": 2, "dp": 4, "recompute": {**_PART, "modules": ["mlp"]}}),
    "attention": _case("llama3.1-8b", "megatron-core", {"tp": 2, "dp": 4, "recompute": {**_PART, "modules": ["attention"]}}),
    # torch.
    "titan-fsdp": _case("llama3.1-8b", "torchtitan", {"dp": 16, "zero_stage": 3}, "2024-12"),
    "titan-op": _case("llama3.1-8b", "torchtitan", {"dp": 8, "zero_stage": 3, "recompute": {**_PART, "modules": ["op"]}},
                      "2025-03", compile=True),
    "titan-tp": _case("llama3.1-70b", "torchtitan", {"tp": 8, "dp": 2, "zero_stage": 3, "recompute": "full"}, "2024-12"),
    "titan-cp": _case("llama3.1-8b", "torchtitan", {"cp": 4, "dp": 2, "zero_stage": 3, "cp_style": "all_gather"}, "2025-03",
                      sequence_length=32768),
    "titan-pp": _case("llama3.1-8b", "torchtitan", {"pp": 4, "dp": 2, "tp": 2, "zero_stage": 3}, "2024-12"),
    "titan-fp8": _case("llama3.1-8b", "torchtitan", {"dp": 8, "zero_stage": 3}, "2025-08", precision="fp8", compile=True),
    "titan-fp8-row": _case("llama3.1-8b", "torchtitan", {"dp": 4, "tp": 2, "zero_stage": 3}, "2025-08", precision="fp8-rowwise",
                           compile=True),
    "deepspeed": _case("llama2-7b", "deepspeed", {"dp": 16, "zero_stage": 3}, "2023-09"),
    "hsdp": _case("llama2-7b", "llm-foundry", {"dp": 16, "zero_stage": 3, "shard_size": 8}),
    "nanotron": _case("llama2-7b", "nanotron", {"dp": 2, "tp": 4, "pp": 2}),
    # Narrow formats, states.
    "fp8": _case("llama3.1-8b", "megatron-core", {"tp": 2, "dp": 4}, precision="fp8"),
    "fp8-nemo": _case("llama3.1-70b", "nemo", {"tp": 4, "pp": 4}, "2025-06", precision="fp8"),
    "fp8-block": _case("deepseek-v3", "megatron-core", {"pp": 16, "ep": 32, "dp": 32, "etp": 1,
                       "recompute": {**_PART, "modules": ["layernorm", "mla_up_proj", "moe_act"]}}, precision="fp8-block",
                       global_batch_size=512),
    "fp32": _case("llama2-7b", "torch-fsdp", {"dp": 8, "zero_stage": 3}, precision="fp32", compile=False),
    "lora": _case("llama2-70b", "nemo", {"tp": 4, "cp": 2, "dp": 1}, "2025-06", trainable="lora"),
    "ddp": _case("llama2-7b", "megatron-core", {"dp": 8, "zero_stage": 0}, "2022-11"),
    # Experts.
    "ep": _case("mixtral-8x7b", "megatron-core", {"ep": 8, "dp": 8, "pp": 1}),
    "ep-etp": _case("mixtral-8x7b", "megatron-core", {"tp": 2, "etp": 2, "ep": 4, "pp": 2, "dp": 4}),
    "ep-moe": _case("qwen3-30b-a3b", "megatron-core", {"ep": 8, "dp": 8, "recompute": {**_PART, "modules": ["moe"]}}),
    "ep-deepep": _case("deepseek-v2", "megatron-core", {"ep": 8, "tp": 2, "pp": 4, "dp": 4, "etp": 1, "ep_dispatcher": "deepep"}),
    "ep-skew": _case("qwen3-30b-a3b", "torchtitan", {"ep": 4, "dp": 8, "zero_stage": 3}, "2025-08",
                     routing={"kind": "zipf", "alpha": 0.3}),
    "mla-attention": _case("deepseek-v3", "megatron-core", {"pp": 8, "ep": 32, "tp": 2, "dp": 32, "etp": 1,
                           "recompute": {**_PART, "modules": ["attention", "shared_experts"]}}, global_batch_size=256),
    "encoder-decoder": _case("switch-base", "plain", {"ep": 8, "dp": 8}, sequence_length=512),
    "window": _case({"preset": "llama3.1-8b", "sliding_window": 1024}, "megatron-core", {"tp": 2, "cp": 2, "dp": 2}),
    "mlp-tp": _case("mlp-4096x24", "plain", {"tp": 8, "sequence_parallel": False, "recompute": "full"}, sequence_length=1),
    "cnn": _case("alexnet", "plain", {"tp": 2}, sequence_length=1, precision="fp32"),
}  # fmt: skip
"""Name -> case; each runs on every one of HARDWARE that has its format."""

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "one": _case("", "megatron-core", {}),
    "tp2": _case("", "megatron-core", {"tp": 2}, precision="bf16"),
    "torch": _case("", "torchtitan", {"tp": 2, "sequence_parallel": False, "zero_stage": 3}, "2024-12", precision="bf16"),
}
"""Blocks of every preset in these shapes (op lists only)."""
