"""Whether a step with more micro-batches is one with fewer, extended.

Finish times are longest paths, which are linear in the number of micro-batches once no op changes what it waits for. Each op of the
shorter step has two images in the longer one, which has a round more: the op as far from the first of its kind, and the op as far
from the last. In the beginning the first image is the same op moved by a constant of its kind, in the end the second is, and for at
least a round both are; and neither uses up its slack to anything that it waits for. Slacks change by the same amount each round:
those that grow never end, and those that shrink last for a number of rounds that they tell. So long what an op waits for stays what
it is, and every further round moves both images by the same constants again.

The constants differ by kind where stages run at their own speed, as in GPipe's forwards: a fast stage gets ever further ahead of a
slow one behind it, at a constant rate. Under a split backward slacks shrink instead, for as long as stages of unequal length use
them up. Where communication slows compute beside it, a round comes nearer to the one before by a constant factor. A step tells
both, so it tells how long one must be to repeat itself (`foreseen`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simpar.engine.timeline import Timeline
from simpar.program.program import COMPUTE_KINDS, FloatArray, IntArray, OpKind, Program

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's ops by kind: phase, stage, layer and stream.

    Attributes:
        kind: int array [ops], numbered alike in both steps.
        number: int array [ops]: how many of its kind come before.
        count: int array [kinds]: ops of each.
        times: start and finish, float array [ops, 2].
        op, before: what waits for what, int arrays [edges]; of each op's one of a kind, in their order.
        begin: first edge of each op, and behind the last, int array [ops + 1].
    """

    kind: IntArray
    number: IntArray
    count: IntArray
    times: FloatArray
    op: IntArray
    before: IntArray
    begin: IntArray

    @classmethod
    def of(cls, timeline: Timeline, kind: IntArray, kinds: int) -> _Step:
        begin, before = timeline.program.predecessors
        op = np.repeat(np.arange(len(kind)), np.diff(begin))
        order, count = np.argsort(kind, kind="stable"), np.bincount(kind, minlength=kinds)
        number = np.empty_like(kind)
        number[order] = np.arange(len(kind)) - np.repeat(np.cumsum(count) - count, count)
        order = np.lexsort((number[before], kind[before], op))
        op, before = op[order], before[order]
        # Ops of a kind run one after the other: whoever waits for several of them waits for the last.
        last = np.ones(len(op), dtype=bool)
        last[:-1] = (np.diff(op) != 0) | (np.diff(kind[before]) != 0)
        op, before = op[last], before[last]
        begin = np.searchsorted(op, np.arange(len(kind) + 1))
        return cls(kind, number, count, np.stack([timeline.start, timeline.finish], axis=1), op, before, begin)

    @property
    def slack(self) -> FloatArray:
        """Seconds from the end of what an op waits for to its start, float array [edges]."""
        found: FloatArray = self.times[self.op, 0] - self.times[self.before, 1]
        return found


class _Images:
    """The ops of the shorter step in the longer one, as far from the first of their kind or from the last.

    Attributes:
        op: int array [ops].
        shift: seconds by which the first (or last) op of the kind starts and finishes later, float array [ops, 2].
        moved: bool array [ops]: moved by that.
    """

    def __init__(self, first: _Step, second: _Step, tolerance: float, *, last: bool) -> None:
        ahead = (second.count - first.count)[first.kind] if last else 0
        starts = np.cumsum(second.count) - second.count
        self.op: IntArray = np.argsort(second.kind, kind="stable")[starts[first.kind] + first.number + ahead]
        shift = second.times[self.op] - first.times
        ends = np.flatnonzero(first.number == (first.count[first.kind] - 1 if last else 0))
        by_kind = np.zeros((len(first.count), 2))
        by_kind[first.kind[ends]] = shift[ends]
        self.shift: FloatArray = by_kind[first.kind]
        self.moved: BoolArray = np.asarray(np.abs(shift - self.shift).max(axis=1) <= tolerance)

    def held(self, first: _Step, second: _Step, others: _Images, further: float, tolerance: float) -> tuple[BoolArray, FloatArray]:
        """(ops that wait for images of what they waited for, with slack left after so many further rounds; slack of the images,
        float array [edges])."""
        good: BoolArray = np.asarray(self.moved & (np.diff(first.begin) == np.diff(second.begin)[self.op]))
        edge = good[first.op]
        place = np.where(edge, second.begin[self.op[first.op]] + np.arange(len(first.op)) - first.begin[first.op], 0)
        image, slack = second.before[place], np.where(edge, second.slack[place], np.inf)
        known: BoolArray = np.zeros(len(edge), dtype=bool)
        for images in (self, others):
            known = np.asarray(known | (images.moved[first.before] & (image == images.op[first.before])))
        good[first.op[~known]] = False
        shrinks = np.flatnonzero(slack < first.slack - tolerance)
        lost = (first.slack[shrinks] - slack[shrinks]) * further
        good[first.op[shrinks[slack[shrinks] - lost < tolerance]]] = False
        return good, slack


