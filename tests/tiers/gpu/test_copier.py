"""Copies between pinned warm memory and a device: right bytes in any order of events, and I-6 kept, not
hoped."""

import logging
import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel
from kvtier.tiers.gpu.copier import coalesce
from kvtier.tiers.gpu.device.contract import CopyPieces, DeviceError, DeviceFault
from kvtier.tiers.gpu.hbm import HbmEngine
from kvtier.tiers.memory.slots import SlotPool
from tests.fakes.gpu.device import FakeDevice
from tests.fakes.gpu.streams import FakeEvent, FakeStream
from tests.tiers.gpu.hot import EXTENT_BYTES, LENGTH, Hot, opened
from tests.tiers.helpers import make_payload


@pytest.mark.parametrize("length", [1, 4097, LENGTH, EXTENT_BYTES])
def test_up_and_down_again(length: int) -> None:
    with opened() as hot:
        place, label = hot.promoted(1, length)
        back = hot.warm_place(length)
        assert hot.copy(hot.down, [CopyItem(place, back, label)]) == [CopyOutcome(None, label.checksum)]
        assert hot.warm.view(back, length) == make_payload(1, length)
        statistics = hot.hot.statistics()
        assert (statistics.num_writes, statistics.written_bytes) == (1, length)
        assert (statistics.num_reads, statistics.read_bytes) == (1, length)


def test_a_batch_of_neighbours_is_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    enqueue = FakeStream.copy

    def count(stream: FakeStream, pieces: CopyPieces) -> None:
        seen.append(len(pieces.lengths))
        enqueue(stream, pieces)

    monkeypatch.setattr(FakeStream, "copy", count)
    with opened() as hot:
        placed = [hot.put(number) for number in range(40)]  # more than one extent of 32
        targets = [hot.hot_place() for _ in placed]
        items = [CopyItem(source, to, label) for (source, label), to in zip(placed, targets, strict=True)]
        assert [outcome.cause for outcome in hot.copy(hot.up, items)] == [None] * 40
        for number, place in enumerate(targets):
            assert hot.peek(place) == make_payload(number, LENGTH)
    assert seen == [2], "one per extent, which is one registration"


def test_nothing_is_over_before_the_device_says_so() -> None:
    with opened() as hot:
        source, label = hot.put(1)
        target = hot.hot_place()
        future = hot.up.start([CopyItem(source, target, label)])
        while not future.done():
            assert hot.hot.flights.num_open == 1
            assert hot.device.step(), "the device has done all it can, and nobody was told"
        assert hot.peek(target) == make_payload(1, LENGTH)
        assert not future.cancel()
        assert hot.hot.flights.num_open == 0


def chain_of_copies(hot: Hot) -> list[int]:
    """Start up, down and up again at once, each reading what the one before writes; return the last
    target."""
    source, label = hot.put(1)
    targets = [hot.hot_place(), hot.warm_place(), hot.hot_place()]
    hot.hot.publish_run([targets[0]], [label])  # as if the planner were hasty
    hot.warm.publish_run([targets[1]], [label])
    futures = []
    for copier, place, target in zip((hot.up, hot.down, hot.up), (source, *targets), targets, strict=False):
        futures.append(copier.start([CopyItem(place, target, label)]))
    hot.device.run()
    assert [future.result(0) for future in futures] == [[CopyOutcome(None, label.checksum)]] * 3
    return targets


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_waits_for_the_one_that_writes_its_source(seed: int) -> None:
    with opened(seed) as hot:
        last = chain_of_copies(hot)[-1]
        assert hot.peek(last) == make_payload(1, LENGTH)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_waits_for_those_that_read_its_target(seed: int) -> None:
    with opened(seed) as hot:
        old, old_label = hot.promoted(1)
        new, new_label = hot.put(2)
        away = hot.warm_place()
        demoted = hot.down.start([CopyItem(old, away, old_label)])
        replaced = hot.up.start([CopyItem(new, old, new_label)])  # reused though it is still read
        hot.device.run()
        assert demoted.result(0)[0].cause is None
        assert replaced.result(0)[0].cause is None
        assert hot.warm.view(away, LENGTH) == make_payload(1, LENGTH)
        assert hot.peek(old) == make_payload(2, LENGTH)


def test_another_identity_is_not_copied() -> None:
    with opened() as hot:
        source, label = hot.put(1)
        place, hot_label = hot.promoted(2)
        wrong = replace(label, prefix_hash=b"x" * 32)
        items = [CopyItem(source, hot.hot_place(), wrong), CopyItem(source, hot.hot_place(), label)]
        assert [o.cause for o in hot.copy(hot.up, items)] == [Cause.WRONG_IDENTITY, None]
        wrong = replace(hot_label, group=3)
        assert hot.copy(hot.down, [CopyItem(place, hot.warm_place(), wrong)])[0].cause is Cause.WRONG_IDENTITY
        assert hot.copy(hot.up, []) == []


