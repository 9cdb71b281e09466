"""A scenario with open facts, answered: every admissible reading is simulated, and the answer spans those that can have run.

What a user or a published row leaves open (recomputation, virtual stages, micro-batch size, ...) is spread instead of guessed:
readings that break a rule or cannot fit the device's memory are dropped, the rest form a mixture, and the answer names the one fact
that would narrow it most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

from simpar.errors import InputError
from simpar.model.kind import site_of
from simpar.result.result import Result
from simpar.specs.open_values import Choice, OpenField, choices, facts_of, open_fields
from simpar.specs.scenario import Scenario, make_scenario

TENTH: Final = 1.2816
"""Standard deviations from the median to either end of an 80 % interval of a normal distribution."""
LEAST_CHANCE: Final = 0.02
"""A reading whose memory fits with less than this chance cannot have run."""
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted duration in seconds with its 80 % interval, and how likely its reading is."""

    weight: float
    seconds: float
    low: float
    high: float

    def below(self, log_s: float) -> float:
        """Chance that the duration is less than exp(log_s): log-normal on either side, so that the interval's ends are tenths."""
        middle = math.log(self.seconds)
        end = self.low if log_s < middle else self.high
        spread = max(abs(math.log(max(end, 1e-30)) - middle) / TENTH, 1e-6)
        return _NORMAL.cdf((log_s - middle) / spread)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 80 % interval of a mixture of estimates, in seconds."""

    seconds: float
    low: float
    high: float

    @property
    def log_width(self) -> float:
        """log(high / low)."""
        return math.log(self.high / self.low)


def mixture(estimates: Sequence[Estimate]) -> Spread:
    """The mixture of `estimates`, their weights in proportion."""
    total = sum(e.weight for e in estimates)
    lowest = math.log(min(min(e.low, e.seconds) for e in estimates)) - 3.0
    highest = math.log(max(max(e.high, e.seconds) for e in estimates)) + 3.0

    def quantile(share: float) -> float:
        low, high = lowest, highest
        for _ in range(60):
            middle = (low + high) / 2.0
            if sum(e.weight * e.below(middle) for e in estimates) < share * total:
                low = middle
            else:
                high = middle
        return math.exp((low + high) / 2.0)

    return Spread(quantile(0.5), quantile(0.1), quantile(0.9))


@dataclass(frozen=True, slots=True)
class Reading(Estimate):
    """One way to settle the open facts that can have run.

    Attributes:
        values: (field, value) pairs.
        weight: how likely it is, after what memory says; the weights of all readings add to 1.
        seconds, low, high: predicted step time and 80 % interval.
        chance_to_fit: that the predicted peak is within the device's memory.
    """

    values: tuple[tuple[str, Any], ...]
    chance_to_fit: float

    @property
    def key(self) -> str:
        """The values as text, as `Choice.key`."""
        return repr(self.values)

    @property
    def facts(self) -> tuple[str, ...]:
        """The values as a site knows them."""
        return facts_of(self.values)

    def as_json(self) -> dict[str, Any]:
        """Values, weight, step time, interval, chance to fit."""
        shown = {"weight": self.weight, "step_time_s": self.seconds, "low": self.low, "high": self.high}
        return {"values": dict(self.values), **shown, "fit_probability": self.chance_to_fit}


@dataclass(frozen=True, slots=True)
class Open:
    """The answer over all readings.

    Attributes:
        step: the mixture's step time.
        readings: likeliest first.
        dropped: (values, reason) of readings that cannot have run.
        look_up: (field, width of the interval, high over low, expected once it is known), the most telling field first.
    """

    step: Spread
    readings: tuple[Reading, ...]
    dropped: tuple[tuple[tuple[tuple[str, Any], ...], str], ...]
    look_up: tuple[tuple[str, float], ...]

    def as_json(self) -> dict[str, Any]:
        """The object under "readings" in `simulate --json`."""
        return {
            "step_time_s": {"median": self.step.seconds, "low": self.step.low, "high": self.step.high},
            "readings": [reading.as_json() for reading in self.readings],
            "dropped": [{"values": dict(values), "reason": reason} for values, reason in self.dropped],
            "look_up": [{"field": path, "high_over_low": width} for path, width in self.look_up],
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What simulating one reading says: seconds, the ends of its interval, peak bytes of the device and its capacity.

    Attributes:
        cached_bytes: of the peak, what the allocator holds without a tensor in it.
        half_width: of the 80 % interval of a predicted peak, as a logarithm.
    """

    seconds: float
    low: float
    high: float
    device_bytes: float
    capacity_bytes: float
    cached_bytes: float = 0.0
    half_width: float = 0.07

    @property
    def chance_to_fit(self) -> float:
        """That the peak is within the capacity, see `fit_probability`."""
        return fit_probability(self.device_bytes, self.cached_bytes, self.capacity_bytes, self.half_width)


def fit_probability(device_bytes: float, cached_bytes: float, capacity_bytes: float, half_width: float) -> float:
    """The chance that a predicted peak fits.

    Before it gives up, torch's caching allocator frees cached blocks and tries again, which helps as far as whole segments are
    free: between none and all of them, so half, and the doubt about it widens the interval.

    Args:
        device_bytes: peak of all that the process holds.
        cached_bytes: of these, reserved by the allocator without a live tensor.
        half_width: of the 80 % interval of a predicted peak, as a logarithm.
    """
    needed = max(device_bytes - 0.5 * cached_bytes, 1.0)
    spread = math.hypot(half_width / TENTH, math.log(max(device_bytes, 1.0) / needed))
    return _NORMAL.cdf(math.log(capacity_bytes / needed) / max(spread, 1e-6))


