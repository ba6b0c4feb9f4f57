"""ForwardCopier: records copied forward inside the cold store, from a segment that is being emptied.

The only edge of the host with no memory at either end, so it is the only one with a buffer of its own:
one batch at a time is read into it and written from it. The checksum is verified by the read and carried
by the label, so a record is never re-hashed into a new truth.
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from ..tiers.base import Buffer, CopyItem, CopyOutcome
from ..tiers.block import FragmentLabel
from ..v1.shm import PAGE_BYTES


class RecordStore(Protocol):
    """The part of the cold store that moves records."""

    def read_batch(self, items: list[tuple[int, FragmentLabel, Buffer]]) -> list[CopyOutcome]:
        """Fill the buffers; one outcome per item."""
        ...

    def write_batch(self, items: list[tuple[int, FragmentLabel, Buffer]]) -> list[CopyOutcome]:
        """Store the payloads; one outcome per item."""
        ...


class ForwardCopier:
    """Implements `Copier` from the cold store to itself. `pool` belongs to the caller."""

    def __init__(self, store: RecordStore, pool: Executor) -> None:
        self._store = store
        self._pool = pool

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order."""
        return self._pool.submit(self._copy, items)

    def _copy(self, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        sizes = [-(-item.label.raw_length // PAGE_BYTES) * PAGE_BYTES for item in items]
        buffer = memoryview(mmap.mmap(-1, sum(sizes)))  # page-aligned, for direct I/O
        parts = []
        start = 0
        for item, size in zip(items, sizes, strict=True):
            parts.append(buffer[start : start + item.label.raw_length])
            start += size
        reads = [(item.source, item.label, part) for item, part in zip(items, parts, strict=True)]
        outcomes = self._store.read_batch(reads)
        whole = [n for n, outcome in enumerate(outcomes) if outcome.cause is None]
        written = self._store.write_batch([(items[n].target, items[n].label, parts[n]) for n in whole])
        for n, outcome in zip(whole, written, strict=True):
            outcomes[n] = outcome
        return outcomes
