"""Measure one rank of a planned layout on this machine: `python -m simpar.live.rank_worker --plan P.json --out M.json`.

Needs torch, numpy and the standard library. On a GPU the tensors are real, collectives do nothing (torch's fake process group) and
memory, time and kernels are measured; elsewhere tensors are fake and memory, FLOPs and bytes on the wire are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from simpar.live.device import Device

FORMAT: Final = 1


class WorkerError(Exception):
    """What the user can change; printed as one line."""


def read_plan(path: Path) -> dict[str, Any]:
    """The plan at `path`.

    Raises:
        WorkerError: missing, not JSON, or of another format.
    """
    try:
        plan = json.loads(path.read_text())
    except FileNotFoundError:
        raise WorkerError(f"{path}: no such file; simpar validate rank --scenario S --bundle DIR writes plans") from None
    except (OSError, ValueError) as error:
        raise WorkerError(f"{path}: not a plan: {error}") from None
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise WorkerError(f"{path}: not a plan of format {FORMAT}; write it anew with this simpar")
    return plan


Keep = Callable[[dict[str, Any]], None]


def measure(plan: dict[str, Any], device: str, *, steps: int = 5, trace: str = "", keep: Keep | None = None) -> dict[str, Any]:
    """Measure one rank.

    Args:
        device: "cuda" (real) or "fake".
        steps: measured steps on a GPU.
        trace: write a profiler trace of further steps there; on fake tensors the host's ops alone.
        keep: given the record of a GPU before the profiler starts, so that nothing is lost if it fails.

    Raises:
        WorkerError: no GPU, no memory, a torch that cannot do it.
    """
    try:
        import torch
    except ImportError:
        raise WorkerError("torch is not installed; pip install torch") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise WorkerError("no GPU is visible to torch; use --device fake for memory, FLOPs and bytes on the wire")
    warnings.filterwarnings("ignore")
    from simpar.live import rank_parallel

    plan = dict(plan)
    begin = time.perf_counter()
    about = {"format": FORMAT, "plan": json.loads(json.dumps(plan)), "mode": device, "torch": torch.__version__}
    mesh = rank_parallel.start(plan, "cuda" if device == "cuda" else "cpu")
    try:
        if device == "cuda":
            from simpar.live.rank_gpu import on_gpu

            held = (lambda found: keep(about | {"wall_s": time.perf_counter() - begin} | found)) if keep else None
            found = on_gpu(plan, mesh, Device("cuda"), steps=steps, trace=trace, keep=held)
        else:
            found = _on_fakes(plan, mesh, trace)
    except torch.OutOfMemoryError as error:
        raise WorkerError(f"out of memory on the device: {str(error).splitlines()[0]}") from None
    finally:
        rank_parallel.stop()
    return about | {"wall_s": time.perf_counter() - begin} | found


def build_stages(plan: dict[str, Any], mesh: Any, device: str, *, whole: bool) -> list[Any]:
    """Parallel stages in fp32 (FSDP computes in bf16); built without storage first where `whole`."""
    import torch

    from simpar.live.rank_model import Stage, rotation
    from simpar.live.rank_parallel import parallel

    stages = []
    for described in plan["stages"]:
        with torch.device("meta" if whole else device):
            stage = Stage(plan, described)
        parallel(stage, mesh, plan)
        if whole:
            stage.to_empty(device=device)
            with torch.no_grad():
                for parameter in stage.parameters():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.normal_(0.0, 0.02)
        stage.turns = rotation(stage.tokens, stage.width, device)
        stages.append(stage)
    return stages


def states_of(stages: list[Any], optimizers: list[Any]) -> dict[str, float]:
    """Elements and bytes at rest after a step.

    `parameters` and `state_bytes` are the mean over the ranks of the shards, `own_parameters` this rank's; torch pads the first
    dimension of uneven shards on the wire: `padding` is the share of elements that adds.
    """
    own = mean = padded = 0.0
    width = 0
    for parameter in (p for s in stages for p in s.parameters()):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        share, rows = _share(parameter)
        own += local.numel()
        mean += parameter.numel() * share
        padded += parameter.numel() / parameter.shape[0] * share / rows * math.ceil(parameter.shape[0] * rows)
        width = max(width, parameter.element_size())
    moments = 0
    for state in (held for optimizer in optimizers for held in optimizer.state.values()):
        local = [v.to_local() if hasattr(v, "to_local") else v for v in state.values() if hasattr(v, "numel") and v.dim() > 0]
        moments += sum(v.numel() * v.element_size() for v in local)
    return {
        "parameters": round(mean), "own_parameters": int(own),
        "state_bytes": round(mean * (width + (moments / own if own else 0.0))),
        "padding": padded / mean - 1.0 if mean else 0.0,
    }  # fmt: skip


def _share(parameter: Any) -> tuple[float, float]:
    """(share of a parameter that a rank holds on the mean, share of its first dimension)."""
    share = rows = 1.0
    for size, placement in zip(getattr(parameter, "device_mesh", _NoMesh).shape, getattr(parameter, "placements", ()), strict=True):
        if hasattr(placement, "dim"):  # Shard, and the strided one of a dimension that two meshes share
            share /= size
            rows /= size if placement.dim == 0 else 1
    return share, rows


class _NoMesh:
    """Of a plain tensor."""

    shape: tuple[int, ...] = ()


# -- without a GPU -----------------------------------------------------------------------------------------------------


def _on_fakes(plan: dict[str, Any], mesh: Any, trace: str = "") -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simpar.live.rank_meter import Meter
    from simpar.live.rank_steps import Job

    with _unfaked(), FakeTensorMode(allow_non_fake_inputs=True):
        blocks = _blocks(plan, mesh, "cpu")
        stages = build_stages(plan, mesh, "cpu", whole=False)
        job = Job(plan, mesh, stages, "cpu", fused=False)
        job.make_states()
        meter = Meter()
        meter.follow(stages, job.followed, [o.state for o in job.optimizers])
        with meter:
            job.step()
        if trace:
            # The host's ops alone: what reads a trace is tried on it.
            from simpar.live.rank_gpu import traced

            traced(job, Device("cpu"), trace)
        wire = [
            {"collective": kind, "ranks": ranks, "element_bytes": width, "calls": calls, "bytes": total}
            for (kind, ranks, width), (calls, total) in sorted(meter.wire.items())
        ]
        return {
            "device": "fake tensors", "states": states_of(stages, job.optimizers), "blocks": blocks,
            "allocated_bytes": meter.peak, "reserved_bytes": None, "step_s": [], "flops": dict(meter.flops), "wire": wire,
            "products": [[*key, calls] for key, calls in meter.products.items()], "kernels": [],
        }  # fmt: skip


@contextmanager
def _unfaked() -> Iterator[None]:
    """DTensor works out shapes outside of the fake mode, so that global shapes are not counted as this rank's memory."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    wanted = [(ShardingPropagator, "_propagate_tensor_meta_non_cached")]
    wanted += [(DeviceMesh, name) for name in ("__init__", "_concatenate", "_flatten") if name in DeviceMesh.__dict__]
    before = [(owner, name, owner.__dict__[name]) for owner, name in wanted]
    for owner, name, raw in before:
        setattr(owner, name, _outside(raw, unset_fake_temporarily))
    try:
        yield
    finally:
        for owner, name, raw in before:
            setattr(owner, name, raw)


