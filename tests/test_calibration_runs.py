"""The run calibration: lookup by framework, time and chip; fitting recovers constants; the shipped file is sane."""

from __future__ import annotations

import numpy as np
import pytest

from simpar.specs.calibration import NEUTRAL, calibration_for, calibrations, uncalibrated
from simpar.validation.fit_runs import HIGH, LOW, NAMES, Sample, cross_validated, errors, fit


def samples(theta: np.ndarray, count: int = 40, noise: float = 0.0, outliers: int = 0) -> list[Sample]:
    generator = np.random.default_rng(1)
    found = []
    for index in range(count):
        parts = generator.uniform(0.2, 1.0, 5) * np.array([10.0, 3.0, 2.0, 200.0, 1.0])
        measured = (parts @ theta + 0.1) * float(np.exp(noise * generator.standard_normal()))
        if index < outliers:
            measured *= 10
        names = (f"source{index % 4}", f"model{index % 7}")
        found.append(Sample(("f", "chip", "2024-01"), "gpu", *names, tuple(parts), 0.1, measured))
    return found


TRUE = np.array([1.1, 1.5, 1.2, 2e-3, 0.2])


def test_fit_recovers_the_constants() -> None:
    """The large parts' constants to a few per cent; what is small is pulled towards neutral, and the runs are met all the same."""
    found = fit(samples(TRUE))
    assert found[:2] == pytest.approx(TRUE[:2], rel=0.05)
    assert np.abs(errors(samples(TRUE), found)).max() < 0.05


def test_fit_shrugs_off_sick_runs() -> None:
    """A quarter of the runs ten times too slow: the rest is still met."""
    found = fit(samples(TRUE, count=80, noise=0.02, outliers=20))
    healthy = samples(TRUE, count=80, noise=0.02)[20:]
    assert np.median(np.abs(errors(healthy, found))) < 0.05


def test_cross_validation_leaves_sources_out() -> None:
    assert np.median(np.abs(cross_validated(samples(TRUE, noise=0.02)))) < 0.06


def test_lookup() -> None:
    """Particular constants win unless they did worse on unseen runs; none when switched off."""
    entries = calibrations()
    general = {c.architecture: c for c in entries if c.framework == "*"}
    mine = next(c for c in entries if c.framework == "zero-bubble" and c.architecture == "ampere")
    year, month = (int(x) for x in mine.since.split("-"))
    assert mine.median_cross_validated < general["ampere"].median_cross_validated
    assert calibration_for("zero-bubble", (year, month), "ampere") == mine
    assert calibration_for("no such framework", (2025, 1), "hopper") == general["hopper"]
    assert calibration_for("megatron-core", (2025, 1), "no such chip") == NEUTRAL
    with uncalibrated():
        assert calibration_for("zero-bubble", (year, month), "ampere") == NEUTRAL
    for entry in entries:
        year, month = (int(x) for x in entry.since.split("-"))
        found = calibration_for(entry.framework, (year, month), entry.architecture)
        assert found.median_cross_validated <= entry.median_cross_validated


def test_shipped_constants_stay_inside_their_bounds() -> None:
    for entry in calibrations():
        values = np.array([getattr(entry, name) for name in NAMES])
        assert (values >= LOW - 1e-6).all()
        assert (values <= HIGH + 1e-6).all()
        assert entry.rows >= 1
        assert entry.sources
        assert entry.median_after <= entry.median_before + 0.02
