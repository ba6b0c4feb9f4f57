"""When what a host holds is written into the index again: after outages, and after losses."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from kvtier.appliance.fleet import index_writer
from kvtier.appliance.fleet.index_writer import HoldingsWriter
from kvtier.v1 import peer_pb2 as pb

from ...fakes.directories.index import FakeIndex
from ..loops import run, turns

NUM_FAILURES = 24  # a pause that doubled as often takes hours


class Host:
    """Holds a bundle at first, and each that is put into `later`; writes them into `index`."""

    def __init__(self) -> None:
        self.index = FakeIndex()
        self.later: asyncio.Queue[bytes] = asyncio.Queue()
        self.writer = HoldingsWriter(self.index, 7, self._watch)

    async def _watch(self) -> AsyncGenerator[pb.WatchInventoryResponse, None]:
        yield pb.WatchInventoryResponse(is_reset=True)
        yield self._message(bytes(8))
        yield pb.WatchInventoryResponse(is_complete=True)
        while True:
            yield self._message(await self.later.get())

    def _message(self, name: bytes) -> pb.WatchInventoryResponse:
        change = pb.InventoryChange(namespace_digest=bytes(32), added=name)
        return pb.WatchInventoryResponse(changes=[change])

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait."""
        while not is_so():
            await turns(1)


def writing(main: Callable[[Host], Awaitable[None]]) -> None:
    """Run `main` beside a host that writes."""

    async def beside() -> None:
        host = Host()
        task = asyncio.create_task(host.writer.run())
        async with asyncio.timeout(30):
            await main(host)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(beside())


def test_the_pause_of_one_outage_does_not_grow_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = -1.0  # no pause
    monkeypatch.setattr(index_writer, "RETRY_S", 0.001)
    monkeypatch.setattr(index_writer, "MAX_RETRY_S", 1e9)
    monkeypatch.setattr(random, "random", lambda: draw)

    async def main(host: Host) -> None:
        nonlocal draw
        host.index.is_down = True
        await host.until(lambda: host.writer.counters["index_writes_failed"] == NUM_FAILURES)
        draw = -1.0
        host.index.is_down = False
        await host.until(lambda: not host.writer.is_failing)
        draw = 0.0
        host.index.is_down = True
        host.later.put_nowait(b"a bundle")
        await host.until(lambda: host.writer.is_failing)
        host.index.is_down = False
        await host.until(lambda: not host.writer.is_failing)

    writing(main)


def test_a_directory_that_has_this_host_anew_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_writer, "RETRY_S", 3600.0)

    async def main(host: Host) -> None:
        host.index.is_down = True
        await host.until(lambda: host.writer.is_failing)
        host.index.is_down = False
        host.writer.begin_again()
        await host.until(lambda: bool(host.index.lives))

    writing(main)


def test_losses_again_and_again_do_not_keep_a_host_from_writing_all() -> None:
    async def main(host: Host) -> None:
        await host.until(lambda: host.writer.num_told == 1)
        for _ in range(3):
            host.index.lives.clear()
            num_added = host.writer.counters["index_bundles_added"]
            while host.writer.counters["index_bundles_added"] < num_added + 2:
                host.writer.begin_again()
                await asyncio.sleep(0)
            await host.until(lambda: host.writer.num_told == 1)
            assert len(host.index.lives) == 1

    writing(main)
