"""Memory-bound kernels: t = launches t0 + bytes / (share of the peak bandwidth), by class and implementation.

Classes: copy, norm, norm_backward, activation, gate, gate_backward (an activation times its gate, halves side by side), softmax,
residual, rope, cross_entropy, loss_chain (torch's, kernel by kernel), embedding, adam, cast, cast_transpose (written transposed),
cast_column (scales along the axis that does not lie in a row), quantize (a cast in all layouts), amax, permute, zero, row_add
(rows added atomically to the sums that an index names), row_sort_add (sorted by it first), row_product (fp32 rows times a weight
each, and times one row), row_take (rows that it names).
Implementations: tuned (hand-written: Transformer Engine, Liger, QuACK), framework (JIT-fused or
compiled by the framework), eager (a chain of elementary operations). Shares: docs/formulas_kernels.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simpar.registry import unknown
from simpar.specs.calibration import constant
from simpar.specs.hardware import GpuSpec
from simpar.specs.kernel_constants import MemoryClass

KERNEL_LATENCY_S: Final = 2e-6
"""Start and drain of one kernel on the device (1.5-2.6 us fits of casts and serving kernels)."""
BEST_SHARE: Final = {
    "fermi": 0.8,
    "volta": 0.87,
    "turing": 0.87,
    "ampere": 0.86,
    "ada": 0.88,
    "hopper": 0.89,
    "blackwell": 0.76,
    "blackwell-rtx": 0.88,
    "cdna2": 0.8,
    "cdna3": 0.8,
    "cdna4": 0.8,
    "tpu": 0.85,
    "cpu": 0.8,
}
"""Achieved copy over the peak bandwidth (clone, triad, cast) by architecture."""
_HOPPER_BEST: Final = 0.89

DEFAULT_CLASSES: Final[Mapping[str, MemoryClass]] = {
    "copy": MemoryClass(tuned=0.89, framework=0.87, eager=0.87),
    "zero": MemoryClass(tuned=0.89, framework=0.87, eager=0.87),
    "residual": MemoryClass(tuned=0.88, framework=0.87, eager=0.86),
    "norm": MemoryClass(tuned=0.85, framework=0.56, eager=0.36),
    "norm_backward": MemoryClass(tuned=0.45, framework=0.36, eager=0.36),
    "activation": MemoryClass(tuned=0.88, framework=0.87, eager=0.87),
    "gate": MemoryClass(tuned=0.91, framework=0.56, eager=0.32),
    "gate_backward": MemoryClass(tuned=0.58, framework=0.19, eager=0.19),
    "softmax": MemoryClass(tuned=0.89, framework=0.56, eager=0.5),
    "rope": MemoryClass(tuned=0.7, framework=0.47, eager=0.25),
    "cross_entropy": MemoryClass(tuned=0.78, framework=0.6, eager=0.5),
    "loss_chain": MemoryClass(tuned=0.63, framework=0.63, eager=0.63),
    "embedding": MemoryClass(tuned=0.82, framework=0.25, eager=0.18),
    "adam": MemoryClass(tuned=0.87, framework=0.69, eager=0.35),
    "cast": MemoryClass(tuned=0.87, framework=0.65, eager=0.45),
    "cast_transpose": MemoryClass(tuned=0.8, framework=0.6, eager=0.3),
    "cast_column": MemoryClass(tuned=0.57, framework=0.27, eager=0.2),
    "quantize": MemoryClass(tuned=0.87, framework=0.65, eager=0.45),
    "amax": MemoryClass(tuned=0.6, framework=0.38, eager=0.38),
    "permute": MemoryClass(tuned=0.48, framework=0.37, eager=0.27),
    "composite": MemoryClass(tuned=0.53, framework=0.53, eager=0.53),
    "row_add": MemoryClass(tuned=0.2, framework=0.2, eager=0.2),
    "row_sort_add": MemoryClass(tuned=0.34, framework=0.34, eager=0.34),
    "row_product": MemoryClass(tuned=0.1, framework=0.1, eager=0.1),
    "row_take": MemoryClass(tuned=0.73, framework=0.73, eager=0.73),
}
"""Shares of the peak measured or published on H100 (membound rows); the fit overrides classes it has rows for. Composite: chains
of elementary torch kernels, over all that they read and write; see `BYTES_PER_CLOCK`. Norms backward: torch's as measured on an
H100 (0.36; 0.30 on a GB300, KernelAgent PR 133), hand-written ones between Liger's there (0.26 to 0.42) and Apex's FastLayerNorm
on an A100 (0.57, apex PR 1037). Rows taken by an index: torch's index_select of 65,536 rows of 4,096 in 0.44 ms on a Hopper GPU
(DLBlas PR 66), 0.61 of a B200's peak (torchao PR 4623 less the copy before it). Activations without a gate: Liger's squared ReLU,
torch's unary kernels (0.86, NeuSight, A100). Chains of a loss: torch's cross_entropy of logits cast to fp32 over the bytes that
frameworks count for it (18 a logit forward and backward), 2.04 to 2.21 TB/s at 32,000 and 128,256 words on an H100 of 3.35
(validation/measured/h100-2026-11/calibration.jsonl); cross_entropy's own rows are single kernels."""
CHAINS_PER_CLOCK: Final = {"hopper": 10.4, "blackwell": 10.4}
"""Architecture -> what one SM reads and writes per clock in chains of elementary kernels, else as in `BYTES_PER_CLOCK`.

From compute capability 9 on torch loads 128 bits at a time (pytorch PR 141959, December 2024). transformers' RMSNorm moves 2.53
TB/s on an H100 SXM (8,192 rows of 4,096 in 0.53 ms forward and 1.25 backward, validation/measured/h100-2026-11/host.jsonl, torch
2.11), a rotary embedding by complex numbers 2.3 (167.8 M values in 1.455 and 1.482 ms, Liger-Kernel's all_benchmark_data.csv,
llama4_rope of August 2025): 10.9 and 9.9 bytes at the clock below. The H100 NVL's 1.98 and 2.17 TB/s of January 2025 came before
that, at a lower clock. Blackwell's kernels are taken to be as Hopper's: nobody published theirs."""
BYTES_PER_CLOCK: Final[Mapping[tuple[str, str], float]] = {
    **{("composite", tier): 8.3 for tier in ("tuned", "framework", "eager")},
    **{("gate_backward", tier): 2.74 for tier in ("framework", "eager")},
    ("cast_transpose", "framework"): 6.3, **{("cast_column", tier): 2.8 for tier in ("framework", "eager")},
    **{(kernel, tier): rate for tier in ("tuned", "framework", "eager")
       for kernel, rate in (("row_add", 2.9), ("row_sort_add", 5.0), ("row_product", 8.3))},
}  # fmt: skip
"""(Class, implementation) -> what one SM reads and writes per clock in kernels whose rate the SMs set and not the memory.

Chains of elementary torch kernels cast, broadcast and reduce, and load less at a time than a copy does: 1.26 TB/s forward and 1.27
backward on an A100's 2.04 (Hugging Face's RMSNorm, 28.6 and 74.7 ps an element, Liger-Kernel's all_benchmark_data.csv of 2024-09),
2.0 to 2.2 on the H100 NVL's 3.94 (18.2 and 45.1 ps, h100_all_benchmark_data.csv of January 2025); see `CHAINS_PER_CLOCK`.
Compiled gradients of a gate whose halves lie side by side write both from one kernel that reads everything for each: 0.64 TB/s
(Liger-Kernel's all_benchmark_data.csv, megatron_swiglu). Compiled casts that turn a tensor, 1.45 and 0.65 TB/s on an H100 with 2.4
(pytorch issues 133242, 149982), reach no whole lines of it. Torch's index_add adds 4,194,304 rows of 128 16-bit values in 4.72 ms
on an H100, as many in fp32 in 4.40 (pytorch PR 175760; 65,536 rows of 4,096 in 2.30 on a Hopper GPU, DLBlas PR 66): each value
takes a thread its own index arithmetic and an atomic operation; six bytes each. Its index_put adds 196,608 rows of 2,048 up in
zeros in 1.85 ms on a B200 (torchao PR 4623), 0.15 of it zeros. The gradients of a batched product of one row with eight are
products for which cuBLAS has no kernel but fp32 tiles: elementary kernels' rate times `ROW_PRODUCT`."""
ROW_PRODUCT: Final = "kernels.row_product"
"""Inferred from a pair of runs: without them GPT-OSS 20B with 131,072 rows of 2,880 a layer, its layers recomputed, reaches 24.2
and not 22.1 % of an H100 (torchtitan PR 2717), 40 ps a value, half of which is what the same values take as copies."""
SM_CLOCK_HZ: Final = {
    "volta": 1.53e9, "turing": 1.6e9, "ampere": 1.41e9, "ada": 2.5e9, "hopper": 1.755e9, "blackwell": 1.92e9,
    "blackwell-rtx": 2.4e9,
}  # fmt: skip
"""Clocks at which SMs run what does not load the tensor cores: data sheets' boost clocks."""
STREAM: Final = "stream"
"""Elementary kernels over one large tensor each: at the rate of a copy, inside a training step as alone."""
CHAINED: Final = frozenset({STREAM, "composite"})
"""Elementary kernels at the rate of the memory, each of which reads what the one before it wrote. An activation or a residual sum
reads what a product wrote, which moved its own operands meanwhile, or what was written a block before."""
CACHED: Final = (0.5, 1.0)
"""What one kernel reads and writes over the size of the L2 cache: up to the first the kernel after it finds all its inputs there,
from the second on none. Kernels run over the same tensors again and again: torch's product with a number reaches 3.87 TB/s on a
4090 of 1.008 with 34 MB of its 72, and no more than the memory's rate on an A800 with 34 of 40 (mli/transformers-benchmarks issue
4); a softmax on a GB200 is 1.6 times as fast with 64 MB of 129 as with a flushed cache, 1.06 times with 128 (NVIDIA/TileGym pull
request 118). Reads alone fall from the cache's rate to the memory's between 28 and 48 MB of an A100's 40 and at an L40's 96
(RRZE-HPC/gpu-benches, gpu-l2-cache), where the cache's rate, 2 (H200) to 6 times the memory's (L40), does not bound a kernel that
goes to the memory for half of its bytes."""
CLASS_SPREAD: Final = {"copy": 0.06, "zero": 0.08, "residual": 0.12, "cast": 0.15, "quantize": 0.15, "adam": 0.15, "permute": 0.4}
"""Half width of the 80 % interval over the value; other classes 0.25."""
OPTIMIZER_TIERS: Final = {"fused": "tuned", "foreach": "framework", "loop": "eager"}


