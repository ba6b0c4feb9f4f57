"""ObjectEdge over Ceph's gateway that is killed, stopped, cut off, filled, emptied and lied about.

Each case: two bundles are stored, the fault begins, every kind of instruction is given and ends, the fault
ends, and the same edge fetches and stores again. Bytes are compared with those that were put, outside of the
code under test, and what is in the bucket with the checksums that it names.
"""

import asyncio
import hashlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, NamedTuple

import pytest

from kvtier.appliance.core.events import CopyFinished, ExportFinished, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, SearchBundles
from kvtier.appliance.transfer.object_edge import LIMITS
from kvtier.sources.objects.layout import pack_head, unpack_head
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.base import Cause
from tests.appliance.loops import run
from tests.appliance.transfer.edge_host import Host, closed
from tests.sources.objects.bundles import verify_bundle
from tests.sources.objects.gateway import Cluster, Gateway, gateway, why_not

from .proxy import Answer, Proxy

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)
if not os.environ.get("KVTIER_GATEWAY_FAULTS"):
    pytest.skip("faults of a gateway take minutes: `make test-gateway`", allow_module_level=True)

DEADLINE_S = 120.0
FETCH_S = 5.0  # that a fetch has
NO_CACHED_QUOTA = "rgw bucket quota ttl = 0\nrgw user quota bucket sync interval = 0\n"
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nRetry-After: 3600\r\nContent-Type: application/xml\r\n"
    b"Content-Length: 44\r\nConnection: close\r\n\r\n<Error><Code>SlowDown</Code></Error>        "
)


class TimedHost(Host):
    """A host whose deadlines are of this machine's clock."""

    @property
    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    @now.setter
    def now(self, value: float) -> None:
        """Leave the clock alone."""


class World(NamedTuple):
    """What a fault can spoil. `store` is the bucket, reached past the proxy; `key` the first bundle's."""

    running: Gateway
    cluster: Cluster
    proxy: Proxy
    bucket: str
    store: ObjectStore
    key: str
    other_key: str
    seen: list[str]  # how often the fault struck


class Fault(NamedTuple):
    """Begins and ends a fault; `causes`: those that fetches of the first bundle may end with."""

    begin: Callable[[World], object]
    end: Callable[[World], object] = lambda world: None
    strikes: bool = True  # something fails of it, surely


def strike(operation: str, then: Callable[[World], Answer | None]) -> Fault:
    """Return a fault at every request of one operation, `all` of them or those of a comma's list."""

    def begin(world: World) -> None:
        def on_request(one: str, path: str) -> Answer | None:
            if operation != "all" and one not in operation.split(","):
                return None
            world.seen.append(one)
            return then(world)

        world.proxy.on_request = on_request

    return Fault(begin, lambda world: world.proxy.heal())


def killed(operation: str, *, at: int | None = None) -> Fault:
    """Return a gateway that is killed when a request of this kind comes.
    With `at` bytes of its answer are sent before the connection is reset."""

    def kill(world: World) -> Answer | None:
        if len(world.seen) > 1:  # it is dead, or is starting again
            return Answer(instead=b"")
        world.cluster.kill_gateway()
        return None if at is None else Answer(reset_at=at)

    def end(world: World) -> None:
        world.proxy.heal()
        world.cluster.start_gateway()

    return strike(operation, kill)._replace(end=end)


def stored(change: Callable[[bytes], bytes]) -> Fault:
    """Return a fault that changes the stored bytes of the first bundle."""
    saved: list[bytes] = []

    def begin(world: World) -> None:
        saved.append(whole := raw(world.store, world.key))
        overwrite(world.store, world.key, change(whole))
        world.seen.append("stored")

    return Fault(begin, lambda world: overwrite(world.store, world.key, saved.pop()))


def raw(store: ObjectStore, key: str) -> bytes:
    """Return an object's bytes."""
    from obstore import get

    inner: Any = store._store
    return bytes(get(inner, key).bytes())


def overwrite(store: ObjectStore, key: str, data: bytes) -> None:
    """Replace an object, which no code of kvtier does."""
    from obstore import put

    inner: Any = store._store
    put(inner, key, data)


def in_another_namespace(data: bytes) -> bytes:
    """Return a bundle as another namespace has it, with the same names and payloads."""
    head = unpack_head(data)
    moved = pack_head(replace(head, chain=head.chain._replace(namespace_digest=b"o" * 32)))
    return moved + data[len(moved) :]


