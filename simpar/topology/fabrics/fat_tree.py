"""Plain fat tree: all NICs of a node plug into the same leaf; oversubscription thins the layers above."""

from __future__ import annotations

from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, clos


def shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """One leaf (or block of leaves that act as one) for each leaf group."""
    return clos(hardware, num_nodes, rails=False)
