"""Infer from published runs the figures that no source states (specs/inferred.toml), one after the other.

    python -m simpar.validation.fit_inferred --data FILE.jsonl [--only NAME ...]

For each figure: the runs whose prediction it moves, each predicted at a ladder of values, the value of least error (what is far off
counts no more than `OUTLIER`), the error where it is chosen on other models, and the error without it. A value that gains no more
than the standard error of its gain over the present one is not taken.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from simpar.errors import InputError, SimparError
from simpar.specs.inferred import FILE, VARIABLE, Inferred, figures
from simpar.validation.fit_runs import OUTLIER
from simpar.validation.predicted import predict
from simpar.validation.run_rows import read_runs, run_of

FloatArray = NDArray[np.float64]
Row = dict[str, Any]
Predictor = Callable[[Sequence[Row], float], FloatArray]
"""Step times [rows] of runs with the figure at a value."""
SHOWS: Final = 0.01
"""Least relative change of a prediction between the ends of the ladder for the run to count."""
MOST_ROWS: Final = 160
"""Evenly spaced ones of more."""
STEPS: Final = 9
"""Values on the ladder, in equal ratios."""
FINE: Final = 161
"""Values that the errors are interpolated at, in equal ratios."""
FOLDS: Final = 5


@dataclass(frozen=True)
class Figure:
    """What is inferred.

    Attributes:
        name: "framework.field" or "kernels.what".
        unit, meaning: for the file.
        low, high: ends of the ladder.
        without: the value that leaves it out.
        of: whether a run may tell it.
    """

    name: str
    unit: str
    meaning: str
    low: float
    high: float
    without: float
    of: Callable[[Row], bool]

    @property
    def ladder(self) -> FloatArray:
        """The values tried."""
        return np.geomspace(self.low, self.high, STEPS)


def source(pattern: str, **limits: tuple[float, float]) -> Callable[[Row], bool]:
    """Runs of a source whose columns lie within limits."""

    def chosen(row: Row) -> bool:
        within = all(low <= float(row.get(key) or 0) <= high for key, (low, high) in limits.items())
        return re.search(pattern, str(row.get("source"))) is not None and within

    return chosen


NANOTRON: Final = source("nanotron benchmark sweep")
VTRAIN: Final = source("vTrain", n_gpus=(1, 8))
FIGURES: Final = (
    Figure("vtrain.launch_s", "s", "host time per kernel in the forward of a traced layer", 5e-5, 4e-4, 0.0, VTRAIN),
    Figure("vtrain.backward_launch_s", "s", "the same in its backward", 1e-5, 1.5e-4, 0.0, VTRAIN),
    Figure("kernels.narrow_rows", "x", "time of products whose rows start on 4 or 8 bytes", 1.0, 3.0, 1.0, VTRAIN),
    Figure("kernels.odd_rows", "x", "time of products whose rows start on 2 bytes", 1.0, 5.0, 1.0, VTRAIN),
    Figure("kernels.unaligned_heads", "of the fp32 peak outside tensor cores",
           "rate of batched products over heads whose rows are not aligned to 16 bytes", 0.2, 2.0, 2.0, source("BLOOM")),
    Figure("deepspeed.state_link_share", "of one adapter", "rate of gathers and reductions under ZeRO-3 of 2021", 0.2, 2.0, 0.0,
           source("Narayanan", zero_stage=(3, 3))),
    Figure("megatron-core.dropless_cpu_s", "s", "host time per layer and pass of experts without a capacity", 3e-4, 1e-2, 0.0,
           source("Megatron-Bridge|DGX Cloud|Folding|xtuner")),
    Figure("nanotron.layer_cpu_s", "s", "host time per layer and pass", 1e-4, 4e-3, 0.0, NANOTRON),
    Figure("nanotron.collective_cpu_s", "s", "host time per collective", 2e-5, 1e-3, 0.0, NANOTRON),
    Figure("nanotron.collective_rank_cpu_s", "s",
           "more of it per tensor rank where pipeline neighbours are on other nodes", 2e-5, 1e-3, 0.0, NANOTRON),
    Figure("nanotron.collective_step_s", "s", "more of it per step of a ring across nodes", 5e-6, 3e-4, 0.0, NANOTRON),
    Figure("nanotron.gather_piece_cpu_s", "s", "host time per slice (tensor and data rank) unpacked after a gather under ZeRO-1",
           1e-6, 5e-5, 0.0, NANOTRON),
    Figure("nanotron.ddp_slowdown", "x", "time of gradient buckets beside the backward, over that alone", 1.0, 3.0, 1.0, NANOTRON),
    Figure("nanotron.far_send_s", "s", "more per pipeline send where the tensor group spans more than two nodes", 0.1, 2.0, 0.0,
           NANOTRON),
)  # fmt: skip


def predicted(row: Row) -> float:
    """Step time of a run; not a number where it cannot be predicted."""
    scenario = run_of(row).scenario
    try:
        return predict(scenario).step_time_s if scenario is not None else float("nan")
    except SimparError:
        return float("nan")


def predictions(rows: Sequence[Row], value: float, *, name: str, workers: int) -> FloatArray:
    """Step times [rows] with one figure at `value`, in processes that have read no other."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = f"{before or ''} {name}={value!r}"
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            return np.array(list(pool.map(predicted, rows, chunksize=4)))
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def counted(error: FloatArray) -> FloatArray:
    """|error|; beyond `OUTLIER`, for reasons of a run's own, more of it hardly counts."""
    found = np.abs(error)
    return np.asarray(found / (1.0 + (found / OUTLIER) ** 4) ** 0.25)


