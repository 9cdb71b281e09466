"""What frameworks resolved, read back: argument tables, checkpoints, configurations, scripts under stand-ins."""

from __future__ import annotations

import argparse
import enum
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from interop_plans import megatron_scenarios
from typer.testing import CliRunner

import simpar
from simpar.cli import app
from simpar.errors import InputError
from simpar.interop.argv import options
from simpar.interop.configs import load_config, load_megatron
from simpar.interop.deepspeed import configuration
from simpar.interop.launched import load as run_and_load
from simpar.interop.meaning import meaning
from simpar.interop.megatron import flags, violations
from simpar.interop.megatron_import import load, of_words
from simpar.model.ledger import total_parameters
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import Scenario, read_scenario

SCENARIOS = Path(__file__).parent.parent / "scenarios"
DATA = Path(__file__).parent / "data" / "frameworks"
DEFAULTS = dict(
    line.split(" ", 1)
    for line in (DATA / "megatron_defaults_core_v0.15.0.txt").read_text().splitlines()
    if not line.startswith("#")
)
WHERE: dict[str, Any] = {"hardware": "dgx-h100", "num_nodes": 2}
LINE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --bf16 --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 32 --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --vocab-size 128256"
)


def words(more: str = "", less: str = "") -> list[str]:
    return LINE.replace(less, "").split() + more.split()


def table_of(found: dict[str, list[str]], **more: Any) -> str:
    """Flags as the table that Megatron-LM prints, with all the defaults that stand in it."""
    names = {
        "fp8-format": "fp8",
        "fp4-format": "fp4",
        "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    }
    listed = {"recompute-modules", "cp-comm-type"}
    arguments: dict[str, Any] = {
        **DEFAULTS, "add_bias_linear": True, "overlap_p2p_comm": True, "params_dtype": "torch.bfloat16", "world_size": 16,
        "rank": 0, **more,
    }  # fmt: skip
    for flag, values in found.items():
        if flag == "disable-bias-linear":
            arguments["add_bias_linear"] = False
        elif flag == "no-overlap-p2p-communication":
            arguments["overlap_p2p_comm"] = False
        else:
            value: Any = True if not values else values[0] if len(values) == 1 and flag not in listed else values
            arguments[names.get(flag, flag.replace("-", "_"))] = value
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(arguments.items())]
    return (
        "\n".join(["noise", "-" * 24 + " arguments " + "-" * 24, *lines, "-" * 20 + " end of arguments " + "-" * 21, "more"]) + "\n"
    )


# -- Megatron-LM -----------------------------------------------------------------------------------------------------------


def test_a_printed_table_says_what_the_flags_say() -> None:
    by_flags = of_words(words(), **WHERE).scenario
    found = load(table_of(options(words())), **WHERE)
    assert meaning(found.scenario) == meaning(by_flags)
    prefixed = "\n".join(f"[default0]:{line}" for line in table_of(options(words())).splitlines())
    assert meaning(load(prefixed, **WHERE).scenario) == meaning(by_flags)
    assert load(table_of(options(words())), hardware="dgx-h100").scenario.world_size == 16


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(megatron_scenarios())
def test_tables_of_random_plans(scenario: Scenario) -> None:
    """Every scenario that Megatron-LM runs comes back from the table its flags make."""
    if violations(scenario) or scenario.world_size != scenario.cluster.num_nodes * scenario.hardware.gpus_per_node:
        return
    try:
        found = options(" ".join(flags(scenario)).replace("'", "").replace('"', "").split())
    except InputError:
        return
    outside = {"hardware": scenario.cluster.hardware, "num_nodes": scenario.cluster.num_nodes}
    by_flags = of_words([w for n, v in found.items() for w in (f"--{n}", *v)], **outside).scenario
    assert meaning(load(table_of(found), **outside).scenario) == meaning(by_flags)


def test_a_table_that_is_cut(tmp_path: Path) -> None:
    text = table_of(options(words()))
    with pytest.raises(InputError, match="its end is missing"):
        load(text[: text.index("seq_length")], **WHERE)


