"""The registry of fitted numbers: lookup by group, a fit that recovers, a gate that only what pays passes, the shipped file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from simpar.cli.app import app
from simpar.evidence.constants_md import constants_text
from simpar.evidence.predicted import predict, stalled
from simpar.evidence.run_type import Measured, Run
from simpar.specs.base import data_dir
from simpar.specs.calibration import (
    ANY,
    FACTORS,
    FILE,
    KNOWN,
    SECONDS,
    UNFAMILIAR,
    WIDTHS,
    Constant,
    calibrated_by,
    calibration_for,
    constants,
    uncalibrated,
    unseen,
)
from simpar.specs.framework import framework
from simpar.specs.scenario import read_scenario
from simpar.specs.training import TRAINED_SPREAD
from validation.tools.fit_constants import as_toml, left_out, unseen_table
from validation.tools.intervals import (
    covered,
    held_out_widths,
    interval_entries,
    memory_entries,
    peaks_covered,
    quantile,
    scored,
)
from validation.tools.pooled import LeftOut, candidates, fit, gated, regained, select
from validation.tools.readme_table import readme_table, write_readme
from validation.tools.samples import MOST_ROWS, RUN_LEVEL, Data, Peak, Sample, errors, evenly, predicted, seen_of

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
TRUE = {"compute": 1.2, "memory": 1.0, "communication": 1.0, "pass_s": 0.0, "step_s": 0.0}


def runs(sources: int, rows: int = 6, true: dict[str, float] | None = None, noise: float = 0.02, **group: str) -> list[Sample]:
    """Made-up runs: every source has its own bias, as real ones do."""
    generator = np.random.default_rng(crc32(repr((sources, tuple(group.items()))).encode()) if group else sources)
    values = np.array([{**TRUE, **(true or {})}[name] for name in (*FACTORS, *SECONDS)])
    found = []
    for source in range(sources):
        bias = noise * generator.standard_normal()
        for _ in range(rows):
            parts = generator.uniform(0.2, 1.0, 5) * np.array([10.0, 2.0, 2.0, 100.0, 0.0]) + np.array([0, 0, 0, 0, 1.0])
            measured = (parts @ values + 0.1) * float(np.exp(bias + noise * generator.standard_normal()))
            where = {"family": "f", "architecture": "a", **group}
            found.append(Sample(**where, source=f"{where['family']}{where['architecture']}{source}", model="m", parts=tuple(parts),
                                rest=0.1, measured=measured))  # fmt: skip
    return found


def test_nested_groups_multiply_and_the_narrowest_error_wins() -> None:
    entries = (
        Constant(name="compute", value=1.2),
        Constant(name="compute", family="torchtitan", value=1.1),
        Constant(name="compute", family="torchtitan", architecture="hopper", value=0.9),
        Constant(name="step_s", architecture="hopper", value=0.02),
        Constant(name="step_s", value=0.01),
        Constant(name="expected_error", value=0.2),
        Constant(name="expected_error", family="torchtitan", architecture="hopper", value=0.1),
        Constant(name="expected_error", family="torchtitan", value=0.15),
    )
    with calibrated_by(entries):
        own = calibration_for("torchtitan", "hopper")
        other = calibration_for("deepspeed", "ampere")
    assert own.compute == pytest.approx(1.2 * 1.1 * 0.9)
    assert own.step_s == pytest.approx(0.03)
    assert own.expected_error == 0.1
    assert (other.compute, other.step_s, other.expected_error, other.memory) == (1.2, 0.01, 0.2, 1.0)
    with uncalibrated():
        assert calibration_for("torchtitan", "hopper").compute == 1.0


def test_a_constant_holds_only_on_architectures_that_sources_ran_on() -> None:
    entries = (
        Constant(name="compute", value=1.2, architectures=("hopper", "ampere")),
        Constant(name="expected_error", value=0.1, architectures=("hopper", "ampere")),
        Constant(name="expected_error", family="torchtitan", value=0.2, architectures=("hopper",)),
    )
    with calibrated_by(entries):
        assert calibration_for("deepspeed", "hopper").compute == 1.2
        unseen_chip = calibration_for("deepspeed", "cdna3")
    assert unseen_chip.compute == 1.0
    assert unseen_chip.expected_error == 0.2
    with uncalibrated():
        assert calibration_for("deepspeed", "cdna3").expected_error == 0.0


def test_combined_factors_stay_within_their_bounds() -> None:
    entries = tuple(Constant(name="compute", value=1.5, **group) for group in ({}, {"architecture": "hopper"}))
    with calibrated_by(entries):
        assert calibration_for("deepspeed", "hopper").compute == KNOWN["compute"].bounds[1]


def test_a_fit_recovers_and_shrugs_off_sick_runs() -> None:
    data = Data.of(runs(200, true={"compute": 1.3}, noise=0.01))
    (found,) = fit(data, [Constant(name="compute", family="f", value=1.0)])
    assert found.value == pytest.approx(1.3, rel=0.03)
    sick = Data.of([replace(s, measured=10.0 * s.measured) if i % 5 == 0 else s for i, s in enumerate(data.samples)])
    (found,) = fit(sick, [Constant(name="compute", family="f", value=1.0)])
    assert found.value == pytest.approx(1.3, rel=0.1)


def test_few_sources_move_a_constant_less_than_many() -> None:
    """Partial pooling: the same runs from one source say less than from many, and all are pulled towards neutral."""

    def compute(sources: int) -> float:
        data = Data.of([constant_pace(1.3, f"s{i % sources}") for i in range(300)])
        return fit(data, [Constant(name="compute", family="f", value=1.0)])[0].value

    assert 1.0 < compute(1) < 1.05 < compute(3) < 1.15 < compute(30) < 1.26 < compute(300) < 1.3
    assert compute(300) == pytest.approx(1.3, rel=0.03)


def constant_pace(factor: float, source: str, **group: str) -> Sample:
    """A run of compute alone, so many times as slow as its parts."""
    where = {"family": "f", "architecture": "a", **group}
    return Sample(**where, source=source, model="m", parts=(10.0, 0.0, 0.0, 0.0, 1.0), rest=0.0, measured=10.0 * factor)


def test_a_source_of_many_runs_weighs_little_more_than_one_run() -> None:
    many = [constant_pace(1.0, "large") for _ in range(100)]

    def compute(singles: int) -> float:
        data = Data.of([*many, *(constant_pace(1.4, f"s{i}") for i in range(singles))])
        return fit(data, [Constant(name="compute", family="f", value=1.0)])[0].value

    assert compute(1) < 1.05
    assert compute(8) > 1.1


@pytest.mark.parametrize("count", [1, 149, 150, 151, 299, 301, 1036])
def test_of_a_large_source_as_many_runs_take_part_as_may(count: int) -> None:
    """One run more than 150 does not halve a source."""
    rows = evenly(count)
    assert len(rows) == len({*rows}) == min(count, MOST_ROWS)
    assert rows == sorted(rows)
    assert 0 <= rows[0] <= rows[-1] < count <= rows[-1] + -(-count // len(rows))


def test_left_out_errors_never_see_their_source() -> None:
    """One source is slower than all others: left out it is met as badly as without its rows, by the linearised fit too."""
    odd = [replace(s, source="odd", measured=1.3 * s.measured) for s in runs(1, rows=40)]
    entry = Constant(name="compute", family="f", value=1.0)
    data = Data.of([*runs(8), *odd])
    inside = np.array([s.source == "odd" for s in data.samples])
    alone = np.abs(errors(Data.of(odd), fit(Data.of(runs(8)), [entry])))
    quick = LeftOut.of(data, fit(data, [entry])).errors([0])
    assert quick[inside].mean() == pytest.approx(alone.mean(), abs=0.02)
    assert quick[inside].mean() > 0.18
    exact = left_out(data, "source", select, workers=1)
    assert exact[inside] == pytest.approx(errors(Data.of(odd), select(Data.of(runs(8)))))


def test_the_gate_keeps_what_carries_over_and_nothing_else() -> None:
    """A factor of all runs stays; one that a single source needs does not, however much it would gain there."""
    strange = [replace(s, source="strange", measured=1.8 * s.measured) for s in runs(1, rows=30)]
    data = Data.of([*runs(60), *strange])
    found = select(data)
    assert {e.name for e in found} == {"compute"}
    assert all(e.gain > e.gain_se > 0 for e in found)
    calm = np.array([s.source != "strange" for s in data.samples])
    assert np.median(np.abs(errors(data, found))[calm]) < 0.05
    neutral = select(Data.of(runs(14, true={"compute": 1.0}, noise=0.05)))
    assert neutral == ()


@pytest.mark.parametrize("sources", [3, 8])
def test_a_constant_of_an_architecture_leaves_alone_a_family_that_it_harms(sources: int) -> None:
    """Two families need 1.3 on the chip, a third nothing: it is not charged, also where it has too few runs to say so alone."""
    slow = [s for name in ("slow", "slower") for s in runs(60, true={"compute": 1.3}, family=name)]
    right = runs(sources, true={"compute": 1.0}, family="right")
    found = select(Data.of([*slow, *right]))
    mine = Data.of(right)
    assert np.median(np.abs(errors(mine, found))) < 0.06
    assert np.median(np.abs(errors(Data.of(slow), found))) < 0.06
    (alone,) = gated(Data.of([*slow, *right]), [Constant(name="compute", architecture="a", value=1.0)])
    assert alone.value == pytest.approx(1.3, rel=0.05)
    assert alone.share("right") < 0.1
    assert alone.share("slow") > 0.99
    assert alone.share("unseen") == 1.0
    assert alone.group == f"architecture=a, of which right {alone.share('right'):g}, slow 1, slower 1"
    assert len(alone.sources) == 120 + sources


def test_a_kept_constant_has_the_gain_of_the_runs_at_hand() -> None:
    """Its value stays; what it gains is what leaving it out would cost the sources of now."""
    entry = Constant(name="compute", architecture="a", value=1.2, gain=0.5, gain_se=0.1)
    pays, idle = (Data.of(runs(12, true={"compute": true})) for true in (1.3, 1.0))
    (found,), (chosen,) = regained(pays, [entry]), gated(pays, [entry])
    assert found.value == entry.value
    assert (found.gain, found.gain_se, found.sources) == (chosen.gain, chosen.gain_se, chosen.sources)
    (found,) = regained(idle, [entry])
    assert found.gain < found.gain_se


def test_a_family_that_nothing_is_known_of_takes_half() -> None:
    """Where a family's gain is as likely as its loss, it takes half of the logarithm, and one more source hardly changes that."""
    half = Constant(name="compute", architecture="a", value=1.44, shares=(("f", 0.5),))
    data = Data.of(runs(3, true={"compute": 1.0}))
    whole = half.model_copy(update={"shares": ()})
    parts = data.parts[:, FACTORS.index("compute")]
    assert predicted(data, [half]) - predicted(data, ()) == pytest.approx(0.2 * parts)
    assert predicted(data, [whole]) - predicted(data, ()) == pytest.approx(0.44 * parts)


