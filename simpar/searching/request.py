"""From what the user writes (a scenario with ranges, or options) to spaces; and a written layout as a choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.searching import axes
from simpar.searching.abilities import ability
from simpar.searching.choice import Choice, Group, Offload, Pipeline, State, Variant, recompute_text, split_text
from simpar.searching.mixed_space import AUTO, OPEN, USUAL, MixedSpace, check_parts
from simpar.searching.refusals import check_space, check_values
from simpar.searching.space import Space
from simpar.specs.base import validate
from simpar.specs.framework import canonical_name, framework
from simpar.specs.framework_rows import FRAMEWORKS
from simpar.specs.framework_run import Pipeline as Engine
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario, make_scenario
from simpar.topology.mesh import Mesh

ANY: Final = "any"
_PLAN_AXES: Final = tuple(a for a in axes.AXES if a not in ("micro_batch_size", "precision", "split", "offload_activations",
                                                            "offload_optimizer", "offload_parameters"))  # fmt: skip
_PARTS_OF_PLAN: Final = frozenset({*_PLAN_AXES, "first_stage_less_layers", "last_stage_less_layers", "embedding_alone",
                                   "layers_per_stage", "offload"})  # fmt: skip
_LAYOUT_FIELDS: Final = ("plan", "training.global_batch_size", "training.micro_batch_size")


def _lists(value: Any) -> list[Any] | None:
    """A range as a list, None for a plain value."""
    if value == ANY:
        return []
    return list(value) if isinstance(value, list) else None


def split_ranges(table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The table without its ranges, and the restrictions that it stands for.

    A plan with a range ("any", or a list of values) fixes what it says in one value, and takes the usual default for what it
    does not say; a plan without any range is taken as a layout that runs today, and restricts nothing.
    """
    plan = dict(table.get("plan") or {})
    training = dict(table.get("training") or {})
    rest = {k: v for k, v in plan.items() if k not in _PARTS_OF_PLAN}
    ranged = [k for k, v in plan.items() if k != "layers_per_stage" and _lists(v) is not None]
    ranged += [k for k in ("micro_batch_size", "precision") if _lists(training.get(k)) is not None]
    restrictions: dict[str, tuple[Any, ...]] = {}
    if ranged:
        restrictions = _fixed(table)
    for key in ("micro_batch_size", "precision"):
        if (values := _lists(training.get(key))) is not None:
            training.pop(key)
            if values and key == "precision":
                training[key] = values[0]
    return {**table, "plan": rest, "training": training}, restrictions


