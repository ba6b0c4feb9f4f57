"""A reference reader of shared memory: v1/shm.py turned into code as directly as possible.

Written independently of clients/, so that the two can disagree. `between` runs between the copy and the
second look at the header: it is where a test recycles the slot.
"""

import mmap
from collections.abc import Callable, Mapping

import numpy as np

from kvtier.v1 import shm


class Reader:
    """Maps an index and extents read-only and gets fragments without asking anybody."""

    def __init__(self, index: int, extents: Mapping[int, int], extent_bytes: int) -> None:
        header = np.frombuffer(_map(index), shm.INDEX_HEADER, 1)[0]
        assert header["magic"].tobytes() == shm.INDEX_MAGIC
        assert header["version"] == shm.INDEX_VERSION
        self.epoch = int(header["epoch"])
        self._mask = (1 << int(header["log2_entries"])) - 1
        self._table = np.frombuffer(_map(index), shm.INDEX_ENTRY, offset=shm.INDEX_HEADER_BYTES)
        assert len(self._table) == self._mask + 1
        self._data: dict[int, memoryview] = {}
        self._headers = {}
        for number, descriptor in extents.items():
            mapping = _map(descriptor)
            self._data[number] = memoryview(mapping)
            self._headers[number] = np.frombuffer(
                mapping, shm.SLOT_HEADER, extent_bytes // shm.MIN_SLOT_BYTES, offset=extent_bytes
            )
        self.num_torn = 0

    def places(self, tag: int) -> list[int]:
        """Return the places the index names for `tag`."""
        found = []
        for step in range(shm.MAX_PROBES):
            there, place = self._table[(tag + step) & self._mask].tolist()
            if there == shm.EMPTY_TAG:
                break
            if there == tag:
                found.append(place)
        return found

    def get(
        self,
        prefix_hash: bytes,
        *,
        namespace_id: int = 1,
        group: int = 0,
        between: Callable[[], None] = lambda: None,
    ) -> tuple[bytes, bytes] | None:
        """Return (payload, checksum) of a fragment, or None: a miss."""
        for place in self.places(shm.tag_of(prefix_hash, namespace_id, group)):
            number = shm.extent_of(place)
            headers = self._headers[number]
            before = headers[shm.slot_of(place)].copy()
            named = (int(before["namespace_id"]), int(before["group"]), before["prefix_hash"].tobytes())
            if before["generation"] % 2 or named != (namespace_id, group, prefix_hash):
                continue
            start = int(before["offset"])
            copied = bytes(self._data[number][start : start + int(before["length"])])
            between()
            if headers[shm.slot_of(place)].tobytes() != before.tobytes():
                self.num_torn += 1
                continue
            return copied, before["checksum"].tobytes()
        return None


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
