"""The axes of the space: their names, default values, and what frameworks can run of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.searching.choice import parse_split, recompute_spec
from simpar.specs.architecture import TokenModel
from simpar.specs.plan import RecomputeSpec

INTEGER_AXES: Final = ("tp", "cp", "pp", "dp", "ep", "etp", "virtual_stages", "micro_batch_size", "zero_stage")
FLAG_AXES: Final = (
    "sequence_parallel", "overlap_tp", "overlap_ep", "overlap_p2p", "overlap_grad_reduce", "overlap_param_gather",
    "reshard_after_forward", "offload_optimizer", "offload_parameters",
)  # fmt: skip
LEFT_OPEN: Final = frozenset({"overlap_p2p", "overlap_grad_reduce", "overlap_param_gather"})
"""Flags that a plan may leave to the framework."""
WORD_AXES: Final = ("schedule", "cp_style", "ep_dispatcher", "precision", "placement", "recompute", "split")
AXES: Final = (*INTEGER_AXES, "shard_size", *FLAG_AXES, "offload_activations", *WORD_AXES)

SCHEDULES: Final = (
    "1f1b", "gpipe", "interleaved", "interleaved_bfs", "interleaved_zb", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe", "dualpipe-v",
)  # fmt: skip
"""naive is left out: it never wins."""

V_SHAPED: Final = frozenset({"zb-v", "v-half", "v-min", "dualpipe-v"})
"""Two stages per rank, down and back up."""

LARGEST: Final = {"micro_batch_size": 32, "virtual_stages": 16, "tokens": 256}
"""Default ranges end here: sequences per micro-batch, chunks per rank, least tokens per context-parallel rank."""

PLACEMENTS: Final = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""Pipeline outermost (Megatron-LM) and data parallel outermost; the orders that frameworks run."""

SHARDS: Final = (2, 8, 32, 128, 512)
"""HSDP: ranks a model is sharded over by default, where they divide; any other with --allow shard_size=..."""

SPLITS: Final = ("even", "0-1", "1-0", "1-1", "alone")

DENSE_MODULES: Final = ("core_attn", "layernorm", "mlp")
MOE_MODULES: Final = ("core_attn", "layernorm", "moe_act", "moe", "shared_experts")
MLA_MODULES: Final = ("mla_up_proj",)


def parse_values(axis: str, texts: Sequence[str]) -> tuple[Any, ...]:
    """The values written for `axis`.

    Raises:
        InputError: no such axis, or a value of the wrong kind.
    """
    if axis not in AXES:
        raise unknown("axis of the space", axis, list(AXES))
    return tuple(_value(axis, text.strip()) for text in texts)


def _value(axis: str, text: str) -> Any:
    try:
        if axis in INTEGER_AXES:
            number = int(text)
            if number < (0 if axis == "zero_stage" else 1):
                raise ValueError
            return number
        if axis == "shard_size":
            return None if text in ("none", "all") else int(text)
        if axis in FLAG_AXES:
            return {"true": True, "false": False, "1": True, "0": False, "on": True, "off": False}[text.lower()]
        if axis == "offload_activations":
            return float(text)
        if axis == "split" and text != "auto":
            parse_split(text)
        if axis == "recompute" and not text.startswith("full:"):
            recompute_spec(text)
    except (ValueError, KeyError):
        right = {"shard_size": "a number or none", "offload_activations": "a fraction from 0 to 1", "split": ", ".join(SPLITS)}
        kind = "true or false" if axis in FLAG_AXES else right.get(axis, "a whole number of at least 1")
        raise InputError([Violation(f"--allow {axis}", text, "is not a value of this axis", kind)]) from None
    return text


EVERYTHING: Final = ("full", "full:*")


