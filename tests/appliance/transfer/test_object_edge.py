"""ObjectEdge over a folder with faults: every instruction ends, whatever the store does."""

import asyncio
import hashlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtier.appliance.core.events import CopyFinished, Event, ExportFinished, SourceChanged, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, FetchBundle, SearchBundles
from kvtier.appliance.transfer.object_edge import MAX_FAILURES, MAX_IN_FLIGHT, ObjectEdge
from kvtier.sources.objects.fleet_keys import FleetKeys
from kvtier.sources.objects.layout import unpack_head
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier
from kvtier.tiers.encryption.master_keys import MasterKeys
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

    def __init__(self, folder: Path, master: bytes = b"", identity: NamespaceIdentity = IDENTITY) -> None:
        self.bundle = BundleBlocks(identity, b"", 0, NAMES)
        self.keys = FleetKeys(MasterKeys(master)) if master else None
        self.pool = SlotPool(1, 2 << 20)
        self.memory = ExtentEngine(self.pool, Indexes(1 << 12, 1), huge_pages=False)
        self.store = FaultyStore(f"file://{folder}")
        self.events: list[Event] = []
        self.now = 0.0
        self._came = asyncio.Event()
        self.edge = ObjectEdge(
            "folder",
            lambda: self.store,
            {Tier.DRAM: self.memory},
            self._deliver,
            clock=lambda: self.now,
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
        return ExportBundle(number, self.bundle, fragments)

    def fetch(self, deadline_at: float = 1e9) -> FetchBundle:
        """Return a fetch of a bundle into places of this memory."""
        items = [CopyItem(label.position, place, label) for place, label in self.places()]
        halves = [(10, items[: len(NAMES)]), (11, items[len(NAMES) :])]
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


# ------------------------------------------------------------------------------------- encryption

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


def objects(folder: Path) -> list[Path]:
    """Return the bundles in a folder."""
    return sorted(path for path in folder.glob("v1/b/*/*/*/*") if "#" not in path.name)


def test_an_encrypted_bundle_is_read_by_hosts_with_the_master_key_and_tells_others_nothing(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, RED)
        export = await exported(one)
        await other.open()
        other.edge.execute(SearchBundles(1, RED, [NAMES[-1], b"x" * 32]))
        assert await other.last(SourceSearched) == SourceSearched(1, 1, 1)
        fetch = other.fetch()
        other.edge.execute(fetch)
        await other.last(CopyFinished, 2)
        items = [item for _, part in fetch.batches for item in part]
        assert other.bytes_at(items) == [label.checksum for _, _, label in export.fragments]
        assert other.causes() == {10: {None}, 11: {None}}
        await closed(one)
        await closed(other)
        [path] = objects(tmp_path)
        everything = path.read_bytes()
        for secret in (*NAMES, RED.digest, *(label.checksum for _, _, label in export.fragments)):
            assert secret not in everything
            assert secret.hex() not in str(path)
        head = unpack_head(everything)
        assert head.chain.is_hidden
        plain_host = Host(tmp_path, identity=RED)
        assert await fetched(plain_host) == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}
        await closed(plain_host)

    run(scene())


def test_one_tenant_cannot_read_anothers_bundle(tmp_path: Path) -> None:
    """Not even when a writer of the bucket puts it where it would be read."""

    async def scene() -> None:
        red, blue = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, BLUE)
        await exported(red)
        await exported(blue)
        of_red, of_blue = sorted(objects(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        of_red.write_bytes(of_blue.read_bytes())
        assert await fetched(red) == {10: {Cause.WRONG_IDENTITY}, 11: {Cause.WRONG_IDENTITY}}
        await closed(red)
        await closed(blue)

    run(scene())


def _swap_payloads(whole: bytes) -> bytes:
    """Exchange two payloads of one group, their entries and envelopes; hash the head again."""
    head = unpack_head(whole)
    changed = bytearray(whole)
    (a, b), (c, d) = head.span(0, 0), head.span(0, 1)
    changed[a:b], changed[c:d] = whole[c:d], whole[a:b]
    entries = 136 + 32 * head.num_blocks
    envelopes = entries + 48 * len(head.entries)
    for start, length in ((entries, 48), (envelopes, 64)):
        one, two = whole[start : start + length], whole[start + length : start + 2 * length]
        changed[start : start + 2 * length] = two + one
    end = envelopes + 64 * len(head.entries)
    changed[end : end + 16] = xxhash.xxh3_128_digest(bytes(changed[:end]))
    return bytes(changed)


@pytest.mark.parametrize(
    ("damage", "causes"),
    [
        (lambda whole: whole[:-1], {10: {None}, 11: {Cause.SHORT_TRANSFER}}),
        (
            lambda whole: whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
            {10: {None}, 11: {None, Cause.NOT_AUTHENTIC}},
        ),
        (_swap_payloads, {10: {None, Cause.NOT_AUTHENTIC}, 11: {None}}),
        (
            lambda whole: whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            {10: {Cause.WRONG_IDENTITY}, 11: {Cause.WRONG_IDENTITY}},
        ),
    ],
    ids=["cut", "flipped", "swapped", "head"],
)
def test_a_changed_encrypted_bundle_is_a_miss(
    tmp_path: Path, damage: Callable[[bytes], bytes], causes: dict[int, set[Cause | None]]
) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, RED)
        await exported(one)
        [path] = objects(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert await fetched(other) == causes
        await closed(one)
        await closed(other)

    run(scene())


def test_a_plain_bundle_under_a_hidden_name_is_not_believed(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "plain").mkdir()
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path / "plain", identity=RED)
        await exported(one)
        await exported(other)
        [path], [plain] = objects(tmp_path), objects(tmp_path / "plain")
        path.write_bytes(plain.read_bytes())
        assert await fetched(one) == {10: {Cause.WRONG_IDENTITY}, 11: {Cause.WRONG_IDENTITY}}
        await closed(one)
        await closed(other)

    run(scene())


def test_after_erasing_nothing_is_read_and_the_tenant_gets_another_key(tmp_path: Path) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, RED)
        await exported(one)
        [path] = objects(tmp_path)
        kept = path.read_bytes()  # a copy that its thief keeps
        assert one.keys is not None
        before = one.keys.key_for_writing("tenant:red")
        one.edge.bar("tenant:red")
        refused = one.filled(2)
        one.edge.execute(refused)
        assert not (await one.last(ExportFinished, 2)).is_stored, "at once"
        assert await one.edge.erase("tenant:red") == 1
        one.edge.admit("tenant:red")
        assert objects(tmp_path) == []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept)
        assert await fetched(other) == {10: {Cause.NO_KEY}, 11: {Cause.NO_KEY}}
        one.edge.execute(one.filled(3))
        assert (await one.last(ExportFinished, 3)).is_stored
        assert one.keys.key_for_writing("tenant:red") != before
        assert len(objects(tmp_path)) == 2, "under a name of its own"
        await closed(one)
        await closed(other)

    run(scene())


def test_a_store_with_another_master_key_is_not_used(tmp_path: Path) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, bytes(32), RED)
        await exported(one)
        other.edge.start()
        async with asyncio.timeout(DEADLINE_S):
            while not other.edge.status().problem:
                await asyncio.to_thread(time.sleep, 0.01)
        assert "another master key" in other.edge.status().problem
        assert not other.edge.status().is_open
        other.edge.execute(other.fetch())
        assert other.causes() == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}
        await closed(one)
        await closed(other)

    run(scene())
