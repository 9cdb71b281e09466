"""Is an order complete, and can it run? Everything wrong with it, in one error that shows where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from simpar.errors import InputError, Violation
from simpar.schedules.action import COMPUTE_PHASES, Action, Phase
from simpar.schedules.order import Chain, Rows, order_arrays, replay

_STEPS_AROUND = 5
"""Steps shown before and after the offending cells."""
_MOST_STEPS = 40
_MOST_LISTED = 8


@dataclass(slots=True)
class _Findings:
    """Violations, the (rank, step) cells that they concern, and the cells that make sense by themselves."""

    violations: list[Violation] = field(default_factory=list)
    marked: set[tuple[int, int]] = field(default_factory=set)
    sound: list[list[Action]] = field(default_factory=list)
    sound_steps: list[list[int]] = field(default_factory=list)
    seen: dict[tuple[int, Phase, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, cell: tuple[int, int], action: Action, rule: str, right: str = "") -> None:
        self.marked.add(cell)
        self.violations.append(Violation(f"rank {cell[0]}, step {cell[1]}", str(action), rule, right))


def check_rows(rows: Rows, chains: Sequence[Chain], stage_to_rank: Sequence[int], num_ranks: int, num_microbatches: int) -> None:
    """Raise `InputError` with all violations of a schedule given by its parts; see `Schedule.check`."""
    found = _Findings()
    found.violations.extend(_shape(rows, chains, stage_to_rank, num_ranks, num_microbatches))
    if not found.violations:
        _check_cells(rows, chains, stage_to_rank, found)
        found.violations.extend(_incomplete(chains, found))
        _check_runs(chains, len(stage_to_rank), num_microbatches, found)
    if found.violations:
        error = InputError(found.violations)
        if found.marked:
            error.args = (f"{error}\n{grid(rows, found.marked)}",)
        raise error


def _shape(
    rows: Rows, chains: Sequence[Chain], stage_to_rank: Sequence[int], num_ranks: int, num_microbatches: int
) -> Iterator[Violation]:
    if len(rows) != num_ranks:
        yield Violation("rows", len(rows), "one row per rank is needed", f"num_ranks is {num_ranks}")
    for stage, rank in enumerate(stage_to_rank):
        if not 0 <= rank < num_ranks:
            right = f"ranks are 0 to {num_ranks - 1}"
            yield Violation(f"stage_to_rank[{stage}]", rank, "is not a rank", right)
    for what, count in (("stages", len(stage_to_rank)), ("microbatches", num_microbatches)):
        held = sorted(index for chain in chains for index in getattr(chain, what))
        if held != list(range(count)):
            yield Violation("chains", held, f"must hold each of the {what} 0 to {count - 1} exactly once")


def _check_cells(rows: Rows, chains: Sequence[Chain], stage_to_rank: Sequence[int], found: _Findings) -> None:
    """Report cells that cannot be right by themselves and sort the others into `found.sound`."""
    chain_of = {stage: chain for chain in chains for stage in chain.stages}
    for rank, row in enumerate(rows):
        found.sound.append([])
        found.sound_steps.append([])
        for step, action in enumerate(row):
            before = len(found.violations)
            for leaf in action.leaves:
                _check_leaf((rank, step), leaf, chain_of, stage_to_rank, found)
            if len(found.violations) == before:
                found.sound[-1].append(action)
                found.sound_steps[-1].append(step)


def _check_leaf(
    cell: tuple[int, int],
    leaf: Action,
    chain_of: dict[int, Chain],
    stage_to_rank: Sequence[int],
    found: _Findings,
) -> None:
    if leaf.phase not in COMPUTE_PHASES:
        found.add(cell, leaf, "a schedule holds compute actions only", "F, B, I, W or a pair of them")
        return
    chain = chain_of.get(leaf.stage)
    if chain is None:
        found.add(cell, leaf, f"there is no stage {leaf.stage}", f"stages are 0 to {len(stage_to_rank) - 1}")
        return
    if leaf.microbatch not in chain.microbatches:
        rule = f"stage {leaf.stage} has no microbatch {leaf.microbatch}"
        last = chain.microbatches.stop - 1
        found.add(cell, leaf, rule, f"its microbatches are {chain.microbatches.start} to {last}")
        return
    if stage_to_rank[leaf.stage] != cell[0]:
        right = f"it is on rank {stage_to_rank[leaf.stage]}"
        found.add(cell, leaf, f"stage {leaf.stage} is not on this rank", right)
    first = found.seen.setdefault((leaf.stage, leaf.phase, leaf.microbatch), cell)
    if first != cell:
        found.add(cell, leaf, "each action runs once", f"it already runs at rank {first[0]}, step {first[1]}")
    split = Phase.I if leaf.phase is Phase.B else Phase.B
    if leaf.phase is not Phase.F and (leaf.stage, split, leaf.microbatch) in found.seen:
        found.add(cell, leaf, "a backward runs either whole (B) or split (I and W)", "leave one out")


def _incomplete(chains: Sequence[Chain], found: _Findings) -> Iterator[Violation]:
    for chain in chains:
        for stage in chain.stages:
            missing: dict[str, list[int]] = {}
            for m in chain.microbatches:
                has = {phase for phase in COMPUTE_PHASES if (stage, phase, m) in found.seen}
                if Phase.F not in has:
                    missing.setdefault("F", []).append(m)
                if not has & {Phase.B, Phase.I, Phase.W}:
                    missing.setdefault("B", []).append(m)
                elif Phase.B not in has:
                    for half in {Phase.I, Phase.W} - has:
                        missing.setdefault(half, []).append(m)
            for phase, microbatches in sorted(missing.items()):
                which = ", ".join(map(str, microbatches[:_MOST_LISTED]))
                more = len(microbatches) - _MOST_LISTED
                what = f"no {phase} of microbatch {which}{f' and {more} more' if more > 0 else ''}"
                right = "forward (F) and backward (B, or I and W)"
                yield Violation(f"stage {stage}", what, "every microbatch passes every stage once", right)


def _check_runs(chains: Sequence[Chain], num_stages: int, num_microbatches: int, found: _Findings) -> None:
    """Replay the sound cells and report those at which ranks wait for ever."""
    order = order_arrays(tuple(map(tuple, found.sound)), tuple(chains), num_stages, num_microbatches)
    result = replay(order, [1.0] * len(order.slot))

    def cell(entry: int) -> tuple[int, int]:
        rank = int(order.rank[entry])
        return rank, found.sound_steps[rank][int(order.slot[entry])]

    for head in result.blocked:
        rank, step = cell(head)
        action = found.sound[rank][int(order.slot[head])]
        needed = order.prerequisites[head : head + len(action.leaves)].ravel().tolist()
        reasons = []
        for entry in needed:
            if entry < 0 or result.finish[entry]:
                continue
            other, at = cell(entry)
            leaf = f"{order.stage[entry]}{COMPUTE_PHASES[order.phase[entry]]}{order.microbatch[entry]}"
            if other == rank:
                place = "in the same cell" if at == step else f"later in this row, at step {at}"
            else:
                place = f"at rank {other}, step {at}, which is never reached"
            reasons.append(f"{leaf} ({place})")
        found.add((rank, step), action, f"waits for ever for {' and '.join(reasons)}", "run that first")


def grid(rows: Rows, marked: set[tuple[int, int]]) -> str:
    """The order as text around the `marked` cells: a line per rank, a column per step, >marks<."""
    first = max(0, min(step for _, step in marked) - _STEPS_AROUND)
    longest = max(map(len, rows), default=0)
    last = min(longest, max(step for _, step in marked) + _STEPS_AROUND + 1, first + _MOST_STEPS)
    header = ["step", *map(str, range(first, last))]
    lines = [header]
    for rank, row in enumerate(rows):
        cells = [str(row[step]) if step < len(row) else "" for step in range(first, last)]
        cells = [f">{text}<" if (rank, first + i) in marked else text for i, text in enumerate(cells)]
        lines.append([f"rank {rank}", *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    if (first, last) != (0, longest):
        text.append(f"(steps {first} to {last - 1} of {longest})")
    return "\n".join(text)
