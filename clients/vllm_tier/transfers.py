"""What a tier does with the appliance: look up, store and load chunks between it and rows of the primary
pool.

Everything here blocks, runs in the tier's own threads, and knows no vLLM. Rows are read and written in
place: a put takes them from the pool into the staging extent, a get copies from the appliance's extents
straight into the row.

    store   lookup (what is there need not travel) -> put the rest under its parent, or as a chain's start
    load    get all chunks of a group; the first that is gone ends it
    probe   lookup, going on behind a gap only where a sliding window is asked for from its end
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..extents import U8
from ..guard import Guard
from ..namespace import Namespace, NamespaceIdentity
from ..sync import Client
from ..words import PutOutcome, PutReport
from .runs import Run, hash_of, in_order_of_asking

MAX_GAPS = 16  # of one lookup; behind more of them nothing is found
MAX_LOAD_BYTES = 32 << 20  # held at one time: a client may pin only a share of the memory
_STORED = (PutOutcome.STORED, PutOutcome.DEDUPLICATED, PutOutcome.IN_PROGRESS)


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
    """Work of one thread: its client, and the namespaces it registered. Not thread-safe."""

    def __init__(
        self,
        client: Client,
        guard: Guard,
        identity_of: Callable[[int], NamespaceIdentity],
        rows: U8,
        deadline_s: float,
    ) -> None:
        """`rows` is the primary pool, uint8, shape (num_chunks, row_bytes); `identity_of` a cache group."""
        self._client = client
        self._guard = guard
        self._identity_of = identity_of
        self._rows: U8 | None = rows
        self._deadline_s = deadline_s
        self._namespaces: dict[int, tuple[NamespaceIdentity, Namespace]] = {}

    def store(self, job: Job) -> Done:
        """Store what is not stored yet. What cannot be stored is missing in the answer, and counted."""
        return self._timed(job, self._store_run)

    def load(self, job: Job) -> Done:
        """Load into the rows. Rows of chunks that are missing in the answer are undefined."""
        return self._timed(job, self._load_run)

    def probe(self, keys: Sequence[bytes], is_descending: Callable[[Sequence[bytes]], bool]) -> set[bytes]:
        """Return which of `keys` are stored; of a chain asked for from its start, up to the first gap."""
        found: set[bytes] = set()
        for group, asked in in_order_of_asking(keys).items():
            num_gaps = MAX_GAPS if is_descending(asked) else 1
            while asked and num_gaps:
                num_blocks = self._num_stored(group, [hash_of(key) for key in asked])
                if num_blocks is None:
                    break
                found.update(asked[:num_blocks])
                asked = asked[num_blocks + 1 :]
                num_gaps -= 1
        return found

    def close(self) -> None:
        """Let go of the pool and of the connection."""
        self._rows = None
        self._guard.ask("close", self._client.close)

    # ---------------------------------------------------------------------------------- internals

    def _timed(self, job: Job, move: Callable[[Run, str], tuple[int, int]]) -> Done:
        began_at = time.monotonic()
        keys: list[bytes] = []
        num_bytes = 0
        for run in job.runs:
            num_chunks, moved_bytes = move(run, job.session)
            keys += run.keys[:num_chunks]
            num_bytes += moved_bytes
        return Done(job, tuple(keys), num_bytes, time.monotonic() - began_at)

    def _store_run(self, run: Run, session: str) -> tuple[int, int]:
        """Return how many chunks of the run are stored now, from its start, and the bytes that travelled."""
        hashes = run.hashes
        num_known = self._num_stored(run.group, hashes)
        if num_known is None or num_known == len(hashes):
            return num_known or 0, 0
        parent = hashes[num_known - 1] if num_known else run.parent
        report = self._put(run, num_known, parent, session)
        if report and parent and report.outcomes[0] is PutOutcome.PARENT_MISSING:
            # What it continues is only in the engine's own pools. It is worth as much as a start of a chain.
            report = self._put(run, num_known, b"", session)
        if report is None:
            return num_known, 0
        for outcome in set(report.outcomes) - set(_STORED):
            self._guard.count(f"PUT_{outcome.name}", report.outcomes.count(outcome))
        num_stored = _num_leading(outcome in _STORED for outcome in report.outcomes)
        return num_known + num_stored, report.num_stored * self._row_bytes

    def _put(self, run: Run, first: int, parent: bytes, session: str) -> PutReport | None:
        def put() -> PutReport:
            return self._client.put(
                self._namespace(run.group),
                run.hashes[first:],
                self._memory(run.rows[first:]),
                parent=parent,
                session=session,
                deadline_s=self._deadline_s,
            )

        return self._guard.ask("store", put)

    def _load_run(self, run: Run, session: str) -> tuple[int, int]:
        """Return how many chunks of the run were loaded, from its start, and their bytes."""
        step = max(1, MAX_LOAD_BYTES // self._row_bytes)
        num_loaded = self._in_pieces(run.hashes, step, partial(self._get, run, session)) or 0
        return num_loaded, num_loaded * self._row_bytes

    def _get(self, run: Run, session: str, first: int, last: int) -> int | None:
        def get() -> int:
            report = self._client.get(
                self._namespace(run.group),
                run.hashes[first:last],
                self._memory(run.rows[first:last]),
                session=session,
                deadline_s=self._deadline_s,
            )
            return report.num_blocks

        num_loaded = self._guard.ask("load", get)
        if num_loaded is not None:
            self._guard.count("GONE_BEFORE_LOAD", last - first - num_loaded)
        return num_loaded

    def _num_stored(self, group: int, hashes: Sequence[bytes]) -> int | None:
        """Return how many of `hashes` are stored, from the first on; None when there was no answer."""

        def lookup(first: int, last: int) -> int | None:
            found = self._guard.ask(
                "lookup", lambda: self._client.lookup(self._namespace(group), hashes[first:last])
            )
            return None if found is None else found.num_blocks

        return self._in_pieces(hashes, len(hashes), lookup)

    def _in_pieces(
        self, hashes: Sequence[bytes], step: int, ask: Callable[[int, int], int | None]
    ) -> int | None:
        """Ask about pieces that one call may name until one is not whole; return how many blocks that gave,
        None when the first got no answer."""
        limit = self._guard.ask("connect", lambda: self._client.info.max_blocks_per_request)
        if limit is None:
            return None
        step = min(step, limit)
        total = 0
        for first in range(0, len(hashes), step):
            last = min(first + step, len(hashes))
            number = ask(first, last)
            if number is None:
                return total or None
            total += number
            if number < last - first:
                break
        return total

    def _namespace(self, group: int) -> Namespace:
        identity = self._identity_of(group)
        known = self._namespaces.get(group)
        if known is None or known[0] != identity:  # the first time, or the tier was reset
            known = self._namespaces[group] = (identity, self._client.register(identity))
        return known[1]

    def _memory(self, rows: Iterable[int]) -> list[U8]:
        assert self._rows is not None, "used after close"
        return [self._rows[row] for row in rows]

    @property
    def _row_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.shape[1]


def _num_leading(answers: Iterable[bool]) -> int:
    """Return how many of the first answers are yes."""
    number = 0
    for answer in answers:
        if not answer:
            break
        number += 1
    return number
