"""The functions in C beside their twins in Python and xxhash, and what they refuse."""

import contextlib
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.native import native
from kvtier.tiers import payload
from kvtier.tiers.block import FragmentLabel
from kvtier.tiers.memory import headers, index
from kvtier.tiers.memory.headers import SlotHeaders
from kvtier.tiers.memory.index import IndexWriter
from kvtier.v1.shm import MAX_PROBES, SLOT_HEADER

pytestmark = pytest.mark.skipif(native is None, reason="native/ was not built, or KVTIER_NATIVE is off")
INSTRUCTIONS = ("plain", "avx2", "avx512", "neon")
FUNCTIONS = (
    "copy_and_digest_many",
    "fill_headers",
    "insert_entries",
    "find_residence",
    "set_residence",
    "read_blocks",
    "open_ring",
    "begin_reads",
    "wait_read",
    "encode_transform",
    "decode_transform",
    "order_stores",
    "use",
)
NUM_SLOTS = 24
SLOT_BYTES = 1 << 16


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Any:
    """Each way to copy that this processor has."""
    assert native is not None
    if not native.use(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.use(None)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("length", [241, 256, 1023, 1024, 1025, 1088, 4096, 65_536, 65_537, 1 << 20])
def test_copy_and_digest(instructions: str, length: int, count: int) -> None:
    source = random.Random(f"{length}/{count}").randbytes(length * count)
    into = memoryview(bytearray(length * count))
    digests = payload.copy_and_checksum_many(into, memoryview(source), length)
    assert into == source
    assert digests == [
        xxhash.xxh3_128_digest(source[first : first + length]) for first in range(0, len(source), length)
    ]


@given(
    length=st.integers(241, 5000),
    count=st.integers(1, 4),
    into_at=st.integers(0, 70),
    from_at=st.integers(0, 70),
)
def test_copy_and_digest_at_any_address(length: int, count: int, into_at: int, from_at: int) -> None:
    """Nothing before or behind the target changes, whatever the boundaries of either."""
    total = length * count
    source = np.random.default_rng(length).integers(0, 256, total + 80, np.uint8)[from_at : from_at + total]
    around = bytearray(b"\xa5") * (total + 200)
    digests = payload.copy_and_checksum_many(
        memoryview(around)[into_at : into_at + total], source.data, length
    )
    assert around == b"\xa5" * into_at + source.tobytes() + b"\xa5" * (200 - into_at)
    pieces = source.reshape(count, length)
    assert digests == [xxhash.xxh3_128_digest(piece.tobytes()) for piece in pieces]


def test_streamed_copies_are_the_same(instructions: str) -> None:
    source = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    for into_at in (0, 1):  # on a boundary, where stores are streamed, and off it
        memory = np.zeros(len(source) + 128, np.uint8)
        start = -memory.ctypes.data % 64 + into_at
        into = memory[start : start + len(source)]
        digests = payload.copy_and_checksum_many(into.data, source.data, 1 << 20)
        assert np.array_equal(into, source)
        assert digests == [xxhash.xxh3_128_digest(piece.tobytes()) for piece in source.reshape(4, -1)]


@pytest.mark.parametrize(
    ("into", "source", "length"),
    [
        (512, 511, 256),
        (511, 511, 256),
        (512, 512, 240),
        (512, 512, 0),
        (512, 512, -256),
        (512, 512, 1 << 62),
    ],
)
def test_sizes_that_do_not_fit_are_refused(into: int, source: int, length: int) -> None:
    assert native is not None
    target = bytearray(into)
    with pytest.raises(ValueError, match="bytes"):
        native.copy_and_digest_many(target, b"\1" * source, length)
    assert target == bytes(into)
    with pytest.raises(TypeError, match="read-write"):
        native.copy_and_digest_many(bytes(512), b"\1" * 512, 256)


# ----------------------------------------------------------------------------------------- headers, index


def label_of(dice: random.Random) -> FragmentLabel:
    """A label with each member at or near an end of its range as often as not."""
    return FragmentLabel(
        dice.randbytes(32),
        dice.choice([0, 1, dice.getrandbits(32), (1 << 32) - 1]),
        dice.choice([bytes(32), dice.randbytes(32), b"\xff" * 32]),
        dice.choice([b"", dice.randbytes(32)]),
        dice.choice([0, dice.getrandbits(31), (1 << 31) - 1]),
        dice.choice([0, dice.getrandbits(32)]),
        dice.choice([1, 65_536, (1 << 64) - 1]),
        dice.randbytes(16),
        is_spent=dice.random() < 0.3,
    )


def twins(monkeypatch: pytest.MonkeyPatch, module: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what `work` returns with the function in C and with its twin."""
    in_c = work()
    with monkeypatch.context() as patched:
        patched.setattr(module, "native", None)
        return in_c, work()


@pytest.mark.parametrize("seed", range(40))
def test_headers_are_those_of_the_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")

    def fill() -> Any:
        dice = random.Random(seed)
        table = bytearray(NUM_SLOTS * SLOT_HEADER.itemsize)
        written = SlotHeaders(memoryview(table))
        tags = []
        for _ in range(4):  # slots are filled again, some emptied before and some not
            slots = dice.sample(range(NUM_SLOTS), dice.randrange(NUM_SLOTS + 1))
            tags.append(written.fill_run(slots, [label_of(dice) for _ in slots], SLOT_BYTES))
            for slot in dice.sample(range(NUM_SLOTS), 5):
                written.empty_if_filled(slot)
        return bytes(table), tags, written.last_generation

    in_c, in_python = twins(monkeypatch, headers, fill)
    assert in_c == in_python


@pytest.mark.parametrize(
    "change",
    [
        {"prefix_hash": bytes(31)},
        {"prefix_hash": b""},
        {"checksum": b""},
        {"checksum": bytes(17)},
        {"parent_hash": bytes(33)},
        {"namespace_id": 1 << 32},
        {"namespace_id": -1},
        {"group": 1 << 40},
        {"position": 1 << 31},
        {"raw_length": 1 << 64},
        {"prefix_hash": "no bytes at all, 32 characters.."},
    ],
)
def test_a_label_that_is_not_valid_writes_nothing(change: dict[str, Any]) -> None:
    dice = random.Random(1)
    labels = [label_of(dice) for _ in range(3)]
    labels[1] = replace(labels[1], **change)
    table = bytearray(NUM_SLOTS * SLOT_HEADER.itemsize)
    written = SlotHeaders(memoryview(table))
    before = bytes(table)
    with pytest.raises((ValueError, OverflowError, TypeError)):
        written.fill_run([0, 1, 2], labels, SLOT_BYTES)
    assert (bytes(table), written.last_generation) == (before, 0)


@pytest.mark.parametrize("slots", [[-1], [NUM_SLOTS], [1 << 40], [1 << 70], [0, 1], [], ["0"]])
def test_slots_outside_of_the_table_are_refused(slots: list[Any]) -> None:
    table = bytearray(NUM_SLOTS * SLOT_HEADER.itemsize)
    written = SlotHeaders(memoryview(table))
    before = bytes(table)
    with pytest.raises((ValueError, OverflowError, TypeError)):
        written.fill_run(slots, [label_of(random.Random(1))], SLOT_BYTES)
    assert table == before


@pytest.mark.parametrize("seed", range(40))
def test_entries_are_those_of_the_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")

    def enter() -> Any:
        dice = random.Random(seed)
        writer = IndexWriter(6, epoch=1)
        held: list[tuple[int, int]] = []
        for _ in range(20):  # few tags at few positions, near full: wrap-around, tombstones, no room
            slots = dice.sample(range(1 << 20), dice.randrange(20))
            tags = [dice.choice([60, 62, 63, 5]) + (dice.randrange(1, 1 << 58) << 6) for _ in slots]
            writer.insert_run(tags, 7 << 32, slots)
            held += zip(tags, ((7 << 32) + slot for slot in slots), strict=True)
            for entry in dice.sample(held, len(held) // 5):
                writer.remove(*entry)
        assert writer.check_integrity() == []
        counts = (writer.num_entries, writer.num_tombstones, writer.num_dropped)
        table = bytes(writer._words)
        writer.close()
        return table, counts

    in_c, in_python = twins(monkeypatch, index, enter)
    assert in_c == in_python
    assert in_c[1][2] > 0, "some found no room"


@pytest.mark.parametrize(
    ("num_words", "tags", "slots"),
    [
        (2 * MAX_PROBES, [0], [1]),
        (2 * MAX_PROBES, [1], [1]),
        (2 * MAX_PROBES, [-5], [1]),
        (2 * MAX_PROBES, [5], []),
        (2 * MAX_PROBES, [5], [-1]),
        (2 * MAX_PROBES + 2, [5], [1]),  # no power of two
        (MAX_PROBES, [5], [1]),  # fewer than a search looks at
        (0, [5], [1]),
        (2 * MAX_PROBES, [5, 1], [1, 1]),  # the first one would be right
        (2 * MAX_PROBES, [5, 1 << 64], [1, 1]),
        (2 * MAX_PROBES, [5, 6], [1, 1 << 64]),
        (2 * MAX_PROBES, [5, 6], [1, (1 << 64) - 7]),  # 7 + slot is no place any more
        (2 * MAX_PROBES, [5, "6"], [1, 1]),
        (2 * MAX_PROBES, [5, 6], [1, None]),
    ],
)
def test_entries_that_are_not_valid_are_refused(num_words: int, tags: list[int], slots: list[int]) -> None:
    assert native is not None
    words = np.zeros(num_words, np.uint64)
    with pytest.raises((ValueError, OverflowError, TypeError)):
        native.insert_entries(words.data, tags, 7, slots)
    assert not words.any()


@pytest.mark.parametrize("first_place", [-1, 1 << 64, "0", 1.5])
def test_a_first_place_that_is_no_number_of_64_bits_is_refused(first_place: Any) -> None:
    assert native is not None
    words = np.zeros(2 * MAX_PROBES, np.uint64)
    with pytest.raises((ValueError, OverflowError, TypeError)):
        native.insert_entries(words.data, [5], first_place, [0])
    assert not words.any()


# --------------------------------------------------------------------------------------- hostile callers


@pytest.mark.parametrize(
    ("slot_bytes", "last_generation"),
    [
        (-1, 0),
        (1 << 64, 0),
        (1 << 60, 0),  # the last slot's offset would have 65 bits
        ("4096", 0),
        (4096, -2),
        (4096, 1),  # odd: no reader would ever see what is there
        (4096, 1 << 62),  # the next one is not taken back by `resume`
        (4096, (1 << 64) - 2),
        (4096, 1 << 64),
    ],
)
def test_sizes_and_generations_are_checked_before_a_header_is_written(
    slot_bytes: Any, last_generation: Any
) -> None:
    assert native is not None
    table = memoryview(bytearray(NUM_SLOTS * SLOT_HEADER.itemsize))
    with pytest.raises((ValueError, OverflowError, TypeError)):
        native.fill_headers(table, [1], [label_of(random.Random(1))], slot_bytes, last_generation)
    assert not any(table)


class ChangingLabel:
    """A label in code, which empties the lists that are being read."""

    def __init__(self, label: FragmentLabel, *lists: list[Any]) -> None:
        self.label, self.lists = label, lists

    def __getattr__(self, name: str) -> Any:
        for one in self.lists:
            one.clear()
        return getattr(self.label, name)


def test_lists_that_labels_empty_meanwhile_are_read_as_they_were() -> None:
    assert native is not None
    dice = random.Random(3)
    wanted = [label_of(dice) for _ in range(8)]
    slots: list[Any] = [*range(8)]
    labels: list[Any] = []
    labels += [ChangingLabel(label, labels, slots) for label in wanted]
    tables = [memoryview(bytearray(NUM_SLOTS * SLOT_HEADER.itemsize)) for _ in range(2)]
    tags = native.fill_headers(tables[0], slots, labels, SLOT_BYTES, 0)
    assert (labels, slots) == ([], [])
    assert tags == native.fill_headers(tables[1], [*range(8)], wanted, SLOT_BYTES, 0)
    assert tables[0] == tables[1]


@pytest.mark.parametrize("distance", [0, 1, 63, 64, 1023, 1025, 4095])
def test_a_copy_over_its_own_source_is_hashed_as_it_is_stored(instructions: str, distance: int) -> None:
    assert native is not None
    for is_forward in (True, False):
        memory = memoryview(bytearray(random.Random(1).randbytes(8192)))
        into, source = memory[:4096], memory[distance : distance + 4096]
        into, source = (into, source) if is_forward else (source, into)
        digests = native.copy_and_digest_many(into, source, 2048)
        assert digests == b"".join(xxhash.xxh3_128_digest(into[at : at + 2048]) for at in (0, 2048))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_of_any_type_are_refused_or_obeyed(function: str) -> None:
    """Nothing that a caller hands over ends the process; memory that was released is refused, too."""
    assert native is not None
    released = memoryview(bytearray(4096))
    released.release()
    strided = memoryview(bytearray(4096))[::2]
    numbers = (0, -1, 1 << 63, 1 << 200, 241, True)
    values: tuple[Any, ...] = (
        None,
        "",
        "\0",
        b"x" * 4096,
        bytearray(4096),
        released,
        strided,
        [],
        [0],
        [None],
        (),
        *numbers,
    )
    dice = random.Random(function)
    for _ in range(3000):
        arguments = dice.choices(values, k=dice.randrange(6))
        # OSError: a kernel without rings
        with contextlib.suppress(TypeError, ValueError, OverflowError, AttributeError, BufferError, OSError):
            getattr(native, function)(*arguments)
    native.use(None)


# ---------------------------------------------------------------------------------- which interpreters


def test_another_interpreter_of_this_process_takes_the_twins() -> None:
    interpreters = pytest.importorskip("_xxsubinterpreters")
    assert native is not None
    other = interpreters.create()
    try:
        # By its path: numpy, which the packages above it import, refuses other interpreters.
        code = f"""
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("_native", {native.__file__!r})
spec = importlib.util.spec_from_loader("_native", loader)
try:
    loader.exec_module(importlib.util.module_from_spec(spec))
except ImportError as refused:
    assert "main interpreter" in str(refused), refused
else:
    raise SystemError("taken")
"""
        interpreters.run_string(other, code)
    finally:
        interpreters.destroy(other)


@pytest.mark.parametrize("name", ["receive_many", "send_many"])
def test_sockets_refuse_what_makes_no_sense(name: str) -> None:
    move, place = getattr(native, name), bytearray(300)
    with contextlib.ExitStack() as stack:
        here, there = map(stack.enter_context, socket.socketpair())
        for one in (here, there):
            one.settimeout(None)
        for start in (-1, 301):
            with pytest.raises(ValueError, match="of 300"):
                move(here.fileno(), [place], start, 1.0)
        with pytest.raises(TypeError):
            move(here.fileno(), (place,), 0, 1.0)
        with pytest.raises(TypeError):
            move(here.fileno(), [place, None], 0, 1.0)
        with pytest.raises(OSError, match="descriptor"):
            move(-1, [place], 0, 1.0)
        assert move(here.fileno(), [], 0, 1.0) in ((0, b""), 0)
        if name == "receive_many":
            with pytest.raises(BufferError):
                move(here.fileno(), [bytes(300)], 0, 1.0)
            with pytest.raises(ValueError, match="at least 241"):
                move(here.fileno(), [place, bytearray(240)], 0, 1.0)
            there.sendall(b"a" * 299)
            there.close()
            assert move(here.fileno(), [place], 0, 1.0) == (299, b"")
            with pytest.raises(EOFError, match="1 bytes early"):
                move(here.fileno(), [place], 299, 1.0)
        place.append(0)  # no buffer is held any more


def test_receiving_ends_after_its_time_and_digests_are_of_whole_buffers() -> None:
    assert native is not None
    data = random.Random(1).randbytes(1000)
    with contextlib.ExitStack() as stack:
        here, there = map(stack.enter_context, socket.socketpair())
        assert native.send_many(there.fileno(), [data[:400], data[400:]], 0, 9.0) == 1000
        places = [bytearray(400), bytearray(600)]
        at, digests = native.receive_many(here.fileno(), places, 0, 0.0)
        assert (at, digests) == (400, xxhash.xxh3_128_digest(data[:400]))
        at, digests = native.receive_many(here.fileno(), places, at, 0.0)
        assert (at, digests) == (1000, xxhash.xxh3_128_digest(data[400:]))
        assert b"".join(places) == data
