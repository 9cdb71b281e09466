"""Closed forms of checkpointing, failures and spares: quick answers, and tests of the simulation.

One notation throughout: `stall_s` is the blocking part of a save (delta), `recovery_s` everything between a failure and
training again (R), `mtti_s` the mean time to interrupt (M), `interval_s` the training time between saves (tau).
Interrupts are a Poisson process.
"""

from __future__ import annotations

import math

DAY_S = 86400.0


def mtti_s(num_nodes: int, rate_per_node_day: float) -> float:
    """Mean time to interrupt of a job on `num_nodes` nodes, seconds: 1 / (N r). Infinite for rate 0."""
    rate = num_nodes * rate_per_node_day
    return DAY_S / rate if rate > 0 else math.inf


def young_interval_s(stall_s: float, mtti_s: float) -> float:
    """First-order optimal interval, sqrt(2 delta M) (Young, CACM 17(9), 1974)."""
    return math.sqrt(2.0 * stall_s * mtti_s)


def daly_interval_s(stall_s: float, mtti_s: float) -> float:
    """Higher-order optimal interval (Daly, FGCS 22(3), 2006, eq. 37), powers of sqrt(delta / 2M); M from delta = 2M."""
    if stall_s >= 2.0 * mtti_s:
        return mtti_s
    x = stall_s / (2.0 * mtti_s) if math.isfinite(mtti_s) else 0.0
    return young_interval_s(stall_s, mtti_s) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - stall_s


def goodput_first_order(interval_s: float, stall_s: float, recovery_s: float, mtti_s: float) -> float:
    """1 - delta/tau - (tau/2 + R)/M, not below 0: good while tau and R are small against M."""
    return max(0.0, 1.0 - stall_s / interval_s - (interval_s / 2.0 + recovery_s) / mtti_s)


def goodput_exact(interval_s: float, stall_s: float, recovery_s: float, mtti_s: float) -> float:
    """e^(-R/M) tau / (M (e^((tau+delta)/M) - 1)): renewal argument for exponential interrupts, which also hit saves and
    recoveries (Daly 2006, eq. 13). Tends to tau / (tau + delta) for M to infinity."""
    if math.isinf(mtti_s):
        return interval_s / (interval_s + stall_s) if math.isfinite(interval_s) else 1.0
    exponent = (interval_s + stall_s) / mtti_s
    if exponent > 700.0:
        return 0.0
    return math.exp(-recovery_s / mtti_s) * interval_s / (mtti_s * math.expm1(exponent))


def exact_interval_s(stall_s: float, mtti_s: float) -> float:
    """Interval that maximises `goodput_exact`; the recovery time has no influence on it.

    Setting the derivative to zero gives e^((tau+delta)/M) (1 - tau/M) = 1; with y = tau/M the left side falls from
    e^(delta/M) at 0 to 0 at 1, so bisection finds the only root.
    """
    if stall_s <= 0:
        return 0.0
    if math.isinf(mtti_s):
        return math.inf
    low, high, x = 0.0, 1.0, stall_s / mtti_s
    for _ in range(200):
        y = (low + high) / 2.0
        # Logarithms keep large stalls finite: y + x + log(1 - y) falls in y.
        low, high = (y, high) if y + x + math.log1p(-y) > 0 else (low, y)
    return (low + high) / 2.0 * mtti_s


def expected_ettr(num_nodes: int, rate_per_node_day: float, restart_overhead_s: float, interval_s: float, write_s: float) -> float:
    """Expected effective training time ratio, (1 - N r (u0 + dt/2)) / (1 + w/dt), not below 0 (arXiv 2410.21680)."""
    lost = num_nodes * rate_per_node_day / DAY_S * (restart_overhead_s + interval_s / 2.0)
    return max(0.0, (1.0 - lost) / (1.0 + write_s / interval_s))


def poisson_tail(spares: int, mean: float) -> float:
    """P(X > spares) for X ~ Poisson(mean), by summing whichever side is smaller in log space."""
    if mean <= 0:
        return 0.0
    log_mean = math.log(mean)

    def term(k: int) -> float:
        return math.exp(k * log_mean - mean - math.lgamma(k + 1))

    if spares < mean:
        # Terms further than 40 standard deviations below the mean are zero in floating point.
        first = max(0, math.floor(mean - 40.0 * math.sqrt(mean)))
        return max(0.0, 1.0 - math.fsum(term(k) for k in range(first, spares + 1)))
    total, k = 0.0, spares + 1
    while True:
        step = term(k)
        total += step
        if step <= total * 1e-17:
            return total
        k += 1


def spares_for(mean: float, confidence: float) -> int:
    """Fewest k with P(Poisson(mean) > k) <= 1 - confidence: by doubling, then halving, because the tail falls in k."""
    low, high = -1, 0
    while poisson_tail(high, mean) > 1.0 - confidence:
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if poisson_tail(middle, mean) > 1.0 - confidence else (low, middle)
    return high


def spares_needed(num_nodes: int, rate_per_node_day: float, repair_s: float, confidence: float) -> int:
    """Fewest spares with P(nodes in repair > spares) <= 1 - confidence; nodes in repair are Poisson(N r W), M/G/inf."""
    return spares_for(num_nodes * rate_per_node_day * repair_s / DAY_S, confidence)
