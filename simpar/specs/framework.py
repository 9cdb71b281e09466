"""What a training framework does that the plan does not say, as data: one dated row per change of behaviour.

`framework("megatron-core", "0.13")` is the behaviour in force at that version. Differences between versions are rows of
the table in framework_rows.py, never branches in code. A version is a release ("0.13", "NeMo 25.04", "v0.0.4") that the
table of releases dates, a year, a month ("2023-07") or free text that holds one of these; none = the newest row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Final

from simpar.registry import unknown
from simpar.specs.framework_policies import (
    DataParallel,
    Kernels,
    Loss,
    Optimizer,
    Policy,
)
from simpar.specs.framework_releases import ALIASES
from simpar.specs.framework_releases import NEWEST as NEWEST
from simpar.specs.framework_releases import Month as Month
from simpar.specs.framework_releases import month_of as month_of
from simpar.specs.framework_rows import FRAMEWORKS, UNRELATED
from simpar.specs.framework_run import Allocator, Conventions, Host, Pipeline
from simpar.specs.framework_runtime import RUNTIME


@dataclass(frozen=True, slots=True)
class FrameworkSpec:
    """The behaviour of one framework at one time: a composition of policies.

    Attributes:
        name: canonical name.
        since: first month that its latest row holds for.
        source: where that row's facts stand.
    """

    name: str
    since: Month
    source: str
    kernels: Kernels = field(default_factory=Kernels)
    head: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: DataParallel = field(default_factory=DataParallel)
    pipeline: Pipeline = field(default_factory=Pipeline)
    host: Host = field(default_factory=Host)
    allocator: Allocator = field(default_factory=Allocator)
    conventions: Conventions = field(default_factory=Conventions)

    def bucket_elements(self, data_ranks: int, width: float = 0.0) -> float:
        """Elements of one gradient bucket for `data_ranks`; infinite when everything is one bucket.

        Args:
            width: bytes of an element; 0 = of a gradient.
        """
        if self.data.bucket_bytes:
            return self.data.bucket_bytes / (width or (4.0 if self.optimizer.gradient_dtype == "fp32" else 2.0))
        size = max(self.data.bucket_elements_min, self.data.bucket_elements_per_rank * data_ranks)
        return size or float("inf")

    def overlaps_p2p(self, chosen: bool | None, *, zero_bubble: bool, interleaved: bool) -> bool:
        """Whether sends run beside compute: as the plan has it (`chosen`), else by the kind of schedule."""
        own = self.pipeline
        default = own.overlap_p2p_zero_bubble if zero_bubble else interleaved and own.overlap_p2p_interleaved
        return default if chosen is None else chosen

    def changed(self, changes: dict[str, Any], *, policy: str = "changed", source: str = "") -> FrameworkSpec:
        """This framework with `changes` (field of any policy -> value); every policy touched takes their name and source."""
        touched: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            touched.setdefault(POLICY_OF[name], {})[name] = value
        made = {part: replace(getattr(self, part), policy=policy, source=source, **new) for part, new in touched.items()}
        return replace(self, **made)


POLICIES: Final[dict[str, type[Policy]]] = {
    "kernels": Kernels, "head": Loss, "optimizer": Optimizer, "data": DataParallel, "pipeline": Pipeline, "host": Host,
    "allocator": Allocator, "conventions": Conventions,
}  # fmt: skip
"""Part of a framework -> the class of its policies."""
POLICY_OF: Final = {
    field.name: part for part, kind in POLICIES.items() for field in fields(kind) if field.name not in ("policy", "source")
}
"""Field -> the part it belongs to; no name stands in two."""


def framework_names() -> list[str]:
    """Every name that `framework` knows, aliases included."""
    return sorted({*FRAMEWORKS, *ALIASES})


def framework(name: str, version: str | None = None) -> FrameworkSpec:
    """The semantics of framework `name` at `version` (see the module docstring for what a version may be).

    Raises:
        UnknownNameError: no such framework; lists the known ones and the closest.
    """
    canonical = canonical_name(name)
    if canonical not in FRAMEWORKS:
        raise unknown("framework", name, framework_names())
    month = month_of(canonical, version)
    return _at(canonical, month, month)


def canonical_name(name: str) -> str:
    """The framework that another name means (axolotl: transformers); itself where it is none."""
    return name if name in FRAMEWORKS else ALIASES.get(name, name)


def family_of(name: str) -> str:
    """The framework that `name` descends from (Megatron-Bridge, NeMo: megatron-core), itself where it has no ancestor."""
    found = canonical_name(name)
    while found in FRAMEWORKS and FRAMEWORKS[found][0] and found not in UNRELATED:
        base = FRAMEWORKS[found][0]
        found = base[""] if isinstance(base, dict) else base
    return found


@lru_cache(maxsize=256)
def _at(name: str, month: Month, run: Month) -> FrameworkSpec:
    """All rows up to `month` applied in order, on top of the runtime's of the month of the `run`; a month before the first row
    takes the first."""
    base, rows = FRAMEWORKS[name]
    first, *later = rows
    since = max(month, first.since)
    if isinstance(base, dict):
        spec = _at(base[""], since, run)
        spec = replace(spec, **{part: getattr(_at(whose, since, run), part) for part, whose in base.items() if part})
    elif base:
        spec = _at(base, since, run)
    else:
        spec = FrameworkSpec(name, first.since, first.source)
        for row in (row for row in RUNTIME if row.since <= max(run, RUNTIME[0].since)):
            spec = spec.changed(row.changes, policy=f"runtime {row.month}", source=row.source)
    for row in (first, *(row for row in later if row.since <= month)):
        spec = spec.changed(row.changes, policy=f"{name} {row.month}", source=row.source)
        spec = replace(spec, name=name, since=row.since, source=row.source)
    return spec
