"""A hardware profile: one GPU type, its node, its scale-up domain, its NICs and its fabric, each number with its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from simpar.boundary import reader
from simpar.registry import unknown
from simpar.specs.base import Evidence, Spec, data_dir, read_toml, validate
from simpar.specs.collective_constants import CollectiveConstants
from simpar.specs.kernel_constants import KernelConstants
from simpar.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, Watts

Q = TypeVar("Q")


class Sourced(Spec, Generic[Q]):
    """A number with the place it comes from. A bare value counts as assumed."""

    value: Q
    kind: Evidence
    """How the number is known: measured, published, derived (arithmetic on published ones) or assumed."""
    source: str
    """Where it stands: document, table, log; for derived numbers the arithmetic; for assumed ones the reason."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: object) -> object:
        if isinstance(value, dict | BaseModel):
            return value
        return {"value": value, "kind": "assumed", "source": "given without a source"}


class GpuSpec(Spec):
    """One accelerator."""

    name: str
    """As the maker calls it."""
    vendor: Literal["nvidia", "amd", "google", "cpu"] = "nvidia"
    """Its maker."""
    architecture: Literal[
        "fermi", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna2", "cdna3", "cdna4", "tpu", "cpu"
    ]  # fmt: skip
    """Kernels and constants are shared within one."""
    sm_count: Sourced[Annotated[int, Field(gt=0)]]
    """Streaming multiprocessors (compute units, cores)."""
    memory: Sourced[Bytes]
    """Capacity that a process sees in total, before the context."""
    memory_bandwidth: Sourced[BytesPerSecond]
    """Peak of the data sheet; achieved fractions are kernel constants."""
    peak_flops: dict[str, Sourced[FlopsPerSecond]]
    """Dense peak by dtype: bf16, fp16, fp8, fp4, tf32, fp32."""
    power: Sourced[Watts]
    """Board power limit."""
    idle_power: Sourced[Watts] | None = None
    """Board power with nothing running."""
    l2_cache: Sourced[Bytes] | None = None
    """Last-level cache."""


HOST_LINEAR_S: Final = 13.5e-6
"""Of one thread of eager torch: what a bf16 linear layer's forward takes the host with a Xeon 8480C (NVIDIA/TransformerEngine issue
2053, 2025-08)."""
HOST_SLOWDOWN: Final = {"grace": 2.6}
"""The same on GB200, 37.1 us, and on GH200, 33.2 us, over it."""
USUAL_X86: Final = 1.6
"""An x86 host of which no more is known, over that Xeon: the geometric mean of it and of a virtual machine beside an H100, 34.4 us
(validation/measured/h100-2026-11/host.jsonl). Assumed; other machines are not known."""


class NodeSpec(Spec):
    """One host."""

    gpus_per_node: Annotated[int, Field(gt=0)]
    """GPUs of one host."""
    host_memory: Sourced[Bytes] | None = None
    """For offloading and checkpoints."""
    pcie_bandwidth: Sourced[BytesPerSecond]
    """Host link of one GPU, one direction, raw."""
    host_device_bandwidth: Sourced[BytesPerSecond] | None = None
    """Achieved pinned copy rate of one GPU, one direction (offload)."""
    cpu: Literal["intel", "amd", "grace", "other"] = "intel"
    """Maker of the host processor: launch times differ."""
    host_linear: Sourced[Seconds] | None = None
    """What a linear layer's forward in eager torch takes the host, as `simpar calibrate` measures it; none = by `cpu`."""
    cores: Sourced[Annotated[float, Field(gt=0)]] | None = None
    """Cores that the processes of a CPU machine share; none = one for each."""
    time_slice: Sourced[Seconds] | None = None
    """Longest that a process keeps a core which others of the machine wait for."""
    wake_delay: Sourced[Seconds] | None = None
    """Until a process that wakes gets a core while all are taken."""
    host_power: Sourced[Watts] | None = None
    """Everything in the node but the GPUs."""

    @property
    def host_slowdown(self) -> float:
        """Time of Python, dispatcher and driver calls over that of the server cores that host costs were measured on."""
        if self.host_linear is not None:
            return float(self.host_linear.value) / HOST_LINEAR_S
        return HOST_SLOWDOWN.get(self.cpu, 1.0)

    @property
    def core_slowdown(self) -> float:
        """The same over a usual host of this kind of CPU."""
        return self.host_slowdown / HOST_SLOWDOWN.get(self.cpu, 1.0)


class ScaleUpSpec(Spec):
    """The fast domain: NVLink/NVSwitch, xGMI, ICI, or PCIe where there is nothing better."""

    kind: Literal["nvswitch", "nvlink-mesh", "xgmi", "pcie", "ici", "shared-memory", "none"]
    """What the links are."""
    domain_size: Annotated[int, Field(gt=0)]
    """GPUs that reach each other over this tier (8 in a DGX, 72 in an NVL72, the slice of a TPU torus)."""
    links_per_gpu: Annotated[int, Field(ge=0)] = 0
    """Links of one GPU; 0: not counted."""
    bandwidth: Sourced[BytesPerSecond]
    """One GPU, one direction, raw, all its links together."""
    latency: Sourced[Seconds]
    """Of one transfer, one way."""
    in_network_reduction: bool = False
    """The switch reduces (NVLink SHARP: NVLS)."""
    torus: tuple[int, ...] = ()
    """Torus dimensions of an ICI slice."""


