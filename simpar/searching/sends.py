"""Sends between pipeline stages: seconds, what compute loses beside them, and bytes that ranks hold for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simpar.costs.held_sms import slowed
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Send
from simpar.parallel.pipeline import boundary_bytes
from simpar.parallel.traffic import send_collectives
from simpar.program.program import FloatArray
from simpar.result.stage_ends import outputs_stay, receive_buffers
from simpar.searching.blocks import B, F, I, W
from simpar.searching.choice import Choice, Group, Offload, Pipeline, State, Variant
from simpar.searching.memo import kept
from simpar.searching.shapes import shape_of

if TYPE_CHECKING:
    from simpar.searching.pricing import Pricing


class Sends:
    """Their prices and bytes, with memos of what layouts share."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._sends: dict[object, tuple[float, tuple[int, ...]]] = {}
        self._sent: dict[object, float] = {}
        self._receives: dict[object, FloatArray | None] = {}

    def seconds(self, group: Group, batch: int, variant: Variant) -> float:
        """Seconds of a boundary tensor between the nearest pipeline ranks; 0 where boundaries differ (then only a bound)."""
        return self._send(group, batch, variant)[0]

    @kept
    def loss(self, group: Group, batch: int, variant: Variant, style: str) -> tuple[float, float]:
        """(Share of a send's time in which compute beside it makes no progress, its time over the shortest pass of a layer).

        No loss is sure where the latter is above 1.
        """
        seconds, held = self._send(group, batch, variant)
        if not all(held) or style == "pairs":
            return 0.0, 1.0
        table, kinds = self.pricing.table(group, batch, variant, "none"), self.pricing.kinds
        passes = (F, B) if style == "full" else (F, I, W)
        density = seconds / table.seconds[list(passes)][:, [kind + kinds.layers for kind in set(kinds.layer)]].min()
        slows = min(self._slowed(group, batch, variant, sms) for sms in held)
        return (slows / (1.0 + slows), float(density)) if density <= 1.0 else (0.0, 1.0)

    def _slowed(self, group: Group, batch: int, variant: Variant, held: int) -> float:
        """How much longer compute takes at least beside a send that holds so many SMs, whatever is recomputed."""
        gpu = self.pricing.template.hardware.gpu
        of_any = slowed((), gpu.sm_count.value, held, gpu.architecture)
        # Recomputation adds no more than the forward, at most half of all, of kernels that are slowed at least.
        return (2.0 * self.pricing.slowed(group, batch, variant, held) + of_any) / 3.0

    def _send(self, group: Group, batch: int, variant: Variant) -> tuple[float, tuple[int, ...]]:
        """(Seconds of a boundary tensor at least, SMs that the sends between any two neighbours hold)."""
        if group.pp == 1:
            return 0.0, (0,)
        key = (self.pricing.sites.neighbours(group), group.tp, group.cp, batch, variant.sequence_parallel)
        if key not in self._sends:
            layout = self.pricing.probe(group, batch, variant)
            pricer = LayoutPricer(layout, self.pricing.kernels, self.pricing.collectives)
            alike = {placement: pair for pair, placement in enumerate(layout.pipeline_pairs)}
            calls = (send_collectives(layout, Send(0, 0, False, pair)) for pair in alike.values())
            prices = [pricer.unslowing("pp", each) for each in calls]
            same = len(set(layout.boundary_bytes)) == 1
            held = tuple(dict.fromkeys(p.held_sms for p in prices))
            self._sends[key] = (min(p.seconds for p in prices), held) if same else (0.0, (0,))
        return self._sends[key]

    def bytes_kept(self, group: Group, batch: int, variant: Variant) -> float:
        """Bytes of a stage's output where it stays until the backward; 0 where boundaries differ (then only a bound)."""
        if group.pp == 1:
            return 0.0
        key = (group.tp, group.cp, batch, variant.sequence_parallel, variant.precision)
        if key not in self._sent:
            layout = self.pricing.probe(group, batch, variant)
            sizes = set(layout.boundary_bytes) if outputs_stay(layout) else set()
            self._sent[key] = boundary_bytes(sizes.pop(), layout.plan) if len(sizes) == 1 else 0.0
        return self._sent[key]

    def buffers(self, group: Group, batch: int, variant: Variant, pipeline: Pipeline, m: int) -> FloatArray | None:
        """Bytes of the buffers of each rank where every micro-batch has its own, None where there are none."""
        if group.pp == 1 or not self.pricing.framework.pipeline.receive_buffers_per_microbatch:
            return None
        key = (group, batch, variant.sequence_parallel, pipeline, m)
        if key not in self._receives:
            shape = shape_of(group.pp, pipeline.virtual_stages, pipeline.schedule)
            choice = Choice(group, batch, variant, pipeline, "none", State(0, None, True, True, True), Offload(0.0, False))
            layout = self.pricing.layout(choice)
            self._receives[key] = np.array([receive_buffers(layout, shape.held[r]) for r in range(group.pp)])
        return self._receives[key]


__all__ = ["Sends"]
