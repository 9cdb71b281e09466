"""Recurrences in chunks and kernels that no other law knows: FLOPs at a rate per SM, or bytes at a share of the bandwidth.

A chunked scan is many small products with serial steps between: it reaches a small part of a tensor core's peak, about as much on
every SM of a generation. Rates are TFLOP/s per SM by the chunk formula of graph/ledger.py, forward, from the tables of
flash-linear-attention's README (GB200, T 8,192, 96 heads of 128: retention 0.787 ms, GLA 1.765, gated delta rule 1.265) and
FlashKDA's (H20, the same shape: gated delta rule 3.20 ms, KDA 4.84 in Triton); ratios of backward to forward time from the first.
Mamba 2's five kernels reach 0.69 to 0.83 on an H100 with 128 heads of 64, state 128, chunks of 256 and 8,192 to 262,144 tokens
(vLLM pull request 27299: 12.6, 12.9, 11.8, 11.1, 10.7 and 10.8 million tokens/s; 0.74 their mean). Its backward multiplies 5
products of states where the forward has 2, 3 of scores where it has 1 (graph/scan_kernels.py): 2.67 times with states as wide as
chunks, counted, not measured. Mamba 1 has no published figure: it runs on vector units, at a rate at which its bytes decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simpar.costs.kernels import KernelModel
from simpar.costs.memory_bound import KERNEL_LATENCY_S
from simpar.costs.price import Price, Provenance
from simpar.parallel.work import KernelWork


@dataclass(frozen=True, slots=True)
class Rate:
    """Forward FLOP/s of one SM, backward over forward time, and whether both were measured."""

    flops_per_s: float
    backward: float
    measured: bool


RATES: Final[dict[str, Rate]] = {
    "linear": Rate(0.66e12, 2.33, measured=True), "delta": Rate(0.66e12, 2.75, measured=True),
    "dplr": Rate(0.38e12, 3.3, measured=False), "ssd": Rate(0.74e12, 2.67, measured=False),
    "diagonal": Rate(0.1e12, 2.5, measured=False),
}  # fmt: skip
"""Kind of scan -> its rate; gated delta rule 0.76 on a GB200's SM and 0.57 on an H20's."""
CUSTOM: Final = 0.3
"""Share of the peak FLOP/s that an unknown kernel reaches, assumed."""
BANDWIDTH: Final = 0.6
"""Share of the bandwidth, as compiled chains reach."""


def price(model: KernelModel, work: KernelWork) -> Price:
    """Seconds of one scan or unknown kernel: the longer of its FLOPs and its bytes."""
    gpu = model.hardware.gpu
    rate = RATES.get(work.kind)
    if rate is None:
        compute = work.flops / (CUSTOM * model.hardware.peak_flops_per_s("bf16"))
    else:
        compute = work.flops / (rate.flops_per_s * gpu.sm_count.value) * (rate.backward if work.backward else 1.0)
    traffic = work.bytes_moved / (BANDWIDTH * gpu.memory_bandwidth.value)
    seconds = max(compute, traffic) + work.launches * KERNEL_LATENCY_S
    measured = rate is not None and rate.measured
    spread = 1.3 if measured else 2.0
    return Price(seconds, seconds / spread, seconds * spread, Provenance.SCALED if measured else Provenance.ASSUMED)
