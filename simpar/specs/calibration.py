"""The registry of fitted numbers: every number of simpar that was chosen by looking at published training runs.

Kernel and collective tables are measured one kernel at a time. In a training step clocks sag under sustained load, launches
straggle and ranks wait for the slowest of them, and small kernels that no list names add up. Each constant scales one physical part
of the step for a *group* of runs: all of them, one GPU architecture, one family of frameworks, or a family on an architecture.
Factors of nested groups multiply, seconds add.

A number stays only if it pays on sources that its fit has not seen: its gain, the mean over the left-out sources of its own group
of the error without it minus the error with it, exceeds its own standard error (`python -m validation.tools.fit_constants`).
`constants.toml` holds the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from simpar.specs.base import Spec, read_toml, validate
from simpar.specs.framework import FrameworkSpec, family_of
from simpar.specs.hardware import HardwareProfile

FILE = Path(__file__).with_name("constants.toml")
ANY: Final = "*"


@dataclass(frozen=True, slots=True)
class Known:
    """What a constant is, whatever its group.

    Attributes:
        neutral: the value that leaves it out.
        bounds: least and most, over all nested groups together.
        meaning: what it scales.
    """

    neutral: float
    bounds: tuple[float, float]
    meaning: str


KNOWN: Final[dict[str, Known]] = {
    "compute": Known(1.0, (0.8, 1.6),
        "factor on seconds of matmuls and attention: clocks and power under sustained load, waiting for the slowest rank"),
    "memory": Known(1.0, (0.8, 2.5),
        "factor on seconds of memory-bound kernels and the optimizer: small kernels that an op list leaves out"),
    "communication": Known(1.0, (0.7, 3.0),
        "factor on seconds of collectives and sends: link efficiency under load, skewed arrival"),
    "pass_s": Known(0.0, (0.0, 20e-3),
        "host seconds that the device waits for per stage pass (a forward or a backward of one micro-batch)"),
    "step_s": Known(0.0, (0.0, 1.0), "host seconds per step: data loading, logging, synchronisation"),
    "expected_error": Known(0.0, (0.0, 1.0),
        "median |predicted / measured - 1| of runs of sources left out of every fit: part of every interval"),
    "interval_up": Known(1.0, (0.1, 10.0),
        "factor on the upper half of a step's interval: a tenth of runs of sources that no fit has seen lie above it"),
    "interval_down": Known(1.0, (0.1, 10.0), "the same of its lower half and those below"),
    "memory_error": Known(0.07, (0.005, 1.0), "half-width of the 80 % interval of a peak of memory, as a logarithm"),
    "expert_memory_error": Known(0.07, (0.005, 1.0),
        "the same of a model with experts: what each rank gets is not known before it runs"),
    "kernels.odd_rows": Known(1.0, (1.0, 5.0),
        "factor on products whose rows start on 2 bytes, which asynchronous copies cannot load"),
    "kernels.unaligned_heads": Known(1.0, (0.1, 1.0),
        "factor on the rate of batched products over heads whose rows are not aligned to 16 bytes"),
    "kernels.row_product": Known(1.0, (0.05, 1.0),
        "factor on the rate of fp32 gradients of a batched product of one row with several (torchtitan's weights of experts)"),
    "host.layer_s": Known(0.5e-3, (0.0, 5e-3),
        "host seconds a layer and pass beside its launches: Megatron-LM of 2023-08, nanotron, transformers"),
    "host.expert_layer_s": Known(0.0, (0.0, 10e-3),
        "more of it in a forward that waits for the tokens of each expert (Host.expert_layer_cpu_s)"),
    "host.layer_slowdown": Known(2.6, (0.5, 5.0),
        "times that host.layer_s takes on Grace: Megatron-LM of 2026-01; 2.6 = as launches"),
    "routing.spread": Known(0.0, (0.0, 3.0),
        "standard deviation of experts' loads over their mean: routers without a bias, 32 experts or more"),
    "search.mesh_error": Known(0.0, (0.0, 0.3), "error that layouts of one mesh and micro-batch share (sd of a logarithm)"),
    "search.own_error": Known(0.0, (0.0, 0.3), "error of one layout among those of its mesh (sd of a logarithm)"),
    "site.common": Known(0.0, (0.0, 1.0),
        "how much sources differ in one factor on everything that runs on the device (sd of its logarithm)"),
    "site.compute": Known(0.0, (0.0, 1.0), "how much sources differ in their factor on compute beside that (sd of its logarithm)"),
    "site.memory": Known(0.0, (0.0, 2.0),
        "how much sources differ in their factor on memory-bound kernels beside that (sd of its logarithm)"),
    "site.communication": Known(0.0, (0.0, 2.0),
        "how much sources differ in their factor on communication beside that (sd of its logarithm)"),
    "site.host": Known(0.0, (0.0, 2.0),
        "how much sources differ in their factor on the host's time beside that (scale of its logarithm)"),
    "site.kind": Known(0.0, (0.0, 20.0),
        "how much runs of one source differ in one factor beside those, in units of the residual's scale"),
    "site.reach": Known(1.0, (0.1, 1e3),
        "doublings between two jobs of one source (size, sequence, batch, GPUs) over which they stop being alike"),
    "site.layout_reach": Known(1e6, (0.1, 1e6),
        "doublings between two layouts (tp, cp, pp, micro-batch) over which they stop being alike"),
    "site.residual": Known(0.0, (0.0, 0.5),
        "scale of log(measured / predicted) between runs of one source, once its factors are right"),
    "site.residual_spread": Known(0.0, (0.0, 2.0), "how much sources differ in that scale (sd of its logarithm)"),
    "site.peak_memory": Known(0.0, (0.0, 1.0), "how much sources differ in log(measured / predicted) of peak memory (sd)"),
    "site.peak_memory_residual": Known(0.0, (0.0, 1.0), "log(measured / predicted) of peak memory between runs of one source (sd)"),
}  # fmt: skip
"""Every constant that there can be."""
FACTORS: Final = ("compute", "memory", "communication")
SECONDS: Final = ("pass_s", "step_s")
SITE_FACTORS: Final = (*FACTORS, "host")
"""What a site's own runs move."""
WIDTHS: Final = ("expected_error", "interval_up", "interval_down", "memory_error", "expert_memory_error")
"""Of these the narrowest group's holds, not the product of all."""
UNFAMILIAR: Final = "unfamiliar"
"""The family whose interval factors hold for frameworks that no published run of the fits had."""


