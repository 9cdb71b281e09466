"""How far a few runs of a cluster could get: other priors than the one of `simpar adapt`, and priors chosen in hindsight.

    python benchmarks/bench_adapt_limits.py --cache seen.jsonl [--priors 150] [--docs docs/site.md]

The same sources and runs as in bench_adapt.py, with everything normal and linear so that thousands of posteriors take a second:
what is left of log(measured / predicted) is a Gaussian process over runs, summed over a grid of scales and stretches as in
`simpar.site.posterior`. Three structures are compared, each with its parameters drawn at random around the registry's:

- jobs: the four factors and a process over jobs alone;
- layouts: the process also falls with doublings of tp, cp, pp and the micro-batch between two runs, as `simpar adapt` has it;
- seconds: in addition, seconds a step and seconds a pass that published runs do not have.

"Chosen on other sources" takes, for each source, the parameters with the smallest score over all others: what an estimate can know.
"Hindsight" takes those with the smallest error of this very source, of those drawn: no estimate knows them.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from docs_table import write_between
from scipy.special import erf

from simpar.evidence.run_rows import run_of
from simpar.site.learned import shipped_prior
from simpar.site.observed import evidence_of
from simpar.site.posterior import FACTORS, GRID, STRETCH, TENTH, FloatArray, Prior
from simpar.specs.base import stored_runs
from simpar.specs.counts import resolved_dp
from simpar.specs.kinds import Reach, correlation
from simpar.specs.scenario import Scenario
from validation.tools.fit_prior import Sites, collect, draw, left_out

GIVEN, DRAWS, LEAST = (0, 1, 3, 5), 12, 4
STRUCTURES = ("jobs", "layouts", "seconds")
ALSO = {"step_s": 0.02, "pass_s": 1e-4}
"""Parameters that the registry has not, and where their draws start."""
MOVED = 0.7
"""Standard deviation of the logarithm of a drawn parameter."""


@dataclass(frozen=True)
class Runs:
    """A site's runs: log(measured / predicted) [runs], its slopes in the four factors [runs, 4], likenesses [runs, runs].

    Attributes:
        apart: doublings between two runs' layouts. per_step, per_pass: of a second a step and a pass, as shares of the step.
    """

    source: str
    off: FloatArray
    slopes: FloatArray
    job: FloatArray
    apart: FloatArray
    per_step: FloatArray
    per_pass: FloatArray


def layout_of(scenario: Scenario) -> tuple[list[float], float]:
    """(tp, cp, pp and micro-batch as doublings, passes of a step)."""
    plan, training = scenario.plan, scenario.training
    passes = 2.0 * plan.virtual_stages * training.global_batch_size / (training.micro_batch_size * resolved_dp(scenario))
    return [math.log2(n) for n in (plan.tp, plan.cp, plan.pp, training.micro_batch_size)], passes


def runs_of(sites: Sites, scenarios: Mapping[str, Scenario], reach: float) -> list[Runs]:
    """Sites with enough runs, linear around the prediction."""
    found = []
    for (source, _), observed in sites.items():
        if len(observed) < LEAST:
            continue
        lines = evidence_of(observed)
        log_s, slopes = lines.log_seconds(np.zeros(FACTORS), np.zeros((len(lines), 0)))
        predicted = (lines.weight * log_s).sum(-1)
        layouts, passes = zip(*(layout_of(scenarios[run.id]) for run in observed), strict=True)
        places = np.array(layouts)
        job = -reach * np.log(correlation(lines.kinds, lines.kinds, Reach(reach, math.inf)))
        found.append(
            Runs(
                source, lines.log_measured - predicted, (lines.weight[..., None] * slopes).sum(-2)[:, :FACTORS], job,
                np.abs(places[:, None] - places[None]).sum(-1), np.exp(-predicted), np.array(passes) * np.exp(-predicted),
            )
        )  # fmt: skip
    return found


def covariances(runs: Runs, prior: Mapping[str, float], structure: str) -> tuple[FloatArray, FloatArray]:
    """(Of the factors, of the process in units of the residual's scale) between runs."""
    known = Prior(**{name: prior[name] for name in Prior.__slots__})
    factors = runs.slopes @ known.covariance @ runs.slopes.T
    apart = runs.job / prior["reach"]
    if structure != "jobs":
        apart = apart + runs.apart / prior["layout_reach"]
    if structure == "seconds":
        factors = factors + prior["step_s"] ** 2 * np.outer(runs.per_step, runs.per_step)
        factors = factors + prior["pass_s"] ** 2 * np.outer(runs.per_pass, runs.per_pass)
    return factors, prior["kind"] ** 2 * np.exp(-apart)


def figures(runs: Runs, prior: Mapping[str, float], structure: str) -> dict[int, tuple[float, float, float]]:
    """k -> (mean absolute relative error, score, share inside the 80 % interval) of the runs not given back; the score is the
    continuous ranked probability score of `fit_prior.missed`."""
    scales, stretch = (a.ravel() for a in np.meshgrid(prior["residual"] * np.exp(prior["residual_spread"] * GRID), STRETCH))
    before = -0.5 * np.tile(GRID**2, len(STRETCH))
    factors, process = covariances(runs, prior, structure)
    noise = scales**2
    whole = stretch[:, None, None] * factors + noise[:, None, None] * process
    count, generator, found = len(runs.off), np.random.default_rng(len(runs.off)), {}
    own = np.diagonal(whole, axis1=1, axis2=2) + noise[:, None]
    for k in GIVEN:
        if count - k < 1:
            continue
        order = np.array([generator.permutation(count) for _ in range(DRAWS if k else 1)])
        few, rest = order[:, :k], order[:, k:]
        between = whole[:, few[:, :, None], few[:, None, :]] + noise[:, None, None, None] * np.eye(k)
        inverse, y = np.linalg.inv(between), runs.off[few]
        across = whole[:, rest[:, :, None], few[:, None, :]]
        weights = across @ inverse
        mean = np.einsum("gdmk,dk->gdm", weights, y)
        variance = own[:, rest] - np.einsum("gdmk,gdmk->gdm", weights, across)
        likely = before[:, None] - 0.5 * (np.einsum("dk,gdkl,dl->gd", y, inverse, y) + np.linalg.slogdet(between)[1])
        share = np.exp(likely - likely.max(0))
        share /= share.sum(0)
        middle = np.einsum("gd,gdm->dm", share, mean)
        spread = np.sqrt(np.einsum("gd,gdm->dm", share, variance + (mean - middle) ** 2))
        off = (runs.off[rest] - middle) / spread
        score = spread * (off * erf(off / math.sqrt(2.0)) + math.sqrt(2.0 / math.pi) * np.exp(-(off**2) / 2.0) - math.pi**-0.5)
        error = np.abs(np.expm1(middle - runs.off[rest]))
        found[k] = (float(error.mean()), float(score.mean()), float((np.abs(off) <= TENTH).mean()))
    return found


def priors(count: int, generator: np.random.Generator) -> list[dict[str, float]]:
    """The registry's parameters, and others around them."""
    shipped = shipped_prior()
    start = {name: getattr(shipped, name) for name in Prior.__slots__} | ALSO
    moved = [
        {name: value * math.exp(MOVED * generator.standard_normal()) for name, value in start.items()} for _ in range(count - 1)
    ]
    return [start, *moved]


Table = dict[str, dict[int, tuple[float, float, float]]]
"""Source -> k -> figures, its sites weighing as their runs."""


def by_source(sites: Sequence[Runs], prior: Mapping[str, float], structure: str) -> Table:
    parts: dict[str, dict[int, list[tuple[int, tuple[float, float, float]]]]] = defaultdict(lambda: defaultdict(list))
    for runs in sites:
        for k, values in figures(runs, prior, structure).items():
            parts[runs.source][k].append((len(runs.off), values))
    return {
        source: {k: tuple(np.average([v for _, v in own], axis=0, weights=[n for n, _ in own])) for k, own in table.items()}
        for source, table in parts.items()
    }  # type: ignore[return-value]


def chosen(tables: Sequence[Table], source: str) -> tuple[int, int]:
    """Which of the priors is best for the other sources (by score), and which for this one (by error with three runs)."""
    others = [np.mean([v[k][1] for s, v in table.items() if s != source for k in (1, 3) if k in v]) for table in tables]
    own = [table[source][3][0] for table in tables]
    return int(np.argmin(others)), int(np.argmin(own))


def common(sites: Sequence[Runs], source: str) -> float:
    """Mean error of a source whose best common factor, of each site, is known."""
    off = [np.expm1(np.median(runs.off) - runs.off) for runs in sites if runs.source == source]
    return float(np.abs(np.concatenate(off)).mean())


def report(sites: Sequence[Runs], count: int) -> str:
    """Markdown."""
    lines = [
        "| what is left is alike by | registry's prior | chosen on other sources | halved | near, worse | inside 80 % "
        "| chosen in hindsight | halved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    drawn = priors(count, np.random.default_rng(0))
    for structure in STRUCTURES:
        tables = [by_source(sites, prior, structure) for prior in drawn]
        usable = [source for source, table in tables[0].items() if 3 in table]
        start = {source: tables[0][source][0][0] for source in usable}
        far = [source for source in usable if start[source] > 0.08]
        near = [source for source in usable if start[source] < 0.05]
        picks = {source: chosen(tables, source) for source in usable}
        plain = {source: tables[0][source][3] for source in usable}
        learned, best = ({source: tables[picks[source][i]][source][3] for source in usable} for i in (0, 1))
        halved = [sum(table[source][0] <= start[source] / 2 for source in far) for table in (learned, best)]
        worse = sum(learned[source][0] - start[source] > 0.003 for source in near)
        mean = [np.mean([table[source][0] for source in far]) for table in (plain, learned, best)]
        inside = np.mean([learned[source][2] for source in usable])
        lines.append(f"| {structure} | {mean[0]:.1%} | {mean[1]:.1%} | {halved[0]} of {len(far)} | {worse} of {len(near)} | "
                     f"{inside:.0%} | {mean[2]:.1%} | {halved[1]} of {len(far)} |")  # fmt: skip
    first = float(np.mean([start[source] for source in far]))
    known = [common(sites, source) for source in far]
    lines += [
        "",
        f"- {len(far)} sources above 8 %: {first:.1%} without their runs, the columns with three; half would be {first / 2:.1%}",
        f"- the same sources with the one factor on everything that fits all their runs best: {np.mean(known):.1%}; "
        f"{sum(k <= start[s] / 2 for k, s in zip(known, far, strict=True))} halved",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="none: the runs that come with simpar")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--priors", type=int, default=150)
    parser.add_argument("--docs", type=Path, help="page whose table is replaced by what comes out")
    options = parser.parse_args()
    files = options.data or [stored_runs()]
    sites = left_out(collect(files, options.cache, options.workers))
    scenarios = {name: run.scenario for name, row in draw(files) if (run := run_of(row, name)).scenario is not None}
    text = report(runs_of(sites, scenarios, shipped_prior().reach), options.priors)
    print(text)
    if options.docs is not None:
        write_between(options.docs, "bench_adapt_limits", text)


if __name__ == "__main__":
    main()
