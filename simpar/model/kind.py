"""What a training job is one of, as far as runs of a cluster are alike: how, on what, and which model in which precision."""

from __future__ import annotations

from simpar.model.ledger import total_parameters
from simpar.specs.framework import family_of
from simpar.specs.kinds import Kind
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site


def group_of(scenario: Scenario) -> str:
    """Framework and GPU, the narrowest group of the registry of constants that a site lies in: "megatron-core on H100 SXM"."""
    return f"{family_of(scenario.framework)} on {scenario.hardware.gpu.name}"


def kind_of(scenario: Scenario) -> Kind:
    """The job, whatever its layout."""
    training = scenario.training
    how = "" if training.trainable == "all" else f" {training.trainable}"
    return Kind(
        parameters=float(total_parameters(scenario.model)), sequence_length=training.sequence_length, gpus=scenario.world_size,
        global_batch_size=training.global_batch_size, precision=f"{training.precision}{how}",
    )  # fmt: skip


def site_of(scenario: Scenario) -> Site | None:
    """What was learned from the cluster's own runs, where they had the scenario's framework and GPU."""
    found = scenario.learned
    return found if found is not None and found.group in ("", group_of(scenario)) else None


__all__ = ["group_of", "kind_of", "site_of"]
