"""Measured runs beside their predictions: step time, idle share of a pipeline, bytes on the wire, memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError
from simpar.live.cluster_in_step import InStep, Reference, in_step
from simpar.live.cluster_layouts import RunLayout
from simpar.live.cluster_predict import Predicted, Setup, kernel_counts, predict, sharding
from simpar.live.cluster_setup import sharded_over
from simpar.ranking import kendall_tau
from simpar.statistics import Comparison, ErrorSummary, summarize

FOREIGN: Final = 0.15
"""Cores: a step in which other processes used more is left out."""
CLEAN_STEPS: Final = 3
DISTURBED: Final = 0.05
"""Cores that others kept busy from which the error that counts them decides."""


@dataclass(frozen=True)
class Measured:
    """What one layout's rounds measured.

    Attributes:
        layout: what ran.
        seconds: of every step in which other processes kept less than FOREIGN cores busy, or of all where there are too few.
        rounds: median of each round.
        first: the record of the first round, with what was measured once.
        steps: measured in all.
        foreign: cores that other processes kept busy, median of the steps that count; 0 where that is not known.
        probes_s: a fixed product beside each round, the mean of the ranks; empty where there was none.
        loads: cores that other processes kept busy in each of `seconds`; empty = `foreign` in all of them.
        idle: of each rank, the share of the pipeline phase that it did not compute in each of `seconds`.
    """

    layout: RunLayout
    seconds: tuple[float, ...]
    rounds: tuple[float, ...]
    first: dict[str, Any]
    steps: int
    foreign: float = 0.0
    probes_s: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    idle: tuple[tuple[float, ...], ...] = ()

    @property
    def median_s(self) -> float:
        """Median step over all rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the middle 80 % of steps over the median: how much the machine itself varies."""
        ordered = sorted(self.seconds)
        low, high = ordered[round(0.1 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]
        return (high - low) / 2.0 / self.median_s

    @property
    def between(self) -> float:
        """Largest over smallest round, minus one: how well a layout repeats."""
        return max(self.rounds) / min(self.rounds) - 1.0


def read_runs(path: Path) -> tuple[dict[str, Any], dict[str, Measured], dict[str, Measured]]:
    """(configuration, runs, references) of a JSONL file, in order of first measurement.

    Raises:
        InputError: no such file, or it holds no measurements.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    config: dict[str, Any] = {}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["kind"] == "config":
                config = record
            else:
                found.setdefault((record["kind"], record["layout"]["name"]), []).append(record)
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                # A killed run leaves a part of its last line.
                break
            rule = "is no measurement; give the file that `simpar validate cluster` wrote"
            raise InputError(f"{path}: line {number} {rule}") from None
    if not config:
        raise InputError(f"{path}: holds no configuration; give the file that `simpar validate cluster` wrote")
    runs = {name: _measured(records) for (kind, name), records in found.items() if kind == "run"}
    references = {name: _measured(records) for (kind, name), records in found.items() if kind == "reference"}
    return config, runs, references


def _measured(records: list[dict[str, Any]]) -> Measured:
    steps = [step for record in records for step in _steps(record)]
    clean = [step for step in steps if step[1] <= FOREIGN]
    # A machine that was never left alone has no clean steps: then all count.
    used = clean if len(clean) >= CLEAN_STEPS else steps
    seconds, loads = tuple(s for s, _, _ in used), tuple(f for _, f, _ in used)
    idle = tuple(zip(*(shares for _, _, shares in used), strict=True))
    first = next((r for r in records if "collectives" in r), records[0])
    rounds = tuple(statistics.median(r["seconds"]) for r in records)
    probes = tuple(statistics.fmean(r["probe_s"]) for r in records if "probe_s" in r)
    layout = RunLayout(**records[0]["layout"])
    return Measured(layout, seconds, rounds, first, len(steps), statistics.median(loads), probes, loads, idle)


def _steps(record: dict[str, Any]) -> list[tuple[float, float, tuple[float, ...]]]:
    """(seconds, cores that others kept busy, idle share of each rank) of every step of a round."""
    seconds = record["seconds"]
    shares = list(zip(*record.get("idle", []), strict=True)) or [()] * len(seconds)
    return list(zip(seconds, record.get("foreign") or [0.0] * len(seconds), shares, strict=True))


