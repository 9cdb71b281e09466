"""What is shipped, by name: scenarios, plans, models, profiles; a first scenario; the help; the data of an installed package."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import simpar
from simpar.api.first_plan import first_layout
from simpar.cli import app, main
from simpar.cli.shipped import print_table
from simpar.errors import InputError
from simpar.evidence import results_md
from simpar.interop.profile_text import profile_text
from simpar.readings import outcome_of
from simpar.searching.abilities import ability
from simpar.specs import base
from simpar.specs.base import data_dir, read_toml
from simpar.specs.catalog import plan_names, plan_path, scenario_names, scenario_path
from simpar.specs.hardware import load_hardware, profile_names, read_profile
from simpar.specs.models_io import model_names
from simpar.specs.options import RunOptions
from simpar.specs.planfile import make_plan, read_plan_table
from simpar.specs.scenario import make_scenario, read_scenario
from simpar.step import simulate

SMALL = "zero-7.5b_a100x64_zero1"
OPTIONS = (
    "--model",
    "llama3.1-8b",
    "--hardware",
    "dgx-h100",
    "--num-nodes",
    "1",
    "--global-batch",
    "16",
    "--sequence-length",
    "4096",
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- names -----------------------------------------------------------------------------------------------------------------


def test_scenarios_and_plans_are_found_by_name(empty: Path) -> None:
    for name in scenario_names():
        assert scenario_path(name).stem == name
    for name in plan_names():
        make_plan(read_plan_table(name))
    assert read_scenario(SMALL).name == "ZeRO 7.5B on 64 devices, stage 1"
    own = empty / SMALL
    own.write_text(scenario_path(SMALL).read_text().replace("stage 1", "mine"))
    assert read_scenario(SMALL).name == "ZeRO 7.5B on 64 devices, mine", "a file of the user's comes first"


@pytest.mark.parametrize(
    ("find", "name", "told"),
    [
        (scenario_path, "zero-7.5b_a100x64_zer1", "unknown scenario 'zero-7.5b_a100x64_zer1'; did you mean"),
        (plan_path, "opt-175b", "unknown plan 'opt-175b'; did you mean 'opt-175b_a100x992'?"),
        (scenario_path, "folder/x", "folder/x: no such file"),
        (scenario_path, "x" * 5000, "cannot be a file: File name too long"),
        (scenario_path, "x.toml", "x.toml: no such file"),
        (scenario_path, f"scenarios/{SMALL}.toml", f"no such file; a shipped scenario has that name: write {SMALL}"),
        (read_scenario, "opt-175b_a100x992", "unknown scenario"),
        (
            read_scenario,
            str(data_dir("scenarios") / "plans" / "opt-175b_a100x992.toml"),
            "not a scenario; answer it with",
        ),
        (read_plan_table, str(scenario_path(SMALL)), "is a scenario, not the plan of a whole run"),
    ],
)
def test_names_that_are_none(empty: Path, find, name: str, told: str) -> None:
    with pytest.raises(InputError) as stop:
        find(name)
    assert told in str(stop.value)


@pytest.mark.parametrize("command", ["simulate", "improve", "explain", "search"])
def test_every_command_takes_names(command: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, command, "zero-7.5b_a100x64_zer1")
    assert code == 2
    assert "did you mean" in err


def test_topology_takes_a_scenario_by_name(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, "topology", SMALL, "--json")[1])["num_gpus"] == 64


# -- options instead of a file ---------------------------------------------------------------------------------------------


def test_options_stand_for_a_scenario_and_its_first_layout_fits(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "simulate", *OPTIONS, "--json", "--detail", "stage")
    found = json.loads(out)
    assert code == 0
    assert found["fits"]
    assert "the first layout that fits" in err
    assert found["layout"]["pp"] == 1
    _, larger, _ = run(capsys, "simulate", *OPTIONS, "--json", "--detail", "stage", "--set", "cluster.memory_scale=0.5")
    layout = json.loads(larger)["layout"]
    assert layout["tp"] * layout["pp"] > found["layout"]["tp"]
    kept = ("--set", "cluster.memory_scale=0.5", "--set", "plan.recompute=full")
    recomputed = json.loads(run(capsys, "simulate", *OPTIONS, "--json", "--detail", "stage", *kept)[1])
    assert (recomputed["layout"]["recompute"], recomputed["fits"]) == ("full", True), "what is said is kept"
    _, out, err = run(capsys, "simulate", *OPTIONS, "--json", "--detail", "stage", "--set", "plan.tp=4")
    assert json.loads(out)["layout"]["tp"] == 4
    assert "layout" not in err, "a plan that is said is taken"


def test_nothing_fits_is_said(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--json", "--detail", "stage", "--set", "cluster.memory_scale=0.01")
    code, out, err = run(capsys, "simulate", *OPTIONS, *small)
    assert code == 1
    plain = json.loads(run(capsys, "simulate", *OPTIONS, *small, "--set", "plan.tp=1")[1])
    assert json.loads(out)["peak_memory_bytes"]["device"] < 0.5 * plain["peak_memory_bytes"]["device"]
    assert "no layout fits; the closest" in err


def test_explain_takes_options(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", *OPTIONS, "--json", "--set", "plan.tp=8")
    assert code == 0
    assert json.loads(out)["neighbours"]


def test_missing_options_are_told_together(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "simulate", "--model", "llama3.1-8b")
    assert code == 2
    assert [line.split(": is required")[0].removeprefix("simpar: ") for line in err.splitlines()] == [
        "--hardware", "--num-nodes", "--global-batch",
    ]  # fmt: skip


def test_options_change_a_scenario() -> None:
    """None of them is ignored beside a file."""
    before = read_toml(scenario_path(SMALL))
    table, file = RunOptions("llama3.1-8b", "dgx-h100", 4, 1024, 64, "plain").table(SMALL, ["plan.tp=2"])
    assert file == str(scenario_path(SMALL))
    assert (table["model"], table["framework"]) == ("llama3.1-8b", "plain")
    assert table["cluster"] == {**before["cluster"], "hardware": "dgx-h100", "num_nodes": 4}
    assert table["training"] == {**before["training"], "sequence_length": 1024, "global_batch_size": 64}
    assert table["plan"]["tp"] == 2
    assert RunOptions().table(SMALL)[0] == before
    part = RunOptions(num_nodes=2).table({"cluster": {"hardware": "x", "num_nodes": 1, "num_gpus": 4}})[0]
    assert part["cluster"] == {"hardware": "x", "num_nodes": 2}


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (2, 1), (8, 1), (12, 2)])
def test_a_number_of_gpus_fills_nodes(gpus: int, nodes: int) -> None:
    """Alone, and beside a scenario whose own machines it replaces."""
    cluster = {"hardware": "dgx-h100", "num_nodes": nodes, "num_gpus": gpus}
    assert RunOptions("llama3.1-8b", "dgx-h100", global_batch=8, num_gpus=gpus).table(None)[0]["cluster"] == cluster
    assert RunOptions(num_gpus=gpus).table({"cluster": {"hardware": "dgx-h100", "num_nodes": 9}})[0]["cluster"] == cluster


# -- listings --------------------------------------------------------------------------------------------------------------


def test_scenarios_are_listed_shown_and_copied(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "scenarios", "--json")[1])
    assert [row["name"] for row in found["scenarios"]] == scenario_names()
    assert [row["name"] for row in found["plans"]] == plan_names()
    row = next(row for row in found["scenarios"] if row["name"] == "llama3.1-70b_h100x64_tp4cp2pp4")
    assert (row["model"], row["machine"], row["nodes"], row["layout"]) == ("llama3.1-70b", "dgx-h100", 8, "tp4 cp2 pp4")
    text = run(capsys, "scenarios")[1]
    assert all(f"\n{name} " in f"\n{text}" for name in (*scenario_names(), *plan_names()))
    shipped = scenario_path(SMALL).read_text()
    assert run(capsys, "scenarios", "show", SMALL)[1] == shipped
    assert json.loads(run(capsys, "scenarios", "show", "opt-175b_a100x992", "--json")[1])["phases"]
    assert run(capsys, "scenarios", "copy", SMALL)[0] == 0
    assert (empty / f"{SMALL}.toml").read_text() == shipped
    code, _, err = run(capsys, "scenarios", "copy", SMALL)
    assert code == 2
    assert "is there already" in err
    assert run(capsys, "scenarios", "copy", SMALL, "--force")[0] == 0
    code, _, err = run(capsys, "scenarios", "show", "zero")
    assert code == 2
    assert "unknown scenario or plan" in err


def test_profiles_are_listed_with_what_one_chooses_by(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row for row in json.loads(run(capsys, "profiles", "--json")[1])}
    assert [*found] == profile_names()
    h100 = load_hardware("dgx-h100")
    row = found["dgx-h100"]
    assert row["memory_bytes"] == h100.gpu.memory.value
    assert row["peak_flops_per_s"] == 989e12
    assert (row["gpus_per_node"], row["nics_per_node"], row["nic_bytes_per_s"]) == (8, 8, 50e9)
    line = next(line for line in run(capsys, "profiles")[1].splitlines() if line.startswith("dgx-h100 "))
    assert line.split() == ["dgx-h100", "H100", "SXM", "79.1", "3.35", "989", "8", "450", "nvswitch", "8", "x", "400", "infiniband"]
    rack = next(line for line in run(capsys, "profiles")[1].splitlines() if line.startswith("gb200-nvl72 "))
    assert "of 72" in rack


def test_a_profile_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "profiles", "show", "dgx-h100")[1]
    line = next(line for line in text.splitlines() if line.startswith("gpu.power "))
    assert line.split(maxsplit=4) == ["gpu.power", "700", "W", "published", "NVIDIA H100 data sheet (SXM)"]
    found = json.loads(run(capsys, "profiles", "show", "dgx-h100", "--json")[1])
    assert found["gpu"]["memory"]["kind"] == "measured"
    assert found["kernels"] == "fitted/h100.kernels.toml"


def test_a_bare_value_of_a_profile_is_shown_as_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    assert run(capsys, "profiles", "new", "--from", "dgx-h100", "--out", str(mine))[0] == 0
    lines = mine.read_text().splitlines()
    mine.write_text("\n".join('power = "700 W"' if line.startswith("power =") else line for line in lines))
    line = next(line for line in run(capsys, "profiles", "show", str(mine))[1].splitlines() if line.startswith("gpu.power "))
    assert line.split(maxsplit=4) == ["gpu.power", "700", "W", "assumed", "given without a source"]


def test_reading_without_constants_is_the_same_machine() -> None:
    whole, quick = read_profile("dgx-h100"), read_profile("dgx-h100", constants=False)
    assert whole.gpu == quick.gpu
    assert whole.kernels != quick.kernels


@pytest.mark.parametrize("name", profile_names())
def test_a_new_profile_is_its_base_explained(name: str, empty: Path) -> None:
    (empty / "my.toml").write_text(profile_text(name, "my"))
    mine, shipped = read_profile("my.toml"), read_profile(name)
    assert mine == shipped.model_copy(update={"name": "my"})


def test_profiles_new(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("profiles", "new", "--from", "dgx-h100", "--out", "fast.toml")
    code, out, _ = run(capsys, *arguments, "--set", "gpu.memory=192 GB", "--set", "nic.count=4")
    assert code == 0
    assert "wrote fast.toml" in out
    text = (empty / "fast.toml").read_text()
    assert 'memory = "192 GB"' in text
    assert "# Capacity that a process sees in total, before the context." in text
    assert max(map(len, (line for line in text.splitlines() if line.startswith("#")))) <= 120
    mine = load_hardware(str(empty / "fast.toml"))
    assert (mine.gpu.memory.value, mine.gpu.memory.kind, mine.nic.count) == (192e9, "assumed", 4)
    assert mine.kernels == load_hardware("dgx-h100").kernels
    assert run(capsys, *arguments)[0] == 2
    code, _, err = run(capsys, *arguments, "--force", "--set", "gpu.memory=192")
    assert code == 2
    assert "a quantity with a unit is needed" in err
    code, _, err = run(capsys, "profiles", "new", "--from", "dgx-h101", "--out", "b.toml")
    assert code == 2
    assert "did you mean" in err


def test_models_are_listed_with_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row for row in json.loads(run(capsys, "models", "--json")[1])}
    assert [*found] == model_names()
    assert found["llama3.1-8b"]["parameters"] == 8_030_261_248
    assert (found["llama3.1-8b"]["layers"], found["llama3.1-8b"]["hidden_size"]) == (32, 4096)
    assert found["mixtral-8x7b"]["active_parameters"] < found["mixtral-8x7b"]["parameters"] / 3
    line = next(line for line in run(capsys, "models")[1].splitlines() if line.startswith("llama3.1-8b "))
    assert line.split()[1:6] == ["transformer", "8.03B", "8.03B", "32", "4096"]


def test_a_model_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, "models", "show", "llama3.1-8b", "--json")[1])["parameters"] == 8_030_261_248
    shown = run(capsys, "models", "show", "llama3.1-8b")[1]
    assert "8,030,261,248" in shown
    assert "32 x " in shown
    assert run(capsys, "models", "show", "llama3.1-8x")[0] == 2


def test_tables_in_a_pipe_have_a_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "bb"), [("x" * 300, "1"), ("y", "22")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a".ljust(300) + "  bb", "x" * 300 + "   1", "y".ljust(300) + "  22"]


# -- a first scenario ------------------------------------------------------------------------------------------------------


def test_new_writes_a_scenario_that_runs(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "new", *OPTIONS, "--framework", "torchtitan", "--out", "sub/first.toml")
    assert code == 0
    assert "then: simpar simulate sub/first.toml" in out
    found = read_scenario(empty / "sub" / "first.toml")
    assert (found.framework, found.cluster.num_nodes, found.training.global_batch_size) == ("torchtitan", 1, 16)
    assert found.plan.zero_stage == 3, "torchtitan shards with FSDP2 only"
    assert run(capsys, "simulate", "sub/first.toml", "--detail", "stage")[0] == 0
    assert run(capsys, "new", *OPTIONS, "--out", "sub/first.toml")[0] == 2


def test_new_writes_paths_as_seen_from_the_file(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parent / "data" / "hf"
    source = next(p for p in sorted(config.rglob("*.json")) if '"llama"' in p.read_text())
    (empty / "config.json").write_text(source.read_text())
    run(capsys, "profiles", "new", "--from", "dgx-h100", "--out", "machine.toml")
    code, _, err = run(
        capsys, "new", *OPTIONS[4:], "--model", "config.json", "--hardware", "machine.toml", "--out", "sub/first.toml"
    )
    assert code == 0, err
    table = read_toml(empty / "sub" / "first.toml")
    assert (table["model"], table["cluster"]["hardware"]) == ("../config.json", "../machine.toml")
    read_scenario(empty / "sub" / "first.toml")


def test_new_takes_a_precision_that_the_gpu_has(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "new", *OPTIONS, "--hardware", "dgx2-v100-32gb", "--sequence-length", "1024", "--out", "v.toml")
    assert code == 0, err
    assert read_scenario("v.toml").training.precision == "fp16"


def test_new_without_a_terminal_does_not_ask(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "new", "--model", "llama3.1-8b")
    assert code == 2
    assert "--num-nodes" in err


def test_new_asks_on_a_terminal_again_where_an_answer_is_wrong(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["llama3.1-8x", "llama3.1-8b", "dgx-h100", "0", "2", "4096", "32", "megatron-cor", "megatron-core"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "prompt", lambda *_, **__: next(answers))
    code, _, err = run(capsys, "new", "--out", "asked.toml")
    assert code == 0
    assert next(answers, None) is None
    assert "did you mean 'llama3.1-8b'" in err
    assert "0: a whole number of at least 1" in err
    found = read_scenario("asked.toml")
    assert (found.cluster.num_nodes, found.training.sequence_length, found.training.global_batch_size) == (2, 4096, 32)


# -- the help --------------------------------------------------------------------------------------------------------------


def commands() -> dict[str, typer.main.click.Command]:
    return typer.main.get_command(app).commands


def test_help_groups_the_commands_and_says_the_exit_codes() -> None:
    text = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "200"}).output
    for word in ("Predict", "Search and plan", "Compare with measurements", "Files of other programs", "What is shipped",
                 "Exit codes: 0 done; 1", "2 bad input; 3 a bug in simpar", "--version", "--install-completion"):  # fmt: skip
        assert word in text
    assert text == CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_a_panel_and_an_example_that_parses(name: str) -> None:
    command = commands()[name]
    assert command.rich_help_panel in ("Predict", "Search and plan", "Compare with measurements", "Files of other programs",
                                       "What is shipped")  # fmt: skip
    assert command.epilog.startswith(f"Example: simpar {name} ")
    words = shlex.split(command.epilog.removeprefix("Example: simpar "))[1:]
    while hasattr(command, "commands") and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    command.make_context(name, words, resilient_parsing=False)


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"simpar {simpar.__version__}\n"


def test_the_shell_completes_names(tmp_path: Path) -> None:
    (tmp_path / "llama3.1-7-mine.toml").write_text("")

    def complete(words: str) -> list[str]:
        environment = {**os.environ, "_SIMPAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
                       "PYTHONPATH": str(Path(base.__file__).parents[2])}  # fmt: skip
        code = "from simpar.cli import app; app(prog_name='simpar')"
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.split()

    assert complete("simpar simulate llama3.1-7") == [
        "llama3.1-70b_a100x64h100x64_tp8pp4", "llama3.1-70b_h100x1_fp8", "llama3.1-70b_h100x64_tp4cp2pp4",
        "llama3.1-70b_tpu-v5px128_fsdp16tp8", "llama3.1-7-mine.toml",
    ]  # fmt: skip
    assert complete("simpar search --hardware dgx-h") == ["dgx-h100", "dgx-h100-96gb-500w", "dgx-h200"]


# -- the installed package -------------------------------------------------------------------------------------------------


def test_data_is_taken_from_the_package_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "simpar"
    (package / "_data" / "scenarios").mkdir(parents=True)
    (tmp_path / "site-packages" / "scenarios").mkdir()
    monkeypatch.setattr(base.resources, "files", lambda _: package)
    assert data_dir("scenarios") == package / "_data" / "scenarios"
    assert base.checkout_dir("scenarios") is None
    with pytest.raises(InputError, match="incomplete"):
        data_dir("validation")


def test_an_installed_package_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_md, "checkout_dir", lambda _: None)
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("wrote"))
    results_md.write_results(None)  # type: ignore[arg-type]


def test_every_data_folder_is_in_the_build() -> None:
    """The build hook and the source distribution name the folders that `data_dir` is asked for."""
    root = Path(base.__file__).parents[2]
    hook, manifest = (root / "setup.py").read_text(), (root / "MANIFEST.in").read_text()
    for name in ("hardware_profiles", "scenarios", "validation"):
        assert f'"{name}"' in hook
        # What Python compiled there while other tests ran is no data.
        kinds = {path.suffix for path in (root / name).rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
        line = next(line for line in manifest.splitlines() if line.startswith(f"recursive-include {name} "))
        assert kinds <= {word.removeprefix("*") for word in line.split()[2:]}


def test_validate_runs_a_selection(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "validate", "--only", "BloombergGPT", "--json")[1])
    assert {row["group"]["group"] for row in found["rows"]} == {"BloombergGPT"}
    code, _, err = run(capsys, "validate", "--only", "BloombergGTP")
    assert code == 2
    assert "did you mean 'BloombergGPT'" in err


def test_a_page_has_everything_inside_where_that_is_asked_for(tmp_path: Path) -> None:
    for more, inside in (([], False), (["--offline"], True)):
        done = CliRunner().invoke(app, ["simulate", SMALL, "--detail", "stage", "--html", str(tmp_path / "page.html"), *more])
        assert done.exit_code == 0, done.output
        assert ("plotly.js v" in (tmp_path / "page.html").read_text()) is inside


def test_a_folder_without_a_model_is_called_one(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["models", "show", str(tmp_path)])
    assert "is a folder without a config.json" in str(done.exception)


def test_images_are_no_tokens() -> None:
    done = CliRunner().invoke(app, ["simulate", "alexnet_gtx580x2_tp2"])
    assert "samples/s" in done.output
    assert "tokens/s" not in done.output


def test_simpar_alone_shows_three_things_that_work() -> None:
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    commands = [line.split("  ")[1].strip() for line in done.output.splitlines() if line.startswith("  simpar")]
    assert [command.split()[1] for command in commands] == ["simulate", "new", "search"]
    for command in commands:
        assert CliRunner().invoke(app, [*command.split()[1:2], "-h"]).exit_code == 0


def test_a_first_plan_of_one_gpu_shards_nothing_where_its_framework_does_not() -> None:
    def stage(framework: str) -> int:
        options = RunOptions("llama3.2-1b", "rtx-4090", None, 2048, 8, framework, num_gpus=1)
        return int(first_layout(options.table(None)[0])[0]["plan"]["zero_stage"])

    assert (stage("transformers"), stage("torchtune")) == (0, 0)
    assert stage("deepspeed") > 0


def test_a_first_plan_recomputes_where_that_is_faster_than_more_ranks() -> None:
    """Without recomputation 64 pipeline stages are not enough for 405B on 128 nodes."""
    options = RunOptions("llama3.1-405b", "dgx-h100", 128, 8192, 256, "megatron-core")
    table = options.table(None)[0]
    found, fits = first_layout(table)
    plan = found["plan"]
    assert fits
    assert (plan["recompute"], plan["tp"], plan["pp"]) == ("full", 8, 8)
    assert not simulate(make_scenario({**table, "plan": plan | {"recompute": "none"}}), detail="stage").fits


def test_a_first_plan_is_likely_to_fit_where_one_is() -> None:
    options = RunOptions("llama3.1-8b", "rtx-4090", None, 2048, 16, "transformers", num_gpus=2)
    table, _ = options.table(None)
    table["training"]["trainable"] = "lora"
    table["training"]["micro_batch_size"] = 1
    found, fits = first_layout(table)
    first = found["plan"]
    assert fits
    chances = [
        outcome_of(simulate(make_scenario({**table, "plan": first | {"recompute": how}}), detail="stage")).chance_to_fit
        for how in ("none", first["recompute"])
    ]
    assert chances[0] < 0.9 <= chances[1]


def test_a_first_micro_batch_grows_while_it_pays() -> None:
    options = RunOptions("llama3.2-1b", "dgx-h100", 1, 1024, 256, "megatron-core")
    table, _ = options.table(None)

    def seconds(size: int) -> float:
        training = {**table["training"], "micro_batch_size": size}
        return simulate(make_scenario({**found, "training": training}), detail="stage").step_time_s

    found, fits = first_layout(table)
    size = found["training"]["micro_batch_size"]
    assert fits
    assert size > 1
    assert seconds(size) < 0.98 * seconds(size // 2)
    assert seconds(2 * size) > 0.98 * seconds(size)
    table["training"]["micro_batch_size"] = 2
    assert first_layout(table)[0]["training"]["micro_batch_size"] == 2


@pytest.mark.parametrize(("model", "hardware", "nodes"), [("gpt-oss-20b", "dgx-h100", 1), ("qwen3-30b-a3b", "mi355x", 4)])
def test_a_first_plan_exchanges_tokens_inside_a_scale_up_domain(model: str, hardware: str, nodes: int) -> None:
    """What spreads experts as far as it can needs the least memory, and takes more than twice as long."""
    table = RunOptions(model, hardware, nodes, 4096, 64 * nodes, "torchtitan").table(None)[0]
    found, fits = first_layout(table)
    plan = found["plan"]
    assert fits
    assert 1 <= plan["ep"] <= 8
    assert nodes == 1 or plan["ep"] > 1

    def seconds(**changes: int) -> float:
        return simulate(make_scenario({**found, "plan": plan | changes}), detail="stage").step_time_s

    # On one node even experts that are not spread fit, with 4 sequences at a time: none of the spreads is faster.
    others = (1, 2, 4, 8) if nodes == 1 else (plan["ep"] // 2,)
    assert seconds() <= min(seconds(ep=size) for size in others)
    if nodes > 1:
        assert seconds(ep=8 * nodes) > 2.0 * seconds()


def test_a_first_plan_on_a_number_of_gpus_that_is_no_power_of_two() -> None:
    """Twelve GPUs do not divide 16 sequences; three pipeline stages leave four ranks of data parallelism, which do."""
    found, fits = first_layout(RunOptions("llama3.1-8b", "dgx-h100", None, 2048, 16, "megatron-core", num_gpus=12).table(None)[0])
    assert fits
    assert (found["plan"]["tp"], found["plan"]["pp"]) == (1, 3)
    none = RunOptions("llama3.2-1b", "dgx-h100", None, 2048, 16, "torchtune", num_gpus=97).table(None)[0]
    with pytest.raises(InputError, match=r"training.global_batch_size = 16: must be a multiple of .* = 97; such as 97"):
        first_layout(none)


def test_what_every_layout_breaks_is_said() -> None:
    options = RunOptions("llama2-7b", "dgx-h100", 1, 2048, 8, "megatron-core")
    table = options.table(None)[0] | {"plan": {"offload": {"parameters": True}}}
    with pytest.raises(InputError, match=r"^plan.offload.parameters = True: megatron-core does not have it"):
        first_layout(table)


@pytest.mark.parametrize("framework", ["transformers", "trl", "torchtune", "nanotron"])
def test_a_first_plan_is_one_that_the_framework_runs(framework: str) -> None:
    """The Trainer has no tensor ranks, nor have frameworks that are launched through its options."""
    options = RunOptions("llama3.1-8b", "rtx-5090", None, 2048, 8, framework, num_gpus=8)
    plan = first_layout(options.table(None)[0])[0]["plan"]
    can = ability(framework).values
    assert all(value in can[name] for name, value in plan.items() if name in can)
