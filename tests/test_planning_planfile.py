"""Plan files: what is read, what is refused and how, what binds where a plan cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpar.errors import InputError
from simpar.planning.answer import Simulation, answer
from simpar.planning.changes import assigned
from simpar.planning.resolve import Resolved, resolve
from simpar.planning.simulated_steps import SimulatedSteps
from simpar.specs.base import field_texts
from simpar.specs.planfile import Phase, make_plan, parse_count, read_plan_table

DAY = 86400.0
STEPS = SimulatedSteps()


def a_table(**changes: Any) -> dict[str, Any]:
    return {
        "name": "test",
        "file": "test.toml",
        "phases": [{"name": "one", "tokens": "1T", "tokens_per_s_per_gpu": 300.0}],
        "cluster": {"num_nodes": 256, "gpus_per_node": 8, "spares": 16},
        "checkpoints": {"parameters": "70B", "write_bandwidth": "200 GB/s"},
    } | changes


def resolved(**changes: Any) -> Resolved:
    return resolve(make_plan(a_table(**changes)), STEPS)


def refused(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolved(**changes)
    text = str(caught.value)
    assert "test.toml" in text
    return text


@pytest.mark.parametrize(
    ("text", "value"),
    [("15.6T", 15.6e12), ("252M", 252e6), ("405B", 405e9), ("1_000", 1000.0), (3.5e11, 3.5e11), ("2.5e9", 2.5e9)],
)
def test_counts(text: object, value: float) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "ten", "-3B", 0, -1, True, float("inf"), "5 B/s"])
def test_what_is_no_count(text: object) -> None:
    with pytest.raises(ValueError, match="count"):
        parse_count(text)


def test_every_field_is_documented_where_it_stands() -> None:
    from simpar.specs import planfile, reliability

    plain = {"name", "description", "component"}
    for module in (planfile, reliability):
        for spec in vars(module).values():
            if isinstance(spec, type) and spec.__module__ == module.__name__ and hasattr(spec, "model_fields"):
                missing = spec.model_fields.keys() - field_texts(spec).keys() - plain
                assert not missing, (spec.__name__, missing)


def test_overrides_reach_any_field(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[[phases]]\ntokens = "1T"\ntokens_per_s_per_gpu = 300\n[cluster]\nnum_nodes = 4\n')
    plan = make_plan(assigned(assigned(read_plan_table(path), "cluster.num_nodes=8"), "checkpoints.parameters=1B"))
    assert (plan.name, plan.cluster.num_nodes, plan.checkpoints.parameters) == ("p", 8, 1e9)


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_negative_rates_are_refused() -> None:
    text = refused(reliability={"failures": [{"component": "gpu", "rate_per_node_day": -1e-3}]})
    assert "reliability.failures.0.rate_per_node_day" in text
    assert "greater than or equal to 0" in text


def test_overlapping_phases_are_refused_with_where_the_one_before_ends() -> None:
    phase = {"tokens": "1T", "tokens_per_s_per_gpu": 300.0}
    text = refused(phases=[phase, {**phase, "starts_at_tokens": 9e11}])
    assert "phases.1.starts_at_tokens" in text
    assert "overlaps the phase before" in text
    assert "1e+12" in text
    assert "leaves a gap" in refused(phases=[phase, {**phase, "starts_at_tokens": 2e12}])


def test_overlapping_windows_are_refused() -> None:
    weekly = {"first_day": 6, "every_days": 7, "duration": "8 h"}
    monthly = {"first_day": 6.2, "every_days": 28, "duration": "2 h"}
    assert "overlaps window 0" in refused(maintenance=[weekly, monthly])
    assert "its own repetition" in refused(maintenance=[{"first_day": 1, "every_days": 1, "duration": "30 h"}])


def test_a_phase_needs_exactly_one_speed() -> None:
    assert "exactly one source of speed" in refused(phases=[{"tokens": "1T"}])
    both = {"tokens": "1T", "tokens_per_s_per_gpu": 3.0, "gpu_hours": 5.0}
    assert "tokens_per_s_per_gpu" in refused(phases=[both])


def test_all_violations_come_together() -> None:
    text = refused(
        phases=[{"tokens": "1T", "step_time": "10 s"}],
        prices={"rent": {"usd_per_gpu_hour": 2}, "own": {"usd_per_gpu": 30000}},
        cluster={"num_nodes": 4, "expansions": [{"add_nodes": 2}]},
    )
    for words in ("rated_gpus", "sequence_length", "global_batch_size", "rented or owned", "exactly one of day"):
        assert words in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoints": {"write_bandwidth": "2 TB/s"}}, "size of a checkpoint is unknown"),
        ({"checkpoints": {"parameters": "1B", "write_bandwidth": "0 TB/s"}}, "must be more than zero"),
        ({"checkpoints": {"parameters": "1B", "interval": "often"}}, "not a quantity"),
        ({"checkpoints": {"parameters": "1B", "interval": 60}}, "unit"),
        ({"power": {"gpu_busy": "100 W", "gpu_idle": "200 W"}}, "is above power.gpu_busy"),
        ({"power": {"pue": 0.9}}, "greater than or equal to 1"),
        ({"deadline": "0 d"}, "longer than zero"),
        ({"deadline": "sixty days"}, "not a quantity"),
        ({"clusters": {}}, "did you mean 'cluster'"),
        ({"phases": []}, "phases"),
        ({"phases": [{"tokens": "1T", "scenario": "nowhere.toml"}]}, "no such scenario"),
        ({"phases": [{"tokens": "1T", "gpu_hours": 5, "layout": "search"}]}, "only be searched for a scenario"),
        ({"cluster": {"num_nodes": 0}}, "greater than 0"),
        ({"cluster": {"num_nodes": 4, "expansions": [{"at_tokens": "2T", "add_nodes": 4}]}}, "after the end"),
        (
            {"phases": [{"tokens": "1T", "gpu_hours": 5, "batch_ramp": [{"tokens": "2T", "global_batch_size": 4}]}]},
            "longer than its phase",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refused(**changes)


# -- results that say what binds ---------------------------------------------------------------------------------------
def test_a_save_longer_than_the_time_between_failures_binds() -> None:
    found = resolved(
        checkpoints={"parameters": "405B", "write_bandwidth": "0.2 GB/s", "mode": "blocking"},
        reliability={"failures": [{"component": "any", "rate_per_node_day": 0.05}]},
    )
    assert not found.feasible
    assert any("longer than the mean time to interrupt" in reason for reason in found.binding)
    assert any("checkpoint stall binds" in reason for reason in found.binding)
    come_to = answer(found.plan, STEPS, Simulation(2))
    assert come_to.days is None
    assert come_to.binding == found.binding


def test_storage_too_slow_for_the_interval_binds_but_runs() -> None:
    table = a_table(checkpoints={"parameters": "405B", "write_bandwidth": "10 GB/s", "interval": "2 min"})
    come_to = answer(make_plan(table), STEPS, Simulation(2))
    assert come_to.feasible
    assert "storage: one save takes 567 s" in come_to.binding[0]
    assert come_to.closed_forms["checkpoint_interval_s"] >= 566


def test_storage_too_small_binds() -> None:
    spec = {"parameters": "405B", "write_bandwidth": "1 TB/s", "keep": 10, "storage_capacity": "50 TB"}
    assert "exceed its capacity" in resolved(checkpoints=spec).binding[0]


def test_an_impossible_deadline_says_that_speed_binds() -> None:
    come_to = answer(make_plan(a_table(deadline="10 d")), STEPS, Simulation(5))
    assert not come_to.feasible
    assert come_to.deadline_probability == 0.0
    assert "speed binds" in come_to.binding[-1]
    assert come_to.days is not None


def test_a_deadline_missed_by_failures_names_the_largest_loss() -> None:
    ideal = 1e12 / (300.0 * 2048) / DAY
    come_to = answer(make_plan(a_table(deadline=f"{ideal * 1.001} d")), STEPS, Simulation(5))
    assert "the largest loss is restart" in come_to.binding[-1]


def test_no_spares_and_constant_failures_is_no_progress() -> None:
    table = a_table(
        cluster={"num_nodes": 2048, "gpus_per_node": 8, "spares": 0},
        reliability={"failures": [{"component": "gpu", "rate_per_gpu_day": 1e-3}], "repair": "3 d"},
    )
    come_to = answer(make_plan(table), STEPS, Simulation(2))
    assert not come_to.feasible
    assert "waiting_for_spare" in come_to.binding[-1]


# -- numbers -----------------------------------------------------------------------------------------------------------
def test_a_checkpoint_of_405b_is_5_67_tb_and_takes_2_8_s_at_2_tb_per_s() -> None:
    found = resolved(checkpoints={"parameters": "405B", "write_bandwidth": "2 TB/s"})
    assert found.checkpoints is not None
    assert found.checkpoints.bytes == pytest.approx(5.67e12)
    assert found.checkpoints.save_s == pytest.approx(2.835)


def test_flops_per_token_conventions() -> None:
    base = {"flops_per_s_per_gpu": "100 TFLOP/s", "active_parameters": "1B"}
    phase = Phase.model_validate({"tokens": "1T", "flops": base})
    assert phase.flops is not None
    assert phase.flops.flops_per_token(4096) == 6e9
    full = base | {"num_layers": 10, "attention_width": 1000, "causal": False, "counts_recompute": True}
    phase = Phase.model_validate({"tokens": "1T", "flops": full})
    assert phase.flops is not None
    assert phase.flops.flops_per_token(4096) == 8 * (1e9 + 2 * 10 * 1000 * 4096)


def test_owned_machines_cost_their_share_of_life_energy_and_people() -> None:
    table = a_table(
        phases=[{"tokens": "1T", "gpu_hours": 2048 * 24 * 10}],
        cluster={"num_nodes": 256, "gpus_per_node": 8},
        reliability={"failures": [], "restart": "0 s", "initialisation": "0 s"},
        checkpoints={"parameters": "1B", "interval": "1000 h"},
        power={"gpu_busy": "700 W", "gpu_idle": "100 W", "node_other": "2 kW", "pue": 1.25, "carbon_kg_per_kwh": 0.5},
        prices={
            "own": {
                "usd_per_gpu": 30000, "server_overhead": 1.5, "interconnect_overhead": 1.2, "lifetime_years": 4,
                "utilisation_of_life": 1.0, "usd_per_kwh": 0.1, "staff_usd_per_year": 365250,
            }
        },
    )  # fmt: skip
    come_to = answer(make_plan(table), STEPS, Simulation(1))
    assert come_to.days is not None
    assert come_to.energy_kwh is not None
    assert come_to.carbon_kg is not None
    assert come_to.cost_usd is not None
    assert come_to.days.p50 == pytest.approx(10)
    energy = 240 * (2048 * 0.7 + 256 * 2.0) * 1.25
    assert come_to.energy_kwh.p50 == pytest.approx(energy)
    assert come_to.carbon_kg.p50 == pytest.approx(energy * 0.5)
    capital = 2048 * 30000 * 1.8 * 10 / (4 * 365.25)
    assert come_to.cost_usd.p50 == pytest.approx(capital + energy * 0.1 + 365250 * 10 / 365.25)


def test_half_the_utilisation_draws_half_of_the_difference() -> None:
    def kwh(utilisation: float) -> float:
        power = {"gpu_busy": "700 W", "gpu_idle": "100 W", "utilisation": utilisation}
        quantiles = answer(make_plan(a_table(power=power, reliability={"failures": []})), STEPS, Simulation(1)).energy_kwh
        assert quantiles is not None
        return quantiles.p50

    assert kwh(0.5) == pytest.approx((kwh(0.0) + kwh(1.0)) / 2)


def test_every_default_is_listed_as_an_assumption() -> None:
    names = {a.name: a.kind for a in resolved().assumptions}
    for name in ("reliability.detection", "failures of node", "power.pue", "power.gpu_busy", "checkpoints"):
        assert names[name] == "assumed"
    given = {a.name: a.kind for a in resolved(reliability={"detection": "1 min"}).assumptions}
    assert given["reliability.detection"] == "given"


def test_uncertain_speed_widens_the_answer() -> None:
    phase = {"tokens": "1T", "tokens_per_s_per_gpu": 300.0, "relative_uncertainty": 0.2}
    wide = answer(make_plan(a_table(phases=[phase])), STEPS, Simulation(60)).days
    narrow = answer(make_plan(a_table()), STEPS, Simulation(60)).days
    assert wide is not None
    assert narrow is not None
    assert wide.p90 / wide.p10 > 1.3 > narrow.p90 / narrow.p10


def test_a_wrong_phase_is_one_violation_and_not_also_a_missing_phase() -> None:
    phase = {"tokens": "1T", "tokens_per_s": 1e6, "rated_gpus": 8, "global_batch_size": -4}
    raw = {"name": "bad", "phases": [phase], "cluster": {"num_nodes": 1}}
    with pytest.raises(InputError) as error:
        make_plan(raw)
    assert [v.field for v in error.value.violations] == ["phases.0.global_batch_size"]
    with pytest.raises(InputError, match="at least 1 item"):
        make_plan({**raw, "phases": []})
