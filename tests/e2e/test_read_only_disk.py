"""A disk that takes no writes any more: what it holds is read, and it is said that it fails."""

import asyncio
import errno
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.core.events import EvictRequested
from kvtier.appliance.host.daemon import Daemon
from kvtier.appliance.observability.daemon_view import READY
from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.tiers.base import Buffer
from kvtier.tiers.block import Tier
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.v1.shm import PAGE_BYTES

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..waiting import until

NUM_BLOCKS = 16
GEOMETRY = Geometry(4, 2, 64, 16, "float16", layers_per_group=2)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"read-only").digest(), GEOMETRY)
LATER = NamespaceIdentity(hashlib.sha256(b"later").digest(), GEOMETRY)
DATA = np.random.default_rng(5).integers(0, 256, NUM_BLOCKS * GEOMETRY.block_bytes, np.uint8)
NAMES = {
    chain: [hashlib.sha256(f"{chain}{number}".encode()).digest() for number in range(NUM_BLOCKS)]
    for chain in "ab"
}


class Disk:
    """Writes of cold stores fail with `code` while there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        write, open_ = DirectIo.write, DirectIo.open

        def refuse() -> None:
            if self.code:
                raise OSError(self.code, os.strerror(self.code))

        def fail_write(
            io: DirectIo, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False
        ) -> int:
            refuse()
            return write(io, fd, buffers, offset, durable=durable)

        def fail_open(io: DirectIo, path: Path, *, direct: bool = True) -> int:
            refuse()
            return open_(io, path, direct=direct)

        monkeypatch.setattr(DirectIo, "write", fail_write)
        monkeypatch.setattr(DirectIo, "open", fail_open)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def blocks(daemon: Daemon, tier: Tier) -> int:
    """Return how many blocks are whole in a tier."""
    catalog = daemon.planner.catalog
    resident = catalog.num_resident[tier]
    return sum(
        resident[row] == one.num_groups for one in catalog.namespaces.values() for row in one.rows.values()
    )


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_what_a_disk_holds_is_read_though_it_takes_no_namespace(
    code: int, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A namespace that was registered during the fault took all of nvme offline."""
    monkeypatch.setattr("kvtier.appliance.store_tasks.STORE_RETRY_S", 0.01)
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        daemon, namespace = served.daemon, client.register(IDENTITY)
        assert client.put(namespace, NAMES["a"], DATA).complete
        until(lambda: served.call(lambda: blocks(daemon, Tier.NVME)) == NUM_BLOCKS)
        served.call(lambda: daemon.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 0)))
        until(lambda: served.call(lambda: blocks(daemon, Tier.DRAM)) == 0)
        disk.code = code
        later = client.register(LATER)
        assert client.put(later, NAMES["b"], DATA).complete
        until(lambda: "takes no writes" in caplog.text)
        until(lambda: sum(served.call(daemon.observability.view.nvme_failures).values()))
        np.testing.assert_array_equal(client.get(namespace, NAMES["a"]).data, DATA)
        np.testing.assert_array_equal(client.get(later, NAMES["b"]).data, DATA)
        disk.code = 0
        until(lambda: served.call(lambda: blocks(daemon, Tier.NVME)) == 2 * NUM_BLOCKS)
        assert not daemon.planner.core.offline


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
@pytest.mark.parametrize("is_queued", [True, False])
def test_what_is_to_be_copied_forward_stays_while_a_disk_takes_no_namespace(
    is_queued: bool,
    code: int,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The copy ended with what failed the disk, and its records counted as damaged."""
    monkeypatch.setattr("kvtier.appliance.store_tasks.STORE_RETRY_S", 0.01)
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        daemon, namespace = served.daemon, client.register(IDENTITY)
        appliance = daemon.appliance
        assert client.put(namespace, NAMES["a"], DATA).complete
        until(lambda: served.call(lambda: blocks(daemon, Tier.NVME)) == NUM_BLOCKS)
        served.call(lambda: appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 0)))
        until(lambda: served.call(lambda: blocks(daemon, Tier.DRAM)) == 0)
        client.pin(namespace, NAMES["a"], 60.0, Tier.NVME)

        def empty() -> "asyncio.Future[Any]":
            answer = appliance.ask(lambda call: EvictRequested(call, Tier.NVME, 0))
            assert isinstance(answer, asyncio.Future)
            return answer

        def fail() -> None:
            disk.code = code
            client.register(LATER)
            until(lambda: "takes no writes" in caplog.text)

        if not is_queued:
            fail()
        served.call(lambda: appliance.mover.hold(Tier.NVME))
        answer = served.call(empty)
        if is_queued:
            until(lambda: served.call(daemon.planner.copies.forward_targets))
            fail()
        np.testing.assert_array_equal(client.get(namespace, NAMES["a"]).data, DATA)
        assert not answer.done()
        disk.code = 0
        until(answer.done)
        assert daemon.planner.story.counters["segments_reclaimed"]
        served.call(lambda: appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 0)))
        np.testing.assert_array_equal(client.get(namespace, NAMES["a"]).data, DATA)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_what_a_disk_holds_is_read_while_it_takes_no_writes(
    code: int, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """836 of 836 writes failed in 90 s, and nothing said so."""
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        daemon, namespace = served.daemon, client.register(IDENTITY)
        assert client.put(namespace, NAMES["a"], DATA).complete
        until(lambda: served.call(lambda: blocks(daemon, Tier.NVME)) == NUM_BLOCKS)
        disk.code = code
        served.call(lambda: daemon.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 0)))
        until(lambda: served.call(lambda: blocks(daemon, Tier.DRAM)) == 0)
        with caplog.at_level(logging.WARNING):
            assert client.put(namespace, NAMES["b"], DATA).complete
            until(lambda: sum(served.call(daemon.observability.view.nvme_failures).values()))
        assert os.strerror(code) in caplog.text
        for chain in NAMES.values():
            np.testing.assert_array_equal(client.get(namespace, chain).data, DATA)
        disk.code = 0
        until(lambda: served.call(lambda: blocks(daemon, Tier.NVME)) == 2 * NUM_BLOCKS)
        assert daemon.observability.view.state() == READY


def test_a_drain_says_how_many_blocks_it_could_not_flush(disk: Disk, tmp_path: Path) -> None:
    """512 of them were lost without a word."""
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        namespace = client.register(IDENTITY)
        served.wait(served.daemon.appliance.settled())
        disk.code = errno.EROFS
        assert client.put(namespace, NAMES["a"], DATA).complete
        drained = served.wait(served.daemon.drain(0.1))
        assert (drained.num_blocks_flushed, drained.num_blocks_unflushed) == (0, NUM_BLOCKS)


def test_what_cannot_be_read_at_one_start_is_found_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its segments were freed, durably, and written to."""
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        assert client.put(client.register(IDENTITY), NAMES["a"], DATA).complete
        until(lambda: served.call(lambda: blocks(served.daemon, Tier.NVME)) == NUM_BLOCKS)
        served.wait(served.daemon.drain(60.0))

    read = DirectIo.read

    def fail_read(io: DirectIo, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if os.fstat(fd).st_size == PAGE_BYTES:  # whether there is O_DIRECT
            return read(io, fd, buffers, offset)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(DirectIo, "read", fail_read)
        with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
            assert "the next start tries again" in caplog.text
            assert client.lookup(client.register(IDENTITY), NAMES["a"]).num_blocks == 0
            assert client.put(client.register(LATER), NAMES["b"], DATA).complete
            until(lambda: served.call(lambda: blocks(served.daemon, Tier.NVME)) == NUM_BLOCKS)
    with DaemonThread(settings), Client(settings.listen[0]) as client:
        np.testing.assert_array_equal(client.get(client.register(IDENTITY), NAMES["a"]).data, DATA)
        np.testing.assert_array_equal(client.get(client.register(LATER), NAMES["b"]).data, DATA)
