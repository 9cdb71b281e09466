"""A published run predicted over everything that its source leaves open."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from simpar.errors import InputError
from simpar.evidence.predicted import AtSite, Prediction, Predictor, at_batch
from simpar.evidence.row_open import BATCH
from simpar.evidence.run_type import Run
from simpar.readings import Open, Outcome, spread_over
from simpar.specs.open_values import Choice, choices, facts_of, open_fields
from simpar.specs.scenario import Scenario

MEMORY_SPREAD: Final = 0.15
"""Standard deviation of log(measured / predicted) of a peak that weighs readings by a measured one (assumed: wide, so that only a
reading that is far off goes)."""


def predict_run(run: Run, predictor: Predictor) -> tuple[Prediction, Open | None]:
    """The prediction of a run's likeliest reading with the step time of all of them; a measured memory weighs the readings, the
    measured step time never does.

    Raises:
        InputError: the plan cannot be run at all.
    """
    assert run.scenario is not None
    fields = open_fields(run.table or {})
    if not fields or run.table is None:
        return _no_surer_than_memory(run, predictor(run.scenario)), None
    usual = run.scenario
    found: dict[str, Prediction] = {}

    def outcome(choice: Choice, scenario: Scenario) -> Outcome:
        p, capacity = predictor(scenario), scenario.hardware.gpu.memory.value
        p = found[choice.key] = at_batch(p, usual.training.global_batch_size / scenario.training.global_batch_size)
        cached, width = p.reserved_bytes - p.allocated_bytes, p.memory_error
        return Outcome(p.step_time_s, p.step_low_s, p.step_high_s, p.device_bytes, capacity, cached, width)

    def likelihood(choice: Choice) -> float:
        own = predictor.site.believes(facts_of(choice.values)) if isinstance(predictor, AtSite) else 1.0
        return own * _memory_likelihood(run, found[choice.key])

    try:
        options = [_with_batch(choice, usual) if BATCH in run.open_facts else choice for choice in choices(run.table, fields)]
        answer = spread_over(options, fields, outcome, likelihood=likelihood)
    except InputError:
        return _no_surer_than_memory(run, predictor(usual)), None
    likeliest = found[answer.readings[0].key]
    step = answer.step
    whole = replace(likeliest, step_time_s=step.seconds, step_low_s=step.low, step_high_s=step.high)
    return _no_surer_than_memory(run, whole), answer


def _with_batch(choice: Choice, usual: Scenario) -> Choice:
    """`choice` with as many micro-batches a step as the usual reading, whatever their size."""
    training = choice.table["training"]
    count = usual.training.global_batch_size // usual.training.micro_batch_size
    whole = {**training, "global_batch_size": count * training["micro_batch_size"]}
    return replace(choice, table={**choice.table, "training": whole})


def _memory_likelihood(run: Run, found: Prediction) -> float:
    return math.exp(-0.5 * (_held_beyond(run, found) / MEMORY_SPREAD) ** 2)


def _held_beyond(run: Run, found: Prediction) -> float:
    """log(measured / predicted) of a run's peak memory; 0 where none was measured."""
    peaks = run.measured.peaks(found)
    return math.log(peaks[0] / max(peaks[1], 1.0)) if peaks else 0.0


def _no_surer_than_memory(run: Run, found: Prediction) -> Prediction:
    """`found` with an upper end that is as much further as the run holds more memory than its readings do.

    Such a run is more than its source says of it (kernels that are not fused, masks, buffers), and often takes longer: of 380
    published runs that measure both, nine in ten lie in their intervals where memory is within 8 %, two in three where it is above.
    """
    beyond = max(_held_beyond(run, found), 0.0)
    if not beyond or found.step_high_s <= found.step_time_s:
        return found
    width = math.hypot(math.log(found.step_high_s / found.step_time_s), beyond)
    return replace(found, step_high_s=found.step_time_s * math.exp(width))
