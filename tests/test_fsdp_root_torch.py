"""What torch's FSDP holds beside a layer's own group: the root's weights and gradients, the inputs of frozen layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest

from simpar.parallel.traffic import stays_gathered
from simpar.result.gathers import Gathers, bucket_elements, head_gradient_bytes, held_inputs, root_weights
from simpar.searching.blocks import Gathered
from simpar.searching.stages import _gathers
from simpar.specs.scenario import make_scenario
from simpar.step import prepare, simulate

torch = pytest.importorskip("torch")

HIDDEN, WORDS, TOKENS, LAYERS = 32, 2048, 1024, 4


@pytest.fixture
def ranks() -> Iterator[None]:
    """A process group of two whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        yield
        torch.distributed.destroy_process_group()


def _tracker(least: int) -> Any:
    """A mode that records the live bytes of storages of `least` bytes and more after every operation."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, Any] = {}
            self.bytes: list[int] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in tree_leaves((out, args)):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= least:
                    storage = tensor.untyped_storage()
                    self.known.setdefault(storage._cdata, StorageWeakRef(storage))
            total = 0
            for name, reference in list(self.known.items()):
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is None:
                    del self.known[name]
                else:
                    total += storage.nbytes()
            self.bytes.append(total)
            return out

    return Live()


def _layer(adapted: bool) -> Any:
    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
            if adapted:
                self.base.weight.requires_grad_(False)
                self.down, self.up = torch.nn.Linear(HIDDEN, 2, bias=False), torch.nn.Linear(2, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            return x + torch.tanh(self.base(x) + (self.up(self.down(x)) if adapted else 0.0))

    return Layer()


def _wrapped(module: Any, adapted: bool) -> Any:
    """FSDP1 with a unit for each layer and, as PEFT's policy has it, for each trained matrix of an adapter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def policy(module: Any, recurse: bool, nonwrapped_numel: int = 0) -> bool:
        leaf = not list(module.children()) and adapted and module.weight.requires_grad
        return recurse or hasattr(module, "base") or leaf

    return FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=torch.device("cpu"))


