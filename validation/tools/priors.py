"""How often published runs that state a fact state each value: `python -m validation.tools.priors`.

Every source weighs the same; values below 1 % are left out. `specs/open_values.PRIORS` holds the result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from simpar.evidence.run_rows import read_rows
from simpar.evidence.run_type import is_stored
from simpar.specs.base import stored_runs
from simpar.specs.open_values import PRIORS, is_open

Raw = Mapping[str, Any]
LEAST: Final = 0.01
"""Smallest share of a value that is listed."""


def _recompute(run: Raw) -> Any:
    value = run["scenario"]["plan"]["recompute"]
    if not isinstance(value, Mapping):
        return value
    return None if is_open(value) else value["granularity"]


def _compile(run: Raw) -> Any:
    value = run["scenario"]["training"].get("compile")
    return None if value is None else bool(value)


def _grouped(column: str, kind: Callable[[Any], Any], needs: str = "") -> Callable[[Raw], Any]:
    """A column of the row's own; of runs whose degree `needs` is more than 1."""

    def value(run: Raw) -> Any:
        group = run["group"]
        stated = group.get(column) is not None and (not needs or int(group.get(needs) or 1) > 1)
        return kind(group[column]) if stated else None

    return value


STATED: Final[dict[str, Callable[[Raw], Any]]] = {
    "plan.recompute": _recompute,
    "plan.virtual_stages": _grouped("vpp", int, "pp"),
    "plan.zero_stage": _grouped("zero_stage", int),
    "plan.sequence_parallel": _grouped("sp", bool, "tp"),
    "plan.overlap_grad_reduce": lambda run: run["scenario"]["plan"].get("overlap_grad_reduce"),
    "plan.overlap_param_gather": lambda run: run["scenario"]["plan"].get("overlap_param_gather"),
    "training.micro_batch_size": _grouped("micro_batch", int),
    "training.compile": _compile,
}
"""Field -> what a stored run states of it, None where it does not."""


def shares(runs: Iterable[Raw], path: str) -> dict[Any, float]:
    """Value -> share of the runs that state the field at `path`, the mean over sources; by value."""
    by_source: dict[str, Counter[Any]] = defaultdict(Counter)
    for run in runs:
        if run.get("scenario") and not run.get("exclude") and (value := STATED[path](run)) is not None:
            by_source[str(run["group"].get("source"))][value] += 1
    found: dict[Any, float] = defaultdict(float)
    for counts in by_source.values():
        for value, count in counts.items():
            found[value] += count / counts.total() / len(by_source)
    return {value: round(found[value], 2) for value in sorted(found) if found[value] >= LEAST}


def priors(folder: Path | None = None) -> dict[str, dict[Any, float]]:
    """Field -> value -> share, of the stored runs in `folder` (those that come with simpar)."""
    runs = [row for _, row in read_rows(folder or stored_runs()) if is_stored(row)]
    return {path: shares(runs, path) for path in PRIORS}


def main() -> None:
    """Print the shares."""
    for path, found in priors().items():
        print(f'    "{path}": {found},'.replace("'", '"'))


if __name__ == "__main__":
    main()