def _fixed(table: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    plan, training = dict(table.get("plan") or {}), dict(table.get("training") or {})
    default = PlanSpec()
    found: dict[str, tuple[Any, ...]] = {}
    for axis in _PLAN_AXES:
        value = plan.get(axis, getattr(default, axis))
        values = _lists(value)
        if values == []:
            continue
        if values is None and axis == "recompute":
            texts = [recompute_text(value if isinstance(value, str) else validate(PlanSpec, {"recompute": value}).recompute)]
            found[axis] = tuple(texts)
        elif values is None and axis == "schedule" and value == "auto":
            found[axis] = _usual_schedules(table)
        elif values is None and value is None and axis in ("dp", "etp"):
            if axis == "etp":
                found[axis] = (1,)
        elif values is not None and axis == "shard_size":
            found[axis] = tuple(None if v in ("all", "none", 0) else v for v in values)
        else:
            found[axis] = tuple(values) if values is not None else (value,)
    for axis, usual in (("micro_batch_size", 1), ("precision", "bf16")):
        value = training.get(axis, usual)
        values = _lists(value)
        if values != []:
            found[axis] = tuple(values) if values is not None else (value,)
    split = (plan.get("first_stage_less_layers", 0), plan.get("last_stage_less_layers", 0), plan.get("embedding_alone", False))
    found["split"] = (split_text(split),)
    offload = plan.get("offload", {})
    found["offload_activations"] = (float(offload.get("activations", 0.0)),)
    for part in ("optimizer", "parameters"):
        found[f"offload_{part}"] = (bool(offload.get(part, False)),)
    return found


def make_space(
    table: dict[str, Any],
    *,
    file: str = "",
    fix: Sequence[str] = (),
    allow: Sequence[str] = (),
    framework: str | None = None,
    num_nodes: int | None = None,
    may_be_empty: bool = False,
) -> Space:
    """The space of a table.

    Args:
        fix, allow: restrictions as written on the command line.
        framework: whose semantics to take and to whose abilities to keep; none = the table's semantics, no limit.
        num_nodes: instead of the table's.
        may_be_empty: as one of several cluster sizes.

    Raises:
        InputError: what is wrong with model, cluster or training, or a restriction that no layout keeps; all together.
    """
    clean, restrictions = split_ranges(table)
    if framework is not None:
        ability(framework)
        clean["framework"] = framework
    if num_nodes is not None:
        clean["cluster"] = {**clean.get("cluster", {}), "num_nodes": num_nodes}
    given = axes.parse_restrictions(fix, allow)
    cluster = clean.get("cluster")
    by_cost = (isinstance(cluster, dict) and bool(cluster.get("parts"))) or given.get("split") == (AUTO,)
    if by_cost:
        given = {axis: values for axis, values in given.items() if values != (AUTO,)}
        usual = _fixed(table)
        said = {axis: values for axis, values in usual.items() if axis not in OPEN and axis != "split"}
        restrictions = {**said, **USUAL, **{a: v for a, v in restrictions.items() if a != "split"}}
        clean["plan"].pop("stage_tp", None)
    check_values({**restrictions, **given})
    template = make_template(clean, file)
    _in_the_space(template)
    if restrictions.get("offload_parameters") == (True,) and _follows(template):
        restrictions["offload_optimizer"] = (False,)
    space = (MixedSpace if by_cost else Space)(template, {**restrictions, **given}, framework)
    if by_cost:
        check_parts(space, given)
    if space.size or not may_be_empty:
        check_space(space, given)
    return space


def optimizer_on_host(scenario: Scenario) -> bool:
    """Whether the optimizer on the host is a choice of its own: not where parameters there take it along."""
    return scenario.plan.offload.optimizer and not (scenario.plan.offload.parameters and _follows(scenario))


def _follows(scenario: Scenario) -> bool:
    return framework(scenario.framework, scenario.framework_version).optimizer.states_follow_parameters


def _usual_schedules(table: dict[str, Any]) -> tuple[str, str]:
    """What "auto" means without and with virtual stages; a framework that does not exist is left to the checks."""
    name = str(table.get("framework") or "")
    own = framework(name, table.get("framework_version")).pipeline if canonical_name(name) in FRAMEWORKS else Engine()
    return own.named("auto", 2, 1), own.named("auto", 2, 2)


def make_template(table: dict[str, Any], file: str = "") -> Scenario:
    """A scenario whose plan does not matter, checked for everything else."""
    return make_scenario({"name": Path(file).stem if file else "search", **table}, file=file, undecided=_LAYOUT_FIELDS)


def _in_the_space(scenario: Scenario) -> None:
    """The space has encoders beside a decoder on the first stage alone, and one model.

    Raises:
        InputError: they have stages of their own, or a reference runs beside the model.
    """
    if scenario.training.reference_model:
        raise InputError([Violation("training.reference_model", True, "no value of the space", "false", scenario.file)])
    if own := scenario.plan.encoder_stages:
        rule = "no value of the space: encoders run on the first stage there"
        raise InputError([Violation("plan.encoder_stages", own, rule, "0", scenario.file)])


def choice_of(scenario: Scenario) -> Choice:
    """The layout that a scenario's plan is.

    Raises:
        InputError: the plan has a part that no axis of the space covers.
    """
    plan, training = scenario.plan, scenario.training
    _in_the_space(scenario)
    if plan.layers_per_stage is not None:
        rule = "a free split of the layers is no value of the space"
        raise InputError([Violation("plan.layers_per_stage", plan.layers_per_stage, rule, "first/last_stage_less_layers")])
    for field, what in (("every", "every k-th layer is"), ("uniform_layers", "chunks of layers are")):
        count = getattr(plan.recompute, field, 1)
        if count > 1:
            right = 'method = "block", as many first layers' if field == "every" else "1: every layer by itself"
            raise InputError([Violation(f"plan.recompute.{field}", count, f"{what} no value of the space", right)])
    mesh = Mesh.of(plan, scenario.world_size)
    own = framework(scenario.framework, scenario.framework_version).pipeline
    schedule = own.named(plan.schedule, plan.pp, plan.virtual_stages)
    chunks = 2 if schedule in axes.V_SHAPED else plan.virtual_stages
    recompute = recompute_text(plan.recompute)
    return Choice(
        Group(plan.tp, plan.cp, plan.pp, mesh.dp, plan.ep, mesh.expert_tp, plan.placement), training.micro_batch_size,
        Variant(plan.sequence_parallel, plan.cp_style, plan.overlap_tp, plan.overlap_ep, plan.ep_dispatcher, training.precision),
        Pipeline(chunks, schedule,
                 (plan.first_stage_less_layers, plan.last_stage_less_layers, plan.embedding_alone), plan.overlap_p2p),
        recompute,
        State(
            plan.zero_stage, plan.shard_size, plan.reshard_after_forward, plan.overlap_grad_reduce, plan.overlap_param_gather,
            plan.offload.parameters,
        ),
        Offload(plan.offload.activations, optimizer_on_host(scenario)),
    )  # fmt: skip


__all__ = ["ANY", "choice_of", "make_space", "make_template", "optimizer_on_host", "split_ranges"]
