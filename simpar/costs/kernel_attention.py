"""Attention of one rank from the fitted sets: choice of kernel, sliding windows, backward passes, unfused attention."""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np

from simpar.costs.attention import AttentionShapes, attention_seconds, head_constants
from simpar.costs.kernel_choice import Resolved, band_at, banded, pick_attention
from simpar.costs.memory_bound import SM_CLOCK_HZ
from simpar.costs.price import Price, Provenance
from simpar.parallel.work import AttentionWork, Gemm, Implementation
from simpar.registry import unknown
from simpar.specs.calibration import constant
from simpar.specs.hardware import GpuSpec, HardwareProfile
from simpar.specs.kernel_constants import AttentionConstants

KERNELS: Final = ("auto", "fa1", "fa2", "fa3", "fa4", "flex", "cudnn", "cudnn9.19", "trtllm-gen", "aiter", "aotriton",
                  "aotriton0.11", "efficient", "efficient-causal", "unfused", "eager")  # fmt: skip
AUTO: Final = {"hopper": "fa3", "blackwell": "trtllm-gen"}
"""By architecture; others FlashAttention-2."""
FALLBACKS: Final = {
    "fa1": ("fa2", "fa3", "cudnn", "trtllm-gen", "fa4"),
    "fa2": ("fa2", "cudnn", "fa3", "trtllm-gen", "fa4"),
    "efficient": ("fa2", "cudnn", "fa3", "trtllm-gen", "fa4"),
    "efficient-causal": ("fa2", "cudnn", "fa3", "trtllm-gen", "fa4"),
    "fa3": ("fa3", "cudnn", "trtllm-gen", "fa4", "fa2"),
    "fa4": ("fa4", "trtllm-gen", "cudnn", "fa3", "fa2"),
    "aiter": ("aiter", "fa2", "cudnn", "fa3", "trtllm-gen", "fa4"),
    "aotriton": ("aotriton", "fa2", "cudnn", "fa3", "trtllm-gen", "fa4"),
    "flex": ("fa4", "fa3", "cudnn", "trtllm-gen", "fa2"),
    "cudnn": ("cudnn", "fa3", "trtllm-gen", "fa4", "fa2"),
    "cudnn9.19": ("fa4", "cudnn", "fa3", "trtllm-gen", "fa2"),
    "trtllm-gen": ("trtllm-gen", "fa4", "cudnn", "fa3", "fa2"),
}
"""Kernel -> sets that may price it, the best first. On Blackwell cuDNN since 9.19 reaches FlashAttention-4's rates: 1,574 and 1,332
TFLOP/s forward and backward at 8k, causal, of 9.22 on a GB200 (cudnn-frontend's benchmarks, April 2026), 1,418 and 1,209 of
FlashAttention-4 on a B200 (flash-attention PR 2280)."""
SLOWER_THAN_FA2: Final = {"fa1": (1.8, 1.8), "efficient": (1.85, 2.15), "efficient-causal": (1.85, 2.15)}
"""Times, forward and backward. FlashAttention-2 paper: about twice as fast as its predecessor, 1.7-2.1 by case. efficient: the
CUTLASS kernel that torch calls memory-efficient (xformers'): A100, 16 bits, head size 128, no mask, 1,343 us against 715 at 2,048
tokens (xformers issue 924), 108 TFLOP/s forward at 8,096 (xformers PR 389) where FlashAttention-2 reaches 203; backward 15,580 us
for 2 x 8 heads at 8,192 tokens, 4,017 at 4,096, 10,063 for 8 x 20 heads at 2,048 (NVIDIA/cutlass PR 992, column v3), 85-88 TFLOP/s
where FlashAttention-2 reaches 180-192. That it reads the mask is not counted. efficient-causal: the same without a mask, told that
it is causal."""
AOTRITON: Final = ("aotriton", "flex", "efficient")
"""What is priced by AOTriton's kernels on AMD's GPUs. torch's memory-efficient attention is AOTriton's too (pytorch aten/src/ATen/
native/transformers/cuda/attention_backward.cu), FlexAttention a Triton template. Another Triton kernel has AOTriton's forward to
10 % on an MI300X from 2,048 to 8,192 tokens (midiareshadi/attn-dsl-bench), and 147 to 251 TFLOP/s in the causal backward on an
MI355X where AOTriton has 110 to 259 (HazyResearch/HipKittens analysis/attn). From version 0.11 on its backward is AITER's."""
SMALL_TILES_BACKWARD: Final = 3.5
"""The same of the memory-efficient kernel's backward, heads above 64, where a block has 99 KB of shared memory at most (compute
capability 8.6, 8.9 and 12.0): torch runs the first kernel that fits (mem_eff_attention/kernels/cutlassB.h, attention_backward.cu),
tiles of 64 x 64 there, of 128 x 128 on an A100. RTX 3090, 16 x 16 heads of 128 at 1,024 tokens: 12.4 TFLOP/s against 43.3
(flash-attention issue 416, whose FlashAttention-2 times are those of that card)."""
GRAPHICS_RATIO: Final = 8.0
"""16-bit over fp32 peak: a graphics chip, with 128 fp32 lanes and 100 KB of shared memory an SM, is below, others are at 16."""
EFFICIENT_HEAD: Final = 128
WIDE_EFFICIENT: Final = 2.6
"""Times that the memory-efficient kernel is slower again with heads above `EFFICIENT_HEAD`, whose output it does not hold in
registers but adds up in global memory (torch aten native/transformers/cuda/mem_eff_attention, kMaxK). One B300, forward and
backward, 16 heads (whitecircle/halo agent-docs/models/gemma4.md, 2026-10-03): of 256 with a mask 4.65, 61.8 and 941 ms at 2,048,
8,192 and 32,768 tokens, of 512 without one 6.53 and 19.7 ms at 2,048 and 4,096; without this factor 2.46, 24.1, 371, 3.67 and 7.18
are priced: 2.5 to 2.7 times less from 4,096 tokens on. At 2,048 it is 1.8 to 1.9, which this overstates."""
BEFORE_ITS_TIME: Final = {
    ("hopper", "fa2"): (1.7, 1.6), ("blackwell", "fa2"): (3.1, 3.0), ("blackwell", "fa3"): (3.1, 3.0),
    ("hopper", "flex"): (1.7, 1.6), ("blackwell", "flex"): (2.3, 2.1),
}  # fmt: skip
"""(Architecture, kernel not written for it) -> times slower, forward and backward, than the architecture's own. Hopper: FA3's
paper (arXiv 2407.08608), 1.5-2.0 and 1.5-1.75 over FA2. Blackwell has no wgmma, so FA2's instructions are all that runs there:
308-380 and 243-334 TFLOP/s at head size 64 (flash-attention issue 1589), a quarter to a third of its own kernels. FlexAttention's
Triton kernels: 1.6 to 3.2 and 1.85 to 2.3 behind FlashAttention-4 on a GB200 (PyTorch's blog on its FlashAttention-4 backend);
on Hopper, and where nothing is said, taken to run as FlashAttention-2, whose times they have in TritonBench
(pytorch/benchmark PR 2443)."""
FP8_SPEEDUP: Final = 1.5
"""FlashAttention-3 chart: forward at 8k-16k, head size 128."""
RATIO: Final = {"small": 2.65, "usual": 2.9, "latent": 3.3}
"""Backward over forward time: head sizes up to 64, above, and 192 / 128."""
BACKWARD_SPREAD: Final = 0.08
DROPOUT_INTEGERS: Final = {"flash": (5.4, 7.3), "cudnn": (13.3, 7.2)}
"""Integer instructions by which dropout lengthens a fused kernel, forward and backward, for each score inside the mask.

Random numbers of a counter (Philox) are made again in the backward. Measured: one H100, torch 2.11, cuDNN 9.19 and torch's
FlashAttention 2, five shapes of head sizes 64 and 128 with dropout 0.1 and 0 (validation/measured/h100-2026-11/host.jsonl): what
all took longer together over their scores. FlashAttention-3 has no dropout: such runs fall back to its predecessor."""
INTEGER_LANES: Final = 64
"""32-bit integer instructions of an SM in a clock."""
_LATENT: Final = "cudnn"
SMALL_SEQUENCE: Final = 1024
"""Smallest length inside the fitted region."""


