"""Everything of a step on one device besides matrix products: attention, memory-bound ops, optimizer, launches, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpar.live.bench_gemm import torch_dtype
from simpar.live.device import torch_module
from simpar.live.measure import Case

Call = Callable[[], object]
GPU_ATTENTION = ((1, 4096, 4096, 32, 8, 128), (1, 8192, 8192, 32, 8, 128), (1, 8192, 8192, 8, 1, 128), (4, 2048, 2048, 16, 16, 64))
CPU_ATTENTION = ((1, 256, 256, 8, 8, 64), (2, 512, 512, 4, 4, 64))
"""(batch, queries, keys, heads, key/value heads, head size)."""


def _attention(device: str, shape: tuple[int, ...], dtype: str, direction: str) -> Call:
    torch, (b, s, t, h, g, d) = torch_module(), shape
    q, k, v = (
        torch.randn(b, heads, length, d, device=device).to(torch_dtype(dtype)).requires_grad_(direction == "backward")
        for heads, length in ((h, s), (g, t), (g, t))
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return attend(q, k, v, is_causal=True, enable_gqa=h != g)

        return forward
    out = attend(q, k, v, is_causal=True, enable_gqa=h != g)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def _backward(out: Any, inputs: tuple[Any, ...]) -> Call:
    torch = torch_module()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _rows(device: str, tiny: bool) -> tuple[int, int]:
    """Rows and columns: larger than any cache, so that the memory is measured."""
    return (64, 256) if tiny else (8192, 8192) if device == "cuda" else (4096, 4096)


def _memory(device: str, tiny: bool, dtype: str) -> dict[str, tuple[float, Callable[[], Call]]]:
    """Class of docs/formulas_kernels.md -> (bytes of the ideal kernel, what builds the call)."""
    torch, (rows, width) = torch_module(), _rows(device, tiny)
    f, kind = torch.nn.functional, torch_dtype(dtype)
    e = float(torch.empty(0, dtype=kind).element_size())

    def tensor(grad: bool = False) -> Any:
        return torch.randn(rows, width, device=device).to(kind).requires_grad_(grad)

    def copy() -> Call:
        x, y = tensor(), tensor()
        return lambda: y.copy_(x)

    def residual() -> Call:
        x, y, z = tensor(), tensor(), tensor()
        return lambda: torch.add(x, y, out=z)

    def norm() -> Call:
        x, w = tensor(), torch.ones(width, device=device, dtype=kind)
        return lambda: f.rms_norm(x, (width,), w)

    def norm_backward() -> Call:
        x, w = tensor(True), torch.ones(width, device=device, dtype=kind, requires_grad=True)
        return _backward(f.rms_norm(x, (width,), w), (x, w))

    def activation() -> Call:
        x = tensor()
        return lambda: f.silu(x)

    def activation_backward() -> Call:
        x = tensor(True)
        return _backward(f.silu(x), (x,))

    def gate() -> Call:
        x, y = tensor(), tensor()
        return lambda: f.silu(x) * y

    def gate_backward() -> Call:
        x, y = tensor(True), tensor(True)
        return _backward(f.silu(x) * y, (x, y))

    def softmax() -> Call:
        x = tensor()
        return lambda: torch.softmax(x, -1)

    def cross_entropy() -> Call:
        x, target = tensor(True), torch.randint(0, width, (rows,), device=device)
        return lambda: torch.autograd.grad(f.cross_entropy(x, target), x)

    n = rows * width * e
    return {
        "copy": (2 * n, copy), "residual": (3 * n, residual), "norm": (2 * n, norm), "norm_backward": (3 * n, norm_backward),
        "activation": (2 * n, activation), "activation_backward": (3 * n, activation_backward), "softmax": (2 * n, softmax),
        "gate": (3 * n, gate), "gate_backward": (5 * n, gate_backward),
        # Read the logits, read them again and write their gradient.
        "cross_entropy": (3 * n, cross_entropy),
        # Of a chain all that its kernels move: the gate's non-linearity, then the product.
        "composite": (5 * n, gate),
    }  # fmt: skip


def _adam(device: str, elements: int) -> Call:
    torch = torch_module()
    p = torch.nn.Parameter(torch.randn(elements, device=device))
    p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW([p], lr=1e-4, fused=True)
    return lambda: optimizer.step()


def _copies(device: str) -> list[Case]:
    torch, size = torch_module(), 256 * 2**20

    def build(to_device: bool) -> Call:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        far = torch.empty(size, dtype=torch.uint8, device=device)
        return (lambda: far.copy_(host, non_blocking=True)) if to_device else (lambda: host.copy_(far, non_blocking=True))

    return [
        Case(f"copy/{name}", "copy", {"op": name, "bytes": size}, lambda to=to: build(to))  # type: ignore[misc]
        for name, to in (("host_to_device", True), ("device_to_host", False))
    ]


def _launch(device: str) -> Call:
    x = torch_module().zeros(1, device=device)
    return lambda: x.add_(1.0)


def cases(device: str, tiny: bool) -> list[Case]:
    """The ops to time, memory-bound ones first.

    Args:
        tiny: small sizes, for tests.
    """
    dtype = "bf16" if device == "cuda" else "fp32"
    found = []
    for name, (moved, build) in _memory(device, tiny, dtype).items():
        found.append(Case(f"memory/{dtype}/{name}", "memory", {"op": name, "bytes": moved, "dtype": dtype}, build))
    elements = 2**12 if tiny else 2**28 if device == "cuda" else 2**22
    adam = {"op": "adam", "bytes": 28.0 * elements, "dtype": "fp32"}
    found.append(Case("memory/fp32/adam", "memory", adam, lambda: _adam(device, elements)))
    found.append(Case("launch", "launch", {"op": "launch"}, lambda: _launch(device)))
    if device == "cuda":
        found += _copies(device)
    shapes = ((1, 32, 32, 2, 2, 16),) if tiny else GPU_ATTENTION if device == "cuda" else CPU_ATTENTION
    for shape in shapes:
        for direction in ("forward", "backward"):
            key = f"attention/{dtype}/{direction}/{'x'.join(map(str, shape))}"
            fields = {"shape": list(shape), "dtype": dtype, "direction": direction, "causal": True}
            found.append(Case(key, "attention", fields, lambda s=shape, d=direction: _attention(device, s, dtype, d)))  # type: ignore[misc]
    return found
