"""EventLog: the last block events, numbered, for watchers.

A ring, not a queue per watcher: a slow watcher cannot make the daemon hold more memory, it only finds
that the ring has moved on. That is a gap in the sequence, and the contract of Watch says what a gap
means: forget everything, start anew. Sequence numbers start at 1 and never repeat within an epoch.

A tenant watches a log of its own isolation domain: its numbers, what it remembers and what it forgets depend
on the events of that domain only, so that they say nothing of other tenants.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

from ..tiers.block import HASH_BYTES, Tier
from .core.catalog.catalog import NamespaceEntry
from .core.instructions import BlockChange, Notify

#: Block events, and names in them, kept for watchers that come back: those of a few seconds at full load. A
#: name takes 32 bytes, an event 250: at most 8 MB.
MAX_BLOCK_EVENTS = 16_384
MAX_BLOCK_NAMES = 131_072
UNKNOWN = ":"  # no isolation domain has this name
MAX_DOMAIN_EVENTS = 8_192  # the same, of one isolation domain that a tenant watches


class BlockEvent(NamedTuple):
    """Something happened to blocks of one namespace."""

    sequence: int
    change: BlockChange
    namespace_id: int
    tier: Tier
    packed_hashes: bytes  # one behind the other: bytes objects of their own take 80 bytes each
    reason: str

    @property
    def prefix_hashes(self) -> tuple[bytes, ...]:
        """The names of the blocks."""
        packed = self.packed_hashes
        return tuple([packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)])


class EventLog:
    """Remembers the last `capacity` events, and at most MAX_BLOCK_NAMES names and one event.

    Owned by the event loop; not thread-safe.

    `namespaces`: the catalog's, read when a tenant watches.
    """

    def __init__(self, capacity: int, namespaces: Mapping[int, NamespaceEntry] | None = None) -> None:
        assert capacity > 0
        #: Blocks that left a tier since the start, by tier and reason.
        self.num_removed: Counter[tuple[Tier, str]] = Counter()
        self._ring: deque[BlockEvent] = deque()
        self._capacity = capacity
        self._num_names = 0  # in the ring
        self._last_sequence = 0
        self._watchers: set[asyncio.Event] = set()
        self._closed = False
        self._namespaces = namespaces if namespaces is not None else {}
        self._domains: dict[int, str] = {}  # by namespace id; kept until the last event of the namespace
        self._of_domain: dict[str, EventLog] = {}  # of those that a tenant has watched

    @property
    def num_watchers(self) -> int:
        """How many are watching now."""
        return len(self._watchers) + sum(log.num_watchers for log in self._of_domain.values())

    @property
    def is_closed(self) -> bool:
        """Return whether the daemon stops: nothing more will be appended."""
        return self._closed

    @property
    def last_sequence(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last_sequence

    def of_domain(self, domain: str) -> "EventLog":
        """Return the log of one isolation domain with its parts. It begins when it is first asked for."""
        log = self._of_domain.get(domain)
        if log is None:
            for number, namespace in self._namespaces.items():
                self._domains[number] = namespace.identity.domain
            log = self._of_domain[domain] = EventLog(MAX_DOMAIN_EVENTS)
            log._closed = self._closed
        return log

    def append(self, notice: Notify) -> None:
        """Number the planner's notice and wake the watchers. The oldest event may be forgotten."""
        if notice.change is BlockChange.REMOVED:
            self.num_removed[notice.tier, notice.reason] += len(notice.prefix_hashes)
        self._last_sequence += 1
        self._ring.append(
            BlockEvent(
                self._last_sequence,
                notice.change,
                notice.namespace_id,
                notice.tier,
                b"".join(notice.prefix_hashes),
                notice.reason,
            )
        )
        self._num_names += len(notice.prefix_hashes)
        while len(self._ring) > self._capacity or (self._num_names > MAX_BLOCK_NAMES and len(self._ring) > 1):
            self._num_names -= len(self._ring.popleft().packed_hashes) // HASH_BYTES
        for watcher in self._watchers:
            watcher.set()
        if self._of_domain:
            self._append_to_domain(notice)

    def after(self, sequence: int) -> list[BlockEvent]:
        """Return the remembered events later than `sequence`, oldest first.

        The first one is later than `sequence + 1` when some were forgotten.
        """
        num_wanted = self._last_sequence - sequence
        if num_wanted <= 0:
            return []
        if num_wanted >= len(self._ring):
            return list(self._ring)
        return [self._ring[i] for i in range(len(self._ring) - num_wanted, len(self._ring))]

    def watch(self, after_sequence: int) -> AsyncGenerator[BlockEvent, None]:
        """Yield events later than `after_sequence` (0: from this call on) as they happen, until `close`.

        A number from the future belongs to an earlier life of the daemon: everything remembered follows,
        and its lower numbers tell the watcher to start anew.
        """
        seen = after_sequence or self._last_sequence
        return self._follow(seen if seen <= self._last_sequence else 0)

    async def _follow(self, seen: int) -> AsyncGenerator[BlockEvent, None]:
        arrived = asyncio.Event()
        self._watchers.add(arrived)
        try:
            while True:
                for event in self.after(seen):
                    yield event
                    seen = event.sequence
                if self._last_sequence > seen:
                    continue  # more came while the last ones were being sent
                if self._closed:
                    return
                arrived.clear()
                await arrived.wait()
        finally:
            self._watchers.discard(arrived)

    def close(self) -> None:
        """End every `watch` once it has sent what is remembered."""
        self._closed = True
        for watcher in self._watchers:
            watcher.set()
        for log in self._of_domain.values():
            log.close()

    def _append_to_domain(self, notice: Notify) -> None:
        """Append to the log of the tenant that the namespace belongs to, if a tenant watches it."""
        number = notice.namespace_id
        namespace = self._namespaces.get(number)
        if namespace is not None:
            domain = self._domains[number] = namespace.identity.domain
            if len(self._domains) > 2 * len(self._namespaces) + 64:
                self._domains = {n: self._domains[n] for n in self._domains.keys() & self._namespaces.keys()}
        else:  # forgotten, with its last blocks
            domain = self._domains.get(number, UNKNOWN)
        log = self._of_domain.get(whole_domain(domain))
        if log is not None:
            log.append(notice)

    def check_integrity(self) -> list[str]:
        """Audit: sequence numbers are consecutive and end at the last one."""
        problems = [problem for log in self._of_domain.values() for problem in log.check_integrity()]
        sequences = [event.sequence for event in self._ring]
        first = self._last_sequence - len(sequences) + 1
        if sequences != list(range(first, self._last_sequence + 1)):
            problems.append(f"event log: sequences {sequences[:3]}... do not end at {self._last_sequence}")
        return problems


def whole_domain(domain: str) -> str:
    """Return the isolation domain of a tenant that `domain` is, or is a part of; empty: the common one."""
    return domain.partition("/")[0] if ":" in domain else ""
