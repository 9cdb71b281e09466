"""Fit the registry of constants on published runs, and keep only what pays on sources that the fit has not seen.

    python -m validation.tools.fit_constants [--data FILE.jsonl ...] [--keep] [--check]

Every run is simulated once under the constants at hand and split into the parts that they scale (`samples`). Constants belong to
an architecture and pass a gate there (`pooled`); what is reported as unseen repeats all of it without each source.
Widths of intervals follow from those errors (`intervals`). With --keep the constants stay as they are, with their gains on the runs
at hand: new runs then count among the unseen, and widen or narrow intervals, without a new fit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from simpar.evidence.constants_md import constants_text, write_constants
from simpar.specs.base import data_dir, stored_runs
from simpar.specs.calibration import ANY, FILE, WIDTHS, Constant, Unseen, constants
from simpar.toml import toml
from validation.tools.intervals import (
    covered,
    held_out_widths,
    interval_entries,
    memory_entries,
    peaks_covered,
)
from validation.tools.leaderboard import COLUMNS, UNSEEN
from validation.tools.pooled import LEAST_SOURCES, fit, regained, select
from validation.tools.readme_table import write_readme
from validation.tools.samples import RUN_LEVEL, Data, FloatArray, Peak, collect, errors

HEADER = "# Written by `python -m validation.tools.fit_constants`; do not edit. See specs/calibration.py.\n\n"


def left_out(
    data: Data,
    group: Literal["source", "family"],
    chosen: Callable[[Data], Sequence[Constant]],
    workers: int,
    free: Data | None = None,
) -> FloatArray:
    """predicted / measured - 1 [rows] under the constants that `chosen` gives without each row's source, or family of frameworks.

    Args:
        chosen: a module-level function (or a partial one), so that workers can import it.
        free: the same rows, those of sources that alone show a property of kernels priced without it; none = `data`.
    """
    shown = (free or data).samples
    found = np.zeros(len(data.samples))
    groups = np.array([getattr(s, group) for s in data.samples])
    names = sorted(set(groups.tolist()))
    without = [Data.of([s for s in data.samples if getattr(s, group) != name]) for name in names]
    with ProcessPoolExecutor(workers) as pool:
        for name, entries in track(zip(names, pool.map(chosen, without), strict=True), "left out", len(names)):
            inside = groups == name
            found[inside] = errors(Data.of([s for s, kept in zip(shown, inside, strict=True) if kept]), entries)
    return found


def unseen_table(data: Data, unseen: FloatArray, neutral: FloatArray) -> list[Unseen]:
    """Errors on unseen sources: of all runs, by family, by family on an architecture with enough sources, by source.

    Args:
        unseen, neutral: predicted / measured - 1 [rows], fitted without the row's source, and with nothing fitted.
    """
    neutral, off = np.abs(neutral), np.abs(unseen)
    inside, score = covered(data, unseen)

    def row(rows: NDArray[np.bool_], count: int, **group: str) -> Unseen:
        medians = (np.median(neutral[rows]), neutral[rows].mean(), np.median(off[rows]), off[rows].mean())
        figures = (*medians, inside[rows].mean(), score[rows].mean())
        names = ("neutral_median", "neutral_mean", "median", "mean", "coverage", "interval_score")
        values = {name: float(value) for name, value in zip(names, figures, strict=True)}
        return Unseen(rows=int(rows.sum()), sources=count, **group, **values)

    found = []
    groups = {(ANY, ANY)} | {(s.family, ANY) for s in data.samples} | {(s.family, s.architecture) for s in data.samples}
    for family, architecture in sorted(groups):
        entry = Constant(name="compute", family=family, architecture=architecture, value=1.0)
        count = len(data.sources_of(entry))
        if count >= LEAST_SOURCES or architecture == ANY:
            found.append(row(data.members(entry), count, family=family, architecture=architecture))
    return found + [row(data.source_index == i, 1, source=source) for i, source in enumerate(data.sources)]


def unseen_rows(data: Data, unseen: FloatArray, neutral: FloatArray) -> str:
    """validation/unseen.csv: every run measured, with nothing fitted, by a fit without its source, and its interval."""
    lines = [",".join(COLUMNS)]
    for sample, free, off, up, down in zip(data.samples, neutral + 1.0, unseen + 1.0, *held_out_widths(data, unseen), strict=True):
        seconds = sample.measured * off
        figures = (sample.measured, sample.measured * free, seconds, seconds * math.exp(-down), seconds * math.exp(up))
        source = '"' + sample.source.replace('"', '""') + '"'
        lines.append(",".join([sample.id, source, *(f"{value:.5g}" for value in figures)]))
    return "\n".join(lines) + "\n"


def mean_over_sources(data: Data, found: FloatArray) -> float:
    """Mean over sources of the mean absolute error of their runs, no run counting more than its own step."""
    off = np.minimum(np.abs(found), 1.0)
    return float(np.mean(np.bincount(data.source_index, off) / np.bincount(data.source_index)))


def peaks_text(peaks: Sequence[Peak]) -> str:
    """How far off peaks of memory are, and how their intervals do on sources that they do not come from: by source, and by run."""
    inside, score = peaks_covered(peaks)
    off = np.array([abs(math.expm1(-p.off)) for p in peaks])
    names, told = np.array([p.source for p in peaks]), np.array([not p.open for p in peaks])

    def text(rows: NDArray[np.bool_]) -> str:
        by_source = [[x[rows & (names == name)].mean() for name in np.unique(names[rows])] for x in (off, inside, score)]
        over = (
            (f"{len(by_source[0])} sources", np.mean(by_source, axis=1)),
            (f"{rows.sum()} runs", [x[rows].mean() for x in (off, inside, score)]),
        )
        return "; ".join(f"mean over {what} {o:.1%}, coverage {c:.0%}, interval score {s:.2f}" for what, (o, c, s) in over)

    return f"{text(np.ones(len(peaks), dtype=bool))}; that state all facts: {text(told)}"


def as_toml(entries: Iterable[Constant], unseen: Iterable[Unseen] = ()) -> str:
    """The registry file."""
    keys = ("name", "family", "architecture", "value", "gain", "gain_se", "architectures", "shares", "rows", "sources", "status")
    optional = ("family", "architecture", "architectures", "shares")
    given = [{key: getattr(entry, key) for key in keys} for entry in entries]
    kept = [{k: v for k, v in entry.items() if not (k in optional and v in (ANY, ()))} for entry in given]
    words_first = [dict(sorted(row.model_dump().items(), key=lambda item: not isinstance(item[1], str))) for row in unseen]
    return HEADER + toml({"constants": kept, "unseen": words_first}, number="{:.5g}".format)


def main() -> None:
    """Fit, test and write the registry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="files of runs; without any, those that come with simpar")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--keep", action="store_true", help="keep the constants, write errors on unseen sources and the widths")
    parser.add_argument("--check", action="store_true", help="print the errors and write nothing")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    shipped = constants()
    files = options.data or [stored_runs()]
    samples, peaks = collect(files, options.workers, shipped)
    data = Data.of(samples)
    # A fold without the one source that shows a property of kernels has no such constant.
    odd = [e for e in shipped if e.status == "one source"]
    names, alone = tuple(e.name for e in odd), {source for e in odd for source in e.sources}
    without = {s.id: s for s in collect(files, options.workers, shipped, alone, names)[0]}
    free = Data.of([without.get(s.id, s) for s in samples])
    chosen = regained(data, [e for e in shipped if e.name in RUN_LEVEL]) if options.keep else select(data)
    neutral = errors(free, ())
    unseen = left_out(data, "source", select, options.workers, free)
    refitted = left_out(data, "source", partial(fit, entries=tuple(chosen)), options.workers, free)
    for name, off in (("nothing fitted", neutral), ("values refitted", refitted), ("whole choice repeated", unseen)):
        size, by_source = np.abs(off), mean_over_sources(data, off)
        print(f"{name:22s} mean over sources {by_source:.4f}, over runs: median {np.median(size):.4f}, mean {size.mean():.4f}")
    print("memory on unseen sources: " + peaks_text(peaks))
    unfamiliar = left_out(data, "family", select, options.workers, free)
    widths = [*interval_entries(data, unseen, unfamiliar), *memory_entries(peaks)]
    # What other commands fit, or no left-out source can tell, stays as it is.
    kept = [e for e in shipped if e.name not in (*RUN_LEVEL, *WIDTHS)]
    found = [*chosen, *kept, *widths]
    rows = unseen_table(data, unseen, neutral)
    print("\n".join(constants_text(found, rows).splitlines()[20:]))
    if options.check:
        return
    options.out.write_text(as_toml(found, rows), encoding="utf-8")
    if options.out == FILE:
        write_constants(entries=found, rows=rows)
        write_readme(rows)
        (data_dir("validation") / UNSEEN).write_text(unseen_rows(data, unseen, neutral), encoding="utf-8")


if __name__ == "__main__":
    main()
