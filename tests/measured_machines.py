"""validation/measured/: what was measured on machines of our own, and the comparison recomputed from it.

Each folder `<machine>-<year>-<month>` holds `about.toml` (schema: `MachineSpec`), and what the collector brought home:
`calibration.jsonl`, `ranks/*.json`, `predictions.json` frozen before, `cluster/*.runs.jsonl`, `blocks.jsonl`, `physics.jsonl`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from simpar.errors import InputError, Violation
from simpar.live.block_predict import compare_blocks
from simpar.live.rank import Classify, Predicted, Row, compare, plan_of, read_measured
from simpar.live.rank_frozen import read_frozen, read_frozen_blocks
from simpar.live.store import Store
from simpar.specs.base import Spec, data_dir, read_toml, validate

NAME: Final = r"^[a-z0-9-]+-20\d\d-\d\d$"
KNOWN: Final = {"about.toml", "predictions.json", "calibration.jsonl", "blocks.jsonl", "physics.jsonl", "log.jsonl", "ranks",
                "cluster", "smoke.json", "nvidia-smi.txt", "profile.toml"}  # fmt: skip


class BoundSpec(Spec):
    """The largest error that the recomputed comparison may have."""

    metric: str
    median: Annotated[float, Field(gt=0)]
    worst: Annotated[float, Field(gt=0)]


class MachineSpec(Spec):
    """about.toml."""

    machine: str
    """As people call it: "one H200 of 141 GB"."""
    date: str
    """Of the measurement, ISO."""
    source: str
    """Who measured with which commit of simpar."""
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

    def errors(self, metric: str) -> list[float]:
        """|predicted / measured - 1| of the compared layouts."""
        chosen = self.about.compared
        rows = [r for r in self.rows if r.metric == metric and r.error is not None and (not chosen or r.layout in chosen)]
        return [abs(r.error or 0.0) for r in rows]

    @property
    def broken(self) -> list[str]:
        """Bounds that the comparison does not keep."""
        found = []
        for bound in self.about.bounds:
            errors = self.errors(bound.metric)
            if not errors:
                found.append(f"{self.name}: {bound.metric}: a bound, but nothing measured")
                continue
            median, worst = statistics.median(errors), max(errors)
            if median > bound.median or worst > bound.worst:
                said = f"median {100 * median:.1f} % (bound {100 * bound.median:.1f}), "
                said += f"worst {100 * worst:.1f} % ({100 * bound.worst:.1f})"
                found.append(f"{self.name}: {bound.metric}: {said}")
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
    if not files:
        return MeasuredMachine(folder.name, about, (), "")
    frozen, sha256 = read_frozen(folder / "predictions.json")
    rows: list[Row] = []
    for path in files:
        measured = read_measured(path)
        plan = plan_of(measured)
        rows += compare(plan, measured, classify, _prediction(frozen, plan.scenario.name, path))
    if (blocks := folder / "blocks.jsonl").is_file():
        rows += compare_blocks(Store(blocks).records.values(), read_frozen_blocks(folder / "predictions.json")[0])
    return MeasuredMachine(folder.name, about, tuple(rows), sha256)


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
        if errors := machine.errors("step_time_s"):
            figures = f"median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} % over {len(errors)} layouts"
            parts.append(f"single-rank step on {machine.about.machine}: {figures}, predictions committed before")
    return "; ".join(parts) or "no GPU has been measured with it yet"
