"""Restrictions that cannot be: values that no layout has, rules that a combination breaks, and which of them to give up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, get_args

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.schedules import SCHEDULES
from simpar.searching import axes
from simpar.searching.choice import Choice, Group, split_text
from simpar.searching.space import Space
from simpar.specs.checks import check_scenario
from simpar.specs.training import Precision
from simpar.topology.mesh import parse_placement

_MODULES: Final = tuple(dict.fromkeys(("attention", "op", *axes.DENSE_MODULES, *axes.MOE_MODULES, *axes.MLA_MODULES)))
_WORDS: Final = {
    "cp_style": ("ring", "all_gather", "ulysses"), "ep_dispatcher": ("alltoall", "allgather", "deepep", "hybridep"),
    "precision": get_args(Precision),
}  # fmt: skip
_PLAIN: Final = {
    "tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "placement": axes.PLACEMENTS[0], "micro_batch_size": 1,
    "sequence_parallel": True, "cp_style": "ring", "overlap_tp": False, "overlap_ep": False, "ep_dispatcher": "alltoall",
    "virtual_stages": 1, "schedule": "1f1b", "split": "even", "overlap_p2p": None, "recompute": "none", "zero_stage": 1,
    "shard_size": None, "reshard_after_forward": True, "overlap_grad_reduce": None, "overlap_param_gather": None,
    "offload_activations": 0.0, "offload_optimizer": False, "offload_parameters": False,
}  # fmt: skip
"""The layout that a rule is shown on where nothing else is known."""
_QUIET: Final = frozenset({*axes.FLAG_AXES, "etp"}) - {"offload_parameters"}
"""Axes that have no effect on many layouts: a value that none has is no mistake."""


def check_values(given: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise unless every value is one that its axis can have at all.

    Raises:
        InputError: all that cannot be, together.
    """
    wrong = [v for axis, values in given.items() for value in values for v in _value(axis, value)]
    if wrong:
        raise InputError(wrong)


def _value(axis: str, value: Any) -> Iterator[Violation]:
    known: list[str] = []
    if (axis, value) == ("split", "auto"):
        yield Violation(axis, value, "layers dealt out by cost are searched by themselves", "--fix split=auto, or cuts without it")
    if axis == "schedule":
        known = [n for n in SCHEDULES if n in axes.SCHEDULES or n == "naive"]
    elif axis in _WORDS:
        known = list(_WORDS[axis])
    elif axis == "recompute":
        yield from _recompute(str(value))
    elif axis == "placement":
        try:
            parse_placement(str(value))
        except InputError as error:
            yield from (Violation(axis, v.value, v.rule, v.right) for v in error.violations)
    elif axis == "zero_stage" and not 0 <= value <= 3:
        yield Violation(axis, value, "must be from 0 to 3", "0 plain, 1 optimizer states, 2 and gradients, 3 and parameters")
    elif axis == "offload_activations" and not 0.0 <= value <= 1.0:
        yield Violation(axis, value, "is a fraction of the saved activations", "from 0 to 1")
    elif axis == "shard_size" and value is not None and value < 1:
        yield Violation(axis, value, "must be at least 1", "a number of ranks, or none for all")
    if known and value not in known:
        yield Violation(axis, value, str(unknown(axis, str(value), known)))


def _recompute(text: str) -> Iterator[Violation]:
    kind, _, detail = text.partition(":")
    right = "none, full, full:3 (first 3 layers of every stage), full:*, selective, selective:core_attn+mlp"
    if kind not in ("none", "full", "selective") or (kind == "none" and detail):
        yield Violation("recompute", text, "is no recomputation", right)
    elif kind == "full" and detail and detail != "*" and not detail.isdigit():
        yield Violation("recompute", text, "needs a number of layers", right)
    elif kind == "selective":
        for name in detail.split("+") if detail else ():
            if name not in _MODULES:
                yield Violation("recompute", text, str(unknown("module", name, list(_MODULES))))


