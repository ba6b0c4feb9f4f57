"""What clients read of shared memory, in C beside its twins in Python, also as a hostile daemon wrote it."""

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.clients.memory import one_sided
from kvtier.clients.memory import residence as reading
from kvtier.clients.memory.extents import Extent, ExtentTable, map_memory
from kvtier.clients.memory.residence import ResidenceReader
from kvtier.native import native
from kvtier.tiers.memory import residence as writing
from kvtier.tiers.memory.residence import ResidenceWriter
from kvtier.v1.residence import MAX_PROBES, NOWHERE, keys_of
from kvtier.v1.shm import MIN_SLOT_BYTES, SLOT_HEADER, place_of, tag_of

from ..clients.memory.mapped import EXTENT_BYTES, Memory

pytestmark = pytest.mark.skipif(native is None, reason="native/ was not built, or KVTIER_NATIVE is off")
LOG2_ENTRIES, NUM_ENTRIES = 8, 256  # a page
TABLE_BYTES = 16 * MAX_PROBES


def name_of(dice: random.Random) -> bytes:
    """One of few names, which begin at few entries and often agree in their first words."""
    first = dice.choice([0, 1, 2, NUM_ENTRIES - 1, dice.getrandbits(64)]).to_bytes(8, "little")
    return first + bytes([0, dice.randrange(4)]) * 4 + bytes(16)


@pytest.mark.parametrize("seed", range(30))
def test_tables_are_those_of_the_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write the same bytes, and both find in them what was set last, near full and with tombstones."""
    print(f"seed {seed}")
    written = []
    for is_native in (True, False):
        with monkeypatch.context() as patched:
            if not is_native:
                patched.setattr(writing, "native", None)
                patched.setattr(reading, "native", None)
            dice, wanted = random.Random(seed), dict[tuple[bytes, int], int]()
            writer = ResidenceWriter(LOG2_ENTRIES, 1, 3)
            reader = ResidenceReader(_mapped(writer), 1)
            found = []
            for _ in range(60):
                names = [name_of(dice) for _ in range(dice.randrange(1, 9))]
                namespace_id, code = dice.choice([1, 2]), dice.choice([0, 1, 3, 255])
                writer.set(b"".join(names), namespace_id, code)
                wanted |= dict.fromkeys(((name, namespace_id) for name in names), code)
                asked = b"".join([*names[:3], name_of(dice)])
                found.append(reader.find(asked, namespace_id).codes)
            assert writer.check_integrity() == []
            counts = writer.num_entries, writer.num_tombstones, writer.num_dropped
            if not writer.num_dropped:
                for (name, namespace_id), code in wanted.items():
                    assert reader.find(name, namespace_id).codes == (bytes([code]) if code else b"")
            written.append((bytes(writer._words), counts, found))
            writer.close()
    assert written[0] == written[1]


def _mapped(writer: ResidenceWriter) -> Any:
    return map_memory(os.dup(writer.descriptor))


def test_a_table_without_room_says_so() -> None:
    writer = ResidenceWriter(LOG2_ENTRIES, 1, 3)
    tails = [bytes(1) + number.to_bytes(2, "little") + bytes(21) for number in range(MAX_PROBES + 5)]
    heads = [keys_of(bytes(8) + tail, 1).tag ^ 77 for tail in tails]  # so that all have the tag 77
    names = [head.to_bytes(8, "little") + tail for head, tail in zip(heads, tails, strict=True)]
    writer.set(b"".join(names), 1, 1)
    assert (writer.num_entries, writer.num_dropped, writer.is_half_full) == (MAX_PROBES, 5, False)
    writer.set(bytes([7]) * 32, 1, 1)
    assert writer.is_half_full
    writer.set(bytes([7]) * 32, 1, 0)
    writer.set(b"".join(names), 1, 0)
    assert (writer.num_entries, writer.num_tombstones, writer.check_integrity()) == (0, 0, [])
    writer.close()


def test_names_that_are_no_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and block counted in text, which differ in few of 32 bytes."""
    names = [b"%16d/%15d" % (number, block) for number in range(20) for block in range(20)]
    for used in (native, None):
        monkeypatch.setattr(writing, "native", used)
        writer = ResidenceWriter(12, 1, 3)
        writer.set(b"".join(names), 1, 1)
        assert (writer.num_entries, writer.num_dropped, writer.check_integrity()) == (400, 0, [])
        writer.close()


