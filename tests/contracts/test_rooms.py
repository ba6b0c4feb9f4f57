"""What every room promises: no two live places overlap, the state are exact, what is given back comes back.

Driven by random sequences, the whole audit after every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers.base import Room
from kvtier.tiers.cold.log import SegmentLog, SegmentState, record_bytes
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import PAGE_BYTES, extent_of, slot_bytes_for, slot_of

EXTENT_BYTES = 256 << 10
FOOTER_BYTES = 2 * PAGE_BYTES


@dataclass
class Case:
    """A room and how to tell where its places lie."""

    room: Room
    extent_of_bytes: Callable[[int, int], tuple[int, int, int]]  # place, length -> unit, first byte, end
    limit_bytes: int  # data bytes of one unit


def slot_pool() -> Case:
    room = SlotPool(3, EXTENT_BYTES)

    def span(place: int, length: int) -> tuple[int, int, int]:
        start = room.offset_of(place)
        assert slot_bytes_for(length) == room.slot_bytes_of(place)
        return extent_of(place), start, start + slot_bytes_for(length)

    return Case(room, span, EXTENT_BYTES)


def segment_log() -> Case:
    room = SegmentLog(4, EXTENT_BYTES, FOOTER_BYTES)

    def span(place: int, length: int) -> tuple[int, int, int]:
        start = slot_of(place) * PAGE_BYTES
        return extent_of(place), start, start + record_bytes(length)

    return Case(room, span, EXTENT_BYTES - FOOTER_BYTES)


CASES = {"SlotPool": slot_pool, "SegmentLog": segment_log}
cases = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def overlaps(case: Case, live: dict[int, tuple[int, int]]) -> list[str]:
    """Return which of the live places (place -> domain, length) lie over each other or over the edge."""
    spans = sorted(case.extent_of_bytes(place, length) for place, (_, length) in live.items())
    problems = [f"{span} is outside" for span in spans if span[1] < 0 or span[2] > case.limit_bytes]
    for before, after in pairwise(spans):
        if before[0] == after[0] and before[2] > after[1]:
            problems.append(f"{before} lies over {after}")
    return problems


@cases
def test_reserve_until_full_then_none(make: Callable[[], Case]) -> None:
    case = make()
    live: dict[int, tuple[int, int]] = {}
    while (place := case.room.reserve(0, 20_000)) is not None:
        assert place not in live
        live[place] = (0, 20_000)
        assert len(live) < 1000
    assert len(live) >= 2
    assert overlaps(case, live) == []
    assert case.room.check_integrity() == []
    assert case.room.reserve(0, 20_000) is None, "full stays full until something is released"


@cases
def test_too_large_can_never_be_held(make: Callable[[], Case]) -> None:
    room = make().room
    assert not room.can_hold(EXTENT_BYTES + 1)
    assert not room.can_hold(0)
    assert room.can_hold(PAGE_BYTES)
    assert room.reserve(0, EXTENT_BYTES + 1) is None
    assert room.statistics().taken_bytes == 0


@cases
def test_a_new_room_is_free_in_full(make: Callable[[], Case]) -> None:
    statistics = make().room.statistics()
    assert statistics.taken_bytes == statistics.wasted_bytes == 0
    assert statistics.free_bytes == statistics.capacity_bytes


steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 2), st.sampled_from([1, 4096, 16_384, 16_385, 40_000])),
        st.tuples(st.just("release"), st.integers(0, 1 << 30), st.just(0)),
    ),
    max_size=120,
)


@cases
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sequence=steps)
def test_any_sequence_keeps_the_books(make: Callable[[], Case], sequence: list[tuple[str, int, int]]) -> None:
    case = make()
    room = case.room
    live: dict[int, tuple[int, int]] = {}
    bound: dict[int, int] = {}  # extent -> the domain it was first used by
    for what, number, length in sequence:
        if what == "reserve":
            place = room.reserve(number, length)
            if place is not None:
                assert place not in live
                live[place] = (number, length)
                room.settle(place)
        elif live:
            place = sorted(live)[number % len(live)]
            room.release(place, live.pop(place)[1])
        assert room.check_integrity() == []
        assert overlaps(case, live) == []
        state = room.statistics()
        assert state.free_bytes + state.taken_bytes == state.capacity_bytes
        assert 0 <= state.wasted_bytes <= state.taken_bytes
        if isinstance(room, SlotPool):
            assert state.taken_bytes - state.wasted_bytes == sum(length for _, length in live.values())
            for place, (domain, _) in live.items():
                assert bound.setdefault(extent_of(place), domain) == domain
                assert room.domain_of_extent(extent_of(place)) == domain


def test_a_slot_pool_that_was_emptied_is_as_large_as_before() -> None:
    room = SlotPool(2, EXTENT_BYTES)
    for length in (16_384, 20_000, EXTENT_BYTES):  # cut anew for every size
        places = []
        while (place := room.reserve(5, length)) is not None:
            places.append(place)
        assert len(places) == 2 * (EXTENT_BYTES // slot_bytes_for(length))
        for place in places:
            room.release(place, length)
        assert room.statistics().taken_bytes == 0
        assert room.check_integrity() == []


def test_an_extent_never_changes_its_domain() -> None:
    room = SlotPool(2, EXTENT_BYTES)
    first = room.reserve(1, 16_384)
    assert first is not None
    room.release(first, 16_384)
    second = room.reserve(2, 16_384)
    assert second is not None
    assert extent_of(second) != extent_of(first)
    assert room.reserve(3, 16_384) is None, "both extents are bound, though nearly empty"


@pytest.mark.parametrize("length", [16_384, 16_385])
def test_a_slot_given_back_twice_or_with_another_length_is_a_bug(length: int) -> None:
    room = SlotPool(1, EXTENT_BYTES)
    place = room.reserve(0, 16_384)
    assert place is not None
    if length == 16_384:
        room.release(place, 16_384)
        room.reserve(0, 20_000)
    with pytest.raises(AssertionError):
        room.release(place, length)


def test_a_slot_pool_audit_finds_what_is_wrong() -> None:
    room = SlotPool(1, EXTENT_BYTES)
    room.reserve(0, 16_384)
    room._extents[0].free.pop()
    assert room.check_integrity() != []
    room = SlotPool(1, EXTENT_BYTES)
    room.reserve(0, 16_384)
    room._taken_bytes += 1
    assert room.check_integrity() != []


def test_a_segment_comes_back_only_when_it_was_sealed_and_emptied() -> None:
    log = SegmentLog(3, EXTENT_BYTES, FOOTER_BYTES)
    places = []
    while (place := log.reserve(0, 40_000)) is not None:
        places.append(place)
    assert log.num_free == 1, "one segment is kept for copying forward"
    for place in places:
        log.settle(place)
    sealed = log.take_segments_to_seal()
    assert log.sealed_segments() == sealed != []
    victim = sealed[0]
    log.begin_reclaim(victim)
    forwarded = log.reserve(0, 40_000, forward=True)
    assert forwarded is not None, "reclaiming has room when nobody else has"
    assert extent_of(forwarded) != victim
    for place in places:
        if extent_of(place) == victim:
            log.release(place, 40_000)
    log.finish_reclaim(victim)
    assert log.segments[victim].state is SegmentState.FREE
    assert log.check_integrity() == []
