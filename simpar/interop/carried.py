"""What a launch file cannot say and does not need to: comment lines that bring a scenario back word for word.

    # simpar: cluster.hardware = "dgx-h100"
    # simpar: plan.dp = null where the file says 8
    # simpar: plan.overlap_p2p = false beside the file

The first kind is no matter of the framework (name, machine, what-if effects). The second writes a value that means the same
as what the file says (meaning.py) as it was written; it no longer counts once somebody edits the file so that the meaning would
change. The third is a fact about the framework that is no setting of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

from pydantic import BaseModel

from simpar.errors import InputError, Violation
from simpar.interop.meaning import meaning, model_meaning
from simpar.specs.base import validate
from simpar.specs.hardware import load_hardware
from simpar.specs.models_io import load_model, model_from_table, model_names, preset_of, table_names
from simpar.specs.scenario import Scenario, make_scenario

_LINE: Final = re.compile(r"^\s*#\s*simpar:\s*([\w.]+)\s*=\s*(.*?)\s*$", re.M)
_WHERE: Final = " where the file says "
_BESIDE: Final = " beside the file"
_FREE: Final = ("name", "description", "framework", "framework_version")
_FOLLOWS: Final = {
    "plan.zero_stage": ("plan.reshard_after_forward", "plan.overlap_param_gather", "plan.shard_size"),
    "plan.schedule": ("plan.virtual_stages", "plan.microbatch_group_size", "plan.layers_per_stage", "plan.overlap_p2p"),
    "plan.virtual_stages": ("plan.microbatch_group_size", "plan.layers_per_stage", "plan.overlap_p2p"),
    "plan.cp": ("plan.cp_style", "plan.dp", "plan.shard_size"),
    "plan.ep": ("plan.etp", "plan.ep_dispatcher", "plan.overlap_ep"),
    "model.num_decoder_layers": ("plan.layers_per_stage",),
    "model.moe": ("plan.ep", "plan.etp", "plan.ep_dispatcher", "plan.overlap_ep"),
}
"""Field -> fields whose meaning hangs on it."""
_CONDITIONAL: Final = ("plan", "training", "model")


class Outside(TypedDict, total=False):
    """What whoever reads a file says of the cluster: where the file does not, or instead of what it says."""

    hardware: str | None
    num_nodes: int | None


@dataclass(frozen=True, slots=True)
class Imported:
    """A scenario read from a launch file.

    Attributes:
        scenario: checked.
        warnings: what stands in the file, may change the step, and is not in the scenario.
    """

    scenario: Scenario
    warnings: tuple[str, ...] = ()


@dataclass
class Reading:
    """What a file says by itself.

    Attributes:
        table: raw scenario table.
        warnings: as in `Imported`.
        wrong: what cannot be read at all.
        finish: completes the table once the number of GPUs is known.
    """

    table: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    wrong: list[Violation] = field(default_factory=list)
    finish: Callable[[dict[str, Any], int], None] | None = None


def carried(
    scenario: Scenario, reading: Reading, what: str, refused: Sequence[Violation] = (), unsaid: Collection[str] = ()
) -> list[str]:
    """Comment lines that bring `scenario` back from a file that says `reading` by itself.

    Args:
        what: the format, for messages.
        refused: what the framework does not run, told together with what its file cannot say.
        unsaid: fields that are no setting of the framework but a fact about it, and so travel as they are.

    Raises:
        InputError: `refused`, and every field whose meaning the file does not hold.
    """
    free = dict(_free(scenario))
    read = _unchecked(_table(reading, free))
    wanted, found = meaning(scenario), meaning(read)
    told = {v.field for v in refused}
    lost = {path for path, value in wanted.items() if value != found.get(path) and path not in unsaid}
    # What follows from another field that is told, or has no effect here, is no loss of its own.
    follows = {name for field, names in _FOLLOWS.items() if field in lost | told for name in names}
    named = [
        Violation(path, _plain(value), f"{what} cannot say this", f"it can say {_plain(found.get(path))!r}")
        for path, value in wanted.items()
        if path in lost - told - follows and (value is not None or not lost | told)
    ]
    if refused or named:
        raise InputError([*refused, *named])
    lines = [f"{path} = {_written(value)}" for path, value in free.items()]
    preset = preset_of(scenario.model)
    if preset is not None and read.model != scenario.model:
        lines.append(f"model = {_written(preset)}")
    for part in _CONDITIONAL:
        if part == "model" and preset is not None:
            continue
        said, wrote = getattr(read, part).model_dump(mode="json"), getattr(scenario, part).model_dump(mode="json")
        for name, value in wrote.items():
            if name == "stacks" and wanted.get("model.stacks") == found.get("model.stacks"):
                continue  # kinds of layers by other names
            if value != said.get(name):
                where = f"{_WHERE}{_written(said.get(name))}"
                # A model's name and source are no part of its meaning.
                condition = _BESIDE if wanted.get(f"{part}.{name}") != found.get(f"{part}.{name}") else where
                lines.append(f"{part}.{name} = {_written(value)}{condition}")
    return [f"# simpar: {line}" for line in lines]


def _written(value: Any) -> str:
    """JSON on one line of printable characters, whatever a format takes for the end of a line."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(value, ensure_ascii=False))


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value


