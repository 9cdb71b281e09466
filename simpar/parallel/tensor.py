"""Tensor parallelism (column then row, Megatron-LM 2019) with and without sequence parallelism (Korthikanti et al. 2022).

Collectives per layer, each on the full activation of 2 b s d bytes: without sequence parallelism two all-reduces forward
and two backward; with it 2 all-gathers and 2 reduce-scatters forward and 4 all-gathers and 2 reduce-scatters backward (two of
the gathers repeat the saved input's, hidden under the input-gradient matmul).
"""

from __future__ import annotations

from simpar.parallel.degrees import Degrees
from simpar.parallel.work import Collective, OpList
from simpar.workload.ops import Region, Seam, volume
from simpar.workload.style import BlockStyle

_SPLIT = frozenset("nkpzwfuvxg")
"""Axes that column-parallel outputs and row-parallel inputs are split along."""
_ENTRY = frozenset({"attention_in", "mlp_in", "head_in"})
_CHANNELS = frozenset({"channel_in"})
"""Where every rank needs all channels that the layer before split."""
_EXIT = frozenset({"attention_out", "mlp_out", "embedding_out"})


def shard(degrees: Degrees, axis: str, region: Region) -> float:
    """Ways `axis` of an activation is split by tensor (and sequence) parallelism."""
    if region == "tensor":
        return degrees.tp if axis in _SPLIT else 1
    if region == "residual":
        return degrees.tp if axis == "s" and degrees.sequence_parallel else 1
    if axis == "y":
        return degrees.tp / degrees.etp
    return degrees.etp if axis in "fu" else 1


def weight_shard(degrees: Degrees, axis: str, region: Region) -> int:
    """Ways a weight is split along `axis`."""
    if region == "tensor":
        return degrees.tp if axis in _SPLIT else 1
    if region == "expert":
        return degrees.etp if axis in "fu" else 1
    return 1


def seam_bytes(seam: Seam, size: dict[str, int], degrees: Degrees) -> float:
    """Bytes of the whole activation at a seam on one context-parallel rank."""
    return sum(seam.element_bytes * volume(axes, size) for axes in seam.axes) / degrees.cp


def forward(seam: Seam, size: dict[str, int], degrees: Degrees, style: BlockStyle, ops: OpList) -> None:
    """Put the forward collective of `seam`, if it has one."""
    if degrees.tp == 1:
        return
    amount = seam_bytes(seam, size, degrees)
    if seam.name in _ENTRY and degrees.sequence_parallel:
        share = 1.0 if seam.name == "head_in" else style.gather_share
        _gather(f"{seam.name}.all_gather", "all_gather", share * amount, degrees, ops, chunked=style.overlapped_gathers)
    elif seam.name in _EXIT:
        name = "reduce_scatter" if degrees.sequence_parallel else "all_reduce"
        _gather(f"{seam.name}.{name}", name, amount, degrees, ops)
    elif seam.name in _CHANNELS or seam.name == "column_out":
        ops.blocking(f"{seam.name}.all_gather", Collective("all_gather", amount, "tp"), "tp")
    elif seam.name == "loss":
        tokens = size["b"] * size["s"] / degrees.cp
        ops.blocking("loss.all_reduce", Collective("all_reduce", 4.0 * tokens, "tp", style.loss_all_reduces), "tp")


def _gather(name: str, collective: str, amount: float, degrees: Degrees, ops: OpList, *, chunked: bool = True) -> None:
    """An exposed collective, or with chunked overlap only its first chunk exposed and the rest beside the next matmul."""
    if not (degrees.overlap_tp and chunked):
        ops.blocking(name, Collective(collective, amount, "tp"), "tp")
        return
    # One of tp chunks cannot be hidden: the first matmul chunk needs it (or, for a reduce-scatter, the last produces it).
    ops.blocking(f"{name}.exposed", Collective(collective, amount / degrees.tp, "tp"), "tp")


def backward_exit(seam: Seam, size: dict[str, int], degrees: Degrees, style: BlockStyle, ops: OpList) -> None:
    """Backward through an exit seam: gather the output gradient (sequence parallelism), nothing otherwise."""
    if degrees.tp > 1 and seam.name in _CHANNELS:
        ops.blocking(f"{seam.name}.reduce_scatter", Collective("reduce_scatter", seam_bytes(seam, size, degrees), "tp"), "tp")
    if degrees.tp > 1 and degrees.sequence_parallel and seam.name in _EXIT:
        share = 1.0 if seam.name == "embedding_out" else style.gather_share
        amount = share * seam_bytes(seam, size, degrees)
        _gather(f"{seam.name}.all_gather", "all_gather", amount, degrees, ops, chunked=style.overlapped_gathers)


def regather(seam: Seam, size: dict[str, int], degrees: Degrees, style: BlockStyle, ops: OpList) -> int | None:
    """Start gathering the saved input of a column-parallel matmul again; the weight gradient waits for it."""
    if degrees.tp == 1 or not degrees.sequence_parallel or style.saves_gathered_input:
        return None
    work = Collective("all_gather", seam_bytes(seam, size, degrees), "tp")
    return ops.start(f"{seam.name}.regather", work, "tp")


def reduce_input_gradient(seam: Seam, size: dict[str, int], degrees: Degrees, ops: OpList) -> int | None:
    """Start reducing the input gradient at an entry seam; overlaps the weight gradient where the framework does that."""
    if degrees.tp == 1 or seam.name not in _ENTRY:
        return None
    name = "reduce_scatter" if degrees.sequence_parallel else "all_reduce"
    work = Collective(name, seam_bytes(seam, size, degrees), "tp")
    index = ops.start(f"{seam.name}.{name}", work, "tp")
    if not degrees.async_tp:
        ops.wait(index)
    return index
