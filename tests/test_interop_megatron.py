"""Megatron-LM launch scripts: every flag that a layout needs, no silent loss, and the way back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from interop_plans import megatron_scenarios

from simpar.errors import InputError
from simpar.interop.launched import load as run_and_load
from simpar.interop.megatron import export, flags, launch_script, violations
from simpar.interop.megatron_import import load
from simpar.interop.megatron_model import layer_bits
from simpar.specs.scenario import Scenario, read_scenario
from simpar.step import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"
LLAMA = SCENARIOS / "llama3.1-70b_h100x64_tp4cp2pp4.toml"
DEEPSEEK = SCENARIOS / "deepseek-v3_h800x2048_pp16ep64.toml"
NOT_MEGATRON = (
    "alexnet", "bloom", "deepseek", "gpipe", "gpt3-175b_tpu", "llama3.1-70b_a100x64h100x64", "llama3.1-70b_tpu", "mlp", "switch",
)  # fmt: skip
"""CNN, ALiBi, DualPipe, TPUs, machines of several kinds, MLPs, encoder-decoder: all that is shipped and not for Megatron-LM."""
RUNNABLE = sorted(p for p in SCENARIOS.glob("*.toml") if not p.name.startswith(NOT_MEGATRON))
MODEL = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 --swiglu
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --bf16
"""


def plain(scenario: Scenario) -> Scenario:
    """Without what no launch file carries: the file it came from, and what is published about it."""
    return scenario.model_copy(update={"file": "", "published": ()})


def script(*lines: str) -> str:
    return "#!/bin/bash\n" + "\n".join(lines) + "\n"


def run(arguments: str, launcher: str = "--nnodes 2 --nproc-per-node 8") -> str:
    flat = " ".join((MODEL + arguments).split())
    return script(f"torchrun {launcher} pretrain_gpt.py {flat}")


def test_a_dense_layout() -> None:
    found = flags(read_scenario(LLAMA))
    for flag in (
        "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 4", "--context-parallel-size 2", "--sequence-parallel",
        "--num-virtual-stages-per-pipeline-rank 5", "--use-distributed-optimizer", "--num-layers 80", "--hidden-size 8192",
        "--num-query-groups 8", "--swiglu", "--untie-embeddings-and-output-weights", "--bf16", "--disable-bias-linear",
    ):  # fmt: skip
        assert flag in found


def test_experts_and_latent_attention() -> None:
    changes = ["plan.schedule=interleaved", "plan.virtual_stages=2", "plan.zero_stage=1"]
    found = flags(read_scenario(DEEPSEEK, changes))
    for flag in ("--multi-latent-attention", "--num-experts 256", "--moe-router-topk 8", "--expert-model-parallel-size 64",
                 "--moe-shared-expert-intermediate-size 2048", "--kv-lora-rank 512", "--mtp-num-layers 1"):  # fmt: skip
        assert flag in found
    assert "--moe-layer-freq '([0]*3+[1]*58)'" in found


def test_what_megatron_cannot_run_is_named_together() -> None:
    with pytest.raises(InputError) as caught:
        flags(read_scenario(DEEPSEEK))
    assert {v.field for v in caught.value.violations} >= {"plan.schedule", "plan.overlap_ep"}
    with pytest.raises(InputError, match="transformers"):
        flags(read_scenario(SCENARIOS / "mlp-4096x24_a100x8_dp8.toml"))
    with pytest.raises(InputError) as caught:
        flags(read_scenario(SCENARIOS / "bloom-176b_a100x384_tp4pp12.toml"))
    assert {v.field for v in caught.value.violations} == {"model.position", "model.embedding_norm"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (["plan.offload={activations=0.5}"], "plan.offload"),
        (["plan.delay_wgrad=true"], "plan.delay_wgrad"),
        (["plan.sequence_parallel=false"], "plan.overlap_tp"),
        (["plan.overlap_grad_reduce=false", "plan.overlap_param_gather=true"], "plan.overlap_param_gather"),
        (["training.trainable=lora"], "training.trainable"),
        (["training.compile=true"], "training.compile"),
        (["training.cross_entropy=chunked"], "training.cross_entropy"),
        (["training.optimizer=adafactor"], "training.optimizer"),
        (["plan.synchronous_optimizer=false"], "plan.synchronous_optimizer"),
        (["plan.zero_stage=3", "plan.reshard_after_forward=false"], "plan.reshard_after_forward"),
        (["plan.placement=tp-dp-cp-ep-pp"], "plan.placement"),
        (["training.cuda_graphs=true", "plan.recompute=full"], "training.cuda_graphs"),
    ],
)
def test_each_loss_is_named(changes: list[str], field: str) -> None:
    with pytest.raises(InputError) as caught:
        flags(read_scenario(LLAMA, changes))
    assert field in {v.field for v in caught.value.violations}


