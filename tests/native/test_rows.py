"""The catalog's table of names: the one in C beside the one of dicts, and what it refuses."""

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import native as native_package
from kvtier.appliance.core.catalog.table import NUM_PARTS, BlockTable, PackedTable

native: Any = native_package.native
pytestmark = pytest.mark.skipif(native is None, reason="native/ was not built, or KVTIER_NATIVE is off")
#: Few first bytes, so that parts grow; names differ in their last bytes only.
NAMES = [bytes([number % 3 * 127]) + bytes(29) + number.to_bytes(2, "big") for number in range(300)]


class Twins:
    """Both tables over one list of names by row."""

    def __init__(self) -> None:
        self.names = [b""] * (2 * len(NAMES))
        self.tables = [BlockTable(self.names), PackedTable(self.names)]
        self.row_of: dict[bytes, int] = {}
        self.free = list(range(len(self.names)))

    def add(self, names: list[bytes], step: int) -> None:
        """Add what is not there, in rows that are taken from the middle of the free ones."""
        names = list(dict.fromkeys(name for name in names if name not in self.row_of))
        rows = [self.free.pop(step * number % len(self.free)) for number in range(len(names))]
        for name, row in zip(names, rows, strict=True):
            self.names[row] = name
            self.row_of[name] = row
        for table in self.tables:
            table.add(names, rows)

    def remove(self, names: list[bytes]) -> None:
        """Remove what is there."""
        names = list(dict.fromkeys(name for name in names if name in self.row_of))
        rows = [self.row_of.pop(name) for name in names]
        for table in self.tables:
            table.remove(names, rows)
        for row in rows:
            self.names[row] = b""
        self.free += rows

    def compare(self) -> None:
        """Both say the same, whatever is asked."""
        twin, packed = self.tables
        assert packed.find(NAMES) == twin.find(NAMES) == [self.row_of.get(name, -1) for name in NAMES]
        assert [packed.get(name, 7) for name in NAMES[:9]] == [twin.get(name, 7) for name in NAMES[:9]]
        assert list(packed.items()) == list(twin.items())
        assert sorted(packed.values()) == sorted(self.row_of.values())
        assert len(packed) == len(twin) == len(self.row_of)
        assert bool(packed) is bool(twin) is bool(self.row_of)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 299), st.integers(1, 300), st.integers(1, 50)), max_size=12
    )
)
def test_twins(steps: list[tuple[bool, int, int, int]]) -> None:
    """Names that come and go, many at once, whatever hashes they have in this process."""
    twins = Twins()
    for is_added, first, count, step in steps:
        names = (NAMES * 2)[first : first + count : step]
        twins.add(names, step) if is_added else twins.remove(names)
        twins.compare()


def test_growth_keeps_what_is_there() -> None:
    names = [bytes([5]) + number.to_bytes(31, "big") for number in range(20_000)]
    table = PackedTable(names)
    table.add(names, range(len(names)))
    assert table.find(names) == list(range(len(names)))
    assert table.part(5) == list(range(len(names)))
    table.remove(names[::2], range(0, len(names), 2))
    assert table.find(names) == [row if row % 2 else -1 for row in range(len(names))]


def test_names_in_the_list_that_are_none() -> None:
    """What the list of names holds does not matter as long as it is no name that is looked for."""
    names: list[bytes] = [b"\1" * 32, b"\2" * 32]
    table = PackedTable(names)
    table.add(names, (0, 1))
    names[0] = b"short"
    assert table.find([b"\1" * 32, b"\2" * 32]) == [-1, 1]
    del names[1:]
    assert table.find([b"\2" * 32, b"\1" * 31, b""]) == [-1] * 3


PARTS = [array("Q", bytes(64))] * NUM_PARTS
COUNTS = array("I", bytes(4 * NUM_PARTS))
NAME = b"\7" * 32
REFUSED: list[Callable[[], object]] = [
    lambda: native.find_rows([], [NAME], [NAME]),
    lambda: native.set_rows(PARTS, COUNTS, [NAME[:31]], [0], 0),
    lambda: native.remove_rows(PARTS, COUNTS, [b""], [0]),
    lambda: native.find_rows(PARTS, [NAME], [7]),
    lambda: native.find_rows(PARTS, [NAME], 7),
    lambda: native.find_rows(PARTS, (NAME,), [NAME]),
    lambda: native.find_rows([array("Q", bytes(24))] * NUM_PARTS, [NAME], [NAME]),
    lambda: native.find_rows([memoryview(bytes(72))[1:65]] * NUM_PARTS, [NAME], [NAME]),
    lambda: native.find_rows([b"1234567"] * NUM_PARTS, [NAME], [NAME]),
    lambda: native.find_rows([None] * NUM_PARTS, [NAME], [NAME]),
    lambda: native.set_rows(PARTS, COUNTS[1:], [NAME], [0], 0),
    lambda: native.set_rows(PARTS, COUNTS, [NAME], [], 0),
    lambda: native.set_rows(PARTS, COUNTS, [NAME], [-1], 0),
    lambda: native.set_rows(PARTS, COUNTS, [NAME], [1 << 31], 0),
    lambda: native.set_rows(PARTS, COUNTS, [NAME], [0], -1),
    lambda: native.set_rows([bytes(64)] * NUM_PARTS, COUNTS, [NAME], [0], 0),
    lambda: native.remove_rows(PARTS, COUNTS, [NAME], [0]),
    lambda: native.remove_rows([array("Q")] * NUM_PARTS, COUNTS, [NAME], [0]),
    lambda: native.move_rows(array("Q", bytes(64)), array("Q", bytes(64))),
    lambda: native.move_rows(array("Q", bytes(64)), array("Q", bytes(72))),
    lambda: native.move_rows(array("Q", [1]), array("Q", [1, 1])),
    lambda: native.move_rows(array("Q", bytes(64)), bytes(128)),
]


@pytest.mark.parametrize("call", REFUSED, ids=map(str, range(len(REFUSED))))
def test_refused(call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError, KeyError, IndexError, BufferError)):
        call()
    assert not any(PARTS[0])
    assert not any(COUNTS)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8), st.integers(0, 2**32 - 1))
def test_parts_that_hold_anything(entries: list[int], count: int) -> None:
    """Whatever is in a part, nothing reads or writes beyond it, and every call ends."""
    parts, counts = [array("Q", entries)] * NUM_PARTS, array("I", [count] * NUM_PARTS)
    names = [bytes([part]) * 32 for part in range(8)]
    assert len(native.find_rows(parts, names, names)) == 8
    assert 0 <= native.set_rows(parts, counts, names, range(8), 0) <= 8
    with contextlib.suppress(KeyError):
        while True:
            native.remove_rows(parts, counts, names[:1], [0])


def test_a_full_part_is_no_endless_search() -> None:
    """Entries that are all alike, none of them the name."""
    entry = (hash(NAME) >> 16 & 0xFFFF_FFFF) << 32 | 1
    assert native.find_rows([array("Q", [entry] * 8)] * NUM_PARTS, [b"\0" * 32], [NAME]) == [-1]
