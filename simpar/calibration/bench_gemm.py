"""Matrix products to time: forward, input gradient, weight gradient accumulated in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpar.calibration.measure import Case, torch_module

DIRECTIONS = ("forward", "dgrad", "wgrad")
CPU_SHAPES = (
    (512, 512, 512), (1024, 1024, 1024), (256, 1024, 512), (1024, 512, 2048), (64, 1024, 1024), (128, 512, 512), (128, 2048, 256),
)  # fmt: skip
GPU_SHAPES = (
    (4096, 4096, 4096), (8192, 8192, 8192), (8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336), (2048, 8192, 8192),
    (8192, 1280, 8192), (8192, 7168, 8192), (1024, 4096, 4096), (512, 2048, 2048),
)  # fmt: skip
"""(m, n, k): squares, and the products of Llama 3 8B and of a tensor-parallel rank of 70B with 8,192 tokens."""


def dtypes(device: str) -> tuple[str, ...]:
    """simpar's names of the dtypes that the device multiplies at speed."""
    torch = torch_module()
    if device == "cuda":
        major = torch.cuda.get_device_capability(0)[0]
        return ("bf16", "fp16", "tf32") if major >= 8 else ("fp16", "fp32")
    native = any(word in torch.backends.cpu.get_cpu_capability() for word in ("AVX512", "SVE"))
    return ("fp32", "bf16") if native and torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("fp32",)


def torch_dtype(name: str) -> Any:
    """torch's type of simpar's `name`."""
    torch = torch_module()
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}[name]


def _call(device: str, shape: tuple[int, int, int], dtype: str, direction: str) -> Callable[[], object]:
    torch, (m, n, k) = torch_module(), shape
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    kind = torch_dtype(dtype)
    x, w, y = (torch.randn(*size, device=device).to(kind) for size in ((m, k), (n, k), (m, n)))
    if direction == "forward":
        return lambda: torch.mm(x, w.t(), out=y)
    if direction == "dgrad":
        return lambda: torch.mm(y, w, out=x)
    main = torch.zeros(n, k, device=device, dtype=torch.float32)
    if kind == torch.float32:
        return lambda: main.addmm_(y.t(), x)
    return lambda: main.add_(torch.mm(y.t(), x))


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
        return Case(key, "gemm", fields, lambda: _call(device, shape, dtype, direction))

    return [case(s, t, d) for s in shapes for t in kinds for d in DIRECTIONS]
