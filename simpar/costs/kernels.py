"""Seconds of every kernel of a training step on one GPU: the facade that lowering asks.

Each price carries an 80 % interval and its provenance. Kernel times are the device's; what the host takes to launch them is not
part of them, because a host that runs ahead hides it. Forms and sources: docs/formulas_kernels.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Concatenate, Final, Generic, ParamSpec, cast

import numpy as np

from simpar.costs import kernel_attention
from simpar.costs.compute import GemmShapes, cast_seconds, gemm_seconds, unaligned
from simpar.costs.gemm_tiles import Array
from simpar.costs.kernel_choice import (
    DERIVED_SPREAD,
    PROMOTED,
    ROWWISE_SHARE,
    Resolved,
    band_arrays,
    band_at,
    banded,
    between,
    dtype_key,
    measured,
    measured_memory,
    pick_gemm,
    resolve,
)
from simpar.costs.memory_bound import (
    BEST_SHARE,
    CLASS_SPREAD,
    KERNEL_LATENCY_S,
    OPTIMIZER_TIERS,
    bounded_share,
    cached,
    class_share,
    memory_seconds,
)
from simpar.costs.price import ZERO, Price, Provenance
from simpar.parallel.work import AttentionWork, Gemm, GroupedGemm, Implementation
from simpar.registry import unknown
from simpar.specs.calibration import RunCalibration
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import DirectionConstants, GemmConstants, GroupedConstants, MeasuredPoint

P = ParamSpec("P")
DIRECTION_SPREAD: Final = 0.03
SMALL_GEMM: Final = 512
"""Smallest m, n and k inside the fitted region."""
CACHE: Final = 65536
_DEFAULT_DIRECTIONS: Final = DirectionConstants()
_DEFAULT_GROUPED: Final = GroupedConstants()
_WIDTHS: Final = {"fp4": 0.5, "fp8": 1.0, "fp8_block": 1.0, "fp32": 4.0, "tf32": 4.0}


class _Memoised(Generic[P]):
    """A method that returns a price; every instance keeps those that it has given."""

    def __init__(self, method: Callable[Concatenate[Any, P], Price]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, Price]:
        kept: Any = lru_cache(maxsize=CACHE)(self._method.__get__(instance, owner))
        # What stands in the instance is found before this descriptor.
        return cast(Callable[P, Price], instance.__dict__.setdefault(self._method.__name__, kept))


def piece_of(work: Gemm) -> Gemm:
    """The kernel that a product is cut into, with nothing beside it."""
    return work._replace(m=max(work.m // work.pieces, 1), pieces=1, held_sms=0)


def _adds(work: Gemm) -> bool:
    """Whether a weight gradient is added to an fp32 buffer."""
    return work.direction == "wgrad" and work.accumulate_fp32


def _oriented(work: Gemm) -> tuple[float, float, float]:
    """Rows, columns and depth of what a product of (m, k) by (k, n) computes in its direction."""
    m, n, k = float(work.m), float(work.n), float(work.k)
    return {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[work.direction]


class KernelModel:
    """Prices of kernels on one GPU; every method is memoised.

    Args:
        hardware: whose GPU, with its fitted constants.
        sustained: clocks at the power cap (training) or a short burst.
        library: prefer the constants of this kernel library; None takes the default of the power mode.
    """

    def __init__(self, hardware: HardwareProfile, *, sustained: bool = True, library: str | None = None) -> None:
        self.hardware, self.sustained = hardware, sustained
        self.sm_count = float(hardware.gpu.sm_count.value)
        self.resolved: Resolved = resolve(hardware)
        c = self.resolved.constants
        self.library = library or c.default_library or None
        self.best_share = c.memory_bandwidth_share or BEST_SHARE.get(hardware.gpu.architecture, 0.8)
        self._directions, self._grouped = c.directions or _DEFAULT_DIRECTIONS, c.grouped or _DEFAULT_GROUPED
        self._points: dict[tuple[str, tuple[int, ...], str, str, bool], MeasuredPoint] = {
            (p.op, p.shape, p.dtype, p.direction, p.causal): p for p in c.points
        }
        self._memory_points = measured_memory(c.points)
        self._sets: dict[str, tuple[GemmConstants, Provenance]] = {}
        self._laws: dict[tuple[Gemm, int], float] = {}
        self._in_steps: dict[RunCalibration, dict[object, Price]] = {}

    def in_steps(self, calibration: RunCalibration) -> dict[object, Price]:
        """Prices of work inside steps to which a framework's runs add this: a memo for whoever prices layouts."""
        found = self._in_steps.setdefault(calibration, {})
        if len(found) > CACHE:
            found.clear()
        return found

    # -- GEMM ------------------------------------------------------------------------------------------------------

    def gemm_set(self, dtype: str) -> tuple[GemmConstants, Provenance]:
        """The constants that price `dtype` and their provenance; others are bf16's, scaled by peaks or as measured."""
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
        vectors = key == "fp32" or (key == "tf32" and key not in self.hardware.gpu.peak_flops)
        known = constants.fp32_over_bf16 if vectors else None
        size = _WIDTHS.get(key, 2.0)
        update = {
            "dtype": key,
            "rate_flops_per_s": base.rate_flops_per_s * (known or ratio),
            "input_bytes": size,
            "derived": "bf16 by measured rates" if known else "bf16 by peaks",
            "output_bytes": size if size > 2 else 2.0,
        }
        if vectors:  # a tile begins and ends in its time however long the products between take
            update["k_overhead"] = base.k_overhead * (known or ratio)
        return base.model_copy(update=update), Provenance.SCALED

    @_Memoised
    def gemm(self, work: Gemm, batch: int = 1) -> Price:
        """`batch` products in one kernel, without what runs beside them (`pieces`, `held_sms`).

        Dtypes: bf16, fp16, fp8 (one scale), fp8_row (one per row, torch's kernel), fp8_block, mxfp8, fp4, tf32, fp32. A weight
        gradient that accumulates adds into an fp32 buffer (8 bytes per weight).

        Raises:
            UnknownNameError: no constants and no peak for the dtype.
        """
        m, n, k = work.m, work.n, work.k
        if min(m, n, k, batch) <= 0:
            return ZERO
        adds = _adds(work)
        if batch == 1 and self._points:
            point = self._points.get(("gemm", (m, n, k), work.dtype, "wgrad_accumulate" if adds else work.direction, True))
            point = point or self._points.get(("gemm", (m, n, k), work.dtype, work.direction, True))
            if point is not None:
                return measured(point)
        c, provenance = self.gemm_set(work.dtype)
        if (work, batch) not in self._laws:
            self._foresee([(work, batch)])
        seconds = self._laws.pop((work, batch))
        spread = math.hypot(self._spread(c), DIRECTION_SPREAD if work.direction != "forward" else 0.0)
        bands = c.bands if min(m, n, k) >= SMALL_GEMM else c.bands_small or c.bands
        return banded(seconds, band_at(bands, 2.0 * batch * m * n * k, spread), provenance, (("gemm", seconds),))

    def foresee(self, works: Iterable[object]) -> None:
        """Price the products among these works together, which takes hardly longer than one of them: they are asked for next."""
        wanted: dict[tuple[Gemm, int], None] = {}
        for work in works:
            if isinstance(work, GroupedGemm) and work.groups > 0 and work.tokens > 0:
                wanted[self._part(work)] = None
            elif isinstance(work, Gemm):
                wanted[piece_of(work), 1] = None
        self._foresee([(work, batch) for work, batch in wanted if min(work.m, work.n, work.k, batch) > 0])

    def _foresee(self, products: Sequence[tuple[Gemm, int]]) -> None:
        """Seconds of products by the law of their dtype, kept until they are priced."""
        alike: dict[tuple[str, bool], list[tuple[Gemm, int]]] = {}
        for each in products:
            alike.setdefault((each[0].dtype, _adds(each[0])), []).append(each)
        d = self._directions
        for (dtype, adds), own in alike.items():
            c, _ = self.gemm_set(dtype)
            m, n, k, batches = np.array([(*_oriented(work), float(batch)) for work, batch in own]).T
            shapes = GemmShapes(m, n, k, batches, 8.0 if adds else None)
            factors = {"forward": 1.0, "dgrad": d.dgrad, "wgrad": d.wgrad_accumulate if adds else d.wgrad}
            each_s = gemm_seconds(c, self.sm_count, shapes).tolist()
            columns, depths = np.array([(work.n, work.k) for work, _ in own], dtype=float).T
            odd = unaligned(columns, depths, c.input_bytes).tolist()
            for (work, batch), seconds, slower in zip(own, each_s, odd, strict=True):
                factor = factors[work.direction] * self._promotion(dtype, work.direction)
                self._laws[work, batch] = seconds * factor * slower

    def _part(self, work: GroupedGemm) -> tuple[Gemm, int]:
        """The product of one expert, and how many run beside each other."""
        rows = max(1, math.ceil(work.tokens / work.groups))
        product = Gemm(rows, work.n, work.k, work.dtype, work.direction, work.accumulate_fp32)
        return product, min(work.groups, self._grouped.streams)

    def _promotion(self, dtype: str, direction: str) -> float:
        slow = self.hardware.gpu.architecture == "hopper" and dtype_key(dtype) == "fp8"
        return PROMOTED if slow and direction != "forward" else 1.0

    def _spread(self, c: GemmConstants) -> float:
        return math.hypot(self.resolved.standing(c)[1], DERIVED_SPREAD if c.derived else 0.0)

    def gemm_array(self, shapes: GemmShapes, dtype: str = "bf16") -> tuple[Array, Array, Array]:
        """(seconds, low, high) [shapes] of many products at once, by the same law as `gemm`, with their casts where those are
        part of what was measured."""
        c, _ = self.gemm_set(dtype)
        if shapes.quantize and not c.cast_bytes_per_s:
            shapes = replace(shapes, quantize=False)
        seconds = gemm_seconds(c, self.sm_count, shapes)
        cast_s = cast_seconds(c, shapes.m, shapes.k) if shapes.quantize else np.zeros_like(seconds)
        seconds = (seconds - cast_s) * unaligned(shapes.n, shapes.k, c.input_bytes) + cast_s
        inside = np.minimum(np.minimum(shapes.m, shapes.n), shapes.k) >= SMALL_GEMM
        flops = 2.0 * shapes.m * shapes.n * shapes.k
        low, high = band_arrays(c.bands, c.bands_small, inside, flops, self._spread(c))
        return seconds, seconds * low, seconds * high

    @_Memoised
    def grouped_gemm(self, work: GroupedGemm) -> Price:
        """Products of the local experts: one library call each, spread over streams (Transformer Engine's GroupedLinear: four);
        how many really run beside each other is measured."""
        groups, tokens, n, k, direction = work.groups, work.tokens, work.n, work.k, work.direction
        if groups <= 0 or tokens <= 0 or min(n, k) <= 0:
            return ZERO
        point = self._points.get(("grouped_gemm", (groups, round(tokens), n, k), work.dtype, direction, True))
        if point is not None:
            return measured(point)
        c, _ = self.gemm_set(work.dtype)
        g, (product, beside) = self._grouped, self._part(work)
        part, rows = self.gemm(product, beside), product.m
        share = {"forward": g.forward, "dgrad": g.dgrad, "wgrad": g.wgrad_accumulate}[direction] if groups > 1 else 1.0
        seconds = groups / beside * part.seconds * share
        spread = math.hypot(self._spread(c), 0.05)
        low, high = band_at(c.bands, 2.0 * rows * groups * n * k, spread)
        if groups > 1:
            low, high = min(low, g.low), max(high, g.high)
        return banded(seconds, (low, high), part.provenance, (("grouped_gemm", seconds),))

    # -- attention -------------------------------------------------------------------------------------------------

    @_Memoised
    def attention(self, work: AttentionWork) -> Price:
        """Scaled dot-product attention of one rank; a causal mask is aligned at the end.

        Kernels: auto (the generation's own), fa1, fa2, fa3, fa4, cudnn, cudnn9.19, trtllm-gen, unfused (fused softmax), eager.

        Raises:
            UnknownNameError: no such kernel.
        """
        sizes = (work.batch, work.sequence_q, work.sequence_kv, work.heads, work.kv_heads, work.head_dim)
        if min(sizes[:4]) <= 0:
            return ZERO
        point = self._points.get(("attention", sizes, work.dtype, "backward" if work.backward else "forward", work.causal))
        return kernel_attention.price(self, work) if point is None else measured(point)

    # -- memory-bound ----------------------------------------------------------------------------------------------

    @_Memoised
    def memory_bound(
        self, kernel: str, bytes_moved: float, *, implementation: Implementation = "tuned", launches: int = 1
    ) -> Price:
        """`launches` kernels of class `kernel` that together move `bytes_moved` through the device memory.

        Raises:
            UnknownNameError: no such class.
        """
        gpu, fitted = self.hardware.gpu, self.resolved.constants.memory
        share = class_share(kernel, implementation, fitted, self.best_share)
        if bytes_moved <= 0:
            return ZERO
        from_cache = cached(kernel, bytes_moved / max(launches, 1), gpu)
        if kernel in self.resolved.own.memory:
            share /= 1.0 - from_cache
        else:
            share = bounded_share(kernel, implementation, gpu, share, from_cache)
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
