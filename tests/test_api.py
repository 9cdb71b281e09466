"""The public Python API: names, changes to scenarios, results, tables, and what a type checker sees."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import simpar
from simpar.api.scenarios import TABLES, changed
from simpar.api.table import Table
from simpar.cli import main

SMALL = "zero-7.5b_a100x64_zero1"
PIPELINED = "llama3.1-70b_h100x64_tp4cp2pp4"


def cli_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def result() -> simpar.Result:
    return simpar.simulate(SMALL)


# -- names -----------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_typed() -> None:
    for name in simpar.__all__:
        assert getattr(simpar, name) is not None
    assert {*simpar.__all__} == {*simpar._HOME, "__version__"}
    tree = ast.parse(Path(simpar.__file__).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    assert {a.asname or a.name for node in typed.body for a in node.names} == {*simpar._HOME}
    with pytest.raises(AttributeError, match="no attribute 'simulates'"):
        simpar.simulates  # noqa: B018


def test_every_public_name_is_documented() -> None:
    text = (Path(simpar.__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert {*simpar._HOME} <= words


def test_no_module_hides_a_public_name() -> None:
    """A submodule called like a function would replace it as soon as it is imported."""
    modules = {module.name for module in pkgutil.iter_modules(simpar.__path__)}
    assert not modules & {*simpar.__all__}


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, simpar; print([m for m in ('numpy', 'pydantic', 'simpy', 'plotly', 'typer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_field_names_are_of_one_table_each() -> None:
    """Otherwise `pp=8` could mean two things."""
    names = [name for spec in TABLES.values() for name in spec.model_fields]
    assert len(names) == len({*names})
    assert not {*names} & {*simpar.Scenario.model_fields}


# -- scenarios -------------------------------------------------------------------------------------------------------------


def test_changes_by_field_table_and_path() -> None:
    table = {"name": "x", "plan": {"tp": 2, "pp": 2, "dp": 4}, "cluster": {"hardware": "dgx-h100", "num_nodes": 2}}
    assert changed(table, {"schedule": "zb-h1"})["plan"] == {"tp": 2, "pp": 2, "dp": 4, "schedule": "zb-h1"}
    assert changed(table, {"cluster": {"sharp": True}})["cluster"] == {"hardware": "dgx-h100", "num_nodes": 2, "sharp": True}
    assert changed(table, {"plan.recompute": {"granularity": "full"}})["plan"]["recompute"] == {"granularity": "full"}
    assert changed(table, {"plan": simpar.Plan(tp=2, pp=2, dp=4)})["plan"]["zero_stage"] == 1
    assert "tp" not in changed(table, {"tp": None, "dp": 8})["plan"]
    split = {"plan": {"pp": 2, "layers_per_stage": [1, 2]}}
    assert "layers_per_stage" not in changed(split, {"plan": simpar.Plan(pp=2)})["plan"], "a Plan replaces the table"
    assert changed(split, {"plan": {"pp": 2}})["plan"]["layers_per_stage"] == [1, 2], "a dictionary is laid over it"
    assert table["plan"] == {"tp": 2, "pp": 2, "dp": 4}, "the source is not changed"


@pytest.mark.parametrize(
    ("change", "dp"),
    [({"pp": 4}, None), ({"num_nodes": 4}, None), ({"cluster": {"num_nodes": 4}}, None), ({"tp": 2}, 4), ({"pp": 4, "dp": 2}, 2),
     ({"plan": {"pp": 4, "dp": 2}}, 2), ({"plan": simpar.Plan(tp=2, pp=1, dp=8)}, 8), ({"plan": simpar.Plan(tp=2)}, None)],
)  # fmt: skip
def test_dp_is_derived_anew_where_degrees_or_cluster_change(change: dict, dp: int | None) -> None:
    table = {"plan": {"tp": 2, "pp": 2, "dp": 4}, "cluster": {"hardware": "dgx-h100", "num_nodes": 2}}
    assert changed(table, change)["plan"].get("dp") == dp


def test_load_takes_names_paths_tables_and_scenarios(tmp_path: Path) -> None:
    named = simpar.load(PIPELINED)
    path = tmp_path / "own.toml"
    path.write_text(Path(named.file).read_text())
    table = {"model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
             "training": {"global_batch_size": 8, "sequence_length": 4096}}  # fmt: skip
    assert simpar.load(path).plan == simpar.load(str(path)).plan == simpar.load(named).plan == named.plan
    built = simpar.Scenario(
        name="scenario", model=simpar.load_model("llama3.1-8b"), cluster=simpar.Cluster(hardware="dgx-h100", num_nodes=1),
        training=simpar.Training(global_batch_size=8, sequence_length=4096),
    )  # fmt: skip
    alone = simpar.load(model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, global_batch_size=8, sequence_length=4096)
    assert simpar.load(table) == simpar.load(built) == alone
    assert simpar.load(built, tp=8).world_size == 8


def test_wrong_changes_are_named() -> None:
    with pytest.raises(simpar.UnknownNameError, match=r"micro_batch_sise.*did you mean 'micro_batch_size'"):
        simpar.load(SMALL, micro_batch_sise=2)
    with pytest.raises(simpar.InputError, match="pp 5 = 40"):
        simpar.load(PIPELINED, pp=5)
    with pytest.raises(simpar.InputError, match=r"model is 'zero-7\.5b', not a table; give all of model"):
        simpar.load(SMALL, **{"model.hidden_size": 8})
    with pytest.raises(simpar.InputError, match="not a int"):
        simpar.load(3)  # type: ignore[arg-type]
    with pytest.raises(simpar.InputError, match=r"tp = 0: must be greater than 0"):
        simpar.Plan(tp=0)
    with pytest.raises(simpar.InputError, match="detail 'ops'"):
        simpar.simulate(SMALL, detail="ops")  # type: ignore[arg-type]


def test_a_scenario_built_in_code_is_checked() -> None:
    built = simpar.Scenario(
        name="x", model=simpar.load_model("llama3.1-8b"), cluster=simpar.Cluster(hardware="dgx-h100", num_nodes=1),
        plan=simpar.Plan(tp=3), training=simpar.Training(global_batch_size=8, sequence_length=4096),
    )  # fmt: skip
    with pytest.raises(simpar.InputError, match=r"plan\.tp = 3: must divide"):
        simpar.simulate(built)


# -- results ---------------------------------------------------------------------------------------------------------------


def test_result_is_what_the_command_line_prints(result: simpar.Result, capsys: pytest.CaptureFixture[str]) -> None:
    printed = cli_json(capsys, "simulate", SMALL)
    assert json.loads(json.dumps(result.to_dict())) == printed
    for name in ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu", "hfu",
                 "bubble_fraction", "fits", "world_size", "device_memory_bytes", "exposed_communication_s"):  # fmt: skip
        assert getattr(result, name) == printed[name]
    assert result.peak_memory_bytes == printed["peak_memory_bytes"]["device"]
    interval = printed["uncertainty"]["step_time_s"]
    assert result.step_time_interval_s == (interval["low"], interval["high"])


def test_waterfall_and_memory_are_tables(result: simpar.Result) -> None:
    assert sum(result.waterfall.column("seconds")) == pytest.approx(result.step_time_s)
    assert sum(result.waterfall.column("share")) == pytest.approx(1.0)
    four = simpar.simulate(PIPELINED, detail="stage")
    assert four.memory.column("rank") == (0, 1, 2, 3)
    assert max(four.memory.column("device")) == four.peak_memory_bytes
    headline = dict(zip(four.table().column("quantity"), four.table().column("value"), strict=True))
    assert headline["mfu"] == four.mfu
    assert headline["world_size"] == 64


def test_result_shows_itself(result: simpar.Result) -> None:
    assert len(repr(result)) < 160
    assert result.name in repr(result)
    assert f"{result.mfu:.1%}" in repr(result)
    assert "<table>" in result._repr_html_()
    full = simpar.simulate(SMALL, memory_scale=0.3, detail="stage")
    assert "DOES NOT FIT" in repr(full)
    assert not full.fits


def test_figures_and_files(result: simpar.Result, tmp_path: Path) -> None:
    import plotly.graph_objects as go

    from simpar.api.result import FIGURES

    for kind in FIGURES:
        figure = result.figure(kind)
        assert isinstance(figure, go.Figure)
        assert figure.data
    shown = {"s": 1.0, "ms": 1e3}[result.figure().layout.xaxis.title.text.split("(")[1].rstrip(")")]
    assert result.figure().data[0].x[-1] == pytest.approx(result.step_time_s * shown)
    with pytest.raises(simpar.UnknownNameError, match=r"waterfal.*did you mean 'waterfall'"):
        result.figure("waterfal")
    assert result.save_html(tmp_path / "a.html").read_text().startswith("<!")
    assert result.save_trace(tmp_path / "a.json.gz").stat().st_size > 1000
    with pytest.raises(simpar.InputError, match="is a folder"):
        result.save_html(tmp_path)


def test_a_single_gpu_has_an_empty_figure_of_communication() -> None:
    alone = simpar.simulate("mlp-4096x24_a100x8_dp8", num_gpus=1, detail="stage")
    assert not alone.figure("communication").data


def test_compare(result: simpar.Result, capsys: pytest.CaptureFixture[str]) -> None:
    found = simpar.compare(SMALL, SMALL, zero_stage=0)
    again = simpar.compare(result, result, zero_stage=0)
    assert again.second.step_time_s == found.second.step_time_s
    assert simpar.compare(result, found.second).first is result
    row = found.table()[0]
    assert (row["quantity"], row["first"], row["second"]) == ("step_time_s", found.first.step_time_s, found.second.step_time_s)
    assert row["change"] == pytest.approx(found.second.step_time_s / found.first.step_time_s - 1.0)
    assert json.loads(json.dumps(found.to_dict())) == cli_json(capsys, "compare", SMALL, SMALL, "--set", "plan.zero_stage=0")
    assert "plan.zero_stage 1 -> 0" in repr(found)
    assert found.table().title == repr(found).split("'")[1]
    assert found.differences().rows == (("plan.zero_stage", "1", "0"),)
    assert "<td>plan.zero_stage</td>" in found._repr_html_()
    assert "nothing differs" in repr(simpar.compare(result, result))


def test_parts_built_in_code_may_be_changed() -> None:
    base = simpar.load(SMALL)
    parts = {name: part for name in simpar.Scenario.model_fields if (part := getattr(base, name)) is not None}
    assert simpar.simulate(parts, tp=2).step_time_s == simpar.simulate(SMALL, tp=2).step_time_s


def test_a_table_of_the_wrong_type_is_told() -> None:
    for name in ("cluster", "plan", "training"):
        with pytest.raises(simpar.InputError, match=f"{name} = 3: must be a table"):
            simpar.simulate(SMALL, **{name: 3})


def test_sweep_holds_a_row_for_every_combination() -> None:
    found = simpar.sweep(PIPELINED, pp=[2, 4], tp=[4, 3], detail="stage", virtual_stages=1, schedule="1f1b")
    assert [(row["pp"], row["tp"]) for row in found] == [(2, 4), (2, 3), (4, 4), (4, 3)]
    assert [row["reason"].partition(":")[0] for row in found] == ["", "plan.tp = 3", "", "plan.tp = 3"]
    assert found.results[1] is None
    again = simpar.simulate(PIPELINED, detail="stage", pp=4, virtual_stages=1, schedule="1f1b")
    assert found[2]["step_time_s"] == again.step_time_s
    assert found[1]["step_time_s"] is None
    assert found.best is max((found.results[0], found.results[2]), key=lambda r: r.tokens_per_s_per_gpu)
    frame = found.to_pandas()
    assert list(frame.columns) == list(found.columns)
    assert frame["mfu"].notna().tolist() == [True, False, True, False]


def test_the_best_of_a_sweep_fits() -> None:
    found = simpar.sweep(SMALL, memory_scale=[0.3, 1.0], detail="stage")
    assert [row["fits"] for row in found] == [False, True]
    assert found[0]["reason"] == "does not fit the memory"
    assert found.best is found.results[1]
    assert simpar.sweep(SMALL, memory_scale=[0.3], detail="stage").best is None
    with pytest.raises(simpar.InputError, match="lists of values"):
        simpar.sweep(SMALL, tp=2)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    found = simpar.explain("mlp-4096x24_a100x8_dp8", measured={"step_time": 1.0})
    assert json.loads(json.dumps(found.to_dict())) == cli_json(
        capsys, "explain", "mlp-4096x24_a100x8_dp8", "--measured", "step_time=1s"
    )
    assert found.table().column("change")
    assert found.result.name in repr(found)
    for wrong in ({"time": 1.0}, {"step_time": 0.0}):
        with pytest.raises(simpar.InputError, match="a value above 0 of step_time"):
            simpar.explain(found.result, measured=wrong)


def test_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = {"framework": "megatron-core", "fix": {"cp": 1, "pp": 1}, "allow": {"tp": [4, 8]}, "top": 2, "workers": 1}
    found = simpar.search(model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, global_batch=16, sequence_length=4096, **settings)
    printed = cli_json(
        capsys, "search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "16",
        "--sequence-length", "4096", "--framework", "megatron-core", "--fix", "cp=1", "--fix", "pp=1", "--allow", "tp=4,8",
        "--top", "2", "--workers", "1", "--quiet",
    )  # fmt: skip
    told = json.loads(json.dumps(found.to_dict()))
    for document in (told, printed):
        document.pop("seconds")
        document.pop("cpu_s", None)
    assert told["best"] == printed["best"]
    assert told["space_size"] == printed["space_size"] == found.space_size
    assert found.optimality_gap == printed["optimality_gap"]
    assert found.best is not None
    assert found.best.step_time_s == printed["best"][0]["step_time_s"]
    assert found.best.scenario.plan.tp in (4, 8)
    assert simpar.simulate(found.best.scenario).step_time_s == found.best.step_time_s
    assert len(found.table()) == len(found.results) == 2
    assert "a step" in repr(found)
    assert found.save_html(tmp_path / "s.html").stat().st_size > 10_000


def test_search_with_a_store_answers_again(tmp_path: Path) -> None:
    source = simpar.load(model="llama3.1-8b", hardware="dgx-h100", num_nodes=1, global_batch_size=16, sequence_length=4096, tp=8)
    settings = {"fix": {"pp": 1, "cp": 1, "tp": 8, "schedule": "1f1b"}, "framework": "megatron-core",
                "store": tmp_path / "s.sqlite", "top": 1, "workers": 1}  # fmt: skip
    first, again = simpar.search(source, **settings), simpar.search(source, **settings)
    assert again.to_dict()["from_store"]
    assert again.table()[0]["step_time_s"] == first.table()[0]["step_time_s"]
    with pytest.raises(simpar.InputError, match="came from a store"):
        again.save_html(tmp_path / "s.html")


def test_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = simpar.plan("opt-175b_a100x992", repetitions=10, changes={"cluster.spares": 20})
    printed = cli_json(capsys, "plan", "opt-175b_a100x992", "--repetitions", "10", "--set", "cluster.spares=20")
    assert json.loads(json.dumps(found.to_dict())) == printed
    assert found.feasible
    assert found.days == printed["days"]
    assert found.goodput == printed["goodput"]
    assert "days" in repr(found)
    assert "days" in found.table().column("quantity")
    assert found.save_html(tmp_path / "p.html").stat().st_size > 10_000


# -- tables ----------------------------------------------------------------------------------------------------------------


def test_table_prints_its_cells() -> None:
    table = Table.of([{"a": "x<y", "n": 12345.678}, {"a": "z", "n": None, "ok": True}], "two rows")
    assert repr(table) == "two rows\na         n   ok\nx<y  12,346\nz            yes"
    assert "x&lt;y" in table._repr_html_()
    assert table.to_dicts() == [{"a": "x<y", "n": 12345.678, "ok": None}, {"a": "z", "n": None, "ok": True}]
    assert table.column("a") == ("x<y", "z")
    assert table[1]["ok"] is True
    assert len(table) == 2
    with pytest.raises(simpar.UnknownNameError, match="column 'b'"):
        table.column("b")


def test_long_tables_say_how_long() -> None:
    table = Table(("i",), tuple((i,) for i in range(100)))
    assert repr(table).endswith("59\n... 100 rows")
    assert "100 rows" in table._repr_html_()
    assert len(table.to_pandas()) == 100


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("to_polars", "polars")])
def test_frames_say_what_they_need(method: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(simpar.InputError, match=f"pip install {package}"):
        getattr(Table(("a",), ((1,),)), method)()


def test_polars_gets_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    fake = types.ModuleType("polars")
    fake.DataFrame = lambda rows, **_: rows
    monkeypatch.setitem(sys.modules, "polars", fake)
    assert Table(("a",), ((1,), (2,))).to_polars() == [{"a": 1}, {"a": 2}]


# -- types -----------------------------------------------------------------------------------------------------------------

USERS_SCRIPT = """
import simpar

