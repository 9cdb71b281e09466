"""What a search says: the best designs as `simulate` sees them, how sure that is, the runner-up, the account, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import exp, log
from typing import Any, Final

from simpar.readings import outcome_of
from simpar.result.result import Result
from simpar.searching.choice import Choice
from simpar.searching.decision import Rival, decide, moves_of
from simpar.searching.design_bounds import DesignBounds
from simpar.searching.designs import design_key, layout_name
from simpar.searching.effects import gap_with_effects, has_effects, leaves_out, pool_of, step_of
from simpar.searching.evaluation import Evaluation
from simpar.searching.find import Found
from simpar.searching.incumbents import Scored
from simpar.searching.mixed_pricing import MixedPricing
from simpar.searching.objective import LARGER_IS_BETTER, SIMPLE, dominates, oriented
from simpar.searching.parts import Wish, largest_share, measure_of, pricing_of, widest
from simpar.searching.runner_up import RunnerUp, Trade, runner_up, trade
from simpar.searching.settings import free_choices
from simpar.specs.scenario import Scenario
from simpar.step import FOLD_MICROBATCHES, simulate

CANNOT_LAUNCH: Final = "their framework cannot launch them"
TIE: Final = 0.01
"""Layouts closer than this, relatively, are not told apart. Between the layouts of one published sweep (one model, cluster and
batch) the ratio of predicted to measured step time scatters by more: a median of 3 % around each sweep's own (Hagemann et al. 2023
3.5 %, llm-foundry 2.9 %, SimuMax 2.6 %, vTrain 5.9 %, zero bubble 0.9 %). Smaller than that scatter, so that what looks simpler
costs little where the model is right."""

EQUAL: Final = 1e-6
"""Relative difference below which two values are the same number."""


Known = dict[tuple[int, str, Choice], Result]
"""Layouts that were simulated, by cluster size and recipe."""


@dataclass(frozen=True)
class Candidate:
    """A layout of the answer.

    Attributes:
        scored: as the search saw it.
        found: the search of its cluster size.
        metrics: simple metrics; of the interval's upper end where the wish is robust.
        value: of the metric that ranks, as in `metrics`.
        result: as `simulate` sees it.
        tied: with the best, within the model's uncertainty.
        fit_probability: chance that it fits the memory.
        best_probability: chance that it is the best of the answer; None where time does not decide.
        expected_step_time_s: what it will take on average if it is chosen: the predicted time and what a choice of the least adds.
        free: axis -> values that change the step by less than the model can tell, its own first.
        measured: rows of the evidence with this combination; None where nobody looked.
    """

    scored: Scored
    found: Found
    metrics: dict[str, float]
    value: float
    result: Result
    tied: bool = False
    fit_probability: float = 1.0
    best_probability: float | None = None
    expected_step_time_s: float = 0.0
    free: dict[str, list[Any]] = field(default_factory=dict)
    measured: int | None = None
    trade: Trade | None = None

    @property
    def design(self) -> str:
        """The short name of its design, with what of the model is recomputed."""
        return "; ".join(filter(None, (self.found.space.recipe, layout_name(self.scored.choice))))

    def to_json(self) -> dict[str, Any]:
        """The object of `simulate`, and how the search got there."""
        return {
            **self.result.to_json(), "choice": self.scored.choice.flat(), "text": str(self.scored.choice), "tied": self.tied,
            "metrics": self.metrics, "value": self.value, "recipe": self.found.space.recipe, "design": self.design,
            "free_choices": self.free,
            "fit_probability": self.fit_probability, "best_probability": self.best_probability,
            "expected_step_time_s": self.expected_step_time_s, "measured_nearby": self.measured,
            "against_best": None if self.trade is None else asdict(self.trade),
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The whole answer of one search (or of one over several cluster sizes).

    Attributes:
        candidates: best first (of a front: by its first metric).
        found: per cluster size searched.
        asked: cluster sizes that were to be searched.
        runner_up: the best of the other designs.
        try_these: positions of the fewest candidates that contain the best with 90 %, likeliest first.
        refused: why their framework cannot launch some of the best layouts, one reason a layout.
        seen: layouts that were simulated again with the scenario's effects; 0 where it has none.
        searched: the search itself knows all of these effects.
        prove: it was asked to go on to the end.
    """

    candidates: tuple[Candidate, ...]
    found: tuple[Found, ...]
    asked: int
    runner_up: RunnerUp | None
    try_these: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()
    seen: int = 0
    searched: bool = True
    prove: bool = False

    @property
    def wish(self) -> Wish:
        """What was wanted."""
        return self.found[0].wish

    @property
    def best(self) -> Candidate | None:
        """What to run."""
        return self.candidates[0] if self.candidates else None

    @property
    def size(self) -> int:
        """Layouts in all spaces."""
        return sum(f.size for f in self.found)

    @property
    def gap(self) -> float | None:
        """The widest gap that could matter; None where nothing is known. With effects, of the step with them."""
        if not self.searched:
            return self._gap_with_effects
        gaps = [f.gap for f in self.found]
        known = [g for g in gaps if g is not None]
        return max(known) if known and len(known) == len(gaps) and self.complete else None

    @property
    def _gap_with_effects(self) -> float | None:
        if self.best is None or len(self.found) > 1 or self.wish.front or self.wish.robust:
            return None
        return gap_with_effects(self.found[0], step_of(self.best.result))

    @property
    def _gap_of(self) -> str:
        drawn = any(found.space.template.effects.is_random for found in self.found)
        return f"the {'expected ' * drawn}step with the scenario's effects" if self.seen else "the step"

    @property
    def complete(self) -> bool:
        """No cluster size was left out, unless a smaller one will do."""
        enough = self.wish.objective == "num_gpus" and bool(self.found[-1].best)
        return len(self.found) == self.asked or enough

    @property
    def finished(self) -> bool:
        """Nothing was left out."""
        return all(f.finished for f in self.found) and self.complete

    def counts(self, what: str) -> dict[str, int]:
        """rejected or evaluated, over all spaces, largest first."""
        total: dict[str, int] = {}
        for found in self.found:
            for name, count in getattr(found.account, what).items():
                total[name] = total.get(name, 0) + count
        if what == "rejected":
            total[CANNOT_LAUNCH] = len(self.refused)
        return dict(sorted(((n, c) for n, c in total.items() if c), key=lambda pair: -pair[1]))

    def to_json(self) -> dict[str, Any]:
        """The public object, see docs/search.md."""
        wish = self.wish
        return {
            "best": [c.to_json() for c in self.candidates], "try_these": list(self.try_these), "optimality_gap": self.gap,
            "mode": "prove" if self.prove else "quick",
            "effects": any(has_effects(f.space.template) for f in self.found),
            "gap_of": self._gap_of, "simulated_with_effects": self.seen,
            "space_size": self.size,
            "rejected": self.counts("rejected"), "evaluated": self.counts("evaluated"),
            "kept": sum(f.account.kept for f in self.found),
            "objective": wish.objective, "robust": wish.robust, "constraints": [str(c) for c in wish.constraints],
            "front": list(wish.front), "finished": self.finished, "seconds": sum(f.seconds for f in self.found),
            "num_gpus": sorted({f.space.template.world_size for f in self.found}),
            "runner_up": None if self.runner_up is None else self.runner_up.to_json(),
        }  # fmt: skip