def _known(name: str) -> str:
    if name not in KNOWN:
        raise ValueError(f"no such constant; known: {', '.join(KNOWN)}")
    return name


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Constant(Spec):
    """One fitted number.

    Attributes:
        name: what it scales, a key of `KNOWN`.
        family, architecture: the runs that it holds for; "*" = any.
        architectures: those that enough sources of the group ran on; it holds on no other. Empty = on all.
        shares: (family, share of the constant's logarithm, or of its seconds, that holds for it): how probable it is that the
            constant helps the family's left-out sources. 1 for families not listed.
        value: in the unit of its name (a factor, or seconds).
        rows, sources: runs of the group and where they were published.
        gain, gain_se: mean over the left-out sources of the group of the absolute relative error without it minus with it, and the
            standard error of that mean.
        status: "kept" (it pays on left-out sources), "interval" (a width, not a price), "one source" (a property of kernels seen
            in one source alone, whose gain holds on that source's other models), "read off" (bounded by looking at runs, not
            fitted, so that these runs are no evidence for it).
    """

    name: Annotated[str, AfterValidator(_known)]
    family: str = ANY
    architecture: str = ANY
    architectures: tuple[str, ...] = ()
    shares: tuple[tuple[str, Share], ...] = ()
    value: float
    rows: int = 0
    sources: tuple[str, ...] = ()
    gain: float = 0.0
    gain_se: float = 0.0
    status: Literal["kept", "interval", "one source", "read off"] = "kept"

    @property
    def neutral(self) -> float:
        """The value that leaves it out."""
        return KNOWN[self.name].neutral

    @property
    def group(self) -> str:
        """The runs that it holds for, "all" or "family=nemo, architecture=hopper"."""
        given = ((key, getattr(self, key)) for key in ("family", "architecture"))
        named = ", ".join(f"{key}={value}" for key, value in given if value != ANY) or "all"
        parts = ", ".join(f"{family} {share:g}" for family, share in self.shares)
        return f"{named}, of which {parts}" if parts else named

    def holds(self, family: str, architecture: str) -> bool:
        """Whether a run of `family` on this chip belongs to the group."""
        seen = not self.architectures or architecture in self.architectures
        return seen and self.family in (ANY, family) and self.architecture in (ANY, architecture)

    def share(self, family: str) -> float:
        """How much of it holds for runs of `family` in its group, 0 to 1."""
        return dict(self.shares).get(family, 1.0)

    def as_json(self) -> dict[str, object]:
        """The object that `simpar constants --json` prints."""
        shown = ("value", "neutral", "rows", "gain", "gain_se", "status")
        return {"name": self.name, "group": self.group, "sources": list(self.sources), "meaning": KNOWN[self.name].meaning} | {
            key: getattr(self, key) for key in shown
        }


