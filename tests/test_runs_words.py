"""Settings of flat rows in other words than their columns usually have."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.row_complete import completed
from simpar.evidence.row_framework import stated_precision
from simpar.evidence.row_plan import _offload
from simpar.evidence.row_recompute import recompute_of
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
        ("TinyLlama-1.1B", "tinyllama-1.1b"), ("CodeLlama-7B", None), ("Mistral 7B v0.1", "mistral-7b-v0.3"),
        ("DeepSeek-R1-Distill-Llama-8B", "llama3.1-8b"), ("DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"), ("Qwen2-7B", "qwen2.5-7b"),
        ("Nemotron-4 15B", "nemotron4-15b"), ("Llama-3.2-3B", "llama3.2-3b"), ("Llama 2 70B", "llama2-70b"),
    ],
)  # fmt: skip
def test_names_of_models_with_the_dimensions_of_a_shipped_one(name: str, preset: str | None) -> None:
    notes = completed({"model_name": name})[1]
    assert notes == ([f"model dimensions not stated: those of {preset}"] if preset else [])


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
    assert set(_offload(row, 1).get("offload", {})) == parts
