"""Rows as other files write them: fields left out, null, of another type, or of a value that no rule knows.

Every row comes out predicted or named with a reason; none breaks the run, none is lost.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.evidence.predicted import Prediction, predict
from simpar.evidence.report_runs import print_report
from simpar.evidence.row_framework import NEAREST, PRECISIONS
from simpar.evidence.row_machine import MACHINES
from simpar.evidence.row_values import COUNTS, FLAGS, MEASURED, TEXTS, read_values
from simpar.evidence.run_rows import run_of
from simpar.evidence.runs import FAULT, validate_runs
from simpar.schedules import SCHEDULES
from simpar.specs.framework_releases import ALIASES
from simpar.specs.framework_rows import FRAMEWORKS

DENSE: dict[str, Any] = {
    "id": "dense", "source": "somewhere", "source_version": "2025-03", "task": "pretrain", "model_name": "Llama-8B",
    "arch": "dense",
    "layers": 8, "hidden": 1024, "ffn": 3584, "heads": 8, "kv_heads": 4, "head_dim": 128, "vocab": 32000, "seq_len": 2048,
    "mlp_type": "swiglu", "position": "rope", "flash_attention": True, "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 16,
    "gpus_per_node": 8, "interconnect": "8x NDR400 IB", "tp": 2, "sp": True, "pp": 2, "vpp": 2, "cp": 1, "ep": 1, "dp": 4,
    "zero_stage": 1, "dist_opt": True, "micro_batch": 1, "global_batch": 16, "grad_accum": 4, "pp_schedule": "interleaved 1f1b",
    "recompute": "none", "precision": "bf16", "optimizer": "AdamW", "framework": "Megatron-LM",
    "framework_version": "core 0.13",
    "overlap_grad_reduce": True, "step_time_s": 0.5, "mem_gib": 20.0, "mem_kind": "max reserved", "oom": False,
    "assumed": ["vocab"],
    "extra": {"zero1_group": 4}, "notes": "measured",
}  # fmt: skip
SHARDED = {
    **DENSE, "id": "sharded", "tp": 1, "sp": False, "pp": 1, "vpp": 1, "dp": 16, "zero_stage": 3, "fsdp": "fsdp2",
    "grad_accum": None,
    "recompute": "full", "framework": "torchtitan (PyTorch FSDP2)", "framework_version": "2025-03", "hsdp_replicas": 2,
    "compile": True,
    "precision": "fp8 rowwise + bf16", "step_time_s": None, "tokens_per_s_per_gpu": 20000.0, "pp_schedule": None,
}  # fmt: skip
EXPERTS = {
    **DENSE, "id": "experts", "arch": "moe-mla", "moe_experts": 8, "moe_topk": 2, "moe_ffn": 512, "moe_shared_ffn": 512,
    "moe_dense_layers": 1, "dense_ffn": 3584, "mla": "q_lora 256, kv_lora 128, qk_nope 128, qk_rope 64, v 128", "mtp_layers": 1,
    "ep": 4, "etp": 1, "tp": 1, "sp": False, "dp": 8, "grad_accum": 2, "moe_routing": "force-balanced; dispatcher deepep",
    "cuda_graphs": "none/[]", "gpu": "GB200", "gpus_per_node": 4, "gpu_mem_gb": 186, "precision": "MXFP8",
}  # fmt: skip
SEEDS = (DENSE, SHARDED, EXPERTS)
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.sampled_from([0, 10**12, 4_194_304, 1e30, float("nan"), float("inf"),
    -1.5, 2.5]),
    st.sampled_from(["", "8", "n/a", "?", "unknown", "none", "auto", "8k", "1,024", "yes", "-1", "NaN", "8 per node",
    "\u00e9", "x" * 300]),
    st.just([]), st.just([1, "a"]), st.just({}), st.just({"a": [1]}),
)  # fmt: skip
KNOWN: dict[str, st.SearchStrategy[Any]] = {
    "gpu": st.sampled_from(["NVIDIA " + re.sub(r"[.*?()\[\]]|\|.*", "", rule.gpu) for rule in MACHINES] + ["Gaudi 3", "TPU v5e"]),
    "framework": st.sampled_from([*FRAMEWORKS, *ALIASES, *(re.sub(r"\\b|\|.*|[.*?()\[\]]", "", rule[0]) for rule in NEAREST)]),
    "precision": st.sampled_from([name for _, name in PRECISIONS]),
    "pp_schedule": st.sampled_from([*SCHEDULES, "dualpipe", "something of our own"]),
    "gpus_per_node": st.sampled_from([1, 2, 3, 4, 6, 8, 16, 72]),
    "recompute": st.sampled_from(["none", "full", "selective", "selective modules", "activation checkpointing", True, False]),
    "pp_layout": st.sampled_from(["Et*4|(t*4|)*14tmL", "first/last stage one layer fewer", "E|t*8L", "uneven"]),
    "interconnect": st.sampled_from(["100 GbE", "4x Slingshot 11", "NVLink", "8x EFA 100 Gbps", "2 x 25 Gb/s per node"]),
    "task": st.sampled_from(["pretrain", "sft", "lora", "lora (rank 32, all-linear)", "dpo", "layer microbenchmark"]),
    "arch": st.sampled_from(
        ["dense", "moe", "moe-mla", "hybrid mamba2/attention", "dense (parallel block + sliding window)", "dit"]
    ),
}
"""Values that rules know, or that runs of the field have, by column."""


def retyped(value: Any) -> st.SearchStrategy[Any]:
    """`value` as another writer may put it."""
    if isinstance(value, bool):
        return st.sampled_from([str(value), str(value).lower(), int(value), "on" if value else "off"])
    if isinstance(value, int | float):
        return st.sampled_from([str(value), float(value), f" {value} ", f"{value:,}"])
    return st.sampled_from([value, [value], str(value).upper()])


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A seed with some columns changed, as many as a row of another source differs in."""
    row = {key: value for key, value in draw(st.sampled_from(SEEDS)).items() if value is not None}
    columns = sorted({*COUNTS, *MEASURED, *FLAGS, *TEXTS, "assumed", "extra"} - {"exclude"})
    for column in draw(st.lists(st.sampled_from(columns), max_size=5, unique=True)):
        how = draw(st.sampled_from(["drop", "retype", "odd", "known"]))
        if how == "drop":
            row.pop(column, None)
        elif how == "retype" and column in row:
            row[column] = draw(retyped(row[column]))
        else:
            row[column] = draw(KNOWN[column] if how == "known" and column in KNOWN else ODD)
    return row


