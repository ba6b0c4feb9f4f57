"""Streams: Put and Get for callers without shared memory. Correct and portable; never the fast path.

Both use the calls of every other client. Get acquires like any reader and sends the pinned
slots in chunks, keeping its lease alive; Put gathers the chunks in a buffer of the daemon's own and commits
it as if it were a client's staging extent. Bytes cross the event loop here, a megabyte at a time; where it
pays they are fewer (stream_codecs.py).
"""

import asyncio
import itertools
import mmap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ...tiers.base import Buffer, Cause, CopyError
from ...tiers.block import HASH_BYTES
from ...tiers.codecs.streaming import SendMeter, StreamEncoder
from ...v1 import kvcache_pb2 as pb
from ...v1.shm import PAGE_BYTES
from ..core import events
from ..core.results import KeepAliveResult, PutResult, ReadyFragment, Refusal
from ..core.shares import Shares
from ..errors import error, from_refusal
from ..security import request_checks as checks
from ..security.callers import Caller
from ..security.client_registry import ConnectedClient
from .cache_service import CacheService
from .stream_codecs import GetEncoder, PutDecoder, SentFragments

CHUNK_BYTES = 1 << 20  # of an answer; gRPC's own limit for a message is 4 MiB
#: Payload of all puts over gRPC in progress, which is held in memory meanwhile; also the largest single put,
#: of a tenant a half of it.
MAX_STREAM_PUT_BYTES = 256 << 20
#: Puts over gRPC in progress; the rest of MAX_CALLS (grpc_server.py) is for the other calls.
MAX_STREAM_PUTS = 192
#: Silence after which a put ends: the slowest link on which it does not sends a megabyte in that time.
IDLE_S = 30.0
_STEP_BYTES = 2 << 20  # in which the space of a put grows: the kernel gives huge pages
_ADDRESS_BITS = 40  # of an offset inside one buffer


@dataclass(slots=True)
class _PutBuffer:
    memory: Buffer
    tenant: str
    taken_bytes: int = 0  # of the tenant's share


