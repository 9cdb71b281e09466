"""Llama 3's three-tier RoCE (arXiv 2407.21783, section 3.3.1): a top-of-rack switch for 16 GPUs, cluster
switches that join 192 racks with full bisection, aggregation switches between pods at 1:7.
"""

from __future__ import annotations

from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, clos


def shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """Rack switch, cluster switches, aggregation: leaf, spine and core of a plain tree."""
    return clos(hardware, num_nodes, rails=False)
