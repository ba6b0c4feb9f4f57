"""One-sided reads against real extents: right bytes, or a miss, whatever the writer does meanwhile."""

import hashlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.clients.memory import extents, one_sided
from kvtier.clients.memory.buffers import copy_bytes
from kvtier.clients.memory.extents import map_memory
from kvtier.clients.memory.one_sided import NO_PLACE
from kvtier.v1.shm import SLOT_HEADER, tags_of

from .mapped import DOMAIN, EPOCH, EXTENT_BYTES, Memory, address, memory, random_bytes

LENGTHS = (16 << 10, 20 << 10, 7 << 10)  # of the fragments of one block
BLOCK = sum(LENGTHS)


def name(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def store_block(filled: Memory, number: int, *, namespace_id: int = 1) -> tuple[bytes, list[int]]:
    payload = random_bytes(BLOCK, number)
    places, start = [], 0
    for group, length in enumerate(LENGTHS):
        part = payload[start : start + length]
        places.append(filled.store(name(number), part, namespace_id=namespace_id, group=group))
        start += length
    return payload, places


@pytest.fixture
def filled() -> Iterator[Memory]:
    with memory(num_extents=4) as made:
        yield made


def read_all(reader: Any, numbers: list[int], namespace_id: int = 1) -> tuple[int, bytes]:
    """The batch way."""
    target = np.zeros((len(numbers), BLOCK), np.uint8)
    packed = b"".join(name(number) for number in numbers)
    offsets = np.cumsum([0, *LENGTHS[:-1]])
    targets = address(target) + np.arange(len(numbers))[:, None] * BLOCK + offsets[None, :]
    places = reader.find(tags_of(packed, namespace_id, len(LENGTHS)))
    num_blocks = reader.read(namespace_id, packed, places, LENGTHS, targets.astype(np.int64))
    return num_blocks, target[:num_blocks].tobytes()


def read_one(reader: Any, number: int, namespace_id: int = 1) -> bytes | None:
    """The quick way."""
    target = np.zeros(BLOCK, np.uint8)
    found = reader.read_block(namespace_id, name(number), LENGTHS, address(target))
    return target.tobytes() if found else None


def test_header_columns_follow_the_wire() -> None:
    fields: Any = SLOT_HEADER.fields
    for column, field in (
        (extents.GENERATION, "generation"),
        (extents.IDENTITY, "namespace_id"),
        (extents.OFFSET, "offset"),
        (extents.LENGTH, "length"),
        (extents.RAW_LENGTH, "raw_length"),
        (extents.CHECK, "check"),
        (extents.HASH, "prefix_hash"),
    ):
        assert fields[field][1] == column * 8
    assert fields["group"][1] == extents.IDENTITY * 8 + 4
    assert fields["checksum"][1] == extents.CHECKED_BYTES


def test_both_ways_find_what_is_stored(filled: Memory) -> None:
    payloads = [store_block(filled, number)[0] for number in range(20)]
    reader = filled.reader()
    assert read_all(reader, list(range(20))) == (20, b"".join(payloads))
    for number, payload in enumerate(payloads):
        assert read_one(reader, number) == payload
    assert read_one(reader, 20) is None
    assert read_all(reader, [0, 20, 1]) == (1, payloads[0])


def test_other_namespace_is_a_miss(filled: Memory) -> None:
    store_block(filled, 1, namespace_id=1)
    reader = filled.reader()
    assert read_one(reader, 1, namespace_id=2) is None
    assert read_all(reader, [1], namespace_id=2)[0] == 0


def test_missing_fragment_ends_the_prefix(filled: Memory) -> None:
    first, _ = store_block(filled, 1)
    _, places = store_block(filled, 2)
    filled.drop(places[1], LENGTHS[1])
    reader = filled.reader()
    assert read_all(reader, [1, 2]) == (1, first)
    assert read_one(reader, 2) is None


def test_unmapped_extent_is_a_miss(filled: Memory) -> None:
    store_block(filled, 1)
    reader = filled.reader(mapped=False)
    assert read_one(reader, 1) is None
    assert read_all(reader, [1])[0] == 0


@pytest.mark.parametrize("way", ["one", "batch"])
def test_slot_recycled_during_the_copy_is_a_miss(
    filled: Memory, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer evicts the block and stores another one in the same slots while we copy."""
    _, places = store_block(filled, 1)
    reader = filled.reader()
    copy: Any = copy_bytes
    copied: list[Any] = []

    def recycle_then_copy(*arguments: int) -> None:
        if not copied:
            for place, length in zip(places, LENGTHS, strict=True):
                filled.drop(place, length)
            store_block(filled, 2)
        copied.append(arguments)
        copy(*arguments)

    for module in (one_sided, extents):
        monkeypatch.setattr(module, "copy_bytes", recycle_then_copy)
    if way == "one":
        assert read_one(reader, 1) is None
    else:
        assert read_all(reader, [1])[0] == 0
    assert copied, "the recycling must have happened in the middle"


@pytest.mark.parametrize("way", ["one", "batch"])
def test_same_block_stored_anew_during_the_copy_is_a_miss(
    filled: Memory, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Identity is as before, only the generation tells."""
    _, places = store_block(filled, 1)
    reader = filled.reader()
    copy: Any = copy_bytes
    copied: list[Any] = []

    def recycle_then_copy(*arguments: int) -> None:
        if not copied:
            for place, length in reversed(list(zip(places, LENGTHS, strict=True))):
                filled.drop(place, length)
            assert store_block(filled, 1)[1] == places
        copied.append(arguments)
        copy(*arguments)

    for module in (one_sided, extents):
        monkeypatch.setattr(module, "copy_bytes", recycle_then_copy)
    assert (read_one(reader, 1) is None) if way == "one" else (read_all(reader, [1])[0] == 0)
    assert copied


@pytest.mark.parametrize("field", ["generation", "namespace_id", "group", "length", "raw_length"])
def test_every_field_of_the_header_counts(filled: Memory, field: str) -> None:
    """The index still points there, the header differs in one field."""
    payload, places = store_block(filled, 1)
    reader = filled.reader()
    assert read_one(reader, 1) == payload
    slot = places[0] & 0xFFFF_FFFF
    headers = filled.engine._extents[places[0] >> 32].headers.table()
    headers[field][slot] += 1
    try:
        assert read_one(reader, 1) is None
        assert read_all(reader, [1])[0] == 0
    finally:
        headers[field][slot] -= 1
    assert read_one(reader, 1) == payload


@pytest.mark.parametrize("offset", [EXTENT_BYTES, (1 << 64) - 4096])
def test_an_offset_outside_of_the_extent_is_a_miss(filled: Memory, offset: int) -> None:
    """Also one that, with the length added, is inside again in 64 bits: bytes before the extent were read."""
    payload, places = store_block(filled, 1)
    reader = filled.reader()
    slot = places[0] & 0xFFFF_FFFF
    headers = filled.engine._extents[places[0] >> 32].headers.table()
    before = int(headers["offset"][slot])
    headers["offset"][slot] = offset
    try:
        assert read_one(reader, 1) is None
        assert read_all(reader, [1])[0] == 0
    finally:
        headers["offset"][slot] = before
    assert read_one(reader, 1) == payload


def test_prefix_hash_is_compared_in_full(filled: Memory) -> None:
    """Another hash with the same first 8 bytes has the same tag; its bytes are not ours."""
    twin = name(1)[:8] + bytes(24)
    filled.store(twin, random_bytes(LENGTHS[0], 5))
    reader = filled.reader()
    target = np.zeros(LENGTHS[0], np.uint8)
    assert not reader.read_block(1, name(1), LENGTHS[:1], address(target))
    places = reader.find(tags_of(name(1), 1, 1))
    assert places[0, 0] != NO_PLACE, "the index cannot tell them apart"
    assert reader.read(1, name(1), places, LENGTHS[:1], np.array([[address(target)]])) == 0
    payload = random_bytes(LENGTHS[0], 6)
    filled.store(name(1), payload)
    assert reader.read_block(1, name(1), LENGTHS[:1], address(target)), "it goes on past its twin"
    assert target.tobytes() == payload


def test_long_probes_find_too(filled: Memory) -> None:
    """Twenty-four tags with the same home: the last ones stand far from it."""
    names = [bytes(4) + number.to_bytes(4, "big") + bytes(24) for number in range(1, 25)]
    places = [filled.store(one, random_bytes(16 << 10, 1)) for one in names]
    reader = filled.reader()
    assert reader.find(tags_of(b"".join(names), 1, 1)).ravel().tolist() == places
    target = np.zeros(16 << 10, np.uint8)
    assert all(reader.read_block(1, one, (16 << 10,), address(target)) for one in names)


def test_index_of_another_life_is_refused(filled: Memory) -> None:
    reader = filled.reader()
    index = map_memory(os.dup(filled.indexes.of(DOMAIN).descriptor))
    with pytest.raises(ValueError, match="another life"):
        one_sided.OneSidedReader(index, reader.extents, EPOCH + 1)
    damaged = index.copy()
    damaged[0] ^= 1
    with pytest.raises(ValueError, match="unknown format"):
        one_sided.OneSidedReader(damaged, reader.extents, EPOCH)


def test_random_histories_agree_with_a_dictionary() -> None:
    """A small, crowded index: many collisions, tombstones, wrap-around."""
    for seed in range(5):
        print(f"seed {seed}")
        chance = random.Random(seed)
        with memory(num_extents=1, num_places=128) as filled:
            reader = filled.reader()
            stored: dict[int, tuple[bytes, int]] = {}
            for step in range(400):
                number = chance.randrange(200)
                if number in stored:
                    filled.drop(stored.pop(number)[1], 16 << 10)
                elif len(stored) < 100:
                    payload = number.to_bytes(4, "big") * (4 << 10)
                    stored[number] = payload, filled.store(name(number), payload)
                if step % 20:
                    continue
                packed = b"".join(name(number) for number in range(200))
                places = reader.find(tags_of(packed, 1, 1)).ravel()
                assert {n for n in range(200) if places[n] != NO_PLACE} == set(stored)
                assert all(places[n] == place for n, (_, place) in stored.items())
                for one, (payload, _) in stored.items():
                    target = np.zeros(16 << 10, np.uint8)
                    assert reader.read_block(1, name(one), (16 << 10,), address(target))
                    assert target.tobytes() == payload
