"""`simpar validate cluster` in other precisions, on one rank, over several hosts and under Slurm; what its exit code follows."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_runs import options, passes

from simpar.errors import InputError
from simpar.host import join_slurm
from simpar.live.bench_collectives import tiers
from simpar.live.cluster import check, layouts_of, run, sbatch
from simpar.live.cluster_compare import DISTURBED, ClusterReport, Measured, compare, compare_layout, read_runs
from simpar.live.cluster_launch import Rendezvous
from simpar.live.cluster_layouts import DEFAULT, LayoutError, RunLayout, parse_layout
from simpar.live.cluster_memory import Beside, captured, weights_peak
from simpar.live.cluster_predict import Setup, predict
from simpar.live.cluster_setup import TRAINING, TRANSFORMER, setup_of
from simpar.parallel.local_layer import LocalLayer
from simpar.result.interpret import interpret

torch_only = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the torch extra is not installed")
CPU = "cpu-gloo"


def test_tiers_are_every_size_within_a_node_and_one_rank_of_each() -> None:
    found = tiers(8, 4)
    assert [(t.name, t.ranks, t.nodes, len(t.groups), t.together) for t in found] == [
        ("8", 8, 2, 1, False), ("2", 2, 1, 4, False), ("2/4together", 2, 1, 4, True), ("4", 4, 1, 2, False),
        ("4/2together", 4, 1, 2, True), ("2/over2", 2, 2, 4, False), ("2/over2/4together", 2, 2, 4, True),
    ]  # fmt: skip
    assert found[5].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found[5].mine(1) is None
    assert found[6].mine(1) == (1, 5)
    assert [t.name for t in tiers(2, 2)] == ["2"]
    names = [t.name for t in tiers(16, 8)]
    assert len(set(names)) == len(names)


def test_slurm_without_torchrun() -> None:
    job = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "42"}
    environment = {**job, "MASTER_ADDR": "node0"}
    join_slurm(environment)
    assert {k: v for k, v in environment.items() if k not in job} == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "20042",
    }  # fmt: skip
    torchrun = {**job, "RANK": "3"}
    join_slurm(torchrun)
    assert torchrun == {**job, "RANK": "3"}


def test_the_job_script_is_a_script(tmp_path: Path) -> None:
    text = sbatch(tmp_path / "c.16.json", 16, options(tmp_path, "dp16", nproc=8, device="cuda", meet=Rendezvous(2)))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    (tmp_path / "job").write_text(text)
    assert subprocess.run(["bash", "-n", str(tmp_path / "job")], check=False).returncode == 0


def test_several_hosts_are_predicted_over_several_nodes(tmp_path: Path) -> None:
    layouts = layouts_of(options(tmp_path, "dp16", nproc=8, meet=Rendezvous(2, 0, "h:29500")))
    setup = replace(setup_of(None, layouts, "dgx-h100", "bf16"), nodes=2, processes_per_node=8)
    setup = replace(setup, training={k: {**t, "global_batch_size": 16} for k, t in setup.training.items()})
    placement = predict(layouts[0], setup).priced.layout.placement("dp")
    assert (placement.size, placement.ranks_per_node) == (16, (8, 8))


def test_gathers_block_the_caller_on_cpus_only() -> None:
    """The same layout and batch: over NVLink the gathers of the next layer run beside this one."""
    layout = parse_layout("fsdp2")
    for hardware, blocks in ((CPU, True), ("dgx-h100", False)):
        program = predict(layout, setup_of(None, [layout], hardware, "fp32")).priced.program
        compute = next(i for i, s in enumerate(program.streams) if s.kind == "compute")
        ops = program.stream_ops[program.stream_ptr[compute] : program.stream_ptr[compute + 1]]
        kinds = {program.kind[op] for op in ops}
        from simpar.program.program import OpKind

        assert (OpKind.GATHER_PARAMETERS in kinds) is blocks


def test_words_of_a_layout() -> None:
    assert parse_layout("fsdp1-recompute-compile") == RunLayout("fsdp1-recompute-compile", fsdp=True, recompute=True, compiled=True)
    setup = setup_of(None, [parse_layout("single")], CPU, "fp32")
    assert setup.scenario(parse_layout("single-recompute")).plan.recompute == "full"
    assert setup.scenario(parse_layout("single-compile")).training.compile
    with pytest.raises(LayoutError, match="compile"):
        parse_layout("dp2-compiled")


def test_wrong_precisions_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose auto, fp32, bf16, fp8"):
        check(options(tmp_path, "dp2", precision="int4"))
    with pytest.raises(InputError, match="fsdp2 would gather weights in 16 bits"):
        layouts_of(options(tmp_path, "dp2,fsdp2", precision="fp8"))


def report(foreign: float, factor: float) -> ClusterReport:
    """A layout that took `factor` times its prediction while others kept this share of the cores busy."""
    layout = parse_layout("dp2")
    setup = setup_of(None, [layout], CPU, "fp32")
    p = predict(layout, setup)
    p = replace(p, cores=2.0, processor_s=1.9 * p.step_time_s)
    foreign *= p.cores
    seconds = factor * p.beside(foreign)
    m = Measured(layout, (seconds,) * 3, (seconds,), {}, 3, foreign)
    return ClusterReport(tuple(compare_layout(m, p)), {"dp2": m}, {"dp2": p}, {}, 0.15)


def test_the_exit_code_follows_the_error_that_decides() -> None:
    assert report(0.0, 1.1).passed
    assert not report(0.0, 1.3).passed
    disturbed = report(0.8, 1.02)
    raw = disturbed.summary("step_time_s").mape
    assert raw is not None
    assert raw > 0.15
    assert disturbed.judged == pytest.approx(1.0 - 1.0 / 1.02, abs=0.002)
    assert disturbed.passed
    assert not report(0.8, 1.5).passed
    assert report(DISTURBED / 8, 1.0).judged == report(DISTURBED / 8, 1.0).summary("step_time_s").mape


@torch_only
@pytest.mark.torch
@pytest.mark.parametrize(
    ("precision", "layouts"), [pytest.param("bf16", "fsdp2,tp2sp,pp2", marks=pytest.mark.slow), ("fp8", "dp2,tp2")]
)
def test_other_precisions_send_what_is_predicted(tmp_path: Path, precision: str, layouts: str) -> None:
    hardware = "dgx-h100"  # a CPU's profile has no such arithmetic; its kernels are torch's own
    given = options(tmp_path, layouts, precision=precision, profile=Path(hardware))
    text = given.scenario.read_text() if given.scenario else ""
    wide = text.replace("hidden_size = 32", "hidden_size = 64").replace("head_dim = 8", "head_dim = 16")
    (tmp_path / "small.toml").write_text(wide)
    assert passes(given)
    config, runs, references = read_runs(tmp_path / "kept.2.runs.jsonl")
    assert config["precision"] == precision
    setup = Setup(config["models"], config["training"], hardware, precision)
    found = compare([(runs, references, setup)], 9.0)
    assert found.volumes_exact == (len(runs), len(runs)), [r.details for r in found.rows if r.metric == "communication_bytes"]
    for m in runs.values():
        assert m.first["losses"][0] == pytest.approx(4.17, abs=0.1)  # ln 64
        assert m.first["host_s"]


def test_what_a_backward_adds_is_as_wide_as_the_run() -> None:
    """Gradients of outputs, inputs and weights take four bytes in fp32, two in bf16."""
    layout = parse_layout("dp2")
    wide, narrow = (
        predict(layout, setup_of(None, [layout], "dgx-h100", precision)).priced.layout.stage_blocks[0][1]
        for precision in ("fp32", "bf16")
    )
    assert wide.transient == 2.0 * narrow.transient > 0.0


def test_each_step_is_corrected_for_its_own_load() -> None:
    """Some steps had another process beside them that took most of the host: their times differ by a factor, the error does not."""
    alone = report(0.0, 1.0)
    p, m = alone.predicted["dp2"], alone.measured["dp2"]
    loads = (0.0, 1.6, 0.0, 1.6, 0.0)
    seconds = tuple(1.1 * p.beside(load) for load in loads)
    assert max(seconds) > 3.0 * min(seconds)
    mixed = replace(m, seconds=seconds, loads=loads, foreign=1.6)
    found = ClusterReport(alone.rows, {"dp2": mixed}, alone.predicted, {}, 0.15)
    assert found.corrected("dp2") == pytest.approx(1.0 / 1.1 - 1.0)
    # One load for all of them would be wrong for most.
    assert replace(found, measured={"dp2": replace(mixed, loads=())}).corrected("dp2") > 1.0
    assert found.passed


PEAKS = json.loads((Path(__file__).parent / "data" / "cluster_peaks.json").read_text())["peaks"]


@pytest.mark.parametrize("name", DEFAULT[2])
def test_peak_memory_is_what_torch_held(name: str) -> None:
    """Every pipeline rank of every default layout of two ranks."""
    layout = parse_layout(name)
    assert predict(layout, setup_of(None, [layout], CPU, "fp32")).memory == pytest.approx(PEAKS[name], rel=0.015)


@pytest.mark.parametrize(
    ("name", "rank"), [("pp2-gpipe", 1), ("pp2", 1), ("pp2-interleaved", 1), ("mlp-pp2", 1), ("fsdp2", 0), ("pp2-zbv", 1)]
)
def test_what_a_pipeline_holds_beside_its_layers_is_counted_to_a_tensor(name: str, rank: int) -> None:
    """Buffers of every micro-batch, what was sent and waits for the end of the step, the last stage's logits."""
    layout = parse_layout(name)
    assert predict(layout, setup_of(None, [layout], CPU, "fp32")).memory[rank] == pytest.approx(PEAKS[name][rank], rel=0.003)


