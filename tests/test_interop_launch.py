"""What all launch files share: the table of formats, files and lines, the rank map, scripts as data, the commands of the guide."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from simpar.boundary import parse_yaml
from simpar.cli import app
from simpar.errors import InputError, UnknownNameError
from simpar.interop.argv import options
from simpar.interop.carried import Reading, settled
from simpar.interop.export import FORMATS, export_files, write_files
from simpar.interop.launch import nodes_and_gpus, rank_map
from simpar.interop.meaning import meaning
from simpar.specs.scenario import Scenario, make_scenario, read_scenario
from simpar.topology.mesh import Mesh

ROOT = Path(__file__).parent.parent
SCENARIOS = ROOT / "scenarios"
LLAMA = SCENARIOS / "llama3.1-70b_h100x64_tp4cp2pp4.toml"
GUIDE = ROOT / "docs" / "export.md"
CHANGES = {
    "megatron": [],
    "torchtitan": ["plan.zero_stage=3", "plan.overlap_tp=false", "training.gradient_dtype=fp32"],
    "deepspeed": ["plan.overlap_tp=false", "plan.sequence_parallel=false", "plan.cp=1", "plan.dp=4", "plan.virtual_stages=1",
                  "plan.schedule=1f1b"],
    "nanotron": ["plan.overlap_tp=false", "plan.cp=1", "plan.dp=16", "plan.pp=1", "plan.virtual_stages=1", "plan.schedule=1f1b",
                 "plan.overlap_param_gather=false", "training.gradient_dtype=fp32"],
}  # fmt: skip


def layout(name: str) -> Scenario:
    return read_scenario(LLAMA, CHANGES[name])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_writes_sound_files(name: str) -> None:
    files = export_files(name, layout(name))
    for file, text in files.items():
        assert text.endswith("\n")
        if file.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        elif file.endswith(".toml"):
            tomllib.loads(text)
        elif file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".yaml"):
            parse_yaml(text, file)
        elif file.endswith(".py"):
            compile(text, file, "exec")
    script = files[f"{name}.sh"]
    assert "torchrun --nnodes 8 --nproc-per-node 8" in script
    assert "#SBATCH --nodes=8" in files[f"{name}.sbatch"]
    assert len(files["rank_map.csv"].splitlines()) == 65


@pytest.mark.parametrize("name", FORMATS)
def test_an_mlp_or_a_pipeline_of_tpus_is_no_run(name: str) -> None:
    with pytest.raises(InputError, match=r"cluster\.hardware|model"):
        export_files(name, read_scenario(SCENARIOS / "gpipe-transformer-48l_tpu-v4x8_pp8.toml"))


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'megatron'"):
        export_files("megatorn", layout("megatron"))


def test_files_go_into_a_folder_or_one_file(tmp_path: Path) -> None:
    files = {"main.sh": "a\n", "other.csv": "b\n"}
    assert write_files(files, tmp_path / "new" / "folder") == [tmp_path / "new/folder/main.sh", tmp_path / "new/folder/other.csv"]
    assert write_files(files, tmp_path / "run.sh") == [tmp_path / "run.sh"]
    assert (tmp_path / "run.sh").read_text() == "a\n"
    with pytest.raises(InputError, match="cannot be written"):
        write_files(files, tmp_path / "run.sh" / "inside")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral-8x22b_h100x128_tp2pp8ep8", ["plan.etp=2", "plan.ep=4"]),
        ("mixtral-8x22b_h100x128_tp2pp8ep8", []),
        ("llama3.1-70b_h100x64_tp4cp2pp4", ["plan.placement=tp-cp-ep-pp-dp"]),
    ],
)
def test_the_rank_map_is_the_mesh(name: str, changes: list[str]) -> None:
    scenario = read_scenario(SCENARIOS / f"{name}.toml", changes)
    head, *rows = rank_map(scenario).splitlines()
    dims = ["pp", "dp", "cp", "tp", *(["edp", "ep", "etp"] if scenario.plan.ep > 1 else [])]
    assert head == ",".join(["rank", "node", "local_rank", *dims])
    mesh = Mesh.of(scenario.plan, scenario.world_size)
    for rank, row in enumerate(rows):
        found = dict(zip(head.split(","), map(int, row.split(",")), strict=True))
        assert (found["rank"], found["node"], found["local_rank"]) == (rank, rank // 8, rank % 8)
        assert {k: found[k] for k in dims} == {k: mesh.coordinates(rank)[k] for k in dims}


def test_part_of_a_node() -> None:
    scenario = read_scenario(SCENARIOS / "llama3.1-70b_h100x1_fp8.toml")
    assert nodes_and_gpus(scenario) == (1, 1)
    assert rank_map(scenario).splitlines()[1] == "0,0,0,0,0,0,0"


# -- comment lines ---------------------------------------------------------------------------------------------------------


def test_comment_lines_count_while_the_meaning_stays() -> None:
    table = {"name": "x", "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "framework": "megatron-core",
             "plan": {"dp": 8, "tp": 1}, "training": {"sequence_length": 2048, "global_batch_size": 8}}  # fmt: skip
    same = settled(Reading(dict(table)), "# simpar: plan.dp = null where the file says 8\n").scenario
    assert same.plan.dp is None
    edited = {**table, "plan": {"dp": 4, "tp": 2}}
    assert settled(Reading(edited), "# simpar: plan.dp = null where the file says 8\n").scenario.plan.dp == 4
    lying = "# simpar: plan.virtual_stages = 2 where the file says 1\n"
    assert settled(Reading(dict(table)), lying).scenario.plan.virtual_stages == 1
    with pytest.raises(InputError, match="JSON"):
        settled(Reading(dict(table)), "# simpar: plan.dp = none\n")


@given(st.sampled_from(sorted(SCENARIOS.glob("*.toml"))))
def test_the_meaning_of_a_scenario_says_every_field(path: Path) -> None:
    scenario = read_scenario(path)
    found = set(meaning(scenario))
    for part in ("plan", "training"):
        assert {f"{part}.{name}" for name in type(getattr(scenario, part)).model_fields} <= found


def test_wording_does_not_change_the_meaning() -> None:
    scenario = read_scenario(LLAMA)
    table = scenario.model_dump(exclude={"file", "published", "model"}, exclude_none=True)
    table["model"] = "llama3.1-70b"
    del table["plan"]["dp"]
    table["plan"] |= {"schedule": "auto", "microbatch_group_size": 4, "layers_per_stage": [4] * 20}
    assert meaning(make_scenario(table)) == meaning(scenario)


def test_options() -> None:
    found = options(shlex.split("--a 1 --b --c_d x y --e=2 '--f-g h'"))
    assert found == {"a": ["1"], "b": [], "c-d": ["x", "y"], "e": ["2"], "f-g": ["h"]}


# -- the guide and the commands --------------------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"(?:^    .*\n)+", GUIDE.read_text(encoding="utf-8"), re.M)


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenarios").symlink_to(SCENARIOS)
    monkeypatch.chdir(tmp_path)
    for line in blocks()[0].splitlines():
        words = shlex.split(line)
        assert words[0] == "simpar"
        result = CliRunner().invoke(app, words[1:])
        # A layout that does not fit is a result, not a failure.
        assert result.exit_code in ((0, 1) if words[1] == "simulate" else (0,)), (line, result.output, result.exception)
    assert (tmp_path / "launch" / "torchtitan_recipe.py").is_file()


def test_the_refusal_of_the_guide() -> None:
    command, *expected = [line.strip() for line in blocks()[1].splitlines()]
    name, path = command.removeprefix("$ simpar export ").split(" ")
    with pytest.raises(InputError) as caught:
        export_files(name, read_scenario(ROOT / path))
    assert f"simpar: {caught.value}".splitlines() == expected


def test_the_guide_lists_every_format_and_file() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name in FORMATS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        assert re.findall(r"`([\w.]+)`", row)[1:] == list(export_files(name, layout(name)))


def test_import_on_the_command_line(tmp_path: Path) -> None:
    line = (
        "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 1024 --num-attention-heads 16 --bf16 "
        "--seq-length 512 --micro-batch-size 1 --tensor-model-parallel-size 2 --unheard-of 3"
    )
    script = tmp_path / "run.sh"
    script.write_text(line + "\n")
    out = tmp_path / "scenario.toml"
    for words in ([str(script)], ["--argv", "--", *line.split()]):
        wanted = ["import", "megatron", "--hardware", "dgx-h100", "--json", *words]
        result = CliRunner().invoke(app, wanted)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["scenario"]["plan"]["tp"], found["scenario"]["plan"]["dp"]) == (2, 4)
        assert any("--unheard-of 3" in w for w in found["warnings"])
    assert CliRunner().invoke(app, ["import", "megatron", str(script), "--hardware", "dgx-h100", "--out", str(out)]).exit_code == 0
    assert read_scenario(out).plan.tp == 2
    with pytest.raises(InputError, match="is no assignment"):
        CliRunner().invoke(app, ["import", "--run", str(script), "--var", "TP"], catch_exceptions=False)
