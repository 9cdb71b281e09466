"""Fit the registry of constants on published runs, and keep only what pays on sources that the fit has not seen.

    python -m simpar.evidence.fit_constants --data FILE.jsonl [FILE.jsonl ...]

Every run is simulated once under the constants at hand. Its waterfall splits the step into parts that the constants scale,

    step = compute * (matmul + attention) + memory * (memory-bound + optimizer) + communication * exposed
         + pass_s * stage passes + step_s + rest,   the pipeline bubble shared out in proportion,

The fit is robust least squares on log errors (scipy, a pseudo-Huber loss); a source weighs as the square root of its rows; nested
groups multiply.

Constants are chosen one after the other, the one with the most gain on left-out sources first. One stays only where that gain
exceeds its own standard error over sources, tested again once all are chosen. The error on unseen sources that is reported repeats
the whole choice without each source (`unseen_errors`).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from simpar.errors import SimparError
from simpar.evidence.constants_md import write_constants
from simpar.evidence.predicted import Prediction, predict, stalled
from simpar.evidence.run_rows import read_runs
from simpar.result.interpret import HALF_WIDTH
from simpar.specs.calibration import (
    ANY,
    BOUNDS,
    FACTORS,
    FILE,
    NEUTRAL,
    SECONDS,
    Constant,
    Unseen,
    calibrated_by,
    calibration_for,
    constants,
)
from simpar.specs.framework import family_of, framework
from simpar.specs.scenario import Scenario

FloatArray = NDArray[np.float64]
RUN_LEVEL: Final = (*FACTORS, *SECONDS)
UNIT: Final = {"compute": 0.15, "memory": 0.3, "communication": 0.3, "pass_s": 1e-3, "step_s": 0.03}
"""Scale of each constant: a pull of `RIDGE` towards neutral in these units keeps what the data do not tell at its neutral value."""
RIDGE: Final = 0.1
HUBER: Final = 0.05
"""Relative error up to which errors count squared; beyond it they count linearly."""
LEAST_SOURCES: Final = 3
"""Fewest sources of a group with run-level constants of its own."""
MOST_ROWS: Final = 150
"""Rows of one source that take part, evenly spaced: more say nothing new about other sources."""
WORST: Final = 1.0
"""Largest absolute relative error that a row counts with in a mean over sources."""
SHRINK: Final = 3.0
"""Weight of the group around in the expected error of a group, in sources."""
TRIED: Final = 8
"""Candidates whose gain on left-out sources is computed at each step, of those that gain most with little refitting."""
FOLDS: Final = 12
"""Groups of sources that are left out in turn while constants are chosen."""
MOST: Final = 30
"""Run-level constants at most."""
PARTS: Final = {
    "ideal: model FLOPs at peak": 0, "matmul and attention below peak": 0, "recomputation": 0, "memory-bound kernels": 1,
    "optimizer": 1, "tensor parallel, exposed": 2, "context parallel, exposed": 2, "expert parallel, exposed": 2,
    "pipeline sends, exposed": 2, "data parallel, exposed": 2,
}  # fmt: skip
BUBBLE: Final = "pipeline bubble and imbalance"
EXCHANGES: Final = "expert parallel, exposed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run, split around the constants it was simulated with.

    Attributes:
        family, architecture, gpu: its groups.
        source, model: where it was published and what was trained.
        parts: seconds that compute, memory and communication scale, passes of `pass_s`, 1 for `step_s` [len(RUN_LEVEL)].
        rest: seconds that no constant scales.
        measured: seconds.
    """

    family: str
    architecture: str
    gpu: str
    source: str
    model: str
    parts: tuple[float, ...]
    rest: float
    measured: float


def sample_of(scenario: Scenario, source: str, model: str, measured: float, entries: tuple[Constant, ...] = ()) -> Sample | None:
    """Simulate one run under `entries` and split it around them; none where it cannot be simulated or was stalled."""
    spec, gpu = framework(scenario.framework, scenario.framework_version), scenario.hardware.gpu
    try:
        with calibrated_by(entries):
            found = predict(scenario)
            here = calibration_for(spec.name, gpu.architecture, gpu.name)
    except SimparError:
        return None
    if stalled(found, scenario, measured):
        return None
    parts = _parts(found, scenario, np.array([getattr(here, name) for name in FACTORS]))
    known = np.array([getattr(here, name) for name in RUN_LEVEL])
    rest = found.step_time_s - float(parts @ known)
    return Sample(family_of(spec.name), gpu.architecture, gpu.name, source, model, tuple(parts), rest, measured)


