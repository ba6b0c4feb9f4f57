"""What every engine promises: the bytes that were put come back under their own name, or nothing does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvtier.tiers.base import Cause, CopyError
from kvtier.tiers.block import FragmentLabel
from tests.contracts.engines import FACTORIES, Case
from tests.tiers.helpers import make_label, make_payload

LENGTH = 40_000


@pytest.fixture(params=list(FACTORIES.values()), ids=list(FACTORIES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    with request.param(tmp_path) as opened:
        yield opened
        assert opened.engine.check_integrity() == []
        assert opened.room.check_integrity() == []


def put(case: Case, number: int, length: int = LENGTH) -> tuple[int, FragmentLabel]:
    """Store fragment `number`; return its place and its label with the checksum."""
    label = make_label(number, length)
    place = case.room.reserve(0, length)
    assert place is not None
    label = replace(label, checksum=case.engine.write(place, label, make_payload(number, length)))
    case.room.settle(place)
    case.engine.publish_run([place], [label])
    return place, label


def get(case: Case, place: int, label: FragmentLabel) -> bytes:
    """Read into a buffer of its own."""
    into = memoryview(bytearray(label.raw_length))
    case.engine.read(place, label, into)
    return bytes(into)


@pytest.mark.parametrize("length", [1, 4095, 4096, 16_385, 600_000])
def test_what_was_put_comes_back(case: Case, length: int) -> None:
    place, label = put(case, 1, length)
    assert get(case, place, label) == make_payload(1, length)
    assert label.checksum == xxhash.xxh3_128_digest(make_payload(1, length))


def test_a_known_checksum_is_carried_unchanged(case: Case) -> None:
    payload = make_payload(1, LENGTH)
    label = replace(make_label(1, LENGTH), checksum=xxhash.xxh3_128_digest(payload))
    place = case.room.reserve(0, LENGTH)
    assert place is not None
    assert case.engine.write(place, label, payload) == label.checksum
    case.room.settle(place)


def test_nothing_is_readable_before_it_is_published(case: Case) -> None:
    if not case.guards_visibility:
        pytest.skip("clients never see this tier")
    label = make_label(1, LENGTH)
    place = case.room.reserve(0, LENGTH)
    assert place is not None
    label = replace(label, checksum=case.engine.write(place, label, make_payload(1, LENGTH)))
    with pytest.raises(CopyError):
        get(case, place, label)
    case.room.settle(place)
    case.engine.publish_run([place], [label])
    assert get(case, place, label) == make_payload(1, LENGTH)


def test_nothing_is_readable_after_it_was_retracted(case: Case) -> None:
    if not case.guards_visibility:
        pytest.skip("clients never see this tier")
    place, label = put(case, 1)
    case.engine.retract(place)
    with pytest.raises(CopyError):
        get(case, place, label)
    case.engine.retract(place)  # again: no effect


@pytest.mark.parametrize("wrong", ["prefix_hash", "group", "namespace", "raw_length"])
def test_another_identity_is_refused(case: Case, wrong: str) -> None:
    place, label = put(case, 1)
    other = {
        "prefix_hash": replace(label, prefix_hash=b"x" * 32),
        "group": replace(label, group=1),
        "namespace": replace(label, namespace_id=2, namespace_digest=b"y" * 32),
        "raw_length": replace(label, raw_length=LENGTH - 1),
    }[wrong]
    with pytest.raises(CopyError) as caught:
        get(case, place, other)
    assert caught.value.cause is Cause.WRONG_IDENTITY
    assert get(case, place, label) == make_payload(1, LENGTH), "the right one is unharmed"
    assert case.engine.statistics().failures[Cause.WRONG_IDENTITY] == 1


def test_a_recycled_place_does_not_answer_for_its_former_fragment(case: Case) -> None:
    places = [put(case, number) for number in range(8)]
    for place, _ in places:
        case.engine.retract(place)
        case.room.release(place, LENGTH)
    again = dict(put(case, number) for number in range(100, 108))
    for place, label in places:
        if place in again:
            with pytest.raises(CopyError):
                get(case, place, label)
    for place, label in again.items():
        assert get(case, place, label) == make_payload_of(label)


def make_payload_of(label: FragmentLabel) -> memoryview:
    """Return the payload of one of the fragments 100 to 107."""
    numbers = [n for n in range(100, 108) if make_label(n, LENGTH).prefix_hash == label.prefix_hash]
    return make_payload(numbers[0], LENGTH)


def test_threads_do_not_disturb_each_other(case: Case) -> None:
    labels = [make_label(number, LENGTH) for number in range(16)]
    places = [case.room.reserve(0, LENGTH) for _ in labels]
    payloads = [make_payload(number, LENGTH) for number in range(16)]

    def write(number: int) -> bytes:
        place = places[number]
        assert place is not None
        return case.engine.write(place, labels[number], payloads[number])

    with ThreadPoolExecutor(4) as pool:
        checksums = list(pool.map(write, range(16)))
        done = [replace(label, checksum=c) for label, c in zip(labels, checksums, strict=True)]
        for place, label in zip(places, done, strict=True):
            assert place is not None
            case.room.settle(place)
            case.engine.publish_run([place], [label])
        read = pool.map(lambda n: get(case, places[n % 16] or 0, done[n % 16]), range(64))
        assert all(found == payloads[n % 16] for n, found in enumerate(read))


def test_statistics_count_what_happened(case: Case) -> None:
    before = case.engine.statistics()
    assert before.backend
    place, label = put(case, 1)
    get(case, place, label)
    get(case, place, label)
    after = case.engine.statistics()
    assert (after.num_writes, after.written_bytes) == (1, LENGTH)
    assert (after.num_reads, after.read_bytes) == (2, 2 * LENGTH)
    assert before.num_writes == 0, "statistics are a copy"


def test_close_twice(case: Case) -> None:
    put(case, 1)
    case.engine.close()
    case.engine.close()


def test_a_closed_engine_says_offline(case: Case) -> None:
    label = make_label(1, LENGTH)
    place = case.room.reserve(0, LENGTH)
    assert place is not None
    case.engine.close()
    with pytest.raises(CopyError) as caught:
        case.engine.write(place, label, make_payload(1, LENGTH))
    assert caught.value.cause is Cause.TIER_OFFLINE
    case.room.settle(place)
