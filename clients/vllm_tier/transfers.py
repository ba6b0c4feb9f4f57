"""What a tier does with the appliance: look up, store and load chunks between it and rows of the primary
pool.

Everything here blocks, runs in the tier's own threads, and knows no vLLM. Rows are read and written in
place: a put takes them from the pool into the staging extent, a get copies from the appliance's extents
straight into the row.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from ...v1.types import NamespaceIdentity
from ..connector.chain_store import MAX_GAPS, ChainStore
from ..memory.buffers import Pieces
from .runs import Run, hash_of, in_order_of_asking


@dataclass(frozen=True, slots=True)
class PrimaryPool:
    """The primary pool as addresses: `num_rows` rows of `row_bytes` each, back to back.

    No view of its memory is kept anywhere, because vLLM unmaps it at its end and cannot while one exists;
    uses of a PrimaryPool must have ended before that.
    """

    address: int
    num_rows: int
    row_bytes: int

    def rows(self, numbers: Sequence[int]) -> Pieces:
        """Return rows as memory of blocks. Raises IndexError for a row that is not there."""
        rows = np.array(numbers, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a pool of {self.num_rows}")
        return Pieces((self.address + rows * self.row_bytes)[:, None], self.row_bytes)


@dataclass(frozen=True, slots=True)
class TierJob:
    """One job of vLLM: which chunks, and the rows of the primary pool they are in or go to."""

    job_id: int
    runs: tuple[Run, ...]
    session: str = ""

    @property
    def num_chunks(self) -> int:
        """Chunks it names."""
        return sum(len(run.keys) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Done:
    """How a job ended. `keys` are the chunks that were moved, or need not be."""

    job: TierJob
    keys: tuple[bytes, ...]
    num_bytes: int = 0
    duration_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all of it was done."""
        return len(self.keys) == self.job.num_chunks


class TierTransfers:
    """Work of one thread. Not thread-safe."""

    def __init__(
        self, store: ChainStore, identity_of: Callable[[int], NamespaceIdentity], pool: PrimaryPool
    ) -> None:
        """`identity_of` a cache group is its namespace's."""
        self._store = store
        self._identity_of = identity_of
        self._pool = pool

    def store(self, job: TierJob) -> Done:
        """Store what is not stored yet. What cannot be stored is missing in the answer, and counted."""
        return self._timed(job, self._store_run)

    def load(self, job: TierJob) -> Done:
        """Load into the rows. Rows of chunks that are missing in the answer are undefined."""
        return self._timed(job, self._load_run)

    def probe(self, keys: Sequence[bytes], is_descending: Callable[[Sequence[bytes]], bool]) -> set[bytes]:
        """Return which of `keys` are stored.

        Of a chain that is asked for from its start, up to the first gap. A sliding window is asked for from
        its end, and found behind gaps, too.
        """
        found: set[bytes] = set()
        for group, asked in in_order_of_asking(keys).items():
            max_gaps = MAX_GAPS if is_descending(asked) else 1
            hashes = [hash_of(key) for key in asked]
            is_stored = self._store.which_stored(self._identity_of(group), hashes, max_gaps)
            found.update(compress(asked, is_stored))
        return found

    def close(self) -> None:
        """Let go of the connection."""
        self._store.close()

    # ---------------------------------------------------------------------------------- internals

    def _timed(self, job: TierJob, move: Callable[[Run, str], tuple[int, int]]) -> Done:
        """Move run by run: `move` returns how many chunks from the start of a run, and how many travelled."""
        began_at = time.monotonic()
        keys: list[bytes] = []
        num_sent = 0
        for run in job.runs:
            num_chunks, num_moved = move(run, job.session)
            keys += run.keys[:num_chunks]
            num_sent += num_moved
        return Done(job, tuple(keys), num_sent * self._pool.row_bytes, time.monotonic() - began_at)

    def _store_run(self, run: Run, session: str) -> tuple[int, int]:
        identity, rows = self._identity_of(run.group), self._pool.rows(run.rows)
        stored = self._store.store(identity, run.hashes, rows, parent=run.parent, session=session)
        return stored.num_blocks, stored.num_sent

    def _load_run(self, run: Run, session: str) -> tuple[int, int]:
        identity, rows = self._identity_of(run.group), self._pool.rows(run.rows)
        num_blocks = self._store.load(identity, run.hashes, rows, session=session)
        return num_blocks, num_blocks