def test_weight_gradients_alone_add_what_torch_makes_before_it_frees() -> None:
    """In units of the residual stream (512 x 128 tokens in fp32), by hand and as a torch 2.13 storage count of this layer has it.

    Norms and products leave 1 + 1 + 3 + 1 + 4 + 1 of their outputs' gradients. Norms free these 2 and the second one's input (3);
    qkv makes 12, frees 3 and its input; proj makes 4 and frees 1 (its input is attention's as well); fc1 makes 16 while proj's 4
    are still there: 16 + 4 - 3 - 4 - 1.
    """
    layout = parse_layout("pp2-zbv")
    block = predict(layout, setup_of(None, [layout], CPU, "fp32")).priced.layout.stage_blocks[1][0]
    local = LocalLayer(block.layer, block.options)
    stream = 4.0 * TRAINING["sequence_length"] * TRANSFORMER["hidden_size"]
    assert [grad / stream for grad in captured(local).values()] == [1.0, 1.0, 3.0, 1.0, 4.0, 1.0]
    assert weights_peak(local) / stream == pytest.approx(12.0, abs=0.01)  # less the norms' statistics


@pytest.mark.parametrize(("name", "rank", "sent"), [("pp2-zbv", 0, 2), ("pp2-zbv", 1, 2), ("pp2-interleaved", 1, 3), ("pp2", 1, 0)])
def test_what_is_sent_waits_for_the_end_of_the_step_and_what_stays_on_a_rank_does_not(name: str, rank: int, sent: int) -> None:
    """Outputs and gradients of each micro-batch that go to the other rank; of 1F1B the last one alone."""
    layout = parse_layout(name)
    p = predict(layout, setup_of(None, [layout], CPU, "fp32"))
    left = sum(amount for _, amount in Beside(p.priced, interpret(p.priced, p.timeline), layout, rank).changes())
    each = 4 * TRAINING["sequence_length"] * TRANSFORMER["hidden_size"]
    assert left == pytest.approx(each * (sent * TRAINING["global_batch_size"] or 1), rel=0.01)


