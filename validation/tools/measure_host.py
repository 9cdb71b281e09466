"""What a host spends for each kind of work of a training step, and kernels no table has: `... measure_host.py --out FILE.jsonl`.

Needs torch alone. Host times are of trains of calls on tensors so small that the device keeps up or of no device at all; each line
of the file is a case as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

CUDA = torch.cuda.is_available()
DEV = "cuda" if CUDA else "cpu"
Case = tuple[str, Callable[[], object], int]


def wait() -> None:
    """For the device."""
    if CUDA:
        torch.cuda.synchronize()


def host(call: Callable[[], object], count: int, repeats: int = 7) -> dict[str, float]:
    """Seconds a call: of the host to enqueue, and until the device is done."""
    call()
    enqueue, done = [], []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        middle = time.perf_counter()
        wait()
        enqueue.append((middle - begin) / count)
        done.append((time.perf_counter() - begin) / count)
    return {"host_s": statistics.median(enqueue), "done_s": statistics.median(done), "low_s": min(enqueue), "high_s": max(enqueue)}


def device(call: Callable[[], object], seconds: float = 0.5) -> dict[str, float]:
    """Seconds a call of the device, sustained for so long."""
    call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    once = max(time.perf_counter() - begin, 1e-6)
    count = max(1, min(200, int(seconds / 5 / once)))
    found = []
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        found.append((time.perf_counter() - begin) / count)
    return {"seconds": statistics.median(found), "low_s": min(found), "high_s": max(found)}


def small(*shape: int, grad: bool = False) -> torch.Tensor:
    """A tensor of little work."""
    return torch.randn(*shape, device=DEV, dtype=torch.bfloat16, requires_grad=grad)


def eager() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Eager operations, autograd, modules, hooks."""
    x, w, g = small(64, 64), small(64, 64), small(64, 64, grad=True)

    def no_grad(call: Callable[[], object], count: int = 300) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with torch.no_grad():
                return host(call, count)

        return run

    yield "op in place", no_grad(lambda: x.add_(1.0))
    yield "op with output", no_grad(lambda: x + w)
    yield "op of a view", no_grad(lambda: x.view(-1))
    yield "empty", no_grad(lambda: torch.empty(64, 64, device=DEV))
    yield "matmul", no_grad(lambda: x @ w)
    yield "op with output recorded", lambda: host(lambda: g + w, 300)
    yield "matmul recorded", lambda: host(lambda: g @ w, 300)
    yield "cast", no_grad(lambda: x.float())

    def chain(op: Callable[[torch.Tensor], torch.Tensor], length: int = 200) -> Callable[[], dict[str, float]]:
        return chain_of(g, op, length)

    yield "autograd of add", chain(lambda y: y + w)
    yield "autograd of mul", chain(lambda y: y * w)
    yield "autograd of matmul", chain(lambda y: y @ w)
    lin = nn.Linear(64, 64, bias=False, device=DEV, dtype=torch.bfloat16)
    lin_frozen = nn.Linear(64, 64, bias=False, device=DEV, dtype=torch.bfloat16).requires_grad_(False)
    lin32 = nn.Linear(64, 64, bias=False, device=DEV)
    rms, ln, silu, ident = (
        nn.RMSNorm(64, device=DEV, dtype=torch.bfloat16),
        nn.LayerNorm(64, device=DEV, dtype=torch.bfloat16),
        nn.SiLU(),
        nn.Identity(),
    )
    yield "linear module", chain(lin)
    yield "linear module frozen", chain(lin_frozen)
    yield "rms norm module", chain(rms)
    yield "layer norm module", chain(ln)
    yield "silu module", chain(silu)
    yield "identity module", chain(ident)

    def autocast() -> dict[str, float]:
        with torch.autocast(DEV, torch.bfloat16):
            return chain(lin32)()

    yield "linear module under autocast", autocast
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda m, i, o: None)
    hooked.register_forward_pre_hook(lambda m, i: None)
    yield "identity module with two hooks", chain(hooked)
    q = small(1, 4, 128, 64, grad=True)
    k, v = small(1, 4, 128, 64), small(1, 4, 128, 64)
    yield "attention", chain_of(q, lambda y: F.scaled_dot_product_attention(y, k, v, is_causal=True))
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def keep(*_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    yield "checkpoint, not reentrant", chain(lambda y: checkpoint(ident_mul, y, w, use_reentrant=False))
    by_operation = partial(create_selective_checkpoint_contexts, keep)
    yield "checkpoint by operation", chain(lambda y: checkpoint(ident_mul, y, w, use_reentrant=False, context_fn=by_operation))
    yield "checkpoint, reentrant", chain(lambda y: checkpoint(ident_mul, y, w, use_reentrant=True))
    yield "item", lambda: host(lambda: x[0, 0].item(), 50)

    def eager_rms(y: torch.Tensor) -> torch.Tensor:
        z = y.float()
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)
        return z.to(y.dtype) * w

    yield "rms norm of transformers", chain(eager_rms, 60)

    def swiglu(y: torch.Tensor) -> torch.Tensor:
        return lin(F.silu(lin(y)) * lin(y))

    yield "gated feed-forward", chain(swiglu, 60)
    if CUDA:
        fast = torch.compile(swiglu)

        def compiled() -> dict[str, float]:
            for _ in range(3):
                fast(g).sum().backward()
            return chain(fast, 60)()

        yield "gated feed-forward compiled", compiled


