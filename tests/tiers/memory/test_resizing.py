"""Rooms and engines whose tier grows and shrinks while it is used."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers.base import ColdStoreError, CopyError
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentLog, SegmentState
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import PAGE_BYTES, extent_of

from ..cold.store import NAMESPACES, label_of, payload_of
from ..helpers import make_label, open_engine, store

EXTENT_BYTES = 64 << 10
SEGMENT_BYTES = 1 << 20

pool_steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 1), st.sampled_from([16_384, 20_000, 65_536])),
        st.tuples(st.just("release"), st.integers(0, 1 << 30), st.just(0)),
        st.tuples(st.just("resize"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(pool_steps)
def test_a_slot_pool_of_any_size_keeps_its_promises(steps: list[tuple[str, int, int]]) -> None:
    pool = SlotPool(3, EXTENT_BYTES)
    live: dict[int, int] = {}
    gone: set[int] = set()
    for what, number, length in steps:
        if what == "reserve":
            before = set(pool.leaving)
            place = pool.reserve(number, length)
            if place is not None:
                assert place not in live
                assert extent_of(place) not in before | gone, "nothing new comes into what leaves"
                live[place] = length
        elif what == "release" and live:
            place = sorted(live)[number % len(live)]
            pool.release(place, live.pop(place))
        elif what == "resize":
            if number > pool.num_extents:
                pool.grow(number)
            else:
                staying = [n for n in pool.extents() if n not in pool.leaving]
                pool.retire(staying[: pool.num_extents - number])
            assert pool.num_extents == number
            assert pool.statistics().capacity_bytes == number * EXTENT_BYTES
        elif what == "take":
            taken = pool.take_gone()
            assert not {extent_of(place) for place in live} & set(taken), "only what is empty goes"
            assert not gone & set(taken), "once"
            gone.update(taken)
        assert pool.check_integrity() == []
        books = pool.statistics()
        assert 0 <= books.free_bytes <= books.capacity_bytes
        assert not gone & set(pool.extents()), "a number is never used again"
    while live:
        pool.release(*live.popitem())
    pool.take_gone()
    assert not pool.leaving, "everything that leaves is gone when it is empty"
    while (place := pool.reserve(0, 65_536)) is not None:
        live[place] = 65_536
    assert all(extent_of(place) not in gone for place in live)


log_steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["reserve", "forward"]), st.sampled_from([1, 40_000, 90_000])),
        st.tuples(st.just("reclaim"), st.just(0)),
        st.tuples(st.just("resize"), st.integers(2, 7)),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(log_steps)
def test_a_segment_log_of_any_size_keeps_its_promises(steps: list[tuple[str, int]]) -> None:
    log = SegmentLog(4, 256 << 10, PAGE_BYTES)
    live: dict[int, int] = {}
    for what, number in steps:
        if what in ("reserve", "forward"):
            place = log.reserve(0, number, forward=what == "forward")
            if place is not None:
                assert place not in live
                assert what == "forward" or extent_of(place) < log.num_segments
                live[place] = number
                log.settle(place)
        elif what == "resize":
            log.resize(number)
            assert log.statistics().capacity_bytes == number * log.segment_bytes
        elif what == "take":
            for segment in log.take_gone():
                assert segment >= log.num_segments
                assert not any(extent_of(place) == segment for place in live)
        log.take_segments_to_seal()
        if what == "reclaim" and (sealed := log.sealed_segments()):
            if log.num_free:
                assert all(n < log.num_segments for n in sealed) or sealed[0] >= log.num_segments
            reclaim(log, sealed[0], live)
        assert log.check_integrity() == []
        assert 0 <= log.statistics().free_bytes <= log.statistics().capacity_bytes
    log.close_open_segments()
    log.take_segments_to_seal()
    for segment in log.sealed_segments():
        reclaim(log, segment, live)
        assert log.check_integrity() == []
    log.take_gone()
    assert not log.is_shrinking or log.num_free == 0
    assert [s.state for s in log.segments[: log.num_segments]] == [SegmentState.FREE] * log.num_segments


def test_segments_that_leave_are_emptied_first_and_stay_empty() -> None:
    log = SegmentLog(6, 256 << 10, PAGE_BYTES)
    live: dict[int, int] = {}
    while (place := log.reserve(0, 90_000)) is not None:
        live[place] = 90_000
        log.settle(place)
    log.resize(3)
    log.take_segments_to_seal()
    assert log.num_free == 0
    assert log.sealed_segments()[0] == 0, "first there must be room to copy forward into"
    reclaim(log, 0, live)
    for _ in range(2):
        assert log.sealed_segments()[0] >= 3
        reclaim(log, log.sealed_segments()[0], live)
        assert log.check_integrity() == []
    assert log.take_gone() == [5, 3, 4]
    assert not log.is_shrinking
    while (place := log.reserve(0, 90_000)) is not None:
        assert extent_of(place) < 3
    log.resize(4)
    assert log.reserve(0, 90_000) is not None


def reclaim(log: SegmentLog, segment: int, live: dict[int, int]) -> None:
    log.begin_reclaim(segment)
    for place in [place for place in live if extent_of(place) == segment]:
        log.release(place, live.pop(place))
    log.finish_reclaim(segment)


def test_an_extent_that_is_given_back_is_gone_for_everybody() -> None:
    with open_engine(num_extents=2, first_extent=7) as (engine, room, _):
        label = make_label(0, 16_384)
        place = store(engine, room, label, 0)
        room.grow(3)
        others = [store(engine, room, make_label(n, 2 << 20), n) for n in (1, 2)]
        number = extent_of(others[1])
        descriptor = engine.descriptor(7 + number)
        room.retire([number])
        assert room.take_gone() == []
        engine.retract(others[1])
        room.release(others[1], 2 << 20)
        assert room.take_gone() == [number]
        engine.give_back(number)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        assert engine.domain_of(7 + number) is None
        with pytest.raises(CopyError):
            engine.descriptor(7 + number)
        engine.prefault()
        assert len(engine.reports()) == engine.num_extents == 2
        engine.verify(place, label)


def open_store(folder: Path, num_segments: int) -> ColdStore:
    opened = ColdStore.open(folder, SEGMENT_BYTES, num_segments)
    opened.recover()
    return opened


def segment_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("segment-*"))


def test_a_cold_store_grows_and_shrinks_by_files(tmp_path: Path) -> None:
    opened = open_store(tmp_path, 2)
    opened.resize(4)
    assert len(segment_files(tmp_path)) == 4
    label, payload = label_of(1, 8192), memoryview(payload_of(1, 8192))
    opened.store_namespace(NAMESPACES[0])
    opened.write(3 << 32, label, payload)
    opened.resize(3)
    assert len(segment_files(tmp_path)) == 4, "until it is given back"
    opened.seal(3)
    opened.free(3)
    opened.give_back(3)
    assert len(segment_files(tmp_path)) == 3
    opened.resize(2)
    opened.resize(3)
    opened.give_back(2)
    assert len(segment_files(tmp_path)) == 3, "it is wanted again"
    opened.resize(5)
    opened.write(4 << 32, label, payload)
    assert opened.check_integrity() == []
    opened.close()
    again = ColdStore.open(tmp_path, SEGMENT_BYTES, 5)
    assert again.recover().num_records == 1
    again.close()


def test_a_disk_without_room_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_store(tmp_path, 2)
    left = [2]

    def allocate(self: DirectIo, fd: int, num_bytes: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        os.posix_fallocate(fd, 0, num_bytes)

    monkeypatch.setattr(DirectIo, "allocate", allocate)
    with pytest.raises(ColdStoreError, match="make room"):
        opened.resize(6)
    assert segment_files(tmp_path) == ["segment-000000", "segment-000001"]
    opened.store_namespace(NAMESPACES[0])
    opened.write(1 << 32, label_of(1, 8192), memoryview(payload_of(1, 8192)))
    assert opened.check_integrity() == []
    opened.close()
