"""The caching allocator: closed forms of its rules, and properties of any sequence of requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.result.allocations import replayed
from simpar.result.allocator import (
    HOST_AHEAD,
    HOST_WAITS,
    MIB,
    RECORDED,
    AllocatorRules,
    CachingAllocator,
    DeviceFullError,
    Event,
    replay,
)

EXPANDABLE = AllocatorRules(expandable_segments=True)


@st.composite
def requests(draw: st.DrawFn) -> list[Event]:
    """Requests and frees in any order, of sizes in every class of the rules, on two streams."""
    sizes = st.one_of(
        st.integers(1, 3 * MIB), st.integers(MIB, 30 * MIB), st.sampled_from([MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 64 * MIB])
    )
    events: list[Event] = []
    live: list[int] = []
    for index in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            events.append((live.pop(draw(st.integers(0, len(live) - 1))), 0, ""))
        else:
            events.append((index, draw(sizes), draw(st.sampled_from(["compute", "gather"]))))
            live.append(index)
    return events


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB, 10 * MIB), (11 * MIB, 11 * MIB, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)  # fmt: skip
def test_one_request_takes_the_block_and_segment_of_its_class(size: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    got = allocator.malloc(size)
    # What is left of a large segment is split off only past 1 MiB, so the block may be the whole segment.
    assert got.size == (block if segment - block > MIB or block <= MIB else segment)
    assert allocator.reserved_bytes == segment
    allocator.free(got)
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == segment


def test_small_requests_share_a_segment_and_the_next_one_opens_another() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(MIB // 2)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(64 * MIB), allocator.malloc(32 * MIB)
    large_address, small_address = large.address, small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(30 * MIB).address == small_address
    assert allocator.malloc(33 * MIB).address == large_address
    assert allocator.reserved_bytes == 96 * MIB


def test_freed_neighbours_merge_into_one_block() -> None:
    allocator = CachingAllocator()
    whole = allocator.malloc(60 * MIB)
    allocator.free(whole)
    parts = [allocator.malloc(20 * MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 60 * MIB
    for index in (0, 2, 1):
        allocator.free(parts[index])
    assert allocator.malloc(60 * MIB).address == whole.address


def test_a_stream_does_not_reuse_the_blocks_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB, "compute"))
    allocator.malloc(40 * MIB, "gather")
    assert allocator.reserved_bytes == 80 * MIB


def test_growing_requests_fragment_segments_but_not_expandable_ones() -> None:
    """Every request is a bit larger than the block the last one left."""
    events: list[Event] = []
    for index in range(10):
        events += [(index, (20 + 4 * index) * MIB, "compute"), (index, 0, "")]
    assert replay(events).reserved_bytes == sum(20 + 4 * i for i in range(10)) * MIB
    assert replay(events, EXPANDABLE).reserved_bytes == 60 * MIB


def test_a_full_device_gives_unused_segments_back_first() -> None:
    rules = AllocatorRules(limit_bytes=100 * MIB)
    allocator = CachingAllocator(rules)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    assert allocator.reserved_bytes == 70 * MIB
    with pytest.raises(DeviceFullError):
        allocator.malloc(40 * MIB)


def test_a_replay_past_the_limit_says_so() -> None:
    events: list[Event] = [(0, 60 * MIB, "compute"), (1, 60 * MIB, "compute")]
    assert replay(events, AllocatorRules(limit_bytes=100 * MIB)).out_of_memory
    assert not replay(events, AllocatorRules(limit_bytes=120 * MIB)).out_of_memory
    whole_pages = AllocatorRules(limit_bytes=120 * MIB, expandable_segments=True)
    assert not replay(events, whole_pages).out_of_memory


@settings(max_examples=150, deadline=None)
@given(requests(), st.booleans())
def test_reserved_covers_allocated_covers_requested(events: list[Event], expandable: bool) -> None:
    sizes = {tensor: size for tensor, size, _ in events if size}
    live = peak = 0
    for tensor, size, _ in events:
        live += size or -sizes[tensor]
        peak = max(peak, live)
    found = replay(events, AllocatorRules(expandable_segments=expandable))
    assert found.reserved_bytes >= found.allocated_bytes >= peak
    # A block exceeds its request by rounding, and by at most 1 MiB that is not worth a split.
    slack = 511 if expandable else MIB + 511
    assert found.allocated_bytes <= peak + slack * len(sizes)


@settings(max_examples=100, deadline=None)
@given(requests(), st.sampled_from([1024, 4096, 65536]))
def test_coarser_rounding_never_allocates_less(events: list[Event], rounding: int) -> None:
    rules = AllocatorRules(rounding_bytes=rounding, expandable_segments=True)
    assert replay(events, rules).allocated_bytes >= replay(events, EXPANDABLE).allocated_bytes


@settings(max_examples=100, deadline=None)
@given(requests(), st.booleans())
def test_everything_freed_merges_back_into_whole_segments(events: list[Event], expandable: bool) -> None:
    allocator = CachingAllocator(AllocatorRules(expandable_segments=expandable))
    held = {}
    for tensor, size, stream in events:
        if size:
            held[tensor] = allocator.malloc(size, stream)
        else:
            allocator.free(held.pop(tensor))
    for block in held.values():
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert allocator.give_back() == allocator.peak_reserved_bytes
    assert allocator.reserved_bytes == 0


@settings(max_examples=100, deadline=None)
@given(requests(), st.booleans())
def test_a_limit_that_is_never_met_changes_nothing(events: list[Event], expandable: bool) -> None:
    free = replay(events, AllocatorRules(expandable_segments=expandable))
    bound = AllocatorRules(expandable_segments=expandable, limit_bytes=free.reserved_bytes)
    assert replay(events, bound) == free


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 30), st.integers(2, 4))
def test_a_repeating_step_of_equal_tensors_reserves_no_more_than_its_first(size: int, count: int, steps: int) -> None:
    """Last in, first out: the pattern of one rank's forward and backward."""
    once: list[Event] = [(i, size * MIB, "compute") for i in range(count)]
    once += [(i, 0, "") for i in reversed(range(count))]
    assert replay(once * steps).reserved_bytes == replay(once).reserved_bytes


