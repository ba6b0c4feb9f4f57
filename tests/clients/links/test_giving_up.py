"""Calls that somebody gives up: cancelled, ended by another task, or cut short by a fork. Nothing stays
behind that only the end of the connection would give back, and nobody else suffers for it."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import AsyncClient, Client, Limits, Namespace
from kvtier.clients.aio.driver import THREAD_BYTES
from kvtier.clients.errors import InvalidRequest
from kvtier.clients.operations.base import Operations
from kvtier.clients.operations.effects import Operation, Work
from kvtier.clients.testing import FakeAppliance
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import local_pb2
from kvtier.v1.local import Frame, Method

from ..memory.mapped import random_bytes
from .scripted import Connection, ScriptedServer, scripted, staged_bytes
from .test_local_channel import BLOCK, IDENTITY, NAMES, answer_lookup, committed

Waiting = list[tuple[Connection, Frame]]
Answer = Callable[[Connection, Frame], None]
WAIT_S = 30.0  # for what must happen; a machine may be slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    with scripted(tmp_path) as made:
        yield made


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/kvtier.sock"


class Held:
    """A handler that keeps calls unanswered until the test answers them."""

    def __init__(self) -> None:
        self.waiting: Waiting = []
        self._arrived = threading.Semaphore(0)

    def __call__(self, connection: Connection, frame: Frame) -> None:
        self.waiting.append((connection, frame))
        self._arrived.release()

    def wait(self) -> None:
        """Return when the next call is there."""
        assert self._arrived.acquire(timeout=WAIT_S)

    async def arrived(self) -> None:
        """The same on an event loop."""
        await asyncio.to_thread(self.wait)


def pinned(connection: Connection, frame: Frame, *, last: bool = False) -> None:
    """The first answer of an acquire: lease 5, one block, which is on its way up."""
    connection.reply(
        frame, pb.AcquireResponse(lease_id=5, num_blocks=1, tiers=bytes([3]), last=last), last=last
    )


async def given_up(call: Coroutine[Any, Any, Any], held: Held) -> None:
    """Make a call and cancel it before its answer comes."""
    task = asyncio.create_task(call)
    await held.arrived()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def released(server: ScriptedServer) -> list[int]:
    """Leases that were given back so far. Call it when a later call was answered."""
    requests = [pb.ReleaseRequest.FromString(f.payload) for f in server.frames if f.method is Method.RELEASE]
    return [lease_id for request in requests for lease_id in request.lease_ids]


@pytest.mark.parametrize("call", ["get", "acquire"])
def test_lease_of_a_cancelled_call_is_given_back_when_it_comes(
    server: ScriptedServer, target: str, call: str
) -> None:
    held = server.handlers[Method.ACQUIRE] = Held()
    server.handlers[Method.LOOKUP] = answer_lookup

    async def run() -> None:
        async with AsyncClient(target) as client:
            namespace: Namespace = await client.register(IDENTITY)
            await given_up(getattr(client, call)(namespace, NAMES[:1]), held)
            pinned(*held.waiting[0])
            for _ in range(2):  # the first may be under way before that answer has come
                await client.lookup(namespace, NAMES[:1])

    asyncio.run(run())
    assert released(server) == [5]


def test_lease_of_an_interrupted_get_is_given_back(
    server: ScriptedServer, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a thread that waits for the first answer of an acquire."""
    held = server.handlers[Method.ACQUIRE] = Held()
    server.handlers[Method.LOOKUP] = answer_lookup
    with Client(target) as client:
        namespace = client.register(IDENTITY)

        def interrupted(ticket: int) -> None:
            held.wait()
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(client._link, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.get(namespace, NAMES[:1])
        pinned(*held.waiting[0])
        for _ in range(2):
            client.lookup(namespace, NAMES[:1])
    assert released(server) == [5]


def test_lease_that_was_known_is_given_back_once(server: ScriptedServer, target: str) -> None:
    """Later answers of an acquire that was given up after its first one are no news."""
    held = server.handlers[Method.ACQUIRE] = Held()
    server.handlers[Method.LOOKUP] = answer_lookup

    async def run() -> None:
        async with AsyncClient(target) as client:
            namespace: Namespace = await client.register(IDENTITY)
            acquiring = asyncio.create_task(client.acquire(namespace, NAMES[:1]))
            await held.arrived()
            pinned(*held.waiting[0])
            await (await acquiring).release()
            connection, frame = held.waiting[0]
            connection.reply(frame, pb.AcquireResponse(lease_id=5, last=True))
            for _ in range(2):
                await client.lookup(namespace, NAMES[:1])

    asyncio.run(run())
    assert released(server) == [5]


def test_a_lease_may_end_while_another_task_waits_for_its_blocks(server: ScriptedServer, target: str) -> None:
    """The one that waits is told at once; it used to wait on, and then to close everybody's connection."""
    server.handlers[Method.ACQUIRE] = pinned
    server.handlers[Method.LOOKUP] = answer_lookup

    async def run() -> None:
        async with AsyncClient(target) as client:
            namespace: Namespace = await client.register(IDENTITY)
            lease = await client.acquire(namespace, NAMES[:1], views=False)
            waiting = asyncio.create_task(lease.wait())
            await asyncio.sleep(0)
            link: Any = client._link
            assert link._waiting, "it waits"
            await lease.release()
            await asyncio.wait_for(waiting, WAIT_S)
            assert not link._waiting
            assert not link._deadlines
            assert (await client.lookup(namespace, NAMES[:1])).num_blocks == 1
            assert client._link is link, "over the same connection"

    asyncio.run(run())


def test_a_cancelled_call_is_forgotten(server: ScriptedServer, target: str) -> None:
    held = server.handlers[Method.LOOKUP] = Held()

    async def run() -> None:
        async with AsyncClient(target) as client:
            namespace: Namespace = await client.register(IDENTITY)
            await given_up(client.lookup(namespace, NAMES[:1]), held)
            answer_lookup(*held.waiting[0])
            server.handlers[Method.LOOKUP] = answer_lookup
            await client.lookup(namespace, NAMES[:1])
            protocol = client._link._protocol  # type: ignore[union-attr]
            assert (protocol._answers, protocol._response_of) == ({}, {})

    asyncio.run(run())


def test_extents_are_not_confused_after_a_cancelled_call(server: ScriptedServer, target: str) -> None:
    """Descriptors of an answer that nobody took are closed, and not handed to the next call."""
    held = Held()
    maps = server.handlers[Method.MAP_EXTENTS]
    server.handlers[Method.MAP_EXTENTS] = held
    payload = random_bytes(BLOCK, 1)
    server.memory.store(NAMES[0], payload)

    async def run() -> None:
        async with AsyncClient(target) as client:
            namespace: Namespace = await client.register(IDENTITY)
            await given_up(client.get(namespace, NAMES[:1]), held)
            (connection, frame), other = held.waiting[0], os.memfd_create("kvtier-other")
            os.ftruncate(other, 4096)
            connection.reply(frame, local_pb2.MapExtentsResponse(extents=[0]), fds=(other,))
            os.close(other)
            server.handlers[Method.MAP_EXTENTS] = maps
            report = await client.get(namespace, NAMES[:1])
            assert report.num_one_sided == 1
            assert bytes(report.data) == payload

    asyncio.run(run())


def test_a_call_on_a_lost_connection_leaves_the_new_one_alone() -> None:
    """One call copies in a thread while its connection is lost and another call makes a new one. When it
    finds out, it moves to the new one, and does not close it under those who use it."""
    appliance = FakeAppliance()
    is_copied = threading.Event()

    def slow(operations: Operations, namespace: Namespace) -> Operation[Any]:
        attachment, namespace_id = yield from operations.begin(namespace)
        yield Work(lambda: is_copied.wait(WAIT_S), THREAD_BYTES)
        request = pb.LookupRequest(namespace_id=namespace_id, prefix_hashes=NAMES[0])
        return (yield from operations.call(attachment, "Lookup", request))

    async def run() -> None:
        async with appliance.async_client() as client:
            namespace = await client.register(IDENTITY)
            copying = asyncio.create_task(client.run(partial(slow, client.operations, namespace)))
            await asyncio.sleep(0)
            appliance.restart()
            await client.put(namespace, NAMES[:1], bytes(BLOCK))
            async with await client.acquire(namespace, NAMES[:1]) as lease:
                link = client._link
                is_copied.set()
                assert (await copying).num_blocks == 1
                await lease.extend(30.0)
            assert client._link is link

    asyncio.run(run())
    assert appliance.check_integrity() == []


FORKING = """
import asyncio, os, sys
from kvtier.clients import AsyncClient, Client, Geometry, NamespaceIdentity

kind, target, *names = sys.argv[1:]
NAMES = [bytes.fromhex(name) for name in names]
GEOMETRY = Geometry(num_layers=1, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16")
IDENTITY, BLOCK = NamespaceIdentity(bytes(16), GEOMETRY), GEOMETRY.block_bytes
if kind == "sync":
    client, run, run_in_child = Client(target), lambda answer: answer, lambda answer: answer
else:
    client, run, run_in_child = AsyncClient(target), asyncio.Runner().run, asyncio.run
namespace = run(client.register(IDENTITY))
run(client.put(namespace, NAMES[:1], bytes([1]) * BLOCK))
child = os.fork()
if not child:
    run_in_child(client.put(namespace, NAMES[1:2], bytes([2]) * BLOCK))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
run(client.put(namespace, NAMES[2:3], bytes([3]) * BLOCK))
run(client.close())
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_forked_child_has_a_connection_of_its_own(server: ScriptedServer, target: str, kind: str) -> None:
    """Two processes on one socket and one staging extent would store one's bytes under the other's name."""
    put: list[tuple[Connection, bytes, bytes]] = []

    def commit(connection: Connection, frame: Frame) -> None:
        request = pb.CommitRequest.FromString(frame.payload)
        put.append((connection, request.reserve.prefix_hashes, staged_bytes(connection, request.spans[0])))
        committed(connection, frame)

    server.handlers[Method.COMMIT] = commit
    names = [name.hex() for name in NAMES[:3]]
    subprocess.run([sys.executable, "-c", FORKING, kind, target, *names], check=True, timeout=4 * WAIT_S)
    own, childs = server.connections
    expected = [(own, 1), (childs, 2), (own, 3)]
    assert put == [(one, name, bytes([i]) * BLOCK) for (one, i), name in zip(expected, NAMES, strict=False)]


def test_a_put_cancelled_while_it_ends_after_a_failure_loses_no_staging(
    server: ScriptedServer, target: str
) -> None:
    """Its first piece was refused, its second is not answered yet: the daemon may still read that one."""
    held = server.handlers[Method.COMMIT] = Held()

    async def run() -> None:
        async with AsyncClient(target, limits=Limits(piece_bytes=BLOCK)) as client:
            namespace: Namespace = await client.register(IDENTITY)
            attachment = client._link.attachment  # type: ignore[union-attr]
            area: Any = attachment.staging
            given, give = asyncio.Event(), area.give

            def told(offset: int) -> None:
                give(offset)
                given.set()

            area.give = told
            put = asyncio.create_task(client.put(namespace, NAMES[:2], bytes(2 * BLOCK)))
            await held.arrived()
            await held.arrived()
            connection, frame = held.waiting[0]
            connection.refuse(frame, 8, "TOO_MANY_IN_FLIGHT")
            await asyncio.wait_for(given.wait(), WAIT_S)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            assert [offset for _, offset in attachment.unsettled] == list(area._taken)

    asyncio.run(run())


def test_an_async_client_connects_anew_on_another_event_loop(server: ScriptedServer, target: str) -> None:
    server.handlers[Method.LOOKUP] = answer_lookup
    client = AsyncClient(target)

    async def look_up() -> int:
        namespace = await client.register(IDENTITY)
        return (await client.lookup(namespace, NAMES[:1])).num_blocks

    async def close() -> None:
        await client.close()

    assert [asyncio.run(look_up()) for _ in range(2)] == [1, 1]
    assert len(server.connections) == 2
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(look_up())
        with pytest.raises(InvalidRequest, match="one for each loop"):
            asyncio.run(look_up())
        loop.run_until_complete(close())
    finally:
        loop.close()
