"""Max-min fair rates on shared links, by progressive filling.

All rates rise together until a link is full or a flow reaches its own peak; whoever is stopped keeps its rate, the
rest rise on (Bertsekas and Gallager, Data Networks, section 6.5.2). The result is the only allocation in which no rate
can be raised without lowering one that is not larger.
"""

from __future__ import annotations

import numpy as np

from simpar.program.program import FloatArray, IntArray

_TIE = 1e-12
"""Links whose fair share differs by less than this, relatively, fill at the same moment."""


def max_min_rates(peak: FloatArray, flow: IntArray, link: IntArray, weight: FloatArray, capacity: FloatArray) -> FloatArray:
    """Fair rate of each flow.

    A flow may press on many links at once, and with different weights (a ring on each of its hops, an all-to-all harder
    on the uplinks than on a pair's cable): at rate r it takes `weight * r` of the link.

    Args:
        peak: most that each flow can use, float array [flows].
        flow, link: which flow presses on which link, int arrays [entries]; a pair occurs once.
        weight: how hard, float array [entries], positive.
        capacity: of each link, float array [links]; 0 for a link that is down.

    Returns:
        Float array [flows] in the unit of `peak`; exactly `peak` for a flow that no link holds back.
    """
    rates = peak.astype(np.float64, copy=True)
    rising = np.ones(len(peak), dtype=bool)
    left = capacity.astype(np.float64, copy=True)
    links = len(capacity)
    while len(flow):
        slope = np.bincount(link, weights=weight, minlength=links)
        level = np.full(links, np.inf)
        np.divide(left, slope, out=level, where=slope > 0.0)
        lowest = max(float(level.min()), 0.0)
        # Flows that peak below the lowest level are never held back: stopping flows only raises the levels of links.
        stopped = rising & (rates <= lowest)
        if not stopped.any():
            full = level <= lowest * (1.0 + _TIE)
            stopped[flow[full[link]]] = True
            rates[stopped] = lowest
        rising &= ~stopped
        leaving = stopped[flow]
        left -= np.bincount(link[leaving], weights=weight[leaving] * rates[flow[leaving]], minlength=links)
        np.maximum(left, 0.0, out=left)
        staying = ~leaving
        flow, link, weight = flow[staying], link[staying], weight[staying]
    return rates
