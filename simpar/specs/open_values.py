"""Facts that a scenario leaves open: `recompute = { unknown = true }`, `virtual_stages = { any_of = [1, 2, 5] }`.

A field that is not known is a set of admissible values with a weight each. `{ any_of = [...] }` lists them, equally likely unless
`weights` says otherwise; `{ unknown = true }` takes what the field admits, weighed by how common each value is in published runs.
"""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from simpar.errors import InputError, Violation
from simpar.specs.base import known_fields, violations_of
from simpar.specs.scenario_spec import Scenario

MOST_READINGS: Final = 256
"""Combinations of open values that are enumerated at most."""
PRIORS: Final[dict[str, dict[Any, float]]] = {
    "plan.recompute": {"full": 0.33, "none": 0.53, "selective": 0.14},
    "plan.virtual_stages": {1: 0.45, 2: 0.08, 3: 0.08, 4: 0.11, 5: 0.04, 6: 0.02, 8: 0.12, 12: 0.07, 20: 0.04},
    "plan.zero_stage": {0: 0.24, 1: 0.19, 2: 0.08, 3: 0.48},
    "plan.sequence_parallel": {False: 0.2, True: 0.8},
    "plan.overlap_grad_reduce": {False: 0.15, True: 0.85},
    "plan.overlap_param_gather": {False: 0.2, True: 0.8},
    "training.micro_batch_size": {1: 0.41, 2: 0.14, 3: 0.01, 4: 0.16, 5: 0.01, 6: 0.02, 8: 0.1, 12: 0.02, 16: 0.04, 32: 0.04,
                                  64: 0.01},
    "training.compile": {False: 0.39, True: 0.61},
}  # fmt: skip
"""Field -> value -> share of published runs that state it, each source with the same weight: what `python -m
validation.tools.priors` prints of validation/runs."""