@torch_only
@pytest.mark.slow
@pytest.mark.torch
def test_peak_memory_is_what_torch_holds(tmp_path: Path) -> None:
    """The default models, whose activations weigh as much as their states."""
    names = "dp2,fsdp2,tp2,pp2-interleaved,pp2-zbv,mlp-pp2,mlp-tp2"
    assert passes(options(tmp_path, names, scenario=None))
    config, runs, references = read_runs(tmp_path / "kept.2.runs.jsonl")
    found = compare([(runs, references, Setup(config["models"], config["training"], CPU))], 9.0)
    for row in found.rows:
        if row.metric == "peak_memory_bytes":
            measured = row.details["measured_per_stage"]
            assert row.details["predicted_per_stage"] == pytest.approx(measured, rel=0.02), row


@torch_only
@pytest.mark.torch
def test_one_rank_trains_plain_sharded_and_recomputed(tmp_path: Path) -> None:
    assert passes(options(tmp_path, "single,fsdp1,single-recompute", nproc=1))
    _, runs, references = read_runs(tmp_path / "kept.1.runs.jsonl")
    assert set(runs) == {"single", "fsdp1", "single-recompute"}
    assert not references
    peaks = {name: m.first["memory"][0]["allocated"] for name, m in runs.items()}
    assert peaks["single-recompute"] < peaks["single"]
    losses = [m.first["losses"][0] for m in runs.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@torch_only
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_one_rank_trains_compiled(tmp_path: Path) -> None:
    assert passes(options(tmp_path, "single,single-compile", nproc=1, timeout_s=300.0))
    _, runs, _ = read_runs(tmp_path / "kept.1.runs.jsonl")
    eager, compiled = (runs[name].first["losses"] for name in ("single", "single-compile"))
    assert compiled == pytest.approx(eager, rel=1e-4)
    setup = setup_of(None, [runs["single"].layout], "dgx-h100", "bf16")
    assert predict(runs["single-compile"].layout, setup).step_time_s < predict(runs["single"].layout, setup).step_time_s


def free_port() -> str:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


SRUN = """#!/bin/bash
pids=()
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_LOCALID=$rank "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


@torch_only
@pytest.mark.slow
@pytest.mark.torch
def test_the_job_script_runs_goes_on_and_is_compared_at_home(tmp_path: Path) -> None:
    """srun and scontrol stand in for Slurm; submitted again nothing is left to measure, by torchrun neither."""
    assert run(options(tmp_path, "dp2,pp2", write_config=tmp_path / "c.json", budget_s=8.0, profile=None)) is None
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    root = Path(__file__).resolve().parents[1]
    for name in ("simpar", "hardware_profiles"):
        (tmp_path / name).symlink_to(root / name)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "here"}
    worker = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), "-m"]
    worker += ["simpar.live.cluster_worker", "--config", "c.json", "--out", "c.runs.jsonl"]
    found = []
    for command in (["bash", "c.sbatch"], ["bash", "c.sbatch"], worker):
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found.append((tmp_path / "c.runs.jsonl").read_text())
    assert found[0] == found[1] == found[2]
    assert found[0].count('"kind": "run"') == 2
    home = options(tmp_path, "", runs=tmp_path / "c.runs.jsonl", profile=tmp_path / "c.toml")
    assert passes(home)


@torch_only
@pytest.mark.slow
@pytest.mark.torch
def test_two_hosts_meet_and_the_first_compares(tmp_path: Path) -> None:
    """Two launches of one process each, as two hosts would start them, twice: the second time nothing is left to measure."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from cluster_runs import options\n"
        "from simpar.cli.options import print_json; from simpar.live.cluster import run\n"
        "from simpar.live.cluster_launch import Rendezvous\n"
        "folder = Path(sys.argv[2]) / sys.argv[3]; folder.mkdir(exist_ok=True)\n"
        "meet = Rendezvous(2, int(sys.argv[3]), '127.0.0.1:' + sys.argv[4])\n"
        "report = run(options(folder, 'dp2', nproc=1, meet=meet))\n"
        "if report is not None: print_json(report.as_json())\n"
    )
    port = free_port()
    tests = str(Path(__file__).parent)
    for _ in range(2):
        nodes = [
            subprocess.Popen([sys.executable, "-c", program, tests, str(tmp_path), node, port], stdout=subprocess.PIPE, text=True)
            for node in ("0", "1")
        ]
        first, second = (node.communicate(timeout=200)[0] for node in nodes)
        assert [node.returncode for node in nodes] == [0, 0]
        assert {row["id"] for row in json.loads(first)["rows"]} == {"dp2"}
        assert second == ""
    assert (tmp_path / "0" / "kept.2.runs.jsonl").read_text().count('"run"') == 1