class NicSpec(Spec):
    """Network adapters of one node."""

    kind: Literal["infiniband", "roce", "efa", "tcpx", "ethernet", "none"]
    """What they speak."""
    count: Annotated[int, Field(ge=0)]
    """Adapters per node."""
    bandwidth: Sourced[BytesPerSecond]
    """One adapter, one direction, raw."""
    latency: Sourced[Seconds]
    """Small message, one switch away, one way."""


class FabricSpec(Spec):
    """The scale-out network."""

    kind: Literal["rail-optimized", "fat-tree", "roce-pod", "nvl-rack", "torus", "single-switch", "none"]
    """How switches are wired."""
    nodes_per_leaf_group: Annotated[int, Field(gt=0)] = 32
    """Nodes under one leaf (plain tree) or one set of rail leaves (rail-optimised scalable unit)."""
    leaf_groups_per_pod: Annotated[int, Field(gt=0)] = 4
    """Leaf groups under one spine layer; pods are joined by the core."""
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """Leaf-to-spine: downlink over uplink capacity."""
    pod_oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """Spine-to-core: 7 for Llama 3's 1:7 between pods of 3,072 GPUs."""
    switch_latency: Sourced[Seconds]
    """Each further switch with its fibre, one way."""
    in_network_reduction: bool = False
    """The switches reduce (InfiniBand SHARP: CollNet)."""


class HardwareProfile(Spec):
    """A machine type; `num_nodes` is the scenario's."""

    name: str
    """What scenarios call it."""
    description: str = ""
    """A sentence for people."""
    gpu: GpuSpec
    """The accelerator."""
    node: NodeSpec
    """The host."""
    scale_up: ScaleUpSpec
    """The fast links between GPUs."""
    nic: NicSpec
    """Network cards."""
    fabric: FabricSpec
    """The network."""
    kernels: KernelConstants = KernelConstants()
    """Fitted kernel constants; empty ones are scaled from the peaks, with a wider interval."""
    collectives: CollectiveConstants = CollectiveConstants()
    """Fitted collective constants; empty ones are derived from the links, with a wider interval."""
    calibrated: str = ""
    """When and by what this very machine was measured (`simpar calibrate` writes it); empty = a type of machine. Times of a
    calibrated machine stand as they were measured: no factor that was fitted on other clusters' runs applies to them."""

    def __hash__(self) -> int:
        """Of what tells machines of one name apart: tables of rates have no hash."""
        return hash((self.name, self.nic.kind, self.nic.count, self.nic.bandwidth.value, self.scale_up.bandwidth.value))

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one host."""
        return self.node.gpus_per_node

    @property
    def domain_size(self) -> int:
        """GPUs of one scale-up domain (at least a node's, where there is a scale-up fabric)."""
        return self.scale_up.domain_size

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak for `dtype`, falling back to the next wider type the chip has (fp8 -> bf16 -> fp16 -> fp32)."""
        order = ["fp4", "fp8", "bf16", "fp16", "tf32", "fp32"]
        start = order.index(dtype) if dtype in order else 2
        for name in order[start:]:
            if name in self.gpu.peak_flops:
                return self.gpu.peak_flops[name].value
        return next(iter(self.gpu.peak_flops.values())).value


def profile_names() -> list[str]:
    """Names of the shipped hardware profiles."""
    return sorted(p.stem for p in data_dir("hardware_profiles").glob("*.toml"))


def profile_path(name: str) -> Path:
    """The file of a profile: at the path `name`, if that ends in .toml, else the shipped one of that name.

    Raises:
        UnknownNameError: no such name.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = data_dir("hardware_profiles") / f"{name}.toml"
        if not path.is_file():
            raise unknown("hardware profile", name, profile_names(), "simpar profiles")
    return path


def included(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """A copy of the raw profile `table` with `kernels = "fitted/x.toml"` style references replaced by the tables they name."""
    found = dict(table)
    for key in ("kernels", "collectives"):
        if isinstance(found.get(key), str):
            # A profile copied elsewhere still finds the shipped constants.
            own = base / found[key]
            found[key] = read_toml(own if own.is_file() else data_dir("hardware_profiles") / found[key])
    return found


@reader("name", "a hardware profile, TOML")
def read_profile(name: str, *, constants: bool = True) -> HardwareProfile:
    """The shipped profile called `name`, or the profile in the TOML file at that path, read anew.

    Args:
        constants: with the fitted constants; without them it is read many times faster.

    Raises:
        InputError: unknown name, or a file that breaks a rule.
    """
    path = profile_path(name)
    table = read_toml(path)
    if constants:
        table = included(table, path.parent)
    else:
        table = {key: value for key, value in table.items() if key not in ("kernels", "collectives")}
    return validate(HardwareProfile, table, file=str(path))


@lru_cache(maxsize=64)
def load_hardware(name: str) -> HardwareProfile:
    """As `read_profile`, remembered.

    Raises:
        InputError: unknown name, or a file that breaks a rule.
    """
    return read_profile(name)
