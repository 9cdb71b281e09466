"""Rules behind the dense runs on A100: gradients of fp16 runs, heads that tensor cores do not take, vTrain's computed table."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.costs.compute import ODD_ROWS, unaligned
from simpar.costs.kernels import KernelModel
from simpar.model.network import padded_vocabulary
from simpar.parallel.keys import Send
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import send_collectives
from simpar.parallel.work import AttentionWork, Collective, Gemm, LocalOp, MemoryWork
from simpar.result.stage_ends import kept_outputs, last_outputs
from simpar.specs.calibration import constant
from simpar.specs.framework import framework
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import read_scenario
from simpar.step import simulate

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "scenarios" / "gpt3-175b_a100x384_tp8pp12.toml"
DATA = Path(os.environ.get("SIMPAR_SHARED_DATA", Path(__file__).parent / "data" / "measured")) / "runs" / "runs.jsonl"
A100 = KernelModel(load_hardware("dgx-a100-80gb"))
GPT_175B = {
    "source": "a table", "model_name": "GPT-175B", "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "seq_len": 2048,
    "mlp_type": "gelu", "gpu": "A100", "gpu_mem_gb": 80, "gpus_per_node": 8, "n_gpus": 384, "tp": 8, "pp": 12, "dp": 4,
    "global_batch": 1536, "precision": "fp16", "zero_stage": 0, "recompute": "full", "framework": "Megatron-LM",
    "framework_version": "2021", "step_time_s": 80.0,
}  # fmt: skip


def test_gradients_of_fp16_runs_may_have_a_type_of_their_own() -> None:
    spec = framework("megatron-core", "2023-09").changed({"gradient_dtype": "fp32", "gradient_dtype_fp16": "fp16"})
    assert (spec.optimizer.gradients("fp16", 4), spec.optimizer.gradients("bf16", 4)) == ("fp16", "fp32")
    assert spec.changed({"gradient_dtype_fp16": None}).optimizer.gradients("fp16", 4) == "fp32"
    for dtype, size in (("fp16", 2.0), ("fp32", 4.0)):
        layout = Layout.of(read_scenario(SCENARIO, [f"training.gradient_dtype={dtype}"]), 1)
        assert layout.state_bytes.gradient == layout.state_bytes.reduce == size


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_products_over_unaligned_heads_run_outside_tensor_cores(direction: str) -> None:
    def seconds(width: int, kernel: str = "unfused") -> float:
        return A100.attention(
            AttentionWork(4, 2048, 2048, 12, 12, width, width, kernel=kernel, backward=direction == "backward")
        ).seconds  # type: ignore[arg-type]

    # 8 columns more cost nothing like the four- to tenfold that leaving the tensor cores does.
    assert seconds(144) < 1.1 * seconds(152)
    for width in (150, 108):
        assert seconds(width) > 3.0 * seconds(width + 4 if width == 108 else 152)
    products = 2.0 if direction == "forward" else 4.0
    least = products * 2.0 * 4 * 12 * 2048**2 * 150 / A100.hardware.peak_flops_per_s("fp32")
    assert seconds(150) > least


def test_rows_of_odd_length_cost_the_tensor_cores() -> None:
    def head(words: int, rows: int = 4096, direction: str = "forward") -> float:
        return A100.gemm(Gemm(rows, words, 2048, direction=direction)).seconds  # type: ignore[arg-type]

    for direction in ("forward", "dgrad", "wgrad"):
        assert head(50264, direction=direction) < head(50257, direction=direction)
        assert head(50257, direction=direction) == pytest.approx(constant(ODD_ROWS) * head(50264, direction=direction), rel=0.02)
    # The number of rows, and products that tensor cores are not for, have nothing to align.
    assert head(50264, rows=4095) < 1.05 * head(50264)
    assert A100.gemm(Gemm(4096, 1, 2048)).seconds <= A100.gemm(Gemm(4096, 8, 2048)).seconds
    assert unaligned(np.array([8.0, 4.0, 3.0]) * 1001, np.array(64.0), 2.0).tolist() == [1.0, 1.0, constant(ODD_ROWS)]
    assert unaligned(np.array(1001.0), np.array(64.0), 4.0).item() == 1.0


def test_each_framework_cuts_the_vocabulary_its_way() -> None:
    def words(name: str, tp: int) -> int:
        changed = [f"framework={name}", f"plan.tp={tp}"]
        network = Layout.of(read_scenario(SCENARIO, changed), 1).network
        assert network.head is not None
        return network.head.size("vocab")

    assert [words("megatron-core", tp) for tp in (1, 8)] == [50304, 51200]
    assert words("torchtitan", 8) == 50264


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200000), st.sampled_from([0, 1, 64, 128]), st.sampled_from([1, 2, 3, 8]))
def test_a_vocabulary_is_cut_into_equal_shares(vocab: int, multiple: int, ranks: int) -> None:
    found = padded_vocabulary(vocab, multiple, ranks)
    assert found % ranks == 0
    if multiple:
        assert 0 <= found - vocab < multiple * ranks
        assert (found // ranks) % multiple == 0
    else:
        assert 0 <= vocab - found < ranks


def test_megatrons_softmax_kernel_takes_heads_in_fours_and_fewer_than_16384_keys() -> None:
    def core(tp: int, batch: int, *more: str) -> LocalOp:
        changed = [f"plan.tp={tp}", f"training.micro_batch_size={batch}", "training.attention_kernel=unfused", *more]
        layer = Layout.of(read_scenario(SCENARIO, changed), 1).stage_blocks[0][1]
        return next(op for op in layer.forward if isinstance(op.work, AttentionWork))

    fused, chain = core(8, 1), core(16, 1)  # 96 heads: 12 and 6 a rank
    assert isinstance(fused.work, AttentionWork)
    assert isinstance(chain.work, AttentionWork)
    assert (fused.work.kernel, chain.work.kernel) == ("unfused", "eager")
    assert chain.kernels > fused.kernels == core(16, 2).kernels
    assert core(8, 1, "training.sequence_length=16384").kernels == chain.kernels
    assert core(8, 1, "training.sequence_length=16128").kernels == fused.kernels


def test_deepspeeds_pipeline_sends_a_part_from_every_tensor_rank() -> None:
    def calls(name: str) -> list[tuple[str, float]]:
        layout = Layout.of(read_scenario(SCENARIO, [f"framework={name}", "framework_version=2022-02"]), 12)
        return [(c.name, c.bytes) for c in send_collectives(layout, Send(0, 1, backward=True))]

    whole = 2.0 * 2048 * 12288
    assert calls("megatron-deepspeed") == [("send_recv", whole / 8), ("all_gather", whole)]
    assert calls("aa-scaling") == [("send_recv", whole)]


def test_a_gate_of_its_own_reduces_its_inputs_gradient_and_waits() -> None:
    """Aleph-Alpha/scaling: one matmul for q, k and v, two for the gated feed-forward, each with an all-reduce in its backward."""

    def backward(name: str, *overrides: str) -> tuple[tuple[LocalOp, ...], list[tuple[int, Collective]]]:
        pieces = [f"framework={name}", "framework_version=2023-07", "model.gated_mlp=true", "plan.recompute=none", *overrides]
        ops = Layout.of(read_scenario(SCENARIO, pieces), 12).stage_blocks[1][0].backward
        return ops, [(i, op.work) for i, op in enumerate(ops) if isinstance(op.work, Collective)]

    def reductions(name: str, *overrides: str) -> list[tuple[str, float]]:
        return [(work.name, work.bytes) for _, work in backward(name, *overrides)[1] if work.name != "all_gather"]

    amount = 2.0 * 2048 * 12288
    assert reductions("aa-scaling") == 3 * [("all_reduce", amount)]
    assert reductions("megatron-core") == 2 * [("all_reduce", amount)]
    assert reductions("aa-scaling", "plan.sequence_parallel=true") == 2 * [("reduce_scatter", amount)]
    ops, found = backward("aa-scaling")
    for index, _ in found:
        assert index in next(op for op in ops[index:] if op.stream == "compute").deps


def test_a_pipeline_engine_holds_the_logits_before_without_pipeline_too() -> None:
    """Aleph-Alpha/scaling has two buffers for outputs in turn: beside a micro-batch's logits those of the one before."""

    def layout(name: str, date: str, pp: int) -> Layout:
        pieces = [f"framework={name}", f"framework_version={date}", "plan.tp=1", f"plan.pp={pp}", "training.micro_batch_size=2"]
        return Layout.of(read_scenario(SCENARIO, pieces), pp)

    def held(name: str, date: str, pp: int) -> float:
        found = layout(name, date, pp)
        return last_outputs(found, found.stage_blocks[-1][-1])

    logits = 2 * 2048 * 50257 * 2.0
    assert layout("aa-scaling", "2023-07", 1).scenario.model.vocab_size == 50257
    for pp in (1, 12):
        assert held("aa-scaling", "2023-07", pp) == pytest.approx(logits)
        assert held("megatron-core", "2023-07", pp) == 0.0
    assert held("torchtitan", "2026-01", 1) == 0.0
    assert held("torchtitan", "2026-01", 12) > 0.0
    assert kept_outputs(layout("aa-scaling", "2023-07", 12), 0) == 2 * 2048 * 12288 * 2.0
    assert kept_outputs(layout("aa-scaling", "2023-07", 12), 11) == 0.0