def test_a_source_that_was_recycled_meanwhile_is_noticed() -> None:
    with opened() as hot:
        place, label = hot.promoted(1)
        future = hot.down.start([CopyItem(place, hot.warm_place(), label)])
        hot.hot.retract(place)
        hot.hot.publish_run([place], [label])
        hot.device.run()
        assert future.result(0)[0].cause is Cause.WRONG_IDENTITY


def test_a_flipped_bit_is_found_when_looked_for() -> None:
    for verifies, expected in ((True, Cause.WRONG_CHECKSUM), (False, None)):
        with opened(verifies=verifies) as hot:
            place, label = hot.promoted(1)
            hot.device.poke(int(hot.hot.addresses_of([place])[0]) + 5, b"\x00\xff\x00")
            assert hot.copy(hot.down, [CopyItem(place, hot.warm_place(), label)])[0].cause is expected


def promote_some(hot: Hot, count: int) -> tuple[list[int], list[FragmentLabel]]:
    placed = [hot.promoted(number) for number in range(count)]
    return [place for place, _ in placed], [label for _, label in placed]


@pytest.mark.parametrize("num_steps", range(12))
def test_a_lost_device_ends_every_copy_and_keeps_its_places(num_steps: int) -> None:
    with opened() as hot:
        told: list[str] = []
        hot.hot.on_lost = told.append
        [place], [label] = promote_some(hot, 1)
        new, new_label = hot.put(7)
        target = hot.hot_place()
        futures = [
            hot.up.start([CopyItem(new, target, new_label)]),
            hot.down.start([CopyItem(place, hot.warm_place(), label)]),
        ]
        for _ in range(num_steps):
            hot.device.step()
        hot.device.lose("test")
        hot.device.run()
        causes = [future.result(0)[0].cause for future in futures]
        assert set(causes) <= {None, Cause.TIER_OFFLINE}
        assert len(told) == (0 if causes == [None, None] else 1)
        assert hot.hot.flights.num_open == 0
        again = hot.copy(hot.up, [CopyItem(new, target, new_label)])
        assert again[0].cause is Cause.TIER_OFFLINE
        assert len(told) == 1
        hot.hot.retract(place)


def test_a_refused_copy_is_waited_for_and_counted_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as hot:
        source, label = hot.put(1)
        item = CopyItem(source, hot.hot_place(), label)

        def refuse(stream: FakeStream, pieces: CopyPieces) -> None:
            half = CopyPieces(pieces.sources, pieces.targets, pieces.lengths // 2)
            stream.device.enqueue_copy(stream, half)  # as a driver may that stumbles in the middle
            raise DeviceError(DeviceFault.REFUSED, "test")

        with monkeypatch.context() as patch:
            patch.setattr(FakeStream, "copy", refuse)
            future = hot.up.start([item])
        assert not future.done()
        hot.device.run()
        assert future.result(0) == [CopyOutcome(Cause.IO_ERROR)]
        assert hot.copy(hot.up, [item])[0].cause is None, "the tier works on"


def test_without_an_event_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    hot = Hot(device)
    source, label = hot.put(1)

    def refuse(device: FakeDevice) -> FakeEvent:
        raise DeviceError(DeviceFault.REFUSED, "the driver makes no event")

    monkeypatch.setattr(FakeDevice, "take_event", refuse)
    assert hot.copy(hot.up, [CopyItem(source, hot.hot_place(), label)]) == [CopyOutcome(Cause.IO_ERROR)]
    assert hot.problems() == []
    hot.close()


def test_a_tier_that_grows_and_shrinks() -> None:
    """Extents that come later are memory of their own; what leaves is unpinned before it is unmapped."""
    with opened(num_extents=1) as hot:
        old = [hot.promoted(number) for number in range(32)]
        hot.warm_room.grow(2)
        hot.hot_room.grow(2)
        place, label = hot.promoted(99)
        assert place not in [place for place, _ in old]
        other = hot.hot_place()
        assert hot.copy(hot.across, [CopyItem(place, other, label)]) == [CopyOutcome(None, label.checksum)]
        assert hot.peek(other) == make_payload(99, LENGTH)
        hot.hot.retract(place)
        for slot in (place, other):
            hot.hot_room.release(slot, LENGTH)
        before = len(hot.device.memory.regions)
        hot.hot_room.retire([1])
        hot.hot.give_back(*hot.hot_room.take_gone())
        hot.warm_room.retire([0])
        hot.warm.give_back(*hot.warm_room.take_gone())
        assert before - len(hot.device.memory.regions) == 2


def test_pinning_has_a_limit_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(max_registered_bytes=EXTENT_BYTES + (4 << 20))  # one extent, and the bounce buffer
    hot = Hot(device)
    bounce_bytes = device.memory.taken_bytes("host")
    with caplog.at_level(logging.ERROR):
        hot.pinned.pin_all()
    assert "up to extent 1 only" in caplog.text
    assert "memlock" in caplog.text
    assert device.memory.taken_bytes("host") - bounce_bytes > EXTENT_BYTES // 2
    placed = [hot.put(number) for number in range(33)]  # one more than an extent has
    items = [CopyItem(place, hot.hot_place(), label) for place, label in placed]
    assert [outcome.cause for outcome in hot.copy(hot.up, items)].count(Cause.IO_ERROR) in (1, 32)
    hot.close()
    assert not device.memory.regions


def test_memory_is_unregistered_before_it_is_unmapped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), opened() as hot:
        hot.promoted(1)
        assert hot.device.memory.taken_bytes("host") > 0
    assert caplog.text == "", "an extent was unmapped while it was registered"


