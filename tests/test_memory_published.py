"""What published runs say about their memory: layouts that ran fit, and what their authors save is not counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpar.engine.longest_path import longest_path
from simpar.evidence.cases import load_cases
from simpar.evidence.predicted import predict
from simpar.parallel.layout import Layout
from simpar.result.interpret import interpret
from simpar.result.result import Result
from simpar.specs.scenario import Scenario, read_scenario
from simpar.step import prepare

SCENARIOS = Path(__file__).parents[1] / "scenarios"
DEEPSEEK = SCENARIOS / "deepseek-v3_h800x2048_pp16ep64.toml"
LLAMA = SCENARIOS / "llama3.1-405b_h100x8192_tp8pp16.toml"


def result_of(scenario: Scenario) -> Result:
    """One step without contention."""
    priced = prepare(scenario, detail="stage")
    return interpret(priced, longest_path(priced.program, priced.table))


@pytest.mark.parametrize("path", [DEEPSEEK, LLAMA], ids=lambda path: path.stem)
def test_a_layout_that_ran_fits(path: Path) -> None:
    assert result_of(read_scenario(path)).fits


def test_deepseek_v3_keeps_the_inputs_of_its_experts_activation_in_fp8() -> None:
    """1 x 128 scales: 33/32 bytes per element in place of 2; the attention output in 12 bits (arXiv 2412.19437, section 3.3.3)."""
    layout = Layout.of(read_scenario(DEEPSEEK), 32)
    saved = dict(layout.stage_blocks[15][0].saved)
    tokens = 4096
    assert saved["moe/activation_in"] == pytest.approx(tokens * 8 * 2 * 2048 * 33 / 32)
    assert saved["attention/out"] == pytest.approx(tokens * 128 * 128 * 1.5)


def test_llama_3_gives_stage_inputs_back() -> None:
    """Every stage is one layer: its first norm's input, 2 bytes per element over tp 8, is gone for all micro-batches in flight."""
    scenario = read_scenario(LLAMA)
    freed = result_of(scenario)
    kept = result_of(scenario.model_copy(update={"framework": "megatron-core"}))
    rank = freed.worst_rank.rank
    each = 2 * 8192 * 16384 / 8
    peaks = [r.memory[rank].at_peak["activations"] for r in (kept, freed)]
    in_flight = 2 * (16 - rank - 1) + 7 * 16 + 1
    assert peaks[0] - peaks[1] == pytest.approx(in_flight * each, rel=0.01)


def test_stages_differ_as_measured() -> None:
    """Peaks of both pipeline ranks of a measured run, allocated and reserved: SimuMax v1.2, b200_release_v1.2_summary.json, case
    llama3_70b_l12_tp1_pp2_dp4_mbc4_cef, largest of each stage's ranks."""
    (case,) = [c for c in load_cases() if c.id == "SimuMax B200/Llama3-70B-12L, 8 B200, pp2"]
    found = predict(case.scenario)
    assert [b / 2**30 for b in found.allocated_per_rank] == pytest.approx([66.552, 62.968], rel=0.005)
    assert [b / 2**30 for b in found.reserved_per_rank] == pytest.approx([70.885, 64.221], rel=0.04)
