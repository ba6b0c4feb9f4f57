"""The proxy carries every byte, whoever is slow, and lets go of everything when either end does."""

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.security.principals import COMMON, Principal
from kvtier.appliance.server import peer_credential_proxy, unix_listener
from kvtier.appliance.server.peer_credential_proxy import PeerCredentialProxy

from ..appliance.loops import run, turns

NUM_BYTES = 2 << 20


def who(uid: int, gid: int) -> Principal:
    return Principal(f"uid {uid}", COMMON)


def test_every_byte_arrives_both_ways_when_nobody_reads_for_a_while(tmp_path: Path) -> None:
    data = os.urandom(NUM_BYTES)

    async def main() -> None:
        proxy = PeerCredentialProxy(tmp_path / "g.sock", 0o660, who)
        may_read, arrived, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        peers: list[str] = []

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append(writer.get_extra_info("socket").getpeername()[1:].decode())
            arrived.set()
            await may_read.wait()
            while chunk := await reader.read(100_000):
                writer.write(chunk)
                await writer.drain()
            writer.close()
            ended.set()

        proxy.prepare()
        async with await asyncio.start_unix_server(echo, proxy.inner):
            proxy.start()
            reader, writer = await asyncio.open_unix_connection(proxy.path)
            sending = asyncio.create_task(_send(writer, data))
            await arrived.wait()
            assert proxy.principal_of(f"unix-abstract:{peers[0]}") == who(os.getuid(), 0)
            assert proxy.principal_of("unix-abstract:kvtier-guessed") is None
            assert not sending.done(), "more than the buffers on the way hold"
            may_read.set()
            assert await reader.readexactly(NUM_BYTES) == data
            await sending
            writer.close()
            await ended.wait()
            assert len(proxy) == 0
            assert proxy.principal_of(f"unix-abstract:{peers[0]}") is None, (
                "a name is good for one connection"
            )
            proxy.stop()
        assert not proxy.path.exists()

    run(main())


def test_out_of_descriptors_it_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot be accepted keeps the listener ready: trying again at once was all that the loop did."""
    monkeypatch.setattr(unix_listener, "REST_S", 3600.0)
    tries: list[int] = []

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            tries.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        proxy = PeerCredentialProxy(tmp_path / "g.sock", 0o660, who)
        async with await asyncio.start_unix_server(lambda *_: None, proxy.inner):
            proxy.start()
            assert proxy._listener.socket is not None
            listener = proxy._listener.socket = Exhausted(fileno=proxy._listener.socket.detach())
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(str(proxy.path))
                asyncio.get_running_loop().remove_reader(listener)
                asyncio.get_running_loop().add_reader(listener, proxy._listener.accept)
                await turns(50)
                assert len(tries) == 1
            proxy.stop()

    run(main())


def test_after_a_rest_it_accepts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_listener, "REST_S", 0.0)
    accepted = asyncio.Event()

    async def main() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            listener.bind(str(tmp_path / "g.sock"))
            listener.listen()
            asyncio.get_running_loop().add_reader(listener, accepted.set)
            unix_listener.rest(listener, accepted.set)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(str(tmp_path / "g.sock"))
                await accepted.wait()
            unix_listener.rest(listener, accepted.set)
        await turns(5)  # it was closed while it rested

    run(main())


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


def test_a_server_that_ends_ends_its_connections(tmp_path: Path) -> None:
    async def main() -> None:
        proxy = PeerCredentialProxy(tmp_path / "g.sock", 0o660, who)
        proxy.prepare()
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        inner.bind(str(proxy.inner))
        inner.listen()
        proxy.start()
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_unix_connection(proxy.path)
        accepted, _ = await loop.sock_accept(inner)
        assert len(proxy) == 1
        accepted.close()
        assert await reader.read() == b"", "the client hears of it"
        assert len(proxy) == 0
        inner.close()
        again, late = await asyncio.open_unix_connection(proxy.path)
        assert await again.read() == b"", "nobody behind the proxy: turned away at once"
        proxy.stop()
        proxy.stop()
        await turns()
        for one in (writer, late):
            one.close()

    run(main())


def test_what_a_held_connection_sent_arrives_after_the_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the server does not read, so that there are two reasons not to read from the client."""
    monkeypatch.setattr(peer_credential_proxy, "OPEN_BURST_S", 0.0)
    monkeypatch.setattr(peer_credential_proxy, "OPEN_CALLS_PER_S", 1e4)

    async def main() -> None:
        proxy = PeerCredentialProxy(tmp_path / "g.sock", 0o660, who)
        arrived, may_read, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        peers: list[str] = []
        received = bytearray()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append(f"unix-abstract:{writer.get_extra_info('socket').getpeername()[1:].decode()}")
            arrived.set()
            await may_read.wait()
            while chunk := await reader.read(100_000):
                received.extend(chunk)
            writer.close()
            ended.set()

        data = os.urandom(NUM_BYTES)
        proxy.prepare()
        async with await asyncio.start_unix_server(take, proxy.inner):
            proxy.start()
            _, writer = await asyncio.open_unix_connection(proxy.path)
            await arrived.wait()
            sending = asyncio.create_task(_send(writer, data))
            for _ in range(100):
                proxy.charge(peers[0])
                await asyncio.sleep(0)
            assert proxy.counters["calls_held"] == 100
            may_read.set()
            await sending
            writer.close()
            await ended.wait()
            assert received == data
            proxy.stop()

    run(main())
