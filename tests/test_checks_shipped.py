"""Every shipped scenario loads, passes the checks, and says what is published about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpar.model.ledger import active_parameters, total_parameters
from simpar.schedules import SCHEDULES
from simpar.specs.base import data_dir
from simpar.specs.checks import check_scenario
from simpar.specs.counts import resolved_dp
from simpar.specs.model import TransformerSpec
from simpar.specs.scenario import read_scenario

FILES = sorted(data_dir("scenarios").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_shipped_scenarios_are_sound(path: Path) -> None:
    scenario = read_scenario(path)
    assert check_scenario(scenario) == []
    assert scenario.plan.schedule in ("auto", *SCHEDULES)
    # No run over machines of several kinds is published with all that a scenario needs: that one is an example.
    assert scenario.published or scenario.cluster.parts
    assert scenario.description
    model, _, layout = path.stem.partition("_")
    assert model
    assert layout, "scenarios are named model_cluster_plan"
    plan = scenario.plan
    assert resolved_dp(scenario) * plan.tp * plan.cp * plan.pp == scenario.world_size


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_published_counts_agree(path: Path) -> None:
    scenario = read_scenario(path)
    counts = {
        "parameters": total_parameters(scenario.model), "active_parameters": active_parameters(scenario.model),
        "world_size": scenario.world_size,
    }  # fmt: skip
    for fact in scenario.published:
        if fact.metric in counts:
            assert counts[fact.metric] == pytest.approx(fact.value, rel=0.02)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_model_reproduces_figure_1(stage: int, gigabytes: float) -> None:
    """arXiv 1910.02054, section 5: 2 + 2 + 12 B per parameter, the last 1, 2 or 3 of them sharded."""
    scenario = read_scenario(data_dir("scenarios") / f"zero-7.5b_a100x64_zero{stage}.toml")
    assert scenario.plan.zero_stage == stage
    shares = [12, 2, 2]  # optimizer states, gradients, parameters
    sharded = sum(shares[:stage])
    per_parameter = sum(shares) - sharded + sharded / resolved_dp(scenario)
    assert round(total_parameters(scenario.model) * per_parameter / 1e9, 1) == gigabytes
    assert scenario.published[0].value == gigabytes * 1e9


def test_megatron_step_times_follow_from_the_published_rate() -> None:
    """arXiv 2104.04473, equation 3, and the batch arithmetic of Table 1."""
    paths = [path for path in FILES if path.name.startswith("megatron-")]
    assert len(paths) == 10
    for path in paths:
        scenario = read_scenario(path)
        model, facts = scenario.model, {fact.metric: fact.value for fact in scenario.published}
        assert isinstance(model, TransformerSpec)
        b, s = scenario.training.global_batch_size, scenario.training.sequence_length
        layers, h, v = model.num_hidden_layers, model.hidden_size, model.vocab_size
        flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        expected = flops / scenario.world_size / facts["hardware_flops_per_s_per_gpu"]
        assert facts["step_time_s"] == pytest.approx(expected, rel=1e-3)


def test_the_flagship_is_there() -> None:
    scenario = read_scenario(data_dir("scenarios") / "llama3.1-405b_h100x16384_tp8pp16.toml")
    assert scenario.world_size == 16384
    assert (scenario.plan.tp, scenario.plan.pp) == (8, 16)
