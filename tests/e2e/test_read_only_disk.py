"""A disk that takes no writes any more: nvme goes offline and comes back."""

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.appliance.observability.daemon_view import READY
from kvtier.tiers.base import Buffer
from kvtier.tiers.block import Tier
from kvtier.tiers.cold.direct_io import DirectIo

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, chain
from ..waiting import until
from .scene import BLOCK_BYTES, HEADS

NUM_BLOCKS = 16


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
    monkeypatch.setattr("kvtier.appliance.store_tasks.STORE_RETRY_S", 0.01)
    return Disk(monkeypatch)


def connected(served: DaemonThread) -> RawClient:
    client = RawClient(served.daemon.service.facts.local_socket_path)
    client.attach()
    return client


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_writes_is_offline_until_it_does(
    code: int, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """836 of 836 writes failed in 90 s while the daemon said that it serves."""
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, connected(served) as client:
        view = served.daemon.observability.view
        namespace = client.register(heads=HEADS)
        served.wait(served.daemon.appliance.settled())
        disk.code = code
        with caplog.at_level(logging.ERROR):
            client.put(namespace, chain(NUM_BLOCKS, "c"), os.urandom(NUM_BLOCKS * BLOCK_BYTES))
            until(lambda: Tier.NVME in served.call(lambda: set(view.planner.core.offline)), "still online")
        assert "tier nvme is lost: write failed: " in caplog.text
        assert os.strerror(code) in caplog.text
        disk.code = 0
        until(lambda: not served.call(lambda: set(view.planner.core.offline)), "still offline")
        assert view.state() == READY


def test_a_drain_says_how_many_blocks_it_could_not_flush(disk: Disk, tmp_path: Path) -> None:
    """512 of them were lost without a word."""
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served, connected(served) as client:
        namespace = client.register(heads=HEADS)
        served.wait(served.daemon.appliance.settled())
        disk.code = errno.EROFS
        client.put(namespace, chain(NUM_BLOCKS, "c"), os.urandom(NUM_BLOCKS * BLOCK_BYTES))
        drained = served.wait(served.daemon.drain(0.1))
        assert (drained.num_blocks_flushed, drained.num_blocks_unflushed) == (0, NUM_BLOCKS)
