"""A site: what simpar learned from a cluster's own runs, as `simpar adapt` writes it and `site = "site.toml"` uses it.

Published runs say what a framework on a GPU takes on clusters on average; a site says how far one cluster is from that: a factor on
compute, on memory-bound kernels, on communication and on the host, bytes on the device that no term explains, and how sure each of
them is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from simpar.errors import InputError, Violation
from simpar.specs.base import Spec, read_toml, validate
from simpar.specs.calibration import KNOWN, SECONDS, SITE_FACTORS, RunCalibration
from simpar.specs.kinds import Kind, Reach, interpolated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Factor = Annotated[float, Field(ge=0.05, le=20.0)]
Covariance = tuple[tuple[float, ...], ...]
Spread = Annotated[float, Field(ge=0.0, le=3.0)]
TENTH: Final = 1.2816
"""Standard deviations from the median of a normal distribution to either end of its 80 % interval."""
TERMS: Final[dict[str, str]] = {
    "matmul": "compute", "attention": "compute", "expert_matmul": "compute", "recompute": "compute",
    "memory_bound": "memory", "optimizer": "memory",
    "tp": "communication", "cp": "communication", "ep": "communication", "pp": "communication", "dp": "communication",
    "launch": "host", "host": "host",
}  # fmt: skip
"""Term of a step's breakdown -> the factor that scales it. A pipeline's bubble is idle time of the rest and grows with it."""


class SiteRun(Spec):
    """A run that the site was learned from: its id, the measured step and the predictions without and with the site (seconds)."""

    id: str
    """The row's."""
    measured_s: Annotated[float, Field(gt=0)]
    """Seconds of its step."""
    before_s: Annotated[float, Field(gt=0)]
    """Predicted without the site."""
    after_s: Annotated[float, Field(gt=0)]
    """Predicted with it."""
    weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How far it was believed: a run far from what the others say counts less."""


class SiteKind(Kind):
    """Runs of one kind (a model, its precision, sequences, batch, GPUs and layout) and their own factor beside the site's."""

    factor: Factor
    """On everything that the site's factors scale."""

    @property
    def kind(self) -> Kind:
        """Without the factor."""
        return Kind(**{name: getattr(self, name) for name in Kind.model_fields})


class SiteFact(Spec):
    """A value of a fact that runs left open, and what the site's runs say of it."""

    fact: str
    """Field and value: "plan.recompute = full"."""
    factor: Annotated[float, Field(gt=0)]
    """On how likely it is."""