def test_a_family_of_two_sources_is_no_exception() -> None:
    """What two sources say of a family changes with either of them: the constant of the architecture holds for them too."""
    slow = [s for name in ("slow", "slower") for s in runs(8, true={"compute": 1.3}, family=name)]
    data = Data.of([*slow, *runs(2, true={"compute": 1.0}, family="right")])
    (alone,) = gated(data, [Constant(name="compute", architecture="a", value=1.0)])
    assert alone.share("right") == 1.0


def test_runs_that_no_constant_explains_carry_none() -> None:
    """Three sources at several times the prediction are another cause's: the fourth, met as it is, would be charged for them."""
    far = [replace(s, source=f"far {s.source}") for s in runs(3, true={"compute": 8.0}, noise=0.02)]
    assert select(Data.of(far)) == ()


def test_only_groups_of_three_sources_have_constants() -> None:
    groups = {e.group for e in candidates(Data.of([*runs(2, architecture="few"), *runs(3, architecture="some")]))}
    assert "architecture=some" in groups
    assert not any("few" in group for group in groups)


def test_factors_of_intervals_cover_unseen_runs() -> None:
    """Errors of 20 % where the parts' intervals say 2 % widen; errors of 2 % where they say 20 % narrow."""
    wrong = [replace(s, family="wrong", up=0.02, down=0.02) for s in runs(12, noise=0.2)]
    sure = [replace(s, family="sure", source=f"s{s.source}", up=0.2, down=0.2) for s in runs(12, noise=0.02)]
    data = Data.of([*wrong, *sure])
    unseen = left_out(data, "source", select, workers=1)
    entries = interval_entries(data, unseen, unseen)
    for name in ("interval_up", "interval_down"):
        factor = {e.family: e.value for e in entries if e.name == name}
        assert {e.architecture for e in entries if e.family in ("sure", "wrong")} == {wrong[0].architecture}
        assert factor["sure"] < factor["*"] < factor["wrong"]
        assert factor[UNFAMILIAR] >= factor["*"]
    inside, score = covered(data, unseen)
    assert 0.65 <= inside.mean() <= 0.95
    off, ten = -np.log1p(unseen), np.full(len(inside), 2.0)
    wide, cost = scored(off, ten, ten)
    assert wide.mean() == 1.0
    assert score.mean() < cost.mean()
    rows = unseen_table(data, unseen, errors(data, ()))
    assert {r.source for r in rows if r.source != "*"} == set(data.sources)
    assert next(r for r in rows if r.family == "wrong").coverage == pytest.approx(inside[: len(wrong)].mean())