def _parts(found: Prediction, scenario: Scenario, factors: FloatArray) -> FloatArray:
    parts = np.zeros(len(RUN_LEVEL))
    for name, seconds in found.waterfall.items():
        # DeepEP's exchanges are not scaled (costs/pricer.py).
        if name in PARTS and not (name == EXCHANGES and scenario.plan.ep_dispatcher != "alltoall"):
            parts[PARTS[name]] += seconds
    busy = found.step_time_s - found.waterfall.get(BUBBLE, 0.0)
    stretch = found.step_time_s / busy if busy > 0 else 1.0
    parts[:3] *= stretch / factors
    plan, training = scenario.plan, scenario.training
    dp = plan.dp or scenario.world_size // (plan.tp * plan.cp * plan.pp)
    parts[3] = 2.0 * training.global_batch_size / (training.micro_batch_size * dp) * plan.virtual_stages * stretch
    parts[4] = 1.0
    return parts


@dataclass(frozen=True)
class Data:
    """Samples as arrays: parts [rows, run-level], seconds [rows], weights [rows]."""

    samples: tuple[Sample, ...]
    parts: FloatArray
    rest: FloatArray
    measured: FloatArray
    weight: FloatArray
    _masks: dict[tuple[str, str, str, tuple[str, ...]], NDArray[np.bool_]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Data:
        """The arrays of `samples`."""
        counts = Counter(s.source for s in samples)
        weight = np.array([counts[s.source] ** -0.5 for s in samples])
        parts, rest, measured = (np.array([getattr(s, name) for s in samples]) for name in ("parts", "rest", "measured"))
        return cls(tuple(samples), parts, rest, measured, weight / weight.mean())

    @cached_property
    def sources(self) -> list[str]:
        """Names of the sources, sorted."""
        return sorted({s.source for s in self.samples})

    @cached_property
    def source_index(self) -> NDArray[np.intp]:
        """Index into `sources` of each row [rows]."""
        index = {source: i for i, source in enumerate(self.sources)}
        return np.array([index[s.source] for s in self.samples])

    def split(self, groups: Sequence[Sequence[str]]) -> tuple[tuple[Data, Data], ...]:
        """(All rows but those of a group of sources, its rows) of every group."""
        pairs = []
        for group in groups:
            inside = [s for s in self.samples if s.source in group]
            pairs.append((Data.of([s for s in self.samples if s.source not in group]), Data.of(inside)))
        return tuple(pairs)

    @cached_property
    def folds(self) -> tuple[tuple[Data, Data], ...]:
        """Every source is left out once, `FOLDS` groups of sources one after the other."""
        return self.split([self.sources[start::FOLDS] for start in range(min(FOLDS, len(self.sources)))])

    def members(self, entry: Constant) -> NDArray[np.bool_]:
        """Rows [rows] that a constant holds for."""
        key = (entry.family, entry.architecture, entry.gpu, entry.architectures)
        if key not in self._masks:
            self._masks[key] = np.array([entry.holds(s.family, s.architecture, s.gpu) for s in self.samples], dtype=bool)
        return self._masks[key]


def predicted(data: Data, chosen: Sequence[Constant], values: Sequence[float] | FloatArray | None = None) -> FloatArray:
    """Step times [rows] under `chosen`, with `values` in place of theirs."""
    factors = np.ones((len(data.samples), len(FACTORS)))
    seconds = np.zeros((len(data.samples), len(SECONDS)))
    for entry, value in zip(chosen, [e.value for e in chosen] if values is None else values, strict=True):
        inside = data.members(entry)
        if entry.name in FACTORS:
            factors[inside, FACTORS.index(entry.name)] *= value
        elif entry.name in SECONDS:
            seconds[inside, SECONDS.index(entry.name)] += value
    return np.asarray((data.parts[:, :3] * factors).sum(1) + (data.parts[:, 3:] * seconds).sum(1) + data.rest)


def fit(data: Data, chosen: Sequence[Constant]) -> tuple[Constant, ...]:
    """`chosen` with the values that meet `data` best."""
    from scipy.optimize import least_squares  # an extra: only fits need it

    if not chosen:
        return ()
    start = np.array([e.value for e in chosen])
    low, high = (np.array([BOUNDS[e.name][end] for e in chosen]) for end in (0, 1))
    neutral, unit = (np.array([table[e.name] for e in chosen]) for table in (NEUTRAL, UNIT))
    root = np.sqrt(data.weight)

    def residuals(values: FloatArray) -> FloatArray:
        off = np.log(np.maximum(predicted(data, chosen, values), 1e-9) / data.measured) / HUBER
        robust = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off * off) - 1.0))
        return np.concatenate([root * robust, RIDGE / HUBER * (values - neutral) / unit])

    found = least_squares(residuals, np.clip(start, low + 1e-9, high - 1e-9), bounds=(low, high), x_scale=unit, max_nfev=40)
    return tuple(e.model_copy(update={"value": float(v)}) for e, v in zip(chosen, found.x, strict=True))


