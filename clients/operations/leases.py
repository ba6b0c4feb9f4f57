"""Leases: blocks pinned and read in place. What Lease and AsyncLease share, without I/O.

A lease is filled by the stream that Acquire opened: fragments are reported as they become readable,
layer order first, so a runtime can start on the first layers while later ones still come from NVMe.

Views are read-only and point into the daemon's own memory (fragments.py). Nothing made from one may outlive
the lease; ending it then raises PreconditionFailed.
"""

from contextlib import suppress
from typing import Any

import numpy as np

from ...v1 import kvcache_pb2
from ...v1.arguments import number, whole
from ...v1.shm import HASH_BYTES, extent_of
from ...v1.types import Tier
from ..errors import CONNECTION_LOST, InvalidRequest, KvtierError, NotFound, PreconditionFailed, Unavailable
from ..memory.buffers import address_of, copy_bytes
from ..memory.extents import OFFSET, U8, Wanted
from ..memory.fragments import Fragment, Readable, end_all
from ..values.keys import pack
from ..values.namespace import Namespace
from .answers import FragmentCounter, num_blocks_of, tiers_of
from .base import Operations, milliseconds
from .effects import Attach, Attachment, Forget, Operation, Receive
from .gets import Chain, check_first_block, map_extents, release, wanted_of
from .terms import ReadTerms