def answer(
    found: Sequence[Found],
    asked: int | None = None,
    runs: Callable[[Scenario], str] = lambda _: "",
    measured: Callable[[Scenario], int] | None = None,
    known: Known | None = None,
) -> Answer:
    """Interpret what was found: simulate the best, rank over all cluster sizes, say how sure that is, explain the runner-up.

    Where the scenario has effects, the best are simulated with them, and where the search left some out, a pool of others.

    Args:
        asked: cluster sizes that were to be searched; none = those of `found`.
        runs: why a layout cannot be launched, which is then left out; "" = it can.
        measured: how many rows of the evidence have the combination of a layout.
        known: results of earlier answers over these spaces; new ones are added.
    """
    wish, known = found[0].wish, {} if known is None else known
    reasons = [[(s, runs(s.choice.scenario(each.space.template))) for s in _pool(each)] for each in found]
    pools = [[s for s, reason in own if not reason] for own in reasons]
    refused = tuple(reason for own in reasons for _, reason in own if reason)
    every = [candidate for each, pool in zip(found, pools, strict=True) for candidate in _candidates(each, pool, wish, known)]
    chosen = _front(every, wish.front) if wish.front else _ranked(every, wish)
    try_these: tuple[int, ...] = ()
    if chosen and not (wish.front or wish.by_memory or wish.objective == "num_gpus"):
        chosen, try_these = _decided(chosen, wish)
    if not wish.front:
        bounds = {each: _bounds(each, wish) for each in found}
        chosen = [replace(c, free=free_choices(own, c.scored.choice)) if (own := bounds[c.found]) else c for c in chosen]
    if measured is not None:
        chosen = [replace(c, measured=measured(c.scored.choice.scenario(c.found.space.template))) for c in chosen]
    chosen = [replace(c, trade=trade(chosen[0].result, c.result)) if c is not chosen[0] else c for c in chosen]
    sizes = len(found) if asked is None else asked
    seen = len(every) if any(has_effects(each.space.template) for each in found) else 0
    searched = not any(leaves_out(each.space, robust=wish.robust) for each in found)
    # With effects that it does not know another design may be nearer than the one that the search knows.
    other = None if wish.front or not searched else _runner_up(chosen, known)
    return Answer(tuple(chosen), tuple(found), sizes, other, try_these or tuple(range(len(chosen)))[:1], refused, seen, searched)


