"""NVL72 racks: NVLink joins the rack; between racks each NIC slot of a tray has a rail of its own."""

from __future__ import annotations

from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, clos


def shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """A rail-optimised tree above the racks; leaf groups are whole numbers of racks."""
    return clos(hardware, num_nodes, rails=True)