def test_either_half_of_an_interval_has_a_factor_of_its_own() -> None:
    """Of ten sources, two are twice as slow as predicted and none is faster: a tenth lies above only with a far upper end."""
    data = Data.of([replace(s, source=str(i), up=0.1, down=0.1) for i in range(10) for s in runs(1)])
    unseen = np.array([-0.5 if s.source in "01" else 0.0 for s in data.samples])
    value = {e.name: e.value for e in interval_entries(data, unseen, unseen) if e.family == "*"}
    assert value["interval_up"] == pytest.approx(math.log(2.0) / 0.1)
    assert value["interval_down"] == 0.1
    assert covered(data, unseen)[0].mean() == 1.0


def test_runs_that_leave_facts_open_move_no_factor() -> None:
    """Their answer spreads over readings: what they are off by beyond that is no news of runs that say everything."""
    data = Data.of([replace(s, source=str(i), up=0.1, down=0.1, open=i >= 8) for i in range(12) for s in runs(1)])
    unseen = np.array([-0.5 if s.open else 0.0 for s in data.samples])
    found = [e.value for e in interval_entries(data, unseen, unseen) if e.name.startswith("interval")]
    assert found == pytest.approx([0.1] * 6)
    assert (covered(data, unseen)[0] == [not s.open for s in data.samples]).all()