FLASH: Final = ("fa2", "fa3")
FLASH_HEADS: Final = (32, 64, 96, 128, 192, 256)
"""Head sizes that FlashAttention has kernels for; any other runs in the next larger one's tiles, with zeros (flash-attention 2.6
csrc/flash_attn/src/static_switch.h, HEADDIM_SWITCH; hopper/flash_api.cpp, round_up_headdim, from 64 on)."""


class Model(Protocol):
    """What attention asks of the model of all kernels (kernels.py)."""

    hardware: HardwareProfile
    resolved: Resolved
    sm_count: float
    sustained: bool
    library: str | None

    def gemm(self, work: Gemm, batch: int) -> Price:
        """Price of `batch` products."""

    def memory_bound(self, kernel: str, bytes_moved: float, *, implementation: Implementation, launches: int) -> Price:
        """Price of memory-bound kernels."""


def _shapes(call: AttentionWork) -> AttentionShapes:
    values = (call.batch, call.sequence_q, call.sequence_kv, call.heads, max(call.kv_heads, 1), call.head_dim, call.v_head_dim)
    b, q, k, h, kv, d, v = (np.array([float(value)]) for value in values)
    return AttentionShapes(b, q, k, h, kv, d, v)


def _pairs(call: AttentionWork) -> float:
    """Query-key pairs inside the mask, per head."""
    q, k = float(call.sequence_q), float(call.sequence_kv)
    if not call.causal:
        return q * k
    full = q * max(k - q / 2.0, k / 2.0)
    if call.window is None or call.window >= k:
        return full
    w = float(call.window)
    return min(full, q * w - (w * w / 2.0 if q >= k else 0.0))


