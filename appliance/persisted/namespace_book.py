"""The namespaces that slot headers name by number, in memory that outlives the daemon.

A list that grows: each entry has its length, a check and the id of its namespace before it, and what a
killed daemon left half written ends the list. A full list is written anew, with the present namespaces.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping

from ...tiers.block import NamespaceIdentity
from ...tiers.cold.manifest import parse_identity
from ...tiers.memory import memfd
from ...tiers.memory.keeper import Keeper
from ...v1.shm import HUGE_PAGE_BYTES

NAME = "kvtier-namespaces-2"
_NUM_BYTES = 2 * HUGE_PAGE_BYTES  # of addresses; pages are taken as they are written
_HEAD = struct.Struct("<III")  # length, crc32 of what follows, id


class NamespaceBook:
    """What a keeper holds of namespaces, by id. `inherited` are those of before."""

    def __init__(self, keeper: Keeper, num_bytes: int = _NUM_BYTES) -> None:
        inherited = keeper.take(NAME)
        if inherited is None:
            self._descriptor = memfd.create(NAME, num_bytes)
            self._mapping = mmap.mmap(self._descriptor, num_bytes)
            keeper.keep(NAME, self._descriptor)
            memfd.seal(self._descriptor, memfd.SEALS_FIXED_SIZE)
        else:
            self._descriptor, self._mapping = inherited
        self._end = 0
        self.identities: dict[int, NamespaceIdentity] = {}
        while self._read():
            pass
        self.inherited = dict(self.identities)
        #: Returns the namespaces that there are, for a list that is full.
        self.present: Callable[[], Mapping[int, NamespaceIdentity]] = lambda: self.identities

    def note(self, number: int, identity: NamespaceIdentity) -> None:
        """Enter a namespace, unless it is there."""
        if self.identities.get(number) == identity or self._write(number, identity):
            return
        present = {**self.present(), number: identity}
        self._end, self.identities = 0, {}
        for one in present.items():
            self._write(*one)  # slots of namespaces that find no space do not outlive the daemon

    def close(self) -> None:
        """Unmap. What the keeper holds stays."""
        self._mapping.close()
        os.close(self._descriptor)

    def _write(self, number: int, identity: NamespaceIdentity) -> bool:
        """Append an entry; returns False when there is no space for it."""
        entry = identity.canonical()
        start, end = self._end, self._end + _HEAD.size + len(entry)
        if end + _HEAD.size > len(self._mapping):
            return False
        self._mapping[start : end + _HEAD.size] = bytes(_HEAD.size) + entry + bytes(_HEAD.size)
        _HEAD.pack_into(self._mapping, start, len(entry), zlib.crc32(entry, number), number)  # it counts
        self._end = end
        self.identities[number] = identity
        return True

    def _read(self) -> bool:
        """Take the next entry; returns False at the end of the list."""
        if self._end + _HEAD.size > len(self._mapping):
            return False
        length, check, number = _HEAD.unpack_from(self._mapping, self._end)
        start = self._end + _HEAD.size
        entry = self._mapping[start : start + length]
        if not length or len(entry) < length or zlib.crc32(entry, number) != check:
            return False
        self._end = start + length
        try:
            self.identities[number] = parse_identity(entry)
        except ValueError:
            return False
        return True
