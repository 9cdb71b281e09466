"""The run calibration: lookup by framework, time and chip; fitting recovers constants; the shipped file is sane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simpar.specs.calibration import NEUTRAL, UNSEEN_ERROR, calibrated_by, calibration_for, calibrations, uncalibrated
from simpar.specs.scenario import read_scenario
from simpar.validation import fit_runs
from simpar.validation.fit_runs import (
    HIGH,
    LEAST_GAIN,
    LOW,
    NAMES,
    Sample,
    as_entries,
    constants_for,
    cross_validated,
    error,
    fit,
    fit_nested,
    sample_of,
    settled,
    unseen_errors,
)
from simpar.validation.predicted import predict


def samples(
    theta: np.ndarray, count: int = 40, noise: float = 0.0, outliers: int = 0, framework: str = "f", gpu: str = "gpu", seed: int = 1
) -> list[Sample]:
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        parts = generator.uniform(0.2, 1.0, 5) * np.array([10.0, 3.0, 2.0, 200.0, 1.0])
        measured = (parts @ theta + 0.1) * float(np.exp(noise * generator.standard_normal()))
        if index < outliers:
            measured *= 10
        names = (f"source{index % 4}", f"model{index % 7}")
        found.append(Sample((framework, "chip", "2024-01"), gpu, *names, tuple(parts), 0.1, measured))
    return found


SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
TRUE = np.array([1.1, 1.5, 1.2, 2e-3, 0.2])


def test_fit_recovers_the_constants() -> None:
    """The large parts' constants to a few per cent; what is small is pulled towards neutral, and the runs are met all the same."""
    found = fit(samples(TRUE), fit_runs.NEUTRAL, 2.0)
    assert found[:2] == pytest.approx(TRUE[:2], rel=0.05)
    assert max(abs(error(s, found)) for s in samples(TRUE)) < 0.05


def test_fit_shrugs_off_sick_runs() -> None:
    """A quarter of the runs ten times too slow: the rest is still met."""
    found = fit(samples(TRUE, count=80, noise=0.02, outliers=20), fit_runs.NEUTRAL, 2.0)
    healthy = samples(TRUE, count=80, noise=0.02)[20:]
    assert np.median([abs(error(s, found)) for s in healthy]) < 0.05


def test_few_runs_stay_near_the_group_around_them() -> None:
    """Three runs of another GPU that are 30 % slower move its constants part of the way; many take them there."""
    slow = 1.3 * TRUE
    short = []
    for count in (3, 150):
        mine = samples(slow, count=count, gpu="other", seed=2)
        found = fit_nested([*samples(TRUE, count=200), *mine])["f", "other", "2024-01"]
        short.append(-np.mean([error(s, found) for s in mine]))
    # With the constants of the group around alone, every run would come out 1 - 1/1.3 = 23 % too fast.
    assert 0.01 < short[0] < 0.2
    assert abs(short[1]) < 0.03


def test_what_a_gpu_differs_by_counts_for_every_framework_of_the_family() -> None:
    """One framework ran on both GPUs, its relative on the old one alone: on the new one it is expected to gain as much."""
    old = np.array([1.3, 1.0, 1.0, 0.0, 0.0])
    new = old - np.array([0.15, 0.0, 0.0, 0.0, 0.0])
    runs = [
        *samples(old, 60, framework="megatron-core", gpu="old"),
        *samples(old, 60, framework="nemo", gpu="old", seed=2),
        *samples(new, 60, framework="megatron-core", gpu="new", seed=3),
    ]
    found = fit_nested(runs)
    (unseen,) = samples(new, 1, framework="nemo", gpu="new", seed=4)
    assert abs(error(unseen, constants_for(unseen, found))) < 0.04
    assert error(unseen, found["nemo", "chip", "2024-01"]) > 0.06
    with calibrated_by(as_entries(found)):
        looked_up = calibration_for("nemo", (2024, 1), "chip", "new")
        relative = calibration_for("megatron-bridge", (2024, 1), "chip", "another")
    assert [getattr(looked_up, name) for name in NAMES] == pytest.approx(constants_for(unseen, found).tolist())
    assert relative.framework == "family megatron-core"


def test_a_refit_keeps_constants_that_it_cannot_better() -> None:
    """As good as the new ones: kept; clearly worse: replaced."""
    runs = samples(TRUE, noise=0.03)
    group = ("f", "gpu", "2024-01")
    found = fit_nested(runs)
    as_good, worse = found[group] * np.array([1.0, 1.01, 1.0, 1.0, 1.0]), found[group] * 1.1
    for old, expected in ((as_good, as_good), (worse, found[group])):
        before = as_entries({group: np.clip(old, LOW, HIGH)})
        assert settled(found, runs, before, runs)[group] == pytest.approx(np.clip(expected, LOW, HIGH))


