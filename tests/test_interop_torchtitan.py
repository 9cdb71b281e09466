"""torchtitan: TOML out and in, the Python recipe, and what it cannot run."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from interop_plans import torchtitan_scenarios

from simpar.errors import InputError
from simpar.interop import torchtitan_models
from simpar.interop.carried import Imported
from simpar.interop.torchtitan import configuration, export, violations
from simpar.interop.torchtitan_import import load, load_dumped, schedule_names
from simpar.interop.torchtitan_models import find_key, key_of, known_flavors, model_of
from simpar.model.huggingface import from_huggingface
from simpar.model.ledger import total_parameters
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.models_io import load_model
from simpar.specs.scenario import Scenario, make_scenario, read_scenario
from simpar.step import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"
CHANGES = ["framework=torchtitan", "framework_version=v0.2", "plan.zero_stage=3", "plan.placement=tp-cp-ep-dp-pp",
           "plan.overlap_tp=false", "plan.recompute=full"]  # fmt: skip
RUNNABLE = ("llama3.1-70b_h100x64_tp4cp2pp4", "llama3.1-405b_h100x16384_tp8pp16", "llama3.1-405b_h100x16384_tp8cp16pp16",
            "llama3.1-405b_h100x200000_tp8pp8", "llama3.1-405b_h100x8192_tp8pp16")  # fmt: skip


def changed(name: str, *more: str) -> Scenario:
    return read_scenario(SCENARIOS / f"{name}.toml", [*CHANGES, *more]).model_copy(update={"file": "", "published": ()})


@pytest.mark.parametrize("name", RUNNABLE)
def test_shipped_layouts_come_back(name: str) -> None:
    scenario = changed(name)
    text = configuration(scenario)
    found = load(text)
    assert found.scenario == scenario
    assert found.warnings == ()
    assert configuration(found.scenario) == text


@pytest.mark.parametrize(("changes", "written"), [
    ((), "fused"), (("training.optimizer=adamw-foreach",), "foreach"), (("training.optimizer=adamw-fused",), "fused"),
    (("framework_version=2024-12",), "foreach"),
])  # fmt: skip
def test_how_the_update_goes_over_the_weights_is_written_and_read(changes: tuple[str, ...], written: str) -> None:
    """What a run says, or torchtitan of its month: lists of operations until 2025-03."""
    scenario = changed(RUNNABLE[0], *changes)
    text = configuration(scenario)
    assert tomllib.loads(text)["optimizer"]["implementation"] == written
    assert load(text).scenario == scenario
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert (
        load(bare, hardware="dgx-h100", num_nodes=8).scenario.training.optimizer
        == {"fused": "adamw", "foreach": "adamw-foreach"}[written]
    )
    other = load(bare.replace(f'implementation = "{written}"', 'implementation = "for-loop"'), hardware="dgx-h100", num_nodes=8)
    assert "optimizer.implementation = 'for-loop': taken as foreach" in other.warnings


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(torchtitan_scenarios())
def test_random_plans_come_back(scenario: Scenario) -> None:
    if violations(scenario):
        with pytest.raises(InputError):
            configuration(scenario)
        return
    text = configuration(scenario)
    found = load(text)
    assert found.scenario == scenario
    assert configuration(found.scenario) == text


def test_the_table_says_the_layout() -> None:
    table = tomllib.loads(configuration(changed(RUNNABLE[0])))
    parallel = table["parallelism"]
    assert [parallel[f"{n}_parallel_degree"] for n in ("tensor", "context", "pipeline")] == [4, 2, 4]
    assert (parallel["data_parallel_shard_degree"], parallel["data_parallel_replicate_degree"]) == (2, 1)
    assert table["model"] == {**table["model"], "name": "llama3", "flavor": "70B"}
    # 128 sequences over 2 replicas, in micro-batches of 1
    assert (table["training"]["local_batch_size"], parallel["pipeline_parallel_microbatch_size"]) == (64, 1)
    parts = parallel["module_fqns_per_model_part"]
    assert len(parts) == 20
    assert [name for part in parts for name in part] == ["tok_embeddings", *(f"layers.{i}" for i in range(80)), "norm", "output"]


def test_hybrid_sharding_counts_ranks_of_both_kinds() -> None:
    scenario = changed(RUNNABLE[1], "plan.shard_size=32")
    table = tomllib.loads(configuration(scenario))["parallelism"]
    assert (table["data_parallel_shard_degree"], table["data_parallel_replicate_degree"]) == (32, 4)


def test_the_recipe_is_python_and_agrees_with_the_table() -> None:
    scenario = changed(RUNNABLE[2])
    files = export(scenario)
    tree = ast.parse(files["torchtitan_recipe.py"])
    compile(files["torchtitan_recipe.py"], "torchtitan_recipe.py", "exec")
    calls = {node.func.id: node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    said = {k.arg: ast.literal_eval(k.value) for k in calls["ParallelismConfig"].keywords}
    table = tomllib.loads(files["torchtitan.toml"])["parallelism"]
    for name in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_schedule", "data_parallel_shard_degree"):
        assert said[name] == table[name]
    training = {k.arg: ast.literal_eval(k.value) for k in calls["TrainingConfig"].keywords}
    assert training["num_tokens_per_train_step"] == 128 * 131072
    assert said["num_pp_microbatches"] == 128 // 8
    assert any(isinstance(n, ast.FunctionDef) and n.name == "layout" for n in tree.body)


def test_what_it_cannot_run_is_named_together() -> None:
    with pytest.raises(InputError) as caught:
        export(read_scenario(SCENARIOS / "deepseek-v3_h800x2048_pp16ep64.toml"))
    fields = {v.field for v in caught.value.violations}
    assert fields >= {"plan.schedule", "plan.zero_stage", "training.precision", "plan.recompute", "model.num_nextn_predict_layers"}
    with pytest.raises(InputError, match="no flavor of this shape"):
        export(read_scenario(SCENARIOS / "gpt3-175b_a100x384_tp8pp12.toml"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("plan.overlap_tp=true", "plan.overlap_tp"), ("plan.sequence_parallel=false", "plan.sequence_parallel"),
        ("plan.cp_style=ulysses", "plan.cp_style"), ("training.gradient_dtype=bf16", "training.gradient_dtype"),
        ("plan.overlap_grad_reduce=false", "plan.overlap_grad_reduce"), ("training.dropout=0.1", "training.dropout"),
        ("plan.offload={optimizer=true}", "plan.offload"), ("training.attention_kernel=unfused", "training.attention_kernel"),
        ("plan.placement=tp-cp-ep-pp-dp", "plan.placement"), ("training.cuda_graphs=true", "training.cuda_graphs"),
    ],
)  # fmt: skip
def test_each_loss_is_named(change: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        configuration(changed(RUNNABLE[0], change))
    assert field in {v.field for v in caught.value.violations}


def test_configurations_of_2024() -> None:
    text = """
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[training]
batch_size = 16
seq_len = 16384
warmup_steps = 200
data_parallel_degree = -1
tensor_parallel_degree = 8
disable_loss_parallel = true
enable_float8_linear = true
compile = true
[experimental]
context_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_split_points = "layers.30"
pipeline_parallel_schedule = "1f1b"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
    found = load(text, hardware="dgx-h100", num_nodes=8)
    plan, training = found.scenario.plan, found.scenario.training
    assert (plan.tp, plan.cp, plan.pp, plan.dp, plan.layers_per_stage) == (8, 2, 2, 2, (30, 50))
    # As many micro-batches as stages, then.
    assert (training.micro_batch_size, training.global_batch_size, training.precision) == (8, 32, "fp8")
    assert training.compile
    assert training.loss_parallel is False
    assert not isinstance(plan.recompute, str)
    assert plan.recompute.every == 2
    assert found.warnings == ()


