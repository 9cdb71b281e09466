"""The 80 % interval of a step's time from the steps with each category of prices at both ends of its own interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray
from simpar.result.ideal import ideal_seconds

HALF_WIDTH = 1.28 / 0.674
"""80 % half-width over the median absolute error of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An 80 % interval and the categories that widen it most."""

    low: float
    high: float
    dominated_by: tuple[tuple[str, float], ...] = ()
    """(category, half-width in the metric's unit), widest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Makespans with categories of prices moved.

    Attributes:
        names: the categories.
        spans: float array [1 + 2 names], seconds: as priced, then each category at its upper and at its lower end.
    """

    names: tuple[str, ...]
    spans: FloatArray

    def interval(self, layout: Layout, makespan: float, breakdown: Mapping[str, float]) -> Interval:
        """The changes of the step's logarithm added in quadrature.

        Times are ratios away from the truth, not differences: the interval is multiplicative, and no end of it is below the time
        that the model FLOPs take at peak.

        Args:
            breakdown: seconds by term, as `Result.breakdown`.
        """
        if layout.site is not None:
            return _at_site(layout, makespan, breakdown)
        spans = self.spans
        up, down = np.maximum(spans[1::2], spans[0]) / spans[0], spans[0] / np.minimum(spans[2::2], spans[0])
        # What the parts' own intervals do not hold: how far the calibration was off on runs that it had not seen.
        unseen = HALF_WIDTH * layout.calibration.expected_error
        # Split-conformal: so that a tenth of the runs of sources that no fit has seen lies above, and a tenth below.
        here = layout.calibration
        low = max(makespan / together(down, unseen) ** here.interval_down, min(ideal_seconds(layout), makespan))
        high = makespan * together(up, unseen) ** here.interval_up
        widths = [(n, makespan * float(max(u, d) - 1.0)) for n, u, d in zip(self.names, up, down, strict=True)]
        widths = sorted([*widths, ("calibration", unseen * makespan)], key=lambda x: -x[1])
        return Interval(low, high, tuple(w for w in widths[:5] if w[1] > 0))


def _at_site(layout: Layout, makespan: float, breakdown: Mapping[str, float]) -> Interval:
    """The interval of a step at a site with runs of its own: how sure they make each factor, and what is left between them.

    The intervals of single prices are in there: a price that is off is off in the site's runs as well.
    """
    assert layout.site is not None
    half, causes = layout.site.log_half_width(layout.site.shares(breakdown, makespan), layout.kind)
    low = max(makespan * float(np.exp(-half)), min(ideal_seconds(layout), makespan))
    widths = sorted(((name, makespan * float(np.expm1(width))) for name, width in causes.items()), key=lambda w: -w[1])
    return Interval(low, makespan * float(np.exp(half)), tuple(w for w in widths if w[1] > 0))


def together(ratios: FloatArray, unseen: float) -> float:
    """One factor of independent ones: the changes of the logarithm add up in quadrature.

    Args:
        ratios: float array [causes], each at least 1.
        unseen: the calibration's own share, a factor of 1 + this.
    """
    return float(np.exp(np.hypot(np.sqrt((np.log(ratios) ** 2).sum()), np.log1p(unseen))))
