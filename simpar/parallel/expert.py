"""Expert parallelism with Megatron's parallel folding: experts live on etp x ep ranks taken from tp x cp x dp.

Dispatch sends every token's hidden vector to the ranks of its top-k experts, combine sends the results back; the backward
mirrors both (the gradient of combine has dispatch's shape and the other way round). Rows of an all-to-all arrive by rank and leave
by rank: a copy puts them in the order of the local experts and back (Megatron-Core token_dispatcher.py, sort_chunks_by_idxs;
torchtitan's permute after the exchange). DeepEP and HybridEP hand out rows that are permuted once.
"""

from __future__ import annotations

from simpar.parallel.degrees import Degrees
from simpar.parallel.work import Collective, ExpertExchange, MemoryWork, OpList


def exchange(name: str, ops: OpList, degrees: Degrees, work: ExpertExchange, sort: MemoryWork | None = None) -> None:
    """Put the exchange of one expert layer: over ep, then the gather (or reduce-scatter) over etp.

    Args:
        work: of one tensor rank of the rank with the fullest experts, for which everybody waits.
        sort: the copy into the order of the local experts, or back; none = there is one of them or the dispatcher sorts.
    """
    combine = work.combine
    if combine and sort is not None:
        ops.compute(f"{name}.sort", sort)
    whole = work.element_bytes * (work.tokens * work.moe.num_experts_per_tok) * degrees.etp * work.hidden
    if combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_reduce_scatter", Collective("reduce_scatter", whole, "etp"), "ep")
    if degrees.ep > 1:
        ops.blocking(name, work, "ep")
    if not combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_all_gather", Collective("all_gather", whole, "etp"), "ep")
    if not combine and sort is not None:
        ops.compute(f"{name}.sort", sort)
