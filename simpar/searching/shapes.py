"""Pipeline shapes: which rank holds which stages, what must run before a rank starts and after it ends, for every schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from simpar.program.program import FloatArray, IntArray
from simpar.schedules import SCHEDULES as FAMILIES
from simpar.schedules import Schedule
from simpar.schedules.interleaved import round_size
from simpar.searching import axes
from simpar.searching.choice import Pipeline
from simpar.searching.slow_ranks import Slow


@dataclass(frozen=True)
class Shape:
    """What the bounds need to know of a schedule, without its order.

    Attributes:
        ranks: pipeline ranks p.
        stages: stages of one copy of the model.
        style: "full": backwards whole; "split": input and weight gradients apart; "pairs": some overlap with forwards.
        share: float array [ranks, stages], how often a rank runs a stage per micro-batch (1; 1/2 in DualPipe).
        before: float array [ranks, stages], stages a micro-batch passes before the rank can start.
        sends: int array [ranks], boundary tensors a rank sends per micro-batch.
        first: int array [ranks], the first stage of each rank.
        slow: float array [ranks], how much longer each rank computes; `share` and `before` count with it, `through` has the least
            of the ranks that hold a stage, float array [stages].
    """

    ranks: int
    stages: int
    style: str
    share: FloatArray
    before: FloatArray
    sends: IntArray
    first: IntArray
    stage_to_rank: tuple[int, ...]
    replicas: int
    name: str
    slow: FloatArray
    through: FloatArray

    def group(self, m: int) -> int:
        """Micro-batches that a rank runs through one chunk before the next, 0 where that is not how it goes."""
        if self.stages == self.ranks or self.style == "pairs" or self.name in axes.V_SHAPED:
            return 0
        return m if self.name == "interleaved_bfs" else round_size(self.ranks, m)

    def sends_beside(self, empty: IntArray, m: int) -> FloatArray:
        """How many sends of each rank surely run beside its own ops, float array [ranks]; for sends that do not block.

        The stream of a send is busy from the end of the op that it follows on for as long as the send takes. Where the rank's next
        op takes no less, no other such stretch overlaps that one, and all of it lies before the end of the rank's last op: left out
        are what follows the last op, and what comes before a pass of a stage without layers, which may be shorter.

        Args:
            empty: int array [ranks], stages without layers on each rank.
        """
        if self.style == "pairs" or self.replicas > 1:
            return np.zeros(self.ranks)
        passes = 2 if self.style == "full" else 3
        beside: FloatArray = np.maximum(m * (self.sends - passes * empty) - 1.0, 0.0)
        return beside

    @property
    def ends_meet(self) -> bool:
        """Whether one rank holds the first stage and the last."""
        return self.replicas > 1 or self.stage_to_rank[0] == self.stage_to_rank[self.stages - 1]

    @property
    def order(self) -> IntArray:
        """Ranks by their first stages, int array [1, ranks]; of pipelines that start at both ends [2, ranks / 2]."""
        ranks = np.arange(self.ranks)
        return ranks[None] if self.replicas == 1 else np.stack([ranks[: self.ranks // 2], ranks[: self.ranks // 2 - 1 : -1]])

    @property
    def held(self) -> dict[int, list[int]]:
        """Pipeline rank -> model stages, as the pricer and the memory count them."""
        found: dict[int, list[int]] = {r: [] for r in range(self.ranks)}
        for index, rank in enumerate(self.stage_to_rank):
            found[rank].append(index % self.stages)
        return found


@lru_cache(maxsize=4096)
def shape_of(ranks: int, virtual_stages: int, schedule: str, slow: Slow = ()) -> Shape:
    """The shape of a schedule on `ranks` ranks with `virtual_stages` chunks, some of them slow."""
    family = FAMILIES[schedule]
    if schedule == "dualpipe":
        places = (*range(ranks), *range(ranks - 1, -1, -1))
        stages, style = ranks, "pairs"
    elif schedule in axes.V_SHAPED:
        places = (*range(ranks), *range(ranks - 1, -1, -1))
        stages, style = 2 * ranks, "pairs" if schedule == "dualpipe-v" else "split"
    else:
        places = tuple(range(ranks)) * virtual_stages
        stages, style = ranks * virtual_stages, "split" if family.splits_backward else "full"
    share = np.zeros((ranks, stages))
    for index, rank in enumerate(places):
        share[rank, index % stages] += stages / len(places)
    before = np.zeros((ranks, stages))
    sends = np.zeros(ranks, dtype=np.int64)
    first = np.array([min(i % stages for i, r in enumerate(places) if r == rank) for rank in range(ranks)])
    for rank in range(ranks):
        before[rank, : first[rank]] = 1.0
    chain = places[:stages]
    for stage in range(stages - 1):
        if chain[stage] != chain[stage + 1]:
            sends[chain[stage]] += 1
            sends[chain[stage + 1]] += 1
    if schedule == "dualpipe":
        sends = (sends + sends[::-1]) // 2
    factors = np.array(slow or (1.0,) * ranks)
    through = np.array([min(factors[r] for i, r in enumerate(places) if i % stages == stage) for stage in range(stages)])
    share, before = share * factors[:, None], before * through
    return Shape(ranks, stages, style, share, before, sends, first, places, family.replicas, schedule, factors, through)


def paired_passes(schedule: Schedule) -> FloatArray:
    """Passes of every rank through every stage of one copy of the model, float array [6, ranks, stages].

    Forwards, forwards in a pair, whole backwards, those in a pair, input and weight gradients by themselves.
    """
    order = schedule.as_arrays()
    pair = order.overlapped()
    column = np.choose(order.phase, [np.where(pair, 1, 0), np.where(pair, 3, 2), 4, 5])
    model = np.array([schedule.model_stage(s) for s in range(schedule.num_stages)])
    found = np.zeros((6, schedule.num_ranks, schedule.stages_per_model))
    np.add.at(found, (column, order.rank, model[order.stage]), 1.0)
    return found


def style_of(pipeline: Pipeline) -> str:
    """The style of a pipeline's schedule, see `Shape`."""
    if pipeline.schedule in ("dualpipe", "dualpipe-v"):
        return "pairs"
    return "split" if FAMILIES[pipeline.schedule].splits_backward else "full"