def _ranked(every: list[Candidate], wish: Wish) -> list[Candidate]:
    """The best of every design (of every recipe of a task; of all layouts, where designs are not asked for), best first, with ties
    marked."""
    ordered, seen = [], set()
    for candidate in sorted(every, key=lambda c: _order(c, wish)):
        key = (candidate.found, () if candidate.found.space.recipe else design_key(candidate.scored.choice))
        if not wish.fold or key not in seen:
            seen.add(key)
            ordered.append(candidate)
    return [replace(c, tied=c is ordered[0] or is_tied(ordered[0], c, wish)) for c in ordered[: wish.keep]]


def _decided(chosen: list[Candidate], wish: Wish) -> tuple[list[Candidate], tuple[int, ...]]:
    """Candidates with their chances, and which of them are worth a trial."""
    sign = -1.0 if wish.metric in LARGER_IS_BETTER else 1.0
    rivals = [
        Rival(sign * log(c.value), moves_of(c.result), (c.result.world_size, c.scored.choice.mesh_key), c.fit_probability)
        for c in chosen
    ]
    decision = decide(rivals)
    found = [
        replace(c, best_probability=float(p), expected_step_time_s=c.expected_step_time_s * exp(decision.optimism))
        for c, p in zip(chosen, decision.best_probability, strict=True)
    ]
    return found, decision.try_these


def _pool(found: Found) -> Iterable[Scored]:
    return pool_of(found) if leaves_out(found.space, robust=found.wish.robust) else found.best


def _candidates(found: Found, pool: Sequence[Scored], wish: Wish, known: Known) -> list[Candidate]:
    if not pool:
        return []
    measure, template = measure_of(found.space, wish, pricing_of(found.space)), found.space.template
    factor, effects = widest(found.space), has_effects(template)
    seen = []
    for scored in pool:
        seconds, size = scored.value * factor if wish.robust else scored.step_time_s, scored.device_bytes
        result = _simulated(found, scored.choice, known)
        if effects:
            seconds, size = result.step_interval.high if wish.robust else step_of(result), result.worst_rank.device_bytes
        metrics = measure.metrics(seconds, size)
        holds = all(c.holds(metrics) for c in wish.constraints if c.metric in SIMPLE)
        fit = outcome_of(result).chance_to_fit
        likely = result.fits if wish.fit_probability is None else fit >= wish.fit_probability
        if not effects or (likely and holds):
            step_s = seconds if effects and not wish.robust else result.step_time_s
            seen.append(
                Candidate(scored, found, metrics, metrics[wish.metric], result, fit_probability=fit, expected_step_time_s=step_s)
            )
    return seen


