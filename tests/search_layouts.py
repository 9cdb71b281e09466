"""Small spaces for the tests of the search, and every layout of them simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from simpar.result.interpret import interpret
from simpar.result.result import Result
from simpar.searching.choice import Choice
from simpar.searching.request import make_space
from simpar.searching.space import Space
from simpar.specs.options import RunOptions
from simpar.step import prepare, run

SMALL = (
    "zero_stage=1", "shard_size=none", "schedule=1f1b,interleaved", "virtual_stages=1,2", "tp=1,2,4", "pp=1,2,4",
    "split=even", "overlap_p2p=true",
    "recompute=none,full", "micro_batch_size=1,4", "cp=1,2", "cp_style=ring", "overlap_tp=false",
    "sequence_parallel=true", "overlap_grad_reduce=true", "overlap_param_gather=true", "placement=tp-cp-ep-dp-pp",
    "offload_activations=0", "offload_optimizer=false",
)  # fmt: skip
"""A few hundred layouts that differ in what matters."""

OFFLOADS = ("offload_activations=0,0.5,1", "offload_optimizer=false,true")


def small_space(
    nodes: int = 1, allow: Sequence[str] = SMALL, *, model: str = "llama3.1-8b", batch: int = 8, length: int = 8192
) -> Space:
    """A model on a few nodes of eight H100."""
    table = RunOptions(model, "dgx-h100", nodes, length, batch, "megatron-core").table(None)[0]
    return make_space(table, allow=allow)


@dataclass(frozen=True)
class Known:
    """One layout of a space, simulated."""

    choice: Choice
    result: Result

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.result.step_time_s

    @property
    def bytes(self) -> float:
        """Of the fullest device."""
        return self.result.worst_rank.device_bytes


@cache
def every_layout(nodes: int = 1, allow: tuple[str, ...] = SMALL, batch: int = 8, length: int = 8192) -> tuple[Known, ...]:
    """All layouts of a small space that fit, simulated one by one."""
    space = small_space(nodes, allow, batch=batch, length=length)
    found = []
    for choice in space.choices():
        detail: Any = "layer" if choice.offload.activations else "stage"
        priced = prepare(choice.scenario(space.template), detail=detail)
        result = interpret(priced, run(priced, interference=True))
        if result.fits:
            found.append(Known(choice, result))
    return tuple(found)