@pytest.mark.parametrize("seed", range(30))
def test_any_bytes_are_read_as_the_twin_reads_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a hostile daemon: no entry empty, values of other names, codes of no tier."""
    dice = random.Random(seed)
    names = [name_of(dice) for _ in range(8)]
    table = np.array(
        [dice.choice([0, 1, 5, dice.getrandbits(64)]) for _ in range(2 * NUM_ENTRIES)], np.uint64
    )
    for name in names:
        tag, check = keys_of(name, 1)
        entry = (tag + dice.randrange(MAX_PROBES)) % NUM_ENTRIES
        table[2 * entry : 2 * entry + 2] = tag, check | dice.choice([0, 1, 200])
    writer = ResidenceWriter(LOG2_ENTRIES, 1, 3)
    np.frombuffer(writer._words, np.uint64)[:] = table
    reader = ResidenceReader(_mapped(writer), 1)
    in_c = [reader.find(b"".join(names[start:]), 1).codes for start in range(8)]
    monkeypatch.setattr(reading, "native", None)
    assert in_c == [reader.find(b"".join(names[start:]), 1).codes for start in range(8)]
    writer.close()


@pytest.mark.parametrize(
    ("table", "names", "namespace_id", "code"),
    [
        (bytearray(TABLE_BYTES - 16), bytes(32), 1, 1),
        (bytearray(TABLE_BYTES + 16), bytes(32), 1, 1),
        (bytearray(), bytes(32), 1, 1),
        (bytearray(TABLE_BYTES), bytes(31), 1, 1),
        (bytearray(TABLE_BYTES), bytes(32), -1, 1),
        (bytearray(TABLE_BYTES), bytes(32), 1 << 32, 1),
        (bytearray(TABLE_BYTES), bytes(32), 1, 256),
        (bytearray(TABLE_BYTES), bytes(32), 1, -1),
        (memoryview(bytearray(TABLE_BYTES + 1))[1:], bytes(32), 1, 1),  # not on a boundary of 8 bytes
        (bytes(TABLE_BYTES), bytes(32), 1, 1),  # read-only
    ],
)
def test_tables_that_are_none_are_refused(table: Any, names: bytes, namespace_id: int, code: int) -> None:
    assert native is not None
    before = bytes(table)
    with pytest.raises((ValueError, OverflowError, TypeError)):
        native.set_residence(table, names, namespace_id, code)
    assert bytes(table) == before
    if code == 1 and not isinstance(table, bytes):
        with pytest.raises((ValueError, OverflowError)):
            native.find_residence(table, names, namespace_id)


# ------------------------------------------------------------------------------------------ one-sided reads


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


LENGTHS = (MIN_SLOT_BYTES, 4096)


def read(reader: one_sided.OneSidedReader, names: bytes) -> tuple[int, bytes]:
    """Return how many blocks were read, and their bytes. Nothing behind the room for them changes."""
    room = np.full(len(names) // 32 * sum(LENGTHS) + 64, 0xA5, np.uint8)
    num_read = reader.read_run(1, names, LENGTHS, room.ctypes.data)
    assert (room[-64:] == 0xA5).all()
    return num_read, room[: num_read * sum(LENGTHS)].tobytes()


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_read_as_the_twin_reads_them(
    seed: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of which a fragment is missing, recycled or of another namespace end what is read."""
    dice = random.Random(seed)
    names, stored = [dice.randbytes(32) for _ in range(6)], dict[bytes, bytes]()
    for name in names:
        payloads = [dice.randbytes(length) for length in LENGTHS]
        places = [memory.store(name, data, group=group) for group, data in enumerate(payloads)]
        stored[name] = b"".join(payloads)
        if dice.random() < 0.15:
            memory.drop(places[1], LENGTHS[1])
            memory.store(dice.randbytes(32), dice.randbytes(LENGTHS[1]), group=1)
            del stored[name]
    names.insert(dice.randrange(7), dice.randbytes(32))
    reader, unmapped = memory.reader(), memory.reader(mapped=False)
    in_c = read(reader, b"".join(names))
    num_whole = next(number for number, name in enumerate(names) if name not in stored)
    assert in_c == (num_whole, b"".join(stored[name] for name in names[:num_whole]))
    monkeypatch.setattr(one_sided, "native", None)
    assert read(reader, b"".join(names)) == in_c
    assert unmapped.read_run(1, names[0], LENGTHS, 1) == 0  # the other way maps extents


