"""Tickets: blocks that another host may read over one data connection, held until it has.

A ticket is an acquire of this host's own, from its tiers only: what is in nvme is loaded first. Its lease
ends when the other host said that all has arrived, when its connection breaks, and when no connection showed
the ticket within TICKET_S. There are MAX_TICKETS at a time, and their bytes count against `peers.send_limit`.
Of both, less urgent fetches may take a share only, so that what decodes finds room behind what is prefetched.
A queue by urgency was rejected: the other host waits in it, and could compute or ask elsewhere.
"""

import asyncio
import math
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...sources.peers.connection import TICKET_BYTES
from ...tiers.base import Buffer
from ...tiers.block import NamespaceIdentity, Urgency
from ...tiers.codecs.base import Shape, shape_of
from ...tiers.codecs.streaming import loaded_codecs
from ...v1 import peer_pb2 as pb
from ...v1.types_pb2 import HostLoad
from ..core.catalog.catalog import NO_ROW, NamespaceEntry
from ..core.events import AcquireRequested, ReleaseRequested
from ..core.results import AcquireResult, ReadyFragment, ReadyFragments
from ..errors import error
from ..event_log import EventLog
from ..security import request_checks as checks
from ..security.callers import Caller
from ..security.client_registry import ConnectedClient
from ..server.cache_service import CacheService
from .holdings import MAX_DIGESTS, Holdings
from .pushing import Pushing

TICKET_S: Final = 5.0  # from its issue until a connection shows it
SEND_S: Final = 30.0  # from its issue until all has arrived
MAX_TICKETS: Final = 16
MAX_AWAIT_S: Final = 600.0
MAX_BACKLOG_S: Final = 0.25  # of bytes beyond the send limit, that are promised already
RETRY_S: Final = 0.1
#: Of tickets and backlog, for fetches of requests that wait for a turn, and of those that do not wait yet.
QUEUED_SHARE, LATER_SHARE = 0.75, 0.25
LEASE_S: Final = 2 * SEND_S


@dataclass(eq=False, slots=True)
class DataTicket:
    """What one connection may read."""

    number: bytes
    payloads: Sequence[Buffer]  # group-major
    num_bytes: int
    client: int
    lease: int
    ends_at: float  # on the loop's clock
    timer: asyncio.TimerHandle
    coding: "PayloadCoding | None"  # None: payloads are sent as they are
    saved_bytes: int = 0  # by encoding


class PayloadCoding(NamedTuple):
    """How the payloads of a ticket may be encoded."""

    codec_ids: frozenset[int]  # that the fetcher reads
    name: str  # of the policy's codec
    shapes: Sequence[Shape]  # of each layer group
    num_blocks: int
    checksums: bytes  # of all payloads


class _Held(NamedTuple):
    """Blocks under a lease: their fragments, group-major."""

    num_blocks: int
    client: int
    lease: int
    fragments: list[ReadyFragment]


