"""TPU pods: inside a slice the torus of chips is the network (scaleup.py); the data-centre network joins
slices by host NICs.
"""

from __future__ import annotations

from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, clos


def shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """A plain tree over hosts, used only between slices."""
    return clos(hardware, num_nodes, rails=False)
