"""What holds wherever hosts learn what others hold: streamed inventories, an index in Redis or in memory."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from kvtier.appliance.fleet.finding import ChainPart, KnownHosts
from kvtier.appliance.fleet.hosts import Hosts
from kvtier.appliance.fleet.index import IndexedHosts
from kvtier.appliance.fleet.index_writer import HoldingsWriter
from kvtier.sources.directories.addresses import parse_address
from kvtier.sources.directories.opening import open_index
from kvtier.sources.directories.records import HostRecord
from kvtier.sources.directories.redis_index import HolderIndex
from kvtier.sources.peers.inventory import short_names
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1.peer_pb2_grpc import PeerServiceServicer, add_PeerServiceServicer_to_server

from ..appliance.loops import run
from ..fakes.directories.index import FakeIndex
from ..sources.directories.servers import needs_redis
from ..sources.directories.services import REDIS_SERVICES

DIGEST, OTHER = hashlib.sha256(b"namespace").digest(), hashlib.sha256(b"other").digest()
PAUSE = threading.Event()
NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(200)]


class Teller:
    """What one host tells: a snapshot to everyone who watches, then changes."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._held: dict[bytes, dict[bytes, None]] = {DIGEST: {}, OTHER: {}}
        self._watchers: list[asyncio.Queue[pb.WatchInventoryResponse]] = []

    def change(self, digest: bytes, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Hold other blocks."""
        self._held[digest].update(dict.fromkeys(added))
        for name in removed:
            self._held[digest].pop(name, None)
        message = self._message(digest, added, removed)
        for queue in self._watchers:
            queue.put_nowait(message)

    def reset(self, digest: bytes, names: Sequence[bytes]) -> None:
        """Hold these instead, and tell so by a snapshot anew, as after a log that has moved on."""
        self._held[digest] = dict.fromkeys(names)
        for queue in self._watchers:
            for message in self._snapshot():
                queue.put_nowait(message)

    def _message(
        self, digest: bytes, added: Iterable[bytes], removed: Iterable[bytes] = ()
    ) -> pb.WatchInventoryResponse:
        change = pb.InventoryChange(
            namespace_digest=digest, added=short_names(added), removed=short_names(removed)
        )
        return pb.WatchInventoryResponse(epoch=self.epoch, host="teller", changes=[change])

    def _snapshot(self) -> list[pb.WatchInventoryResponse]:
        return [
            pb.WatchInventoryResponse(epoch=self.epoch, is_reset=True),
            *(self._message(digest, names) for digest, names in self._held.items()),
            pb.WatchInventoryResponse(epoch=self.epoch, is_complete=True),
        ]

    async def watch(self) -> AsyncGenerator[pb.WatchInventoryResponse, None]:
        """Yield messages for ever."""
        queue: asyncio.Queue[pb.WatchInventoryResponse] = asyncio.Queue()
        self._watchers.append(queue)
        try:
            for message in self._snapshot():
                yield message
            while True:
                try:
                    async with asyncio.timeout(1.0):
                        message = await queue.get()
                except TimeoutError:
                    message = pb.WatchInventoryResponse(epoch=self.epoch)
                yield message
        finally:
            self._watchers.remove(queue)


class World:
    """Hosts that tell, and one that asks. `now`: passes at every look, so that nothing is only remembered."""

    hosts: KnownHosts

    def __init__(self) -> None:
        self.tellers: dict[int, Teller] = {}
        self.now = 0.0

    async def start(self, number: int) -> Teller:
        """Let a host begin a life."""
        raise NotImplementedError

    async def kill(self, number: int) -> None:
        """End a host's life."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all."""
        for number in list(self.tellers):
            await self.kill(number)
        await self.hosts.stop()

    async def find(self, names: Sequence[bytes], digest: bytes = DIGEST) -> dict[int, int]:
        """Return how many of the names each host holds, by the number in its address."""
        self.now += 1000.0
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.hosts.find(ChainPart(digest, names, 0, 1), found.set_result)  # a second answer raises
        held = await found
        return {self.number_of(host.address): count for host, count in held.items()}

    def number_of(self, address: str) -> int:
        """Return which host an address is."""
        return int(address.rpartition(":")[2])

    async def until(self, names: Sequence[bytes], wanted: dict[int, int], digest: bytes = DIGEST) -> None:
        """Wait until this is found."""
        async with asyncio.timeout(60):
            while await self.find(names, digest) != wanted:
                await asyncio.to_thread(PAUSE.wait, 0.01)


class Streams(World):
    """Inventories that hosts stream."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: Hosts = Hosts(99, None, lambda: frozenset([DIGEST, OTHER]), lambda: None)
        self._servers: dict[int, tuple[grpc.aio.Server, int]] = {}

    async def start(self, number: int) -> Teller:
        teller, server = Teller(number + 1000 * len(self.tellers) + 1), grpc.aio.server()

        class Service(PeerServiceServicer):
            def FetchBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
                raise AssertionError("no blocks are fetched here")

            def AwaitBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
                raise AssertionError("no blocks are awaited here")

            def PushBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
                raise AssertionError("no blocks are pushed here")

            async def WatchInventory(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
                async for message in teller.watch():
                    yield message

        service: Any = Service()
        add_PeerServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers[number], self.tellers[number] = (server, port), teller
        self._tell()
        return teller

    async def kill(self, number: int) -> None:
        server, _ = self._servers.pop(number)
        del self.tellers[number]
        await server.stop(None)
        self._tell()

    def _tell(self) -> None:
        self.hosts.set_members(f"127.0.0.1:{port}" for _, port in self._servers.values())

    def number_of(self, address: str) -> int:
        ports = {port: number for number, (_, port) in self._servers.items()}
        return ports[int(address.rpartition(":")[2])]


class Indexed(World):
    """An index that hosts write."""

    def __init__(self, index: HolderIndex) -> None:
        super().__init__()
        self._index = index
        self.hosts: IndexedHosts = IndexedHosts(index, None, lambda: None, lambda: None, lambda: self.now)
        self.hosts.directory_answers()
        self._writers: dict[int, asyncio.Task[None]] = {}
        self._num_lives = 0

    async def start(self, number: int) -> Teller:
        self._num_lives += 1
        teller = self.tellers[number] = Teller((1 << 62) + self._num_lives)
        writer = HoldingsWriter(self._index, teller.epoch, teller.watch)
        self._writers[number] = asyncio.create_task(writer.run())
        self._tell()
        return teller

    async def kill(self, number: int) -> None:
        writer = self._writers.pop(number)
        del self.tellers[number]
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        self._tell()

    def _tell(self) -> None:
        lives = {
            one.epoch: HostRecord(one.epoch, f"127.0.0.1:{number}") for number, one in self.tellers.items()
        }
        self.hosts.set_lives(lives)

    async def find(self, names: Sequence[bytes], digest: bytes = DIGEST) -> dict[int, int]:
        self.hosts.directory_answers()  # a busy machine may be too slow for a look
        return await super().find(names, digest)

    async def stop(self) -> None:
        await super().stop()
        await self._index.close()


WORLDS = [
    pytest.param("streams"),
    pytest.param("index in memory"),
    *(pytest.param(name, marks=needs_redis) for name in REDIS_SERVICES),
]


@pytest.fixture(scope="module", params=WORLDS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:
        if request.param in REDIS_SERVICES:
            url, access = REDIS_SERVICES[request.param](tmp_path_factory.mktemp("index"), stack)
            yield lambda fleet: Indexed(open_index(parse_address(f"{url}#{fleet}"), access))
        elif request.param == "streams":
            yield lambda fleet: Streams()
        else:
            yield lambda fleet: Indexed(FakeIndex())


@pytest.fixture
def scene(
    service: Any, request: pytest.FixtureRequest
) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    def play(main: Callable[[World], Awaitable[None]]) -> None:
        async def played() -> None:
            world: World = service(request.node.originalname)
            try:
                await main(world)
            finally:
                await world.stop()

        run(played())

    return play


def test_what_hosts_hold_is_found_to_the_first_gap(scene: Any) -> None:
    async def main(world: World) -> None:
        first, second = await world.start(1), await world.start(2)
        first.change(DIGEST, NAMES[:100], [])
        second.change(DIGEST, NAMES[:30] + NAMES[31:50], [])
        await world.until(NAMES, {1: 100, 2: 30})
        assert await world.find(NAMES[31:50]) == {1: 19, 2: 19}
        assert await world.find(NAMES[150:]) == {}
        assert await world.find(NAMES[90:110]) == {1: 10}
        assert await world.find([]) == {}

    scene(main)


def test_what_is_dropped_is_found_no_more(scene: Any) -> None:
    async def main(world: World) -> None:
        teller = await world.start(1)
        teller.change(DIGEST, NAMES[:10], [])
        await world.until(NAMES, {1: 10})
        teller.change(DIGEST, [], NAMES[5:10])
        await world.until(NAMES, {1: 5})
        teller.change(DIGEST, NAMES[5:7], [])
        await world.until(NAMES, {1: 7})

    scene(main)


def test_a_snapshot_anew_replaces_all_that_was_told(scene: Any) -> None:
    async def main(world: World) -> None:
        teller = await world.start(1)
        teller.change(DIGEST, NAMES[:20], [])
        await world.until(NAMES, {1: 20})
        teller.reset(DIGEST, NAMES[:4] + NAMES[10:12])
        await world.until(NAMES, {1: 4})
        await world.until(NAMES[10:], {1: 2})

    scene(main)


def test_a_new_life_holds_nothing_of_the_former_one(scene: Any) -> None:
    async def main(world: World) -> None:
        (await world.start(1)).change(DIGEST, NAMES[:20], [])
        (await world.start(2)).change(DIGEST, NAMES[:3], [])
        await world.until(NAMES, {1: 20, 2: 3})
        await world.kill(1)
        await world.until(NAMES, {2: 3})
        again = await world.start(1)
        again.change(DIGEST, NAMES[:2], [])
        await world.until(NAMES, {1: 2, 2: 3})

    scene(main)


def test_namespaces_are_apart(scene: Any) -> None:
    async def main(world: World) -> None:
        teller = await world.start(1)
        teller.change(DIGEST, NAMES[:5], [])
        teller.change(OTHER, NAMES[:9], [])
        await world.until(NAMES, {1: 9}, OTHER)
        await world.until(NAMES, {1: 5})

    scene(main)


def test_what_a_host_tells_of_an_awaited_chain_is_found_at_once(scene: Any) -> None:
    async def main(world: World) -> None:
        for number in (1, 2):
            (await world.start(number)).change(DIGEST, NAMES[:4], [])
        await world.until(NAMES, {1: 4, 2: 4})
        host = next(one for one in world.hosts.all() if world.number_of(one.address) == 1)
        assert world.hosts.at(host.address) is host
        assert world.hosts.at("127.0.0.1:none") is None
        answers: list[Any] = []
        world.hosts.told(host, DIGEST, NAMES[100:103], "")
        for digest, names in ((DIGEST, NAMES[100:103]), (DIGEST, NAMES[102:103]), (OTHER, NAMES[100:103])):
            world.hosts.find(ChainPart(digest, names, 0, 4), answers.append)
        assert answers[:2] == [{host: 3}, {host: 1}]
        assert await world.find(NAMES[100:], OTHER) == {}
        await world.kill(1)
        assert world.hosts.at(host.address) is None
        assert await world.find(NAMES[100:103]) == {}

    scene(main)


def test_every_look_is_answered_when_all_ends(scene: Any) -> None:
    async def main(world: World) -> None:
        (await world.start(1)).change(DIGEST, NAMES[:5], [])
        await world.until(NAMES, {1: 5})
        world.now += 1000.0
        answers: list[Any] = []
        for _ in range(50):
            world.hosts.find(ChainPart(DIGEST, NAMES, 0, 1), answers.append)
        await world.hosts.stop()
        assert len(answers) == 50
        assert await world.find(NAMES) == {}

    scene(main)
