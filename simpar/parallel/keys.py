"""Symbolic prices of a program: what a candidate's layout turns into seconds. Two candidates of one shape share the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PhaseLetter = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Blocks [first, last) of (model) stage `stage` in one phase.

    Attributes:
        cut: of a pass that is cut: something else may wait for one of its blocks, or hold one up.
    """

    phase: PhaseLetter
    stage: int
    first: int
    last: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class BlockOp:
    """One op of one block in one phase, for the op level of detail.

    Attributes:
        part: of an op of the ep stream beside another micro-batch's compute, what the block waits for or what it does not.
    """

    phase: PhaseLetter
    stage: int
    block: int
    index: int
    part: Literal["whole", "waited", "beside"] = "whole"


@dataclass(frozen=True, slots=True)
class LaunchGap:
    """Time by which the host is late after one block; `cut` as in `Compute`."""

    phase: PhaseLetter
    stage: int
    block: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Overlapped:
    """A forward of one stage interleaved with a backward of another (DualPipe, 1F1B with expert overlap)."""

    forward_stage: int
    backward_stage: int


@dataclass(frozen=True, slots=True)
class Send:
    """The activation (or its gradient) from stage to stage, rank to rank.

    Attributes:
        pair: which neighbours on the pipeline (`pair_of`); -1 = the slowest.
    """

    from_stage: int
    to_stage: int
    backward: bool
    pair: int = -1


def pair_of(rank: int, other: int, ranks: int) -> int:
    """The number of a pair of pipeline ranks: the lower of two neighbours, the last rank for last and first; -1 for others."""
    if abs(rank - other) == 1:
        return min(rank, other)
    return ranks - 1 if abs(rank - other) == ranks - 1 else -1


@dataclass(frozen=True, slots=True)
class Gather:
    """Parameters of blocks [first, last) of a stage gathered from their shards."""

    stage: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Gradients of blocks [first, last) of a stage reduced over the data-parallel ranks."""

    stage: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TiedReduce:
    """Gradient of a tied embedding summed over first and last stage."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The update of everything a pipeline rank holds, gradient norm included."""

    rank: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Offloaded activations of blocks [first, last) of a stage, to the host after the forward or back before the backward."""

    stage: int
    first: int
    last: int
    to_host: bool


Key = Compute | BlockOp | LaunchGap | Overlapped | Send | Gather | Reduce | TiedReduce | OptimizerStep | Offload
