"""A pipeline schedule: for each rank, what it runs in which order. Pure order: there is no time in it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simpar.schedules.action import Action, Phase
from simpar.schedules.check import check_rows
from simpar.schedules.order import (
    PHASE_CODE,
    PREREQUISITES,
    Chain,
    OrderArrays,
    Replay,
    Rows,
    order_arrays,
    replay,
)


@dataclass(frozen=True)
class Schedule:
    """Who runs what in which order.

    Attributes:
        name: the schedule's registry name, or a file's name.
        num_ranks: pipeline ranks p.
        num_microbatches: microbatches m of one step, all chains together.
        stage_to_rank: for each (virtual) stage, the rank that holds it.
        rows: for each rank, its actions in order. Compute actions only.
        copies: the copies of the model. Left out: one of all stages and microbatches.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    rows: Rows
    copies: tuple[Chain, ...] = ()

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The copies of the model, one at least."""
        return self.copies or (Chain(range(len(self.stage_to_rank)), range(self.num_microbatches)),)

    @cached_property
    def _full_backward(self) -> frozenset[int]:
        """The (stage, microbatch) pairs, as stage * m + microbatch, that run B: there B is what I means in the rule."""
        m, backward, pair = self.num_microbatches, Phase.B, Phase.OVERLAP_F_B
        leaves = [action for row in self.rows for action in row if action[1] is backward]
        leaves += [leaf for row in self.rows for action in row if action[1] is pair for leaf in action[3] if leaf[1] is backward]
        return frozenset([leaf[0] * m + leaf[2] for leaf in leaves])

    @property
    def num_stages(self) -> int:
        """Virtual stages, over all chains."""
        return len(self.stage_to_rank)

    @property
    def stages_per_model(self) -> int:
        """Virtual stages of one copy of the model."""
        return len(self.chains[0].stages)

    @property
    def replicas(self) -> int:
        """Copies of the model that the pipeline holds: 2 for a bidirectional schedule, else 1."""
        return len(self.chains)

    @property
    def ends_meet(self) -> bool:
        """Whether one rank holds the first part of the model and the last."""
        return self.replicas > 1 or self.stage_to_rank[0] == self.stage_to_rank[-1]

    @property
    def splits_backward(self) -> bool:
        """Whether some backward runs as I and W."""
        return len(self._full_backward) < sum(len(chain.stages) * len(chain.microbatches) for chain in self.chains)

    def chain_of(self, stage: int) -> Chain:
        """The chain that `stage` belongs to."""
        return next(chain for chain in self.chains if stage in chain.stages)

    def model_stage(self, stage: int) -> int:
        """Which part of the model `stage` computes: its place within its chain."""
        return stage - self.chain_of(stage).stages.start

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def prerequisites(self, action: Action) -> list[Action]:
        """What must have finished before `action` starts, besides the actions before it in its row.

        For an overlapped pair: what either part needs. The answer holds no pairs, only F, B, I and W.
        """
        found: list[Action] = []
        for leaf in action.leaves:
            stages = self.chain_of(leaf.stage).stages
            for offset, phase in PREREQUISITES[leaf.phase]:
                stage = leaf.stage + offset
                if stage not in stages:
                    continue
                whole = stage * self.num_microbatches + leaf.microbatch in self._full_backward
                wanted = Phase.B if phase is Phase.I and whole else phase
                found.append(Action(stage, wanted, leaf.microbatch))
        return found

    def as_arrays(self) -> OrderArrays:
        """The order as integer columns, for consumers that cannot afford one Python object per action."""
        return order_arrays(self.rows, self.chains, self.num_stages, self.num_microbatches)

    def check(self) -> None:
        """Verify that the order is complete and can run.

        Raises:
            InputError: an action is missing, doubled, unknown or on the wrong rank, or ranks wait for each
                other for ever. Lists every violation and shows the rank x step grid with those cells marked.
        """
        check_rows(self.rows, self.chains, self.stage_to_rank, self.num_ranks, self.num_microbatches)

    def replay(
        self,
        F: float = 1.0,
        B: float = 2.0,
        I: float = 1.0,  # noqa: E741
        W: float = 1.0,
        overlap: float | None = None,
    ) -> Replay:
        """When each entry of `as_arrays` runs if every stage costs the same and communication nothing.

        Args:
            F: duration of a forward of one virtual stage, in any unit of time; B, I, W likewise.
            B: a full backward. Independent of I and W: pass all three.
            I: an input gradient.
            W: a weight gradient.
            overlap: an overlapped pair, whose parts start and finish together. Left out, its parts run one
            after
                the other, as torch and DualPipe do unless the user supplies an overlapped implementation.
        """
        order = self.as_arrays()
        durations = np.array([F, B, I, W])[order.phase]
        if overlap is None:
            order = replace(order, slot=np.arange(len(order.slot)))
        else:
            durations[order.overlapped()] = overlap
        return replay(order, durations.tolist())

    def unit_makespan(self, **costs: float) -> float:
        """From the first action to the end of the last; `costs` as in `replay`."""
        return self.replay(**costs).makespan

    def unit_bubble(self, *, flush: bool = True, **costs: float) -> float:
        """The longest time that a rank idles; `costs` as in `replay`.

        With a flush every rank waits for the last one before the next step. Without (the zero-bubble papers'
        reading, with an optimizer that is not synchronised) only gaps between a rank's own actions count.
        """
        played, order = self.replay(**costs), self.as_arrays()
        idle = []
        for begin, end in itertools.pairwise(order.rank_start):
            # Both parts of an overlapped pair may carry the pair's times: count each time span once.
            spans = set(zip(played.start[begin:end], played.finish[begin:end], strict=True))
            first, last = (0.0, played.makespan) if flush else (min(spans)[0], max(finish for _, finish in spans))
            idle.append(last - first - sum(finish - start for start, finish in spans))
        return max(idle)

    def peak_in_flight(self, released_by: Phase = Phase.W) -> tuple[int, ...]:
        """Per rank, the most stage activations it holds at once.

        One unit is what one virtual stage keeps of one microbatch; divide by the stages per rank for full
        stages. It is held from the forward until the full backward or, where that is split, until
        `released_by`: W (the default), which still needs the saved inputs, or I.
        """
        change_by_code = np.zeros(len(PHASE_CODE), dtype=np.int64)
        change_by_code[PHASE_CODE[Phase.F]] = 1
        change_by_code[[PHASE_CODE[Phase.B], PHASE_CODE[released_by]]] = -1
        order = self.as_arrays()
        change = change_by_code[order.phase]
        bounds = itertools.pairwise(order.rank_start)
        return tuple(int(np.cumsum(change[begin:end]).max(initial=0)) for begin, end in bounds)


def loop_placement(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage -> rank when the stages go round the ranks `virtual_stages` times: 0 1 2 3 0 1 2 3."""
    return tuple(range(num_ranks)) * virtual_stages


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Stage -> rank when two stages per rank go down the ranks and back up: 0 1 2 3 3 2 1 0."""
    down = tuple(range(num_ranks))
    return down + down[::-1]
