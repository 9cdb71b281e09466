"""What every spec shares: frozen, no unknown fields, and errors that name file, field, value, rule and right values."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from simpar.boundary import MOST_CONFIG_BYTES, parse_toml, read_text
from simpar.errors import InputError, Violation
from simpar.registry import closest

Evidence = Literal["measured", "published", "derived", "assumed"]


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _SpecType
else:

    class _SpecType(type(BaseModel)):
        """Specs built in code break rules in simpar's words, as those read from files do."""

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise InputError(violations_of(error, cls, fields)) from None


class Spec(BaseModel, metaclass=_SpecType):
    """Base of everything the user writes.

    Raises:
        InputError: when built in code from values that break a rule.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def field_texts(spec: type[BaseModel]) -> dict[str, str]:
    """Field -> the string below it in the source, of a spec and what it inherits from.

    Read where it is shown: pydantic would parse the source of every spec on every import.
    """
    found: dict[str, str] = {}
    for owner in reversed(spec.__mro__):
        generic = getattr(owner, "__pydantic_generic_metadata__", {}).get("origin")
        if not issubclass(owner, BaseModel) or owner is BaseModel or generic is not None:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for statement, after in zip(body, [*body[1:], None], strict=True):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(text, str):
                found[statement.target.id] = " ".join(text.split())
    return found


S = TypeVar("S", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in the TOML file at `path`.

    Raises:
        InputError: the file is missing, unreadable or not TOML (with line and column).
    """
    return parse_toml(read_text(path, MOST_CONFIG_BYTES, empty=True), path)


def known_fields(spec: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """What an unknown field at `location` was probably meant to be, else all fields that its table has, in words."""
    known = _fields_of(spec, location[:-1])
    close = closest(str(location[-1]), known)
    return f"did you mean {close!r}?" if close else f"known fields: {', '.join(sorted(known))}"


def _fields_of(spec: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    current: Any = spec
    for part in location:
        fields = getattr(current, "model_fields", {})
        if part not in fields:
            continue
        annotation = fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        current = models[0]
    return list(getattr(current, "model_fields", {}))


_KINDS: Final = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type", "dataclass_type"), "must be a table"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type", "iterable_type"), "must be a list"),
    **dict.fromkeys(("int_type", "int_parsing"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be a text",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "missing": "is required",
}
"""Rules that pydantic states in terms of Python's types, by its name of the error."""


def _below(table: Any, part: int | str) -> tuple[Any] | None:
    """What lies at `part` of a table, a list or a spec, in a tuple; None where nothing does."""
    if isinstance(table, BaseModel):
        table = dict(table)
    elif isinstance(table, list | tuple):
        table = dict(enumerate(table))
    return (table[part],) if isinstance(table, Mapping) and part in table else None


def _written(location: tuple[int | str, ...], table: Any, missing: bool) -> tuple[int | str, ...]:
    """`location` as the user can find it in `table`: without pydantic's names of a union's members."""
    found: list[int | str] = []
    for index, part in enumerate(location):
        below = _below(table, part)
        if below is not None:
            table = below[0]
        elif not (missing and index == len(location) - 1):
            continue
        found.append(part)
    return tuple(found)


def violations_of(error: ValidationError, spec: type[BaseModel], table: Any, file: str = "", prefix: str = "") -> list[Violation]:
    """One `Violation` per problem pydantic found in `table`, in simpar's words."""
    items = [
        (_written(item["loc"], table, item["type"] == "missing"), item) for item in error.errors(include_url=False)
    ]  # fmt: skip
    found: dict[str, Violation] = {}
    for location, item in items:
        if any(len(other) > len(location) and other[: len(location)] == location for other, _ in items):
            continue  # what is wrong below says more: wrong entries of a list, the table that a union's other members are not
        field = ".".join(str(part) for part in (prefix, *location) if part != "")
        rule = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        value, rule, right = item.get("input"), _KINDS.get(item["type"], rule), ""
        if item["type"] == "extra_forbidden":
            rule, right = "unknown field", known_fields(spec, item["loc"])
        elif item["type"] == "missing":
            value = None
        elif isinstance(value, dict | list):
            value = "..."
        elif item["type"] == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
            quoted = f'{field} = "{value}"'
            right = f"in quotes: {quoted}, on the command line --set '{quoted.replace(' ', '')}'"
        before = found.get(field)
        if before is not None and rule not in before.rule:
            rule = f"{before.rule}, or {rule.removeprefix('must be ')}"  # members of a union
        found[field] = Violation(field, value, rule, right, file)
    return list(found.values())


def validate(spec: type[S], table: Any, *, file: str = "", prefix: str = "") -> S:
    """`table` as a `spec`.

    Raises:
        InputError: every violation found, together.
    """
    try:
        return spec.model_validate(table)
    except ValidationError as error:
        raise InputError(violations_of(error, spec, table, file, prefix)) from None


def data_dir(name: str) -> Path:
    """The folder of shipped data called `name` (hardware_profiles, scenarios, validation): in a wheel inside the package, in a
    checkout (or its editable install) at the top of the repository.

    Raises:
        InputError: the installation is incomplete.
    """
    return _shipped(str(resources.files("simpar")), name)


def stored_runs() -> Path:
    """The folder of the measured runs that come with simpar, see `evidence.run_type`."""
    return data_dir("validation") / "runs"


@lru_cache(maxsize=64)
def _shipped(package: str, name: str) -> Path:
    for candidate in (Path(package, "_data", name), Path(package).parent / name):
        if candidate.is_dir():
            return candidate
    raise InputError(f"the shipped folder {name!r} is missing in {package}: this installation of simpar is incomplete")


def checkout_dir(name: str) -> Path | None:
    """`data_dir(name)` where it belongs to a checkout, whose generated files may be written anew; None in an installed package."""
    folder = data_dir(name)
    return None if folder.parent.name == "_data" else folder
