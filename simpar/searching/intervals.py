"""The upper end of a layout's 80 % interval before it is simulated: what `result.interpret` finds, on shared programs."""

from __future__ import annotations

import numpy as np

from simpar.engine.longest_path import longest_path_batch
from simpar.result.interval import together
from simpar.searching.choice import Choice
from simpar.searching.evaluation import Evaluation


class Intervals:
    """Upper ends of intervals.

    Args:
        unseen: half-width that the calibration alone gives, as a share of the step time.
        factor: on the upper half, in logarithms (specs/calibration.py, `interval_up`).
    """

    def __init__(self, evaluation: Evaluation, unseen: float, factor: float) -> None:
        self.evaluation, self.unseen, self.factor = evaluation, unseen, factor

    def high(self, choice: Choice, time_s: float) -> float:
        """The upper end for a layout that takes `time_s`, or a lower bound of it where that is one of its time.

        Each category of seconds goes to its own upper end, all else staying; the changes of the longest path's logarithm, without
        interference, add up in quadrature with what the calibration leaves open.
        """
        step, seconds = self.evaluation.raised(choice)
        spans = longest_path_batch(step.program, seconds)
        return float(time_s * together(np.maximum(spans[1:], spans[0]) / spans[0], self.unseen) ** self.factor)


__all__ = ["Intervals"]
