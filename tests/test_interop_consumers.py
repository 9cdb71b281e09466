"""Exports held against those who read them: DeepSpeed's own parser where it is installed, published lists of settings elsewhere.

Lists (tests/data/frameworks): names taken from the projects' sources at the commit and date that stand in each.
"""

from __future__ import annotations

import ast
import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

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


def scenario_for(name: str, changes: dict[str, Any]) -> Scenario:
    return simpar.load(
        model="llama3.1-8b", hardware="dgx-h100", num_nodes=2, framework=name, global_batch_size=64, sequence_length=4096,
        **{"tp": 1, **changes},
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
