"""Data in what torch's fake process group leaves unwritten: a rank's own in place of what its neighbours would have sent.

Before torch 2.13 the group copies in gathers alone and leaves sums as they are: the outputs of reduce-scatters and exchanges are
memory that nobody wrote, stale, constant or NaN; what a pipeline receives is so in every version. On such data a GPU draws less
power and runs faster than on real activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork


def _own(output: Any, source: Any, part: int = 0) -> None:
    """Write the part of `source` that a rank has of its own into `output`, as much of it as there is."""
    count = output.numel()
    found = source.reshape(-1)[part * count : (part + 1) * count]
    with torch.no_grad():
        output.view(-1)[: found.numel()].copy_(found)


def _rank(group: Any) -> int:
    return int(dist.ProcessGroup.unbox(group).rank())


def _reduce_scatter(output: Any, source: Any, group: Any, *_: Any) -> Any:
    _own(output, source, _rank(group))
    return output, FakeWork().boxed()


def _exchange(output: Any, source: Any, *_: Any) -> Any:
    _own(output, source)
    return FakeWork().boxed()


def _receive(tensors: Any, *_: Any) -> Any:
    """Activations and gradients that a pipeline receives are random."""
    for tensor in tensors:
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.normal_()
    return FakeWork().boxed()


OWN: Final[dict[str, Callable[..., Any]]] = {
    "_reduce_scatter_base_": _reduce_scatter,
    "alltoall_base_": _exchange,
    "recv_": _receive,
}
"""The ops of c10d that torchtitan's parallelism issues and the fake group leaves unwritten."""


@contextmanager
def written(device: str) -> Iterator[None]:
    """Inside, these ops write their outputs, on real tensors of `device` ("cpu", "cuda")."""
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name, kernel in OWN.items():
            library.impl(name, kernel, device.upper())
        yield
