"""Rail-optimised fat tree (DGX SuperPOD): NIC i of every node of a scalable unit plugs into leaf i of that
unit.

Traffic between equal local indices of one unit crosses one switch; to another index NCCL first moves over
NVLink to the GPU on the destination's rail (PXN).
https://developer.nvidia.com/blog/doubling-all2all-performance-with-nccl-2-12/
"""

from __future__ import annotations

from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, clos


def shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """One leaf for each NIC slot of a node in each leaf group."""
    return clos(hardware, num_nodes, rails=True)
