"""The pipelines of a program that is being lowered: which ranks and streams a stage has, where its actions are cut."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import Literal

from simpar.parallel.layout import Layout
from simpar.program.builder import ProgramBuilder
from simpar.program.program import Stream
from simpar.program.units import Units
from simpar.schedules import Action, Phase, Schedule

Detail = Literal["stage", "layer", "op"]
Segment = tuple[int, int]


class Pipelines:
    """Stages, buckets and streams of every pipeline; `copy` is the one being lowered (0 alone when folded)."""

    def __init__(self, layout: Layout, schedule: Schedule, detail: Detail, units: Units) -> None:
        self.layout, self.schedule, self.detail = layout, schedule, detail
        self.units, self.copy = units, 0
        self.builder = ProgramBuilder(layout.scenario.name)
        self.zero = layout.plan.zero_stage
        self.data_parallel = layout.shares_state and layout.training.optimizer != "none"
        self.gather_always = self.zero == 3 and schedule.num_ranks == 1 and self.data_parallel
        by_block = self.data_parallel and (self.gather_always or (self.zero == 2 and schedule.num_ranks == 1))
        self.reduce_always = by_block and not layout.defers_reduction
        self.reduces_beside = by_block or layout.overlap_grad_reduce
        # Nothing is computed meanwhile: what is reduced with every backward is on its stream.
        self.reduces_alone = self.reduce_always and not self.gather_always and not layout.overlap_grad_reduce
        self.offloads = layout.plan.offload.activations > 0
        self.offloads_in_turn = self.offloads and layout.framework.data.offload_blocks_compute
        self.last_backward: dict[int, Action] = {}
        self.first_forward: dict[int, Action] = {}
        self._find_ends()

    def _find_ends(self) -> None:
        forward, backwards, first, last = Phase.F, (Phase.B, Phase.W), self.first_forward, self.last_backward
        for action in chain.from_iterable(self.schedule.rows):
            for leaf in action[3] or (action,):
                if leaf[1] is forward:
                    first.setdefault(leaf[0], leaf)
                elif leaf[1] in backwards:
                    last[leaf[0]] = leaf

    def rank_of(self, stage: int) -> int:
        return self.schedule.stage_to_rank[stage]

    def model_stage(self, stage: int) -> int:
        return self._model_stages[stage]

    @cached_property
    def _model_stages(self) -> tuple[int, ...]:
        return tuple(self.schedule.model_stage(s) for s in range(self.schedule.num_stages))

    @cached_property
    def _chains(self) -> tuple[range, ...]:
        return tuple(self.schedule.chain_of(s).stages for s in range(self.schedule.num_stages))

    @cached_property
    def _stream_cache(self) -> dict[tuple[int, int, str], tuple[Stream, ...]]:
        return {}

    def blocks(self, stage: int) -> int:
        return len(self.layout.stage_blocks[self.model_stage(stage)])

    def buckets(self, stage: int) -> tuple[Segment, ...]:
        """Gradient buckets of a stage, in the order of the backward."""
        return self._buckets[stage]

    @cached_property
    def _buckets(self) -> tuple[tuple[Segment, ...], ...]:
        return tuple(map(self._find_buckets, range(self.schedule.num_stages)))

    @cached_property
    def bucket_ends(self) -> tuple[dict[int, int], ...]:
        """Of each stage: first block of a bucket -> the block after its last."""
        return tuple(map(dict, self._buckets))

    def bucket_of(self, stage: int, block: int) -> int:
        """First block of the bucket of a stage that holds `block`."""
        return next(first for first, _ in self.buckets(stage) if first <= block)

    def _find_buckets(self, stage: int) -> tuple[Segment, ...]:
        layout = self.layout
        if (self.gather_always or self.reduce_always) and not layout.framework.data.fills_buckets(layout.plan.zero_stage):
            return tuple((i, i + 1) for i in range(self.blocks(stage) - 1, -1, -1))
        bucketed = layout.overlap_grad_reduce or self.gather_always or self.reduce_always
        if layout.framework.data.buckets_on_first_pipeline_rank_only and stage != 0:
            bucketed = False
        return layout.buckets(self.model_stage(stage), bucketed=bucketed)

    def segments(self, stage: int, leaf: Action) -> list[Segment]:
        """How an action is cut into ops, in the order of execution."""
        count = self.blocks(stage)
        forward = leaf.phase is Phase.F
        if count == 0:
            return [(0, 0)]
        if self.detail != "stage" or self.gather_always or self.offloads:
            pieces = [(i, i + 1) for i in range(count)]
        elif self.is_cut(stage, leaf):
            pieces = sorted(self.buckets(stage))
        else:
            pieces = [(0, count)]
        return pieces if forward else pieces[::-1]

    def is_cut(self, stage: int, leaf: Action) -> bool:
        """Whether something else may wait for a block inside an action, or hold one up."""
        if self.gather_always or self.offloads:
            return self.blocks(stage) > 1
        return self._has_buckets(stage, leaf) and len(self.buckets(stage)) > 1

    def _has_buckets(self, stage: int, leaf: Action) -> bool:
        """Whether parameters come, or gradients go, bucket by bucket."""
        if not self.data_parallel:
            return False
        if leaf.phase is Phase.F:
            return leaf == self.first_forward[stage] and self.gathers_at_start
        if self.reduce_always:
            return leaf.phase in (Phase.B, Phase.W)
        return leaf == self.last_backward[stage] and self.reduces_beside

    @property
    def launches_together(self) -> bool:
        """Whether pipeline ranks launch their reductions at the same time, not as each finishes a stage's last backward."""
        schedule, data = self.schedule, self.layout.framework.data
        wanted = self.data_parallel and self.layout.overlap_grad_reduce and not self.reduce_always
        return wanted and data.reduces_together and not schedule.splits_backward and schedule.replicas == 1

    @cached_property
    def launched_after(self) -> dict[Action, list[int]]:
        """Backward -> stages whose whole gradients are reduced once it has finished (`launches_together`).

        Rank r launches r backwards late, as its neighbours before it finish so much later; what is left goes with its last
        backward. Without virtual stages the first rank reduces bucket by bucket inside its last backward.
        """
        found: dict[Action, list[int]] = {}
        if not self.launches_together:
            return found
        chunks = self.schedule.num_stages > self.schedule.num_ranks
        for rank, row in enumerate(self.schedule.rows):
            backwards = [leaf for action in row for leaf in action.leaves if leaf.phase is Phase.B]
            for index, leaf in enumerate(backwards):
                if leaf == self.last_backward[leaf.stage] and (chunks or rank):
                    found.setdefault(backwards[min(index + rank, len(backwards) - 1)], []).append(leaf.stage)
        return found

    @cached_property
    def launched_late(self) -> frozenset[int]:
        """Stages of `launched_after`."""
        return frozenset(stage for stages in self.launched_after.values() for stage in stages)

    @property
    def gathers_at_start(self) -> bool:
        """Parameters are gathered under the first forward (sharded optimizer with overlap, or FSDP under a pipeline)."""
        if not self.data_parallel or self.gather_always:
            return False
        return self.zero == 3 or (self.zero >= 1 and self.layout.overlap_param_gather)

    def streams(self, rank: int, kind: str) -> tuple[Stream, ...]:
        """Streams of `kind` of all ranks that the current copy of pipeline rank `rank` joins."""
        key = (self.copy, rank, kind)
        found = self._stream_cache.get(key)
        if found is None:
            found = self._stream_cache[key] = tuple(Stream(r, kind) for r in self.units.ranks(self.copy, rank))
        return found

    def all_streams(self, rank: int, kind: str) -> tuple[Stream, ...]:
        """The same over all copies: for data-parallel collectives."""
        return tuple(Stream(r, kind) for copy in range(self.units.copies) for r in self.units.ranks(copy, rank))

    def role(self, rank: int) -> int:
        return self.units.ranks(self.copy, rank)[0]

    def local(self, key: tuple[object, ...]) -> tuple[object, ...]:
        """The key of something that each copy has for itself."""
        return (self.copy, *key)

    def everywhere(self, key: tuple[object, ...]) -> list[object]:
        """The keys of something in every copy."""
        return [(copy, *key) for copy in range(self.units.copies)]