def class_share(kernel: str, implementation: str, fitted: Mapping[str, MemoryClass], best: float) -> float:
    """Share of the peak bandwidth.

    Raises:
        UnknownNameError: no such kernel class.
    """
    kernel = "copy" if kernel == STREAM else kernel
    if kernel in fitted:
        return float(getattr(fitted[kernel], implementation))
    if kernel not in DEFAULT_CLASSES:
        raise unknown("memory-bound kernel", kernel, sorted(DEFAULT_CLASSES))
    share = float(getattr(DEFAULT_CLASSES[kernel], implementation))
    return min(share * best / _HOPPER_BEST, 1.0)


def bounded_share(kernel: str, implementation: str, gpu: GpuSpec, share: float, from_cache: float = 0.0) -> float:
    """`share` of the peak bandwidth, or what the SMs reach in a kernel that they bound: a copy's share at most. Of a kernel that
    finds `from_cache` of its bytes in the L2 cache, the share that all of them reach."""
    bound = BYTES_PER_CLOCK.get((kernel, implementation))
    if bound is None or gpu.architecture not in SM_CLOCK_HZ:
        return share / (1.0 - from_cache)
    if kernel == "composite":
        bound = CHAINS_PER_CLOCK.get(gpu.architecture, bound)
    bound *= constant(ROW_PRODUCT) if kernel == "row_product" else 1.0
    rate = bound * gpu.sm_count.value * SM_CLOCK_HZ[gpu.architecture]
    return min(rate / gpu.memory_bandwidth.value, BEST_SHARE[gpu.architecture] / (1.0 - from_cache))


def cached(kernel: str, bytes_each: float, gpu: GpuSpec) -> float:
    """Share of the bytes of a kernel, of which it moves `bytes_each`, that do not come from the memory: of a chain's kernel the
    inputs, half of what it moves where it has one, while they are still in the L2 cache. What it writes goes to the memory.

    Between the write and the read of a line a chain moves what one kernel moves. Caches of NVIDIA's GPUs alone: nobody published
    how others' keep a chain's tensors, and a TPU's is no cache but the compiler's memory.
    """
    if kernel not in CHAINED or gpu.l2_cache is None or gpu.architecture not in SM_CLOCK_HZ:
        return 0.0
    all_there, none_there = CACHED
    found = (none_there - bytes_each / gpu.l2_cache.value) / (none_there - all_there)
    return 0.5 * min(max(found, 0.0), 1.0)


def memory_seconds(bytes_moved: float, bandwidth_bytes_per_s: float, share: float, launches: int) -> float:
    """Seconds of `launches` kernels that move `bytes_moved` together."""
    return launches * KERNEL_LATENCY_S + bytes_moved / (bandwidth_bytes_per_s * share)