class PutBuffers:
    """Buffers of streamed puts; for the mover one staging extent of all remote clients.

    Bounded by `capacity_bytes` for all puts together. A buffer takes space of its tenant's share as it is
    filled, not for what a header announced. Every buffer has its own range of offsets, never used again, so
    that a late copy cannot read another put's bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._shares = Shares(capacity_bytes)
        self.calls = Shares(MAX_STREAM_PUTS)  # puts in progress, those without a buffer included
        self._buffers: dict[int, _PutBuffer] = {}
        self._numbers = itertools.count(1)

    @property
    def taken_bytes(self) -> int:
        """Bytes of all buffers that are filled."""
        return self._shares.taken

    def open(self, tenant: str, num_bytes: int) -> int:
        """Return the first offset of a new buffer. Raises CallerError when it could never be filled."""
        limit = self._shares.largest(tenant)
        if num_bytes > limit:
            raise error("TOO_LARGE", f"a put of {num_bytes} bytes, limit {limit}; split it")
        number = next(self._numbers)
        rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, rounded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # shared pages of 4 KiB took half of what a put took
        self._buffers[number] = _PutBuffer(memoryview(memory)[:num_bytes], tenant)
        return number << _ADDRESS_BITS

    def fill(self, offset: int, num_bytes: int) -> None:
        """Take space for the first `num_bytes` of a buffer. Raises BusyError when there is none now."""
        buffer = self._buffers[offset >> _ADDRESS_BITS]
        if num_bytes <= buffer.taken_bytes:
            return
        wanted = min(-(-num_bytes // _STEP_BYTES) * _STEP_BYTES, len(buffer.memory))
        if not self._shares.take(buffer.tenant, wanted - buffer.taken_bytes):
            raise error("TOO_MANY_IN_FLIGHT", "other streamed puts fill the buffers", retry_after_s=0.1)
        buffer.taken_bytes = wanted

    def give(self, offset: int) -> None:
        """Give a buffer back; a copy that still reads it keeps its memory alive."""
        buffer = self._buffers.pop(offset >> _ADDRESS_BITS)
        self._shares.give(buffer.tenant, buffer.taken_bytes)

    def view(self, offset: int, length: int, /) -> Buffer:
        """Return the bytes of a span, for a copy. Raises CopyError when the buffer was given back."""
        buffer = self._buffers.get(offset >> _ADDRESS_BITS)
        if buffer is None:
            raise CopyError(Cause.SOURCE_GONE, "the put has ended")
        start = offset & ((1 << _ADDRESS_BITS) - 1)
        if start + length > len(buffer.memory):
            raise CopyError(Cause.SHORT_TRANSFER, f"{length} bytes at {start} of {len(buffer.memory)}")
        return buffer.memory[start : start + length]


class _ReceivedPut(NamedTuple):
    """A put with all its payload: where it lies, and what makes its reservation from a call number."""

    client: ConnectedClient
    request_id: str
    offset: int
    num_blocks: int
    block_bytes: int
    reservation: Callable[[int], events.ReserveRequested]


def _decoded(request: bytes) -> pb.PutRequest:
    """Return a message of a put. Raises CallerError where its header is too large."""
    return pb.PutRequest.FromString(checks.encoded("Put", request))


class ByteStreams:
    """The two calls of KVCacheService that carry bytes."""

    def __init__(self, service: CacheService, buffers: PutBuffers) -> None:
        self._service = service
        self._buffers = buffers

    # ------------------------------------------------------------------------------------- put

    async def put(self, caller: Caller, requests: AsyncIterator[bytes]) -> pb.PutResponse:
        """Gather the payload of the blocks named in the header, then store them.

        Raises BusyError where the tenant has too many puts in progress or no space is left, UnknownError
        after IDLE_S seconds without a message, or when the client of the put is closed.
        """
        tenant = caller.tenancy.share
        if not self._buffers.calls.take(tenant, 1):
            raise error("TOO_MANY_IN_FLIGHT", "too many streamed puts in progress", retry_after_s=0.1)
        try:
            async with asyncio.timeout(IDLE_S) as silence:
                put = await self._receive(caller, requests, silence)
            return await self._store(put)
        except TimeoutError:
            raise error(
                "UNKNOWN_RESERVATION",
                f"a put ends with its client and after {IDLE_S:g} s without a message; put it again",
            ) from None
        finally:
            self._buffers.calls.give(tenant, 1)

    async def _receive(
        self, caller: Caller, requests: AsyncIterator[bytes], silence: asyncio.Timeout
    ) -> "_ReceivedPut":
        """Gather the payload in a buffer, which is then the caller's to give back."""
        first = _decoded(await anext(requests, b""))
        if first.WhichOneof("part") != "header":
            raise error("BAD_REQUEST", "the first message of a put is its header")
        header = first.header
        service = self._service
        client = service.client_of(caller, header.client_id)
        build = service.reservation(caller, client, header)
        num_blocks = len(header.prefix_hashes) // HASH_BYTES
        identity = service.identity_of(caller, header.namespace_id)
        num_bytes = num_blocks * identity.geometry.block_bytes
        offset = self._buffers.open(caller.tenancy.share, num_bytes)
        client.receiving.add(silence)
        try:
            decoder = PutDecoder(
                identity,
                num_blocks,
                self._buffers.view(offset, num_bytes),
                partial(self._buffers.fill, offset),
            )
            now = asyncio.get_running_loop().time
            silence.reschedule(now() + IDLE_S)
            async for request in requests:
                silence.reschedule(now() + IDLE_S)
                service.clients.heard_of(client)
                await decoder.take(_decoded(request))
            decoder.finish()
            self._count("received", decoder.raw_bytes, decoder.encoded_bytes)
        except BaseException:
            self._buffers.give(offset)
            raise
        finally:
            client.receiving.discard(silence)
        return _ReceivedPut(
            client, header.request_id, offset, num_blocks, identity.geometry.block_bytes, build
        )

    async def _store(self, put: "_ReceivedPut") -> pb.PutResponse:
        """Commit what was received; the buffer is given back once nothing is copied out of it any more."""
        service, offset, block_bytes = self._service, put.offset, put.block_bytes
        spans = [(offset + block * block_bytes, block_bytes) for block in range(put.num_blocks)]
        answer = service.appliance.ask(
            lambda call: events.CommitRequested(
                call, put.client.id, put.request_id, 0, spans, put.reservation(call)
            )
        )
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda _: self._buffers.give(offset))
            result = await asyncio.shield(answer)  # the caller may go away meanwhile
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
        codec_ids = checks.codecs(request.codecs)
        replies = service.start_acquire(caller, request.acquire, lambda result: result)
        lease_id = num_blocks = 0
        encoder = self._encoder(caller, client, request.acquire.namespace_id, codec_ids)
        meter = SendMeter()
        try:
            async for result in replies:
                lease_id, num_blocks = result.lease_id, result.num_blocks
                meter.begin()
                most_bytes = CHUNK_BYTES if request.takes_several else 0
                async for sent in encoder.messages(result.ready, most_bytes):
                    for message in self._messages(client, lease_id, num_blocks, sent):
                        yield message
                    meter.sent(sent.choice, sent.num_bytes)
            yield pb.GetResponse(num_blocks=num_blocks, last=True)
        finally:
            service.appliance.abandon(replies)
            if lease_id:
                service.appliance.step(events.ReleaseRequested(None, client.id, [lease_id]))

    def _encoder(
        self, caller: Caller, client: ConnectedClient, namespace_id: int, codec_ids: frozenset[int]
    ) -> GetEncoder:
        """Return what encodes the fragments of this get, knowing what is known of its connection."""
        service = self._service
        if client.encoder is None or client.encoder.codec_ids != codec_ids:
            client.encoder = StreamEncoder(tuple(codec_ids))
        return GetEncoder(
            client.encoder,
            service.compression,
            service.identity_of(caller, namespace_id),
            self._view,
            lambda part: service.memory(part.tier).checksum(part.place),
        )

    def _view(self, part: ReadyFragment) -> Buffer:
        return self._service.memory(part.tier).view(part.place, part.length)

    def _messages(
        self, client: ConnectedClient, lease_id: int, num_blocks: int, sent: SentFragments
    ) -> Iterator[pb.GetResponse]:
        """Yield fragments in chunks: several in one, or one in several."""
        parts, encoded, length = sent.parts, sent.encoded, sent.num_bytes
        if encoded is not None:
            self._count("sent", length, len(encoded.stored))
            length = len(encoded.stored)
        blocks, groups = [one.block for one in parts], [one.group for one in parts]
        for start in range(0, length, CHUNK_BYTES):
            self._prove_alive(client, lease_id)
            message = pb.GetResponse(
                num_blocks=num_blocks,
                block=blocks[0],
                group=groups[0],
                offset=start,
                more_blocks=blocks[1:],
                more_groups=groups[1:],
            )
            if encoded is None:
                message.chunk = b"".join(self._view(one)[start : start + CHUNK_BYTES] for one in parts)
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