def ident_mul(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What a checkpoint wraps."""
    return y * w


def both_passes(forward: Callable[[], torch.Tensor], count: int) -> dict[str, float]:
    """Host seconds for each of `count` parts of a forward and of its backward."""
    times = []
    for _ in range(7):
        wait()
        begin = time.perf_counter()
        y = forward()
        middle = time.perf_counter()
        loss = y.sum()
        wait()
        back = time.perf_counter()
        loss.backward()
        times.append(((middle - begin) / count, (time.perf_counter() - back) / count))
    return {"forward_s": statistics.median(f for f, _ in times), "backward_s": statistics.median(b for _, b in times)}


def chain_of(start: torch.Tensor, op: Callable[[torch.Tensor], torch.Tensor], length: int = 100) -> Callable[[], dict[str, float]]:
    """Host time of a chain, forward and backward."""

    def forward() -> torch.Tensor:
        start.grad, y = None, start
        for _ in range(length):
            y = op(y)
        return y

    return lambda: both_passes(forward, length)


def optimizers() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """AdamW's host time a tensor, and its time on the device; gradient norms."""

    def of(tensors: int, elements: int, dtype: torch.dtype, **how: Any) -> dict[str, float]:
        ps = [nn.Parameter(torch.randn(elements, device=DEV, dtype=dtype)) for _ in range(tensors)]
        for p in ps:
            p.grad = torch.randn_like(p)
        adam = torch.optim.AdamW(ps, **how)
        return host(adam.step, 5) | device(adam.step)

    def norm(tensors: int, elements: int, foreach: bool) -> dict[str, float]:
        ps = [nn.Parameter(torch.randn(elements, device=DEV)) for _ in range(tensors)]
        for p in ps:
            p.grad = torch.randn_like(p)

        def call() -> object:
            return nn.utils.clip_grad_norm_(ps, 1.0, foreach=foreach)

        return host(call, 5) | device(call)

    big, many = (2**22, 200), (64, 300)
    for kind, how in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("loop", {"foreach": False})):
        yield f"adamw {kind}, tiny tensors", lambda h=how: of(many[1], many[0], torch.float32, **h)  # type: ignore[misc]
        if CUDA:
            for dtype in (torch.float32, torch.bfloat16):
                yield f"adamw {kind}, 839 M elements {dtype}", lambda h=how, t=dtype: of(big[1], big[0], t, **h)  # type: ignore[misc]
    for foreach in (True, False):
        yield f"clip_grad_norm foreach={foreach}, tiny tensors", lambda f=foreach: norm(many[1], many[0], f)  # type: ignore[misc]
        if CUDA:
            yield f"clip_grad_norm foreach={foreach}, 839 M elements", lambda f=foreach: norm(big[1], big[0], f)  # type: ignore[misc]


