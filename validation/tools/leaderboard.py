"""docs/leaderboard.md: the same published runs predicted by simpar and by others. `python -m validation.tools.leaderboard`.

simpar's predictions are those of fits that left the run's source out (validation/unseen.csv, written by `fit_constants`); others'
are read from the tables in validation/peers, or from files given with `--add`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from simpar.boundary import read_records
from simpar.errors import InputError
from simpar.evidence.report_tables import markdown
from simpar.specs.base import checkout_dir, data_dir

UNSEEN: Final = "unseen.csv"
COLUMNS: Final = ("run", "source", "measured_s", "neutral_s", "unseen_s", "low_s", "high_s")
"""Of unseen.csv: seconds as measured, with nothing fitted, by a fit without the source, and its 80 % interval."""
PEER_COLUMNS: Final = ("run", "predictor", "setting", "step_time_s")
PAGE: Final = """# Leaderboard: published runs, predicted

Step times of published training runs as different predictors give them. simpar's lines are predictions of fits that left the whole
source of a run out; the peers' were run as shipped. A line covers the runs that its predictor can express, so lines of different
numbers of runs compare by the column beside: simpar's error on the very same runs.

{tables}

## How to submit yours

The runs are in `validation/runs` of the repository: one JSON object a line, each with its scenario
(model, cluster, plan, training), what its source leaves open, and where the figures stand.

1. Read the scenarios, not the figures. A predictor that was fitted on some of the sources says so, or predicts each source with a
   fit that left it out, as simpar does.
2. Write a CSV file with the columns `{columns}`: the `id` of the run, your predictor's name and setting, seconds per step.
   Leave out what it cannot express.
3. `python -m validation.tools.leaderboard --add yours.csv` prints the tables with your lines. Send the file with a version and a
   command that repeats it; it goes into `validation/peers` and this page is made again.

A run of your own with a measured step time is as welcome: one JSON object with the columns of `validation/runs`, and a public place
that prints the figure.
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """A run's measured seconds, and simpar's by fits without its source: nothing fitted, fitted, the ends of the interval."""

    source: str
    measured_s: float
    neutral_s: float
    unseen_s: float
    low_s: float
    high_s: float


def read_unseen() -> dict[str, Seen]:
    """Run -> its figures, of unseen.csv.

    Raises:
        InputError: unreadable, or without a column.
    """
    path = data_dir("validation") / UNSEEN
    found = {}
    for row in _rows(path, COLUMNS):
        found[row["run"]] = Seen(row["source"], *(_number(row, name, path) for name in COLUMNS[2:]))
    return found


def read_peers(files: Iterable[Path]) -> dict[tuple[str, str], dict[str, float]]:
    """(Predictor, setting) -> run -> seconds, of the tables in `files`.

    Raises:
        InputError: unreadable, or without a column.
    """
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for path in files:
        for row in _rows(path, PEER_COLUMNS):
            found[row["predictor"], row["setting"]][row["run"]] = _number(row, "step_time_s", path)
    return dict(found)


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    rows = list(read_records(path))
    if missing := [name for name in columns if rows and name not in rows[0]]:
        raise InputError(f"{path}: no column {', '.join(missing)}; the columns are {', '.join(columns)}")
    return rows


def _number(row: Mapping[str, str], name: str, path: Path) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{path}: run {row['run']!r} has {name} = {row[name]!r}; expected seconds, more than 0")
    return value


def tables(seen: Mapping[str, Seen], peers: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """The page's tables: over all runs of each predictor, then by source."""
    head = ["predictor", "setting", "runs", "median error", "mean", "bias", "simpar on these runs: median", "mean"]
    lines = ["## All runs", "", *markdown(head[:2], head[2:], [_line(name, runs, seen) for name, runs in sorted(peers.items())])]
    own = {run: row.unseen_s for run, row in seen.items()}
    lines += ["", "simpar on all runs that it can express:", ""]
    free = {run: row.neutral_s for run, row in seen.items()}
    both = (("sources left out", own), ("nothing fitted", free))
    lines += markdown(head[:2], head[2:6], [_line(("simpar", name), found, seen)[:6] for name, found in both])
    compared = {run for runs in peers.values() for run in runs}
    for source in sorted({seen[run].source for run in compared if run in seen}):
        inside = {run: row for run, row in seen.items() if row.source == source and run in compared}
        rows = [_line(name, {r: s for r, s in runs.items() if r in inside}, inside) for name, runs in sorted(peers.items())]
        lines += ["", f"## {source}", "", *markdown(head[:2], head[2:], [row for row in rows if row[2] != "0"])]
    return "\n".join(lines)


def _line(name: tuple[str, str], predicted: Mapping[str, float], seen: Mapping[str, Seen]) -> list[str]:
    both = [run for run in predicted if run in seen]
    if not both:
        return [*name, "0", "-", "-", "-", "-", "-"]
    error = np.array([predicted[run] / seen[run].measured_s - 1.0 for run in both])
    own = np.array([seen[run].unseen_s / seen[run].measured_s - 1.0 for run in both])
    figures = [np.median(np.abs(error)), np.abs(error).mean(), error.mean(), np.median(np.abs(own)), np.abs(own).mean()]
    return [*name, str(len(both)), *(f"{value:.1%}" for value in figures)]


def page(added: Sequence[Path] = ()) -> str:
    """The page, with the lines of the files `added`."""
    shipped = sorted((data_dir("validation") / "peers").glob("*.csv"))
    return PAGE.format(tables=tables(read_unseen(), read_peers([*shipped, *added])), columns=",".join(PEER_COLUMNS))


def main() -> None:
    """Write docs/leaderboard.md of the checkout; with `--add` print the page instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="tables of predictions to be shown beside the others")
    added = parser.parse_args().add
    folder = checkout_dir("validation")
    if added or folder is None:
        print(page(added))
    else:
        (folder.parent / "docs" / "leaderboard.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
