"""Shares of the peak bandwidth by class of memory-bound kernel on a GPU, from `membound.csv`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from simpar.costs.memory_bound import BEST_SHARE, DEFAULT_CLASSES, class_share
from simpar.evidence.memory_tables import MemoryRow, memory_rows
from simpar.specs.kernel_constants import MemoryClass

TIERS = ("tuned", "framework", "eager")


def fit_classes(path: Path, gpu: str, architecture: str) -> tuple[dict[str, MemoryClass], float]:
    """(classes with rows on this GPU or, failing that, its architecture; best achieved share)."""
    rows = [row for row in memory_rows(path) if row.share is not None]
    best = BEST_SHARE.get(architecture, 0.8)
    copies = [row.share for row in rows if row.gpu == gpu and row.kernel in ("copy", "cast") and row.tier == "tuned" and row.share]
    if copies:
        best = float(np.max(copies)) if gpu != "a100" else float(np.median(copies))
    seen: dict[tuple[str, str], list[MemoryRow]] = defaultdict(list)
    for row in rows:
        if row.gpu == gpu:
            seen[row.kernel, row.tier].append(row)
    found = {}
    for kernel in sorted({kernel for kernel, _ in seen}):
        if kernel not in DEFAULT_CLASSES:
            continue
        used = [row for tier in TIERS for row in seen.get((kernel, tier), [])]
        values = {tier: _share(seen.get((kernel, tier), []), kernel, tier, best) for tier in TIERS}
        # A tier without rows lies between its neighbours: at most the better one, and the worse one at most it. Of two with rows
        # the better one is at least as fast: nobody writes a kernel by hand to be slower than what a framework brings.
        for better, worse in ((TIERS[0], TIERS[1]), (TIERS[1], TIERS[2])):
            if values[worse] > values[better]:
                unmeasured = (kernel, worse) not in seen
                values[worse if unmeasured else better] = values[better if unmeasured else worse]
        found[kernel] = MemoryClass(**values, rows=len(used), source=f"{path.name} lines {', '.join(str(r.line) for r in used)}")
    return found, round(best, 4)


def _share(rows: list[MemoryRow], kernel: str, tier: str, best: float) -> float:
    """Median of the measured shares, or the default of the class scaled to this GPU."""
    measured = [row.share for row in rows if row.share]
    return round(float(np.median(measured)) if measured else class_share(kernel, tier, {}, best), 4)
