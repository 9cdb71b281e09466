"""Shapes of a run, timed in this very process, become prices; every kind of shape runs; wrong files are told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

from simpar.costs.kernels import KernelModel
from simpar.costs.price import Provenance
from simpar.live import bench_host, bench_shapes
from simpar.live.bench_collectives import Group
from simpar.live.calibrate import Options, calibrate, checked
from simpar.live.cluster_layouts import parse_layouts
from simpar.live.cluster_predict import Setup, predict
from simpar.live.cluster_shapes import collectives_of, shapes_of
from simpar.live.measure import Clock
from simpar.live.store import CalibrationError
from simpar.parallel.work import Gemm
from simpar.specs.hardware import load_hardware

pytestmark = pytest.mark.torch
SMALL = {
    "kind": "transformer", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32,
}  # fmt: skip
MOE = {**SMALL, "moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}}
BATCH = {"sequence_length": 8, "global_batch_size": 4, "micro_batch_size": 1}
LAYOUTS = "dp2,fsdp2,tp2sp,pp2-zbv,cp2-ulysses,ep2dp2,mlp-tp2"


@pytest.fixture(scope="module")
def setup() -> Setup:
    models: dict[str, dict[str, Any]] = {"transformer": SMALL, "moe": MOE, "mlp": {"kind": "mlp", "width": 16, "depth": 2}}
    return Setup(models, dict.fromkeys(models, BATCH) | {"mlp": {**BATCH, "sequence_length": 1}}, "cpu-gloo")


def test_every_shape_of_the_layouts_becomes_a_measured_price(tmp_path: Path, setup: Setup) -> None:
    predictions = [predict(layout, setup) for layout in parse_layouts(LAYOUTS)]
    shapes = shapes_of(predictions)
    listed = tmp_path / "shapes.json"
    listed.write_text(json.dumps({"shapes": shapes, "collectives": collectives_of(predictions)}))
    out = tmp_path / "mine.toml"
    lines: list[str] = []
    assert calibrate(Options(out, 0.0, out.with_suffix(".jsonl"), device="cpu", shapes=listed), lines.append) == 0
    profile = load_hardware(str(out))
    assert profile.node.cores is not None
    model = KernelModel(profile)
    for shape in shapes:
        if shape["op"] == "gemm":
            m, n, k = shape["shape"]
            adds = shape["direction"] == "wgrad_accumulate"
            price = model.gemm(Gemm(m, n, k, dtype="fp32", direction="wgrad" if adds else shape["direction"], accumulate_fp32=adds))
            assert price.provenance is Provenance.MEASURED, shape
        elif shape["op"] == "memory":
            assert model.memory_bound(shape["kernel"], float(shape["shape"][0])).provenance is Provenance.MEASURED, shape
    # Continued, nothing is measured twice that is narrow, and the profile is the same kind of file.
    again: list[str] = []
    resumed = Options(out, 0.0, out.with_suffix(".jsonl"), resume=True, device="cpu", shapes=listed)
    assert calibrate(resumed, again.append) == 0
    assert len(again) <= len(lines)


def test_samples_are_positive_and_stop_when_the_time_is_up() -> None:
    group = Group("cpu", 5.0)
    shape = {"op": "gemm", "shape": [8, 8, 8], "dtype": "fp32", "direction": "forward"}
    (case,) = bench_shapes.cases([shape, shape], "cpu")
    samples = bench_host.measure_shape(case.build, group, Clock("cpu"), 0.0)
    assert len(samples) == bench_host.CHUNK
    assert min(samples) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ('{"shapes": []}', "must be JSON with the lists"),
        ('{"shapes": [{"op": "fft", "shape": [8]}], "collectives": []}', "no such op; known: gemm"),
    ],
)
def test_wrong_shape_files_are_told(tmp_path: Path, text: str, message: str) -> None:
    listed = tmp_path / "shapes.json"
    listed.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        calibrate(Options(None, 0.0, tmp_path / "store.jsonl", device="cpu", shapes=listed))
    with pytest.raises(CalibrationError, match="no such file"):
        checked(Options(tmp_path / "o.toml", device="cpu", shapes=tmp_path / "none.json"), None)
