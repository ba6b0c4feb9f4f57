"""What every directory does: hosts that enter find each other, those that leave or expire are gone."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.sources.directories import etcd, records
from kvtier.sources.directories.addresses import DirectoryAccess, DirectoryError, parse_address
from kvtier.sources.directories.opening import open_directory
from kvtier.sources.directories.records import HostDirectory, HostRecord
from kvtier.sources.directories.redis_server import RedisDirectory

from ..appliance.loops import run
from ..fakes.directories import FakeDirectory, Shelf
from ..sources.directories.servers import (
    PASSWORD,
    Server,
    etcd_cluster,
    etcd_control,
    needs_etcd,
    needs_redis,
    redis_server,
    write_certificates,
    write_password,
)
from ..sources.directories.services import SERVICES, Start, etcd_with_a_user

PAUSE = threading.Event()
FIRST = HostRecord(1 << 62, "10.0.0.1:7070", "one", "0.1.0")
SECOND = HostRecord(7, "[fd00::2]:7070", "two", "0.1.0")


class World:
    """One service, with any number of clients of it. Every test has a fleet of its own."""

    def __init__(self, open_one: Callable[[str], HostDirectory]) -> None:
        self._open = open_one
        self.fleet = ""

    def open(self) -> HostDirectory:
        """Return a client for another host."""
        return self._open(self.fleet)


def served(start: Start, folder: Path, stack: ExitStack) -> World:
    """Return the world of a server."""
    url, access = start(folder, stack)
    return World(lambda fleet: open_directory(parse_address(f"{url}#{fleet}"), access))


def faked() -> World:
    """Return a world in memory."""
    shelf: dict[str, Shelf] = {}
    return World(lambda fleet: FakeDirectory(shelf.setdefault(fleet, Shelf())))


PARAMETERS = ["fake", *(pytest.param(name, marks=marks) for name, (_, marks) in SERVICES.items())]


@pytest.fixture(scope="module", params=PARAMETERS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        if request.param == "fake":
            yield faked()
        else:
            yield served(SERVICES[request.param][0], tmp_path_factory.mktemp("directory"), stack)


@pytest.fixture
def world(service: World, request: pytest.FixtureRequest) -> World:
    service.fleet = request.node.originalname
    return service


def hosts(world: World, main: Callable[[HostDirectory, HostDirectory], Awaitable[None]]) -> None:
    """Run `main` with the clients of two hosts."""

    async def both() -> None:
        one, two = world.open(), world.open()
        try:
            await main(one, two)
        finally:
            await one.close()
            await two.close()
            await one.close()

    run(both())


def test_hosts_that_enter_find_each_other_and_leave(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def main(one: HostDirectory, two: HostDirectory) -> None:
        met = await one.meet(FIRST)
        assert (met.records, met.is_new, met.problem) == ([FIRST], True, "")
        met = await two.meet(SECOND)
        assert (sorted(met.records), met.is_new) == ([SECOND, FIRST], True)
        met = await one.meet(FIRST)
        assert (sorted(met.records), met.is_new) == ([SECOND, FIRST], False)
        await two.leave(SECOND)
        assert (await one.meet(FIRST)).records == [FIRST]

    hosts(world, main)
    assert [record for record in caplog.records if record.name.startswith("redis")] == []  # before: a warning


def test_a_second_life_of_a_host_stands_beside_the_first(world: World) -> None:
    async def main(one: HostDirectory, two: HostDirectory) -> None:
        await one.meet(FIRST)
        again = FIRST._replace(epoch=FIRST.epoch + 1)
        met = await two.meet(again)
        assert sorted(met.records) == [FIRST, again]
        await one.leave(FIRST)
        assert (await two.meet(again)).records == [again]

    hosts(world, main)


def test_a_life_that_another_host_enters_is_entered_again(world: World) -> None:
    async def main(one: HostDirectory, two: HostDirectory) -> None:
        await two.meet(FIRST._replace(address="10.0.0.9:7070"))
        met = await one.meet(FIRST)
        assert met.records == [FIRST]
        assert met.is_new  # what the directory lost meanwhile, the other host's record hides
        other = world.open()
        assert FIRST in (await other.meet(SECOND)).records
        await other.close()

    hosts(world, main)


def test_what_is_not_renewed_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (records, etcd, "kvtier.sources.directories.redis_server", "tests.fakes.directories"):
        monkeypatch.setattr(
            *((f"{module}.TTL_S", 1.0) if isinstance(module, str) else (module, "TTL_S", 1.0))
        )

    async def main(one: HostDirectory, two: HostDirectory) -> None:
        await one.meet(FIRST)
        async with asyncio.timeout(60):
            while len((await two.meet(SECOND)).records) > 1:
                await asyncio.to_thread(PAUSE.wait, 0.2)
            met = await one.meet(FIRST)
            assert met.is_new
            assert sorted(met.records) == [SECOND, FIRST]

    hosts(world, main)


def test_two_fleets_do_not_see_each_other(world: World) -> None:
    async def main(one: HostDirectory, two: HostDirectory) -> None:
        await one.meet(FIRST)
        world.fleet += "2"
        other = world.open()
        assert (await other.meet(SECOND)).records == [SECOND]
        await other.close()

    hosts(world, main)


@needs_redis
def test_nonsense_in_redis_is_counted_and_left_out(tmp_path: Path) -> None:
    nonsense = [
        b"",
        b"{",
        b"[" * 100_000,
        b"x" * 5000,
        b'{"epoch":true,"address":"h:1","name":"","version":"","protocol":1,"oldest":1}',
        *(
            json.dumps(FIRST._replace(**bad)._asdict()).encode()
            for bad in (
                {"epoch": 0},
                {"epoch": 1 << 63},
                {"address": "unix:///etc/passwd"},
                {"address": "h:99999"},
                {"address": ["h:1"]},
                {"name": 5},
                {"protocol": "1"},
            )
        ),
    ]

    async def main() -> None:
        with redis_server(tmp_path) as server:
            directory = open_directory(
                parse_address(f"redis://127.0.0.1:{server.port}#contract"), DirectoryAccess()
            )
            assert isinstance(directory, RedisDirectory)
            client = directory._client
            for number, value in enumerate(nonsense):
                await client.set(f"{{kvtier:contract}}:host:{number}", value)
                await client.sadd("{kvtier:contract}:hosts", str(number))
            met = await directory.meet(FIRST)
            assert (met.records, met.num_unreadable) == ([FIRST], len(nonsense))
            await client.set("{kvtier:contract}:hosts", "no set at all")
            with pytest.raises(DirectoryError, match="WRONGTYPE"):
                await directory.meet(FIRST)
            await directory.close()

    run(main())


@needs_redis
def test_a_full_server_keeps_who_is_in_it_and_takes_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
            address = parse_address(f"redis://127.0.0.1:{server.port}#contract")
            one, two = (open_directory(address, DirectoryAccess()) for _ in range(2))
            await one.meet(FIRST)
            server.ask("CONFIG", "SET", "maxmemory", "1")
            met = await one.meet(FIRST)
            assert (met.records, met.is_new, met.problem) == ([FIRST], False, "")
            met = await two.meet(SECOND)
            assert met.records == [FIRST]
            assert "maxmemory" in met.problem
            server.ask("CONFIG", "SET", "maxmemory", "0")
            assert (await two.meet(SECOND)).problem == ""
            await one.close()
            await two.close()

    run(main())


@needs_redis
def test_a_host_behind_more_hosts_than_are_read_is_not_new_at_each_meeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it wrote all that it holds into the index again each time."""
    monkeypatch.setattr("kvtier.sources.directories.redis_server.MAX_RECORDS", 2)

    async def main() -> None:
        with redis_server(tmp_path) as server:
            address = parse_address(f"redis://127.0.0.1:{server.port}#contract")
            hosts = [FIRST._replace(epoch=epoch) for epoch in (1, 2, 3)]
            directories = [open_directory(address, DirectoryAccess()) for _ in hosts]
            for directory, host in zip(directories, hosts, strict=True):
                assert (await directory.meet(host)).is_new
            for directory, host in zip(directories, hosts, strict=True):
                met = await directory.meet(host)
                assert (len(met.records), met.is_new) == (2, False)
                await directory.close()

    run(main())


