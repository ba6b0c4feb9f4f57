"""The error table: complete, used, and the same on every way out. Every row is provoked for real."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import pytest
from grpc_status import rpc_status

from kvtier.appliance import errors
from kvtier.appliance.config import Settings
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.host import daemon
from kvtier.appliance.security import request_checks as checks
from kvtier.v1 import admin_pb2, direct_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.errors import DETAIL_KEY
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from kvtier.v1.local import Method
from kvtier.v1.residence import RESIDENCE_EXTENT

from .conftest import small_settings
from .loops import DaemonThread
from .raw_client import RawClient, Refused, chain, identity

if TYPE_CHECKING:  # they exist for type checkers only
    from kvtier.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceAsyncStub


# --------------------------------------------------------------- provoking every row, for real

Attempt: TypeAlias = Callable[[], object]


class World:
    """A daemon, a local client of it, and its gRPC stubs."""

    def __init__(self, served: DaemonThread, raw: RawClient) -> None:
        self.served, self.raw = served, raw
        self.address = served.daemon.grpc.addresses[0]

    def rpc(self, main: Callable[["KVCacheServiceAsyncStub"], Coroutine[Any, Any, object]]) -> object:
        async def connected() -> object:
            async with grpc.aio.insecure_channel(self.address) as channel:
                return await main(KVCacheServiceStub(channel))

        return self.served.wait(connected())  # grpc.aio supports one loop in a process

    def admin(self, main: Callable[["AdminServiceAsyncStub"], Coroutine[Any, Any, object]]) -> object:
        async def connected() -> object:
            async with grpc.aio.insecure_channel(self.address) as channel:
                return await main(AdminServiceStub(channel))

        return self.served.wait(connected())  # grpc.aio supports one loop in a process


def reason_of(attempt: Attempt) -> tuple[str, str]:
    """Return (reason, message) of the refusal; checks what comes with it over gRPC."""
    try:
        attempt()
    except Refused as refused:
        return refused.detail.reason, refused.detail.message
    except grpc.aio.AioRpcError as failed:
        return reason_of_rpc(failed)
    pytest.fail("nothing was refused")


def reason_of_rpc(failed: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Return (reason, message) of a failed RPC; checks what travels beside it."""
    packed = dict(failed.trailing_metadata())[DETAIL_KEY]
    assert isinstance(packed, bytes)
    detail = types_pb2.ErrorDetail.FromString(packed)
    assert failed.code() is errors.REASONS[detail.reason].code
    assert rpc_status.from_call(failed).details, "google.rpc.Status is there, too"
    return detail.reason, detail.message


def lookup(raw: RawClient, namespace_id: int = 1, hashes: bytes = b"x" * 32) -> Attempt:
    request = pb.LookupRequest(namespace_id=namespace_id, prefix_hashes=hashes)
    return lambda: raw.call(Method.LOOKUP, request, pb.LookupResponse)


def commit(raw: RawClient, *spans: tuple[int, int], blocks: int = 1, reservation_id: int = 0) -> Attempt:
    reserve = pb.ReserveRequest(namespace_id=1, prefix_hashes=b"".join(chain(blocks, "commit")))
    request = pb.CommitRequest(
        reservation_id=reservation_id,
        reserve=None if reservation_id else reserve,
        spans=[types_pb2.StagingSpan(offset=offset, length=length) for offset, length in spans],
    )
    return lambda: raw.call(Method.COMMIT, request, pb.CommitResponse)


def acquire(raw: RawClient, **fields: Any) -> Attempt:
    request = pb.AcquireRequest(namespace_id=1, prefix_hashes=b"x" * 32, **fields)
    return lambda: raw.call(Method.ACQUIRE, request, pb.AcquireResponse)


def get_pages(raw: RawClient, num_pages: int, num_hints: int = 0) -> Attempt:
    acquire = pb.AcquireRequest(namespace_id=1, retention=[types_pb2.Retention()] * num_hints)
    request = direct_pb2.GetPagesRequest(
        registration_id=1 << 63, acquire=acquire, page_ids=bytes(4 * num_pages)
    )
    return lambda: raw.call(Method.GET_PAGES, request, direct_pb2.GetPagesResponse)