def _ratio(model: Model, call: AttentionWork, kernel: str) -> float:
    """Backward over forward time."""
    if call.v_head_dim != call.head_dim:
        return RATIO["latent"]
    found = [b for b in model.resolved.constants.backward if b.kernel == kernel]
    if found:
        best = min(found, key=lambda b: abs(math.log2(b.head_dim / call.head_dim)))
        return best.ratio * (1.0 + best.short_sequence / call.sequence_kv)
    return RATIO["small"] if call.head_dim <= 64 else RATIO["usual"]


def _named(architecture: str, call: AttentionWork) -> str:
    """The kernel that runs where `call` names one of a framework or none."""
    kernel = AUTO.get(architecture, "fa2") if call.kernel == "auto" else call.kernel
    if architecture.startswith("cdna"):
        # AITER's assembly takes no window (ROCm/aiter op_tests/cpp/mha/README.md): Composable Kernel and Triton do.
        windowed = call.window is not None and call.window < call.sequence_kv
        if kernel.startswith(AOTRITON):
            return "aiter" if kernel == "aotriton0.11" and call.backward and not windowed else "aotriton"
        return "fa2" if kernel == "aiter" and windowed else kernel
    return "fa2" if kernel == "flex" and (architecture, kernel) not in BEFORE_ITS_TIME else kernel