def test_forced_balance_is_a_flag_both_ways() -> None:
    even = read_scenario(SCENARIOS / "mixtral-8x22b_h100x128_tp2pp8ep8.toml")
    assert "--moe-router-force-load-balancing" in flags(even)
    natural = read_scenario(SCENARIOS / "mixtral-8x22b_h100x128_tp2pp8ep8.toml", ["training.routing={}"])
    assert "--moe-router-force-load-balancing" not in flags(natural)
    assert load(launch_script(even)).scenario.training.routing.kind == "balanced"
    assert load(launch_script(natural)).scenario.training.routing.kind == "lognormal"


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.stem)
def test_every_shipped_scenario_comes_back(path: Path) -> None:
    # DeepSpeed's reductions below stage 3 wait for the backward, which Megatron-LM's gather does not do without.
    overlap = ["plan.overlap_grad_reduce=true"] if path.stem.endswith(("zero1", "zero2")) else []
    scenario = plain(read_scenario(path, overlap))
    text = launch_script(scenario)
    found = load(text)
    assert found.scenario == scenario
    assert found.warnings == ()
    assert launch_script(found.scenario) == text


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(megatron_scenarios())
def test_random_plans_come_back(scenario: Scenario) -> None:
    if violations(scenario):
        with pytest.raises(InputError):
            launch_script(scenario)
        return
    text = launch_script(scenario)
    found = load(text)
    assert found.scenario == scenario
    assert launch_script(found.scenario) == text


def test_the_script_is_shell() -> None:
    files = export(read_scenario(LLAMA))
    assert "--nnodes 8 --nproc-per-node 8" in files["megatron.sh"]
    for name in ("megatron.sh", "megatron.sbatch"):
        subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)


def test_the_command_that_bash_runs_is_the_one_read() -> None:
    """bash itself expands the arrays: the words are those of the exporter."""
    text = launch_script(read_scenario(LLAMA)).replace("torchrun ", "printf '%s\\n' ")
    printed = subprocess.run(["bash", "-s"], input=text, text=True, check=True, capture_output=True).stdout.split("\n")
    for flag in flags(read_scenario(LLAMA)):
        name, *values = flag.split(" ")
        assert printed[printed.index(name) + 1 : printed.index(name) + 1 + len(values)] == values


def test_an_edited_script_means_what_it_says() -> None:
    text = launch_script(read_scenario(LLAMA)).replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2")
    plan = load(text.replace("--overlap-grad-reduce\n", "").replace("    --overlap-param-gather\n", "")).scenario.plan
    assert (plan.pp, plan.dp, plan.overlap_grad_reduce) == (2, 4, False)
    assert load(text, num_nodes=4).scenario.plan.dp == 2


def test_variables_arrays_arithmetic_and_branches(tmp_path: Path) -> None:
    text = script(
        "GPUS_PER_NODE=8; NNODES=${SLURM_NNODES:-4}", "TP=2", "PP=$((GPUS_PER_NODE/TP/2))  # 2", "PR=fp8",
        'MP=(', '  --tensor-model-parallel-size $TP # tensor', '  --pipeline-model-parallel-size ${PP}', ')',
        'if [ $TP -gt 1 ]; then', '  MP+=(--sequence-parallel)', 'fi',
        'if [[ "$PR" == "fp8" ]]; then EXTRA=("--fp8-format hybrid"); elif [ $PR = bf16 ]; then EXTRA=(--wrong); fi',
        'case $PR in bf16) Z=0 ;; fp8|mxfp8) Z=1 ;; esac', '[ "$Z" -eq 1 ] && OPT="--use-distributed-optimizer"',
        f"model=\" {' '.join(MODEL.split())} \\", '  --micro-batch-size 1 --global-batch-size 64"',
        'run="torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py $model ${MP[@]} ${EXTRA[@]} $OPT"',
        "eval $run 2>&1 | tee log.txt",
    )  # fmt: skip
    path = tmp_path / "run.sh"
    path.write_text(text)
    scenario = run_and_load(path, hardware="dgx-h100").scenario
    plan = scenario.plan
    assert (plan.tp, plan.pp, plan.dp, plan.sequence_parallel, plan.zero_stage) == (2, 2, 8, True, 1)
    assert (scenario.training.precision, scenario.cluster.num_nodes) == ("fp8", 4)
    assert run_and_load(path, (), {"SLURM_NNODES": "8"}, hardware="dgx-h100").scenario.cluster.num_nodes == 8