def pin(raw: RawClient, floor: int, hashes: list[bytes], namespace_id: int = 1) -> Attempt:
    request = pb.PinRequest(
        namespace_id=namespace_id,
        prefix_hashes=b"".join(hashes),
        floor=types_pb2.Tier.ValueType(floor),
        ttl_ms=1000,
    )
    return lambda: raw.call(Method.PIN, request, pb.PinResponse)


def store_in(raw: RawClient, model: bytes) -> bytes:
    """Store a block in a namespace of its own."""
    return raw.put(raw.register(model=model), chain(1), bytes(32768))


LOCAL_REFUSALS: dict[str, tuple[str, Callable[[RawClient], Attempt]]] = {
    "half a hash": ("BAD_KEY", lambda raw: lookup(raw, hashes=b"x" * 33)),
    "no hash": ("BAD_KEY", lambda raw: lookup(raw, hashes=b"")),
    "a block twice": (
        "BAD_KEY",
        lambda raw: (
            lambda: raw.call(
                Method.RESERVE, pb.ReserveRequest(namespace_id=1, prefix_hashes=b"x" * 64), pb.ReserveResponse
            )
        ),
    ),
    "a block to be read twice": (
        "BAD_KEY",
        lambda raw: (
            lambda: raw.call(
                Method.ACQUIRE, pb.AcquireRequest(namespace_id=1, prefix_hashes=b"x" * 64), pb.AcquireResponse
            )
        ),
    ),
    "a crooked parent": (
        "BAD_KEY",
        lambda raw: (
            lambda: raw.call(
                Method.RESERVE,
                pb.ReserveRequest(namespace_id=1, parent_hash=b"short", prefix_hashes=b"x" * 32),
                pb.ReserveResponse,
            )
        ),
    ),
    "too many blocks": ("TOO_MANY_BLOCKS", lambda raw: lookup(raw, hashes=bytes(32 * 4097))),
    "an unknown namespace": ("UNKNOWN_NAMESPACE", lambda raw: lookup(raw, namespace_id=99)),
    "a span past the end": ("BAD_SPAN", lambda raw: commit(raw, ((1 << 20) - 16383, 16384))),
    "a span that wraps around": ("BAD_SPAN", lambda raw: commit(raw, ((1 << 64) - 16384, 16384))),
    "a span too short": ("BAD_SPAN", lambda raw: commit(raw, (0, 16383))),
    "more spans than blocks in a request": ("TOO_MANY_BLOCKS", lambda raw: commit(raw, *[(0, 0)] * 4097)),
    "a request that takes long to decode": (
        "TOO_LARGE",
        lambda raw: (
            lambda: raw.call(Method.RELEASE, pb.ReleaseRequest(lease_ids=[1] * 600_000), pb.ReleaseResponse)
        ),
    ),
    "the longest chain with 32 pages a block": ("NO_DEVICE", lambda raw: get_pages(raw, num_pages=4096 * 32)),
    "hints before many page ids": (
        "TOO_LARGE",
        lambda raw: get_pages(raw, num_pages=4096 * 32, num_hints=300_000),
    ),
    "fewer spans than blocks": ("BAD_SPAN", lambda raw: commit(raw, (0, 16384), blocks=2)),
    "nothing to commit": (
        "BAD_REQUEST",
        lambda raw: lambda: raw.call(Method.COMMIT, pb.CommitRequest(), pb.CommitResponse),
    ),
    "an unknown reservation": ("UNKNOWN_RESERVATION", lambda raw: commit(raw, reservation_id=77)),
    "an urgency of the future": ("BAD_REQUEST", lambda raw: acquire(raw, urgency=99)),
    "an endless request id": ("BAD_REQUEST", lambda raw: acquire(raw, request_id="x" * 257)),
    "a first block past the end": ("BAD_REQUEST", lambda raw: acquire(raw, first_block=1)),
    "a lease for ever": ("LEASE_TTL_TOO_LARGE", lambda raw: acquire(raw, ttl_ms=1 << 62)),
    "somebody else's name": ("UNKNOWN_CLIENT", lambda raw: acquire(raw, client_id=12345)),
    "a nameless session": (
        "BAD_REQUEST",
        lambda raw: (
            lambda: raw.call(Method.UPDATE_SESSION, pb.UpdateSessionRequest(), pb.UpdateSessionResponse)
        ),
    ),
    "prefetch to disk": (
        "BAD_REQUEST",
        lambda raw: (
            lambda: raw.call(
                Method.PREFETCH,
                pb.PrefetchRequest(namespace_id=1, prefix_hashes=b"x" * 32, target=types_pb2.TIER_NVME),
                pb.PrefetchResponse,
            )
        ),
    ),
    "a tier of the future": ("BAD_REQUEST", lambda raw: pin(raw, 99, chain(1))),
    "a fragment no tier can hold": (
        "LAYOUT_MISMATCH",
        lambda raw: lambda: raw.register(layers=1024, layers_per_group=1024),
    ),
    "a digest too short": ("BAD_NAMESPACE", lambda raw: lambda: raw.register(model=b"m")),
    "a profile nobody has": ("UNKNOWN_PROFILE", lambda raw: lambda: raw.register(profile=b"p" * 32)),
    "no heads": ("BAD_NAMESPACE", lambda raw: lambda: raw.register(heads=0)),
    "too many namespaces": (
        "TOO_MANY_NAMESPACES",
        lambda raw: lambda: [store_in(raw, model * 16) for model in (b"m", b"n", b"o")],
    ),
    "extents of nobody": ("UNKNOWN_EXTENT", lambda raw: lambda: raw.map_extents([10_000])),
    "an extent twice": ("BAD_REQUEST", lambda raw: lambda: raw.map_extents([RESIDENCE_EXTENT] * 2)),
    "too many extents": ("BAD_REQUEST", lambda raw: lambda: raw.map_extents(list(range(65)))),
    "pins beyond the tier": ("TIER_FULL", lambda raw: pin_all(raw)),
}


