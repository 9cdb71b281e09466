"""What eager torch moves to weigh experts' outputs and bring them back to their tokens, against torch itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simpar.graph.kernel_types import KernelPlan
from simpar.graph.kernels import kernels
from simpar.graph.types import Permute
from simpar.model.layered import token_network
from simpar.specs.framework import framework
from simpar.specs.models_io import load_model

torch = pytest.importorskip("torch")
modes = pytest.importorskip("torch.utils._python_dispatch")

TOKENS, CHOSEN, WIDTH = 6, 2, 16
ROWS = TOKENS * CHOSEN


class Moved(modes.TorchDispatchMode):  # type: ignore[misc]
    """Bytes of values of all rows that kernels read and write; what is written in place is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in str(func):
            inputs = args[1:] if "index_put_" in str(func) else args
            for each in (*inputs, found):
                if isinstance(each, torch.Tensor) and each.is_floating_point() and each.numel() == ROWS * WIDTH:
                    self.bytes += each.numel() * each.element_size()
        return found


def multiplied_and_added(rows: Any, scores: Any, order: Any) -> Any:
    """torchtitan models/moe/moe.py until PR 1974 and since PR 2775."""
    weighed = (rows.to(torch.float32) * scores.reshape(-1)[order].reshape(-1, 1)).to(rows.dtype)
    index = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
    return torch.zeros(TOKENS, WIDTH, dtype=rows.dtype).scatter_add(0, index, weighed)


def batched_product(rows: Any, scores: Any, order: Any) -> Any:
    """The same between the two."""
    placed = torch.zeros(ROWS, WIDTH, dtype=rows.dtype)
    placed[order] = rows
    return torch.bmm(scores.reshape(-1, 1, CHOSEN), placed.reshape(-1, CHOSEN, WIDTH).float()).to(rows.dtype).squeeze(1)


@pytest.mark.parametrize(
    ("version", "weigh"), [("2025-08", multiplied_and_added), ("2026-01", batched_product), ("2026-05", multiplied_and_added)]
)
def test_torchtitan_weighs_experts_outputs_in_as_many_bytes_as_torch(version: str, weigh: Callable[..., Any]) -> None:
    """Beside a read and a write of each row: where rows are added, those of the sum itself, whose tensor is that of the tokens."""
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(TOKENS, CHOSEN, requires_grad=True)
    moved = []
    with Moved() as mode:
        result = weigh(rows, scores, torch.randperm(ROWS))
        moved.append(mode.bytes / (ROWS * WIDTH))
        result.sum().backward()
        moved.append(mode.bytes / (ROWS * WIDTH) - moved[0])
    forward, backward = framework("torchtitan", version).kernels.expert_output_bytes
    own = (0.0, 2.0) if weigh is multiplied_and_added else (4.0, 4.0)
    assert (forward + own[0], backward + own[1]) == tuple(moved)


@pytest.mark.parametrize("compiled", [False, True])
def test_only_eager_kernels_weigh_apart(compiled: bool) -> None:
    library = replace(framework("torchtitan", "2026-01").kernels, fused_activation=compiled)
    layer = token_network(load_model("qwen3-30b-a3b"), 1, 16).layers[-1]
    copied = {k.node.back: k.copied for k in kernels(layer, KernelPlan(library=library)) if isinstance(k.node, Permute)}
    assert copied == {False: (0.0, 0.0), True: (0.0, 0.0) if compiled else (12.0, 14.0)}