def swap(world: World) -> None:
    """Let two objects change names."""
    first, second = raw(world.store, world.key), raw(world.store, world.other_key)
    overwrite(world.store, world.key, second)
    overwrite(world.store, world.other_key, first)
    world.seen.append("swapped")


def delete_epoch(world: World) -> None:
    """Delete what is stored, as a lifecycle rule does at the end of an epoch."""
    world.store.delete([one.key for one in world.store.objects("v1/b/")])


def mid_read(world: World) -> Answer | None:
    """Let the epoch end when the first bytes of a bundle are under way."""
    delete_epoch(world)
    return None


def no_bucket(world: World) -> None:
    world.cluster.admin("bucket", "rm", f"--bucket={world.bucket}", "--purge-objects")
    world.seen.append("deleted")


def full(world: World) -> None:
    world.cluster.admin("quota", "set", "--quota-scope=user", "--uid=kv", "--max-size=1")
    world.cluster.admin("quota", "enable", "--quota-scope=user", "--uid=kv")
    world.seen.append("full")


def user(word: str) -> Callable[[World], None]:
    """Return what suspends or enables the user."""

    def act(world: World) -> None:
        world.cluster.admin("user", word, "--uid=kv")
        world.seen.append(word)

    return act


def stop(world: World) -> None:
    world.cluster.signal_gateway(SIGSTOP)
    world.seen.append("stopped")


def flip(at: int) -> Callable[[bytes], bytes]:
    """Return what inverts a bit of byte `at`."""
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 or len(data) :]


