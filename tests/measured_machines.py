"""validation/measured/: what was measured on machines of our own, and the comparison recomputed from it.

Each folder `<machine>-<year>-<month>` holds `about.toml` (schema: `MachineSpec`), and what the collector brought home:
`calibration.jsonl`, `ranks/*.json`, `predictions.json` frozen before, `cluster/*.runs.jsonl`, `blocks.jsonl`, `physics.jsonl`; of
Hugging Face's Trainer `trainer/*.toml`, `trainer/predictions.json` frozen before and `trainer/measured/*.json`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, model_validator

from simpar.errors import InputError, Violation
from simpar.live.block_predict import compare_blocks
from simpar.live.rank import Classify, Predicted, Row, compare, plan_of, read_measured
from simpar.live.rank_frozen import digest, read_frozen, read_frozen_blocks
from simpar.live.store import Store
from simpar.specs.base import Spec, data_dir, read_toml, validate

NAME: Final = r"^[a-z0-9-]+-20\d\d-\d\d$"
KNOWN: Final = {"about.toml", "predictions.json", "calibration.jsonl", "blocks.jsonl", "physics.jsonl", "log.jsonl", "ranks",
                "cluster", "smoke.json", "nvidia-smi.txt", "profile.toml", "host.jsonl", "trainer"}  # fmt: skip
SAID: Final = {"step_time_s": ("single-rank step", "layouts"), "trainer_step_time_s": ("step of Hugging Face's Trainer", "runs")}
"""Metrics of README's sentence, in words, and what they are measured of."""


class BoundSpec(Spec):
    """The largest error that the recomputed comparison may have."""

    metric: str
    median: Annotated[float, Field(gt=0)]
    worst: Annotated[float, Field(gt=0)]
    layouts: tuple[str, ...] = ()
    """Those it holds for; empty = all that are compared. Bounds of parts of a metric must leave nothing out."""
    what: str = ""
    """Those layouts in words; README names them so."""

    @model_validator(mode="after")
    def _named(self) -> BoundSpec:
        if bool(self.layouts) != bool(self.what):
            raise ValueError("a bound of some layouts says in `what` which they are, one of all does not")
        return self


class MachineSpec(Spec):
    """about.toml."""

    machine: str
    """As people call it: "one H200 of 141 GB"."""
    date: str
    """Of the measurement, ISO."""
    source: str
    """Who measured with which commit of simpar."""
    notes: str = ""
    """What to know of it: what disturbed the measurement, what is left out."""
    compared: tuple[str, ...] = ()
    """Layouts no constant was fitted on; empty = all."""
    bounds: tuple[BoundSpec, ...] = ()


@dataclass(frozen=True)
class MeasuredMachine:
    """One folder, read.

    Attributes:
        name: of the folder. about: its schema.
        rows: the comparison of every rank with its frozen prediction. sha256: of the predictions; empty without ranks.
    """

    name: str
    about: MachineSpec
    rows: tuple[Row, ...]
    sha256: str

    def errors(self, metric: str, layouts: Sequence[str] = ()) -> list[float]:
        """|predicted / measured - 1| of the compared layouts, or of some of them."""
        chosen, some = self.about.compared, layouts or [r.layout for r in self.rows]
        rows = [r for r in self.rows if r.metric == metric and r.error is not None and (not chosen or r.layout in chosen)]
        return [abs(r.error or 0.0) for r in rows if r.layout in some]

    def parts(self, metric: str) -> list[BoundSpec]:
        """The bounds of a metric that hold for some layouts each."""
        return [bound for bound in self.about.bounds if bound.metric == metric and bound.layouts]

    @property
    def broken(self) -> list[str]:
        """Bounds that the comparison does not keep, and layouts that bounds of parts leave out."""
        found = []
        for bound in self.about.bounds:
            errors = self.errors(bound.metric, bound.layouts)
            if not errors:
                found.append(f"{self.name}: {bound.metric}: a bound, but nothing measured")
                continue
            median, worst = statistics.median(errors), max(errors)
            if median > bound.median or worst > bound.worst:
                said = f"median {100 * median:.1f} % (bound {100 * bound.median:.1f}), "
                said += f"worst {100 * worst:.1f} % ({100 * bound.worst:.1f})"
                found.append(f"{self.name}: {bound.metric}: {said}")
        for metric in dict.fromkeys(bound.metric for bound in self.about.bounds if bound.layouts):
            named = [name for bound in self.parts(metric) for name in bound.layouts]
            if len(self.errors(metric, named)) < len(self.errors(metric)) or len(set(named)) < len(named):
                found.append(f"{self.name}: {metric}: the bounds of parts leave layouts out, or name some twice")
        return found