class Unseen(Spec):
    """How far off predictions are on runs of sources that no fit has seen.

    Attributes:
        family, architecture, source: the runs; "*" = all.
        rows, sources: how many.
        neutral_median, neutral_mean: absolute relative error of the step time with every constant neutral.
        median, mean: the same with the whole fit repeated without the run's source.
        coverage: share of these runs inside their 80 % interval, whose factor is that of all other sources.
        interval_score: mean of the interval's width in log seconds plus ten times what lies outside: lower is better.
    """

    family: str = ANY
    architecture: str = ANY
    source: str = ANY
    rows: int
    sources: int
    neutral_median: float
    neutral_mean: float
    median: float
    mean: float
    coverage: float
    interval_score: float = 0.0


class ConstantsFile(Spec):
    """constants.toml."""

    constants: tuple[Constant, ...] = ()
    unseen: tuple[Unseen, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """The constants in force for one framework on one architecture: factors, seconds, and the widths of intervals, see `KNOWN`;
    `host`, on what the framework's host code takes, is a site's alone."""

    compute: float = 1.0
    memory: float = 1.0
    communication: float = 1.0
    host: float = 1.0
    pass_s: float = 0.0
    step_s: float = 0.0
    expected_error: float = 0.0
    interval_up: float = 1.0
    interval_down: float = 1.0
    memory_error: float = 0.07
    expert_memory_error: float = 0.07

    def memory_half_width(self, *, experts: bool) -> float:
        """Log half-width of the 80 % interval of a peak, of a model with or without experts."""
        return self.expert_memory_error if experts else self.memory_error


_OTHERS: ContextVar[tuple[Constant, ...] | None] = ContextVar("constants", default=None)
"""Constants in place of the shipped ones."""


@lru_cache(maxsize=1)
def constants() -> tuple[Constant, ...]:
    """The shipped registry."""
    return read_constants(FILE)


def registered(name: str) -> float:
    """The value of a number of the registry that has one entry, for all groups."""
    (found,) = (entry.value for entry in constants() if entry.name == name)
    return found


def read_constants(path: Path) -> tuple[Constant, ...]:
    """The registry in a file that `fit_constants` wrote.

    Raises:
        InputError: unreadable, or an entry that breaks a rule.
    """
    return validate(ConstantsFile, read_toml(path), file=str(path)).constants


def unseen() -> tuple[Unseen, ...]:
    """Errors on sources left out of the shipped fit, all runs first."""
    return validate(ConstantsFile, read_toml(FILE), file=str(FILE)).unseen


@contextmanager
def calibrated_by(entries: tuple[Constant, ...]) -> Iterator[None]:
    """These constants instead of the shipped ones."""
    token = _OTHERS.set(entries)
    try:
        yield
    finally:
        _OTHERS.reset(token)


@contextmanager
def uncalibrated() -> Iterator[None]:
    """Prices with every constant neutral, for fits and for reports without constants."""
    with calibrated_by(()):
        yield


def calibration_for(framework: str, architecture: str) -> RunCalibration:
    """The run-level constants of a framework on a GPU architecture: nested groups combined and kept within their bounds.

    A width (`WIDTHS`) is that of the narrowest group that has one; on an architecture that no group has seen, the largest of all.
    The interval of a family that no group names on this architecture is at least that of `UNFAMILIAR` ones, and that of the family
    on others.
    """
    others, family = _OTHERS.get(), family_of(framework)
    return _shipped(family, architecture) if others is None else _combined(others, family, architecture)


def calibration_on(framework: FrameworkSpec, hardware: HardwareProfile) -> RunCalibration:
    """The constants of published runs of `framework` on accelerators of the architecture that `hardware` has."""
    return calibration_for(framework.name, hardware.gpu.architecture)


def measured_here(published: RunCalibration) -> RunCalibration:
    """Constants of a calibrated machine: neutral. What a real run adds to measured parts is as uncertain as it ever was."""
    widths = {name: getattr(published, name) for name in WIDTHS}
    return RunCalibration(**widths)


@lru_cache(maxsize=512)
def _shipped(family: str, architecture: str) -> RunCalibration:
    """By the names of a group alone: all constants are slow to hash, and every layout asks."""
    return _combined(constants(), family, architecture)


@lru_cache(maxsize=512)
def _combined(entries: tuple[Constant, ...], family: str, architecture: str) -> RunCalibration:
    found = {name: KNOWN[name].neutral for name in (*FACTORS, *SECONDS)}
    for entry in entries:
        if not entry.holds(family, architecture):
            continue
        if entry.name in FACTORS:
            found[entry.name] *= entry.value ** entry.share(family)
        elif entry.name in SECONDS:
            found[entry.name] += entry.value * entry.share(family)
    clipped = {name: within(name, value) for name, value in found.items()}
    widths = {name: width_in_force(entries, name, family, architecture) for name in WIDTHS}
    return RunCalibration(**clipped, **widths)


def within(name: str, value: float) -> float:
    """`value` of a constant kept within its bounds."""
    low, high = KNOWN[name].bounds
    return min(max(value, low), high)


def width_in_force(entries: Iterable[Constant], name: str, family: str, architecture: str) -> float:
    """A width of `WIDTHS` for a family on an architecture, see `calibration_for`."""
    alike = [entry for entry in entries if entry.name == name]
    here = [entry for entry in alike if entry.holds(family, architecture)]
    if not here:
        return max((entry.value for entry in alike), default=KNOWN[name].neutral)
    narrowest = max(here, key=lambda e: sum(key != ANY for key in (e.family, e.architecture)))
    if narrowest.family == family:
        return narrowest.value
    # Few sources have this family on such a chip, or none: as far off as strangers are, and as the family is elsewhere.
    return max([narrowest.value, *(entry.value for entry in alike if entry.family in (UNFAMILIAR, family))])


_LEFT_OUT: set[str] = set()
"""Properties of kernels that this process prices without."""


def leave_out(names: Iterable[str]) -> None:
    """Price without these properties of kernels, in this whole process; before it prices anything, as prices are remembered."""
    _LEFT_OUT.update(names)
    constant.cache_clear()


@lru_cache(maxsize=16)
def constant(name: str) -> float:
    """A property of kernels, the same for every run and in every context: prices of kernels are remembered."""
    known = () if name in _LEFT_OUT else constants()
    return next((entry.value for entry in known if entry.name == name), KNOWN[name].neutral)
