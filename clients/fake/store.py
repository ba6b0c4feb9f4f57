"""What FakeAppliance stores: blocks in LRU order, each fragment in an extent of its own, in this process.

Memory looks exactly as v1/shm.py says (data, then a slot header with generation and identity), so that the
real client code reads and verifies it as it would a daemon's.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from ...v1.shm import MIN_SLOT_BYTES, SLOT_HEADER, slot_bytes_for
from ..memory.extents import U8, Extent

Key = tuple[int, bytes]  # (namespace id, prefix hash)


@dataclass(slots=True)
class FakeFragment:
    """One fragment: its extent, the extent's number, and the header that readers compare."""

    number: int
    length: int
    extent: Extent
    header: "np.ndarray[tuple[int], np.dtype[np.void]]"


@dataclass(slots=True)
class FakeBlock:
    """One stored block."""

    parent: Key | None
    fragments: list[FakeFragment]
    num_children: int = 0
    num_holders: int = 0  # leases and pins

    @property
    def num_bytes(self) -> int:
        """Payload of the block."""
        return sum(fragment.length for fragment in self.fragments)


@dataclass(slots=True)
class FakeStore:
    """Blocks up to `capacity_bytes`.

    The least recently used block without a hold and that has no child goes first: a prefix outlives what was
    built on it (invariant 5).
    """

    capacity_bytes: int
    blocks: OrderedDict[Key, FakeBlock] = field(default_factory=OrderedDict)
    extents: dict[int, Extent] = field(default_factory=dict)
    used_bytes: int = 0
    num_evicted: int = 0
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _generations: "itertools.count[int]" = field(default_factory=lambda: itertools.count(2, 2))

    def prefix(self, namespace_id: int, hashes: list[bytes]) -> list[Key]:
        """Return the keys of the longest stored prefix."""
        keys = [(namespace_id, one) for one in hashes]
        return list(itertools.takewhile(self.blocks.__contains__, keys))

    def use(self, keys: list[Key]) -> None:
        """Count blocks as used, the end of the chain first, so that it is also evicted first."""
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` are free; False when what is held leaves too little."""
        while self.used_bytes + num_bytes > self.capacity_bytes:
            victim = next(
                (k for k, b in self.blocks.items() if not b.num_holders and not b.num_children), None
            )
            if victim is None:
                return False
            self.evict(victim)
        return True

    def add(self, key: Key, parent: Key | None, payload: U8, fragment_bytes: list[int]) -> bool:
        """Store a block (its payload is copied); False when there is no room."""
        if parent is not None:
            self.blocks[parent].num_holders += 1  # room must not be made at its expense
        has_room = self.make_room(len(payload))
        if parent is not None:
            self.blocks[parent].num_holders -= 1
        if not has_room:
            return False
        block = FakeBlock(parent, [])
        offset = 0
        for group, length in enumerate(fragment_bytes):
            block.fragments.append(self._fragment(key, group, payload[offset : offset + length]))
            offset += length
        self.blocks[key] = block
        self.used_bytes += len(payload)
        if parent is not None:
            self.blocks[parent].num_children += 1
        return True

    def evict(self, key: Key) -> None:
        """Drop a block: its headers become odd, as a recycled slot's would."""
        block = self.blocks.pop(key)
        for fragment in block.fragments:
            fragment.header["generation"] += 1
            del self.extents[fragment.number]
        self.used_bytes -= block.num_bytes
        self.num_evicted += 1
        if block.parent is not None and block.parent in self.blocks:
            self.blocks[block.parent].num_children -= 1

    def check_integrity(self) -> list[str]:
        """Audit: bytes add up, children have parents, headers are even."""
        problems = []
        if self.used_bytes != sum(block.num_bytes for block in self.blocks.values()):
            problems.append(f"store: {self.used_bytes} bytes in the state differ from the blocks'")
        if self.used_bytes > self.capacity_bytes:
            problems.append(f"store: {self.used_bytes} bytes of {self.capacity_bytes}")
        for (_, name), block in self.blocks.items():
            if block.parent is not None and block.parent not in self.blocks:
                problems.append(f"block {name.hex()[:8]}: its parent is gone")
            if any(int(fragment.header["generation"][0]) & 1 for fragment in block.fragments):
                problems.append(f"block {name.hex()[:8]}: stored with an odd generation")
        return problems

    def _fragment(self, key: Key, group: int, payload: U8) -> FakeFragment:
        data_bytes = slot_bytes_for(len(payload))
        memory = np.zeros(data_bytes + data_bytes // MIN_SLOT_BYTES * SLOT_HEADER.itemsize, np.uint8)
        memory[: len(payload)] = payload
        header = memory[data_bytes : data_bytes + SLOT_HEADER.itemsize].view(SLOT_HEADER)
        header["namespace_id"], header["group"] = key[0], group
        header["length"] = header["raw_length"] = len(payload)
        header["prefix_hash"] = np.void(key[1])
        header["generation"] = next(self._generations)
        number = next(self._numbers)
        self.extents[number] = Extent(memory, data_bytes)
        return FakeFragment(number, len(payload), self.extents[number], header)
