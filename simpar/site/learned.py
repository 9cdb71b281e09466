"""`adapt`: a cluster's runs become a site: its factors, its memory, its interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from simpar.evidence.run_type import Run
from simpar.evidence.run_workers import Bar, in_order
from simpar.site.observed import NEUTRAL, Observed, Unused, evidence_of, observe
from simpar.site.posterior import FACTORS, FREEDOM, TENTH_OF_T, FloatArray, Posterior, Prior, learn
from simpar.specs.calibration import SITE_FACTORS, constant
from simpar.specs.kinds import Kind
from simpar.specs.site import TENTH, Site, SiteFact, SiteKind, SiteRun
from simpar.toml import toml_value

MOVED: Final = 0.08
"""Change of a step's logarithm beyond which the runs are simulated again around the factors found."""
DOUBTED: Final = 0.4
"""Weight below which a run is said to contradict the others."""


def shipped_prior() -> Prior:
    """How much clusters differ, from the registry of constants."""
    return Prior(**{name: constant(f"site.{name}") for name in Prior.__slots__})


@dataclass(frozen=True, slots=True)
class Adapted:
    """What a cluster's runs say.

    Attributes:
        site: for `site = ...`.
        runs: what was learned from.
        unused: runs that say nothing, and why.
        posterior: of the factors.
        prior: what it started from.
        half_widths: of the 80 % interval of log(step) of each run with the site [runs].
    """

    site: Site
    runs: tuple[Observed, ...]
    unused: tuple[Unused, ...]
    posterior: Posterior
    prior: Prior
    half_widths: FloatArray

    @property
    def errors(self) -> tuple[float, float]:
        """Mean absolute relative error of the steps learned from, without and with the site."""
        return tuple(  # type: ignore[return-value]
            float(np.mean([abs(getattr(run, name) / run.measured_s - 1.0) for run in self.site.runs])) if self.site.runs else 0.0
            for name in ("before_s", "after_s")
        )

    @property
    def widths(self) -> tuple[float, float]:
        """Half the 80 % interval of the runs' steps, relative, without and with the site: medians over the runs."""
        if not self.runs:
            return 0.0, 0.0
        before = float(np.median([math.sqrt(run.predicted[2] / run.predicted[1]) for run in self.runs])) - 1.0
        return before, float(np.median(np.exp(self.half_widths))) - 1.0

    @property
    def doubted(self) -> tuple[str, ...]:
        """Runs that contradict the others."""
        return tuple(run.id for run in self.site.runs if run.weight < DOUBTED)

    def as_json(self) -> dict[str, Any]:
        """The object of `simpar adapt --json`."""
        ends = TENTH * np.sqrt(np.diag(self.posterior.covariance))
        prior = TENTH * np.sqrt(np.diag(self.prior.usual_covariance))
        return {
            "site": self.site.model_dump(mode="json"),
            "factors": {
                name: {
                    "value": value, "low": value * math.exp(-ends[i]), "high": value * math.exp(ends[i]),
                    "low_before": math.exp(-prior[i]), "high_before": math.exp(prior[i]),
                }
                for i, (name, value) in enumerate(self.site.factors.items())
            },
            "kinds": {kind.name: kind.factor for kind in self.site.kinds},
            "facts": {told.fact: told.factor for told in self.site.facts},
            "peak_memory_bytes": self.site.peak_memory_bytes,
            "mean_error": dict(zip(("before", "after"), self.errors, strict=True)),
            "half_width": dict(zip(("before", "after"), self.widths, strict=True)),
            "doubted": list(self.doubted),
            "unused": [{"id": run.id, "reason": run.reason} for run in self.unused],
        }  # fmt: skip


def adapt(runs: Iterable[Run], *, name: str = "site", workers: int = 1, progress: bool = False) -> Adapted:
    """Learn a site from its runs; without usable runs nothing moves.

    Args:
        workers: processes.
        progress: show a bar on standard error.
    """
    wanted, prior = list(runs), shipped_prior()
    seen = of_one_group(in_order(partial(observe, at=NEUTRAL), wanted, workers, Bar(len(wanted), progress)))
    first = [run for run in seen if isinstance(run, Observed)]
    found = learn(evidence_of(first), prior)
    lines = evidence_of(first)
    after, half = found.predict(lines)
    if first and np.abs(np.log(after / [run.predicted[0] for run in first])).max() > MOVED:
        # What overlaps is no straight line: once more around the factors found.
        at, used = _at(found), {run.id for run in first}
        same = [run for run in wanted if run.id in used]
        again = in_order(partial(observe, at=at), same, workers, Bar(len(same), progress))
        kept = [run for run in again if isinstance(run, Observed)]
        if len(kept) == len(first):
            kept = [replace(run, kind=before.kind) for run, before in zip(kept, first, strict=True)]
            lines = evidence_of(kept, at)
            found = learn(lines, prior)
            after, half = found.predict(lines)
    site = _site(name, first, found, after)
    return Adapted(site, tuple(first), tuple(run for run in seen if isinstance(run, Unused)), found, prior, half)


