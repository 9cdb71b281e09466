"""Fabric kinds: name -> the Clos that a machine's nodes are joined by. One small file for each."""

from __future__ import annotations

from collections.abc import Callable

from simpar.registry import Registry
from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape
from simpar.topology.fabrics import fat_tree, nvl_rack, rail_optimized, roce_pod, single_switch, torus

FABRICS: Registry[Callable[[HardwareProfile, int], ClosShape]] = Registry(
    "fabric",
    {
        "rail-optimized": rail_optimized.shape,
        "fat-tree": fat_tree.shape,
        "roce-pod": roce_pod.shape,
        "nvl-rack": nvl_rack.shape,
        "torus": torus.shape,
        "single-switch": single_switch.shape,
        "none": single_switch.shape,
    },
)


def fabric_shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """The scale-out network of `num_nodes` nodes of `hardware`."""
    return FABRICS[hardware.fabric.kind](hardware, num_nodes)
