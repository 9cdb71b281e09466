"""What the page hands out: the scenario as TOML, the report, launch flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.report.serve.answer import Answer
from simpar.report.serve.state import Bases
from simpar.report.step_html import step_page
from simpar.specs.hardware import profile_names
from simpar.specs.models_io import model_names
from simpar.specs.scenario import Scenario
from simpar.step import simulate

NO_FLAGS = "this page was started without an exporter of launch flags"
"""Why the button for launch flags is off, where it is."""


def scenario_toml(answer: Answer, bases: Bases) -> str:
    """The scenario as a file that `simpar simulate` reads: registered names stay, the scenario's own files get whole paths."""
    table = answer.state.table(bases)
    folder = Path(bases[answer.state.base].file).resolve().parent
    cluster = table["cluster"] = dict(table["cluster"])
    for part, key, names in ((table, "model", model_names()), (cluster, "hardware", profile_names())):
        value = part.get(key)
        if isinstance(value, str) and value not in names and (folder / value).exists():
            part[key] = str(folder / value)
    return toml(table)


def report_html(answer: Answer) -> str:
    """The page that `simpar simulate --html` writes, layer by layer."""
    return step_page(simulate(answer.scenario))


def file_name(answer: Answer, suffix: str) -> str:
    """A name without anything that a file system could mind."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", answer.state.base) + suffix


def toml(table: Mapping[str, Any]) -> str:
    """A table of strings, numbers, booleans, lists and tables as TOML; None is left out."""
    lines: list[str] = []
    _write(table, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping) and v}
    lines += [f"{_key(k)} = {_value(v)}" for k, v in table.items() if k not in nested and v is not None and not _tables(v)]
    for key, value in table.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        if key in nested:
            lines += ["", f"[{name}]"]
            _write(value, name, lines)
        elif _tables(value):
            for item in value:
                lines += ["", f"[[{name}]]"]
                _write(item, name, lines)


def _tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }" if value else "{}"
    return str(value)


def launch_flags(answer: Answer, export: Callable[[Scenario], str] | None) -> str:
    """The launch script of the scenario.

    Raises:
        InputError: no exporter, or a layout that its framework cannot run.
    """
    if export is None:
        raise InputError([Violation("launch flags", "", NO_FLAGS)])
    return export(answer.scenario)
