"""Fit the run calibration: a handful of constants per framework and GPU architecture, on published runs, cross-validated.

    python -m simpar.validation.fit_runs --data FILE.jsonl

Each run is simulated once without constants; its waterfall splits the step into parts, and the constants scale the parts:

    step = compute * (matmul + attention) + memory * (memory-bound + optimizer) + communication * exposed
         + pass_s * stage passes + step_s + launch gaps,   the pipeline bubble shared out in proportion.

Robust (absolute relative errors by reweighted least squares), bounded, pulled towards neutral with the weight of a few rows.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpar.errors import SimparError
from simpar.specs.calibration import FILE, uncalibrated
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario
from simpar.validation.predicted import predict
from simpar.validation.run_rows import read_runs

FloatArray = NDArray[np.float64]
NAMES = ("compute", "memory", "communication", "pass_s", "step_s")
NEUTRAL = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
LOW = np.array([0.95, 0.9, 0.9, 0.0, 0.0])
# A part cannot run much faster inside a step than alone; a little, because shared tables differ from a run's own libraries.
HIGH = np.array([1.6, 3.0, 4.0, 20e-3, 2.0])
UNIT = np.array([1.0, 1.0, 1.0, 1e-3, 0.1])
"""Scale of each constant, for the pull towards neutral."""
PRIOR_ROWS = 2.0
OUTLIER = 0.4
"""Relative error at which a run's weight has halved."""
LEAST_ROWS = 6
PARTS = {
    "ideal: model FLOPs at peak": 0, "matmul and attention below peak": 0, "recomputation": 0, "memory-bound kernels": 1,
    "optimizer": 1, "tensor parallel, exposed": 2, "context parallel, exposed": 2, "expert parallel, exposed": 2,
    "pipeline sends, exposed": 2, "data parallel, exposed": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One run (group: framework, architecture, generation): its parts in seconds [len(NAMES)], the rest that no constant
    scales, and what was measured."""

    group: tuple[str, str, str]
    gpu: str
    source: str
    model: str
    parts: tuple[float, ...]
    rest: float
    measured: float


def sample_of(scenario: Scenario, source: str, model: str, measured: float) -> Sample | None:
    """Simulate one run without constants and split it."""
    with uncalibrated():
        try:
            found = predict(scenario)
        except SimparError:
            return None
    spec = framework(scenario.framework, scenario.framework_version)
    parts, rest = np.zeros(len(NAMES)), 0.0
    for name, seconds in found.waterfall.items():
        if name in PARTS:
            parts[PARTS[name]] += seconds
        else:
            rest += seconds
    bubble = found.waterfall.get("pipeline bubble and imbalance", 0.0)
    busy = found.step_time_s - bubble
    stretch = found.step_time_s / busy if busy > 0 else 1.0
    parts[:3] *= stretch
    rest = (rest - bubble) * stretch
    plan, training = scenario.plan, scenario.training
    dp = plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)
    microbatches = training.global_batch_size / (training.micro_batch_size * dp)
    parts[3] = 2.0 * microbatches * plan.virtual_stages * stretch
    parts[4] = 1.0
    since = f"{spec.since[0]:04d}-{spec.since[1]:02d}"
    group = (spec.name, scenario.hardware.gpu.architecture, since)
    return Sample(group, scenario.hardware.gpu.name, source, model, tuple(parts), rest, measured)


def fit(samples: Sequence[Sample], fixed: frozenset[int] = frozenset()) -> FloatArray:
    """Constants of one group; those in `fixed` stay neutral."""
    parts = np.array([s.parts for s in samples])
    measured = np.array([s.measured for s in samples])
    target = (measured - np.array([s.rest for s in samples])) / measured
    design = parts / measured[:, None]
    theta = NEUTRAL.copy()
    free = [i for i in range(len(NAMES)) if i not in fixed]
    for _ in range(60):
        error = design @ theta - target
        # Absolute errors, and runs that are far off for reasons of their own (a sick cluster) hardly count.
        weight = 1.0 / np.maximum(np.abs(error), 0.02) / (1.0 + (error / OUTLIER) ** 4)
        # The pull is worth PRIOR_ROWS rows of 10 % error for a change of one unit.
        pull = PRIOR_ROWS * weight.mean() * 0.1**2 / UNIT**2
        before = theta.copy()
        for i in free:
            column = design[:, i]
            others = design @ theta - column * theta[i]
            numerator = (weight * column * (target - others)).sum() + pull[i] * NEUTRAL[i]
            denominator = (weight * column * column).sum() + pull[i]
            theta[i] = min(max(numerator / denominator, LOW[i]), HIGH[i])
        if np.abs(theta - before).max() < 1e-6:
            break
    return theta


def errors(samples: Sequence[Sample], theta: FloatArray) -> FloatArray:
    """predicted / measured - 1."""
    parts = np.array([s.parts for s in samples])
    rest = np.array([s.rest for s in samples])
    measured = np.array([s.measured for s in samples])
    found: FloatArray = (parts @ theta + rest) / measured - 1.0
    return found


def cross_validated(samples: Sequence[Sample], fixed: frozenset[int] = frozenset()) -> FloatArray:
    """Errors of rows that were left out: by source where there are several, else by fifths of the models."""
    keys = [s.source for s in samples]
    if len(set(keys)) < 2:
        models = sorted({s.model for s in samples})
        fold = {m: i % 5 for i, m in enumerate(models)}
        keys = [str(fold[s.model]) for s in samples] if len(models) >= 3 else [str(i % 5) for i in range(len(samples))]
    found = []
    for key in sorted(set(keys)):
        inside = [s for s, k in zip(samples, keys, strict=True) if k != key]
        outside = [s for s, k in zip(samples, keys, strict=True) if k == key]
        theta = fit(inside, fixed) if len(inside) >= 3 else NEUTRAL
        found.append(errors(outside, theta))
    return np.concatenate(found)


def entry(group: tuple[str, str, str], samples: Sequence[Sample]) -> str:
    """One TOML table of the calibration file."""
    theta = fit(samples)
    before, after = np.median(np.abs(errors(samples, NEUTRAL))), np.median(np.abs(errors(samples, theta)))
    crossed = np.median(np.abs(cross_validated(samples)))
    name, architecture, since = group
    lines = ["[[entries]]", f'framework = "{name}"', f'architecture = "{architecture}"', f'since = "{since}"']
    lines += [f"{n} = {v:.5g}" for n, v in zip(NAMES, theta, strict=True)]
    sources = ", ".join(f'"{s}"' for s in sorted({s.source for s in samples}))
    lines += [f"rows = {len(samples)}", f"sources = [{sources}]", f"median_before = {before:.4f}", f"median_after = {after:.4f}",
              f"median_cross_validated = {crossed:.4f}"]  # fmt: skip
    without = {n: np.median(np.abs(cross_validated(samples, frozenset({i})))) for i, n in enumerate(NAMES)}
    lines.append("without = {" + ", ".join(f"{n} = {v:.4f}" for n, v in without.items()) + "}")
    return "\n".join(lines) + "\n"


def collect(data: Path, workers: int) -> list[Sample]:
    """Every run of the file that has a step time and can be expressed."""
    jobs = [
        (run.scenario, str(run.group.get("source", "")), str(run.group.get("model_name", "")), run.measured.step_time_s)
        for run in read_runs(data)
        if run.scenario is not None and run.measured is not None and run.measured.step_time_s
    ]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(sample_of, *zip(*jobs, strict=True), chunksize=16)
        return [s for s in found if s is not None and math.isfinite(sum(s.parts))]


def main() -> None:
    """Fit all groups and write the calibration file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    samples = collect(options.data, options.workers)
    groups: dict[tuple[str, str, str], list[Sample]] = defaultdict(list)
    chips: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        name, architecture, since = sample.group
        groups[sample.group].append(sample)
        groups[name, sample.gpu, since].append(sample)
        chips[architecture].append(sample)
    text = ["# Written by `python -m simpar.validation.fit_runs`; do not edit. See specs/calibration.py.\n"]
    for group, members in sorted(groups.items()):
        if len(members) >= LEAST_ROWS:
            text.append(entry(group, members))
    for chip, members in sorted(chips.items()):
        # For frameworks without runs of their own: every framework counts the same, whatever its number of rows.
        by_framework: dict[str, list[Sample]] = defaultdict(list)
        for member in members:
            by_framework[member.group[0]].append(member)
        least = max(min(len(m) for m in by_framework.values()), 20)
        thinned = [s for m in by_framework.values() for s in m[:: max(len(m) // least, 1)]]
        text.append(entry(("*", chip, "2000-01"), thinned))
    options.out.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
