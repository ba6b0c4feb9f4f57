"""ObjectEdge over a store that dies in the middle of a step, or that a daemon does not wait for."""

import asyncio
import threading

import pytest

from kvtier.appliance.core.events import CopyFinished, ExportFinished
from kvtier.sources.objects.store import StoreLimits
from tests.sources.objects.bundles import verify_bundle
from tests.sources.objects.s3_server import S3Answer, S3Request, S3Server, late

from ..loops import run
from .edge_host import DEADLINE_S, Host, closed
from .test_store_faults import URL, export, is_open, recovered, stored_again


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", ["list", "head", "put", "get", "second get"])
def test_a_store_that_is_killed_in_the_middle_of_a_step(step: str, is_done: bool, server: S3Server) -> None:
    """`is_done`: after it did what was asked, before it says so."""

    async def scene() -> None:
        one, host = Host(URL), Host(URL)
        exported = await export(one)
        if step == "put":
            server.objects.clear()
        operation, after = ("get", server.count("get") + 1) if step == "second get" else (step, 0)

        def is_it(request: S3Request) -> bool:
            return request.operation == operation and server.count(operation) > after

        has_died, dies = threading.Event(), threading.Lock()

        def die(request: S3Request) -> S3Answer | None:
            if not is_it(request):
                return None
            if dies.acquire(blocking=False):  # once: a request behind it would kill the one started anew
                threading.Thread(target=kill).start()
            return S3Answer(0)

        def kill() -> None:
            server.close()
            has_died.set()

        if is_done:
            server.change = lambda request, answer: die(request) or answer
        else:
            server.refuse = die
        host.edge.start()
        if step != "list":
            await is_open(host)
            host.edge.execute(host.filled() if step in ("put", "head") else host.fetch(first=1))
            ended = CopyFinished, ExportFinished
            await host.until(lambda: any(isinstance(event, ended) for event in host.events))
        assert await asyncio.to_thread(has_died.wait, DEADLINE_S)
        for stored in server.objects.values():
            verify_bundle(memoryview(stored.data))
        server.heal()
        server.start()
        if step == "put":
            await stored_again(host, server, host.filled(), 1)
        await recovered(host, exported)
        await closed(one)
        await closed(host)

    run(scene())


def test_an_export_that_hangs_does_not_hold_up_the_end(server: S3Server) -> None:
    """The end of a daemon's grace period; the store has hours to answer."""

    async def scene() -> None:
        host = Host(URL, limits=StoreLimits(idle_s=3600.0, request_s=3600.0))
        await host.open()
        came = threading.Event()

        def hold_up(request: S3Request, answer: S3Answer) -> S3Answer:
            if request.operation != "put":
                return answer
            came.set()
            return late(answer, threading.Event())

        server.change = hold_up
        host.edge.execute(host.filled())
        assert await asyncio.to_thread(came.wait, DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await closed(host)

    run(scene())
