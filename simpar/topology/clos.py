"""The scale-out network as a Clos: NIC slots, leaves, spines, core, with every count and capacity by
arithmetic.

All switched fabrics are this shape with other numbers (`fabric_shape`). Links are one-way, and a link between
two switch layers stands for all the cables between those two switches.
"""

from __future__ import annotations

from dataclasses import dataclass

from simpar.specs.hardware import HardwareProfile

RADIX = 64
"""Ports of a switch at the NIC's speed (QM9700: 64 x 400 Gb/s); sets how many spines there are, not what they
carry.
"""

RAILS = {"rail-optimized": True, "nvl-rack": True, "fat-tree": False, "roce-pod": False, "torus": False}
"""Fabric -> whether each NIC slot of a node plugs into a leaf of its own; without rails all NICs of a node share a leaf.

- rail-optimized (DGX SuperPOD): NIC i of every node of a scalable unit plugs into leaf i of that unit. Traffic between equal
  local indices crosses one switch; to another index NCCL first moves over NVLink to the GPU on the destination's rail (PXN).
  https://developer.nvidia.com/blog/doubling-all2all-performance-with-nccl-2-12/
- nvl-rack (NVL72): NVLink joins the rack; leaf groups of the tree above are whole numbers of racks.
- fat-tree: oversubscription thins the layers above the leaves.
- roce-pod: Llama 3's three-tier RoCE (arXiv 2407.21783, section 3.3.1): a top-of-rack switch for 16 GPUs, cluster switches that
  join 192 racks with full bisection, aggregation switches between pods at 1:7.
- torus (TPU pods): inside a slice the torus of chips is the network (scaleup.py); the tree joins slices by host NICs.

The others, single-switch and none, are one leaf group, however many nodes there are.
"""


@dataclass(frozen=True, slots=True)
class ClosShape:
    """Sizes of a Clos.

    A *slot* is what one GPU sends through: a NIC, or all the NICs of a GPU where it has several, or the NIC
    that several GPUs share. A *leaf group* is the nodes under one leaf, or under one set of rail leaves.
    Every leaf of a pod is joined to each of the pod's spines, and spine k of each pod to core plane k.

    Attributes:
        num_nodes: hosts.
        slots: NIC slots of a host.
        slot_bytes_per_s: one slot, one direction.
        nodes_per_group: hosts of a leaf group.
        leaves_per_group: leaves of a leaf group: `slots` when rail-optimised, else 1.
        groups_per_pod: leaf groups of a pod.
        spines: spines of a pod; 0 when one leaf group holds all.
        leaf_uplink_bytes_per_s: one leaf to one spine, one direction.
        spine_uplink_bytes_per_s: one spine to its core plane, one direction; 0 with one pod.
    """

    num_nodes: int
    slots: int
    slot_bytes_per_s: float
    nodes_per_group: int
    leaves_per_group: int
    groups_per_pod: int
    spines: int
    leaf_uplink_bytes_per_s: float
    spine_uplink_bytes_per_s: float

    @property
    def num_groups(self) -> int:
        """Leaf groups."""
        return -(-self.num_nodes // self.nodes_per_group)

    @property
    def num_leaves(self) -> int:
        """Leaves in all."""
        return self.num_groups * self.leaves_per_group if self.slots else 0

    @property
    def num_pods(self) -> int:
        """Pods."""
        return -(-self.num_groups // self.groups_per_pod)

    @property
    def has_core(self) -> bool:
        """Whether a core joins several pods."""
        return self.num_pods > 1

    @property
    def is_rail_optimized(self) -> bool:
        """Whether each slot of a node goes to a leaf of its own."""
        return self.leaves_per_group > 1

    def leaf(self, node: int, slot: int) -> int:
        """The leaf that `slot` of `node` is plugged into."""
        group = node // self.nodes_per_group
        return group * self.leaves_per_group + (slot if self.is_rail_optimized else 0)

    def pod_of_leaf(self, leaf: int) -> int:
        """The pod of a leaf."""
        return leaf // (self.leaves_per_group * self.groups_per_pod)

    def spine_for(self, dst_slot: int) -> int:
        """The spine (and core plane) that traffic to a cluster-wide slot takes: by the destination, as static routing of a fat tree
        does (Zahavi, D-mod-k), so that shift patterns, that is rings and all-to-all rounds, spread evenly.
        """
        return (dst_slot // self.slots if self.is_rail_optimized else dst_slot) % self.spines


def nic_slots(hardware: HardwareProfile) -> tuple[int, float]:
    """Slots of a node and bytes per second of one, one direction."""
    nic = hardware.nic
    slots = min(nic.count, hardware.gpus_per_node) if nic.kind != "none" else 0
    return (slots, nic.count * nic.bandwidth.value / slots) if slots else (0, 0.0)


def clos(hardware: HardwareProfile, num_nodes: int, *, rails: bool) -> ClosShape:
    """The Clos of `hardware` over `num_nodes` nodes, each NIC slot of a node on a leaf of its own when
    `rails`.

    Spines are counted by radix arithmetic: as many switches of 64 ports as the pod's leaf uplinks fill, half
    of the ports pointing up where there is a core, and no more than a leaf has uplinks. For a DGX SuperPOD of
    1 to 4 scalable units this gives its 4, 8, 12 and 16 spines.
    """
    fabric = hardware.fabric
    slots, slot_bw = nic_slots(hardware)
    per_group, per_pod = fabric.nodes_per_leaf_group, fabric.leaf_groups_per_pod
    groups = -(-num_nodes // per_group)
    leaves = slots if rails else 1
    core = groups > per_pod
    spines, leaf_up, spine_up = 0, 0.0, 0.0
    if slots and num_nodes > 1 and (groups > 1 or leaves > 1):
        ports = per_group * slots / fabric.oversubscription
        filled = min(groups, per_pod) * ports / (RADIX // 2 if core else RADIX)
        spines = max(1, min(-int(-filled // 1), int(ports / leaves)))
        leaf_up = per_group * slots * slot_bw / leaves / fabric.oversubscription / spines
        spine_up = leaf_up * leaves * per_pod / fabric.pod_oversubscription if core else 0.0
    return ClosShape(num_nodes, slots, slot_bw, per_group, leaves, per_pod, spines, leaf_up, spine_up)


def fabric_shape(hardware: HardwareProfile, num_nodes: int) -> ClosShape:
    """The scale-out network of `num_nodes` nodes of `hardware`."""
    if (rails := RAILS.get(hardware.fabric.kind)) is not None:
        return clos(hardware, num_nodes, rails=rails)
    slots, slot_bw = nic_slots(hardware)
    return ClosShape(num_nodes, slots, slot_bw, num_nodes, 1, 1, 0, 0.0, 0.0)