def test_sections_since_2025() -> None:
    text = """
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
local_batch_size = 8
global_batch_size = 512
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
expert_parallel_degree = 4
expert_tensor_parallel_degree = 1
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["loss"]
[some_new_section]
switch = 1
"""
    found = load(text, hardware="dgx-h100", num_nodes=2)
    plan, training = found.scenario.plan, found.scenario.training
    assert (plan.dp, plan.shard_size, plan.ep, plan.zero_stage, plan.reshard_after_forward) == (16, 8, 4, 3, False)
    assert (training.micro_batch_size, training.global_batch_size, training.compile) == (8, 512, "loss")
    assert any("some_new_section.switch" in w for w in found.warnings)
    assert simulate(found.scenario).step_time_s > 0


@pytest.mark.parametrize(
    ("converters", "precision", "parts"),
    [
        (["quantize.linear.mx"], "mxfp8", "linears"),
        (["quantize.grouped_mm.mx"], "mxfp8", "experts"),
        (["quantize.linear.mx", "quantize.grouped_mm.mx"], "mxfp8", "all"),
        (["quantize.linear.float8"], "fp8", "linears"),
        (["quantize.grouped_mm.float8"], "fp8-rowwise", "experts"),
        (["quantize.linear.float8", "quantize.grouped_mm.float8"], "fp8", "all"),
    ],
)
def test_converters_of_linears_and_of_experts(converters: list[str], precision: str, parts: str) -> None:
    """torchtitan docs/mxfp8.md; what is written for what was read has the same converters."""
    text = f"""
[model]
name = "deepseek_v3"
flavor = "16B"
converters = {converters!r}
[training]
local_batch_size = 4
[parallelism]
"""
    scenario = load(text, hardware="dgx-b200", num_nodes=1).scenario
    assert (scenario.training.precision, scenario.training.narrow_modules) == (precision, parts)
    written = tomllib.loads(configuration(scenario))
    assert written["model"]["converters"] == converters
    if any("grouped" in name for name in converters):
        (table,) = written["quantize"]["grouped_mm"].values()
        assert table["fqns"] == ["experts"]
    dense = text.replace("deepseek_v3", "llama3").replace("16B", "8B")
    assert load(dense, hardware="dgx-b200", num_nodes=1).scenario.training.narrow_modules == "all"


