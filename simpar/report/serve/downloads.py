"""What the page hands out: the scenario as TOML, the report, launch flags."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.report.serve.answer import Answer
from simpar.report.serve.attached import GPU_FIELDS
from simpar.report.serve.fields import AS_WRITTEN
from simpar.report.serve.state import Bases
from simpar.report.step_html import step_page
from simpar.specs.hardware import profile_names
from simpar.specs.models_io import model_names
from simpar.specs.scenario import Scenario
from simpar.step import simulate
from simpar.toml import toml

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
    return _own_gpu(answer, bases, cluster) + toml(table)


def _own_gpu(answer: Answer, bases: Bases, cluster: dict[str, Any]) -> str:
    """How to write the profile of the user's own GPU, which the scenario then names; "" without one."""
    values = answer.state.values
    own = [(f, values[f.key]) for f in GPU_FIELDS if values.get(f.key) not in (None, "")]
    if not own:
        return ""
    cluster["hardware"] = "own-gpu.toml"
    base = values["hardware"] if values["hardware"] != AS_WRITTEN else bases[answer.state.base].table["cluster"]["hardware"]
    words = " ".join(f"--set '{f.profile}={value:g} {f.unit}'" for f, value in own)
    return f"# Write the profile first: simpar profiles new --from {base} --out own-gpu.toml {words}\n"


def report_html(answer: Answer) -> str:
    """The page that `simpar simulate --html` writes, layer by layer."""
    return step_page(simulate(answer.scenario))


def file_name(answer: Answer, suffix: str) -> str:
    """A name without anything that a file system could mind."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", answer.state.base) + suffix


def launch_flags(answer: Answer, export: Callable[[Scenario], str] | None) -> str:
    """The launch script of the scenario.

    Raises:
        InputError: no exporter, or a layout that its framework cannot run.
    """
    if export is None:
        raise InputError([Violation("launch flags", "", NO_FLAGS)])
    return export(answer.scenario)
