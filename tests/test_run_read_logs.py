"""Logs of frameworks read into rows: figures, what is set apart, and every kind of bad input with one message."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simpar
from simpar.cli import main
from simpar.errors import InputError
from simpar.evidence.run_rows import run_of
from simpar.interop.meaning import meaning
from simpar.runlogs.formats import PARSERS, read_log
from simpar.runlogs.lines import cleaned
from simpar.runlogs.read import add_rows, read_run
from simpar.runlogs.records import Interval
from simpar.runlogs.row import columns_of, with_scenario
from simpar.runlogs.scalars import tag_of
from simpar.runlogs.steady import in_seconds, steady
from simpar.specs.catalog import scenario_names, scenario_path

DATA = Path(__file__).parent / "data" / "runs"
SCENARIO = simpar.load("llama3.1-70b_h100x64_tp4cp2pp4")
TITAN = simpar.load(SCENARIO, framework="torchtitan", framework_version=None)


def iteration(step: int, ms: float, *, stamp: str = "", skipped: int = 0, scale: float = 1.0, batch: int = 128) -> str:
    """A line of Megatron-LM core 0.6 and later (with a stamp) or before."""
    head = f" [{stamp}]" if stamp else ""
    return (
        f"{head} iteration {step:8d}/    5000 | consumed samples: {step * batch:12d} | elapsed time per iteration (ms): {ms:.1f} | "
        f"throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.5E-05 | global batch size: {batch:5d} | lm loss: 9.8E+00 | "
        f"load_balancing_loss: 1.02 | loss scale: {scale:.1f} | grad norm: 2.1 | number of skipped iterations: {skipped:3d} | "
        f"number of nan iterations:   0 |\n"
    )


def titan(step: int, tps: str, rank: str = "") -> str:
    return (
        f"{rank}[titan] 2026-01-01 00:00:{step % 60:02d},000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.12345  "
        f"\x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[38;2;54;234;195mmemory: 39.50GiB(49.90%)  \x1b[34mtps: {tps}  "
        f"\x1b[36mtflops: 412.34  \x1b[35mmfu: 41.69%\x1b[39m\n"
    )


def nanotron(step: int, time: str, key: str = "elapsed_time_per_iteration_ms") -> str:
    head = f"08/31/2024 14:37:{step % 60:02d} [INFO|DP=0|PP=0|TP=0|node1]: "
    return (
        f"{head}iteration: {step} / 50 | consumed_tokens: {step}.05M | {key}: {time} | tokens_per_sec: 109K | "
        "tokens_per_sec_per_gpu: 1.7K | global_batch_size: 128 | lm_loss: 5.32 | lr: 0.00015\n"
        f"{head} Memory usage: 64.15MiB. Peak allocated 30929.5MiB. Peak reserved: 49600.0MiB\n"
    )


def written(folder: Path, text: str, name: str = "train.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# -- formats ---------------------------------------------------------------------------------------------------------------


def test_megatron_with_everything_set_apart(tmp_path: Path) -> None:
    lines = [iteration(10, 30000.0, scale=65536.0)]
    for step in range(20, 220, 10):
        if step == 60:
            lines.append(
                "(min, max) time across ranks (ms):\n    forward-compute ................................: (100.25, 120.75)\n"
            )
        if step == 100:
            lines.append(" validation loss at iteration 90 | lm loss value: 2.0E+00 | lm loss PPL: 7.4E+00 |\n")
        if step == 120:
            lines.append("  saving checkpoint at iteration     110 to /ckpt in torch_dist format\n")
        slow = {100: 9000.0, 120: 12000.0, 150: 16000.0}.get(step, 8000.0 + step / 10)
        lines.append(iteration(step, slow, skipped=int(step == 180), scale=65536.0 if step < 180 else 32768.0))
    memory = "[Rank {}] (after 2 iterations) memory (MB) | allocated: 1.5 | max allocated: {} | reserved: 9 | max reserved: {}"
    lines.append(memory.format(0, 40000.0, 50000.0) + memory.format(16, 41000.0, 51000.0) + "\n")
    found = read_run(SCENARIO, [written(tmp_path, "".join(lines))])
    row = found.row
    assert row["step_time_s"] == pytest.approx(8.0115, abs=2e-3)
    apart = row["extra"]["apart"]
    assert {k: v["intervals"] for k, v in apart.items()} == {"checkpoint": 1, "evaluation": 1, "skipped": 1, "stall": 1}
    assert apart["stall"]["extra_s"] == pytest.approx(80.0, rel=0.01)
    assert row["extra"]["warm_up_intervals"] == 1
    assert row["extra"]["loss_scale"] == {"skipped_updates": 1, "changes": [[10, 65536.0], [180, 32768.0]]}
    assert row["extra"]["moe"] == {"load_balancing_loss": 1.02}
    assert row["extra"]["timers"] == {"forward-compute max (ms)": 120.75, "forward-compute min (ms)": 100.25}
    assert row["mem_gib"] == pytest.approx(41000.0 / 1024, rel=1e-4)
    assert row["mem_kind"] == "max allocated"
    assert row["extra"]["memory_gib"]["reserved"] == {
        "0": pytest.approx(50000 / 1024, rel=1e-3),
        "16": pytest.approx(51000 / 1024, rel=1e-3),
    }


def test_newer_megatron_stops_its_clock_for_evaluation(tmp_path: Path) -> None:
    """Core 0.6 and later write a stamp, and since 0.5 the timer leaves evaluation out: nothing is set apart, the pause is told."""
    lines = []
    for index in range(1, 30):
        if index == 20:
            lines.append(" validation loss at iteration 19 | lm loss value: 2.0E+00 |\n")
        seconds = index * 8 + (100 if index >= 20 else 0)
        lines.append(iteration(index, 8000.0, stamp=f"2026-03-01 10:{seconds // 60:02d}:{seconds % 60:02d}"))
    row = read_run(SCENARIO, [written(tmp_path, "".join(lines))]).row
    assert "apart" not in row["extra"]
    assert row["extra"]["pauses_s"] == pytest.approx(100.0)
    assert row["step_time_s"] == 8.0


def test_torchtitan_rates_are_per_device(tmp_path: Path) -> None:
    text = titan(1, "120") + "".join(titan(s, "1,024") for s in range(10, 110, 10))
    row = read_run(TITAN, [written(tmp_path, text)]).row
    tokens = TITAN.training.global_batch_size * TITAN.training.sequence_length
    assert row["step_time_s"] == pytest.approx(tokens / (1024 * TITAN.world_size))
    assert (row["mem_gib"], row["mem_kind"]) == (39.5, "max reserved")


def test_the_first_line_of_core_016_leaves_its_clock_running(tmp_path: Path) -> None:
    """Iteration 1 has a line of its own since 2026, and the next interval still holds it: 2 % above the others here."""
    text = iteration(1, 60000.0) + iteration(10, 8160.0) + "".join(iteration(s, 8000.0) for s in range(20, 100, 10))
    row = read_run(SCENARIO, [written(tmp_path, text)]).row
    assert row["extra"]["warm_up_intervals"] == 2
    assert row["extra"]["step_time"]["most_s"] == 8.0


def test_checkpoints_of_torchtitan_lie_inside_their_interval(tmp_path: Path) -> None:
    saves = "[titan] 2026-01-01 00:00:50,000 - root - INFO - Finished saving the checkpoint in 12.34 seconds.\n"
    text = "".join((saves if s == 60 else "") + titan(s, "1,000" if s == 60 else "1,024") for s in range(10, 120, 10))
    row = read_run(TITAN, [written(tmp_path, text)]).row
    assert row["extra"]["apart"]["checkpoint"]["intervals"] == 1
    assert row["extra"]["step_time"]["least_s"] == row["extra"]["step_time"]["most_s"]


def test_nanotron_has_three_digits(tmp_path: Path) -> None:
    scenario = simpar.load(SCENARIO, framework="nanotron", framework_version=None)
    for key in ("elapsed_time_per_iteration_ms", "time_per_iteration_ms"):
        text = nanotron(1, "24.7K", key) + "".join(nanotron(s, "4.71K" if s % 2 else "987", key) for s in range(2, 20))
        row = read_run(scenario, [written(tmp_path, text)]).row
        assert row["step_time_s"] in (pytest.approx(4.71), pytest.approx(0.987), pytest.approx((4.71 + 0.987) / 2))
        assert row["extra"]["memory_gib"]["allocated"] == {"0": pytest.approx(30929.5 / 1024, rel=1e-4)}


def test_deepspeed_of_two_generations(tmp_path: Path) -> None:
    scenario = simpar.load(
        model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, framework="deepspeed", global_batch_size=16, sequence_length=2048,
        zero_stage=3,
    )  # fmt: skip
    rate = "RunningAvgSamplesPerSec=7.9, CurrSamplesPerSec=8.0, MemAllocated=4.32GB, MaxMemAllocated=38.49GB"
    for form in (
        "[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0}, ",
        "[timer.py:198:stop] 0/{0}, ",
    ):
        text = "".join(form.format(s) + rate + "\n" for s in range(10, 200, 10))
        row = read_run(scenario, [written(tmp_path, text)]).row
        assert row["step_time_s"] == pytest.approx(2.0)
        assert row["mem_gib"] == 38.49
    pipe = "".join(f"steps: {s} loss: 5.5508 lm loss: 5.5 iter time (s): 0.936 samples/sec: 17.1\n" for s in range(1, 9))
    assert read_run(scenario, [written(tmp_path, pipe)]).row["step_time_s"] == pytest.approx(0.936)


def test_means_of_deepspeed_until_0_6_are_taken_apart(tmp_path: Path) -> None:
    """Each line has the mean since the third micro-step; two lines of a public log and their stamps say 128 sequences a step."""
    scenario = simpar.load(
        model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, framework="deepspeed", global_batch_size=128, sequence_length=2048,
        zero_stage=3,
    )  # fmt: skip
    line = "[2022-03-11 {}] [INFO] [timer.py:189:stop] 0/{}, SamplesPerSec={}, MemAllocated=0.26GB, MaxMemAllocated=9.02GB\n"
    seen = line.format("02:06:58,985", 40, 83.48609168106144) + line.format("02:07:14,130", 50, 83.73838805358588)
    row = read_run(scenario, [written(tmp_path, seen)]).row
    assert row["step_time_s"] == pytest.approx(15.145 / 10, rel=3e-3)
    assert row["mem_gib"] == 9.02
    total, text = 0.0, line.format("02:06:00,000", 2, "-inf")
    for step in range(10, 100, 10):
        total += 10 * (4.0 if step == 50 else 2.0) if step > 10 else 8 * 3.0
        text += line.format(f"02:{step}:00,000", step, 128 * (step - 2) / total)
    row = read_run(scenario, [written(tmp_path, text)]).row
    assert row["step_time_s"] == pytest.approx(2.0)
    assert row["extra"]["apart"]["stall"] == {"intervals": 1, "extra_s": pytest.approx(20.0)}


def test_lines_that_a_terminal_broke(tmp_path: Path) -> None:
    """As in public logs of Megatron-Bridge; a line that is cut and never goes on takes nothing of the next."""
    whole = "".join(iteration(s, 8000.0 + s, stamp=f"2025-10-02 22:52:{s:02d}") for s in range(1, 9))
    broken = "\n".join(line[i : i + 80] for line in whole.splitlines() for i in range(0, len(line), 80))
    assert read_log(written(tmp_path, broken)).intervals == read_log(written(tmp_path, whole)).intervals
    cut = iteration(9, 1.0)[:70] + "\n" + iteration(10, 8010.0)
    assert [i.step for i in read_log(written(tmp_path, whole + cut)).intervals] == [*range(1, 9), 10]


def test_bars_without_a_loss_count_where_the_format_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f"\r {n}0%|#| {n}/10 [00:0{n}<00:02,  2.50s/it]" for n in range(1, 9)))
    with pytest.raises(InputError, match="--format transformers"):
        read_log(path)
    assert [i.seconds for i in read_log(path, "transformers").intervals] == [2.5] * 8


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_what_powershell_writes(encoding: str, packed: bool, tmp_path: Path) -> None:
    text = "".join(iteration(s, 8000.0) for s in range(1, 9))
    data = text.replace("\n", "\r\n").encode(encoding)
    path = tmp_path / "train.log"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read_log(path).intervals == read_log(written(tmp_path, text, "plain.log")).intervals


@pytest.mark.parametrize(
    ("file", "form", "least", "most"),
    [
        ("trainer_5.23.log", "transformers", 0.10, 0.15),
        ("lightning_2.6_metrics.csv", "metrics", 0.04, 0.05),
        ("deepspeed_0.19.log", "deepspeed", 0.09, 0.16),
        ("events.out.tfevents", "tensorboard", 0.1, 0.16),
    ],
)
def test_files_that_frameworks_wrote(file: str, form: str, least: float, most: float) -> None:
    path = next(DATA.glob(f"{file}*"))
    reading = read_log(path)
    assert reading.format == form
    found = steady(in_seconds(reading, 1.0, 16.0, 1), file)
    assert least < found.steps.median < most
    assert found.steps.least <= found.steps.p10 <= found.steps.median <= found.steps.p90 <= found.steps.most


def test_nemo_and_lightning_bars(tmp_path: Path) -> None:
    bar = "Epoch 0: : {0:3d}%|#| {0}/100 [01:{0:02d}<00:10, reduced_train_loss=7.1, global_step={1}.00, train_step_timing in s={2}]"
    text = "\r".join(bar.format(s, s - 1, 24.0 if s == 1 else 2.31) for s in range(1, 40)) + "\n"
    reading = read_log(written(tmp_path, text))
    assert reading.format == "lightning"
    assert steady(in_seconds(reading, 1, 1, 1), "x").steps.median == 2.31
    rich = "".join(f"Epoch 0/-2 --- {s}/600 0:00:0{s % 10} • 0:00:00 20.00it/s v_num: 0.000\n" for s in range(1, 30))
    assert steady(in_seconds(read_log(written(tmp_path, rich)), 1, 1, 1), "x").steps.median == pytest.approx(0.05)


def maxtext(step: int, seconds: float) -> str:
    return (
        f"I0811 21:54:55.531340 138304841739136 metric_logger.py:226] completed step: {step}, seconds: {seconds:.3f}, "
        "TFLOP/s/device: 350.869, Tokens/s/device: 19222.175, total_weights: 1572864, loss: 12.979, lm_loss: 12.979\n"
    )


def test_maxtext_sees_a_step_end_while_later_ones_run(tmp_path: Path) -> None:
    """The second and third steps show their dispatch; a line comes a step late, and a checkpoint lies in the step after it."""
    scenario = simpar.load("llama3.1-70b_tpu-v5px128_fsdp16tp8")
    lines = [maxtext(0, 60.0), maxtext(1, 0.631), maxtext(2, 0.002)]
    for step in range(3, 30):
        saved = "I0811 21:54:55.1 7 max_logging.py:10] Saved a checkpoint at step 11.\n" if step == 11 else ""
        lines.append(saved + maxtext(step, 25.0 if step == 12 else 10.25))
    lines.append("[Rampup Batch Size Phase], completed step: 30, seconds: 2.000, total_weights: 1, loss: 1.000\n")
    row = read_run(scenario, [written(tmp_path, "".join(lines))]).row
    assert row["extra"]["apart"] == {"checkpoint": {"intervals": 1, "extra_s": pytest.approx(14.75)}}
    steps = row["extra"]["step_time"]
    assert (steps["least_s"], steps["most_s"], steps["count"]) == (10.25, 10.25, 26)
    with pytest.raises(InputError, match="decimal comma"):
        read_log(written(tmp_path, maxtext(3, 10.25).replace("10.250", "10,250")))


def test_torchtune_and_torchtitan_of_2024(tmp_path: Path) -> None:
    bar = "\r".join(f"1|{s}|Loss: 1.3{s}:  {s}%|███  | {s}/100 [00:{s:02d}<09:30,  1.16s/it]" for s in range(1, 45))
    assert steady(in_seconds(read_log(written(tmp_path, bar)), 1, 1, 1), "x").steps.median == 1.16
    text = "".join(titan(s, "1,024").replace("tps:", "wps:") for s in range(10, 60, 10))
    assert {i.tokens_per_s_per_gpu for i in read_log(written(tmp_path, text)).intervals} == {1024.0}


def test_a_run_of_which_only_the_end_is_told(tmp_path: Path) -> None:
    """The Trainer's last line is the mean of the whole run; there is no start to leave out."""
    end = "{'train_runtime': '2000', 'train_samples_per_second': '1.6', 'train_steps_per_second': '0.2', 'epoch': '3'}\n"
    reading = read_log(written(tmp_path, end))
    found = steady(in_seconds(reading, 1, 1, 1), "x")
    assert (found.steps.median, found.steps.steps) == (5.0, 400)
    assert "mean of the whole run" in reading.notes[0]