class Site(Spec):
    """site.toml.

    Attributes below are medians of the posterior; its spreads are standard deviations of logarithms.
    """

    name: str = "site"
    """What reports call it."""
    group: str = ""
    """Framework and GPU that the runs had; what another framework or GPU takes is not told by them. Empty = any."""
    compute: Factor = 1.0
    """On seconds of matmuls and attention."""
    memory: Factor = 1.0
    """On seconds of memory-bound kernels and the optimizer."""
    communication: Factor = 1.0
    """On seconds of collectives and sends."""
    host: Factor = 1.0
    """On seconds of the host: launches, Python, what a step takes beside its kernels."""
    kinds: tuple[SiteKind, ...] = ()
    """Kinds of runs that the site had."""
    other_kind: Spread = 0.0
    """Of the factor of a kind that is like none of these, whose median is 1."""
    reach: Annotated[float, Field(gt=0)] = 1.0
    """Doublings between two jobs over which their likeness falls to 1/e (`simpar.specs.kinds`)."""
    layout_reach: Annotated[float, Field(gt=0)] = KNOWN["site.layout_reach"].neutral
    """Doublings between two layouts over which it does."""
    covariance: Covariance | None = None
    """Of the logarithms of the four factors, in that order, then of the kinds'."""
    facts: tuple[SiteFact, ...] = ()
    """Open facts (docs/open_facts.md) that the site's runs tell something of."""
    residual: Spread = 0.0
    """Of log(measured / predicted) between the site's runs, once the factors are right."""
    peak_memory_bytes: float = 0.0
    """More (or less) on every device than the terms of its memory add up to."""
    peak_memory_spread: Spread = 0.0
    """Of log(measured / predicted) of a peak at this site; 0 = as everywhere."""
    runs: tuple[SiteRun, ...] = ()
    """What it was learned from."""

    @field_validator("covariance")
    @classmethod
    def _is_a_covariance(cls, rows: Covariance | None, info: ValidationInfo) -> Covariance | None:
        kinds = len(info.data.get("kinds", ()))
        size = len(SITE_FACTORS) + kinds
        if rows is None:
            return rows
        if len(rows) != size or any(len(row) != size for row in rows):
            raise ValueError(f"must be {size} rows of {size}: four factors and {kinds} kinds")
        for i in range(size):
            for j in range(size):
                bound = math.sqrt(max(rows[i][i], 0.0) * max(rows[j][j], 0.0))
                if rows[i][i] < 0.0 or abs(rows[i][j] - rows[j][i]) > 1e-9 or abs(rows[i][j]) > bound * (1.0 + 1e-6) + 1e-12:
                    raise ValueError("must be a covariance: symmetric, no variance below 0, no correlation above 1")
        return rows

    @property
    def learned(self) -> bool:
        """Whether it says anything: one that no run is behind changes nothing."""
        return self.model_copy(update={"name": "", "group": "", "runs": ()}) != Site(name="")

    @property
    def factors(self) -> dict[str, float]:
        """compute, memory, communication, host."""
        return {name: getattr(self, name) for name in SITE_FACTORS}

    @property
    def reaches(self) -> Reach:
        """How far runs are alike."""
        return Reach(self.reach, self.layout_reach)

    @property
    def of_jobs(self) -> Site:
        """What it says of jobs whatever their layouts, for what compares layouts: each job's own factor is the mean of its kinds',
        and what layouts differ by beside it joins the residual."""
        jobs = list(dict.fromkeys(each.kind.job for each in self.kinds))
        neutral = {"layout_reach": KNOWN["site.layout_reach"].neutral}
        if self.covariance is None or jobs == [each.kind for each in self.kinds] == [each.kind.job for each in self.kinds]:
            return self.model_copy(update=neutral)
        same = np.array([[float(each.kind.job == job) for each in self.kinds] for job in jobs])
        mean = same / same.sum(1, keepdims=True)
        logs = np.log([each.factor for each in self.kinds])
        whole = np.eye(len(SITE_FACTORS) + len(jobs), len(SITE_FACTORS) + len(self.kinds))
        whole[len(SITE_FACTORS) :, len(SITE_FACTORS) :] = mean
        rows = whole @ np.array(self.covariance) @ whole.T
        left = logs - same.T @ (mean @ logs)
        found = tuple(SiteKind(**job.model_dump(), factor=math.exp(own)) for job, own in zip(jobs, mean @ logs, strict=True))
        return self.model_copy(
            update={
                "kinds": found, "covariance": tuple(tuple(float(v) for v in row) for row in (rows + rows.T) / 2.0),
                "residual": math.hypot(self.residual, float(np.sqrt(np.mean(left**2)))), **neutral,
            }
        )  # fmt: skip

    def settled(self, kind: Kind) -> Site:
        """What it says of runs of one kind: that kind's own factor is in the four, and in their covariance."""
        weights, left = interpolated([kind], [each.kind for each in self.kinds], self.reaches)
        own, size = self.of_kind(kind), len(SITE_FACTORS)
        whole = np.hstack([np.eye(size), np.tile(weights, (size, 1))])
        rows = None if self.covariance is None else whole @ np.array(self.covariance) @ whole.T
        low, high = 0.05, 20.0
        return self.model_copy(
            update={
                **{name: min(max(value * own, low), high) for name, value in self.factors.items()}, "kinds": (),
                "other_kind": self.other_kind * math.sqrt(max(float(left[0, 0]), 0.0)),
                "covariance": None if rows is None else tuple(tuple(float(v) for v in row) for row in (rows + rows.T) / 2.0),
            }
        )  # fmt: skip

    def of_kind(self, kind: Kind) -> float:
        """The factor of runs of a kind: what the site's own kinds that are like it had."""
        weights, _ = interpolated([kind], [each.kind for each in self.kinds], self.reaches)
        return math.exp(sum(w * math.log(each.factor) for w, each in zip(weights[0], self.kinds, strict=True)))

    def believes(self, facts: Iterable[str]) -> float:
        """Factor on how likely a reading with these facts is (`open_values.facts_of`)."""
        known = {each.fact: each.factor for each in self.facts}
        return math.prod(known.get(fact, 1.0) for fact in facts)

    def applied(self, published: RunCalibration, kind: Kind) -> RunCalibration:
        """The constants of published runs with the site's factors, and those of a kind of runs, on top."""
        own = {**dict.fromkeys(SECONDS, self.host), **self.factors}
        alike = self.of_kind(kind)
        moved = {name: getattr(published, name) * factor * alike for name, factor in own.items()}
        peak = TENTH * self.peak_memory_spread
        widths = {"memory_error": peak, "expert_memory_error": peak} if peak else {}
        return replace(published, **moved, expected_error=self.least_error, interval_up=1.0, interval_down=1.0, **widths)

    @property
    def least_error(self) -> float:
        """`expected_error` of a step that no factor is uncertain for: what is left between the site's own runs."""
        return math.expm1(TENTH * self.residual) / (1.28 / 0.674)

    def log_half_width(self, shares: Mapping[str, float], kind: Kind) -> tuple[float, dict[str, float]]:
        """Half the 80 % interval of log(step time), and each cause's part of it.

        Args:
            shares: of the step that each factor scales.
            kind: of the run.
        """
        weights = [shares.get(name, 0.0) for name in SITE_FACTORS]
        scaled = sum(weights)
        alike, left = interpolated([kind], [each.kind for each in self.kinds], self.reaches)
        weights += [scaled * float(weight) for weight in alike[0]]
        size = len(weights)
        rows = self.covariance or ((0.0,) * size,) * size
        variance = sum(weights[i] * weights[j] * rows[i][j] for i in range(size) for j in range(size))
        new = scaled * self.other_kind * math.sqrt(max(float(left[0, 0]), 0.0))
        causes = {f"site's {name}": TENTH * weights[i] * math.sqrt(rows[i][i]) for i, name in enumerate(SITE_FACTORS)}
        causes |= {"a kind of run that the site never had": TENTH * new, "between the site's runs": TENTH * self.residual}
        return TENTH * math.sqrt(max(variance, 0.0) + new**2 + self.residual**2), causes

    def shares(self, breakdown: Mapping[str, float], step_s: float) -> dict[str, float]:
        """Share of a step of `step_s` that each factor scales; the bubble is shared out in proportion.

        Args:
            breakdown: seconds by term, as `Result.breakdown`.
        """
        busy = step_s - max(breakdown.get("bubble", 0.0), 0.0)
        found = dict.fromkeys(SITE_FACTORS, 0.0)
        for term, name in TERMS.items():
            found[name] += max(breakdown.get(term, 0.0), 0.0)
        return {name: seconds / busy if busy > 0 else 0.0 for name, seconds in found.items()}


def read_site(path: str | Path) -> Site:
    """The site in the TOML file at `path`, as `simpar adapt` writes it.

    Raises:
        InputError: missing, unreadable, or an entry that breaks a rule.
    """
    path = Path(path)
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        right = "`simpar adapt RUNS.jsonl --out site.toml` writes one"
        raise InputError([Violation("site", str(path), "there is no such file", right)]) from None
    return _read(str(path.resolve()), stamp)


@lru_cache(maxsize=16)
def _read(path: str, stamp: int) -> Site:
    return validate(Site, read_toml(Path(path)), file=path)


def site_beside(site: str | Site | None, file: str) -> Site | None:
    """The site that a scenario holds or names, relative to the scenario's file; none where it names none.

    Raises:
        InputError: as `read_site`.
    """
    if site is None or isinstance(site, Site):
        return site
    beside = Path(file).parent / site if file else Path(site)
    return read_site(beside if beside.is_file() else site)
