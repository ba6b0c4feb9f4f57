"""Streams: Put and Get for callers without shared memory. Correct and portable; never the fast path.

Both use the calls of every other client. Get acquires like any reader and sends the pinned
slots in chunks, keeping its lease alive; Put gathers the chunks in a buffer of the daemon's own and commits
it as if it were a client's staging extent. Bytes cross the event loop here, a megabyte at a time; where it
pays they are fewer (stream_codecs.py).
"""

import asyncio
import itertools
import mmap
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from ...tiers.base import Buffer, Cause, CopyError
from ...tiers.block import HASH_BYTES
from ...tiers.codecs.streaming import SendMeter, StreamEncoder
from ...v1 import kvcache_pb2 as pb
from ...v1.shm import PAGE_BYTES
from ..core import events
from ..core.results import KeepAliveResult, PutResult, Refusal
from ..errors import error, from_refusal
from ..security.callers import Caller
from ..security.client_registry import ConnectedClient
from .cache_service import CacheService
from .stream_codecs import EncodedFragment, GetEncoder, PutDecoder

CHUNK_BYTES = 1 << 20  # of an answer; gRPC's own limit for a message is 4 MiB
#: Payload of all puts over gRPC in progress, which is held in memory meanwhile; also the largest single put.
MAX_STREAM_PUT_BYTES = 256 << 20
_ADDRESS_BITS = 40  # of an offset inside one buffer


class PutBuffers:
    """Buffers of streamed puts; for the mover one staging extent of all remote clients.

    Bounded by `capacity_bytes` for all puts together. Every buffer has its own range of offsets, never
    used again, so that a late copy cannot read another put's bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self._buffers: dict[int, Buffer] = {}
        self._numbers = itertools.count(1)

    def take(self, num_bytes: int) -> int:
        """Return the first offset of a new buffer.

        Raises CallerError when it could never fit, BusyError when it does not fit now.
        """
        if num_bytes > self.capacity_bytes:
            raise error("TOO_LARGE", f"a put of {num_bytes} bytes, limit {self.capacity_bytes}; split it")
        if self.taken_bytes + num_bytes > self.capacity_bytes:
            raise error("TOO_MANY_IN_FLIGHT", "other streamed puts fill the buffers", retry_after_s=0.1)
        number = next(self._numbers)
        rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, rounded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # shared pages of 4 KiB took half of what a put took
        self._buffers[number] = memoryview(memory)[:num_bytes]
        self.taken_bytes += num_bytes
        return number << _ADDRESS_BITS

    def give(self, offset: int) -> None:
        """Give a buffer back; a copy that still reads it keeps its memory alive."""
        self.taken_bytes -= len(self._buffers.pop(offset >> _ADDRESS_BITS))

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


class ByteStreams:
    """The two calls of KVCacheService that carry bytes."""

    def __init__(self, service: CacheService, buffers: PutBuffers) -> None:
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
        identity = service.identity_of(caller, header.namespace_id)
        block_bytes = identity.geometry.block_bytes
        offset = self._buffers.take(num_blocks * block_bytes)
        try:
            decoder = PutDecoder(identity, num_blocks, self._buffers.view(offset, num_blocks * block_bytes))
            async for request in requests:
                await decoder.take(request)
            decoder.finish()
            self._count("received", decoder.raw_bytes, decoder.encoded_bytes)
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
        if isinstance(result, Refusal):
            raise from_refusal(result)
        assert isinstance(result, PutResult)
        return pb.PutResponse(outcomes=result.outcomes)

    # ------------------------------------------------------------------------------------- get

    async def get(self, caller: Caller, request: pb.GetRequest) -> AsyncIterator[pb.GetResponse]:
        """Yield the readable prefix in chunks, fragments in the order in which they become readable.

        The last message carries only the number of blocks that count.
        """
        service = self._service
        client = service.client_of(caller, request.acquire.client_id)
        replies = service.start_acquire(caller, request.acquire, lambda result: result)
        lease_id = num_blocks = 0
        encoder = self._encoder(caller, client, request)
        meter = SendMeter()
        try:
            async for result in replies:
                lease_id, num_blocks = result.lease_id, result.num_blocks
                meter.begin()
                async for one in encoder.encode(result.ready):
                    for message in self._messages(client, lease_id, num_blocks, one):
                        yield message
                    meter.sent(one.choice, one.part.length)
            yield pb.GetResponse(num_blocks=num_blocks, last=True)
        finally:
            service.appliance.abandon(replies)
            if lease_id:
                service.appliance.step(events.ReleaseRequested(None, client.id, [lease_id]))

    def _encoder(self, caller: Caller, client: ConnectedClient, request: pb.GetRequest) -> GetEncoder:
        """Return what encodes the fragments of this get, knowing what is known of its connection."""
        service = self._service
        if client.encoder is None or client.encoder.codec_ids != frozenset(request.codecs):
            client.encoder = StreamEncoder(request.codecs)
        return GetEncoder(
            client.encoder,
            service.compression,
            service.identity_of(caller, request.acquire.namespace_id),
            lambda part: service.memory(part.tier).view(part.place, part.length),
            lambda part: service.memory(part.tier).checksum(part.place),
        )

    def _messages(
        self, client: ConnectedClient, lease_id: int, num_blocks: int, travelling: EncodedFragment
    ) -> Iterator[pb.GetResponse]:
        """Yield a fragment in chunks."""
        part, _, encoded = travelling
        if encoded is not None:
            self._count("sent", part.length, len(encoded.stored))
        length = part.length if encoded is None else len(encoded.stored)
        for start in range(0, length, CHUNK_BYTES):
            self._prove_alive(client, lease_id)
            message = pb.GetResponse(num_blocks=num_blocks, block=part.block, group=part.group, offset=start)
            if encoded is None:
                view = self._service.memory(part.tier).view(part.place, part.length)
                message.chunk = bytes(view[start : start + CHUNK_BYTES])
            else:
                message.chunk = encoded.stored[start : start + CHUNK_BYTES]
                message.encoded.codec = encoded.codec_id
                message.encoded.length = length
                message.encoded.checksum = encoded.checksum
            yield message

    def _count(self, direction: str, raw_bytes: int, encoded_bytes: int) -> None:
        """Count what travelled encoded: `stream_sent_raw_bytes` and so on."""
        counters = self._service.appliance.counters
        counters[f"stream_{direction}_raw_bytes"] += raw_bytes
        counters[f"stream_{direction}_encoded_bytes"] += encoded_bytes

    def _prove_alive(self, client: ConnectedClient, lease_id: int) -> None:
        """Raise CallerError when the lease has ended.

        Asked in the same breath as the bytes are taken, and after they were encoded: a slow reader's lease
        may be over, and then the slot holds other bytes.
        """
        appliance = self._service.appliance
        kept = appliance.ask(lambda call: events.KeptAlive(call, client.id, [lease_id]))
        if isinstance(kept, Refusal):  # the client has left meanwhile
            raise from_refusal(kept)
        assert isinstance(kept, KeepAliveResult), "answered at once"
        if kept.expired:
            raise error("LEASE_EXPIRED", "the lease ended while its blocks were being sent; get them again")
        self._service.clients.heard_of(client)
