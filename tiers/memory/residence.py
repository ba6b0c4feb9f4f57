"""The residence table of one isolation domain, as the daemon writes it (layout: v1/residence.py).

It says of each block in which tier it is, so that a lookup needs no call, whatever tier that is and whether
or not its extents are mapped. The shared index was not enough: it knows memory only, one entry a fragment.

Its size is fixed, because clients map it. One that is half full is replaced by its owner
(appliance/server/residences.py), which knows all blocks.
"""

import os

import numpy as np

from ...native import native, order_stores
from ...v1.residence import (
    EDGE,
    EDGE_OFFSET,
    ENTRY_BYTES,
    HEAD,
    HEADER_BYTES,
    MAGIC,
    MAX_PROBES,
    NUM_SPEEDS,
    SPEED,
    SPEEDS_OFFSET,
    STATE_OFFSET,
    VERSION,
    file_bytes,
    keys_of,
)
from ...v1.shm import EMPTY_TAG, HASH_BYTES, TOMBSTONE_TAG
from . import memfd

NOT_HERE = 0  # the code that takes a block out


class ResidenceWriter:
    """The writable side of a table of 2**log2_entries. Used by one thread. Raises SharedMemoryError."""

    def __init__(self, log2_entries: int, epoch: int, slowest: int) -> None:
        assert 1 << log2_entries >= MAX_PROBES
        self.log2_entries = log2_entries
        self.num_entries = 0
        self.num_tombstones = 0
        self.num_dropped = 0  # found no room: what is not here may be somewhere
        self.descriptor, self._mapping = memfd.create_mapped(
            "kvtier-residence", file_bytes(log2_entries), "raise RLIMIT_NOFILE and RLIMIT_AS"
        )
        self._whole = memoryview(self._mapping)
        HEAD.pack_into(self._whole, 0, MAGIC, VERSION, log2_entries, epoch, slowest, 0)
        memfd.seal(self.descriptor, memfd.SEALS_READ_ONLY)
        self._head = self._whole[:HEADER_BYTES].cast("Q")
        self._words = self._whole[HEADER_BYTES:].cast("Q")
        self._mask = (1 << log2_entries) - 1

    @property
    def is_half_full(self) -> bool:
        """Whether searches become long."""
        return 2 * (self.num_entries + self.num_tombstones) > 1 << self.log2_entries

    def set(self, names: bytes, namespace_id: int, code: int) -> None:
        """Set the tier of each of `names`, 32 bytes each, by its number on the wire; NOT_HERE: in none."""
        if native is not None:
            more, tombstones, dropped = native.set_residence(self._words, names, namespace_id, code)
            self.num_entries += more
            self.num_tombstones += tombstones
            self.num_dropped += dropped
            return
        for start in range(0, len(names), HASH_BYTES):
            self._set(*keys_of(names[start : start + HASH_BYTES], namespace_id), code)

    def _set(self, tag: int, check: int, code: int) -> None:
        words, mask = self._words, self._mask
        room = -1
        for position in range(tag, tag + MAX_PROBES):
            word = (position & mask) << 1
            there = words[word]
            if there == tag and words[word + 1] & ~0xFF == check:
                if code:
                    words[word + 1] = check | code
                else:
                    self._take_out(position)
                return
            if there <= TOMBSTONE_TAG and room < 0:
                room = word
            if there == EMPTY_TAG:
                break
        if not code:
            return
        if room < 0:
            self.num_dropped += 1
            return
        self.num_tombstones -= words[room] == TOMBSTONE_TAG
        self.num_entries += 1
        words[room + 1] = check | code  # before the tag: a reader that sees that sees this
        words[room] = tag

    def _take_out(self, position: int) -> None:
        words, mask = self._words, self._mask
        words[(position & mask) << 1] = TOMBSTONE_TAG
        self.num_entries -= 1
        self.num_tombstones += 1
        if words[(position + 1 & mask) << 1] != EMPTY_TAG:
            return
        while words[(position & mask) << 1] == TOMBSTONE_TAG:  # behind them no search goes on anyway
            words[(position & mask) << 1] = EMPTY_TAG
            self.num_tombstones -= 1
            position -= 1

    def set_state(self, state: int) -> None:
        """Say what it means that a block is not here."""
        self._head[STATE_OFFSET // 8] = state

    def set_edge(self, bandwidth_bytes_per_s: float, start_s: float) -> None:
        """Set the speed at which blocks come up from the slowest tier."""
        self._price(EDGE_OFFSET, EDGE.pack(0, bandwidth_bytes_per_s, start_s))

    def set_speeds(self, speeds: list[tuple[int, int, float, float]]) -> None:
        """Set (namespace, number of the source, tokens/s, doubling tokens) of the namespaces, if room."""
        for number, speed in enumerate([*speeds, (0, 0, 0.0, 0.0)][:NUM_SPEEDS]):
            self._price(SPEEDS_OFFSET + number * SPEED.size, SPEED.pack(0, *speed))

    def _price(self, offset: int, packed: bytes) -> None:
        if self._whole[offset + 8 : offset + len(packed)] == packed[8:]:
            return
        word = offset // 8
        version = self._head[word]
        self._head[word] = version + 1
        if order_stores is not None:
            order_stores()
        self._whole[offset + 8 : offset + len(packed)] = packed[8:]
        if order_stores is not None:
            order_stores()
        self._head[word] = version + 2

    def check_integrity(self) -> list[str]:
        """Audit: counts equal what the table holds, every entry can be reached."""
        table = np.frombuffer(self._words, np.uint64).reshape(-1, ENTRY_BYTES // 8)
        tags, problems = table[:, 0], []
        live = np.flatnonzero(tags > TOMBSTONE_TAG)
        num_tombstones = int(np.count_nonzero(tags == TOMBSTONE_TAG))
        if (len(live), num_tombstones) != (self.num_entries, self.num_tombstones):
            counted = f"{self.num_entries} entries and {self.num_tombstones} tombstones"
            problems.append(f"residence: counted {counted}, holds {len(live)} and {num_tombstones}")
        distance = live.astype(np.uint64) - tags[live] & np.uint64(self._mask)
        for start, steps in zip(live.tolist(), distance.tolist(), strict=True):
            before = tags[np.arange(start - steps, start) & self._mask] if steps < MAX_PROBES else tags[:0]
            if steps >= MAX_PROBES or np.any(before == EMPTY_TAG):
                problems.append(f"residence: entry {start} cannot be found")
        return problems

    def close(self) -> None:
        """Unmap and close. Idempotent; clients keep what they mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._words.release()
            self._head.release()