def price(model: Model, call: AttentionWork) -> Price:
    """Price of one attention.

    Raises:
        UnknownNameError: no such kernel.
    """
    if call.kernel not in KERNELS:
        raise unknown("attention kernel", call.kernel, list(KERNELS))
    architecture = model.hardware.gpu.architecture
    kernel = _named(architecture, call)
    if kernel in ("unfused", "eager"):
        return _unfused(model, call, eager=kernel == "eager")
    if call.kernel == "efficient":
        call = call._replace(causal=False, window=None)
    latent = call.v_head_dim != call.head_dim
    order: tuple[str, ...] = FALLBACKS[kernel]
    sets = model.resolved.constants.attention
    if latent and any(a.kernel == _LATENT and _measures(a, call.head_dim) for a in sets):
        order = (_LATENT, *order)
    own = _pick(model, sets, order, call, "backward") if call.backward else None
    factor = 1.0
    if own is None or own.kernel != order[0]:
        own = _pick(model, sets, order, call, "forward")
        if own is not None and call.backward:
            factor = _ratio(model, call, own.kernel) * model.resolved.constants.backward_over_forward
    if own is None:
        return _unfused(model, call)
    shapes = _shapes(call if latent or _measures(own, call.head_dim) else _padded(call, kernel))
    seconds = float(attention_seconds(own, model.sm_count, shapes)[0])
    if call.causal and call.window is not None:
        whole = float(call.sequence_q) * max(call.sequence_kv - call.sequence_q / 2.0, call.sequence_kv / 2.0)
        # What a query's row of tiles costs beside its keys does not shrink with the window: s0 / 2 keys, as in the causal law.
        more = float(head_constants(own, shapes.head_dim)[1][0]) / 2.0 * call.sequence_q
        seconds = own.latency_s + (seconds - own.latency_s) * (_pairs(call) + more) / (whole + more)
    seconds *= factor * _behind(model.hardware.gpu, kernel, call)
    written = "fa2" if kernel.startswith("efficient") else kernel  # of Ampere's instructions both
    slower = BEFORE_ITS_TIME.get((architecture, written))
    if slower is not None and own.kernel != written:
        seconds *= slower[call.backward]
    if call.dtype.startswith("fp8") and not call.backward:
        seconds /= FP8_SPEEDUP
    if call.dropout:
        seconds += _dropout_s(model, call, own.kernel)
    return _banded(model, call, own, kernel, seconds, factor)


def _behind(gpu: GpuSpec, kernel: str, call: AttentionWork) -> float:
    """Times that an older kernel takes of FlashAttention-2's."""
    if kernel not in SLOWER_THAN_FA2:
        return 1.0
    wide = WIDE_EFFICIENT if kernel != "fa1" and call.head_dim > EFFICIENT_HEAD else 1.0
    peak = gpu.peak_flops
    small = "fp32" in peak and "fp16" in peak and peak["fp16"].value < GRAPHICS_RATIO * peak["fp32"].value
    if small and kernel != "fa1" and call.backward and call.head_dim > 64:
        return SMALL_TILES_BACKWARD * wide
    return SLOWER_THAN_FA2[kernel][call.backward] * wide


def _dropout_s(model: Model, call: AttentionWork, kernel: str) -> float:
    """Seconds in which random numbers of all scores inside the mask are drawn beside nothing else."""
    gpu = model.hardware.gpu
    clock = SM_CLOCK_HZ.get(gpu.architecture, SM_CLOCK_HZ["ampere"])
    each = DROPOUT_INTEGERS["cudnn" if kernel.startswith("cudnn") else "flash"][call.backward]
    return call.batch * call.heads * _pairs(call) * each / (model.sm_count * INTEGER_LANES * clock)


def _padded(call: AttentionWork, kernel: str) -> AttentionWork:
    """`call` with heads as wide as those of the kernel that FlashAttention has for them."""
    width = next((size for size in FLASH_HEADS if size >= call.head_dim), call.head_dim) if kernel in FLASH else call.head_dim
    return call._replace(head_dim=width, v_head_dim=width)


def _measures(a: AttentionConstants, head_dim: int) -> bool:
    return any(h.head_dim == head_dim for h in a.heads)


def _pick(
    model: Model, sets: tuple[AttentionConstants, ...], order: tuple[str, ...], call: AttentionWork, direction: str
) -> AttentionConstants | None:
    return pick_attention(
        sets,
        order,
        causal=call.causal,
        head_dim=call.head_dim,
        direction=direction,
        sustained=model.sustained,
        library=model.library,
    )


