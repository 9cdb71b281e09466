"""The degrees that shape one layer's work on one rank (data and pipeline parallelism do not)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpar.graph.shard import Placement


@dataclass(frozen=True, slots=True)
class Degrees:
    """Tensor, context and expert degrees and their styles.

    Attributes:
        tp, sequence_parallel, cp, cp_style, ep, etp: as in specs/plan.py.
        overlap_tp: chunked overlap of tensor-parallel collectives with their matmuls.
        overlap_ep: expert exchange runs under another micro-batch's compute: a forward and a backward are interleaved.
        ring_merges: "" = merging partial outputs costs nothing to speak of (TransformerEngine's kernels); "fused" or "eager":
            torch's ring, whose merges are kernels that a compiler fused, or elementary operations.
        async_tp: backward collectives overlap the weight gradient (Megatron's linear_with_grad_accumulation).
        dispatcher: expert exchange implementation.
    """

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_style: Literal["ring", "all_gather", "ulysses"] = "ring"
    ring_merges: Literal["", "fused", "eager"] = ""
    ep: int = 1
    etp: int = 1
    overlap_tp: bool = False
    overlap_ep: bool = False
    async_tp: bool = True
    dispatcher: str = "alltoall"

    def placement(self, load: float = 1.0) -> Placement:
        """Ways in which axes are split; `load`: rows of the fullest expert rank over the mean."""
        return Placement(self.tp, self.cp, self.ep, self.etp, self.sequence_parallel, load)