def test_a_late_line_of_another_rank_is_no_restart(tmp_path: Path) -> None:
    """Ranks without a launcher's prefix write into one stream: one of them is a line behind."""
    steps = [1, 1, 2, 1, 2, 3, 3, 2, 4, 3, 4, 5, 5, 6, 6]
    reading = read_log(written(tmp_path, "".join(titan(s, "1,024") for s in steps)))
    assert [i.step for i in reading.intervals] == [1, 2, 3, 4, 5, 6]
    assert reading.segments == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("_step,iteration-time,mem-max-allocated-bytes\n1,9,1073741824\n2,2.5,1073741824\n3,2.5,\n4,2.5,\n", 2.5),
        ("Step,my run - train_step_timing in s,my run - train_step_timing in s__MIN\n1,9,9\n2,3,1\n3,3,1\n4,3,1\n", 3.0),
    ],
)
def test_exports_of_wandb(text: str, value: float, tmp_path: Path) -> None:
    reading = read_log(written(tmp_path, text, "wandb.csv"))
    assert steady(in_seconds(reading, 1, 1, 1), "x").steps.median == value


def test_llama_factory_is_timed_by_its_clock(tmp_path: Path) -> None:
    rows = [{"current_steps": 5 * i, "loss": 1.0, "elapsed_time": f"0:00:{10 * i:02d}"} for i in range(1, 6)]
    reading = read_log(written(tmp_path, "".join(json.dumps(r) + "\n" for r in rows), "trainer_log.jsonl"))
    assert steady(in_seconds(reading, 1, 1, 1), "x").steps.median == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "meaning_of"),
    [("train/iteration-time", "seconds"), ("time_metrics/end_to_end(s)", "seconds"), ("throughput(tps)", "tokens_per_s_per_gpu"),
     ("run a - memory/max_reserved(GiB)", "reserved"), ("lm loss", None), ("grad-norm", None)],
)  # fmt: skip
def test_names_of_series(name: str, meaning_of: str | None) -> None:
    found = tag_of(name)
    assert (found.meaning if found else None) == meaning_of


