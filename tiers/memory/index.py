"""The shared index: a table in which clients of one isolation domain find fragments by themselves.

Open addressing over a sealed memfd (layout in v1/shm.py). An entry is (tag, place); one tag may have
several, because a fragment can be in `hbm` and in `dram`, and because tags can meet. The table is a
hint that readers check against the slot header, which is why no entry needs a lock, and why an entry that
finds no room within MAX_PROBES is only counted: the fragment is then found by asking the daemon.

A dict beside the table (tag to position) was rejected: walking at most 32 entries that are usually
one is as fast, and there is nothing to keep in step.
"""

import os
import threading

import numpy as np

from ...native import MEMORY_IS_ORDERED, native, order_stores
from ...v1.shm import (
    EMPTY_TAG,
    INDEX_ENTRY,
    INDEX_HEADER,
    INDEX_HEADER_BYTES,
    INDEX_MAGIC,
    INDEX_VERSION,
    MAX_PROBES,
    TOMBSTONE_TAG,
    index_file_bytes,
)
from . import memfd
from .keeper import Keeper

INDEX_NAME = "kvtier-index-"  # then domain and epoch


def log2_entries_for(num_places: int) -> int:
    """Return the table size, as a power of two, that holds `num_places` at a load of a half or less."""
    return max(MAX_PROBES.bit_length(), (2 * num_places - 1).bit_length())


