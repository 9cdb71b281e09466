"""The reference engine's answer without its clock, for many candidates of one graph at once.

With compute slowed by communication of the same role, an op's finish depends on what communication is still running when it
starts. In a folded program every communication op is triggered by the end of a compute op of its own role (or by nothing), so
whatever can slow an op is already running when the op starts, and each stream's busy time from then on is one stretch.
The finish then is a closed form of the start and of those stretches' ends, increasing in all of them:
longer prices never make a step shorter, with interference as without. SimPy finds the same times, to the last bit but for
sums of more than one stretch.
"""

from __future__ import annotations

import numpy as np

from simpar.program.program import FloatArray
from simpar.search.graph import Graph

_FEW = 6
"""Candidates up to which plain Python per candidate beats numpy per op (measured)."""


def makespans(graph: Graph, seconds: FloatArray, interference: FloatArray) -> FloatArray:
    """Step times of candidates, float array [candidates].

    Args:
        graph: what waits for what; where it is not `exact`, interference is left out and the times are lower bounds.
        seconds, interference: float arrays [candidates, prices].
    """
    if not graph.exact:
        interference = np.zeros_like(interference)
    if len(seconds) <= _FEW:
        pairs = zip(seconds.tolist(), interference.tolist(), strict=True)
        return np.array([_one(graph, each, factors) for each, factors in pairs])
    return _many(graph, seconds, interference)


def _one(graph: Graph, seconds: list[float], factors: list[float]) -> float:
    finish = [0.0] * len(graph.preds)
    busy: dict[int, dict[float, float]] = {}
    preds, price, compute, beside = graph.preds, graph.price, graph.compute, graph.beside
    for op in graph.order:
        start = 0.0
        for pred in preds[op]:
            if finish[pred] > start:
                start = finish[pred]
        key = price[op]
        work, level, role = seconds[key], factors[key], compute[op]
        if role >= 0 and level <= 0.0:
            stretches = busy.get(role)
            if stretches:
                for loud in sorted(stretches, reverse=True) if len(stretches) > 1 else stretches:
                    ahead = stretches[loud] - start
                    if ahead > 0.0:
                        done = min(ahead / (1.0 + loud), work)
                        start += done * (1.0 + loud)
                        work -= done
            finish[op] = start + work
            continue
        end = finish[op] = start + work
        if level > 0.0 and beside[op] >= 0:
            known = busy.setdefault(beside[op], {})
            if end > known.get(level, 0.0):
                known[level] = end
    return max(finish, default=0.0)


def _many(graph: Graph, seconds: FloatArray, factors: FloatArray) -> FloatArray:
    durations, levels = np.ascontiguousarray(seconds.T), factors.T
    loud = (levels > 0.0).any(axis=1).tolist()
    least = levels.min(axis=1).tolist()
    width = len(seconds)
    quiet, latest = np.zeros(width), np.zeros(width)
    finish: list[FloatArray] = [quiet] * len(graph.preds)
    busy: dict[int, dict[float, FloatArray]] = {}
    preds, price, compute, beside = graph.preds, graph.price, graph.compute, graph.beside
    maximum = np.maximum
    for op in graph.order:
        waits = preds[op]
        start = finish[waits[0]] if waits else quiet
        for pred in waits[1:]:
            start = maximum(start, finish[pred])
        key, role = price[op], compute[op]
        if role >= 0 and not loud[key]:  # type: ignore[index]
            stretches = busy.get(role)
            end = start + durations[key] if not stretches else _slowed(start, durations[key], stretches)
        else:
            end = start + durations[key]
            # Candidates may differ in a level: the least of them keeps the answer a lower bound for all.
            level = least[key]
            if level > 0.0 and beside[op] >= 0:
                known = busy.setdefault(beside[op], {})
                known[level] = maximum(known[level], end) if level in known else end
        finish[op] = end
    for op in graph.sinks:
        maximum(latest, finish[op], out=latest)
    return latest


def _slowed(start: FloatArray, work: FloatArray, stretches: dict[float, FloatArray]) -> FloatArray:
    """Finish of `work` seconds of compute from `start` while each level of interference lasts until its end."""
    now, left = start, work
    for level in sorted(stretches, reverse=True) if len(stretches) > 1 else list(stretches):
        ahead = stretches[level] - now
        if ahead.max() <= 0.0:
            continue
        done = np.minimum(np.maximum(ahead, 0.0) / (1.0 + level), left)
        now = now + done * (1.0 + level)
        left = left - done
    return now + left


__all__ = ["makespans"]
