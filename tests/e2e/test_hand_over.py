"""Prefill here, decode there: one runtime puts a prompt block by block, another one waits for it."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest

from kvtier.clients import AsyncClient, Client, ExpectedBlocks, GetReport, PrefillSpeed

from ..daemon import PATIENT
from ..sources.directories.servers import needs_redis, redis_server
from ..waiting import until
from .fleet_hosts import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Host, data_of, fleet, indexed, names_of

CHUNK = 7  # blocks; bundles have four
SLOW = PrefillSpeed(0.5)  # tokens a second: what is expected is awaited for as long as its caller allows


def put_part(client: Client, chain: int, first: int, end: int) -> None:
    """Put some blocks of a chain behind those before them."""
    names, data = names_of(chain), data_of(chain).reshape(CHAIN_BLOCKS, -1)
    parent = names[first - 1] if first else b""
    assert client.put(client.register(IDENTITY), names[first:end], data[first:end], parent=parent).complete


def wait_for(host: Host, chain: int, expected: ExpectedBlocks, **named: Any) -> GetReport:
    """Read a chain that is expected; what came is as it was put."""
    with host.client as client:
        got = client.get(client.register(IDENTITY), names_of(chain), expected=expected, **named)
        np.testing.assert_array_equal(got.data, data_of(chain)[: got.num_blocks * GEOMETRY.block_bytes])
        return got


def is_stored(client: Client, num_blocks: int) -> bool:
    """Whether a daemon has so many blocks of the first chain."""
    return client.lookup(client.register(IDENTITY), names_of(1)).num_blocks >= num_blocks


def epoch_of(host: Host) -> int:
    """Return the epoch of a host's daemon."""
    with host.client as client:
        return client.info.epoch


def know_each_other(first: Host, second: Host) -> None:
    """Return when the second host reads what the first one has, but for a part of a bundle."""
    first.put(200)
    until(lambda: second.read(200) >= CHAIN_BLOCKS - CHAIN_BLOCKS % 4)


@contextmanager
def hosts_of(folder: Path, way: str) -> Iterator[list[Host]]:
    """Start the hosts of a hand-over."""
    with ExitStack() as stack:
        if way == "index":
            yield stack.enter_context(indexed(folder, stack.enter_context(redis_server(folder)), 2))
        else:
            yield stack.enter_context(fleet(folder, 1 if way == "one host" else 2))


WAYS = ["one host", "streams", pytest.param("index", marks=needs_redis)]


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_read_while_it_is_put(tmp_path: Path, way: str) -> None:
    with hosts_of(tmp_path, way) as hosts, hosts[0].client as prefill, ThreadPoolExecutor(1) as pool:
        decode = hosts[-1]
        if decode is not hosts[0]:
            know_each_other(hosts[0], decode)
        waiting = pool.submit(wait_for, decode, 1, ExpectedBlocks(epoch=epoch_of(hosts[0])), deadline_s=60.0)
        for first in range(0, CHAIN_BLOCKS, CHUNK):
            end = min(first + CHUNK, CHAIN_BLOCKS)
            put_part(prefill, 1, first, end)
            with decode.client as client:  # each part is there before the next one is put
                until(partial(is_stored, client, end))
            assert end == CHAIN_BLOCKS or not waiting.done()
        assert waiting.result(60).num_blocks == CHAIN_BLOCKS


def test_what_is_expected_counts_until_it_has_come(tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as (host,), host.client as prefill, host.client as decode:
        put_part(prefill, 1, 0, 2)
        namespace = decode.register(IDENTITY)
        lease = decode.acquire(namespace, names_of(1)[:6], expected=ExpectedBlocks(num_blocks=5))
        assert lease.num_blocks == 5
        put_part(prefill, 1, 2, 5)
        lease.wait()
        assert lease.num_blocks == 5
        lease.release()
        for expected in (ExpectedBlocks(epoch=12345), ExpectedBlocks(host="nowhere:1")):
            assert wait_for(host, 2, expected, deadline_s=60.0).num_blocks == 0, "nobody knows that host"
        with Client(host.address, timeout=PATIENT) as remote:  # without shared memory
            expected = ExpectedBlocks(num_blocks=6, wait_s=0.01)
            assert remote.get(remote.register(IDENTITY), names_of(1), expected=expected).num_blocks == 5


def test_calls_of_a_client_that_waits_for_many_prompts_are_not_behind_them(tmp_path: Path) -> None:
    """Before: 32 gets that wait took every stream of their connection. It seemed dead, and puts waited."""

    async def main(address: str) -> None:
        async with AsyncClient(address, timeout=PATIENT) as client:
            namespace = await client.register(IDENTITY, SLOW)
            gets = [
                asyncio.create_task(
                    client.get(namespace, names_of(chain, 1), expected=ExpectedBlocks(), deadline_s=60.0)
                )
                for chain in range(40)
            ]
            while await asyncio.to_thread(host.counter, "acquires_expecting") < 32:
                assert not any(get.done() for get in gets), "they did not wait"
            assert (await client.lookup(namespace, names_of(1))).num_blocks == 0
            assert (await client.put(namespace, names_of(100), data_of(100))).complete
            assert (await client.get(namespace, names_of(100))).num_blocks == CHAIN_BLOCKS
            assert not any(get.done() for get in gets)
            for get in gets:
                get.cancel()
            await asyncio.gather(*gets, return_exceptions=True)

    with fleet(tmp_path, 1) as (host,):
        asyncio.run(main(host.address))


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_prefill_host_that_dies_is_not_waited_for(tmp_path: Path, way: str) -> None:
    with hosts_of(tmp_path, way) as (first, second), ThreadPoolExecutor(1) as pool:
        know_each_other(first, second)
        waiting = pool.submit(wait_for, second, 1, ExpectedBlocks(epoch=epoch_of(first)), deadline_s=300.0)
        until(lambda: second.counter("acquires_expecting") > 0)
        with first.client as prefill:
            put_part(prefill, 1, 0, CHUNK)
        with second.client as client:
            until(partial(is_stored, client, CHUNK))
        os.kill(first.daemon.pid, SIGKILL)
        assert waiting.result(60).num_blocks == CHUNK
