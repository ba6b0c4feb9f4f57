"""ExtentEngine beyond the contract suite: locations, audits, start and end."""

import threading
from dataclasses import replace

import pytest

from kvtier.tiers import payload
from kvtier.tiers.base import Cause, CopyError, MemoryEngine
from kvtier.tiers.block import Tier
from kvtier.tiers.memory import engine as memory
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.memfd import SharedMemoryError
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import place_of
from tests.tiers.helpers import EXTENT_BYTES, drop, make_label, make_payload, open_engine, store
from tests.tiers.memory.reader import Reader

LENGTH = 40_000


def test_it_is_a_memory_engine() -> None:
    with open_engine(tier=Tier.HBM) as (engine, _, _):
        checked: MemoryEngine = engine
        assert checked.tier is Tier.HBM


def test_location_names_what_a_client_maps() -> None:
    with open_engine(num_extents=2, first_extent=5) as (engine, room, _):
        places = [store(engine, room, make_label(n, 1 << 20), n) for n in range(4)]
        for number, place in enumerate(places):
            extent, offset, generation = engine.location(place)
            assert extent in (5, 6)
            assert offset % (1 << 20) == 0
            assert generation % 2 == 0
            assert engine.view(place, 1 << 20) == make_payload(number, 1 << 20)
        assert engine.descriptor(5) != engine.descriptor(6)


def test_bytes_read_into_a_view_are_published_like_written_ones() -> None:
    with open_engine() as (engine, room, _):
        label = replace(make_label(1, LENGTH), checksum=b"c" * 16)
        place = room.reserve(0, LENGTH)
        assert place is not None
        engine.view(place, LENGTH)[:] = make_payload(1, LENGTH)  # as the cold store does
        engine.publish_run([place], [label])
        into = memoryview(bytearray(LENGTH))
        engine.read(place, label, into)
        assert into == make_payload(1, LENGTH)


def test_a_slot_recycled_during_a_read_is_refused() -> None:
    with open_engine() as (engine, room, _):
        label = make_label(1, LENGTH)
        place = store(engine, room, label, 1)
        generation = engine.verify(place, label)
        drop(engine, room, place, LENGTH)
        assert store(engine, room, label, 1) == place
        with pytest.raises(CopyError, match="recycled") as caught:
            engine.verify(place, label, generation)
        assert caught.value.cause is Cause.WRONG_IDENTITY


def test_a_read_looks_again_when_it_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine() as (engine, room, _):
        old, new = make_label(1, LENGTH), make_label(2, LENGTH)
        place = store(engine, room, old, 1)

        def copy_and_recycle(into: memoryview, source: memoryview) -> None:
            payload.copy(into, source)
            drop(engine, room, place, LENGTH)
            assert store(engine, room, new, 2) == place

        monkeypatch.setattr(memory, "copy", copy_and_recycle)  # the real copy, at the worst moment
        with pytest.raises(CopyError):
            engine.read(place, old, memoryview(bytearray(LENGTH)))