def test_many_large_tensors_reserve_nearly_what_they_allocate_with_expandable_segments() -> None:
    events: list[Event] = [(i, (37 + i % 5) * MIB, "compute") for i in range(100)]
    found = replay(events, EXPANDABLE)
    assert found.reserved_bytes / found.allocated_bytes < 1.01


def test_blocks_that_a_collective_used_last_are_there_again_only_later() -> None:
    """Freed, they no longer count as allocated; the next request of their size opens another segment until enough came after."""
    size, events = 32 * MIB, []
    for tensor in range(20):
        events += [(tensor, size, "compute"), (tensor, 0, RECORDED)]
    held = replay(events, AllocatorRules(pending_frees=5))
    assert held.allocated_bytes == size
    assert held.reserved_bytes == 6 * size
    assert replay(events).reserved_bytes == size


def test_a_full_device_waits_for_collectives() -> None:
    size = 32 * MIB
    events = [(tensor, amount, kind) for tensor in range(20) for amount, kind in ((size, "compute"), (0, RECORDED))]
    squeezed = replay(events, AllocatorRules(pending_frees=5, limit_bytes=3 * size))
    assert not squeezed.out_of_memory
    assert squeezed.reserved_bytes == 3 * size


def test_a_waiting_host_leaves_nothing_pending() -> None:
    """Buffers that a collective still reads are kept back only while the host is ahead, and come back where it waits."""
    size = 4 * MIB

    def passes(*before: tuple[int, int, str]) -> list[Event]:
        return [*before, *(step for i in range(8) for step in ((i, size, "compute"), (i, 0, RECORDED)))]

    rules = AllocatorRules(pending_frees=50, large_segment_bytes=size)
    assert replay(passes(), rules).reserved_bytes == 8 * size
    assert replay(passes(HOST_WAITS), rules).reserved_bytes == size
    assert replay([*passes(HOST_WAITS), *passes(HOST_AHEAD), *passes(HOST_WAITS)], rules).reserved_bytes == 8 * size
    caught_up = [*passes(), HOST_WAITS, *passes()]
    assert replay(caught_up, rules).reserved_bytes == 8 * size


def test_a_replay_is_remembered_by_its_requests_and_its_rules() -> None:
    few, more = [(1, 2**22, ""), (2, 2**21, ""), (1, 0, "")], [(1, 2**22, ""), (2, 2**23, ""), (1, 0, "")]
    for events in (few, more, few):
        for rules in (AllocatorRules(), AllocatorRules(limit_bytes=2**22), AllocatorRules()):
            assert replayed(list(events), rules) == replay(events, rules)
    assert replayed(few, AllocatorRules()) != replayed(more, AllocatorRules())
