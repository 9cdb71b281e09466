"""Measured runs, each simulated once and split into the parts that run-level constants scale.

step = compute * (matmul + attention) + memory * (memory-bound + optimizer) + communication * exposed
     + pass_s * stage passes + step_s + rest,   the pipeline bubble shared out in proportion.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from simpar.errors import SimparError
from simpar.evidence.predicted import Prediction, predict, stage_passes, stalled
from simpar.evidence.run_rows import read_runs
from simpar.evidence.run_type import Run
from simpar.result.interval import HALF_WIDTH
from simpar.specs.architecture import has_experts
from simpar.specs.calibration import (
    ANY,
    FACTORS,
    KNOWN,
    SECONDS,
    Constant,
    RunCalibration,
    calibrated_by,
    calibration_for,
    leave_out,
)
from simpar.specs.framework import family_of, framework
from simpar.specs.scenario import Scenario

FloatArray = NDArray[np.float64]
RUN_LEVEL: Final = (*FACTORS, *SECONDS)
MOST_ROWS: Final = 150
"""Rows of one source that take part, evenly spaced: more say nothing new about other sources."""
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
        family, architecture: its groups.
        source, model: where it was published and what was trained.
        parts: seconds that compute, memory and communication scale, passes of `pass_s`, 1 for `step_s` [len(RUN_LEVEL)].
        rest: seconds that no constant scales.
        measured: seconds.
        down, up: logarithms of the step time over the lower and of the upper end over the step time, by the parts' own intervals.
        id: of the run.
        open: whether the run leaves facts open, so that this is its usual reading.
    """

    family: str
    architecture: str
    source: str
    model: str
    parts: tuple[float, ...]
    rest: float
    measured: float
    down: float = 0.0
    up: float = 0.0
    id: str = ""
    open: bool = False


@dataclass(frozen=True, slots=True)
class Peak:
    """A measured peak memory: where it was published, whether the model has experts, log(measured / predicted), and whether the run
    leaves facts open."""

    source: str
    experts: bool
    off: float
    open: bool = False


def seen_of(run: Run, entries: tuple[Constant, ...] = ()) -> tuple[Sample | None, Peak | None]:
    """A run's step time, split around `entries`, and its peak memory, beside what is simulated under these.

    None of either where it was not measured or cannot be simulated; no step time where it was stalled.
    """
    scenario, measured, source = run.scenario, run.measured, str(run.group.get("source", ""))
    assert scenario is not None
    spec, architecture = framework(scenario.framework, scenario.framework_version), scenario.hardware.gpu.architecture
    try:
        with calibrated_by(entries):
            found = predict(scenario)
            here = calibration_for(spec.name, architecture)
    except SimparError:
        return None, None
    peaks = measured.peaks(found)
    unsure = bool(run.open_facts)
    peak = Peak(source, has_experts(scenario.model), math.log(peaks[0] / peaks[1]), unsure) if peaks else None
    if not measured.step_time_s or stalled(found, scenario, measured.step_time_s):
        return None, peak
    parts = _parts(found, scenario, np.array([getattr(here, name) for name in FACTORS]))
    known = np.array([getattr(here, name) for name in RUN_LEVEL])
    rest = found.step_time_s - float(parts @ known)
    down = _own(found.step_time_s / found.step_low_s, here.interval_down, here)
    up = _own(found.step_high_s / found.step_time_s, here.interval_up, here)
    where = (family_of(spec.name), architecture, source, str(run.group.get("model_name", "")))
    sample = Sample(*where, tuple(parts), rest, measured.step_time_s, down, up, run.id, unsure)
    return (sample if math.isfinite(sum(parts) + rest) else None), peak


def _own(end: float, factor: float, here: RunCalibration) -> float:
    """The logarithm of an interval's end without the share of what the fits had not seen."""
    whole = math.log(max(end, 1.0)) / factor
    return math.sqrt(max(whole**2 - math.log1p(HALF_WIDTH * here.expected_error) ** 2, 0.0))


def _parts(found: Prediction, scenario: Scenario, factors: FloatArray) -> FloatArray:
    parts = np.zeros(len(RUN_LEVEL))
    for name, seconds in found.waterfall.items():
        # DeepEP's exchanges are not scaled (costs/pricer.py).
        if name in PARTS and not (name == EXCHANGES and scenario.plan.ep_dispatcher != "alltoall"):
            parts[PARTS[name]] += seconds
    busy = found.step_time_s - found.waterfall.get(BUBBLE, 0.0)
    stretch = found.step_time_s / busy if busy > 0 else 1.0
    parts[:3] *= stretch / factors
    parts[3] = stage_passes(scenario) * stretch
    parts[4] = 1.0
    return parts


