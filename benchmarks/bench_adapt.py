"""What a few runs of a cluster are worth: whole sources left out of every fit, and k of their runs given back.

    python benchmarks/bench_adapt.py [--data FILE.jsonl ...] [--cache seen.jsonl] [--check 12] [--docs docs/site.md]

Every source of published runs stands for a site, or for as many as it has frameworks and GPUs. Its predictions come from constants
fitted without it, and the prior of `simpar adapt` is estimated without it as well. Then 60 random draws of k = 1, 2, 3, 5 of a
site's runs are learned from, and the rest predicted. Runs are simulated once (`--cache` keeps them) and are straight lines in the
four factors from then on; `--check` simulates some of the predictions in full, at the factors learned, and prints how far the
lines are from that.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from docs_table import write_between

from simpar.evidence.predicted import predict_at
from simpar.evidence.run_rows import run_of
from simpar.site.learned import shipped_prior
from simpar.site.observed import evidence_of
from simpar.site.posterior import FACTORS, Evidence, FloatArray, Prior, learn
from simpar.specs.base import stored_runs
from simpar.specs.calibration import SITE_FACTORS
from simpar.specs.kinds import interpolated
from simpar.specs.site import Site
from validation.tools.fit_prior import Sites, collect, draw, fit_prior, left_out

DRAWS = 60
GIVEN = (1, 2, 3, 5)
LEAST = 4
"""Fewest runs of a site."""
FOLDS = 5
TRIES = 60
"""Of each fold's fit, which starts from the shipped prior."""


@dataclass(frozen=True)
class Line:
    """A source: mean absolute errors, shares inside the 80 % interval and median half-widths, before and with k runs.

    Attributes:
        others: mean absolute error of each run where all others of its site are given back: more than that no few runs can tell.
        fitted: the same with the four factors that fit all of the site's runs best, these runs among them.
    """

    source: str
    runs: int
    error: dict[int, float]
    covered: dict[int, float]
    width: dict[int, float]
    others: float
    fitted: float


def figures(lines: Evidence, prior: Prior, generator: np.random.Generator, draws: int) -> Line:
    """Errors on the runs that were not given back."""
    count = len(lines)
    error: dict[int, list[float]] = {k: [] for k in (0, *GIVEN)}
    covered: dict[int, list[float]] = {k: [] for k in (0, *GIVEN)}
    width: dict[int, list[float]] = {k: [] for k in (0, *GIVEN)}

    def add(k: int, given: FloatArray, rest: FloatArray) -> None:
        found = learn(lines.only(given), prior)
        predicted, half = found.predict(lines.only(rest))
        off = np.log(predicted) - lines.log_measured[rest]
        error[k].append(float(np.abs(np.expm1(off)).mean()))
        covered[k].append(float((np.abs(off) <= half).mean()))
        width[k].append(float(np.median(np.expm1(half))))

    everything = np.arange(count)
    add(0, everything[:0], everything)
    for k in GIVEN:
        if count - k >= 1:
            for _ in range(draws):
                order = generator.permutation(count)
                add(k, order[:k], order[k:])
    shown = [{k: float(np.mean(v)) for k, v in table.items() if v} for table in (error, covered, width)]
    return Line("", count, *shown, others(lines, prior), fitted(lines))


def others(lines: Evidence, prior: Prior) -> float:
    """Mean absolute error of each run, learned from all others."""
    off = []
    for run in range(len(lines)):
        predicted, _ = learn(lines.only(np.delete(np.arange(len(lines)), run)), prior).predict(lines.only([run]))
        off.append(abs(float(predicted[0]) / math.exp(lines.log_measured[run]) - 1.0))
    return float(np.mean(off))


def fitted(lines: Evidence) -> float:
    """Mean absolute error with the four factors, between a fifth and five each, that make it smallest."""
    from scipy.optimize import minimize

    def error(theta: FloatArray) -> float:
        log_s, _ = lines.log_seconds(np.clip(theta, -1.6, 1.6), np.zeros((len(lines), 0)))
        return float(np.abs(np.expm1((lines.weight * log_s).sum(-1) - lines.log_measured)).mean())

    common = float(np.median(lines.log_measured - (lines.weight * np.log(lines.parts.sum(-1) + lines.rest)).sum(-1)))
    simplex = 0.3 * np.vstack([np.zeros(FACTORS), np.eye(FACTORS)])
    starts = (np.zeros(FACTORS), np.full(FACTORS, common))
    return min(float(minimize(error, x, method="Nelder-Mead", options={"initial_simplex": x + simplex, "maxfev": 1500}).fun)
               for x in starts)  # fmt: skip


def benchmark(sites: Sites, *, own_prior: bool, draws: int = DRAWS) -> list[Line]:
    """A line for every source that has a site of at least four runs: its sites together, each counting as its runs.

    Args:
        own_prior: estimate the prior without a fifth of the sources at a time, those that it is then used for.
    """
    shipped, found = shipped_prior(), []
    names = sorted({name for name, _ in sites})
    for fold in range(FOLDS if own_prior else 1):
        inside = names[fold::FOLDS] if own_prior else names
        prior = (
            fit_prior({key: runs for key, runs in sites.items() if key[0] not in inside}, shipped, TRIES) if own_prior else shipped
        )
        for source in inside:
            own = [runs for (name, _), runs in sites.items() if name == source and len(runs) >= LEAST]
            generator = np.random.default_rng(names.index(source))
            if own:
                found.append(together(source, [figures(evidence_of(runs), prior, generator, draws) for runs in own]))
    return found


