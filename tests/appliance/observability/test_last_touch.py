"""A get answered from shared memory sends nothing; what it read counts, though the client leaves at once."""

import asyncio
import threading

import numpy as np

from kvtier.clients import AsyncClient, Client
from kvtier.tiers.block import Tier

from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Shown, Start, names

WAIT_S = 30.0


def _found_of(shown: Shown, session: str) -> int:
    """Blocks of a session that were found in dram, when every client is gone."""
    pause, waited = threading.Event(), 0.0
    while shown.served.call(lambda: len(shown.daemon.clients)):
        assert waited < WAIT_S, "the client is still there"
        waited += 0.01
        pause.wait(0.01)
    telemetry = shown.daemon.observability.view.telemetry
    return shown.served.call(lambda: telemetry.of(session).found[Tier.DRAM])


def test_the_last_reads_of_a_client_count(start: Start) -> None:
    shown = start(nvme=False)
    data = np.ones(CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with Client(shown.target) as client:
        ns = client.register(IDENTITY)
        client.put(ns, names("a"), data, session="short")
        assert client.get(ns, names("a"), session="short").num_blocks == CHAIN_BLOCKS
    assert _found_of(shown, "short") == CHAIN_BLOCKS

    async def read_and_leave() -> None:
        async with AsyncClient(shown.target) as client:
            ns = await client.register(IDENTITY)
            await client.get(ns, names("a"), session="shorter")

    asyncio.run(read_and_leave())
    assert _found_of(shown, "shorter") == CHAIN_BLOCKS
    assert shown.audit() == []
