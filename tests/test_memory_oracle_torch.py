"""torch as an independent oracle on small shapes: saved activations, states, FLOPs and bytes on the wire, exact or to 1 %."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode
from torch_llama import Collectives, Layer, LiveBytes, Llama, Shape, build, local_elements

from simpar.live.rank_parallel import per_op_contexts, stop, tensor_parallel
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout, recomputed_flops
from simpar.parallel.traffic import state_collectives
from simpar.parallel.work import Collective
from simpar.result.memory import static_state
from simpar.specs.scenario import Scenario, make_scenario

pytestmark = pytest.mark.torch
WORLD = 8
VERSION = "2026-02"
"""RMSNorm is one kernel, as in the torch under test and in the model (FusedNorm): torch 2.9 on; keys are not repeated any more, the
loss is not chunked yet."""
SHAPES = {"square": Shape(), "wide": Shape(512, 3, 8, 8, 1536, 2048), "grouped": Shape(256, 2, 16, 8, 768, 512)}


@pytest.fixture
def ranks() -> Iterator[None]:
    """A group of WORLD ranks of which this process is the first; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    stop()


def scenario(shape: Shape, tokens: int, batch: int = 1, framework: str = "torchtitan", **plan: Any) -> Scenario:
    """The layout that the torch model runs."""
    plan = {"zero_stage": 0, **plan}
    degree = plan.get("dp", WORLD // (plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)))
    return make_scenario({
        "name": "oracle", "model": shape.table(), "framework": framework, "framework_version": VERSION,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": plan,
        "training": {"sequence_length": tokens, "micro_batch_size": batch, "global_batch_size": batch * degree * plan.get("pp", 1)},
    })  # fmt: skip


def layout_of(found: Scenario) -> Layout:
    """Its layout, one stage per pipeline rank."""
    return Layout.of(found, found.plan.pp)


def layers_of(layout: Layout) -> list[LocalBlock]:
    """Blocks of transformer layers."""
    return [block for blocks in layout.stage_blocks for block in blocks if not block.outside_layers]


def kept_after_forward(model: Llama, x: Any, recompute: str) -> int:
    """Bytes that the layers of `model` leave alive for their backward, but for their last output."""
    live = LiveBytes()
    live.ignore(*model.parameters(), x)
    with live:
        for layer in model.layers.values():
            if recompute == "none":
                x = layer(x)
            elif recompute == "full":
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, context_fn=per_op_contexts)
        local = x.to_local() if hasattr(x, "to_local") else x
        # The first input was made outside, the last output is the input of what follows: one for the other.
        return live.bytes - local.untyped_storage().nbytes() + local.numel() * local.element_size()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_saved_activations_of_a_layer(shape: Shape, batch: int, recompute: str) -> None:
    model = build(shape, first=False)
    x = torch.zeros(batch, 128, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    expected = sum(b.saved_bytes for b in layers_of(layout_of(scenario(shape, 128, batch, recompute=recompute))))
    assert kept_after_forward(model, x, recompute) == pytest.approx(expected, rel=0.01)


class ChainedNorm(torch.nn.Module):
    """RMSNorm as transformers' models write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recompute", ["none", "full", "op"])
def test_saved_activations_of_a_layer_with_norms_in_chains(shape: Shape, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs again starts from the layer's 16-bit input, which the norms themselves do not keep."""
    monkeypatch.setattr("torch_llama.Norm", ChainedNorm)
    model = build(shape, first=False)
    x = torch.zeros(1, 128, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    plan: Any = {"granularity": "selective", "modules": ("op",)} if recompute == "op" else recompute
    blocks = layers_of(layout_of(scenario(shape, 128, framework="prime-rl", recompute=plan)))
    expected = sum(b.saved_bytes for b in blocks)
    if recompute == "op":
        expected -= sum(v for b in blocks for name, v in b.saved if name in ("attention/out", "attention/lse"))
    if recompute == "none":
        # A residual sum is no one's: the first input, which nothing keeps, stands for the last output.
        expected += 2 * 128 * shape.hidden
    live = kept_after_forward(model, x, recompute)
    assert live == pytest.approx(expected, rel=0.01)


class Adapted(torch.nn.Module):
    """A frozen linear with a low-rank pair beside it, which (wide) reads what was cast to fp32 and back, as peft's under FSDP."""

    def __init__(self, base: torch.nn.Linear, rank: int, *, wide: bool) -> None:
        super().__init__()
        self.base, self.wide = base.requires_grad_(False), wide
        self.a, self.b = (
            torch.nn.Linear(i, o, bias=False, dtype=torch.bfloat16)
            for i, o in ((base.in_features, rank), (rank, base.out_features))
        )

    def forward(self, x: Any) -> Any:
        read = x.float().to(x.dtype) if self.wide else x
        return self.base(x) + self.b(self.a(read)) * 2.0


@dataclass
class PeakBytes(LiveBytes):
    """The most of them since `most` was last set."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.bytes)
        return result


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("framework", ["modalities", "transformers"])
def test_most_that_a_layers_backward_holds(framework: str, adapted: bool, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager autograd: at the product of a gate, whose two gradients meet what both of its ops saved."""
    if framework == "transformers":
        monkeypatch.setattr("torch_llama.Norm", ChainedNorm)
    shape, tokens = Shape(256, 1, 8, 2, 1024, 512), 512
    layer = build(shape, first=False).layers["0"]
    if adapted:
        layer.requires_grad_(False)
        for name in ("wq", "wk", "wv", "wo"):
            setattr(layer.attention, name, Adapted(getattr(layer.attention, name), 4, wide=framework == "transformers"))
    x = torch.zeros(1, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    live = PeakBytes()
    live.ignore(*layer.parameters(), x)
    with live:
        y = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if recompute == "full" else layer(x)
        gradient, live.most = torch.zeros_like(y), 0
        y.backward(gradient)
    adapter = {"trainable": "lora", "lora_rank": 4} if adapted else {}
    found = make_scenario({
        "model": shape.table(), "framework": framework, "framework_version": "2024-10",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"zero_stage": 3, "recompute": recompute},
        "training": {"sequence_length": tokens, "global_batch_size": 8, **adapter},
    })  # fmt: skip
    (block,) = layers_of(layout_of(found))
    expected = block.saved_bytes + max(block.working, 0.0) + block.transient
    # Its input was made outside, its output is the caller's; norms in chains keep neither.
    outside = 0 if framework == "transformers" and recompute == "none" else x.nbytes
    assert live.most - y.nbytes == pytest.approx(expected - outside, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_saved_activations_under_selective_recomputation(shape: Shape) -> None:
    """Every second matmul is kept; attention is a stub here, not an op that the policy could keep, so its part is added."""
    model = build(shape, first=False)
    x = torch.zeros(1, 128, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    op = {"granularity": "selective", "modules": ("op",)}
    blocks = layers_of(layout_of(scenario(shape, 128, recompute=op)))
    attention = sum(v for b in blocks for name, v in b.saved if name in ("attention/out", "attention/lse"))
    expected = sum(b.saved_bytes for b in blocks) - attention
    assert kept_after_forward(model, x, "op") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("cp", [2, 4])
def test_saved_activations_under_context_parallelism(cp: int) -> None:
    """Everything but attention sees its part of the sequence; attention keeps its local queries, keys, values and output."""
    shape = SHAPES["grouped"]
    model = build(shape, first=False)
    x = torch.zeros(1, 512 // cp, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    expected = sum(b.saved_bytes for b in layers_of(layout_of(scenario(shape, 512, cp=cp))))
    assert kept_after_forward(model, x, "none") == pytest.approx(expected, rel=0.01)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_saved_activations_under_tensor_parallelism(shape: Shape, tp: int, sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))
    model = build(shape, first=False)
    tensor_parallel(model, mesh["tp"], sequence=sequence)
    x = torch.zeros(1, 256 // (tp if sequence else 1), shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    found = scenario(shape, 256, tp=tp, sequence_parallel=sequence)
    expected = sum(b.saved_bytes for b in layers_of(layout_of(found)))
    assert kept_after_forward(model, x, "none") == pytest.approx(expected, rel=0.01)


def states(layout: Layout, stage: int) -> tuple[int, int]:
    """(weights of a stage before data-parallel sharding, of it the norms', which tensor parallelism replicates)."""
    blocks = layout.stage_blocks[stage]
    return round(sum(b.dense_parameters for b in blocks)), len(blocks)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameters_of_a_rank_are_exact(shape: Shape, tp: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))
    model = build(shape)
    if tp > 1:
        tensor_parallel(model, mesh["tp"], sequence=True)
    whole, _ = states(layout_of(scenario(shape, 128, tp=tp, sequence_parallel=tp > 1)), 0)
    assert local_elements(model) == whole


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("pp", [2, 4])
def test_parameters_of_pipeline_stages_are_exact(pp: int) -> None:
    shape = SHAPES["square"]
    layout = layout_of(scenario(shape, 128, pp=pp))
    for stage in range(pp):
        model = build(shape, first=stage == 0, last=stage == pp - 1, layers=layout.stages[stage].count)
        assert local_elements(model) == states(layout, stage)[0]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fully_sharded_states_are_exact(shape: Shape) -> None:
    model = sharded(shape, init_device_mesh("cpu", (WORLD,)))
    layout = layout_of(scenario(shape, 128, zero_stage=3))
    assert local_elements(model) * WORLD == states(layout, 0)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, torch.zeros(1, 128, dtype=torch.long))
    optimizer.step()
    held = sum(v.to_local().numel() * 4 for s in optimizer.state.values() for k, v in s.items() if k in ("exp_avg", "exp_avg_sq"))
    state = layout.state_bytes
    assert held * WORLD == states(layout, 0)[0] * state.moments


def sharded(shape: Shape, mesh: DeviceMesh, wrap: Any = None, tensor: DeviceMesh | None = None) -> Llama:
    """FSDP2 with one group per layer, the embedding, and norm with output; fp32 shards, bf16 compute, fp32 reduction.

    Args:
        wrap: put around every layer first.
        tensor: split over these ranks first, with sequence parallelism.
    """
    model = build(shape, torch.float32)
    if tensor is not None:
        tensor_parallel(model, tensor, sequence=True)
    for name in list(model.layers):
        model.layers[name] = wrap(model.layers[name]) if wrap else model.layers[name]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model.embedding, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # type: ignore[list-item]
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tp", [1, 2])
def test_states_of_a_fully_sharded_pipeline_stage_are_exact(shape: Shape, tp: int) -> None:
    """Between micro-batches: gathered weights, unsharded fp32 gradients (of a split vocabulary whole), no shards beside them."""
    dp = 4 // tp
    mesh = init_device_mesh("cpu", (2, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    layout = layout_of(scenario(shape, 64, pp=2, dp=dp, tp=tp, sequence_parallel=tp > 1, zero_stage=3))
    model = build(shape, torch.float32, last=False, layers=layout.stages[0].count)
    if tp > 1:
        tensor_parallel(model, mesh["tp"], sequence=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers.values(), model.embedding, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)  # type: ignore[call-overload]
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model.set_reshard_after_forward(False)  # type: ignore[operator]
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    live = LiveBytes()
    live.ignore(*model.parameters())
    found = []
    with live:
        for _ in range(2):
            run(model, torch.zeros(1, 64, dtype=torch.long))
            found.append(live.bytes)
    state = dict(static_state(layout, [0]))
    assert found == [state["fsdp_buffers"] + state["gradients"]] * 2


def run(model: Any, tokens: Any) -> None:
    """Forward and backward."""
    out = model(tokens)
    out = out.to_local() if hasattr(out, "to_local") else out
    out.float().sum().backward()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bytes_of_fully_sharded_communication_are_exact(shape: Shape) -> None:
    model = sharded(shape, init_device_mesh("cpu", (WORLD,)))
    tokens = torch.zeros(1, 128, dtype=torch.long)
    run(model, tokens)
    with Collectives() as wire:
        run(model, tokens)
    layout = layout_of(scenario(shape, 128, zero_stage=3))
    head = len(layout.stage_blocks[0]) - 1
    reduced = sum(c.bytes for c in state_collectives(layout, Reduce(0, 0, head + 1)))
    assert wire.total("reduce_scatter") == reduced
    # Gathered before the forward and again before the backward, but for the head's group, which stays.
    forward = sum(c.bytes for c in state_collectives(layout, Gather(0, 0, head + 1)))
    again = sum(c.bytes for c in state_collectives(layout, Gather(0, 0, head)))
    embedding = sum(c.bytes for c in state_collectives(layout, Gather(0, 0, 1)))
    assert forward + again - embedding <= wire.total("all_gather") <= forward + again


def wire_bytes(ops: Any, name: str) -> float:
    """Bytes of the tensor-parallel collectives of one kind in a block's list."""
    works = [op.work for op in ops if isinstance(op.work, Collective) and op.work.dimension == "tp"]
    return sum(w.bytes for w in works if w.name == name)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_of_tensor_parallel_communication_are_exact(shape: Shape, tp: int, sequence: bool) -> None:
    """Per layer two all-reduces forward, or with sequence parallelism gathers and reduce-scatters both ways.

    Without it torch reduces the input gradient of every column matmul by itself, Megatron their sum: only the forward agrees.
    """
    mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))
    model = build(shape, first=False)
    tensor_parallel(model, mesh["tp"], sequence=sequence)
    x = torch.zeros(1, 256 // (tp if sequence else 1), shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    with CommDebugMode() as counts, Collectives() as wire:
        for layer in model.layers.values():
            x = layer(x)
        if sequence:
            x.sum().backward()
    blocks = layers_of(layout_of(scenario(shape, 256, tp=tp, sequence_parallel=sequence)))
    kinds = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    for kind in kinds:
        expected = sum(wire_bytes((*b.forward, *(b.backward if sequence else ())), kind) for b in blocks)
        assert wire.total(kind) == expected
    assert counts.get_total_counts() >= sum(wire.count(kind) for kind in kinds)


def score_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention as the two products it is, so that torch counts them."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_of_a_step_are_exact(shape: Shape, recompute: str) -> None:
    """torch counts the whole score matrix of causal attention; simpar's second figure does as well."""
    model = build(shape)
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.attention.kernel = score_attention
    tokens = torch.zeros(1, 128, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    # torch stops recomputing once all saved tensors are back, before the last matmul; Megatron runs the whole layer.
    with counter, set_checkpoint_early_stop(False):
        x = model.embedding(tokens)  # type: ignore[misc]
        for layer in model.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if recompute == "full" else layer(x)
        model.output(model.norm(x)).sum().backward()  # type: ignore[misc]
    layout = layout_of(scenario(shape, 128, dp=WORLD, recompute=recompute))
    expected = layout.model_flops + layout.attention_model_flops
    if recompute == "full":
        # The forward of the layers once more; half of its causal attention is in `recomputed_flops`.
        expected += recomputed_flops(layout) + layout.attention_model_flops / 3
    assert counter.get_total_flops() * WORLD == expected
