"""Expert parallelism with Megatron's parallel folding: experts live on etp x ep ranks taken from tp x cp x dp.

Dispatch sends every token's hidden vector to the ranks of its top-k experts, combine sends the results back; the backward
mirrors both (the gradient of combine has dispatch's shape and the other way round).
"""

from __future__ import annotations

from simpar.parallel.degrees import Degrees
from simpar.parallel.work import Collective, ExpertExchange, OpList
from simpar.specs.model import MoeSpec
from simpar.workload.ops import Region


def shard(degrees: Degrees, axis: str, region: Region) -> int:
    """Expert parallelism moves rows, it does not split activations further: every rank keeps its share of rows."""
    del degrees, axis, region
    return 1


def weight_shard(degrees: Degrees, axis: str, region: Region) -> int:
    """Experts are spread over ep ranks."""
    return degrees.ep if region == "expert" and axis == "e" else 1


def exchange(
    name: str, size: dict[str, int], degrees: Degrees, moe: MoeSpec, ops: OpList, *, combine: bool, element_bytes: float,
    load_factor: float = 1.0,
) -> None:  # fmt: skip
    """Put the exchange of one expert layer: over ep, then the gather (or reduce-scatter) over etp.

    Everybody waits for the rank with the fullest experts, which takes in `load_factor` times the mean.
    """
    rows = load_factor * size["y"] / (degrees.cp * degrees.tp)
    hidden = size["d"]
    whole = element_bytes * rows * degrees.etp * hidden
    if combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_reduce_scatter", Collective("reduce_scatter", whole, "etp"), "ep")
    if degrees.ep > 1:
        work = ExpertExchange(combine, rows / moe.num_experts_per_tok, hidden, moe.num_experts_per_tok, element_bytes,
                              degrees.dispatcher, moe.topk_group)  # fmt: skip
        if degrees.overlap_ep:
            ops.start(name, work, "ep")
        else:
            ops.blocking(name, work, "ep")
    if not combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_all_gather", Collective("all_gather", whole, "etp"), "ep")
