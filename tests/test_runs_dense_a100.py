"""Rules behind the dense runs on A100: gradients of fp16 runs, heads that tensor cores do not take, vTrain's computed table."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from simpar.costs.kernels import KernelModel
from simpar.parallel.keys import Gather, Send
from simpar.parallel.layout import Layout
from simpar.simulate import prepare
from simpar.specs.framework import framework
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import read_scenario
from simpar.validation.row_framework import framework_of
from simpar.validation.run_rows import run_of

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "scenarios" / "gpt3-175b_a100x384_tp8pp12.toml"
DATA = Path(os.environ.get("SIMPAR_SHARED_DATA", ROOT.parent / "shared" / "data")) / "runs" / "runs.jsonl"
A100 = KernelModel(load_hardware("dgx-a100-80gb"))
GPT_175B = {
    "source": "a table", "model_name": "GPT-175B", "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "seq_len": 2048,
    "mlp_type": "gelu", "gpu": "A100", "gpu_mem_gb": 80, "gpus_per_node": 8, "n_gpus": 384, "tp": 8, "pp": 12, "dp": 4,
    "global_batch": 1536, "precision": "fp16", "zero_stage": 0, "recompute": "full", "framework": "Megatron-LM",
    "framework_version": "2021", "step_time_s": 80.0,
}  # fmt: skip


def test_gradients_of_fp16_runs_may_have_a_type_of_their_own() -> None:
    spec = replace(framework("megatron-core", "2023-09"), gradient_dtype="fp32", gradient_dtype_fp16="fp16")
    assert (spec.gradients("fp16"), spec.gradients("bf16")) == ("fp16", "fp32")
    assert replace(spec, gradient_dtype_fp16=None).gradients("fp16") == "fp32"
    for dtype, size in (("fp16", 2.0), ("fp32", 4.0)):
        layout = Layout.of(read_scenario(SCENARIO, [f"training.gradient_dtype={dtype}"]), 1)
        assert layout.state_bytes.gradient == layout.state_bytes.reduce == size


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_products_over_unaligned_heads_run_outside_tensor_cores(direction: str) -> None:
    def seconds(width: int, kernel: str = "unfused") -> float:
        return A100.attention(4, 2048, 2048, 12, 12, width, kernel=kernel, direction=direction).seconds  # type: ignore[arg-type]

    # 8 columns more cost nothing like the four- to tenfold that leaving the tensor cores does.
    assert seconds(144) < 1.1 * seconds(152)
    for width in (150, 108):
        assert seconds(width) > 3.0 * seconds(width + 4 if width == 108 else 152)
    products = 2.0 if direction == "forward" else 4.0
    least = products * 2.0 * 4 * 12 * 2048**2 * 150 / A100.hardware.peak_flops_per_s("fp32")
    assert seconds(150) > least


def test_sends_of_nanotron_stall_where_the_tensor_group_spans_more_than_two_nodes() -> None:
    def send_s(tp: int, name: str = "nanotron") -> float:
        scenario = read_scenario(SCENARIO, [
            f"framework={name}", "plan.pp=2", "plan.recompute=none", f"plan.tp={tp}"])  # fmt: skip
        priced = prepare(scenario, detail="stage")
        return max(p.seconds for p, k in zip(priced.prices, priced.program.price_keys, strict=True) if isinstance(k, Send))

    stall = framework("nanotron").far_send_s
    assert stall > 0
    assert send_s(16) < stall < send_s(32)
    assert send_s(32, "megatron-core") < stall


def test_the_175b_run_of_2021_has_two_layers_per_chunk() -> None:
    run = run_of({**GPT_175B, "assumed": ["schedule: interleaved presumed where divisible"]})
    assert run.scenario is not None, run.skipped
    assert run.scenario.plan.virtual_stages == 4


def test_what_a_row_assumes_tells_vtrains_own_predictions_from_megatron_runs() -> None:
    table = {"framework": "Megatron-LM", "assumed": ["recompute as in config/validation/single"]}
    assert framework_of(table)[0] == "vtrain"
    assert framework_of({"framework": "Megatron-LM"})[0] == "megatron-core"


@pytest.mark.skipif(not DATA.is_file(), reason="measured runs are not here")
def test_vtrains_single_node_table_is_computed() -> None:
    """No measured step is a straight line in the number of micro-batches to a millionth."""
    lines: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    with DATA.open(encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            if framework_of(row)[0] == "vtrain":
                key = tuple(row[name] for name in ("layers", "hidden", "tp", "pp", "dp", "micro_batch"))
                lines[key][row["grad_accum"]] = row["step_time_s"]
    checked = 0
    for times in lines.values():
        counts = sorted(times)
        if len(counts) >= 3:
            first, *others = ((times[b] - times[a]) / (b - a) for a, b in pairwise(counts))
            assert all(abs(slope / first - 1.0) < 1e-6 for slope in others)
            checked += 1
    assert checked >= 50


def test_zero3_of_2021_moves_weights_no_faster_than_a_part_of_one_adapter() -> None:
    def gather_s(month: str) -> float:
        scenario = read_scenario(SCENARIO, [
            "framework=deepspeed", f"framework_version={month}", "plan.tp=1", "plan.pp=1", "plan.dp=384",
            "plan.zero_stage=3"])  # fmt: skip
        layout = Layout.of(scenario, 1)
        parameters = layout.block_parameters(0, 1, 2)[0]
        priced = prepare(scenario, detail="stage")
        seconds = [p.seconds for p, k in zip(priced.prices, priced.program.price_keys, strict=True) if k == Gather(0, 1, 2)]
        least = 2.0 * parameters / (0.66 * layout.hardware.nic.bandwidth.value)
        assert (seconds[0] == pytest.approx(least)) == (month < "2022")
        return seconds[0]

    assert gather_s("2021-07") > 3.0 * gather_s("2022-07")
