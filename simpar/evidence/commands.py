"""The commands that compare what is measured with what is predicted, and print it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from simpar.evidence.cases import chosen_cases, load_cases, run_cases
from simpar.evidence.collectives import print_report as print_collectives
from simpar.evidence.collectives import validate_collectives
from simpar.evidence.predicted import AtSite, predict
from simpar.evidence.results_md import check_bounds, print_cases, write_results
from simpar.evidence.runs import Report, validate_runs
from simpar.output import finite
from simpar.specs.base import data_dir, stored_runs
from simpar.specs.site import read_site


def cases(as_json: bool = False, folder: Path | None = None, only: Sequence[str] = ()) -> int:
    """`simpar validate`: all published cases, or those chosen; returns the exit code.

    A full run writes validation/RESULTS.md of a checkout. The code is 1 when a case is outside its tolerance or, in a full run,
    a group is worse than its recorded bound.

    Args:
        only: groups, or ids of cases.

    Raises:
        InputError: a file that breaks a rule, or an unknown group or case.
    """
    every = load_cases(folder)
    report = run_cases(chosen_cases(every, only) if only else every, os.cpu_count() or 1, progress=True)
    worse = [] if only else check_bounds(report)
    if as_json:
        sys.stdout.write(json.dumps({**report.as_json(), "worse_than_bound": worse}) + "\n")
    else:
        print_cases(report, worse)
    if folder is None and not only:
        write_results(report)
    return 1 if worse or report.outside else 0


def collectives(data: Path | None, as_json: bool = False) -> int:
    """`simpar validate collectives [--data FILE] [--json]`; exit code 1 past the stated tolerance.

    Without a file: the tables that come with simpar.

    Raises:
        InputError: see `validate_collectives`.
    """
    report = validate_collectives(data or data_dir("validation") / "collectives")
    if as_json:
        sys.stdout.write(json.dumps(finite(report.as_json())) + "\n")
    else:
        print_collectives(report)
    return 0 if report.within_tolerance else 1


def runs(data: Path | None, where: Sequence[str] = (), site: Path | None = None) -> Report:
    """Of `simpar validate runs [--data FILE] [--where ...] [--site FILE]`.

    Without a file: the runs that come with simpar.

    Raises:
        InputError: the file or a condition is wrong.
    """
    data = data or stored_runs()
    predictor = predict if site is None else AtSite(read_site(site))
    return validate_runs(data, where, predictor=predictor, progress=True)
