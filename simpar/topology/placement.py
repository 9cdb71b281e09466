"""Where a group of ranks sits in the cluster: all that a collective's price needs to know about the topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "node", "domain", "leaf", "pod", "core"]
"""The widest thing a group crosses: nothing, one node, one scale-up domain, one leaf group, one pod, the core."""


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """One communication group on the cluster.

    Attributes:
        size: ranks in the group.
        ranks_per_domain: how many of them in each scale-up domain they touch, e.g. (8, 8) for 16 ranks on two DGX
            nodes. A domain is a node where the node is the scale-up domain, an NVL72 rack where it is the rack.
        ranks_per_node: the same by host.
        tier: the widest switch layer crossed.
        concurrent_groups: sibling groups of the same dimension with members in the same node that communicate at the
            same time and share its NICs (a node whose 8 GPUs belong to 8 different DP groups: 8).
        oversubscription: how much a NIC's share shrinks when all send across the widest layer crossed: the product of
            downlink over uplink capacity of the layers passed, 1 when none is.
        stride: distance between consecutive members in global rank order (1 = neighbours).
        same_rail: members in different nodes have the same local GPU index (rail-aligned traffic).
    """

    size: int
    ranks_per_domain: tuple[int, ...]
    ranks_per_node: tuple[int, ...]
    tier: Tier
    concurrent_groups: int = 1
    oversubscription: float = 1.0
    stride: int = 1
    same_rail: bool = True

    @property
    def num_domains(self) -> int:
        """Scale-up domains touched."""
        return len(self.ranks_per_domain)

    @property
    def num_nodes(self) -> int:
        """Hosts touched."""
        return len(self.ranks_per_node)

    def __hash__(self) -> int:
        """Of the small fields: a group over 25,000 nodes is looked up as fast as one over two."""
        return hash((self.size, self.tier, self.num_nodes, self.num_domains, self.concurrent_groups, self.stride))
