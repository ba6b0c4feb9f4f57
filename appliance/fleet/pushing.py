"""Pushing: bytes between hosts by NIXL (`peers.transport: nixl`), for tickets of which both ends agree on it.

    fetcher   lends a slot of its landing memory and asks with PushBlocks; what is there is copied to where it
              stays, and the copy is compared with its checksum, as over a data connection
    holder    copies what the ticket stands for into a slot of its outgoing memory, and writes from there

Whatever fails is left to the data connection, or is a miss: no NIXL at the other end or another version of
it, no free slot, a write that does not end, a process that died. After a failure a host is not asked to push
for PAUSE_S; a process that ended is started again after 1 s, 2 s ... MAX_REST_S. A fetch that has no time
left leaves its push alone; the slot is free when that has ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import grpc

from ...sources.peers.connection import ConnectionLost
from ...sources.peers.nixl_process import (
    MAX_METADATA_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
    Destination,
    NixlProcess,
    NotBegun,
)
from ...tiers.base import Buffer, CopyError
from ...tiers.codecs.base import Shape
from ...tiers.payload import copy_and_checksum
from ...v1 import peer_pb2 as pb
from ..tasks import Tasks, end
from .fleet_host import FleetHost, is_cancelled

log = logging.getLogger(__name__)

PUSH_S: Final = 2.0  # of one write, half of the fetch's time at most: the other half is the data connection's
LEAST_S: Final = 0.2  # with less no push is tried: one that is late costs a slot
HOLDER_SHARE: Final = 0.8  # of the time of the call, in which the holder answers what became of its write
PAUSE_S: Final = 60.0
REFUSED_S: Final = 1.0  # where it wrote nothing, which is over
MAX_WORDS: Final = 200
MAX_REST_S: Final = 60.0
STEADY_S: Final = 60.0  # of a process's life, after which the next one's start does not wait


class LandedReader:
    """Reads payloads out of a landing slot, in the order of their ticket. For one thread."""

    def __init__(self, landed: Buffer) -> None:
        self._left = landed

    def fill_many(self, places: Sequence[Buffer], shape: Shape | None = None) -> list[bytes]:
        """Fill places one after another, and return the checksums of what is in them then."""
        checksums = []
        for place in places:
            payload, self._left = self._left[: len(place)], self._left[len(place) :]
            checksums.append(copy_and_checksum(place, payload))
        return checksums


class Pushing:
    """Keeps NIXL's process, and moves bytes through it, both ways. Owned by the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._process: NixlProcess | None = None  # while it can be used
        self._copiers = ThreadPoolExecutor(NUM_SLOTS, thread_name_prefix="kvtier-push")
        self._pushes: Tasks[pb.PushBlocksResponse] = Tasks()  # into landing memory
        self._keeping = self._loop.create_task(self._keep())
        self.counters: Counter[str] = Counter()

    @property
    def version(self) -> str:
        """Return the version of NIXL; empty while it cannot be used."""
        return self._process.version if self._process is not None else ""

    async def stop(self) -> None:
        """End the process; no memory is read or written afterwards. Idempotent."""
        self._pushes.cancel()  # before the process that they wait for ends
        await end([self._keeping])
        await self._pushes.settle()
        await asyncio.to_thread(self._copiers.shutdown)

    async def _keep(self) -> None:
        """Start the process whenever there is none."""
        rest_s = 1.0
        while True:
            began_at, process = self._clock(), None
            try:
                process = NixlProcess(self._copiers)
                await process.start()
                log.info("NIXL %s moves blocks between hosts, process %d", process.version, process.pid)
                self._process = process
                await process.ended.wait()
                words = "NIXL's process has ended"
            except (OSError, ConnectionLost) as failure:
                words = str(failure)
            finally:
                self._process = None
                if process is not None:
                    await process.close()
            rest_s = 1.0 if self._clock() - began_at > STEADY_S else rest_s
            self.counters["pushes_process_ended"] += 1
            log.warning("%s; data connections are used, and it is tried again in %g s", words, rest_s)
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, MAX_REST_S)

    # --------------------------------------------------------------------------------------- fetcher

    @asynccontextmanager
    async def landed(
        self, host: FleetHost, ticket: pb.FetchBlocksResponse, num_bytes: int, deadline_at: float
    ) -> AsyncIterator[LandedReader | None]:
        """Have a host write what a ticket stands for, and lend what reads it; None: nothing came.

        Then a data connection may show the ticket. CopyErrors of what is read become ConnectionLost: any host
        of the fleet may have written there. Raises ConnectionLost when time is over."""
        process = self._process
        slot = None if process is None else await self._land(process, host, ticket, num_bytes, deadline_at)
        if process is None or slot is None:
            yield None
            return
        in_doubt = False
        try:
            yield LandedReader(process.landing.view(slot, num_bytes))
        except CopyError as failure:
            in_doubt = True
            self._failed(host, "wrong_bytes", str(failure))
            raise ConnectionLost(f"other bytes have landed: {failure}") from failure
        finally:
            process.give_back(process.landing, slot, in_doubt=in_doubt)

    async def _land(
        self,
        process: NixlProcess,
        host: FleetHost,
        ticket: pb.FetchBlocksResponse,
        num_bytes: int,
        deadline_at: float,
    ) -> int | None:
        """Return the landing slot that has what a ticket stands for; None when nothing came."""
        now = self._clock()
        within_s = min(PUSH_S, (deadline_at - now) / 2)
        is_usable = ticket.nixl_version == process.version and now >= host.push_after
        fits = num_bytes <= SLOT_BYTES and within_s >= LEAST_S
        if not (is_usable and fits) or (slot := process.landing.take()) is None:
            return None
        request = pb.PushBlocksRequest(
            ticket=ticket.ticket,
            nixl_version=process.version,
            metadata=process.metadata,
            address=process.address + slot,
            length=num_bytes,
        )
        push = self._pushes.start(self._asked(process, host, request, within_s))
        is_here = False
        try:
            await asyncio.wait({push}, timeout=max(0.0, deadline_at - now))
            is_here = push.done() and not push.result().problem
        finally:
            if not is_here:  # it may still come: the slot waits for its end, whatever its fetch does
                push.add_done_callback(partial(self._settle, process, slot))
        if not push.done():
            raise ConnectionLost("time is over")
        return slot if is_here else None

    async def _asked(
        self, process: NixlProcess, host: FleetHost, request: pb.PushBlocksRequest, within_s: float
    ) -> pb.PushBlocksResponse:
        """Return a host's answer to PushBlocks, or one that says what failed."""
        assert host.stub is not None
        expected = process.expect()
        try:
            answer: pb.PushBlocksResponse = await host.stub.PushBlocks(request, timeout=within_s)
        except grpc.aio.AioRpcError as failure:
            answer = pb.PushBlocksResponse(problem=f"{failure.code().name}, {failure.details()}")
        except (asyncio.CancelledError, grpc.aio.BaseError):
            if is_cancelled():
                raise
            answer = pb.PushBlocksResponse(problem="its channel was closed")
        finally:
            process.end(expected)
        if answer.problem:
            self._failed(host, "failed", answer.problem, REFUSED_S if answer.is_over else PAUSE_S)
        else:
            self.counters["pushes_arrived"] += 1
        return answer

    def _settle(self, process: NixlProcess, slot: int, push: "asyncio.Task[pb.PushBlocksResponse]") -> None:
        """Give back the slot of a push of which nothing is read."""
        answer = None if push.cancelled() else push.result()
        in_doubt = answer is None or bool(answer.problem and not answer.is_over)
        process.give_back(process.landing, slot, in_doubt=in_doubt)

    def _failed(self, host: FleetHost, outcome: str, words: str, pause_s: float = PAUSE_S) -> None:
        self.counters[f"pushes_{outcome}"] += 1
        host.push_after = self._clock() + pause_s
        log.warning("host %s, NIXL: %s; data connections for %g s", host.address, words[:MAX_WORDS], pause_s)

    # ---------------------------------------------------------------------------------------- holder

    async def push(
        self, payloads: Sequence[Buffer], request: pb.PushBlocksRequest, deadline_at: float
    ) -> pb.PushBlocksResponse:
        """Write payloads into the memory of another host; nothing reads them afterwards."""
        process = self._process
        if process is None or request.nixl_version != process.version:
            words = f"NIXL {self.version or 'is not there'}, not {request.nixl_version[:20]}"
            return pb.PushBlocksResponse(problem=words, is_over=True)
        if request.length != sum(map(len, payloads)) or not 0 < request.length <= SLOT_BYTES:
            return pb.PushBlocksResponse(problem="another number of bytes", is_over=True)
        if len(request.metadata) > MAX_METADATA_BYTES:
            return pb.PushBlocksResponse(problem="too much metadata", is_over=True)
        to = Destination(request.metadata, request.address, request.length)
        try:
            left_s = max(0.0, deadline_at - self._clock())
            await process.write(payloads, to, min(PUSH_S, HOLDER_SHARE * left_s))
        except NotBegun as failure:
            return pb.PushBlocksResponse(problem=str(failure) or "refused", is_over=True)
        except ConnectionLost as failure:
            return pb.PushBlocksResponse(problem=str(failure) or "broken")
        return pb.PushBlocksResponse(is_over=True)