class LeaseState:
    """A lease from Acquire to Release. `num_blocks` is final once `finished`."""

    def __init__(
        self, operations: Operations, attachment: Attachment, chain: Chain, views: bool = True
    ) -> None:
        self.lease_id = 0
        self.num_blocks = 0
        self.tiers: tuple[Tier, ...] = ()
        self.num_stored = 0
        self.reason = ""  # why not all that is stored is loaded
        self.finished = False  # no more fragments will come
        self.released = False
        self.warning = ""  # when it was released
        self.chain = chain
        self.attachment = attachment
        self._views = views  # False: another process reads the bytes
        self._operations = operations
        self._ticket = 0
        self._streamed: dict[tuple[int, int], U8] = {}  # gRPC: bytes of fragments not yet whole
        self._counter = FragmentCounter(chain.first_block, chain.num_blocks, chain.namespace.fragment_bytes)
        self._wanted: list[Wanted] = []  # what must still be in the slots; empty over gRPC
        self._fragments: dict[tuple[int, int], Readable] = {}
        self._fresh: list[Fragment] = []  # readable, not iterated yet
        self._view_lock = attachment.view_lock if attachment.local and views else None
        self._viewed: set[int] = set()  # extents that are locked for it

    # ------------------------------------------------------------------------------- operations

    def open(self, ttl_s: float) -> Operation[None]:
        """Pin. Returns when the daemon has named the lease."""
        operations, attachment, chain = self._operations, self.attachment, self.chain
        request = chain.acquire_request(operations, attachment, chain.first_block, ttl_s)
        self._ticket = yield from operations.send(attachment, "Acquire", request, chain.timeout_s)
        yield from self._receive_pins()
        if attachment.local:
            return
        # Without shared memory the lease only pins. Its bytes come by a stream of their own.
        while not self.finished:
            yield from self._receive_pins()
        if not self._views:
            return
        self.finished = self.num_blocks <= chain.first_block
        if not self.finished:
            get = kvcache_pb2.GetRequest(
                acquire=chain.acquire_request(operations, attachment, chain.first_block), takes_several=True
            )
            self._ticket = yield from operations.send(attachment, "Get", get, chain.timeout_s)

    def next_fragments(self) -> Operation[list[Fragment]]:
        """Return fragments not returned before; empty when there are no more."""
        while not self._fresh and not self.finished and not self.released:
            if not (yield from self._is_attached()):
                raise NotFound("the connection that held this lease is gone", reason="LEASE_EXPIRED")
            receive = self._receive_pins if self.attachment.local or not self._views else self._receive_chunk
            try:
                yield from receive()
            except KvtierError:
                if not self.released:  # by another task: then nothing more comes
                    raise
        fresh, self._fresh = self._fresh, []
        return [fragment for fragment in fresh if fragment.block < self.num_blocks]

    def extend(self, ttl_s: float) -> Operation[None]:
        """Ask for more time. Raises NotFound when the lease has ended."""
        expired = not (yield from self._is_attached()) or self.released
        if not expired:
            request = kvcache_pb2.KeepAliveRequest(
                client_id=self.attachment.client_id,
                lease_ids=[self.lease_id],
                ttl_ms=milliseconds("ttl_s", ttl_s, 0.0),
            )
            response = yield from self._operations.call(self.attachment, "KeepAlive", request)
            expired = self.lease_id in response.expired_lease_ids
        if expired:
            raise NotFound(
                "the lease has ended: discard what was read under it and acquire again",
                reason="LEASE_EXPIRED",
            )

    def close(self) -> Operation[None]:
        """Release: views first, then the pin. Idempotent; never raises for a daemon that is gone.

        Raises PreconditionFailed, with the lease released, when something made from a fragment is still
        referenced.
        """
        if self.released:
            return
        self.released = True
        problem, self.warning = end_all(self._fragments)
        self._fresh.clear()
        if self._view_lock is not None:
            self._view_lock.give_back(self._viewed)
        if (yield from self._is_attached()):
            with suppress(KvtierError):
                if not self.finished:
                    yield Forget(self._ticket)
                if self.lease_id:
                    yield from release(self.attachment, self.lease_id)
        if problem:
            raise PreconditionFailed(problem, reason="VIEWS_IN_USE")

    # ---------------------------------------------------------------------------------- reading

    def view(self, block: int, group: int) -> memoryview:
        """Return a fragment's bytes. Raises NotFound when it has not arrived or the lease has ended."""
        return self.readable(block, group).view()

    @property
    def dtype(self) -> str:
        """Name of the elements' type."""
        return self.chain.namespace.geometry.dtype

    def readable(self, block: int, group: int) -> Readable:
        """Return where a fragment's bytes are.

        Raises NotFound when it has not arrived or the lease has " "ended.
        """
        place = whole("block", block), whole("group", group)
        found = None if self.released else self._fragments.get(place)
        if found is None:
            raise NotFound(
                f"fragment ({block}, {group}) is not readable; iterate or wait() first",
                reason="LEASE_EXPIRED" if self.released else "NOT_ARRIVED",
            )
        return found

    def still_valid(self) -> bool:
        """Whether every fragment reported so far is still the one that was leased.

        Call it after the last read (after the copy's completion event, for a GPU): True proves that
        the bytes read were right; False means discard them.
        """
        if self.released:
            return False
        return all(bool(self.attachment.extents.check(wanted)[0].all()) for wanted in self._wanted)

    # -------------------------------------------------------------------------------- internals

    def _is_attached(self) -> Operation[bool]:
        attachment = yield Attach(connect=False)
        return attachment is self.attachment

    def _receive_pins(self) -> Operation[None]:
        message = (yield Receive(self._ticket)).message
        self._counter.count_answer()
        if message.tiers:
            self.tiers = tiers_of(message.tiers, self.attachment.tiers)
        if message.num_stored:  # also where nothing of it could be pinned
            self.num_stored, self.reason = message.num_stored, message.reason
        self.lease_id = message.lease_id
        self.num_blocks = num_blocks_of(message, self.chain.num_blocks)
        self.finished = message.last
        if self.attachment.local and self._views:
            if message.ready.block:
                yield from self._add(message.ready)
            if message.last:
                self.num_blocks = self._counter.end(self.num_blocks)

    def _add(self, ready: kvcache_pb2.Fragments) -> Operation[None]:
        wanted, rows, groups = wanted_of(self.chain, self._counter, ready)
        numbers = [extent_of(place) for place in wanted.places.tolist()]
        yield from map_extents(self._operations, self.attachment, numbers, self.chain.timeout_s)
        self._lock_views(set(numbers) - self._viewed)
        right, headers, _ = self.attachment.extents.check(wanted)
        self._counter.add_all(rows, groups, right)
        self._wanted.append(wanted)
        if not right.all():  # a lease that does not hold: whatever the reason, a miss
            self.num_blocks = min(self.num_blocks, self.chain.first_block + int(rows[~right].min()))
        for row in np.flatnonzero(right).tolist():
            data = self.attachment.extents.mapped[numbers[row]].data
            start = int(headers[row, OFFSET])
            memory = data[start : start + int(wanted.lengths[row])]
            self._arrived(int(rows[row]) + self.chain.first_block, int(groups[row]), memory)

    def _lock_views(self, extents: set[int]) -> None:
        if self._view_lock is None or not extents:
            return
        self._view_lock.take(extents)
        self._viewed |= extents
        if self.attachment.is_lost():  # the next daemon may have looked before there were locks
            raise Unavailable("the daemon that granted the lease is gone", reason=CONNECTION_LOST)

    def _receive_chunk(self) -> Operation[None]:
        message = (yield Receive(self._ticket)).message
        for row, group, part in self._counter.parts(message) if message.chunk else ():
            key = (row + self.chain.first_block, group)
            length = self.chain.namespace.fragment_bytes[group]
            target = self._streamed.setdefault(key, np.empty(length, np.uint8))
            copy_bytes(address_of(target) + message.offset, part, len(part))
            if self._counter.add(row, group, len(part)):
                self._arrived(*key, self._streamed.pop(key)[:])
        if message.last:
            self.finished = True
            self.num_blocks = self._counter.end(min(self.num_blocks, message.num_blocks))

    def _arrived(self, block: int, group: int, memory: U8) -> None:
        self._fragments[block, group] = Readable(memory)
        self._fresh.append(Fragment(block, group, self))


def acquire(
    operations: Operations,
    namespace: Namespace,
    hashes: Any,
    ttl_s: float | None,
    views: bool,
    terms: ReadTerms,
) -> Operation[LeaseState]:
    """Pin the stored prefix; see Client.acquire."""
    if ttl_s is not None:
        number("ttl_s", ttl_s, 0.0)
    if not (num_blocks := len(pack(hashes)) // HASH_BYTES):
        raise InvalidRequest("a lease of no blocks; pass one prefix hash at least")
    check_first_block(terms.first_block, num_blocks - 1)
    attachment, namespace_id = yield from operations.begin(namespace)
    packed = operations.chain(attachment, hashes)
    timeout_s = operations.deadline(terms.deadline_s)
    chain = Chain(namespace, namespace_id, packed, terms.first_block, timeout_s, terms)
    state = LeaseState(operations, attachment, chain, views)
    try:
        yield from state.open(ttl_s or 0.0)
    except BaseException:
        yield from state.close()
        raise
    return state