def attention() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """SDPA with and without dropout, by backend, forward and forward with backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [
        (4, 16, 2048, 64, True),
        (2, 32, 4096, 128, True),
        (1, 32, 8192, 128, True),
        (16, 16, 512, 64, False),
        (8, 16, 1024, 128, True),
    ]
    for b, h, s, d, causal in shapes if CUDA else [(1, 2, 64, 16, True)]:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            for dropout in (0.0, 0.1):
                for backward in (False, True):

                    def run(b: int = b, h: int = h, s: int = s, d: int = d, c: bool = causal, e: Any = backend, p: float = dropout,
                            w: bool = backward) -> dict[str, float]:  # fmt: skip
                        q, k, v = (small(b, h, s, d, grad=w) for _ in range(3))
                        o = small(b, h, s, d)

                        def call() -> None:
                            with sdpa_kernel(e):
                                y = F.scaled_dot_product_attention(q, k, v, is_causal=c, dropout_p=p)
                            if w:
                                y.backward(o)
                                q.grad = k.grad = v.grad = None

                        return device(call, 0.25)

                    part = "both" if backward else "forward"
                    name = f"attention {backend.name} b{b} h{h} s{s} d{d} causal={causal} p={dropout} {part}"
                    yield name, run


def elementwise() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Losses, norms and dropout as frameworks run them, forward and backward."""
    n, v, d = (8192, 128256, 4096) if CUDA else (16, 64, 32)

    def loss(compiled: bool, upcast: bool) -> dict[str, float]:
        logits = torch.randn(n, v, device=DEV, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, v, (n,), device=DEV)

        def one(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x.float() if upcast else x, labels)

        fn = torch.compile(one) if compiled else one

        def call() -> None:
            fn(logits).backward()
            logits.grad = None

        return device(call)

    for compiled in (False, True) if CUDA else (False,):
        for upcast in (True, False):
            yield f"cross entropy {n} x {v} compiled={compiled} upcast={upcast}", lambda c=compiled, u=upcast: loss(c, u)  # type: ignore[misc]

    def both(make: Callable[[], nn.Module]) -> dict[str, float]:
        module = make().to(DEV, torch.bfloat16)
        x = torch.randn(n, d, device=DEV, dtype=torch.bfloat16, requires_grad=True)
        o = torch.randn_like(x)

        def call() -> None:
            module(x).backward(o)
            x.grad = None

        with torch.no_grad():
            forward = device(lambda: module(x), 0.2)["seconds"]
        return {"forward_s": forward, **device(call, 0.2)}

    yield f"dropout {n} x {d}", lambda: both(lambda: nn.Dropout(0.1))
    yield f"rms norm {n} x {d}", lambda: both(lambda: nn.RMSNorm(d))
    yield f"layer norm {n} x {d}", lambda: both(lambda: nn.LayerNorm(d))
    yield f"gelu {n} x {d}", lambda: both(nn.GELU)
    yield f"silu {n} x {d}", lambda: both(nn.SiLU)
    weight = torch.randn(d, device=DEV, dtype=torch.bfloat16, requires_grad=True)

    class Eager(nn.Module):
        def forward(self, x: Any) -> Any:
            z = x.float()
            z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)
            return weight * z.to(x.dtype)

    yield f"rms norm of transformers {n} x {d}", lambda: both(Eager)

    def embedding(rows: int) -> dict[str, float]:
        table = nn.Embedding(v, d, device=DEV, dtype=torch.bfloat16)
        ids = torch.randint(0, v, (rows,), device=DEV)
        o = torch.randn(rows, d, device=DEV, dtype=torch.bfloat16)

        def call() -> None:
            table(ids).backward(o)
            table.weight.grad = None

        return {"forward_s": device(lambda: table(ids), 0.2)["seconds"], **device(call, 0.3)}

    yield f"embedding of {n} rows", lambda: embedding(n)