def test_closing_waits_for_what_is_under_way() -> None:
    hot = Hot(FakeDevice())
    source, label = hot.put(1)
    future = hot.up.start([CopyItem(source, hot.hot_place(), label)])
    closer = threading.Thread(target=hot.close)
    closer.start()
    while closer.is_alive():
        if hot.hot._is_closed:  # from now on it waits
            hot.device.run()
        closer.join(0.001)
    assert future.result(0)[0].cause is None
    assert hot.device.check_integrity() == []
    assert hot.device.left_behind == []


def test_a_slab_that_does_not_fit() -> None:
    device = FakeDevice(capacity_bytes=1 << 20)
    with pytest.raises(DeviceError) as caught:
        HbmEngine(device, SlotPool(1, 2 << 20))
    assert caught.value.fault is DeviceFault.OUT_OF_MEMORY
    device.shut_down()
    few = FakeDevice(num_streams=2)
    with pytest.raises(DeviceError) as caught:
        Hot(few)
    assert caught.value.fault is DeviceFault.OCCUPIED
    few.shut_down()


Moving = tuple[int, CopyItem, "Future[list[CopyOutcome]]"]


def land(
    hot: Hot,
    at: dict[int, tuple[bool, int]],
    number: int,
    item: CopyItem,
    future: "Future[list[CopyOutcome]]",
) -> None:
    """Take over a copy that ended, and give its source back at once, as the planner does."""
    assert future.result(0) == [CopyOutcome(None, item.label.checksum)]
    if item.source in hot.hot._published and hot.hot._published[item.source][1] is item.label:
        hot.hot.retract(item.source)
        hot.hot_room.release(item.source, LENGTH)
        hot.warm.publish_run([item.target], [item.label])
        at[number] = (False, item.target)
    else:
        hot.drop_warm(item.source)
        hot.hot.publish_run([item.target], [item.label])
        at[number] = (True, item.target)


rows = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3), st.integers(0, 1)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows)
@example([(9, 0, 1, 0), (0, 1, 1, 1)])  # neighbours in two regions
def test_coalescing_changes_no_byte(rows: list[tuple[int, int, int, int]]) -> None:
    """Every byte goes where it went before, and no piece spans two regions."""
    columns = np.array([(10 * r + s, t, min(n, 10 - s), r, 0) for s, t, n, r in rows], np.uint64)
    sources, targets, lengths, regions, others = columns.T
    signed = (column.astype(np.int64) for column in (lengths, regions, others))
    merged = coalesce(sources.copy(), targets.copy(), *signed)

    def bytes_of(triples: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return sorted((s + i, t + i) for s, t, n in triples for i in range(n))

    after = list(zip(*(column.tolist() for column in merged), strict=True))
    assert bytes_of(after) == bytes_of([(s, t, n) for s, t, n, *_ in columns.tolist()])
    assert all(s // 10 == (s + n - 1) // 10 for s, _, n in after)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_mix_of_copies_keeps_every_byte(data: st.DataObject) -> None:
    """Fragments wander up and down in any order while the device is late; places are reused as soon as they
    may be."""
    with opened(data.draw(st.integers(0, 1 << 16))) as hot:
        at: dict[int, tuple[bool, int]] = {}  # fragment -> (is hot, place), while nothing is under way
        labels: dict[int, FragmentLabel] = {}
        moving: list[Moving] = []
        for number in range(4):
            place, labels[number] = hot.put(number)
            at[number] = (False, place)
        for _ in range(data.draw(st.integers(1, 25))):
            for _ in range(data.draw(st.integers(0, 6))):
                hot.device.step()
            for entry in [entry for entry in moving if entry[2].done()]:
                moving.remove(entry)
                land(hot, at, *entry)
            if at:
                number = data.draw(st.sampled_from(sorted(at)))
                is_hot, place = at.pop(number)
                target = hot.warm_place() if is_hot else hot.hot_place()
                item = CopyItem(place, target, labels[number])
                copier = hot.down if is_hot else hot.up
                moving.append((number, item, copier.start([item])))
            assert hot.problems() == []
        hot.device.run()
        for entry in moving:
            land(hot, at, *entry)
        for number, (is_hot, place) in at.items():
            found = hot.peek(place) if is_hot else hot.warm.view(place, LENGTH)
            assert found == make_payload(number, LENGTH)
