"""Settings of flat rows in other words than their columns usually have."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.row_adapters import adapters_of
from simpar.evidence.row_complete import completed
from simpar.evidence.row_framework import attention_of, framework_of, stated_precision
from simpar.evidence.row_layers import recompute_of
from simpar.evidence.row_machine import _named_memory
from simpar.evidence.row_plan import _fused, _loss, _offload
from simpar.evidence.row_values import read_values
from simpar.specs.framework import framework


@pytest.mark.parametrize(
    ("column", "value", "read"),
    [
        ("recompute", "None", "none"), ("recompute", "Full", "full"), ("recompute", "unknown", None),
        ("recompute", "selective modules", "selective modules"), ("recompute", "Full (block, 5 layers)", "full (block, 5 layers)"),
        ("recompute", True, "full"), ("recompute", False, "none"),
        ("zero_stage", "ZeRO-3", 3), ("zero_stage", "zero2", 2), ("zero_stage", "stage 1", 1), ("zero_stage", "none", 0),
        ("zero_stage", False, 0), ("zero_stage", "FSDP2", 3), ("zero_stage", "unknown", None),
        ("seq_len", "8k", 8192), ("seq_len", "4,096", 4096), ("hidden", "4096", 4096),
        ("compile", "torch.compile", True), ("compile", "yes (max-autotune)", True), ("compile", "no, eager", False),
        ("compile", "eager", False), ("compile", "none", False), ("compile", "per layer", True), ("compile", "model", "model"),
        ("sp", "yes (Megatron)", True), ("flash_attention", "on (FA3)", "on (FA3)"), ("flash_attention", "no (SDPA math)", False),
    ],
)  # fmt: skip
def test_words_of_settings(column: str, value: object, read: object) -> None:
    found = read_values({column: value})
    assert (found.row.get(column), found.wrong) == (read, {})


def test_other_words_are_no_counts() -> None:
    assert "hidden" in read_values({"hidden": "8k"}).wrong
    assert "zero_stage" in read_values({"zero_stage": "some"}).wrong


@pytest.mark.parametrize(
    ("words", "read"),
    [("float16", "fp16"), ("16-mixed", "fp16"), ("half", "fp16"), ("bfloat16", "bf16"), ("bf16-mixed", "bf16")],
)
def test_words_of_precisions(words: str, read: str) -> None:
    assert stated_precision({"precision": words}) == read


def test_full_recomputation_of_whatever_else_is_said() -> None:
    assert recompute_of({"recompute": "full, reentrant"}, framework("transformers"), []) == "full"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Vicuna-7B-v1.5", "llama2-7b"), ("LLaMA-7B", "llama2-7b"), ("open_llama_7b_v2", "llama2-7b"), ("LLaMA-65B", None),
        ("TinyLlama-1.1B", "tinyllama-1.1b"), ("CodeLlama-7B", None), ("Code Llama 7B", None),
        ("LLaMA-7B-MoE", None), ("DeepSeek-R1-Distill-Qwen-1.5B", None), ("Mistral 7B v0.1", "mistral-7b-v0.3"),
        ("DeepSeek-R1-Distill-Llama-8B", "llama3.1-8b"), ("DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"), ("Qwen2-7B", "qwen2.5-7b"),
        ("Nemotron-4 15B", "nemotron4-15b"), ("Llama-3.2-3B", "llama3.2-3b"), ("Llama 2 70B", "llama2-70b"),
        ("DeepSeek-V3-16B", "deepseek-v2-lite"), ("DeepSeek-V3-671B", "deepseek-v3"), ("DeepSeek-V3 (37B active)", "deepseek-v3"),
        ("DeepSeek-V3-100B", None), ("Kimi-K2-1T", "kimi-k2"), ("Kimi-K2 16B", None),
    ],
)  # fmt: skip
def test_names_of_models_with_the_dimensions_of_a_shipped_one(name: str, preset: str | None) -> None:
    notes = completed({"model_name": name})[1]
    assert notes == ([f"model dimensions not stated: those of {preset}"] if preset else [])


@pytest.mark.parametrize(("sizes", "known"), [({"layers": 96}, True), ({"layers": 96, "hidden": 2048}, False)])
def test_a_named_model_of_another_depth_has_its_widths(sizes: dict[str, int], known: bool) -> None:
    found, notes = completed({"model_name": "Qwen3-235B-A22B", **sizes})
    assert found["layers"] == 96
    assert (found.get("heads"), found.get("moe_ffn")) == ((64, 1536) if known else (None, None))
    assert notes == (["model dimensions not stated: those of qwen3-235b-a22b, with 96 layers"] if known else [])


def test_latent_attention_that_the_architecture_says_has_the_named_models_ranks() -> None:
    sizes = {"layers": 61, "hidden": 7168, "heads": 64, "moe_experts": 384, "moe_ffn": 2048}
    assert "kv_lora 512" in completed({"model_name": "Kimi-K2", "arch": "moe-mla", **sizes})[0]["mla"]
    assert "mla" not in completed({"model_name": "Kimi-K2", "arch": "moe", **sizes})[0]


@pytest.mark.parametrize(
    ("policy", "modules"),
    [
        ("save_dot_with_context_except_mlp", {"mlp", "layernorm"}), ("save_dot_except_mlp", {"mlp", "layernorm", "core_attn"}),
        ("save_dot_except_mlpwi", {"mlp", "layernorm", "core_attn"}), ("minimal_flash", {"layernorm", "core_attn"}),
    ],
)  # fmt: skip
def test_policies_of_maxtext_recompute_what_they_do_not_keep(policy: str, modules: set[str]) -> None:
    found = recompute_of({"recompute": "selective", "recompute_detail": policy}, framework("maxtext"), [])
    assert isinstance(found, dict)
    assert set(found["modules"]) == modules


@pytest.mark.parametrize(
    ("name", "window"),
    [("Mistral-7B-Instruct-v0.1", 4096), ("Zephyr 7B beta", 4096), ("Mistral 7B v0.3", None), ("Mistral-7B-Instruct-v0.2", None)],
)
def test_windows_of_models_that_the_shipped_one_lacks(name: str, window: int | None) -> None:
    assert completed({"model_name": name})[0].get("attn_window") == window
    assert completed({"model_name": name, "attn_window": "full"})[0]["attn_window"] == "full"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("gemma-2-9b-it", "gemma2-9b"),
        ("OLMo-2-1124-13B", "olmo2-13b"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("Llama-4-Scout", "llama4-scout"),
    ],
)
def test_layers_that_rows_cannot_state_are_the_named_model_s(name: str, preset: str) -> None:
    found, notes = completed({"model_name": name})
    assert (found["shipped_model"], notes) == (preset, [f"layers that are not alike: those of {preset}"])
    assert "shipped_model" not in completed({"model_name": name, "layers": 4, "hidden": 1024})[0]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"offload": "CPU", "zero_stage": 2, "framework": "DeepSpeed"}, {"optimizer"}),
        ({"offload": "cpu", "zero_stage": 3, "fsdp": "DeepSpeed ZeRO-3"}, {"optimizer"}),
        ({"offload": "ZeRO-Infinity", "zero_stage": 3, "framework": "DeepSpeed"}, {"optimizer", "parameters"}),
        ({"offload": "yes", "zero_stage": 3, "framework": "HF Trainer", "fsdp": "FSDP"}, {"optimizer", "parameters"}),
        ({"offload": "activations to CPU", "layers": 32}, {"activations"}),
        ({"offload": "none"}, set()),
    ],
)
def test_offload_that_names_no_part(row: dict[str, Any], parts: set[str]) -> None:
    assert set(_offload(row, 1, []).get("offload", {})) == parts


@pytest.mark.parametrize(
    "words", ["non-fused RMSNorm", "without fused RMSNorm", "not fused rope", "un-fused norm", "no fused norm", "unfused norm"]
)
def test_kernels_that_are_said_not_to_be_fused(words: str) -> None:
    assert _fused(words) == []
    assert _fused(f"{words}; fused SwiGLU") == ["SwiGLU"]


@pytest.mark.parametrize(("words", "loss"), [("without fused cross entropy", None), ("non-fused cross entropy", "unfused")])
def test_losses_that_are_said_not_to_be_fused(words: str, loss: str | None) -> None:
    assert _loss({"notes": words}, framework("megatron-core")).get("cross_entropy") == loss


@pytest.mark.parametrize(
    ("notes", "modules"),
    [
        ("QK-norm on q and k", None), ("LoRA rank 16, k and v repeated", None), ("LoRA; tuned up and down", None),
        ("LoRA rank 16 on q,k,v,o", "attention"), ("LoRA r=8, alpha 32, on q and v", "qv"),
        ("target modules: gate, up, down", "mlp"),
        ("LoRA (q, k, v, o, gate, up, down)", "all"), ("adapters on the Q and V", "qv"), ("q_proj and v_proj", "qv"),
    ],
)  # fmt: skip
def test_notes_name_the_modules_of_adapters_where_they_speak_of_adapters(notes: str, modules: str | None) -> None:
    assert adapters_of({"task": "lora", "notes": notes}, framework("transformers")).get("lora_modules") == modules


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("linear_qkv,linear_proj,linear_fc1,linear_fc2", "all"), ("linear_qkv, linear_proj", "attention"),
        ("*.linear_fc1 *.linear_fc2", "mlp"), ("linear_q_proj, linear_kv_down_proj, linear_kv_up_proj", "attention"),
        ("linear_fc1, linear_kv_down_proj", "all"),
    ],
)  # fmt: skip
def test_modules_of_adapters_by_the_names_of_megatron(targets: str, modules: str) -> None:
    assert adapters_of({"task": "lora", "lora_target_modules": targets}, framework("megatron-bridge"))["lora_modules"] == modules


@pytest.mark.parametrize(
    ("gpu", "memory"),
    [
        ("GH200 480GB", None), ("GH200 120GB", None), ("GH200 (96 GB HBM3, 480 GB LPDDR5X)", 96), ("GH200 144G HBM3e, 480 GB", 144),
        ("GH200 (480 GB LPDDR5X, 96 GB HBM3)", 96), ("A100-SXM4-40GB", 40), ("A10G", None),
    ],
)  # fmt: skip
def test_memory_in_the_name_of_a_gpu(gpu: str, memory: int | None) -> None:
    assert _named_memory(gpu) == memory


@pytest.mark.parametrize(
    ("row", "kernel"),
    [
        ({"notes": "no eager attention"}, "auto"), ({"notes": "2x faster than eager attention"}, "auto"),
        ({"flash_attention": "FA2 (no eager fallback)"}, "fa2"), ({"flash_attention": "flash (math disabled)"}, "auto"),
        ({"notes": "math backend is off"}, "auto"), ({"flash_attention": "eager, not flash"}, "unfused"),
        ({"flash_attention": "eager (no flash)"}, "unfused"), ({"notes": "eager attention instead of flash"}, "unfused"),
        ({"flash_attention": "SDPA without math or eager"}, "auto"), ({"notes": "fused norm; eager attention"}, "unfused"),
    ],
)  # fmt: skip
def test_kernels_of_attention_that_a_run_does_without(row: dict[str, Any], kernel: str) -> None:
    assert attention_of(row) == kernel


@pytest.mark.parametrize(
    ("row", "tuning"),
    [
        ({"task": "SFT"}, True), ({"task": "supervised fine-tuning"}, True), ({"task": "full fine-tuning"}, True),
        ({"task": "Full-parameter"}, True), ({"lora_rank": 16}, True), ({"task": "LoRA"}, True),
        ({"task": "full pre-training"}, False), ({"task": "pretrain"}, False), ({}, False),
    ],
)  # fmt: skip
def test_tasks_that_fine_tune(row: dict[str, Any], tuning: bool) -> None:
    name = framework_of({"framework": "Megatron-Bridge 26.06", "model_name": "Qwen3-8B", **row})[0]
    assert name == ("megatron-bridge-defaults" if tuning else "megatron-bridge")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"framework": "Megatron-Bridge 0.4.2, recipe qwen3_30b_a3b_pretrain_config"}, "megatron-bridge-defaults"),
        ({"notes": "deepseek_v3_pretrain_config_32nodes", "model_name": "DeepSeek-V3"}, "megatron-bridge-tuning"),
        ({"notes": "qwen3_235b_a22b_pretrain_config_gb300"}, "megatron-bridge"),
        ({"model_name": "OLMoE-1B-7B"}, "megatron-bridge-defaults"),
        ({"notes": "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"}, "megatron-bridge"),
        ({"model_name": "Kimi-K2"}, "megatron-bridge"),
        ({"task": "sft", "model_name": "Moonlight-16B-A3B"}, "megatron-bridge-tuning"),
        ({"task": "sft", "model_name": "Qwen3-VL-30B"}, "megatron-bridge-tuning"),
        ({"task": "lora", "model_name": "Llama-3-70B"}, "megatron-bridge"), ({"model_name": None}, "megatron-bridge"),
        ({"framework": "Megatron-LM", "task": "sft"}, "megatron-core"),
    ],
)  # fmt: skip
def test_recipes_of_megatron_bridges_library_fuse_less(row: dict[str, Any], name: str) -> None:
    assert framework_of({"framework": "Megatron-Bridge 0.4.2", "model_name": "Qwen3-30B-A3B", "task": "pretrain", **row})[0] == name
