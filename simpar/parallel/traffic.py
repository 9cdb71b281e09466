"""What data and pipeline parallelism put on the wire, as collectives: the one place that prices and contention read."""

from __future__ import annotations

from collections.abc import Sequence

from simpar.parallel.beside import op_of
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import BlockOp, Gather, Reduce, Send
from simpar.parallel.layout import Layout
from simpar.parallel.modules import linears, matrices, module_experts
from simpar.parallel.work import Collective, Dimension, ExpertExchange, LocalOp


def calls_of(layout: Layout, key: object) -> tuple[Collective, ...]:
    """Collectives that a price key stands for, in the order they run; none for compute."""
    if isinstance(key, Send):
        return send_collectives(layout, key)
    if isinstance(key, Gather | Reduce):
        return state_collectives(layout, key)
    return calls_in(op_of(layout, key)) if isinstance(key, BlockOp) else ()


def calls_in(op: LocalOp) -> tuple[Collective, ...]:
    """The collective that an op inside a block is; none for compute."""
    if isinstance(op.work, ExpertExchange):
        return (Collective("all_to_all", op.work.bytes, "ep"),)
    return (op.work,) if isinstance(op.work, Collective) else ()


def state_collectives(layout: Layout, key: Gather | Reduce) -> tuple[Collective, ...]:
    """Collectives of one gather or gradient reduction, dense weights then experts', in the order they run.

    ZeRO 0 all-reduces gradients; sharded states reduce-scatter them (2.. 4 bytes per element) and gather parameters; a hybrid
    (HSDP) does both inside the shard group and all-reduces its piece over the replicas.
    """
    # Frozen weights have no gradient to reduce, and only full sharding gathers them.
    trained = isinstance(key, Reduce) or layout.plan.zero_stage < 3
    dense, experts = layout.block_parameters(key.stage, key.first, key.last, trainable=trained)
    if not trained:
        for block in layout.stage_blocks[key.stage][key.first : key.last]:
            dense, experts = dense + block.frozen_parameters - block.frozen_experts, experts + block.frozen_experts
    found: list[Collective] = []
    for parameters, expert in ((dense, False), (experts, True)):
        if parameters > 0:
            found += _state(layout, key, parameters, expert=expert)
    return tuple(c for c in found if layout.placement(c.dimension).size > 1)


def _state(layout: Layout, key: Gather | Reduce, parameters: float, *, expert: bool) -> list[Collective]:
    if expert and not layout.plan.shard_experts:
        return []  # costs/update_price.py averages their gradients
    state = layout.state_bytes
    hybrid = layout.shard_ranks < layout.data_ranks and layout.plan.zero_stage > 0
    plain: Dimension = "edp" if expert else "dp"
    shard: Dimension = "expert_shard" if expert else "shard"
    replica: Dimension = "expert_replica" if expert else "replica"
    group = shard if hybrid else plain
    if isinstance(key, Gather):
        if layout.plan.zero_stage in (1, 2) and layout.framework.data.broadcasts_weights:
            # Whole tensors, dealt to the ranks: as many broadcasts, one after the other, as ranks have any.
            owners = max(1.0, min(layout.placement(group).size, parameters / tensor_parameters(layout)))
            return [Collective("broadcast", parameters * state.gather / owners, group, owners)]
        calls = _module_gathers(layout, key, expert=expert)
        return [Collective("all_gather", parameters * state.gather / calls, group, calls)]
    amount = parameters * state.reduce
    if layout.plan.zero_stage == 0 or layout.framework.data.all_reduces_whole(layout.plan.zero_stage):
        calls = _buckets(layout, parameters)
        return [Collective("all_reduce", amount / calls, plain, calls)]
    found = [Collective("reduce_scatter", amount, group)]
    if hybrid:
        found.append(Collective("all_reduce", amount / layout.placement(shard).size, replica))
    return found


def _module_gathers(layout: Layout, key: Gather, *, expert: bool) -> float:
    """All-gathers that the weights of these blocks take: one, or one for each module under ZeRO-3. A fetch of a module gathers what
    was not fetched ahead, and then ahead until a bucket is full or as many weights are live as may be: where a model has more, as
    many as the module before gave back (DeepSpeed partitioned_param_coordinator.py, fetch_sub_module)."""
    if layout.plan.zero_stage != 3 or not layout.framework.data.fsdp_module_gathers:
        return 1.0
    layers = [block.layer for block in layout.stage_blocks[key.stage][key.first : key.last]]
    if layout.framework.host.fsdp_rank_lists and not expert:  # of Megatron-LM's modules
        return float(max(sum(matrices(layer) - linears(layer)[True] for layer in layers), 1))
    return float(max(sum(linears(layer, module_experts(layout))[expert] for layer in layers), 1))


def stays_gathered(layout: Layout, blocks: Sequence[LocalBlock]) -> list[bool]:
    """Which of a stage's blocks keep the weights that their forward gathered for their backward: all, where a plan says so, else
    those with few weights to pass in between, the last one among them."""
    if not layout.plan.reshard_after_forward:
        return [True] * len(blocks)
    found, passed = [True] * len(blocks), 0.0
    for index in range(len(blocks) - 1, 0, -1):
        # Forward and backward of the blocks behind, with another forward of those that are recomputed.
        passed += blocks[index].gathered_parameters * (3.0 if blocks[index].working > 0.0 else 2.0)
        found[index - 1] = passed < layout.framework.data.fsdp_reuse_weights
    return found


def tensor_parameters(layout: Layout) -> float:
    """Mean weights of one parameter tensor of the model on one rank; a tied matrix beside its embedding counts once."""
    network = layout.network
    blocks = [b for b in (network.embedding, *network.layers, network.head) if b is not None]
    local = [layout.split(block, layout.options) for block in blocks]
    tensors = sum(bool(node.parameters) for block in blocks for node in block.nodes)
    weights = sum(b.dense_parameters + b.expert_parameters for b in local)
    if network.tied and layout.stages[-1].shares:
        weights, tensors = weights - layout.tied_extra, tensors - 1
    return weights / max(tensors, 1)


def _buckets(layout: Layout, parameters: float) -> float:
    """All-reduces that these weights' gradients take: one, or those of DistributedDataParallel's buckets.

    A bucket is closed by the tensor that fills it (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size), so
    that it holds half a tensor more than its cap on average.
    """
    width = layout.state_bytes.bucket
    if not width:
        return 1.0
    cap = layout.framework.bucket_elements(layout.data_ranks, width)
    return max(parameters / (cap + tensor_parameters(layout) / 2.0), 1.0)


def send_collectives(layout: Layout, key: Send) -> tuple[Collective, ...]:
    """A pipeline send, and the gather of its slices where every tensor rank sent one (Narayanan et al. 2021)."""
    amount = layout.entering_bytes(max(key.from_stage, key.to_stage))
    sliced = layout.framework.pipeline.tp_scatter_gather_p2p and not layout.degrees.sequence_parallel and layout.plan.tp > 1
    if sliced:
        return (Collective("send_recv", amount / layout.plan.tp, "pp", pair=key.pair), Collective("all_gather", amount, "tp"))
    return (Collective("send_recv", amount, "pp", pair=key.pair),)
