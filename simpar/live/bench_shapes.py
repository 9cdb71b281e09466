"""The very shapes that a set of layouts runs, timed as a training step runs them: eager, outputs allocated, operands not in cache.

A shape is a JSON object (docs/calibration.md): `{"op": "gemm", "shape": [m, n, k], "dtype": "fp32", "direction": "wgrad"}`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpar.live.bench_gemm import operand_bytes, product, torch_dtype
from simpar.live.device import Device, torch_module
from simpar.live.measure import Case
from simpar.live.store import CalibrationError

Call = Callable[[], object]
Shape = Mapping[str, Any]
MOST_SETS = 64
BACKENDS = ("math", "flash", "efficient", "cudnn", "overrideable")
"""Of scaled_dot_product_attention, as torch numbers them."""
ROWS_OF_TOKEN = 8
"""Experts of a token where their rows are summed by a batched product; a shape has their rows alone."""
SMALL = 64
"""Largest size along one axis where the command is only tried."""


def key_of(shape: Shape) -> str:
    """The name of a shape's record."""
    parts = [shape["op"], shape.get("kernel", ""), shape.get("chain", "")]
    parts += [shape.get("dtype", "fp32"), shape.get("direction", "forward")]
    parts.append("x".join(str(v) for v in shape["shape"]))
    if shape["op"] == "attention" and not shape.get("causal", True):
        parts.append("full")
    if shape.get("dims"):
        parts.append(",".join(f"{k}{v}" for k, v in sorted(shape["dims"].items())))
    return "/".join(p for p in parts if p)