def check_space(space: Space, given: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise if the space is empty, or if no layout of it has any of the values asked for on some axis.

    Args:
        given: restrictions that the user wrote on the command line.

    Raises:
        InputError: which rules are broken, or which restrictions exclude each other.
    """
    if space.size == 0:
        raise InputError(_empty(space))
    wrong = unused(space, given)
    if wrong:
        raise InputError(wrong)


def unused(space: Space, given: Mapping[str, tuple[Any, ...]]) -> list[Violation]:
    """Values asked for that no layout of a space has: an axis without effect there would be silently ignored."""
    found = []
    for axis, values in given.items():
        if axis not in _QUIET and not _realised(space, axis, values):
            rules = broken_rules(replace(space, restrictions={}), {axis: values}, None)
            rule = "; ".join(rules) or "no layout of this model on this cluster, with the other restrictions, has it"
            found.append(Violation(axis, _text(values), rule))
    return found


def _text(values: tuple[Any, ...]) -> str:
    return ",".join("none" if v is None else str(v) for v in values)


def _realised(space: Space, axis: str, values: tuple[Any, ...]) -> bool:
    """Whether any layout of the space has one of these values."""
    return any(axes.matches(axis, v, values) or (axis == "recompute" and _stands_for(v, values)) for v in _values_of(space, axis))


def _stands_for(value: Any, values: tuple[Any, ...]) -> bool:
    """Selections of modules under "selective" alone."""
    return "selective" in values and str(value).startswith("selective")


def _values_of(space: Space, axis: str) -> Iterator[Any]:
    """Values of an axis that layouts of the space have, as they are met."""
    for group in space.groups:
        if axis in ("tp", "cp", "pp", "dp", "ep", "etp", "placement"):
            yield getattr(group, axis)
        elif axis in ("cp_style", "ep_dispatcher", "precision"):
            yield from (getattr(v, axis) for v in space.variants(group))
        elif axis in ("zero_stage", "shard_size", "offload_parameters"):
            yield from (getattr(s, axis) for s in space.states(group))
        elif axis == "offload_activations":
            yield from (o.activations for o in space.offloads)
        else:
            yield from _inner_values(space, group, axis)


def _inner_values(space: Space, group: Group, axis: str) -> Iterator[Any]:
    for batch, m in space.micro_batches(group):
        if axis == "micro_batch_size":
            yield batch
            continue
        for pipeline in space.pipelines(group.pp, m):
            if axis == "recompute":
                yield from space.recomputes(space.deepest(pipeline, group.pp))
            else:
                value = getattr(pipeline, axis)
                yield split_text(value) if axis == "split" else value


def _empty(space: Space) -> list[Violation]:
    """Why a space has no layout at all."""
    given = space.restrictions
    rules = broken_rules(replace(space, restrictions={}), given, None)
    if rules:
        return [Violation("search", _named(given), "no layout can have this", "; ".join(rules))]
    if len(given) == 1:
        rule = "no layout of this model on this cluster has it"
        return [Violation("search", _named(given), rule, "another value, or another batch or cluster")]
    without = [
        axis for axis in given
        if replace(space, restrictions={a: v for a, v in given.items() if a != axis}).size
    ]  # fmt: skip
    if without:
        rule = "no layout has all of this at once"
        return [Violation("search", _named(given), rule, f"give up one of {', '.join(without)}")]
    right = "relax several restrictions, or change the batch or cluster"
    return [Violation("search", _named(given), "the space has no layout", right)]


def _named(given: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{axis}={_text(values)}" for axis, values in given.items()) or "no restriction"


def broken_rules(space: Space, given: Mapping[str, tuple[Any, ...]], base: Choice | None) -> tuple[str, ...]:
    """Rules that keep these values out of a space: of the framework, of earlier restrictions, each value's own, all together.

    Args:
        base: a layout of the space to put the values into; none = the plainest.
    """
    found: list[str] = []
    for axis, values in given.items():
        if values and not any(space.can(axis, v) for v in values):
            found.append(f"{space.framework} cannot run {axis} = {_text(values)} (--framework any takes it in)")
        known = space.restrictions.get(axis)
        if known is not None and not any(axes.matches(axis, v, known) for v in values):
            found.append(f"{axis} is restricted to {_text(known)}")
    if found:
        return tuple(found)
    plain = {**_PLAIN, "precision": space.template.training.precision}
    for axis, values in given.items():
        each = [_violations(space, {**plain, axis: value}, (axis,)) for value in values]
        if each and all(each):
            found += each[0]
    if found:
        return tuple(dict.fromkeys(found))
    flat = plain if base is None else base.flat()
    together = {**flat, **{axis: values[0] for axis, values in given.items() if values}}
    return tuple(dict.fromkeys(_violations(space, together, tuple(given))))


def _violations(space: Space, flat: dict[str, Any], named: tuple[str, ...]) -> list[str]:
    """Broken rules of one layout that have to do with the axes `named`."""
    world, batch = space.template.world_size, space.template.training.global_batch_size
    group = flat["tp"] * flat["cp"] * flat["pp"]
    found = []
    if "dp" in named:
        found += [f"dp = {flat['dp']} must divide the {world} GPUs"] if world % flat["dp"] else []
        found += [f"dp = {flat['dp']} must divide the {batch} sequences of a step"] if batch % flat["dp"] else []
        if not found and "tp" in named and group * flat["dp"] != world:
            found.append(f"tp x cp x pp x dp = {group * flat['dp']} must be the {world} GPUs")
    else:
        degrees = [d for d in ("tp", "cp", "pp") if d in named]
        if world % group and degrees:
            found.append(f"{' x '.join(degrees)} = {group} must divide the {world} GPUs")
        flat = {**flat, "dp": max(world // group, 1)}
    if batch % flat["micro_batch_size"]:
        found.append(f"micro_batch_size = {flat['micro_batch_size']} must divide the {batch} sequences of a step")
    if "dp" in named and (found or named == ("dp",)):
        return found
    if str(flat["recompute"]).startswith("full:") and flat["recompute"][5:].isdigit() and int(flat["recompute"][5:]) > space.layers:
        return [f"recompute = {flat['recompute']}: the model has {space.layers} layers"]
    if flat["virtual_stages"] > 1 and "schedule" not in named:
        # Shown on the schedule that has chunks.
        flat = {**flat, "schedule": "interleaved", "pp": flat["pp"] if "pp" in named else max(flat["pp"], 2)}
    if flat["recompute"] == "full:*":
        flat = {**flat, "recompute": "full"}
    if flat["ep"] == 1 and "etp" not in named:
        flat = {**flat, "etp": flat["tp"]}
    try:
        scenario = Choice.from_flat(flat).scenario(space.template)
        rules = check_scenario(scenario)
    except InputError as error:
        return [str(error)]
    # A batch that the plainest layout does not divide says nothing about the values asked for.
    return [*found, *(str(v) for v in rules if v.field.removeprefix("plan.").removeprefix("training.") in named)]


__all__ = ["broken_rules", "check_space", "check_values", "unused"]
