"""What a client has of the daemon's memory goes back: at its end, and after calls given up."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import AsyncClient, Namespace
from kvtier.v1.local import Method

from .scripted import ScriptedServer, scripted
from .test_giving_up import WAIT_S, Held
from .test_local_channel import BLOCK, IDENTITY, NAMES, answer_lookup, committed

CLOSING = """
import asyncio, gc, os, sys
from kvtier.clients import AsyncClient, Client

def count():
    return len(os.listdir("/proc/self/fd")), open("/proc/self/maps").read().count("memfd:")

async def once():
    async with AsyncClient(sys.argv[1]) as client:
        await client.info

def sync_once():
    with Client(sys.argv[1]) as client:
        client.info

asyncio.run(once())  # what is imported and made once
gc.collect()
gc.disable()
before = count()
for _ in range(3):
    sync_once()
    asyncio.run(once())
print(before, count())
assert count() == before
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    with scripted(tmp_path) as made:
        yield made


def test_a_closed_client_keeps_no_memory_until_a_collection(server: ScriptedServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOSING, f"unix://{tmp_path}/kvtier.sock"]
    subprocess.run(command, check=True, timeout=4 * WAIT_S)


def test_staging_of_a_cancelled_put_is_given_back_when_it_is_answered(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """The daemon may read the staging extent until it has answered, whoever still waits for it."""
    held = server.handlers[Method.COMMIT] = Held()
    server.handlers[Method.LOOKUP] = answer_lookup

    async def run() -> None:
        async with AsyncClient(f"unix://{tmp_path}/kvtier.sock") as client:
            namespace: Namespace = await client.register(IDENTITY)
            put = asyncio.create_task(client.put(namespace, NAMES[:2], bytes(2 * BLOCK)))
            await held.arrived()
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            asked = asyncio.create_task(client.staging(server.staging_bytes))
            await client.lookup(namespace, NAMES[:1])
            assert not asked.done()
            server.handlers[Method.COMMIT] = committed
            committed(*held.waiting[0])
            with await asyncio.wait_for(asked, WAIT_S) as buffer:
                assert len(buffer) == server.staging_bytes
            num_blocks = server.staging_bytes // BLOCK
            names = [hashlib.sha256(bytes([i, 1])).digest() for i in range(num_blocks)]
            assert (await client.put(namespace, names, np.zeros(num_blocks * BLOCK, np.uint8))).complete
            link: Any = client._link
            assert link.attachment.staging.check_integrity() == []

    asyncio.run(run())
