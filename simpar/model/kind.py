"""What a training job is one of, as far as runs of a cluster are alike: how, on what, and which model in which precision."""

from __future__ import annotations

from simpar.model.ledger import total_parameters
from simpar.specs.framework import family_of
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site


def group_of(scenario: Scenario) -> str:
    """Framework and GPU, the narrowest group of the registry of constants that a site lies in: "megatron-core on H100 SXM"."""
    return f"{family_of(scenario.framework)} on {scenario.hardware.gpu.name}"


def kind_of(scenario: Scenario) -> str:
    """Model and precision: "8.03B bf16"; fine-tuning says so."""
    parameters, training = float(total_parameters(scenario.model)), scenario.training
    size = f"{parameters / 1e9:.3g}B" if parameters >= 1e8 else f"{parameters / 1e6:.3g}M"
    how = "" if training.trainable == "all" else f" {training.trainable}"
    return f"{size} {training.precision}{how}"


def site_of(scenario: Scenario) -> Site | None:
    """What was learned from the cluster's own runs, where they had the scenario's framework and GPU."""
    found = scenario.learned
    return found if found is not None and found.group in ("", group_of(scenario)) else None


__all__ = ["group_of", "kind_of", "site_of"]
