"""A scenario as files that start the run: the one table of export formats, for `simpar export`, `search --export` and the page.

A format is a function Scenario -> {file name: text}, the main file first; beside it stand the Slurm script and the rank map.
What a framework cannot run is an InputError that names every violation; nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from simpar.errors import InputError, Violation
from simpar.interop.launch import WORK
from simpar.interop.scenario_text import scenario_text
from simpar.registry import Registry
from simpar.searching.abilities import launched_as
from simpar.specs.scenario import Scenario
from simpar.step import decided

Exporter = Callable[[Scenario], dict[str, str]]


def _exporter(name: str) -> Exporter:
    """`export` of a module here, imported when it is called: a command that writes no files needs one of them at most."""

    def export(scenario: Scenario) -> dict[str, str]:
        found: dict[str, str] = import_module(f"simpar.interop.{name}").export(scenario)
        return found

    return export


FORMATS: Final[Registry[Exporter]] = Registry(
    "export format",
    {n: _exporter(n) for n in ("megatron", "torchtitan", "deepspeed", "nanotron", "huggingface", "axolotl", "torchtune")},
)
"""Name -> exporter."""
_LAUNCHES: Final = {"megatron-core": "megatron", "transformers": "huggingface"}
"""Framework whose limits are known -> its export format, where that has another name."""


def launcher(framework: str) -> str:
    """The export format of a framework's own files, "" = of none."""
    name = launched_as(framework)
    return next((n for n in (framework, _LAUNCHES.get(name, name)) if n in FORMATS), "")


def export_files(name: str, scenario: Scenario) -> dict[str, str]:
    """File name -> text of `scenario` for the framework `name`, the main file first.

    Raises:
        UnknownNameError: no such format.
        InputError: everything of the scenario that the framework cannot run.
    """
    exporter = FORMATS[name]
    scenario.check_one_kind("a launch script starts the same command with the same kernels on machines of one kind")
    return exporter(decided(scenario))


def not_launched(scenario: Scenario) -> str:
    """Why the scenario's own framework cannot run its plan, as its exporter sees it; "" = it can, or no exporter knows.

    What the framework cannot run of the model, and what its files do not say of the step's work, is the same for every layout and
    does not count.
    """
    name = launcher(scenario.framework)
    try:
        if name:
            export_files(name, scenario)
    except InputError as error:
        return next((str(v) for v in error.violations if v.field.startswith(("plan.", "training.")) and v.field not in WORK), "")
    return ""


def run_files(scenario: Scenario) -> dict[str, str]:
    """What a layout is run with: its scenario, and the files of its own framework where an exporter knows it."""
    found, name = {"scenario.toml": scenario_text(scenario)}, launcher(scenario.framework)
    with suppress(InputError):
        found.update(export_files(name, scenario) if name else {})
    return found


def check_model(name: str, scenario: Scenario) -> None:
    """Raise unless the framework `name` can run the model at all, whatever its layout.

    Raises:
        UnknownNameError: no such format.
        InputError: everything of the model that the framework cannot run.
    """
    try:
        export_files(name, scenario)
    except InputError as error:
        wrong = [v for v in error.violations if v.field.partition(".")[0] == "model" or v.field in WORK]
        if wrong:
            raise InputError(wrong) from None


def write_files(files: dict[str, str], out: Path, field: str = "--out") -> list[Path]:
    """Write `files` into the folder `out`; a path with a suffix (run.sh) is a file and takes the main file alone.

    Returns:
        The paths written, the main file's first.

    Raises:
        InputError: a file is in the way of the folder, a folder in the way of the file, or writing is not permitted.
    """
    single = bool(out.suffix) and not out.is_dir()
    targets = {out: next(iter(files.values()))} if single else {out / name: text for name, text in files.items()}
    try:
        for path, text in targets.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise InputError([Violation(field, str(out), rule, "name a folder, or a file that may be replaced")]) from None
    return list(targets)
