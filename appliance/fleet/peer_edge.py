"""PeerEdge: carries out what the planner asks of sources, over other hosts first and a store behind them.

    search    what the hosts say they hold, which is asked of memory; where none has it, the store
    fetch     a ticket of the least busy host that has all blocks, then its bytes over a data connection;
              another host or the store where it refuses, stops or sends other bytes, within the deadline
    export    the store's

Payloads are read into the places where they are to stay by a thread, and are compared with their checksums
there. A batch is reported when no thread writes into its places any more.
"""

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

import grpc

from ...sources.peers.connection import TICKET_BYTES, ConnectionLost, break_off
from ...sources.peers.receiving import PayloadReader, connect
from ...tiers.base import Cause, CopyError, CopyItem, CopyOutcome, MemoryEngine
from ...tiers.block import NamespaceIdentity, Tier, Urgency, tenant_of
from ...tiers.codecs.base import shape_of
from ...tiers.codecs.streaming import loaded_codecs
from ...v1 import peer_pb2 as pb
from ...v1.bundles import blocks_per_bundle
from ...v1.conversions import urgency_to_wire
from ...v1.shm import CHECKSUM_BYTES
from ..core.events import CopyFinished, Event, SourceChanged, SourceSearched
from ..core.instructions import FetchBundle, SearchBundles
from ..core.remembered import Remembered
from ..tasks import Tasks
from ..transfer.object_edge import ObjectEdge, Work
from .finding import ChainPart, Held, KnownHosts
from .fleet_host import DISTRUST_S, FleetHost, is_cancelled
from .fleet_tls import FleetTls
from .pushing import LandedReader, Pushing

log = logging.getLogger(__name__)

MAX_THREADS: Final = 64  # MAX_FETCHES of 16 hosts that are slow; those of others wait
MAX_TRIES: Final = 2  # hosts that one fetch asks
TICKET_WAIT_S: Final = 2.0
STALL_S: Final = 1.0  # without a byte, after which a host is given up
FASTER: Final = 4.0  # than until then: what would not arrive in time even so is given up, too
#: Of a fetch that was given less, that it was late says nothing of the host: its caller's time was short.
TELLING_S: Final = 0.25
CONNECT_S: Final = 1.0
#: Of the time that is left, for a host while there is another source.
FIRST_SHARE: Final = 0.6
MISSING_S: Final = 60.0  # for which a store that lacks a bundle is not asked for it again
MAX_MISSING: Final = 65_536
FULL: Final = grpc.StatusCode.RESOURCE_EXHAUSTED


class Refused(Exception):
    """A host gave no ticket; the message says why."""


class NotThere(Refused):
    """A host does not have the blocks that it was said to hold: nothing is wrong with it."""


def _is_silent(failure: Exception) -> bool:
    """Return whether a host did not answer at all."""
    silent = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() in silent


def _is_late(failure: Exception) -> bool:
    """Return whether a host had no answer when time was over."""
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _is_of_less_urgent(work: FetchBundle, failure: Exception) -> bool:
    """Return whether a host may have room for what is more urgent than a fetch that it refused."""
    is_full = isinstance(failure, grpc.aio.AioRpcError) and failure.code() is FULL
    return is_full and work.bundle.urgency > Urgency.PREFILL


