"""One-sided gets: find fragments in the shared index, copy them, prove that they were what we wanted.

No call to the daemon, no lock. The index is a hint; the proof is the slot header: generation (even) and
identity are compared before the copy and again after it, so a slot recycled meanwhile is a miss, never
wrong bytes (proto/kvtier/v1/shm.py has the protocol and why it needs x86).

Blocks that go to one place, back to back, are read by native code in one call (`read_run`), which has its
twin in `read_block`. `find` and `read` are for pieces of blocks and for extents that are not mapped yet;
they are vectorised, because for a thousand fragments a Python loop costs more than the copies.
"""

import struct
from collections.abc import Sequence

import numpy as np

from ...native import MEMORY_IS_ORDERED, native
from ...v1.shm import (
    EMPTY_TAG,
    HASH_BYTES,
    INDEX_ENTRY,
    INDEX_HEADER,
    INDEX_HEADER_BYTES,
    INDEX_MAGIC,
    INDEX_VERSION,
    MAX_PROBES,
    index_file_bytes,
    tag_of,
)
from .buffers import copy_bytes
from .extents import CHECKED_BYTES, HEADER_BYTES, I64, U8, U64, ExtentTable, Wanted

NO_PLACE = -1
_MAX_LOG2_ENTRIES = 40  # more would take a terabyte

_ENTRY = struct.Struct("<QQ")
_CHECKED = struct.Struct("<QQQQQQ32s")
# Probe distances tried together. Most tags sit at their home; few need the last columns.
_PROBES = (np.arange(1), np.arange(1, 8), np.arange(8, MAX_PROBES))


class UnorderedMemory(Exception):
    """This processor reorders loads and stores, and there is no native code to keep them in order."""


