"""Which ranks exchange how much in each communication op, for the contention model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np

from simpar.hashed import HashedOnce
from simpar.parallel.keys import BlockOp, Gather, Reduce, Send
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import calls_of, send_collectives, state_collectives
from simpar.program.program import Groups, OpKind, Program, Transfer
from simpar.program.units import Units

Share = Callable[[BlockOp], float]
"""Part of an op's bytes that its key stands for (LayoutPricer.exchange_share)."""
_COMMUNICATION = frozenset({OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD, OpKind.GATHER_PARAMETERS, OpKind.REDUCE_GRADIENTS,
                            OpKind.COLLECTIVE})  # fmt: skip


class _Finder:
    def __init__(self, layout: Layout, program: Program, units: Units, rank_of: dict[int, int], share: Share) -> None:
        self.layout, self.program, self.units, self.rank_of, self.share = layout, program, units, rank_of, share
        self._groups: dict[tuple[str, int, int], Groups] = {}
        self._distinct: dict[Groups, Groups] = {}

    def transfer(self, op: int) -> Transfer | None:
        key = self.program.price_keys[self.program.price[op]]
        role = int(self.program.role[op])
        if isinstance(key, Send):
            call = send_collectives(self.layout, key)[0]
            target = self.rank_of[key.to_stage]
            return Transfer("send_recv", call.bytes, self.pairs(role, target))
        if isinstance(key, Gather | Reduce):
            calls = state_collectives(self.layout, key)
            if not calls:
                return None
            most, call = max(((c.bytes * c.repeat, c) for c in calls), key=lambda pair: pair[0])
            return Transfer(call.name, most, self.groups(call.dimension, role, everywhere=True))
        for call in calls_of(self.layout, key) if isinstance(key, BlockOp) else ():
            amount = call.bytes * call.repeat * self.share(key)
            return Transfer(call.name, amount, self.groups(call.dimension, role))
        return None

    def _one(self, groups: Iterable[tuple[int, ...]]) -> Groups:
        """The first of equal groups, so that none is ever compared rank by rank."""
        found = HashedOnce(groups)
        return self._distinct.setdefault(found, found)

    @cached_property
    def pipeline_rank(self) -> dict[int, int]:
        """Role -> pipeline rank."""
        return {unit[0]: p for copy in self.units.members for p, unit in enumerate(copy)}

    def members(self, role: int, *, everywhere: bool) -> frozenset[int] | None:
        """Global ranks that an op of `role` stands for; None = all of its pipeline rank."""
        if not self.units.expanded or everywhere:
            return None
        return next(frozenset(unit) for copy in self.units.members for unit in copy if unit[0] == role)

    def groups(self, dimension: str, role: int, *, everywhere: bool = False) -> Groups:
        """All groups of `dimension` among the ranks that the op stands for. One object per distinct answer."""
        rank = self.pipeline_rank[role]
        found = (dimension, rank, -1 if everywhere or not self.units.expanded else role)
        if found not in self._groups:
            layout = self.layout
            table = layout.mesh.groups({"dp": "dp_cp"}.get(dimension, dimension), layout.shard_ranks)
            wanted = self.members(role, everywhere=everywhere)
            at = np.array([layout.mesh.coordinates(int(g[0]))["pp"] == rank for g in table])
            rows = [tuple(int(r) for r in g) for g in table[at]]
            self._groups[found] = self._one(g for g in rows if wanted is None or g[0] in wanted)
        return self._groups[found]

    def pairs(self, role: int, target: int) -> Groups:
        """Sender and receiver of every pair of ranks that a pipeline send stands for."""
        rank = self.pipeline_rank[role]
        key = ("pairs", rank * 100_000 + target, role if self.units.expanded else -1)
        if key not in self._groups:
            mesh = self.layout.mesh
            wanted = self.members(role, everywhere=False)
            senders = [int(g[rank]) for g in mesh.groups("pp")] if wanted is None else sorted(wanted)
            rows = []
            for sender in senders:
                at = mesh.coordinates(sender)
                rows.append((sender, mesh.rank(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=target)))
            self._groups[key] = self._one(rows)
        return self._groups[key]


def with_transfers(layout: Layout, program: Program, stage_to_rank: tuple[int, ...], share: Share, *, expand: bool) -> Program:
    """`program` with what each communication op moves, and between which ranks.

    Args:
        stage_to_rank: pipeline rank of each model stage.
        share: part of an exchange's bytes that a key stands for.
        expand: the program has one role per rank.
    """
    finder = _Finder(layout, program, Units.of(layout, expand=expand), dict(enumerate(stage_to_rank)), share)
    found: dict[int, Transfer] = {}
    for op in np.flatnonzero(np.isin(program.kind, [int(k) for k in _COMMUNICATION])):
        transfer = finder.transfer(int(op))
        if transfer is not None and transfer.groups:
            found[int(op)] = transfer
    return replace(program, transfers=found)
