"""The state of the page: a scenario to start from and what was changed of it. It is the address, both ways, and a scenario."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.report.serve.attached import GPU_FIELDS, MOST_PACKED, hardware_of, model_of, unpack
from simpar.report.serve.fields import AS_WRITTEN, BY_KEY, FIELDS, OWN_MODEL, RUN_DEFAULTS, Field, Value
from simpar.schedules import SCHEDULES
from simpar.specs.base import data_dir, read_toml
from simpar.specs.hardware import profile_names
from simpar.specs.models_io import model_names
from simpar.specs.scenario import Scenario, apply_override, make_scenario

SEEN_ONLY = ("pin", "ask")
"""Parts of an address that change what is shown and no answer: pinned configurations, the question."""
MORE_TABLES = ("plan", "training", "cluster")
"""Tables that free overrides may change."""
_LONGEST = 4000
"""Characters of the free overrides, and of an address without what is attached."""


@dataclass(frozen=True)
class Base:
    """A scenario to start from: its raw table, and every control's value in it."""

    name: str
    table: dict[str, Any]
    values: dict[str, Value]
    file: str


class Bases:
    """Scenarios that the page may start from: the shipped ones, and the file named on the command line, if any; all at one site."""

    def __init__(self, file: Path | None = None, site: Path | None = None) -> None:
        self.site = {} if site is None else {"site": str(site.resolve())}
        self.paths = {p.stem: p for p in sorted(data_dir("scenarios").glob("*.toml"))}
        self.first = "llama3.1-405b_h100x16384_tp8pp16" if file is None else file.stem
        if file is not None:
            self.paths = {file.stem: file, **{k: v for k, v in self.paths.items() if k != file.stem}}
        self._read: dict[str, Base] = {}
        # Whatever is wrong with the file is said at once, not in the browser.
        self[self.first]

    def __getitem__(self, name: str) -> Base:
        if name not in self.paths:
            raise unknown("scenario", name, list(self.paths))
        if name not in self._read:
            path = self.paths[name]
            table = {**read_toml(path), **self.site}
            self._read[name] = Base(name, table, values_of(make_scenario(table, file=str(path)), table), str(path))
        return self._read[name]


def values_of(scenario: Scenario, table: Mapping[str, Any]) -> dict[str, Value]:
    """Every control's value in a scenario; what a control cannot say is "as written"."""
    found: dict[str, Value] = {**{field.key: None for field in GPU_FIELDS}, **RUN_DEFAULTS}
    for field in FIELDS:
        if not field.path:
            continue
        if field.key == "model":
            name = table.get("model")
            found["model"] = name if name in field.choices else AS_WRITTEN
            continue
        value: Any = scenario
        for part in field.path.split("."):
            value = getattr(value, part)
        if field.kind == "word" and value not in field.choices:
            value = AS_WRITTEN
        found[field.key] = value
    return found


