"""Expert parallelism with Megatron's parallel folding: experts live on etp x ep ranks taken from tp x cp x dp.

Dispatch sends every token's hidden vector to the ranks of its top-k experts, combine sends the results back; the backward
mirrors both (the gradient of combine has dispatch's shape and the other way round).
"""

from __future__ import annotations

from simpar.parallel.degrees import Degrees
from simpar.parallel.work import Collective, ExpertExchange, OpList
from simpar.specs.model import MoeSpec


def exchange(
    name: str, rows: float, width: int, degrees: Degrees, moe: MoeSpec, ops: OpList, *, combine: bool, element_bytes: float
) -> None:
    """Put the exchange of one expert layer: over ep, then the gather (or reduce-scatter) over etp.

    Args:
        rows: of the rank with the fullest experts, for which everybody waits, on one of its tensor ranks.
        width: elements of a row.
    """
    whole = element_bytes * rows * degrees.etp * width
    if combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_reduce_scatter", Collective("reduce_scatter", whole, "etp"), "ep")
    if degrees.ep > 1:
        work = ExpertExchange(combine, rows / moe.num_experts_per_tok, width, moe.num_experts_per_tok, element_bytes,
                              degrees.dispatcher, moe.topk_group)  # fmt: skip
        ops.blocking(name, work, "ep")
    if not combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_all_gather", Collective("all_gather", whole, "etp"), "ep")
