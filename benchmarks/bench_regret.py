"""Does the layout that would be chosen win? Regret of the predicted best on published and measured sweeps, as JSON.

python benchmarks/bench_regret.py [--data FILE] [--rows N] [--where source=nanotron] [--workers N]

Every sweep (runs that differ in their layout alone) is ranked by the predicted step time; the regret is how much slower the first
of that ranking was measured than the measured best. `--rows` takes whole sweeps, drawn by a fixed rule, up to about N runs.
Sweeps in which the choice costs more than 10 % are named with both layouts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from simpar.evidence.runs import Report, matches, validate_runs
from simpar.ranking import LAYOUT_KEYS, SWEEP_KEYS, rank_sweeps
from simpar.statistics import Comparison

MEAN, WORST = 0.02, 0.10
"""What is wanted: the mean regret over sweeps, and that of every sweep."""


def default_data() -> Path:
    """The shared runs."""
    root = os.environ.get("SIMPAR_SHARED_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    return Path(root) / "runs" / "runs.jsonl"


def sampled(path: Path, where: list[str], rows: int | None) -> list[str]:
    """Lines of the file: all, or those of whole sweeps up to about `rows` runs."""
    sweeps: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line) if line.strip() else None
        if row and matches(row, where):
            sweeps[json.dumps([row.get(key) for key in SWEEP_KEYS])].append(line)
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
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--where", action="append", default=[])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if not options.data.exists():
        raise SystemExit(f"no runs at {options.data}: give --data, or SIMPAR_SHARED_DATA")
    began = time.process_time()
    report = predicted(sampled(options.data, options.where, options.rows), options.workers)
    sweeps = rank_sweeps(report.rows)
    print(json.dumps({
        "ranking": report.ranking.as_json(), "wanted": {"mean_regret": MEAN, "worst_regret": WORST},
        "above_2_percent": sum(s.regret_1 > MEAN for s in sweeps), "above_10_percent": sum(s.regret_1 > WORST for s in sweeps),
        "by_source": by_source(report), "failures": failures(report), "sweeps": [s.as_json() for s in sweeps],
        "cpu_s": time.process_time() - began,
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
