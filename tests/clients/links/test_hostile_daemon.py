"""Both clients before a daemon that is broken or hostile: only KvtierError leaves, nothing is believed that
never arrived, no byte beside the caller's buffer changes, and the next call has a new connection."""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import AsyncClient, Client, KvtierError, Retry, Timeout, Unavailable
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.local import Flag, Frame, Method, encode
from kvtier.v1.shm import tag_of

from ...contracts.blocking import Blocking
from .hostile import (
    EMPTY_DOMAIN,
    GEOMETRY,
    IDENTITY,
    NAMES,
    PAYLOADS,
    HostileLocal,
    hostile_grpc,
    hostile_local,
)
from .scripted import Connection

Record = Callable[[str, object], None]
BLOCK = GEOMETRY.block_bytes
GUARD = 4096
SEEDS = range(40)
BRIEF = Timeout(call_s=0.1, connect_s=1.0, grace_s=0.1)  # for what a mutation leaves unanswered
PATIENT = Timeout(call_s=60.0, connect_s=60.0, grace_s=60.0)
Make = Callable[..., Any]


def maker(kind: str, stack: ExitStack) -> Make:
    """Return what makes a client that can be used from this thread."""
    if kind == "sync":
        return Client
    runner = stack.enter_context(asyncio.Runner())
    return lambda *arguments, **named: Blocking(AsyncClient(*arguments, **named), runner)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ExitStack() as stack:
        yield maker(request.param, stack)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HostileLocal]:
    """A daemon that answers right, but for the handlers that a test replaces."""
    made = HostileLocal(tmp_path / "kvtier.sock.local")
    made.mutations.of = lambda call: None  # type: ignore[method-assign]
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def client(server: HostileLocal, make: Make) -> Iterator[Any]:
    with make(f"unix://{server.path.with_suffix('')}", timeout=PATIENT, retry=Retry(num_attempts=1)) as one:
        yield one


# ------------------------------------------------------------------------------ every call, many mutations


def get(client: Any, namespace: Any, *, is_proven: bool, **settings: Any) -> None:
    memory = bytearray(b"\xa5" * (GUARD + 4 * BLOCK + GUARD))
    into = memoryview(memory)[GUARD:-GUARD]
    try:
        report = client.get(namespace, NAMES, into, **settings)
    finally:
        assert set(memory[:GUARD] + memory[-GUARD:]) == {0xA5}, "bytes beside the buffer changed"
    assert report.num_blocks <= len(NAMES)
    for row in range(report.num_loaded if is_proven else 0):
        block = row + report.first_block
        assert bytes(into[row * BLOCK : (row + 1) * BLOCK]) == PAYLOADS[block], f"block {block} is not there"


def lease(client: Any, namespace: Any, *, views: bool) -> None:
    held = client.acquire(namespace, NAMES, views=views)
    try:
        for fragment in held:
            assert fragment.block < len(NAMES)
            assert len(fragment.copy()) == BLOCK // 2
        assert held.num_blocks <= len(NAMES)
        for block in range(held.num_blocks if views else 0):
            held.view(block, 0)  # what counts has arrived
        held.extend(1.0)
    finally:
        held.release()


def put(client: Any, namespace: Any) -> None:
    report = client.put(namespace, NAMES[:2], b"".join(PAYLOADS[:2]))
    assert len(report.outcomes) == 2


def rank(client: Any, namespace: Any) -> None:
    for host in client.rank(namespace, NAMES).hosts:
        assert max(host.num_held, host.num_fetched + host.num_computed) <= len(NAMES)
        assert 0.0 <= host.first_token_s < float("inf")


def session(client: Any, _: Any) -> None:
    one = client.session("a", deadline_s=1.0)
    one.fork("b").end()
    one.end()


CALLS: tuple[Callable[[Any, Any, bool], object], ...] = (
    lambda client, namespace, _: client.lookup(namespace, NAMES),
    lambda client, namespace, _: rank(client, namespace),
    lambda client, namespace, is_proven: get(client, namespace, is_proven=is_proven),
    lambda client, namespace, is_proven: get(client, namespace, is_proven=is_proven, first_block=1),
    lambda client, namespace, _: client.get(namespace, NAMES),
    lambda client, namespace, _: lease(client, namespace, views=True),
    lambda client, namespace, _: lease(client, namespace, views=False),
    lambda client, namespace, _: put(client, namespace),
    lambda client, namespace, _: client.pin(namespace, NAMES, 1.0).unpin(),
    lambda client, namespace, _: client.prefetch(namespace, NAMES),
    lambda client, namespace, _: session(client, namespace),
)


def shared_memory() -> set[str]:
    """Return the descriptors of shared memory that this process has open."""
    return {one for one in os.listdir("/proc/self/fd") if _leads_to(one).startswith("/memfd:kvtier")}