_JOB: dict[str, Any] = {
    "model": "llama3.1-8b",
    "framework": "transformers",
    "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1},
    "plan": {"zero_stage": 3, "recompute": "full"},
    "training": {"sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 8},
}


def scenario(version: str, **training: Any) -> Any:
    return make_scenario({**_JOB, "framework_version": version, "training": {**_JOB["training"], **training}})


@pytest.mark.parametrize(("adapted", "reentrant", "more"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_frozen_layers_hold_their_inputs_and_gradients(ranks: None, adapted: bool, reentrant: bool, more: int) -> None:
    """Copies of its input that a checkpointed layer adds to the worst of a backward, beyond the one that is its checkpoint."""
    from torch.utils.checkpoint import checkpoint

    worst = []
    for count in (LAYERS, 2 * LAYERS):
        layers: Any = torch.nn.ModuleList([_layer(adapted) for _ in range(count)])
        layers.forward = partial(reduce, lambda y, layer: checkpoint(layer, y, use_reentrant=reentrant), layers)
        model = _wrapped(layers, adapted)
        for _ in range(2):
            x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
            with _tracker(4 * TOKENS * HIDDEN) as live:
                y = model(x).sum()
                forwards = len(live.bytes)
                y.backward()
        worst.append(round(max(live.bytes[forwards:]) / (4 * TOKENS * HIDDEN)))
    assert worst[1] - worst[0] == (1 + more) * LAYERS

    priced = prepare(scenario("2024-11" if reentrant else "2026-06", **({"trainable": "lora"} if adapted else {}))).layout
    held = sum(held_inputs(priced, block) for block in priced.stage_blocks[0])
    assert held == more * sum(b.saved_bytes for b in priced.stage_blocks[0] if not b.outside_layers)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_the_root_stays_gathered_and_reduces_last(ranks: None, kind: str) -> None:
    """Embedding and head without a group of their own, in tables: both gathered throughout, the head's gradient from the backward's
    begin, the embedding's and the copy of both that is reduced at its end."""
    from torch.distributed.fsdp import fully_shard

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = torch.nn.Embedding(WORDS, HIDDEN), _layer(adapted=False)
            self.head = torch.nn.Linear(HIDDEN, WORDS, bias=False)

        def forward(self, tokens: Any) -> Any:
            middle = self.layer(self.embedding(tokens))
            seen.append(len(live.bytes))
            middle.register_hook(lambda _: seen.append(len(live.bytes)))
            return self.head(middle)

    table = 4 * WORDS * HIDDEN
    model: Any = Model()
    if kind == "fsdp1":
        model = _wrapped(model, adapted=False)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    for _ in range(2):
        seen: list[int] = []
        with _tracker(table) as live:
            model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        model.zero_grad()
    rests = 1.0 if kind == "fsdp1" else 0.0  # this rank's half of both weights, where it is one tensor
    found = [live.bytes[seen[0] - 1] / table, live.bytes[seen[1] - 1] / table, max(live.bytes) / table]
    assert [round(f - rests) for f in found[:2]] == [2, 3]
    assert found[2] - rests >= (5.5 if kind == "fsdp1" else 3.5)  # FSDP2 lets the weights go first

    layout = prepare(scenario("2026-06")).layout
    blocks = layout.stage_blocks[0]
    gathers, words = Gathers.of(layout, blocks), 2.0 * blocks[0].dense_parameters
    layers = 2.0 * blocks[1].dense_parameters
    assert gathers.forward[0] == pytest.approx(2 * words + layers, rel=1e-3)
    assert gathers.begin[-2] == pytest.approx(3 * words + 2 * layers, rel=1e-3)
    assert gathers.end[0] == pytest.approx(2 * words + 2 * words + 2 * words, rel=1e-3)


@pytest.mark.parametrize(
    ("framework", "version", "model", "holds"),
    [
        ("torchtitan", "2025-07", "llama3.1-8b", True),
        ("torchtitan", "2025-08", "llama3.1-8b", False),
        ("torchtitan", "2025-12", "llama3.2-1b", True),
        ("prime-rl", "2026-01", "llama3.2-1b", True),
        ("prime-rl", "2026-01", "llama3.1-8b", False),
        ("torchtune", "2026-01", "llama3.1-8b", True),
    ],
)
def test_the_root_holds_the_ends_where_no_group_of_their_own_does(framework: str, version: str, model: str, holds: bool) -> None:
    """A layer's forward holds the gathered embedding and head as well (shared ones once), or its own group and the next."""
    fields = {"model": model, "framework": framework, "framework_version": version}
    layout = prepare(make_scenario({**_JOB, **fields})).layout
    blocks = layout.stage_blocks[0]
    ends = 2.0 * (blocks[0].dense_parameters + blocks[-1].dense_parameters)
    assert Gathers.of(layout, blocks).forward[1] == pytest.approx(holds * ends + 4.0 * blocks[1].dense_parameters, rel=1e-6)


def test_adapted_runs_peak_at_the_end_of_their_backward() -> None:
    """Under reentrant checkpointing the peak grows by the gradients of all layers' inputs."""
    linear = {"trainable": "lora", "cross_entropy": "linear"}
    before, after = (simulate(scenario(v, **linear)).worst_rank for v in ("2025-12", "2026-02"))
    layers = 31 * 8 * 4096 * 4096 * 2.0
    assert 0.9 * layers < before.allocated_bytes - after.allocated_bytes < 1.1 * layers
    assert before.reserved_bytes - after.reserved_bytes > 0.8 * layers


def test_the_head_of_a_loss_by_pieces_adds_up_what_is_reduced(ranks: None) -> None:
    """FSDP2 without reductions turns a piece's 16-bit gradient into the dtype of the reduction, and adds the next ones to it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    head: Any = torch.nn.Linear(HIDDEN, WORDS, bias=False)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    head.set_requires_gradient_sync(False)
    for _ in range(2):
        head(torch.zeros(4, HIDDEN)).sum().backward()
    (parameter,) = head._get_fsdp_state()._fsdp_param_group.fsdp_params
    summed = parameter.unsharded_accumulated_grad
    assert (summed.numel(), summed.dtype, parameter.unsharded_param.grad) == (HIDDEN * WORDS, torch.float32, None)

    found = []
    for version in ("2026-02", "2026-03"):  # whole logits, then a loss by pieces
        layout = prepare(make_scenario({**_JOB, "framework": "torchtitan", "framework_version": version})).layout
        blocks = layout.stage_blocks[0]
        found.append(Gathers.of(layout, blocks).end[-1] / blocks[-1].dense_parameters)
    assert found[1] - found[0] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    ("framework", "training"),
    [
        ("transformers", {}), ("transformers", {"trainable": "lora"}), ("torchtitan", {"cross_entropy": "chunked"}),
        ("deepspeed", {}),
    ],
)  # fmt: skip
def test_the_search_gathers_the_same(framework: str, training: dict[str, Any]) -> None:
    job = {**_JOB, "framework": framework, "framework_version": "2026-06"}
    if framework == "deepspeed":
        job["model"] = "llama2-7b"  # whose head is small: the last layers' weights come again within 1e9 weights
    layout = prepare(scenario("2026-06", **training) if framework == "transformers" else make_scenario(job)).layout
    blocks = layout.stage_blocks[0]
    assert (sum(stays_gathered(layout, blocks)) > 1) is (framework == "deepspeed")
    expected = Gathers.of(layout, blocks)
    held = np.array([[b.dense_parameters + b.expert_parameters for b in blocks]])
    trained, root = np.array([[sum(layout.trained(b)) for b in blocks]]), np.array([root_weights(layout, blocks)])
    head, reuse = head_gradient_bytes(layout), layout.framework.data.fsdp_reuse_weights
    bucket = bucket_elements(layout)
    assert (bucket > 0.0) is (framework == "deepspeed")
    gathered = Gathered(layout.state_bytes.gather, layout.state_bytes.reduce, 1, head=head, reuse=reuse, bucket=bucket)
    passes = held * np.where(np.array([[b.working for b in blocks]]) > 0.0, 3.0, 2.0)
    found = _gathers(held, trained, root, np.array([True]), passes, gathered)
    for one, name in zip(found, ("forward", "begin", "end"), strict=True):
        assert one[0] == pytest.approx(getattr(expected, name), rel=1e-9), name
