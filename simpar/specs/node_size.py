"""A machine whose nodes hold another number of GPUs than its profile's: what grows with the GPUs, what stays a link's.

Cloud shapes and supercomputers cut the same GPU into nodes of 1, 2, 4, 8 or 16. Everything that a node has per GPU (adapters,
host memory, host power) keeps its share per GPU; a GPU keeps its links. What the boards of another size really are (a switch or a
mesh of links, an adapter more or less) is a profile's to say.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

from simpar.specs.base import data_dir, read_toml, validate
from simpar.specs.collective_constants import CollectiveConstants
from simpar.specs.hardware import HardwareProfile, ScaleUpSpec, Sourced

Q = TypeVar("Q")
_SWITCHED = ("nvswitch", "pcie", "shared-memory")
"""Scale-up fabrics that a larger board extends; links of a mesh are as many as the GPUs have."""


def with_gpus_per_node(profile: HardwareProfile, gpus: int) -> HardwareProfile:
    """`profile` with nodes of `gpus` GPUs; the numbers that change are marked as assumed.

    A domain wider than a node (a rack, a torus) stays what it is, as far as whole nodes fill it. One that is a node, or a part of
    it, follows the node.
    """
    if gpus == profile.gpus_per_node:
        return profile
    share = gpus / profile.gpus_per_node
    node: dict[str, Any] = {"gpus_per_node": gpus}
    for name in ("host_memory", "host_power"):
        if (number := getattr(profile.node, name)) is not None:
            node[name] = _times(number, share, f"nodes of {gpus} GPUs")
    nic = profile.nic
    if nic.count:
        nic = nic.model_copy(update={"count": max(1, round(nic.count * share))})
    changes: dict[str, Any] = {"node": profile.node.model_copy(update=node), "nic": nic, "scale_up": _scale_up(profile, gpus)}
    if profile.scale_up.kind == "pcie":
        # Collectives over PCIe are the host's (peer access, sockets), and a box of another size is another host: a sound one.
        own = profile.collectives
        changes["collectives"] = own.model_copy(update={"scale_up": _sound_host().scale_up, "bands": (), "points": ()})
    return profile.model_copy(update=changes)


@lru_cache(maxsize=1)
def _sound_host() -> CollectiveConstants:
    """Constants measured on a PCIe host that keeps its bandwidth with more GPUs."""
    path = data_dir("hardware_profiles") / "fitted" / "blackwell_pcie_roce.collectives.toml"
    return validate(CollectiveConstants, read_toml(path), file=str(path))


def _scale_up(profile: HardwareProfile, gpus: int) -> ScaleUpSpec:
    old, per_node = profile.scale_up, profile.gpus_per_node
    if old.torus:
        return old
    if old.domain_size > max(per_node, gpus):
        return old.model_copy(update={"domain_size": old.domain_size - old.domain_size % gpus})
    if old.domain_size >= per_node and old.kind in _SWITCHED:
        return old.model_copy(update={"domain_size": gpus})
    # Bridged pairs and meshes do not grow; of a mesh, only the links to the GPUs that are there count.
    domain = min(old.domain_size, gpus) if gpus % min(old.domain_size, gpus) == 0 else gcd(old.domain_size, gpus)
    changes: dict[str, Any] = {"domain_size": domain}
    if old.kind == "xgmi" and domain > 1:
        changes["bandwidth"] = _times(old.bandwidth, (domain - 1) / (old.domain_size - 1), f"links to {domain - 1} others")
    return old.model_copy(update=changes)


def _times(number: Sourced[Q], factor: float, why: str) -> Sourced[Q]:
    if factor == 1.0:
        return number
    update = {"value": number.value * factor, "kind": "assumed", "source": f"{number.source}, times {factor:g}: {why}"}  # type: ignore[operator]
    return number.model_copy(update=update)