def selections(model: TokenModel, able: Sequence[Any] | None, given: Sequence[Any] | None) -> tuple[str, ...]:
    """Recomputations other than of whole layers: none, and the sets of up to two modules.

    Args:
        able: patterns that the framework can run; none = all.
        given: patterns that the user allows; none = the default range.
    """
    modules = list(MOE_MODULES if model.moe else DENSE_MODULES)
    if model.mla:
        modules += MLA_MODULES
    if model.moe and not model.moe.shared_expert_intermediate_size:
        modules.remove("shared_experts")
    if any("op" in str(v) for v in able or ()):
        modules = ["op"]
    # All of an expert layer includes its activation.
    pairs = [(a, b) for a, b in combinations(modules, 2) if {a, b} != {"moe", "moe_act"}]
    found = ["none", *(f"selective:{'+'.join(c)}" for c in [(m,) for m in modules] + pairs)]
    if given is not None:
        found += [v for v in given if v.startswith("selective") and v not in found]
        found = [v for v in found if matches("recompute", v, given)]
    if able is not None:
        found = [v for v in found if matches("recompute", v, able)]
    return tuple(found)


def whole_layers(able: Sequence[Any] | None, given: Sequence[Any] | None) -> tuple[bool, bool, frozenset[int]]:
    """Whether whole layers may be recomputed: all of a stage, any number of its first ones, these numbers of them."""
    able, given = EVERYTHING if able is None else able, EVERYTHING if given is None else given
    both = [v for v in given if v in able or (v.startswith("full:") and "full:*" in able)]
    numbers = frozenset(int(v[5:]) for v in both if v.startswith("full:") and v[5:].isdigit())
    return "full" in both, "full:*" in both, numbers


def shard_sizes(divisors: Sequence[int]) -> list[int]:
    """Default sizes of a shard group below all of the ranks (the last of their ascending divisors)."""
    return [size for size in SHARDS if size in divisors and size < divisors[-1]]


def parse_restrictions(fix: Sequence[str], allow: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`--fix pp=1` and `--allow schedule=1f1b,interleaved` as axis -> values.

    Raises:
        InputError: everything wrong, together.
    """
    found: dict[str, tuple[Any, ...]] = {}
    wrong: list[Violation] = []
    for option, texts in (("--fix", fix), ("--allow", allow)):
        for text in texts:
            # Several assignments may share one option: --fix tp=8,pp=16.
            for axis, values in _assignments(text):
                try:
                    if not axis or not values or (option == "--fix" and len(values) > 1):
                        right = "write it as axis=value" + (",value" if option == "--allow" else "")
                        raise InputError([Violation(option, text, "cannot be read", right)])
                    parsed = parse_values(axis, values)
                    found[axis] = tuple(v for v in found.get(axis, parsed) if v in parsed)
                except InputError as error:
                    wrong += error.violations or [Violation(option, text, str(error))]
    if wrong:
        raise InputError(wrong)
    return found


def _assignments(text: str) -> list[tuple[str, list[str]]]:
    """ "tp=4,8,pp=2" -> [("tp", ["4", "8"]), ("pp", ["2"])]."""
    found: list[tuple[str, list[str]]] = []
    for part in text.split(","):
        axis, equals, value = part.partition("=")
        if equals:
            found.append((axis.strip(), [value] if value.strip() else []))
        elif found:
            found[-1][1].append(part)
        else:
            found.append(("", []))
    return found


def matches(axis: str, value: Any, allowed: Sequence[Any]) -> bool:
    """Whether `value` is among `allowed`; recompute patterns ("full:*", a module alone) match what they stand for."""
    if axis != "recompute":
        return value in allowed
    if value in allowed:
        return True
    text = str(value)
    if text.startswith("full:"):
        return "full:*" in allowed
    if text.startswith("selective:"):
        return all(m in allowed for m in text.removeprefix("selective:").split("+")) or "selective" in allowed
    return False


__all__ = ["AXES", "RecomputeSpec", "matches", "parse_restrictions", "parse_values", "selections", "whole_layers"]
