"""Models by name, from Hugging Face config.json files of every supported family, and from TOML tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpar.errors import InputError, UnknownNameError
from simpar.model.families import ALIASES, READERS, TABLE
from simpar.model.huggingface import from_huggingface
from simpar.model.ledger import active_parameters, total_parameters
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.base import data_dir
from simpar.specs.model import MlpSpec, TransformerSpec
from simpar.specs.models_io import load_model, model_names, preset_called, preset_described
from simpar.specs.scenario import make_scenario, read_scenario

HF = Path(__file__).parent / "data" / "hf"

PUBLISHED = {
    "bloom": 176_247_271_424, "deepseek_v2": 235_741_434_880, "deepseek_v3": 671_026_404_352,
    "gemma": 8_537_680_896, "gemma2": 9_241_705_984, "gpt2": 124_439_808, "gpt_neox": 20_554_567_680,
    "llama": 8_030_261_248, "mistral": 7_241_732_096, "mixtral": 46_702_792_704, "qwen2": 72_706_203_648,
    "qwen2_moe": 14_315_784_192, "qwen3": 8_190_735_360, "qwen3_moe": 30_532_122_624,
}  # fmt: skip
"""Tensors of the released checkpoints: BLOOM 176B, DeepSeek-V2 and V3, Gemma 7B, Gemma 2 9B, GPT-2, GPT-NeoX 20B,
Llama 3.1 8B, Mistral 7B, Mixtral 8x7B, Qwen2.5 72B, Qwen1.5-MoE-A2.7B, Qwen3 8B, Qwen3 30B-A3B."""

SAME_AS_PRESET = {
    "bloom": "bloom-176b", "deepseek_v2": "deepseek-v2", "deepseek_v3": "deepseek-v3", "llama": "llama3.1-8b",
    "mixtral": "mixtral-8x7b", "qwen2": "qwen2.5-72b", "qwen3_moe": "qwen3-30b-a3b",
}  # fmt: skip

NOT_THE_MODEL = {"name", "source", "published_parameters", "published_as"}
BUFFERS = {"deepseek_v3": {"router_bias"}}
"""transformers holds the selection bias as a buffer, the paper counts it."""
UNUSED = {"qwen3_moe": {"intermediate_size"}}
"""No layer is dense."""


def config(family: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((HF / f"{family}.json").read_text())
    return loaded


def shape(model: TransformerSpec | ArchitectureSpec, family: str = "") -> dict[str, Any]:
    table = model.model_dump(exclude=NOT_THE_MODEL | UNUSED.get(family, set()))
    for name in BUFFERS.get(family, ()):
        table["moe"].pop(name)
    return table


def transformer(config: dict[str, Any]) -> TransformerSpec:
    model = from_huggingface(config)
    assert isinstance(model, TransformerSpec)
    return model


def as_version_5(old: dict[str, Any]) -> dict[str, Any]:
    """`old` with the names that transformers 5 writes."""
    new = dict(old)
    if "torch_dtype" in new:
        new["dtype"] = new.pop("torch_dtype")
    if "rope_theta" in new:
        new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), "rope_type": "default"}
    if new["model_type"] in ("qwen3_moe", "mixtral") and "num_experts" in new:
        new["num_local_experts"] = new.pop("num_experts")
    return new


def test_every_family_has_a_fixture() -> None:
    assert {path.name.split(".")[0] for path in HF.glob("*.json")} == set(PUBLISHED) <= set(TABLE)


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_import_reproduces_the_published_count(family: str) -> None:
    assert total_parameters(load_model(str(HF / f"{family}.json"))) == PUBLISHED[family]


@pytest.mark.parametrize("family", sorted(SAME_AS_PRESET))
def test_import_equals_the_preset(family: str) -> None:
    preset = load_model(SAME_AS_PRESET[family])
    assert isinstance(preset, TransformerSpec)
    assert shape(from_huggingface(config(family)), family) == shape(preset, family)


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_versions_4_and_5_give_the_same_model(family: str) -> None:
    assert shape(from_huggingface(as_version_5(config(family)))) == shape(from_huggingface(config(family)))


@pytest.mark.parametrize("path", sorted(HF.glob("*.v5.json")), ids=lambda p: p.name)
def test_version_5_files(path: Path) -> None:
    old = from_huggingface(config(path.name.split(".")[0]))
    assert shape(from_huggingface(json.loads(path.read_text()))) == shape(old)


def test_a_file_without_a_model_type_is_refused() -> None:
    with pytest.raises(InputError, match="model_type"):
        from_huggingface({"hidden_size": 8})


def test_missing_keys_are_listed_together() -> None:
    broken = config("qwen3_moe")
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        del broken[key]
    with pytest.raises(InputError) as caught:
        from_huggingface(broken, file="x/config.json")
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"hidden_size", "vocab_size", "num_hidden_layers"}
    assert all(violation.file == "x/config.json" for violation in caught.value.violations)


@pytest.mark.parametrize("wrong", ["4096", 0, -1, 3.5, True, [1]])
def test_sizes_must_be_positive_integers(wrong: object) -> None:
    with pytest.raises(InputError, match="hidden_size"):
        from_huggingface({**config("llama"), "hidden_size": wrong})


def test_patterns_that_a_transformer_cannot_say_are_layers() -> None:
    scattered = from_huggingface({**config("qwen3_moe"), "mlp_only_layers": [3, 7]})
    assert isinstance(scattered, ArchitectureSpec)
    assert scattered.stacks[0].pattern[:4] == ("full_experts*3", "full_mlp", "full_experts*3", "full_mlp")
    every_other = from_huggingface({**config("deepseek_v3"), "moe_layer_freq": 2})
    assert isinstance(every_other, ArchitectureSpec)
    assert every_other.stacks[0].pattern[:3] == ("full_mlp*4", "full_experts", "full_mlp")
    assert isinstance(from_huggingface({**config("llama"), "hidden_act": "xielu"}), ArchitectureSpec)
    leading = transformer({**config("qwen3_moe"), "mlp_only_layers": [1, 0]})
    assert leading.moe is not None
    assert leading.moe.first_k_dense_replace == 2


def test_family_details() -> None:
    assert transformer({**config("llama"), "attention_bias": True}).attention_out_bias
    assert transformer(config("qwen2")).attention_bias
    assert not transformer(config("qwen2")).attention_out_bias
    assert transformer(config("mistral")).sliding_window == 4096
    assert transformer(config("qwen2")).sliding_window is None
    windowed = {**config("qwen2"), "use_sliding_window": True, "max_window_layers": 0}
    assert transformer(windowed).sliding_window == 131072
    assert transformer({**config("mistral"), "num_key_value_heads": None}).num_key_value_heads == 32
    assert transformer(config("gemma")).tie_word_embeddings
    lite = transformer({**config("deepseek_v2"), "q_lora_rank": None})
    assert lite.mla is not None
    assert lite.mla.q_lora_rank == 0


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"), ("meta-llama/Meta-Llama-3-8B", "llama3.1-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"), ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"), ("google/gemma-3-27b-it", "gemma3-27b"),
    ],
)  # fmt: skip
def test_names_at_hugging_face_mean_presets(name: str, preset: str) -> None:
    assert load_model(name) == load_model(preset)


@pytest.mark.parametrize("name", model_names())
def test_every_preset_is_found_under_an_organisation(name: str) -> None:
    assert preset_called(f"org/{name.upper()}") == name


@pytest.mark.parametrize("name", ["mistralai/Mistral-7B-v0.1", "meta-llama/Llama-5-8B", "Qwen/Qwen3-8", "", "/"])
def test_names_of_other_models_mean_no_preset(name: str) -> None:
    assert preset_called(name) is None


@pytest.mark.parametrize(
    ("text", "preset"),
    [("Llama 3.1 405B proxy, 8 layers", "llama3.1-405b"), ("Meta-Llama-3-8B (untied)", "llama3.1-8b"),
     ("Mixtral 8x22B-G8T8", "mixtral-8x22b"),
     ("Nemotron_3_Nano", "nemotron-3-nano-30b-a3b"), ("DeepseekV2_236B", "deepseek-v2"), ("Nemotron", None), ("of 8B", None)],
)  # fmt: skip
def test_descriptions_speak_of_presets(text: str, preset: str | None) -> None:
    assert preset_described(text) == preset


def test_an_error_lists_the_nearest_of_many_names() -> None:
    with pytest.raises(UnknownNameError) as error:
        load_model("mistralai/Mistral-7B-v0.1")
    text = str(error.value)
    assert "did you mean 'mistral-7b-v0.3'" in text
    assert f"`simpar models` lists all {len(model_names())}" in text
    assert len(text) < 400


def test_unknown_preset_names_the_closest() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'llama3\.1-405b'"):
        load_model("llama3-405b")
    assert "llama3.1-405b" in model_names()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[1]", "one object"),
        ("model.toml", "kind = ", "not valid TOML"),
        ("model.toml", 'kind = "rnn"', "unknown kind"),
        ("model.toml", 'kind = "mlp"\nwidht = 3', "did you mean 'width'"),
    ],
)
def test_broken_files_are_one_message(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        load_model(name, base=tmp_path)


def test_missing_files_are_one_message(tmp_path: Path) -> None:
    for name in ("nowhere.json", "nowhere.toml"):
        with pytest.raises(InputError, match="no such file"):
            load_model(name, base=tmp_path)


def test_paths_are_relative_to_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((HF / "llama.json").read_text())
    (tmp_path / "mine.toml").write_text('[model]\nkind = "mlp"\nwidth = 8\ndepth = 2')
    assert load_model("model", base=tmp_path) == load_model("model/config.json", base=tmp_path)
    assert load_model("mine.toml", base=tmp_path) == MlpSpec(name="mine", width=8, depth=2)
    table = {
        "model": "model/config.json", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 512, "global_batch_size": 8},
    }  # fmt: skip
    scenario = make_scenario(table, file=str(tmp_path / "s.toml"))
    assert total_parameters(scenario.model) == PUBLISHED["llama"]


def test_the_documentation_lists_every_preset_with_its_count() -> None:
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    for name in model_names():
        assert f"| `{name}` | {total_parameters(load_model(name)):,} |" in text
    assert all(f"`{family}`" in text for family in {*TABLE, *READERS, *ALIASES})
    assert f"# {active_parameters(load_model('deepseek-v3'))}: what one token meets" in text


def test_the_documentation_names_every_published_metric() -> None:
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    for path in data_dir("scenarios").glob("*.toml"):
        for fact in read_scenario(path).published:
            assert f"`{fact.metric}`" in text, f"{path.name}: {fact.metric}"
