"""Lower bounds on the seconds of every kind of block, cheap enough for every variant of every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from simpar.costs.host import least_launches
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.blocks import op_lists, span_lists
from simpar.parallel.layout import Layout
from simpar.parallel.work import LocalOp
from simpar.program.program import FloatArray
from simpar.searching.blocks import expert_branch, expert_span, has_experts, plain_blocks, serial_seconds
from simpar.searching.choice import Group, Variant

if TYPE_CHECKING:
    from simpar.searching.pricing import Pricing


class Floors:
    """The floors of one search, each computed once."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._known: dict[object, FloatArray] = {}

    def block(self, group: Group, batch: int, variant: Variant) -> FloatArray:
        """Lower bounds on seconds [forward, backward, backward and forward without communication, both together; kinds].

        Together they take no less than their busiest stream, whatever hides behind what. The dense part of a block does not depend
        on expert parallelism, nor the expert part on the context-parallel style: each is priced once per combination that it does
        depend on, and both are added (see `serial_seconds`).
        """
        total, longer = self._part(group, batch, variant, expert=False), 0.0
        if self.pricing.has_experts:
            expert = self._part(group, batch, variant, expert=True)
            if variant.overlap_ep and group.ep > 1:
                # What waits among experts beside an exchange is hidden with it, in no less time than either pass takes alone.
                longer = (total[:2] + expert[:2]).max(axis=0, keepdims=True)
                expert = expert[[3, 2, 2, 3, 4]]
            total = np.concatenate([total[:4] + expert[:4], np.maximum(total[4:], expert[4:])])
        return np.concatenate([total[:4], np.maximum(np.maximum(total[4:], longer), total[:1] + total[1:2])])

    def compute(self, group: Group, batch: int) -> FloatArray:
        """Compute alone, [forward, backward; kinds], a bound for every variant of a mesh and micro-batch."""
        # Kernels do not know where the ranks of a group sit.
        key = ("compute", group.tp, group.cp, group.ep, group.etp, batch)
        if key not in self._known:
            found = []
            variants = self.pricing.space.variants(group)
            sequence = any(v.sequence_parallel for v in variants)
            for precision, style in dict.fromkeys((v.precision, v.cp_style) for v in variants):
                plain = Variant(sequence, style, False, False, "alltoall", precision)
                parts = (False, True) if self.pricing.has_experts else (False,)
                found.append(np.sum([self._part(group, batch, plain, expert=part)[[3, 2]] for part in parts], axis=0))
            self._known[key] = np.minimum.reduce(found)
        return self._known[key]

    @cached_property
    def host(self) -> FloatArray:
        """What the host takes beside its launches, [forward, backward; kinds]: of every mesh, the least of any variant."""
        space, kinds = self.pricing.space, self.pricing.kinds
        # The more ranks share the experts, the fewer of them a rank's host has to launch.
        group, found = max(space.groups, key=lambda group: group.ep), []
        precisions = space.values("precision", (space.template.training.precision,))
        for precision, dispatcher in product(precisions, {"alltoall", *space.values("ep_dispatcher", ())}):
            variant = replace(space.variants(group)[0], precision=precision, ep_dispatcher=dispatcher)
            layout, each = self.pricing.probe(group, 1, variant), np.zeros((2, kinds.count))
            for kind, block in plain_blocks(layout, kinds).items():
                if not layout.options.frozen:
                    each[:, kind] = least_launches(layout, experts=has_experts(block))
            each[:, : kinds.layers] = each[:, kinds.layers : 2 * kinds.layers]
            found.append(each)
        return np.asarray(np.minimum.reduce(found))

    def _part(self, group: Group, batch: int, variant: Variant, *, expert: bool) -> FloatArray:
        """Floors of the dense or the expert part of every kind of block, as in `block`."""
        v, site = variant, self.pricing.sites.of(group)
        if expert:
            tokens = batch / (group.cp * group.tp)
            router = tokens if v.sequence_parallel else batch / group.cp
            # How far the fullest rank is above the mean depends on the tokens of all.
            even = group.ep == 1 or self.pricing.template.training.routing.kind == "balanced"
            where: tuple[object, ...] = (site[2], site[3], site[6], site[7], v.ep_dispatcher, v.precision)
            key = (expert, None if even else batch, tokens, router, *where)
        else:
            key = (expert, *self.pricing.sites.dense(site, batch, v))
        if key not in self._known:
            if expert:
                plain = replace(v, cp_style="ring", overlap_tp=False, overlap_ep=False)
            else:
                group, plain = replace(group, ep=1, etp=group.tp), replace(v, overlap_ep=False, ep_dispatcher="alltoall")
            layouts = (self.pricing.probe(group, batch, plain, state=state) for state in self.pricing.kinds_of_states(v))
            self._known[key] = np.minimum.reduce([self._floor_of(layout, expert=expert) for layout in layouts])
        return self._known[key]

    def _floor_of(self, layout: Layout, *, expert: bool) -> FloatArray:
        """Floors of the dense or the expert part of every kind of block, as in `block`."""
        pricer = LayoutPricer(layout, self.pricing.kernels, self.pricing.collectives)
        blocks, first = plain_blocks(layout, self.pricing.kinds), dict[object, int]()
        if expert:
            # What predicts a further token has the experts of a layer.
            same = {kind: first.setdefault(expert_branch(block), kind) for kind, block in blocks.items() if has_experts(block)}
            lists = {kind: span_lists(blocks[kind], layout.options, expert_span(blocks[kind])) for kind in first.values()}
        else:
            same = {kind: kind for kind in blocks}
            lists = {kind: op_lists(block, layout.options) for kind, block in blocks.items()}
        pricer.foresee(op for both in lists.values() for ops in both for op in ops)
        floors = {kind: _floor(pricer, both, has_experts(blocks[kind]), expert=expert) for kind, both in lists.items()}
        found, n = np.zeros((5, self.pricing.kinds.count)), self.pricing.kinds.layers
        for kind, like in same.items():
            found[:, kind] = floors[like]
        found[:, :n] = found[:, n : 2 * n]
        return found


def _floor(pricer: LayoutPricer, lists: Sequence[Sequence[LocalOp]], experts: bool, *, expert: bool) -> list[float]:
    """The floors of a block, which has `experts`, from its forward and backward."""
    found, busy = [0.0] * 4, dict[str, float]()
    for row, ops in enumerate(lists):
        # Gradients of all weights are summed in one op: of experts they are as many as expert parallelism leaves.
        summed = [experts and op.name.startswith("accumulation") for op in ops]
        seconds = [0.0 if no else pricer.op_price(op).seconds for op, no in zip(ops, summed, strict=True)]
        found[row] = serial_seconds(ops, seconds)[expert]
        for op, each in zip(ops, seconds, strict=True):
            if op.name.startswith("moe") != expert:
                continue
            if op.stream == "compute":
                found[3 - row] += each
            else:
                busy[op.stream] = busy.get(op.stream, 0.0) + each
    return [*found, max(busy.values(), default=0.0)]


__all__ = ["Floors"]