def test_a_left_out_run_has_the_factor_that_a_user_would_get() -> None:
    """Where a family has too few other sources on a chip, the widest of it elsewhere holds."""
    wild = [replace(s, family="wild", up=0.1, down=0.1) for s in runs(6, architecture="ampere")]
    rare = [replace(s, family="wild", source=f"rare {s.source}", up=0.1, down=0.1) for s in runs(1, architecture="hopper")]
    calm = [replace(s, family="calm", source=f"calm {s.source}", up=0.1, down=0.1) for s in runs(9, architecture="ampere")]
    data = Data.of([*wild, *rare, *calm])
    unseen = np.array([-0.4 if s.family == "wild" else 0.0 for s in data.samples])
    up, _ = held_out_widths(data, unseen)
    assert up[len(wild)] == pytest.approx(up[0], rel=0.2)
    assert up[len(wild)] > 1.2 * up[-1]


def test_the_quantile_weighs_sources_by_the_root_of_their_runs() -> None:
    values = [0.1] * 100 + [1.0] * 4
    assert quantile(values, ["a"] * 100 + ["b", "c", "d", "e"], 0.8) == 1.0
    assert quantile(values, ["a"] * 100 + ["b"] * 4, 0.8) == 0.1


def _peaks(experts: bool, offs: list[float], rows: int = 1) -> list[Peak]:
    return [Peak(f"{experts} {i}", experts, off) for i, off in enumerate(offs) for _ in range(rows)]


def test_widths_of_memory_are_those_of_models_with_and_without_experts() -> None:
    """Each is pulled to that of all sources, by the weight of five; runs that leave facts open tell nothing."""
    dense, experts = _peaks(False, [0.1] * 8), _peaks(True, [-0.4] * 6)
    guessed = [replace(p, source=f"open {p.source}", off=0.9, open=True) for p in (*dense, *experts)]
    value = {e.name: e.value for e in memory_entries([*dense, *experts, *guessed])}
    assert value == {
        "memory_error": pytest.approx(math.exp((8 * math.log(0.1) + 5 * math.log(0.4)) / 13)),
        "expert_memory_error": pytest.approx(0.4),
    }
    with calibrated_by(tuple(memory_entries([*dense, *experts]))):
        here = calibration_for("torchtitan", "a")
        assert here.memory_half_width(experts=True) == here.expert_memory_error == pytest.approx(0.4)
        assert here.memory_half_width(experts=False) == here.memory_error < 0.2