@dataclass(frozen=True, slots=True)
class OpenField:
    """One field that a scenario leaves open.

    Attributes:
        path: the field, "plan.recompute".
        values: (value, weight) pairs; the weights add to 1.
    """

    path: str
    values: tuple[tuple[Any, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to settle every open field.

    Attributes:
        values: (path, value) pairs.
        weight: product of their weights.
        table: the scenario's table with these values.
    """

    values: tuple[tuple[str, Any], ...]
    weight: float
    table: dict[str, Any]

    @property
    def key(self) -> str:
        """The values as text, which hashes (a value may be a table)."""
        return repr(self.values)


def open_fields(table: Mapping[str, Any], file: str = "") -> tuple[OpenField, ...]:
    """The open fields of a scenario's raw table, in the order in which they stand.

    Raises:
        InputError: an empty set, weights that do not match, no such field, or one whose values cannot be listed.
    """
    return tuple(_field(path, value, file) for path, value in _leaves(table))


def choices(table: Mapping[str, Any], fields: tuple[OpenField, ...], file: str = "") -> list[Choice]:
    """Every combination of the values of `fields`, the likeliest first.

    Raises:
        InputError: more than `MOST_READINGS` combinations.
    """
    count = 1
    for field in fields:
        count *= len(field.values)
    if count > MOST_READINGS:
        rule = f"{count} combinations of open values"
        named = ", ".join(f"{f.path} ({len(f.values)})" for f in fields)
        raise InputError([Violation(named, count, rule, f"at most {MOST_READINGS}: settle a field, or list fewer values", file)])
    found = []
    for combination in itertools.product(*(field.values for field in fields)):
        settled = copy.deepcopy(dict(table))
        weight = 1.0
        for field, (value, share) in zip(fields, combination, strict=True):
            _set(settled, field.path, value)
            weight *= share
        values = tuple((field.path, value) for field, (value, _) in zip(fields, combination, strict=True))
        found.append(Choice(values, weight, settled))
    return sorted(found, key=lambda choice: -choice.weight)


def facts_of(values: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """(Path, value) pairs as text: "plan.recompute = full"."""
    return tuple(f"{path} = {value}" for path, value in values)


def is_open(value: object) -> bool:
    """Whether a raw value leaves its field open."""
    return isinstance(value, Mapping) and ("any_of" in value or "unknown" in value)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in table.items():
        path = f"{prefix}{key}"
        if is_open(value):
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")


def _field(path: str, value: Mapping[str, Any], file: str) -> OpenField:
    extra = sorted(set(value) - {"any_of", "weights", "unknown"})
    if extra or ("any_of" in value) == bool(value.get("unknown")):
        right = "write { unknown = true } or { any_of = [first, second] }"
        raise InputError([Violation(path, dict(value), "is no way to leave a field open", right, file)])
    if value.get("unknown"):
        return OpenField(path, _admissible(path, file))
    listed, weights = value["any_of"], value.get("weights")
    if not isinstance(listed, list | tuple) or not listed:
        raise InputError([Violation(f"{path}.any_of", listed, "must be a list of values", "such as [1, 2]", file)])
    weights = weights if weights is not None else [1.0] * len(listed)
    positive = isinstance(weights, list | tuple) and all(isinstance(w, int | float) and 0 < w < float("inf") for w in weights)
    if not positive or len(weights) != len(listed):
        raise InputError([Violation(f"{path}.weights", weights, "must be one positive number for each value", file=file)])
    _check_types(path, listed, file)
    return OpenField(path, _shares(zip(listed, weights, strict=True)))


def _check_types(path: str, listed: Iterable[Any], file: str) -> None:
    """Raise where a listed value is none of its field's type: no run can have had it, so it is a mistake, not a reading to drop."""
    info = _info(path)
    if not path.startswith(("plan.", "training.")) or info is None:
        return  # cluster and model are resolved from names and files first
    constrained: Any = Annotated[info.annotation, info]
    adapter: TypeAdapter[Any] = TypeAdapter(constrained)
    for value in listed:
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            tables = _specs(info.annotation) or [Scenario]
            raise InputError(violations_of(error, tables[0], value, file, f"{path}.any_of")) from None


def _shares(pairs: Any) -> tuple[tuple[Any, float], ...]:
    listed = list(pairs)
    total = sum(weight for _, weight in listed)
    return tuple((value, weight / total) for value, weight in listed)


def _admissible(path: str, file: str) -> tuple[tuple[Any, float], ...]:
    """Values of a field whose value is unknown: those of `PRIORS`, else every choice of its type, equally likely."""
    if path in PRIORS:
        return _shares(PRIORS[path].items())
    info = _info(path)
    if info is None and path.startswith(("plan.", "training.")):
        raise InputError([Violation(path, "unknown", "unknown field", known_fields(Scenario, tuple(path.split("."))), file)])
    options = _options(info.annotation) if info else ()
    if not options:
        right = f"list them: {path.rpartition('.')[2]} = {{ any_of = [first, second] }}"
        raise InputError([Violation(path, "unknown", "its admissible values are not known", right, file)])
    return _shares((option, 1.0) for option in options)


def _info(path: str) -> FieldInfo | None:
    """The field of a scenario at `path`; None where its specs have none of that name."""
    found: FieldInfo | None = None
    current: Any = Scenario
    for part in path.split("."):
        models = _specs(current)
        if not models or part not in models[0].model_fields:
            return None
        found = models[0].model_fields[part]
        current = found.annotation
    return found


def _specs(annotation: Any) -> list[type[BaseModel]]:
    """The tables that an annotation admits."""
    return [m for m in (annotation, *get_args(annotation)) if isinstance(m, type) and issubclass(m, BaseModel)]


def _options(annotation: Any) -> tuple[Any, ...]:
    if annotation is bool:
        return (True, False)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(option for part in get_args(annotation) for option in _options(part))
    return ()


def _set(table: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        table = table[parent]
    table[last] = value
