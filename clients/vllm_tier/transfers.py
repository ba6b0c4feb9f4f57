"""What a tier does with the appliance: look up, store and load chunks between it and rows of the primary
pool.

Everything here blocks, runs in the tier's own threads, and knows no vLLM. Rows are read and written in
place: a put takes them from the pool into the staging extent, a get copies from the appliance's extents
straight into the row.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..chain_store import ChainStore
from ..extents import U8
from ..namespace import NamespaceIdentity
from .runs import Run, hash_of, in_order_of_asking

MAX_GAPS = 16  # of one lookup; behind more of them nothing is found


@dataclass(frozen=True, slots=True)
class Job:
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

    job: Job
    keys: tuple[bytes, ...]
    num_bytes: int = 0
    duration_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all of it was done."""
        return len(self.keys) == self.job.num_chunks


class Transfers:
    """Work of one thread. Not thread-safe."""

    def __init__(self, store: ChainStore, identity_of: Callable[[int], NamespaceIdentity], rows: U8) -> None:
        """`rows` is the primary pool, uint8, shape (num_chunks, row_bytes); `identity_of` a cache group."""
        self._store = store
        self._identity_of = identity_of
        self._rows: U8 | None = rows

    def store(self, job: Job) -> Done:
        """Store what is not stored yet. What cannot be stored is missing in the answer, and counted."""
        return self._timed(job, self._store_run)

    def load(self, job: Job) -> Done:
        """Load into the rows. Rows of chunks that are missing in the answer are undefined."""
        return self._timed(job, self._load_run)

    def probe(self, keys: Sequence[bytes], is_descending: Callable[[Sequence[bytes]], bool]) -> set[bytes]:
        """Return which of `keys` are stored.

        Of a chain that is asked for from its start, up to the first gap. A sliding window is asked for from
        its end, and found behind gaps, too.
        """
        found: set[bytes] = set()
        for group, asked in in_order_of_asking(keys).items():
            num_gaps = MAX_GAPS if is_descending(asked) else 1
            while asked and num_gaps:
                num_blocks = self._store.num_stored(self._identity_of(group), [hash_of(key) for key in asked])
                if num_blocks is None:
                    break
                found.update(asked[:num_blocks])
                asked = asked[num_blocks + 1 :]
                num_gaps -= 1
        return found

    def close(self) -> None:
        """Let go of the pool and of the connection."""
        self._rows = None
        self._store.close()

    # ---------------------------------------------------------------------------------- internals

    def _timed(self, job: Job, move: Callable[[Run, str], tuple[int, int]]) -> Done:
        """Move run by run: `move` returns how many chunks from the start of a run, and how many travelled."""
        began_at = time.monotonic()
        keys: list[bytes] = []
        num_sent = 0
        for run in job.runs:
            num_chunks, num_moved = move(run, job.session)
            keys += run.keys[:num_chunks]
            num_sent += num_moved
        row_bytes = 0 if self._rows is None else self._rows.shape[1]
        return Done(job, tuple(keys), num_sent * row_bytes, time.monotonic() - began_at)

    def _store_run(self, run: Run, session: str) -> tuple[int, int]:
        stored = self._store.store(
            self._identity_of(run.group), run.hashes, self._memory(run), parent=run.parent, session=session
        )
        return stored.num_blocks, stored.num_sent

    def _load_run(self, run: Run, session: str) -> tuple[int, int]:
        num_blocks = self._store.load(
            self._identity_of(run.group), run.hashes, self._memory(run), session=session
        )
        return num_blocks, num_blocks

    def _memory(self, run: Run) -> list[U8]:
        assert self._rows is not None, "used after close"
        return [self._rows[row] for row in run.rows]
