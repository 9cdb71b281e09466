"""Pipelines of a space: the blocks of their stages, what ranks hold and send, the order of their schedules; each found once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simpar.parallel.pipeline import StageLayers, split_layers
from simpar.program.program import FloatArray, IntArray
from simpar.schedules import Schedule
from simpar.searching.blocks import Composition
from simpar.searching.choice import Pipeline
from simpar.searching.critical import Paths, critical_paths
from simpar.searching.in_flight import Backwards, InFlight, backwards, in_flight
from simpar.searching.memo import kept
from simpar.searching.shapes import paired_passes, shape_of, style_of
from simpar.searching.slow_ranks import Slow
from simpar.searching.stages import Stages
from simpar.step import schedule_of

if TYPE_CHECKING:
    from simpar.searching.pricing import Pricing


class Pipelines:
    """The pipelines of one search: nothing here depends on what a block costs."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._compositions: dict[object, Composition] = {}
        self._in_flight: dict[object, InFlight] = {}
        self._schedules: dict[object, Schedule] = {}
        self._paths: dict[object, Paths] = {}
        self._stages: dict[object, Stages] = {}

    def composition(self, pipeline: Pipeline, pp: int, limit: int | None) -> Composition:
        """Blocks of every stage."""
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
        key = (shape.stages, shape.ends_meet, pipeline.split, limit)
        if key not in self._compositions:
            layers = self.stage_layers(pipeline, pp)
            self._compositions[key] = Composition.of(self.pricing.kinds, layers, limit)
        return self._compositions[key]

    def in_flight(self, pipeline: Pipeline, pp: int, m: int) -> InFlight:
        """What ranks hold at their worst moments, by class of stages (see `Stages.which`)."""
        which = self.plain_stages(pipeline, pp).which
        policy = self.pricing.framework.pipeline
        outputs = {"none": 0, "one": 1, "all": m}[policy.last_outputs] if pp > 1 or policy.engine_of_one_stage else 0
        if outputs < 2 and pipeline.schedule in ("1f1b", "interleaved") and m % pp == 0:
            m = min(m, 3 * pp)  # the warm-up holds the most, and all after it repeats itself
        key = (pipeline.schedule, pipeline.virtual_stages, pp, m, which.tobytes())
        if key not in self._in_flight:
            schedule = self.schedule(pipeline, pp, m)
            self._in_flight[key] = in_flight(schedule, which, outputs=outputs)
        return self._in_flight[key]

    def schedule(self, pipeline: Pipeline, pp: int, m: int) -> Schedule:
        """The schedule of a pipeline, as `simulate` would build it."""
        key = (pipeline.schedule, pipeline.virtual_stages, pp, m)
        if key not in self._schedules:
            plan = self.pricing.template.plan.model_copy(
                update={"pp": pp, "schedule": pipeline.schedule, "virtual_stages": pipeline.virtual_stages}
            )
            self._schedules[key] = schedule_of(self.pricing.template.model_copy(update={"plan": plan}), m)
        return self._schedules[key]

    @kept
    def backwards(self, pipeline: Pipeline, pp: int, m: int) -> Backwards:
        """What must run before and after the first backwards of each rank."""
        return backwards(self.schedule(pipeline, pp, m))

    @kept
    def passes(self, pipeline: Pipeline, pp: int, m: int) -> FloatArray:
        """What ranks run where some of their passes are pairs, see `paired_passes`; nothing elsewhere."""
        return paired_passes(self.schedule(pipeline, pp, m)) if style_of(pipeline) == "pairs" else np.zeros(0)

    def paths(self, pipeline: Pipeline, pp: int, m: int, slow: Slow) -> Paths:
        """Chains of passes, see `critical`."""
        stages = self.plain_stages(pipeline, pp)
        layers = stages.counts[0][:, : 2 * self.pricing.kinds.layers].sum(axis=1)
        key = (pipeline.schedule, pipeline.virtual_stages, pp, m, stages.which.tobytes(), layers.tobytes(), slow)
        if key not in self._paths:
            self._paths[key] = critical_paths(self.schedule(pipeline, pp, m), stages.which, layers, slow)
        return self._paths[key]

    def stage_layers(self, pipeline: Pipeline, pp: int) -> tuple[StageLayers, ...]:
        """Layers of every stage of one copy of the model."""
        first, last, alone = pipeline.split
        plan = self.pricing.template.plan.model_copy(
            update={"first_stage_less_layers": first, "last_stage_less_layers": last, "embedding_alone": alone,
                    "layers_per_stage": None}
        )  # fmt: skip
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
        return split_layers(
            len(self.pricing.kinds.layer), shape.stages, plan, ends_meet=shape.ends_meet, encoders=len(self.pricing.kinds.encoders)
        )

    def plain_stages(self, pipeline: Pipeline, pp: int) -> Stages:
        """The stages of a pipeline without recomputation."""
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
        key = ("plain", shape.stages, shape.ends_meet, pipeline.split)
        if key not in self._stages:
            self._stages[key] = Stages.of(self.pricing.kinds, self.stage_layers(pipeline, pp), (0,))
        return self._stages[key]

    @kept
    def rank_blocks(self, pipeline: Pipeline, pp: int) -> IntArray:
        """Blocks of each rank, int array [ranks]."""
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
        return np.asarray((shape.share > 0) @ self.composition(pipeline, pp, 0).counts.sum(axis=1))

    @kept
    def sends_beside(self, pipeline: Pipeline, pp: int, m: int) -> FloatArray:
        """How many sends of each rank surely run beside its ops, float array [ranks]."""
        if self.blocking(pipeline, pp):
            return np.zeros(pp)
        shape, stages = shape_of(pp, pipeline.virtual_stages, pipeline.schedule), self.stage_layers(pipeline, pp)
        empty = [sum(not stages[s].count for s in set(held)) for held in shape.held.values()]
        return shape.sends_beside(np.array(empty, dtype=np.int64), m)

    def blocking(self, pipeline: Pipeline, pp: int) -> bool:
        """Whether sends hold the compute stream; the rule of `program.waits.p2p_blocks`."""
        shape = shape_of(pp, pipeline.virtual_stages, pipeline.schedule)
        kinds = {"zero_bubble": shape.style != "full" or shape.replicas > 1, "interleaved": shape.stages > pp}
        return not self.pricing.framework.overlaps_p2p(pipeline.overlap_p2p, **kinds)


__all__ = ["Pipelines"]
