"""The allocator's view of a layout: its ranks' requests (requests.py) replayed, reserved over allocated."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, Protocol

from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import BlockOp, Compute, Overlapped
from simpar.parallel.layout import Layout
from simpar.result.allocator import AllocatorPeak, AllocatorRules, Event, replay
from simpar.result.requests import Pass, rank_events, until_steady

MAX_EVENTS: Final = 30_000
"""Past so many requests only what is saved is replayed, without what comes and goes within a pass."""


def passes_of(keys: list[object], stage_blocks: tuple[tuple[LocalBlock, ...], ...]) -> list[Pass]:
    """What the ops with these prices, in the order of one rank, do as passes over blocks."""
    found: list[Pass] = []
    for key in keys:
        if isinstance(key, Compute):
            found.append((key.phase, key.stage, key.first, key.last))
        elif isinstance(key, BlockOp) and key.index == 0 and key.part != "beside":
            found.append((key.phase, key.stage, key.block, key.block + 1))
        elif isinstance(key, Overlapped):
            found.append(("F", key.forward_stage, 0, len(stage_blocks[key.forward_stage])))
            found.append(("B", key.backward_stage, 0, len(stage_blocks[key.backward_stage])))
    return found


_KEPT: Final = 4096
_KNOWN: OrderedDict[tuple[bytes, AllocatorRules], AllocatorPeak] = OrderedDict()


def _digest(plain: list[Event] | list[Pass]) -> bytes:
    # Version 2 of the format knows no references, so equal lists are equal bytes.
    return blake2b(marshal.dumps(plain, 2), digest_size=16).digest()


def replayed(events: list[Event], rules: AllocatorRules) -> AllocatorPeak:
    """`replay`, remembered: many layouts ask the allocator for the same sizes in the same order."""
    key = (_digest(events), rules)
    found = _KNOWN.get(key)
    if found is None:
        found = _KNOWN[key] = replay(events, rules)
        if len(_KNOWN) > _KEPT:
            _KNOWN.popitem(last=False)
    return found


Known = dict[tuple[int, bytes, int | None], AllocatorPeak]
"""Peaks of a rank by what it runs and what the device can give."""


class Reserving(Protocol):
    """Who knows what the allocator reserves."""

    def reserved_bytes(self, rank: int, allocated: float, fragmentation: float, room_bytes: float) -> float:
        """Reserved by a rank that allocates so much at its peak, where the device has `room_bytes` for its allocator."""
        ...


class Replays:
    """The allocator's view of a layout's ranks, replayed when first asked for and only where it matters."""

    def __init__(
        self, layout: Layout, held: dict[int, list[int]], passes: Callable[[int], list[Pass]], known: Known | None = None
    ) -> None:
        """
        Args:
            held: pipeline rank -> model stages.
            passes: pipeline rank -> what it runs, in order.
            known: of layouts whose ranks ask for the same where they run the same; more is added.
        """
        self._layout, self._held, self._passes, self._known = layout, held, passes, known
        self._chosen: tuple[int, ...] = tuple(sorted(held))
        self._events: dict[int, list[Event]] = {}
        self._found: dict[tuple[int, float | None], AllocatorPeak] = {}

    def choose(self, allocated: dict[int, float]) -> None:
        """Replay the first rank and the fullest only; the others take the ratio of the nearest of these."""
        self._chosen = tuple(sorted({min(allocated), max(allocated, key=lambda rank: allocated[rank])}))

    def peak(self, rank: int, room: float | None = None) -> AllocatorPeak:
        """Peaks of the rank nearest to `rank` that is replayed.

        Args:
            room: what the device can give over what is allocated at the peak; none = no limit.
        """
        nearest = min(self._chosen, key=lambda chosen: abs(chosen - rank))
        key = (nearest, None if room is None else round(room, 3))
        if key not in self._found:
            limit = None if room is None else int(self.peak(nearest).allocated_bytes * room)
            spec, nodes = self._layout.framework, self._layout.scenario.cluster.num_nodes
            expandable = spec.allocator.expandable_segments or (spec.allocator.expandable_segments_one_node and nodes == 1)
            rules = AllocatorRules(
                expandable_segments=expandable, limit_bytes=limit, pending_frees=spec.allocator.pending_collectives
            )
            self._found[key] = self._replayed(nearest, rules)
        return self._found[key]

    def _replayed(self, rank: int, rules: AllocatorRules) -> AllocatorPeak:
        if self._known is None:
            return replayed(self._requests(rank), rules)
        name = (rank, _digest(until_steady(self._passes(rank))), rules.limit_bytes)
        if name not in self._known:
            self._known[name] = replayed(self._requests(rank), rules)
        return self._known[name]

    def _requests(self, rank: int) -> list[Event]:
        if rank not in self._events:
            layout = self._layout.of_rank(rank)
            passes = self._passes(rank)
            events = rank_events(layout, self._held[rank], passes, most=MAX_EVENTS)
            if len(events) > MAX_EVENTS:
                events = rank_events(layout, self._held[rank], passes, thin=True)
            self._events[rank] = events
        return self._events[rank]

    def ratio(self, rank: int) -> float:
        """Reserved over allocated of a rank on a device without end, 1 or more."""
        if self._layout.framework.allocator.planned:
            return 1.0
        peak = self.peak(rank)
        return peak.reserved_bytes / peak.allocated_bytes if peak.allocated_bytes else 1.0

    def reserved_bytes(self, rank: int, allocated: float, fragmentation: float, room_bytes: float) -> float:
        """Reserved by a rank that allocates so much at its peak, where the device has `room_bytes` for its allocator.

        A full device is no end yet: the allocator gives unused segments back and asks again, so what is reserved stops at the
        room as long as the requests can still be served.
        """
        whole = allocated * self.ratio(rank) * fragmentation
        if whole <= room_bytes or allocated * fragmentation > room_bytes:
            return whole
        squeezed = self.peak(rank, room_bytes / (allocated * fragmentation))
        return whole if squeezed.out_of_memory else room_bytes
