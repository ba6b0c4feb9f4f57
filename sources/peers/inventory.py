"""HostInventory: which blocks another host says it holds, by the first 8 bytes of their names.

Sorted arrays, 8 bytes a block, 16 for one on disk, and a dict over them for the changes since they were
sorted: a set of Python integers takes ten times the memory. Names are hashes: that two blocks share 8 bytes
is as rare as 1 in 10^12 at a million blocks, and then a fetch brings nothing, as with any other wrong hint.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NAME_BYTES: Final = 8
#: Of one host, in all namespaces: 32 MB, and as much again if all are on disk. What it says beyond them is
#: not remembered.
MAX_NAMES: Final = 4 << 20
#: Changes of one namespace from which on they are merged into its array: at least so many, and a share of it.
MERGE_NAMES: Final = 8192
MERGE_SHARE: Final = 16
_DTYPE: Final = np.dtype("<u8")


def short_names(names: Iterable[bytes]) -> bytes:
    """Return the first 8 bytes of each name, packed."""
    return b"".join(name[:NAME_BYTES] for name in names)


def unpack_names(packed: bytes) -> "NDArray[Any]":
    """Return packed short names as (n,) uint64; bytes behind the last whole one are left out."""
    return np.frombuffer(packed, _DTYPE, len(packed) // NAME_BYTES)


class NameSet:
    """Short names of one namespace."""

    def __init__(self) -> None:
        self._sorted: NDArray[Any] = np.empty(0, _DTYPE)
        self._changes: dict[int, bool] = {}  # name -> whether it is there now

    def __len__(self) -> int:
        """Return the number of names, with those of changes: an upper bound."""
        return len(self._sorted) + len(self._changes)

    @property
    def is_to_be_merged(self) -> bool:
        """Return whether there are so many changes that they cost more than merging them."""
        return len(self._changes) >= max(MERGE_NAMES, len(self._sorted) // MERGE_SHARE)

    def change(self, packed: bytes, is_there: bool) -> None:
        """Add or remove packed names."""
        self._changes.update(dict.fromkeys(unpack_names(packed).tolist(), is_there))

    def merged(self) -> "tuple[NDArray[Any], dict[int, bool]]":
        """Return the sorted names with all changes, and these changes.

        Changes nothing: may run in a thread while the event loop asks `has`."""
        changes = dict(self._changes)
        names = np.fromiter(changes, _DTYPE, len(changes))
        is_there = np.fromiter(changes.values(), np.bool_, len(changes))
        kept = self._sorted
        if len(kept) and len(names):
            touched = np.sort(names)
            where = np.minimum(np.searchsorted(touched, kept), len(touched) - 1)
            kept = kept[touched[where] != kept]
        return np.sort(np.concatenate([kept, names[is_there]])), changes

    def adopt(self, names: "NDArray[Any]", changes: dict[int, bool]) -> None:
        """Take over what `merged` returned; changes that came since then stay changes."""
        self._sorted = names
        self._changes = {
            name: is_there for name, is_there in self._changes.items() if changes.get(name) is not is_there
        }

    def has(self, names: "NDArray[Any]") -> list[bool]:
        """Return for each name of (n,) uint64 whether it is there."""
        if len(self._sorted):
            where = np.minimum(np.searchsorted(self._sorted, names), len(self._sorted) - 1)
            found: list[bool] = (self._sorted[where] == names).tolist()
        else:
            found = [False] * len(names)
        if self._changes:
            changed = self._changes.get
            found = [changed(name, was) for name, was in zip(names.tolist(), found, strict=True)]
        return found


class HostInventory:
    """The names that one host told of, by namespace digest. Bounded by `max_names`."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._of: dict[bytes, NameSet] = {}
        self._on_disk: dict[bytes, NameSet] = {}  # those that are not wholly in memory there
        self.num_refused = 0  # names beyond the bound

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def change(
        self, digest: bytes, added: bytes, removed: bytes, added_on_disk: bytes = b""
    ) -> list[NameSet]:
        """Take in what the host says of one namespace. Returns the sets of names that are to be merged.

        `added_on_disk`: those of `added` that are not wholly in memory; others in it are left out."""
        names = self._of.setdefault(digest, NameSet())
        room = max(0, self._max_names - len(self))
        self.num_refused += max(0, len(added) // NAME_BYTES - room)
        added = added[: room * NAME_BYTES]
        names.change(removed, False)
        names.change(added, True)
        on_disk = self._on_disk.setdefault(digest, NameSet())
        taken = unpack_names(added)
        is_on_disk = np.isin(taken, unpack_names(added_on_disk))
        if len(on_disk):  # names that it has no more are told of: most were never there
            gone = np.concatenate([taken[~is_on_disk], unpack_names(removed)])
            on_disk.change(gone[on_disk.has(gone)].tobytes(), False)
        on_disk.change(taken[is_on_disk].tobytes(), True)
        return [one for one in (names, on_disk) if one.is_to_be_merged]

    def has(self, digest: bytes, packed: bytes) -> list[bool]:
        """Return for each packed short name whether the host says it holds the block."""
        known = self._of.get(digest)
        names = unpack_names(packed)
        return known.has(names) if known is not None else [False] * len(names)

    def among(self, digest: bytes, names: bytes) -> bytes:
        """Return those of packed names that the host says it holds, packed."""
        known, asked = self._of.get(digest), unpack_names(names)
        return asked[known.has(asked)].tobytes() if known is not None and len(asked) else b""

    def beyond(self, other: "HostInventory") -> Iterator[tuple[bytes, bytes]]:
        """Yield, for each namespace, the packed names that `other` does not have."""
        for digest, names in self._of.items():
            mine, _ = names.merged()
            theirs = other._of.get(digest)
            if theirs is not None and len(mine):
                mine = mine[~np.array(theirs.has(mine))]
            yield digest, mine.tobytes()

    def prefix(self, digest: bytes, names: Sequence[bytes]) -> int:
        """Return how many names, from the first one on, the host says it holds."""
        known = self._of.get(digest)
        if known is None or not names:
            return 0
        if not known.has(unpack_names(names[0][:NAME_BYTES]))[0]:
            return 0
        found = known.has(unpack_names(short_names(names)))
        return found.index(False) if False in found else len(found)

    def num_on_disk(self, digest: bytes, names: Sequence[bytes]) -> int:
        """Return how many of these names, which it holds, it says are not wholly in memory."""
        known = self._on_disk.get(digest)
        return sum(known.has(unpack_names(short_names(names)))) if known is not None and names else 0
