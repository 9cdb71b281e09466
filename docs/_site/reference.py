"""The generated pages of the site: reference of files, command line, output, schedules, and what supports what.

An mkdocs hook: every page is made from the code when the site is built, so none can be out of date.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).parent))

from output import output_page
from pictures import families_picture
from schedule_pictures import schedules_page
from support import support_page

PAGES: dict[str, Callable[[], str]] = {}
"""Path under docs/ -> what makes it."""


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' event: add the generated pages."""
    from mkdocs.structure.files import File

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    files.append(File.generated(config, "images/families.svg", content=families_picture()))
    return files


def page(path: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a generated page."""

    def register(make: Callable[[], str]) -> Callable[[], str]:
        PAGES[path] = make
        return make

    return register


# --- Files: fields of the pydantic models -----------------------------------------------------------------------------------------


def alternatives(annotation: Any) -> Iterator[Any]:
    """The types that a field may have, without `Annotated`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from alternatives(part)
    else:
        yield annotation


def sourced(kind: Any) -> Any:
    """The type of the value of a figure that carries its source; None for any other type."""
    parts = getattr(kind, "__pydantic_generic_metadata__", {}).get("args")
    return parts[0] if parts else None


@cache
def quantities() -> dict[Any, str]:
    """What reads a quantity with a unit -> how it is written."""
    from simpar import units

    shown = {
        units.Bytes: 'bytes (`"80 GB"`)', units.BytesPerSecond: 'bytes per second (`"400 Gb/s"`)', units.Seconds: 'time (`"5 us"`)',
        units.FlopsPerSecond: 'FLOP/s (`"989 TFLOP/s"`)', units.Watts: 'power (`"700 W"`)',
    }  # fmt: skip
    return {annotation.__metadata__[0].func: text for annotation, text in shown.items()}


def type_text(annotation: Any, metadata: Any = ()) -> str:
    """A type as a person writes it in a TOML file."""
    for part in (*metadata, *getattr(annotation, "__metadata__", ())):
        if getattr(part, "func", None) in quantities():
            return quantities()[part.func]
    words = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): ""}
    shown = []
    for kind in alternatives(annotation):
        if get_origin(kind) is Literal:
            shown += [f"`{value}`" for value in get_args(kind)]
        elif get_origin(kind) in (tuple, list):
            inner = [part for part in get_args(kind) if part is not Ellipsis]
            shown.append("list of " + " and ".join(dict.fromkeys(type_text(part) for part in inner)))
        elif get_origin(kind) is dict or kind is dict:
            shown.append("table")
        elif sourced(kind) is not None:
            shown.append(f"{type_text(sourced(kind))} with source")
        elif getattr(kind, "__name__", "") in FITTED:
            shown.append("table")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            shown.append(f"[table](#{kind.__name__.lower()})")
        else:
            shown.append(words.get(kind, getattr(kind, "__name__", str(kind))))
    return ", ".join(dict.fromkeys(text for text in shown if text))


def bounds(info: FieldInfo) -> str:
    """The range that a field's validators name."""
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    metadata = [*info.metadata]
    for kind in get_args(info.annotation) or ():
        metadata += [*getattr(kind, "__metadata__", ())]
    flat = [part for item in metadata for part in getattr(item, "metadata", [item])]
    return ", ".join(dict.fromkeys(f"{sign} {getattr(m, name):g}" for m in flat for name, sign in signs if hasattr(m, name)))