def _outside(raw: Any, context: Any) -> Any:
    """A method that runs inside `context`."""
    inside = raw.__func__ if isinstance(raw, staticmethod) else raw

    def outside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inside(*args, **kwargs)

    return staticmethod(outside) if isinstance(raw, staticmethod) else outside


def _blocks(plan: dict[str, Any], mesh: Any, device: str) -> list[dict[str, Any]]:
    """Bytes that one layer of each kind keeps from forward to backward, and its FLOPs, in 16 bits and without FSDP."""
    import torch

    from simpar.live.rank_meter import Meter
    from simpar.live.rank_model import Stage, rotation
    from simpar.live.rank_parallel import recomputed, tensor_parallel

    kinds = sorted({moe for stage in plan["stages"] for moe in stage["moe"]})
    found = []
    for moe in kinds:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                stage = Stage(plan, {"embedding": False, "head": False, "moe": [moe]})
        finally:
            torch.set_default_dtype(torch.float32)
        if plan["world"]["tp"] > 1:
            tensor_parallel(stage, mesh["tp"], sequence=plan["sequence_parallel"])
        recomputed(stage, plan["recompute"])
        turns = rotation(stage.tokens, stage.width, device)
        layer = next(iter(stage.layers.values()))
        local = stage.tokens // (plan["world"]["tp"] if plan["sequence_parallel"] else 1)
        x = torch.zeros(plan["micro_batch_size"], local, plan["model"]["hidden_size"], dtype=torch.bfloat16, device=device,
                        requires_grad=True)  # fmt: skip
        meter = Meter()
        meter.ignore(stage, turns, x)
        with meter:
            out = layer(x, turns)
            held = out.to_local() if hasattr(out, "to_local") else out
            # The input was made outside, the output is the input of what follows: one for the other.
            kept = meter.current - _rounded(held.untyped_storage().nbytes()) + _rounded(x.untyped_storage().nbytes())
            flops = dict(meter.flops)
            out.backward(torch.zeros_like(out))
        found.append({"name": "moe_layer" if moe else "layer", "saved_bytes": kept, "forward_flops": flops,
                      "flops": dict(meter.flops)})  # fmt: skip
        del out, held, layer, stage, x, meter
    return found


def _rounded(amount: int) -> int:
    from simpar.live.rank_meter import ROUND

    return -(-amount // ROUND) * ROUND


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 measured, 2 bad input or not possible here."""
    parser = argparse.ArgumentParser(prog="python -m simpar.live.rank_worker", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="as written by simpar validate rank --bundle")
    parser.add_argument("--out", type=Path, required=True, help="measured.json")
    parser.add_argument("--device", choices=("auto", "cuda", "fake"), default="auto")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", default="", help="write a profiler trace here; on the fake device of the host's ops")
    options = parser.parse_args(arguments)
    try:
        plan = read_plan(options.plan)
        if plan["expandable_segments"]:
            # Read when torch first allocates on a GPU; both names, as they changed.
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
                os.environ.setdefault(name, "expandable_segments:True")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        keep = partial(write_record, options.out)
        keep(measure(plan, _device(options.device), steps=options.steps, trace=options.trace, keep=keep))
    except (WorkerError, OSError) as error:
        sys.stderr.write(f"rank_worker: {error}\n")
        return 2
    return 0


def write_record(path: Path, found: dict[str, Any]) -> None:
    """Replace the file, whole or not at all, and have it on the disk."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(found, indent=1))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _device(name: str) -> str:
    if name != "auto":
        return name
    try:
        import torch
    except ImportError:
        raise WorkerError("torch is not installed; pip install torch") from None
    return "cuda" if torch.cuda.is_available() else "fake"


if __name__ == "__main__":
    sys.exit(main())
