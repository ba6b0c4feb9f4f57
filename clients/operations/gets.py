"""Get: one-sided as far as that goes, the rest leased; streamed for callers without shared memory.

    one-sided   shared index -> copy, proven by the slot headers        no call at all
    leased      Acquire (promotes from NVMe) -> copy as fragments land  from the first block in doubt on
    streamed    Get over gRPC, raw or encoded

All three fill the same targets: addresses of shape (blocks, groups, pieces of one fragment).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ...v1 import kvcache_pb2, local_pb2
from ...v1.arguments import instance, whole
from ...v1.conversions import urgency_to_wire
from ...v1.local import MAX_DESCRIPTORS
from ...v1.shm import HASH_BYTES, extent_of, slot_bytes_for, tags_of
from ..errors import InvalidRequest, KvtierError, NotFound, broken_answer
from ..memory.buffers import Pieces, blocks_of, scatter, target_span
from ..memory.extents import I64, U64, Wanted
from ..values.keys import pack
from ..values.namespace import Namespace
from ..values.types import GetReport
from .answers import FragmentCounter, num_leading
from .base import Operations, milliseconds, only_answer
from .effects import Attachment, Forget, Operation, Post, Receive, Send, Work
from .stream_codecs import EncodedReader, readable_codecs
from .terms import ReadTerms

_MAX_NUMBER = (1 << 31) - 1  # of extents and slots: a place has 64 bits, one of them for a sign
_HALF_WORD = np.uint64(32)


@dataclass(slots=True)
class Chain:
    """The blocks one call is about, and how it is to be treated."""

    namespace: Namespace
    namespace_id: int
    packed: bytes
    first_block: int
    timeout_s: float
    terms: ReadTerms

    def behind(self, num_blocks: int) -> "Chain":
        """Return the same, from so many blocks further on."""
        return replace(self, first_block=self.first_block + num_blocks) if num_blocks else self

    @property
    def num_blocks(self) -> int:
        """Blocks named."""
        return len(self.packed) // HASH_BYTES

    def acquire_request(
        self, operations: Operations, attachment: Attachment, first_block: int, ttl_s: float = 0.0
    ) -> kvcache_pb2.AcquireRequest:
        """Return the message that pins the chain from `first_block` on."""
        terms = self.terms
        return kvcache_pb2.AcquireRequest(
            request_id=operations.request_id(),
            client_id=attachment.client_id,
            namespace_id=self.namespace_id,
            prefix_hashes=self.packed,
            session_id=terms.session,
            urgency=urgency_to_wire(terms.urgency),
            ttl_ms=milliseconds("ttl_s", ttl_s, 0.0),
            deadline_ms=milliseconds("deadline_s", self.timeout_s),
            first_block=first_block,
            load_anyway=bool(terms.load_anyway),
            retention=[hint.to_wire() for hint in terms.retention],
            expected=terms.expected.to_wire() if terms.expected is not None else None,
        )


def get(
    operations: Operations, namespace: Namespace, hashes: Any, into: Any, terms: ReadTerms
) -> Operation[GetReport]:
    """Fetch blocks; see Client.get."""
    instance("namespace", namespace, Namespace)
    packed, first_block = pack(hashes), terms.first_block
    num_named = len(packed) // HASH_BYTES
    check_first_block(first_block, num_named)
    num_wanted = num_named - first_block
    data = np.empty(num_wanted * namespace.block_bytes, np.uint8) if into is None else into
    blocks = blocks_of(data, num_wanted, namespace.block_bytes, writable=True)
    attachment, namespace_id = yield from operations.begin(namespace)
    packed, timeout_s = operations.chain(attachment, packed), operations.deadline(terms.deadline_s)
    chain = Chain(namespace, namespace_id, packed, first_block, timeout_s, terms)
    num_one_sided, is_shared = 0, num_wanted and attachment.reader is not None
    if is_shared and blocks.address is not None and attachment.extents.mapped:
        num_one_sided = yield from _read_run(operations, attachment, chain, blocks.address)
    if num_one_sided < num_wanted:
        targets = blocks.targets(namespace.fragment_offsets, namespace.fragment_bytes)
        if is_shared:
            behind, rest = chain.behind(num_one_sided), targets[num_one_sided:]
            is_run = blocks.address is not None
            num_one_sided += yield from _read_one_sided(operations, attachment, behind, rest, is_run)
    done = first_block + num_one_sided
    if done < num_named:
        rest = targets[num_one_sided:]
        read = _read_leased if attachment.local else _read_streamed
        end = yield from read(operations, attachment, chain, done, rest)
        done = max(end, done) if num_one_sided else end
    num_bytes = max(0, done - first_block) * namespace.block_bytes
    return GetReport(done, first_block, data[:num_bytes] if into is None else into, num_bytes, num_one_sided)


def get_one(
    attachment: Attachment, namespace: Namespace, name: bytes, into: Any, session: str, thread_bytes: int
) -> GetReport | None:
    """Answer a get of one block from shared memory alone, without lock or generator.

    That takes the fewest microseconds. None when it does not work, or the block has `thread_bytes` or more.
    """
    reader = attachment.reader
    if reader is None or namespace.__class__ is not Namespace or session.__class__ is not str:
        return None  # what is wrong is said where there is time
    namespace_id = attachment.namespace_ids.get(namespace.digest)
    if namespace_id is None or not session.isascii() or isinstance(into, list | tuple | Pieces):
        return None
    target = target_span(into)
    num_bytes = namespace.block_bytes
    if target.num_bytes < num_bytes or num_bytes >= thread_bytes:
        return None
    if not reader.read_run(namespace_id, name, namespace.fragment_bytes, target.address):
        return None
    attachment.touches.add(namespace_id, session, name)
    return GetReport(1, 0, into, num_bytes, 1)


def check_first_block(first_block: int, limit: int) -> None:
    """Raise InvalidRequest when `first_block` is not in the chain; at most `limit` is."""
    if not 0 <= whole("first_block", first_block, -1 << 63) <= limit:
        raise InvalidRequest(f"first_block is {first_block}, the chain allows 0 to {limit}")


def map_extents(
    operations: Operations, attachment: Attachment, numbers: Sequence[int], timeout_s: float
) -> Operation[None]:
    """Map extents that are not mapped yet. Raises NotFound when one is not ours."""
    missing = attachment.extents.missing(numbers)
    for start in range(0, len(missing), MAX_DESCRIPTORS):
        wanted = missing[start : start + MAX_DESCRIPTORS]
        ticket = yield Send("MapExtents", local_pb2.MapExtentsRequest(extents=wanted), timeout_s)
        answer = yield from only_answer(ticket)
        attachment.extents.add_all(answer.message.extents, answer.memory)


def release(attachment: Attachment, lease_id: int) -> Operation[None]:
    """End a lease, without waiting for an answer."""
    request = kvcache_pb2.ReleaseRequest(client_id=attachment.client_id, lease_ids=[lease_id])
    yield Post("Release", request)


@cache
def _tables(fragment_bytes: tuple[int, ...]) -> tuple[U64, U64]:
    """Return the lengths of the layer groups' fragments, and of the slots that hold them."""
    return np.array(fragment_bytes, np.uint64), np.array([*map(slot_bytes_for, fragment_bytes)], np.uint64)