def test_the_logits_before_count_in_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there when the last stage's memory is at its highest, once."""
    pieces = ["framework=aa-scaling", "framework_version=2023-07", "training.micro_batch_size=4", "plan.tp=1"]
    scenario = read_scenario(SCENARIO, pieces)
    grown = simulate(scenario, detail="stage").memory[-1].allocated_bytes
    monkeypatch.setattr("simpar.result.memory.last_outputs", lambda *_: 0.0)
    assert grown - simulate(scenario, detail="stage").memory[-1].allocated_bytes == pytest.approx(4 * 2048 * 50257 * 2.0)


def test_a_batch_whose_attention_output_is_turned_keeps_it_twice() -> None:
    """Aleph-Alpha/scaling: of one sequence the turned output is a view; without a fused kernel nobody keeps what it was."""

    def copies(name: str, batch: int, kernel: str = "fa2") -> float:
        pieces = [f"framework={name}", "framework_version=2023-07", "plan.recompute=none", f"training.micro_batch_size={batch}"]
        scenario = read_scenario(SCENARIO, [*pieces, f"training.attention_kernel={kernel}"])
        saved = Layout.of(scenario, 12).stage_blocks[1][0].saved
        return sum(size for name, size in saved if name.endswith("/out_copies"))

    assert copies("aa-scaling", 4) == 4 * 2048 * 12288 / 8 * 2.0
    assert copies("aa-scaling", 1) == copies("aa-scaling", 4, "unfused") == copies("megatron-core", 4) == 0.0


