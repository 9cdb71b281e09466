"""What a training job is one of, as far as runs of a cluster are alike: how, on what, and which model in which precision."""

from __future__ import annotations

from simpar.model.ledger import total_parameters
from simpar.specs.counts import resolved_dp
from simpar.specs.framework import family_of
from simpar.specs.kinds import Kind
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site


def group_of(scenario: Scenario) -> str:
    """Framework and GPU, the narrowest group of the registry of constants that a site lies in: "megatron-core on H100 SXM"."""
    return f"{family_of(scenario.framework)} on {scenario.hardware.gpu.name}"


def kind_of(scenario: Scenario, step_s: float | None = None) -> Kind:
    """The job, and the degrees of its layout.

    Args:
        step_s: predicted without the site, seconds; none where only the job counts.
    """
    plan, training = scenario.plan, scenario.training
    batches = training.global_batch_size / (training.micro_batch_size * resolved_dp(scenario))
    how = "" if training.trainable == "all" else f" {training.trainable}"
    return Kind(
        parameters=float(total_parameters(scenario.model)), sequence_length=training.sequence_length, gpus=scenario.world_size,
        global_batch_size=training.global_batch_size, precision=f"{training.precision}{how}",
        tp=plan.tp, cp=plan.cp, pp=plan.pp, micro_batch_size=training.micro_batch_size,
        microbatch_s=1.0 if step_s is None else step_s / batches,
    )  # fmt: skip


def of_jobs(scenario: Scenario) -> Scenario:
    """`scenario` at a site that says the same of all its layouts: a factor for each would leave no bound that holds for many."""
    found = scenario.learned
    return scenario if found is None else scenario.model_copy(update={"site": found.of_jobs})


def site_of(scenario: Scenario) -> Site | None:
    """What was learned from the cluster's own runs, where they had the scenario's framework and GPU."""
    found = scenario.learned
    return found if found is not None and found.group in ("", group_of(scenario)) else None
