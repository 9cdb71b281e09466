"""What every spec shares: frozen, no unknown fields, and errors that name file, field, value, rule and right values."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from simpar.errors import InputError, Violation

Evidence = Literal["measured", "published", "derived", "assumed"]


class Spec(BaseModel):
    """Base of everything the user writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


S = TypeVar("S", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in the TOML file at `path`.

    Raises:
        InputError: the file is missing, unreadable or not TOML (with line and column).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _known_fields(spec: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Field names of the (sub)model at `location`, for suggesting the closest."""
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


def violations_of(error: ValidationError, spec: type[BaseModel], file: str = "", prefix: str = "") -> list[Violation]:
    """One `Violation` per problem pydantic found, in simpar's words."""
    found = []
    items = error.errors(include_url=False)
    for item in items:
        location = item["loc"]
        below = any(len(other["loc"]) > len(location) and other["loc"][: len(location)] == location for other in items)
        if item["type"] == "too_short" and below:
            continue  # only because the wrong entries do not count
        field = ".".join(str(part) for part in (prefix, *location) if part != "")
        value, rule, right = item.get("input"), item["msg"].removeprefix("Value error, "), ""
        if item["type"] == "extra_forbidden":
            known = _known_fields(spec, location[:-1])
            close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
            rule = "unknown field"
            right = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(sorted(known))}"
        elif item["type"] == "missing":
            value, rule = None, "is required"
        elif isinstance(value, dict | list):
            value = "..."
        found.append(Violation(field, value, rule, right, file))
    return found


def validate(spec: type[S], table: Any, *, file: str = "", prefix: str = "") -> S:
    """`table` as a `spec`.

    Raises:
        InputError: every violation found, together.
    """
    try:
        return spec.model_validate(table)
    except ValidationError as error:
        raise InputError(violations_of(error, spec, file, prefix)) from None


def data_dir(name: str) -> Path:
    """The folder of shipped data called `name` (hardware_profiles, scenarios, validation), in a checkout or an install."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package.parent / name, package / "_data" / name):
        if candidate.is_dir():
            return candidate
    raise InputError(f"the shipped folder {name!r} is missing beside {package}")