def settle(figure: Figure, rows: Sequence[Row], measured: FloatArray, present: float, predictor: Predictor) -> Inferred:
    """Infer one figure.

    Args:
        rows: that may tell it; measured: their step times.
        present: value in force.
        predictor: step times of rows under a value.

    Raises:
        InputError: no run shows it.
    """
    ends = [predictor(rows, value) for value in (figure.low, figure.high)]
    shows = np.flatnonzero(np.abs(ends[1] / ends[0] - 1.0) > SHOWS)
    if not len(shows):
        raise InputError(f"{figure.name}: no run of the data shows it; {len(rows)} might")
    shows = shows[np.unique(np.linspace(0, len(shows) - 1, min(len(shows), MOST_ROWS)).round().astype(int))]
    chosen, measured = [rows[i] for i in shows], measured[shows]
    between = [predictor(chosen, float(v)) for v in figure.ladder[1:-1]]
    steps = np.stack([ends[0][shows], *between, ends[1][shows]])
    values = np.geomspace(figure.low, figure.high, FINE)
    # Step times are straight in most figures: interpolated between the rungs, not the errors.
    times = np.stack([np.interp(values, figure.ladder, column) for column in steps.T])
    errors = counted(times / measured[:, None] - 1.0)
    now = counted(predictor(chosen, present) / measured - 1.0)
    least = int(errors.mean(axis=0).argmin())
    gain = now - errors[:, least]
    value = present
    if gain.mean() > gain.std() / np.sqrt(len(gain)):
        value = float(f"{values[least]:.2g}")
    more = errors - errors[:, [least]]
    close = values[more.mean(axis=0) <= more.std(axis=0) / np.sqrt(len(more))]
    models = sorted({str(row.get("model_name")) for row in chosen})
    fold = np.array([models.index(str(row.get("model_name"))) % FOLDS for row in chosen])
    left_out = [errors[fold == k][:, errors[fold != k].mean(axis=0).argmin()] for k in set(fold.tolist()) if (fold != k).any()]
    kept, none = (np.abs(predictor(chosen, v) / measured - 1.0) for v in (value, figure.without))
    return Inferred(
        name=figure.name, value=value, unit=figure.unit, meaning=figure.meaning, rows=len(chosen),
        sources=tuple(sorted({str(row["source"]) for row in chosen})), best=float(f"{values[least]:.3g}"),
        low=float(f"{close.min():.3g}"), high=float(f"{close.max():.3g}"), error=round(float(kept.mean()), 4),
        without=round(float(none.mean()), 4), cross_validated=round(float(np.concatenate(left_out).mean()), 4) if left_out else 0.0,
    )  # fmt: skip


def text_of(found: Sequence[Inferred]) -> str:
    """The figures as inferred.toml."""
    lines = ["# Written by `python -m simpar.validation.fit_inferred`; do not edit. See specs/inferred.py.", ""]
    for figure in found:
        lines.append("[[figures]]")
        for key, value in figure.model_dump(mode="json").items():
            lines.append(f"{key} = {json.dumps(value)}")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Infer the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    runs = [r for r in read_runs(options.data) if r.scenario is not None and not r.excluded and r.measured.step_time_s]
    known = dict(figures())
    for figure in FIGURES:
        if options.only and figure.name not in options.only:
            continue
        chosen = [run for run in runs if figure.of(run.row)]
        measured = np.array([run.measured.step_time_s for run in chosen], dtype=float)
        predictor = partial(predictions, name=figure.name, workers=options.workers)
        known[figure.name] = settle(figure, [run.row for run in chosen], measured, known[figure.name].value, predictor)
        typer.echo(known[figure.name].model_dump_json())
        os.environ[VARIABLE] = " ".join(f"{name}={f.value!r}" for name, f in known.items())
        options.out.write_text(text_of([known[f.name] for f in FIGURES]), encoding="utf-8")


if __name__ == "__main__":
    main()
