"""Both clients against a daemon that dies, stays silent, refuses, or answers in an awkward order."""

import asyncio
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import (
    AsyncClient,
    Client,
    Geometry,
    Limits,
    NamespaceIdentity,
    Overloaded,
    PutOutcome,
    Retry,
    Timeout,
    Unavailable,
)
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import local_pb2
from kvtier.v1.local import HEADER, Flag, Frame, Method

from ...contracts.blocking import Blocking
from ..memory.mapped import random_bytes
from .scripted import Connection, ScriptedServer, scripted, staged_bytes

GEOMETRY = Geometry(num_layers=1, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16")
BLOCK = GEOMETRY.block_bytes  # 16 KiB, one fragment
IDENTITY = NamespaceIdentity(bytes(16), GEOMETRY)
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
BRIEF = Timeout(call_s=1.0, connect_s=60.0, grace_s=0.5)  # and yet enough for a server that answers
WAIT_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    with scripted(tmp_path) as made:
        yield made


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, server: ScriptedServer, tmp_path: Path) -> Iterator[Any]:
    target = f"unix://{tmp_path}/kvtier.sock"
    with ExitStack() as stack:
        if request.param == "sync":
            yield lambda **settings: stack.enter_context(Client(target, **settings))
        else:
            runner = stack.enter_context(asyncio.Runner())

            def make(**settings: Any) -> Any:
                client = Blocking(AsyncClient(target, **settings), runner)
                stack.push(client.__exit__)
                return client

            yield make


def answer_lookup(connection: Connection, frame: Frame) -> None:
    connection.reply(frame, pb.LookupResponse(num_blocks=1, tiers=bytes([2]), load_s=0.5))


