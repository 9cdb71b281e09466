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
class Step:
    """A step's ops by kind: phase, stage, layer and stream.

    Attributes:
        program: of which they are.
        kinds: what tells its kinds apart, alike in steps of the same kinds.
        kind: int array [ops], index into the kinds.
        number: int array [ops]: how many of its kind come before.
        count: int array [kinds]: ops of each.
        of_kind: the ops, kind by kind, int array [ops].
        times: start and finish, float array [2, ops].
        op, before: what waits for what, int arrays [edges]; of each op's one of a kind, in their order.
        slack: seconds from the end of what an op waits for to its start, float array [edges].
        begin: first edge of each op, and behind the last, int array [ops + 1].
    """

    program: Program
    kinds: IntArray
    kind: IntArray
    number: IntArray
    count: IntArray
    of_kind: IntArray
    times: FloatArray
    op: IntArray
    before: IntArray
    slack: FloatArray
    begin: IntArray

    @classmethod
    def of(cls, timeline: Timeline) -> Step:
        """The step that runs as `timeline`."""
        program = timeline.program
        streams = {stream: index for index, stream in enumerate(sorted(program.streams, key=str))}
        begins, on = program.op_streams
        stream = np.array([streams[stream] for stream in program.streams])[on[begins[:-1]]]
        columns = [column + 1 for column in (program.kind, program.stage, program.layer, stream)]
        sizes = [int(column.max(initial=0)) + 1 for column in columns]
        codes, kind, count = np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True, return_counts=True)
        begin, before = program.predecessors
        op = np.repeat(np.arange(len(kind)), np.diff(begin))
        order = np.argsort(kind, kind="stable")
        number = np.empty_like(kind)
        number[order] = np.arange(len(kind)) - np.repeat(np.cumsum(count) - count, count)
        by_kind = np.lexsort((number[before], kind[before], op))
        op, before = op[by_kind], before[by_kind]
        # Ops of a kind run one after the other: whoever waits for several of them waits for the last.
        last = np.ones(len(op), dtype=bool)
        last[:-1] = (np.diff(op) != 0) | (np.diff(kind[before]) != 0)
        op, before = op[last], before[last]
        times, slack = np.stack([timeline.start, timeline.finish]), timeline.start[op] - timeline.finish[before]
        begin = np.searchsorted(op, np.arange(len(kind) + 1))
        return cls(program, np.concatenate([sizes, codes]), kind, number, count, order, times, op, before, slack, begin)

    def passes(self, more: int) -> IntArray:
        """The ops of the kinds that have so many, int array [kinds, more]."""
        begins = (np.cumsum(self.count) - self.count)[self.count == more]
        found: IntArray = self.of_kind[begins[:, None] + np.arange(more)]
        return found


class _Images:
    """The ops of the shorter step in the longer one, as far from the first of their kind or from the last.

    Attributes:
        op: int array [ops].
        shift: seconds by which the first (or last) op of a kind starts and finishes later, float array [2, kinds].
        moved: bool array [ops]: moved by that.
    """

    def __init__(self, first: Step, second: Step, tolerance: float, *, last: bool) -> None:
        ahead = (second.count - first.count)[first.kind] if last else 0
        starts = np.cumsum(second.count) - second.count
        self.op: IntArray = second.of_kind[starts[first.kind] + first.number + ahead]
        shift, end = second.times[:, self.op] - first.times, np.cumsum(first.count) - 1
        self.shift: FloatArray = shift[:, first.of_kind[end if last else end - first.count + 1]]
        self.moved: BoolArray = np.asarray(np.abs(shift - self.shift[:, first.kind]).max(axis=0) <= tolerance)

    def held(self, first: Step, second: Step, others: _Images, further: float, tolerance: float) -> tuple[BoolArray, FloatArray]:
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


