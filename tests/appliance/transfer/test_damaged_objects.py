"""Objects that are not what their names say: never overwritten, and no longer a harm than they must be."""

import time
from collections.abc import Callable

import pytest

from kvtier.appliance.core.events import ExportFinished, SourceSearched
from kvtier.appliance.core.instructions import SearchBundles
from kvtier.tiers.base import Cause
from tests.sources.objects.bundles import verify_bundle
from tests.sources.objects.s3_server import S3Server, StoredObject

from ..loops import run
from .edge_host import IDENTITY, MASTER, NAMES, RED, Host, closed
from .test_store_faults import DAY_S, URL, export, fetch, flip


class Clock:
    """Days since now."""

    days = 0

    def __call__(self) -> float:
        return time.time() + self.days * DAY_S


def damage(server: S3Server, change: Callable[[bytes], bytes]) -> list[str]:
    """Change every object; return their keys."""
    for key, found in server.objects.items():
        if key.startswith("fleet/v1/b/"):
            server.objects[key] = StoredObject(change(found.data), time.time())
    return [key for key in server.objects if key.startswith("fleet/v1/b/")]


@pytest.mark.parametrize("master", [b"", MASTER])
def test_a_damaged_object_is_passed_over_for_one_of_an_older_epoch(server: S3Server, master: bytes) -> None:
    async def scene() -> None:
        identity, clock = RED if master else IDENTITY, Clock()
        host = Host(URL, master, identity, now_s=clock)
        work = await export(host)
        [old] = damage(server, lambda data: data)
        whole = server.objects[old]
        clock.days = 1
        server.clock_s = clock
        damage(server, flip(-1))
        host.edge.execute(host.filled(2))
        assert (await host.last(ExportFinished, 2)).is_stored, "copied on: its head is whole"
        server.objects[old] = whole
        for copy in (10, 20):
            assert (Cause.NOT_AUTHENTIC if master else Cause.WRONG_CHECKSUM) in await fetch(host, work, copy)
        assert await fetch(host, work, 30) == {None}
        await closed(host)

    run(scene())


def test_a_damaged_object_is_stored_again_in_the_next_epoch(server: S3Server) -> None:
    async def scene() -> None:
        clock = Clock()
        host = Host(URL, now_s=clock)
        work = await export(host)
        damage(server, flip(-1))
        for copy in (10, 20):
            assert Cause.WRONG_CHECKSUM in await fetch(host, work, copy)
        host.edge.execute(SearchBundles(1, IDENTITY, [NAMES[-1]]))
        assert (await host.last(SourceSearched)).num_found == 0
        host.edge.execute(host.filled(2))
        assert not (await host.last(ExportFinished, 2)).is_stored, "never overwritten"
        clock.days = 1
        server.clock_s = clock
        host.edge.execute(host.filled(3))
        assert (await host.last(ExportFinished, 3)).num_bytes, "sent, not copied on"
        assert await fetch(host, work, 30) == {None}
        await closed(host)

    run(scene())


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: bytes(len(data)), flip(200)])
def test_what_is_no_bundle_of_its_name_is_not_copied_on(
    server: S3Server, change: Callable[[bytes], bytes]
) -> None:
    async def scene() -> None:
        before, host = Host(URL), Host(URL, now_s=lambda: time.time() + DAY_S)
        work = await export(before)
        [old] = damage(server, change)
        server.clock_s = lambda: time.time() + DAY_S
        await host.open()
        host.edge.execute(host.filled())
        assert (await host.last(ExportFinished)).num_bytes
        [new] = server.objects.keys() - {old}
        verify_bundle(memoryview(server.objects[new].data))
        assert await fetch(host, work) == {None}
        await closed(before)
        await closed(host)

    run(scene())