STEPS = ("list", "head", "get", "put", "copy")
FAULTS: dict[str, Fault] = {
    **{f"gateway killed at a {step}": killed(step) for step in STEPS if step not in ("list", "copy")},
    "gateway killed in a head's answer": killed("head", at=20),
    "gateway killed in the bytes of a bundle": killed("get", at=9000),
    "gateway killed before it says that it stored": killed("put", at=0),
    "connections reset at once": strike("all", lambda world: Answer(instead=b"")),
    "connections reset in the answer": strike("all", lambda world: Answer(reset_at=40)),
    "connections reset in the bytes of a bundle": strike("get", lambda world: Answer(reset_at=9000)),
    "503 with Retry-After": strike("all", lambda world: Answer(instead=SLOW_DOWN)),
    "gateway stopped": Fault(stop, lambda world: world.cluster.signal_gateway(SIGCONT)),
    "bit flipped on the way": strike("get", lambda world: Answer(flip_at=9000)),
    "object cut": stored(lambda data: data[: len(data) // 2]),
    "object cut in its head": stored(lambda data: data[:100]),
    "object empty": stored(lambda data: b""),
    "bit flipped in the head": stored(flip(200)),
    "bit flipped in a payload": stored(flip(-1)),
    "objects swapped between names": Fault(swap, swap),
    "object of another namespace": stored(in_another_namespace),
    "bucket full": Fault(
        full, lambda world: world.cluster.admin("quota", "disable", "--quota-scope=user", "--uid=kv")
    ),
    "credentials revoked": Fault(user("suspend"), user("enable")),
    "bucket deleted": Fault(no_bucket, lambda world: world.running.make_bucket(world.bucket)),
    "epoch ends in the middle of a read": strike("get", mid_read)._replace(strikes=False),
}


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    if (reason := why_not()) or os.environ.get("KVTIER_S3_ENDPOINT"):
        pytest.skip(reason or "the gateway has to be started here, to be killed")
    with gateway(tmp_path_factory.mktemp("ceph"), NO_CACHED_QUOTA) as running:
        yield running


def host(monkeypatch: pytest.MonkeyPatch, url: str, endpoint: str, names: list[bytes]) -> TimedHost:
    """Return a host that reaches the store by `endpoint`; its bundle has these names."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    made = TimedHost(url, limits=LIMITS)
    made.bundle = replace_names(made.bundle, names)
    return made


def replace_names(bundle: BundleBlocks, names: list[bytes]) -> BundleBlocks:
    return BundleBlocks(bundle.identity, b"", 0, names)


def names_of(case: str, number: int) -> list[bytes]:
    """Return the names of a bundle."""
    return [hashlib.sha256(f"{case} {number} {block}".encode()).digest() for block in range(4)]


async def fetched(host: Host, exported: ExportBundle, copy: int, first: int = 0) -> set[Cause | None]:
    """Fetch a bundle; return how it ended. What landed is what was put."""
    host.bundle = exported.bundle
    work = host.fetch(time.monotonic() + FETCH_S, copy, first)
    host.edge.execute(work)
    await host.until(lambda: {copy, copy + 1} <= host.causes().keys())
    wanted = {(label.prefix_hash, label.group): label.checksum for _, _, label in exported.fragments}
    ended = {event.copy: event.outcomes for event in host.events if isinstance(event, CopyFinished)}
    causes = set()
    for number, items in work.batches:
        for item, outcome in zip(items, ended[number], strict=True):
            causes.add(outcome.cause)
            if outcome.cause is None:
                assert host.bytes_at([item]) == [wanted[item.label.prefix_hash, item.label.group]]
            host.pool.release(item.target, item.label.raw_length)
    return causes


async def stored_once(host: Host, work: ExportBundle, number: int) -> bool:
    """Export; return whether the store has it, as far as the edge knows."""
    before = sum(isinstance(one, ExportFinished) for one in host.events)
    host.edge.execute(replace(work, export=number))
    return bool((await host.last(ExportFinished, before + 1)).is_stored)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_of_the_gateway(
    case: str, ceph: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[case]
    bucket = f"case{list(FAULTS).index(case)}"
    url = f"s3://{bucket}/kv"
    for name, value in ceph.environment().items():
        monkeypatch.setenv(name, value)
    assert ceph.cluster is not None
    ceph.cluster.start_gateway()  # another case may have failed
    ceph.make_bucket(bucket)
    proxy = Proxy(int(ceph.endpoint.rpartition(":")[2]))

    async def scene() -> None:
        one = host(monkeypatch, url, ceph.endpoint, names_of(case, 0))
        await one.open()
        bundles = []
        for number in range(3):
            one.bundle = replace_names(one.bundle, names_of(case, number))
            bundles.append(one.filled(number))
        first, second, third = bundles
        await recovered(one, first, 1)  # a new cluster makes its pools with the first object
        await recovered(one, second, 1001)
        store = ObjectStore(url, endpoint=ceph.endpoint)
        keys = {one.key.rpartition("/")[2]: one.key for one in store.objects("v1/b/")}
        key, other_key = (keys[work.bundle.names[-1].hex()] for work in (first, second))
        assert ceph.cluster is not None
        world = World(ceph, ceph.cluster, proxy, bucket, store, key, other_key, [])
        other = host(monkeypatch, url, f"http://127.0.0.1:{proxy.port}", names_of(case, 0))
        await other.open()
        await asyncio.to_thread(fault.begin, world)
        causes = set()
        try:
            other.edge.execute(SearchBundles(1, first.bundle.identity, [first.bundle.names[-1]]))
            await other.last(SourceSearched)
            causes |= await fetched(other, first, 10)
            causes |= await fetched(other, second, 20, first=1)  # found wrong twice, it is passed over
            other.bundle = third.bundle
            work = other.filled(3)
            is_stored = await stored_once(other, work, 3)
        finally:
            await asyncio.to_thread(fault.end, world)
        assert world.seen, "the fault did not strike"
        if fault.strikes:
            assert causes - {None} or not is_stored, "nothing failed"
        await recovered(other, work, 100)
        for stored_one in store.objects("v1/b/"):
            verify_bundle(memoryview(raw(store, stored_one.key)))
        if store.size(key) is not None:
            await recovered_fetch(other, first)
        await closed(one)
        await closed(other)

    try:
        run(scene())
    finally:
        proxy.close()


async def recovered(host: Host, work: ExportBundle, number: int) -> None:
    """Export and fetch until both succeed, in the same process."""
    pause_s = 0.0
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.sleep(pause_s, not await stored_once(host, work, number)):
            number, pause_s = number + 1, 0.2
    await recovered_fetch(host, work)


async def recovered_fetch(host: Host, work: ExportBundle) -> None:
    """Fetch until all of it lands."""
    async with asyncio.timeout(DEADLINE_S):
        copy = 1000 * (1 + len(host.events))
        while await asyncio.sleep(0.2, await fetched(host, work, copy := copy + 2) != {None}):
            pass
