"""A memory tier of the real kind, filled by a test: what a client maps, without a daemon around it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtier.clients.memory.extents import ExtentTable, map_memory
from kvtier.clients.memory.one_sided import OneSidedReader
from kvtier.tiers.block import FragmentLabel
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool

EPOCH = 77
EXTENT_BYTES = 2 << 20
DOMAIN = 0


class Memory:
    """`num_extents` warm extents and their index, as the daemon keeps them."""

    def __init__(self, num_extents: int = 2, num_places: int = 256) -> None:
        self.room = SlotPool(num_extents, EXTENT_BYTES)
        self.indexes = Indexes(num_places, EPOCH)
        self.engine = ExtentEngine(self.room, self.indexes, huge_pages=False)

    def store(self, name: bytes, payload: bytes, *, namespace_id: int = 1, group: int = 0) -> int:
        """Write and publish one fragment; return its place."""
        place = self.room.reserve(DOMAIN, len(payload))
        assert place is not None
        label = FragmentLabel(bytes(32), namespace_id, name, b"", 0, group, len(payload))
        checksum = self.engine.write(place, label, memoryview(payload))
        self.engine.publish_run(
            [place], [FragmentLabel(bytes(32), namespace_id, name, b"", 0, group, len(payload), checksum)]
        )
        return place

    def drop(self, place: int, length: int) -> None:
        """Retract a fragment and free its slot, which the next `store` of this size takes."""
        self.engine.retract(place)
        self.room.release(place, length)

    def reader(self, *, mapped: bool = True) -> OneSidedReader:
        """Return a reader with its own mappings, as a client has them."""
        table = ExtentTable(EXTENT_BYTES)
        if mapped:
            for number in range(self.engine.num_extents):
                table.add(number, os.dup(self.engine.descriptor(number)))
        index = map_memory(os.dup(self.indexes.of(DOMAIN).descriptor))
        return OneSidedReader(index, table, EPOCH)

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()
        self.indexes.close()


@contextmanager
def memory(**settings: int) -> Iterator[Memory]:
    """A Memory that is closed afterwards, and was right until then."""
    made = Memory(**settings)
    try:
        yield made
        assert made.engine.check_integrity() == []
        assert made.indexes.check_integrity() == []
    finally:
        made.close()


def random_bytes(num_bytes: int, seed: int) -> bytes:
    """Bytes that differ between seeds."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()


def address(buffer: "np.ndarray[Any, Any]") -> int:
    """Where a target begins."""
    return int(buffer.__array_interface__["data"][0])