def test_fragments_published_together_are_found_like_those_published_one_by_one() -> None:
    with open_engine(num_extents=2, first_extent=3) as (engine, room, indexes):
        labels, places = [], []
        for number in range(70):  # an extent has 51 such slots
            label = make_label(number // 2, LENGTH, group=number % 2)
            place = room.reserve(0, LENGTH)
            assert place is not None
            labels.append(replace(label, checksum=engine.write(place, label, make_payload(number, LENGTH))))
            places.append(place)
        engine.publish_run(places[:69], labels[:69])
        engine.publish_run([places[69]], [labels[69]])
        assert engine.check_integrity() == []
        assert indexes.of(0).num_entries == 70
        extents = {number: engine.descriptor(number) for number in (3, 4)}
        reader = Reader(indexes.of(0).descriptor, extents, EXTENT_BYTES)
        for number, (place, label) in enumerate(zip(places, labels, strict=True)):
            assert engine.verify(place, label) % 2 == 0
            found = reader.get(label.prefix_hash, group=label.group)
            assert found == (bytes(make_payload(number, LENGTH)), label.checksum)
        with pytest.raises(AssertionError, match="published twice"):
            engine.publish_run(places[:2], labels[:2])


def test_programmers_errors_are_assertions() -> None:
    with open_engine() as (engine, room, _):
        label = make_label(1, LENGTH)
        place = store(engine, room, label, 1)
        with pytest.raises(AssertionError, match="retracted"):
            engine.write(place, label, make_payload(2, LENGTH))
        with pytest.raises(AssertionError, match="twice"):
            engine.publish_run([place], [replace(label, checksum=b"c" * 16)])
        with pytest.raises(AssertionError, match="slot has"):
            engine.view(place, LENGTH + 4096)
        other = room.reserve(0, LENGTH)
        assert other is not None
        with pytest.raises(AssertionError, match="hashed"):
            engine.publish_run([other], [label])


def test_the_audit_finds_a_published_slot_that_is_free() -> None:
    with open_engine() as (engine, room, _):
        place = store(engine, room, make_label(1, LENGTH), 1)
        keep = room.reserve(0, LENGTH)
        assert keep is not None
        room.release(place, LENGTH)  # without retract
        assert any("published and free" in problem for problem in engine.check_integrity())
        engine.retract(place)


def test_the_audit_finds_a_header_that_says_otherwise() -> None:
    with open_engine() as (engine, room, _):
        place = store(engine, room, make_label(1, LENGTH), 1)
        extent = engine._extents[0]
        assert extent is not None
        extent.headers.empty(0)
        assert any("readable=False" in problem for problem in engine.check_integrity())
        extent.headers.last_generation -= 2
        extent.headers.fill(1, make_label(9, 10), 0)
        assert any(f"{place_of(0, 1):#x}" in problem for problem in engine.check_integrity())
        extent.headers.empty(1)
        engine.retract(place)
        extent.headers.empty(0)


def test_what_the_index_cannot_hold_is_still_served() -> None:
    room = SlotPool(2, EXTENT_BYTES)
    indexes = Indexes(64, epoch=1, max_domains=1)
    engine = ExtentEngine(room, indexes)
    first = store(engine, room, make_label(1, LENGTH), 1, domain=1)
    second = store(engine, room, make_label(2, LENGTH), 2, domain=2)  # no index for this one
    for number, place in ((1, first), (2, second)):
        into = memoryview(bytearray(LENGTH))
        engine.read(place, make_label(number, LENGTH), into)
        assert into == make_payload(number, LENGTH)
        engine.retract(place)
    with pytest.raises(SharedMemoryError):
        engine.indexes.of(2)
    engine.close()
    indexes.close()


def test_prefault_in_a_thread_while_in_use_and_closed_meanwhile() -> None:
    room = SlotPool(8, 8 << 20)
    indexes = Indexes(64, epoch=1)
    engine = ExtentEngine(room, indexes)
    thread = threading.Thread(target=engine.prefault)
    thread.start()
    places = [store(engine, room, make_label(n, 1 << 20), n) for n in range(16)]
    for number, place in enumerate(places):
        assert engine.view(place, 1 << 20) == make_payload(number, 1 << 20)
    engine.close()
    thread.join()
    engine.prefault()  # does nothing now
    assert engine.reports() == []
    indexes.close()


def test_prefault_makes_all_extents() -> None:
    with open_engine(num_extents=3) as (engine, _, _):
        assert len(engine.reports()) == 1, "the rest is made when it is needed, or now"
        engine.prefault()
        assert [report.prefaulted for report in engine.reports()] == [True] * 3


def test_a_host_that_cannot_is_known_at_start() -> None:
    with pytest.raises(SharedMemoryError, match="node"):
        ExtentEngine(SlotPool(1, EXTENT_BYTES), Indexes(64, epoch=1), numa_nodes=[900])
