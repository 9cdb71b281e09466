"""Stored runs: a flat row and what is stored of it are the same run; what single sources' documents add; shares of stated facts."""

from __future__ import annotations

import importlib.util
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from simpar.evidence.run_rows import read_rows, run_of
from simpar.evidence.runs import validate_runs
from simpar.specs.base import stored_runs
from simpar.specs.open_values import PRIORS, is_open
from validation.tools.priors import priors, shares
from validation.tools.store_runs import as_stored

TOOL = Path(__file__).resolve().parents[1] / "validation" / "tools" / "store_runs.py"
FLAT = Path(__file__).parent / "data" / "measured" / "runs" / "runs.jsonl"
GPT_175B = {
    "id": "175b", "source": "Narayanan et al. 2021 (arXiv 2104.04473)", "model_name": "GPT-175B", "layers": 96, "hidden": 12288,
    "ffn": 49152, "heads": 96, "seq_len": 2048, "mlp_type": "gelu", "gpu": "A100", "gpu_mem_gb": 80, "gpus_per_node": 8,
    "n_gpus": 384, "tp": 8, "pp": 12, "dp": 4, "global_batch": 1536, "precision": "fp16", "zero_stage": 0, "recompute": "full",
    "framework": "Megatron-LM", "framework_version": "2021", "step_time_s": 80.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> Any:
    """The script that reads flat rows once."""
    spec = importlib.util.spec_from_file_location("store_runs", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(step: int) -> list[dict[str, Any]]:
    return [row for _, row in islice(read_rows(FLAT), 0, None, step)]


def test_a_stored_run_is_the_run_of_its_flat_row() -> None:
    seen = set()
    for row in flat(5):
        run = run_of(row, "x")
        again = run_of(json.loads(json.dumps(as_stored(run, "test"))), "x")
        assert again.scenario == run.scenario
        assert json.dumps(again.table) == json.dumps(run.table)
        assert (again.id, again.measured, again.skipped, again.excluded) == (run.id, run.measured, run.skipped, run.excluded)
        assert again.group == run.group
        seen |= set(again.open_facts)
    assert "plan.recompute" in seen


def test_what_a_source_leaves_open_is_unknown_in_the_file() -> None:
    stored = as_stored(run_of({**GPT_175B, "recompute": None}), "fit")
    assert {p for p in ("recompute", "virtual_stages") if is_open(stored["scenario"]["plan"][p])} == {"recompute", "virtual_stages"}
    assert is_open(stored["scenario"]["training"]["micro_batch_size"])
    assert stored["usual"]["plan.virtual_stages"] == 1
    assert stored["use"] == "fit"
    table = run_of(stored).table
    assert table is not None
    assert table["plan"]["virtual_stages"]["any_of"][0] == 1
    assert table["plan"]["virtual_stages"]["weights"][0] == pytest.approx(0.7)


def test_a_stored_run_may_list_what_an_unknown_fact_can_be() -> None:
    stored = as_stored(run_of({**GPT_175B, "recompute": None}), "fit")
    stored["scenario"]["plan"]["recompute"] = {"any_of": ["full", "none"], "weights": [0.9, 0.1]}
    stored["usual"]["plan.recompute"] = "none"
    run = run_of(stored)
    assert run.scenario is not None
    assert run.table is not None
    assert run.scenario.plan.recompute == "none"
    assert run.table["plan"]["recompute"] == {"any_of": ["full", "none"], "weights": [0.9, 0.1]}


def test_facts_of_one_source_come_from_the_script_alone(tool: Any) -> None:
    plain = run_of(GPT_175B).scenario
    added = run_of(tool.amended(GPT_175B)).scenario
    assert plain is not None
    assert added is not None
    assert (plain.plan.virtual_stages, added.plan.virtual_stages, added.training.micro_batch_size) == (1, 4, 1)
    stated = run_of(tool.amended({**GPT_175B, "vpp": 2, "micro_batch": 2})).scenario
    assert stated is not None
    assert (stated.plan.virtual_stages, stated.training.micro_batch_size) == (2, 2)
    computed = {**GPT_175B, "source": "vTrain (MICRO 2024)", "assumed": ["recompute as in config/validation/single"]}
    assert "another simulator" in run_of(tool.amended(computed)).excluded
    assert not run_of(computed).excluded
    fused = tool.amended({**GPT_175B, "source": "Hagemann et al. 2023", "framework": "AA-Scaling", "notes": "RMS kernel"})
    assert run_of(fused).scenario.framework == "aa-scaling-fused-norm"  # type: ignore[union-attr]
    bloom = tool.stored({**GPT_175B, "source": "BLOOM-176B chronicles (bigscience)"}, "x", "fit")
    assert run_of(bloom).scenario.model.position == "alibi"  # type: ignore[union-attr]


def test_the_shipped_runs_are_scenarios_with_sources() -> None:
    """One in 40 in full; of all, that they say where they are from and whether a fit saw them."""
    count = 0
    for index, (name, row) in enumerate(read_rows(stored_runs())):
        count += 1
        assert row["group"].get("source"), name
        assert row["use"] in ("fit", "test"), name
        assert row["scenario"] or row["skipped"], name
        if index % 40 == 0:
            run = run_of(row, name)
            assert (run.scenario is None) == bool(run.row.get("skipped")), f"{name}: {run.skipped}"
    assert count > 3000


def test_stored_runs_are_validated_like_flat_rows(tmp_path: Path) -> None:
    rows = [row for row in flat(1) if run_of(row).scenario and row.get("step_time_s") and row.get("n_gpus", 99) <= 8][:2]
    (tmp_path / "flat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "stored"
    folder.mkdir()
    for index, row in enumerate(rows):
        (folder / f"{index}.jsonl").write_text(json.dumps(as_stored(run_of(row), "test")) + "\n")
    one, other = (validate_runs(path, workers=1) for path in (tmp_path / "flat.jsonl", folder))
    assert one.rows == other.rows
    assert one.rows
    assert validate_runs(folder, ["n_gpus<=8", f"source={rows[0]['source'][:8]}"], workers=1).rows


def test_a_broken_stored_run_says_why() -> None:
    stored = as_stored(run_of(GPT_175B), "test")
    wrong = {**stored, "scenario": {**stored["scenario"], "plan": {**stored["scenario"]["plan"], "tp": 7}}}
    assert "not a valid scenario" in run_of(wrong).skipped
    assert "unexpected value" in run_of({**stored, "usual": {"nothing.at_all": 1}}).skipped


def test_priors_are_what_the_stored_runs_state() -> None:
    found = priors()
    assert found == PRIORS
    run = {"scenario": {"plan": {"recompute": "full"}, "training": {}}, "group": {"source": "a"}}
    other = {"scenario": {"plan": {"recompute": {"granularity": "selective"}}, "training": {}}, "group": {"source": "b"}}
    silent = {"scenario": {"plan": {"recompute": {"unknown": True}}, "training": {}}, "group": {"source": "c"}}
    assert shares([run, run, run, other, silent], "plan.recompute") == {"full": 0.5, "selective": 0.5}


def test_tables_that_add_one_technique_a_row_have_none_before_its_row(tool: Any) -> None:
    row = {**GPT_175B, "source": "torchtune README", "source_ref": "optimization tables", "framework": "torchtune", "tp": 1,
           "pp": 1, "model_name": "Llama-3.2-3B", "n_gpus": 1, "dp": 1, "global_batch": 2,
           "framework_version": "2025-03"}  # fmt: skip
    found = {name: run_of(tool.amended({**row, "id": f"tune-3b-{name}"})).scenario for name in ("packed", "ac")}
    assert {name: (s.training.cross_entropy, s.framework_version) for name, s in found.items() if s is not None} == {
        "packed": ("unfused", "2024-11"), "ac": ("auto", "2024-11"),
    }  # fmt: skip


def test_a_stated_dropout_counts_and_an_unstated_one_is_the_frameworks(tool: Any) -> None:
    row = {
        **GPT_175B,
        "source": "FlagPerf",
        "source_ref": "training/nvidia/llama3_8B-megatron/README.md",
        "framework_version": "2024-05",
    }
    rates = [run.scenario.training.dropout for run in (run_of(row), run_of(tool.amended(row))) if run.scenario is not None]
    assert rates == [0.0, 0.1]


def test_performance_scripts_of_megatron_bridge_ask_for_the_engines_loss(tool: Any) -> None:
    row = {**GPT_175B, "source": "NVIDIA Megatron-Bridge performance summary", "framework": "Megatron-Bridge"}
    found = [
        run_of(tool.amended({**row, "id": f"bridge-{version}-1", "framework_version": f"NeMo {version}"})).scenario
        for version in ("25.09", "25.11")
    ]
    assert [s.training.cross_entropy for s in found if s is not None] == ["fused", "auto"]