def rotating(build: Callable[[], Call], bytes_: float, device: str) -> Call:
    """Calls of several operand sets of `bytes_` in turn, so many that no cache holds the next one's."""
    cold = Device(device).cold_bytes
    count = max(1, min(MOST_SETS, int(cold // max(bytes_, 1.0)) + 1))
    calls = itertools.cycle([build() for _ in range(count)])
    return lambda: next(calls)()


def _gemm(shape: Shape, device: str) -> Call:
    size, dtype, direction = shape["shape"], shape["dtype"], shape["direction"]
    return rotating(lambda: product(size, dtype, direction, device), operand_bytes(size, dtype), device)


def grouped(shape: Sequence[int], dtype: str, direction: str, device: str) -> Call:
    """`groups` experts on equal rows: torch._grouped_mm in 16 bits on a GPU, as torchtitan runs them; else batched products."""
    torch, (groups, tokens, n, k), kind = torch_module(), shape, torch_dtype(dtype)
    m = max(1, round(tokens / groups))
    if device == "cuda" and kind != torch.float32 and direction != "wgrad_accumulate":
        ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * m
        x, y = (torch.randn(groups * m, width, device=device).to(kind) for width in (k, n))
        w = torch.randn(groups, k, n, device=device).to(kind)
        calls: dict[str, Call] = {
            "forward": lambda: torch._grouped_mm(x, w, offs=ends),
            "dgrad": lambda: torch._grouped_mm(y, w.transpose(1, 2), offs=ends),
            "wgrad": lambda: torch._grouped_mm(x.t(), y, offs=ends),
        }
        return calls[direction]
    x, w, y = (torch.randn(groups, *size, device=device).to(kind) for size in ((m, k), (n, k), (m, n)))
    if direction == "forward":
        return lambda: torch.bmm(x, w.transpose(1, 2))
    if direction == "dgrad":
        return lambda: torch.bmm(y, w)
    main = torch.zeros(groups, n, k, device=device)
    if direction == "wgrad":
        return lambda: torch.bmm(y.transpose(1, 2), x)
    return lambda: main.add_(torch.bmm(y.transpose(1, 2), x))


def _grouped(shape: Shape, device: str) -> Call:
    groups, tokens, n, k = size = shape["shape"]
    bytes_ = groups * operand_bytes((max(1, round(tokens / groups)), n, k), shape["dtype"])
    return rotating(lambda: grouped(size, shape["dtype"], shape["direction"], device), bytes_, device)


def _both(forward: Callable[..., Any], inputs: Sequence[Any], direction: str) -> Call:
    """The forward with what it saves, or its backward."""
    torch = torch_module()
    if direction == "forward":
        return lambda: forward(*inputs)
    wanted = [t for t in inputs if t.requires_grad]
    out = forward(*inputs)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def sdpa_backend(q: Any, k: Any, v: Any, *, causal: bool) -> str:
    """The backend that scaled_dot_product_attention takes for these tensors."""
    chosen = torch_module()._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return BACKENDS[int(chosen)] if 0 <= int(chosen) < len(BACKENDS) else "other"


def _attention(shape: Shape, device: str, found: dict[str, Any]) -> Call:
    """From rows [s, b, n h] and packed [s, b, 2 k h] (of batches first: [b, s, ...]) to rows, copies of layout included."""
    torch, (b, s, t, n, k, h), kind = torch_module(), shape["shape"], torch_dtype(shape["dtype"])
    causal, first = shape.get("causal", True), bool(shape.get("batch_first"))
    order, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if first else ((1, 2, 0, 3), (2, 0, 1, 3))

    def of(q: Any, kv: Any) -> Any:
        keys, values = kv.split([k, k], dim=2)
        q, keys, values = (x.permute(order) for x in (q, keys, values))
        found.setdefault("backend", sdpa_backend(q, keys, values, causal=causal))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=n != k)
        return out.permute(back).flatten(2)

    def build() -> Call:
        rows, columns = ((b, s), (b, t)) if first else ((s, b), (t, b))
        q = torch.randn(*rows, n, h, device=device).to(kind).requires_grad_()
        kv = torch.randn(*columns, 2 * k, h, device=device).to(kind).requires_grad_()
        return _both(of, (q, kv), shape["direction"])

    return rotating(build, kind.itemsize * b * h * (2 * s * n + 2 * t * k), device)


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


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _memory(shape: Shape, device: str) -> Call:
    """A memory-bound op of a layer; `dims` are its sizes on one rank.

    A class of one direction (norm_backward) runs the op's backward, a class that many ops run in (composite) what `chain` names.
    """
    torch, kind, dims = torch_module(), torch_dtype(shape.get("dtype", "fp32")), shape["dims"]
    f, direction = torch.nn.functional, shape.get("direction", "forward")
    runs = shape.get("chain") or shape["kernel"].removesuffix("_backward")
    if shape["kernel"].endswith("_backward"):
        direction = "backward"
    # Of a compiled block: what the compiler makes of the chain.
    fused = torch.compile if dims.get("compiled") and device == "cuda" else _as_it_is

    def tensor(*size: int) -> Any:
        return torch.randn(*size, device=device).to(kind).requires_grad_()

    def norm() -> Call:
        width = dims["width"]
        from simpar.live.kernels import rms_norm, rms_norm_chain

        of = rms_norm_chain if shape.get("chain") else rms_norm
        return _both(fused(of), (tensor(dims["rows"], width), tensor(width)), direction)

    def rope() -> Call:
        s, h = dims["rows"], dims["head_dim"]
        if dims.get("complex"):
            turns = torch.polar(torch.ones(s, h // 2, device=device), torch.randn(s, h // 2, device=device))

            def turn(x: Any) -> Any:
                pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
                return torch.view_as_real(pairs * turns[:, None, :]).flatten(2).type_as(x)

            return _both(turn, (tensor(s, dims["heads"], h),), direction)
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
        if dims.get("gated") == 2:
            # Two products wrote the two halves.
            pair = (tensor(dims["rows"], dims["width"]), tensor(dims["rows"], dims["width"]))
            return _both(fused(lambda left, right: f.silu(left) * right), pair, direction)
        if dims.get("gated"):

            def gate(x: Any) -> Any:
                left, right = x.chunk(2, dim=-1)
                return f.silu(left) * right

            return _both(fused(gate), (tensor(dims["rows"], 2 * dims["width"]),), direction)
        return _both(f.relu, (tensor(dims["rows"], dims["width"]),), direction)

    def cross_entropy() -> Call:
        target = torch.randint(0, dims["width"], (dims["rows"],), device=device)
        return _both(lambda x: f.cross_entropy(x.float(), target), (tensor(dims["rows"], dims["width"]),), direction)

    def embedding() -> Call:
        rows = torch.randint(0, dims["vocabulary"], (dims["rows"],), device=device)
        return _both(lambda w: f.embedding(rows, w), (tensor(dims["vocabulary"], dims["width"]),), direction)

    def row_sum() -> Call:
        x = tensor(dims["rows"], dims["width"]).detach()
        return lambda: x.sum(0)

    def softmax() -> Call:
        return _both(lambda x: x.softmax(dim=-1), (tensor(dims["rows"], dims["width"]),), direction)

    def permute() -> Call:
        if dims.get("transposed"):
            # rows x width floats, read and written twice each: the copies of layout around exchanges.
            x = torch.randn(dims["rows"], dims["width"] // 4 * 2, 2, device=device)
            return lambda: (x.transpose(0, 1).contiguous(), x.transpose(1, 2).contiguous())
        order = torch.randperm(dims["rows"], device=device)
        return _both(lambda x: x.index_select(0, order), (tensor(dims["rows"], dims["width"]),), direction)

    def zero() -> Call:
        x = tensor(dims["rows"], dims["width"]).detach()
        return x.zero_

    def rows_named() -> Call:
        """Rows that an index names: taken, or added to the sums that it names, atomically or sorted first."""
        x = tensor(dims["rows"], dims["width"]).detach()
        if runs == "row_take":
            order = torch.randperm(dims["rows"], device=device)
            return lambda: x.index_select(0, order)
        sums, named = torch.zeros_like(x), torch.randint(0, dims["rows"], (dims["rows"],), device=device)
        if runs == "row_add":
            return lambda: sums.scatter_add_(0, named[:, None].expand(-1, dims["width"]), x)
        return lambda: sums.index_put_((named,), x, accumulate=True)

    def row_product() -> Call:
        # The gradients of a batched product that sums a token's rows, in fp32: of the rows and of their weights.
        tokens = max(1, dims["rows"] // ROWS_OF_TOKEN)
        weights, x, grad = (
            torch.randn(tokens, *size, device=device)
            for size in ((ROWS_OF_TOKEN, 1), (ROWS_OF_TOKEN, dims["width"]), (1, dims["width"]))
        )
        return lambda: (torch.bmm(weights, grad), torch.bmm(grad, x.transpose(1, 2)))

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
        if "elements" in dims:
            return _sharded_copy(dims, device)
        x = torch.randn(dims["rows"], dims["width"], device=device).to(kind)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    builders = {
        "copy": copy,
        "norm": norm, "rope": rope, "residual": residual, "activation": activation, "gate": activation,
        "cross_entropy": cross_entropy, "embedding": embedding, "softmax": softmax, "permute": permute, "adam": adam,
        "row_sum": row_sum, "row_product": row_product, "zero": zero,
        **dict.fromkeys(("row_take", "row_add", "row_sort_add"), rows_named),
    }  # fmt: skip
    return rotating(builders[runs], float(shape["shape"][0]), device)


BUILDERS: dict[str, Callable[[Shape, str], Call]] = {"gemm": _gemm, "grouped_gemm": _grouped, "memory": _memory}


def _small(shape: Shape) -> Shape:
    """The same kernel on sizes that any machine runs at once."""
    dims = {name: min(int(v), SMALL) for name, v in shape.get("dims", {}).items()}
    size = list(shape["shape"]) if shape["op"] == "memory" else [min(int(v), SMALL) for v in shape["shape"]]
    if shape["op"] == "attention":
        size[3:5] = [size[3] // math.gcd(*size[3:5]), 1]
    return {**shape, "shape": size, "dims": dims} if dims else {**shape, "shape": size}


def _build(shape: Shape, device: str, fields: dict[str, Any]) -> Call:
    if shape["op"] == "attention":
        return _attention(shape, device, fields)
    return BUILDERS[shape["op"]](shape, device)


def cases(shapes: Sequence[Shape], device: str, *, small: bool = False) -> list[Case]:
    """The shapes as cases, each once.

    Args:
        small: run them at small sizes, under their own names: the command is tried, nothing is measured.

    Raises:
        CalibrationError: a shape that nothing here runs.
    """
    found: dict[str, Case] = {}
    for shape in shapes:
        if shape.get("op") not in (*BUILDERS, "attention"):
            raise CalibrationError(f"shapes: {shape!r}: no such op; known: {', '.join([*BUILDERS, 'attention'])}")
        fields = {k: v for k, v in shape.items() if k != "op"} | {"point": shape["op"]}
        key, run = key_of(shape), _small(shape) if small else shape
        found[key] = Case(key, "shape", fields, lambda s=run, f=fields: _build(s, device, f))  # type: ignore[misc]
    return list(found.values())