def extends(one: Step, other: Step, *, interference: bool, tolerance: float, further: float = np.inf) -> bool:
    """Whether each further round moves the ops of `other`, a round longer, as the last one moved those of `one`.

    Args:
        further: so many rounds.
        interference: how fast an op runs hangs on what runs beside it.
        tolerance: seconds that are none.
    """
    if not np.array_equal(one.kinds, other.kinds) or (other.count < one.count).any():
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
    shifts = np.concatenate([early.shift, late.shift])
    if interference and not _together(one, end > begin, other.count > one.count, shifts, tolerance):
        return False
    # Each op inside starts with the end of one op, the same in all of its images.
    edges = np.flatnonzero(inside[one.op])
    waits = np.flatnonzero(np.diff(one.op[edges], prepend=-1))
    slacks = np.maximum(one.slack, np.maximum(slack, later))[edges]
    return len(waits) == 0 or bool((np.minimum.reduceat(slacks, waits) <= tolerance).all())


def may_extend(second: Step, few: int, more: int, *, tolerance: float) -> bool:
    """Whether a round of every kind of pass and of message that a micro-batch has one of is the one before, moved by a constant.

    Without that `extends` is false whatever the first step is.

    Args:
        few, more: ops of such a kind in the first step and in `second`.
        tolerance: as of `extends`.
    """
    ops, ahead = second.passes(more), more - few
    ops = ops[second.program.kind[ops[:, 0]] <= OpKind.SEND_BACKWARD]
    moved = second.times[:, ops[:, ahead:]] - second.times[:, ops[:, :-ahead]]
    alike = np.abs(np.diff(moved, axis=2)).max(axis=0, initial=0.0) <= 4 * tolerance
    if ahead < 2:
        return True
    # A round of passes is moved alike: so many less one in a row are moved as the next one is.
    rounds = np.lib.stride_tricks.sliding_window_view(np.asarray(alike), ahead - 1, axis=1)
    return bool(np.all(np.any(np.all(rounds, axis=2), axis=1)))


def foreseen(step: Step, ahead: int, more: int, every: int, *, tolerance: float) -> tuple[float, bool] | None:
    """(how many passes of a kind a step needs to repeat itself, whether as a slack lasts until then), as far as one of `more` says;
    None where that says nothing.

    Past its head each of its rounds is the one before moved by a constant, until a slack is used up and another head begins; or
    comes nearer to that by a constant factor, which is seen as far as two such steps. Its tail is as long as any step's.

    Args:
        ahead: passes of a round of a kind that a micro-batch has one of.
        more, every: those of the step, and of the whole.
        tolerance: as of `extends`.
    """
    ops = step.passes(more)
    moved = step.times[:, ops[:, ahead:]] - step.times[:, ops[:, :-ahead]]
    change = np.abs(moved[..., ahead:] - moved[..., :-ahead]).max(axis=(0, 1), initial=0.0)
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
        late = until < every and step.times[0, ops[:, 0]].max() < step.times[0, ops[:, -1]].min()
    else:
        end = int(np.argmin(apart))
        since = end - ahead * max(end // (3 * ahead), 1)
        if since < 0 or apart[since] <= apart[end]:
            return None
        late = False
        rate = float(np.log(apart[end] / apart[since])) / (end - since)
        head = min(end + float(np.log(tolerance / apart[end])) / rate, 2.0 * more)
    return head + (len(apart) - end) + 2 * ahead, bool(late)


def _used_up(step: Step, ops: IntArray, again: IntArray, tolerance: float) -> float:
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


def _together(step: Step, inside: BoolArray, again: BoolArray, shifts: FloatArray, tolerance: float) -> bool:
    """Whether all communication of a rank keeps step with some of its compute, so that it always meets the same.

    Args:
        inside: kinds of which some ops count, bool array [kinds].
        again: kinds of which there are more in each further round; of the others one end of their compute moves as they do.
        shifts: of both images, float array [4, kinds].
    """
    one = step.of_kind[np.cumsum(step.count) - 1]
    compute = np.isin(step.program.kind[one], [int(kind) for kind in COMPUTE_KINDS])
    for role in np.unique(step.program.role[one][inside]):
        own = inside & (step.program.role[one] == role)
        for part, both in ((again, np.maximum), (~again, np.minimum)):
            apart = np.abs(shifts[:, own & ~compute & part, None] - shifts[:, None, own & compute])
            if (both(apart[:2].max(axis=0), apart[2:].max(axis=0)).min(axis=1, initial=np.inf) > 2 * tolerance).any():
                return False
    return True