def in_step_of(references: dict[str, Measured], setup: Setup, degrees: Sequence[int] = ()) -> InStep:
    """What the reference steps say.

    Args:
        degrees: of full sharding among the layouts that ran; none = nothing is sharded.
    """
    plain = [m for m in references.values() if not m.layout.fsdp and not m.layout.split]
    steps = {m.layout.model: (m, predict(m.layout, setup)) for m in plain}
    found = {}
    for model, (measured, p) in steps.items():
        kernels, launches = kernel_counts(p.priced)
        found[model] = Reference(measured.median_s, kernels, launches, max(p.step_time_s - kernels, 0.0))
    split = {m.layout.model: max(m.median_s, 0.0) for m in references.values() if m.layout.split}
    known = replace(in_step(found), split_s=split)
    sharded = next((m for m in references.values() if m.layout.fsdp and m.layout.model in found), None)
    if sharded is None or not degrees:
        return known
    # The same step by hand: as many micro-batches as the ranks of the smallest group have together.
    ranks, layout = min(degrees), sharded.layout
    like = predict(sharded_over(layout, ranks), setup)
    kernels, launches = kernel_counts(like.priced)
    calls, copies_s = sharding(like.priced)
    expected = ranks * (known.factor(layout.model) * kernels + known.launch_s * launches + copies_s) + found[layout.model].rest_s
    return replace(known, shard_s=max((sharded.median_s - expected) / (ranks * calls), 0.0))


