"""EventLog: the last block events, numbered, for watchers.

A ring, not a queue per watcher: a slow watcher cannot make the daemon hold more memory, it only finds
that the ring has moved on. That is a gap in the sequence, and the contract of Watch says what a gap
means: forget everything, start anew. Sequence numbers start at 1 and never repeat within an epoch.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ..tiers.block import Tier
from .core.instructions import BlockChange, Notify

#: Block events kept for watchers that come back: those of a few seconds at full load, some 10 MB.
MAX_BLOCK_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Something happened to blocks of one namespace."""

    sequence: int
    change: BlockChange
    namespace_id: int
    tier: Tier
    prefix_hashes: tuple[bytes, ...]
    reason: str


class EventLog:
    """Remembers the last `capacity` events. Owned by the event loop; not thread-safe."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        #: Blocks that left a tier since the start, by tier and reason.
        self.num_removed: Counter[tuple[Tier, str]] = Counter()
        self._ring: deque[BlockEvent] = deque(maxlen=capacity)
        self._last_sequence = 0
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    @property
    def num_watchers(self) -> int:
        """How many are watching now."""
        return len(self._watchers)

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
                tuple(notice.prefix_hashes),
                notice.reason,
            )
        )
        for watcher in self._watchers:
            watcher.set()

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

    async def watch(self, after_sequence: int) -> AsyncGenerator[BlockEvent, None]:
        """Yield events later than `after_sequence` (0: only new ones) as they happen, until `close`.

        A number from the future belongs to an earlier life of the daemon: everything remembered follows,
        and its lower numbers tell the watcher to start anew.
        """
        seen = after_sequence or self._last_sequence
        if seen > self._last_sequence:
            seen = 0
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

    def check_integrity(self) -> list[str]:
        """Audit: sequence numbers are consecutive and end at the last one."""
        sequences = [event.sequence for event in self._ring]
        first = self._last_sequence - len(sequences) + 1
        if sequences != list(range(first, self._last_sequence + 1)):
            return [f"event log: sequences {sequences[:3]}... are not consecutive to {self._last_sequence}"]
        return []
