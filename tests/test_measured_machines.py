"""A calibrated machine: what was measured stands, and which accelerator it is follows from its figures, not from its name."""

from __future__ import annotations

import html
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from simpar.costs.pricer import LayoutPricer
from simpar.live.profile_out import write
from simpar.live.store import Store
from simpar.parallel.layout import Layout
from simpar.parallel.work import AttentionWork, Gemm
from simpar.report.step_html import step_page
from simpar.report.step_table import step_report
from simpar.specs.calibration import Constant, RunCalibration, calibrated_by
from simpar.specs.framework import framework_names
from simpar.specs.scenario import make_scenario
from simpar.step import prepare

MACHINE = {
    "key": "machine", "kind": "machine", "device": "cuda", "date": "2026-11-22", "torch": "2.13.0", "name": "NVIDIA H100 80GB HBM3",
    "cores": 64, "threads": 1, "memory_bytes": 85000000000, "sm_count": 132, "capability": [9, 0],
}  # fmt: skip
ATTENTION_S, PRODUCT_S = 3.1e-3, 0.9e-3


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An H100 with two measured shapes."""
    folder = tmp_path_factory.mktemp("machine")
    store = Store(folder / "s.jsonl")
    store.append(MACHINE)
    for key, op, shape, seconds in (
        ("a", "attention", [1, 8192, 8192, 32, 8, 128], ATTENTION_S), ("g", "gemm", [8192, 6144, 4096], PRODUCT_S),
    ):  # fmt: skip
        store.append({"key": key, "kind": "shape", "point": op, "shape": shape, "dtype": "bf16", "direction": "forward",
                      "seconds": seconds, "spread": 0.01})  # fmt: skip
    write(store, folder / "mine.toml")
    return folder / "mine.toml"


def layout(hardware: str, framework: str = "torchtitan") -> Layout:
    """Llama 8B over eight ranks."""
    return Layout.of(make_scenario({
        "name": "x", "model": "llama3.1-8b", "framework": framework, "cluster": {"hardware": hardware, "num_nodes": 1},
        "plan": {"dp": 8, "zero_stage": 3}, "training": {"sequence_length": 8192, "global_batch_size": 8},
    }), 1)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(framework_names())), factor=st.floats(1.05, 1.6), step_s=st.floats(1e-3, 1.0))
def test_no_factor_of_published_runs_applies(profile: Path, name: str, factor: float, step_s: float) -> None:
    values = {"compute": factor, "memory": factor, "communication": factor, "pass_s": 1e-3, "step_s": step_s, "expected_error": 0.1}
    everywhere = tuple(Constant(name=constant, value=value) for constant, value in values.items())
    with calibrated_by(everywhere):
        here, shipped = layout(str(profile), name), layout("dgx-h100", name)
        assert here.calibration == RunCalibration(expected_error=0.1)
        assert here.calibration.expected_error == here.published_calibration.expected_error == 0.1
        assert here.published_calibration.compute == shipped.calibration.compute == factor


def test_a_measured_point_is_the_price(profile: Path) -> None:
    priced = prepare(layout(str(profile)).scenario, detail="op")
    pricer = LayoutPricer(priced.layout, *_models(priced))
    ops = [op for block in priced.layout.stage_blocks[0] for op in block.forward]
    attention = next(op for op in ops if isinstance(op.work, AttentionWork))
    product = next(op for op in ops if isinstance(op.work, Gemm) and op.work.n == 6144)
    assert pricer.op_price(attention).seconds == pytest.approx(ATTENTION_S, rel=1e-12)
    assert pricer.op_price(product).seconds == pytest.approx(PRODUCT_S, rel=1e-12)


def _models(priced: object) -> tuple[object, ...]:
    from simpar.step import cost_models

    return cost_models(priced.layout.scenario, priced.layout.hardware)  # type: ignore[attr-defined]


def test_megatron_on_a_calibrated_h100_is_told_the_same_constants(profile: Path) -> None:
    here, shipped = layout(str(profile), "megatron-core"), layout("dgx-h100", "megatron-core")
    assert here.published_calibration == shipped.calibration


def test_what_published_clusters_add_is_a_line_of_its_own(profile: Path) -> None:
    from simpar.step import simulate

    # Of a family and machine that something is fitted for.
    found = simulate(layout(str(profile), "torch-fsdp").scenario)
    constants = layout("dgx-h100", "torch-fsdp").calibration
    assert len(found.notes) == 1
    assert constants.compute != 1.0
    assert f"memory x {constants.memory:.3g}" in found.notes[0]
    assert f"compute x {constants.compute:.3g}" in found.notes[0]
    assert f"{1e3 * constants.step_s:.3g} ms a step" in found.notes[0]
    assert found.to_json()["notes"] == list(found.notes)
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(step_report(found))
    assert f"note: {found.notes[0]}" in console.export_text()
    assert html.escape(found.notes[0]) in step_page(found)
    assert simulate(layout("dgx-h100", "torch-fsdp").scenario).notes == ()
