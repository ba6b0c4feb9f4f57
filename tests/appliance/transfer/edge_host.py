"""A memory tier and an ObjectEdge over a store that fails when it is told to."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.appliance.core.events import CopyFinished, Event, ExportFinished, SourceChanged
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, FetchBundle
from kvtier.appliance.transfer.object_edge import ObjectEdge
from kvtier.sources.objects.fleet_keys import FleetKeys
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectStore, StoreLimits
from kvtier.sources.objects.usage import StoreRequest
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier
from kvtier.tiers.encryption.master_keys import MasterKeys
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tiers.payload import checksum

GEOMETRY = Geometry(4, 2, 16, 64, "float16", layers_per_group=2)
IDENTITY = NamespaceIdentity(b"m" * 32, GEOMETRY)
NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
BUNDLE = BundleBlocks(IDENTITY, b"", 0, NAMES)
DEADLINE_S = 60.0


class FaultyStore(ObjectStore):
    """A folder that fails when it is told to."""

    problem: StoreProblem | None = None
    before_chunk: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def _request(self, operation: str) -> Iterator[StoreRequest]:
        if self.problem is not None:
            raise StoreError(self.problem)
        with super()._request(operation) as request:
            yield request

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """See ObjectStore."""
        for chunk in super().stream(key, start, end):
            self.before_chunk()
            yield chunk


class Host:
    """A memory tier, and an edge over a folder or an address; collects the events.

    `now` is the clock of deadlines; `now_s` seconds since 1970."""

    def __init__(
        self,
        place: Path | str,
        master: bytes = b"",
        identity: NamespaceIdentity = IDENTITY,
        *,
        limits: StoreLimits | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.bundle = BundleBlocks(identity, b"", 0, NAMES)
        self.keys = FleetKeys(MasterKeys(master)) if master else None
        self.pool = SlotPool(1, 2 << 20)
        self.memory = ExtentEngine(self.pool, Indexes(1 << 12, 1), huge_pages=False)
        self.store = FaultyStore(place if isinstance(place, str) else f"file://{place}", limits=limits)
        self.events: list[Event] = []
        self.now = 0.0
        self._came = asyncio.Event()
        self.edge = ObjectEdge(
            "folder",
            lambda: self.store,
            {Tier.DRAM: self.memory},
            self._deliver,
            clock=lambda: self.now,
            now_s=now_s,
            keys=self.keys,
        )

    def _deliver(self, event: Event) -> None:
        self.events.append(event)
        self._came.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for events."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._came.clear()
                await self._came.wait()

    async def last(self, kind: type, count: int = 1) -> Any:
        """Wait for so many events of a kind; return the last one."""
        await self.until(lambda: sum(isinstance(one, kind) for one in self.events) >= count)
        return [one for one in self.events if isinstance(one, kind)][-1]

    async def open(self) -> None:
        """Start the edge, and wait until it asks the store."""
        self.edge.start()
        assert (await self.last(SourceChanged)).is_open

    def places(self) -> list[tuple[int, FragmentLabel]]:
        """Reserve a bundle's places, group-major."""
        digest, found = self.bundle.identity.digest, []
        for group, length in enumerate(GEOMETRY.fragment_bytes):
            for position, name in enumerate(names := self.bundle.names):
                place = self.pool.reserve(0, length)
                assert place is not None
                parent = names[position - 1] if position else b""
                found.append((place, FragmentLabel(digest, 1, name, parent, position, group, length)))
        return found

    def filled(self, number: int = 1) -> ExportBundle:
        """Put a bundle's bytes into memory; return its export."""
        rng, fragments = np.random.default_rng(list(self.bundle.names[0])), []
        for place, label in self.places():
            payload = rng.integers(0, 256, label.raw_length, np.uint8).data
            label.checksum = self.memory.write(place, label, payload)
            fragments.append((Tier.DRAM, place, label))
        return ExportBundle(number, self.bundle, fragments)

    def fetch(self, deadline_at: float = 1e9, copy: int = 10, first: int = 0) -> FetchBundle:
        """Return a fetch of a bundle into places of this memory, as copies `copy` and the next one.
        From block `first` on: those before it are here."""
        items = [CopyItem(label.position, place, label) for place, label in self.places()]
        halves = [(copy, items[first : len(NAMES)]), (copy + 1, items[len(NAMES) + first :])]
        return FetchBundle(self.bundle, Tier.DRAM, halves, deadline_at)

    def bytes_at(self, items: Any) -> list[bytes]:
        """Return the checksums of what lies at places."""
        return [checksum(self.memory.view(item.target, item.label.raw_length)) for item in items]

    def causes(self) -> dict[int, set[Cause | None]]:
        """Return why the fragments of each copy did not land."""
        ended = [one for one in self.events if isinstance(one, CopyFinished)]
        assert len({one.copy for one in ended}) == len(ended), "a copy ends once"
        return {one.copy: {outcome.cause for outcome in one.outcomes} for one in ended}


async def closed(host: Host) -> None:
    """End what a test began."""
    await host.edge.stop()
    host.memory.close()


MASTER = bytes(range(32))
RED = NamespaceIdentity(b"m" * 32, GEOMETRY, domain="tenant:red")
BLUE = NamespaceIdentity(b"m" * 32, GEOMETRY, domain="tenant:blue")


async def exported(host: Host) -> ExportBundle:
    """Export a bundle; return what was exported."""
    await host.open()
    export = host.filled()
    host.edge.execute(export)
    assert (await host.last(ExportFinished)).is_stored
    return export


async def fetched(host: Host) -> dict[int, set[Cause | None]]:
    """Fetch the bundle; return why its fragments did not land."""
    await host.open()
    host.edge.execute(host.fetch())
    await host.last(CopyFinished, 2)
    return host.causes()
