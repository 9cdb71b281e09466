"""Expert parallelism with Megatron's parallel folding: experts live on etp x ep ranks taken from tp x cp x dp.

Dispatch sends every token's hidden vector to the ranks of its top-k experts, combine sends the results back; the backward
mirrors both (the gradient of combine has dispatch's shape and the other way round). Rows of an all-to-all arrive by rank and leave
by rank: a copy puts them in the order of the local experts and back (Megatron-Core token_dispatcher.py, sort_chunks_by_idxs;
torchtitan's permute after the exchange, `SORTS`). DeepEP and HybridEP hand out rows that are permuted once.

Megatron-Core's dispatcher by all-gather (MoEAllGatherTokenDispatcher) gives each rank the tokens of all, from which it takes the
rows of its own experts, and sums their outputs by a reduce-scatter over all tokens: neither gets longer where loads are uneven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simpar.parallel.degrees import Degrees
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import Collective, ExpertExchange, MemoryWork, OpList
from simpar.specs.architecture import TokenModel
from simpar.specs.framework_policies import Kernels
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario
from simpar.specs.training import RoutingSpec, TrainingSpec

Passes = tuple[tuple[str, float], ...]
_COPY: Final[Passes] = (("copy", 2.0),)
_SUMMED: Final[Passes] = (("zero", 1.0), ("row_sort_add", 3.0))
SORTS: Final[Mapping[str, Mapping[tuple[bool, bool], Passes]]] = {
    "chunks": {}, "local": {}, "indexed": {(False, True): _SUMMED},
    "padded": {(False, False): (("copy", 4.0),), (True, True): (("copy", 5.0),), (False, True): _SUMMED},
}  # fmt: skip
"""`Kernels.expert_order` -> (way back, backward) -> classes of kernels and how many times they read or write the rows; a copy
where there is none. Local: on one expert rank as well, whose rows are in that order. Indexed: torch takes rows by a list of them
and backward adds the gradients up in zeros. Padded: first the rows are copied behind each other with an empty one, which others
come to stand for; backward of the way back its gradient is put into zeros (torchtitan models/moe/utils.py, _permute and
_unpermute)."""


def expert_rows(scenario: Scenario, kernels: Kernels, load_factor: float) -> float:
    """Rows of an expert rank over those of balanced routing: of all its experts where each runs on every token."""
    moe = scenario.model.moe if isinstance(scenario.model, TokenModel) else None
    if moe is not None and moe.transformers_class == "every" and kernels.transformers_classes:
        return moe.num_experts / moe.num_experts_per_tok
    capacity = scenario.training.routing.capacity_factor
    return load_factor if capacity is None else capacity


def fixes_tokens(plan: PlanSpec, routing: RoutingSpec) -> bool:
    """Whether a capacity tells the host how many tokens come; DeepEP waits for their number all the same (its README)."""
    return routing.capacity_factor is not None and not (plan.ep > 1 and plan.ep_dispatcher == "deepep")


def pads_rows(plan: PlanSpec, training: TrainingSpec) -> bool:
    """Whether Megatron-Core pads the rows of each expert, where the host knows their number, in kernels of their own around narrow
    products of TransformerEngine (transformer/moe/experts.py, TEGroupedMLP: Fp8Padding, Fp8Unpadding, and none of them where rows
    have such numbers already). DeepEP's are padded as they are permuted (since 554ce493 of 2026-02), HybridEP's as they arrive, and
    graphs of whole layers want rows that the router has padded (moe_router_padding_for_quantization)."""
    graphs = training.cuda_graphs and training.cuda_graph_scope == "layer"
    return plan.ep_dispatcher in ("alltoall", "allgather") and not graphs


def sorts(options: SplitOptions, back: bool, backward: bool) -> Passes:
    """What puts rows into the order of the local experts, or back: none where the dispatcher does, or where there is no other.
    Around narrow products they are copied once more, to a number of rows that these take and back."""
    degrees, order, moe = options.degrees, options.kernels.library.expert_order, options.moe
    several = moe is not None and moe.num_experts > degrees.ep and (degrees.ep > 1 or order == "local")
    padded = _COPY if options.pads_rows and options.narrow_experts and options.engine_casts else ()
    if degrees.dispatcher != "alltoall" or not (several or order == "padded"):
        return padded
    return SORTS[order].get((back, backward), _COPY) + padded


def exchange(
    name: str, ops: OpList, degrees: Degrees, work: ExpertExchange, sort: Sequence[MemoryWork] = (), load_factor: float = 1.0
) -> None:
    """Put the exchange of one expert layer: over ep, then the gather (or reduce-scatter) over etp.

    Args:
        work: of one tensor rank of the rank with the fullest experts, for which everybody waits.
        sort: kernels that put rows into the order of the local experts, or back.
        load_factor: rows of `work` over those of balanced routing.
    """
    sent: ExpertExchange | Collective = work
    if degrees.dispatcher == "allgather":
        everyone = work.tokens / load_factor * degrees.ep * work.hidden * work.element_bytes
        sent = Collective("reduce_scatter" if work.combine else "all_gather", everyone, "ep")
    combine = work.combine
    for each in sort if combine else ():
        ops.compute(f"{name}.sort", each)
    whole = work.element_bytes * (work.tokens * work.moe.num_experts_per_tok) * degrees.etp * work.hidden
    if combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_reduce_scatter", Collective("reduce_scatter", whole, "etp"), "ep")
    if degrees.ep > 1:
        ops.blocking(name, sent, "ep")
    if not combine and degrees.etp > 1:
        ops.blocking(f"{name}.etp_all_gather", Collective("all_gather", whole, "etp"), "ep")
    for each in () if combine else sort:
        ops.compute(f"{name}.sort", each)
