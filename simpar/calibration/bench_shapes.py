"""The very shapes that a set of layouts runs, timed as a training step runs them: eager, outputs allocated, operands not in cache.

A shape is a JSON object (docs/calibration.md): `{"op": "gemm", "shape": [m, n, k], "dtype": "fp32", "direction": "wgrad"}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpar.calibration.bench_gemm import torch_dtype
from simpar.calibration.measure import Case, torch_module
from simpar.calibration.store import CalibrationError

Call = Callable[[], object]
Shape = Mapping[str, Any]
COLD_BYTES = 48 * 2**20
"""Operands are taken in turn from sets of at least so many bytes together, more than the caches next to a core hold."""
MOST_SETS = 12


def key_of(shape: Shape) -> str:
    """The name of a shape's record."""
    parts = [shape["op"], shape.get("kernel", ""), shape.get("dtype", "fp32"), shape.get("direction", "forward")]
    parts.append("x".join(str(v) for v in shape["shape"]))
    if shape["op"] == "attention" and not shape.get("causal", True):
        parts.append("full")
    if shape.get("dims"):
        parts.append(",".join(f"{k}{v}" for k, v in sorted(shape["dims"].items())))
    return "/".join(p for p in parts if p)


def _rotating(build: Callable[[], Call], bytes_: float) -> Call:
    """Calls of several operand sets in turn."""
    count = max(1, min(MOST_SETS, int(COLD_BYTES // max(bytes_, 1.0)) + 1))
    calls = itertools.cycle([build() for _ in range(count)])
    return lambda: next(calls)()


def _gemm(shape: Shape, device: str) -> Call:
    torch, (m, n, k), kind = torch_module(), shape["shape"], torch_dtype(shape["dtype"])
    direction = shape["direction"]

    def build() -> Call:
        x, w, y = (torch.randn(*size, device=device).to(kind) for size in ((m, k), (n, k), (m, n)))
        if direction == "forward":
            return lambda: torch.nn.functional.linear(x, w)
        if direction == "dgrad":
            return lambda: y @ w
        if direction == "wgrad":
            return lambda: y.t() @ x
        main = torch.zeros(n, k, device=device)
        return lambda: main.add_(y.t() @ x)

    return _rotating(build, 4.0 * (m * k + n * k * (2 if "accumulate" in direction else 1) + m * n))


def _grouped(shape: Shape, device: str) -> Call:
    torch, (groups, tokens, n, k), kind = torch_module(), shape["shape"], torch_dtype(shape["dtype"])
    direction, m = shape["direction"], max(1, round(tokens / groups))

    def build() -> Call:
        x, w, y = (torch.randn(groups, *size, device=device).to(kind) for size in ((m, k), (n, k), (m, n)))
        if direction == "forward":
            return lambda: torch.bmm(x, w.transpose(1, 2))
        if direction == "dgrad":
            return lambda: torch.bmm(y, w)
        main = torch.zeros(groups, n, k, device=device)
        if direction == "wgrad":
            return lambda: torch.bmm(y.transpose(1, 2), x)
        return lambda: main.add_(torch.bmm(y.transpose(1, 2), x))

    return _rotating(build, 4.0 * groups * (m * k + 2 * n * k + m * n))


def _both(forward: Callable[..., Any], inputs: Sequence[Any], direction: str) -> Call:
    """The forward with what it saves, or its backward."""
    torch = torch_module()
    if direction == "forward":
        return lambda: forward(*inputs)
    wanted = [t for t in inputs if t.requires_grad]
    out = forward(*inputs)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def _attention(shape: Shape, device: str) -> Call:
    """From packed rows [s, b, (n + 2 k) h] to rows [s, b, n h], copies of layout included."""
    torch, (b, s, t, n, k, h), kind = torch_module(), shape["shape"], torch_dtype(shape["dtype"])
    causal = shape.get("causal", True)

    def of(q: Any, kv: Any) -> Any:
        keys, values = kv.split([k, k], dim=2)
        q, keys, values = (x.permute(1, 2, 0, 3) for x in (q, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=n != k)
        return out.permute(2, 0, 1, 3).flatten(2)

    def build() -> Call:
        q = torch.randn(s, b, n, h, device=device).to(kind).requires_grad_()
        kv = torch.randn(t, b, 2 * k, h, device=device).to(kind).requires_grad_()
        return _both(of, (q, kv), shape["direction"])

    return _rotating(build, 4.0 * b * h * (2 * s * n + 2 * t * k))


PIECES, ROW = 4, 512
"""A sharded group is timed as so many weights with rows of so many elements."""


def _sharded_copy(dims: Mapping[str, int], device: str) -> Call:
    """What fully_shard copies around a gather or reduction of `elements` over `ranks`; buffers are new each time, as there."""
    torch, ranks = torch_module(), dims["ranks"]
    part = max(1, dims["elements"] // (PIECES * ranks))
    own = torch.randn(PIECES * part, device=device)
    if not dims["reduces"]:

        def gather() -> None:
            buffer = torch.empty(ranks, PIECES * part, device=device)
            buffer[0].copy_(own)
            whole = [torch.empty(ranks, part, device=device) for _ in range(PIECES)]
            torch.split_with_sizes_copy(buffer, [part] * PIECES, dim=1, out=whole)

        return gather
    width = min(ROW, part)
    rows = max(1, part // width)
    gradients = [torch.randn(ranks * rows, width, device=device) for _ in range(PIECES)]

    def reduce() -> None:
        buffer = torch.empty(ranks, PIECES * rows * width, device=device)
        torch._chunk_cat(gradients, dim=0, num_chunks=ranks, out=buffer)
        own[: buffer.shape[1]].add_(buffer[0])

    return reduce


def _memory(shape: Shape, device: str) -> Call:
    """A memory-bound op of a layer; `dims` are its sizes on one rank."""
    torch, kind, dims = torch_module(), torch_dtype(shape.get("dtype", "fp32")), shape["dims"]
    f, direction = torch.nn.functional, shape.get("direction", "forward")

    def tensor(*size: int) -> Any:
        return torch.randn(*size, device=device).to(kind).requires_grad_()

    def norm() -> Call:
        width = dims["width"]
        return _both(lambda x, w: f.rms_norm(x, (width,), w), (tensor(dims["rows"], width), tensor(width)), direction)

    def rope() -> Call:
        s, h = dims["rows"], dims["head_dim"]
        cosine, sine = (torch.randn(s, 1, h, device=device).to(kind) for _ in range(2))

        def rotate(x: Any) -> Any:
            left, right = x.chunk(2, dim=-1)
            return x * cosine + torch.cat([-right, left], dim=-1) * sine

        return _both(rotate, (tensor(s, dims["heads"], h),), direction)

    def residual() -> Call:
        x, y = tensor(dims["rows"], dims["width"]), tensor(dims["rows"], dims["width"])
        # Backward: the gradients of the two branches meet in a sum.
        return lambda: x + y

    def activation() -> Call:
        if dims.get("gated"):

            def gate(x: Any) -> Any:
                left, right = x.chunk(2, dim=-1)
                return f.silu(left) * right

            return _both(gate, (tensor(dims["rows"], 2 * dims["width"]),), direction)
        return _both(f.relu, (tensor(dims["rows"], dims["width"]),), direction)

    def cross_entropy() -> Call:
        target = torch.randint(0, dims["width"], (dims["rows"],), device=device)
        return _both(lambda x: f.cross_entropy(x, target), (tensor(dims["rows"], dims["width"]),), direction)

    def embedding() -> Call:
        rows = torch.randint(0, dims["vocabulary"], (dims["rows"],), device=device)
        return _both(lambda w: f.embedding(rows, w), (tensor(dims["vocabulary"], dims["width"]),), direction)

    def softmax() -> Call:
        return _both(lambda x: x.softmax(dim=-1), (tensor(dims["rows"], dims["width"]),), direction)

    def permute() -> Call:
        if dims.get("transposed"):
            # rows x width floats, read and written twice each: the copies of layout around exchanges.
            x = torch.randn(dims["rows"], dims["width"] // 4 * 2, 2, device=device)
            return lambda: (x.transpose(0, 1).contiguous(), x.transpose(1, 2).contiguous())
        order = torch.randperm(dims["rows"], device=device)
        return _both(lambda x: x.index_select(0, order), (tensor(dims["rows"], dims["width"]),), direction)

    def adam() -> Call:
        parts = [torch.nn.Parameter(torch.randn(dims["width"], dims["width"], device=device)) for _ in range(dims["rows"])]
        for p in parts:
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.AdamW(parts, lr=1e-4, fused=True)

        def step() -> None:
            norms = torch._foreach_norm([p.grad for p in parts])
            float(torch.stack(norms).square().sum().sqrt())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return step

    def copy() -> Call:
        return _sharded_copy(dims, device)

    builders = {
        "copy": copy,
        "norm": norm, "rope": rope, "residual": residual, "activation": activation, "cross_entropy": cross_entropy,
        "embedding": embedding, "softmax": softmax, "permute": permute, "adam": adam,
    }  # fmt: skip
    return _rotating(builders[shape["kernel"]], float(shape["shape"][0]))


BUILDERS: dict[str, Callable[[Shape, str], Call]] = {
    "gemm": _gemm, "grouped_gemm": _grouped, "attention": _attention, "memory": _memory,
}  # fmt: skip


def cases(shapes: Sequence[Shape], device: str) -> list[Case]:
    """The shapes as cases, each once.

    Raises:
        CalibrationError: a shape that nothing here runs.
    """
    found: dict[str, Case] = {}
    for shape in shapes:
        if shape.get("op") not in BUILDERS:
            raise CalibrationError(f"shapes: {shape!r}: no such op; known: {', '.join(BUILDERS)}")
        fields = {k: v for k, v in shape.items() if k != "op"} | {"point": shape["op"]}
        key = key_of(shape)
        found[key] = Case(key, "shape", fields, lambda s=shape: BUILDERS[s["op"]](s, device))  # type: ignore[misc]
    return list(found.values())
