"""Awaits: lets other hosts tell which blocks of a chain they have, as runtimes there put them.

One stream for each chain that is awaited, to the host that the runtime named. What it says goes where the
hosts' inventories or the index are looked at, so that a fetch finds it as it finds everything else. The
inventory's own stream was rejected for this: it tells of all blocks, 20 times a second, and the last block of
a prompt would come 50 ms later. At most MAX_AWAITS chains are awaited at one host: what is beyond is not
waited for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from ...tiers.block import tenant_of
from ...v1 import peer_pb2 as pb
from ..core.events import BlocksTold, Event
from ..core.instructions import AwaitBlocks, StopAwaiting
from ..tasks import end
from .finding import KnownHosts
from .fleet_host import FleetHost, is_cancelled

if TYPE_CHECKING:
    from ...v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 0.01, 1.0  # twice as long each time


class Awaits:
    """Executes AwaitBlocks and StopAwaiting. Owned by the event loop."""

    def __init__(
        self,
        hosts: KnownHosts,
        deliver: Callable[[Event], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._hosts = hosts
        self._deliver = deliver
        self._clock = clock
        self._sleep = sleep
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def execute(self, work: AwaitBlocks | StopAwaiting) -> None:
        """Begin, or end, to listen to a host."""
        if isinstance(work, StopAwaiting):
            if (task := self._tasks.pop(work.number, None)) is not None:
                task.cancel()
        else:
            self._tasks[work.number] = asyncio.create_task(self._follow(work))

    async def stop(self) -> None:
        """Listen to nothing any more. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        await end(tasks.values())

    async def _follow(self, work: AwaitBlocks) -> None:
        """Pass on what a host tells, until it has told of all blocks, is gone, or time is over."""
        host, told, domain = self._hosts.at(work.source), 0, work.identity.domain
        if host is not None and host.is_live and host.awaits.take(domain, 1):
            try:
                told = await self._follow_at(host, work)
            finally:
                host.awaits.give(domain, 1)
        if self._tasks.pop(work.number, None) is not None:
            self._deliver(BlocksTold(work.number, told, is_over=True))

    async def _follow_at(self, host: FleetHost, work: AwaitBlocks) -> int:
        """Pass on what `host` tells in this life of it; return the number of blocks told of."""
        epoch, told, retry_s = host.epoch, 0, RETRY_S
        while host.is_live and host.epoch == epoch and host.stub is not None:
            try:
                return await self._listen(host, host.stub, work, told)
            except (grpc.aio.AioRpcError, grpc.aio.BaseError, OSError) as failure:
                log.debug("host %s: %s", host.address, failure)
                if not host.is_streaming:  # nothing else says that it is gone
                    break
                if isinstance(failure, grpc.aio.AioRpcError) and not _is_of_channel(failure):
                    break
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
            await self._sleep(retry_s)  # its channel may be opened anew
            retry_s = min(2 * retry_s, MAX_RETRY_S)
        return told

    async def _listen(
        self, host: FleetHost, stub: "PeerServiceAsyncStub", work: AwaitBlocks, told: int
    ) -> int:
        """Pass on one stream; return the number of blocks told of when it has ended."""
        left_s, digest = work.until - self._clock(), work.identity.digest
        if left_s <= 0:
            return told
        request = pb.AwaitBlocksRequest(
            epoch=host.epoch,
            namespace_digest=digest,
            prefix_hashes=b"".join(work.names),
            deadline_ms=max(1, int(left_s * 1000)),
        )
        async for message in stub.AwaitBlocks(request, timeout=left_s + 1.0):
            num_blocks = min(message.num_blocks, len(work.names))
            if num_blocks > told:
                self._hosts.told(host, digest, work.names[told:num_blocks], tenant_of(work.identity.domain))
                told = num_blocks
                self._deliver(BlocksTold(work.number, told))
        return told


def _is_of_channel(failure: grpc.aio.AioRpcError) -> bool:
    """Return whether the connection failed, and not the call."""
    return failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