def extends(first: Timeline, second: Timeline, *, interference: bool, tolerance: float, further: float = np.inf) -> bool:
    """Whether each further round moves the ops of `second`, a round longer, as the last one moved those of `first`.

    Args:
        further: so many rounds.
        interference: how fast an op runs hangs on what runs beside it.
        tolerance: seconds that are none.
    """
    kinds = _kinds((first.program, second.program))
    many = 1 + max(int(kind.max(initial=0)) for kind in kinds)
    one, other = (_Step.of(timeline, kind, many) for timeline, kind in zip((first, second), kinds, strict=True))
    if (other.count < one.count).any() or (one.count == 0).any():
        return False
    early, late = (_Images(one, other, tolerance, last=last) for last in (False, True))
    (fixed, slack), (moving, later) = (
        early.held(one, other, late, further, tolerance),
        late.held(one, other, early, further, tolerance),
    )
    end, begin = one.count.copy(), np.zeros_like(one.count)
    np.minimum.at(end, one.kind[~fixed], one.number[~fixed])
    np.maximum.at(begin, one.kind[~moving], one.number[~moving] + 1)
    # Of what comes once in a step, however long, both images are one.
    if (end - begin < other.count - one.count).any() or (end < begin).any():
        return False
    inside = (one.number >= begin[one.kind]) & (one.number < end[one.kind])
    shifts = np.concatenate([early.shift, late.shift], axis=1)
    if interference and not _together(first.program, inside, other.count[one.kind] > one.count[one.kind], shifts, tolerance):
        return False
    # Each op inside starts with the end of one op, the same in all of its images.
    edges = np.flatnonzero(inside[one.op])
    waits = np.flatnonzero(np.diff(one.op[edges], prepend=-1))
    slacks = np.maximum(one.slack, np.maximum(slack, later))[edges]
    return len(waits) == 0 or bool((np.minimum.reduceat(slacks, waits) <= tolerance).all())


def may_extend(second: Timeline, few: int, more: int, *, tolerance: float) -> bool:
    """Whether a round of every kind of pass and of message that a micro-batch has one of is the one before, moved by a constant.

    Without that `extends` is false whatever the first step is.

    Args:
        few, more: ops of such a kind in the first step and in `second`.
        tolerance: as of `extends`.
    """
    (kind,) = _kinds((second.program,))
    order, count = np.argsort(kind, kind="stable"), np.bincount(kind)
    times, ahead = np.stack([second.start, second.finish], axis=1)[order], more - few
    passes = np.isin(np.arange(len(count)), kind[second.program.kind <= OpKind.SEND_BACKWARD])
    for begin in (np.cumsum(count) - count)[passes & (count == more)]:
        own = times[begin : begin + more]
        moved = own[ahead:] - own[:-ahead]
        apart = np.flatnonzero(np.abs(np.diff(moved, axis=0)).max(axis=1) > 4 * tolerance) + 1
        if np.diff(np.concatenate([[0], apart, [few]])).max() < ahead:
            return False
    return True


