"""Streams: Put and Get for callers without shared memory. Correct and portable; never the fast path.

Both are thin over the calls that everybody else uses. Get acquires like any reader and sends the pinned
slots in chunks, keeping its lease alive; Put gathers the chunks in a buffer of the daemon's own and commits
it as if it were a client's staging extent. Bytes cross the event loop here, a megabyte at a time.
"""

import asyncio
import itertools
import mmap
from collections.abc import AsyncIterator

from ..tiers.base import Buffer, Cause, CopyError
from ..tiers.block import HASH_BYTES
from ..tiers.payload import copy
from ..v1 import kvcache_pb2 as pb
from ..v1.shm import PAGE_BYTES
from .callers import Caller
from .clients import Client
from .core import events
from .errors import error, from_refusal
from .service import Service

CHUNK_BYTES = 1 << 20  # of an answer; gRPC's own limit for a message is 4 MiB
_ADDRESS_BITS = 40  # of an offset inside one buffer


class PutBuffers:
    """Where streamed puts are gathered; to the mover one staging extent of all remote clients.

    Bounded by `capacity_bytes` for all puts together. Every buffer has its own range of offsets, never
    used again, so that a late copy cannot read another put's bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self._buffers: dict[int, Buffer] = {}
        self._numbers = itertools.count(1)

    def take(self, num_bytes: int) -> int:
        """Return the first offset of a new buffer. Raises CallerError when it could never fit, BusyError
        when it does not fit now."""
        if num_bytes > self.capacity_bytes:
            raise error("TOO_LARGE", f"a put of {num_bytes} bytes, limit {self.capacity_bytes}; split it")
        if self.taken_bytes + num_bytes > self.capacity_bytes:
            raise error("TOO_MANY_IN_FLIGHT", "other streamed puts fill the buffers", retry_after_s=0.1)
        number = next(self._numbers)
        rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._buffers[number] = memoryview(mmap.mmap(-1, rounded))[:num_bytes]
        self.taken_bytes += num_bytes
        return number << _ADDRESS_BITS

    def give(self, offset: int) -> None:
        """Give a buffer back; a copy that still reads it keeps its memory alive."""
        self.taken_bytes -= len(self._buffers.pop(offset >> _ADDRESS_BITS))

    def fill(self, offset: int, chunk: bytes) -> None:
        """Write `chunk` at `offset`, which must lie inside one buffer."""
        copy(self._view(offset, len(chunk)), memoryview(chunk))

    def view(self, offset: int, length: int, /) -> Buffer:
        """Return the bytes of a span, for a copy. Raises CopyError when the buffer was given back."""
        return self._view(offset, length)

    def _view(self, offset: int, length: int) -> Buffer:
        buffer = self._buffers.get(offset >> _ADDRESS_BITS)
        if buffer is None:
            raise CopyError(Cause.SOURCE_GONE, "the put has ended")
        start = offset & ((1 << _ADDRESS_BITS) - 1)
        if start + length > len(buffer):
            raise CopyError(Cause.SHORT_TRANSFER, f"{length} bytes at {start} of {len(buffer)}")
        return buffer[start : start + length]


class Streams:
    """The two calls of KVCacheService that carry bytes."""

    def __init__(self, service: Service, buffers: PutBuffers) -> None:
        self._service = service
        self._buffers = buffers

    # ------------------------------------------------------------------------------------- put

    async def put(self, caller: Caller, requests: AsyncIterator[pb.PutRequest]) -> pb.PutResponse:
        """Gather the payload of the blocks named in the header, then store them."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "header":
            raise error("BAD_REQUEST", "the first message of a put is its header")
        header = first.header
        service = self._service
        client = service.client_of(caller, header.client_id)
        build = service.reservation(caller, client, header)
        num_blocks = len(header.prefix_hashes) // HASH_BYTES
        block_bytes = service.identity_of(caller, header.namespace_id).geometry.block_bytes
        offset = self._buffers.take(num_blocks * block_bytes)
        try:
            await self._gather(requests, offset, num_blocks * block_bytes)
        except BaseException:
            self._buffers.give(offset)
            raise
        spans = [(offset + block * block_bytes, block_bytes) for block in range(num_blocks)]
        answer = service.appliance.ask(
            lambda call: events.CommitRequested(call, client.id, header.request_id, 0, spans, build(call))
        )
        if isinstance(answer, asyncio.Future):
            # The caller may go away; the buffer stays until nothing is copied out of it any more.
            answer.add_done_callback(lambda _: self._buffers.give(offset))
            result = await asyncio.shield(answer)
        else:
            self._buffers.give(offset)
            result = answer
        if isinstance(result, events.Refusal):
            raise from_refusal(result)
        assert isinstance(result, events.PutResult)
        return pb.PutResponse(outcomes=result.outcomes)

    async def _gather(self, requests: AsyncIterator[pb.PutRequest], offset: int, num_bytes: int) -> None:
        received = 0
        async for request in requests:
            if request.WhichOneof("part") != "chunk":
                raise error("BAD_REQUEST", "after the header a put has only chunks")
            if received + len(request.chunk) > num_bytes:
                raise error("BAD_REQUEST", f"more payload than the {num_bytes} bytes of the blocks named")
            if request.chunk:
                self._buffers.fill(offset + received, request.chunk)
                received += len(request.chunk)
        if received != num_bytes:
            raise error("BAD_REQUEST", f"{received} bytes of payload, the blocks named have {num_bytes}")

    # ------------------------------------------------------------------------------------- get

    async def get(self, caller: Caller, request: pb.GetRequest) -> AsyncIterator[pb.GetResponse]:
        """Yield the readable prefix in chunks, fragments in the order in which they become readable; the
        last message carries only the number of blocks that count."""
        service = self._service
        client = service.client_of(caller, request.acquire.client_id)
        replies = service.start_acquire(caller, request.acquire, lambda result: result)
        lease_id = num_blocks = 0
        try:
            async for result in replies:
                lease_id, num_blocks = result.lease_id, result.num_blocks
                for part in result.ready:
                    for start in range(0, part.length, CHUNK_BYTES):
                        chunk = self._chunk(client, lease_id, part, start)
                        yield pb.GetResponse(
                            num_blocks=num_blocks,
                            block=part.block,
                            group=part.group,
                            offset=start,
                            chunk=chunk,
                        )
            yield pb.GetResponse(num_blocks=num_blocks, last=True)
        finally:
            service.appliance.abandon(replies)
            if lease_id:
                service.appliance.step(events.ReleaseRequested(None, client.id, [lease_id]))

    def _chunk(self, client: Client, lease_id: int, part: events.ReadyFragment, start: int) -> bytes:
        """Return one chunk of a slot. The lease is proven alive in the same breath as the bytes are taken:
        a slow reader's lease may have ended, and then the slot is somebody else's."""
        appliance = self._service.appliance
        kept = appliance.ask(lambda call: events.KeptAlive(call, client.id, [lease_id]))
        assert isinstance(kept, events.KeepAliveResult), "answered at once"
        if kept.expired:
            raise error("LEASE_EXPIRED", "the lease ended while its blocks were being sent; get them again")
        self._service.clients.heard_of(client)
        view = self._service.memory(part.tier).view(part.place, part.length)
        return bytes(view[start : start + CHUNK_BYTES])