def test_a_known_model_is_named_and_simulates() -> None:
    """The vocabulary does not stand in the flags: the shipped model of these shapes has it."""
    found = load(run("--global-batch-size 32 --micro-batch-size 1 --use-distributed-optimizer"), hardware="dgx-h100")
    assert found.scenario.model.name == "Llama 3.1 8B"
    assert found.warnings == ()
    assert simulate(found.scenario).step_time_s > 0


def test_flags_that_change_the_step_are_told_and_others_not() -> None:
    text = run("--micro-batch-size 1 --ddp-bucket-size 1000 --fp8-param-gather --lr 1e-4 --save here --brand-new-switch 3")
    warnings = "\n".join(load(text, hardware="dgx-h100").warnings)
    for flag in ("--ddp-bucket-size 1000", "--fp8-param-gather", "--brand-new-switch 3"):
        assert flag in warnings
    assert "--lr" not in warnings
    assert "--save" not in warnings


def test_old_flags() -> None:
    text = run("--batch-size 2 --activations-checkpoint-method uniform --DDP-impl local --num-layers-per-virtual-pipeline-stage 2 "
               "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 4", "--nnodes 2 --nproc_per_node 8")  # fmt: skip
    scenario = load(text, hardware="dgx-a100-80gb").scenario
    assert (scenario.plan.recompute, scenario.plan.virtual_stages, scenario.training.micro_batch_size) == ("full", 4, 2)
    assert scenario.training.global_batch_size == 2


def test_uneven_stages() -> None:
    layout = run('--pipeline-model-parallel-size 4 --micro-batch-size 1 --pipeline-model-parallel-layout "Et*7|(t*9|)*2t*7,L"')
    plan = load(layout, hardware="dgx-h100").scenario.plan
    assert plan.layers_per_stage is None
    assert (plan.first_stage_less_layers, plan.last_stage_less_layers) == (2, 2)
    ends = run("--pipeline-model-parallel-size 4 --micro-batch-size 1 --decoder-first-pipeline-num-layers 5 "
               "--decoder-last-pipeline-num-layers 7")  # fmt: skip
    assert load(ends, hardware="dgx-h100").scenario.plan.layers_per_stage == (5, 10, 10, 7)


def test_what_is_missing_is_asked_for_together() -> None:
    with pytest.raises(InputError) as caught:
        load(script("torchrun train.py --num-layers 4 --tensor-model-parallel-size '' --micro-batch-size x"))
    text = str(caught.value)
    for part in ("--tensor-model-parallel-size", "--var NAME=VALUE", "--micro-batch-size", "--hidden-size", "--hardware"):
        assert part in text
    with pytest.raises(InputError, match="neither a table of Megatron-LM's arguments nor a command"):
        load("#!/bin/bash\necho hello\n")


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1", [1] * 6), ("2", [1, 0, 1, 0, 1, 0]), ("([0]*2+[1]*4)", [0, 0, 1, 1, 1, 1]), ("([0]*1+[1]*1)*3", [0, 1] * 3),
        ("[0,1,1]*2", [0, 1, 1] * 2), ("([1]*", None), ("__import__('os')", None),
    ],
)  # fmt: skip
def test_layer_patterns(text: str, bits: list[int] | None) -> None:
    assert layer_bits(text, 6) == bits


def test_a_dispatcher_by_all_gather_goes_out_and_comes_back() -> None:
    """It is what Megatron-LM takes where a script says nothing."""
    text = run("--micro-batch-size 1 --global-batch-size 64 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
               "--vocab-size 32000 --use-distributed-optimizer --expert-model-parallel-size 2")  # fmt: skip
    found = load(text, file="mine.sh", hardware="dgx-h100")
    assert found.scenario.plan.ep_dispatcher == "allgather"
    script = launch_script(found.scenario)
    assert "--moe-token-dispatcher-type allgather" in script
    assert load(script).scenario == found.scenario


def test_a_script_of_others_goes_out_and_comes_back() -> None:
    text = run("--micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 8 --sequence-parallel --num-experts 8 "
               "--moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --vocab-size 32000 "
               "--use-distributed-optimizer --overlap-grad-reduce --expert-model-parallel-size 2 "
               "--transformer-impl local")  # fmt: skip
    found = load(text, file="mine.sh", hardware="dgx-h100")
    assert found.scenario.plan.etp == 8
    assert any("--transformer-impl local" in w for w in found.warnings)
    again = load(launch_script(found.scenario))
    assert again.scenario == found.scenario
    assert again.warnings == ()