def errors(data: Data, chosen: Sequence[Constant]) -> FloatArray:
    """predicted / measured - 1 of each row [rows]."""
    return np.asarray(predicted(data, chosen) / data.measured - 1.0)


def by_source(data: Data, found: FloatArray) -> FloatArray:
    """Mean absolute error of each source's rows [sources], no row counting more than `WORST`."""
    off = np.minimum(np.abs(found), WORST)
    return np.asarray(np.bincount(data.source_index, off) / np.bincount(data.source_index))


def held_out(data: Data, chosen: Sequence[Constant]) -> FloatArray:
    """Mean absolute error of each source [sources] with the values of `chosen` fitted without it (and the rest of its fold)."""
    found = np.zeros(len(data.sources))
    for others, inside in data.folds:
        found[[data.sources.index(source) for source in inside.sources]] = by_source(inside, errors(inside, fit(others, chosen)))
    return found


def left_out(data: Data, chosen: Sequence[Constant]) -> FloatArray:
    """predicted / measured - 1 [rows], with the values of `chosen` fitted without each row's source."""
    found = np.zeros(len(data.samples))
    for others, inside in data.split([[source] for source in data.sources]):
        found[data.source_index == data.sources.index(inside.sources[0])] = errors(inside, fit(others, chosen))
    return found


def gain_of(better: FloatArray, worse: FloatArray) -> tuple[float, float]:
    """(Mean over sources of the error that goes, its standard error)."""
    saved = worse - better
    return float(saved.mean()), float(saved.std() / math.sqrt(len(saved)))


def candidates(data: Data) -> list[Constant]:
    """Every constant that could be fitted: those of groups with enough sources."""
    values = {key: sorted({getattr(s, key) for s in data.samples}) for key in ("family", "architecture", "gpu")}
    groups: list[dict[str, str]] = [{}, *({key: chip} for key in ("architecture", "family") for chip in values[key])]
    groups += [{"family": f, key: c} for f in values["family"] for key in ("architecture", "gpu") for c in values[key]]
    found = []
    for group in groups:
        entry = Constant(name="compute", value=1.0, **group)
        if len({s.source for s, inside in zip(data.samples, data.members(entry), strict=True) if inside}) >= LEAST_SOURCES:
            seen = architectures_of(data, entry)
            found += [Constant(name=name, value=NEUTRAL[name], architectures=seen, **group) for name in RUN_LEVEL]
    return found


def architectures_of(data: Data, entry: Constant) -> tuple[str, ...]:
    """Architectures that at least `LEAST_SOURCES` sources of a constant's group ran on."""
    sources: dict[str, set[str]] = defaultdict(set)
    for sample, inside in zip(data.samples, data.members(entry), strict=True):
        if inside:
            sources[sample.architecture].add(sample.source)
    return tuple(sorted(name for name, found in sources.items() if len(found) >= LEAST_SOURCES))


def select(data: Data, *, progress: bool = False) -> tuple[Constant, ...]:
    """The constants that pay on left-out sources, fitted on all of `data`; see the module."""
    chosen: tuple[Constant, ...] = ()
    now = held_out(data, chosen)
    left = candidates(data)
    while len(chosen) < MOST:
        found = [(gain_of(crossed, now), trial, crossed) for trial, crossed in _trials(data, chosen, left)]
        paying = [f for f in found if f[0][0] > f[0][1]]
        if not paying:
            break
        (gain, doubt), chosen, now = max(paying, key=lambda f: f[0][0] - f[0][1])
        if progress:
            added = chosen[-1]
            print(f"{added.name} {added.group}: gain {gain:.4f} +- {doubt:.4f}, left out {now.mean():.4f}")
    return _pruned(data, chosen)


