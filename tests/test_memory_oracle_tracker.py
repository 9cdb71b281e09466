"""Peak memory of a whole step against torch's own trackers: FSDP2 and tensor parallelism on fake CPU tensors, one rank of eight."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from test_memory_oracle_torch import WORLD, scenario, sharded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_llama import Shape

from simpar.engine.longest_path import longest_path
from simpar.result.interpret import interpret
from simpar.result.memory import RankMemory
from simpar.step import prepare

pytestmark = pytest.mark.torch
SHAPES = {
    "logits": Shape(256, 4, 8, 4, 512, 8192),
    "activations": Shape(512, 6, 8, 8, 1536, 1024),
    "weights": Shape(1024, 3, 8, 2, 4096, 2048),
}


@pytest.fixture
def ranks() -> Iterator[None]:
    """A group of WORLD ranks of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def memory_of(shape: Shape, tokens: int, batch: int, **plan: Any) -> RankMemory:
    """simpar's rank 0 of the same step."""
    priced = prepare(scenario(shape, tokens, batch, **plan))
    return interpret(priced, longest_path(priced.program, priced.table)).memory[0]


def tensor_bytes(memory: RankMemory) -> float:
    """What the rank allocates at most without the workspaces of cuBLAS, which a step on a CPU does not have."""
    return memory.allocated_bytes - dict(memory.static)["workspaces"]


def step(model: Any, optimizer: Any, tokens: Any) -> None:
    """Forward, loss in fp32, backward, update, gradients to none."""
    out = model(tokens)
    loss = functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())
    del out
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(tracker: Any) -> int:
    """Bytes that the tracker saw at most."""
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])


def tracked(model: Any, optimizer: Any, tokens: Any, tracker: Any) -> int:
    """Peak of the second step: the first one makes the optimizer's state."""
    for _ in range(2):
        with tracker:
            step(model, optimizer, tokens)
        found = peak(tracker)
        tracker.reset_mod_stats()
    return found


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("batch", "recompute"), [(1, "none"), (2, "none"), (1, "full")])
def test_peak_of_a_fully_sharded_step(name: str, batch: int, recompute: str) -> None:
    shape, mesh = SHAPES[name], init_device_mesh("cpu", (WORLD,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens = torch.zeros(batch, 512, dtype=torch.long)
        model = sharded(shape, mesh, wrap=checkpoint_wrapper if recompute == "full" else None)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        found = tracked(model, optimizer, tokens, tracker)
    expected = tensor_bytes(memory_of(shape, 512, batch, zero_stage=3, recompute=recompute))
    assert expected == pytest.approx(found, rel=0.04)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", ["logits", "activations"])
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_peak_of_a_sharded_and_tensor_parallel_step(name: str, tp: int) -> None:
    """Sequence parallelism and the vocabulary-parallel loss over tp ranks, fully sharded over the others; real small tensors."""
    shape, mesh = SHAPES[name], init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))
    tokens = torch.zeros(1, 256, dtype=torch.long)
    model = sharded(shape, mesh["dp"], tensor=mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((tokens,))
    with loss_parallel():
        found = tracked(model, optimizer, tokens, tracker)
    memory = memory_of(shape, 256, 1, tp=tp, sequence_parallel=True, zero_stage=3)
    assert tensor_bytes(memory) == pytest.approx(found, rel=0.04)
