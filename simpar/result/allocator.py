"""PyTorch's CUDA caching allocator as a model: what it reserves from the device for a sequence of requests.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.13): sizes round up to 512 bytes; requests of up to 1 MiB are served from
segments of 2 MiB (the small pool), larger ones from segments of 20 MiB, and from 10 MiB on from segments of their own size
rounded up to 2 MiB. The smallest cached block that is large enough is taken (lowest address first) and split if what is
left is worth it: 512 bytes in the small pool, more than 1 MiB in the large one. Freed neighbours of a segment merge, and
segments go back to the device only when it is full. Blocks belong to the stream that asked for them. With expandable
segments each pool of a stream is one growing range of pages (2 MiB small, 20 MiB large); a full device takes whole pages back
from any free run of it, and they are mapped again when the run is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AllocatorRules:
    """The allocator's constants and settings.

    Attributes:
        rounding_bytes: least block and what sizes round up to.
        small_bytes: largest request of the small pool; also what a split of a large block must leave more than.
        small_segment_bytes, large_segment_bytes: segments of small and of medium requests; pages of expandable segments.
        own_segment_bytes: from this request on a segment holds one request.
        segment_rounding_bytes: such segments round up to this.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        limit_bytes: what the device can give; none = no limit.
        pending_frees: blocks that a collective still holds after they were freed (record_stream) while the host runs ahead of
            the device: so many at most, or until the device is full.
    """

    rounding_bytes: int = 512
    small_bytes: int = MIB
    small_segment_bytes: int = 2 * MIB
    large_segment_bytes: int = 20 * MIB
    own_segment_bytes: int = 10 * MIB
    segment_rounding_bytes: int = 2 * MIB
    expandable_segments: bool = False
    limit_bytes: int | None = None
    pending_frees: int = 0

    def rounded(self, size: int) -> int:
        """Bytes of the block that a request of `size` bytes takes."""
        return max(-(-size // self.rounding_bytes) * self.rounding_bytes, self.rounding_bytes)

    def segment(self, rounded: int) -> int:
        """Bytes of the segment that a rounded request opens."""
        if rounded <= self.small_bytes:
            return self.small_segment_bytes
        if rounded < self.own_segment_bytes:
            return self.large_segment_bytes
        return -(-rounded // self.segment_rounding_bytes) * self.segment_rounding_bytes


class Block:
    """A run of bytes of a segment, in use or free, between its neighbours; `unmapped` of a free one have gone back."""

    __slots__ = ("address", "free", "next", "pool", "previous", "size", "unmapped")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.free, self.unmapped = True, 0
        self.previous: Block | None = None
        self.next: Block | None = None


class _Pool:
    """Free blocks of one stream and size class, by size then address."""

    __slots__ = ("blocks", "keys", "last", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}
        self.last: Block | None = None
        """The block at the growing end (expandable segments)."""

    def put(self, block: Block) -> None:
        insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def best_fit(self, size: int) -> Block | None:
        at = bisect_left(self.keys, (size, -1))
        if at == len(self.keys):
            return None
        return self.blocks.pop(self.keys.pop(at)[1])


class DeviceFullError(Exception):
    """The device has no room for a segment, with every unused one given back."""


class CachingAllocator:
    """The allocator's state; `malloc` and `free` replay a program's requests.

    Attributes:
        rules: constants and settings.
        allocated_bytes, reserved_bytes: at present, blocks rounded.
        peak_allocated_bytes, peak_reserved_bytes: largest so far.
        host_ahead: the host runs ahead of the device, so that freed buffers of collectives are still in use.
    """

    def __init__(self, rules: AllocatorRules | None = None) -> None:
        self.rules = rules or AllocatorRules()
        self.host_ahead = True
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._next_address = 0
        self._pending: deque[Block] = deque()

    def malloc(self, size: int, stream: str = "compute") -> Block:
        """A block for `size` bytes on `stream`.

        Raises:
            DeviceFullError: over the limit although every unused segment was given back.
        """
        rules = self.rules
        rounded = rules.rounded(size)
        small = rounded <= rules.small_bytes
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = pool.best_fit(rounded)
        if block is None:
            block = self._grown(pool, rounded) if rules.expandable_segments else self._segment(pool, rules.segment(rounded))
        rest = block.size - rounded
        if block.unmapped:
            self._map(block, rest)
        if rest >= rules.rounding_bytes if small or rules.expandable_segments else rest > rules.small_bytes:
            self._split(block, rounded)
        block.free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block, *, recorded: bool = False) -> None:
        """Give a block of `malloc` back; it merges with free neighbours.

        Args:
            recorded: a collective's stream uses it: it counts as freed, but is not there for others yet.
        """
        self.allocated_bytes -= block.size
        if not (recorded and self.host_ahead and self.rules.pending_frees):
            self._release(block)
            return
        self._pending.append(block)
        if len(self._pending) > self.rules.pending_frees:
            self._release(self._pending.popleft())

    def host(self, *, ahead: bool) -> None:
        """The host waits for the device, which then has nothing pending, or begins to run ahead of it."""
        self.host_ahead = ahead
        if not ahead:
            self._settle()

    def _settle(self) -> None:
        while self._pending:
            self._release(self._pending.popleft())

    def _release(self, block: Block) -> None:
        block.free = True
        pool, before, after = block.pool, block.previous, block.next
        if after is not None and after.free:
            pool.remove(after)
            self._join(block, after)
        if before is not None and before.free:
            pool.remove(before)
            self._join(before, block)
            block = before
        pool.put(block)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool)
        rest.unmapped, block.unmapped = block.unmapped, 0
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.put(rest)

    def _join(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.unmapped += after.unmapped
        block.next = after.next
        if after.next is not None:
            after.next.previous = block
        if block.pool.last is after:
            block.pool.last = block

    def _take(self, size: int) -> int:
        """Reserve `size` bytes of the device; returns their address."""
        limit = self.rules.limit_bytes
        if limit is not None and self.reserved_bytes + size > limit:
            self.give_back()
            if self.reserved_bytes + size > limit:
                raise DeviceFullError
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        address = self._next_address
        self._next_address += size
        return address

    def _segment(self, pool: _Pool, size: int) -> Block:
        return Block(self._take(size), size, pool)

    def _grown(self, pool: _Pool, size: int) -> Block:
        """The free end of the pool's range, grown by whole pages until it holds `size`."""
        page = self.rules.small_segment_bytes if pool.small else self.rules.large_segment_bytes
        end = pool.last
        have = end.size if end is not None and end.free else 0
        more = -(-(size - have) // page) * page
        self._take(more)
        if end is None:
            # Every range has addresses of its own.
            block = Block((len(self._pools) << 40) * page, more, pool)
            pool.last = block
            return block
        if end.free:
            pool.remove(end)
            end.size += more
            return end
        block = Block(end.address + end.size, more, pool)
        block.previous, end.next, pool.last = end, block, block
        return block

    def give_back(self) -> int:
        """What collectives held is waited for; unused segments (or whole unused pages of expandable ranges) go back to the device.

        Returns:
            bytes given back.
        """
        before = self.reserved_bytes
        self._settle()
        for pool in self._pools.values():
            if self.rules.expandable_segments:
                self._unmap(pool)
                continue
            for block in [b for b in pool.blocks.values() if b.previous is None and b.next is None]:
                pool.remove(block)
                self.reserved_bytes -= block.size
        return before - self.reserved_bytes

    def _unmap(self, pool: _Pool) -> None:
        """Whole pages inside the free runs of a range go back; the addresses stay."""
        page = self.rules.small_segment_bytes if pool.small else self.rules.large_segment_bytes
        for block in pool.blocks.values():
            whole = max((block.address + block.size) // page - -(-block.address // page), 0) * page
            if whole > block.unmapped:
                self.reserved_bytes -= whole - block.unmapped
                block.unmapped = whole

    def _map(self, block: Block, rest: int) -> None:
        """Map what a request takes of a free run again; of its last `rest` bytes whole pages may stay away."""
        page = self.rules.small_segment_bytes if block.pool.small else self.rules.large_segment_bytes
        needed = block.unmapped - min(block.unmapped, rest // page * page)
        if needed:
            block.unmapped -= needed
            self._take(needed)


Event = tuple[int, int, str]
"""(tensor id, bytes or 0 to free it, stream; freed: RECORDED where a collective used it last). Tensor -1 is none: HOST_WAITS or
HOST_AHEAD in place of the stream."""
RECORDED: Final = "recorded"
HOST_WAITS: Final[Event] = (-1, 0, "host_waits")
HOST_AHEAD: Final[Event] = (-1, 0, "host_ahead")


@dataclass(frozen=True, slots=True)
class AllocatorPeak:
    """What a replay ended with.

    Attributes:
        allocated_bytes, reserved_bytes: peaks.
        out_of_memory: the device was full; the peaks are those until then.
    """

    allocated_bytes: int
    reserved_bytes: int
    out_of_memory: bool = False


def replay(events: list[Event], rules: AllocatorRules | None = None) -> AllocatorPeak:
    """Peaks over a sequence of requests; a tensor that is freed must have been asked for."""
    allocator = CachingAllocator(rules)
    held: dict[int, Block] = {}
    malloc, free, pop = allocator.malloc, allocator.free, held.pop
    try:
        for tensor, size, stream in events:
            if size:
                held[tensor] = malloc(size, stream)
            elif tensor >= 0:
                free(pop(tensor), recorded=stream == RECORDED)
            else:
                allocator.host(ahead=stream == HOST_AHEAD[2])
    except DeviceFullError:
        return AllocatorPeak(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, True)
    return AllocatorPeak(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
