"""Why a run was slower than predicted: causes told apart by their signs, each with a probability.

Every cause says what it would do to each sign at a few strengths; the run's signs then weigh the causes by Bayes' rule. "As
predicted" and "something else" are among them, so that a run that shows nothing is not blamed on anything. Where the prediction
itself is unsure, its error is one number shared by all causes: it blurs the step and the compute time alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from simpar.site.signs import Expected, Signs

NOISE: Final[dict[str, float]] = {
    "compute": 0.06, "uneven": 0.02, "exposed": 0.04, "hidden": 0.12, "traffic": 0.15, "idle": 0.04, "tail": 0.04,
    "mean": 0.015, "load": 0.1,
    "data": 0.02, "memory": 0.08,
}  # fmt: skip
"""Standard deviation of each sign of a healthy run, beside what the prediction is unsure of (assumed; the tail is that of logs)."""
SEEN: Final[dict[str, float]] = {"starved": 0.1, "full": 0.12, "retries": 0.02, "paused": 0.02}
"""How often a sign that is there or not is seen on runs without its cause (assumed)."""
SHOWN: Final = 0.92
"""And with it."""
TAILS: Final = 4.0
"""Degrees of freedom: no single sign decides alone."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a cause of one strength does.

    Attributes:
        extra_s: seconds it adds to a step.
        signs: of a run with it, 0 where left out.
    """

    extra_s: float
    signs: Signs


@dataclass(frozen=True, slots=True)
class Cause:
    """A known way to be slow.

    Attributes:
        name: in words.
        prior: how often slow runs have it (assumed; run_formats' sizes), as a weight.
        check: what a person would do next.
        traces: at several strengths, equally likely.
    """

    name: str
    prior: float
    check: str
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause and how likely it is.

    Attributes:
        extra_s: seconds of the step it most probably holds; step_s: the step without it.
        shown: the signs that speak for it, (name, value).
    """

    name: str
    probability: float
    extra_s: float
    step_s: float
    check: str
    shown: tuple[tuple[str, float], ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """One entry of "causes"."""
        gain = (self.step_s + self.extra_s) / self.step_s - 1.0 if self.step_s > 0 else 0.0
        return {
            "cause": self.name, "probability": self.probability, "extra_s": self.extra_s, "step_time_without_s": self.step_s,
            "gain": gain, "check": self.check, "signs": dict(self.shown),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """What decides which causes there can be.

    Attributes:
        passes: stage passes of a rank in a step, whose sends may block; 0 without a pipeline.
        experts_s: seconds of a step that grow with the fullest expert's load.
        readings: (what differs, step, peak over the predicted) of configurations one setting away.
    """

    passes: float = 0.0
    experts_s: float = 0.0
    readings: tuple[tuple[str, float, float], ...] = ()


AS_PREDICTED: Final = "as predicted"
UNKNOWN: Final = "something else"


def causes_of(expected: Expected, job: Job) -> list[Cause]:
    """Every known cause that such a job can have."""
    step = expected.step_s
    found = [Cause(AS_PREDICTED, 3.0, "nothing: the run is within what predictions are off by", (Trace(0.0, {}),))]

    def add(name: str, prior: float, check: str, traces: Iterable[Trace]) -> None:
        found.append(Cause(name, prior, check, tuple(traces)))

    add(
        "throttled clocks",
        1.0,
        "nvidia-smi -q -d PERFORMANCE on every node (thermal slowdown, power brake); DCGM clock event reasons; a GEMM burn per GPU",
        (Trace((f - 1) * expected.compute_s, {"compute": math.log(f)}) for f in (1.1, 1.2, 1.35, 1.6)),
    )
    add(
        "one slow node or GPU",
        1.0,
        "the rank with the longest compute and the shortest collectives: swap its node out; dcgmi diag -r 3, numactl, governor",
        (
            Trace((f - 1) * expected.compute_s, {"uneven": math.log(f), **_waits((f - 1) * expected.compute_s, expected)})
            for f in (1.08, 1.15, 1.3, 1.6)
        ),
    )
    if expected.exposed_s + expected.hidden_s > 1e-3 * step:
        add(
            "a slow link",
            1.0,
            "nccl-tests by pairs of nodes; ibstat rates and perfquery errors; NCCL_DEBUG=INFO for SHM, SOCKET or missing GDRDMA",
            (_slow_link(f, expected) for f in (1.5, 2.0, 3.0, 5.0)),
        )
    add(
        "host-bound launches",
        1.0,
        "CUDA graphs, torch.compile or larger micro-batches; look for cudaStreamSynchronize and .item() in a trace",
        (Trace(x * step, {"idle": x, "starved": 1.0}) for x in (0.1, 0.25, 0.5)),
    )
    if expected.hidden_s > 0.01 * step:
        share = expected.hidden_s / (expected.hidden_s + expected.exposed_s)
        add(
            "no overlap where the plan has it",
            1.0,
            "print the overlap flags of the run and CUDA_DEVICE_MAX_CONNECTIONS; in a trace: do NCCL kernels run beside GEMMs?",
            (Trace(f * expected.hidden_s, {"exposed": f * expected.hidden_s / step, "hidden": -f * share}) for f in (0.6, 1.0)),
        )
    if job.passes:
        add(
            "stalled blocking sends",
            0.7,
            "batch_p2p_comm against overlap_p2p_comm; the sender's trace: does its stage wait about 0.5 s in every send?",
            (Trace(q * job.passes, _waits(q * job.passes, expected)) for q in (0.3, 0.5, 0.7)),
        )
    if job.experts_s > 0.01 * step:
        add(
            "expert imbalance",
            1.0,
            "tokens per expert; one run with forced balance (--moe-router-force-load-balancing): if the step falls, the router",
            (Trace((f - 1) * job.experts_s, _imbalance(f, job, expected)) for f in (1.3, 1.8, 2.5, 4.0)),
        )
    add(
        "allocator retries near the memory limit",
        0.8,
        "num_alloc_retries in torch.cuda.memory_stats(); expandable_segments:True, a smaller micro-batch or more recomputation",
        (Trace(x * step, {"idle": x, "retries": 1.0, "full": 1.0, "tail": 2 * x}) for x in (0.05, 0.15, 0.4)),
    )
    add(
        "data loading",
        1.0,
        "the same run on mock data: if the step falls, more workers or faster storage",
        (Trace(x * step, {"idle": x, "data": x / (1 + x), "tail": 0.3 * x}) for x in (0.05, 0.15, 0.4)),
    )
    add(
        "checkpoints or evaluation inside the time given",
        0.7,
        "take the median of plain steps; the save interval against the long steps",
        (Trace(x * step, {"mean": math.log1p(x), "paused": 1.0, "given": 1.0}) for x in (0.05, 0.15, 0.4)),
    )
    for what, seconds, peak in job.readings:
        add(
            f"another configuration ran: {what}",
            1.0 / len(job.readings),
            "the argument table at the start of the log, or the resolved config that the framework wrote",
            (Trace(seconds - step, {"memory": math.log(peak), **_more_compute(seconds, step, expected)}),),
        )
    add(
        UNKNOWN,
        0.4,
        "a trace of every rank: simpar run read --trace 'rank*.json.gz'",
        (Trace(x * step, {}) for x in (-0.3, -0.15, 0.15, 0.4, 1.0, 3.0)),
    )
    return found  # fmt: skip


def _slow_link(factor: float, expected: Expected) -> Trace:
    """All communication takes longer; what compute hid stays hidden as long as there is compute left beside it."""
    whole = expected.exposed_s + expected.hidden_s
    exposed = max(factor * whole - max(expected.hidden_s, min(0.5 * expected.compute_s, factor * expected.hidden_s)), 0.0)
    extra = max(exposed - expected.exposed_s, 0.0)
    hidden = (1.0 - exposed / (factor * whole)) - expected.hidden_s / whole
    return Trace(extra, {"exposed": extra / expected.step_s, "hidden": hidden, "traffic": math.log(factor)})


def _waits(extra: float, expected: Expected) -> Signs:
    """Signs of seconds that collectives or sends take longer because a peer is late: none of them is hidden."""
    whole = max(expected.exposed_s + expected.hidden_s, 1e-9 * expected.step_s)
    hidden = expected.hidden_s / (whole + extra) - expected.hidden_s / whole
    return {"exposed": extra / expected.step_s, "hidden": hidden, "traffic": math.log1p(extra / whole)}


def _imbalance(factor: float, job: Job, expected: Expected) -> Signs:
    """The fullest rank computes longer, all others wait for it in the next exchange."""
    extra = (factor - 1) * job.experts_s
    return {"load": math.log(factor), "uneven": math.log1p(extra / max(expected.compute_s, 1e-12)), **_waits(extra, expected)}


def _more_compute(seconds: float, step: float, expected: Expected) -> Signs:
    """A configuration's own difference is taken to be compute: recomputation, kernels of other sizes."""
    return {"compute": math.log(max((expected.compute_s + seconds - step) / max(expected.compute_s, 1e-12), 1e-3))}


def diagnose(signs: Signs, expected: Expected, causes: Sequence[Cause]) -> list[Verdict]:
    """Every cause with its probability, the likeliest first."""
    scored = []
    for cause in causes:
        each = [_log_likelihood(signs, expected, trace) for trace in cause.traces]
        top = max(each)
        weights = [math.exp(value - top) for value in each]
        score = math.log(cause.prior) + top + math.log(sum(weights) / len(weights))
        best = cause.traces[each.index(top)]
        extra = sum(w * t.extra_s for w, t in zip(weights, cause.traces, strict=True)) / sum(weights)
        scored.append((score, cause, extra, best))
    top = max(score for score, *_ in scored)
    total = sum(math.exp(score - top) for score, *_ in scored)
    measured = expected.step_s * math.exp(signs.get("step", 0.0) + max(signs.get("mean", 0.0), 0.0))
    found = []
    for score, cause, extra, best in scored:
        held = 0.0 if cause.name in (AS_PREDICTED, UNKNOWN) else min(extra, 0.95 * measured)
        shown = tuple((n, signs[n]) for n, v in best.signs.items() if n in signs and v and abs(signs[n]) > 0.3 * abs(v))
        found.append(Verdict(cause.name, math.exp(score - top) / total, held, measured - held, cause.check, shown))
    return sorted(found, key=lambda verdict: -verdict.probability)


def _log_likelihood(signs: Signs, expected: Expected, trace: Trace) -> float:
    """Of all signs, where the cause has this strength."""
    total = 0.0
    inside = not trace.signs.get("given")
    grows = math.log(max(expected.step_s + trace.extra_s * inside, 1e-9 * expected.step_s) / expected.step_s)
    strength = 0.15 * abs(grows)  # between the strengths that are tried
    for name, value in signs.items():
        wanted = grows if name == "step" else trace.signs.get(name, 0.0)
        if name in SEEN:
            share = SHOWN if wanted else SEEN[name]
            total += math.log(share if value else 1.0 - share)
            continue
        unsure = expected.spread if name in ("step", "compute") else 0.0
        own = 0.25 * abs(wanted) if name != "step" else strength
        width = math.sqrt(NOISE.get(name, 0.0) ** 2 + unsure**2 + own**2)
        off = (value - wanted) / width
        total += -math.log(width) - 0.5 * (TAILS + 1.0) * math.log1p(off * off / TAILS)
    return total
