"""One key of a config.json changed at a time: parameters follow transformers' own class, or the key is refused by its name."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from test_models_transformers import ONE, counted, from_file, made, mappings, written  # noqa: E402

from simpar.errors import InputError  # noqa: E402
from simpar.model.huggingface import read  # noqa: E402
from simpar.model.ledger import totals  # noqa: E402

pytestmark = pytest.mark.torch

FREE = re.compile(
    "token|dropout|eps|initializer|std$|theta|use_cache|^output_|^return_|dtype|pruned|architectures|label|transformers_version|name_or_path"
    "|chunk_size_feed|problem_type|is_encoder_decoder|is_decoder|model_type|rope_|_coef|jitter|layerdrop|pdrop|vocab_size|temperature"
    "|softcap|scale|scaling|_act$|activation|multiplier|logit|alpha|beta$|init|limit|^dt_|time_step_(min|max|floor)"
)
"""Keys that no class builds weights by."""
APART: dict[str, set[str]] = {"bailing_hybrid": {"linear_conv_kernel_dim", "short_conv_kernel_size"}}
"""Two keys for one size, of which the class takes the second."""
WERE_WRONG: list[tuple[str, str, Any]] = [
    ("deepseek_v4", "mlp_bias", True), ("deepseek_v4", "n_shared_experts", 2), ("doge", "is_moe", True),
    ("inkling2_text", "sliding_window_size", 512), ("inkling2_text", "rel_extent", 512),
    ("kimi_linear", "tie_word_embeddings", True),
    ("laguna", "gating", "per-element"), ("lfm3", "use_attention_gate", False), ("lfm3", "use_sandwich_norm", False),
    ("modernbert-decoder", "classifier_bias", True), ("qwen3_next", "attention_bias", True), ("solar_open", "attention_bias", True),
    ("zamba2", "mamba_expand", 4), ("zamba2", "n_mamba_heads", 16), ("zamba2", "use_conv_bias", False),
    ("gte", "tie_word_embeddings", False), ("switch_transformers", "router_bias", True),
    ("wav2vec2-bert", "apply_spec_augment", False), ("wav2vec2-bert", "mask_time_prob", 0.0),
    ("hy_v3", "num_shared_experts", 0), ("mixtral", "num_local_experts", 1), ("dots1", "n_routed_experts", 1),
    ("jamba", "num_experts", 1), ("qwen3_moe", "num_experts", 0),
]  # fmt: skip
LEFT_OUT: list[tuple[str, str]] = [
    ("axk1", "mlp_layer_types"), ("beam", "mlp_layer_types"), ("laguna", "mlp_layer_types"), ("hy_v4", "indexer_types"),
    ("lfm3", "layer_types"), ("minimax", "layer_types"), ("bailing_hybrid", "layer_types"), ("bailing_hybrid", "linear_head_dim"),
    ("zamba", "layers_block_type"), ("bart", "decoder_layers"), ("t5", "num_decoder_layers"),
    ("switch_transformers", "encoder_sparse_step"),
]  # fmt: skip
"""Keys without which a class builds what a default or other keys say."""
CONTRADICTORY: list[tuple[str, str, Any]] = [
    ("esmc", "head_dim", 32), ("gemma3n_text", "num_kv_shared_layers", 30), ("helium", "head_dim", 64),
    ("longcat_flash", "qk_head_dim", 96), ("mpt", "expansion_ratio", 2), ("xlstm", "embedding_dim", 2048),
    ("zamba", "attention_hidden_size", 3712), ("zamba2", "tie_word_embeddings", False),
    ("bitnet", "num_attention_heads", 12), ("roformer", "num_attention_heads", 7),
    ("apertus", "mlp_bias", True), ("deepseek_v4", "intermediate_size", 96), ("longcat_flash", "num_hidden_layers", 7),
    ("mimo_v2_flash", "n_shared_experts", 1), ("minimax", "shared_intermediate_size", 128),
]  # fmt: skip
"""Sizes with which a class is built but does not run, or keys that it does not read and its published weights follow."""


def changed(model_type: str, name: str, value: Any) -> tuple[dict[str, Any], int]:
    """The file with one key changed, and the class's parameters."""
    table = copy.deepcopy(written(made(model_type), difference=False))
    table[name] = value
    given = {key: v for key, v in table.items() if key not in ("model_type", "transformers_version")}
    config = transformers.CONFIG_MAPPING[model_type](**given)
    return written(config, difference=False), counted(model_type, config)