def _leads_to(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # that of the listing itself
        return ""


@pytest.fixture
def leaves_no_descriptor() -> Iterator[None]:
    gc.collect()
    before = shared_memory()
    yield
    gc.collect()
    assert shared_memory() <= before, "an engine that tries again and again would run out of them"


@pytest.mark.usefixtures("leaves_no_descriptor")
@pytest.mark.parametrize("transport", [hostile_local, hostile_grpc])
def test_only_kvtier_errors_leave(
    transport: Any, make: Make, tmp_path: Path, record_property: Record
) -> None:
    num_answered = 0
    with transport(tmp_path) as (target, set_seed):
        for seed in SEEDS:
            set_seed(seed)
            with suppress(KvtierError), make(target, timeout=BRIEF) as client:
                namespace = client.register(IDENTITY)
                for call in CALLS:
                    with suppress(KvtierError):
                        call(client, namespace, transport is hostile_local)
                        num_answered += 1
    record_property("calls_of_mutations", len(SEEDS) * len(CALLS))
    assert num_answered > len(SEEDS), "most mutations concern one call of many"


# ------------------------------------------------------------------------------ one lie at a time


def test_blocks_without_fragments_are_no_blocks(
    server: HostileLocal, client: Any, record_property: Record
) -> None:
    """`num_blocks` alone made a get report blocks that were never written."""
    empty = pb.AcquireResponse(lease_id=5, num_blocks=3, tiers=bytes([2] * 3), last=True)
    server.handlers[Method.ACQUIRE] = lambda connection, frame: connection.reply(frame, empty)
    namespace = client.register(IDENTITY)
    record_property("blocks_of_a_lie", num_blocks := client.get(namespace, NAMES[:3]).num_blocks)
    assert num_blocks == 0
    with client.acquire(namespace, NAMES[:3]) as lease:
        assert lease.wait() == 0


def test_a_block_lacks_one_of_its_fragments(server: HostileLocal, client: Any) -> None:
    def acquire(connection: Connection, frame: Frame) -> None:
        ready = server.ready(0, 3)
        for column in (ready.block, ready.group, ready.extent, ready.offset, ready.length, ready.generation):
            del column[3]  # the second half of block 1
        connection.reply(frame, pb.AcquireResponse(lease_id=5, num_blocks=3, ready=ready, last=True))

    server.handlers[Method.ACQUIRE] = acquire
    namespace = client.register(IDENTITY)
    report = client.get(namespace, NAMES[:3])
    assert (report.num_blocks, report.data.tobytes()) == (1, PAYLOADS[0])
    with client.acquire(namespace, NAMES[:3]) as lease:
        assert lease.wait() == 1


def ready_with(server: HostileLocal, **columns: int) -> pb.AcquireResponse:
    """Return an answer with a wrong number in its second fragment."""
    ready = server.ready(0, 3)
    for name, number in columns.items():
        getattr(ready, name)[1] = number
    return pb.AcquireResponse(lease_id=5, num_blocks=3, ready=ready, last=True)


LIES: dict[str, tuple[Method, Callable[[HostileLocal], Any]]] = {
    "a block that was not asked for": (Method.ACQUIRE, lambda s: ready_with(s, block=3_000_000_000)),
    "a layer group that there is not": (Method.ACQUIRE, lambda s: ready_with(s, group=2)),
    "a slot that no place can name": (Method.ACQUIRE, lambda s: ready_with(s, offset=(1 << 64) - 4096)),
    "an extent that no place can name": (Method.ACQUIRE, lambda s: ready_with(s, extent=(1 << 32) - 1)),
    "a fragment of another length": (Method.ACQUIRE, lambda s: ready_with(s, length=1)),
    "more blocks than were named": (Method.LOOKUP, lambda _: pb.LookupResponse(num_blocks=9)),
    "a tier without a name": (Method.LOOKUP, lambda _: pb.LookupResponse(num_blocks=1, tiers=bytes([99]))),
    "a host with more than was named": (
        Method.RANK,
        lambda _: pb.RankResponse(hosts=[pb.RankedHost(num_held=9)]),
    ),
    "a time that is none": (
        Method.RANK,
        lambda _: pb.RankResponse(hosts=[pb.RankedHost(first_token_s=float("nan"))]),
    ),
    "no outcomes": (Method.COMMIT, lambda _: pb.CommitResponse()),
    "an outcome without a name": (Method.COMMIT, lambda _: pb.CommitResponse(outcomes=bytes([2, 99]))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_connection(server: HostileLocal, client: Any, lie: str) -> None:
    method, make_answer = LIES[lie]
    right = server.handlers[method]
    server.handlers[method] = lambda connection, frame: connection.reply(frame, make_answer(server))
    namespace = client.register(IDENTITY)
    calls: dict[Method, Callable[[], object]] = {
        Method.LOOKUP: lambda: client.lookup(namespace, NAMES[:3]),
        Method.RANK: lambda: client.rank(namespace, NAMES[:3]),
        Method.ACQUIRE: lambda: client.get(namespace, NAMES[:3]),
        Method.COMMIT: lambda: put(client, namespace),
    }
    with pytest.raises(Unavailable) as raised:
        calls[method]()
    assert raised.value.reason == "BROKEN_ANSWER"
    server.handlers[method] = right
    assert client.lookup(namespace, NAMES).num_blocks == 3
    assert len(server.connections) == 2


def test_answers_to_no_call_end_the_connection(server: HostileLocal, client: Any) -> None:
    """A flood of them used to be read for seconds after a call's deadline."""
    stray = encode(Frame(Method.LOOKUP, Flag.NONE, 99, b""))
    server.handlers[Method.LOOKUP] = lambda connection, _: connection.socket.sendall(stray)
    namespace = client.register(IDENTITY)
    with pytest.raises(Unavailable) as raised:
        client.lookup(namespace, NAMES)
    assert raised.value.reason == "BROKEN_ANSWER"


def test_a_flood_of_late_answers_does_not_outlast_a_deadline(
    server: HostileLocal, make: Make, record_property: Record
) -> None:
    """Answers to an acquire that was given up are lawful, and there may be any number of them."""
    acquires: list[Frame] = []

    def acquire(connection: Connection, frame: Frame) -> None:
        acquires.append(frame)
        first = pb.AcquireResponse(lease_id=5, num_blocks=1, tiers=bytes([3]))
        connection.reply(frame, first, last=False)

    def flood(connection: Connection, _: Frame) -> None:
        answer = encode(Frame(Method.ACQUIRE, Flag.NONE, acquires[0].call, b"")) * 4096
        for _number in range(1024):
            connection.socket.sendall(answer)
        connection.hang_up()

    server.handlers[Method.ACQUIRE] = acquire
    server.handlers[Method.LOOKUP] = flood
    timeout = Timeout(call_s=0.1, connect_s=60.0, grace_s=0.1)
    with make(f"unix://{server.path.with_suffix('')}", timeout=timeout) as client:
        namespace = client.register(IDENTITY)
        client.acquire(namespace, NAMES[:1]).release()
        began_at = time.monotonic()
        with pytest.raises(Unavailable) as raised:
            client.lookup(namespace, NAMES)
        record_property("flood_s", time.monotonic() - began_at)
    assert raised.value.reason == "NO_ANSWER"


def test_answers_without_end_are_an_error(server: HostileLocal, client: Any) -> None:
    def acquire(connection: Connection, frame: Frame) -> None:
        for _ in range(10_000):
            connection.reply(frame, pb.AcquireResponse(lease_id=5, num_blocks=3), last=False)
        connection.reply(frame, pb.AcquireResponse(lease_id=5, last=True))

    server.handlers[Method.ACQUIRE] = acquire
    with pytest.raises(Unavailable) as raised:
        client.get(client.register(IDENTITY), NAMES)
    assert raised.value.reason == "BROKEN_ANSWER"


def unsealed(descriptor: int) -> int:
    """Return memory with the same bytes that the daemon can cut short at any time."""
    copy = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(copy, os.fstat(descriptor).st_size)
    os.sendfile(copy, descriptor, 0, os.fstat(descriptor).st_size)
    return copy


@pytest.mark.parametrize("which", ["staging", "index", "extent"])
def test_memory_that_could_be_cut_short_is_not_mapped(server: HostileLocal, client: Any, which: str) -> None:
    """Reading behind the end of a shared mapping is SIGBUS: a daemon could end its clients' engines."""
    answers = server.right_descriptors

    def unsealed_descriptors(call: str, descriptors: list[int]) -> list[int]:
        at = {("Attach", "staging"): 0, ("Attach", "index"): 1, ("MapExtents", "extent"): 0}.get(
            (call, which)
        )
        return [unsealed(one) if at == n else one for n, one in enumerate(descriptors)]

    server.right_descriptors = unsealed_descriptors  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="not sealed against F_SEAL_SHRINK"):
        client.get(client.register(IDENTITY), NAMES[:3])
    server.right_descriptors = answers  # type: ignore[method-assign]
    assert client.get(client.register(IDENTITY), NAMES[:3]).num_blocks == 3


def test_an_index_of_lies_is_a_miss(server: HostileLocal, client: Any) -> None:
    """Places with a sign, in extents that there are not, in slots beyond their extent."""
    index = server.memory.indexes.of(EMPTY_DOMAIN)
    for name, place in zip(NAMES, (1 << 63, 0xFFFF_FFFF, 9999 << 32), strict=False):
        for group in range(GEOMETRY.num_groups):
            assert index.insert(tag_of(name, 1, group), place)
    namespace = client.register(IDENTITY)
    for first in range(3):
        report = client.get(namespace, NAMES[:3], first_block=first)
        assert (report.num_blocks, report.num_one_sided) == (3, 0)
        assert report.data.tobytes() == b"".join(PAYLOADS[first:])
