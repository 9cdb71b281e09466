"""How much clusters differ: the prior of `simpar adapt`, estimated from sources that no fit has seen.

    python -m validation.tools.fit_prior [--data FILE.jsonl ...] [--cache seen.jsonl]

Every source's runs of one framework on one GPU stand for a site. The run-level constants are fitted again without the source; its
runs are then straight lines in the site's four factors (`simpar.site.observed`), and the spreads are those with which a few runs
of a site predict its others best (`missed`). They go into the registry of constants as `site.*`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.evidence.run_rows import columns_of, read_rows, run_of
from simpar.evidence.run_workers import Bar, in_workers
from simpar.site.observed import Observed, evidence_of, observe
from simpar.site.posterior import TENTH_OF_T, Evidence, Prior, learn
from simpar.specs.base import stored_runs
from simpar.specs.calibration import FACTORS, FILE, Constant, calibrated_by, calibration_for, constants, unseen
from simpar.specs.framework import family_of
from simpar.specs.site import TENTH
from validation.tools.fit_constants import as_toml
from validation.tools.pooled import fit
from validation.tools.samples import RUN_LEVEL, Data, Sample

MOST_ROWS: Final = 14
"""Runs of one source, drawn at random: more say little more about how sources differ."""
LEAST_ROWS: Final = 2
"""Fewest runs of a source that says anything about the spread within."""
START: Final = Prior(0.12, 0.06, 0.2, 0.35, 0.1, 2.5, 4.0, 4.0, 0.035, 1.0)
FEW: Final = (1, 2, 3, 3, 5)
"""Runs given back in the splits of a site that the prior is estimated from."""
LEAST: Final = 0.01
"""No spread is estimated below this: sources are too few to say that there is none."""


Sites = Mapping[tuple[str, str], Sequence[Observed]]
"""(Source, framework and GPU) -> runs: a source that ran on several machines is several sites."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A published run, observed under the shipped constants.

    Attributes:
        source, framework, architecture, gpu: its groups.
        factors: on compute, memory and communication, that its lines hold for; step_s: seconds a step that they do.
        observed: its straight lines.
    """

    source: str
    framework: str
    architecture: str
    gpu: str
    factors: tuple[float, float, float]
    step_s: float
    observed: Observed


def draw(files: Sequence[Path], most: int = MOST_ROWS, seed: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """(Name, row) of at most `most` runs of every source, drawn at random."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for file in files:
        for name, row in read_rows(file):
            if not row.get("oom") and not row.get("exclude") and not row.get("skipped"):
                found[str(columns_of(row).get("source"))].append((name, row))
    generator = random.Random(seed)
    return [job for source in found for job in generator.sample(found[source], min(most, len(found[source])))]


def seen_of(job: tuple[str, dict[str, Any]]) -> Seen | None:
    """A row observed; none where it says nothing about its site."""
    name, row = job
    run = run_of(row, name)
    found = observe(run)
    if run.scenario is None or not isinstance(found, Observed):
        return None
    gpu = run.scenario.hardware.gpu
    here = calibration_for(run.scenario.framework, gpu.architecture)
    return Seen(
        str(columns_of(row).get("source")), run.scenario.framework, gpu.architecture, gpu.name,
        (here.compute, here.memory, here.communication), here.step_s, replace(found, id=name),
    )  # fmt: skip


def collect(files: Sequence[Path], cache: Path | None = None, workers: int = 2, most: int = MOST_ROWS) -> list[Seen]:
    """The drawn runs of the files, from `cache` where they are in it; what is new is added to it."""
    jobs = draw(files, most)
    known = dict(_read(cache)) if cache is not None and cache.exists() else {}
    left = [job for job in jobs if job[0] not in known]
    with Bar(len(left), True) as bar:
        for index, found in in_workers(seen_of, left, workers):
            known[left[index][0]] = found
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps([left[index][0], None if found is None else _table(found)]) + "\n")
            bar.advance(1)
    return [found for name, _ in jobs if (found := known.get(name)) is not None]


def _table(seen: Seen) -> dict[str, Any]:
    return {name: getattr(seen, name) for name in Seen.__slots__} | {"observed": seen.observed.as_table()}


def _read(cache: Path) -> Iterable[tuple[str, Seen | None]]:
    for text in cache.read_text().splitlines():
        name, found = json.loads(text)
        if found is not None:
            observed = Observed.of_table(found["observed"])
            found = Seen(**{**found, "factors": tuple(found["factors"]), "observed": observed})
        yield name, found


def left_out(seen: Sequence[Seen]) -> Sites:
    """(Source, framework and GPU) -> its runs as predicted by constants fitted without the source."""
    chosen = tuple(entry for entry in constants() if entry.name in RUN_LEVEL)
    samples = [_sample(each) for each in seen]
    data = Data.of(samples)
    found: dict[tuple[str, str], list[Observed]] = defaultdict(list)
    for source in data.sources:
        entries = fit(Data.of([s for s in samples if s.source != source]), chosen)
        for each in seen:
            if each.source == source:
                found[source, each.observed.group].append(_under(each, entries))
    return dict(found)


def _sample(seen: Seen) -> Sample:
    """The likeliest reading as the fit of constants takes it, with every factor neutral."""
    line = max(seen.observed.lines, key=lambda line: line.weight)
    *parts, host = [part / factor for part, factor in zip(line.parts, (*seen.factors, 1.0), strict=True)]
    rest = max(line.rest + host - seen.step_s, 0.0)
    return Sample(
        family_of(seen.framework), seen.architecture, seen.source, "", (*parts, 0.0, 1.0), rest, seen.observed.seconds,
    )  # fmt: skip