def test_of_a_few_runs_any_gain_counts() -> None:
    runs = samples(TRUE, noise=0.03)[:4]
    group = ("f", "gpu", "2024-01")
    found = fit_nested(runs)
    worse = as_entries({group: np.clip(found[group] * np.array([1.01, 1.0, 1.0, 1.0, 1.0]), LOW, HIGH)})
    gain = np.mean([abs(error(r, found[group] * np.array([1.01, 1.0, 1.0, 1.0, 1.0]))) - abs(error(r, found[group])) for r in runs])
    assert (settled(found, runs, worse, runs)[group] == found[group]).all() == (gain > LEAST_GAIN)


def test_a_source_counts_as_the_root_of_its_rows() -> None:
    """Sixteen times as many runs of one source weigh four times as much, not sixteen."""
    few, many = samples(TRUE, count=40), samples(1.3 * TRUE, count=40, seed=2)
    mixed = [replace(s, source="few") for s in few] + [replace(s, source="many") for s in many * 16]
    found = fit(mixed, fit_runs.NEUTRAL, 2.0)
    bias = np.mean([error(s, found) for s in few])
    flat = [replace(s, source=str(i)) for i, s in enumerate(mixed)]
    assert bias < np.mean([error(s, fit(flat, fit_runs.NEUTRAL, 2.0)) for s in few])


def test_cross_validation_leaves_sources_out() -> None:
    found = cross_validated(samples(TRUE, noise=0.02))
    assert len(found) == 40
    assert np.median([abs(e) for e in found.values()]) < 0.06


def test_lookup() -> None:
    """The narrowest constants win; later generations of a framework take its last; a chip without any has a wide interval;
    none when switched off."""
    entries = calibrations()
    general = {c.architecture: c for c in entries if c.framework == "*"}
    mine = max((c for c in entries if c.framework == "zero-bubble" and c.architecture == "ampere"), key=lambda c: c.since)
    year, month = (int(x) for x in mine.since.split("-"))
    assert calibration_for("zero-bubble", (year, month), "ampere") == mine
    assert calibration_for("zero-bubble", (year + 3, month), "ampere", "no such GPU") == mine
    assert calibration_for("zero-bubble", (2010, 1), "ampere").since == "2000-01"
    assert calibration_for("no such framework", (2025, 1), "hopper") == general["hopper"]
    unseen = calibration_for("megatron-core", (2025, 1), "no such chip")
    assert unseen == NEUTRAL.model_copy(update={"expected_error": UNSEEN_ERROR})
    with uncalibrated():
        assert calibration_for("zero-bubble", (year, month), "ampere") == NEUTRAL
    for entry in entries:
        year, month = (int(x) for x in entry.since.split("-"))
        assert calibration_for(entry.framework, (year, month), entry.architecture) == entry


def test_few_runs_hardly_tell_how_far_off_the_next_will_be() -> None:
    many = samples(TRUE, count=40, framework="megatron-core")
    few = samples(TRUE, count=2, framework="nemo")
    crossed = dict.fromkeys(range(40), 0.1) | {40: -0.001, 41: 0.001}
    found = unseen_errors([*many, *few], crossed)
    assert found["*", "chip", fit_runs.EVER] == pytest.approx(0.1)
    assert found["megatron-core", "gpu", "2024-01"] == pytest.approx(0.1)
    own = found["nemo", "gpu", "2024-01"]
    around = found["nemo", "chip", "2024-01"]
    assert own == pytest.approx((2 * 0.001 + fit_runs.ERROR_ROWS * around) / (2 + fit_runs.ERROR_ROWS))
    assert 0.03 < own < 0.1


def test_shipped_constants_stay_inside_their_bounds() -> None:
    for entry in calibrations():
        values = np.array([getattr(entry, name) for name in NAMES])
        assert (values >= LOW - 1e-6).all()
        assert (values <= HIGH + 1e-6).all()
        assert entry.rows >= 1
        assert 0.01 < entry.expected_error < 0.6
        assert entry.sources
        # Few rows follow the group around them.
        assert entry.median_after <= entry.median_before + (0.02 if entry.rows >= 20 else 0.1)


def test_a_run_is_split_around_the_constants_in_force() -> None:
    """At those constants the split gives the simulated step back, overlap and bubble included; from none it comes near."""
    scenario = read_scenario(SCENARIOS / "korthikanti-175b_a100x64_tp8pp8.toml")
    theta = np.array([1.2, 1.4, 1.6, 2e-4, 0.05])
    entries = as_entries({("*", scenario.hardware.gpu.architecture, "2000-01"): theta})
    with calibrated_by(entries):
        step = predict(scenario).step_time_s
    split = sample_of(scenario, "source", "model", step, entries)
    assert split is not None
    assert error(split, theta) == pytest.approx(0.0, abs=1e-9)
    plain = sample_of(scenario, "source", "model", step)
    assert plain is not None
    assert error(plain, theta) == pytest.approx(0.0, abs=0.05)
    assert error(plain, fit_runs.NEUTRAL) < -0.1
