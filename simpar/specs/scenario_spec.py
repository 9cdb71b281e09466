"""A scenario: a model on a cluster under a plan, resolved."""

from __future__ import annotations

from simpar.errors import InputError, Violation
from simpar.specs.architecture import ModelSpec
from simpar.specs.base import Spec
from simpar.specs.cluster import ClusterSpec
from simpar.specs.effects import EffectsSpec
from simpar.specs.hardware import HardwareProfile
from simpar.specs.plan import PlanSpec
from simpar.specs.site import Site, site_beside
from simpar.specs.training import TrainingSpec


class Published(Spec):
    """What is published about a scenario, for comparison; never an input."""

    metric: str
    """step_time_s, tokens_per_s_per_gpu, mfu, model_flops_per_s_per_gpu, bubble_fraction."""
    value: float
    """In SI units; fractions for mfu and bubble_fraction."""
    source: str
    """Where it stands."""
    note: str = ""
    """How it was derived, if it was."""
    fitted: bool = False
    """The constants were fitted with this run, so that agreement with it is no evidence."""


class Scenario(Spec):
    """A model, a cluster, a plan and a training step, all resolved."""

    name: str
    """What reports call it."""
    description: str = ""
    """A sentence for people."""
    model: ModelSpec
    """What is trained: the name of a preset, the path of a Hugging Face config.json, or a table."""
    framework: str = "megatron-core"
    """Whose semantics: kernels, defaults, memory, host."""
    framework_version: str | None = None
    """A release (0.9.0), or a month (2024-10); none = the newest behaviour known."""
    cluster: ClusterSpec
    """On which machines."""
    plan: PlanSpec = PlanSpec()
    """How the work is laid out over ranks."""
    training: TrainingSpec
    """Batch, sequence, precision, optimizer."""
    effects: EffectsSpec = EffectsSpec()
    """What is not ideal: contention, slow ranks, faults, jitter."""
    published: tuple[Published, ...] = ()
    """Measured figures of this very run, for comparison; never an input."""
    site: str | Site | None = None
    """What `simpar adapt` learned from a cluster's own runs: a file, relative to the scenario's, or its table."""
    file: str = ""
    """Where it was read from, for messages."""

    @property
    def learned(self) -> Site | None:
        """The site, where one is named and any run is behind it."""
        found = site_beside(self.site, self.file)
        return found if found is not None and found.learned else None

    @property
    def hardware(self) -> HardwareProfile:
        """The cluster's profile, with the cluster's overrides applied.

        Raises:
            InputError: pipeline ranks or replicas are of several kinds (`specs/stage_plan.py` has the hardware of each).
        """
        self.check_one_kind("only simpar simulate, search, explain, compare and simpar.sweep know pipelines of several kinds")
        gpus = self.cluster.num_gpus or self.cluster.own_gpus
        return self.cluster.profile(gpus)

    @property
    def world_size(self) -> int:
        """GPUs used."""
        return self.cluster.num_gpus or sum(part.own_gpus for part in self.cluster.parts or (self.cluster,))

    def check_one_kind(self, why: str) -> None:
        """Raise unless the cluster has machines of one kind.

        Raises:
            InputError: it has parts; `why` says what is in their way.
        """
        parts = self.cluster.parts
        if parts:
            right = "cluster.hardware and cluster.num_nodes"
            raise InputError([Violation("cluster.parts", f"{len(parts)} parts", why, right, self.file)])
        if self.plan.stage_tp is not None:
            raise InputError([Violation("plan.stage_tp", self.plan.stage_tp, why, "plan.tp", self.file)])
