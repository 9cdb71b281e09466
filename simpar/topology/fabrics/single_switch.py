"""One switch for all nodes, or, where a machine has no NICs, one box and no network."""

from __future__ import annotations

from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, nic_slots


def shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """A single leaf group, however many nodes there are."""
    slots, slot_bw = nic_slots(hardware)
    return ClosShape(num_nodes, slots, slot_bw, num_nodes, 1, 1, 0, 0.0, 0.0)