# -- lines and steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "12: ", "[rank3]:", "[default7]: ", "[1,3]<stdout>: ", "(TaskRunner pid=12, ip=10.0.0.1) ",
                                    "2026-01-01T00:00:00.123Z stdout F [rank3]: "])  # fmt: skip
def test_prefixes_of_launchers(prefix: str, tmp_path: Path) -> None:
    text = "".join(prefix + iteration(s, 8000.0) for s in range(1, 8))
    packed = tmp_path / "train.log.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert len(read_log(packed).intervals) == 7
    assert [x.text for x in cleaned("\x1b[32ma\rb\n")] == ["a", "b"]


def test_ranks_that_print_their_own(tmp_path: Path) -> None:
    text = "".join(titan(s, f"{1000 + 100 * r}", f"[rank{r}]:") for s in range(1, 20) for r in (0, 1))
    row = read_run(TITAN, [written(tmp_path, text)]).row
    by_rank = row["extra"]["step_time_by_rank_s"]
    assert by_rank["0"] / by_rank["1"] == pytest.approx(1.1)


def test_restarts_drop_their_own_start(tmp_path: Path) -> None:
    text = "".join(iteration(s, 60000.0 if s in (1, 11) else 8000.0) for s in (*range(1, 16), *range(11, 31)))
    row = read_run(SCENARIO, [written(tmp_path, text)]).row
    assert row["extra"]["restarts"] == 1
    assert row["step_time_s"] == 8.0
    assert row["extra"]["warm_up_intervals"] == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=40), st.integers(0, 5))
