"""YAML of fine-tuning frameworks read into a scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simpar.cli import app
from simpar.errors import InputError
from simpar.interop.configs import load_config
from simpar.interop.export import FORMATS
from simpar.interop.finetune_import import DIALECTS
from simpar.interop.launched import load as run_and_load
from simpar.interop.meaning import meaning
from simpar.runlogs.compare import check_same_job
from simpar.runlogs.records import LogReading
from simpar.specs.scenario import Scenario, make_scenario

WHERE: dict[str, Any] = {"hardware": "dgx-h100", "num_nodes": 1}
AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
bf16: auto
attn_implementation: flash_attention_2
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
template: qwen3
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
TRL = """
model_name_or_path: HuggingFaceTB/SmolLM2-1.7B
torch_dtype: bfloat16
attn_implementation: flash_attention_2
max_seq_length: 4096
per_device_train_batch_size: 4
bf16: true
"""
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_activation_checkpointing: true, fsdp_offload_params: false}
"""


def saved(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(folder: Path, text: str, **more: Any) -> Scenario:
    return load_config(saved(folder, "run.yaml", text), **WHERE, **more).scenario


def tuned(framework: str, plan: dict[str, Any], training: dict[str, Any]) -> Scenario:
    return make_scenario({
        "name": "tuned", "model": "llama3.1-8b", "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"sequence_parallel": False, "recompute": "full", **plan},
        "training": {"sequence_length": 2048, "global_batch_size": 32, "micro_batch_size": 2, "attention_kernel": "fa2",
                     "compile": False, **training},
    })  # fmt: skip


PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero_stage": 0}, {}),
    ({"zero_stage": 3}, {"optimizer": "adamw-8bit"}),
    ({"zero_stage": 3, "reshard_after_forward": False, "shard_size": 4, "recompute": "none"}, {}),
    ({"zero_stage": 3, "offload": {"optimizer": True, "parameters": True}}, {}),
    ({"zero_stage": 0}, {"trainable": "lora", "lora_rank": 8, "lora_modules": "all", "base_weights": "nf4-double"}),
    ({"zero_stage": 0}, {"trainable": "lora", "base_weights": "int8", "lora_dropout": 0.1, "dora": True}),
    ({"zero_stage": 3}, {"fused_kernels": ["norm", "rope"], "cross_entropy": "linear"}),
    ({"zero_stage": 0}, {"trainable": "lora", "lora_modules": "qv"}),
    ({"zero_stage": 0}, {"trainable": "lora", "lora_modules": "mlp"}),
    ({"zero_stage": 2}, {}),
    ({"zero_stage": 0}, {"optimizer": "adamw-foreach", "pure_bf16": True}),
    ({"zero_stage": 0}, {"optimizer": "adamw-fused", "pure_bf16": True}),
]


TUNES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero_stage": 3}, {"optimizer": "adamw-8bit"}),
    ({"zero_stage": 3, "reshard_after_forward": False, "shard_size": 4, "tp": 2}, {}),
    ({"zero_stage": 3, "offload": {"optimizer": True, "parameters": True, "activations": 1.0}}, {}),
    ({"zero_stage": 3}, {"trainable": "lora", "lora_rank": 8, "lora_modules": "all", "base_weights": "nf4-double"}),
    ({"zero_stage": 3}, {"optimizer": "adamw-foreach"}),
    ({"zero_stage": 3}, {"trainable": "lora", "lora_modules": "mlp", "dora": True}),
]


@pytest.mark.parametrize(("plan", "training"), TUNES)
def test_what_is_written_for_torchtune_means_the_same(plan: dict[str, Any], training: dict[str, Any], tmp_path: Path) -> None:
    scenario = tuned("torchtune", plan, {"cross_entropy": "chunked", "attention_kernel": "auto", **training})
    found = read(tmp_path, FORMATS["torchtune"](scenario)["torchtune.yaml"])
    wanted, got = meaning(scenario), meaning(found)
    assert {k: (v, got.get(k)) for k, v in wanted.items() if v != got.get(k)} == {}