@pytest.mark.parametrize(("model_type", "name", "value"), WERE_WRONG)
def test_a_changed_key_changes_the_parameters_as_it_does_in_transformers(model_type: str, name: str, value: Any) -> None:
    table, parameters = changed(model_type, name, value)
    assert totals(read(table, file=model_type), 128).parameters == parameters


@pytest.mark.parametrize(("model_type", "name"), LEFT_OUT)
def test_a_key_that_is_left_out_has_the_value_that_its_class_gives_it(model_type: str, name: str) -> None:
    table = written(made(model_type), difference=False)
    del table[name]
    parameters = counted(model_type, from_file(copy.deepcopy(table)))
    assert totals(read(table, file=model_type), 128).parameters == parameters


@pytest.mark.parametrize(("model_type", "name", "value"), CONTRADICTORY)
def test_a_size_that_meets_no_other_is_refused_by_its_name(model_type: str, name: str, value: Any) -> None:
    table = {**written(made(model_type), difference=False), name: value}
    with pytest.raises(InputError, match=name):
        read(table, file=model_type)


def test_heads_of_an_encoder_that_do_not_fill_its_width_are_refused() -> None:
    text = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 4}
    table = {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral", "head_dim": 32}}
    with pytest.raises(InputError, match=r"vision_config\.head_dim = 32: is not hidden_size / num_attention_heads \(16\) = 64"):
        read(table)


def test_halves_of_layers_and_a_pattern_in_pieces_are_counted_as_the_class_does() -> None:
    table = written(made("longcat_flash"), difference=False)
    table["num_hidden_layers"] = 2 * table.pop("num_layers")
    parameters = counted("longcat_flash", from_file(copy.deepcopy(table)))
    assert totals(read(table, file="longcat_flash"), 128).parameters == parameters
    table = {
        **written(made("nemotron_h"), difference=False),
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "num_hidden_layers": 4,
    }
    del table["layers_block_type"], table["time_step_limit"]
    parameters = counted("nemotron_h", from_file(copy.deepcopy(table)))
    assert totals(read(table, file="nemotron_h"), 128).parameters == parameters


def test_a_pair_of_encoders_that_says_how_it_ties_a_head_has_none() -> None:
    table = written(made("clip"), difference=False)
    for part in (table, table["text_config"]):
        part["tie_word_embeddings"] = True
    assert totals(read(table, file="clip"), 128).parameters == counted("clip", from_file(copy.deepcopy(table)))


def test_a_missing_size_is_named_rather_than_what_follows_from_it() -> None:
    table = written(made("bart"), difference=False)
    del table["d_model"]
    with pytest.raises(InputError, match="d_model"):
        read(table, file="bart")


def variants(value: Any) -> Iterator[Any]:
    """Other values of a key: switched, doubled, halved, given."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value or 1, value // 2 if value % 2 == 0 else value + 1)
    elif value is None:
        yield from (True, 4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in ONE if t in mappings()["CAUSAL_LM"]])
def test_every_key_of_a_family_is_followed_or_refused(model_type: str) -> None:
    wrong = []
    for name, value in written(made(model_type), difference=False).items():
        for other in () if FREE.search(name) or name in APART.get(model_type, ()) else variants(value):
            try:
                table, parameters = changed(model_type, name, other)
            except Exception:  # transformers cannot build that
                continue
            try:
                found = totals(read(table, file=model_type), 128).parameters
            except InputError as error:
                found = parameters if name in str(error) or "required" in str(error) else -1
            if found != parameters:
                wrong.append((name, other, found, parameters))
    assert not wrong