class IndexWriter:
    """The writable side of one domain's index. Used by one thread; readers need no permission.

    Raises SharedMemoryError when the host has no memory for it.
    """

    def __init__(self, log2_entries: int, epoch: int, name: str = "", keeper: Keeper | None = None) -> None:
        assert 1 << log2_entries >= MAX_PROBES
        self.num_entries = 0
        self.num_tombstones = 0
        self.num_dropped = 0  # since the start: had no room within MAX_PROBES
        self._mask = (1 << log2_entries) - 1
        self.descriptor, self._mapping = memfd.create_mapped(
            "kvtier-index", index_file_bytes(log2_entries), "make the memory tiers smaller"
        )
        if keeper is not None:
            keeper.keep(name, self.descriptor)
        memfd.seal(self.descriptor, memfd.SEALS_READ_ONLY)
        is_ordered = MEMORY_IS_ORDERED or native is not None
        header = np.array((INDEX_MAGIC, INDEX_VERSION, log2_entries, epoch, is_ordered), INDEX_HEADER)
        whole = memoryview(self._mapping)
        whole[: INDEX_HEADER.itemsize] = header.tobytes()
        self._words = whole[INDEX_HEADER_BYTES:].cast("Q")  # tag, place, tag, place, ...

    def insert(self, tag: int, place: int) -> bool:
        """Enter (tag, place); False, counted, when there is no room within MAX_PROBES."""
        assert tag > TOMBSTONE_TAG
        words, mask = self._words, self._mask
        for position in range(tag, tag + MAX_PROBES):
            word = (position & mask) << 1
            there = words[word]
            if there <= TOMBSTONE_TAG:
                # Place before tag: a reader that sees the tag sees its place.
                words[word + 1] = place
                if order_stores is not None:
                    order_stores()
                words[word] = tag
                self.num_entries += 1
                self.num_tombstones -= there == TOMBSTONE_TAG
                return True
        self.num_dropped += 1
        return False

    def insert_run(self, tags: list[int], first_place: int, slots: list[int]) -> None:
        """Enter (tag, first_place + slot) for each pair of `tags` and `slots`, as `insert` does one."""
        if native is not None:
            num_inserted, num_tombstones = native.insert_entries(self._words, tags, first_place, slots)
            self.num_entries += num_inserted
            self.num_tombstones -= num_tombstones
            self.num_dropped += len(tags) - num_inserted
            return
        for tag, slot in zip(tags, slots, strict=True):
            self.insert(tag, first_place + slot)

    def remove(self, tag: int, place: int) -> bool:
        """Take (tag, place) out; False when it was never entered."""
        words, mask = self._words, self._mask
        for position in range(tag, tag + MAX_PROBES):
            word = (position & mask) << 1
            there = words[word]
            if there == tag and words[word + 1] == place:
                words[word] = TOMBSTONE_TAG
                self.num_entries -= 1
                self.num_tombstones += 1
                if words[(position + 1 & mask) << 1] == EMPTY_TAG:
                    self._clear_tombstones_before(position)
                return True
            if there == EMPTY_TAG:
                return False
        return False

    def _clear_tombstones_before(self, position: int) -> None:
        """Empty the run of tombstones that ends at `position`: behind it no search goes on anyway."""
        words, mask = self._words, self._mask
        while words[(position & mask) << 1] == TOMBSTONE_TAG:
            words[(position & mask) << 1] = EMPTY_TAG
            self.num_tombstones -= 1
            position -= 1

    def check_integrity(self) -> list[str]:
        """Audit: counts equal what the table holds, every entry can be reached, none is there twice."""
        problems = []
        table = np.frombuffer(self._words, INDEX_ENTRY)
        tags = table["tag"]
        live = np.flatnonzero(tags > TOMBSTONE_TAG)
        if len(live) != self.num_entries:
            problems.append(f"index: {len(live)} entries, counted {self.num_entries}")
        num_tombstones = int(np.count_nonzero(tags == TOMBSTONE_TAG))
        if num_tombstones != self.num_tombstones:
            problems.append(f"index: {num_tombstones} tombstones, counted {self.num_tombstones}")
        if len(np.unique(table[live])) != len(live):
            problems.append("index: an entry is there twice")
        distance = live.astype(np.uint64) - tags[live] & np.uint64(self._mask)
        if np.any(distance >= MAX_PROBES):
            problems.append("index: an entry is further than MAX_PROBES from where it is looked for")
        for start, steps in zip(live.tolist(), distance.tolist(), strict=True):
            before = tags[np.arange(start - steps, start) & self._mask]
            if np.any(before == EMPTY_TAG):
                problems.append(f"index: entry {start} stands behind an empty one")
        return problems

    def close(self) -> None:
        """Unmap and close. Idempotent; clients keep what they mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._words.release()


class Indexes:
    """The indexes of one daemon, one per isolation domain, made when first asked for.

    Shared by all memory tiers. A `keeper` gets each one: clients with views lock it, and the next daemon asks
    whether they still do. `num_places` is how many fragments they hold together. Raises SharedMemoryError
    beyond `max_domains`.
    """

    def __init__(
        self, num_places: int, epoch: int, max_domains: int = 256, keeper: Keeper | None = None
    ) -> None:
        self._log2_entries = log2_entries_for(num_places)
        self._epoch = epoch
        self._max_domains = max_domains
        self._keeper = keeper
        self._writers: dict[int, IndexWriter] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._writers)

    def of(self, domain: int) -> IndexWriter:
        """Return the index of `domain`."""
        writer = self._writers.get(domain)
        if writer is None:
            with self._lock:
                if domain not in self._writers and len(self._writers) >= self._max_domains:
                    raise memfd.SharedMemoryError(
                        f"{self._max_domains} isolation domains are in use, which is the limit; "
                        "let clients share domains"
                    )
                if domain not in self._writers:
                    name = self._name(domain)
                    self._writers[domain] = IndexWriter(self._log2_entries, self._epoch, name, self._keeper)
                writer = self._writers[domain]
        return writer

    def drop(self, domain: int) -> None:
        """Close the index of `domain`, which no extent is bound to; `of` makes an empty one again."""
        with self._lock:
            writer = self._writers.pop(domain, None)
            if writer is not None:
                writer.close()
                if self._keeper is not None:
                    self._keeper.drop(self._name(domain))

    def check_integrity(self) -> list[str]:
        """Audit every index."""
        return [f"domain {d}: {p}" for d, w in self._writers.items() for p in w.check_integrity()]

    def close(self) -> None:
        """Close every index. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _name(self, domain: int) -> str:
        """Return the name by which a keeper knows the index of `domain`."""
        return f"{INDEX_NAME}{domain}-{self._epoch}"