def test_torchtune(tmp_path: Path) -> None:
    text = """
model: {_component_: torchtune.models.qwen2_5.qlora_qwen2_5_7b_instruct, lora_attn_modules: [q_proj, v_proj], lora_rank: 4}
tokenizer: {_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, max_seq_len: null}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
optimizer: {_component_: torch.optim.AdamW}
batch_size: 2
gradient_accumulation_steps: 8
enable_activation_checkpointing: true
dtype: bf16
"""
    path = saved(tmp_path, "tune.yaml", text)
    with pytest.raises(InputError, match="--sequence-length"):
        load_config(path, **WHERE)
    found = load_config(path, sequence_length=1024, **WHERE)
    training = found.scenario.training
    assert (training.lora_rank, training.lora_modules, training.base_weights) == (4, "qv", "nf4-double")
    assert training.optimizer == "adamw-foreach"
    assert (found.scenario.plan.zero_stage, training.global_batch_size, training.sequence_length) == (3, 2 * 8 * 8, 1024)
    three = load_config(
        saved(tmp_path, "three.yaml", text.replace("v_proj]", "v_proj, output_proj]")), sequence_length=1024, **WHERE
    )
    assert three.scenario.training.lora_modules == "attention"
    assert any("output_proj, q_proj, v_proj" in w for w in three.warnings)
    for old, new, said in (
        ("qwen2_5_7b", "qwen9_7b", "no model known here"),
        ("LinearCrossEntropyLoss", "DPOLoss", "another recipe"),
    ):
        with pytest.raises(InputError, match=said):
            load_config(saved(tmp_path, "bad.yaml", text.replace(old, new)), sequence_length=1024, **WHERE)


@pytest.mark.parametrize("name", ["axolotl", "huggingface"])
@pytest.mark.parametrize(("plan", "training"), PLANS)
def test_what_is_written_means_the_same(name: str, plan: dict[str, Any], training: dict[str, Any], tmp_path: Path) -> None:
    if name == "huggingface" and plan["zero_stage"] == 0 and not training:
        training = {"pure_bf16": False}  # sft.yaml names the dtype that weights are loaded in
    scenario = tuned("axolotl" if name == "axolotl" else "trl", plan, training)
    for file, text in FORMATS[name](scenario).items():
        saved(tmp_path, file, text)
    more = {} if name == "axolotl" else {"accelerate": tmp_path / "accelerate.yaml"}
    found = load_config(tmp_path / ("axolotl.yaml" if name == "axolotl" else "sft.yaml"), **WHERE, **more).scenario
    wanted, got = meaning(scenario), meaning(found)
    assert {k: (v, got.get(k)) for k, v in wanted.items() if v != got.get(k)} == {}


def test_axolotl(tmp_path: Path) -> None:
    more = """
gradient_checkpointing: offload
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_sharding_strategy: SHARD_GRAD_OP}
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
"""
    found = read(tmp_path, AXOLOTL + more)
    plan, training = found.plan, found.training
    assert (plan.zero_stage, plan.reshard_after_forward, plan.recompute) == (3, False, "full")
    assert (plan.offload.activations, plan.offload.optimizer, plan.offload.parameters) == (1.0, True, True)
    assert (training.cross_entropy, training.fused_kernels, training.global_batch_size) == ("linear", True, 2 * 4 * 8)
    with pytest.raises(InputError, match=r"16 ranks must be the 8 GPUs"):
        read(
            tmp_path,
            AXOLOTL + "fsdp_version: 2\nfsdp_config: {}\ndp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n",
        )
    with pytest.raises(InputError, match="rl"):
        read(tmp_path, AXOLOTL + "rl: dpo\n")


def test_llama_factory(tmp_path: Path) -> None:
    found = load_config(saved(tmp_path, "run.yaml", FACTORY), **WHERE)
    training = found.scenario.training
    assert (training.sequence_length, training.trainable, training.lora_rank, training.lora_modules) == (2048, "lora", 8, "all")
    assert (found.scenario.plan.recompute, training.global_batch_size, training.base_weights) == ("full", 16, "auto")
    assert any("--accelerate" in w for w in found.warnings)
    assert read(tmp_path, FACTORY + "quantization_bit: 4\n").training.base_weights == "nf4-double"
    whole = FACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    assert read(tmp_path, whole).training.pure_bf16 is False  # trained weights are turned into fp32
    assert read(tmp_path, whole + "pure_bf16: true\n").training.pure_bf16 is True
    assert read(tmp_path, whole + "disable_gradient_checkpointing: true\n").plan.recompute == "none"
    for more, said in (
        ("use_galore: true\n", "use_galore"),
        ("deepspeed: ds.json\n", "no file here"),
        ("pipeline_model_parallel_size: 2\n", "pipeline"),
    ):
        with pytest.raises(InputError, match=said):
            read(tmp_path, whole + more)
    with pytest.raises(InputError, match="stage = 'dpo'"):
        read(tmp_path, FACTORY.replace("stage: sft", "stage: dpo"))
    engine = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": "auto"}
    saved(tmp_path, "examples/ds.json", json.dumps(engine))
    path = saved(tmp_path, "examples/full/run.yaml", whole + "deepspeed: examples/ds.json\n")
    plan = load_config(path, **WHERE).scenario.plan
    assert (plan.zero_stage, plan.offload.optimizer, plan.offload.parameters) == (3, True, False)


