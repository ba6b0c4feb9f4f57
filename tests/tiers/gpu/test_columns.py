"""Batches looked at in columns end as they would item by item, whatever is wrong with any of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.tiers.base import Cause, CopyError, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Tier
from kvtier.tiers.gpu.copier import DeviceEnd
from kvtier.tiers.gpu.device.contract import CopyPieces
from kvtier.tiers.gpu.device.flights import Flight, Flights, TouchedPlaces
from kvtier.tiers.memory.headers import LabelColumns
from kvtier.tiers.memory.places import column_of
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.gpu.hot import EXTENT_BYTES, LENGTH, Hot, opened
from tests.tiers.helpers import make_payload

SHORT = 20_000  # of fragments in an extent of smaller slots
PER_EXTENT = EXTENT_BYTES // LENGTH

wrong: dict[str, Callable[[FragmentLabel], FragmentLabel]] = {
    "nothing": lambda label: label,
    "copied label": lambda label: replace(label),
    "hash": lambda label: replace(label, prefix_hash=bytes(31) + b"\x01"),
    "group": lambda label: replace(label, group=label.group + 1),
    "namespace": lambda label: replace(label, namespace_id=7, namespace_digest=b"n" * 32),
    "length": lambda label: replace(label, raw_length=label.raw_length - 1),
    "checksum": lambda label: replace(label, checksum=b"c" * 16),
    "no checksum": lambda label: replace(label, checksum=b""),
}


def scalar(end: DeviceEnd, place: int, label: FragmentLabel) -> int | Cause:
    """The generation of one fragment, or why there is none."""
    try:
        return end.verify(place, label)
    except CopyError as error:
        return error.cause


Known = dict[int, tuple[int, FragmentLabel]]
Rows = list[tuple[int, FragmentLabel]]


def asked(hot: Hot, kinds: list[tuple[int, str]], *, is_hot: bool) -> tuple[Known, Rows]:
    """Store fragments by number; return where they are, and places and labels as they are asked for, with
    something wrong in the label. Number -1 is a slot that was never filled, -2 one that was retracted."""
    store = hot.promoted if is_hot else hot.put
    known = {number: store(number) for number in {number for number, _ in kinds} | {0} if number >= 0}
    empty = hot.hot_place() if is_hot else hot.warm_place()
    slots = {**known, -1: (empty, known[0][1]), -2: store(99)}
    (hot.hot if is_hot else hot.warm).retract(slots[-2][0])
    return known, [(slots[number][0], wrong[kind](slots[number][1])) for number, kind in kinds]


kinds = st.lists(st.tuples(st.integers(-2, 5), st.sampled_from(sorted(wrong))), min_size=1, max_size=8)
good = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["nothing", "copied label"])), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kinds | good, st.booleans())
@example([(0, "nothing"), (0, "nothing")], False)
@example([(0, "nothing"), (-2, "nothing")], False)
@example([(0, "nothing"), (-2, "nothing")], True)
def test_generations_are_those_of_one_look_each(kinds: list[tuple[int, str]], is_hot: bool) -> None:
    with opened() as hot:
        end: DeviceEnd = hot.hot if is_hot else hot.pinned
        _, rows = asked(hot, kinds, is_hot=is_hot)
        expected = [scalar(end, place, label) for place, label in rows]
        places, identities = (
            column_of([place for place, _ in rows]),
            LabelColumns([label for _, label in rows]),
        )
        found = end.generations_of(places, identities)
        if found is not None:
            assert found.tolist() == expected
        elif all(kind in ("nothing", "copied label") and number >= 0 for number, kind in kinds):
            pytest.fail("nothing is wrong, and the columns would not say so")


@pytest.mark.parametrize("is_hot", [False, True])
@pytest.mark.parametrize("kind", sorted(wrong))
def test_one_wrong_label_among_right_ones_is_found(kind: str, is_hot: bool) -> None:
    with opened() as hot:
        end: DeviceEnd = hot.hot if is_hot else hot.pinned
        _, rows = asked(hot, [(0, "nothing"), (1, kind), (2, "nothing")], is_hot=is_hot)
        expected = [scalar(end, place, label) for place, label in rows]
        found = end.generations_of(
            column_of([place for place, _ in rows]), LabelColumns([row[1] for row in rows])
        )
        assert (None if found is None else found.tolist()) in (None, expected)


def test_addresses_are_those_of_one_look_each_in_any_extents() -> None:
    with opened(num_extents=3) as hot:
        for end, reserve in ((hot.pinned, hot.warm_place), (hot.hot, hot.hot_place)):
            places = [reserve(LENGTH) for _ in range(PER_EXTENT + 3)] + [reserve(SHORT) for _ in range(5)]
            assert len({place >> 32 for place in places}) == 3
            order = np.random.default_rng(3).permutation(len(places))
            mixed = [places[i] for i in order] + places[:2]
            assert end.addresses_of(mixed).tolist() == [int(end.addresses_of([place])[0]) for place in mixed]
            assert end.addresses_of([]).tolist() == []


numbers = st.frozensets(st.integers(0, 5), max_size=2)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(kinds | good, st.sampled_from(["up", "down", "across"]), numbers, numbers, st.booleans())
@example([(0, "nothing"), (0, "nothing"), (1, "copied label")], "up", frozenset(), frozenset(), False)
@example([(0, "nothing"), (1, "nothing")], "up", frozenset({1}), frozenset(), False)
@example([(0, "nothing"), (1, "nothing")], "across", frozenset({1}), frozenset(), False)
@example([(0, "nothing"), (1, "hash"), (2, "nothing")], "up", frozenset(), frozenset({2}), False)
@example([(0, "nothing"), (1, "hash"), (2, "nothing")], "up", frozenset(), frozenset(), False)
@example([(0, "nothing"), (1, "nothing")], "up", frozenset(), frozenset(), True)
def test_a_batch_ends_item_by_item(
    kinds: list[tuple[int, str]],
    edge: str,
    retracted: frozenset[int],
    recycled: frozenset[int],
    is_lost: bool,
) -> None:
    """Outcomes, in order, are those of a look at each item before the copy and one after it; what landed is
    what was put, and the failures are counted one by one."""
    with opened(num_extents=3) as hot:
        is_hot, copier = edge != "up", getattr(hot, edge)
        source, engine = (hot.hot, hot.hot) if is_hot else (hot.pinned, hot.warm)
        reserve = hot.warm_place if edge == "down" else hot.hot_place
        known, rows = asked(hot, kinds, is_hot=is_hot)
        for _ in range(PER_EXTENT - 4):  # some targets are in the next extent
            reserve()
        items = [CopyItem(place, reserve(), label) for place, label in rows]
        if is_lost:
            hot.hot.lost("test")
        expected = [expected_outcome(source, item, edge, is_lost) for item in items]
        before = engine.statistics().failures.get(Cause.WRONG_IDENTITY, 0)
        future = copier.start(items)
        if not future.done():
            changed = {known[number][0]: number for number in (retracted | recycled) & known.keys()}
            for place, number in changed.items():
                engine.retract(place)
                if number in recycled:
                    engine.publish_run([place], [known[number][1]])
            expected = [
                CopyOutcome(Cause.WRONG_IDENTITY)
                if item.source in changed and outcome.cause in (None, Cause.WRONG_CHECKSUM)
                else outcome
                for item, outcome in zip(items, expected, strict=True)
            ]
        hot.device.run()
        assert future.result(0) == expected
        num_wrong = [outcome.cause for outcome in expected].count(Cause.WRONG_IDENTITY)
        assert engine.statistics().failures.get(Cause.WRONG_IDENTITY, 0) - before == num_wrong
        for item, outcome, (number, _) in zip(items, expected, kinds, strict=True):
            if outcome.cause is None:
                end = hot.pinned if edge == "down" else hot.hot
                there = hot.device.peek(int(end.addresses_of([item.target])[0]), LENGTH)
                assert there == make_payload(number, LENGTH)


def expected_outcome(source: DeviceEnd, item: CopyItem, edge: str, is_lost: bool) -> CopyOutcome:
    """How a copy ends of which nothing changes while it is under way."""
    found = scalar(source, item.source, item.label)
    if isinstance(found, Cause):
        return CopyOutcome(found)
    if is_lost:
        return CopyOutcome(Cause.TIER_OFFLINE)
    if edge == "down" and item.label.checksum in (b"", b"c" * 16):  # hbm's identity says nothing of it
        return CopyOutcome(Cause.WRONG_CHECKSUM)
    return CopyOutcome(None, item.label.checksum)


class Ordered:
    """Copies between places of two tiers on a fake device, which audits their order, put in order by Flights
    alone."""

    def __init__(self, seed: int) -> None:
        self.device = FakeDevice(seed=seed)
        self.flights = Flights(self.device)
        self.start = {tier: self.device.allocate(8 * LENGTH).address for tier in (Tier.HBM, Tier.DRAM)}
        self.open: list[Flight] = []
        self.streams = [self.device.take_stream() for _ in range(4)]

    def begin(self, stream: int, source: Tier, target: Tier, pairs: list[tuple[int, int]]) -> None:
        """Copy a byte range of its own from each source place to its target place."""
        on = self.streams[stream]
        event = on.record()
        reads, writes = (
            TouchedPlaces(source, [a for a, _ in pairs]),
            TouchedPlaces(target, [b for _, b in pairs]),
        )
        flight = Flight(on, event, reads, writes)
        self.flights.begin(flight)
        sources = np.array([self.start[source] + LENGTH * place for place in reads.places], np.uint64)
        targets = np.array([self.start[target] + LENGTH * place for place in writes.places], np.uint64)
        on.copy(CopyPieces(sources, targets, np.full(len(pairs), 16, np.int64)))
        on.record(event)
        self.open.append(flight)

    def end(self, number: int) -> None:
        """End the flight `number` of those that have landed, in any order."""
        done = [flight for flight in self.open if flight.event.is_done()]
        if done:
            flight = done[number % len(done)]
            self.open.remove(flight)
            self.flights.end(flight)
            self.device.recycle(flight.event)

    def close(self) -> None:
        """Let everything land and end."""
        self.device.run()
        while self.open:
            self.end(0)
            assert self.flights.check_integrity() == []
        assert self.flights.wait_until_quiet(0)
        self.device.shut_down()


tiers = st.sampled_from([Tier.HBM, Tier.DRAM])
pairs = st.lists(
    st.tuples(st.integers(0, 3), st.integers(4, 7)), min_size=1, max_size=3, unique_by=lambda pair: pair[1]
)
turned = st.booleans()
steps = st.lists(
    st.tuples(st.just("begin"), st.integers(0, 3), tiers, tiers, pairs, turned)
    | st.tuples(st.just("step"), st.integers(1, 6))
    | st.tuples(st.just("end"), st.integers(0, 3)),
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps, st.integers(0, 100))
def test_flights_that_touch_the_same_place_are_ordered(steps: list[tuple[Any, ...]], seed: int) -> None:
    """The device's audit knows every pair of copies that nothing orders."""
    world = Ordered(seed)
    for step in steps:
        if step[0] == "begin":
            _, stream, source, target, places, is_turned = step
            if is_turned and len({a for a, _ in places}) == len(places):
                places = [(b, a) for a, b in places]
            world.begin(stream, source, target, places)
        elif step[0] == "step":
            for _ in range(step[1]):
                world.device.step()
        else:
            world.end(step[1])
        assert world.flights.num_open == len(world.open)
        assert world.flights.check_integrity() == []
        assert world.device.check_integrity() == []
    world.close()


