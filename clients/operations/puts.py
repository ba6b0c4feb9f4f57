"""Put: copy into the staging extent piece by piece, commit each piece, overlap the two.

    copy 1 -> commit 1 (sent, not awaited) -> copy 2 -> commit 2 -> answer 1 -> copy 3 -> ...

One piece is one round trip, because Commit reserves too. Two pieces are in flight at most: while the daemon
copies and hashes one, the client copies the next. Bytes that already lie in the staging extent (a
StagingBuffer) are committed where they are. Skipping the copy of blocks that the shared index shows was
rejected: the daemon answers per block and drops what it has, and a lookup first is cheaper still.

A span of the staging extent is given back only when the daemon has answered: until then it may read it.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...v1 import kvcache_pb2, types_pb2
from ...v1.arguments import instance, instances, number, text
from ...v1.shm import HASH_BYTES
from ...v1.types import PutOutcome
from ..errors import InvalidRequest, KvtierError, Overloaded
from ..memory.buffers import Blocks, blocks_of
from ..memory.staging import StagingArea, StagingBuffer
from ..values.keys import pack, parent_hash
from ..values.namespace import Namespace
from ..values.types import PutReport, Retention
from .answers import outcomes_of
from .base import Operations, milliseconds, only_answer
from .effects import Attach, Attachment, Operation, Receive, Send, Work
from .stream_codecs import chunks, gathered
from .terms import PutTerms

MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class _Piece:
    first: int  # block
    blocks: Blocks
    offset: int  # in the staging extent
    taken: bool  # by us; False for a StagingBuffer of the caller
    ticket: int = 0  # of a commit that was sent and not answered


class _Put:
    """What stays the same over the pieces of one put."""

    def __init__(
        self,
        operations: Operations,
        attachment: Attachment,
        header: kvcache_pb2.ReserveRequest,
        timeout_s: float,
        block_bytes: int,
    ) -> None:
        assert attachment.staging is not None
        self.operations = operations
        self.attachment = attachment
        self.staging: StagingArea = attachment.staging
        self.header = header
        self.timeout_s = timeout_s
        self.block_bytes = block_bytes
        self.outcomes: list[PutOutcome] = []
        self.in_flight: deque[_Piece] = deque()

    def run(self, blocks: Blocks) -> Operation[list[PutOutcome]]:
        try:
            try:
                yield from self._put(blocks)
            except KvtierError:
                yield from self._abandon()
                raise
        except KvtierError:
            raise
        except BaseException:  # cancelled: no copies any more, but the daemon may still read
            self.attachment.unsettled.extend((p.ticket, p.offset) for p in self.in_flight if p.taken)
            raise
        return self.outcomes + [PutOutcome.PARENT_MISSING] * (len(blocks) - len(self.outcomes))

    def _put(self, blocks: Blocks) -> Operation[None]:
        for first, last in self._cut(len(blocks)):
            if self._refused():
                break
            yield from self._ask((yield from self._stage(first, blocks.part(first, last))))
        while self.in_flight:
            yield from self._settle()

    def _ask(self, piece: _Piece) -> Operation[None]:
        self.in_flight.append(piece)
        piece.ticket = yield from self.commit(piece)
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            yield from self._settle()

    def _cut(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        limit = min(self.operations.settings.limits.piece_bytes, self.staging.capacity_bytes // 2)
        step = max(1, limit // self.block_bytes)
        for first in range(0, num_blocks, step):
            yield first, min(first + step, num_blocks)

    def offset_of(self, blocks: Blocks) -> int | None:
        """Where the blocks lie in the staging extent; None unless they all do, back to back."""
        if blocks.address is None:
            return None
        return self.staging.offset_of(blocks.address, len(blocks) * self.block_bytes)

    def _stage(self, first: int, blocks: Blocks) -> Operation[_Piece]:
        """Copy a piece into the staging extent, waiting for earlier pieces where it is full."""
        num_bytes = len(blocks) * self.block_bytes
        while (offset := self.staging.take(num_bytes)) is None:
            if self.in_flight:
                yield from self._settle()
            elif self.attachment.unsettled:
                yield from settle_left_over(self.attachment)
            else:
                raise Overloaded(
                    f"{num_bytes} bytes of the staging extent ({self.staging.capacity_bytes}) are not free; "
                    "release staging buffers, or raise Limits.staging_bytes",
                    reason="STAGING_FULL",
                )
        piece = _Piece(first, blocks, offset, taken=True)
        try:
            yield Work(partial(blocks.gather, self.staging.address + offset), num_bytes)
        except BaseException:
            self.staging.give(offset)
            raise
        return piece

    def commit(self, piece: _Piece) -> Operation[int]:
        """Ask the daemon to store a piece; return the ticket of its answer."""
        hashes, header = self.header.prefix_hashes, self.header
        first, last = piece.first, piece.first + len(piece.blocks)
        request = kvcache_pb2.CommitRequest(
            client_id=self.attachment.client_id,
            reserve=header,  # a copy
            spans=[types_pb2.StagingSpan(offset=piece.offset, length=(last - first) * self.block_bytes)],
        )
        reserve = request.reserve
        reserve.request_id = request.request_id = self.operations.request_id()
        if last - first < len(hashes) // HASH_BYTES:
            reserve.prefix_hashes = hashes[first * HASH_BYTES : last * HASH_BYTES]
            reserve.prefill_s = header.prefill_s * (last - first) * HASH_BYTES / len(hashes)
        if first:
            reserve.parent_hash = hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES]
        ticket = yield from self.operations.send(self.attachment, "Commit", request, self.timeout_s)
        return ticket

    def _settle(self) -> Operation[None]:
        """Wait for the oldest piece."""
        piece = self.in_flight[0]
        outcomes = yield from self._answer(piece)
        if outcomes[0] is PutOutcome.PARENT_MISSING and piece.first and not self._refused():
            # Decided before its parent, the piece before it, had landed. It has now.
            piece.ticket = yield from self.commit(piece)
            outcomes = yield from self._answer(piece)
        self.in_flight.popleft()
        self._give(piece)
        self.outcomes += outcomes

    def _answer(self, piece: _Piece) -> Operation[list[PutOutcome]]:
        ticket, piece.ticket = piece.ticket, 0
        try:
            answer = yield Receive(ticket)
        except KvtierError:
            raise
        except BaseException:
            piece.ticket = ticket
            raise
        return outcomes_of(answer.message.outcomes, len(piece.blocks))

    def _refused(self) -> bool:
        return bool(self.outcomes) and not self.outcomes[-1].is_kept

    def _abandon(self) -> Operation[None]:
        """One piece failed. Wait for the others, whatever becomes of them: the first failure is told."""
        while self.in_flight:
            piece = self.in_flight[0]
            if piece.ticket:
                with suppress(KvtierError):
                    yield Receive(piece.ticket)
            self.in_flight.popleft()
            self._give(piece)

    def _give(self, piece: _Piece) -> None:
        if piece.taken:
            self.staging.give(piece.offset)


def put(
    operations: Operations, namespace: Namespace, hashes: Any, data: Any, terms: PutTerms
) -> Operation[PutReport]:
    """Store blocks; see Client.put."""
    instance("namespace", namespace, Namespace)
    packed = pack(hashes)
    blocks = blocks_of(data, len(packed) // HASH_BYTES, namespace.block_bytes, writable=False)
    timeout_s = operations.deadline(terms.deadline_s)
    header = put_header(operations, packed, timeout_s, terms)
    if not len(blocks):
        return PutReport([])
    attachment, namespace_id = yield from operations.begin(namespace)
    header.client_id, header.namespace_id = attachment.client_id, namespace_id
    if attachment.staging is None:
        operations.chain(attachment, packed)
        return (yield from _stream(operations, attachment, namespace, header, blocks, timeout_s))
    if namespace.block_bytes > attachment.staging.capacity_bytes:
        raise InvalidRequest(
            f"a block of {namespace.block_bytes} bytes does not fit the staging extent of "
            f"{attachment.staging.capacity_bytes}; raise Limits.staging_bytes",
            reason="TOO_LARGE",
        )
    staged = _Put(operations, attachment, header, timeout_s, namespace.block_bytes)
    offset = staged.offset_of(blocks)
    if offset is None:
        return PutReport((yield from staged.run(blocks)))
    ticket = yield from staged.commit(_Piece(0, blocks, offset, taken=False))
    answer = yield from only_answer(ticket)
    return PutReport(outcomes_of(answer.message.outcomes, len(blocks)))


def put_header(
    operations: Operations, packed: bytes, timeout_s: float, terms: PutTerms
) -> kvcache_pb2.ReserveRequest:
    """Return what a put says of its blocks, for any namespace. Raises InvalidRequest."""
    return kvcache_pb2.ReserveRequest(
        request_id=operations.request_id(),
        parent_hash=parent_hash(terms.parent),
        prefix_hashes=packed,
        session_id=text("session", terms.session),
        deadline_ms=milliseconds("deadline_s", timeout_s),
        prefill_s=number("prefill_s", terms.prefill_s),
        retention=[hint.to_wire() for hint in instances("retention", terms.retention, Retention)],
    )


def settle_left_over(attachment: Attachment) -> Operation[None]:
    """Wait for the pieces of puts that were cancelled, and give their memory back."""
    assert attachment.staging is not None
    while attachment.unsettled:
        ticket, offset = attachment.unsettled.popleft()
        if ticket:
            with suppress(KvtierError):  # that put was given up; only its memory matters
                yield Receive(ticket)
        attachment.staging.give(offset)


def staging(num_bytes: int) -> Operation[StagingBuffer]:
    """Return memory of the staging extent, ordinary memory where there is none. Raises Overloaded."""
    attachment: Attachment = yield Attach()
    try:
        return StagingBuffer(num_bytes, attachment.staging)
    except Overloaded:
        if not attachment.unsettled:
            raise
    yield from settle_left_over(attachment)
    return StagingBuffer(num_bytes, attachment.staging)


def _stream(
    operations: Operations,
    attachment: Attachment,
    namespace: Namespace,
    header: kvcache_pb2.ReserveRequest,
    blocks: Blocks,
    timeout_s: float,
) -> Operation[PutReport]:
    """Put without shared memory: a header, then all bytes in chunks, block after block; where the daemon
    reads codecs, fragment after fragment."""
    chunk_bytes = operations.settings.limits.chunk_bytes
    writer = attachment.streams.writer(namespace.identity.geometry, header.namespace_id, chunk_bytes)

    def messages() -> Iterator[kvcache_pb2.PutRequest]:
        yield kvcache_pb2.PutRequest(header=header)
        if writer is not None:
            yield from writer.messages(blocks)
            return
        step = max(1, chunk_bytes // blocks.block_bytes)
        for first in range(0, len(blocks), step):
            yield from chunks(gathered(blocks.part(first, first + step)), chunk_bytes)

    ticket = yield Send("Put", messages(), timeout_s)
    answer = yield Receive(ticket)
    return PutReport(outcomes_of(answer.message.outcomes, len(blocks)))
