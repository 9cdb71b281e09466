"""What a schedule that depends on times needs to know of a priced layout."""

from __future__ import annotations

from statistics import median_high

from simpar.costs.mixed import MixedPricer
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Compute, PhaseLetter, Send


def stage_times(pricer: LayoutPricer | MixedPricer) -> dict[str, object]:
    """Options of a schedule family that wants times: seconds of F, I and W of a stage, of a send, and memory by rank.

    Of times one value for all stages, the median one's, as the zero-bubble authors' runtime takes from its profile: the first
    and last stages differ (embedding, head) and the order should not follow them. Memory is each rank's own there.

    Returns:
        `f`, `i`, `w`, `send` in seconds; per rank `size`, bytes of a micro-batch's activations, and `kept`, the fraction of
        them that stays until the weight gradient.
    """
    layout = pricer.layout
    stages = range(layout.num_stages)

    def seconds(phase: PhaseLetter) -> float:
        found = (pricer.price(Compute(phase, s, 0, len(layout.stage_blocks[s]))).seconds for s in stages)
        return max(median_high(found), 1e-12)

    kept, size = [], []
    for blocks in layout.stage_blocks:
        saved = sum(block.saved_bytes for block in blocks)
        deferred = sum(block.deferred for block in blocks) if layout.framework.pipeline.input_gradient_releases else saved
        size.append(max(saved, 1.0))
        kept.append(min(deferred / size[-1], 1.0))
    send = pricer.price(Send(0, 1, backward=False)).seconds if layout.num_stages > 1 else 0.0
    return {"f": seconds("F"), "i": seconds("I"), "w": seconds("W"), "send": send, "size": tuple(size), "kept": tuple(kept)}