def default_text(info: FieldInfo) -> str:
    """What holds where the file says nothing."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel | dict | tuple | list):
        return "" if not value or isinstance(value, BaseModel) else f"`{value}`"
    return f"`{value}`" if value != "" else ""


FITTED = ("KernelConstants", "CollectiveConstants")
"""Tables that fits write and nobody else does."""


def specs_in(spec: type[BaseModel], seen: dict[type[BaseModel], None]) -> dict[type[BaseModel], None]:
    """A spec and every spec that a field of it may hold, in the order of the fields; without fitted constants."""
    if spec in seen or spec.__name__ in FITTED:
        return seen
    seen[spec] = None

    def inside(annotation: Any) -> Iterator[type[BaseModel]]:
        for kind in alternatives(annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and sourced(kind) is None:
                yield kind
            for part in get_args(kind):
                if part is not Ellipsis and get_origin(kind) is not Literal:
                    yield from inside(part)

    for info in spec.model_fields.values():
        for inner in inside(info.annotation):
            specs_in(inner, seen)
    return seen


def cell(text: str) -> str:
    """Text inside a table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def spec_tables(root: type[BaseModel], skip: frozenset[str] = frozenset()) -> str:
    """One table of fields for a spec and for each spec inside it."""
    from simpar.specs.base import field_texts

    parts = []
    for spec in specs_in(root, {}):
        parts.append(f"## {spec.__name__}\n\n{inspect.cleandoc(spec.__doc__ or '')}\n")
        parts.append("| field | value | default | meaning |\n|---|---|---|---|")
        texts = field_texts(spec)
        for name, info in spec.model_fields.items():
            if name in skip:
                continue
            value = "; ".join(text for text in (type_text(info.annotation, info.metadata), bounds(info)) if text)
            meaning = cell(info.description or texts.get(name, ""))
            parts.append(f"| `{name}` | {value} | {default_text(info)} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


@page("reference/scenario.md")
def scenario_page() -> str:
    """Every field of a scenario."""
    from simpar.specs.scenario import Scenario

    return (
        "# Fields of a scenario\n\n"
        "A scenario is a TOML file: a model, a cluster, a plan, a training job. Unknown fields are errors that name the closest field;\n"
        'quantities may carry units (`"80 GB"`, `"400 Gb/s"`). `--set plan.pp=8` overrides a field on the command line. A value that\n'
        "you do not know may be left [open](../open_facts.md).\n\n" + spec_tables(Scenario, frozenset({"file"}))
    )


@page("reference/profile.md")
def profile_page() -> str:
    """Every field of a hardware profile."""
    from simpar.specs.hardware import HardwareProfile

    return (
        "# Fields of a hardware profile\n\n"
        "`simpar profiles new --from dgx-h100 --out my.toml` writes a commented file to start from. A number may stand alone, and then\n"
        "counts as assumed, or as a table with `value`, `kind` (measured, published, derived, assumed) and `source`.\n\n"
        + spec_tables(HardwareProfile)
    )


@page("reference/plan_file.md")
def plan_page() -> str:
    """Every field of a plan file."""
    from simpar.specs.planfile import PlanFile

    return (
        "# Fields of a plan file\n\nWhat `simpar plan` reads: a whole run with its failures, checkpoints and costs; see [Planning](../planning.md).\n\n"
        + spec_tables(PlanFile)
    )


# --- Command line -----------------------------------------------------------------------------------------------------------------


@page("reference/cli.md")
def cli_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from simpar.cli.app import EXIT_CODES, app

    root = typer.main.get_command(app)
    parts = [f"# Command line\n\n{EXIT_CODES}\n\n`simpar --install-completion` adds completion to your shell."]
    for path, command in commands(root, ("simpar",)):
        parts.append(f"\n## {' '.join(path)}\n\n{inspect.cleandoc(command.help or '')}\n")
        if command.epilog and command.epilog.startswith("Example: "):
            parts.append(f"    {command.epilog.removeprefix('Example: ')}\n")
        parts.append("| | meaning | default |\n|---|---|---|")
        for parameter in command.params:
            words = (
                (*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else (parameter.name.upper(),)
            )
            name = " ".join(f"`{word}`" for word in words)
            default = "" if parameter.default in (None, (), False) or callable(parameter.default) else f"`{parameter.default}`"
            parts.append(f"| {name} | {cell(getattr(parameter, 'help', '') or '')} | {default} |")
    return "\n".join(parts)


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that call it."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, (*path, name))


@page("glossary.md")
def glossary_page() -> str:
    """Every term."""
    from simpar.report.terms import TERMS

    rows = (f"| {word} | {cell(meaning)} |" for word, meaning in TERMS.items())
    return "\n".join(
        (
            "# Words\n",
            "Each word has one meaning in simpar; where frameworks differ, the choice is stated.",
            "`simpar simulate --explain-terms` prints those of a report below it.\n",
            "| word | meaning |",
            "|---|---|",
            *rows,
        )
    )


page("reference/schedules.md")(schedules_page)
page("reference/support.md")(support_page)
page("reference/output.md")(output_page)