def of_one_group(seen: Sequence[Observed | Unused]) -> list[Observed | Unused]:
    """`seen` with the commonest framework and GPU alone: another framework's runs, or another GPU's, are another site."""
    counts = Counter(run.group for run in seen if isinstance(run, Observed))
    if len(counts) < 2:
        return list(seen)
    group = counts.most_common(1)[0][0]

    def kept(run: Observed | Unused) -> Observed | Unused:
        if isinstance(run, Unused) or run.group == group:
            return run
        return Unused(run.id, f"{run.group}, not {group}: a site is one framework on one GPU; adapt these runs on their own")

    return [kept(run) for run in seen]


def _at(found: Posterior) -> Site:
    low, high = 0.06, 18.0
    values = {name: float(np.clip(math.exp(t), low, high)) for name, t in zip(SITE_FACTORS, found.theta[:FACTORS], strict=True)}
    return Site(**values)


def _site(name: str, runs: Sequence[Observed], found: Posterior, after: FloatArray) -> Site:
    if not runs:
        return Site(name=name)
    rows = tuple(
        SiteRun(id=run.id, measured_s=run.seconds, before_s=run.predicted[0], after_s=float(s), weight=float(w))
        for run, s, w in zip(runs, after, found.weight, strict=True)
    )
    extra, spread = memory_of_site([run.memory for run in runs if run.memory is not None])
    covariance = tuple(tuple(float(v) for v in row) for row in (found.covariance + found.covariance.T) / 2.0)
    own = np.clip(np.exp(found.theta[FACTORS:]), 0.06, 18.0)
    return _at(found).model_copy(
        update={
            "name": name, "group": runs[0].group, "covariance": covariance, "other_kind": found.kind,
            "reach": found.reach.job, "layout_reach": found.reach.layout,
            "kinds": tuple(SiteKind(**k.model_dump(), factor=f) for k, f in zip(found.kinds, own, strict=True)),
            "facts": tuple(SiteFact(fact=fact, factor=factor) for fact, factor in found.facts.items()),
            "residual": found.residual, "peak_memory_bytes": extra,
            "peak_memory_spread": spread, "runs": rows,
        }
    )  # fmt: skip


def memory_of_site(peaks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(Bytes on every device that no term explains, spread of the logarithm of a peak) from (measured, predicted) peaks.

    A constant in bytes, shrunk towards 0 by what the spread between sources allows; a run far from the others counts less.
    """
    if not peaks:
        return 0.0, 0.0
    between, within = constant("site.peak_memory"), constant("site.peak_memory_residual")
    measured, predicted = np.array(peaks).T
    typical = float(np.median(predicted))
    scale, extra, weight = within * predicted, 0.0, np.ones(len(peaks))
    for _ in range(30):
        off = (measured - predicted - extra) / scale
        weight = (FREEDOM + 1) / (FREEDOM + off**2)
        precision = weight / scale**2
        extra = float((precision * (measured - predicted)).sum() / (precision.sum() + 1.0 / (between * typical) ** 2))
    left = 1.0 / math.sqrt(float((weight / scale**2).sum()) + 1.0 / (between * typical) ** 2) / typical
    return extra, math.hypot(within * TENTH_OF_T / TENTH, left)


def write_site(site: Site, path: Path) -> None:
    """Write site.toml.

    Raises:
        InputError: the file cannot be written.
    """
    from simpar.output import write_file

    write_file(path, as_toml(site).encode(), "--out")


def as_toml(site: Site) -> str:
    """site.toml, readable."""
    lines = [
        "# Written by `simpar adapt`; use it with --site, or as `site = \"...\"` in a scenario. docs/site.md says what it holds.",
        f"name = {toml_value(site.name)}",
        *([f"group = {toml_value(site.group)}"] if site.group else []),
        *(f"{name} = {value:.6g}" for name, value in site.factors.items()),
    ]  # fmt: skip
    if site.covariance is not None:
        rows = ", ".join("[" + ", ".join(f"{v:.9g}" for v in row) + "]" for row in site.covariance)
        lines += [f"covariance = [{rows}]", f"other_kind = {site.other_kind:.6g}", f"reach = {site.reach:.6g}"]
        lines += [f"layout_reach = {site.layout_reach:.6g}", f"residual = {site.residual:.6g}"]
    if site.peak_memory_bytes or site.peak_memory_spread:
        lines += [f"peak_memory_bytes = {site.peak_memory_bytes:.8g}", f"peak_memory_spread = {site.peak_memory_spread:.6g}"]
    for kind in site.kinds:
        sizes = (f"{key} = {value:.12g}" for key, value in zip(list(Kind.model_fields)[:4], kind.sizes, strict=True))
        degrees = (f"{key} = {value}" for key, value in zip(list(Kind.model_fields)[5:9], kind.degrees, strict=True))
        last = f"microbatch_s = {kind.microbatch_s:.8g}"
        lines += [
            "",
            "[[kinds]]",
            f"factor = {kind.factor:.6g}",
            *sizes,
            f"precision = {toml_value(kind.precision)}",
            *degrees,
            last,
        ]
    for told in site.facts:
        lines += ["", "[[facts]]", f"fact = {toml_value(told.fact)}", f"factor = {told.factor:.6g}"]
    for run in site.runs:
        seconds = (f"{key} = {getattr(run, key):.8g}" for key in ("measured_s", "before_s", "after_s", "weight"))
        lines += ["", "[[runs]]", f"id = {toml_value(run.id)}", *seconds]
    return "\n".join(lines) + "\n"