def _trials(data: Data, chosen: tuple[Constant, ...], left: Sequence[Constant]) -> list[tuple[tuple[Constant, ...], FloatArray]]:
    """The most promising constants added to `chosen`, each with its errors on left-out sources."""
    base = by_source(data, errors(data, chosen))
    promise = []
    for entry in left:
        if any(entry.name == e.name and entry.group == e.group for e in chosen):
            continue
        steps = [entry.neutral + k * UNIT[entry.name] for k in (-1, -0.5, 0.5, 1, 3)]
        trials = [entry.model_copy(update={"value": v}) for v in steps if BOUNDS[entry.name][0] <= v <= BOUNDS[entry.name][1]]
        gains = [gain_of(by_source(data, errors(data, (*chosen, t))), base)[0] for t in trials]
        best = int(np.argmax(gains))
        promise.append((gains[best], trials[best]))
    promise.sort(key=lambda p: -p[0])
    tried = [fit(data, (*chosen, trial)) for gain, trial in promise[:TRIED] if gain > 0.0]
    return [(trial, held_out(data, trial)) for trial in tried]


def _pruned(data: Data, chosen: tuple[Constant, ...]) -> tuple[Constant, ...]:
    """`chosen` without what no longer pays beside the others, each with its gain."""
    while True:
        now = held_out(data, chosen)
        gains = []
        for entry in chosen:
            others = fit(data, tuple(e for e in chosen if e is not entry))
            gains.append(gain_of(now, held_out(data, others)))
        worst = min(range(len(chosen)), key=lambda i: gains[i][0] - gains[i][1], default=None)
        if worst is None or gains[worst][0] > gains[worst][1]:
            return tuple(_described(data, e, g) for e, g in zip(chosen, gains, strict=True))
        chosen = fit(data, tuple(e for i, e in enumerate(chosen) if i != worst))


def _described(data: Data, entry: Constant, gain: tuple[float, float] = (0.0, 0.0)) -> Constant:
    inside = data.members(entry)
    sources = sorted({s.source for s, kept in zip(data.samples, inside, strict=True) if kept})
    update = {"rows": int(inside.sum()), "sources": tuple(sources), "gain": gain[0], "gain_se": gain[1]}
    return entry.model_copy(update=update)


def unseen_errors(data: Data, workers: int = 2) -> FloatArray:
    """predicted / measured - 1 [rows], with the whole choice and fit repeated without each row's source."""
    found = np.zeros(len(data.samples))
    with ProcessPoolExecutor(workers) as pool:
        alone = data.split([[source] for source in data.sources])
        chosen = pool.map(select, [others for others, _ in alone])
        for index, entries in enumerate(track(chosen, "sources left out", len(data.sources))):
            found[data.source_index == index] = errors(alone[index][1], entries)
    return found


def expected_errors(data: Data, unseen: FloatArray) -> list[Constant]:
    """Median error on left-out sources of every family on an architecture, pulled towards the group around by `SHRINK` sources.

    A group of fewer than `LEAST_SOURCES` sources takes the error of the group around it.
    """

    def shrunk(members: NDArray[np.bool_], around: float) -> float:
        rows = by_source_median(data, unseen, members)
        return float((sum(rows) + SHRINK * around) / (len(rows) + SHRINK))

    everywhere = np.ones(len(data.samples), dtype=bool)
    overall = float(np.median(by_source_median(data, unseen, everywhere)))
    first = Constant(name="expected_error", value=overall, status="interval")
    found = [first.model_copy(update={"architectures": architectures_of(data, first)})]
    pairs = sorted({(s.family, ANY) for s in data.samples} | {(s.family, s.architecture) for s in data.samples})
    around = {ANY: overall}
    for family, architecture in pairs:
        entry = Constant(name="expected_error", family=family, architecture=architecture, value=0.0, status="interval")
        inside = data.members(entry)
        if len({s.source for s, kept in zip(data.samples, inside, strict=True) if kept}) < LEAST_SOURCES:
            continue
        value = shrunk(inside, around.get(family, overall))
        if architecture == ANY:
            around[family] = value
        found.append(entry.model_copy(update={"value": value, "architectures": architectures_of(data, entry)}))
    return [_described(data, entry) for entry in found]


