"""State -> what the page shows: a simulated step, days and cost."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpar.errors import InputError, Violation
from simpar.report.serve.front import refused
from simpar.report.serve.programs import Programs, step_of
from simpar.report.serve.state import Bases, State
from simpar.result.result import Result
from simpar.specs.counts import microbatches
from simpar.specs.scenario import Scenario

if TYPE_CHECKING:
    from simpar.report.serve.preview import Preview

DAY_S, HOUR_S = 86400.0, 3600.0
MAX_ACTIONS = 400_000
"""Forward and backward passes of a step; more take minutes, which is for the command line."""
SOON_S = 0.22
"""An answer that is expected to take longer gets a first answer before it: the rest of half a second is the browser's."""
FIRST_S_PER_PASS = 5e-5
"""Expected before anything was measured."""
SLOWEST_S_PER_PASS = 4e-4
"""What a pass of many blocks takes; short steps take longer per pass, but not long."""
_KEPT = 12


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run in closed form: tokens / (tokens per second x goodput)."""

    days: float
    gpu_hours: float
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the page shows of a state.

    Attributes:
        query: of the state.
        run: days and cost; None where the layout does not fit.
        seconds: it took to compute.
    """

    query: str
    state: State
    scenario: Scenario
    result: Result
    run: Run | None
    seconds: float


def actions_of(scenario: Scenario) -> int:
    """Forward and backward passes of all virtual stages over all micro-batches of one pipeline."""
    return 2 * microbatches(scenario) * scenario.plan.pp * scenario.plan.virtual_stages


def check_size(scenario: Scenario) -> None:
    """Refuse steps that would keep the page busy for minutes.

    Raises:
        InputError: too many passes.
    """
    actions = actions_of(scenario)
    if actions > MAX_ACTIONS:
        rule = f"{actions:,} passes in a step are more than this page simulates"
        right = f"at most {MAX_ACTIONS:,}: a smaller global_batch_size, or `simpar simulate` on the command line"
        raise InputError([Violation("training.global_batch_size", scenario.training.global_batch_size, rule, right)])


def run_of(result: Result, tokens: float, usd_per_gpu_hour: float, goodput: float) -> Run:
    """Days, GPU-hours and rent of training `tokens` at the step's throughput, `goodput` of the time."""
    return run_for(result.tokens_per_s, result.world_size, tokens, usd_per_gpu_hour, goodput)


def run_for(tokens_per_s: float, gpus: int, tokens: float, usd_per_gpu_hour: float, goodput: float) -> Run:
    """The same from a throughput."""
    seconds = tokens / tokens_per_s / goodput
    gpu_hours = seconds / HOUR_S * gpus
    return Run(seconds / DAY_S, gpu_hours, gpu_hours * usd_per_gpu_hour)


class Answers:
    """Computes answers, one at a time, and keeps the last few."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()
        self._programs = Programs()
        self._pace: dict[str, float] = {}

    def __call__(self, state: State, outdated: Callable[[], bool] = lambda: False) -> Answer | None:
        """The answer to `state`; None where it is `outdated` by the time its turn comes.

        Raises:
            InputError: everything wrong with it, as on the command line.
        """
        refused()
        query = state.query(self.bases)
        with self._lock:
            if outdated():
                return None
            if query in self._kept:
                self._kept.move_to_end(query)
                return self._kept[query]
            answer = self._compute(query, state)
            self._kept[query] = answer
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return answer

    def early(self, state: State, outdated: Callable[[], bool] = lambda: False) -> Preview | None:
        """A first answer where the whole one is expected to take long, and only while it is not `outdated`.

        Raises:
            InputError: as the whole answer.
        """
        from simpar.report.serve.preview import preview

        refused()
        scenario = state.scenario(self.bases)
        numbers = run_numbers(state)
        check_size(scenario)
        if self._pace.get(state.base, FIRST_S_PER_PASS) * actions_of(scenario) < SOON_S:
            return None
        # Beside a whole step that is still being computed: waiting for that would take longer.
        return None if outdated() else preview(scenario, *numbers, lowering=self._programs)

    def known(self, state: State) -> bool:
        """Whether the answer is kept already."""
        return state.query(self.bases) in self._kept

    def _compute(self, query: str, state: State) -> Answer:
        started = time.perf_counter()
        scenario = state.scenario(self.bases)
        numbers = run_numbers(state)
        check_size(scenario)
        result = step_of(scenario, self._programs)
        run = run_of(result, *numbers) if result.fits else None
        _ = result.worst_rank.device_bytes  # replayed when first asked for: it belongs to the time taken
        seconds = time.perf_counter() - started
        pace = min(seconds / max(actions_of(scenario), 1), SLOWEST_S_PER_PASS)
        self._pace[state.base] = max(pace, self._pace.get(state.base, 0.0) * 0.7)
        return Answer(query, state, scenario, result, run, seconds)


def run_numbers(state: State) -> tuple[float, float, float]:
    """Tokens, price and goodput.

    Raises:
        InputError: all that are wrong.
    """
    found: list[float] = []
    wrong: list[Violation] = []
    for key in ("tokens", "usd", "goodput"):
        try:
            found.append(state.number(key))
        except InputError as error:
            wrong += error.violations
    if wrong:
        raise InputError(wrong)
    return found[0], found[1], found[2]