class PeerEdge:
    """Executes SearchBundles, FetchBundle and ExportBundle. Owned by the event loop.

    `engines` are those of the memory tiers; `deliver` gets the events, on the loop. `store`: asked where no
    host has a bundle; its events go through `deliver_of_store`.
    """

    def __init__(
        self,
        hosts: KnownHosts,
        engines: Mapping[Tier, MemoryEngine],
        deliver: Callable[[Event], None],
        clock: Callable[[], float],
        tls: FleetTls | None,
        stores_in_plain: bool = False,
    ) -> None:
        self._stores_in_plain = stores_in_plain
        self._loop = asyncio.get_running_loop()
        self._hosts = hosts
        self._engines = engines
        self._deliver = deliver
        self._clock = clock
        self._tls = tls
        self.store: ObjectEdge | None = None
        self.pushing: Pushing | None = None
        self._is_store_open = False
        self._told: SourceChanged | None = None
        self._searches: dict[int, SearchBundles] = {}  # that the store carries out
        #: In the store, until when; by digest and name.
        self._missing: Remembered[tuple[bytes, bytes], float] = Remembered(MAX_MISSING)
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kvtier-fetch")
        self._fetches: Tasks[None] = Tasks()
        self._is_stopping = threading.Event()
        self.counters: Counter[str] = Counter()

    def execute(self, work: Work) -> None:
        """Begin an instruction; one that nothing can be asked for ends at once."""
        if self._is_stopping.is_set():
            return
        if isinstance(work, SearchBundles):
            self._search(work)
        elif isinstance(work, FetchBundle):
            self._fetches.start(self._fetch(work))
        else:
            assert self.store is not None
            self.store.execute(work)

    async def stop(self) -> None:
        """Wait for the threads, which read nothing more. Idempotent."""
        self._is_stopping.set()
        await self._fetches.stop()
        await asyncio.to_thread(self._pool.shutdown)

    # ------------------------------------------------------------------------------- what can be asked

    def hosts_changed(self) -> None:
        """Tell the planner whether there is anything to ask."""
        if self._is_stopping.is_set():
            return
        has_hosts = bool(self._hosts.live())
        event = SourceChanged(
            has_hosts or self._is_store_open, takes_exports=self._is_store_open, has_hosts=has_hosts
        )
        if event != (self._told or SourceChanged(False, takes_exports=False)):
            self._told = event
            self._deliver(event)

    def deliver_of_store(self, event: Event) -> None:
        """Take in an event of the store, and pass on what it means beside hosts."""
        if isinstance(event, SourceChanged):
            self._is_store_open = event.is_open
            self.hosts_changed()
        elif isinstance(event, SourceSearched):
            self._searched(event)
        else:
            self._deliver(event)

    # -------------------------------------------------------------------------------------- search

    def _search(self, search: SearchBundles) -> None:
        """Answer from what hosts say they hold; where none has the first bundle, ask the store."""
        size = blocks_per_bundle(search.identity.geometry)
        tenant = tenant_of(search.identity.domain)
        part = ChainPart(search.identity.digest, search.blocks, search.num_here, size, tenant)
        self._hosts.find(part, partial(self._found, search))

    def _found(self, search: SearchBundles, held: Held) -> None:
        """Answer a search, with what hosts hold of its blocks."""
        if self._is_stopping.is_set():
            return
        now, names = self._clock(), search.names
        num_blocks = max((number for host, number in held.items() if host.may_fetch(now)), default=0)
        self.counters["searches_found" if num_blocks else "searches_empty"] += 1
        if num_blocks:
            num_blocks += search.num_here
            num_found = num_blocks // blocks_per_bundle(search.identity.geometry)
            self._deliver(
                SourceSearched(search.search, num_found, -1, is_stored=False, num_blocks=num_blocks)
            )
        elif not (self._is_store_open and names) or self._is_missing(search.identity, names[0], now):
            self._deliver(SourceSearched(search.search, 0, -1))
        else:
            assert self.store is not None
            self._searches[search.search] = search
            self.store.execute(search)

    def _is_missing(self, identity: NamespaceIdentity, name: bytes, now: float) -> bool:
        return (self._missing.get(tenant_of(identity.domain), (identity.digest, name)) or 0.0) > now

    def _searched(self, event: SourceSearched) -> None:
        """Remember here what the store lacks: the planner may ask again, because a host may have it soon."""
        search = self._searches.pop(event.search)
        if 0 <= event.num_possible < len(search.names):
            key = (search.identity.digest, search.names[event.num_possible])
            self._missing.put(tenant_of(search.identity.domain), key, self._clock() + MISSING_S)
        self._deliver(replace(event, num_possible=-1))

    # --------------------------------------------------------------------------------------- fetch

    async def _fetch(self, work: FetchBundle) -> None:
        """Carry out a fetch. Every batch of it ends, whatever goes wrong: its places are kept until then."""
        left = dict(work.batches)  # that have not landed
        try:
            cause = await self._bring(work, left)
        except Exception:
            log.exception("a fetch of %d blocks", len(work.bundle.names))
            cause = Cause.IO_ERROR
        for copy, items in left.items():
            self._deliver(CopyFinished(copy, [CopyOutcome(cause)] * len(items)))

    async def _bring(self, work: FetchBundle, left: dict[int, Sequence[CopyItem]]) -> Cause:
        """Bring what is `left` from a host, another host, or the store. Returns why some is left then."""
        first = min(item.source for items in left.values() for item in items)
        cause, tried = Cause.SOURCE_GONE, list[FleetHost]()
        while left and len(tried) < MAX_TRIES and (now := self._clock()) < work.deadline_at:
            holders = [one for one in await self._holders(work, first, now) if one not in tried]
            if not holders:
                break
            tried.append(host := holders[0])
            share = FIRST_SHARE if len(holders) > 1 or self._has_stored(work) else 1.0
            cause = await self._in_turn(host, work, left, first, now + share * (work.deadline_at - now))
        if left and self._clock() >= work.deadline_at:
            cause = Cause.CANCELLED
        if left and self._has_stored(work) and self.store is not None and self._clock() < work.deadline_at:
            self.counters["fetches_left_to_store"] += bool(tried)
            self.store.execute(replace(work, batches=list(left.items())))
            left.clear()
        return cause

    async def _holders(self, work: FetchBundle, first: int, now: float) -> list[FleetHost]:
        """Return the hosts that may be asked and hold all blocks from `first` on, the least busy first."""
        names, found = work.bundle.names[first:], self._loop.create_future()
        size = blocks_per_bundle(work.bundle.identity.geometry)

        def keep(held: Held) -> None:
            if not found.done():  # the fetch may have been given up
                found.set_result(held)

        tenant = tenant_of(work.bundle.identity.domain)
        self._hosts.find(ChainPart(work.bundle.identity.digest, names, first, size, tenant), keep)
        held: Held = await found
        able = [host for host, number in held.items() if number >= len(names) and host.may_fetch(now)]
        return sorted(able, key=lambda one: (one.num_fetches, one.load.num_tickets, -one.bytes_per_s))

    def _has_stored(self, work: FetchBundle) -> bool:
        """Return whether a store can have it: a whole bundle."""
        size = blocks_per_bundle(work.bundle.identity.geometry)
        return self._is_store_open and len(work.bundle.names) == size

    async def _in_turn(
        self,
        host: FleetHost,
        work: FetchBundle,
        left: dict[int, Sequence[CopyItem]],
        first: int,
        deadline_at: float,
    ) -> Cause:
        """Wait until fewer fetches from a host are under way, then fetch from it what is `left`."""
        host.num_fetches += 1
        try:
            async with asyncio.timeout(max(0.0, deadline_at - self._clock())):
                await host.turns.acquire(tenant_of(work.bundle.identity.domain))
        except TimeoutError:
            host.num_fetches -= 1
            return Cause.CANCELLED
        try:
            if not host.may_fetch(self._clock()):  # it failed meanwhile
                return Cause.SOURCE_GONE
            return await self._from_host(host, work, left, first, deadline_at)
        finally:
            host.turns.release()
            host.num_fetches -= 1

    async def _from_host(
        self,
        host: FleetHost,
        work: FetchBundle,
        left: dict[int, Sequence[CopyItem]],
        first: int,
        deadline_at: float,
    ) -> Cause:
        """Fetch from one host what is `left`, which gets less as batches land. Returns why some is."""
        began_at, cause, words = self._clock(), Cause.SOURCE_GONE, ""
        try:
            ticket = await self._ticket(host, work, first, deadline_at - began_at)
            size = ticket.num_blocks * work.bundle.identity.geometry.block_bytes
            pushing = self.pushing
            push = pushing.landed(host, ticket, size, deadline_at) if pushing is not None else nullcontext()
            async with push as landed:
                num_bytes = await self._loop.run_in_executor(
                    self._pool, self._receive, host, work, left, first, ticket, deadline_at, landed
                )
            host.measured(num_bytes, self._clock() - began_at)
            host.counters["fetches"] += 1
            host.counters["bytes"] += num_bytes
            self.counters["bytes_received"] += num_bytes
            outcome = "arrived"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            outcome, words = "broken", "its channel was closed"  # by the end of its stream, under this call
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, Refused) as failure:
            outcome, words = "refused", str(failure)
            is_short = _is_late(failure) and deadline_at - began_at < TELLING_S
            if not (isinstance(failure, NotThere) or _is_of_less_urgent(work, failure) or is_short):
                host.failed(self._clock(), is_silent=_is_silent(failure))
        except CopyError as failure:
            outcome, cause, words = "wrong_bytes", failure.cause, str(failure)
            host.pause(self._clock() + DISTRUST_S)
        except (OSError, ConnectionLost) as failure:
            outcome, cause, words = "broken", Cause.SHORT_TRANSFER, str(failure)
            if deadline_at - began_at >= TELLING_S:
                host.failed(self._clock(), is_silent=True)
        self.counters[f"fetches_{outcome}"] += 1
        if outcome != "arrived":
            host.counters[outcome] += 1
            log.log(
                logging.WARNING if outcome == "wrong_bytes" else logging.DEBUG,
                "host %s: %s",
                host.address,
                words,
            )
        return cause

    async def _ticket(
        self, host: FleetHost, work: FetchBundle, first: int, wait_s: float
    ) -> pb.FetchBlocksResponse:
        """Return a ticket for blocks of a bundle from block `first` on. Raises Refused and AioRpcError."""
        names = work.bundle.names[first:]
        assert host.stub is not None
        request = pb.FetchBlocksRequest(
            epoch=host.epoch,
            namespace_digest=work.bundle.identity.digest,
            prefix_hashes=b"".join(names),
            deadline_ms=max(1, int(wait_s * 1000)),
            urgency=urgency_to_wire(work.bundle.urgency),
            codecs=loaded_codecs(work.bundle.identity.geometry.dtype, encodes=False),
            stores_in_plain=self._stores_in_plain,
        )
        ticket = await host.stub.FetchBlocks(request, timeout=min(wait_s, TICKET_WAIT_S))
        num_payloads = ticket.num_blocks * work.bundle.identity.geometry.num_groups
        if not ticket.ticket:
            raise NotThere("it does not have the blocks any more")
        if (
            len(ticket.ticket) != TICKET_BYTES
            or not 0 < ticket.num_blocks <= len(names)
            or len(ticket.checksums) != num_payloads * CHECKSUM_BYTES
            or not 0 < ticket.data_port < 1 << 16
        ):
            raise Refused("its ticket makes no sense")
        return ticket

    # ------------------------------------------------------------------------------------- threads

    def _receive(
        self,
        host: FleetHost,
        work: FetchBundle,
        left: dict[int, Sequence[CopyItem]],
        first: int,
        ticket: pb.FetchBlocksResponse,
        deadline_at: float,
        landed: LandedReader | None,
    ) -> int:
        """Read what a ticket stands for; batches land one by one. Returns the bytes.
        Raises OSError, ConnectionLost and CopyError; nothing writes into places then."""
        if landed is not None:
            return self._read_groups(landed, work, left, first, ticket)

        size = ticket.num_blocks * work.bundle.identity.geometry.block_bytes

        def check(silent_s: float) -> None:
            now = self._clock()
            if self._is_stopping.is_set() or now >= deadline_at:
                raise ConnectionLost("time is over")
            if silent_s > STALL_S:
                raise ConnectionLost(f"nothing came for {STALL_S:g} s")
            gone_s, time_s = now - reader.began_at, deadline_at - reader.began_at
            if gone_s > STALL_S and FASTER * reader.num_bytes * time_s < size * gone_s:
                raise ConnectionLost(f"{reader.num_bytes} bytes in {gone_s:.1f} s: too slow")

        connection = self._connected(host, ticket.data_port, deadline_at)
        try:
            reader = PayloadReader(connection, self._clock, check)
            reader.begin(ticket.ticket, ticket.num_blocks * work.bundle.identity.geometry.num_groups)
            num_bytes = self._read_groups(reader, work, left, first, ticket)
            reader.end()
        except BaseException:
            break_off(connection)
            raise
        host.give_idle(connection)
        return num_bytes

    def _connected(self, host: FleetHost, port: int, deadline_at: float) -> socket.socket:
        connection = host.take_idle()
        if connection is None:
            timeout_s = max(0.001, min(CONNECT_S, deadline_at - self._clock()))
            tls = self._tls.context(is_server=False) if self._tls is not None else None
            name = self._tls.name if self._tls is not None else ""
            connection = connect(host.ip, port, timeout_s, tls, name)
        return connection

    def _read_groups(
        self,
        reader: PayloadReader | LandedReader,
        work: FetchBundle,
        left: dict[int, Sequence[CopyItem]],
        first: int,
        ticket: pb.FetchBlocksResponse,
    ) -> int:
        """Read all payloads in their order, each into its place, or past it where it is not wanted."""
        memory, lengths = self._engines[work.target], work.bundle.identity.geometry.fragment_bytes
        wanted = {(item.label.group, item.source - first): item for items in left.values() for item in items}
        copies = {items[0].label.group: copy for copy, items in left.items()}
        for group, length in enumerate(lengths):
            items = [wanted.get((group, block)) for block in range(ticket.num_blocks)]
            found = reader.fill_many(
                [memory.view(one.target, length) if one else memoryview(bytearray(length)) for one in items],
                shape_of(work.bundle.identity.geometry, group),
            )
            for block, (item, digest) in enumerate(zip(items, found, strict=True)):
                start = (group * ticket.num_blocks + block) * CHECKSUM_BYTES
                told = ticket.checksums[start : start + CHECKSUM_BYTES]
                if digest != told or (item and item.label.checksum not in (b"", told)):
                    raise CopyError(Cause.WRONG_CHECKSUM, f"block {block}, layer group {group}")
            if group in copies:
                self._land(copies[group], left, first, ticket)
        return sum(lengths) * ticket.num_blocks

    def _land(
        self, copy: int, left: dict[int, Sequence[CopyItem]], first: int, ticket: pb.FetchBlocksResponse
    ) -> None:
        """Tell the planner of a batch that has arrived, but for blocks that the host did not have."""
        outcomes = []
        for item in left.pop(copy):
            block, group = item.source - first, item.label.group
            if block >= ticket.num_blocks:
                outcomes.append(CopyOutcome(Cause.SOURCE_GONE))
                continue
            start = (group * ticket.num_blocks + block) * CHECKSUM_BYTES
            outcomes.append(CopyOutcome(None, ticket.checksums[start : start + CHECKSUM_BYTES]))
        if not self._is_stopping.is_set():
            self._loop.call_soon_threadsafe(self._deliver, CopyFinished(copy, outcomes))