result: simpar.Result = simpar.simulate("70b.toml", pp=8, cluster={"num_nodes": 16})
seconds: float = result.step_time_s
low, high = result.step_time_interval_s
for row in result.waterfall:
    print(row["part"], row["seconds"])
table = simpar.sweep("70b.toml", pp=[2, 4, 8], tp=[4, 8])
best: simpar.Result | None = table.best
scenario = simpar.Scenario(
    name="mine", model=simpar.load_model("llama3.1-8b"), cluster=simpar.Cluster(hardware="dgx-h100", num_nodes=1),
    plan=simpar.Plan(tp=8), training=simpar.Training(global_batch_size=8, sequence_length=4096),
)
found: simpar.SearchResult = simpar.search(scenario, framework="megatron-core", fix={"cp": 1}, top=3)
days: dict[str, float] | None = simpar.plan("opt-175b_a100x992", repetitions=10).days
try:
    simpar.explain(simpar.load("70b.toml"), measured={"step_time": 12.3})
except simpar.InputError as error:
    print([violation.field for violation in error.violations])
"""


def test_mypy_strict_accepts_a_users_script(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "good.py").write_text(USERS_SCRIPT)
    (tmp_path / "bad.py").write_text('import simpar\nx: str = simpar.simulate("a").step_time_s\nsimpar.search(depth=3)\n')
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path / "cache"),
               "--follow-imports", "silent", "good.py", "bad.py"]  # fmt: skip
    root = str(Path(simpar.__file__).parent.parent)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MYPYPATH": root})
    wrong = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert {line.partition(":")[0] for line in wrong} == {"bad.py"}, done.stdout
    assert len(wrong) == 2