def _simulated(found: Found, choice: Choice, known: Known) -> Result:
    """A layout as `simulate` has it, with the scenario's effects; without any on the program that was swept."""
    template, pricing = found.space.template, pricing_of(found.space)
    key = (template.world_size, found.space.recipe, choice)
    if isinstance(pricing, MixedPricing):
        return simulate(choice.scenario(template)) if has_effects(template) else pricing.evaluation.result(choice)
    if key not in known:
        evaluation = Evaluation.of(pricing)
        if has_effects(template):
            scenario = pricing.slow_ranks.folded(choice.scenario(template), choice.group)
            known[key] = simulate(scenario, detail=evaluation.detail(choice))
        elif evaluation.microbatches(choice) > FOLD_MICROBATCHES:
            replayed = partial(evaluation.replayed, choice)
            known[key] = simulate(choice.scenario(template), detail=evaluation.detail(choice), replayed=replayed)
        else:
            known[key] = evaluation.replayed(choice)
    return known[key]


def _order(c: Candidate, wish: Wish) -> tuple[float, float, float, str]:
    return oriented(c.metrics, wish.metric), c.metrics["step_time_s"], c.scored.choice.complexity, str(c.scored.choice)


def _bounds(found: Found, wish: Wish) -> DesignBounds | None:
    """Bounds of all layouts that are likely enough to fit; none over machines of several kinds."""
    space, pricing = found.space, pricing_of(found.space)
    if isinstance(pricing, MixedPricing):
        return None
    share = 1.0 if wish.fit_probability is None else largest_share(space, wish.fit_probability)
    return DesignBounds(space, pricing, share * space.template.hardware.gpu.memory.value)


def _front(every: list[Candidate], names: tuple[str, ...]) -> list[Candidate]:
    """What no other beats in these metrics; of equals the simplest."""
    best: dict[tuple[float, ...], Candidate] = {}
    for c in sorted(every, key=lambda c: (c.scored.choice.complexity, str(c.scored.choice))):
        if not any(dominates(other.metrics, c.metrics, names) for other in every):
            best.setdefault(tuple(c.metrics[n] for n in names), c)
    return sorted(best.values(), key=lambda c: [oriented(c.metrics, n) for n in names])


def is_tied(best: Candidate, other: Candidate, wish: Wish) -> bool:
    """Whether the model cannot tell which of two layouts is better: they are within TIE, and within the interval of the best.

    Memory and numbers of GPUs are compared as they are.
    """
    if wish.by_memory:
        return abs(other.value - best.value) <= EQUAL * max(abs(best.value), 1.0)
    if wish.objective == "num_gpus":
        if other.value != best.value:
            return False
        mine, theirs = best.metrics["step_time_s"], other.metrics["step_time_s"]
    else:
        mine, theirs = best.value, other.value
    interval, seconds = best.result.step_interval, best.result.step_time_s
    unsure = min(TIE, (interval.high - interval.low) / 2.0 / seconds)
    return abs(theirs - mine) / abs(mine) <= max(EQUAL, unsure)


def _runner_up(candidates: list[Candidate], known: Known) -> RunnerUp | None:
    """Of the winner's cluster size."""
    if not candidates:
        return None
    best = candidates[0]
    found = best.found
    return runner_up(found, best.result, best.scored.choice, lambda choice: _simulated(found, choice, known))


__all__ = ["Answer", "Candidate", "answer", "is_tied"]
