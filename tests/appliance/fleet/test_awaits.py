"""Chains awaited at other hosts take no stream that tickets and inventories need, on either side."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from kvtier.appliance.core.events import BlocksTold
from kvtier.appliance.core.instructions import AwaitBlocks, StopAwaiting
from kvtier.appliance.fleet.awaits import MAX_RETRY_S, RETRY_S, Awaits
from kvtier.appliance.fleet.fleet_host import MAX_AWAITS, FleetHost
from kvtier.appliance.server.grpc_server import MAX_AWAITED
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1.peer_pb2_grpc import PeerServiceStub

from ...e2e.fleet_hosts import IDENTITY, fleet, names_of
from ...waiting import until
from ..loops import run


async def turns() -> None:
    """Let tasks that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def is_refused(awaits: Awaits, told: Sequence[Any], numbers: Sequence[int], domain: str) -> list[int]:
    """Await a chain for each number; return those that are over at once."""
    before, identity = len(told), replace(IDENTITY, domain=domain)
    for number in numbers:
        awaits.execute(AwaitBlocks(number, identity, names_of(1), "host:1", 60.0))
    await turns()
    assert all(event.is_over for event in told[before:])
    return [event.await_number for event in told[before:]]


def test_chains_awaited_at_a_host_are_bounded_and_shared_by_isolation_domain() -> None:
    """Before: 31 of them held every stream of the channel, and no ticket was given any more."""

    async def main() -> None:
        async def silent(request: Any, **_: float) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        host, told = FleetHost("host:1"), list[Any]()
        host.is_live, host.stub = True, SimpleNamespace(AwaitBlocks=silent)  # type: ignore[assignment]
        hosts: Any = SimpleNamespace(at={"host:1": host}.get)
        awaits = Awaits(hosts, told.append, lambda: 0.0)
        half, third = MAX_AWAITS // 2, MAX_AWAITS // 4
        assert await is_refused(awaits, told, range(half + 3), "acme") == [half, half + 1, half + 2]
        assert await is_refused(awaits, told, range(100, 100 + third), "bolt") == []
        for number in range(third):
            awaits.execute(StopAwaiting(number))
        await turns()
        assert await is_refused(awaits, told, [200], "acme") == []  # what ended is given back
        await awaits.stop()
        assert host.awaits.taken == 0
        assert await is_refused(awaits, told, range(300, 300 + MAX_AWAITS), "") == []  # there are no others
        assert await is_refused(awaits, told, [400], "") == [400]
        await awaits.stop()
        assert {type(event) for event in told} == {BlocksTold}

    run(main())


def test_a_host_that_is_not_there_is_asked_less_and_less_often() -> None:
    """Before: a hundred times a second, for each chain and as long as ten minutes."""
    pauses: list[float] = []

    async def main() -> None:
        async def refused(request: Any, **_: float) -> AsyncIterator[Any]:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
            yield

        async def passed(pause_s: float) -> None:
            pauses.append(pause_s)
            host.is_live = len(pauses) < 10

        host, told = FleetHost("host:1"), list[Any]()
        host.is_live, host.stub = True, SimpleNamespace(AwaitBlocks=refused)  # type: ignore[assignment]
        hosts: Any = SimpleNamespace(at={"host:1": host}.get)
        awaits = Awaits(hosts, told.append, lambda: 0.0, passed)
        awaits.execute(AwaitBlocks(1, IDENTITY, names_of(1), "host:1", 60.0))
        for _ in range(10):
            await turns()
        await awaits.stop()
        assert told == [BlocksTold(1, 0, is_over=True)]

    run(main())
    assert pauses == [min(RETRY_S * 2**tries, MAX_RETRY_S) for tries in range(10)]


def test_a_chain_is_awaited_on_when_its_channel_closes_and_not_when_its_task_is_cancelled() -> None:
    """Before: a cancellation from elsewhere was taken for the end of a channel, and the task went on."""

    async def main() -> None:
        num_calls, reached = 0, asyncio.Event()

        async def closed(request: Any, **_: float) -> AsyncIterator[Any]:
            nonlocal num_calls
            num_calls += 1
            if num_calls < 3:
                raise asyncio.CancelledError  # as gRPC does for the calls of a channel that is closed
            reached.set()
            await asyncio.Event().wait()
            yield

        host = FleetHost("host:1")
        host.is_live, host.stub = True, SimpleNamespace(AwaitBlocks=closed)  # type: ignore[assignment]
        hosts: Any = SimpleNamespace(at={"host:1": host}.get)
        awaits = Awaits(hosts, list[Any]().append, lambda: 0.0)
        try:
            awaits.execute(AwaitBlocks(1, IDENTITY, names_of(1), "host:1", 60.0))
            (task,) = asyncio.all_tasks() - {asyncio.current_task()}
            await reached.wait()
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()
        finally:
            await awaits.stop()

    run(main())


def test_chains_that_hosts_await_leave_room_for_every_inventory(tmp_path: Path) -> None:
    """Before: 256 filled the lane of the fleet's one principal, and a host that came anew was refused."""
    with fleet(tmp_path, 1) as (host,), ExitStack() as open_ones:
        options = [("grpc.use_local_subchannel_pool", 1)]
        stubs = [
            PeerServiceStub(open_ones.enter_context(grpc.insecure_channel(host.address, options)))
            for _ in range(9)
        ]
        asked = pb.WatchInventoryRequest(namespace_digests=[IDENTITY.digest])
        epoch = next(stubs[0].WatchInventory(asked, timeout=60)).epoch
        request = pb.AwaitBlocksRequest(
            epoch=epoch,
            namespace_digest=IDENTITY.digest,
            prefix_hashes=b"".join(names_of(1)),
            deadline_ms=60_000,
        )
        streams, codes = list[Any](), set[grpc.StatusCode]()
        open_ones.callback(lambda: [stream.cancel() for stream in streams])
        for stub in stubs * 29:
            stream: Any = stub.AwaitBlocks(request, timeout=60)
            try:
                assert next(stream).num_blocks == 0
                streams.append(stream)
            except grpc.RpcError:
                codes.add(stream.code())
        assert len(streams) == MAX_AWAITED // 2  # all at one address, which leaves others the rest
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}

        def watches(stub: PeerServiceStub) -> bool:
            watch: Any = stub.WatchInventory(asked, timeout=60)
            try:
                return bool(next(watch).epoch == epoch)
            except grpc.RpcError:  # a busy machine may refuse a call for a moment
                return False
            finally:
                watch.cancel()

        for stub in stubs:
            until(partial(watches, stub))
