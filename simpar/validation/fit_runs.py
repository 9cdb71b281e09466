"""Fit the run calibration: a handful of constants per framework and GPU architecture, on published runs, cross-validated.

    python -m simpar.validation.fit_runs --data FILE.jsonl

Each run is simulated without constants; its waterfall splits the step into parts, and the constants scale the parts:

    step = compute * (matmul + attention) + memory * (memory-bound + optimizer) + communication * exposed
         + pass_s * stage passes + step_s + launch gaps,   the pipeline bubble shared out in proportion.

What overlaps does not scale in proportion, so every run is simulated again under the constants found, and they are fitted around
there, twice.

Robust (absolute relative errors by reweighted least squares) and bounded. Groups are nested: all runs of an architecture, those
of a family of frameworks on it (of one descent), on one of its GPUs, of one framework, of one generation of the framework; each
is pulled towards the constants of the group around it with the weight of some rows, so that few runs move them little. What a GPU
differs from its architecture by is the family's and counts for each of its frameworks; a framework with enough runs on a GPU has
constants of its own there. Groups keep the constants they had where new ones gain next to nothing. A source counts as the square
root of its rows.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simpar.errors import SimparError
from simpar.specs.calibration import (
    BOUNDS,
    FILE,
    RunCalibration,
    calibrated_by,
    calibration_for,
    family_name,
    read_calibrations,
)
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario
from simpar.validation.constants_md import write_constants
from simpar.validation.predicted import predict
from simpar.validation.run_rows import read_runs

FloatArray = NDArray[np.float64]
NAMES = ("compute", "memory", "communication", "pass_s", "step_s")
NEUTRAL = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
LOW, HIGH = (np.array(ends) for ends in zip(*(BOUNDS[name] for name in NAMES), strict=True))
UNIT = np.array([1.0, 1.0, 1.0, 1e-3, 0.1])
"""Scale of each constant, for the pull towards neutral."""
PRIOR_ROWS = (10.0, 2.0, 10.0, 2.0, 20.0, 7.0)
"""Weight of the pull towards the group around, in rows that gain 10 % error when a factor moves by 1: architecture (towards
neutral), family, family on a GPU, framework, generation, framework on a GPU. Chosen by the error of sources left out wholly, 0.106
on average over sources against 0.162 without constants, and among weights as good as these so that no bound of
validation/bounds.toml is passed."""
AROUND = (0, 0, 1, 1, 3, 4)
"""Level of the group around each level's."""
SHARED = (3, 4)
"""Levels whose runs come from several GPUs; their constants hold before what each GPU differs by."""
ERROR_ROWS = 7.0
"""Weight of the error around in that of a group, in rows: a few runs hardly tell how far off the next will be. The likelihood of
the errors of sources left out, under intervals drawn without them, is flat between 4 and 10 and falls on both sides."""
OUTLIER = 0.4
"""Relative error at which a run's weight has halved."""
LEAST_ROWS = 2
"""For constants of one GPU."""
KEPT = 2.0
"""A group's constants are replaced where its runs are met better by more than so many standard errors of the gain: one
that chance alone gives once in forty times."""
LEAST_GAIN = 0.001
"""Nor are any replaced that meet their runs better by less than a tenth of a point, however surely."""
ROUNDS = 2
"""Simulations around constants found."""
EVER = "2000-01"
Group = tuple[str, str, str]
"""Framework or "*", architecture or GPU, first month."""
EXCHANGES = "expert parallel, exposed"
PARTS = {
    "ideal: model FLOPs at peak": 0, "matmul and attention below peak": 0, "recomputation": 0, "memory-bound kernels": 1,
    "optimizer": 1, "tensor parallel, exposed": 2, "context parallel, exposed": 2, EXCHANGES: 2,
    "pipeline sends, exposed": 2, "data parallel, exposed": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One run (group: framework, architecture, generation): its parts in seconds [len(NAMES)], the rest that no constant
    scales, and what was measured."""

    group: Group
    gpu: str
    source: str
    model: str
    parts: tuple[float, ...]
    rest: float
    measured: float


def sample_of(
    scenario: Scenario, source: str, model: str, measured: float, entries: tuple[RunCalibration, ...] = ()
) -> Sample | None:
    """Simulate one run under the constants of `entries` (none: without) and split it around them."""
    spec = framework(scenario.framework, scenario.framework_version)
    gpu = scenario.hardware.gpu
    with calibrated_by(entries):
        try:
            found = predict(scenario)
        except SimparError:
            return None
        here = calibration_for(spec.name, spec.since, gpu.architecture, gpu.name)
    theta = np.array([getattr(here, name) for name in NAMES])
    parts = np.zeros(len(NAMES))
    for name, seconds in found.waterfall.items():
        # DeepEP's exchanges are not scaled (costs/pricer.py).
        if name in PARTS and not (name == EXCHANGES and scenario.plan.ep_dispatcher != "alltoall"):
            parts[PARTS[name]] += seconds
    busy = found.step_time_s - found.waterfall.get("pipeline bubble and imbalance", 0.0)
    stretch = found.step_time_s / busy if busy > 0 else 1.0
    parts[:3] *= stretch / theta[:3]
    plan, training = scenario.plan, scenario.training
    dp = plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)
    microbatches = training.global_batch_size / (training.micro_batch_size * dp)
    parts[3] = 2.0 * microbatches * plan.virtual_stages * stretch
    parts[4] = 1.0
    since = f"{spec.since[0]:04d}-{spec.since[1]:02d}"
    rest = found.step_time_s - float(np.dot(parts, theta))
    return Sample((spec.name, gpu.architecture, since), gpu.name, source, model, tuple(parts), rest, measured)


def groups_of(sample: Sample) -> tuple[Group, ...]:
    """The groups of a run, in the order of PRIOR_ROWS."""
    name, architecture, since = sample.group
    family = family_name(name)
    return (
        ("*", architecture, EVER), (family, architecture, EVER), (family, sample.gpu, EVER), (name, architecture, EVER),
        sample.group, (name, sample.gpu, since),
    )  # fmt: skip


def fit(samples: Sequence[Sample], prior: FloatArray, rows: float, fixed: frozenset[int] = frozenset()) -> FloatArray:
    """Constants of one group, pulled towards `prior` with the weight of `rows` runs; those in `fixed` stay neutral."""
    parts = np.array([s.parts for s in samples])
    measured = np.array([s.measured for s in samples])
    target = (measured - np.array([s.rest for s in samples])) / measured
    design = parts / measured[:, None]
    counts = Counter(s.source for s in samples)
    share = np.array([counts[s.source] ** -0.5 for s in samples])
    share /= share.mean()
    theta = prior.copy()
    theta[list(fixed)] = NEUTRAL[list(fixed)]
    free = [i for i in range(len(NAMES)) if i not in fixed]
    for _ in range(60):
        error = design @ theta - target
        # Absolute errors, and runs that are far off for reasons of their own (a sick cluster) hardly count.
        weight = share / np.maximum(np.abs(error), 0.005) / (1.0 + (error / OUTLIER) ** 4)
        pull = rows * weight.mean() * 0.1**2 / UNIT**2
        before = theta.copy()
        for i in free:
            column = design[:, i]
            others = design @ theta - column * theta[i]
            numerator = (weight * column * (target - others)).sum() + pull[i] * prior[i]
            denominator = (weight * column * column).sum() + pull[i]
            theta[i] = min(max(numerator / denominator, LOW[i]), HIGH[i])
        if np.abs(theta - before).max() < 1e-5:
            break
    return theta


def fit_nested(samples: Sequence[Sample], fixed: frozenset[int] = frozenset()) -> dict[Group, FloatArray]:
    """Constants of every group, widest first."""
    found: dict[Group, FloatArray] = {}
    for level, rows in enumerate(PRIOR_ROWS):
        members: dict[Group, list[Sample]] = defaultdict(list)
        for sample in samples:
            members[groups_of(sample)[level]].append(sample)
        for group, inside in members.items():
            own = level == len(PRIOR_ROWS) - 1
            if own and len(inside) < LEAST_ROWS:
                continue
            prior = found[groups_of(inside[0])[AROUND[level]]] if level else NEUTRAL
            if own:
                prior = on_gpu(prior, inside[0], found)
            chosen: Sequence[Sample] = inside if level else _thinned(inside)
            if level in SHARED:
                chosen = [_moved(sample, _of_gpu(sample, found)) for sample in inside]
            found[group] = fit(chosen, prior, rows, fixed)
    return found


def on_gpu(theta: FloatArray, sample: Sample, found: dict[Group, FloatArray]) -> FloatArray:
    """Constants of an architecture as they hold on the run's GPU."""
    return np.asarray(np.clip(theta + _of_gpu(sample, found), LOW, HIGH))


def _of_gpu(sample: Sample, found: dict[Group, FloatArray]) -> FloatArray:
    """What the constants of the run's family on its GPU differ from those on its architecture by."""
    _, everywhere, here, *_ = groups_of(sample)
    return np.asarray(found[here] - found[everywhere]) if here in found and everywhere in found else np.zeros(len(NAMES))


def _moved(sample: Sample, by: FloatArray) -> Sample:
    """The run as constants that are `by` larger see it."""
    return replace(sample, rest=sample.rest + float(np.dot(sample.parts, by)))


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most 20 rows of a framework more than the smallest has: what holds for all is not what the largest sweep says."""
    by_framework: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_framework[sample.group[0]].append(sample)
    least = max(min(len(m) for m in by_framework.values()), 20)
    return [s for m in by_framework.values() for s in m[:: max(len(m) // least, 1)]]


def constants_for(sample: Sample, found: dict[Group, FloatArray]) -> FloatArray:
    """Those of the framework on the GPU, else the narrowest on the architecture and what the GPU differs by."""
    everybody, family, _, framework_ever, generation, own = groups_of(sample)
    if own in found:
        return found[own]
    wide = next((found[g] for g in (generation, framework_ever, family, everybody) if g in found), NEUTRAL)
    return on_gpu(wide, sample, found)


def error(sample: Sample, theta: FloatArray) -> float:
    """predicted / measured - 1."""
    return float((np.dot(sample.parts, theta) + sample.rest) / sample.measured - 1.0)


def cross_validated(samples: Sequence[Sample], fixed: frozenset[int] = frozenset()) -> dict[int, float]:
    """Row -> error with its source left out of every fit; of a framework's only source, with a fifth of its models left out."""
    frameworks: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        frameworks[sample.group[0]].add(sample.source)
    keys = []
    for sample in samples:
        alone = len(frameworks[sample.group[0]]) == 1
        models = sorted({s.model for s in samples if s.source == sample.source}) if alone else []
        keys.append((sample.source, models.index(sample.model) % 5 if alone else 0))
    found: dict[int, float] = {}
    for key in sorted(set(keys)):
        constants = fit_nested([s for s, k in zip(samples, keys, strict=True) if k != key], fixed)
        for index, sample in enumerate(samples):
            if keys[index] == key:
                found[index] = error(sample, constants_for(sample, constants))
    return found


def settled(
    found: dict[Group, FloatArray], fresh: Sequence[Sample], before: Sequence[RunCalibration], held: Sequence[Sample]
) -> dict[Group, FloatArray]:
    """`found` with the constants of groups as they were `before`, where new ones gain next to nothing.

    Near its best a fit is flat: without this every refit would move predictions that it does not better. Of groups with fewer
    rows than the pull towards the group around weighs, any gain above `LEAST_GAIN` counts. The constants of a family on an
    architecture and on its GPUs stay or go together, as their differences count.

    Args:
        fresh, held: the same runs split around `found` and around `before`: a split is exact only around the constants that it
            was simulated with.
    """
    old = {(e.framework, e.architecture, e.since): np.array([getattr(e, name) for name in NAMES]) for e in before}
    rows: dict[tuple[int, Group], list[int]] = defaultdict(list)
    for index, sample in enumerate(held):
        for level, group in enumerate(groups_of(sample)):
            rows[level, group].append(index)
    bundles: dict[object, set[Group]] = defaultdict(set)
    better: set[object] = set()
    for (level, group), members in rows.items():
        bundle = _bundle(level, group, held[members[0]])
        bundles[bundle].add(group)
        if group not in found or group not in old:
            better.add(bundle)
            continue
        gain = np.array([_loss(level, group, held[i], old) - _loss(level, group, fresh[i], found) for i in members])
        # What a few runs gain has no error to speak of; they are mostly what the group around says, which has moved.
        doubt = KEPT * float(gain.std()) / math.sqrt(len(gain)) if len(gain) >= PRIOR_ROWS[-1] else 0.0
        if gain.mean() > max(doubt, LEAST_GAIN):
            better.add(bundle)
    kept = {group for bundle, groups in bundles.items() if bundle not in better for group in groups}
    return {group: old[group] if group in kept else theta for group, theta in found.items()}


def _bundle(level: int, group: Group, sample: Sample) -> object:
    """What stays or goes with a group: a family's constants on an architecture and on its GPUs."""
    return groups_of(sample)[1] if level in (1, 2) else (level, group)


def _loss(level: int, group: Group, sample: Sample, constants: dict[Group, FloatArray]) -> float:
    """|error| of a run under a group's constants; one that is far off for reasons of its own hardly counts, as in `fit`."""
    theta = constants[group]
    found = abs(error(sample, on_gpu(theta, sample, constants) if level in SHARED else theta))
    return found / (1.0 + (found / OUTLIER) ** 4)


def unseen_errors(samples: Sequence[Sample], crossed: dict[int, float]) -> dict[Group, float]:
    """Median error of every group on runs left out, drawn towards that of the group around, see `ERROR_ROWS`."""
    found: dict[Group, float] = {}
    for level, around in enumerate(AROUND):
        members: dict[Group, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            members[groups_of(sample)[level]].append(index)
        for group, rows in members.items():
            own = float(np.median([abs(crossed[i]) for i in rows]))
            outer = found.get(groups_of(samples[rows[0]])[around], own)
            found.setdefault(group, (len(rows) * own + ERROR_ROWS * outer) / (len(rows) + ERROR_ROWS))
    return found


def entries(
    samples: Sequence[Sample], plain: Sequence[Sample], constants: dict[Group, FloatArray], around: dict[Group, Sequence[Sample]]
) -> list[str]:
    """TOML tables of the calibration file.

    Args:
        samples: what the constants were fitted on.
        plain: the same runs simulated without constants.
        around: group -> the same runs split around its constants.
    """
    without_any = [error(sample, NEUTRAL) for sample in plain]
    crossed = cross_validated(samples)
    unseen = unseen_errors(samples, crossed)
    without = {name: cross_validated(samples, frozenset({i})) for i, name in enumerate(NAMES)}
    members: dict[Group, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        for group in groups_of(sample):
            members[group].append(index)
    found = []
    for group, theta in sorted(constants.items()):
        inside = [around[group][i] for i in members[group]]
        shared = group in {groups_of(inside[0])[level] for level in SHARED}
        after = [error(s, on_gpu(theta, s, constants) if shared else theta) for s in inside]
        found.append(_entry(group, theta, samples, members[group], unseen[group], crossed, without, without_any, after))
    return found


def _entry(
    group: Group, theta: FloatArray, samples: Sequence[Sample], rows: Sequence[int], unseen: float,
    crossed: dict[int, float], without: dict[str, dict[int, float]], without_any: Sequence[float], with_these: Sequence[float],
) -> str:  # fmt: skip
    def median(found: Sequence[float]) -> float:
        return float(np.median(np.abs(found)))

    name, chip, since = group
    lines = ["[[entries]]", f'framework = "{name}"', f'architecture = "{chip}"', f'since = "{since}"']
    lines += [f"{n} = {v:.5g}" for n, v in zip(NAMES, theta, strict=True)]
    sources = ", ".join(f'"{s}"' for s in sorted({samples[i].source for i in rows}))
    before = median([without_any[i] for i in rows])
    lines += [f"rows = {len(rows)}", f"sources = [{sources}]",
              f"median_before = {before:.4f}", f"median_after = {median(with_these):.4f}",
              f"median_cross_validated = {median([crossed[i] for i in rows]):.4f}", f"expected_error = {unseen:.4f}"]  # fmt: skip
    lines.append("without = {" + ", ".join(f"{n} = {median([w[i] for i in rows]):.4f}" for n, w in without.items()) + "}")
    return "\n".join(lines) + "\n"


def collect(data: Path, workers: int, entries: tuple[RunCalibration, ...] = ()) -> list[Sample]:
    """Every run of the file that has a step time, can be expressed and that the data does not exclude; see `sample_of`."""
    jobs = [
        (run.scenario, str(run.group.get("source", "")), str(run.group.get("model_name", "")), run.measured.step_time_s, entries)
        for run in read_runs(data)
        if run.scenario is not None and not run.excluded and run.measured.step_time_s
    ]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(sample_of, *zip(*jobs, strict=True), chunksize=16)
        return [s for s in found if s is not None and math.isfinite(sum(s.parts))]


def as_entries(constants: dict[Group, FloatArray]) -> tuple[RunCalibration, ...]:
    """Constants of groups as the simulator looks them up."""
    return tuple(
        RunCalibration(framework=name, architecture=chip, since=since, **dict(zip(NAMES, map(float, theta), strict=True)))
        for (name, chip, since), theta in constants.items()
    )


def main() -> None:
    """Fit all groups and write the calibration file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    around = plain = collect(options.data, options.workers)
    for _ in range(ROUNDS):
        around = collect(options.data, options.workers, as_entries(fit_nested(around)))
    head = "# Written by `python -m simpar.validation.fit_runs`; do not edit. See specs/calibration.py.\n"
    constants = fit_nested(around)
    shown: dict[Group, Sequence[Sample]] = dict.fromkeys(constants, around)
    if FILE.is_file():
        before = read_calibrations(FILE)
        fresh, held = (collect(options.data, options.workers, known) for known in (as_entries(constants), before))
        chosen = settled(constants, fresh, before, held)
        shown = {group: fresh if theta is constants[group] else held for group, theta in chosen.items()}
        constants = chosen
    options.out.write_text("\n".join([head, *entries(around, plain, constants, shown)]), encoding="utf-8")
    if options.out == FILE:
        write_constants(entries=read_calibrations(FILE))


if __name__ == "__main__":
    main()