def committed(connection: Connection, frame: Frame, outcome: PutOutcome = PutOutcome.STORED) -> None:
    request = pb.CommitRequest.FromString(frame.payload)
    connection.reply(
        frame, pb.CommitResponse(outcomes=bytes([outcome] * (len(request.reserve.prefix_hashes) // 32)))
    )


def leased(server: ScriptedServer, place: int, block: int = 0) -> pb.AcquireResponse:
    """The last answer of an acquire: this block is readable, and those before it."""
    extent, offset, generation = server.memory.engine.location(place)
    ready = pb.Fragments(
        block=[block], group=[0], extent=[extent], offset=[offset], length=[BLOCK], generation=[generation]
    )
    return pb.AcquireResponse(lease_id=5, num_blocks=block + 1, ready=ready, last=True)


# ------------------------------------------------------------------------------ daemons that fail


def test_lost_connection_is_replaced_at_once(server: ScriptedServer, connect: Any) -> None:
    calls = []

    def die_once(connection: Connection, frame: Frame) -> None:
        calls.append(frame)
        connection.hang_up() if len(calls) == 1 else answer_lookup(connection, frame)

    server.handlers[Method.LOOKUP] = die_once
    client = connect()
    namespace = client.register(IDENTITY)
    server.namespace_id = 9  # the daemon that answers now is another one
    assert client.lookup(namespace, NAMES[:1]).num_blocks == 1
    assert len(server.connections) == 2
    assert namespace.id == 9
    assert pb.LookupRequest.FromString(calls[1].payload).namespace_id == 9


def test_lost_connection_is_told_when_nobody_may_retry(server: ScriptedServer, connect: Any) -> None:
    server.handlers[Method.LOOKUP] = lambda connection, _: connection.hang_up()
    client = connect(retry=Retry(num_attempts=1))
    namespace = client.register(IDENTITY)
    with pytest.raises(Unavailable) as raised:
        client.lookup(namespace, NAMES[:1])
    assert raised.value.reason == "CONNECTION_LOST"
    server.handlers[Method.LOOKUP] = answer_lookup
    assert client.lookup(namespace, NAMES[:1]).num_blocks == 1, "the next call reconnects"


def test_silence_ends_the_connection(server: ScriptedServer, connect: Any) -> None:
    server.handlers[Method.LOOKUP] = lambda *_: None
    client = connect(timeout=BRIEF)
    namespace = client.register(IDENTITY)
    with pytest.raises(Unavailable) as raised:
        client.lookup(namespace, NAMES[:1])
    assert raised.value.reason == "NO_ANSWER"
    assert server.methods() == [Method.LOOKUP], "silence is not tried again"
    server.handlers[Method.LOOKUP] = answer_lookup
    assert client.lookup(namespace, NAMES[:1]).num_blocks == 1
    assert len(server.connections) == 2


def test_nobody_there(tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/nobody.sock") as client, pytest.raises(Unavailable) as raised:
        client.register(IDENTITY)
    assert raised.value.reason == "NOT_RUNNING"


def test_broken_frame_ends_the_connection(server: ScriptedServer, connect: Any) -> None:
    broken = HEADER.pack(1 << 30, Method.LOOKUP, 0, 1)
    server.handlers[Method.LOOKUP] = lambda connection, _: connection.socket.sendall(broken)
    client = connect(retry=Retry(num_attempts=1))
    namespace = client.register(IDENTITY)
    with pytest.raises(Unavailable, match="broken frame"):
        client.lookup(namespace, NAMES[:1])


def test_refusal_says_what_the_daemon_said(server: ScriptedServer, connect: Any) -> None:
    server.handlers[Method.LOOKUP] = lambda c, f: c.refuse(f, 8, "TOO_MANY_IN_FLIGHT", 250, tier="dram")
    client = connect()
    namespace = client.register(IDENTITY)
    with pytest.raises(Overloaded) as raised:
        client.lookup(namespace, NAMES[:1])
    error = raised.value
    assert (error.reason, error.retry_after_s, error.metadata) == (
        "TOO_MANY_IN_FLIGHT",
        0.25,
        {"tier": "dram"},
    )
    assert server.methods() == [Method.LOOKUP]


# ------------------------------------------------------------------------------ one-sided reads


def test_one_sided_reads_are_reported_with_the_next_call(server: ScriptedServer, connect: Any) -> None:
    payloads = [random_bytes(BLOCK, i) for i in range(3)]
    for name, payload in zip(NAMES, payloads, strict=False):
        server.memory.store(name, payload)
    server.handlers[Method.LOOKUP] = answer_lookup
    client = connect(limits=Limits(max_pending_touches=4))
    namespace = client.register(IDENTITY)
    assert client.get(namespace, NAMES[:2], session="s").num_one_sided == 2
    target = bytearray(BLOCK)
    for _ in range(3):
        report = client.get(namespace, NAMES[2:3], target, session="s")
        assert (report.num_one_sided, bytes(target)) == (1, payloads[2])
        assert client.get(namespace, NAMES[:2], session="s").num_one_sided == 2
    assert server.methods() == [], "nothing was asked"
    client.lookup(namespace, NAMES[:1])
    assert server.methods() == [Method.TOUCH, Method.LOOKUP]
    touch = server.frames[-2]
    assert touch.flags & Flag.NO_REPLY
    request = pb.TouchRequest.FromString(touch.payload)
    assert (request.session_id, request.prefix_hashes) == ("s", b"".join(NAMES[:3]))


def test_many_touches_do_not_wait(server: ScriptedServer, connect: Any) -> None:
    for i, name in enumerate(NAMES):
        server.memory.store(name, random_bytes(BLOCK, i))
    reported = threading.Event()
    server.handlers[Method.TOUCH] = lambda *_: reported.set()
    client = connect(limits=Limits(max_pending_touches=6))
    namespace = client.register(IDENTITY)
    assert client.get(namespace, NAMES).num_one_sided == 8
    assert reported.wait(WAIT_S)


def test_touches_are_reported_in_as_many_calls_as_the_daemon_allows(server: ScriptedServer) -> None:
    """More than one call may name would be refused as a whole, and nobody hears that."""
    names = [hashlib.sha256(bytes([i])).digest() for i in range(100)]
    for i, name in enumerate(names):
        server.memory.store(name, random_bytes(BLOCK, i))
    server.handlers[Method.LOOKUP] = answer_lookup
    with Client(f"unix://{server.path.with_suffix('')}") as client:
        namespace = client.register(IDENTITY)
        assert client.get(namespace, names[:60]).num_one_sided == 60
        assert client.get(namespace, names[60:]).num_one_sided == 40
        client.lookup(namespace, names[:1])
    touches = [pb.TouchRequest.FromString(f.payload) for f in server.frames if f.method is Method.TOUCH]
    assert [len(touch.prefix_hashes) // 32 for touch in touches] == [64, 36]
    assert b"".join(touch.prefix_hashes for touch in touches) == b"".join(names)


@pytest.mark.parametrize(("deadline_s", "deadline_ms"), [(-1.0, 1), (0.0, 1), (1e30, 86_400_000)])
def test_a_deadline_that_has_passed_is_no_invitation_to_wait(
    server: ScriptedServer, connect: Any, deadline_s: float, deadline_ms: int
) -> None:
    """0 on the wire stands for the daemon's own limit, which is longer than this client waits."""
    requests = []

    def acquire(connection: Connection, frame: Frame) -> None:
        requests.append(pb.AcquireRequest.FromString(frame.payload))
        connection.reply(frame, pb.AcquireResponse(last=True))

    server.handlers[Method.ACQUIRE] = acquire
    client = connect()
    assert client.get(client.register(IDENTITY), NAMES[:1], deadline_s=deadline_s).num_blocks == 0
    assert requests[0].deadline_ms == deadline_ms
    assert len(server.connections) == 1


def test_an_extent_that_cannot_be_mapped_is_an_error_of_ours(server: ScriptedServer, connect: Any) -> None:
    """And what came with it is closed."""
    server.memory.store(NAMES[0], bytes(BLOCK))
    servers_are_closed = threading.Event()

    def map_extents(connection: Connection, frame: Frame) -> None:
        fds = _sealed("unreadable", os.O_WRONLY), _sealed("spare", os.O_RDONLY)
        connection.reply(frame, local_pb2.MapExtentsResponse(extents=[0, 1]), fds=fds)
        for one in fds:
            os.close(one)
        servers_are_closed.set()

    server.handlers[Method.MAP_EXTENTS] = map_extents
    client = connect()
    namespace = client.register(IDENTITY)
    with pytest.raises(Overloaded, match="address space") as raised:
        client.get(namespace, NAMES[:1])
    assert raised.value.reason == "NO_ADDRESS_SPACE"
    assert servers_are_closed.wait(WAIT_S)
    assert not [name for name in _open_files() if "unreadable" in name or "spare" in name]


def _sealed(name: str, mode: int) -> int:
    """Return a descriptor of 4 KiB of memory that cannot become shorter."""
    memory = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        return os.open(f"/proc/self/fd/{memory}", mode)
    finally:
        os.close(memory)


def _open_files() -> set[str]:
    """What this process has open."""
    files = set()
    for one in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, by another thread
            files.add(os.readlink(f"/proc/self/fd/{one}"))
    return files


def test_what_shared_memory_lacks_is_acquired(server: ScriptedServer, connect: Any) -> None:
    """Two blocks are there; the third is promoted while the call waits, in a second answer."""
    payloads = [random_bytes(BLOCK, i) for i in range(4)]
    for name, payload in zip(NAMES[:2], payloads, strict=False):
        server.memory.store(name, payload)

    def acquire(connection: Connection, frame: Frame) -> None:
        request = pb.AcquireRequest.FromString(frame.payload)
        assert request.first_block == 2
        connection.reply(frame, pb.AcquireResponse(lease_id=5, num_blocks=4, tiers=bytes([3])), last=False)
        place = server.memory.store(NAMES[2], payloads[2])
        connection.reply(frame, leased(server, place, block=2))

    released = threading.Event()
    server.handlers[Method.ACQUIRE] = acquire
    server.handlers[Method.RELEASE] = lambda *_: released.set()
    client = connect()
    namespace = client.register(IDENTITY)
    report = client.get(namespace, NAMES[:4])
    assert (report.num_blocks, report.num_one_sided) == (3, 2)
    assert report.data.tobytes() == b"".join(payloads[:3])
    assert released.wait(WAIT_S)


def test_extents_are_mapped_while_their_blocks_come_up(server: ScriptedServer, connect: Any) -> None:
    """The daemon says where blocks will be, and here brings none before the client has mapped that."""
    payload = random_bytes(BLOCK, 1)
    acquired: list[Frame] = []

    def acquire(connection: Connection, frame: Frame) -> None:
        acquired.append(frame)
        arriving = pb.AcquireResponse(lease_id=5, num_blocks=1, arriving_extents=[0])
        connection.reply(frame, arriving, last=False)

    def map_extents(connection: Connection, frame: Frame) -> None:
        answer_map_extents(connection, frame)
        connection.reply(acquired[0], leased(server, server.memory.store(NAMES[0], payload)))

    server.handlers[Method.ACQUIRE], answer_map_extents = acquire, server.handlers[Method.MAP_EXTENTS]
    server.handlers[Method.MAP_EXTENTS] = map_extents
    client = connect()
    into = np.zeros(BLOCK, np.uint8)
    assert client.get(client.register(IDENTITY), NAMES[:1], into=into).num_blocks == 1
    assert into.tobytes() == payload


def test_extents_that_cannot_be_mapped_ahead_are_mapped_later(server: ScriptedServer, connect: Any) -> None:
    payload = random_bytes(BLOCK, 1)

    def acquire(connection: Connection, frame: Frame) -> None:
        gone = pb.AcquireResponse(lease_id=5, num_blocks=1, arriving_extents=[99])
        connection.reply(frame, gone, last=False)
        connection.reply(frame, leased(server, server.memory.store(NAMES[0], payload)))

    def map_extents(connection: Connection, frame: Frame) -> None:
        if local_pb2.MapExtentsRequest.FromString(frame.payload).extents == [99]:
            connection.refuse(frame, 5, "UNKNOWN_EXTENT")
        else:
            answer_map_extents(connection, frame)

    server.handlers[Method.ACQUIRE], answer_map_extents = acquire, server.handlers[Method.MAP_EXTENTS]
    server.handlers[Method.MAP_EXTENTS] = map_extents
    client = connect()
    into = np.zeros(BLOCK, np.uint8)
    assert client.get(client.register(IDENTITY), NAMES[:1], into=into).num_blocks == 1
    assert into.tobytes() == payload


def test_wrong_generation_under_a_lease_is_a_miss(server: ScriptedServer, connect: Any) -> None:
    place = server.memory.store(NAMES[0], random_bytes(BLOCK, 1), namespace_id=2)

    server.handlers[Method.ACQUIRE] = lambda connection, frame: connection.reply(frame, leased(server, place))
    client = connect()
    namespace = client.register(IDENTITY)  # it has id 1: the slot holds another namespace's block
    assert client.get(namespace, NAMES[:1]).num_blocks == 0
    with client.acquire(namespace, NAMES[:1]) as lease:
        assert list(lease) == []
        assert lease.num_blocks == 0


# ------------------------------------------------------------------------------------------ puts


def test_pieces_overlap(server: ScriptedServer, connect: Any) -> None:
    """The first commit is answered only when the second has arrived: a client that waits hangs here."""
    waiting: list[tuple[Connection, Frame]] = []
    seen: list[bytes] = []

    def commit(connection: Connection, frame: Frame) -> None:
        request = pb.CommitRequest.FromString(frame.payload)
        seen.extend(staged_bytes(connection, span) for span in request.spans)
        waiting.append((connection, frame))
        if len(seen) >= 4 or len(waiting) == 2:
            while waiting:
                committed(*waiting.pop(0))

    server.handlers[Method.COMMIT] = commit
    client = connect(limits=Limits(piece_bytes=BLOCK))
    namespace = client.register(IDENTITY)
    data = random_bytes(4 * BLOCK, 3)
    assert client.put(namespace, NAMES[:4], data).num_stored == 4
    assert b"".join(seen) == data
    parents = [pb.CommitRequest.FromString(f.payload).reserve.parent_hash for f in server.frames[-4:]]
    assert parents == [b"", *NAMES[:3]]


def test_piece_that_came_before_its_parent_is_sent_again(server: ScriptedServer, connect: Any) -> None:
    outcomes = [PutOutcome.STORED, PutOutcome.PARENT_MISSING, PutOutcome.STORED]
    server.handlers[Method.COMMIT] = lambda c, f: committed(c, f, outcomes.pop(0))
    client = connect(limits=Limits(piece_bytes=BLOCK))
    namespace = client.register(IDENTITY)
    assert client.put(namespace, NAMES[:2], bytes(2 * BLOCK)).complete
    assert outcomes == []


def test_put_stops_after_a_refusal(server: ScriptedServer, connect: Any) -> None:
    outcomes = [PutOutcome.STORED, PutOutcome.NO_ROOM, PutOutcome.PARENT_MISSING]
    server.handlers[Method.COMMIT] = lambda c, f: committed(c, f, outcomes.pop(0))
    client = connect(limits=Limits(piece_bytes=BLOCK))
    namespace = client.register(IDENTITY)
    report = client.put(namespace, NAMES[:6], bytes(6 * BLOCK))
    assert report.outcomes == [1 + 1, PutOutcome.NO_ROOM, *[PutOutcome.PARENT_MISSING] * 4]
    assert (report.num_stored, report.num_refused) == (1, 5)
    assert server.methods().count(Method.COMMIT) <= 3


def test_failed_put_gives_its_staging_back(server: ScriptedServer, connect: Any) -> None:
    server.handlers[Method.COMMIT] = lambda c, f: c.refuse(f, 8, "TIER_FULL", 100)
    client = connect(limits=Limits(piece_bytes=BLOCK))
    namespace = client.register(IDENTITY)
    with pytest.raises(Overloaded):
        client.put(namespace, NAMES, bytes(8 * BLOCK))
    with client.staging(server.staging_bytes) as whole:
        assert len(whole) == server.staging_bytes
    with pytest.raises(Overloaded) as raised:
        client.staging(server.staging_bytes + 1)
    assert raised.value.reason == "STAGING_FULL"


def test_put_from_staging_copies_nothing(server: ScriptedServer, connect: Any) -> None:
    spans: list[Any] = []

    def commit(connection: Connection, frame: Frame) -> None:
        spans.extend(pb.CommitRequest.FromString(frame.payload).spans)
        committed(connection, frame)

    server.handlers[Method.COMMIT] = commit
    client = connect(limits=Limits(piece_bytes=BLOCK))
    namespace = client.register(IDENTITY)
    with client.staging(64 * 1024), client.staging(3 * BLOCK) as buffer:
        client.put(namespace, NAMES[:3], buffer)
    assert [(s.offset, s.length) for s in spans] == [(64 * 1024, 3 * BLOCK)]


# ------------------------------------------------------------------------------- asyncio's own


def test_async_calls_overlap_on_one_connection(server: ScriptedServer, tmp_path: Path) -> None:
    waiting: list[tuple[Connection, Frame]] = []

    def lookup(connection: Connection, frame: Frame) -> None:
        waiting.append((connection, frame))
        if len(waiting) == 3:
            for number, (peer, one) in reversed(list(enumerate(waiting))):
                peer.reply(one, pb.LookupResponse(num_blocks=number))

    server.handlers[Method.LOOKUP] = lookup

    async def run() -> list[int]:
        async with AsyncClient(f"unix://{tmp_path}/kvtier.sock") as client:
            namespace = await client.register(IDENTITY)
            found = await asyncio.gather(*(client.lookup(namespace, NAMES[:3]) for _ in range(3)))
            return [one.num_blocks for one in found]

    assert sorted(asyncio.run(run())) == [0, 1, 2]
    assert len(server.connections) == 1