def outcome_of(result: Result) -> Outcome:
    """What a reading's result says."""
    interval = result.step_interval
    worst = max(result.memory, key=lambda rank: rank.device_bytes)
    cached, width = worst.reserved_bytes - worst.allocated_bytes, result.layout.memory_half_width
    return Outcome(result.step_time_s, interval.low, interval.high, worst.device_bytes, result.device_memory_bytes, cached, width)


def spread_over(
    options: Iterable[Choice],
    fields: Sequence[OpenField],
    simulate: Callable[[Choice, Scenario], Outcome],
    *,
    file: str = "",
    likelihood: Callable[[Choice], float] = lambda _: 1.0,
) -> Open:
    """Simulate every choice and put the readings together.

    Args:
        simulate: the outcome of one choice, given its checked scenario.
        likelihood: what else was seen says of a simulated choice (a measured memory, never the step time itself), as a factor.

    Raises:
        InputError: no reading can have run: what is wrong with all of them, else the reason of the likeliest.
    """
    found: list[Reading] = []
    errors: list[InputError] = []
    dropped: list[tuple[tuple[tuple[str, Any], ...], str]] = []
    for choice in options:
        try:
            scenario = make_scenario(choice.table, file=file)
            outcome = simulate(choice, scenario)
        except InputError as error:
            errors.append(error)
            dropped.append((choice.values, str(error).splitlines()[0]))
            continue
        chance = outcome.chance_to_fit
        if chance < LEAST_CHANCE:
            gib = (outcome.device_bytes / 2**30, outcome.capacity_bytes / 2**30)
            dropped.append((choice.values, f"needs {gib[0]:.1f} of {gib[1]:.1f} GiB"))
            continue
        site = site_of(scenario)
        own = 1.0 if site is None else site.believes(facts_of(choice.values))
        weight = choice.weight * own * chance * max(likelihood(choice), 1e-12)
        found.append(Reading(weight, outcome.seconds, outcome.low, outcome.high, choice.values, chance))
    if not found:
        if len(errors) == len(dropped) and len({reason for _, reason in dropped}) == 1:
            raise errors[0]  # whatever the open fields are
        values, reason = dropped[0]
        named = ", ".join(f"{path} = {value!r}" for path, value in values)
        raise InputError(f"no reading of the open fields can run; with {named}: {reason}")
    total = sum(reading.weight for reading in found)
    readings = sorted((replace(r, weight=r.weight / total) for r in found), key=lambda r: -r.weight)
    return Open(mixture(readings), tuple(readings), tuple(dropped), _look_up(readings, fields))


def _look_up(readings: Sequence[Reading], fields: Sequence[OpenField]) -> tuple[tuple[str, float], ...]:
    """(Field, expected high over low of the interval once its value is known), the most telling first."""
    found = []
    for field in fields:
        groups: dict[str, list[Reading]] = {}
        for reading in readings:
            groups.setdefault(repr(dict(reading.values)[field.path]), []).append(reading)
        width = sum(sum(r.weight for r in group) * mixture(group).log_width for group in groups.values())
        found.append((field.path, math.exp(width)))
    return tuple(sorted(found, key=lambda pair: pair[1]))


def simulate_open(
    table: Mapping[str, Any], file: str = "", *, simulate: Callable[[Scenario], Result] | None = None
) -> tuple[Result, Open | None]:
    """The result of the likeliest reading of a raw scenario table, and the answer over all readings (none where nothing is open).

    Args:
        file: what its relative paths start from.
        simulate: what simulates one scenario; none = `simpar.step.simulate`.

    Raises:
        InputError: the scenario is wrong, or none of its readings can have run.
    """
    from simpar import step

    run = simulate or step.simulate
    fields = open_fields(table, file)
    if not fields:
        return run(make_scenario(dict(table), file=file)), None
    results: dict[str, Result] = {}

    def outcome(choice: Choice, scenario: Scenario) -> Outcome:
        found = results[choice.key] = run(scenario)
        return outcome_of(found)

    answer = spread_over(choices(table, fields, file), fields, outcome, file=file)
    return results[answer.readings[0].key], answer


def with_readings(table: dict[str, Any], answer: Open | None) -> dict[str, Any]:
    """The object of `simulate --json` with the mixture's headline numbers and all readings; as it is where nothing is open.

    The rest (waterfall, memory, layout) stays that of the likeliest reading.
    """
    if answer is None:
        return table
    step, factor = answer.step, table["step_time_s"] / answer.step.seconds
    rates = ("tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu", "mfu_non_causal", "hfu")
    moved = {"step_time_s": step.seconds} | {name: table[name] * factor for name in rates if name in table}
    uncertain = dict(table["uncertainty"])
    uncertain["step_time_s"] = {"low": step.low, "high": step.high, "dominated_by": dict(answer.look_up[:1])}
    for name in set(uncertain) & set(rates):
        uncertain[name] = {"low": moved[name] * step.seconds / step.high, "high": moved[name] * step.seconds / step.low}
    return {**table, **moved, "uncertainty": uncertain, "readings": answer.as_json()}