class OneSidedReader:
    """Reads fragments of one isolation domain from `index` and `extents`.

    Raises ValueError when the index is of another version or another life of the daemon, UnorderedMemory
    where nothing may be read without a lease.
    """

    def __init__(self, index: U8, extents: ExtentTable, epoch: int) -> None:
        head = index[: INDEX_HEADER.itemsize].view(INDEX_HEADER)[0]
        if head["magic"].tobytes() != INDEX_MAGIC or int(head["version"]) != INDEX_VERSION:
            raise ValueError("the shared index has an unknown format: client and daemon differ in version")
        if int(head["epoch"]) != epoch:
            raise ValueError("the shared index belongs to another life of the daemon")
        log2_entries = int(head["log2_entries"])
        if log2_entries > _MAX_LOG2_ENTRIES or len(index) < index_file_bytes(log2_entries):
            raise ValueError(f"the shared index has {len(index)} bytes, too few for 2**{log2_entries}")
        self.extents = extents
        #: Whether what Python reads is in order. Else only `read_run` may be believed, and `find` is a hint.
        self.is_ordered = MEMORY_IS_ORDERED
        if not self.is_ordered and (native is None or not head["is_ordered"]):
            raise UnorderedMemory("daemon and client need native code on this machine")
        self._mask = (1 << log2_entries) - 1
        self._entries = index.data[INDEX_HEADER_BYTES : index_file_bytes(log2_entries)]
        table = np.frombuffer(self._entries, INDEX_ENTRY)
        self._tags: U64 = table["tag"]
        self._places: U64 = table["place"]

    def read_run(
        self, namespace_id: int, packed: bytes, fragment_bytes: tuple[int, ...], address: int
    ) -> int:
        """Copy blocks back to back to `address`; return how many from the first one on are provably there.

        Memory behind these is undefined. Extents that are not mapped count as not there.
        """
        if native is not None:
            entries, memory, data_bytes = self._entries, self.extents.memory, self.extents.extent_bytes
            return native.read_blocks(  # type: ignore[no-any-return]
                entries, memory, data_bytes, namespace_id, packed, fragment_bytes, address
            )
        block_bytes = sum(fragment_bytes)
        for number, start in enumerate(range(0, len(packed), HASH_BYTES)):
            name = packed[start : start + HASH_BYTES]
            if not self.read_block(namespace_id, name, fragment_bytes, address + number * block_bytes):
                return number
        return len(packed) // HASH_BYTES

    def read_block(
        self, namespace_id: int, prefix_hash: bytes, fragment_bytes: Sequence[int], address: int
    ) -> bool:
        """Copy one block to `address`, fragments back to back.

        False when any doubt remains; the target is then undefined.
        """
        for group, length in enumerate(fragment_bytes):
            if not self._read_fragment(namespace_id, prefix_hash, group, length, address):
                return False
            address += length
        return True

    def find(self, tags: U64) -> I64:
        """Return where the index says the fragments with these tags are, NO_PLACE where it says nothing.

        `tags` has any shape; the answer has the same one.
        """
        wanted = tags.ravel()
        places = np.full(len(wanted), NO_PLACE, np.int64)
        home = (wanted & np.uint64(self._mask)).astype(np.int64)
        unknown = np.arange(len(wanted))
        for distances in _PROBES:
            entries = (home[unknown, None] + distances) & self._mask
            window = self._tags[entries]
            hits = window == wanted[unknown, None]
            rows = np.flatnonzero(hits.any(axis=1))
            places[unknown[rows]] = self._places[entries[rows, hits[rows].argmax(axis=1)]]
            go_on = ~hits.any(axis=1) & (window != EMPTY_TAG).all(axis=1)
            unknown = unknown[go_on]
            if not len(unknown):
                break
        return places.reshape(tags.shape)

    def read(
        self, namespace_id: int, packed: bytes, places: I64, fragment_bytes: Sequence[int], targets: I64
    ) -> int:
        """Copy the longest prefix of blocks that is provably there; return how many blocks that is.

        `places` has shape (blocks, groups), `targets` (addresses) the same or one more axis: the pieces of a
        fragment. Memory at targets past the
        answer is undefined. Extents that are not mapped count as not there.
        """
        num_blocks, num_groups = places.shape
        names = np.frombuffer(packed, "<u8").reshape(-1, 4)
        wanted = Wanted(
            namespace_id,
            places.ravel(),
            np.repeat(names, num_groups, axis=0) if num_groups > 1 else names,
            np.broadcast_to(np.arange(num_groups, dtype=np.uint64), places.shape).reshape(-1),
            np.broadcast_to(np.array(fragment_bytes, np.uint64), places.shape).reshape(-1),
        )
        targets = targets.reshape(len(wanted.places), -1)
        right = self.extents.copy(wanted, targets).reshape(num_blocks, num_groups).all(axis=1)
        return num_blocks if right.all() else int(right.argmin())

    def _read_fragment(
        self, namespace_id: int, prefix_hash: bytes, group: int, length: int, address: int
    ) -> bool:
        entries, mask, mapped = self._entries, self._mask, self.extents.mapped
        tag = tag_of(prefix_hash, namespace_id, group)
        for entry in range(tag, tag + MAX_PROBES):
            found, place = _ENTRY.unpack_from(entries, (entry & mask) << 4)
            if found == EMPTY_TAG:
                return False
            if found != tag:
                continue
            extent = mapped.get(place >> 32)
            if extent is None:
                return False  # the batch path maps it
            start = (place & 0xFFFF_FFFF) * HEADER_BYTES
            before = bytes(extent.header_bytes[start : start + CHECKED_BYTES])
            if len(before) < CHECKED_BYTES:
                return False
            generation, identity, offset, stored_bytes, raw_bytes, _, name = _CHECKED.unpack(before)
            if (
                generation & 1
                or name != prefix_hash
                or identity != namespace_id | group << 32
                or stored_bytes != length
                or raw_bytes != length
                or offset + length > extent.data_bytes
            ):
                continue  # recycled, or another fragment with the same tag
            copy_bytes(address, extent.address + offset, length)
            return bool(extent.header_bytes[start : start + CHECKED_BYTES] == before)
        return False
