"""ObjectEdge over a folder with faults: every instruction ends, whatever the store does."""

import asyncio
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.core.events import CopyFinished, Event, ExportFinished, SourceChanged, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, FetchBundle, SearchBundles
from kvtier.appliance.transfer.object_edge import MAX_FAILURES, MAX_IN_FLIGHT, ObjectEdge
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tiers.payload import checksum

from ..loops import run

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

GEOMETRY = Geometry(4, 2, 16, 64, "float16", layers_per_group=2)
IDENTITY = NamespaceIdentity(b"m" * 32, GEOMETRY)
NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
BUNDLE = BundleBlocks(IDENTITY, b"", 0, NAMES)
DEADLINE_S = 60.0


class FaultyStore(ObjectStore):
    """A folder that fails when it is told to."""

    problem: StoreProblem | None = None
    before_chunk: Callable[[], None] = staticmethod(lambda: None)

    def size(self, key: str) -> int | None:
        """See ObjectStore."""
        self._fail()
        return super().size(key)

    def check_bucket(self) -> None:
        """See ObjectStore."""
        self._fail()
        super().check_bucket()

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """See ObjectStore."""
        self._fail()
        for chunk in super().stream(key, start, end):
            self.before_chunk()
            yield chunk

    def _fail(self) -> None:
        if self.problem is not None:
            raise StoreError(self.problem)


class Host:
    """A memory tier, and an edge over a folder; collects the events."""

    def __init__(self, folder: Path) -> None:
        self.pool = SlotPool(1, 2 << 20)
        self.memory = ExtentEngine(self.pool, Indexes(1 << 12, 1), huge_pages=False)
        self.store = FaultyStore(f"file://{folder}")
        self.events: list[Event] = []
        self.now = 0.0
        self._came = asyncio.Event()
        self.edge = ObjectEdge(
            "folder", lambda: self.store, {Tier.DRAM: self.memory}, self._deliver, clock=lambda: self.now
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
        digest, found = IDENTITY.digest, []
        for group, length in enumerate(GEOMETRY.fragment_bytes):
            for position, name in enumerate(NAMES):
                place = self.pool.reserve(0, length)
                assert place is not None
                parent = NAMES[position - 1] if position else b""
                found.append((place, FragmentLabel(digest, 1, name, parent, position, group, length)))
        return found

    def filled(self, number: int = 1) -> ExportBundle:
        """Put a bundle's bytes into memory; return its export."""
        rng, fragments = np.random.default_rng(7), []
        for place, label in self.places():
            payload = rng.integers(0, 256, label.raw_length, np.uint8).data
            label.checksum = self.memory.write(place, label, payload)
            fragments.append((Tier.DRAM, place, label))
        return ExportBundle(number, BUNDLE, fragments)

    def fetch(self, deadline_at: float = 1e9) -> FetchBundle:
        """Return a fetch of a bundle into places of this memory."""
        items = [CopyItem(label.position, place, label) for place, label in self.places()]
        halves = [(10, items[: len(NAMES)]), (11, items[len(NAMES) :])]
        return FetchBundle(BUNDLE, Tier.DRAM, halves, deadline_at)

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


def test_what_is_exported_is_fetched_bit_for_bit(tmp_path: Path) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path), Host(tmp_path)
        await one.open()
        await other.open()
        export = one.filled()
        one.edge.execute(export)
        ended = await one.last(ExportFinished)
        assert ended.is_stored
        assert ended.num_bytes > sum(label.raw_length for _, _, label in export.fragments)
        other.edge.execute(SearchBundles(1, IDENTITY, [NAMES[-1], b"x" * 32]))
        assert await other.last(SourceSearched) == SourceSearched(1, 1, 1)
        fetch = other.fetch()
        other.edge.execute(fetch)
        await other.last(CopyFinished, 2)
        assert [event.copy for event in other.events if isinstance(event, CopyFinished)] == [10, 11]
        items = [item for _, part in fetch.batches for item in part]
        assert other.bytes_at(items) == [label.checksum for _, _, label in export.fragments]
        other.edge.execute(other.filled(2))
        assert await other.last(ExportFinished) == ExportFinished(2, True, 0), "it is there already"
        await closed(one)
        await closed(other)

    run(scene())


def test_memory_that_is_not_what_was_put_is_not_stored(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        export = host.filled()
        host.memory.view(export.fragments[3][1], 8)[:] = b"12345678"
        host.edge.execute(export)
        assert not (await host.last(ExportFinished)).is_stored
        await closed(host)

    run(scene())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_fetch_ends_at_its_deadline_and_writes_no_more(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.edge.execute(host.filled())
        await host.last(ExportFinished)

        def late() -> None:
            host.now = 2.0

        host.store.before_chunk = late
        host.edge.execute(host.fetch(deadline_at=1.0))
        await host.last(CopyFinished, 2)
        assert host.causes() == {10: {Cause.CANCELLED}, 11: {Cause.CANCELLED}}
        await closed(host)

    run(scene())


def test_a_store_that_fails_is_left_alone_until_it_is_back(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.store.problem = StoreProblem.UNREACHABLE
        for number in range(MAX_FAILURES):
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            assert await host.last(SourceSearched, number + 1) == SourceSearched(number, 0, -1)
        assert not (await host.last(SourceChanged, 2)).is_open
        host.edge.execute(host.fetch())
        host.edge.execute(ExportBundle(5, BUNDLE, []))
        assert host.causes() == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}, "at once"
        assert not (await host.last(ExportFinished)).is_stored
        assert host.edge.status().problem
        host.store.problem = None
        assert (await host.last(SourceChanged, 3)).is_open
        assert not host.edge.status().problem
        await closed(host)

    run(scene())


def test_a_busy_store_gets_half_as_many_requests(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.store.problem = StoreProblem.BUSY
        for number in range(10):
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            await host.last(SourceSearched, number + 1)
        assert host.edge.status().is_open, "busy is not gone"
        assert host.edge.status().max_in_flight == 1
        host.store.problem = None
        for number in range(10, 10 + MAX_IN_FLIGHT):
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            await host.last(SourceSearched, number + 1)
        assert host.edge.status().max_in_flight == MAX_IN_FLIGHT
        await closed(host)

    run(scene())


def test_a_bundle_that_is_not_there_is_a_miss(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.edge.execute(host.fetch())
        await host.last(CopyFinished, 2)
        assert host.causes() == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}
        assert host.edge.status().is_open
        await closed(host)

    run(scene())


def test_stopping_waits_for_the_threads(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.edge.execute(host.filled())
        await host.last(ExportFinished)
        host.edge.execute(host.fetch())
        await closed(host)
        host.edge.execute(host.fetch())  # nothing happens any more

    run(scene())
