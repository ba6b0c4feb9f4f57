"""ForwardCopier: records copied forward inside the cold store, from a segment that is being emptied.

The only edge of the host with no memory at either end, so it is the only one with a buffer of its own:
one batch at a time is read into it and written from it, as it is stored: nothing is decoded to be encoded
again, which would cost time, and with a lossy codec truth; nothing is decrypted to be encrypted again, which
would cost a key. What was read is verified, and its checksum is carried by the label, so a record is never
re-hashed into a new truth either.
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import accumulate

from ...tiers.base import Cause, CopyItem, CopyOutcome
from ...tiers.cold.engine import ColdStore
from ...tiers.cold.record_io import stored_bytes
from ...v1.shm import PAGE_BYTES

#: Why a record was not written anew. Said of a copy they would mean that what was *read* is lost.
NOT_WRITTEN = (Cause.IO_ERROR, Cause.SHORT_TRANSFER)


class ForwardCopier:
    """Implements `Copier` from the cold store to itself. `pool` belongs to the caller."""

    def __init__(self, store: ColdStore, pool: Executor) -> None:
        self._store = store
        self._pool = pool

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order."""
        return self._pool.submit(self._copy, items)

    def _copy(self, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        lengths = [stored_bytes(item.label) for item in items]
        sizes = [-(-length // PAGE_BYTES) * PAGE_BYTES for length in lengths]
        buffer = memoryview(mmap.mmap(-1, sum(sizes)))  # page-aligned, for direct I/O
        starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        parts = [buffer[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        reads = [(item.source, item.label, part) for item, part in zip(items, parts, strict=True)]
        outcomes = self._store.read_batch(reads, as_stored=True)
        whole = [n for n, outcome in enumerate(outcomes) if outcome.cause is None]
        writes = [
            (items[n].target, replace(items[n].label, checksum=outcomes[n].checksum), parts[n]) for n in whole
        ]
        encryptions = [outcomes[n].encryption for n in whole]
        written = self._store.write_batch(writes, as_stored=True, encryptions=encryptions)
        for n, outcome in zip(whole, written, strict=True):
            outcomes[n] = CopyOutcome(Cause.NO_SPACE) if outcome.cause in NOT_WRITTEN else outcome
        return outcomes