def allocator() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """What cudaMalloc, cudaFree and the caching allocator cost."""
    if not CUDA:
        return

    def malloc(gib: float) -> dict[str, float]:
        torch.cuda.empty_cache()
        times, frees = [], []
        for _ in range(5):
            a = time.perf_counter()
            x = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=DEV)
            b = time.perf_counter()
            del x
            wait()
            c = time.perf_counter()
            torch.cuda.empty_cache()
            frees.append(time.perf_counter() - c)
            times.append(b - a)
        return {"malloc_s": statistics.median(times), "free_s": statistics.median(frees)}

    for gib in (0.02, 0.25, 1.0, 8.0):
        yield f"cudaMalloc of {gib} GiB", lambda g=gib: malloc(g)  # type: ignore[misc]

    def across(to: bool, pinned: bool) -> dict[str, float]:
        far = torch.empty(2**30, dtype=torch.uint8, pin_memory=pinned)
        near = torch.empty(2**30, dtype=torch.uint8, device=DEV)
        return device((lambda: near.copy_(far, non_blocking=True)) if to else (lambda: far.copy_(near, non_blocking=True)), 0.5)

    for pinned in (True, False):
        yield f"copy of 1 GiB to the device, pinned={pinned}", lambda p=pinned: across(True, p)  # type: ignore[misc]
        yield f"copy of 1 GiB to the host, pinned={pinned}", lambda p=pinned: across(False, p)  # type: ignore[misc]


def sharded() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """FSDP2 and DTensor on a fake group of 8: host time of a layer with nothing in it to compute."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh(DEV, (8,))

    def stack(shard: bool, layers: int = 40, linears: int = 7, reshard: bool = True) -> dict[str, float]:
        def layer() -> nn.Module:
            return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(linears)))

        model = nn.Sequential(*(layer() for _ in range(layers))).to(DEV)
        if shard:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for one in model:
                fully_shard(one, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        x = torch.randn(8, 64, device=DEV)
        return both_passes(lambda: model(x), layers)

    yield "layer of 7 linears", lambda: stack(False)
    yield "layer of 7 linears under fully_shard", lambda: stack(True)
    yield "layer of 7 linears under fully_shard, not resharded", lambda: stack(True, reshard=False)
    yield "layer of 1 linear", lambda: stack(False, linears=1)
    yield "layer of 1 linear under fully_shard", lambda: stack(True, linears=1)

    def parallel(tp: bool) -> dict[str, float]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        layers = 30
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)) for _ in range(layers))
        ).to(DEV)
        if tp:
            for one in model:
                parallelize_module(one, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        x = torch.randn(8, 64, device=DEV)
        return both_passes(lambda: model(x), layers)

    yield "pair of linears", lambda: parallel(False)
    yield "pair of linears, tensor parallel over 8", lambda: parallel(True)


def graphs() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """CUDA graphs."""
    if not CUDA:
        return

    def replay() -> dict[str, float]:
        x = torch.zeros(1, device=DEV)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x.add_(1.0)
        wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                x.add_(1.0)
        found = host(graph.replay, 5)
        return {name: value / 1000 for name, value in found.items()}

    yield "kernel of a CUDA graph", replay


def main() -> None:
    """Every case that the file does not have while there is time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=120.0)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    known = {json.loads(line)["case"] for line in given.out.read_text().splitlines()} if given.out.is_file() else set()
    end = time.monotonic() + given.limit
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    with given.out.open("a", encoding="utf-8") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        if "machine" not in known:
            keep({"case": "machine", "cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__,
                  "device": torch.cuda.get_device_name() if CUDA else "cpu"})  # fmt: skip
        for group in (eager, optimizers, sharded, graphs, elementwise, attention, allocator):
            for name, run in group():
                if name in known or time.monotonic() > end:
                    continue
                begin = time.monotonic()
                try:
                    found: dict[str, Any] = run()
                except Exception as error:  # one case must not end the others
                    found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
                keep({"case": name, **found, "wall_s": round(time.monotonic() - begin, 2)})
                if CUDA:
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
