"""What a search says: the best layouts as `simulate` sees them, ties, the runner-up, the account, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simpar.result.result import Result
from simpar.searching.effects import gap_with_effects, has_effects, pool_of, step_of
from simpar.searching.find import Found
from simpar.searching.incumbents import Scored
from simpar.searching.objective import SIMPLE, dominates, oriented
from simpar.searching.parts import Wish, measure_of, pricing_of, widest
from simpar.searching.runner_up import RunnerUp, runner_up
from simpar.specs.scenario import Scenario
from simpar.step import simulate

TIE: Final = 0.01
"""Layouts closer than this, relatively, are not told apart. Between the layouts of one published sweep (one model, cluster and
batch) the ratio of predicted to measured step time scatters by more: a median of 3 % around each sweep's own (Hagemann et al. 2023
3.5 %, llm-foundry 2.9 %, SimuMax 2.6 %, vTrain 5.9 %, zero bubble 0.9 %). Smaller than that scatter, so that what looks simpler
costs little where the model is right."""

EQUAL: Final = 1e-6
"""Relative difference below which two values are the same number."""


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
    """

    scored: Scored
    found: Found
    metrics: dict[str, float]
    value: float
    result: Result
    tied: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object of `simulate`, and how the search got there."""
        return {
            **self.result.to_json(), "choice": self.scored.choice.flat(), "text": str(self.scored.choice), "tied": self.tied,
            "metrics": self.metrics, "value": self.value,
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The whole answer of one search (or of one over several cluster sizes).

    Attributes:
        candidates: best first (of a front: by its first metric).
        found: per cluster size searched.
        asked: cluster sizes that were to be searched.
        runner_up: the best of the other designs.
        refused: layouts among the best that their framework cannot launch.
        seen: layouts that were simulated again with the scenario's effects; 0 where it has none.
    """

    candidates: tuple[Candidate, ...]
    found: tuple[Found, ...]
    asked: int
    runner_up: RunnerUp | None
    refused: int = 0
    seen: int = 0

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
        if self.seen:
            return self._gap_with_effects
        gaps = [f.gap for f in self.found]
        known = [g for g in gaps if g is not None]
        return max(known) if known and len(known) == len(gaps) and self.complete else None

    @property
    def _gap_with_effects(self) -> float | None:
        if self.best is None or len(self.found) > 1 or self.wish.front or self.wish.robust:
            return None
        found = self.found[0]
        return gap_with_effects(found, step_of(self.best.result), found.space.template.effects)

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
            total["their framework cannot launch them"] = self.refused
        return dict(sorted(((n, c) for n, c in total.items() if c), key=lambda pair: -pair[1]))

    def to_json(self) -> dict[str, Any]:
        """The public object, see docs/search.md."""
        wish = self.wish
        return {
            "best": [c.to_json() for c in self.candidates], "optimality_gap": self.gap,
            "gap_of": "the step with the scenario's effects" if self.seen else "the step", "simulated_with_effects": self.seen,
            "space_size": self.size,
            "rejected": self.counts("rejected"), "evaluated": self.counts("evaluated"),
            "kept": sum(f.account.kept for f in self.found),
            "objective": wish.objective, "robust": wish.robust, "constraints": [str(c) for c in wish.constraints],
            "front": list(wish.front), "finished": self.finished, "seconds": sum(f.seconds for f in self.found),
            "num_gpus": [f.space.template.world_size for f in self.found],
            "runner_up": None if self.runner_up is None else self.runner_up.to_json(),
        }  # fmt: skip


def answer(found: Sequence[Found], asked: int | None = None, runs: Callable[[Scenario], bool] = lambda _: True) -> Answer:
    """Interpret what was found: rank over all cluster sizes, simulate the best, find ties, explain the runner-up.

    Where the scenario has effects, which the search itself leaves out, they rank: a pool of the best is simulated with them.

    Args:
        asked: cluster sizes that were to be searched; none = those of `found`.
        runs: whether a layout can be launched; what cannot is left out.
    """
    wish = found[0].wish
    pools = {id(each): [s for s in _pool(each) if runs(s.choice.scenario(each.space.template))] for each in found}
    refused = sum(len(list(_pool(each))) - len(pools[id(each)]) for each in found)
    every = [candidate for each in found for candidate in _candidates(each, pools[id(each)], wish)]
    if wish.front:
        chosen = _front(every, wish.front)
    else:
        chosen = _with_ties(sorted(every, key=lambda c: _order(c, wish))[: wish.keep], wish)
    sizes = len(found) if asked is None else asked
    seen = len(every) if any(has_effects(each.space.template) for each in found) else 0
    # With effects another design may be nearer than the one that the search knows.
    other = None if wish.front or seen else _runner_up(chosen)
    return Answer(tuple(chosen), tuple(found), sizes, other, refused, seen)


def _pool(found: Found) -> Iterable[Scored]:
    return pool_of(found) if has_effects(found.space.template) else found.best


def _candidates(found: Found, pool: Sequence[Scored], wish: Wish) -> list[Candidate]:
    if not pool:
        return []
    measure, template = measure_of(found.space, wish, pricing_of(found.space)), found.space.template
    factor, effects = widest(found.space), has_effects(template)
    seen = []
    for scored in pool:
        seconds, size = scored.value * factor if wish.robust else scored.step_time_s, scored.device_bytes
        result = simulate(
            scored.choice.scenario(template), detail="stage" if effects and not scored.choice.offload.activations else "layer"
        )
        if effects:
            seconds, size = result.step_interval.high if wish.robust else step_of(result), result.worst_rank.device_bytes
        metrics = measure.metrics(seconds, size)
        holds = all(c.holds(metrics) for c in wish.constraints if c.metric in SIMPLE)
        if not effects or (result.fits and holds):
            seen.append(Candidate(scored, found, metrics, metrics[wish.metric], result))
    return seen


def _order(c: Candidate, wish: Wish) -> tuple[float, float, float, str]:
    return oriented(c.metrics, wish.metric), c.metrics["step_time_s"], c.scored.choice.complexity, str(c.scored.choice)


def _front(every: list[Candidate], names: tuple[str, ...]) -> list[Candidate]:
    """What no other beats in these metrics; of equals the simplest."""
    best: dict[tuple[float, ...], Candidate] = {}
    for c in sorted(every, key=lambda c: (c.scored.choice.complexity, str(c.scored.choice))):
        if not any(dominates(other.metrics, c.metrics, names) for other in every):
            best.setdefault(tuple(c.metrics[n] for n in names), c)
    return sorted(best.values(), key=lambda c: [oriented(c.metrics, n) for n in names])


def _with_ties(ordered: list[Candidate], wish: Wish) -> list[Candidate]:
    """The same with ties marked, and of those tied with the best the simplest first."""
    if not ordered:
        return []
    best = ordered[0]
    marked = [Candidate(c.scored, c.found, c.metrics, c.value, c.result, tied=c is best or is_tied(best, c, wish)) for c in ordered]
    tied = sorted((c for c in marked if c.tied), key=lambda c: (c.scored.choice.complexity, _order(c, wish)))
    return [*tied, *(c for c in marked if not c.tied)]


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


def _runner_up(candidates: list[Candidate]) -> RunnerUp | None:
    """Of the winner's cluster size."""
    if not candidates:
        return None
    best = candidates[0]
    found = best.found
    return runner_up(found, best.result, best.scored.choice)


__all__ = ["Answer", "Candidate", "answer", "is_tied"]