def test_peaks_are_covered_by_the_widths_of_other_sources() -> None:
    peaks = [*_peaks(False, [0.1] * 8), Peak("wild", False, 0.5)]
    inside, score = peaks_covered(peaks)
    assert inside.tolist() == [True] * 8 + [False]
    assert score[-1] == pytest.approx(2 * 0.1 + 10 * 0.4)


def test_an_unfamiliar_family_has_at_least_the_width_of_unfamiliar_ones() -> None:
    entries = (
        Constant(name="interval_up", value=1.2),
        Constant(name="interval_up", family="megatron-core", value=0.8),
        Constant(name="interval_up", family=UNFAMILIAR, value=2.0),
    )
    with calibrated_by(entries):
        assert calibration_for("megatron-core", "hopper").interval_up == 0.8
        assert calibration_for("deepspeed", "hopper").interval_up == 2.0


def test_a_family_on_an_unseen_chip_is_no_surer_than_elsewhere() -> None:
    entries = (
        Constant(name="interval_up", value=1.1, architectures=("ampere", "hopper", "cdna4")),
        Constant(name="interval_up", family="deepspeed", architecture="ampere", value=3.0, architectures=("ampere",)),
        Constant(name="interval_up", family="deepspeed", architecture="hopper", value=2.0, architectures=("hopper",)),
        Constant(name="interval_up", family="megatron-core", architecture="ampere", value=0.8, architectures=("ampere",)),
        Constant(name="interval_up", family=UNFAMILIAR, value=1.3, architectures=("ampere", "hopper", "cdna4")),
    )
    with calibrated_by(entries):
        pairs = [(family, chip) for family in ("deepspeed", "megatron-core") for chip in ("ampere", "cdna4")]
        factors = [calibration_for(*pair).interval_up for pair in pairs]
    assert factors == [3.0, 3.0, 0.8, 1.3]


def test_a_run_is_split_around_the_constants_in_force() -> None:
    """Under those constants the split gives the simulated step back, overlap and bubble included; from none it comes near."""
    scenario = read_scenario(SCENARIOS / "korthikanti-175b_a100x64_tp8pp8.toml")
    values = {"compute": 1.2, "memory": 1.4, "communication": 1.6, "pass_s": 2e-4, "step_s": 0.05}
    entries = tuple(Constant(name=name, value=value) for name, value in values.items())
    with calibrated_by(entries):
        step = predict(scenario).step_time_s
    for start, tolerance in ((entries, 1e-9), ((), 0.05)):
        measured = Measured(step_time_s=step)
        run = Run("id", {"source": "source"}, measured, scenario, skipped="", excluded="", assumptions=(), row={})
        split, _ = seen_of(run, start)
        assert split is not None
        assert errors(Data.of([split]), entries)[0] == pytest.approx(0.0, abs=tolerance)


def test_stalled_pipelines_are_recognised_by_half_a_second_a_pass() -> None:
    scenario = read_scenario(SCENARIOS / "korthikanti-175b_a100x64_tp8pp8.toml", ["framework=nanotron", "plan.recompute=none"])
    found = predict(scenario)
    passes = 2 * scenario.training.global_batch_size // scenario.training.micro_batch_size * scenario.plan.virtual_stages
    assert stalled(found, scenario, found.step_time_s + 0.5 * passes)
    assert not stalled(found, scenario, found.step_time_s + 0.05 * passes)
    assert not stalled(found, scenario, found.step_time_s + 3.0 * passes)
    assert not stalled(found, scenario, 1.2 * found.step_time_s)


def test_the_shipped_registry_is_small_bounded_and_pays() -> None:
    entries = constants()
    assert len([e for e in entries if e.status != "interval"]) <= 40
    assert sum(1 + len(e.shares) for e in entries if e.name in RUN_LEVEL) <= 40
    assert len({(e.name, e.group) for e in entries}) == len(entries)
    for entry in entries:
        low, high = KNOWN[entry.name].bounds
        assert low <= entry.value <= high
        assert entry.rows >= 1
        assert entry.sources
        assert json.loads(json.dumps(entry.as_json()))["group"] == entry.group
        if entry.status == "kept":
            assert entry.gain > entry.gain_se
            assert len(entry.sources) >= 3
        assert entry.status == "interval" or entry.name not in WIDTHS
    assert [e.group for e in entries if e.name == "expected_error"] == ["all"]