class PeerService:
    """Handler of PeerService: issues tickets, and tells what this host holds.

    `data_port`: where connections show tickets, once it is known. Owned by the event loop."""

    def __init__(
        self, service: CacheService, events: EventLog, send_limit: int | None, is_encrypted: bool
    ) -> None:
        self._service = service
        self._is_encrypted = is_encrypted
        self._send_limit = send_limit or math.inf
        self._promised_until = 0.0  # when the bytes of all tickets so far may have been sent
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[bytes, DataTicket] = {}  # that no connection showed yet
        self._num_acquiring = 0
        self._used: set[DataTicket] = set()
        self._clients: dict[str, ConnectedClient] = {}  # by isolation domain
        self.data_port = 0
        self.pushing: Pushing | None = None
        self.counters: Counter[str] = Counter()
        self.holdings = Holdings(
            service.planner.catalog,
            events,
            service.facts.epoch,
            socket.gethostname(),
            self.load,
            service.ladder.log_tier,
        )

    @property
    def num_tickets(self) -> int:
        """Return how many tickets there are, with those that are being made."""
        return len(self._waiting) + len(self._used) + self._num_acquiring

    def load(self) -> HostLoad:
        """Return how busy this host is, as it tells others."""
        service, core = self._service, self._service.planner.core
        memory = [core.rooms[tier].statistics() for tier in core.ladder.memory_tiers if tier in core.rooms]
        log_tier = core.ladder.log_tier
        load = HostLoad(
            num_tickets=self.num_tickets,
            max_tickets=MAX_TICKETS,
            queued_bytes=sum(core.bytes_in_flight.values()),
            memory_free_share=sum(one.free_bytes for one in memory)
            / max(1, sum(one.capacity_bytes for one in memory)),
            is_draining=service.draining,
        )
        last = core.rooms.get(log_tier) or core.rooms.get(core.ladder.put_tier)
        if last is not None:
            room = last.statistics()
            load.free_share = room.free_bytes / max(1, room.capacity_bytes)
        if log_tier in core.rooms:
            load.disk_wait_s = core.costs.wait_s(log_tier)
            load.disk_bytes_per_s = core.costs.bandwidth_of(log_tier)
        return load

    # --------------------------------------------------------------------------------------- calls

    async def watch_inventory(
        self, caller: Caller, request: pb.WatchInventoryRequest
    ) -> AsyncIterator[pb.WatchInventoryResponse]:
        """Yield what this host holds of the namespaces asked for, then what changes."""
        if len(request.namespace_digests) > MAX_DIGESTS:
            raise error("BAD_REQUEST", f"{len(request.namespace_digests)} namespaces, limit {MAX_DIGESTS}")
        self._check_encryption(request)
        async for message in self.holdings.watch(request.namespace_digests):
            yield message

    async def await_blocks(
        self, caller: Caller, request: pb.AwaitBlocksRequest
    ) -> AsyncIterator[pb.AwaitBlocksResponse]:
        """Yield how many blocks of a chain can be read, whenever it is more. Raises ApplianceError."""
        namespace, names = self._asked(request.epoch, request.namespace_digest, request.prefix_hashes)
        try:
            async with asyncio.timeout(min(request.deadline_ms / 1000, MAX_AWAIT_S)):
                async for num_blocks in self.holdings.grows(namespace, names):
                    yield pb.AwaitBlocksResponse(num_blocks=num_blocks)
        except TimeoutError:
            pass

    def _check_encryption(self, request: pb.WatchInventoryRequest | pb.FetchBlocksRequest) -> None:
        """Raise ApplianceError for a host that would, or may, write in plain what is encrypted here."""
        if not self._is_encrypted or (request.HasField("stores_in_plain") and not request.stores_in_plain):
            return
        fix = "set encryption.master_key" if request.stores_in_plain else "install this version"
        message = f"this host encrypts what it stores; {fix} on the one that asks"
        raise error("NOT_ENCRYPTED", message)

    def _asked(self, epoch: int, digest: bytes, packed: bytes) -> tuple[NamespaceEntry, list[bytes]]:
        """Return what a request of another host is about. Raises ApplianceError."""
        service = self._service
        if epoch != service.facts.epoch:
            raise error("NOTHING_THERE", "this host has started anew; what it held is not known any more")
        names = service.chain(packed)
        checks.distinct(names)
        namespace = self._namespace(digest)
        if namespace is None:
            raise error("UNKNOWN_NAMESPACE", "no runtime has registered this namespace here")
        return namespace, names

    async def fetch_blocks(self, caller: Caller, request: pb.FetchBlocksRequest) -> pb.FetchBlocksResponse:
        """Return a ticket for the blocks that are here, from the first one on. Raises ApplianceError."""
        service = self._service
        namespace, names = self._asked(request.epoch, request.namespace_digest, request.prefix_hashes)
        self._check_encryption(request)
        urgency, codec_ids = checks.urgency(request.urgency), checks.codecs(request.codecs)
        self._admit(urgency)
        self._num_acquiring += 1
        try:
            held = await self._hold(namespace, names, urgency, min(request.deadline_ms / 1000, SEND_S))
        finally:
            self._num_acquiring -= 1
        if not held.fragments:
            self._release(held.client, held.lease)
            return pb.FetchBlocksResponse()
        engines = [service.memory(one.tier) for one in held.fragments]
        checksums = b"".join(
            engine.checksum(one.place) for engine, one in zip(engines, held.fragments, strict=True)
        )
        coding = self._coding(namespace.identity, held.num_blocks, checksums, codec_ids)
        return pb.FetchBlocksResponse(
            ticket=self._issue(held, coding).number,
            data_port=self.data_port,
            num_blocks=held.num_blocks,
            checksums=checksums,
            nixl_version=self.pushing.version if self.pushing is not None else "",
        )

    async def push_blocks(self, caller: Caller, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
        """Write what a ticket stands for into the caller's memory. Raises ApplianceError."""
        if self.pushing is None or (ticket := self.take(request.ticket)) is None:
            raise error("NOTHING_THERE", "no such ticket")
        is_sent = False
        try:
            answer = await self.pushing.push(ticket.payloads, request, caller.deadline_at)
            is_sent = not answer.problem
            return answer
        finally:  # also of a call that was given up: nothing reads the payloads any more
            if is_sent:
                self.end(ticket, is_sent)
            else:
                self._give_back(ticket)

    def _coding(
        self, identity: NamespaceIdentity, num_blocks: int, checksums: bytes, codec_ids: frozenset[int]
    ) -> PayloadCoding | None:
        geometry, name = identity.geometry, self._service.compression.codec
        readable = codec_ids.intersection(loaded_codecs(geometry.dtype, encodes=True))
        if not readable or name == "identity":
            return None
        shapes = [shape_of(geometry, group) for group in range(geometry.num_groups)]
        return PayloadCoding(readable, name, shapes, num_blocks, checksums)

    def _namespace(self, digest: bytes) -> NamespaceEntry | None:
        known = self._service.planner.catalog.namespaces.values()
        return next((one for one in known if one.identity.digest == digest), None)

    def _admit(self, urgency: Urgency) -> None:
        """Raise BusyError when there are too many tickets, or too much is promised, for this urgency."""
        late_s, share = self._promised_until - self._loop.time(), 1.0
        if urgency > Urgency.PREFILL:
            share = QUEUED_SHARE if urgency is Urgency.QUEUED else LATER_SHARE
        is_late = late_s > share * MAX_BACKLOG_S
        if self.num_tickets >= share * MAX_TICKETS or is_late:
            self.counters["tickets_refused"] += 1
            what = "peers.send_limit is reached" if is_late else f"{self.num_tickets} tickets"
            raise error("TOO_MANY_IN_FLIGHT", f"{what}; compute, or ask another host", RETRY_S)

    async def _hold(
        self, namespace: NamespaceEntry, names: list[bytes], urgency: Urgency, wait_s: float
    ) -> _Held:
        """Lease the longest prefix of `names` that is readable within `wait_s`."""
        appliance, domain = self._service.appliance, namespace.identity.domain
        client = self._client(domain)
        replies = appliance.ask_many(
            lambda call: AcquireRequested(
                call,
                client.id,
                "",
                namespace.id,
                names,
                urgency=urgency,
                ttl_s=min(LEASE_S, self._service.options.lease_ttl_max_s),
                deadline_at=appliance.clock() + wait_s,
                load_anyway=True,
                is_local=True,
            ),
            lambda result: result,
            self._service.verify_found(namespace.id, names),
        )
        replies.raise_first()
        last, found = AcquireResult(0, 0, ReadyFragments(), True, 0.0), list[ReadyFragment]()
        is_held = False
        try:
            async for result in replies:
                last = result
                found += result.ready
            is_held = True
        finally:
            if not is_held:
                appliance.abandon(replies)
                self._release(client.id, last.lease_id)
        num_blocks = min(last.num_blocks, self._num_exact(namespace, names))
        fragments = [one for one in found if one.block < num_blocks]
        fragments.sort(key=lambda one: (one.group, one.block))
        return _Held(num_blocks, client.id, last.lease_id, fragments)

    def _num_exact(self, namespace: NamespaceEntry, names: Iterable[bytes]) -> int:
        """Return the blocks before the first one that came out of a lossy record: another host would not know
        that it did, and lose something again."""
        catalog, number = self._service.planner.catalog, 0
        for name in names:
            row = namespace.rows.get(name, NO_ROW)
            if row == NO_ROW or (catalog.spent and not catalog.spent.isdisjoint(catalog.fragments(row))):
                break
            number += 1
        return number

    def _client(self, domain: str) -> ConnectedClient:
        client = self._clients.get(domain)
        if client is None or self._service.clients.get(client.id) is not client:
            client = self._clients[domain] = self._service.clients.open_fleet(domain)
        return client

    # ------------------------------------------------------------------------------------- tickets

    def _issue(self, held: _Held, coding: PayloadCoding | None) -> DataTicket:
        memory = self._service.memory
        payloads = [memory(one.tier).view(one.place, one.length) for one in held.fragments]
        num_bytes = sum(map(len, payloads))
        now = self._loop.time()
        self._promised_until = max(now, self._promised_until) + num_bytes / self._send_limit
        number = secrets.token_bytes(TICKET_BYTES)
        timer = self._loop.call_later(TICKET_S, self._expire, number)
        ticket = DataTicket(number, payloads, num_bytes, held.client, held.lease, now + SEND_S, timer, coding)
        self._waiting[number] = ticket
        self.counters["tickets_issued"] += 1
        return ticket

    def _expire(self, number: bytes) -> None:
        ticket = self._waiting.pop(number, None)
        if ticket is not None:
            self.counters["tickets_not_used"] += 1
            self._let_go(ticket)

    def take(self, number: bytes) -> DataTicket | None:
        """Return the ticket of a number, for its one use; None when there is none."""
        ticket = self._waiting.pop(number, None)
        if ticket is not None:
            self._used.add(ticket)
        return ticket

    def _give_back(self, ticket: DataTicket) -> None:
        """Let a data connection show a ticket that was taken."""
        self._used.discard(ticket)
        self._waiting[ticket.number] = ticket
        ticket.timer.cancel()
        left_s = min(TICKET_S, ticket.ends_at - self._loop.time())
        ticket.timer = self._loop.call_later(max(0.0, left_s), self._expire, ticket.number)

    def end(self, ticket: DataTicket, is_sent: bool) -> None:
        """Let go of what a ticket held: nothing reads it any more."""
        self._used.discard(ticket)
        self.counters["tickets_sent" if is_sent else "tickets_broken"] += 1
        self.counters["bytes_sent"] += ticket.num_bytes if is_sent else 0
        self.counters["bytes_saved"] += ticket.saved_bytes
        self._let_go(ticket)

    def _let_go(self, ticket: DataTicket) -> None:
        ticket.timer.cancel()
        ticket.payloads = ()
        self._service.appliance.step(ReleaseRequested(None, ticket.client, [ticket.lease]))

    def _release(self, client: int, lease: int) -> None:
        if lease:
            self._service.appliance.step(ReleaseRequested(None, client, [lease]))