@pytest.mark.parametrize("field", ["generation", "namespace_id", "group", "offset", "length", "raw_length"])
@pytest.mark.parametrize(
    "value", [0, 1, 3, 4096, EXTENT_BYTES, (1 << 32) - 1, (1 << 63) + 2, (1 << 64) - 4096]
)
def test_headers_that_lie_are_no_blocks(field: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a header says, nothing outside of the extent is read, and the twin reads the same."""
    name, place = bytes(range(32)), place_of(0, 3)
    tag = tag_of(name, 1, 0)
    entries = np.zeros(2 * 64, np.uint64)
    entries[2 * (tag & 63) : 2 * (tag & 63) + 2] = tag, place
    whole = np.zeros(EXTENT_BYTES + 128 * (EXTENT_BYTES // MIN_SLOT_BYTES), np.uint8)
    headers = whole[EXTENT_BYTES:].view(SLOT_HEADER)
    headers["generation"] = 1
    headers[3] = (2, 1, 0, 3 * MIN_SLOT_BYTES, 4096, 4096, 0, 0, name, bytes(16), bytes(32))
    headers[3][field] = value % (1 << 8 * headers.dtype[field].itemsize)
    table = ExtentTable(EXTENT_BYTES)
    table.add(0, Extent(whole, EXTENT_BYTES))
    reader = one_sided.OneSidedReader.__new__(one_sided.OneSidedReader)
    reader.extents, reader._mask, reader._entries = table, 63, entries.view(np.uint8).data
    room = np.full(4096 + 64, 0xA5, np.uint8)
    in_c = reader.read_run(1, name, (4096,), room.ctypes.data)
    assert (room[4096:] == 0xA5).all()
    monkeypatch.setattr(one_sided, "native", None)
    assert reader.read_run(1, name, (4096,), room.ctypes.data) == in_c


@pytest.mark.parametrize(
    "place",
    [place_of(0, 1 << 31), place_of(0, (1 << 32) - 1), place_of((1 << 31) - 1, 0), 1 << 63, (1 << 64) - 1],
)
def test_places_that_are_none_are_no_blocks(place: int) -> None:
    assert native is not None
    name = bytes(range(32))
    tag = tag_of(name, 1, 0)
    entries = np.zeros(2 * 64, np.uint64)
    entries[2 * (tag & 63) : 2 * (tag & 63) + 2] = tag, place
    extents = {0: memoryview(bytearray(EXTENT_BYTES + 128 * 128))}
    room = np.zeros(4096, np.uint8)
    assert native.read_blocks(entries.data, extents, EXTENT_BYTES, 1, name, (4096,), room.ctypes.data) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"entries": bytes(16 * 31)},
        {"entries": bytes(0)},
        {"data_bytes": -1},
        {"data_bytes": 1 << 70},
        {"namespace_id": 1 << 32},
        {"names": bytes(33)},
        {"fragment_bytes": ()},
        {"fragment_bytes": (-1,)},
        {"fragment_bytes": ("4096",)},
        {"fragment_bytes": (1 << 41,)},
        {"address": 0},
        {"address": -1},
        {"address": 1 << 64},
        {"extents": []},
    ],
)
def test_reads_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    assert native is not None
    arguments: dict[str, Any] = {
        "entries": bytes(16 * 64),
        "extents": {},
        "data_bytes": EXTENT_BYTES,
        "namespace_id": 1,
        "names": bytes(32),
        "fragment_bytes": (4096,),
        "address": 1,
    }
    assert native.read_blocks(*arguments.values()) == 0
    with pytest.raises((ValueError, OverflowError, TypeError)):
        native.read_blocks(*(arguments | change).values())


def test_an_extent_that_is_too_short_is_refused() -> None:
    assert native is not None
    name = bytes(range(32))
    tag = tag_of(name, 1, 0)
    entries = np.zeros(2 * 64, np.uint64)
    entries[2 * (tag & 63) : 2 * (tag & 63) + 2] = tag, place_of(0, 0)
    for memory in (bytes(EXTENT_BYTES - 8), "text", None):
        with pytest.raises((ValueError, TypeError)):
            native.read_blocks(entries.data, {0: memory}, EXTENT_BYTES, 1, name, (4096,), 1)


def test_state_is_told_by_the_daemon() -> None:
    writer = ResidenceWriter(LOG2_ENTRIES, 1, 3)
    reader = ResidenceReader(_mapped(writer), 1)
    assert not reader.find(bytes(32), 1).is_certain
    writer.set_state(NOWHERE)
    assert reader.find(bytes(32), 1).is_certain
    writer.close()
