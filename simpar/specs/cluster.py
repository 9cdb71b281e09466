"""Which machines, how many: of one kind, or parts of several kinds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simpar.specs.base import Spec
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.node_size import with_gpus_per_node
from simpar.units import BytesPerSecond, Seconds

Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
"""What if: a multiple."""


class MachinesSpec(Spec):
    """Machines of one kind."""

    hardware: str
    """A name in hardware_profiles/ or a path to a profile."""
    num_nodes: Annotated[int, Field(gt=0)]
    """Machines."""
    gpus_per_node: Annotated[int, Field(gt=0)] | None = None
    """Overrides the profile's; adapters follow with their number per GPU, and so does a scale-up domain of one node."""
    domain_size: Annotated[int, Field(gt=0)] | None = None
    """GPUs that the scale-up links join in this job, where they are fewer than the profile's: a job over pieces of two racks, or
    one node's where links between nodes are off."""
    oversubscription: Annotated[float, Field(ge=1)] | None = None
    """Overrides the fabric's leaf-to-spine ratio."""
    pod_oversubscription: Annotated[float, Field(ge=1)] | None = None
    """Overrides the ratio between pods."""
    nics_per_node: Annotated[int, Field(gt=0)] | None = None
    """Overrides the number of adapters."""
    memory_scale: Scale = 1.0
    """What if: device memory, as a multiple of the profile's."""
    scale_up_bandwidth_scale: Scale = 1.0
    """What if: links inside the scale-up domain, as a multiple of the profile's."""
    nic_bandwidth_scale: Scale = 1.0
    """What if: each adapter, as a multiple of the profile's."""

    @property
    def own_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * (self.gpus_per_node or load_hardware(self.hardware).gpus_per_node)

    def profile(self, gpus: int) -> HardwareProfile:
        """The machines' profile with the overrides applied, for a job that uses so many `gpus` of them."""
        profile = load_hardware(self.hardware)
        if self.gpus_per_node:
            profile = with_gpus_per_node(profile, self.gpus_per_node)
        fabric = {key: value for key in ("oversubscription", "pod_oversubscription") if (value := getattr(self, key)) is not None}
        changes: dict[str, Any] = {}
        if fabric:
            changes["fabric"] = profile.fabric.model_copy(update=fabric)
        if self.nics_per_node:
            changes["nic"] = profile.nic.model_copy(update={"count": self.nics_per_node})
        for part, field, scale in (
            ("gpu", "memory", self.memory_scale),
            ("scale_up", "bandwidth", self.scale_up_bandwidth_scale),
            ("nic", "bandwidth", self.nic_bandwidth_scale),
        ):
            if scale != 1.0:
                old = changes.get(part, getattr(profile, part))
                number = getattr(old, field)
                source = f"{number.source}, times {scale:g}"
                number = number.model_copy(update={"value": number.value * scale, "kind": "assumed", "source": source})
                changes[part] = old.model_copy(update={field: number})
        domain = self.domain_size or filled_domain(profile, gpus)
        if domain != profile.domain_size:
            scale_up = changes.get("scale_up", profile.scale_up)
            changes["scale_up"] = scale_up.model_copy(update={"domain_size": domain})
        return profile.model_copy(update=changes) if changes else profile


class PartsNetworkSpec(Spec):
    """The network between parts of a cluster."""

    bandwidth: BytesPerSecond
    """What one node exchanges with nodes of other parts, one direction, all its adapters together."""
    latency: Seconds = 0.0
    """What distance adds to every message or collective between parts (a fibre of 100 km: 500 us)."""


class ClusterSpec(MachinesSpec):
    """Which machines, how many."""

    num_gpus: Annotated[int, Field(gt=0)] | None = None
    """Fewer than all the nodes' GPUs, for part of a node; none = all."""
    sharp: bool = False
    """The network's switches reduce (SHARP, NCCL_COLLNET_ENABLE=1): a licence and a setting of the job, off by default."""
    parts: tuple[MachinesSpec, ...] = ()
    """Machines of several kinds instead of `hardware` and `num_nodes`; ranks lie on them in this order."""
    parts_hold: Literal["stages", "replicas"] = "stages"
    """What a part holds: whole pipeline ranks, or whole replicas (pipelines) of the data parallelism."""
    parts_network: PartsNetworkSpec | None = None
    """Between parts; none = what the slower of the two can do."""

    @model_validator(mode="before")
    @classmethod
    def _of_parts(cls, table: Any) -> Any:
        """With parts, hardware is theirs and the number of nodes their sum."""
        if not isinstance(table, dict) or not table.get("parts"):
            return table
        parts = table["parts"] if isinstance(table["parts"], list | tuple) else ()
        counts = [part.get("num_nodes") if isinstance(part, dict) else getattr(part, "num_nodes", 0) for part in parts]
        nodes = sum(count for count in counts if isinstance(count, int))
        return {"hardware": "", "num_nodes": nodes or 1, **table}


def filled_domain(profile: HardwareProfile, world_size: int) -> int:
    """GPUs of each scale-up domain that a job of `world_size` uses.

    A job larger than a rack-wide domain takes as many nodes of every rack, so that its groups do not straddle racks: the most
    whole nodes whose GPUs divide the job (64 of an NVL72 for 512 GPUs). Domains of one node, and jobs inside one rack, fill up.
    """
    domain, node = profile.domain_size, profile.gpus_per_node
    if domain <= node or world_size <= domain or profile.scale_up.torus:
        return domain
    return next((d for d in range(domain - domain % node, node, -node) if world_size % d == 0), domain)