@dataclass(frozen=True)
class State:
    """Everything that the page shows follows from this.

    Attributes:
        base: name of the scenario started from.
        values: value of every control.
        more: further overrides, "plan.cp_style=ulysses".
        config: packed config.json of the user's own model; "" = none.
        site: packed site that was learned from the user's own runs; "" = none.
    """

    base: str
    values: Mapping[str, Value]
    more: tuple[str, ...] = ()
    config: str = ""
    site: str = ""

    def query(self, bases: Bases) -> str:
        """The address' query: the base, what differs from it, further overrides. Reproduces the state."""
        start = bases[self.base].values
        pairs = [("scenario", self.base)]
        pairs += [(f.key, _text(self.values.get(f.key))) for f in FIELDS if self._differs(f, start)]
        pairs += [("set", text) for text in self.more]
        own = (("config", self.config if self.own_model else ""), ("site", self.site))
        return urlencode([*pairs, *((key, text) for key, text in own if text)])

    @property
    def own_model(self) -> bool:
        """Whether the model is the one that the user dropped."""
        return self.values.get("model") == OWN_MODEL

    def changed(self, bases: Bases) -> set[str]:
        """Keys of the scenario's fields that differ from the base."""
        start = bases[self.base].values
        return {f.key for f in FIELDS if f.path and self._differs(f, start)}

    def _differs(self, field: Field, start: Mapping[str, Value]) -> bool:
        value = self.values.get(field.key)
        return value not in (start.get(field.key), AS_WRITTEN)

    def table(self, bases: Bases) -> dict[str, Any]:
        """The raw scenario table, as `simpar simulate` would read it.

        Raises:
            InputError: a choice that is not in its registry, an override that may not come from a browser.
        """
        base, changed = bases[self.base], self.changed(bases)
        table = copy.deepcopy(base.table)
        _forget(table, changed)
        for key in changed:
            _put(table, BY_KEY[key].path, self.values.get(key))
        wrong: list[Violation] = []
        for text in self.more:
            try:
                _check_override(text)
                apply_override(table, text)
            except InputError as error:
                wrong += error.violations or [Violation("overrides", text, str(error))]
        if changed or self.more:
            table.pop("published", None)
            table.pop("description", None)
        # The model that the user dropped is data, not a name.
        wrong += _foreign({k: v for k, v in table.items() if not (k == "model" and self.own_model)}, base.table)
        if wrong:
            raise InputError(wrong)
        return {**table, **self._own(table)}

    def _own(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """What the user brought along, as parts of the scenario's table, whose names were checked.

        Raises:
            InputError: a file that is no model, a figure that breaks a rule.
        """
        found: dict[str, Any] = {}
        if self.own_model:
            if not self.config:
                raise InputError([Violation("model", OWN_MODEL, "no file was dropped", "drop a config.json on the page first")])
            found["model"] = model_of(self.config)
        if self.site:
            found["site"] = unpack(self.site, "site")
        if any(self.values.get(field.key) not in (None, "") for field in GPU_FIELDS):
            found["cluster"] = {**table["cluster"], "hardware": hardware_of(str(table["cluster"]["hardware"]), self.values)}
        return found

    def scenario(self, bases: Bases) -> Scenario:
        """The checked scenario.

        Raises:
            InputError: all violations, as on the command line.
        """
        return make_scenario(self.table(bases), file=bases[self.base].file)

    def number(self, key: str) -> float:
        """A number of the run (tokens, usd, goodput).

        Raises:
            InputError: not a number in its range.
        """
        field, value = BY_KEY[key], self.values.get(key)
        right = {"tokens": 'such as "15.6T" or 1e12', "usd": "at least 0", "goodput": "above 0, at most 1"}[key]
        try:
            number = parse_count(value)
        except ValueError:
            raise InputError([Violation(field.label, value, "must be a number", right)]) from None
        low = number >= 0 if key == "usd" else number > 0
        if not low or not math.isfinite(number) or (key == "goodput" and number > 1):
            raise InputError([Violation(field.label, value, "is out of range", right)])
        return number


def parse_count(value: object) -> float:
    """15.6T, 300B, 2M, 1e12 as a number.

    Raises:
        ValueError: anything else.
    """
    text = str(value).strip()
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    return float(text[:-1] if scale != 1.0 else text) * scale


def of_query(query: str, bases: Bases) -> State:
    """The state that an address stands for; unknown or ill-typed parts are errors that name what would be right.

    Raises:
        InputError: all of them together.
    """
    if len(query) > _LONGEST + 2 * MOST_PACKED:
        raise InputError(f"the address is longer than {_LONGEST + 2 * MOST_PACKED} characters")
    pairs = parse_qsl(query.lstrip("?"), keep_blank_values=True)
    given = dict(pairs)
    base = bases[given.get("scenario", bases.first)]
    values, more, wrong = dict(base.values), [], []
    for key, text in pairs:
        if key == "set":
            more.append(text)
        elif key in BY_KEY:
            values[key] = parse(BY_KEY[key], text)
        elif key not in ("scenario", "config", "site", *SEEN_ONLY):
            wrong += [Violation(key, text, "no such setting", f"one of {', '.join(('scenario', 'set', *BY_KEY))}")]
    if wrong:
        raise InputError(wrong)
    return State(base.name, values, tuple(more), given.get("config", ""), given.get("site", ""))


def check_words(state: State, bases: Bases) -> None:
    """Refuse choices that no drop-down offers: it would show none.

    Raises:
        InputError: all of them together.
    """
    wrong = []
    start = bases[state.base].values
    for field in FIELDS:
        value = state.values.get(field.key)
        if field.kind == "word" and value not in (*field.choices, AS_WRITTEN, start.get(field.key)):
            wrong.append(Violation(field.path, value, str(unknown(field.label, str(value), list(field.choices)))))
    if wrong:
        raise InputError(wrong)


def parse(field: Field, text: str) -> Value:
    """A control's value from text. What is not of its kind stays text: the check of the scenario names it."""
    if field.kind in ("word", "text"):
        return text
    if not text.strip():
        return None
    try:
        return int(text) if field.kind == "int" else float(text)
    except ValueError:
        return text


def of_controls(base: str, values: Mapping[str, Value], more: str | None, config: str | None = "", site: str | None = "") -> State:
    """The state that the page's controls show; browsers send 1.0 as 1 and the other way round."""
    found = {k: _typed(BY_KEY[k], v) for k, v in values.items() if k in BY_KEY}
    lines = tuple(line.strip() for line in (more or "")[:_LONGEST].splitlines() if line.strip())
    return State(base, found, lines, config or "", site or "")


def _typed(field: Field, value: Any) -> Value:
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        return str(value)[:100]
    if field.kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    if field.kind == "float" and isinstance(value, int):
        return float(value)
    return value if field.kind != "int" or not isinstance(value, str) else parse(field, value)


def _text(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _put(table: dict[str, Any], path: str, value: Value) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    if value is None and last == "oversubscription":
        table.pop(last, None)
    else:
        table[last] = value


def _forget(table: dict[str, Any], changed: set[str]) -> None:
    """Drop what the scenario derived from settings that have changed: it would contradict the new ones."""
    plan, cluster, training = (table.setdefault(name, {}) for name in ("plan", "cluster", "training"))
    # dp follows from the cluster: the same value in the scenario as written.
    dropped: list[tuple[dict[str, Any], str]] = []
    if changed & {"nodes", "hardware", "gpn", "tp", "cp", "pp"}:
        dropped += [(plan, "dp"), (plan, "shard_size")]
    if changed & {"nodes", "hardware", "gpn"}:
        dropped += [(cluster, "num_gpus")]
    if "hardware" in changed:
        dropped += [(cluster, "domain_size"), (cluster, "nics_per_node")]
        dropped += [] if "gpn" in changed else [(cluster, "gpus_per_node")]
        dropped += [(cluster, "oversubscription"), (cluster, "pod_oversubscription")]
    if changed & {"model", "pp", "v", "schedule"}:
        dropped += [(plan, "layers_per_stage"), (plan, "microbatch_group_size")]
    if "model" in changed:
        dropped += [(plan, "first_stage_less_layers"), (plan, "last_stage_less_layers"), (training, "routing")]
    if changed & {"tp", "ep", "model"}:
        dropped += [(plan, "etp")]
    if "framework" in changed:
        dropped += [(table, "framework_version")]
    for part, name in dropped:
        part.pop(name, None)


def _check_override(text: str) -> None:
    """Overrides come from a browser: none may name a file, and none may ask for effects that run for hours."""
    field = text.partition("=")[0].strip()
    if field.split(".")[0] not in MORE_TABLES or "." not in field:
        right = f"a field of {', '.join(MORE_TABLES)}, such as plan.cp_style=ulysses"
        raise InputError([Violation("overrides", text, "this page changes the layout, the training step and the cluster", right)])


def _foreign(table: Mapping[str, Any], base: Mapping[str, Any]) -> list[Violation]:
    """Names that stand for files: those of the registries and the scenario's own only, whatever the browser sent."""
    found = []
    known: Sequence[tuple[str, str, Sequence[str]]] = (
        ("", "model", model_names()), ("cluster", "hardware", profile_names()), ("plan", "schedule", ("auto", *SCHEDULES)),
    )  # fmt: skip
    for part, name, names in known:
        here, there = (t.get(part, {}) if part else t for t in (table, base))
        value = here.get(name) if isinstance(here, Mapping) else None
        if value is None or value in names or (isinstance(there, Mapping) and value == there.get(name)):
            continue
        error = unknown(name, str(value), list(names))
        found.append(Violation(f"{part}.{name}".lstrip("."), value, str(error)))
    return found