def test_steady_steps_are_among_the_measured(seconds: list[float], start: int) -> None:
    intervals = [Interval(i + 1, 1, s, contains=frozenset({"start"}) if i == 0 else frozenset()) for i, s in enumerate(seconds)]
    found = steady(intervals, "x").steps
    assert min(seconds) <= found.least <= found.median <= found.most <= max(seconds)
    assert found.steps <= len(seconds) - 1


# -- rows ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in scenario_names() if "cluster.parts" not in scenario_path(n).read_text()])
def test_rows_are_predicted_with_their_scenario(name: str) -> None:
    scenario = simpar.load(name)
    run = run_of(json.loads(json.dumps({**with_scenario(columns_of(scenario), scenario), "step_time_s": 1.0, "id": "x"})))
    assert not run.skipped
    assert run.scenario is not None
    assert meaning(run.scenario) == meaning(scenario)
    assert run.scenario.hardware == scenario.hardware


def test_rows_are_replaced_and_contradictions_told(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    log = written(tmp_path, "".join(iteration(s, 8000.0) for s in range(1, 9)))
    slow = written(tmp_path, "".join(iteration(s, 12000.0) for s in range(1, 9)), "slow.log")
    first = read_run(SCENARIO, [log]).row
    assert add_rows(out, [first]) == []
    assert add_rows(out, [first]) == []
    assert len(out.read_text().splitlines()) == 1
    told = add_rows(out, [read_run(SCENARIO, [slow]).row])
    assert len(told) == 1
    assert "contradict" in told[0]
    assert len(out.read_text().splitlines()) == 2


def test_runs_of_other_configurations_contradict_nothing(tmp_path: Path) -> None:
    """Another framework's, or one with another of any column; however many contradict a run, it is said once."""
    out = tmp_path / "runs.jsonl"
    row = read_run(SCENARIO, [written(tmp_path, "".join(iteration(s, 8000.0) for s in range(1, 9)))]).row
    add_rows(out, [{**row, "id": f"run {index}", "step_time_s": 8.0 + index} for index in range(6)])
    for changed in ({"framework": "torchtitan"}, {"cp_style": "ring"}):
        assert add_rows(out, [{**row, "id": "other", "step_time_s": 50.0, **changed}]) == []
    (told,) = add_rows(out, [{**row, "id": "slow", "step_time_s": 50.0}])
    assert "and 3 more such" in told


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.jsonl"
    for part in ("a", "b"):
        written(tmp_path, "".join(iteration(s, 8000.0) for s in range(1, 9)), f"train_{part}.log")
    with pytest.raises(SystemExit) as stop:
        main(["run", "read", "llama3.1-70b_h100x64_tp4cp2pp4", "--log", str(tmp_path / "train_?.log"), "--out", str(out), "--json"])
    assert not stop.value.code
    row = json.loads(capsys.readouterr().out)
    assert row["step_time_s"] == 8.0
    assert json.loads(out.read_text())["id"] == row["id"]


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\nworld\n", "no line says how long a step took"),
        ("", "no line says how long a step took"),
        (iteration(1, 8000.0), "all within start-up"),
        ("".join(iteration(s, 8000.0) for s in range(1, 6)).replace("8000.0", "8000,0"), "decimal comma"),
        ("".join(iteration(s, 8000.0, batch=64) for s in range(1, 6)), "global_batch_size = 128.*says 64"),
        (" using world size: 8, data-parallel size: 8\n" + iteration(1, 1.0) + iteration(2, 1.0), "says 8"),
        ("".join(titan(s, "1,000") for s in range(1, 9)), "log of torchtitan, which nemo does not write"),
        ("iteration       10/     100 | consumed samples: 12 | elapsed time per iter", "no line says"),
    ],
)
def test_bad_logs_get_one_message(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_run(SCENARIO, [written(tmp_path, text)])


def test_a_run_out_of_memory_is_a_row(tmp_path: Path) -> None:
    error = (
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB\n"
    )
    row = read_run(SCENARIO, [written(tmp_path, "building model\n" + error)]).row
    assert row["oom"] is True
    assert run_of(json.loads(json.dumps(row))).measured.out_of_memory
    steps = "".join(iteration(s, 8000.0) for s in range(1, 9))
    found = read_run(SCENARIO, [written(tmp_path, steps + error)])
    assert "oom" not in found.row
    assert any("out of memory" in note for note in found.notes)


def test_wandbs_own_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"output\.log"):
        read_log(written(tmp_path, "x", "run-1.wandb"))