def foreseen(second: Timeline, ahead: int, more: int, every: int, *, tolerance: float) -> tuple[float, bool] | None:
    """(how many passes of a kind a step needs to repeat itself, whether as a slack lasts until then), as far as one of `more` says;
    None where that says nothing.

    Past its head each of its rounds is the one before moved by a constant, until a slack is used up and another head begins; or
    comes nearer to that by a constant factor. Its tail is as long as any step's.

    Args:
        ahead: passes of a round of a kind that a micro-batch has one of.
        more, every: those of the step, and of the whole.
        tolerance: as of `extends`.
    """
    (kind,) = _kinds((second.program,))
    step = _Step.of(second, kind, int(kind.max(initial=0)) + 1)
    begins = (np.cumsum(step.count) - step.count)[step.count == more]
    ops = np.argsort(kind, kind="stable")[begins[:, None] + np.arange(more)]
    moved = step.times[ops[:, ahead:]] - step.times[ops[:, :-ahead]]
    change = np.abs(moved[:, ahead:] - moved[:, :-ahead]).max(axis=(0, 2), initial=0.0)
    if len(change) < 2 * ahead:
        return None
    apart = np.lib.stride_tricks.sliding_window_view(change, ahead).max(axis=1)
    same = np.diff(np.concatenate([[False], apart <= tolerance, [False]]).astype(np.int64))
    heads, ends = np.flatnonzero(same > 0), np.flatnonzero(same < 0)
    if len(heads):
        end, until = 0, -np.inf
        # A regime whose slack is used up within the step has made room for the next.
        while len(heads) and until < end + 3 * ahead:
            longest = int(np.argmax(ends - heads))
            end, head = int(ends[longest]), float(heads[longest])
            heads, ends = heads[longest + 1 :], ends[longest + 1 :]
            last = ops[:, end + ahead - 1 : end + 2 * ahead - 1].reshape(-1)
            until = _used_up(step, last, ops[:, end + 2 * ahead - 1 : end + 3 * ahead - 1].reshape(-1), tolerance)
        head += until if until < every else 0.0
        # A lead of passes that all end before others begin is as long as there are micro-batches: more of them last longer.
        late = until < every and step.times[ops[:, 0], 0].max() < step.times[ops[:, -1], 0].min()
    else:
        end = int(np.argmin(apart))
        since = end - ahead * max(end // (3 * ahead), 1)
        if since < 0 or apart[since] <= apart[end]:
            return None
        late = False
        head = end + (end - since) * float(np.log(tolerance / apart[end]) / np.log(apart[end] / apart[since]))
    return head + (len(apart) - end) + 2 * ahead, bool(late)


def _used_up(step: _Step, ops: IntArray, again: IntArray, tolerance: float) -> float:
    """Of which number an op is the first to have lost its slack to what it waits for; infinite where none loses any.

    Args:
        ops, again: of a round and of the next.
    """
    alike = np.diff(step.begin)[ops] == np.diff(step.begin)[again]
    ops, again = ops[alike], again[alike]
    counts = np.diff(step.begin)[ops]
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    edges, images = (np.repeat(step.begin[part], counts) + place for part in (ops, again))
    left = step.slack[images]
    lost = step.slack[edges] - left
    loses = np.flatnonzero((lost > tolerance) & (step.kind[step.before[edges]] == step.kind[step.before[images]]))
    images, edges = images[loses], edges[loses]
    number, before = step.number[step.op[images]], step.number[step.op[edges]]
    return float((number + (number - before) * left[loses] / lost[loses]).min(initial=np.inf))


def _kinds(programs: tuple[Program, ...]) -> list[IntArray]:
    """Of each op of some programs a number of its kind."""
    known = {stream: index for index, stream in enumerate(programs[0].streams)}
    rows = []
    for program in programs:
        numbers = np.array([known.get(stream, len(known)) for stream in program.streams], dtype=np.int64)
        begins, streams = program.op_streams
        rows.append(np.stack([program.kind, program.stage, program.layer, numbers[streams[begins[:-1]]]], axis=1) + 1)
    both = np.concatenate(rows)
    code = np.zeros(len(both), dtype=np.int64)
    for column in both.T:
        code = code * (int(column.max(initial=0)) + 1) + column
    number = np.unique(code, return_inverse=True)[1].reshape(-1)
    return np.split(number, np.cumsum([len(row) for row in rows])[:-1])


def _together(program: Program, inside: BoolArray, again: BoolArray, shifts: FloatArray, tolerance: float) -> bool:
    """Whether all communication of a rank keeps step with some of its compute, so that it always meets the same.

    Args:
        again: ops of which there are more in each further round; of the others one end of their compute moves as they do.
        shifts: of both images, float array [ops, 4].
    """
    compute = np.isin(program.kind, [int(kind) for kind in COMPUTE_KINDS])
    for role in np.unique(program.role[inside]):
        own = inside & (program.role == role)
        computes = np.unique(shifts[own & compute], axis=0)
        for part, both in ((again, np.maximum), (~again, np.minimum)):
            sends = np.unique(shifts[own & ~compute & part], axis=0)
            apart = np.abs(sends[:, None] - computes[None])
            if (both(apart[..., :2].max(axis=2), apart[..., 2:].max(axis=2)).min(axis=1, initial=np.inf) > 2 * tolerance).any():
                return False
    return True