def test_columns_that_are_linears_of_their_own_meet_the_tensor_ranks_one_by_one() -> None:
    """picotron: q, k and v, then gate and up: five all-reduces a backward. With sequence parallelism five gathers forward, five
    more backward, and what is gathered or scattered is copied twice (read and written: 4 times its bytes)."""

    def calls(*overrides: str, backward: bool = True) -> dict[str, float]:
        pieces = ["framework=picotron", "framework_version=2026-08", "model.gated_mlp=true", "plan.recompute=none", *overrides]
        block = Layout.of(read_scenario(SCENARIO, pieces), 12).stage_blocks[1][0]
        found: dict[str, float] = {}
        for op in block.backward if backward else block.forward:
            if isinstance(op.work, Collective):
                assert op.work.bytes == amount
                found[op.work.name] = found.get(op.work.name, 0.0) + op.work.repeat
            elif "layout" in op.name and isinstance(op.work, MemoryWork):
                found["copied"] = found.get("copied", 0.0) + op.work.bytes_moved / amount
        return found

    amount = 2.0 * 2048 * 12288
    assert calls(backward=False) == {"all_reduce": 2.0}
    assert calls() == {"all_reduce": 5.0}
    assert calls("plan.sequence_parallel=true", backward=False) == {"all_gather": 5.0, "reduce_scatter": 2.0, "copied": 28.0}
    assert calls("plan.sequence_parallel=true") == {"all_gather": 7.0, "reduce_scatter": 5.0, "copied": 48.0}
    assert calls("framework=deepspeed") == {"all_reduce": 5.0}
