"""The gate carries every byte, whoever is slow, and lets go of everything when either end does."""

import asyncio
import os
import socket
from pathlib import Path

from kvtier.appliance.access import COMMON, Principal
from kvtier.appliance.gate import Gate

from ..appliance.loops import run, turns

NUM_BYTES = 2 << 20


def who(uid: int, gid: int) -> Principal:
    return Principal(f"uid {uid}", COMMON)


def test_every_byte_arrives_both_ways_when_nobody_reads_for_a_while(tmp_path: Path) -> None:
    data = os.urandom(NUM_BYTES)

    async def main() -> None:
        gate = Gate(tmp_path / "g.sock", 0o660, who)
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

        gate.prepare()
        async with await asyncio.start_unix_server(echo, gate.inner):
            gate.start()
            reader, writer = await asyncio.open_unix_connection(gate.path)
            sending = asyncio.create_task(_send(writer, data))
            await arrived.wait()
            assert gate.principal_of(f"unix-abstract:{peers[0]}") == who(os.getuid(), 0)
            assert gate.principal_of("unix-abstract:kvtier-guessed") is None
            assert not sending.done(), "more than the buffers on the way hold"
            may_read.set()
            assert await reader.readexactly(NUM_BYTES) == data
            await sending
            writer.close()
            await ended.wait()
            assert len(gate) == 0
            assert gate.principal_of(f"unix-abstract:{peers[0]}") is None, "a name is good for one connection"
            gate.stop()
        assert not gate.path.exists()

    run(main())


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


def test_a_server_that_ends_ends_its_connections(tmp_path: Path) -> None:
    async def main() -> None:
        gate = Gate(tmp_path / "g.sock", 0o660, who)
        gate.prepare()
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        inner.bind(str(gate.inner))
        inner.listen()
        gate.start()
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_unix_connection(gate.path)
        accepted, _ = await loop.sock_accept(inner)
        assert len(gate) == 1
        accepted.close()
        assert await reader.read() == b"", "the client hears of it"
        assert len(gate) == 0
        inner.close()
        again, late = await asyncio.open_unix_connection(gate.path)
        assert await again.read() == b"", "nobody behind the gate: turned away at once"
        gate.stop()
        gate.stop()
        await turns()
        for one in (writer, late):
            one.close()

    run(main())