@dataclass(frozen=True)
class Data:
    """Samples as arrays: parts [rows, run-level], seconds [rows]."""

    samples: tuple[Sample, ...]
    parts: FloatArray
    rest: FloatArray
    measured: FloatArray
    _masks: dict[tuple[str, str, tuple[str, ...]], NDArray[np.bool_]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Data:
        """The arrays of `samples`."""
        parts, rest, measured = (np.array([getattr(s, name) for s in samples]) for name in ("parts", "rest", "measured"))
        return cls(tuple(samples), parts, rest, measured)

    @cached_property
    def sources(self) -> list[str]:
        """Names of the sources, sorted."""
        return sorted({s.source for s in self.samples})

    @cached_property
    def source_index(self) -> NDArray[np.intp]:
        """Index into `sources` of each row [rows]."""
        index = {source: i for i, source in enumerate(self.sources)}
        return np.array([index[s.source] for s in self.samples])

    @cached_property
    def rows_of_source(self) -> NDArray[np.intp]:
        """How many rows each row's source has [rows]."""
        return np.asarray(np.bincount(self.source_index)[self.source_index])

    def split(self, group: Sequence[str]) -> tuple[Data, Data]:
        """(All rows but those of the sources of `group`, theirs)."""
        outside = [s for s in self.samples if s.source not in group]
        return Data.of(outside), Data.of([s for s in self.samples if s.source in group])

    def shares(self, entry: Constant) -> FloatArray:
        """How much of a constant holds for each row [rows]."""
        given = dict(entry.shares)
        return np.where(self.members(entry), [given.get(s.family, 1.0) for s in self.samples], 0.0)

    def members(self, entry: Constant) -> NDArray[np.bool_]:
        """Rows [rows] that a constant holds for."""
        key = (entry.family, entry.architecture, entry.architectures)
        if key not in self._masks:
            self._masks[key] = np.array([entry.holds(s.family, s.architecture) for s in self.samples], dtype=bool)
        return self._masks[key]

    def sources_of(self, entry: Constant) -> list[str]:
        """Sources of the rows that a constant holds for, sorted."""
        return sorted({s.source for s, kept in zip(self.samples, self.members(entry), strict=True) if kept})


def predicted(data: Data, chosen: Sequence[Constant]) -> FloatArray:
    """Step times [rows] under `chosen`; nested groups combined and kept within their bounds as `calibration_for` does."""
    factors = np.ones((len(data.samples), len(FACTORS)))
    seconds = np.zeros((len(data.samples), len(SECONDS)))
    for entry in chosen:
        shares = data.shares(entry)
        if entry.name in FACTORS:
            factors[:, FACTORS.index(entry.name)] *= entry.value**shares
        elif entry.name in SECONDS:
            seconds[:, SECONDS.index(entry.name)] += entry.value * shares
    for table, names in ((factors, FACTORS), (seconds, SECONDS)):
        for column, name in enumerate(names):
            table[:, column] = np.clip(table[:, column], *KNOWN[name].bounds)
    return np.asarray((data.parts[:, :3] * factors).sum(1) + (data.parts[:, 3:] * seconds).sum(1) + data.rest)


def errors(data: Data, chosen: Sequence[Constant]) -> FloatArray:
    """predicted / measured - 1 of each row [rows]."""
    return np.asarray(predicted(data, chosen) / data.measured - 1.0)


def evenly(count: int) -> list[int]:
    """Of `count` rows, at most `MOST_ROWS`, evenly spaced."""
    most = min(count, MOST_ROWS)
    return [i * count // most for i in range(most)]


def collect(
    files: Sequence[Path], workers: int, entries: tuple[Constant, ...], only: Container[str] = ANY, without: tuple[str, ...] = ()
) -> tuple[list[Sample], list[Peak]]:
    """The runs of the files that can be expressed, at most `MOST_ROWS` of a source: step times and peaks.

    Args:
        only: sources; none = all.
        without: properties of kernels that prices leave out.
    """
    jobs = [
        run
        for file in files
        for run in read_runs(file)
        if run.scenario is not None and not run.excluded and not run.skipped and not run.measured.out_of_memory
    ]
    rows = defaultdict(list)
    for run in jobs:
        source = str(run.group.get("source", ""))
        if only == ANY or source in only:
            rows[source].append(run)
    kept = [members[i] for members in rows.values() for i in evenly(len(members))]
    with ProcessPoolExecutor(workers, initializer=leave_out, initargs=(without,)) as pool:
        found = pool.map(partial(seen_of, entries=entries), kept, chunksize=8)
        seen = list(track(found, "runs", len(kept)))
    return [s for s, _ in seen if s is not None], [p for _, p in seen if p is not None]