def test_other_languages_thousands(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="decimal comma"):
        read_run(TITAN, [written(tmp_path, "".join(titan(s, "1.024") for s in range(1, 9)))])


def test_a_log_cut_in_the_middle_keeps_what_is_whole(tmp_path: Path) -> None:
    text = "".join(iteration(s, 8000.0) for s in range(1, 9))
    whole = read_run(SCENARIO, [written(tmp_path, text)]).row
    cut = read_run(SCENARIO, [written(tmp_path, text[:-180])]).row
    assert cut["step_time_s"] == whole["step_time_s"]


@pytest.mark.parametrize("data", [b"\x1f\x8bbroken", b"\x00\x01\x02" * 50, b"\xff" * 100])
def test_files_that_are_no_logs(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(data)
    with pytest.raises(InputError):
        read_log(path)
    with pytest.raises(InputError, match="no such file"):
        read_log(tmp_path / "none.log")
    with pytest.raises(InputError, match="without TensorBoard"):
        read_log(tmp_path)


def test_event_files_that_are_damaged(tmp_path: Path) -> None:
    data = next(DATA.glob("events*")).read_bytes()
    for cut in (len(data) - 3, len(data) - 100):
        path = tmp_path / f"events.out.tfevents.{cut}"
        path.write_bytes(data[:cut])
        assert "killed" in " ".join(read_log(path).notes)
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"x" * 40)
    with pytest.raises(InputError, match="no TensorBoard event file"):
        read_log(path)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="iteration elapsed time per (ms): 0123456789.,|/step tps loss'{}[]Epoch\n\r\x1bs", max_size=300))
def test_no_text_makes_a_reader_fail(text: str) -> None:
    for kind in PARSERS.values():
        parser = kind("x")
        for raw in text.split("\n"):
            for line in cleaned(raw):
                try:
                    parser.feed(line)
                except InputError:
                    return
        parser.finish()


@pytest.mark.parametrize(("after", "words"), [(1, "max allocated in the first step"), (2, "max allocated"), (10, "max allocated")])
def test_megatron_since_2026_reports_memory_of_the_first_step(tmp_path: Path, after: int, words: str) -> None:
    """Its first iteration is logged, whatever --log-interval: the moments are made in that update."""
    lines = [iteration(step, 8000.0) for step in range(10, 60, 10)]
    memory = (
        "[Rank 16] (after {} iterations) memory (MB) | allocated: 1 | max allocated: 40960 | reserved: 9 | max reserved: 50000\n"
    )
    lines.insert(1, memory.format(after))
    found = read_run(SCENARIO, [written(tmp_path, "".join(lines))]).row
    assert (found["mem_gib"], found["mem_kind"]) == (40.0, words)