def test_unseen_errors_are_given_by_family_and_by_source() -> None:
    rows = unseen()
    assert (rows[0].family, rows[0].architecture, rows[0].source) == ("*", "*", "*")
    by_source = [r for r in rows if r.source != "*"]
    assert sum(r.rows for r in by_source) == rows[0].rows
    assert len(by_source) == rows[0].sources


def test_the_registry_is_written_as_it_is_shipped() -> None:
    assert as_toml(constants(), unseen()) == FILE.read_text(encoding="utf-8")


def test_the_page_of_constants_is_that_of_the_shipped_file() -> None:
    assert (data_dir("validation") / "CONSTANTS.md").read_text() == constants_text(constants(), unseen())
    entry = Constant(name="compute", family="f", value=1.25, rows=7, sources=("s", "t"), gain=0.02, gain_se=0.01)
    cells = [cell.strip() for cell in constants_text([entry]).splitlines()[-1].strip("|").split("|")]
    assert cells == ["compute", "family=f", "1.25", "7", "2", "2.00%", "1.00%", "kept"]


def test_readmes_table_is_that_of_unseen_errors(tmp_path: Path) -> None:
    text = (SCENARIOS.parent / "README.md").read_text()
    table = text.partition("<!-- unseen -->\n")[2].partition("<!-- /unseen -->")[0].splitlines()
    assert table == readme_table(unseen())
    assert f"| all | all | {unseen()[0].rows} |" in text
    copy = tmp_path / "README.md"
    copy.write_text("a\n<!-- unseen -->\nold\n<!-- /unseen -->\nb\n")
    write_readme(unseen(), copy)
    assert copy.read_text().splitlines() == ["a", "<!-- unseen -->", *table, "<!-- /unseen -->", "b"]


def test_the_command_prints_the_registry() -> None:
    found = json.loads(CliRunner().invoke(app, ["constants", "--json"]).output)
    assert found["count"] == len(found["constants"]) == len(constants())
    keys = {"name", "group", "value", "neutral", "rows", "sources", "gain", "gain_se", "status"}
    assert all(keys <= set(entry) for entry in found["constants"])
    shown = CliRunner().invoke(app, ["constants"])
    assert shown.exit_code == 0
    assert "expected_error" in shown.output


def test_a_process_prices_without_properties_of_kernels_that_are_left_out() -> None:
    code = "from simpar.specs.calibration import constant, leave_out; a = constant('kernels.odd_rows'); "
    code += "leave_out(['kernels.odd_rows']); print(a, constant('kernels.odd_rows'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(said[0]) > 1.0
    assert float(said[1]) == 1.0


def test_a_source_that_alone_shows_something_is_met_without_it() -> None:
    data = Data.of(runs(4))
    free = Data.of([replace(s, rest=s.rest + s.measured) if s.source.endswith("0") else s for s in data.samples])
    mine = np.array([s.source.endswith("0") for s in data.samples])
    plain, honest = (left_out(data, "source", select, 1, rows) for rows in (None, free))
    assert honest[mine] == pytest.approx(plain[mine] + 1.0)
    assert honest[~mine] == pytest.approx(plain[~mine])


@given(st.sampled_from(FACTORS), st.floats(0.8, 1.6))
@settings(max_examples=20, deadline=None)
def test_a_constant_of_another_group_changes_nothing(name: str, value: float) -> None:
    with calibrated_by((Constant(name=name, family="torchtitan", value=value),)):
        assert getattr(calibration_for("megatron-core", "hopper"), name) == 1.0
        assert getattr(calibration_for("torchtitan", "hopper"), name) == value


def test_what_was_read_off_runs_stands_in_the_registry_as_it_is_used() -> None:
    entries = {(entry.name, entry.family): entry.value for entry in constants() if entry.status == "read off"}
    host = {family: framework(family).host for name, family in entries if name.startswith("host.")}
    assert entries["routing.spread", ANY] == TRAINED_SPREAD[0]
    layers = {family: policy.layer_cpu_s for family, policy in host.items()}
    assert {"megatron-core", "nanotron", "transformers"} == set(host)
    assert layers == {family: value for (name, family), value in entries.items() if name == "host.layer_s"}
    assert entries["host.expert_layer_s", "megatron-core"] == host["megatron-core"].expert_layer_cpu_s
    assert entries["host.layer_slowdown", "megatron-core"] == host["megatron-core"].layer_slowdown
