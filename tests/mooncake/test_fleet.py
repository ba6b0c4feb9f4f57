"""Hosts that share a pool, of which a process is killed: the same bytes, or misses; local service goes on."""

from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import numpy as np
import pytest

from kvtier.clients import Client
from kvtier.sources.objects.opening import open_store

from ..daemon import PATIENT, Daemon
from ..e2e.test_shared_store import (
    BUNDLE_BLOCKS,
    CHAIN_BLOCKS,
    GEOMETRY,
    IDENTITY,
    NUM_CHAINS,
    STORED_BLOCKS,
    data_of,
    expect,
    fill,
    host,
    names_of,
)
from ..waiting import until
from .running import Pool

NUM_BUNDLES = NUM_CHAINS * STORED_BLOCKS // BUNDLE_BLOCKS


def stored(pool: Pool) -> int:
    """Return how many bundles are in a pool."""
    return sum(key.startswith("v1/b/") for key in pool.names())


def expect_prefixes(daemon: Daemon, chains: range) -> None:
    """Read chains: no more than is stored, and each byte as it was put."""
    with Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        for chain in chains:
            got = client.get(namespace, names_of(chain))
            assert got.num_blocks <= STORED_BLOCKS
            np.testing.assert_array_equal(got.data, data_of(chain)[: got.num_blocks * GEOMETRY.block_bytes])


def test_of_three_processes_one_is_killed(tmp_path: Path) -> None:
    with Pool(tmp_path, num_lenders=3) as pool:
        url = f"mooncake://{pool.address}"
        with host(tmp_path / "first", url, "eager") as first:
            fill(first)
            until(lambda: stored(pool) == NUM_BUNDLES)
            first.stop(SIGKILL)
        with host(tmp_path / "second", url, "off") as second:
            expect(second, STORED_BLOCKS, range(2))
            pool.lenders[0].kill()
            expect_prefixes(second, range(2, NUM_CHAINS))
            expect(second, STORED_BLOCKS, range(2))  # from here, now
            fill(second)
            expect(second, CHAIN_BLOCKS)
            assert second.stop() == 0
        with host(tmp_path / "third", url, "off") as third:
            expect_prefixes(third, range(NUM_CHAINS))
            assert third.stop() == 0


@pytest.mark.parametrize("is_killed", [True, False])
def test_without_its_master_a_pool_is_left_alone_and_comes_back(tmp_path: Path, is_killed: bool) -> None:
    with Pool(tmp_path) as pool, host(tmp_path / "host", f"mooncake://{pool.address}", "eager") as running:
        if is_killed:
            pool.master.kill()
        else:
            pool.master.send_signal(SIGSTOP)
        fill(running)
        running.wait_for_log("is not used for now: no answer")
        expect(running, CHAIN_BLOCKS)
        if is_killed:
            pool.restart_master()
        else:
            pool.master.send_signal(SIGCONT)
        until(lambda: running.log.read_text().count(": in use") == 2)
        until(lambda: stored(pool) == NUM_BUNDLES or _read_again(running))
        assert running.stop() == 0


def _read_again(daemon: Daemon) -> bool:
    expect(daemon, CHAIN_BLOCKS)
    return False


def test_what_was_changed_in_a_pool_is_a_miss(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        url = f"mooncake://{pool.address}"
        with host(tmp_path / "first", url, "eager") as first:
            fill(first)
            until(lambda: stored(pool) == NUM_BUNDLES)
            assert first.stop() == 0
        store = open_store(url)
        for chain in range(2):
            [key] = [key for key in pool.names() if key.endswith(names_of(chain)[7].hex())]
            data = bytearray(b"".join(map(bytes, store.stream(key, 0, 1 << 30))))
            data[-5] ^= 1  # in the last fragment of block 7
            store.delete([key])
            assert store.create(key, memoryview(data if chain else data[: len(data) * 2 // 3]))
        with host(tmp_path / "second", url, "off") as second:
            expect(second, BUNDLE_BLOCKS, range(1))
            expect(second, 7, range(1, 2))
            expect(second, STORED_BLOCKS, range(2, NUM_CHAINS))
            assert second.stop() == 0
