"""What another daemon left in memory, damaged at every byte: what is whole is found, nothing else is."""

import mmap
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier.appliance.persisted.namespace_book import NAME, NamespaceBook
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.memory.extent import SlotExtent
from kvtier.tiers.memory.found import has_right_bytes, labelled_slots
from kvtier.tiers.memory.keeper import Keeper
from kvtier.tiers.payload import checksum
from kvtier.v1.shm import HUGE_PAGE_BYTES, MIN_SLOT_BYTES, SLOT_HEADER

NUM_SLOTS = 4
HEADER_BYTES = SLOT_HEADER.itemsize
DIGESTS = {1: bytes([1]) * 32, 2: bytes([2]) * 32}
DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "a bit flips": lambda header, at: header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :],
    "the highest bit flips": lambda header, at: header[:at] + bytes([header[at] ^ 128]) + header[at + 1 :],
    "a byte is zero": lambda header, at: header[:at] + b"\0" + header[at + 1 :],
    "a byte is 255": lambda header, at: header[:at] + b"\xff" + header[at + 1 :],
    "zeros from there on": lambda header, at: header[:at] + bytes(len(header) - at),
    "ones from there on": lambda header, at: header[:at] + b"\xff" * (len(header) - at),
    "zeros up to there": lambda header, at: bytes(at) + header[at:],
}


def label_of(slot: int, payload: bytes) -> FragmentLabel:
    """Label of what is put into a slot; every byte of it counts."""
    names = np.random.default_rng(slot).integers(1, 255, (2, 32), np.uint8)
    parent = b"" if slot == 0 else names[1].tobytes()
    number = 1 + slot % 2
    return FragmentLabel(
        DIGESTS[number],
        number,
        names[0].tobytes(),
        parent,
        slot,
        slot % 3,
        len(payload),
        checksum(memoryview(payload)),
        is_spent=slot > 1,
    )


def payload_of(seed: int) -> bytes:
    return np.random.default_rng(100 + seed).bytes(MIN_SLOT_BYTES - 100)


def fill(extent: SlotExtent, slot: int, seed: int) -> FragmentLabel:
    """Put a fragment into a slot."""
    payload, offset = payload_of(seed), slot * MIN_SLOT_BYTES
    extent.data[offset : offset + len(payload)] = payload
    label = label_of(seed, payload)
    extent.headers.fill(slot, label, offset)
    return label


def whole(extent: SlotExtent) -> dict[int, FragmentLabel]:
    """Return what a daemon would publish, by slot."""
    found = labelled_slots(extent, DIGESTS.get)
    return {slot: label for slot, label in found if has_right_bytes(extent, slot, label)}


@pytest.fixture
def extent() -> Iterator[SlotExtent]:
    extent = SlotExtent("test", HUGE_PAGE_BYTES, huge_pages=False)
    yield extent
    extent.close()


def header_of(extent: SlotExtent, slot: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The bytes of a header, writable."""
    rows = extent.headers.table().view(np.uint8).reshape(-1, HEADER_BYTES)
    return rows[slot]  # type: ignore[no-any-return]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_header_damaged_anywhere_is_dropped_or_still_right(
    extent: SlotExtent, damage: Callable[[bytes, int], bytes]
) -> None:
    labels = {slot: fill(extent, slot, slot) for slot in range(NUM_SLOTS)}
    for slot in range(NUM_SLOTS):
        header, good = header_of(extent, slot), header_of(extent, slot).tobytes()
        for at in range(HEADER_BYTES):
            header[:] = np.frombuffer(damage(good, at), np.uint8)
            found = whole(extent)
            assert {s: one for s, one in found.items() if s != slot} == {
                s: one for s, one in labels.items() if s != slot
            }
            assert found.get(slot, labels[slot]) == labels[slot]
            if header.tobytes()[8:] != good[8:]:  # behind the generation, which readers compare
                assert slot not in found
            header[:] = np.frombuffer(good, np.uint8)
    assert whole(extent) == labels


def test_a_header_torn_between_two_fragments_names_neither(extent: SlotExtent) -> None:
    fill(extent, 1, 1)
    before = header_of(extent, 1).tobytes()
    label = fill(extent, 1, 2)  # its bytes are those that are there
    header, after = header_of(extent, 1), header_of(extent, 1).tobytes()
    for at in range(8, HEADER_BYTES):
        for torn in (after[:at] + before[at:], before[:at] + after[at:]):
            header[:] = np.frombuffer(torn, np.uint8)
            assert whole(extent) in ({}, {1: label})
            assert torn[8:] == after[8:] or not whole(extent)


def test_one_wrong_byte_of_a_payload_is_noticed_wherever_it_is(extent: SlotExtent) -> None:
    labels = {slot: fill(extent, slot, slot) for slot in range(NUM_SLOTS)}
    for at in range(labels[2].raw_length):
        extent.data[2 * MIN_SLOT_BYTES + at] ^= 16
        assert not has_right_bytes(extent, 2, labels[2])
        extent.data[2 * MIN_SLOT_BYTES + at] ^= 16
    assert whole(extent) == labels


def test_a_generation_that_no_daemon_wrote_is_not_continued(extent: SlotExtent) -> None:
    fill(extent, 0, 0)
    header_of(extent, 0)[:8] = 255
    header_of(extent, 0)[0] = 254
    extent.headers.resume()
    label = fill(extent, 1, 1)
    assert whole(extent) == {1: label}


def test_a_damaged_book_of_namespaces_ends_before_the_damage() -> None:
    """A number must never stand for another model."""
    geometry = Geometry(num_layers=2, num_kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
    identities = [NamespaceIdentity(bytes([number]) * 32, geometry) for number in range(3)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeper = Keeper(ours, {})
        theirs.sendall(b"ok")  # to `keep`
        book = NamespaceBook(keeper)
        for number, identity in enumerate(identities, 1):
            book.note(number, identity)
        content = book._mapping
        num_bytes = sum(12 + len(identity.canonical()) for identity in identities)
        good = content[:num_bytes]
        for damage in DAMAGES.values():
            for at in range(num_bytes):
                content[:num_bytes] = damage(good, at)
                found = read_again(keeper, content)
                assert found == identities[: len(found)]
                assert content[0] == 0 or len(found) >= entries_before(at, identities)
        content[:num_bytes] = good
        assert read_again(keeper, content) == identities
        book.close()


def read_again(keeper: Keeper, content: mmap.mmap) -> list[NamespaceIdentity]:
    """Return what another daemon reads out of the book."""
    keeper.inherited[NAME] = -1, content
    return list(NamespaceBook(keeper).identities.values())


def entries_before(at: int, identities: list[NamespaceIdentity]) -> int:
    """Return how many entries end before byte `at`."""
    end, count = 0, 0
    for identity in identities:
        end += 12 + len(identity.canonical())
        if end > at:
            return count
        count += 1
    return count
