"""config.json of every kind of model: parameters and FLOPs of published files, keys that are not read, the two forms."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import parameter_ledger as oracle
import pytest

from simpar.cli.app import main
from simpar.errors import InputError
from simpar.graph.masks import Mask
from simpar.model.forms import general, short
from simpar.model.huggingface import from_huggingface, read
from simpar.model.ledger import entries, total_parameters, totals
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.mixers import AttentionSpec
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, model_from_table, model_names, table_names

DATA = Path(__file__).parent / "data" / "models"
with (DATA / "corpus.csv").open() as _file:
    ROWS = {row["file"]: row for row in csv.DictReader(_file)}
OTHER_FLOPS = {
    # The reference counts all nine adapters of Zamba2's shared block at each of its nine uses; a use meets one.
    "zamba2.json": (8.7049e9 - 8 * 9 * 2 * 128 * (2560 + 20480), 11.3473e9 - 8 * 9 * 2 * 128 * (2560 + 20480)),
    # It counts up-projections of experts that have none: 4 of 12 choices are zero experts, which return their input.
    "longcat_flash.json": (64.6333e9 - 28 * 4 * 4 * 6144 * 2048, 97.5166e9 - 28 * 4 * 4 * 6144 * 2048),
}
INEXACT = {"Step-3.7-Flash.json": 663_552}
"""Parameters beyond the reference, which counts the class's default vocabulary (81 words less), not the file's."""


OTHERS = json.loads((DATA / "others.json").read_text())
"""Files of libraries that are no dependency (flash-linear-attention, diffusers), of remote code, and with keys that only published
files have; with their counts."""


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: str(row["config"].get("model_type") or row["config"].get("_class_name")))
def test_files_of_other_libraries(row: dict[str, Any]) -> None:
    assert totals(read(row["config"]), 64).parameters == row["parameters"]


def test_a_file_that_names_its_class_alone_is_read_as_that_class() -> None:
    table = config("Qwen3-8B.json")
    named = {name: value for name, value in table.items() if name != "model_type"}
    assert totals(read(named), 64).parameters == totals(read(table), 64).parameters
    with pytest.raises(InputError, match="model_type: is required"):
        read({**named, "architectures": ["UnheardOfForCausalLM"]})


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("Qwen3-8B.json", {"vocab_size": float("inf")}, "vocab_size = inf: holds a value that cannot be read"),
        ("Qwen3-8B.json", {"head_dim": "wide"}, "head_dim = 'wide': must be a positive integer"),
        (
            "Qwen3.5-27B.json",
            {"text_config": {"model_type": "qwen3_5_text", "layer_types": 5}},
            "text_config.layer_types = 5: must be a list",
        ),
        ("Qwen3-8B.json", {"intermediate_size": [5, 6]}, "intermediate_size = [5, 6]: holds a value that cannot be read"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(file: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read({**config(file), **changes})


def test_a_family_without_a_line_is_built_by_what_its_file_switches_on() -> None:
    plain = {"model_type": "unheard-of", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
             "intermediate_size": 128}  # fmt: skip
    switched = {**plain, "use_qk_norm": True, "add_qkv_bias": True, "mlp_bias": True}
    few, more = (totals(read(table), 64).parameters for table in (plain, switched))
    assert more - few == 3 * (2 * 16 + 3 * 64 + 2 * 128 + 64)
    narrow = {**{k: v for k, v in plain.items() if k != "intermediate_size"}, "hidden_ratio": 4}
    assert few - totals(read(narrow), 64).parameters == 3 * 3 * 64 * (128 - 256)
    assert any("not in the table" in note for note in read(plain).notes)


def test_a_generalised_delta_rule_is_counted_in_chunks() -> None:
    """RWKV-7: every matrix twice, and per head of 64 chunks of 16 with two more products of the keys than the delta rule."""
    row = next(row for row in OTHERS if row["config"].get("model_type") == "rwkv7")
    model, heads = read(row["config"]), row["config"]["hidden_size"] // 64
    matrices = sum(e.flops * e.runs for e in entries(model, 4096) if not e.node.endswith("scan"))
    scan = row["config"]["num_hidden_layers"] * heads * (10 * 16 * 64 + 4 * 16 * 64 + 8 * 64 * 64)
    assert totals(model, 4096).forward_flops_per_token == pytest.approx(matrices + scan)


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / name).read_text())
    return loaded


@pytest.mark.parametrize("name", sorted(ROWS))
def test_published_files_have_their_true_counts(name: str) -> None:
    row, model = ROWS[name], read(config(name), file=name)
    short_of, long_of = totals(model, 4096), totals(model, 32768)
    true = int(row["params_total"])
    assert short_of.parameters == true + INEXACT.get(name, 0)
    outside = int(row["params_input_embeddings"]) + int(row["params_untied_head"])
    assert short_of.parameters_without_embeddings == true - outside
    listed = tuple(float(row[f"fwd_gflop_per_token_total_{n}"]) * 1e9 for n in (4096, 32768))
    at_4k, at_32k = OTHER_FLOPS.get(name, listed)
    assert short_of.forward_flops_per_token == pytest.approx(at_4k, rel=5e-4)
    assert long_of.forward_flops_per_token == pytest.approx(at_32k, rel=5e-4)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B.json", "DeepSeek-V3.json", "Mixtral-8x7B-v0.1.json", "Jamba-1.5-Mini.json"])
def test_active_parameters_are_what_one_token_meets(name: str) -> None:
    assert totals(read(config(name)), 4096).active_parameters == int(ROWS[name]["params_active"])


def test_a_structural_key_that_is_not_read_is_an_error_that_names_it() -> None:
    odd = {**config("Qwen3-8B.json"), "hyper_streams": 4, "made_up_remark": "free", "attention_dropout": 0.1}
    with pytest.raises(InputError) as caught:
        read(odd, file="x.json")
    assert [v.field for v in caught.value.violations] == ["hyper_streams"]
    assert "hyper_streams" in " ".join(read(odd, approximate=True).notes)
    nested = config("Qwen3-VL-2B-Instruct.json")
    with pytest.raises(InputError, match=r"text_config\.new_heads"):
        read({**nested, "text_config": {**nested["text_config"], "new_heads": 3}})
    # What a file calls its tower's table, and its dialogues.
    odd = {**config("Qwen3-8B.json"), "visual_tokenizer_config": {"hidden_size": 8}, "conversation_formatter_class": "Plain"}
    with pytest.raises(InputError) as caught:
        read(odd, file="x.json")
    assert [v.field for v in caught.value.violations] == ["visual_tokenizer_config"]


def test_a_key_of_the_class_is_free_at_its_default_alone() -> None:
    base = {"model_type": "xlstm", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 50}
    assert read({**base, "weight_mode": "single"}) == read(base)
    with pytest.raises(InputError, match="weight_mode"):
        read({**base, "weight_mode": "fused"})


def test_shared_weights_are_held_once() -> None:
    def kind(window: int, shared: str) -> dict[str, Any]:
        attention = {"kind": "attention", "num_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "window": window}
        mlp = {"branches": [{"kind": "mlp", "width": 6}], "norm": "none", "shared_weights": shared}
        return {"sublayers": [{"branches": [attention], "norm": "none"}, mlp]}

    def parameters(shared: str) -> int:
        stack = {
            "hidden_size": 4,
            "pattern": ["a*2", "b"],
            "layers": {"a": kind(2, shared), "b": kind(3, shared)},
            "final_norm": False,
        }
        return total_parameters(
            model_from_table({"kind": "layers", "vocab_size": 5, "tie_word_embeddings": True, "stacks": [stack]})
        )

    mlp, attention = 3 * 4 * 6, 4 * 4 * 4
    assert parameters("") == 3 * (mlp + attention) + 20
    assert parameters("one") == mlp + 3 * attention + 20


def test_a_key_that_contradicts_its_family_is_an_error() -> None:
    with pytest.raises(InputError, match="attention_bias"):
        read({**config("Mixtral-8x7B-v0.1.json"), "attention_bias": True})
    assert read({**config("Mixtral-8x7B-v0.1.json"), "attention_bias": False})


def test_unknown_families_are_read_by_their_keys_with_a_note() -> None:
    new = {**config("Qwen3-8B.json"), "model_type": "brand_new"}
    model = read(new)
    assert "brand_new" in model.notes[0]
    norms = 36 * 2 * 128
    assert totals(model, 128).parameters == 8_190_735_360 - norms  # as Llama is built: no norms of queries and keys
    with pytest.raises(InputError, match="prophetnet"):
        read({**new, "model_type": "prophetnet"})
    with pytest.raises(InputError, match="vision_config"):
        read({"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {"model_type": "unheard_of"}})


def test_a_class_of_diffusers_without_a_reader_is_named() -> None:
    with pytest.raises(InputError, match=r"_class_name = 'UNet2DConditionModel': a class of diffusers that is not read"):
        read({"_class_name": "UNet2DConditionModel", "attention_head_dim": [5, 10, 20], "in_channels": 4})


def test_windows_stand_where_the_class_puts_them() -> None:
    base = config("Qwen3-8B.json")
    windowed = read({**base, "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 30})
    assert windowed.stacks[0].pattern == ("full_mlp*30", "sliding_mlp*6")
    assert read(base).stacks[0].pattern == ("full_mlp*36",)
    listed = read(
        {**base, "layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 64, "use_sliding_window": True}
    )
    assert [len(listed.stacks[0].layers), listed.stacks[0].sequence()[:2]] == [2, ("sliding_mlp", "full_mlp")]
    with pytest.raises(InputError, match="layer_types"):
        read({**base, "layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask("bidirectional"), Mask("window", 5), Mask("chunk", 6), Mask("bidirectional_window", 3),
     Mask("compressed", 4, 3, 2), Mask("compressed", 4, 3), Mask("top_k", 7), Mask("bidirectional", joint=2), Mask("fixed", 9)],
    ids=lambda mask: f"{mask.kind}{mask.size}",
)  # fmt: skip
@pytest.mark.parametrize("length", [1, 4, 17, 40])
def test_masks_count_their_pairs(mask: Mask, length: int) -> None:
    def sees(i: int, j: int) -> bool:
        match mask.kind:
            case "bidirectional":
                return True
            case "window" | "top_k" | "compressed":
                return 0 <= i - j < mask.size
            case "chunk":
                return j <= i and i // mask.size == j // mask.size
            case "bidirectional_window":
                return abs(i - j) <= mask.size
        return j <= i

    pairs = sum(sees(i, j) for i in range(length) for j in range(length))
    if mask.kind == "compressed":
        pairs += sum(min((i + 1) // mask.block, mask.selected or length) for i in range(length))
    if mask.kind == "fixed":
        pairs = length * mask.size
    assert mask.attended(length) == pairs + length * mask.joint


TRANSFORMERS = [name for name in table_names() if isinstance(load_model(name), TransformerSpec)]
CONFIGS = sorted(set(model_names()) - set(table_names()))


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations_ship_with_source_and_count(name: str) -> None:
    model = load_model(name)
    assert model.source
    assert model.published_parameters == total_parameters(model)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_both_forms_of_a_preset_are_the_same_model(name: str) -> None:
    model = load_model(name)
    assert isinstance(model, TransformerSpec)
    whole = general(model)
    counted = totals(whole, 64)
    assert (counted.parameters, counted.active_parameters) == (oracle.total_parameters(model), oracle.active_parameters(model))
    again = short(whole)
    if again is not None:
        assert totals(general(again), 64) == counted


def test_a_config_is_a_transformer_where_one_can_say_it() -> None:
    assert isinstance(from_huggingface(config("Qwen3-30B-A3B.json")), TransformerSpec)
    assert isinstance(from_huggingface(config("gpt-oss-20b.json")), ArchitectureSpec)


def test_a_reader_takes_over_the_settled_keys_of_its_parent() -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128}
    table = {"model_type": "hunyuan", **small, "num_experts": 4, "moe_topk": 2}
    # `moe_layer_num_skipped` is settled for all mixtures of Hunyuan's, `cla_share_factor` for the largest.
    settled = {"moe_layer_num_skipped": 3, "cla_share_factor": 2}
    assert read({**table, **settled}).stacks == read(table).stacks
    with pytest.raises(InputError, match="moe_layer_num_skipped"):
        read({**table, **settled, "model_type": "mixtral"})


def test_layers_by_hand() -> None:
    table = {
        "kind": "layers", "vocab_size": 100, "tie_word_embeddings": True,
        "stacks": [{
            "hidden_size": 8, "pattern": ["local*2", "global"],
            "layers": {
                kind: {"sublayers": [
                    {"branches": [{"kind": "attention", "num_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
                    "window": window}]},
                    {"branches": [{"kind": "mlp", "width": 16}]},
                ]}
                for kind, window in (("local", 3), ("global", None))
            },
        }],
    }  # fmt: skip
    model = model_from_table(table)
    assert isinstance(model, ArchitectureSpec)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    found = totals(model, 10)
    assert found.parameters == 3 * layer + 100 * 8 + 8
    local, full = (1 + 2 + 8 * 3) / 10, 55 / 10
    assert found.forward_flops_per_token == pytest.approx(2 * 3 * (layer - 16) + 2 * 16 * (2 * local + full) + 2 * 800)
    assert isinstance(model.branches()[0], AttentionSpec)
    assert sum(entry.parameters * entry.held for entry in entries(model, 10)) == found.parameters
    with pytest.raises(InputError, match="names the layer 'gobal'"):
        model_from_table({**table, "stacks": [{**table["stacks"][0], "pattern": ["gobal"]}]})


def test_models_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["models", "show", *arguments])
        assert stop.value.code in (0, None)
        return capsys.readouterr().out

    path = str(DATA / "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json")
    found = json.loads(shown(path, "--json"))
    assert found["parameters"] == 31_577_937_344
    assert {layer["layer"]: layer["count"] for layer in found["layers"]} == {"mamba": 23, "moe_experts": 23, "full": 6}
    longer = json.loads(shown(path, "--json", "--sequence-length", "32768"))
    assert longer["forward_flops_per_token"] > found["forward_flops_per_token"]
    assert "8,030,261,248" in shown("llama3.1-8b")
    odd = tmp_path / "config.json"
    odd.write_text(json.dumps({**config("Qwen3-8B.json"), "moe_streams": 2}))
    with pytest.raises(SystemExit) as stop:
        main(["models", "show", str(odd)])
    assert stop.value.code == 2
    assert "moe_streams" in capsys.readouterr().err
    assert "moe_streams" in shown(str(odd), "--approximate")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_register_layers", 4), ("attn_gate_rank", 16), ("layer_repeat", 2), ("loop_count", 2), ("recurrent_depth", 3),
        ("mixer_types", ["a", "b"]), ("ngram_table_rows", 1000), ("use_nope_every", 4), ("router_hidden", 64), ("lora_r", 16),
        ("weight_sharing", "cycle"), ("memory_tokens", 8), ("parallel_residual", True), ("double_wide_mlp", True),
        ("cross_layer_kv", True), ("channel_mixer", "glu"), ("bottleneck", 64), ("qkv_rank", 4),
    ],
)  # fmt: skip
def test_a_structural_key_that_nobody_reads_is_an_error_that_names_it(key: str, value: Any) -> None:
    for name in ("Qwen3-8B.json", "DeepSeek-V3.json"):
        with pytest.raises(InputError, match=f"{key} = .*not read.*--approximate"):
            read({**config(name), key: value})
        assert any(key in note for note in read({**config(name), key: value}, approximate=True).notes)
    vision = config("Qwen3-VL-2B-Instruct.json")
    with pytest.raises(InputError, match=f"text_config.{key}"):
        read({**vision, "text_config": {**vision["text_config"], key: value}})
