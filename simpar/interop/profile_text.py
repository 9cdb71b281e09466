"""A hardware profile as a commented TOML file, to start one's own from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from simpar.specs.base import field_texts, read_toml, validate
from simpar.specs.hardware import HardwareProfile, included, profile_path
from simpar.specs.scenario import apply_override
from simpar.toml import toml_value

_HEAD = """\
# A hardware profile, written by `simpar profiles new --from {base}`: change what differs on your machine.
#
# A value may be bare ("192 GB"): it then counts as assumed. Or it says how it is known and where it stands:
#     {{ value = "192 GB", kind = "published", source = "data sheet" }}
# with kind measured, published, derived or assumed. Units: GB and GiB, Gb/s and GB/s, TFLOP/s, us, W.
"""
_CONSTANTS = {
    "kernels": "Constants fitted on measured kernels of this GPU. For another GPU remove the line: they are then scaled from the "
    "peaks, with a wider interval; or measure yours with `simpar calibrate`.",
    "collectives": "Constants fitted on measured collectives of this network. For another network remove the line: they are then "
    "derived from the links, with a wider interval.",
}
_WIDTH = 118


def profile_text(base: str, name: str, overrides: Sequence[str] = ()) -> str:
    """The profile `base` (a name or a path) as a TOML file called `name`, every field with what it means.

    Args:
        overrides: "gpu.memory=192 GB"; a number with a source is replaced by the bare value.

    Raises:
        InputError: no such profile, or an override that breaks a rule.
    """
    path = profile_path(base)
    table = read_toml(path)
    for assignment in overrides:
        apply_override(table, assignment)
    table["name"] = name
    validate(HardwareProfile, included(table, path.parent), file=f"{base} with --set")
    # References to fitted constants stay valid from anywhere; those of the user's own files do not.
    for key in ("kernels", "collectives"):
        if isinstance(table.get(key), str) and (path.parent / table[key]).is_file() and base != path.stem:
            table[key] = str((path.parent / table[key]).resolve())
    lines = [*_HEAD.format(base=base).splitlines(), "", f"name = {toml_value(name)}"]
    if table.get("description"):
        lines.append(f"description = {toml_value(table['description'])}")
    for key, text in _CONSTANTS.items():
        if table.get(key):
            lines += [*_comment(text), f"{key} = {toml_value(table[key])}"]
    for key, field in HardwareProfile.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and key not in _CONSTANTS:
            lines += ["", *_comment(field.annotation.__doc__ or ""), f"[{key}]", *_section(key, field.annotation, table[key])]
    return "\n".join(lines) + "\n"


def _section(name: str, spec: type[BaseModel], table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one table: a comment, then the field; optional fields without a value as comments; nested tables last."""
    nested, texts = [], field_texts(spec)
    for key, field in spec.model_fields.items():
        value = table.get(key)
        if isinstance(value, dict) and "value" not in value:
            nested.append((key, texts.get(key, ""), value))
            continue
        if key in texts:
            yield from _comment(texts[key])
        if value is None:
            default = field.get_default(call_default_factory=True)
            shown = "not given" if default is None or default == () else f"as if {toml_value(default)}"
            yield f"# {key} = ... ({shown})"
        else:
            yield f"{key} = {toml_value(value)}"
    for key, text, value in nested:
        yield from ["", *_comment(text), f"[{name}.{key}]", *(f"{k} = {toml_value(v)}" for k, v in value.items())]


def _comment(text: str) -> list[str]:
    """Text as comment lines of at most `_WIDTH` characters."""
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line] if line != "#" else lines
