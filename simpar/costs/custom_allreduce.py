"""All-reduce kernels of inference libraries inside one domain: one-shot and two-shot over peer-mapped buffers.

One-shot: every rank reads the whole buffer of every other, (n - 1) S over its link, one barrier. Two-shot: reduce-scatter
and all-gather by reads, 2 (n - 1)/n S, two barriers. Larger messages go to NCCL. Outside a CUDA graph the call costs its
launch and a copy into the registered buffer.
"""

from __future__ import annotations

from simpar.costs.collective_geometry import Geometry
from simpar.specs.collective_constants import CustomConstants

KERNELS = ("trtllm", "vllm", "sglang")
PUBLISHED = CustomConstants(
    base_s={"trtllm": 2.5e-6, "vllm": 4.2e-6, "sglang": 2.4e-6}, rank_s=0.1e-6, one_shot_efficiency=0.6,
    two_shot_base_s=6e-6, two_shot_efficiency=0.6, eager_s=20e-6, copy_efficiency=0.9,
)  # fmt: skip
"""Read off the kernels' tables on H100."""


def seconds(
    bytes_: float, kernel: str, graph: bool, g: Geometry, k: CustomConstants, nccl_s: float, memory_bytes_per_s: float
) -> float:
    """Duration; `nccl_s` is NCCL's all-reduce of the same buffer."""
    n, link = g.size, g.link_bytes_per_s
    base = k.base_s.get(kernel, max(k.base_s.values())) + k.rank_s * (n - 1)
    one = base + (n - 1) * bytes_ / (k.one_shot_efficiency * link)
    two = base + k.two_shot_base_s + 2.0 * (n - 1) / n * bytes_ / (k.two_shot_efficiency * link)
    fastest = min(one, two, base + nccl_s)
    if graph:
        return fastest
    return max(k.eager_s, fastest) + 2.0 * bytes_ / (k.copy_efficiency * memory_bytes_per_s)
