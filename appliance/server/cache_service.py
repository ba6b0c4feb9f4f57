"""Service: what every call of KVCacheService means, for both transports.

    request message -> checked -> event -> planner -> result -> response message

A handler takes (caller, request) and returns the response itself when the planner answered at once, which
it nearly always does, else a future of it; only Acquire has several answers. So the local channel never
makes a task for a lookup, and the gRPC servicers stay one line each. Refusals are raised as
ApplianceError. Whatever a caller sends is checked here, before the planner sees it: the planner asserts
where it would have to trust.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ... import __version__
from ...tiers.block import HASH_BYTES, NamespaceIdentity, Tier
from ...tiers.codecs.streaming import usable_codecs
from ...tiers.ladder import Ladder
from ...tiers.memory.engine import ExtentEngine
from ...v1 import kvcache_pb2 as pb
from ...v1.conversions import WireTiers
from ...v1.local import MAX_PAYLOAD_BYTES
from ..appliance import Appliance
from ..compression.profiles import Profiles, check_profile
from ..config import CompressionSettings
from ..core import events, results
from ..core.options import PlannerOptions
from ..errors import error, from_refusal
from ..persisted.namespace_book import NamespaceBook
from ..replies import NowOrLater, Replies
from ..security import request_checks as checks
from ..security.callers import Caller
from ..security.client_registry import MAX_CLIENT_TTL_S, ClientRegistry, ConnectedClient
from ..transfer.lanes import Route
from .call_latency import CallLatencies
from .residences import Residences
from .responses import respond
from .stream_codecs import stream_codecs

DEFAULT_DEADLINE_S = 30.0  # of an acquire that names none

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What clients learn of the daemon. `extent_bytes`: data bytes of every extent of all memory tiers."""

    epoch: int
    extent_bytes: int
    local_socket_path: str = ""  # empty without a local channel