def wanted_of(
    chain: Chain, counter: FragmentCounter, ready: kvcache_pb2.Fragments
) -> tuple[Wanted, I64, I64]:
    """Return what the fragments of an answer must look like in memory, their rows, and their layer groups.

    Rows are those of `counter`. Raises Unavailable for fragments that were not asked for.
    """
    # Lists first: of a container of protobuf numpy makes an array of one in four times the time.
    columns = (ready.block, ready.group, ready.extent, ready.offset, ready.length, ready.generation)
    lists = [column[:] for column in columns]
    if len(set(map(len, lists))) != 1:
        raise broken_answer("columns of different lengths")
    blocks, groups = np.array(lists[0], np.int64), np.array(lists[1], np.int64)
    extents, offsets, told_lengths, generations = (np.array(values, np.uint64) for values in lists[2:])
    rows = counter.rows_of(blocks, groups)
    length_table, slot_table = _tables(chain.namespace.fragment_bytes)
    lengths = length_table[groups]
    slots = offsets // slot_table[groups]
    is_other = lengths != told_lengths
    if np.logical_or.reduce(is_other) or np.maximum.reduce(slots | extents) > _MAX_NUMBER:
        raise broken_answer("fragments where none can be")
    wanted = Wanted(
        chain.namespace_id,
        (extents << _HALF_WORD | slots).view(np.int64),
        np.frombuffer(chain.packed, "<u8").reshape(-1, 4)[blocks],
        groups.astype(np.uint64),
        lengths,
        generations,
    )
    return wanted, rows, groups


def _read_run(operations: Operations, attachment: Attachment, chain: Chain, address: int) -> Operation[int]:
    """Read one-sidedly, back to back to `address`; return how many blocks that gave."""
    reader, packed = attachment.reader, chain.packed[chain.first_block * HASH_BYTES :]
    assert reader is not None
    namespace = chain.namespace
    num_read: int = yield Work(
        lambda: reader.read_run(chain.namespace_id, packed, namespace.fragment_bytes, address),
        len(packed) // HASH_BYTES * namespace.block_bytes,
    )
    yield from _touch(operations, attachment, chain, packed[: num_read * HASH_BYTES])
    return num_read