def _under(seen: Seen, entries: Sequence[Constant]) -> Observed:
    """The run's lines with other constants in force."""
    with calibrated_by(tuple(entries)):
        after = calibration_for(seen.framework, seen.architecture)
    ratios = [*(getattr(after, name) / before for name, before in zip(FACTORS, seen.factors, strict=True)), 1.0]
    more = after.step_s - seen.step_s
    lines = tuple(
        replace(line, parts=tuple(p * r for p, r in zip(line.parts, ratios, strict=True)), rest=max(line.rest + more, 0.0))
        for line in seen.observed.lines
    )
    old = sum(line.weight * line.seconds for line in seen.observed.lines)
    factor = sum(line.weight * line.seconds for line in lines) / old
    low, middle, high = (
        each * factor for each in (seen.observed.predicted[1], seen.observed.predicted[0], seen.observed.predicted[2])
    )
    return replace(seen.observed, lines=lines, predicted=(middle, low, high))


def fit_prior(sites: Sites, start: Prior = START, tries: int = 200) -> Prior:
    """The spreads with which a few runs of a source predict its others best (`missed`), after at most `tries` evaluations."""
    from scipy.optimize import minimize  # an extra: only fits need it

    jobs = [job for runs in sites.values() for job in given_back(evidence_of(runs))]

    def worse(logs: Sequence[float]) -> float:
        return missed(jobs, Prior(*np.maximum(np.exp(logs), LEAST)))

    first = np.log([getattr(start, name) for name in Prior.__slots__])
    simplex = first + np.vstack([np.zeros(len(first)), 0.5 * np.eye(len(first))])
    options = {"xatol": 0.1, "fatol": 2e-4, "maxfev": tries, "initial_simplex": simplex}
    found = minimize(worse, first, method="Nelder-Mead", options=options)
    return Prior(*(float(v) for v in np.maximum(np.exp(found.x), LEAST)))


def given_back(lines: Evidence) -> list[tuple[float, Evidence, Evidence]]:
    """(Weight, runs given, runs to predict) of a site: all its splits weigh 1 together."""
    generator, count = np.random.default_rng(len(lines)), len(lines)
    orders = [(k, generator.permutation(count)) for k in FEW if count > k]
    return [(1.0 / len(orders), lines.only(order[:k]), lines.only(order[k:])) for k, order in orders]


def missed(jobs: Sequence[tuple[float, Evidence, Evidence]], prior: Prior) -> float:
    """Continuous ranked probability score of the runs to predict, in log seconds, the mean over sites: the mean absolute error of a
    prediction without an interval, less where an interval says how far off it may be (Gneiting and Raftery 2007, eq. 21)."""
    from scipy.special import erf

    total = 0.0
    for weight, few, rest in jobs:
        predicted, half = learn(few, prior).predict(rest)
        spread = half / TENTH
        off = (rest.log_measured - np.log(predicted)) / spread
        score = spread * (off * erf(off / math.sqrt(2.0)) + math.sqrt(2.0 / math.pi) * np.exp(-(off**2) / 2.0) - math.pi**-0.5)
        total += weight * float(np.mean(score))
    return total / sum(weight for weight, _, _ in jobs)


def memory_spreads(sites: Sites) -> tuple[float, float]:
    """(Between sources, between runs of one source): standard deviations of log(measured / predicted) of peak memory, robust."""
    groups = [np.log([m / p for m, p in peaks]) for runs in sites.values()
              if len(peaks := [run.memory for run in runs if run.memory is not None]) >= LEAST_ROWS]  # fmt: skip
    within = float(np.median([np.median(np.abs(g - np.median(g))) for g in groups])) * 1.4826
    between = float(np.median(np.abs([np.median(g) for g in groups]))) * 1.4826
    return max(between, LEAST), max(within, LEAST) * TENTH / TENTH_OF_T


def entries_of(prior: Prior, memory: tuple[float, float], sites: Sites) -> list[Constant]:
    """The registry's entries, with the runs and sources behind them."""
    values = {f"site.{name}": getattr(prior, name) for name in Prior.__slots__}
    values |= {"site.peak_memory": memory[0], "site.peak_memory_residual": memory[1]}
    behind = {site: runs for site, runs in sites.items() if len(runs) >= LEAST_ROWS}
    names = tuple(sorted({source for source, _ in behind}))
    record = {"rows": sum(map(len, behind.values())), "sources": names, "status": "interval"}
    return [Constant.model_validate({"name": name, "value": round(value, 5), **record}) for name, value in values.items()]


def write(found: Sequence[Constant], path: Path = FILE) -> None:
    """The registry with these entries in place of its `site.*`."""
    from simpar.evidence.constants_md import write_constants

    kept = [entry for entry in constants() if not entry.name.startswith("site.")]
    path.write_text(as_toml([*kept, *found], unseen()), encoding="utf-8")
    if path == FILE:
        constants.cache_clear()
        write_constants()


def main() -> None:
    """Estimate and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="none: the runs that come with simpar")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    sites = left_out(collect(options.data or [stored_runs()], options.cache, options.workers))
    prior, memory = fit_prior(sites), memory_spreads(sites)
    print(prior, memory)
    write(entries_of(prior, memory, sites), options.out)


if __name__ == "__main__":
    main()
