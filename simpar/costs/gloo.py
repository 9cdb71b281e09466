"""gloo on CPUs: processes on one host (loopback) or several, TCP with a thread per pair.

Laws: ring for all-reduce, all-gather, reduce-scatter and all-to-all; trees for broadcast, reduce; each process's copies run
on its own core, so the loopback rate is shared when there are more ranks than cores.
"""

from __future__ import annotations

from math import ceil, log2

from simpar.costs.collective_law import Geometry, Law
from simpar.costs.nccl import traffic
from simpar.specs.hardware import HardwareProfile

BASE_S = 120e-6
"""Hand-over to gloo's thread and back; with two messages of the profile's latency a small all-reduce of 2 ranks takes
0.2-0.25 ms (medians of 0.15-0.35 ms were measured on two cores)."""

MESSAGE_S = 60e-6
"""One small message between two processes (latency of the profile cpu-gloo, measured)."""
HANDLED_S = 28e-6
"""A message that nobody waits for: the least of the same measurement."""


def check_seconds(ranks: int) -> float:
    """Seconds for which the ranks of a group compare on the host what each is about to call.

    torch's ProcessGroupWrapper::runCollectiveChecks under TORCH_DISTRIBUTED_DEBUG=DETAIL: a monitored barrier and two all-gathers
    around a ring, of the fingerprint's shape and of the fingerprint. In the barrier (ProcessGroupGloo::monitoredBarrier) every rank
    tells the first, which then answers all: a message there and one back, and the first handles two for each of the others.
    """
    return 3.0 * BASE_S + 2.0 * ranks * MESSAGE_S + 2.0 * (ranks - 2) * HANDLED_S if ranks > 1 else 0.0


def laws(collective: str, hardware: HardwareProfile, g: Geometry) -> list[Law]:
    """The law of `collective` on `hardware` (scale-up kind shared-memory)."""
    n, hop, rate = g.size, hardware.scale_up.latency.value, g.link_bytes_per_s
    far = hardware.nic.latency.value + g.extra_latency_s
    levels = ceil(log2(n)) if n > 1 else 0
    steps = {"all_reduce": 2 * levels, "broadcast": levels, "reduce": levels, "send_recv": 1}.get(collective, n - 1)
    wire = traffic(collective, n)
    beta = wire / rate
    if g.domains > 1:
        out = g.rank_out_bytes_per_s if collective == "all_to_all" else g.domain_out_bytes_per_s
        beta = max(beta, wire / (0.9 * out))
    alpha = BASE_S + steps * (far if g.domains > 1 else hop)
    return [Law("Ring", "TCP", alpha, beta, channels=0)]