def pin_all(raw: RawClient) -> Attempt:
    """Pin more than a tier may hold pinned: a part of its 8 MiB."""

    def attempt() -> None:
        namespace = raw.register(heads=4)  # fragments of 16 KiB fill their slots
        for number in range(16):
            blocks = chain(16, f"pin{number}")
            raw.put(namespace, blocks, bytes(16 * 32768))
            pin(raw, types_pb2.TIER_DRAM, blocks, namespace.namespace_id)()

    return attempt


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A daemon with small limits, and a client."""
    options = replace(PlannerOptions(), max_clients=2, max_namespaces=2)
    monkeypatch.setattr(Settings, "planner_options", lambda self: options)
    monkeypatch.setattr(daemon, "MAX_STREAM_PUT_BYTES", 1 << 20)
    settings = small_settings(tmp_path, limits={"max_clients": 2})
    with DaemonThread(settings) as served, RawClient(served.daemon.service.facts.local_socket_path) as raw:
        raw.attach()
        raw.register()
        yield World(served, raw)


@pytest.mark.parametrize("what", LOCAL_REFUSALS)
def test_the_local_channel_refuses(world: World, what: str) -> None:
    reason, prepare = LOCAL_REFUSALS[what]
    found, message = reason_of(prepare(world.raw))
    assert (found, bool(message)) == (reason, True)
    assert world.raw.register().namespace_id == 1, "and goes on"


# ------------------------------------------------------------------------------- only over gRPC


async def opened(stub: "KVCacheServiceAsyncStub") -> int:
    return (await stub.OpenClient(pb.OpenClientRequest(name="test"))).client_id


async def unknown_client(stub: "KVCacheServiceAsyncStub") -> object:
    return await stub.Release(pb.ReleaseRequest(client_id=1))  # a local one's id


async def domain_over_grpc(stub: "KVCacheServiceAsyncStub") -> object:
    given = identity()
    given.domain = "tenant"
    return await stub.RegisterNamespace(pb.RegisterNamespaceRequest(identity=given))


async def commit_without_staging(stub: "KVCacheServiceAsyncStub") -> object:
    client = await opened(stub)
    reserve = pb.ReserveRequest(namespace_id=1, prefix_hashes=b"x" * 32)
    span = types_pb2.StagingSpan(offset=0, length=16384)
    return await stub.Commit(pb.CommitRequest(client_id=client, reserve=reserve, spans=[span]))


def put_parts(client: int, num_blocks: int, *chunks: bytes) -> AsyncIterator[pb.PutRequest]:
    async def parts() -> AsyncIterator[pb.PutRequest]:
        blocks = b"".join(chain(num_blocks, "put"))
        yield pb.PutRequest(header=pb.ReserveRequest(client_id=client, namespace_id=1, prefix_hashes=blocks))
        for chunk in chunks:
            yield pb.PutRequest(chunk=chunk)

    return parts()


async def release_too_large(stub: "KVCacheServiceAsyncStub") -> object:
    return await stub.Release(pb.ReleaseRequest(client_id=await opened(stub), lease_ids=[1] * 600_000))


async def get_with_endless_codecs(stub: "KVCacheServiceAsyncStub") -> object:
    acquire = pb.AcquireRequest(client_id=await opened(stub), namespace_id=1, prefix_hashes=b"x" * 32)
    return [answer async for answer in stub.Get(pb.GetRequest(acquire=acquire, codecs=range(65)))]


async def put_too_large(stub: "KVCacheServiceAsyncStub") -> object:
    return await stub.Put(put_parts(await opened(stub), 65))


async def put_too_short(stub: "KVCacheServiceAsyncStub") -> object:
    return await stub.Put(put_parts(await opened(stub), 2, bytes(16384)))


async def put_too_long(stub: "KVCacheServiceAsyncStub") -> object:
    return await stub.Put(put_parts(await opened(stub), 1, bytes(16384), b"x"))


async def put_with_endless_header(stub: "KVCacheServiceAsyncStub", *before: pb.PutRequest) -> object:
    async def parts() -> AsyncIterator[pb.PutRequest]:
        for part in before:
            yield part
        yield pb.PutRequest(header=pb.ReserveRequest(retention=[types_pb2.Retention()] * 300_000))

    return await stub.Put(parts())


async def put_with_endless_second_header(stub: "KVCacheServiceAsyncStub") -> object:
    before = [part async for part in put_parts(await opened(stub), 1)]
    return await put_with_endless_header(stub, *before)


async def put_without_header(stub: "KVCacheServiceAsyncStub") -> object:
    async def parts() -> AsyncIterator[pb.PutRequest]:
        yield pb.PutRequest(chunk=b"x")

    return await stub.Put(parts())


async def puts_beyond_the_buffers(stub: "KVCacheServiceAsyncStub") -> object:
    """One put holds all the buffers while a second one asks."""
    client = await opened(stub)
    more = asyncio.Event()

    async def parts() -> AsyncIterator[pb.PutRequest]:
        yield pb.PutRequest(
            header=pb.ReserveRequest(
                client_id=client, namespace_id=1, prefix_hashes=b"".join(chain(64, "slow"))
            )
        )
        for _ in range(8):
            yield pb.PutRequest(chunk=bytes(64 << 10))
        await more.wait()

    slow = stub.Put(parts())
    refusals = 0
    try:
        async with asyncio.timeout(60.0):
            while True:  # until the first one's header has arrived
                await stub.Put(put_parts(client, 1, bytes(16384)))
                refusals += 1
    finally:
        more.set()
        slow.cancel()


async def too_many_clients(stub: "KVCacheServiceAsyncStub") -> object:
    return [await opened(stub) for _ in range(2)]  # the local one is the third


GRPC_REFUSALS = [
    ("UNKNOWN_CLIENT", unknown_client),
    ("BAD_NAMESPACE", domain_over_grpc),
    ("BAD_SPAN", commit_without_staging),
    ("TOO_LARGE", put_too_large),
    ("TOO_LARGE", release_too_large),
    ("BAD_REQUEST", get_with_endless_codecs),
    ("BAD_REQUEST", put_too_short),
    ("BAD_REQUEST", put_too_long),
    ("TOO_LARGE", put_with_endless_header),
    ("TOO_LARGE", put_with_endless_second_header),
    ("BAD_REQUEST", put_without_header),
    ("TOO_MANY_IN_FLIGHT", puts_beyond_the_buffers),
    ("TOO_MANY_CLIENTS", too_many_clients),
]


@pytest.mark.parametrize(("reason", "main"), GRPC_REFUSALS, ids=lambda x: getattr(x, "__name__", None))
def test_grpc_refuses(
    world: World, reason: str, main: Callable[["KVCacheServiceAsyncStub"], Coroutine[Any, Any, object]]
) -> None:
    found, message = reason_of(lambda: world.rpc(main))
    assert (found, bool(message)) == (reason, True)


def test_a_get_is_refused_whose_lease_ends_while_its_bytes_are_sent(world: World) -> None:
    clients = world.served.daemon.planner.leases.clients

    async def main(stub: "KVCacheServiceAsyncStub") -> None:
        client = await opened(stub)
        await stub.Put(put_parts(client, 60, *[bytes(16384) for _ in range(60)]))
        blocks = b"".join(chain(60, "put"))
        acquire = pb.AcquireRequest(client_id=client, namespace_id=1, prefix_hashes=blocks)
        async for _ in stub.Get(pb.GetRequest(acquire=acquire)):
            held = list(clients[client].leases)  # its ids are not told to callers of Get
            await stub.Release(pb.ReleaseRequest(client_id=client, lease_ids=held))

    assert reason_of(lambda: world.rpc(main))[0] == "LEASE_EXPIRED"


async def nothing_there(stub: "AdminServiceAsyncStub") -> object:
    return await stub.Inspect(admin_pb2.InspectRequest(session_id="nobody"))


async def evict_from_nowhere(stub: "AdminServiceAsyncStub") -> object:
    return await stub.Evict(admin_pb2.EvictRequest(tier=types_pb2.TIER_HBM))


def test_what_stands_around_bulk_data_hides_nothing() -> None:
    put = pb.PutRequest(header=pb.ReserveRequest(prefix_hashes=bytes(1 << 20))).SerializeToString()
    chunk = pb.PutRequest(chunk=bytes(1 << 20)).SerializeToString()
    assert checks.encoded("Put", chunk) == chunk
    begun = b"\x12\x80\x80\x80\x02\0\0\0"  # of a chunk of 4 MiB
    hidden = [
        b"\x12\0" + put,
        b"\x09" + begun + put,
        b"\x73" + begun + b"\x74" + put,
        put + b"\x12\xff\xff\xff\x7f",
    ]
    for message in (*hidden, b"\x12\0" * 9 + chunk, b"\xff" * (1 << 20)):
        with pytest.raises(errors.CallerError, match="without bulk data"):
            checks.encoded("Put", message)


async def policy_of_a_million_bytes(stub: "AdminServiceAsyncStub") -> object:
    text = "no_such_setting: 1\n".ljust(1_000_000, "#")
    return await stub.ApplyPolicy(admin_pb2.ApplyPolicyRequest(yaml=text, dry_run=True))


@pytest.mark.parametrize(
    ("reason", "main"),
    [
        ("NOTHING_THERE", nothing_there),
        ("BAD_TIER", evict_from_nowhere),
        ("BAD_POLICY", policy_of_a_million_bytes),
    ],
)
def test_admin_refuses(
    world: World, reason: str, main: Callable[["AdminServiceAsyncStub"], Coroutine[Any, Any, object]]
) -> None:
    assert reason_of(lambda: world.admin(main))[0] == reason


def test_a_draining_daemon_takes_nothing_new(world: World) -> None:
    world.served.wait(world.served.daemon.drain(0.1))
    assert reason_of(commit(world.raw, (0, 16384)))[0] == "DRAINING"
    with RawClient(world.served.daemon.service.facts.local_socket_path) as late:
        assert reason_of(late.attach)[0] == "DRAINING"
    assert reason_of(lambda: world.rpc(opened))[0] == "DRAINING"
    lookup(world.raw)()  # what is there may still be read


def test_a_defect_is_said_to_be_one(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret details")

    monkeypatch.setattr(world.served.daemon.planner, "lookup", broken)
    reason, message = reason_of(lookup(world.raw))
    assert reason == "BUG"
    assert "secret" not in message
    assert "secret details" in caplog.text, "the log says it"


def test_every_row_of_the_table_was_provoked_above() -> None:
    provoked = {reason for reason, _ in LOCAL_REFUSALS.values()} | {reason for reason, _ in GRPC_REFUSALS}
    provoked |= {"NOTHING_THERE", "BAD_TIER", "DRAINING", "BUG", "LEASE_EXPIRED"}  # or above
    provoked |= {
        "NOT_AUTHENTICATED",
        "NO_TENANT",
        "NOT_ADMIN",
        "NOT_A_HOST",
        "QUOTA_EXCEEDED",
    }  # in tests/security
    provoked |= {"SOURCE_FAILED", "DISK_FAILED"}  # test_fleet_encryption.py, test_erase.py
    provoked |= {"NOT_ENCRYPTED", "BAD_POLICY", "NEEDS_RESTART", "GENERATION_CONFLICT"}  # test_reload.py
    provoked |= {"BAD_PAGES", "NO_DEVICE", "UNKNOWN_PAGES"}  # in tests/e2e/test_direct.py
    assert provoked == set(errors.REASONS)
