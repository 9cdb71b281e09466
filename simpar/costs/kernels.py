"""Seconds of every kernel of a training step on one GPU: the facade that lowering asks.

First version: published form and constants (tile-wave GEMM, length-limited attention, bytes over bandwidth).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from simpar.costs.price import ZERO, Price, Provenance
from simpar.specs.hardware import HardwareProfile

Direction = Literal["forward", "dgrad", "wgrad"]
Implementation = Literal["tuned", "framework", "eager"]

_TILES = ((256, 128, 0), (128, 256, 0), (192, 128, 1), (128, 192, 1), (128, 128, 2), (64, 256, 3), (256, 64, 3),
          (64, 128, 4), (128, 64, 4))
# rate over peak, k0, t0, achieved bandwidth over peak, beta, p, split cost, tile efficiencies
_GEMM = {
    "ampere": (260 / 312, 121, 3.0e-6, 0.86, 0.55, 2.2, 1.19, (1.0, 0.83, 0.83, 0.74, 0.74)),
    "hopper": (715 / 989, 127, 2.4e-6, 0.89, 0.13, 4.0, 0.74, (1.0, 0.9, 0.9, 0.9, 1.0)),
    "blackwell": (1440 / 2250, 98, 1.7e-6, 0.76, 0.20, 5.0, 1.66, (1.0, 0.9, 0.9, 0.9, 0.98)),
}
_FLASH = {"ampere": (206 / 312, 213.0), "hopper": (640 / 989, 600.0), "blackwell": (1300 / 2250, 920.0)}
_MEMORY = {"tuned": 1.0, "framework": 0.6, "eager": 0.35}


class KernelModel:
    """Prices of kernels on one GPU; every method is memoised.

    Args:
        hardware: whose GPU, with its fitted constants.
        sustained: clocks at the power cap (training) or a short burst.
        library: prefer the constants of this kernel library; None takes the best for training.
        launch_overhead_s: host time to issue one kernel; None takes 5 us eager, 0 in graphs.
        graphs: the step is replayed as CUDA graphs.
    """

    def __init__(self, hardware: HardwareProfile, *, sustained: bool = True, library: str | None = None,
                 launch_overhead_s: float | None = None, graphs: bool = False) -> None:
        self.hardware = hardware
        self.sustained = sustained
        self.library = library
        self._launch = launch_overhead_s if launch_overhead_s is not None else (0.0 if graphs else 5e-6)
        self._gemm_constants = _GEMM.get(hardware.gpu.architecture, _GEMM["hopper"])
        self._flash = _FLASH.get(hardware.gpu.architecture, _FLASH["hopper"])
        self._bandwidth = hardware.gpu.memory_bandwidth.value * self._gemm_constants[3]
        self.gemm = lru_cache(maxsize=65536)(self._gemm)  # type: ignore[method-assign]
        self.grouped_gemm = lru_cache(maxsize=65536)(self._grouped_gemm)  # type: ignore[method-assign]
        self.attention = lru_cache(maxsize=65536)(self._attention)  # type: ignore[method-assign]
        self.memory_bound = lru_cache(maxsize=65536)(self._memory_bound)  # type: ignore[method-assign]

    def launch(self) -> float:
        """Seconds the host needs to issue one kernel."""
        return self._launch

    def _price(self, seconds: float, spread: float) -> Price:
        return Price(seconds, seconds * (1 - spread), seconds * (1 + spread), Provenance.PUBLISHED)

    def gemm(self, m: int, n: int, k: int, *, dtype: str = "bf16", direction: Direction = "forward",
             accumulate_fp32: bool = False, batch: int = 1, quantize: bool = False) -> Price:
        """`batch` products of (m, k) by (k, n); m, n, k are the forward's whatever the `direction`."""
        raise NotImplementedError

    def _gemm(self, m: int, n: int, k: int, *, dtype: str = "bf16", direction: Direction = "forward",
              accumulate_fp32: bool = False, batch: int = 1, quantize: bool = False) -> Price:
        return self._price(self._gemm_seconds(m, n, k, dtype, direction, accumulate_fp32, batch, quantize), 0.1)

    def _gemm_seconds(self, m: int, n: int, k: int, dtype: str, direction: str, accumulate_fp32: bool, batch: int,
                      quantize: bool) -> float:
        if min(m, n, k, batch) <= 0:
            return 0.0
        if direction == "dgrad":
            n, k = k, n
        elif direction == "wgrad":
            m, n, k = n, k, m
        fraction, k0, t0, _, beta, p, split_cost, tile = self._gemm_constants
        rate = fraction * self.hardware.peak_flops_per_s(dtype.removesuffix("_block"))
        sm = self.hardware.gpu.sm_count.value
        size = 1.0 if dtype.startswith("fp8") else 2.0
        out = 8.0 if direction == "wgrad" and accumulate_fp32 else 2.0
        best = math.inf
        for a, b, kind in _TILES:
            for s in (1, 2, 4, 8):
                if s > 1 and k / s < 256:
                    break
                x = batch * math.ceil(m / a) * math.ceil(n / b) * s / sm
                waves = max(1.0, x) + (beta * (math.ceil(x) - x) if x > 1 else 0.0)
                t = waves * 2 * a * b * (k / s + k0) * sm / (rate * tile[kind])
                if s > 1:
                    t += split_cost * 8 * s * m * n * batch / self._bandwidth
                best = min(best, t)
        memory = batch * (size * (m * k + n * k) + out * m * n) / self._bandwidth
        factor = 1.05 if direction == "wgrad" and accumulate_fp32 else 1.0
        cast = 5.0 * m * k / self._bandwidth if quantize else 0.0
        return t0 + factor * (best**p + memory**p) ** (1 / p) + cast

    def grouped_gemm(self, groups: int, tokens: float, n: int, k: int, *, dtype: str = "bf16",
                     direction: Direction = "forward", accumulate_fp32: bool = False, imbalance: float = 1.0) -> Price:
        """`groups` products with `tokens` rows in total over the local experts; `imbalance` scales the rows."""
        raise NotImplementedError

    def _grouped_gemm(self, groups: int, tokens: float, n: int, k: int, *, dtype: str = "bf16",
                      direction: Direction = "forward", accumulate_fp32: bool = False, imbalance: float = 1.0) -> Price:
        if groups <= 0 or tokens <= 0:
            return ZERO
        rows = max(1, math.ceil(tokens * imbalance / groups))
        return self._price(self._gemm_seconds(rows, n, k, dtype, direction, accumulate_fp32, groups, False) / 0.85, 0.3)

    def attention(self, batch: int, sequence_q: int, sequence_kv: int, heads: int, kv_heads: int, head_dim: int, *,
                  v_head_dim: int | None = None, causal: bool = True, direction: str = "forward", kernel: str = "auto",
                  window: int | None = None, dtype: str = "bf16") -> Price:
        """Scaled dot-product attention of one rank; causal counts the triangle."""
        raise NotImplementedError

    def _attention(self, batch: int, sequence_q: int, sequence_kv: int, heads: int, kv_heads: int, head_dim: int, *,
                   v_head_dim: int | None = None, causal: bool = True, direction: str = "forward", kernel: str = "auto",
                   window: int | None = None, dtype: str = "bf16") -> Price:
        if min(batch, sequence_q, sequence_kv, heads) <= 0:
            return ZERO
        keys = sequence_kv if window is None else min(sequence_kv, window)
        fraction, s0 = self._flash
        rate = fraction * self.hardware.peak_flops_per_s("bf16")
        pairs = sequence_q * (keys / 2 if causal and window is None else keys)
        flops = 2.0 * batch * heads * (head_dim + (v_head_dim or head_dim)) * pairs
        seconds = 7e-6 + flops * (1 + (s0 if causal else s0 / 3) / sequence_kv) / rate
        if direction == "backward":
            seconds *= 3.3 if v_head_dim not in (None, head_dim) else (2.65 if head_dim <= 64 else 2.9)
        return self._price(seconds, 0.15)

    def memory_bound(self, kernel: str, bytes_moved: float, *, implementation: Implementation = "tuned",
                     launches: int = 1) -> Price:
        """A memory-bound kernel of class `kernel` that moves `bytes_moved` through the memory."""
        raise NotImplementedError

    def _memory_bound(self, kernel: str, bytes_moved: float, *, implementation: Implementation = "tuned",
                      launches: int = 1) -> Price:
        if bytes_moved <= 0:
            return ZERO
        return self._price(launches * 2e-6 + bytes_moved / (self._bandwidth * _MEMORY[implementation]), 0.2)

    def adam(self, parameters: float, *, bytes_per_parameter: float, implementation: str = "fused") -> Price:
        """One optimizer update over `parameters` local elements."""
        if parameters <= 0:
            return ZERO
        share = 0.95 if implementation == "fused" else 0.4
        return self._price(5e-6 + parameters * bytes_per_parameter / (self._bandwidth * share), 0.15)
