"""AccessLog: what clients ask for and put, for recorders.

It listens at the one place that every request passes, the event on its way into the planner, so nothing is
missing and no service has to remember to report. Without a watcher it is not called at all. A watcher has
its own bounded queue: one that is too slow loses accesses, and their number is reported.

What a client read one-sidedly it reports later, possibly several chains in one message; they are separated
by the catalog's parents, and a chain read twice within one report counts once.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from ...tiers.block import Urgency
from ..appliance import Appliance
from ..core.events import (
    AcquireRequested,
    CommitRequested,
    Event,
    ReserveRequested,
    SessionEnded,
    SessionUpdated,
    Touched,
)
from ..core.planner import Planner

MAX_REMEMBERED_REQUESTS = 4096
MAX_WAITING_ACCESSES = 65_536  # of one watcher, which is told of how many it lost beyond


class AccessKind(Enum):
    """What was wanted of the blocks. Numbers are those of the wire."""

    ASK = 1
    PUT = 2
    SESSION = 3


class SessionReport(NamedTuple):
    """What a session said about itself."""

    urgency: Urgency
    num_decoded_tokens: int = 0  # since its last request; 0: it did not say
    back_in_s: float = 0.0  # when it expects to need its blocks again; 0: it did not say
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BlockAccess:
    """Blocks of one chain that were asked for or put, or what a session reported about itself."""

    at_s: float  # seconds on the appliance's clock
    kind: AccessKind
    namespace_id: int
    session_id: str
    parent_hash: bytes = b""  # of the block before the first one; empty at the start of a chain
    prefix_hashes: Sequence[bytes] = ()
    num_found: int = 0  # of ASK: how many were stored, from the first on
    word: SessionReport | None = None  # of SESSION
    num_lost: int = 0  # accesses that the watcher was too slow to take, before this one


class AccessWatcher:
    """A bounded queue of accesses: iterate. Ends when the log is closed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: deque[BlockAccess] = deque()
        self._num_lost = 0
        self._arrived = asyncio.Event()
        self._closed = False

    def tell(self, access: BlockAccess) -> None:
        """Queue an access, or count it as lost."""
        if len(self._waiting) >= self._capacity:
            self._num_lost += 1
            return
        self._waiting.append(replace(access, num_lost=self._num_lost) if self._num_lost else access)
        self._num_lost = 0
        self._arrived.set()

    def close(self) -> None:
        """End the iteration once what waits has been taken."""
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> "AccessWatcher":
        return self

    async def __anext__(self) -> BlockAccess:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()


class AccessLog:
    """Turns events into accesses. Owned by the event loop; not thread-safe."""

    def __init__(self, appliance: Appliance, planner: Planner, capacity: int) -> None:
        assert capacity > 0
        self._appliance = appliance
        self._planner = planner
        self._capacity = capacity
        self._watchers: set[AccessWatcher] = set()
        # (client, request id) of puts and acquires: a retry is the same request.
        self._requests: OrderedDict[tuple[int, str], None] = OrderedDict()

    def join(self) -> AccessWatcher:
        """Return a watcher of every access from now on, until `leave`."""
        watcher = AccessWatcher(self._capacity)
        self._watchers.add(watcher)
        self._appliance.tap = self.note
        return watcher

    def leave(self, watcher: AccessWatcher) -> None:
        """Remove a watcher. Idempotent."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._appliance.tap = None
            self._requests.clear()

    def close(self) -> None:
        """End every watcher's iteration."""
        for watcher in self._watchers:
            watcher.close()

    def note(self, event: Event, now: float) -> None:
        """Record an event that the planner is about to handle. Changes nothing there."""
        if isinstance(event, Touched):
            for chain in self._chains(event):
                parent = self._parent_of(event.namespace_id, chain[0])
                self._tell(
                    BlockAccess(
                        now, AccessKind.ASK, event.namespace_id, event.session_id, parent, chain, len(chain)
                    )
                )
        elif isinstance(event, AcquireRequested):
            if not event.is_local and self._is_new(event.client, event.request_id):
                self._asked(event, now)
        elif isinstance(event, CommitRequested) and event.reserve is not None:
            self._put(event.reserve, now)
        elif isinstance(event, ReserveRequested):
            self._put(event, now)
        elif isinstance(event, SessionUpdated | SessionEnded):
            self._tell(BlockAccess(now, AccessKind.SESSION, 0, event.session_id, word=_word_of(event, now)))

    # ------------------------------------------------------------------------------------ internals

    def _asked(self, event: AcquireRequested, now: float) -> None:
        """What stands before first_block was read one-sidedly, and is reported as touched."""
        hashes, first = event.prefix_hashes, event.first_block
        found = self._planner.lookup(event.namespace_id, hashes)
        num_found = max(0, getattr(found, "num_blocks", 0) - first)
        parent = hashes[first - 1] if first else b""
        session = event.session_id
        self._tell(
            BlockAccess(now, AccessKind.ASK, event.namespace_id, session, parent, hashes[first:], num_found)
        )

    def _put(self, request: ReserveRequested, now: float) -> None:
        if self._is_new(request.client, request.request_id):
            hashes, session = request.prefix_hashes, request.session_id
            self._tell(
                BlockAccess(now, AccessKind.PUT, request.namespace_id, session, request.parent_hash, hashes)
            )

    def _is_new(self, client: int, request_id: str) -> bool:
        """Whether this is the first try of a request."""
        if not request_id:
            return True
        name = (client, request_id)
        is_new = name not in self._requests
        self._requests[name] = None
        if len(self._requests) > MAX_REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)
        return is_new

    def _chains(self, event: Touched) -> list[list[bytes]]:
        """Return the runs of blocks in a report, each the child of the one before."""
        chains: list[list[bytes]] = []
        before = b""
        for prefix_hash in event.prefix_hashes:
            if chains and self._parent_of(event.namespace_id, prefix_hash) == before:
                chains[-1].append(prefix_hash)
            else:
                chains.append([prefix_hash])
            before = prefix_hash
        return chains

    def _parent_of(self, namespace_id: int, prefix_hash: bytes) -> bytes:
        catalog = self._planner.catalog
        if namespace_id not in catalog.namespaces:
            return b""
        row = catalog.find(namespace_id, prefix_hash)
        parent = catalog.parent[row] if row >= 0 else -1
        return catalog.prefix_hash[parent] if parent >= 0 else b""

    def _tell(self, access: BlockAccess) -> None:
        for watcher in self._watchers:
            watcher.tell(access)


def _word_of(event: SessionUpdated | SessionEnded, now: float) -> SessionReport:
    if isinstance(event, SessionEnded):
        return SessionReport(Urgency.ENDED, event.num_decoded_tokens, ended=True)
    back_in_s = max(0.0, event.back_at - now) if event.back_at < float("inf") else 0.0
    return SessionReport(event.urgency, event.num_decoded_tokens, back_in_s)
