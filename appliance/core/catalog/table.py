"""BlockTable: prefix hash -> row, without pauses.

One table of a million entries stops the world for tens of milliseconds whenever it is made larger, and with
entries coming and going it is made anew again and again. 256 parts by the first byte of the hash (which is
uniform) are made larger one at a time, in a fraction of a millisecond each.

A part is a dict. Where there is native code it is an array instead, of rows and half a hash of their names,
which the catalog has in its list already: 13 bytes a block for 66 at ten million, and names that are
looked for together wait for memory together. Both give the rows of a part in ascending order, so that
nothing depends on the hashes of a process.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from ....native import native

NUM_PARTS = 256
MIN_ENTRIES = 8
ADDED_AT_ONCE = 1024  # a start adds millions
_ROW, _ONE = np.uint64(0xFFFF_FFFF), np.uint64(1)
_NONE = np.zeros(0, np.uint64)


class BlockTable:
    """A mapping from 32-byte hashes to rows; `names`: the hashes by row, which may change beside this."""

    def __init__(self, names: list[bytes]) -> None:
        self._names = names
        self._dicts: list[dict[bytes, int]] = [{} for _ in range(NUM_PARTS)]

    def get(self, prefix_hash: bytes, default: int) -> int:
        """Return the row of a hash, `default` when it is not there."""
        return self._dicts[prefix_hash[0]].get(prefix_hash, default)

    def find(self, prefix_hashes: Sequence[bytes]) -> list[int]:
        """Return the row of each hash, -1 (NO_ROW) where it is not there."""
        dicts = self._dicts
        return [dicts[name[0]].get(name, -1) for name in prefix_hashes]

    def add(self, prefix_hashes: Sequence[bytes], rows: Sequence[int]) -> None:
        """Add hashes that are not there, with their rows."""
        dicts = self._dicts
        for name, row in zip(prefix_hashes, rows, strict=True):
            dicts[name[0]][name] = row

    def remove(self, prefix_hashes: Sequence[bytes], rows: Sequence[int]) -> None:
        """Remove hashes, which are still the names of these rows. Raises KeyError where one is not there."""
        dicts = self._dicts
        for name, row in zip(prefix_hashes, rows, strict=True):
            if dicts[name[0]].get(name) != row:
                raise KeyError(name)
            del dicts[name[0]][name]

    def part(self, number: int) -> list[int]:
        """Return the rows of one of NUM_PARTS parts, those of hashes with this first byte, in order."""
        return sorted(self._dicts[number].values())

    def __contains__(self, prefix_hash: bytes) -> bool:
        return self.get(prefix_hash, -1) >= 0

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def values(self) -> Iterator[int]:
        """Iterate over the rows."""
        for number in range(NUM_PARTS):
            yield from self.part(number)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over (hash, row)."""
        for row in self.values():
            yield self._names[row], row


class PackedTable(BlockTable):
    """A BlockTable of arrays, which native code goes through (native/_rows.c). Rows are below 2**31.

    What compares names reads them in the list by row: a hash is there before it is looked for, and until it
    was removed.
    """

    def __init__(self, names: list[bytes]) -> None:
        self._names = names
        self._parts = [array("Q")] * NUM_PARTS  # one for all that are empty
        self._counts = array("I", bytes(4 * NUM_PARTS))
        assert native is not None
        self._native = native

    def get(self, prefix_hash: bytes, default: int) -> int:
        """Return the row of a hash, `default` when it is not there."""
        row: int = self._native.find_rows(self._parts, self._names, (prefix_hash,))[0]
        return row if row >= 0 else default

    def find(self, prefix_hashes: Sequence[bytes]) -> list[int]:
        """Return the row of each hash, -1 (NO_ROW) where it is not there."""
        rows: list[int] = self._native.find_rows(self._parts, self._names, prefix_hashes)
        return rows

    def add(self, prefix_hashes: Sequence[bytes], rows: Sequence[int]) -> None:
        """Add hashes that are not there, with their rows."""
        if len(prefix_hashes) > ADDED_AT_ONCE and not any(self._counts):
            num_entries = 1 << (len(prefix_hashes) * 4 // (3 * NUM_PARTS)).bit_length()
            self._parts = [array("Q", bytes(8 * num_entries)) for _ in self._parts]
        for start in range(0, len(prefix_hashes), ADDED_AT_ONCE):
            names = prefix_hashes[start : start + ADDED_AT_ONCE]
            self._add(names, rows[start : start + ADDED_AT_ONCE])

    def _add(self, names: Sequence[bytes], rows: Sequence[int]) -> None:
        done, parts = 0, self._parts
        while (done := self._native.set_rows(parts, self._counts, names, rows, done)) < len(names):
            number = names[done][0]  # of a part without room
            larger = array("Q", bytes(8 * max(MIN_ENTRIES, 2 * len(parts[number]))))
            self._native.move_rows(parts[number], larger)
            parts[number] = larger

    def remove(self, prefix_hashes: Sequence[bytes], rows: Sequence[int]) -> None:
        """Remove hashes, which are still the names of these rows. Raises KeyError where one is not there."""
        self._native.remove_rows(self._parts, self._counts, prefix_hashes, rows)

    def part(self, number: int) -> list[int]:
        """Return the rows of one of NUM_PARTS parts, in order."""
        entries = np.frombuffer(self._parts[number], np.uint64) if self._counts[number] else _NONE
        rows: list[int] = (np.sort(entries[entries != 0] & _ROW) - _ONE).tolist()
        return rows

    def __len__(self) -> int:
        return sum(self._counts)


def block_table(names: list[bytes]) -> BlockTable:
    """Return an empty table, of the kind that there is."""
    return BlockTable(names) if native is None else PackedTable(names)
