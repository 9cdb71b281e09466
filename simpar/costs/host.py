"""Seconds that the host takes to launch a block: kernels, collectives, modules and the hooks around them."""

from __future__ import annotations

from simpar.costs.block_price import BlockPrice
from simpar.parallel.layout import Layout

ATTENTION_SHARE = 0.5
"""Of a dense layer's modules, and so of the host's time beside its launches: what a layer with experts keeps (assumed: attention
and feed-forward alike; the kernels of router, dispatch and experts are counted one by one)."""


def launch_seconds(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time to launch a block's kernels; the device waits where this is the longer one."""
    spec, training = layout.framework, layout.training
    passes = 2.0 if phase != "F" and price.recomputes else 1.0
    slow = layout.hardware.node.host_slowdown * layout.calibration.host
    each = slow * (spec.host.launch_s if phase == "F" else spec.host.backward_launch_s)
    if training.cuda_graphs:
        return price.expert_kernels * each if training.cuda_graph_scope == "attention" else 0.0
    beside = slow * (price.collectives * spec.host.collective_cpu_s + _sharding_hooks_s(layout, price, phase))
    if layout.compiled:
        return slow * price.kernels * spec.host.compiled_launch_s + beside
    host = price.kernels * each + beside + slow * passes * spec.host.layer_cpu_s
    if price.expert_kernels and spec.host.expert_layer_cpu_s:
        forwards = passes if phase == "F" else passes - 1.0
        waits = forwards * spec.host.expert_layer_cpu_s if layout.host_counts_tokens else 0.0
        host += slow * (waits - passes * (1.0 - ATTENTION_SHARE) * spec.host.layer_cpu_s)
    if spec.host.fsdp_module_cpu_s and layout.gathers_by_layer:
        # A fetch or two ahead, the host hides behind the layer's kernels what its hooks take, norms' chains included.
        host += slow * passes * (price.weights + price.containers) * spec.host.fsdp_module_cpu_s
        host = max(price.seconds, host)
    return host


def _sharding_hooks_s(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time around a pass of a block whose weights are gathered for it; no graph takes it away."""
    if not layout.gathers_by_layer:
        return 0.0
    host, backward = layout.framework.host, phase != "F"
    return host.fsdp_group_cpu_s[backward] + price.weights * host.fsdp_weight_cpu_s[backward]


__all__ = ["launch_seconds"]
