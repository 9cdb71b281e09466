"""The questions that the page answers, each with its reasons in words. No figure here is another than that of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simpar.readings import outcome_of
from simpar.report.serve.answer import Answer
from simpar.report.serve.preview import Preview
from simpar.report.step_table import REMEDIES
from simpar.result.result import Result
from simpar.units import format_bytes, format_seconds

QUESTIONS: Final = {
    "fit": "Does it fit?", "fast": "How fast is it?", "best": "Which layout is best?", "long": "How long will it take?",
    "why": "Why is it slow?", "mine": "What do my own runs say?",
}  # fmt: skip
"""Key in the address -> question, in the order shown."""
FIRST: Final = "fast"


@dataclass(frozen=True, slots=True)
class Said:
    """An answer in words.

    Attributes:
        verdict: the answer, one sentence.
        why: reasons, most important first.
        bad: whether it is bad news.
    """

    verdict: str
    why: tuple[str, ...]
    bad: bool = False


def said(answer: Answer) -> dict[str, Said]:
    """The answer to each question but that of the user's own runs, which needs runs."""
    return {
        "fit": fit(answer.result), "fast": fast(answer.result), "best": best(answer.result), "long": long(answer),
        "why": why_slow(answer.result),
    }  # fmt: skip


def said_early(early: Preview) -> dict[str, Said]:
    """What is known before a long step is simulated whole."""
    wait = ("The whole step is being simulated; the answer with its reasons follows.",)
    step = format_seconds(early.step_time_s)
    found = {key: Said(f"About {step} a step.", wait) for key in QUESTIONS if key != "mine"}
    found["fit"] = Said(fit(early.short).verdict, wait, not early.short.fits)
    found["fast"] = Said(f"About {step} a step: {early.tokens_per_s:,.0f} tokens per second.", wait)
    return found


def fit(result: Result) -> Said:
    """Does it fit?"""
    worst, device = result.worst_rank, result.device_memory_bytes
    left = device - worst.device_bytes
    needs = f"the fullest GPU, of pipeline rank {worst.rank}, needs {format_bytes(worst.device_bytes)} of {format_bytes(device)}"
    margin = f"{format_bytes(left)} are left" if result.fits else f"{format_bytes(-left)} too much"
    chance = outcome_of(result).chance_to_fit
    parts = sorted(worst.at_peak.items(), key=lambda part: -part[1])[:4]
    why = [
        f"The chance that a real run fits is {_percent(chance)}: predicted peaks have an error, and the allocator may give back "
        "what it caches.",
        "At its fullest moment it holds "
        + ", ".join(f"{format_bytes(size)} of {name.replace('_', ' ')}" for name, size in parts)
        + ".",
    ]  # fmt: skip
    outside = sum(size for _, size in worst.outside)
    fragments = worst.reserved_bytes - worst.allocated_bytes
    why.append(
        f"The allocator's unused segments take {format_bytes(max(fragments, 0.0))}, "
        f"the CUDA context and NCCL {format_bytes(outside)}."
    )
    return Said(f"{'Yes' if result.fits else 'No'}: {needs}; {margin}.", tuple(why), not result.fits)


def _percent(share: float) -> str:
    """A probability, never rounded to certainty."""
    return "above 99 %" if share > 0.99 else "below 1 %" if share < 0.01 else f"{share:.0%}".replace("%", " %")


def fast(result: Result) -> Said:
    """How fast is it?"""
    low, high = result.step_interval.low, result.step_interval.high
    widest = [name.replace("_", "-") for name, _ in result.step_interval.dominated_by[:2]]
    why = [
        f"80 of 100 real runs should take {format_seconds(low)} to {format_seconds(high)}; most of that doubt is about "
        f"{' and '.join(widest)}.",
        f"{result.mfu:.0%} of the GPUs' peak goes into the model ({result.model_flops_per_s_per_gpu / 1e12:,.0f} TFLOP/s per GPU); "
        + _where(result),
    ]  # fmt: skip
    weak = [name.replace("_", "-") for name, kind in result.provenance.items() if kind in ("assumed", "peak-scaled")]
    if weak:
        why.append(f"Not measured on this machine, so scaled from the data sheet: {', '.join(weak)}.")
    verdict = f"{format_seconds(result.step_time_s)} a step: {result.tokens_per_s:,.0f} tokens per second."
    return Said(verdict if result.fits else f"{verdict} But it does not fit.", tuple(why), not result.fits)


def _where(result: Result) -> str:
    losses = sorted(result.waterfall()[1:], key=lambda part: -part[1])[:2]
    told = " and ".join(f"{name} ({seconds / result.step_time_s:.0%})" for name, seconds in losses)
    return f"the largest losses are {told}."


def best(result: Result) -> Said:
    """Which layout is best?"""
    why = (
        "Free are tp, pp, virtual stages, micro-batch, recomputation, and 1F1B or interleaved; everything else stays as set.",
        "The search proves that no other layout of this space is faster. `simpar search` frees the other fields as well.",
    )
    now = f"{format_seconds(result.step_time_s)} a step" if result.fits else "does not fit"
    return Said(f"The present layout: {now}. Press Search the layout to see whether another one is better.", why, not result.fits)


def long(answer: Answer) -> Said:
    """How long will it take, and what will it cost?"""
    values, run = answer.state.values, answer.run
    tokens = str(values["tokens"])
    if run is None:
        return Said("A layout that does not fit takes no time and costs nothing: it does not run.", (), True)
    why = (
        f"{tokens} tokens at {answer.result.tokens_per_s:,.0f} tokens per second, of which a goodput of "
        f"{float(str(values['goodput'])):.0%} trains; {_count(run.gpu_hours)} GPU-hours at ${float(str(values['usd'])):g}.",
        "Failures, checkpoints and spares are simulated by `simpar plan`; here the goodput stands for them.",
    )
    return Said(f"{tokens} tokens take {_count(run.days)} days and cost ${_count(run.cost_usd)}.", why)


def _count(value: float) -> str:
    from simpar.report.serve.tables import short

    return short(value)


def why_slow(result: Result) -> Said:
    """Why is it slow? The losses that a layout can change, with what shrinks each."""
    step = result.step_time_s
    found = sorted(((name, result.breakdown.get(name, 0.0)) for name in REMEDIES), key=lambda part: -part[1])
    why = [f"{seconds / step:.1%}: {REMEDIES[name]}." for name, seconds in found[:4] if seconds > 0.005 * step]
    kernels = dict(result.waterfall())["matmul and attention below peak"]
    if kernels > 0.02 * step:
        why.append(
            f"{kernels / step:.1%}: no matmul reaches the data sheet's peak; larger micro-batches and smaller tp come closer."
        )
    lost = 1.0 - result.ideal_s / step
    return Said(f"{lost:.0%} of the step is not model FLOPs at peak. What a change of layout could win back:", tuple(why))
