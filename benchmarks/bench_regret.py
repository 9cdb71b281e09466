"""Does the layout that would be chosen win? Regret of the predicted best on published and measured sweeps, as JSON.

python benchmarks/bench_regret.py [--data FILE] [--rows N] [--where source=nanotron] [--workers N]

Every sweep (runs that differ in their layout alone) is ranked by the predicted step time; the regret is how much slower the first
of that ranking was measured than the measured best. `--rows` takes whole sweeps, drawn by a fixed rule, up to about N runs.
Sweeps in which the choice costs more than 10 % are named with both layouts.

Of sweeps with five layouts or more it also says how good the advice of `simpar search` would have been: the regret of the first,
of the best of the first three and of the designs to try, how often these contain one within 1 % of the best (90 % are promised),
how many they are, and how often what is given a chance to be best is. The two errors behind these chances are measured on the
sweeps of all other sources (`errors_of`), so that no sweep is judged by errors that were seen on it; `errors` are those of all
sweeps, for the registry.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from simpar.evidence.runs import Report, matches, validate_runs
from simpar.program.program import FloatArray
from simpar.ranking import LAYOUT_KEYS, SWEEP_KEYS, rank_sweeps
from simpar.searching.decision import TOLD, Rival, decide
from simpar.specs.base import stored_runs
from simpar.statistics import Comparison

MEAN, WORST = 0.02, 0.10
"""What is wanted: the mean regret over sweeps, and that of every sweep."""


def sampled(data: Path, where: list[str], rows: int | None) -> list[str]:
    """Lines of the file, or of the files of a folder: all, or those of whole sweeps up to about `rows` runs."""
    sweeps: dict[str, list[str]] = defaultdict(list)
    for path in sorted(data.glob("*.jsonl")) if data.is_dir() else [data]:
        for line in path.read_text().splitlines():
            row = json.loads(line) if line.strip() else None
            known = row.get("group", row) if row else None
            if known and matches(known, where):
                sweeps[json.dumps([known.get(key) for key in SWEEP_KEYS])].append(line)
    found: list[str] = []
    for name in sorted(sweeps, key=lambda text: crc32(text.encode())):
        if rows is None or len(found) < rows:
            found += sweeps[name]
    return found


def predicted(lines: list[str], workers: int) -> Report:
    """These runs, predicted and compared."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return validate_runs(path, workers=workers)


def by_source(report: Report) -> dict[str, dict[str, Any]]:
    """Sweeps, mean and worst regret, and Kendall's tau of every source."""
    found = defaultdict(list)
    for sweep in report.sweeps:
        found[str(sweep.key["source"])].append(sweep)
    return {
        source: {
            "sweeps": len(own), "mean_regret": float(np.mean([s.regret_1 for s in own])),
            "worst_regret": max(s.regret_1 for s in own),
            "above_10_percent": sum(s.regret_1 > WORST for s in own),
            "mean_tau": float(np.mean([s.tau for s in own if s.tau is not None] or [np.nan])),
        }
        for source, own in sorted(found.items())
    }  # fmt: skip


ADVISED: Final = 5
"""Layouts of a sweep from which on it tells of advice."""
RIVALS: Final = 10
"""Layouts that a search returns."""
BINS: Final = ((0.0, 0.05), (0.05, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 0.7), (0.7, 1.01))
_MESH: Final = ("tp", "pp", "cp", "ep", "dp", "micro_batch")


@dataclass(frozen=True, slots=True)
class Advice:
    """What `decide` would have said of one sweep, and what was measured.

    Attributes:
        regrets: of the first, of the best of three, of the best of those to try.
        size: designs to try.
        chances: (chance to be best, whether it was) of every layout.
        optimism: logarithm of measured over predicted of the first, over the sweep's median; and what was expected of it.
    """

    source: str
    regrets: tuple[float, float, float]
    size: int
    chances: tuple[tuple[float, bool], ...]
    optimism: tuple[float, float]


Errors = tuple[float, float]
"""Standard deviations of a logarithm: what layouts of one mesh and micro-batch share, a layout's own."""
NEAR: Final = 0.1
"""Logarithm of the ratio of two predictions up to which a search weighs them against each other."""
NORMAL: Final = 0.6745
"""Median of the absolute value of a standard normal."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Layouts of one sweep, fastest predicted first: measured and predicted seconds, and the mesh of each."""

    source: str
    measured: FloatArray
    predicted: FloatArray
    meshes: tuple[tuple[Any, ...], ...]


def sweep_of(report: Report, key: Mapping[str, Any]) -> Sweep | None:
    """One sweep; None where it has too few layouts."""
    times: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in (row for row in report.rows if _of(row, key)):
        times[tuple(row.group.get(k) for k in LAYOUT_KEYS)].append((float(row.measured), float(row.predicted or 0.0)))
    if len(times) < ADVISED:
        return None
    layouts = sorted(((*np.median(np.array(t), axis=0), name) for name, t in times.items()), key=lambda each: each[1])
    measured, predicted = (np.array([each[i] for each in layouts]) for i in (0, 1))
    return Sweep(str(key["source"]), measured, predicted, tuple(tuple(n[LAYOUT_KEYS.index(k)] for k in _MESH) for *_, n in layouts))