def measured_dir() -> Path:
    """validation/measured."""
    return data_dir("validation") / "measured"


def read_machine(folder: Path, classify: Classify) -> MeasuredMachine:
    """A folder of measurements and its comparison with what was predicted before.

    Raises:
        InputError: about.toml breaks a rule, a file that does not belong there, ranks without frozen predictions.
    """
    about = validate(MachineSpec, read_toml(folder / "about.toml"), file=str(folder / "about.toml"))
    strange = sorted(p.name for p in folder.iterdir() if p.name not in KNOWN)
    if strange:
        right = f"a folder holds {', '.join(sorted(KNOWN))}"
        raise InputError([Violation(str(folder), ", ".join(strange), "does not belong there", right)])
    files = [p for p in sorted((folder / "ranks").glob("*.json")) if not p.stem.endswith(".again")]
    rows: list[Row] = _trainer(folder / "trainer") if (folder / "trainer").is_dir() else []
    if not files:
        return MeasuredMachine(folder.name, about, tuple(rows), "")
    frozen, sha256 = read_frozen(folder / "predictions.json")
    for path in files:
        measured = read_measured(path)
        plan = plan_of(measured)
        rows += compare(plan, measured, classify, _prediction(frozen, plan.scenario.name, path))
        for again in sorted(path.parent.glob(f"{path.stem}.*again.json")):
            rows.append(Row(path.stem, "repeat_s", again.stem, measured["step_median_s"], read_measured(again)["step_median_s"]))
    if (blocks := folder / "blocks.jsonl").is_file():
        rows += compare_blocks(Store(blocks).records.values(), read_frozen_blocks(folder / "predictions.json")[0])
    return MeasuredMachine(folder.name, about, tuple(rows), sha256)


def _trainer(folder: Path) -> list[Row]:
    """Runs of Hugging Face's Trainer beside what was predicted of them."""
    said = folder / "predictions.json"
    table = json.loads(said.read_text())
    frozen = table["predictions"]
    if digest(frozen) != table["sha256"]:
        raise InputError(f"{said}: the predictions do not have their hash: they were changed after they were frozen")
    rows = []
    for path in sorted((folder / "measured").glob("*.json")):
        found = json.loads(path.read_text())
        name = found["name"]
        if name not in frozen:
            raise InputError(f"{path}: nothing was predicted of {name} before it was measured")
        memory = frozen[name]["peak_memory_bytes"]
        rows += [Row(name, "trainer_step_time_s", "", frozen[name]["step_time_s"], found["median_s"]),
                 Row(name, "trainer_allocated_bytes", "", memory["allocated"], found["allocated_bytes"])]  # fmt: skip
    return rows


def _prediction(frozen: dict[str, Predicted], name: str, path: Path) -> Predicted:
    if name not in frozen:
        raise InputError(
            f"{path}: nothing was predicted of {name} before it was measured; predictions.json holds {', '.join(frozen)}"
        )
    return frozen[name]


def machines(classify: Classify, folder: Path | None = None) -> list[MeasuredMachine]:
    """Every folder of validation/measured, by name.

    Raises:
        InputError: one of them breaks a rule.
    """
    folder = folder or measured_dir()
    return [read_machine(path, classify) for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []


def readme_line(found: Sequence[MeasuredMachine]) -> str:
    """The sentence of README.md, made from what is there."""
    parts = []
    for machine in found:
        for metric, (what, unit) in SAID.items():
            if not machine.errors(metric):
                continue
            groups = [(f"{bound.what}: ", bound.layouts) for bound in machine.parts(metric)] or [("", ())]
            figures = [words + _figures(machine.errors(metric, layouts), unit) for words, layouts in groups]
            parts.append(f"{what} on {machine.about.machine}: {'; '.join(figures)}, predictions committed before")
    return ". ".join(parts[:1] + [part[0].upper() + part[1:] for part in parts[1:]]) or "no GPU has been measured with it yet"


def _figures(errors: Sequence[float], unit: str) -> str:
    return f"median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} % over {len(errors)} {unit}"