def _touch(operations: Operations, attachment: Attachment, chain: Chain, packed: bytes) -> Operation[None]:
    """Remember that blocks were read one-sidedly; report what is due."""
    if packed:
        attachment.touches.add(chain.namespace_id, chain.terms.session, packed)
        if attachment.touches.are_due(operations.settings.limits):
            yield from operations.flush(attachment)


def _read_one_sided(
    operations: Operations, attachment: Attachment, chain: Chain, targets: I64, is_run: bool
) -> Operation[int]:
    """Read one-sidedly from the first wanted block on; return how many blocks that gave."""
    reader = attachment.reader
    assert reader is not None
    packed = chain.packed[chain.first_block * HASH_BYTES :]
    places = reader.find(tags_of(packed, chain.namespace_id, chain.namespace.num_groups))
    num_listed = num_leading(np.all(places >= 0, axis=1))
    if num_listed == 0:
        return 0
    places, packed = places[:num_listed], packed[: num_listed * HASH_BYTES]
    extents = (places >> 32).ravel().tolist()
    if attachment.extents.missing(extents):
        with suppress(NotFound):  # what cannot be mapped is read under a lease
            yield from map_extents(operations, attachment, extents, chain.timeout_s)
    if not reader.is_ordered:
        return (yield from _read_run(operations, attachment, chain, int(targets[0, 0, 0]))) if is_run else 0
    fragment_bytes = chain.namespace.fragment_bytes
    num_read: int = yield Work(
        lambda: reader.read(chain.namespace_id, packed, places, fragment_bytes, targets[:num_listed]),
        num_listed * chain.namespace.block_bytes,
    )
    yield from _touch(operations, attachment, chain, packed[: num_read * HASH_BYTES])
    return num_read


def _read_leased(
    operations: Operations, attachment: Attachment, chain: Chain, first_block: int, targets: I64
) -> Operation[int]:
    """Read under a lease from `first_block` on, as fragments become readable; return the end of the
    readable prefix. `targets` begin at `first_block`."""
    request = chain.acquire_request(operations, attachment, first_block)
    ticket = yield from operations.send(attachment, "Acquire", request, chain.timeout_s)
    lease_id = 0
    counter = FragmentCounter(first_block, chain.num_blocks, chain.namespace.fragment_bytes)
    try:
        while True:
            message = (yield Receive(ticket)).message
            counter.count_answer()
            lease_id = message.lease_id
            if message.ready.block:
                wanted, rows, groups = wanted_of(chain, counter, message.ready)
                extents = [extent_of(place) for place in wanted.places.tolist()]
                yield from map_extents(operations, attachment, extents, chain.timeout_s)
                copy = partial(attachment.extents.copy, wanted, targets[rows, groups])
                right = yield Work(copy, int(wanted.lengths.sum()))
                counter.add_all(rows, groups, right)  # a wrong one: its lease does not hold; a miss
            if message.arriving_extents:  # takes milliseconds, and the device is busy reading meanwhile
                with suppress(NotFound):
                    yield from map_extents(operations, attachment, message.arriving_extents, chain.timeout_s)
            if message.last:
                return counter.end(message.num_blocks)
    finally:
        with suppress(KvtierError):  # on a broken connection everything is released anyway
            yield Forget(ticket)
            if lease_id:
                yield from release(attachment, lease_id)


def _read_streamed(
    operations: Operations, attachment: Attachment, chain: Chain, first_block: int, targets: I64
) -> Operation[int]:
    """Read from a gRPC stream; return the end of the readable prefix."""
    request = kvcache_pb2.GetRequest(
        acquire=chain.acquire_request(operations, attachment, first_block),
        codecs=readable_codecs(),
        takes_several=True,
    )
    ticket = yield from operations.send(attachment, "Get", request, chain.timeout_s)
    fragment_bytes = chain.namespace.fragment_bytes
    counter = FragmentCounter(first_block, chain.num_blocks, fragment_bytes)
    encoded = EncodedReader(chain.namespace.identity.geometry)
    try:
        while True:
            message = (yield Receive(ticket)).message
            if message.HasField("encoded"):
                group = message.group
                row = counter.row_of(message.block, group)
                if encoded.take(message):  # the last chunk of it
                    is_right = yield Work(
                        partial(encoded.decode, group, targets[row, group]), fragment_bytes[group]
                    )
                    counter.add(row, group, fragment_bytes[group] if is_right else 0)
            elif message.chunk:
                for row, group, part in counter.parts(message):
                    scatter(targets[row, group], fragment_bytes[group], message.offset, part)
                    counter.add(row, group, len(part))
            if message.last:
                return counter.end(message.num_blocks)
    finally:
        with suppress(KvtierError):
            yield Forget(ticket)
