"""Exports held against those who read them: DeepSpeed's own parser where it is installed, published lists of settings elsewhere.

Lists (tests/data/frameworks): names taken from the projects' sources at the commit and date that stand in each.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import logging
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, assume, given, settings
from interop_plans import megatron_scenarios

import simpar
from simpar.boundary import parse_yaml
from simpar.errors import InputError
from simpar.interop import deepspeed
from simpar.interop.argv import options
from simpar.interop.export import export_files
from simpar.interop.megatron import flags
from simpar.interop.torchtitan_recipe import COMMIT
from simpar.specs.scenario import Scenario, read_scenario

pytestmark = pytest.mark.consumers
ROOT = Path(__file__).parent.parent
LISTS = Path(__file__).parent / "data" / "frameworks"
TITAN = json.loads((LISTS / "torchtitan_main.json").read_text())
NANOTRON = json.loads((LISTS / "nanotron.json").read_text())["classes"]
CASES: dict[str, list[dict[str, Any]]] = {
    "torchtitan": [
        {"zero_stage": 3}, {"zero_stage": 3, "pp": 2, "schedule": "1f1b"},
        {"zero_stage": 3, "tp": 2, "cp": 2, "cp_style": "all_gather"},
        {"zero_stage": 3, "recompute": "full"}, {"zero_stage": 3, "recompute": {"granularity": "selective", "modules": ["op"]}},
        {"zero_stage": 3, "shard_size": 8}, {"zero_stage": 0}, {"zero_stage": 3, "compile": True, "tp": 2, "overlap_tp": True},
        {"zero_stage": 3, "pp": 4, "schedule": "interleaved", "virtual_stages": 2, "cross_entropy": "chunked"},
    ],
    "huggingface": [
        {"zero_stage": 3}, {"zero_stage": 3, "recompute": "full", "fused_kernels": True, "cross_entropy": "linear"},
        {"zero_stage": 2, "sequence_parallel": False}, {"zero_stage": 3, "shard_size": 8}, {"zero_stage": 0},
        {"zero_stage": 3, "trainable": "lora", "lora_modules": "all", "base_weights": "nf4-double",
         "optimizer": "adamw-8bit-paged"},
        {"zero_stage": 3, "offload": {"optimizer": True, "parameters": True}, "optimizer": "adafactor"},
    ],
    "axolotl": [
        {"zero_stage": 3}, {"zero_stage": 3, "recompute": "full", "fused_kernels": True, "cross_entropy": "linear"},
        {"zero_stage": 3, "recompute": "full", "offload": {"activations": 1.0}, "cross_entropy": "tiled"},
        {"zero_stage": 1, "sequence_parallel": False, "optimizer": "adamw-8bit"},
        {"zero_stage": 3, "trainable": "lora", "lora_rank": 64, "base_weights": "int8"},
        {"zero_stage": 3, "shard_size": 8, "cp": 2, "cp_style": "ring", "tp": 2, "sequence_parallel": False},
    ],
    "torchtune": [
        {"zero_stage": 3}, {"zero_stage": 3, "recompute": "full", "offload": {"activations": 1.0}, "optimizer": "adamw-4bit"},
        {"zero_stage": 3, "shard_size": 8, "cross_entropy": "chunked", "compile": True},
        {"zero_stage": 3, "tp": 2, "sequence_parallel": False},
        {"zero_stage": 3, "trainable": "lora", "lora_modules": "all", "base_weights": "nf4"},
        {"zero_stage": 3, "global_batch_size": 16, "optimizer_in_backward": True, "optimizer": "adamw-8bit-paged"},
    ],
    "nanotron": [
        {"zero_stage": 1, "sequence_parallel": True}, {"zero_stage": 0, "tp": 4, "sequence_parallel": True, "overlap_tp": True},
        {"zero_stage": 1, "tp": 2, "sequence_parallel": False, "recompute": "full"},
    ],
    "deepspeed": [
        {"zero_stage": n, "sequence_parallel": False} for n in range(4)] + [
        {"zero_stage": 3, "sequence_parallel": False, "offload": {"optimizer": True, "parameters": True}},
        {"zero_stage": 2, "tp": 2, "sequence_parallel": False},
        {"zero_stage": 1, "cp": 2, "cp_style": "ulysses", "sequence_parallel": False, "recompute": "full"},
    ],
}  # fmt: skip


FRAMEWORKS = {"huggingface": "trl", "axolotl": "transformers"}


def scenario_for(name: str, changes: dict[str, Any]) -> Scenario:
    return simpar.load(
        model="llama3.1-8b", hardware="dgx-h100", num_nodes=2, framework=FRAMEWORKS.get(name, name), sequence_length=4096,
        **{"tp": 1, "global_batch_size": 64, **changes},
    )  # fmt: skip


def cases(name: str) -> Any:
    return pytest.mark.parametrize("changes", CASES[name], ids=str)


# -- torchtitan ------------------------------------------------------------------------------------------------------------


def parts(name: str, table: dict[str, Any]) -> set[str]:
    return {f"{name}.{k}" if name else k for k in table}


def leaves(table: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in table.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


@cases("torchtitan")
def test_settings_of_torchtitan(changes: dict[str, Any]) -> None:
    known = set((LISTS / "torchtitan_v0.2.2.txt").read_text().split("\n")[1:])
    table = tomllib.loads(export_files("torchtitan", scenario_for("torchtitan", changes))["torchtitan.toml"])
    assert leaves(table) <= known


@cases("torchtitan")
def test_the_recipe_imports_and_names_what_is_there(changes: dict[str, Any]) -> None:
    text = export_files("torchtitan", scenario_for("torchtitan", changes))["torchtitan_recipe.py"]
    assert TITAN["commit"] in COMMIT
    assert TITAN["commit"] in text
    tree = ast.parse(text)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = {a.name for a in node.names}
            assert names <= set(TITAN["modules"][node.module]), node.module
            imported |= names
        if isinstance(node, ast.Call):
            callee = ast.unparse(node.func)
            listed = TITAN["fields"].get(callee) or next((v for k, v in TITAN["fields"].items() if k.endswith(f".{callee}")), None)
            if listed is not None:
                assert {k.arg for k in node.keywords} <= set(listed), callee
            if callee == "model_registry":
                flavor = ast.literal_eval(node.args[0])
                assert flavor in TITAN["flavors"]["llama3"]
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported <= used


# -- nanotron --------------------------------------------------------------------------------------------------------------


SECTIONS = {
    "general": "GeneralArgs", "parallelism": "ParallelismArgs", "tokens": "TokensArgs", "logging": "LoggingArgs",
    "checkpoints": "CheckpointsArgs", "tokenizer": "TokenizerArgs", "optimizer": "OptimizerArgs",
}  # fmt: skip


def check_class(name: str, table: dict[str, Any]) -> None:
    """dacite in strict mode: every key is a field, every field without a default is there."""
    fields = NANOTRON[name]
    assert set(table) <= set(fields), name
    assert {f for f, needed in fields.items() if needed} <= set(table), name


@cases("nanotron")
def test_the_tables_of_nanotron(changes: dict[str, Any]) -> None:
    table = parse_yaml(export_files("nanotron", scenario_for("nanotron", changes))["nanotron.yaml"], "nanotron.yaml")
    assert set(table) <= set(NANOTRON["Config"])
    for key, name in SECTIONS.items():
        check_class(name, table[key])
    check_class("ModelArgs", table["model"])
    check_class("LRSchedulerArgs", table["optimizer"]["learning_rate_scheduler"])
    check_class("AdamWOptimizerArgs", table["optimizer"]["optimizer_factory"])
    kind = "LlamaConfig" if "is_llama_config" in table["model"]["model_config"] else "Qwen2Config"
    check_class(kind, table["model"]["model_config"])
    for stage in table["data_stages"]:
        check_class("DatasetStageArgs", stage)
        check_class("DataArgs", stage["data"])
    wanted = changes.get("overlap_tp", False) and changes.get("tp", 1) > 1
    assert table["parallelism"]["tp_linear_async_communication"] is wanted


@pytest.fixture(scope="module")
def nanotron_config() -> Any:
    """nanotron's own parser. The released package's `logging` and `config` import each other, so its `logging` is left out."""
    pytest.importorskip("dacite", reason="needs nanotron")
    if importlib.util.find_spec("nanotron") is None:
        pytest.skip("needs nanotron")
    stand_in = types.ModuleType("nanotron.logging")
    vars(stand_in).update({key: value for key, value in vars(logging).items() if not key.startswith("__")})
    vars(stand_in).update({key: MagicMock() for key in ("get_logger", "log_rank", "warn_once", "human_format", "log_memory")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nanotron.logging", stand_in)
        yield importlib.import_module("nanotron.config.config")


@cases("nanotron")
def test_nanotron_parses_its_configuration(changes: dict[str, Any], nanotron_config: Any) -> None:
    """Every section whose shape the released 0.4 (2024) shares with the main branch that exports are for, all but the optimizer."""
    scenario = scenario_for("nanotron", changes)
    table = parse_yaml(export_files("nanotron", scenario)["nanotron.yaml"], "nanotron.yaml")
    found = {}
    for key, name in SECTIONS.items():
        if key != "optimizer":
            kind = getattr(nanotron_config, name)
            later = set(NANOTRON[name]) - {field.name for field in dataclasses.fields(kind)}
            part = {field: value for field, value in table[key].items() if field not in later}
            found[key] = nanotron_config.get_config_from_dict(part, config_class=kind)
    plan, training, tokens = scenario.plan, scenario.training, found["tokens"]
    assert (found["parallelism"].tp, found["parallelism"].pp) == (plan.tp, plan.pp)
    assert found["parallelism"].dp * plan.tp * plan.pp == scenario.world_size
    batch = tokens.micro_batch_size * tokens.batch_accumulation_per_replica * found["parallelism"].dp
    assert (batch, tokens.sequence_length) == (training.global_batch_size, training.sequence_length)


def test_experts_of_nanotron_have_their_width() -> None:
    model = {**simpar.load("mixtral-8x22b_h100x128_tp2pp8ep8").model.model_dump(), "attention_bias": False}
    scenario = simpar.load(scenario_for("nanotron", {"zero_stage": 1}), model={k: v for k, v in model.items() if v is not None},
                           **{"plan.placement": "tp-cp-ep-pp-dp"})  # fmt: skip
    table = parse_yaml(export_files("nanotron", scenario)["nanotron.yaml"], "nanotron.yaml")
    moe = table["model"]["model_config"]["moe_config"]
    check_class("MoEConfig", moe)
    assert moe["moe_intermediate_size"] == model["moe"]["moe_intermediate_size"]


# -- DeepSpeed -------------------------------------------------------------------------------------------------------------


@cases("deepspeed")
def test_deepspeed_parses_its_configuration(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="needs deepspeed")
    scenario = scenario_for("deepspeed", changes)
    table = deepspeed.configuration(scenario)
    plan = scenario.plan
    # It divides the ranks by those that share a sequence itself.
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *_: scenario.world_size // (plan.tp * plan.pp))
    unknown: list[str] = []
    monkeypatch.setattr("deepspeed.utils.logger.warning", lambda text, *_: unknown.append(str(text)))
    found = config.DeepSpeedConfig(json.loads(json.dumps(table)))
    assert found.zero_optimization_stage == plan.zero_stage
    assert found.train_batch_size == scenario.training.global_batch_size
    assert found.train_micro_batch_size_per_gpu == scenario.training.micro_batch_size
    assert not [text for text in unknown if "unknown" in text.lower() or "extra" in text.lower()]
    assert (found.zero_config.offload_optimizer is not None) == plan.offload.optimizer
    assert "deepspeed" in sys.modules


# -- fine-tuning -----------------------------------------------------------------------------------------------------------


@cases("huggingface")
def test_training_arguments(changes: dict[str, Any]) -> None:
    """Fields and values are those of the installed transformers."""
    arguments = pytest.importorskip("transformers.training_args", reason="needs transformers")
    scenario = scenario_for("huggingface", changes)
    files = export_files("huggingface", scenario)
    table = parse_yaml(files["training_args.yaml"], "training_args.yaml")
    known = {f.name: f for f in dataclasses.fields(arguments.TrainingArguments)}
    assert set(table) <= set(known)
    assert table["optim"] in {o.value for o in arguments.OptimizerNames}
    batch = table["per_device_train_batch_size"] * table["gradient_accumulation_steps"]
    assert batch * (scenario.world_size // (scenario.plan.tp * scenario.plan.cp)) == scenario.training.global_batch_size
    checkpointed = parse_yaml(files["accelerate.yaml"], "a").get("fsdp_config", {}).get("fsdp_activation_checkpointing", False)
    assert not (checkpointed and table["gradient_checkpointing"])
    assert (checkpointed or table["gradient_checkpointing"]) == (scenario.plan.recompute == "full")
    assert ("deepspeed" in table) == ("deepspeed.json" in files)


@cases("huggingface")
def test_arguments_of_trl(changes: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl", reason="needs trl")
    table = parse_yaml(export_files("huggingface", scenario_for("huggingface", changes))["sft.yaml"], "sft.yaml")
    known = {f.name for kind in (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments) for f in dataclasses.fields(kind)}
    assert set(table) <= known


@cases("huggingface")
def test_accelerate_reads_its_configuration(changes: dict[str, Any], tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="needs accelerate")
    launch = pytest.importorskip("accelerate.commands.launch", reason="needs accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(export_files("huggingface", scenario_for("huggingface", changes))["accelerate.yaml"])
    found = config_args.load_config_from_file(str(path))
    options_known = {a.dest for a in launch.launch_command_parser()._actions}
    for part in ("fsdp_config", "parallelism_config", "deepspeed_config"):
        assert set(getattr(found, part) or {}) <= options_known


@cases("axolotl")
def test_keys_of_axolotl(changes: dict[str, Any]) -> None:
    listed = json.loads((LISTS / "axolotl.json").read_text())
    table = parse_yaml(export_files("axolotl", scenario_for("axolotl", changes))["axolotl.yaml"], "axolotl.yaml")
    assert set(table) <= set(listed["keys"])
    assert set(table.get("fsdp_config", {})) <= set(listed["fsdp_config"])
    assert ("cut_cross_entropy" in table) == any("CutCrossEntropy" in p for p in table.get("plugins", []))


@cases("torchtune")
def test_keys_of_torchtune(changes: dict[str, Any]) -> None:
    listed = json.loads((LISTS / "torchtune.json").read_text())
    scenario = scenario_for("torchtune", changes)
    files = export_files("torchtune", scenario)
    table = parse_yaml(files["torchtune.yaml"], "torchtune.yaml")
    recipe = re.search(r"\b(?:full|lora)_finetune_\w+", files["torchtune.sh"])
    assert recipe is not None
    assert set(table) <= set(listed["recipes"][recipe[0]])
    module, _, builder = table["model"].pop("_component_").rpartition(".")
    assert builder in listed["components"][module]
    if scenario.training.trainable == "lora":
        assert set(table["model"]) <= set(listed["components"]["lora_llama3_1_8b"])
    module, _, loss = table["loss"]["_component_"].rpartition(".")
    assert module == "torch.nn" or loss in listed["components"][module]


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("huggingface", {"zero_stage": 3, "cross_entropy": "chunked"}, "training.cross_entropy"),
        ("huggingface", {"zero_stage": 3, "optimizer": "muon"}, "training.optimizer"),
        ("huggingface", {"zero_stage": 3, "pp": 2}, "plan.pp"),
        ("axolotl", {"zero_stage": 3, "recompute": "selective"}, "plan.recompute"),
        ("torchtune", {"zero_stage": 2}, "plan.zero_stage"),
        ("torchtune", {"zero_stage": 3, "optimizer_in_backward": True}, "training.optimizer_in_backward"),
        ("torchtune", {"zero_stage": 3, "fused_kernels": True}, "training.fused_kernels"),
    ],
)
def test_options_that_a_framework_does_not_have_are_refused(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=re.escape(field)):
        export_files(name, scenario_for("megatron-core" if name == "x" else name, changes))


# -- Megatron-LM -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(megatron_scenarios())
def test_megatrons_own_rules(scenario: Scenario) -> None:
    """Asserts of megatron/training/arguments.py at d98e8a64dd (22 August 2026) that bear on what is exported."""
    try:
        found = options(shlex.split(" ".join(flags(scenario))))
    except InputError:
        assume(False)
        return
    known = set((LISTS / "megatron_flags.txt").read_text().split())
    assert {f"--{name}" for name in found} <= known
    if "overlap-param-gather" in found:
        assert {"use-distributed-optimizer", "use-megatron-fsdp"} & set(found)
        assert "overlap-grad-reduce" in found
    if found.get("data-parallel-sharding-strategy") == ["optim_grads_params"] and scenario.plan.overlap_grad_reduce is not False:
        assert ("overlap-param-gather" in found) == ("overlap-grad-reduce" in found)
    assert int(found["max-position-embeddings"][0]) >= int(found["seq-length"][0])
    if "use-megatron-fsdp" in found:
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" not in export_files("megatron", scenario)["megatron.sh"]


@pytest.mark.parametrize(("version", "kernel"), [(None, "native"), ("0.19", "native"), ("0.15", "te")])
def test_the_fused_loss_is_one_that_the_release_runs(version: str | None, kernel: str) -> None:
    scenario = simpar.load(scenario_for("megatron-core", {"tp": 2}), framework_version=version, cross_entropy="fused")
    assert f"--cross-entropy-fusion-impl {kernel}" in flags(scenario)


@pytest.mark.parametrize("name", ["llama3.1-70b_h100x64_tp4cp2pp4", "mixtral-8x22b_h100x128_tp2pp8ep8"])
@pytest.mark.parametrize("adds", [0, 1])
def test_the_vocabulary_is_the_models(name: str, adds: int) -> None:
    """Padded as Megatron-LM pads, the vocabulary is the model's, whether NullTokenizer adds a token (up to core 0.14) or not."""
    scenario = read_scenario(ROOT / "scenarios" / f"{name}.toml")
    found = options(shlex.split(" ".join(flags(scenario))))
    unit = int(found["make-vocab-size-divisible-by"][0]) * scenario.plan.tp
    size = int(found["vocab-size"][0]) + adds
    assert -(-size // unit) * unit == scenario.model.vocab_size  # type: ignore[union-attr]


def test_parameters_are_gathered_ahead_under_megatron_fsdp() -> None:
    scenario = simpar.load(scenario_for("megatron-core", {"zero_stage": 3}), **{"plan.overlap_grad_reduce": True})
    assert {"--overlap-param-gather", "--overlap-grad-reduce"} <= set(flags(scenario))
    with pytest.raises(InputError, match="Megatron-FSDP reduces gradients"):
        flags(simpar.load(scenario, **{"plan.overlap_grad_reduce": False}))
