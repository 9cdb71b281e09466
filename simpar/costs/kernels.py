"""Seconds of every kernel of a training step on one GPU: the facade that lowering asks.

Each price carries an 80 % interval and its provenance. Kernel times are the device's; the host time to launch them is
separate (`launch`), because a host that runs ahead hides it. Forms and sources: docs/formulas_kernels.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from simpar.costs import kernel_attention
from simpar.costs.compute import GemmShapes, cast_seconds, gemm_seconds
from simpar.costs.gemm_alignment import unaligned
from simpar.costs.kernel_choice import DERIVED_SPREAD, PROMOTED, ROWWISE_SHARE, Resolved, band_at, dtype_key, pick_gemm, resolve
from simpar.costs.kernel_points import band_arrays, banded, between, measured, measured_memory
from simpar.costs.memory_bound import (
    BEST_SHARE,
    CLASS_SPREAD,
    KERNEL_LATENCY_S,
    OPTIMIZER_TIERS,
    bounded_share,
    class_share,
    memory_seconds,
)
from simpar.costs.price import ZERO, Price, Provenance
from simpar.registry import unknown
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import DirectionConstants, GemmConstants, GroupedConstants, MeasuredPoint

Direction = Literal["forward", "dgrad", "wgrad"]
Implementation = Literal["tuned", "framework", "eager"]
Array = NDArray[np.float64]
LAUNCH_S: Final = 5e-6
"""Host time of one eager launch (4-6 us raw on current hosts)."""
DIRECTION_SPREAD: Final = 0.03
SMALL_GEMM: Final = 512
"""Smallest m, n and k inside the fitted region."""
CACHE: Final = 65536
_DEFAULT_DIRECTIONS: Final = DirectionConstants()
_DEFAULT_GROUPED: Final = GroupedConstants()
_WIDTHS: Final = {"fp4": 0.5, "fp8": 1.0, "fp8_block": 1.0, "fp32": 4.0, "tf32": 4.0}


def _memoised(method: Callable[..., Price]) -> Callable[..., Price]:
    return lru_cache(maxsize=CACHE)(method)


class KernelModel:
    """Prices of kernels on one GPU; every method is memoised.

    Args:
        hardware: whose GPU, with its fitted constants.
        sustained: clocks at the power cap (training) or a short burst.
        library: prefer the constants of this kernel library; None takes the default of the power mode.
        launch_overhead_s: host time to issue one kernel; None takes 5 us eager, 0 in graphs.
        graphs: the step is replayed as CUDA graphs.
        scale: every GEMM and attention time times this (`one_point`).
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        *,
        sustained: bool = True,
        library: str | None = None,
        launch_overhead_s: float | None = None,
        graphs: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.hardware, self.sustained, self.library, self.graphs, self.scale = hardware, sustained, library, graphs, scale
        self.sm_count = float(hardware.gpu.sm_count.value)
        self.resolved: Resolved = resolve(hardware)
        self._launch = launch_overhead_s if launch_overhead_s is not None else (0.0 if graphs else LAUNCH_S)
        c = self.resolved.constants
        self.library = library or c.default_library or None
        self.best_share = c.memory_bandwidth_share or BEST_SHARE.get(hardware.gpu.architecture, 0.8)
        self._directions, self._grouped = c.directions or _DEFAULT_DIRECTIONS, c.grouped or _DEFAULT_GROUPED
        self._points: dict[tuple[str, tuple[int, ...], str, str, bool], MeasuredPoint] = {
            (p.op, p.shape, p.dtype, p.direction, p.causal): p for p in c.points
        }
        self._memory_points = measured_memory(c.points)
        self._sets: dict[str, tuple[GemmConstants, Provenance]] = {}
        self._cached_gemm = _memoised(self._gemm)
        self._cached_grouped = _memoised(self._grouped_gemm)
        self._cached_attention = _memoised(self._attention)
        self._cached_memory = _memoised(self._memory_bound)

    def launch(self) -> float:
        """Host seconds to issue one kernel: a floor on the step where the host cannot run ahead, not part of any price."""
        return self._launch

    # -- GEMM ------------------------------------------------------------------------------------------------------

    def gemm_set(self, dtype: str) -> tuple[GemmConstants, Provenance]:
        """The constants that price `dtype` and their provenance; other dtypes are scaled from bf16 by their peaks."""
        if dtype not in self._sets:
            self._sets[dtype] = self._gemm_set(dtype)
        return self._sets[dtype]

    def _gemm_set(self, dtype: str) -> tuple[GemmConstants, Provenance]:
        key = dtype_key(dtype)
        constants = self.resolved.constants
        if key == "fp8_row":
            per_tensor, provenance = self.gemm_set("fp8")
            rate = ROWWISE_SHARE * per_tensor.rate_flops_per_s
            derived = "fp8, by torch's kernel over cuBLAS's"
            return per_tensor.model_copy(update={"rate_flops_per_s": rate, "derived": derived}), provenance
        found = pick_gemm(constants, key, library=self.library, sustained=self.sustained)
        if found is not None:
            return found, self.resolved.standing(found)[0]
        base = pick_gemm(constants, "bf16", library=self.library, sustained=self.sustained)
        peak_key = key.removesuffix("_block")
        if base is None or peak_key not in ("bf16", "fp8", "fp4", "fp32", "tf32"):
            raise unknown("GEMM dtype", dtype, ["bf16", "fp16", "fp8", "fp8_row", "fp8_block", "mxfp8", "fp4", "fp32", "tf32"])
        ratio = self.hardware.peak_flops_per_s(peak_key) / self.hardware.peak_flops_per_s("bf16")
        size = _WIDTHS.get(key, 2.0)
        update = {
            "dtype": key,
            "rate_flops_per_s": base.rate_flops_per_s * ratio,
            "input_bytes": size,
            "derived": "bf16 by peaks",
            "output_bytes": size if size > 2 else 2.0,
        }
        return base.model_copy(update=update), Provenance.SCALED

    def gemm(
        self,
        m: int,
        n: int,
        k: int,
        *,
        dtype: str = "bf16",
        direction: Direction = "forward",
        accumulate_fp32: bool = False,
        batch: int = 1,
        quantize: bool = False,
    ) -> Price:
        """`batch` products y[m, n] = x[m, k] W[k, n], or one of the gradients.

        Args:
            m, n, k: the forward's sizes, whatever the `direction`.
            dtype: of the operands: bf16, fp16, fp8 (one scale), fp8_row (one per row, torch's kernel), fp8_block, mxfp8, fp4,
                tf32, fp32.
            direction: forward, dgrad (of x) or wgrad (of W).
            accumulate_fp32: wgrad adds into an fp32 buffer (8 bytes per weight).
            quantize: include the dynamic cast of the left operand.

        Raises:
            UnknownNameError: no constants and no peak for `dtype`.
        """
        return self._cached_gemm(m, n, k, dtype, direction, accumulate_fp32, batch, quantize)

    def _shapes(
        self, m: Any, n: Any, k: Any, direction: str, accumulate: bool, batch: Any, quantize: bool
    ) -> tuple[GemmShapes, float]:
        """The product as the library sees it, and the direction's factor."""
        d = self._directions
        if direction == "dgrad":
            return GemmShapes(m, k, n, batch, None, quantize), d.dgrad
        if direction == "wgrad":
            out = 8.0 if accumulate else None
            return GemmShapes(n, k, m, batch, out, quantize), d.wgrad_accumulate if accumulate else d.wgrad
        return GemmShapes(m, n, k, batch, None, quantize), 1.0

    def _gemm(self, m: int, n: int, k: int, dtype: str, direction: str, accumulate: bool, batch: int, quantize: bool) -> Price:
        if min(m, n, k, batch) <= 0:
            return ZERO
        if batch == 1 and not quantize and self._points:
            adds = direction == "wgrad" and accumulate
            point = self._points.get(("gemm", (m, n, k), dtype, "wgrad_accumulate" if adds else direction, True))
            point = point or self._points.get(("gemm", (m, n, k), dtype, direction, True))
            if point is not None:
                return measured(point)
        c, provenance = self.gemm_set(dtype)
        rows, columns, depth = (np.array([float(v)]) for v in (m, n, k))
        shapes, factor = self._shapes(
            rows, columns, depth, direction, accumulate, float(batch), quantize and bool(c.cast_bytes_per_s)
        )
        total = float(gemm_seconds(c, self.sm_count, shapes)[0])
        cast_s = float(cast_seconds(c, shapes.m * batch, shapes.k)[0]) if shapes.quantize else 0.0
        if quantize and not shapes.quantize:
            cast_s = self._plain_cast(float(shapes.m[0] * shapes.k[0]) * batch)
            total += cast_s
        factor *= self._promotion(dtype, direction)
        kernel = (total - cast_s) * factor * self.scale * float(unaligned(columns, depth, c.input_bytes)[0])
        spread = math.hypot(self._spread(c), DIRECTION_SPREAD if direction != "forward" else 0.0)
        terms = (("gemm", kernel), ("cast", cast_s)) if cast_s else (("gemm", kernel),)
        bands = c.bands if min(m, n, k) >= SMALL_GEMM else c.bands_small or c.bands
        return banded(kernel + cast_s, band_at(bands, 2.0 * batch * m * n * k, spread), provenance, terms)

    def _promotion(self, dtype: str, direction: str) -> float:
        slow = self.hardware.gpu.architecture in ("hopper", "ada") and dtype_key(dtype) == "fp8"
        return PROMOTED if slow and direction != "forward" else 1.0

    def _spread(self, c: GemmConstants) -> float:
        return math.hypot(self.resolved.standing(c)[1], DERIVED_SPREAD if c.derived else 0.0)

    def _plain_cast(self, elements: float) -> float:
        """amax (2 bytes per element) and cast (3) with the memory-bound classes."""
        amax = self._memory_bound("amax", 2.0 * elements, "tuned", 1).seconds
        return amax + self._memory_bound("cast", 3.0 * elements, "tuned", 1).seconds

    def gemm_array(
        self,
        m: Array,
        n: Array,
        k: Array,
        *,
        dtype: str = "bf16",
        direction: Direction = "forward",
        accumulate_fp32: bool = False,
        batch: Array | float = 1.0,
        quantize: bool = False,
    ) -> tuple[Array, Array, Array]:
        """(seconds, low, high) [shapes] of many products at once, by the same law as `gemm`."""
        c, _ = self.gemm_set(dtype)
        m, n, k = (np.asarray(v, dtype=float) for v in (m, n, k))
        shapes, factor = self._shapes(m, n, k, direction, accumulate_fp32, batch, quantize and bool(c.cast_bytes_per_s))
        factor *= self._promotion(dtype, direction)
        seconds = gemm_seconds(c, self.sm_count, shapes)
        cast_s = cast_seconds(c, shapes.m * np.asarray(batch), shapes.k) if shapes.quantize else np.zeros_like(seconds)
        seconds = (seconds - cast_s) * factor * self.scale * unaligned(n, k, c.input_bytes) + cast_s
        inside = np.minimum(np.minimum(m, n), k) >= SMALL_GEMM
        low, high = band_arrays(c.bands, c.bands_small, inside, 2.0 * m * n * k * np.asarray(batch), self._spread(c))
        return seconds, seconds * low, seconds * high

    def grouped_gemm(
        self,
        groups: int,
        tokens: float,
        n: int,
        k: int,
        *,
        dtype: str = "bf16",
        direction: Direction = "forward",
        accumulate_fp32: bool = False,
        imbalance: float = 1.0,
    ) -> Price:
        """`groups` products k -> n of the local experts with `tokens` rows in total: one library call each, spread over
        streams (Transformer Engine's GroupedLinear: four); how many really run beside each other is measured.

        Args:
            imbalance: rows of this rank over the mean rank's; scales `tokens`.
        """
        return self._cached_grouped(groups, tokens, n, k, dtype, direction, accumulate_fp32, imbalance)

    def _grouped_gemm(
        self, groups: int, tokens: float, n: int, k: int, dtype: str, direction: str, accumulate: bool, imbalance: float
    ) -> Price:
        if groups <= 0 or tokens <= 0 or min(n, k) <= 0:
            return ZERO
        point = self._points.get(("grouped_gemm", (groups, round(tokens * imbalance), n, k), dtype, direction, True))
        if point is not None:
            return measured(point)
        c, _ = self.gemm_set(dtype)
        rows = max(1, math.ceil(tokens * imbalance / groups))
        g = self._grouped
        beside = min(groups, g.streams)
        part = self._cached_gemm(rows, n, k, dtype, direction, accumulate, beside, False)
        share = {"forward": g.forward, "dgrad": g.dgrad, "wgrad": g.wgrad_accumulate}[direction] if groups > 1 else 1.0
        seconds = groups / beside * part.seconds * share
        spread = math.hypot(self._spread(c), 0.05)
        low, high = band_at(c.bands, 2.0 * rows * groups * n * k, spread)
        if groups > 1:
            low, high = min(low, g.low), max(high, g.high)
        return banded(seconds, (low, high), part.provenance, (("grouped_gemm", seconds),))

    # -- attention -------------------------------------------------------------------------------------------------

    def attention(
        self,
        batch: int,
        sequence_q: int,
        sequence_kv: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        causal: bool = True,
        direction: str = "forward",
        kernel: str = "auto",
        window: int | None = None,
        dtype: str = "bf16",
    ) -> Price:
        """Scaled dot-product attention of one rank.

        Args:
            batch, sequence_q, sequence_kv, heads, kv_heads, head_dim: sizes; a causal mask is aligned at the end.
            v_head_dim: width of the values where it differs (latent attention: 192 and 128).
            direction: forward or backward (all three gradients).
            kernel: auto (the generation's own), fa1, fa2, fa3, fa4, cudnn, trtllm-gen, unfused (fused softmax), eager.
            window: causal sliding window, in keys.

        Raises:
            UnknownNameError: no such kernel.
        """
        return self._cached_attention(
            batch,
            sequence_q,
            sequence_kv,
            heads,
            kv_heads,
            head_dim,
            v_head_dim or head_dim,
            causal,
            direction,
            kernel,
            window,
            dtype,
        )

    def _attention(self, *arguments: Any) -> Price:
        batch, queries, keys, heads, kv_heads, head_dim, v_head_dim, causal, direction, kernel, window, dtype = arguments
        if min(batch, queries, keys, heads) <= 0:
            return ZERO
        point = self._points.get(("attention", (batch, queries, keys, heads, kv_heads, head_dim), dtype, direction, causal))
        if point is not None:
            return measured(point)
        call = kernel_attention.Call(
            batch, queries, keys, heads, kv_heads, head_dim, v_head_dim, causal, direction, kernel, window, dtype
        )
        return kernel_attention.price(self, call)

    # -- memory-bound ----------------------------------------------------------------------------------------------

    def memory_bound(
        self, kernel: str, bytes_moved: float, *, implementation: Implementation = "tuned", launches: int = 1
    ) -> Price:
        """`launches` kernels of class `kernel` that together move `bytes_moved` through the device memory.

        Raises:
            UnknownNameError: no such class.
        """
        return self._cached_memory(kernel, bytes_moved, implementation, launches)

    def _memory_bound(self, kernel: str, bytes_moved: float, implementation: str, launches: int) -> Price:
        gpu, fitted = self.hardware.gpu, self.resolved.constants.memory
        share = class_share(kernel, implementation, fitted, self.best_share)
        if kernel not in fitted:
            share = bounded_share(kernel, implementation, gpu, share)
        if bytes_moved <= 0:
            return ZERO
        if kernel in self._memory_points:
            return between(self._memory_points[kernel], bytes_moved)
        seconds = memory_seconds(bytes_moved, gpu.memory_bandwidth.value, share, launches)
        standing, extra = self.resolved.standing(kernel)
        spread = math.hypot(CLASS_SPREAD.get(kernel, 0.25), extra / 2)
        provenance = standing if kernel in self.resolved.constants.memory else Provenance.SCALED
        latency = launches * KERNEL_LATENCY_S
        return banded(
            seconds, (math.exp(-spread), math.exp(spread)), provenance, (("latency", latency), ("traffic", seconds - latency))
        )

    def adam(self, parameters: float, *, bytes_per_parameter: float, implementation: str = "fused") -> Price:
        """One optimizer update over `parameters` local elements.

        Args:
            bytes_per_parameter: traffic of the state layout (docs/formulas_kernels.md, Adam).
            implementation: fused (one multi-tensor kernel), foreach, loop.

        Raises:
            UnknownNameError: no such implementation.
        """
        if implementation not in OPTIMIZER_TIERS:
            raise unknown("optimizer implementation", implementation, sorted(OPTIMIZER_TIERS))
        tier = cast(Implementation, OPTIMIZER_TIERS[implementation])
        return self.memory_bound("adam", parameters * bytes_per_parameter, implementation=tier)

    # -- calibration -----------------------------------------------------------------------------------------------

    def one_point(self, m: int, n: int, k: int, seconds: float, *, dtype: str = "bf16") -> KernelModel:
        """A model whose compute times are rescaled so that this forward GEMM takes `seconds`."""
        predicted = self.gemm(m, n, k, dtype=dtype).seconds
        narrowed = KernelModel(
            self.hardware,
            sustained=self.sustained,
            library=self.library,
            launch_overhead_s=self._launch,
            graphs=self.graphs,
            scale=self.scale * seconds / predicted,
        )
        narrowed.resolved = replace(self.resolved, spread=self.resolved.spread / 2)
        return narrowed
