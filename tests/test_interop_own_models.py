"""Launch files of the user's own models: every Hugging Face family and models written by hand go out and come back the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.cli import main
from simpar.errors import InputError
from simpar.interop import megatron_import, nanotron_import, torchtitan_import
from simpar.interop.carried import Imported
from simpar.interop.export import FORMATS, export_files
from simpar.specs.scenario import Scenario, make_scenario

CONFIGS = sorted((Path(__file__).parent / "data" / "hf").glob("*.json"))
FRAMEWORKS: Final = {
    "megatron": "megatron-core", "torchtitan": "torchtitan", "deepspeed": "deepspeed", "nanotron": "nanotron",
    "huggingface": "transformers", "axolotl": "transformers", "torchtune": "torchtune",
}  # fmt: skip
PLANS: Final[dict[str, dict[str, Any]]] = {
    "megatron": {"tp": 2, "dp": 8},
    "torchtitan": {"zero_stage": 3},
    "deepspeed": {"zero_stage": 1},
    "nanotron": {"tp": 2, "sequence_parallel": True},
    **{name: {"zero_stage": 3} for name in ("huggingface", "axolotl", "torchtune")},
}
LOADERS: Final[dict[str, Callable[..., Imported]]] = {
    "megatron": megatron_import.load, "torchtitan": torchtitan_import.load, "nanotron": nanotron_import.load,
}  # fmt: skip
REFUSED: Final = {
    "megatron": {"bloom", "gemma", "gemma2", "gpt_neox"},
    "torchtitan": {
        "bloom", "deepseek_v3", "gemma", "gemma2", "gpt2", "gpt_neox", "mistral", "mixtral", "qwen2", "qwen2_moe",
    },
    "nanotron": {
        "bloom", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gpt2", "gpt_neox", "qwen3", "qwen3_moe",
    },
    "deepspeed": set(), "huggingface": set(), "axolotl": set(),
    "torchtune": {path.name.partition(".")[0] for path in CONFIGS},
}  # fmt: skip
"""Families that a framework's file cannot say; all others must go out."""
LLAMA: Final = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
}  # fmt: skip


def scenario(model: Any, format_name: str) -> Scenario:
    return make_scenario({
        "name": "mine", "model": model, "framework": FRAMEWORKS[format_name], "cluster": {"hardware": "dgx-h100", "num_nodes": 2},
        "plan": PLANS[format_name], "training": {"sequence_length": 1024, "global_batch_size": 64},
    }).model_copy(update={"file": ""})  # fmt: skip


def back(format_name: str, text: str) -> Scenario:
    found = LOADERS[format_name](text, file="launched")
    assert not found.warnings
    return found.scenario


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_goes_out_and_comes_back(path: Path, format_name: str) -> None:
    given_scenario = scenario(str(path), format_name)
    if path.name.partition(".")[0] in REFUSED[format_name]:
        with pytest.raises(InputError, match="model"):
            export_files(format_name, given_scenario)
        return
    text = next(iter(export_files(format_name, given_scenario).values()))
    if format_name in LOADERS:
        assert back(format_name, text) == given_scenario


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(("megatron", "nanotron")))
def test_a_model_of_any_name_comes_back(name: str, source: str, format_name: str) -> None:
    own = scenario({"name": name, "source": source, **LLAMA}, format_name)
    text = next(iter(export_files(format_name, own).values()))
    assert back(format_name, text) == own


@pytest.mark.parametrize("name", ["a\n# simpar: plan.tp = 8", "$(touch x)", "yes", "1e5", "a: b", "\u2028x", '"q"', "back\\slash"])
@pytest.mark.parametrize("format_name", ["megatron", "nanotron"])
def test_names_are_texts_and_nothing_else(name: str, format_name: str) -> None:
    own = scenario({"name": name, **LLAMA}, format_name).model_copy(update={"name": name})
    text = next(iter(export_files(format_name, own).values()))
    assert back(format_name, text) == own


def test_a_search_exports_a_model_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parent / "data" / "hf" / "llama.json"
    with pytest.raises(SystemExit) as stop:
        main([
            "search", "--model", str(config), "--hardware", "dgx-h100", "--num-nodes", "1", "--sequence-length", "1024",
            "--global-batch", "8", "--framework", "megatron-core", "--fix", "pp=1", "--fix", "cp=1", "--fix", "schedule=1f1b",
            "--fix", "recompute=none", "--fix", "micro_batch_size=1", "--quiet", "--workers", "1",
            "--export", "megatron", "--out", str(tmp_path / "launch"),
        ])  # fmt: skip
    assert stop.value.code == 0, capsys.readouterr().err
    assert back("megatron", (tmp_path / "launch" / "megatron.sh").read_text()).model.source.startswith("Hugging Face")


def test_nanotron_is_imported_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nanotron.yaml"
    path.write_text(next(iter(export_files("nanotron", scenario(LLAMA, "nanotron")).values())))
    with pytest.raises(SystemExit) as stop:
        main(["import", "nanotron", str(path)])
    assert stop.value.code == 0
    assert 'framework = "nanotron"' in capsys.readouterr().out
