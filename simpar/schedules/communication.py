"""From compute order to what torch's runtime executes: point-to-point and FSDP actions between the compute.

The passes mean the same as those of torch.distributed.pipelining (2.13), so that a file with communication
that simpar writes runs as torch would run the compute order itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simpar.errors import InternalError, Violation
from simpar.schedules.action import COMMUNICATION_PHASES, FSDP_PHASES, Action, Phase
from simpar.schedules.order import Rows
from simpar.schedules.schedule import Schedule

ACTIVE_STAGES = 3
"""Stages whose parameters torch keeps gathered at a time: one each for forward, backward and prefetch."""


def with_communication(schedule: Schedule) -> Rows:
    """The rows of `schedule` with UNSHARD, RESHARD, REDUCE_GRAD and the sends and receives put in."""
    rows = [_with_reduce_grad(schedule, _with_unshard(row)) for row in schedule.rows]
    return _with_send_recv(schedule, rows)


def _with_unshard(row: Sequence[Action]) -> list[Action]:
    """Gather the parameters of the next `ACTIVE_STAGES` stages in use before each action, free all others."""
    result: list[Action] = []
    active: dict[int, None] = {}  # used as an ordered set
    for position, action in enumerate(row):
        coming: dict[int, None] = {}
        for later in row[position:]:
            coming.update(dict.fromkeys(leaf.stage for leaf in later.leaves))
            if len(coming) >= ACTIVE_STAGES:
                break
        for stage in [stage for stage in active if stage not in coming]:
            del active[stage]
            result.append(Action(stage, Phase.RESHARD))
        for stage in [stage for stage in coming if stage not in active]:
            active[stage] = None
            result.append(Action(stage, Phase.UNSHARD))
        result.append(action)
    return result + [Action(stage, Phase.RESHARD) for stage in active]


def _with_reduce_grad(schedule: Schedule, row: Sequence[Action]) -> list[Action]:
    """Reduce a stage's gradients right after its last backward."""
    result: list[Action] = []
    finished: Counter[int] = Counter()
    for action in row:
        result.append(action)
        for leaf in action.leaves:
            if leaf.phase in (Phase.B, Phase.W):
                finished[leaf.stage] += 1
                if finished[leaf.stage] == len(schedule.chain_of(leaf.stage).microbatches):
                    result.append(Action(leaf.stage, Phase.REDUCE_GRAD))
    return result


def transfer(schedule: Schedule, leaf: Action) -> tuple[Action, Action] | None:
    """The send on this rank and the receive on the other that follow `leaf`; None if its result stays here."""
    if leaf.phase is Phase.F:
        stage, phases = leaf.stage + 1, (Phase.SEND_F, Phase.RECV_F)
    elif leaf.phase in (Phase.B, Phase.I):
        stage, phases = leaf.stage - 1, (Phase.SEND_B, Phase.RECV_B)
    else:
        return None
    if stage not in schedule.chain_of(leaf.stage).stages:
        return None
    if schedule.stage_to_rank[stage] == schedule.stage_to_rank[leaf.stage]:
        return None
    return Action(leaf.stage, phases[0], leaf.microbatch), Action(stage, phases[1], leaf.microbatch)


def _with_send_recv(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Rows:
    """Send each result at once, and post its receive at that moment on the other rank.

    Ranks take turns, one action each. A receive is posted in the order in which the sends happen, which is
    what keeps blocking communication free of deadlocks.
    """
    result: list[list[Action]] = [[] for _ in rows]
    done: set[Action] = set()
    head = [0] * len(rows)
    unfinished = list(range(len(rows)))
    while unfinished:
        progress = False
        for rank in unfinished:
            action = rows[rank][head[rank]]
            if action.computes and not done.issuperset(schedule.prerequisites(action)):
                continue
            progress = True
            head[rank] += 1
            result[rank].append(action)
            if not action.computes:
                continue
            for leaf in action.leaves:
                done.add(leaf)
                if pair := transfer(schedule, leaf):
                    result[rank].append(pair[0])
                    result[schedule.stage_to_rank[pair[1].stage]].append(pair[1])
        if not progress:
            raise InternalError(f"schedule {schedule.name!r} was lowered without having been checked")
        unfinished = [rank for rank in unfinished if head[rank] < len(rows[rank])]
    return tuple(map(tuple, result))


def communication_violations(schedule: Schedule, rows: Rows) -> Iterator[Violation]:
    """What is wrong with the communication in `rows`, whose compute actions are those of `schedule`.

    Every result that crosses ranks needs one send after its computation and one receive before its use,
    each on the right rank. FSDP actions must name a stage of their rank; when they gather and free is the
    user's choice.
    """
    place: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            where = f"rank {rank}, step {step}"
            if action.phase in FSDP_PHASES and action.stage not in schedule.stages_of(rank):
                yield Violation(where, str(action), "concerns a stage of another rank", _holder(schedule, action.stage))
            if action.phase in COMMUNICATION_PHASES and action in place:
                other = place[action]
                yield Violation(where, str(action), f"stands at rank {other[0]}, step {other[1]} already", "leave one out")
            for leaf in action.leaves:
                place.setdefault(leaf, (rank, step))
    needed: set[Action] = set()
    for leaf in [leaf for row in schedule.rows for action in row for leaf in action.leaves]:
        if pair := transfer(schedule, leaf):
            needed.update(pair)
            yield from _transfer_violations(schedule, leaf, pair, place)
    for action, (rank, step) in place.items():
        if action.phase in COMMUNICATION_PHASES and action not in needed:
            rule = "nothing crosses ranks here"
            yield Violation(f"rank {rank}, step {step}", str(action), rule, "leave it out")


def _holder(schedule: Schedule, stage: int) -> str:
    known = stage in range(schedule.num_stages)
    return f"stage {stage} is on rank {schedule.stage_to_rank[stage]}" if known else f"there is no stage {stage}"


def _transfer_violations(
    schedule: Schedule, leaf: Action, pair: tuple[Action, Action], place: dict[Action, tuple[int, int]]
) -> Iterator[Violation]:
    send, receive = pair
    used_by = [Phase.F] if leaf.phase is Phase.F else [Phase.B, Phase.I]
    use = next(a for phase in used_by if (a := Action(receive.stage, phase, leaf.microbatch)) in place)
    for action, anchor, order in ((send, leaf, "after"), (receive, use, "before")):
        rank, step = place[anchor]
        where = f"rank {rank}, step {step}"
        if action not in place:
            yield Violation(where, str(anchor), f"{action} is missing", f"put it {order} {anchor}")
        elif place[action][0] != rank:
            yield Violation(where, str(anchor), f"{action} stands on rank {place[action][0]}", f"move it to rank {rank}")
        elif (place[action][1] > step) != (order == "after"):
            yield Violation(where, str(anchor), f"{action} stands on the wrong side of it", f"put it {order} {anchor}")