class CacheService:
    """Handlers of KVCacheService without its two streams of bytes (streams.py)."""

    def __init__(
        self,
        appliance: Appliance,
        clients: ClientRegistry,
        options: PlannerOptions,
        facts: ServerFacts,
        remote_routes: Mapping[Tier, Route],
    ) -> None:
        self.appliance = appliance
        self.planner = appliance.planner
        self.clients = clients
        self.options = options
        self.facts = facts
        self.tiers = WireTiers(self.planner.core.ladder.infos)
        self.residences = Residences(appliance, facts.epoch, self.tiers)
        self._remote_routes = remote_routes  # from the buffers of streamed puts
        self.call_latencies = CallLatencies()
        self.profiles: Profiles = {}  # that a namespace may name
        self.book: NamespaceBook | None = None  # where memory outlives the daemon
        #: Called with namespace and hashes before they are looked up. Returns None, or what to wait for: some
        #: of these blocks are in memory that an earlier daemon left, and are being verified.
        self.verify_found: Callable[[int, Sequence[bytes]], asyncio.Future[None] | None] = lambda *_: None
        self.compression = CompressionSettings()  # of streams
        #: Returns the address of a host of the fleet by name and epoch; empty for this one, None for none.
        self.locate: Callable[[str, int], str | None] = lambda name, epoch: (
            "" if epoch == facts.epoch or not (name or epoch) else None
        )
        self.draining = False

    # --------------------------------------------------------------------------- clients and namespaces

    def get_server_info(self, caller: Caller, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        """Return version, epoch and limits of this daemon."""
        return pb.GetServerInfoResponse(
            version=__version__,
            api_versions=["v1"],
            epoch=self.facts.epoch,
            local_socket_path=self.facts.local_socket_path,
            max_blocks_per_request=self.options.max_blocks_per_request,
            max_message_bytes=MAX_PAYLOAD_BYTES,
            max_lease_ttl_ms=round(self.options.lease_ttl_max_s * 1000),
            draining=self.draining,
            ladder=self.tiers.announcement(),
        )

    def open_client(self, caller: Caller, request: pb.OpenClientRequest) -> pb.OpenClientResponse:
        """Only over gRPC: on the local channel the connection is the client."""
        if self.draining:
            raise error("DRAINING", "the daemon is shutting down; recompute", retry_after_s=1.0)
        name = checks.text("name", request.name)
        request_id = checks.text("request_id", request.request_id)
        ttl_s = checks.ttl_s(request.ttl_ms, MAX_CLIENT_TTL_S)
        client = self.clients.open_remote(
            name, request_id, ttl_s, self._remote_routes, caller.domain, caller.principal.name
        )
        return pb.OpenClientResponse(client_id=client.id, ttl_ms=round(client.ttl_s * 1000))

    def close_client(self, caller: Caller, request: pb.CloseClientRequest) -> pb.CloseClientResponse:
        """End a client; what it holds is released. Idempotent."""
        client = self.clients.get(request.client_id)
        if client is not None and not client.local and client.owner == caller.principal.name:
            self.clients.close(client.id, "closed")
        return pb.CloseClientResponse()

    def register_namespace(
        self, caller: Caller, request: pb.RegisterNamespaceRequest
    ) -> NowOrLater[pb.RegisterNamespaceResponse]:
        """Return the number of a namespace, which is made where it is new. Raises ApplianceError."""
        identity = checks.identity(request.identity, self._domain(caller, request.identity.domain))
        check_profile(identity, self.profiles)
        prefill = checks.prefill_speed(request.prefill) if request.HasField("prefill") else None
        answer = self.appliance.ask(lambda call: events.NamespaceRegistered(call, identity, prefill))

        def registered(result: results.NamespaceResult) -> pb.RegisterNamespaceResponse:
            if self.book is not None:
                self.book.note(result.namespace_id, identity)
            return pb.RegisterNamespaceResponse(
                namespace_id=result.namespace_id,
                digest=result.digest,
                num_groups=len(result.fragment_bytes),
                fragment_bytes=result.fragment_bytes,
                put_codecs=usable_codecs(),
                stream_codecs=stream_codecs(self.compression, identity),
                takes_first_chunks=True,
            )

        return respond(answer, results.NamespaceResult, registered)

    # -------------------------------------------------------------------------------- reading

    def lookup(self, caller: Caller, request: pb.LookupRequest) -> NowOrLater[pb.LookupResponse]:
        """Return how much of a chain is stored, and where. Changes nothing."""
        hashes = self.chain(request.prefix_hashes)
        self.identity_of(caller, request.namespace_id)
        verifying = self.verify_found(request.namespace_id, hashes)
        if verifying is None:
            return self._looked_up(request.namespace_id, hashes)

        async def later() -> pb.LookupResponse:
            await verifying
            return self._looked_up(request.namespace_id, hashes)

        return asyncio.ensure_future(later())

    def _looked_up(self, namespace_id: int, hashes: Sequence[bytes]) -> pb.LookupResponse:
        found = self.planner.lookup(namespace_id, hashes)
        if isinstance(found, results.Refusal):
            raise from_refusal(found)
        search_s = 0.0
        if found.num_blocks < len(hashes) and self.planner.fetches.is_open:
            self.appliance.step(events.LookedUp(namespace_id, hashes))  # for the next one: this one waits not
            search_s = self.planner.fetches.search_s(namespace_id, hashes, found.num_blocks)
        return pb.LookupResponse(
            num_blocks=found.num_blocks,
            tiers=self.tiers.pack(found.tiers),
            load_s=found.load_s,
            recompute_s=found.recompute_s,
            num_worth_loading=found.num_worth_loading,
            reason=found.reason,
            num_fetchable=found.num_fetchable,
            fetch_s=found.fetch_s,
            search_s=search_s,
        )

    def start_acquire(
        self,
        caller: Caller,
        request: pb.AcquireRequest,
        convert: Callable[[results.AcquireResult], T],
        device_reader: ConnectedClient | None = None,
        reads_hbm: bool = False,
    ) -> Replies[T]:
        """Start an acquire; its results pass through `convert` (self.acquired for most) as they come.

        With a `device_reader` the lease is that client's, and if it `reads_hbm` what it is given may lie in
        any memory tier.
        """
        client = device_reader or self.client_of(caller, request.client_id)
        hashes = self.chain(request.prefix_hashes)
        self.identity_of(caller, request.namespace_id)
        checks.text("request_id", request.request_id)
        session_id = caller.session("session_id", request.session_id)
        checks.distinct(hashes)
        if request.first_block >= len(hashes):
            raise error(
                "BAD_REQUEST", f"first_block {request.first_block} is not one of {len(hashes)} blocks"
            )
        deadline_at = self.deadline(caller, request.deadline_ms, DEFAULT_DEADLINE_S)
        ttl_s = checks.ttl_s(request.ttl_ms, self.options.lease_ttl_max_s)
        expected = checks.expected(request, len(hashes), deadline_at, self.appliance.clock(), self.locate)
        retention, urgency = checks.retention(request.retention), caller.urgency(request.urgency)
        replies = self.appliance.ask_many(
            lambda call: events.AcquireRequested(
                call,
                client.id,
                request.request_id,
                request.namespace_id,
                hashes,
                session_id,
                urgency,
                ttl_s,
                deadline_at,
                request.first_block,
                request.load_anyway,
                retention,
                reads_hbm,
                expected=expected,
            ),
            convert,
            self.verify_found(request.namespace_id, hashes),
        )
        replies.raise_first()
        return replies

    async def acquire(self, caller: Caller, request: pb.AcquireRequest) -> AsyncIterator[pb.AcquireResponse]:
        """Yield the answers of an acquire; ends its lease when the caller stops listening before the last."""
        replies = self.start_acquire(caller, request, self.acquired)
        try:
            async for answer in replies:
                yield answer
        finally:
            self.appliance.abandon(replies)

    def acquired(self, result: results.AcquireResult) -> pb.AcquireResponse:
        """Return one answer of an acquire, places named as clients map them."""
        response = pb.AcquireResponse(
            lease_id=result.lease_id,
            num_blocks=result.num_blocks,
            last=result.last,
            ttl_ms=round(result.ttl_s * 1000),
            tiers=self.tiers.pack(result.tiers),
            num_stored=result.num_stored,
            reason=result.reason,
            load_s=result.load_s,
            recompute_s=result.recompute_s,
            arriving_extents=[self.memory(tier).first_extent + extent for tier, extent in result.arriving],
        )
        if result.ready:
            places = [self.memory(part.tier).location(part.place) for part in result.ready]
            extents, offsets, generations = zip(*places, strict=True)
            ready = response.ready
            ready.block.extend(result.ready.blocks)
            ready.group.extend(result.ready.groups)
            ready.extent.extend(extents)
            ready.offset.extend(offsets)
            ready.length.extend(result.ready.lengths)
            ready.generation.extend(generations)
        return response

    def release(self, caller: Caller, request: pb.ReleaseRequest) -> NowOrLater[pb.ReleaseResponse]:
        """End leases; returns how many were not known."""
        client = self.client_of(caller, request.client_id)
        lease_ids = self._lease_ids(request.lease_ids)
        answer = self.appliance.ask(lambda call: events.ReleaseRequested(call, client.id, lease_ids))
        return respond(
            answer, results.CountResult, lambda result: pb.ReleaseResponse(num_unknown=result.count)
        )

    def keep_alive(self, caller: Caller, request: pb.KeepAliveRequest) -> NowOrLater[pb.KeepAliveResponse]:
        """Extend leases; returns those that had expired."""
        client = self.client_of(caller, request.client_id)
        lease_ids = self._lease_ids(request.lease_ids)
        ttl_s = checks.ttl_s(request.ttl_ms, self.options.lease_ttl_max_s)
        answer = self.appliance.ask(lambda call: events.KeptAlive(call, client.id, lease_ids, ttl_s))
        return respond(
            answer,
            results.KeepAliveResult,
            lambda result: pb.KeepAliveResponse(expired_lease_ids=result.expired),
        )

    def touch(self, caller: Caller, request: pb.TouchRequest) -> pb.TouchResponse:
        """Count blocks as used that a client read without a call."""
        client = self.client_of(caller, request.client_id)
        hashes = self.chain(request.prefix_hashes)
        self.identity_of(caller, request.namespace_id)
        session_id = caller.session("session_id", request.session_id)
        self.appliance.step(events.Touched(client.id, request.namespace_id, hashes, session_id))
        return pb.TouchResponse()

    # -------------------------------------------------------------------------------- writing

    def reserve(self, caller: Caller, request: pb.ReserveRequest) -> NowOrLater[pb.ReserveResponse]:
        """Reserve room for new blocks; returns the outcome of each."""
        client = self.client_of(caller, request.client_id)
        event = self.reservation(caller, client, request)
        answer = self.appliance.ask(event)
        return respond(
            answer,
            results.ReserveResult,
            lambda result: pb.ReserveResponse(reservation_id=result.reservation_id, outcomes=result.outcomes),
        )

    def commit(self, caller: Caller, request: pb.CommitRequest) -> NowOrLater[pb.CommitResponse]:
        """Store the blocks of a reservation, or of `reserve` in this call; returns their outcomes."""
        client = self.client_of(caller, request.client_id)
        checks.text("request_id", request.request_id)
        spans = checks.spans(request.spans, client.staging_bytes, self.options.max_blocks_per_request)
        build = None
        if request.HasField("reserve"):
            if request.reservation_id:
                raise error("BAD_REQUEST", "give a reservation_id or `reserve`, not both")
            build = self.reservation(caller, client, request.reserve)
            identity = self.planner.catalog.namespaces[request.reserve.namespace_id].identity
            num_blocks = len(request.reserve.prefix_hashes) // HASH_BYTES
            spans = checks.spans_of_blocks(spans, num_blocks, identity.geometry)
        elif not request.reservation_id:
            raise error("BAD_REQUEST", "a commit needs a reservation_id, or `reserve` set")
        answer = self.appliance.ask(
            lambda call: events.CommitRequested(
                call, client.id, request.request_id, request.reservation_id, spans, build and build(call)
            )
        )
        return respond(answer, results.PutResult, lambda result: pb.CommitResponse(outcomes=result.outcomes))

    def reservation(
        self, caller: Caller, client: ConnectedClient, request: pb.ReserveRequest
    ) -> Callable[[int], events.ReserveRequested]:
        """Check a reserve request; return what makes its event from a call number."""
        hashes = self.chain(request.prefix_hashes)
        self.identity_of(caller, request.namespace_id)
        checks.text("request_id", request.request_id)
        session_id = caller.session("session_id", request.session_id)
        if len(request.parent_hash) not in (0, HASH_BYTES):
            raise error("BAD_KEY", f"parent_hash must be empty or 32 bytes, is {len(request.parent_hash)}")
        checks.distinct([*hashes, request.parent_hash])
        deadline_at = float("inf")
        if request.deadline_ms:
            deadline_at = self.appliance.clock() + request.deadline_ms / 1000
        prefill_s, retention = checks.prefill_s(request.prefill_s), checks.retention(request.retention)
        return lambda call: events.ReserveRequested(
            call,
            client.id,
            request.request_id,
            request.namespace_id,
            request.parent_hash,
            hashes,
            session_id,
            deadline_at,
            prefill_s,
            retention,
        )

    def abort(self, caller: Caller, request: pb.AbortRequest) -> pb.AbortResponse:
        """Give up a reservation. Idempotent."""
        client = self.client_of(caller, request.client_id)
        self.appliance.step(events.AbortRequested(client.id, request.reservation_id))
        return pb.AbortResponse()

    # ------------------------------------------------------------------------------- common parts

    @property
    def ladder(self) -> Ladder:
        """The tiers that this daemon can have."""
        return self.planner.core.ladder

    def memory(self, tier: Tier) -> ExtentEngine:
        """Return the engine of a memory tier."""
        engine = self.appliance.engines[tier]
        assert isinstance(engine, ExtentEngine)
        return engine

    def domain_number(self, name: str) -> int:
        """Return the number by which rooms and engines know an isolation domain."""
        return self.planner.domain_number(name)

    def check_integrity(self) -> list[str]:
        """Audit the shell."""
        return [*self.appliance.check_integrity(), *self.residences.check_integrity()]

    def identity_of(self, caller: Caller, namespace_id: int, *, is_admin: bool = False) -> NamespaceIdentity:
        """Return a namespace that the caller may use.
        Those of other isolation domains exist only for `is_admin`. Raises UnknownError."""
        namespace = self.planner.catalog.namespaces.get(namespace_id)
        if namespace is None or not (is_admin or caller.domain == namespace.identity.domain):
            raise error("UNKNOWN_NAMESPACE", f"namespace {namespace_id} is not registered; register it first")
        return namespace.identity

    def client_of(self, caller: Caller, client_id: int) -> ConnectedClient:
        """Return the client a request is of. Raises UnknownError."""
        return caller.client_in(self.clients, client_id)

    def _domain(self, caller: Caller, wanted: str) -> str:
        """Return the isolation domain of a namespace: the connection's, or over gRPC the tenant's.

        Raises CallerError where gRPC names a domain of its own.
        """
        if caller.client is None and wanted:
            raise error("BAD_NAMESPACE", "isolation domains need the local channel; leave `domain` empty")
        return caller.domain

    def chain(self, packed: bytes) -> list[bytes]:
        """Return the prefix hashes of a request. Raises CallerError beyond the limit."""
        return checks.chain(packed, self.options.max_blocks_per_request)

    def _lease_ids(self, lease_ids: Sequence[int]) -> list[int]:
        limit = self.options.max_leases_per_client
        if len(lease_ids) > limit:
            raise error("BAD_REQUEST", f"{len(lease_ids)} leases in one call, limit {limit}; split the call")
        return list(lease_ids)

    def deadline(self, caller: Caller, deadline_ms: int, default_s: float) -> float:
        """Return the deadline of a call on the appliance's clock: the caller's, at the latest the RPC's."""
        now = self.appliance.clock()
        if deadline_ms:
            return min(now + deadline_ms / 1000, caller.deadline_at)
        return min(now + default_s, caller.deadline_at)
