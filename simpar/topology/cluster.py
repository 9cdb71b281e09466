"""Every link of a cluster under an integer id, and the route between any two GPUs, by arithmetic alone.

Links are one-way. Ids run through the classes in the order scale-up, PCIe up and down (by GPU), NIC up and
down (by slot), leaf to spine and back, spine to core and back.
A rate-sharing engine needs no more than `links` and `route`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simpar.errors import InputError
from simpar.specs.hardware import HardwareProfile
from simpar.topology.clos import ClosShape, fabric_shape
from simpar.topology.levels import check_capacity
from simpar.topology.scaleup import ScaleUp, scale_up

FloatArray = NDArray[np.float64]
Route = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinkTable:
    """Links by id.

    Attributes:
        capacity_bytes_per_s: float array [links], one direction; 0 where a link is missing or dead.
        latency_s: float array [links], one way.
    """

    capacity_bytes_per_s: FloatArray
    latency_s: FloatArray


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` nodes of a machine, wired.

    Attributes:
        hardware: the machine.
        num_nodes: hosts.
        dead_slots: NIC slots (rails) that are down in every node; their GPUs send through the next live one.

    Raises:
        InputError: a machine without a network on several nodes, or no NIC slot left alive.
    """

    hardware: HardwareProfile
    num_nodes: int
    dead_slots: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_capacity(0, self.hardware, self.num_nodes)
        slots = self.net.slots
        wrong = sorted(s for s in self.dead_slots if not 0 <= s < slots)
        if wrong:
            raise InputError(f"dead rails {wrong}: {self.hardware.name} has NIC slots 0 to {slots - 1}")
        if slots and len(self.dead_slots) == slots:
            raise InputError(f"all {slots} NIC slots of {self.hardware.name} are dead: no network is left")

    @cached_property
    def net(self) -> ClosShape:
        """The scale-out network."""
        return fabric_shape(self.hardware, self.num_nodes)

    @cached_property
    def domains(self) -> ScaleUp:
        """The scale-up network."""
        return scale_up(self.hardware, self.num_nodes)

    @cached_property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.num_nodes * self.hardware.gpus_per_node

    @cached_property
    def shares_pcie(self) -> bool:
        """PCIe is the scale-up network, so that its links carry traffic to NICs too."""
        return self.hardware.scale_up.kind in ("pcie", "shared-memory")

    @cached_property
    def one_pcie_switch(self) -> bool:
        """All GPUs of a node meet on one PCIe switch (else there is one for each NIC slot)."""
        return not self.has_pxn or not self.net.slots

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First id of scale-up, PCIe up, PCIe down, NIC up, NIC down, leaf up, leaf down, core up, core down;
        the end.
        """
        net = self.net
        pcie = 0 if self.shares_pcie else self.num_gpus
        nics, leaf, core = self.num_nodes * net.slots, net.num_leaves * net.spines, net.num_pods * net.spines
        sizes = (self.domains.num_links, pcie, pcie, nics, nics, leaf, leaf, core * net.has_core, core * net.has_core)
        return tuple(np.concatenate([[0], np.cumsum(sizes)]).tolist())

    @property
    def num_links(self) -> int:
        """One-way links."""
        return self.offsets[-1]

    @cached_property
    def links(self) -> LinkTable:
        """Capacities and latencies.

        The NIC's latency (a small message, one switch away) is split over its two NIC links; each link
        between switch layers adds the latency of one further switch.
        """
        net, hw = self.net, self.hardware
        capacity, latency = np.empty(self.num_links), np.zeros(self.num_links)
        first, pcie, _, nic, _, leaf, _, core, end = (*self.offsets[:8], self.offsets[-1])
        capacity[first:pcie], latency[first:pcie] = self.domains.capacities(), self.domains.latency_s
        capacity[pcie:nic] = hw.node.pcie_bandwidth.value
        live = np.array([s not in self.dead_slots for s in range(net.slots)], dtype=np.float64)
        capacity[nic:leaf] = np.tile(live * net.slot_bytes_per_s, 2 * self.num_nodes) if net.slots else 0.0
        latency[nic:leaf] = hw.nic.latency.value / 2
        capacity[leaf:core] = net.leaf_uplink_bytes_per_s
        capacity[core:end] = net.spine_uplink_bytes_per_s
        latency[leaf:end] = hw.fabric.switch_latency.value
        capacity.setflags(write=False)
        latency.setflags(write=False)
        return LinkTable(capacity, latency)

    def slot_of(self, gpu: int) -> int:
        """The NIC slot that `gpu` sends through: its own, or the next live one."""
        slot = self._own_slot(gpu)
        while slot in self.dead_slots:
            slot = (slot + 1) % self.net.slots
        return slot

    def _own_slot(self, gpu: int) -> int:
        return gpu % self.hardware.gpus_per_node * self.net.slots // self.hardware.gpus_per_node

    def route(self, src: int, dst: int) -> Route:
        """Ids of the links from GPU `src` to GPU `dst`, in order; empty for a GPU to itself.

        Inside a domain over its own links; inside a node, else, over PCIe; else through NICs: on a
        rail-optimised fabric first to the GPU of `src`'s node on `dst`'s rail where a switch or mesh joins
        them (NCCL's PXN).

        Raises:
            InputError: no such GPU.
        """
        if not (0 <= src < self.num_gpus and 0 <= dst < self.num_gpus):
            raise InputError(f"GPUs {src} and {dst}: the cluster has 0 to {self.num_gpus - 1}")
        if src == dst:
            return ()
        domain = self.hardware.domain_size
        if src // domain == dst // domain:
            return tuple(self.domains.route(src, dst))
        per_node = self.hardware.gpus_per_node
        if src // per_node == dst // per_node:
            return (self._pcie_up(src), self._pcie_down(dst))
        return self._network_route(src, dst)

    def _network_route(self, src: int, dst: int) -> Route:
        into_slot = self.slot_of(dst)
        out_slot = into_slot if self.has_pxn and self.net.is_rail_optimized else self.slot_of(src)
        first, last = self._on_rail(src, out_slot), self._on_rail(dst, into_slot)
        before = tuple(self.domains.route(src, first)) if first != src else ()
        after = tuple(self.domains.route(last, dst)) if last != dst else ()
        slots, per_node = self.net.slots, self.hardware.gpus_per_node
        out, into = src // per_node * slots + out_slot, dst // per_node * slots + into_slot
        nic_up, nic_down = self.offsets[3] + out, self.offsets[4] + into
        middle = self._between_leaves(out, into)
        return (*before, self._pcie_up(first), nic_up, *middle, nic_down, self._pcie_down(last), *after)

    @cached_property
    def has_pxn(self) -> bool:
        """GPUs of a node reach each other's NICs over NVLink or xGMI."""
        spec = self.hardware.scale_up
        return spec.kind in ("nvswitch", "nvlink-mesh", "xgmi") and spec.domain_size >= self.hardware.gpus_per_node

    def _on_rail(self, gpu: int, slot: int) -> int:
        """The GPU of `gpu`'s node beside NIC slot `slot`; `gpu` itself where it is, or where all share one
        PCIe switch.
        """
        if self.one_pcie_switch or self._own_slot(gpu) == slot:
            return gpu
        per_node, slots = self.hardware.gpus_per_node, self.net.slots
        node, local = divmod(gpu, per_node)
        beside = range(-(-slot * per_node // slots), -(-(slot + 1) * per_node // slots))
        return node * per_node + beside[local % len(beside)]

    def _between_leaves(self, out: int, into: int) -> Route:
        """From the leaf of cluster-wide slot `out` to that of `into`."""
        net, slots = self.net, self.net.slots
        here, there = net.leaf(out // slots, out % slots), net.leaf(into // slots, into % slots)
        if here == there:
            return ()
        spine = net.spine_for(into)
        _, _, _, _, _, leaf_up, leaf_down, core_up, core_down, _ = self.offsets
        up, down = leaf_up + here * net.spines + spine, leaf_down + there * net.spines + spine
        pod, other = net.pod_of_leaf(here), net.pod_of_leaf(there)
        if pod == other:
            return (up, down)
        return (up, core_up + pod * net.spines + spine, core_down + other * net.spines + spine, down)

    def _pcie_up(self, gpu: int) -> int:
        return self.offsets[0 if self.shares_pcie else 1] + gpu

    def _pcie_down(self, gpu: int) -> int:
        return (self.num_gpus if self.shares_pcie else self.offsets[2]) + gpu

    def pcie_vertex(self, gpu: int) -> str:
        """The PCIe switch of `gpu`."""
        node, local = divmod(gpu, self.hardware.gpus_per_node)
        if self.shares_pcie:
            kind = "pcie" if self.hardware.scale_up.kind == "pcie" else "domain"
            return f"{kind}:{gpu // self.hardware.domain_size}"
        if self.one_pcie_switch:
            return f"pcie:{node}"
        return f"pcie:{node}.{local * self.net.slots // self.hardware.gpus_per_node}"

    def name_of(self, link: int) -> str:
        """Such as "gpu:3>nvswitch:0"."""
        return ">".join(self.path_of(link))

    def path_of(self, link: int) -> tuple[str, ...]:
        """The vertices that link `link` runs through (a NIC link runs through the NIC).

        Raises:
            InputError: no such link.
        """
        if not 0 <= link < self.num_links:
            raise InputError(f"link {link}: the cluster has 0 to {self.num_links - 1}")
        kind = int(np.searchsorted(self.offsets, link, side="right")) - 1
        index = link - self.offsets[kind]
        if kind == 0:
            return self.domains.ends(index)
        up = kind in (1, 3, 5, 7)
        path = (self._pcie_path, self._nic_path, self._leaf_path, self._core_path)[(kind - 1) // 2](index)
        return path if up else path[::-1]

    def _pcie_path(self, gpu: int) -> tuple[str, ...]:
        return f"gpu:{gpu}", self.pcie_vertex(gpu)

    def _nic_path(self, index: int) -> tuple[str, ...]:
        node, slot = divmod(index, self.net.slots)
        first = node * self.hardware.gpus_per_node - (-slot * self.hardware.gpus_per_node // self.net.slots)
        return self.pcie_vertex(first), f"nic:{node}.{slot}", f"leaf:{self.net.leaf(node, slot)}"

    def _leaf_path(self, index: int) -> tuple[str, ...]:
        leaf, spine = divmod(index, self.net.spines)
        return f"leaf:{leaf}", f"spine:{self.net.pod_of_leaf(leaf)}.{spine}"

    def _core_path(self, index: int) -> tuple[str, ...]:
        pod, spine = divmod(index, self.net.spines)
        return f"spine:{pod}.{spine}", f"core:{spine}"