def _banded(model: Model, call: AttentionWork, own: AttentionConstants, kernel: str, seconds: float, factor: float) -> Price:
    flops = 2.0 * call.batch * call.heads * _pairs(call) * (call.head_dim + call.v_head_dim)
    standing, extra = model.resolved.standing(own)
    spread = math.hypot(extra, BACKWARD_SPREAD if factor != 1.0 else 0.0)
    exact = own.kernel == kernel
    bands = own.bands if call.sequence_kv >= SMALL_SEQUENCE else own.bands_small or own.bands
    band = band_at(bands, flops, math.hypot(spread, 0.0 if exact else 0.1))
    provenance = standing if exact else Provenance.SCALED
    return banded(seconds, band, provenance, (("attention", seconds),))


SCORE_BYTES: Final = {("forward", False): (8.0, 2), ("backward", False): (12.0, 3), ("forward", True): (16.0, 3),
                      ("backward", True): (20.0, 3)}  # fmt: skip
"""(Direction, eager) -> bytes per score and kernels of the softmax between two products. Fused: Megatron's scale-mask-softmax, and
dropout. Eager torch, the scale in the product: mask (read 2, write 2), softmax into fp32 (2, 4), back to 16 bits (4, 2); backward
the gradient to fp32 (2, 4), the softmax's (8, 2), the mask's (2, 2)."""
WIDE_SCORE_BYTES: Final = {("forward", False): (16.0, 2), ("backward", False): (24.0, 3), ("forward", True): (16.0, 2),
                           ("backward", True): (12.0, 1)}  # fmt: skip
"""The same of scores in fp32. Eager torch has nothing to cast: mask (4, 4), softmax (4, 4); backward the softmax's (8, 4)."""


ALIGNED_HEAD: Final = 8
"""Elements of 16 bits in the 16 bytes that loads of tensor-core kernels are aligned to."""
UNALIGNED_HEADS: Final = "kernels.unaligned_heads"
"""Of the fp32 peak outside tensor cores: what batched products over heads that are not aligned reach; fitted on the runs of
BLOOM's chronicles with heads 150 or 108 wide, a fifth longer than those with 144 or 224."""


def _on_cuda_cores(model: Model, price: Price, flops: float) -> Price:
    """The price of a batched product that tensor cores do not take."""
    seconds = flops / (constant(UNALIGNED_HEADS) * model.hardware.peak_flops_per_s("fp32"))
    if seconds <= price.seconds:
        return price
    return Price(seconds, 0.8 * seconds, 1.25 * seconds, Provenance.SCALED, price.terms)


def _unfused(model: Model, call: AttentionWork, *, eager: bool = False) -> Price:
    """Two batched products and the passes over the scores that the masked, scaled softmax and dropout make."""
    rows, columns, count = call.sequence_q, call.sequence_kv, call.batch * call.heads
    scores = float(count) * rows * columns
    wide = call.dtype in ("fp32", "tf32")
    dtype = call.dtype if wide else "bf16"
    products = [
        model.gemm(Gemm(rows, columns, call.head_dim, dtype), count),
        model.gemm(Gemm(rows, call.v_head_dim, columns, dtype), count),
    ]
    if call.backward:
        products = [p for p in products for _ in range(2)]
    if not wide and (call.head_dim % ALIGNED_HEAD or call.v_head_dim % ALIGNED_HEAD):
        products = [_on_cuda_cores(model, p, 2.0 * scores * call.head_dim) for p in products]
    each, launches = (WIDE_SCORE_BYTES if wide else SCORE_BYTES)["backward" if call.backward else "forward", eager]
    passes = model.memory_bound("softmax", scores * each, implementation="eager" if eager else "framework", launches=launches)
    parts = [*products, passes]
    total = sum(p.seconds for p in parts)
    return Price(
        total, 0.85 * total, 1.2 * total, passes.provenance, (("products", total - passes.seconds), ("softmax", passes.seconds))
    )