def errors_of(sweeps: Sequence[Sweep]) -> Errors:
    """The two errors, from differences between pairs of layouts of one sweep; medians, because single runs stall.

    Layouts of one mesh differ by two own errors, others by two errors of their meshes besides; sweeps count alike. Only pairs
    predicted within `NEAR` of each other count: those are what a search weighs, and pairs further apart are further off.
    """
    same, other = [], []
    for sweep in sweeps:
        ratio = np.log(sweep.measured / sweep.predicted)
        pairs: dict[bool, list[float]] = {True: [], False: []}
        for i, j in combinations(range(len(ratio)), 2):
            if abs(np.log(sweep.predicted[i] / sweep.predicted[j])) > NEAR:
                continue
            pairs[sweep.meshes[i] == sweep.meshes[j]].append(abs(ratio[i] - ratio[j]))
        for found, own in ((same, pairs[True]), (other, pairs[False])):
            found += [float(np.median(own))] if own else []
    own, apart = (float(np.median(found)) / NORMAL / 2.0**0.5 if found else 0.0 for found in (same, other))
    return max(apart**2 - own**2, 0.0) ** 0.5, own


def advice_of(sweep: Sweep, errors: Errors) -> Advice:
    """The advice on one sweep under these errors."""
    rivals = [Rival(float(np.log(t)), {}, mesh) for t, mesh in zip(sweep.predicted[:RIVALS], sweep.meshes, strict=False)]
    found = decide(rivals, mesh_error=errors[0], own_error=errors[1])
    least, first = sweep.measured.min(), sweep.measured[:RIVALS]
    regrets = (first[0], first[:3].min(), first[list(found.try_these)].min())
    ratio = np.log(sweep.measured / sweep.predicted)
    best = int(first.argmin())
    chances = tuple((float(p), i == best) for i, p in enumerate(found.best_probability))
    optimism = float(ratio[0] - np.median(ratio)), found.optimism
    return Advice(sweep.source, tuple(float(r / least - 1.0) for r in regrets), len(found.try_these), chances, optimism)  # type: ignore[arg-type]


def advised(report: Report, *, without: str = "") -> dict[str, Any]:
    """How good the advice is over all sweeps, those of sources with `without` in their names left out."""
    sweeps = [s for each in report.sweeps if (s := sweep_of(report, each.key)) and not (without and without in s.source)]
    every = [advice_of(sweep, errors_of([s for s in sweeps if s.source != sweep.source])) for sweep in sweeps]
    if not every:
        return {"sweeps": 0}
    regrets = np.array([a.regrets for a in every])
    chances = np.array([pair for a in every for pair in a.chances])
    bins = []
    for low, high in BINS:
        own = chances[(chances[:, 0] >= low) & (chances[:, 0] < high)]
        bins += [{"said": float(own[:, 0].mean()), "were": float(own[:, 1].mean()), "layouts": len(own)}] if len(own) else []
    return {
        "sweeps": len(every), "layouts": sum(len(s.measured) for s in sweeps), "sources": sorted({s.source for s in sweeps}),
        "errors": dict(zip(("mesh", "own"), errors_of(sweeps), strict=True)),
        "mean_regret": float(regrets[:, 0].mean()), "mean_regret_of_three": float(regrets[:, 1].mean()),
        "mean_regret_of_those_to_try": float(regrets[:, 2].mean()), "those_to_try": float(np.mean([a.size for a in every])),
        "contain_the_best_within_1_percent": float((regrets[:, 2] <= TOLD).mean()), "best_probability": bins,
        "optimism": float(np.mean([a.optimism[0] for a in every])),
        "optimism_of_independent_errors": float(np.mean([a.optimism[1] for a in every])),
    }  # fmt: skip


def failures(report: Report) -> list[dict[str, Any]]:
    """Sweeps whose choice costs more than 10 %: what was chosen, what was best, both measured and predicted."""
    found = []
    for sweep in report.sweeps:
        if sweep.regret_1 > WORST:
            own = [row for row in report.rows if _of(row, sweep.key)]
            chosen, best = min(own, key=lambda row: row.predicted or 0.0), min(own, key=lambda row: float(row.measured))
            found.append({**sweep.as_json(), "chosen": _layout(chosen), "best": _layout(best)})
    return sorted(found, key=lambda each: -each["regret_1"])


def _of(row: Comparison, key: Any) -> bool:
    return row.metric == "step_time_s" and row.predicted is not None and all(row.group.get(k) == v for k, v in key.items())


def _layout(row: Comparison) -> dict[str, Any]:
    layout = {key: row.group.get(key) for key in LAYOUT_KEYS if row.group.get(key) is not None}
    return {**layout, "measured_s": row.measured, "predicted_s": row.predicted}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=stored_runs())
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--where", action="append", default=[])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if not options.data.exists():
        raise SystemExit(f"no runs at {options.data}: give --data")
    began = time.process_time()
    report = predicted(sampled(options.data, options.where, options.rows), options.workers)
    sweeps = rank_sweeps(report.rows)
    print(json.dumps({
        "ranking": report.ranking.as_json(), "wanted": {"mean_regret": MEAN, "worst_regret": WORST},
        "above_2_percent": sum(s.regret_1 > MEAN for s in sweeps), "above_10_percent": sum(s.regret_1 > WORST for s in sweeps),
        "advice": advised(report), "advice_without_stalled_runs": advised(report, without="nanotron"),
        "by_source": by_source(report), "failures": failures(report), "sweeps": [s.as_json() for s in sweeps],
        "cpu_s": time.process_time() - began,
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