@dataclass(frozen=True)
class ClusterReport:
    """All layouts of one or more runs.

    Attributes:
        rows: one per layout and metric.
        measured, predicted: by layout name.
        in_step: what the reference steps said, by world size.
        tolerance: on the mean absolute error of step times.
    """

    rows: tuple[Comparison, ...]
    measured: dict[str, Measured]
    predicted: dict[str, Predicted]
    in_step: dict[int, InStep]
    tolerance: float

    def summary(self, metric: str) -> ErrorSummary:
        """Errors of one metric."""
        return summarize(row for row in self.rows if row.metric == metric)

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted and measured step times."""
        rows = [row for row in self.rows if row.metric == "step_time_s" and row.predicted is not None]
        return kendall_tau([float(r.measured) for r in rows], [float(r.predicted or 0.0) for r in rows])

    @property
    def volumes_exact(self) -> tuple[int, int]:
        """(layouts whose bytes agree to the byte, layouts)."""
        rows = [row for row in self.rows if row.metric == "communication_bytes"]
        return sum(row.measured == row.predicted for row in rows), len(rows)

    @property
    def noise(self) -> float:
        """Median spread of steps of one layout."""
        return statistics.median(m.spread for m in self.measured.values()) if self.measured else 0.0

    @property
    def foreign(self) -> float:
        """Cores that other processes kept busy beside the layouts, the median."""
        return statistics.median(m.foreign for m in self.measured.values()) if self.measured else 0.0

    @property
    def beside_foreign(self) -> float | None:
        """Mean absolute error of step times when predictions count what other processes took of the host."""
        found = [abs(self.corrected(name)) for name in self.measured]
        return statistics.fmean(found) if found else None

    @property
    def probe(self) -> tuple[float, float] | None:
        """(median seconds of the fixed product, how far its slowest and fastest layout are apart, over it)."""
        found = [s for m in self.measured.values() for s in m.probes_s]
        return (statistics.median(found), (max(found) - min(found)) / statistics.median(found)) if found else None

    @property
    def judged(self) -> float | None:
        """The mean error that decides: of the steps as they were, or, where others used the host, of what they left of it."""
        raw = self.summary("step_time_s").mape
        return self.beside_foreign if self.foreign >= DISTURBED else raw

    @property
    def outside(self) -> tuple[Comparison, ...]:
        """Step times further off than the tolerance, by the error that decides."""
        rows = [r for r in self.rows if r.metric == "step_time_s"]
        return tuple(r for r in rows if abs(self.corrected(r.id) if self.foreign >= DISTURBED else r.error or 0.0) > self.tolerance)

    def corrected(self, name: str) -> float:
        """Predicted / measured - 1 of a layout's steps, each counted with what other processes took of the host in it; the median.

        Others come and go: a step is compared with the prediction beside its own load, not beside the usual one.
        """
        m, p = self.measured[name], self.predicted[name]
        loads = m.loads or [m.foreign] * len(m.seconds)
        return statistics.median(p.beside(load) / s - 1.0 for s, load in zip(m.seconds, loads, strict=True))

    @property
    def passed(self) -> bool:
        """Whether step times are within the tolerance on average, by the error that decides."""
        return self.judged is not None and self.judged <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """The object of `simpar validate cluster --json`."""
        metrics = list(dict.fromkeys(row.metric for row in self.rows))
        exact, layouts = self.volumes_exact
        return {
            "rows": [row.as_json() for row in self.rows],
            "groups": [{"by": {}, "metric": metric, **self.summary(metric).as_json()} for metric in metrics],
            "kendall_tau": self.tau, "communication_exact": {"layouts": layouts, "exact": exact},
            "mape_beside_foreign": self.beside_foreign, "mape_judged": self.judged, "foreign_cores": self.foreign,
            "foreign_cores_per_layout": {n: m.foreign for n, m in self.measured.items()},
            "probe_s": {n: list(m.probes_s) for n, m in self.measured.items()},
            "noise": self.noise, "noise_per_layout": {n: m.spread for n, m in self.measured.items()},
            "steps": {n: {"used": len(m.seconds), "measured": m.steps} for n, m in self.measured.items()},
            "between_rounds": {n: m.between for n, m in self.measured.items()},
            "in_step": {str(n): found.as_json() for n, found in self.in_step.items()},
            "outside_tolerance": [row.id for row in self.outside], "tolerance": self.tolerance, "passed": self.passed,
        }  # fmt: skip


def compare(parts: Sequence[tuple[dict[str, Measured], dict[str, Measured], Setup]], tolerance: float) -> ClusterReport:
    """Runs, references and setup of each world size, compared."""
    rows: list[Comparison] = []
    measured: dict[str, Measured] = {}
    predicted: dict[str, Predicted] = {}
    in_step: dict[int, InStep] = {}
    for runs, references, setup in parts:
        found = in_step_of(references, setup, [m.layout.dp for m in runs.values() if m.layout.fsdp])
        for name, m in runs.items():
            in_step[m.layout.world_size] = found
            p = predict(m.layout, replace(setup, in_step=found))
            measured[name], predicted[name] = m, p
            rows += compare_layout(m, p)
    return ClusterReport(tuple(rows), measured, predicted, in_step, tolerance)


def compare_layout(m: Measured, p: Predicted) -> list[Comparison]:
    """The rows of one layout."""
    layout, first = m.layout, m.first
    group = {"layout": layout.name, "ranks": layout.world_size, "model": layout.model}
    low, high = p.interval
    spread = {
        "spread": m.spread, "rounds_s": list(m.rounds), "foreign_cores": m.foreign,
        "predicted_beside_foreign_s": p.beside(m.foreign),
    }  # fmt: skip
    rows = [Comparison(layout.name, "step_time_s", m.median_s, p.step_time_s, low, high, group=group, details=spread)]
    if layout.pp > 1:
        each = layout.world_size // layout.pp
        ranks = [statistics.median(shares) for shares in m.idle]
        idle = [statistics.fmean(ranks[r * each : (r + 1) * each]) for r in range(layout.pp)]
        steps = sorted(statistics.fmean(shares) for shares in zip(*m.idle, strict=True))
        details = {"measured_per_stage": idle, "predicted_per_stage": list(p.idle), "measured_per_step": steps}
        bubble = statistics.fmean(idle), statistics.fmean(p.idle)
        rows.append(Comparison(layout.name, "bubble_fraction", *bubble, group=group, details=details))
    if layout.world_size > 1 and "collectives" in first:
        rows += _communication(layout, first, p, group)
    if "memory" in first:
        each = layout.world_size // layout.pp
        peaks = [max(v["allocated"] for v in first["memory"][r * each : (r + 1) * each]) for r in range(layout.pp)]
        worst = max(range(layout.pp), key=peaks.__getitem__)
        details = {"measured_per_stage": peaks, "predicted_per_stage": list(p.memory)}
        rows.append(Comparison(layout.name, "peak_memory_bytes", peaks[worst], p.memory[worst], group=group, details=details))
    return rows


def _communication(layout: RunLayout, first: dict[str, Any], p: Predicted, group: dict[str, Any]) -> list[Comparison]:
    """Bytes of all collectives of all ranks, and seconds in them of the busiest rank."""
    each = layout.world_size // layout.pp
    wanted: dict[str, float] = {}
    found: dict[str, float] = {}
    for rank, counts in enumerate(first["collectives"]):
        for key, (_, amount) in counts.items():
            name = "send_recv/2" if key.startswith("send_recv") else key
            found[name] = found.get(name, 0.0) + amount
        for key, (_, amount) in p.collectives(rank // each).items():
            wanted[key] = wanted.get(key, 0.0) + amount
    details = {"measured": found, "predicted": wanted}
    return [Comparison(layout.name, "communication_bytes", sum(found.values()), sum(wanted.values()), group=group, details=details)]
