"""A stage made parallel the way torchtitan does it: DTensor tensor parallelism, checkpointing, FSDP2; under the fake process group.

The fake group is of the whole job, so every shard has its real size; its collectives do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from simpar.live.rank_model import Experts, Plan, Stage


def start(plan: Plan, device: str) -> DeviceMesh:
    """The job's group and mesh (pp, replica, shard, tp), and in `plan["groups"]` the groups that the model itself needs."""
    world, at = plan["world"], plan["coordinates"]
    sizes = (world["pp"], world["replicas"], world["shard"], world["tp"])
    rank = ((at["pp"] * sizes[1] + at["replica"]) * sizes[2] + at["shard"]) * sizes[3] + at["tp"]
    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes[0] * sizes[1] * sizes[2] * sizes[3])
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("pp", "replica", "shard", "tp"))
    plan["groups"] = {}
    data = sizes[1] * sizes[2]
    begin = at["pp"] * data * sizes[3]
    inner = at["replica"] * sizes[2] + at["shard"]
    for name in ("cp", "ep"):
        if world[name] > 1:
            # Consecutive ranks of one tensor coordinate.
            first = inner // world[name] * world[name]
            members = [begin + (first + i) * sizes[3] + at["tp"] for i in range(world[name])]
            plan["groups"][name] = dist.new_group(members, use_local_synchronization=True)
    plan["expert_mesh"] = None
    if world["ep"] > 1:
        members = [begin + i for i in range(inner % world["ep"], data, world["ep"])]
        plan["expert_mesh"] = DeviceMesh(device, members, mesh_dim_names=("expert_shard",))
    return mesh


def stop() -> None:
    """End the job's group."""
    dist.destroy_process_group()
    forget_meshes()


def forget_meshes() -> None:
    """Have DTensor forget the meshes of former jobs: an equal mesh of another job has other groups."""
    from torch.distributed.tensor import _redistribute, debug

    for owner, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "_gen_transform_infos")):
        found = getattr(owner, name, None)
        clear = getattr(found, "cache_clear", found)
        if clear is not None:
            clear()


def tensor_parallel(model: Stage, mesh: Any, *, sequence: bool) -> None:
    """Column then row, with or without sequence parallelism; logits stay split."""
    residual = Shard(1) if sequence else Replicate()
    top: dict[str, Any] = {}
    if model.embedding is not None:
        top["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
    if model.output is not None:
        top |= {"norm": SequenceParallel()} if sequence else {}
        top["output"] = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, top)
    for layer in model.layers.values():
        columns = [f"attention.{n}" for n in ("wq", "wk", "wv")] + ["feed_forward.w1"]
        columns += ["feed_forward.w3"] if hasattr(layer.feed_forward, "w3") else []
        layouts: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        layouts |= {n: RowwiseParallel(output_layouts=residual) for n in ("attention.wo", "feed_forward.w2")}
        if sequence:
            layouts |= {
                "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }  # fmt: skip
        parallelize_module(layer, mesh, layouts)


def per_op_contexts() -> Any:
    """torchtitan's per-op selective checkpointing: attention, reduce-scatters and every second matmul are kept."""
    seen = {True: 0, False: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(func)
        if func is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        else:
            keep = "reduce_scatter" in name or ("attention" in name and "backward" not in name)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recomputed(model: Stage, recompute: dict[str, Any]) -> None:
    """Layers (or attention alone) put under checkpointing."""
    kind, modules = recompute["granularity"], recompute["modules"]
    count = recompute["num_layers"]
    for index, name in enumerate(list(model.layers)):
        layer = model.layers[name]
        if kind == "full" and (count is None or index < count):
            model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False, early_stop=False)
        elif kind == "selective" and "op" in modules:
            model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False, early_stop=False, context_fn=per_op_contexts)
        elif kind == "selective":
            layer.attention.core = checkpoint_wrapper(layer.attention.core, preserve_rng_state=False, early_stop=False)


def inner(layer: Any) -> Any:
    """A layer without its checkpoint wrapper."""
    return getattr(layer, "_checkpoint_wrapped_module", layer)


def fully_sharded(model: Stage, mesh: Any, plan: Plan) -> None:
    """One FSDP2 group per layer, the embedding, and norm with output; experts over the ranks that hold the same ones."""
    reduce = {"fp32": torch.float32, "bf16": torch.bfloat16}[plan["reduce_dtype"]]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    data = mesh["replica", "shard"] if plan["world"]["replicas"] > 1 else mesh["shard"]
    reshard = bool(plan["reshard_after_forward"]) and plan["world"]["pp"] == 1
    shared = {"mesh": data, "mp_policy": policy}
    for layer in model.layers.values():
        experts = inner(layer).feed_forward
        if isinstance(experts, Experts) and plan["expert_mesh"] is not None:
            fully_shard(experts.experts, mesh=plan["expert_mesh"], mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(layer, reshard_after_forward=reshard, **shared)
    if model.embedding is not None:
        fully_shard(model.embedding, reshard_after_forward=reshard, **shared)
    if model.norm is not None:
        fully_shard([model.norm, model.output], reshard_after_forward=False, **shared)
    fully_shard(model, reshard_after_forward=reshard, **shared)


def parallel(model: Stage, mesh: Any, plan: Plan) -> Stage:
    """All three, in torchtitan's order."""
    if plan["world"]["tp"] > 1:
        tensor_parallel(model, mesh["tp"], sequence=plan["sequence_parallel"])
    recomputed(model, plan["recompute"])
    fully_sharded(model, mesh, plan)
    return model