def unseen_table(data: Data, unseen: FloatArray, expected: Sequence[Constant]) -> list[Unseen]:
    """Errors on unseen sources: of all runs, of every family, of every family on an architecture with enough sources."""
    neutral = np.abs(errors(data, ()))
    off = np.abs(unseen)
    widths = np.zeros(len(data.samples))
    for entry in expected:  # wide groups first, so that the narrowest stays
        widths[data.members(entry)] = HALF_WIDTH * entry.value
    inside_interval = np.abs(np.log1p(unseen)) <= np.log1p(widths)
    found = []
    groups = {(ANY, ANY)} | {(s.family, ANY) for s in data.samples} | {(s.family, s.architecture) for s in data.samples}
    for family, architecture in sorted(groups):
        rows = data.members(Constant(name="compute", family=family, architecture=architecture, value=1.0))
        sources = len({s.source for s, kept in zip(data.samples, rows, strict=True) if kept})
        if sources < LEAST_SOURCES and architecture != ANY:
            continue
        figures = (
            np.median(neutral[rows]),
            neutral[rows].mean(),
            np.median(off[rows]),
            off[rows].mean(),
            inside_interval[rows].mean(),
        )
        names = ("neutral_median", "neutral_mean", "median", "mean", "coverage")
        values = {name: float(value) for name, value in zip(names, figures, strict=True)}
        found.append(Unseen(family=family, architecture=architecture, rows=int(rows.sum()), sources=sources, **values))
    return found


def by_source_median(data: Data, found: FloatArray, members: NDArray[np.bool_]) -> list[float]:
    """Median absolute error of each source's rows among `members`."""
    rows: dict[str, list[float]] = defaultdict(list)
    for sample, error, inside in zip(data.samples, found, members, strict=True):
        if inside:
            rows[sample.source].append(abs(float(error)))
    return [float(np.median(values)) for values in rows.values()]


def collect(files: Sequence[Path], workers: int, entries: tuple[Constant, ...]) -> list[Sample]:
    """The runs of the files that have a step time and can be expressed; at most `MOST_ROWS` of a source."""
    jobs = [
        (run.scenario, str(run.group.get("source", "")), str(run.group.get("model_name", "")), run.measured.step_time_s)
        for file in files
        for run in read_runs(file)
        if run.scenario is not None and not run.excluded and run.measured.step_time_s and not run.measured.out_of_memory
    ]
    rows: dict[str, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        rows[job[1]].append(index)
    kept = sorted(i for members in rows.values() for i in members[:: -(-len(members) // MOST_ROWS)])
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(partial(sample_of, entries=entries), *zip(*(jobs[i] for i in kept), strict=True), chunksize=8)
        return [s for s in track(found, "runs", len(kept)) if s is not None and math.isfinite(sum(s.parts) + s.rest)]


def as_toml(entries: Iterable[Constant], unseen: Iterable[Unseen] = ()) -> str:
    """The registry file."""
    lines = ["# Written by `python -m simpar.evidence.fit_constants`; do not edit. See specs/calibration.py.", ""]
    for entry in entries:
        lines.append("[[constants]]")
        given = [(key, getattr(entry, key)) for key in ("name", "family", "architecture", "gpu")]
        lines += [f'{key} = "{value}"' for key, value in given if value != ANY]
        lines += [f"{key} = {getattr(entry, key):.5g}" for key in ("value", "gain", "gain_se")]
        if entry.architectures:
            lines.append(f"architectures = [{', '.join(chr(34) + a + chr(34) for a in entry.architectures)}]")
        sources = ", ".join('"' + source.replace('"', "'") + '"' for source in entry.sources)
        lines += [f"rows = {entry.rows}", f"sources = [{sources}]", f'status = "{entry.status}"', ""]
    for row in unseen:
        lines.append("[[unseen]]")
        table = row.model_dump()
        lines += [f'{key} = "{value}"' for key, value in table.items() if isinstance(value, str)]
        lines += [f"{key} = {value:.5g}" for key, value in table.items() if not isinstance(value, str)] + [""]
    return "\n".join(lines)


def main() -> None:
    """Fit, test and write the registry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    data = Data.of(collect(options.data, options.workers, constants()))
    first = select(data, progress=True)
    # What overlaps does not scale in proportion: the chosen constants are fitted again around themselves.
    data = Data.of(collect(options.data, options.workers, first))
    chosen = _pruned(data, fit(data, first))
    unseen = unseen_errors(data, options.workers)
    print(f"sources left out, everything refitted: mean {by_source(data, unseen).mean():.4f} over sources, "
          f"median {np.median(np.abs(unseen)):.4f} over rows")  # fmt: skip
    expected = expected_errors(data, left_out(data, chosen))
    found = [*chosen, *(e for e in constants() if e.status == "one source" or e.name.startswith("site.")), *expected]
    rows = unseen_table(data, unseen, expected)
    options.out.write_text(as_toml(found, rows), encoding="utf-8")
    if options.out == FILE:
        write_constants(entries=found, rows=rows)


if __name__ == "__main__":
    main()