def test_a_writer_waits_for_every_reader() -> None:
    world = Ordered(0)
    for stream in range(3):
        world.begin(stream, Tier.HBM, Tier.HBM, [(0, 4 + stream)])
    world.begin(3, Tier.HBM, Tier.HBM, [(1, 0)])
    assert world.device.check_integrity() == []
    world.close()


def test_the_last_writer_is_known_when_an_earlier_one_has_ended() -> None:
    world = Ordered(0)
    world.begin(0, Tier.HBM, Tier.DRAM, [(0, 4)])
    world.begin(1, Tier.HBM, Tier.DRAM, [(1, 4)])
    while not world.open[0].event.is_done():
        assert world.device.step()
    assert not world.open[1].event.is_done()
    world.end(0)
    world.begin(2, Tier.HBM, Tier.DRAM, [(2, 4)])
    world.begin(3, Tier.DRAM, Tier.HBM, [(4, 5)])
    assert world.device.check_integrity() == []
    world.close()


def test_it_is_not_quiet_before_the_end_of_a_flight_was_told() -> None:
    """Memory that is closed once it is quiet must not be closed under `landed`, which looks at both ends."""
    device = FakeDevice()
    flights, was_quiet = Flights(device), []
    memory, stream = device.allocate(2 * LENGTH).address, device.take_stream()
    pieces = CopyPieces(
        np.array([memory], np.uint64), np.array([memory + LENGTH], np.uint64), np.full(1, 16, np.int64)
    )
    flights.launch(
        stream,
        TouchedPlaces(Tier.HBM, [0]),
        TouchedPlaces(Tier.HBM, [1]),
        lambda: stream.copy(pieces),
        lambda error: was_quiet.append(flights.wait_until_quiet(0.0)),
    )
    while not was_quiet:
        device.run()
    assert was_quiet == [False]
    assert flights.wait_until_quiet(60.0)
