"""The namespaces that slot headers name by number, in memory that outlives the daemon.

A list that only grows: namespace number n is entry n. Each entry has its length and a check before it, and
what a killed daemon left half written ends the list.
"""

import mmap
import os
import struct
import zlib

from ...tiers.block import NamespaceIdentity
from ...tiers.cold.manifest import parse_identity
from ...tiers.memory import memfd
from ...tiers.memory.keeper import Keeper
from ...v1.shm import HUGE_PAGE_BYTES

NAME = "kvtier-namespaces-1"
_NUM_BYTES = 2 * HUGE_PAGE_BYTES  # of addresses; pages are taken as they are written
_HEAD = struct.Struct("<II")  # length, crc32


class NamespaceBook:
    """What a keeper holds of namespaces, by number from 1. The first `num_inherited` are those of before."""

    def __init__(self, keeper: Keeper) -> None:
        inherited = keeper.take(NAME)
        if inherited is None:
            self._descriptor = memfd.create(NAME, _NUM_BYTES)
            self._mapping = mmap.mmap(self._descriptor, _NUM_BYTES)
            keeper.keep(NAME, self._descriptor)
            memfd.seal(self._descriptor, memfd.SEALS_FIXED_SIZE)
        else:
            self._descriptor, self._mapping = inherited
        self._end = 0
        self.identities: list[NamespaceIdentity] = []
        while (identity := self._read()) is not None:
            self.identities.append(identity)
        self.num_inherited = len(self.identities)

    def note(self, number: int, identity: NamespaceIdentity) -> None:
        """Enter namespace `number`, unless it is there. Numbers come in order."""
        if number <= len(self.identities):
            return
        assert number == len(self.identities) + 1, "namespaces are numbered one after the other"
        entry = identity.canonical()
        end = self._end + _HEAD.size + len(entry)
        if end > _NUM_BYTES:
            return  # slots of namespaces that are not in the book do not outlive the daemon
        self._mapping[self._end + _HEAD.size : end] = entry
        _HEAD.pack_into(self._mapping, self._end, len(entry), zlib.crc32(entry))
        self._end = end
        self.identities.append(identity)

    def close(self) -> None:
        """Unmap. What the keeper holds stays."""
        self._mapping.close()
        os.close(self._descriptor)

    def _read(self) -> NamespaceIdentity | None:
        length, check = _HEAD.unpack_from(self._mapping, self._end)
        start = self._end + _HEAD.size
        entry = self._mapping[start : start + length]
        if not length or len(entry) < length or zlib.crc32(entry) != check:
            return None
        self._end = start + length
        try:
            return parse_identity(entry)
        except ValueError:
            return None
