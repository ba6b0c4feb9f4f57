"""Holdings: tells other hosts which blocks this one can read, and from where, and what changes.

Reads the log of block events, which is a ring: a host that reads slowly makes this one hold no more memory.
It finds that the ring has moved on, and gets a snapshot anew. Nothing is kept for hosts that do not watch.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ...sources.directories.records import OLDEST, PROTOCOL
from ...sources.peers.inventory import short_names
from ...tiers.block import Tier
from ...v1 import peer_pb2 as pb
from ...v1.bundles import blocks_per_bundle
from ...v1.types_pb2 import HostLoad
from ..core.catalog.catalog import NO_ROW, Catalog, NamespaceEntry
from ..core.catalog.table import NUM_PARTS
from ..event_log import BlockEvent, EventLog

HEARTBEAT_S: Final = 1.0
FLUSH_S: Final = 0.05  # between two looks for changes, which are sent together
STEP_NAMES: Final = 2048  # looked at between two turns of the event loop
CHUNK_NAMES: Final = 16_384  # in one message of a snapshot
MAX_DIGESTS: Final = 4096


class Holdings:
    """What this host holds, as messages. Owned by the event loop.

    `load` is asked with every heartbeat; `host` is this host's name, for people. Blocks with a fragment
    only in `log_tier` are told as being on disk."""

    def __init__(
        self,
        catalog: Catalog,
        events: EventLog,
        epoch: int,
        host: str,
        load: Callable[[], HostLoad],
        log_tier: Tier,
    ) -> None:
        self._catalog = catalog
        self._events = events
        self._epoch = epoch
        self._host = host
        self._load = load
        self._log_tier = log_tier
        self.num_watchers = 0

    async def watch(
        self, digests: Iterable[bytes] | None, *, in_bundles: bool = False
    ) -> AsyncGenerator[pb.WatchInventoryResponse, None]:
        """Yield a snapshot of the namespaces with these digests, then changes, until the log is closed.

        None: of all namespaces. `in_bundles`: of each bundle its last block only, which is the bundle's name;
        of what is gone every block is told."""
        wanted = frozenset(digests) if digests is not None else None
        told: dict[int, bytes] = {}  # namespaces of which a snapshot was sent
        seen, is_reset, beat_at = self._events.last_sequence, True, 0.0
        clock = asyncio.get_running_loop().time
        self.num_watchers += 1
        try:
            while not self._events.is_closed:
                new = {
                    number: namespace.identity.digest
                    for number, namespace in self._catalog.namespaces.items()
                    if number not in told and (wanted is None or namespace.identity.digest in wanted)
                }
                if new or is_reset:
                    told.update(new)
                    async for message in self._snapshot(new, is_reset, in_bundles):
                        yield message
                    is_reset, beat_at = False, clock() + HEARTBEAT_S
                while seen < self._events.last_sequence and not is_reset:
                    newer = self._events.after(seen)
                    if newer[0].sequence > seen + 1:
                        told, is_reset, seen = {}, True, self._events.last_sequence
                        break
                    seen, changes = self._changes(newer, told, in_bundles)
                    if changes:
                        yield self._message(changes)
                        beat_at = clock() + HEARTBEAT_S
                    await asyncio.sleep(0)
                if is_reset:
                    continue
                if clock() >= beat_at:
                    yield self._message([])
                    beat_at = clock() + HEARTBEAT_S
                await asyncio.sleep(FLUSH_S)
        finally:
            self.num_watchers -= 1

    async def grows(self, namespace: NamespaceEntry, names: Sequence[bytes]) -> AsyncIterator[int]:
        """Yield how many of `names`, from the first one on, can be read here: now, and whenever it is more.

        Ends when it is all."""
        events, told = self._events.watch(0), -1
        while True:
            there = max(told, 0)
            while there < len(names) and self._tier(namespace.rows.get(names[there], NO_ROW)) is not None:
                there += 1
            if there > told:
                yield there
                told = there
            if there == len(names):
                return
            async for event in events:
                if event.namespace_id == namespace.id:
                    break
            else:
                return  # the daemon stops

    async def _snapshot(
        self, namespaces: Mapping[int, bytes], is_reset: bool, in_bundles: bool
    ) -> AsyncIterator[pb.WatchInventoryResponse]:
        first = self._message([])
        first.is_reset = is_reset
        first.protocol, first.oldest = PROTOCOL, OLDEST
        yield first
        for number, digest in namespaces.items():
            chunk: dict[bytes, Tier] = {}
            for names in self._names(number, in_bundles):
                chunk |= names
                if len(chunk) >= CHUNK_NAMES:
                    yield self._message([self._change(digest, chunk)])
                    chunk = {}
                await asyncio.sleep(0)
            if chunk:
                yield self._message([self._change(digest, chunk)])
        last = self._message([])
        last.is_complete = True
        yield last

    def _names(self, number: int, in_bundles: bool) -> Iterator[dict[bytes, Tier]]:
        """Yield the blocks of a namespace that can be read and their tiers, STEP_NAMES looked at a time."""
        namespace = self._catalog.namespaces[number]
        size = blocks_per_bundle(namespace.identity.geometry) if in_bundles else 1
        for part in range(NUM_PARTS):
            rows = namespace.rows.part(part)
            names = [self._catalog.prefix_hash[row] for row in rows]
            for start in range(0, len(rows), STEP_NAMES):
                some = names[start : start + STEP_NAMES]
                if number not in self._catalog.namespaces:
                    return
                present = {
                    name: self._tier(row)
                    for name, row in zip(some, namespace.rows.find(some), strict=True)
                    if row >= 0 and self._is_end(row, size)
                }
                yield {name: tier for name, tier in present.items() if tier is not None}

    def _is_end(self, row: int, size: int) -> bool:
        """Return whether a block is the last one of a bundle of `size` blocks, or gone."""
        return size == 1 or row < 0 or self._catalog.position[row] % size == size - 1

    def _tier(self, row: int) -> Tier | None:
        """Return the slowest tier that reading a block involves; None where it cannot be read."""
        return self._catalog.tier_of(row) if row >= 0 else None

    def _changes(
        self, events: Iterable[BlockEvent], told: Mapping[int, bytes], in_bundles: bool
    ) -> tuple[int, list[pb.InventoryChange]]:
        """Return the number of the last event that was looked at, and what events changed, as it is now."""
        there: dict[int, dict[bytes, Tier | None]] = {}
        last, num_names = 0, 0
        for event in events:
            last = event.sequence
            if event.namespace_id in told:
                namespace = self._catalog.namespaces.get(event.namespace_id)
                of = there.setdefault(event.namespace_id, {})
                size = blocks_per_bundle(namespace.identity.geometry) if namespace and in_bundles else 1
                for name in event.prefix_hashes:
                    row = NO_ROW if namespace is None else namespace.rows.get(name, NO_ROW)
                    if self._is_end(row, size):
                        of[name] = self._tier(row)
                num_names += len(event.prefix_hashes)
                if num_names >= STEP_NAMES:
                    break
        return last, [self._change(told[number], of) for number, of in there.items()]

    def _change(self, digest: bytes, tiers: Mapping[bytes, Tier | None]) -> pb.InventoryChange:
        """Return what is told of blocks of one namespace that are in these tiers, or in none."""
        return pb.InventoryChange(
            namespace_digest=digest,
            added=short_names(name for name, tier in tiers.items() if tier is not None),
            removed=short_names(name for name, tier in tiers.items() if tier is None),
            added_on_disk=short_names(name for name, tier in tiers.items() if tier == self._log_tier),
        )

    def _message(self, changes: list[pb.InventoryChange]) -> pb.WatchInventoryResponse:
        return pb.WatchInventoryResponse(
            epoch=self._epoch, host=self._host, changes=changes, load=self._load(), tells_tiers=True
        )
