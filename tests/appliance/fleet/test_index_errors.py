"""The client of an index fails in an unexpected way: looks are answered, and writing goes on."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from kvtier.appliance.fleet import index_writer
from kvtier.appliance.fleet.finding import ChainPart
from kvtier.appliance.fleet.index import IndexedHosts
from kvtier.appliance.fleet.index_writer import HoldingsWriter
from kvtier.v1 import peer_pb2 as pb

from ...fakes.directories.index import FakeIndex
from ..loops import run


class FailingIndex(FakeIndex):
    """Fails once with what no call should raise."""

    has_failed = False

    def _check(self) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise TypeError("of the client")


def test_a_look_that_fails_unexpectedly_is_answered() -> None:
    """Before: never, so the fetch that waited for it kept its places for ever."""

    async def main() -> None:
        hosts = IndexedHosts(FailingIndex(), None, lambda: None, lambda: None, lambda: 0.0)
        hosts.directory_answers()
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        hosts.find(ChainPart(bytes(32), [bytes(32)], 0, 1), found.set_result)
        async with asyncio.timeout(10):
            assert await found == {}
        assert hosts.counters["index_failed"] == 1
        await hosts.stop()

    run(main())


def test_a_write_that_fails_unexpectedly_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: it ended the task, and the index was told nothing more."""
    monkeypatch.setattr(index_writer, "RETRY_S", 0.001)

    async def main() -> None:
        index, written = FailingIndex(), asyncio.Event()
        added: Sequence[pb.InventoryChange] = [pb.InventoryChange(namespace_digest=bytes(32), added=bytes(8))]

        async def watch() -> AsyncGenerator[pb.WatchInventoryResponse, None]:
            yield pb.WatchInventoryResponse(is_reset=True)
            yield pb.WatchInventoryResponse(changes=added, is_complete=True)
            written.set()
            await asyncio.Event().wait()

        writer = HoldingsWriter(index, 7, watch)
        task = asyncio.create_task(writer.run())
        async with asyncio.timeout(10):
            waits = asyncio.create_task(written.wait())
            await asyncio.wait([task, waits], return_when="FIRST_COMPLETED")
        assert waits.done()
        assert index.lives
        assert writer.counters["index_writes_failed"] == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())
