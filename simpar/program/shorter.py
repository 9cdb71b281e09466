"""Programs of fewer micro-batches by leaving out a round of each rank's row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np

from simpar.program.program import IntArray, Program, pointers
from simpar.schedules import Action, Schedule

Rounds = list[tuple[int, int]]
"""Of each row of a schedule the place of a round in it, and its length."""


def rounds(fewer: Schedule, more: Schedule) -> Rounds | None:
    """What every row of `more` has beyond that of `fewer`, with the same again on either side of it; None where one has not."""
    found = [_round(*rows) for rows in zip(fewer.rows, more.rows, strict=True)]
    return [own for own in found if own] if all(found) else None


def leave_out(program: Program, more: Schedule, left: Rounds, microbatches: int) -> Program | None:
    """`program`, folded and lowered from `more`, as lowered from a schedule without these rounds of so many micro-batches of each
    copy of the model; None where that is not the same without their ops.

    An op waits for what it ever does of its micro-batch; behind the round all of these are numbered anew. Micro-batches keep their
    numbers otherwise, and there are no labels.
    """
    begins, starts, cuts = program.begins.tolist(), [0, *accumulate(map(len, more.rows))], []
    for (place, length), start, end in zip(left, starts, starts[1:], strict=False):
        at = start + place
        first, before, begin, stop, last = (begins[action] for action in (start, at - length, at, at + length, end))
        if not np.array_equal(program.price[before:begin], program.price[begin:stop]):
            return None
        cuts.append((first, begin, stop, last))
    late, stay = np.ones(program.num_ops, dtype=bool), np.ones(program.num_ops, dtype=bool)
    late[: cuts[0][0]] = False
    for first, begin, stop, _ in cuts:
        late[first:stop] = stay[begin:stop] = False
    head = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    # The end of a step waits for ops of all micro-batches.
    end = head >= cuts[-1][3]
    edge = stay[head] & (stay[program.dep_ops] | ~end)
    head, before, end = head[edge], program.dep_ops[edge], end[edge]
    # Whoever waits for what the round parts it from waits for another micro-batch's.
    other = ~end & np.where(late[head], ~late[before] & (before >= cuts[0][0]), late[before] | ~stay[before])
    before[other] = _of_another(program, before[other], np.where(late[head[other]], -microbatches, microbatches))
    if (before < 0).any() or not stay[before].all() or (late[before] == late[head])[other].any():
        return None
    number, on = np.cumsum(stay) - 1, stay[program.stream_ops]
    stream = np.repeat(np.arange(len(program.streams)), np.diff(program.stream_ptr))[on]
    return replace(
        program,
        stream_ptr=pointers(np.bincount(stream, minlength=len(program.streams))),
        stream_ops=number[program.stream_ops[on]],
        **{name: getattr(program, name)[stay] for name in ("kind", "stage", "microbatch", "layer", "role", "price")},
        dep_ptr=pointers(np.bincount(head, minlength=program.num_ops)[stay]),
        dep_ops=number[before],
        pairs={int(number[op]): pair for op, pair in program.pairs.items() if stay[op]},
        labels={},
        begins=np.zeros(0, dtype=np.int64),
    )


def _kinds(row: tuple[Action, ...]) -> Iterator[tuple[object, ...]]:
    """What a rank runs, whichever micro-batch."""
    return (action[:2] if not action[3] else (action[3][0][0], action[3][1][0]) for action in row)


def _round(fewer: tuple[Action, ...], more: tuple[Action, ...]) -> tuple[int, int] | None:
    """(place, length) of a round in `more`, with a round like it on either side, that `fewer` does not have."""
    short, longer = list(_kinds(fewer)), list(_kinds(more))
    length = len(longer) - len(short)
    end = next((at for at, (a, b) in enumerate(zip(short, longer, strict=False)) if a != b), len(short))
    at, again = end - length, longer[end - length : end]
    if length <= 0 or at < length or longer[end + length :] != short[end:]:
        return None
    return (at, length) if longer[at - length : at] == again == longer[end : end + length] else None


def _of_another(program: Program, ops: IntArray, ahead: IntArray) -> IntArray:
    """The same as `ops` of a micro-batch so many behind theirs; -1 where there is none or it is of no micro-batch."""
    most = int(program.microbatch.max(initial=0)) + 1
    code = np.where(program.microbatch < 0, -1, program.price * most + program.microbatch)
    order = np.argsort(code, kind="stable")
    to = program.microbatch[ops] + ahead
    wanted = np.where((code[ops] < 0) | (to < 0) | (to >= most), -2, code[ops] + ahead)
    found = order[np.minimum(np.searchsorted(code[order], wanted), len(order) - 1)]
    return np.where(code[found] == wanted, found, -1)
