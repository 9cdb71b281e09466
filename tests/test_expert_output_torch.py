"""What eager torch moves to weigh experts' outputs and bring them back to their tokens, against torch itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simpar.costs.memory_bound import bounded_share
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.kernels import kernels
from simpar.graph.types import Permute
from simpar.model.layered import token_network
from simpar.parallel.degrees import Degrees
from simpar.parallel.expert import SORTS, sorts
from simpar.parallel.split_options import SplitOptions
from simpar.specs.calibration import constant
from simpar.specs.framework import framework
from simpar.specs.hardware import load_hardware
from simpar.specs.models_io import load_model

torch = pytest.importorskip("torch")
modes = pytest.importorskip("torch.utils._python_dispatch")
tree = pytest.importorskip("torch.utils._pytree")

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
    """Beside what brings rows to their tokens: where they are added, their read (the sum is of the tokens' size) and the write of
    their gradient; else a read and a write of each, and backward those of the product with vectors."""
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(TOKENS, CHOSEN, requires_grad=True)
    moved = []
    with Moved() as mode:
        result = weigh(rows, scores, torch.randperm(ROWS))
        moved.append(mode.bytes / (ROWS * WIDTH))
        result.sum().backward()
        moved.append(mode.bytes / (ROWS * WIDTH) - moved[0])
    forward, backward = framework("torchtitan", version).kernels.expert_output_bytes
    own = (2.0, 2.0) if weigh is multiplied_and_added else (4.0, 4.0 + 8.0)
    assert (forward + own[0], backward + own[1]) == tuple(moved)


@pytest.mark.parametrize(("version", "compiled"), [("2025-08", True), ("2026-01", False), ("2026-01", True), ("2026-06", True)])
def test_compiled_graphs_weigh_outputs_unless_experts_stay_eager(version: str, compiled: bool) -> None:
    own = framework("torchtitan", version).kernels
    library = replace(own, fused_activation=compiled)
    layer = token_network(load_model("qwen3-30b-a3b"), 1, 16).layers[-1]
    back = next(k for k in kernels(layer, KernelPlan(library=library)) if isinstance(k.node, Permute) and k.node.back)
    apart = not compiled or version == "2026-01"
    assert [each for kind, _, *each in back.beside if kind == "copy"] == ([list(own.expert_output_bytes)] if apart else [])


class Called(modes.TorchDispatchMode):  # type: ignore[misc]
    """Names of the operations that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def gathered(tokens: Any, order: Any) -> Any:
    """torchtitan's rows of experts until PR 1974."""
    return torch.gather(tokens, 0, (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH))


def indexed(tokens: Any, order: Any) -> Any:
    """The same since then."""
    return tokens[order // CHOSEN]


def padded(tokens: Any, order: Any) -> Any:
    """torchtitan models/moe/utils.py, _permute and _unpermute."""
    rows = torch.vstack((tokens, tokens.new_zeros(WIDTH)))[order]
    back = rows.new_empty(len(tokens) + 1, WIDTH)
    back[order] = rows
    return back[:-1]


SUMS = {"row_add": ("aten.scatter_add.default", "aten.scatter_add_.default"), "row_sort_add": ("aten.index_put.default",)}


@pytest.mark.parametrize(("version", "take", "kernel"), [("2025-08", gathered, "row_add"), ("2026-05", indexed, "row_sort_add")])
def test_gradients_of_rows_are_added_by_the_kernel_that_torch_calls(version: str, take: Callable[..., Any], kernel: str) -> None:
    tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)
    rows = take(tokens, torch.randperm(ROWS))
    with Called() as mode:
        rows.sum().backward()
    assert not set(SUMS[kernel]).isdisjoint(mode.names)
    layer = token_network(load_model("qwen3-30b-a3b"), 1, 16).layers[-1]
    plan = KernelPlan(library=framework("torchtitan", version).kernels)
    there = next(k for k in kernels(layer, plan) if isinstance(k.node, Permute) and not k.node.back)
    assert [(kind, each) for kind, _, *each in there.beside] == [(kernel, [0.0, 6.0])]
    assert there.backward == ()


@pytest.mark.parametrize(
    ("name", "month", "kinds"),
    [("prime-rl", "2026-01", ["row_add", "copy", "row_add"]), ("prime-rl", "2026-10", ["copy", "copy", "copy"]),
     ("torchtitan", "2026-02", ["row_sort_add", "copy", "row_product"]), ("nemo-automodel", "2026-01", []),
     ("megatron-core", "2026-06", [])],
)  # fmt: skip
def test_rows_are_added_by_what_a_framework_calls(name: str, month: str, kinds: list[str]) -> None:
    """Atomically, in bulk from torch 2.13 on; sorted first where they are taken by an index; or by kernels made for it."""
    library = framework(name, month).kernels
    layer = token_network(load_model("qwen3-30b-a3b"), 1, 16).layers[-1]
    found = [k for k in kernels(layer, KernelPlan(library=library)) if isinstance(k.node, Permute)]
    assert [kind for k in found for kind, *_ in k.beside] == kinds
    assert {k.price for k in found} == {"row_take" if kinds else "permute"}


class Passes(modes.TorchDispatchMode):  # type: ignore[misc]
    """How often kernels read or write all rows; what is written in place, or gives a new one its width, is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "new_" not in str(func):
            inputs = tree.tree_leaves(args[1:] if "index_put_" in str(func) else args)
            floats = [each for each in (*inputs, found) if isinstance(each, torch.Tensor) and each.is_floating_point()]
            self.count += sum(each.numel() >= (ROWS - 1) * WIDTH for each in floats)
        return found


def test_padding_copies_rows_as_often_as_torch() -> None:
    rows = torch.randn(ROWS - 1, WIDTH, requires_grad=True)
    with Passes() as mode:
        found = padded(rows, torch.randperm(ROWS - 1))
    assert mode.count == sum(n for back in (False, True) for _, n in SORTS["padded"].get((back, False), (("copy", 2.0),)))
    with Called() as called:
        found.sum().backward()
    names = [name.split(".")[1] for name in called.names]
    # Of the way back, zeros and a copy into them (3 passes), taken by the index (2); of the way there, zeros and sums (1, 3).
    assert [name for name in names if name in ("slice_backward", "index", "index_put")] == ["slice_backward", "index", "index_put"]
    assert SORTS["padded"][True, True] == (("copy", 5.0),)
    assert sum(n for _, n in SORTS["padded"][False, True]) == 4.0


@pytest.mark.parametrize(("name", "expected"), [("megatron-core", 2), ("torchtitan", 0), ("transformers", 0)])
def test_megatron_sorts_the_rows_of_one_expert_rank(name: str, expected: int) -> None:
    moe, plan = load_model("qwen3-30b-a3b").moe, KernelPlan(library=framework(name, "2026-06").kernels)
    options = SplitOptions(degrees=Degrees(dispatcher="alltoall"), moe=moe, kernels=plan)
    assert sum(passes for _, passes in sorts(options, back=True, backward=False)) == expected


@pytest.mark.parametrize(
    ("ep", "dispatcher", "version"),
    [(8, "alltoall", "2025-11"), (1, "alltoall", "2025-11"), (8, "alltoall", "2026-06"), (1, "alltoall", "2026-06"),
     (8, "deepep", "2025-11")],
)  # fmt: skip
def test_rows_are_put_in_order_where_the_framework_does(ep: int, dispatcher: str, version: str) -> None:
    options = SplitOptions(
        degrees=Degrees(ep=ep, dispatcher=dispatcher), moe=load_model("qwen3-30b-a3b").moe,
        kernels=KernelPlan(library=framework("torchtitan", version).kernels),
    )  # fmt: skip
    expected = dispatcher == "alltoall" and (ep > 1 or version == "2025-11")
    assert bool(sorts(options, back=False, backward=True)) == expected


def test_the_rate_of_products_of_rows_is_the_registry_s() -> None:
    """40 ps a value of eight bytes on an H100's 132 SMs at 1.755 GHz, half of it as copies (torchtitan PR 2717)."""
    gpu = load_hardware("dgx-h100").gpu
    share = bounded_share("row_product", "eager", gpu, 0.1)
    assert share * gpu.memory_bandwidth.value == pytest.approx(1.5 * 132 * 1.755e9, rel=1e-3)
    chain = bounded_share("composite", "eager", gpu, 0.1) * 8.3 / 10.4  # as before torch loaded 128 bits at a time
    assert share == pytest.approx(constant("kernels.row_product") * chain)
