"""How many consecutive GPUs each tier of a machine holds, and how tight the layers between them are."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.errors import InputError, Violation
from simpar.specs.hardware import HardwareProfile
from simpar.topology.placement import Tier

UNBOUNDED = 2**62
"""GPUs under a tier that holds everything."""


@dataclass(frozen=True, slots=True)
class Levels:
    """GPUs per tier, numbered node by node (global index = node * gpus_per_node + local index).

    Attributes:
        node: GPUs of one host.
        domain: GPUs of one scale-up domain; may be a part of a node (a bridged pair) or many nodes (an NVL72 rack).
        leaf: GPUs of one leaf group.
        pod: GPUs of one pod.
        leaf_oversubscription: capacity below the leaf layer over that above it.
        pod_oversubscription: capacity below the spine layer over that above it.
    """

    node: int
    domain: int
    leaf: int
    pod: int
    leaf_oversubscription: float
    pod_oversubscription: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Node, domain, leaf group, pod."""
        return (self.node, self.domain, self.leaf, self.pod)

    def tier(self, first: int, last: int) -> Tier:
        """The widest tier crossed by a group whose lowest and highest GPU are `first` and `last`."""
        if first == last:
            return "device"
        if first // self.node == last // self.node:
            return "node"
        if first // self.domain == last // self.domain:
            return "domain"
        if first // self.leaf == last // self.leaf:
            return "leaf"
        return "pod" if first // self.pod == last // self.pod else "core"

    def oversubscription(self, tier: Tier) -> float:
        """What a NIC's share shrinks by when every NIC sends across `tier`: the product over the layers crossed."""
        if tier == "pod":
            return self.leaf_oversubscription
        return self.leaf_oversubscription * self.pod_oversubscription if tier == "core" else 1.0


def levels(hardware: HardwareProfile) -> Levels:
    """The tiers of `hardware`; microseconds, so that a search may ask every time."""
    fabric, node = hardware.fabric, hardware.node.gpus_per_node
    leaf = UNBOUNDED if fabric.kind in ("none", "single-switch") else fabric.nodes_per_leaf_group * node
    pod = UNBOUNDED if leaf == UNBOUNDED else leaf * fabric.leaf_groups_per_pod
    return Levels(node, hardware.scale_up.domain_size, leaf, pod, fabric.oversubscription, fabric.pod_oversubscription)


def check_capacity(world_size: int, hardware: HardwareProfile, num_nodes: int) -> None:
    """`world_size` ranks fit on `num_nodes` nodes.

    Raises:
        InputError: they do not, or the machine has no network to join its nodes.
    """
    per_node, found = hardware.gpus_per_node, []
    if num_nodes < 1:
        found.append(Violation("cluster.num_nodes", num_nodes, "must be at least 1"))
    elif world_size > num_nodes * per_node:
        needed = -(-world_size // per_node)
        rule = f"{num_nodes} nodes of {hardware.name} hold {num_nodes * per_node} GPUs"
        found.append(Violation("world size", world_size, rule, f"use at least {needed} nodes"))
    if num_nodes > max(1, hardware.domain_size // per_node) and hardware.fabric.kind == "none":
        rule = f"{hardware.name} has no network between nodes"
        found.append(Violation("cluster.num_nodes", num_nodes, rule, "use 1 node"))
    if found:
        raise InputError(found)