class Backend(enum.Enum):
    flash = 1


def test_the_args_of_a_checkpoint(tmp_path: Path) -> None:
    """The classes in it are never loaded; tensors are none."""
    names = {n.replace("-", "_"): (v[0] if v else True) for n, v in options(words()).items()}
    args = argparse.Namespace(**{k: int(v) if str(v).isdigit() else v for k, v in names.items()}, attention_backend=Backend.flash,
                              add_bias_linear=False, world_size=16)  # fmt: skip
    delattr(args, "disable_bias_linear")
    folder = tmp_path / "iter_0000100" / "mp_rank_00"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "model_optim_rng.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"args": args, "iteration": 100, "where": Path("x")}))
    for path in (tmp_path / "iter_0000100", folder / "model_optim_rng.pt"):
        assert meaning(load_config(path, **WHERE).scenario) == meaning(of_words(words(), **WHERE).scenario)
    (tmp_path / "other.pt").write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(InputError, match="holds no args"):
        load_config(tmp_path / "other.pt", **WHERE)


STRUCTURAL = [
    ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "spec"),
    ("--yaml-cfg config.yaml", "yaml-cfg"),
    ("--experimental-attention-variant gated_delta_net --linear-attention-freq 4", "experimental-attention-variant"),
    ("--hybrid-override-pattern M*X-", "hybrid-override-pattern"),
    ("--rampup-batch-size 16 16 1000", "rampup-batch-size"),
    ("--rl-something 3", "rl-something"),
    ("--heterogeneous-layers-config-path x.json", "heterogeneous-layers-config-path"),
]


@pytest.mark.parametrize(("more", "name"), STRUCTURAL)
def test_structural_flags_are_refused_unless_accepted(more: str, name: str) -> None:
    with pytest.raises(InputError, match=f"--{name}"):
        of_words(words(more), **WHERE)
    names = [w[2:] for w in more.split() if w.startswith("--")]
    found = of_words(words(more), accept=names, **WHERE)
    assert of_words(words(more), accept=["all"], **WHERE).scenario == found.scenario
    assert meaning(found.scenario) == meaning(of_words(words(), **WHERE).scenario)
    if name != "spec":
        assert any("as accepted" in w for w in found.warnings)


def test_plain_layer_specs_are_no_other_model() -> None:
    more = "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec"
    assert of_words(words(more), **WHERE).scenario == of_words(words(), **WHERE).scenario


def test_rotary_positions_leave_nothing_to_switch_off() -> None:
    found = of_words(words("--no-position-embedding"), **WHERE)
    assert (found.scenario, found.warnings) == (of_words(words(), **WHERE).scenario, of_words(words(), **WHERE).warnings)
    with pytest.raises(InputError, match="no-position-embedding"):
        of_words(words("--no-position-embedding", "--position-embedding-type rope "), **WHERE)


@pytest.mark.parametrize(
    ("more", "less", "field", "value"),
    [
        ("--position-embedding-type alibi", "--position-embedding-type rope ", "position", "alibi"),
        ("--normalization rmsnorm", "--normalization RMSNorm ", "norm", "rmsnorm"),
        ("--geglu", "--swiglu ", "gated_mlp", True),
        ("--geglu", "--swiglu ", "activation", "gelu"),
        ("--embed-layernorm", "", "embedding_norm", True),
        ("--squared-relu", "--swiglu ", "activation", "squared_relu"),
    ],
)
def test_what_once_became_another_model(more: str, less: str, field: str, value: object) -> None:
    assert getattr(of_words(words(more, less), **WHERE).scenario.model, field) == value


def test_zero_of_deepspeed_scripts() -> None:
    found = of_words(words("--deepspeed --zero-stage 3", "--use-distributed-optimizer "), **WHERE).scenario
    assert (found.plan.zero_stage, found.framework) == (3, "megatron-deepspeed")