@needs_etcd
def test_a_token_from_before_a_change_of_users_is_replaced(tmp_path: Path) -> None:
    """Before: with tokens of the kind jwt no host was in the directory until its token ended."""
    files = write_certificates(tmp_path)
    words = ("--auth-token", f"jwt,sign-method=HS256,priv-key={files['password']},ttl=10m")

    async def main(members: list[Server], url: str) -> None:
        directory = open_directory(parse_address(f"{url}#test"), DirectoryAccess(tmp_path))
        for number in range(3):
            assert (await directory.meet(FIRST)).is_new is (number == 0)
            etcd_control(members, "user", "add", f"another{number}:{PASSWORD}", user="root")
        await directory.close()

    with etcd_cluster(tmp_path, 3, files, *words) as members:
        run(main(members, etcd_with_a_user(members)))


def test_passwords_and_their_files_stay_out_of_errors(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        write_password(tmp_path)
        access = DirectoryAccess(tmp_path)
        directory = open_directory(parse_address(url), access)
        with pytest.raises(DirectoryError) as failed:
            await directory.meet(FIRST)
        assert PASSWORD not in repr(failed.value) + str(failed.value)
        await directory.close()

    for url in ("redis://127.0.0.1:9", "redis+sentinel://127.0.0.1:9/main", "redis+cluster://127.0.0.1:9"):
        run(main(url))
    run(main("etcd://kv@127.0.0.1:9"))
