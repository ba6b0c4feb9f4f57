"""What the two tables that clients map have in common: the shared index and the residence table.

Open addressing over a sealed memfd: behind a header entries of two words, a tag and a value. An entry stands
within `max_probes` steps of `tag & mask`; one that finds no room there is only counted. What is taken out
leaves a tombstone, unless no search goes on behind it.
"""

import os

import numpy as np
import numpy.typing as npt

from ...v1.shm import EMPTY_TAG, TOMBSTONE_TAG
from . import memfd


class ProbedTable:
    """The writable side of a table. Used by one thread; readers need no permission. Raises SharedMemoryError.

    Not sealed yet: only what is not can be kept over the end of this process (keeper.py). `kind` is what
    audits call it, `fix` what the error for lack of memory says."""

    def __init__(
        self, kind: str, log2_entries: int, max_probes: int, num_bytes: int, header_bytes: int, fix: str
    ) -> None:
        assert 1 << log2_entries >= max_probes
        self.num_entries = 0
        self.num_tombstones = 0
        self.num_dropped = 0  # since the start: had no room within `max_probes`
        self._kind = kind
        self._max_probes = max_probes
        self._mask = (1 << log2_entries) - 1
        self.descriptor, self._mapping = memfd.create_mapped(f"kvtier-{kind}", num_bytes, fix)
        self._header = memoryview(self._mapping)[:header_bytes]
        self._words = memoryview(self._mapping)[header_bytes:].cast("Q")  # tag, value, tag, value, ...

    def seal(self) -> None:
        """Let nothing but this mapping write to the table."""
        memfd.seal(self.descriptor, memfd.SEALS_READ_ONLY)

    def _take_out(self, position: int) -> None:
        """Take the entry at `position` out."""
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

    def _table(self) -> "npt.NDArray[np.uint64]":
        """Return the table, (entries, 2): tags and values."""
        return np.frombuffer(self._words, np.uint64).reshape(-1, 2)

    def check_integrity(self) -> list[str]:
        """Audit: counts equal what the table holds, every entry can be reached."""
        tags, problems = self._table()[:, 0], []
        live = np.flatnonzero(tags > TOMBSTONE_TAG)
        num_tombstones = int(np.count_nonzero(tags == TOMBSTONE_TAG))
        if (len(live), num_tombstones) != (self.num_entries, self.num_tombstones):
            counted = f"{self.num_entries} entries and {self.num_tombstones} tombstones"
            problems.append(f"{self._kind}: counted {counted}, holds {len(live)} and {num_tombstones}")
        distance = live.astype(np.uint64) - tags[live] & np.uint64(self._mask)
        for start, steps in zip(live.tolist(), distance.tolist(), strict=True):
            is_far = steps >= self._max_probes
            if is_far or np.any(tags[np.arange(start - steps, start) & self._mask] == EMPTY_TAG):
                problems.append(f"{self._kind}: entry {start} cannot be found")
        return problems

    def close(self) -> None:
        """Unmap and close. Idempotent; clients keep what they mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._words.release()
            self._header.release()