def _free(scenario: Scenario) -> Iterator[tuple[str, Any]]:
    """What no launch file is about."""
    for name in _FREE:
        if (value := getattr(scenario, name)) not in (None, ""):
            yield name, value
    for part in ("cluster", "effects"):
        spec = getattr(scenario, part)
        for name, spec_field in type(spec).model_fields.items():
            value = getattr(spec, name)
            if value != spec_field.get_default(call_default_factory=True):
                yield f"{part}.{name}", spec.model_dump(mode="json")[name]


def _put(table: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        inner = table.get(parent)
        table[parent] = dict(inner) if isinstance(inner, dict) else {}
        table = table[parent]
    table[last] = value


def _unchecked(table: dict[str, Any]) -> Scenario:
    """The scenario of a table, without the rules that span several parts: what differs is to be told, not what follows from it."""
    model = table["model"]
    found = load_model(model) if isinstance(model, str) else model_from_table(model)
    return validate(Scenario, {**_without_none(table), "model": found.model_dump()})


def _table(reading: Reading, free: Mapping[str, Any]) -> dict[str, Any]:
    table = {k: dict(v) if isinstance(v, dict) else v for k, v in reading.table.items()}
    for path, value in free.items():
        _put(table, path, value)
    if reading.finish is not None:
        cluster = table["cluster"]
        per_node = cluster.get("gpus_per_node") or load_hardware(cluster["hardware"]).gpus_per_node
        world = cluster.get("num_gpus") or cluster["num_nodes"] * per_node
        reading.finish(table, world)
    return table


def settled(reading: Reading, text: str, file: str = "", outside: Outside | None = None) -> Imported:
    """The scenario of a file: what it says, its comment lines, and the cluster from the outside.

    Raises:
        InputError: what cannot be read, a comment line that is broken, and every rule that the scenario breaks; together.
    """
    hints, wrong = _hints(text, file)
    free = {p: h.value for p, h in hints.items() if h.where is None and not h.beside and p != "model"}
    for name, value in (outside or {}).items():
        if value is not None:
            free[f"cluster.{name}"] = value
            free.pop("cluster.num_gpus", None)
    known = {
        **reading.table.get("cluster", {}),
        **{p.removeprefix("cluster."): v for p, v in free.items() if p.startswith("cluster.")},
    }
    wrong += [
        Violation(f"--{name.replace('_', '-')}", None, f"the file does not say {what}", right, file)
        for name, what, right in (
            ("hardware", "what it runs on", "the name of a hardware profile (`simpar profiles`)"),
            ("num_nodes", "on how many nodes it runs", "their number"),
        )
        if name not in known
    ]
    if reading.wrong or wrong:
        raise InputError([*reading.wrong, *wrong])
    table = _table(reading, free)
    read = make_scenario(_without_none(table), file=file)
    if isinstance(table["model"], dict) and not any(path.startswith("model") for path in hints):
        table["model"] = next((n for n in table_names() if _same_model(read, n)), table["model"])
    table = _worded(table, read, hints, file)
    scenario = make_scenario(_without_none(table), file=file)
    return Imported(scenario.model_copy(update={"file": ""}), tuple(dict.fromkeys(reading.warnings)))


def settled_on_gpus(reading: Reading, text: str, file: str, outside: Outside) -> Imported:
    """As `settled`, for a file that says its number of GPUs; `num_gpus` stays only where the job does not fill its nodes."""
    known = reading.table["cluster"]
    hints, _ = _hints(text, file)
    hinted = hints.get("cluster.hardware")
    name = outside.get("hardware") or (hinted.value if hinted is not None else None)
    gpus = known.pop("num_gpus", None)
    if name is not None and gpus is not None and outside.get("num_nodes") is None and "cluster.num_nodes" not in hints:
        per_node = load_hardware(name).gpus_per_node
        if "num_nodes" not in known or gpus % per_node or gpus != known["num_nodes"] * per_node:
            known["num_nodes"] = -(-gpus // per_node)
            if gpus % per_node:
                known["num_gpus"] = gpus
    return settled(reading, text, file, outside)


def _worded(table: dict[str, Any], read: Scenario, hints: Mapping[str, _Hint], file: str) -> dict[str, Any]:
    """`table` with the wording of the comment lines: only lines that leave the meaning of the file as it is."""
    said = read.model_dump(mode="json")
    beside = [path for path, hint in hints.items() if hint.beside]
    for path in beside:
        _put(table, path, hints[path].value)
    base = meaning(make_scenario(_without_none(table), file=file) if beside else read)
    lines: list[tuple[str, Any]] = []
    for path, hint in hints.items():
        part, _, name = path.partition(".")
        if path == "model" or (hint.where is not None and part in _CONDITIONAL and said[part].get(name) == json.loads(hint.where)):
            lines.append((path, hint.value))
    if (found := _tried(table, lines, base, file)) is not None:
        return found
    for line in lines:
        table = _tried(table, [line], base, file) or table
    return table


def _tried(table: dict[str, Any], lines: list[tuple[str, Any]], base: Mapping[str, Any], file: str) -> dict[str, Any] | None:
    """`table` with `lines` written in, or None where that is no scenario or means something else."""
    found = {k: dict(v) if isinstance(v, dict) else v for k, v in table.items()}
    for path, value in lines:
        if path.startswith("model.") and isinstance(found["model"], str):
            found["model"] = load_model(found["model"]).model_dump()
        if path == "model":
            found["model"] = value
        else:
            _put(found, path, value)
    try:
        scenario = make_scenario(_without_none(found), file=file)
    except InputError:
        return None
    return found if meaning(scenario) == base else None


@dataclass(frozen=True, slots=True)
class _Hint:
    """A comment line: the value; as JSON, what the file must say for it to count; or that the file says nothing of it."""

    value: Any
    where: str | None = None
    beside: bool = False


def _hints(text: str, file: str) -> tuple[dict[str, _Hint], list[Violation]]:
    """Path -> comment line, and the lines that are broken."""
    found: dict[str, _Hint] = {}
    wrong = []
    for path, rest in _LINE.findall(text):
        beside = rest.endswith(_BESIDE)
        written, where, condition = rest.removesuffix(_BESIDE).partition(_WHERE)
        try:
            found[path] = _Hint(json.loads(written), json.dumps(json.loads(condition)) if where else None, beside)
        except json.JSONDecodeError:
            wrong.append(Violation(f"# simpar: {path}", rest, "is no value", 'JSON, such as "dgx-h100", 8, true or null', file))
    return found, wrong


def _same_model(read: Scenario, name: str) -> bool:
    if name not in model_names():
        return False
    other = read.model_copy(update={"model": load_model(name)})
    return model_meaning(other) == model_meaning(read)


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    """Fields that are none are left out, so that their default (none) holds."""
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in table.items() if v is not None}