def together(source: str, parts: Sequence[Line]) -> Line:
    """The sites of a source as one line."""

    def mean(field: str) -> dict[int, float]:
        known = {k: [(getattr(p, field)[k], p.runs) for p in parts if k in getattr(p, field)] for k in (0, *GIVEN)}
        return {k: sum(v * n for v, n in pairs) / sum(n for _, n in pairs) for k, pairs in known.items() if pairs}

    runs = sum(p.runs for p in parts)
    known, best = (sum(getattr(p, name) * p.runs for p in parts) / runs for name in ("others", "fitted"))
    return Line(source, runs, mean("error"), mean("covered"), mean("width"), known, best)


def table(found: Sequence[Line]) -> str:
    """Markdown."""
    heads = [
        "source",
        "runs",
        "without",
        *(f"k = {k}" for k in GIVEN),
        "others",
        "fitted",
        "inside 80 %",
        *(f"k = {k}" for k in GIVEN),
        "±",
        "± k = 3",
    ]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]

    def cells(values: Mapping[int, float]) -> list[str]:
        return [f"{values[k]:.1%}" if k in values else "" for k in GIVEN]

    for line in sorted(found, key=lambda line: -line.error[0]):
        covered = [f"{line.covered[k]:.0%}" if k in line.covered else "" for k in (0, *GIVEN)]
        widths = [f"{line.width[0]:.1%}", f"{line.width.get(3, math.nan):.1%}"]
        errors = [f"{line.error[0]:.1%}", *cells(line.error), f"{line.others:.1%}", f"{line.fitted:.1%}"]
        rows.append(f"| {' | '.join([line.source, str(line.runs), *errors, *covered, *widths])} |")
    return "\n".join(rows)


def targets(found: Sequence[Line]) -> str:
    """The three targets."""
    three = [line for line in found if 3 in line.error]
    far = [line for line in three if line.error[0] > 0.08]
    near = [line for line in three if line.error[0] < 0.05]
    before, after = (float(np.mean([line.error[k] for line in far])) for k in (0, 3))
    halved = sum(line.error[3] <= line.error[0] / 2 for line in far)
    worse = [(line.source, line.error[3] - line.error[0]) for line in near if line.error[3] - line.error[0] > 0.003]
    covered = {k: float(np.mean([line.covered[k] for line in found if k in line.covered])) for k in (0, *GIVEN)}
    weighted = {k: sum(line.covered[k] * line.runs for line in found if k in line.covered)
                / sum(line.runs for line in found if k in line.covered) for k in (0, *GIVEN)}  # fmt: skip
    width = {k: float(np.median([line.width[k] for line in found if k in line.width])) for k in (0, *GIVEN)}
    known, best = (float(np.mean([getattr(line, name) for line in far])) for name in ("others", "fitted"))
    return "\n".join([
        f"sources above 8 %: {len(far)}, mean error {before:.1%} -> {after:.1%} with 3 runs (x {after / before:.2f}); "
        f"{halved} at least halved",
        f"the same with all other runs given back: {known:.1%}; with the four factors that fit all their runs best: {best:.1%}",
        f"sources below 5 %: {len(near)}, worse by more than 0.3 points with 3 runs: {len(worse)} "
        + ", ".join(f"{name} {100 * more:+.1f}" for name, more in worse),
        "inside the 80 % interval, mean over sources: " + ", ".join(f"k = {k}: {v:.0%}" for k, v in covered.items()),
        "inside the 80 % interval, over runs:         " + ", ".join(f"k = {k}: {v:.0%}" for k, v in weighted.items()),
        "half-width, median over sources:             " + ", ".join(f"k = {k}: ± {v:.1%}" for k, v in width.items()),
    ])  # fmt: skip


def check(files: Sequence[Path], sites: Sites, count: int) -> str:
    """Full simulations beside the lines, at factors learned from three runs of each source: how far apart they are."""
    jobs = dict(draw(files))
    generator, off = random.Random(1), []
    prior = shipped_prior()
    for site in generator.sample([s for s, runs in sites.items() if len(runs) > 3], count):
        runs = sites[site]
        found = learn(evidence_of(runs[:3]), prior)
        run = runs[3]
        scenario = run_of(jobs[run.id], run.id).scenario
        if len(run.lines) > 1 or scenario is None:
            continue
        plain = predict_at(Site(), scenario).step_time_s
        own = float(interpolated([run.kind], found.kinds, found.reach)[0][0] @ found.theta[FACTORS:])
        factors = dict(zip(SITE_FACTORS, map(float, np.exp(found.theta[:FACTORS] + own)), strict=True))
        moved = predict_at(Site(**factors), scenario).step_time_s
        change = found.predict(evidence_of([run]))[0][0] / sum(line.weight * line.seconds for line in run.lines)
        off.append(abs(math.log(change) - math.log(moved / plain)))
        print(f"{site[0]}: the line says x {change:.4f}, the simulator x {moved / plain:.4f}")
    return f"lines against full simulations: mean {np.mean(off):.2%}, worst {np.max(off):.2%} of {len(off)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="none: the runs that come with simpar")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--shipped-prior", action="store_true", help="the registry's instead of one estimated without the source")
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--docs", type=Path, help="page whose table is replaced by what comes out")
    options = parser.parse_args()
    files = options.data or [stored_runs()]
    sites = left_out(collect(files, options.cache, options.workers))
    checked = [check(files, sites, options.check)] if options.check else []
    found = benchmark(sites, own_prior=not options.shipped_prior, draws=options.draws)
    lines = [*checked, *targets(found).splitlines()]
    text = f"{table(found)}\n\n" + "\n".join(f"- {line}" for line in lines)
    print(text)
    if options.docs is not None:
        write_between(options.docs, "bench_adapt", text)


if __name__ == "__main__":
    main()