@pytest.mark.parametrize(("components", "compiled"), [(["model", "loss"], True), (["model"], "model"), (["loss"], "loss")])
def test_a_loss_outside_the_compiled_model(components: list[str], compiled: bool | str) -> None:
    text = f"""
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
[parallelism]
[compile]
enable = true
components = {components!r}
"""
    scenario = load(text, hardware="dgx-h100", num_nodes=1).scenario
    assert scenario.training.compile == compiled
    written = tomllib.loads(configuration(scenario))["compile"]
    assert (written["enable"], written["components"]) == (True, components)
    table = scenario.model_dump(mode="json")
    long = {"sequence_length": 32768, "cross_entropy": "unfused"}
    made = [{**table["training"], **long, "compile": c} for c in (True, "model", "loss", False)]
    peaks = [max(r.allocated_bytes for r in simulate(make_scenario({**table, "training": t})).memory) for t in made]
    assert peaks[0] < peaks[1]
    assert peaks[2] - peaks[0] == pytest.approx(peaks[3] - peaks[1])
    assert peaks[2] < peaks[3]


def test_memory_options_of_a_configuration() -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
dtype = "bfloat16"
enable_cpu_offload = true
mixed_precision_reduce = "bfloat16"
[float8]
enable_fsdp_float8_all_gather = true
[parallelism]
"""
    found = load(text, hardware="dgx-h100", num_nodes=1)
    training, offload = found.scenario.training, found.scenario.plan.offload
    assert training.pure_bf16
    assert training.fp8_gather
    assert (offload.optimizer, offload.parameters) == (True, True)
    told = [w.partition(" = ")[0] for w in found.warnings]
    assert told == ["training.mixed_precision_reduce"]
    usual = text.replace("enable_fsdp_float8_all_gather = true", "")
    assert not load(usual, hardware="dgx-h100", num_nodes=1).scenario.training.fp8_gather
    whole = usual + "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n"
    assert load(whole, hardware="dgx-h100", num_nodes=1).scenario.training.fp8_gather
    copies = text + "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n"
    assert not load(copies, hardware="dgx-h100", num_nodes=1).scenario.plan.offload.parameters
    early = text.replace("enable_cpu_offload = true", "") + "[optimizer]\nearly_step_in_backward = true\n"
    assert load(early, hardware="dgx-h100", num_nodes=1).scenario.training.optimizer_in_backward


def test_stages_without_a_split_are_torchtitans() -> None:
    """Embedding and head count as a layer each, two stages a rank for a looped schedule (pipeline_parallel.py)."""
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""
    plan = load(text, hardware="dgx-h100", num_nodes=1).scenario.plan
    assert (plan.virtual_stages, plan.layers_per_stage) == (2, (4, 5, 4, 4, 4, 4, 4, 3))
    four = load(text + "pipeline_parallel_layers_per_stage = 3\n", hardware="dgx-h100", num_nodes=1).scenario.plan
    assert (four.virtual_stages, four.layers_per_stage) == (3, (2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1))


def test_wrong_files() -> None:
    with pytest.raises(InputError, match="later configurations are Python"):
        load("def config(): ...")
    with pytest.raises(InputError, match="no configuration of torchtitan"):
        load("[a]\nb = 1\n")
    with pytest.raises(InputError) as caught:
        load('[model]\nname = "llama4"\nflavor = "17bx16e"\n[training]\nseq_len = "x"\n[parallelism]\n'
             'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Magic"\n')  # fmt: skip
    text = str(caught.value)
    for part in ("llama4 17bx16e", "training.seq_len", "Magic", "--hardware"):
        assert part in text
    with pytest.raises(InputError, match="llama4 17bx16e") as caught:
        load('[model]\nname = "llama4"\nflavor = "17bx16e"\n[training]\nseq_len = 8192\n[parallelism]\n'
             "pipeline_parallel_degree = 4\n", hardware="dgx-h100", num_nodes=4)  # fmt: skip
    assert len(str(caught.value).splitlines()) == 1, "nothing is said of layers that nobody knows"


def test_flavors_count_their_parameters() -> None:
    """The sizes that the flavors are called by, to the digit printed."""
    sizes = {"0.6B": 0.6, "1B": 1.2, "3B": 3.2, "1.7B": 1.7, "4B": 4.0, "8B": 8.0, "14B": 14.8, "16B": 15.7, "32B": 32.8}
    for entry in known_flavors():
        name, flavor = entry.split(" ")
        if flavor in sizes and (key := find_key(name, flavor)) is not None:
            total = total_parameters(model_of(key)) / 1e9
            # Qwen3.5's has a vision encoder, and here a head of its own: 0.24 and 0.64 billion.
            wanted = {"qwen3 8B": 8.2, "qwen3_5 4B": 4.3 + 0.24 + 0.64}.get(entry, sizes[flavor])
            assert total == pytest.approx(wanted, rel=0.03), entry
    assert find_key("llama3", "8B_flex") == ("llama3", "8B")


def test_schedules_have_torchs_names() -> None:
    names = schedule_names()
    assert names["1F1B"] == "1f1b"
    assert names["Interleaved1F1B"] == "interleaved"
    assert names["ZBVZeroBubble"] == "zb-v"


def test_layers_of_several_kinds_come_back() -> None:
    """gpt-oss attends a window in every other layer; torchtitan has it since v0.2.2, without a pipeline or context parallelism."""
    base: dict[str, Any] = {
        "name": "oss", "model": "gpt-oss-20b", "framework": "torchtitan", "cluster": {"hardware": "dgx-h100", "num_nodes": 4},
        "training": {"sequence_length": 8192, "global_batch_size": 64},
    }  # fmt: skip
    scenario = make_scenario({**base, "plan": {"zero_stage": 3, "ep": 8}})
    text = configuration(scenario)
    assert 'name = "gpt_oss"\nflavor = "20b"' in text
    assert load(text).scenario == scenario
    even = make_scenario(
        {**base, "plan": {"zero_stage": 3, "ep": 8}, "training": {**base["training"], "routing": {"kind": "balanced"}}}
    )
    forced = configuration(even)
    assert "moe_force_load_balance = true" in forced
    assert "moe_force_load_balance" not in text
    assert load(forced).scenario == even
    # torchtitan of 2025 has the switch among [training].
    older = text.replace("[training]", "[training]\ndebug_moe_force_load_balance = true")
    assert load(older).scenario.training.routing.kind == "balanced"
    with pytest.raises(InputError, match="neither a pipeline nor context parallelism"):
        configuration(make_scenario({**base, "plan": {"zero_stage": 3, "pp": 2}}))


@pytest.mark.parametrize(
    ("model", "name", "flavor", "package"),
    [
        ("qwen3.5-27b", "qwen3_5", "27B", "qwen3_5"), ("qwen3.5-35b-a3b", "qwen3_5", "35B-A3B", "qwen3_5"),
        ("kimi-k2.5", "kimi_k2_5", "Kimi-K2.5", "kimi_k2_7"),
    ],
)  # fmt: skip
def test_vision_language_models_of_the_main_branch(model: str, name: str, flavor: str, package: str) -> None:
    """Their decoders mix layers; a release has none of them, so there is no TOML file; the encoder runs with the first stage."""
    base: dict[str, Any] = {
        "name": "vlm", "model": model, "framework": "torchtitan", "cluster": {"hardware": "dgx-h100", "num_nodes": 32},
        "training": {"sequence_length": 8192, "global_batch_size": 256},
    }  # fmt: skip
    shape = load_model(model)
    assert isinstance(shape, ArchitectureSpec)
    mtp = {"model": shape.model_copy(update={"num_nextn_predict_layers": 0}).model_dump()}
    scenario = make_scenario({**base, **mtp, "plan": {"zero_stage": 3, "tp": 4, "pp": 4, "schedule": "1f1b"}})
    files = export(scenario)
    assert "torchtitan.toml" not in files
    recipe = files["torchtitan_recipe.py"]
    compile(recipe, "torchtitan_recipe.py", "exec")
    assert f"from torchtitan.models.{package} import model_registry" in recipe
    assert f"model_registry({flavor!r})" in recipe
    assert '["vision_encoder", "tok_embeddings", "layers.0"' in recipe
    assert "\ntorchrun" in files["torchtitan.sh"]
    assert "job.config_file" not in files["torchtitan.sh"]
    with pytest.raises(InputError, match="no context parallelism"):
        export(make_scenario({**base, **mtp, "plan": {"zero_stage": 3, "cp": 2}}))
    layers: list[dict[str, Any]] = [{}] * shape.num_layers
    found = dumped(model_spec={"name": name, "flavor": flavor, "model": {"vocab_size": shape.vocab_size, "layers": layers}})
    assert isinstance(found.scenario.model, ArchitectureSpec)
    assert key_of(found.scenario.model) == (name, flavor)
    with pytest.raises(InputError, match="layers = 3"):
        dumped(model_spec={"name": name, "flavor": flavor, "model": {"vocab_size": shape.vocab_size, "layers": [{}] * 3}})


def test_the_table_of_dense_sizes_makes_the_published_27b() -> None:
    table = torchtitan_models.dense_qwen35(5120, 64, 24, 4, 17408, 48, (1152, 4304, 27, 16))
    made = from_huggingface(table)
    assert isinstance(made, ArchitectureSpec)
    assert key_of(made) == ("qwen3_5", "27B")
    assert key_of(made.model_copy(update={"tie_word_embeddings": True})) is None
    assert [total_parameters(model_of(("qwen3_5", size))) // 10**8 for size in ("0.8B", "2B", "4B", "9B")] == [11, 27, 51, 94]


def dumped(**sections: object) -> Imported:
    """As torchtitan's main of August 2026 dumps llama3_8b: classes without their names, and the model as it was built."""
    layer = {"attention": {"wo": {"in_features": 4096, "bias": False}}}
    table: dict[str, Any] = {
        "hf_assets_path": "./assets", "dump_folder": "./outputs", "profiler": {"enable_profiling": True, "profile_freq": 100},
        "dataloader": {"seed": 42}, "override": {"imports": []},
        "model_spec": {"name": "llama3", "flavor": "8B", "model": {"dim": 4096, "vocab_size": 128256, "layers": [layer] * 32}},
        "optimizer": {"param_groups": [{"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 3e-4}}]},
        "training": {"num_tokens_per_microbatch_per_dp_rank": 8192, "max_context_length": 8192, "disable_cuda_graphs": False},
        "parallelism": {"tensor_parallel_degree": 2, "expert_parallel_degree": 1, "spmd_backend": "spmd_types",
                        "context_parallel_ptrr_mask_key": None, "enable_fsdp_symm_mem": False},
        "activation_checkpoint": {"preserve_rng_state": True, "determinism_check": "default", "debug": False,
                                  "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]},
        "compile": {"enable": True, "enable_async_tensor_parallel": True, "components": ["model", "loss"], "backend": "inductor"},
        "loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": 128256}},
    }  # fmt: skip
    table |= sections
    return load_dumped(table, json.dumps(table), hardware="dgx-h100", num_nodes=1)


def test_a_dump_of_torchtitans_classes() -> None:
    found = dumped()
    assert found.warnings == ()
    plan, training = found.scenario.plan, found.scenario.training
    assert (plan.recompute.granularity, plan.recompute.modules) == ("selective", ("op",))
    assert (plan.overlap_tp, training.cross_entropy, training.compile) == (True, "chunked", True)
    common = {"preserve_rng_state": True, "determinism_check": "default", "debug": False}
    for section, recompute in ((common, "full"), (None, "none")):
        scenario = dumped(activation_checkpoint=section, loss={}).scenario
        assert (scenario.plan.recompute, scenario.training.cross_entropy) == (recompute, "auto")
    (warning,) = dumped(override={"imports": ["mine"]}).warnings
    assert warning.startswith("override.imports")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"dim": 4096, "vocab_size": 128256, "layers": [{}] * 16}, "model_spec.model.layers = 16"),
        ({"dim": 2048, "vocab_size": 128256, "layers": [{}] * 32}, "model_spec.model.dim = 2048"),
        ({"dim": 4096, "vocab_size": 128256, "layers": [{"wo": {"rank": 8, "alpha": 16.0}}] * 32}, "LoRA"),
    ],
)
def test_a_dump_of_another_model_than_its_flavor_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        dumped(model_spec={"name": "llama3", "flavor": "8B", "model": model})
