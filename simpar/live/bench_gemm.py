"""Matrix products to time: forward, input gradient, weight gradient alone and added into an fp32 buffer; in 16 bits, fp32, tf32 and
fp8 with one scale a tensor or one a row (torch._scaled_mm)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simpar.live.device import torch_module
from simpar.live.measure import Case

DIRECTIONS = ("forward", "dgrad", "wgrad", "wgrad_accumulate")
FP8 = ("fp8", "fp8_row")
"""One scale for each operand, or one for each of its rows."""
CPU_SHAPES = (
    (512, 512, 512), (1024, 1024, 1024), (256, 1024, 512), (1024, 512, 2048), (64, 1024, 1024), (128, 512, 512), (128, 2048, 256),
)  # fmt: skip
GPU_SHAPES = (
    (4096, 4096, 4096), (8192, 8192, 8192), (8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336), (2048, 8192, 8192),
    (8192, 1280, 8192), (8192, 7168, 8192), (1024, 4096, 4096), (512, 2048, 2048),
)  # fmt: skip
"""(m, n, k): squares, and the products of Llama 3 8B and of a tensor-parallel rank of 70B with 8,192 tokens."""


def dtypes(device: str) -> tuple[str, ...]:
    """simpar's names of the dtypes that training on the device multiplies in."""
    torch = torch_module()
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability(0)
        return ("bf16", *FP8) if (major, minor) >= (8, 9) else ("bf16",) if major >= 8 else ("fp16", "fp32")
    native = any(word in torch.backends.cpu.get_cpu_capability() for word in ("AVX512", "SVE"))
    return ("fp32", "bf16") if native and torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("fp32",)


def torch_dtype(name: str) -> Any:
    """torch's type of simpar's `name`."""
    torch = torch_module()
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}[name]


def sizes(shape: Sequence[int], direction: str) -> tuple[int, int, int]:
    """(rows, columns, depth) of what is multiplied for a product y[m, n] = x[m, k] W[k, n] or its gradient."""
    m, n, k = shape
    return {"forward": (m, n, k), "dgrad": (m, k, n)}.get(direction, (n, k, m))


def scaled(shape: Sequence[int], dtype: str, direction: str, device: str) -> Callable[[], object]:
    """An fp8 product on operands laid out as torch._scaled_mm wants them; casts are not in it."""
    torch, (rows, columns, depth) = torch_module(), sizes(shape, direction)
    a, b = (torch.randn(n, depth, device=device).to(torch.float8_e4m3fn) for n in (rows, columns))
    by_row = dtype == "fp8_row"
    scale_a = torch.ones((rows, 1) if by_row else (), device=device)
    scale_b = torch.ones((1, columns) if by_row else (), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def product(shape: Sequence[int], dtype: str, direction: str, device: str) -> Callable[[], object]:
    """One product as eager training runs it: the output is allocated."""
    if dtype in FP8:
        return scaled(shape, dtype, direction, device)
    torch, (m, n, k) = torch_module(), shape
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    kind = torch_dtype(dtype)
    x, w, y = (torch.randn(*size, device=device).to(kind) for size in ((m, k), (n, k), (m, n)))
    if direction == "forward":
        return lambda: torch.nn.functional.linear(x, w)
    if direction == "dgrad":
        return lambda: y @ w
    if direction == "wgrad":
        return lambda: y.t() @ x
    main = torch.zeros(n, k, device=device, dtype=torch.float32)
    return lambda: main.add_(y.t() @ x)


def operand_bytes(shape: Sequence[int], dtype: str) -> float:
    """Of both operands and the result."""
    m, n, k = shape
    size = 1.0 if dtype in FP8 else float(torch_module().empty(0, dtype=torch_dtype(dtype)).element_size())
    return size * (m * k + n * k + m * n)


def cases(device: str, tiny: bool) -> list[Case]:
    """The products to time, the most telling ones first.

    Args:
        tiny: one small shape, for tests.
    """
    shapes = ((128, 128, 128),) if tiny else GPU_SHAPES if device == "cuda" else CPU_SHAPES
    kinds = ("fp32",) if tiny and device == "cpu" else dtypes(device)

    def case(shape: tuple[int, int, int], dtype: str, direction: str) -> Case:
        key = f"gemm/{dtype}/{direction}/{'x'.join(map(str, shape))}"
        fields = {"shape": list(shape), "dtype": dtype, "direction": direction}
        return Case(key, "gemm", fields, lambda: product(shape, dtype, direction, device))

    return [case(s, t, d) for t in kinds for s in shapes for d in DIRECTIONS if t not in FP8 or d != "wgrad_accumulate"]
