"""Schedules as CSV files, in both forms that torch.distributed.pipelining reads: a row per rank, a cell per action.

``compute_only`` holds the compute actions; ``compute_comms`` also sends, receives and FSDP actions. In torch:
``_PipelineScheduleRuntime(stages, n_microbatches)._load_csv(path, format)``; in torchtitan the option
``pipeline_parallel_schedule_csv``.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from simpar import boundary
from simpar.errors import InputError, Violation
from simpar.schedules.action import Action, parse_action
from simpar.schedules.communication import communication_violations, with_communication
from simpar.schedules.order import Chain, Rows
from simpar.schedules.schedule import Schedule


def write_csv(schedule: Schedule, path: Path | str, *, communication: bool = False) -> None:
    """Write `schedule` to `path`; with `communication`, the form that torch calls compute_comms.

    torch has no notion of two copies of the model: it cannot run a bidirectional schedule
    (`Schedule.replicas` 2).
    """
    rows = with_communication(schedule) if communication else schedule.rows
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


@boundary.reader("path", "a schedule: a row for each rank, a cell for each action")
def read_csv(path: Path | str, *, replicas: int = 1) -> Schedule:
    """The schedule in a CSV file of either form, checked; empty cells (torch's idle slots) are skipped.

    Ranks, stages, microbatches and placement are what the file uses. Communication is checked, then left out:
    a `Schedule` is compute order only.

    Args:
        path: the file.
        replicas: copies of the model; stages and microbatches are divided among them in ascending order.

    Raises:
        InputError: not a schedule. Names the file and every wrong cell.
    """
    path = Path(path)
    rows = _read_rows(path)
    compute = tuple(tuple(action for action in row if action.computes) for row in rows)
    try:
        schedule = _schedule(path.stem, compute, replicas)
        schedule.check()
        found = () if rows == compute else tuple(communication_violations(schedule, rows))
        if found:
            raise InputError(found)
    except InputError as error:
        located = InputError([replace(violation, file=str(path)) for violation in error.violations])
        # `check` appends the rank x step grid to its list of violations: keep it.
        grid = str(error)[len("\n".join(map(str, error.violations))) :]
        located.args = (f"{located}{grid}",)
        raise located from None
    return schedule


def _read_rows(path: Path) -> Rows:
    cells = boundary.read_csv(path, empty=True)  # that it uses no stage says more
    violations = []
    rows: list[tuple[Action, ...]] = []
    for row_number, row in enumerate(cells, start=1):
        actions = []
        for column, text in enumerate(row, start=1):
            if not text.strip():
                continue
            try:
                actions.append(parse_action(text))
            except InputError as error:
                rule = str(error).partition(" is not an action")[2]
                field = f"row {row_number}, column {column}"
                violations.append(Violation(field, text, f"is not an action{rule}", file=str(path)))
        rows.append(tuple(actions))
    if violations:
        raise InputError(violations)
    return tuple(rows)


def _schedule(name: str, rows: Rows, replicas: int) -> Schedule:
    """A schedule of what `rows` use."""
    rank_of: dict[int, int] = {}
    microbatches: set[int] = set()
    for rank, row in enumerate(rows):
        for leaf in (leaf for action in row for leaf in action.leaves):
            rank_of.setdefault(leaf.stage, rank)
            microbatches.add(leaf.microbatch)
    violations = []
    for what, used in (("stage", set(rank_of)), ("microbatch", microbatches)):
        if not used:
            violations.append(Violation("schedule", "", f"uses no {what}", "a row per rank with F and B is needed"))
        elif max(used) >= len(used):
            gap = next(i for i in range(len(used)) if i not in used)
            rule = f"must number them from 0 without a gap, but there is no {what} {gap}"
            violations.append(Violation(f"last {what}", max(used), rule))
        elif replicas < 1 or len(used) % replicas:
            rule = f"cannot be divided among {replicas} copies of the model"
            violations.append(Violation(f"number of {what}s", len(used), rule))
    if violations:
        raise InputError(violations)
    s, m = len(rank_of) // replicas, len(microbatches) // replicas
    chains = tuple(Chain(range(i * s, i * s + s), range(i * m, i * m + m)) for i in range(replicas))
    placement = tuple(rank_of[stage] for stage in range(len(rank_of)))
    return Schedule(name, len(rows), len(microbatches), placement, rows, chains if replicas > 1 else ())