@given(rows())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({})
@example({"extra": "text", "assumed": 3, "n_gpus": "eight", "mem_gib": "lots", "bubble_fraction": "?", "step_time_s": {}})
def test_every_row_becomes_a_scenario_or_a_reason(row: dict[str, Any]) -> None:
    run = run_of(row, "line 1")
    assert (run.scenario is None) <= bool(run.skipped)
    assert run.skipped.strip() == run.skipped
    assert all(isinstance(note, str) and note for note in run.assumptions)
    assert json.loads(json.dumps(run.group)) == run.group
    assert len({repr(value): value for value in run.group.values()}) <= len(run.group)
    hash(tuple(run.group.values()))


@given(
    st.lists(rows(), min_size=1, max_size=6), st.sampled_from(["n_gpus>=8", "source=some", "assumed!=x", "tp<3", "oom=false", ""])
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_row_of_a_file_is_predicted_or_named(found: list[dict[str, Any]], where: str) -> None:
    report = reported(found, predict_nothing)
    assert len(report["named"]) + report["predicted"] == len(found)
    assert not [reason for reason in report["named"] if FAULT in reason or "xception" in reason or not reason]
    again = reported(found, predict_nothing, where)
    # A condition that no row meets is told.
    assert f"--where {where}" in again.get("message", f"--where {where}")


@given(rows())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_scenario_of_a_row_can_be_predicted(row: dict[str, Any]) -> None:
    report = reported([row], predict)
    assert not [reason for reason in report["named"] if FAULT in reason], report["named"]


def predict_nothing(scenario: Any) -> Prediction:
    """Stands for the simulator, which is not what is tested here."""
    ranks = (1e9,) * scenario.plan.pp
    return Prediction(
        step_time_s=1.0, step_low_s=0.9, step_high_s=1.1, bubble_fraction=0.1, busiest_bubble_fraction=0.1,
        allocated_bytes=1e9, reserved_bytes=1e9, device_bytes=1e9, state_bytes=1e9,
        allocated_per_rank=ranks,
        reserved_per_rank=ranks, fits=True, waterfall={},
    )  # fmt: skip


def reported(found: list[dict[str, Any]], predictor: Any, where: str = "") -> dict[str, Any]:
    """The reasons of rows without a prediction and the number of those with one, from the whole report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        try:
            report = validate_runs(path, [where] if where else [], workers=1, predictor=predictor)
        except InputError as error:
            return {"message": str(error)}
        print_report(report, as_json=True)
    named = [reason for reason, ids in report.not_expressed.items() for _ in ids]
    return {"named": named, "predicted": len(found) - len(named)}


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed["id"])
def test_the_seeds_are_predicted(seed: dict[str, Any]) -> None:
    run = run_of(seed)
    assert run.skipped == ""
    assert run.scenario is not None
    assert predict(run.scenario).step_time_s > 0


@given(st.sampled_from(sorted(COUNTS)), st.integers(1, 10**6))
def test_a_whole_number_reads_the_same_however_it_is_written(column: str, value: int) -> None:
    for written in (value, float(value), str(value), f" {value:,} "):
        read = read_values({column: written})
        assert read.row.get(column) == value or column in read.wrong
        assert (column in read.wrong) == (column in read_values({column: value}).wrong)
