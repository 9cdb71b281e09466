"""`simpar search` and `simpar improve` on the command line: JSON, tables, exit codes, one clear message for what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpar.cli import app, main
from simpar.report.search_view import ProgressLine, progress_text
from simpar.searching.choice import Choice
from simpar.searching.command import parse_sizes
from simpar.searching.find import Watch
from simpar.searching.improve import improve
from simpar.searching.incumbents import Scored
from simpar.searching.request import make_space
from simpar.specs.options import RunOptions
from simpar.specs.scenario import read_scenario
from simpar.step import simulate

ASKED = ("--model", "llama3.1-8b", "--hardware", "dgx-h100", "--sequence-length", "8192", "--global-batch", "8")
ONE = (*ASKED, "--num-nodes", "1", "--quiet")
SMALL = (*ONE, "--framework", "megatron-core", "--allow", "tp=1,2,4", "--allow", "pp=1,2", "--fix", "cp=1", "--fix", "zero_stage=1",
         "--allow", "micro_batch_size=1,4", "--allow", "recompute=none,full", "--allow", "schedule=1f1b,interleaved")  # fmt: skip
SOME = ("tp", "pp", "micro_batch_size", "virtual_stages", "recompute", "zero_stage", "overlap_param_gather")
"""Not all axes, to save time."""
SCENARIO = """
name = "a small run"
model = "llama3.1-8b"
framework = "megatron-core"
[cluster]
hardware = "dgx-h100"
num_nodes = 1
[plan]
tp = {tp}
pp = 2
{more}
[training]
sequence_length = 8192
global_batch_size = 8
micro_batch_size = 1
"""


def run(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def scenario_file(folder: Path, tp: object = 4, more: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(SCENARIO.format(tp=tp, more=more))
    return path


# -- what comes out --------------------------------------------------------------------------------------------------------


def test_json_is_one_object_of_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(("search", *SMALL, "--json", "--top", "3", "--why", "tp=8", "--why", "tp=4,pp=2"), capsys)
    found = json.loads(out)
    assert code == 0
    assert err == ""
    text = (Path(__file__).parent.parent / "docs" / "search.md").read_text(encoding="utf-8")
    documented = set(found) - {n for n in found if f"`{n}`" not in text}
    assert documented == set(found), f"not in docs/search.md: {set(found) - documented}"
    assert len(found["best"]) == 3
    assert found["optimality_gap"] == 0.0
    assert found["finished"] is True
    assert found["kept"] + sum(found["rejected"].values()) == found["space_size"]
    table = RunOptions("llama3.1-8b", "dgx-h100", 1, 8192, 8, "megatron-core").table(None)[0]
    fix = ["tp=1,2,4", "pp=1,2", "cp=1", "zero_stage=1", "micro_batch_size=1,4", "recompute=none,full", "schedule=1f1b,interleaved"]
    space = make_space(table, allow=fix, framework="megatron-core")
    assert found["space_size"] == space.size
    for layout in found["best"]:
        # The printed choice is the printed layout: simulated again it gives the printed numbers.
        result = simulate(Choice.from_flat(layout["choice"]).scenario(space.template))
        assert result.step_time_s == pytest.approx(layout["step_time_s"], rel=1e-12)
        assert layout["value"] == layout["metrics"]["step_time_s"] == pytest.approx(result.step_time_s, rel=1e-9)
        assert layout["fits"] is True
    first, second = found["why"]
    assert first["space_size"] == 0
    assert first["broken_rules"] == ["tp is restricted to 1,2,4"]
    waterfall = second["waterfall_s"].values()
    asked, winner = sum(w["asked"] for w in waterfall), sum(w["winner"] for w in waterfall)
    assert asked == pytest.approx(second["best"]["step_time_s"], rel=1e-6)
    assert winner == pytest.approx(found["best"][0]["step_time_s"], rel=1e-6)
    assert asked / winner - 1.0 == pytest.approx(second["slower_by"], rel=1e-6)


def test_the_table_names_ties_reasons_and_the_next_design(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    code, out, _ = run(("search", *SMALL, "--why", "tp=4,pp=2"), capsys)
    assert code == 0
    for text in (
        "on 8 x H100 SXM: batch 8 of 8,192 tokens",
        "proven best",
        "Next design",
        "cannot beat the best",
        "Why not tp=4,pp=2?",
        "ideal: model FLOPs at peak",
    ):
        assert text in out


def test_why_not_says_which_bytes_do_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    corner = "tp=1,pp=2,micro_batch_size=1,recompute=none"
    less = ("--fix", "offload_optimizer=false", "--set", "cluster.memory_scale=0.4")
    code, out, _ = run(("search", *SMALL, *less, "--why", corner, "--json"), capsys)
    assert code == 0
    short = json.loads(out)["why"][0]["shortage"]
    assert short["needed_bytes"] > short["device_memory_bytes"] > 0
    assert sum(short["by_category"].values()) == pytest.approx(short["needed_bytes"], rel=1e-6)
    assert short["choice"]["tp"] == 1
    assert short["choice"]["recompute"] == "none"
    code, out, _ = run(("search", *SMALL, *less, "--why", corner), capsys)
    assert "fits the memory" in out
    assert "activations" in out
    assert "GiB of 31.64 GiB" in out


def test_why_not_says_which_limit_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--fix", "tp=4,recompute=none,micro_batch_size=1,split=even,offload_optimizer=false", "--fix",
           "overlap_grad_reduce=true,overlap_param_gather=true,schedule=1f1b,shard_size=none,overlap_tp=false")  # fmt: skip
    code, out, _ = run(("search", *SMALL, *few, "--where", "bubble_fraction<=0.01", "--why", "pp=2", "--json"), capsys)
    assert code == 0
    missed = json.loads(out)["why"][0]["missed_constraints"]
    assert len(missed) == 1
    assert missed[0].startswith("bubble_fraction <= 0.01 (0.")


def test_nothing_that_fits_is_a_result(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    code, out, err = run(("search", *SMALL, "--fix", "tp=4,recompute=none", "--set", "cluster.memory_scale=0.2"), capsys)
    assert code == 1
    assert err == ""
    assert "no layout will do" in out
    assert "does not fit the memory" in out
    assert "GiB of 15.82 GiB" in out
    few = "tp=4,pp=1,recompute=none,overlap_tp=false,overlap_grad_reduce=true,overlap_param_gather=true,shard_size=none"
    code, out, _ = run(("search", *SMALL, "--fix", few, "--where", "mfu>=0.99", "--json"), capsys)
    assert code == 1
    found = json.loads(out)
    assert found["best"] == []
    assert found["optimality_gap"] == 0.0
    assert found["runner_up"] is None
    assert found["why"][0]["missed_constraints"][0].startswith("mfu >= 0.99 (0.")


def test_a_scenario_with_ranges_is_the_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario_file(tmp_path, tp="[2, 4]", more='recompute = ["none", "full"]')
    code, out, _ = run(("search", str(path), "--json", "--quiet"), capsys)
    found = json.loads(out)
    assert code == 0
    assert found["space_size"] == 4
    assert {layout["layout"]["tp"] for layout in found["best"]} == {2, 4}
    assert all(layout["layout"]["pp"] == 2 for layout in found["best"])


def test_cluster_sizes_may_be_ranges() -> None:
    assert parse_sizes("8..64x2,96") == (8, 16, 32, 64, 96)
    assert parse_sizes("8..32+8") == (8, 16, 24, 32)
    assert parse_sizes("4") == (4,)
    assert parse_sizes("") == ()


def test_a_winner_that_cannot_be_launched_names_the_option_that_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corner = (*ONE, "--fix", "tp=8", "--fix", "pp=1", "--fix", "zero_stage=1", "--fix", "micro_batch_size=1", "--fix", "cp=1")
    code, out, err = run(("search", *corner, "--export", "torchtitan", "--out", str(tmp_path)), capsys)
    assert code == 2
    assert "torchtitan shards fully" in err
    assert "--framework torchtitan searches what it can run" in err
    assert "tp8" in out  # what was found is shown all the same


def test_the_winner_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "launch"
    code, _, err = run(("search", *SMALL, "--export", "megatron", "--out", str(out)), capsys)
    assert code == 0
    written = list(out.iterdir())
    assert written
    assert all(str(path) in err.replace("\n", "") for path in written)
    script = next(p for p in written if p.suffix == ".sh").read_text()
    assert "--tensor-model-parallel-size" in script


# -- what cannot be --------------------------------------------------------------------------------------------------------

WRONG: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--fix", "tp=3"), "plan.tp = 3: must divide num_attention_heads (32)"),
    (("--fix", "tp=16"), "tp = 16 must divide the 8 GPUs"),
    (("--fix", "tp=8,pp=8"), "tp x pp = 64 must divide the 8 GPUs"),
    (("--fix", "dp=3"), "dp = 3 must divide the 8 GPUs"),
    (("--fix", "micro_batch_size=3"), "must divide the 8 sequences"),
    (("--fix", "ep=4"), "the model has no experts"),
    (("--fix", "shard_size=3"), "must divide the dp x cp ranks"),
    (("--fix", "pp=1,schedule=interleaved"), "no layout has all of this at once; give up one of pp, schedule"),
    (("--fix", "recompute=full:99"), "the model has 32 layers"),
    (("--fix", "speed=2"), "unknown axis of the space 'speed'"),
    (("--fix", "tp"), "write it as axis=value"),
    (("--fix", "tp=fast"), "a whole number"),
    (("--fix", "schedule=fast"), "unknown schedule 'fast'"),
    (("--fix", "precision=fp9"), "did you mean 'fp"),
    (("--fix", "recompute=some"), "is no recomputation"),
    (("--fix", "recompute=selective:everything"), "unknown module 'everything'"),
    (("--fix", "zero_stage=4"), "must be from 0 to 3"),
    (("--fix", "offload_activations=2"), "from 0 to 1"),
    (("--framework", "megatron-core", "--fix", "zero_stage=3"), "megatron-core cannot run zero_stage = 3"),
    (("--framework", "fastest"), "unknown framework 'fastest'"),
    (("--objective", "happiness"), "unknown objective 'happiness'"),
    (("--where", "happiness>3"), "unknown metric 'happiness'"),
    (("--pareto", "step_time"), "two or three metrics"),
    (("--robust", "p50"), "no such reading of the interval; p90"),
    (("--robust", "p90", "--pareto", "memory,num_gpus"), "not --pareto"),
    (("--robust", "p90", "--objective", "memory_headroom"), "not --objective memory_headroom"),
    (("--top", "0"), "at least 1"),
    (("--resume",), "--store FILE"),
    (("--num-nodes", "8..2"), "8..64x2"),
    (("--deadline", "60d"), "--tokens"),
    (("--why", "speed=2"), "unknown axis of the space 'speed'"),
    (("--why", "schedule=fast"), "unknown schedule 'fast'"),
    (("--export", "paper"), "unknown export format 'paper'"),
    (("--export", "torchtitan", "--model", "gpt3-175b"), "torchtitan has no flavor of this shape"),
    (("--usd-per-gpu-hour", "0"), "must be above 0"),
)  # fmt: skip


@pytest.mark.parametrize(("arguments", "hint"), WRONG, ids=["_".join(a).replace("--", "") for a, _ in WRONG])
def test_what_cannot_be_is_one_clear_message(arguments: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    # A corner that takes no time, where only the question is wrong.
    small = ("--fix", "tp=8", "--fix", "recompute=full") if arguments[0] == "--why" else ()
    code, out, err = run(("search", *ONE, *small, *arguments), capsys)
    assert code == 2, (out, err)
    assert out == ""
    assert err.startswith("simpar: ")
    assert hint in err
    assert "Traceback" not in err


def test_what_is_missing_is_said_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(("search", "--hardware", "dgx-h100"), capsys)
    assert code == 2
    assert all(name in err for name in ("--model", "--num-nodes", "--global-batch"))
    code, _, err = run(("search", *ONE, "--top", "0", "--objective", "x", "--where", "y<1", "--pareto", "z"), capsys)
    assert all(name in err for name in ("--top", "--objective", "--where", "--pareto"))


# -- improve ---------------------------------------------------------------------------------------------------------------


def test_improve_finds_changes_of_one_and_two_axes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpar.searching.improve.improve", partial(improve, axes=SOME))
    path = scenario_file(tmp_path, more='recompute = "full"\nzero_stage = 0')
    code, out, _ = run(("improve", str(path), "--framework", "megatron-core", "--json", "--quiet", "--top", "3"), capsys)
    found = json.loads(out)
    assert code == 0
    today = simulate(read_scenario(path))
    assert found["today"]["step_time_s"] == pytest.approx(today.step_time_s, rel=1e-12)
    template = read_scenario(path)
    for count, changes in ((1, found["single_changes"]), (2, found["double_changes"])):
        assert changes
        assert [c["gain"] for c in changes] == sorted((c["gain"] for c in changes), reverse=True)
        for change in changes:
            result = simulate(Choice.from_flat(change["choice"]).scenario(template))
            assert 0 < change["gain"] == pytest.approx(1.0 - result.step_time_s / today.step_time_s, rel=1e-6)
            assert change["memory_change_bytes"] == pytest.approx(
                result.worst_rank.device_bytes - today.worst_rank.device_bytes, rel=1e-6
            )
            assert result.fits
            axes = set(change["changes"]) - ({"schedule"} if "virtual_stages" in change["changes"] else set())
            assert len(axes - ({"shard_size"} if "zero_stage" in axes else set())) == count
    assert found["double_changes"][0]["gain"] >= found["single_changes"][0]["gain"]
    # Recomputing everything is what this layout suffers from.
    assert any("recompute" in c["changes"] for c in found["single_changes"])


def test_improve_prints_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpar.searching.improve.improve", partial(improve, axes=("recompute", "micro_batch_size")))
    path = scenario_file(tmp_path, more='recompute = "full"')
    said = CliRunner().invoke(app, ["improve", str(path), "--quiet"], env={"COLUMNS": "200"})
    assert said.exit_code == 0
    assert "Today: tp4 sp pp2" in said.output
    assert "recompute full -> none" in said.output


# -- progress --------------------------------------------------------------------------------------------------------------


def test_progress_names_the_incumbent_and_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    choice = next(make_space(RunOptions("llama3.1-8b", "dgx-h100", 1, 8192, 8, None).table(None)[0], fix=["tp=8"]).choices())
    watch = Watch(Scored(choice, 2.0, 1e9, 2.0), 1.5, 3, 8, 17, 31.0)
    text = progress_text(watch)
    assert "gap 25.00%" in text
    assert "part 3/8" in text
    assert "17 simulated" in text
    assert f"best 2 s {choice}" in text
    assert "P(best)" not in text
    assert f" (P(best) 38%) {choice}" in progress_text(replace(watch, chance=lambda: 0.376))
    assert "nothing found yet" in progress_text(Watch(None, 0.0, 0, 8, 0, 0.0))
    for terminal in (True, False):
        output = io.StringIO()
        line = ProgressLine(Console(file=output, force_terminal=terminal, width=200))
        line(watch)
        line(watch)
        line(None)
        line(None)
        assert "gap 25.00%" in output.getvalue()
        if not terminal:
            assert output.getvalue().count("gap") == 1, "a log gets a line every half minute"