def test_trl_with_accelerate(tmp_path: Path) -> None:
    alone = load_config(saved(tmp_path, "sft.yaml", TRL), **WHERE).scenario
    assert (alone.training.sequence_length, alone.training.pure_bf16, alone.plan.zero_stage) == (4096, True, 0)
    assert alone.plan.recompute == "full"  # TRL's default
    assert read(tmp_path, TRL.replace("torch_dtype: bfloat16\n", "")).training.pure_bf16 is False
    path = saved(tmp_path, "accelerate.yaml", FSDP)
    found = load_config(tmp_path / "sft.yaml", hardware="dgx-h100", accelerate=path).scenario
    assert (found.plan.zero_stage, found.world_size, found.training.pure_bf16) == (3, 8, None)
    engine = "distributed_type: DEEPSPEED\nnum_processes: 16\nnum_machines: 2\n"
    engine += "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
    found = load_config(tmp_path / "sft.yaml", hardware="dgx-h100", accelerate=saved(tmp_path, "a.yaml", engine)).scenario
    assert (found.plan.zero_stage, found.plan.offload.optimizer, found.world_size) == (2, True, 16)
    words = ["--accelerate", str(path), "--hardware", "dgx-h100", "--model", "llama3.1-8b", "--sequence-length", "1024"]
    result = CliRunner().invoke(app, ["import", "config", str(tmp_path / "sft.yaml"), *words])
    assert result.exit_code == 0, result.output
    assert "sequence_length = 1024" in result.output
    with pytest.raises(InputError, match="by --accelerate"):
        load_config(path, **WHERE)
    with pytest.raises(InputError, match="no configuration of accelerate"):
        load_config(tmp_path / "sft.yaml", accelerate=tmp_path / "sft.yaml", **WHERE)
    with pytest.raises(InputError, match="no configuration that is read"):  # open-instruct's own loop
        read(tmp_path, TRL + "with_tracking: true\n")


def test_the_optimizer_of_a_file_is_torchs_by_name_and_deepspeeds_under_deepspeed(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen2.5-7B\nsequence_len: 2048\nmicro_batch_size: 2\nbf16: true\n"
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    for more, ours in (
        ("", "adamw"), ("optimizer: adamw_torch\n", "adamw-foreach"), ("optimizer: adamw_torch_fused\n", "adamw-fused"),
        (f"optimizer: adamw_torch\ndeepspeed: {tmp_path / 'ds.json'}\n", "adamw"),
    ):  # fmt: skip
        assert read(tmp_path, text + more).training.optimizer == ours


def test_names_of_dialects_are_told_once() -> None:
    for name, dialect in DIALECTS.items():
        read_keys = set(dialect.names.values())
        assert not read_keys & {*dialect.another, *dialect.noted}, name
        assert set(dialect.defaults) <= {*dialect.names, "nested", "pure"}, name


def test_a_framework_by_another_name_writes_its_log() -> None:
    for name in ("axolotl", "llama-factory"):
        check_same_job(LogReading("train.log", "transformers"), tuned(name, {"zero_stage": 3}, {}))
    with pytest.raises(InputError, match="which axolotl does not write"):
        check_same_job(LogReading("train.log", "torchtitan"), tuned("axolotl", {"zero_stage": 3}, {}))


def test_commands_that_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, "sft.yaml", TRL)
    saved(tmp_path, "fsdp.yaml", FSDP)
    saved(tmp_path, "lora.yaml", FACTORY)
    saved(tmp_path, "axolotl.yaml", AXOLOTL)
    trl = "accelerate launch --config_file fsdp.yaml -m trl.scripts.sft --config sft.yaml --per_device_train_batch_size 2\n"
    found = run_and_load(saved(tmp_path, "trl.sh", trl), hardware="dgx-h100").scenario
    assert (found.plan.zero_stage, found.training.micro_batch_size, found.training.sequence_length) == (3, 2, 4096)
    fewer = trl.replace("fsdp.yaml", "fsdp.yaml --num_processes 4")
    assert run_and_load(saved(tmp_path, "four.sh", fewer), hardware="dgx-h100").scenario.world_size == 4
    found = run_and_load(saved(tmp_path, "lf.sh", "llamafactory-cli train lora.yaml --lora_rank=32 --bf16\n"), **WHERE).scenario
    assert (found.training.lora_rank, found.training.precision) == (32, "bf16")
    found = run_and_load(saved(tmp_path, "ax.sh", "axolotl train axolotl.yaml --micro-batch-size 1\n"), **WHERE).scenario
    assert (found.training.micro_batch_size, found.framework) == (1, "axolotl")
    flags = "trl sft --model_name_or_path meta-llama/Llama-3.1-8B --max_length 2048 --use_peft --lora_target_modules all-linear\n"
    found = run_and_load(saved(tmp_path, "flags.sh", flags), **WHERE).scenario
    assert (found.training.trainable, found.training.lora_modules, found.training.sequence_length) == ("lora", "all", 2048)
    with pytest.raises(InputError, match="neither"):  # whose trainer?
        run_and_load(saved(tmp_path, "own.sh", "python my.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16\n"), **WHERE)