@pytest.mark.parametrize("value", ["--position-embedding-type fancy", "--normalization BatchNorm"])
def test_values_that_mean_nothing_here_are_refused(value: str) -> None:
    name, word = value.split()
    with pytest.raises(InputError, match=word):
        of_words([w for w in words() if w not in (name, "rope", "RMSNorm")] + value.split(), **WHERE)


# -- scripts under stand-ins -----------------------------------------------------------------------------------------------


def scripted(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text("#!/bin/bash\n" + text)
    return path


SCRIPTS = [
    'for ((i=0; i<2; i++)); do H=$((2048 * (i + 1))); done\ntorchrun pretrain_gpt.py --hidden-size $H {line}',
    'read -r H REST <<< "4096 x"\ntorchrun pretrain_gpt.py --hidden-size $H {line}',
    'H=$(seq 4096 4096 | head -n 1)\nA=(--hidden-size "$H")\nsrun -N 2 bash -c "python -u pretrain_gpt.py ${{A[*]}} {line}"',
    'set -e; rm -rf {folder}/mark; mkdir -p out; pip install x\nsource missing.sh || true\nexport H=4096\n'
    'mpirun -np 16 numactl -N 0 python3 pretrain_gpt.py --hidden-size ${{H}} {line} | tee log.txt > /dev/null',
    'declare -A SIZES=([8b]=4096); f() {{ echo "--hidden-size ${{SIZES[$1]}}"; }}\ntorchrun x.py $(f 8b) {line} &\n'
    "wait",
]  # fmt: skip


@pytest.mark.parametrize("text", SCRIPTS)
def test_scripts_that_only_bash_understands(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mark").mkdir()
    line = LINE.replace("--hidden-size 4096 ", "")
    path = scripted(tmp_path, text.format(line=line, folder=tmp_path))
    found = run_and_load(path, **WHERE).scenario
    assert found.model.hidden_size == 4096  # type: ignore[union-attr]
    assert meaning(found) == meaning(of_words(words(), **WHERE).scenario)
    assert (tmp_path / "mark").is_dir()  # rm is a command that did nothing
    assert not (tmp_path / "out").exists()


def test_scripts_of_other_models_are_refused() -> None:
    bert = ["torchrun", "/opt/megatron/pretrain_bert.py", *words()]
    with pytest.raises(InputError, match=r"pretrain_bert\.py"):
        of_words(bert, **WHERE)
    assert of_words(bert, accept=["pretrain_bert.py"], **WHERE).scenario == of_words(words(), **WHERE).scenario


def test_a_job_on_the_input_of_sbatch_is_run(tmp_path: Path) -> None:
    line = f'srun --mpi=pmix bash -c "cd /x; torchrun x.py {LINE.replace("size 2 --seq", "size ${TP} --seq")}" | tee log'
    path = scripted(tmp_path, f"TP=4\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --time=1\n{line}\nEOF\n")
    assert run_and_load(path, **WHERE).scenario.plan.tp == 4


def test_a_script_that_gives_up_is_quoted(tmp_path: Path) -> None:
    text = "[ -f train.py ] || { echo Error: no train.py; echo; exit 1; }\ntorchrun train.py --num-layers 2\n"
    with pytest.raises(InputError, match=r"printed: Error: no train\.py"):
        run_and_load(scripted(tmp_path, text), **WHERE)


def test_the_environment_of_a_script_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP", "8")
    path = scripted(tmp_path, f"torchrun x.py {LINE.replace('size 2 --seq', 'size ${TP:-2} --seq')}\n")
    assert run_and_load(path, **WHERE).scenario.plan.tp == 2
    assert run_and_load(path, (), {"TP": "4"}, **WHERE).scenario.plan.tp == 4


def test_scripts_are_not_run_unasked(tmp_path: Path) -> None:
    path = scripted(tmp_path, f"touch {tmp_path}/mark > {tmp_path}/mark\nTP=2\ntorchrun x.py --num-layers $TP\n")
    result = CliRunner().invoke(app, ["import", "megatron", str(path), "--hardware", "dgx-h100"])
    assert isinstance(result.exception, InputError)
    assert "import --run" in str(result.exception)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(InputError, match="starts none of"):
        run_and_load(scripted(tmp_path, "echo hello; frobnicate\n"), **WHERE)
    path = scripted(tmp_path, f"torchrun x.py {LINE}\n")
    result = CliRunner().invoke(app, ["import", "--run", str(path), "--hardware", "dgx-h100", "--num-nodes", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["scenario"]["plan"]["tp"] == 2
    assert "was run on this machine" in result.stderr


# -- configurations --------------------------------------------------------------------------------------------------------

BRIDGE = """
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 128
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  add_bias_linear: false
  normalization: RMSNorm
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  seq_length: 4096
  vocab_size: 128256
  hidden_dropout: 0.0
  attention_dropout: 0.0
  tensor_model_parallel_size: 2
  sequence_parallel: true
  attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend, _args_: [5]}
train: {micro_batch_size: 1, global_batch_size: 32, train_iters: 50}
ddp: {use_distributed_optimizer: true, grad_reduce_in_fp32: true}
optimizer: {optimizer: adam, use_distributed_optimizer: true}
mixed_precision: bf16_mixed
"""
NEOX = """
"pipe-parallel-size": 1
"model-parallel-size": 2
"num-layers": 24
"hidden-size": 2048
"num-attention-heads": 16
"seq-length": 2048
"max-position-embeddings": 2048
"pos-emb": "rotary"
"no-weight-tying": true
"train_micro_batch_size_per_gpu": 4
"gradient_accumulation_steps": 2
"checkpoint-activations": true
"checkpoint-num-layers": 1
"zero_optimization": {"stage": 1}
"fp16": {"enabled": true}
"vocab_size": 50304
"""
PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      seq_length: ${PRIMUS_SEQ_LENGTH:8192}
      micro_batch_size: 2
      global_batch_size: 64
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      pipeline_model_parallel_size: 1
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 8
"""
VERL = """
data: {train_batch_size: 1024, max_prompt_length: 512, max_response_length: 1536}
actor_rollout_ref:
  model: {path: meta-llama/Llama-3.1-8B-Instruct, enable_gradient_checkpointing: true}
  rollout: {n: 5, name: vllm}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
    fsdp_config: {fsdp_size: -1, param_offload: false, optimizer_offload: true}
trainer: {n_gpus_per_node: 8, nnodes: 2}
"""


def saved(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_megatron_bridge_says_what_the_flags_say(tmp_path: Path) -> None:
    found = load_config(saved(tmp_path, "run_config.yaml", BRIDGE), **WHERE).scenario
    wanted = of_words(
        words("--accumulate-allreduce-grads-in-fp32 --padded-vocab-size 128256", "--vocab-size 128256"), **WHERE
    ).scenario
    assert meaning(found) == meaning(wanted)
    printed = f"done with setup ...\n------- Task Configuration -------\n{BRIDGE}{'-' * 34}\ntraining ...\n"
    log = saved(tmp_path, "train.log", printed)
    for read in (load_config, load_megatron):  # `import megatron` takes such a log too
        scenario = read(log, **WHERE).scenario
        assert meaning(scenario) == meaning(wanted)
        assert scenario.framework == "megatron-bridge"
    # As NeMo 25.09 prints it: the model's longest length, and defaults of models that it is not.
    longest = BRIDGE.replace("seq_length: 4096", "seq_length: 131072\n  mamba_state_dim: 128\n  is_hybrid_model: false")
    read = load_config(saved(tmp_path, "l.yaml", f"{longest}dataset: {{sequence_length: 4096}}\n"), **WHERE).scenario
    assert meaning(read) == meaning(wanted)
    padded = BRIDGE.replace("vocab_size: 128256", "vocab_size: 128001\n  should_pad_vocab: true")
    assert load_config(saved(tmp_path, "p.yaml", padded), **WHERE).scenario.model.vocab_size == 128256  # type: ignore[union-attr]
    fp8 = load_config(saved(tmp_path, "f.yaml", BRIDGE.replace("bf16_mixed", "bf16_with_mxfp8_mixed")), **WHERE).scenario
    assert fp8.training.precision == "mxfp8"
    for old, new, said in (("num_layers: 32", "num_layers: 32\n  is_hybrid_model: true", "--is-hybrid-model"),
                           ("mixed_precision:", "peft: {dim: 16}\nmixed_precision:", "--peft"),
                           ("num_layers: 32", "num_layers: ${n}", "not resolved")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            load_config(saved(tmp_path, "bad.yaml", BRIDGE.replace(old, new)), **WHERE)
    with pytest.raises(InputError, match="num-nodes"):
        load_config(saved(tmp_path, "run_config.yaml", BRIDGE), hardware="dgx-h100")


def test_gpt_neox(tmp_path: Path) -> None:
    found = load_config(saved(tmp_path, "neox.yml", NEOX), **WHERE).scenario
    assert (found.plan.tp, found.plan.zero_stage, found.plan.recompute) == (2, 1, "full")
    assert (found.training.micro_batch_size, found.training.global_batch_size) == (4, 4 * 2 * 8)
    assert (found.training.precision, found.framework) == ("fp16", "megatron-deepspeed")
    model = found.model
    assert (model.position, model.tie_word_embeddings, model.intermediate_size) == ("rope", False, 8192)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="attention_config"):
        load_config(saved(tmp_path, "neox.yml", NEOX + '"attention-config": [[["mamba"], 24]]\n'), **WHERE)
    # configs/llama2/7B.yml: its MLP is 11,008 wide; mistral's 14,336 without a multiple make 4,778.
    for size, multiple, width in ((32768, 256, 11008), (14336, 1, 4778)):
        gated = f'"activation": "swiglu"\n"intermediate-size": {size}\n"mlp-multiple-of": {multiple}\n'
        model = load_config(saved(tmp_path, "neox.yml", NEOX + gated), **WHERE).scenario.model
        assert isinstance(model, TransformerSpec)
        assert (model.intermediate_size, model.gated_mlp) == (width, True)
    with pytest.raises(InputError, match="does not say num_layers"):
        load_config(saved(tmp_path, "neox.yml", NEOX.replace('"num-layers": 24', "")), **WHERE)


def test_gpt_neox_beside_megatrons_flags(tmp_path: Path) -> None:
    def read(more: str, text: str = NEOX) -> Any:
        return load_config(saved(tmp_path, "neox.yml", text + more), **WHERE)

    plain = read("").scenario.training
    assert (plain.attention_kernel, plain.optimizer) == ("unfused", "adamw")
    assert read('"attention-config": [[["flash"], 24]]\n').scenario.training.attention_kernel == "fa2"
    assert read("te_mha: true\n").scenario.training.attention_kernel == "auto"
    assert any("use_bnb_optimizer" in w for w in read("use_bnb_optimizer: true\n").warnings)
    assert read('optimizer: {"type": "Lion"}\n').warnings == (*read("").warnings, "optimizer.type = 'lion': taken as AdamW")
    assert read("sliding_window_width: 1024\n").scenario.model.sliding_window == 1025
    apart = read("use_bias_in_attn_linear: false\n").scenario.model
    assert (apart.attention_bias, apart.mlp_bias) == (False, True)
    host = NEOX.replace('"stage": 1', '"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000000')
    found = read("", host)
    assert found.scenario.plan.offload.optimizer
    assert any("reduce_bucket_size" in w for w in found.warnings)
    bf16 = NEOX.replace('"fp16"', '"bf16"')
    assert read("", bf16).scenario.training.gradient_dtype == "bf16"
    assert read('data_types: {"grad_accum_dtype": "fp32"}\n', bf16).scenario.training.gradient_dtype == "fp32"
    # 128 sequences over 8 data ranks: by default at once.
    whole = NEOX.replace('"train_micro_batch_size_per_gpu": 4', "train_batch_size: 128")
    assert read("", whole.replace('"gradient_accumulation_steps": 2', "")).scenario.training.micro_batch_size == 16
    assert read("", whole).scenario.training.micro_batch_size == 8
    with pytest.raises(InputError, match="neither train_batch_size"):
        read("", NEOX.replace('"train_micro_batch_size_per_gpu": 4', ""))


def test_gpt_neox_beside_its_attention(tmp_path: Path) -> None:
    """GPT-NeoX 20B (configs/20B.yml, padded to 50,432 tokens) has the parameters of its checkpoint; tied norms are one a layer."""
    text = NEOX.replace("2048\n", "6144\n", 1).replace('layers": 24', 'layers": 44').replace('heads": 16', 'heads": 64')
    text = text.replace("50304", "50432") + '"gpt-j-residual": true\n'
    found = load_config(saved(tmp_path, "neox.yml", text), **WHERE)
    assert total_parameters(found.scenario.model) == 20_554_567_680
    assert any("tensor ranks at once" in warning for warning in found.warnings)
    tied = load_config(
        saved(tmp_path, "t.yml", text.replace('parallel-size": 2', 'parallel-size": 1') + "gpt-j-tied: true\n"), **WHERE
    )
    assert total_parameters(tied.scenario.model) == 20_554_567_680 - 44 * 2 * 6144
    assert not any("tensor ranks at once" in warning for warning in tied.warnings)


def test_primus(tmp_path: Path) -> None:
    found = load_config(saved(tmp_path, "primus.yaml", PRIMUS), hardware="mi300x", num_nodes=1).scenario
    assert found.model.name == "Llama 3.1 8B"  # type: ignore[union-attr]
    assert (found.training.sequence_length, found.training.micro_batch_size, found.plan.zero_stage) == (8192, 2, 1)
    assert found.plan.recompute.num_layers == 8  # type: ignore[union-attr]
    for old, new, said in (("llama3.1_8B", "my_own", "a file of Primus"), ("${PRIMUS_TP:1}", "${TP}", "no default"),
                           ("framework: megatron", "framework: torchtitan", "another trainer")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            load_config(saved(tmp_path, "primus.yaml", PRIMUS.replace(old, new)), hardware="mi300x", num_nodes=1)
    with pytest.raises(InputError, match=r"modules = 'post_trainer': has no pre_trainer"):
        load_config(saved(tmp_path, "sft.yaml", PRIMUS.replace("pre_trainer:", "post_trainer:")), hardware="mi300x", num_nodes=1)


def test_verl(tmp_path: Path) -> None:
    result = load_config(saved(tmp_path, "config.yaml", VERL), hardware="dgx-h100")
    found = result.scenario
    assert (found.training.sequence_length, found.training.global_batch_size, found.training.micro_batch_size) == (2048, 320, 2)
    assert (found.plan.zero_stage, found.plan.recompute, found.plan.offload.optimizer, found.world_size) == (3, "full", False, 16)
    assert any("training phase alone" in w for w in result.warnings)
    # What is moved out lies on the GPU while the actor is trained; FSDP 2's own policy keeps it on the host.
    assert any("optimizer_offload: what it moves" in w for w in result.warnings)
    policy = VERL.replace("optimizer_offload: true", "offload_policy: true")
    host = load_config(saved(tmp_path, "p.yaml", policy), hardware="dgx-h100").scenario.plan.offload
    assert (host.optimizer, host.parameters) == (True, True)
    with pytest.raises(InputError, match="nor use_dynamic_bsz"):
        load_config(saved(tmp_path, "n.yaml", VERL.replace("    ppo_micro_batch_size_per_gpu: 2\n", "")), hardware="dgx-h100")
    megatron = VERL.replace(
        "strategy: fsdp2", "strategy: megatron\n    megatron: {tensor_model_parallel_size: 4, sequence_parallel: true}"
    )
    plan = load_config(saved(tmp_path, "m.yaml", megatron), hardware="dgx-h100").scenario.plan
    assert (plan.tp, plan.zero_stage) == (4, 1)
    with pytest.raises(InputError, match="no model known here"):
        load_config(saved(tmp_path, "x.yaml", VERL.replace("Llama-3.1-8B-Instruct", "Nothing-3B")), hardware="dgx-h100")


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 3}, {"zero_stage": 2, "tp": 2, "sequence_parallel": False},
                                     {"zero_stage": 3, "offload": {"optimizer": True}, "recompute": "full"}])  # fmt: skip
def test_deepspeed_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    scenario = simpar.load(
        model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, framework="deepspeed", global_batch_size=32, sequence_length=2048,
        **{"tp": 1, "zero_stage": 1, **changes},
    )  # fmt: skip
    path = saved(tmp_path, "ds.json", json.dumps(configuration(scenario)))
    found = load_config(path, hardware="dgx-h100", num_nodes=1, model="llama3.1-8b", sequence_length=2048).scenario
    wanted, got = meaning(scenario), meaning(found)
    assert {k: (wanted[k], got[k]) for k in wanted if wanted[k] != got[k]} == {}


def test_deepspeed_asks_for_what_it_does_not_say(tmp_path: Path) -> None:
    path = saved(tmp_path, "ds.json", '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}')
    with pytest.raises(InputError) as caught:
        load_config(path, hardware="dgx-h100", num_nodes=1)
    for part in ("train_micro_batch_size_per_gpu", "--model", "--sequence-length"):
        assert part in str(caught.value)


def test_deepspeed_says_what_it_does_not_read(tmp_path: Path) -> None:
    said = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 5e7}}  # fmt: skip
    more: dict[str, Any] = {"model": "llama3.1-8b", "sequence_length": 4096, **WHERE}
    found = load_config(saved(tmp_path, "ds.json", json.dumps(said)), **more)
    assert [w.partition(" = ")[0] for w in found.warnings] == ["zero_optimization.zero_hpz_partition_size"]
    with pytest.raises(InputError, match="neither train_batch_size"):
        load_config(saved(tmp_path, "ds.json", '{"zero_optimization": {"stage": 2}}'), **more)


def test_torchtitan_counts_tokens_in_2026(tmp_path: Path) -> None:
    table = {
        "model_spec": {"name": "llama3", "flavor": "8B"},
        "training": {"num_tokens_per_microbatch_per_dp_rank": 16384, "max_context_length": 8192,
                     "num_tokens_per_train_step": 16384 * 16},
        "parallelism": {"tensor_parallel_degree": 1, "data_parallel_shard_degree": -1}, "activation_checkpoint": {"mode": "full"},
    }  # fmt: skip
    found = load_config(saved(tmp_path, "config.json", json.dumps(table)), **WHERE).scenario
    assert (found.training.sequence_length, found.training.micro_batch_size, found.training.global_batch_size) == (8192, 2, 32)
    assert (found.plan.zero_stage, found.plan.recompute) == (3, "full")


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: 1\n"), ("a.json", "{}"), ("a.txt", "hello\n"), ("a.yml", "- 1\n")])
def test_other_files_are_named(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"configuration|DeepSpeed"):
        load_config(saved(tmp_path, name, text), **WHERE)


def test_runs_are_read_with_a_configuration(tmp_path: Path) -> None:
    """The log itself is the configuration: its table of arguments says what ran."""
    step = "iteration {:8d}/     100 | consumed samples: 32 | elapsed time per iteration (ms): 500.0 | global batch size:    32 |\n"
    log = saved(tmp_path, "train.log", table_of(options(words())) + "".join(step.format(i) for i in range(1, 10)))
    result = CliRunner().invoke(app, ["run", "read", str(log), "--log", str(log), "--hardware", "dgx-h100", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    row = json.loads(result.stdout)
    assert (row["step_time_s"], row["tp"], row["n_gpus"]) == (0.5, 2, 16)
    assert read_scenario(SCENARIOS / "llama3.1-70b_h100x64_tp4cp2pp4.toml").plan.tp == 4
