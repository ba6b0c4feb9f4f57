"""LocalServer: the local channel. A Unix stream socket beside the gRPC one, and its connections.

Framing is v1/local.py; the calls are those of KVCacheService, plus two that carry file descriptors:
Attach (the client's own staging extent, its domain's index) and MapExtents (warm extents of that domain,
never another's). The socket's mode decides which users may open it; the domain of a connection follows from
the peer's user, as the kernel reports it. A connection may name parts of that domain, and never leave it.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from ... import __version__
from ...tiers.base import CopyError
from ...tiers.block import Tier, tenant_of
from ...tiers.memory.memfd import SharedMemoryError
from ...tiers.memory.staging import StagingExtent
from ...v1 import direct_pb2, local_pb2
from ...v1 import kvcache_pb2 as pb
from ...v1.local import MAX_DESCRIPTORS, Frame, Method
from ...v1.shm import PAGE_BYTES
from ..errors import ApplianceError, error
from ..security import request_checks as checks
from ..security.callers import Caller, CallRates, domain_in
from ..security.principals import Authenticator
from ..security.rights import limited_calls
from ..tasks import Tasks
from ..transfer.lanes import Route
from .cache_service import CacheService
from .local_connection import NAMES, LocalConnection, peer_of
from .local_turns import Turns
from .open_domains import OpenDomains
from .ports import PagesPort
from .unix_listener import UnixListener, is_power_of_two

log = logging.getLogger(__name__)

#: Connections of users that belong to no tenant, where there are tenants: they are told so, and closed.
MAX_STRANGERS = 16
MAX_PREFAULTS = 2  # at a time: they take threads that others need, too
MIN_STAGING_BYTES = 4 << 20  # less than this is refused rather than given, unless less is wanted
ATTACH_TIMEOUT_S = 5.0
LIMITED_CALLS = limited_calls()

PAGE_CALLS = frozenset(method for method in Method if method.name.endswith("_PAGES"))

Handler = Callable[[Caller, Any], Any]
#: Calls with several answers, which are not in the table of the others.
STREAMED = frozenset({Method.ACQUIRE, Method.GET_PAGES})


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Bounds of the local channel."""

    staging_bytes: int = 64 << 20  # largest staging extent a client gets
    max_connections: int = 256
    socket_mode: int = 0o660


class LocalServer:
    """Listens at `path`. `staging_routes` returns the mover's routes out of a staging extent."""

    def __init__(
        self,
        service: CacheService,
        path: Path,
        staging_routes: Callable[[StagingExtent], Mapping[Tier, Route]],
        options: LocalOptions,
        access: Authenticator,
        rates: CallRates,
        handlers: Sequence[object],
    ) -> None:
        self.path = path
        self._listener = UnixListener(path, self._admit)
        self.connections: set[LocalConnection] = set()
        self.counters: Counter[str] = Counter()  # ends of connections, by reason
        self._service = service
        self._staging_routes = staging_routes
        self.options = options
        self._access = access
        self._rates = rates
        self._strangers: set[LocalConnection] = set()
        self._turns = Turns()
        self._prefaults = asyncio.Semaphore(MAX_PREFAULTS)
        self._prefaulting: Tasks[None] = Tasks()
        self._domains = OpenDomains(service)
        self._attaching: dict[asyncio.Task[None], LocalConnection] = {}
        self._direct: PagesPort | None = None
        self._calls = _unary_calls(pb, service, *handlers)

    def serve_pages(self, direct: PagesPort) -> None:
        """Take calls of the direct path, too."""
        self._direct = direct
        self._calls |= _unary_calls(direct_pb2, direct)

    def adopt(self, options: LocalOptions) -> None:
        """Apply another policy: other options, and callers as they are now.

        Closes the connections of processes that belong to another tenant now, or to none."""
        self.options = options
        for connection in list(self.connections):
            caller, now = connection.caller, self._access.of_peer(connection.uid, connection.gid)
            if caller.principal.tenancy is None:
                continue  # not attached
            if now.tenancy is None or now.tenancy.domain != caller.tenancy.domain:
                connection.close("tenant changed")
            else:
                caller.principal = now

    # ------------------------------------------------------------------------------ the socket

    def start(self) -> None:
        """Listen. Raises StartError when the path is in use or cannot be used."""
        self._listener.start(self.options.socket_mode)

    async def stop(self) -> None:
        """Close every connection and the socket. Idempotent."""
        self._listener.stop()
        for connection in list(self.connections):
            connection.close("daemon stops")
        if self._attaching:
            await asyncio.wait(self._attaching)
        self._service.residences.close()

    def _admit(self, accepted: socket.socket) -> None:
        """Serve an accepted connection, or close it where there are too many."""
        _, uid, gid = peer_of(accepted)
        is_stranger = self._access.is_stranger(uid, gid)
        if is_stranger and len(self._strangers) >= MAX_STRANGERS:
            self.counters["of no tenant"] += 1
            if is_power_of_two(self.counters["of no tenant"]):
                log.warning("closed a connection to %s: uid %d belongs to no tenant", self.path, uid)
            accepted.close()
            return
        if len(self.connections) >= self.options.max_connections:
            self.counters["too many connections"] += 1
            accepted.close()
            return
        latencies = self._service.call_latencies
        connection = LocalConnection(accepted, self._answer, self._closed, latencies, self._turns)
        self.connections.add(connection)
        if is_stranger:
            self._strangers.add(connection)
        loop = asyncio.get_running_loop()
        loop.call_later(ATTACH_TIMEOUT_S, self._expect_attached, connection)

    def _expect_attached(self, connection: LocalConnection) -> None:
        if connection.caller.client is None and connection not in self._attaching.values():
            connection.close("did not attach")

    def _closed(self, connection: LocalConnection, reason: str) -> None:
        self.connections.discard(connection)
        self._strangers.discard(connection)
        self.counters[reason] += 1
        client = connection.caller.client
        if client is not None:
            connection.caller.client = None
            if self._direct is not None:
                self._direct.client_gone(client.id)
            self._service.clients.close(client.id, reason)

    # -------------------------------------------------------------------------------- dispatch

    def _answer(self, connection: LocalConnection, frame: Frame) -> None:
        """Answer one frame, now or later.

        Whatever goes wrong with a call is its own answer; only what makes the stream itself doubtful closes
        the connection.
        """
        if (frame.method is Method.ATTACH) != (connection.caller.client is None):
            connection.close("attached twice" if frame.method is Method.ATTACH else "call before attach")
            return
        try:
            checks.encoded(NAMES[frame.method], frame.payload)
            if frame.method in LIMITED_CALLS:
                self._rates.charge(connection.caller, self._service.appliance.clock())
            if frame.method is Method.ATTACH:
                self._start_attach(connection, frame)
            elif frame.method is Method.MAP_EXTENTS:
                self._map_extents(connection, frame)
            elif frame.method is Method.ACQUIRE:
                self._acquire(connection, frame)
            elif frame.method in PAGE_CALLS and self._direct is None:
                raise error("NO_DEVICE", "the daemon has no GPU; get and put through shared memory")
            elif frame.method is Method.GET_PAGES and self._direct is not None:
                request = direct_pb2.GetPagesRequest.FromString(frame.payload)
                connection.stream(frame, self._direct.get_pages(connection.caller, request))
            else:
                parse, handler = self._calls[frame.method]
                answer = handler(connection.caller, parse(frame.payload))
                if isinstance(answer, asyncio.Future):
                    answer.add_done_callback(lambda future: self._answer_later(connection, frame, future))
                else:
                    connection.reply(frame, answer)
        except ApplianceError as problem:
            connection.reply_error(frame, problem)
        except DecodeError:
            connection.reply_error(frame, error("BAD_REQUEST", f"{frame.method.name}: undecodable message"))
        except Exception:
            connection.reply_error(frame, _bug(frame))

    def _answer_later(
        self, connection: LocalConnection, frame: Frame, answer: "asyncio.Future[Message]"
    ) -> None:
        try:
            connection.reply(frame, answer.result())
        except ApplianceError as problem:
            connection.reply_error(frame, problem)
        except Exception:
            connection.reply_error(frame, _bug(frame))
        connection.flush()

    def _acquire(self, connection: LocalConnection, frame: Frame) -> None:
        request = pb.AcquireRequest.FromString(frame.payload)
        replies = self._service.start_acquire(connection.caller, request, self._service.acquired)
        answers = replies.take()
        for answer in answers:
            connection.reply(frame, answer, last=answer.last)
        if not replies.is_last:
            connection.stream(frame, replies)

    # ----------------------------------------------------------------- calls with descriptors

    def _start_attach(self, connection: LocalConnection, frame: Frame) -> None:
        request = local_pb2.AttachRequest.FromString(frame.payload)
        connection.pause()  # what follows belongs to an attached client
        task = asyncio.get_running_loop().create_task(self._attach(connection, frame, request))
        self._attaching[task] = connection
        task.add_done_callback(self._attaching.pop)

    async def _attach(
        self, connection: LocalConnection, frame: Frame, request: local_pb2.AttachRequest
    ) -> None:
        try:
            await self._open_client(connection, frame, request)
        except ApplianceError as problem:
            connection.reply_error(frame, problem)
        except Exception:
            connection.reply_error(frame, _bug(frame))
        connection.flush()
        connection.resume()
        if connection.caller.client is None:  # it was told why; another attempt is another connection
            connection.close("of no tenant" if connection in self._strangers else "not attached")

    async def _open_client(
        self, connection: LocalConnection, frame: Frame, request: local_pb2.AttachRequest
    ) -> None:
        service = self._service
        connection.caller.principal = self._access.of_peer(connection.uid, connection.gid)
        domain = domain_in(connection.caller.tenancy, checks.text("domain", request.domain))
        if service.draining:
            raise error("DRAINING", "the daemon is shutting down; recompute", retry_after_s=1.0)
        with self._domains.attaching(domain):
            await self._open_in(domain, connection, frame, request)

    async def _open_in(
        self, domain: str, connection: LocalConnection, frame: Frame, request: local_pb2.AttachRequest
    ) -> None:
        service = self._service
        number = service.domain_number(domain)
        staging_bytes = self._take_staging(domain, request.staging_bytes)
        memory = service.memory(service.ladder.put_tier)

        def make() -> tuple[StagingExtent, int]:
            staging = StagingExtent(staging_bytes)
            try:
                return staging, memory.indexes.of(number).descriptor
            except SharedMemoryError:
                staging.close()
                raise

        try:
            staging, index = await asyncio.to_thread(make)
        except SharedMemoryError as problem:
            service.clients.staging.give(tenant_of(domain), staging_bytes)
            raise error("TOO_MANY_CLIENTS", str(problem), retry_after_s=1.0) from problem
        client = None
        try:
            if not connection.closed:
                name, routes = checks.text("name", request.name), self._staging_routes(staging)
                client = service.clients.open_local(
                    name, domain, staging, routes, connection.pid, connection.uid
                )
        finally:
            if client is None:
                staging.close()
                service.clients.staging.give(tenant_of(domain), staging_bytes)
        if client is None:
            return
        connection.caller.client = client
        response = local_pb2.AttachResponse(
            client_id=client.id,
            epoch=service.facts.epoch,
            staging_bytes=staging_bytes,
            extent_bytes=service.facts.extent_bytes,
            version=__version__,
            max_blocks_per_request=service.options.max_blocks_per_request,
            is_traced=service.call_latencies.is_traced,
            ladder=service.tiers.announcement(),
        )
        connection.reply(frame, response, fds=(staging.descriptor, index))
        self._prefaulting.start(self._prefault(connection, staging))

    async def _prefault(self, connection: LocalConnection, staging: StagingExtent) -> None:
        """Allocate a client's staging, a few at a time.

        The client has its answer: fresh pages come at 0.4 GB/s, and of clients that come together the last
        ones would have waited for the staging of all others.
        """
        async with self._prefaults:
            if connection.closed:
                return
            try:
                await asyncio.to_thread(staging.prefault())
            except SharedMemoryError as problem:
                log.warning("a local client was closed: %s", problem)
                connection.close("no memory for staging")

    def _take_staging(self, domain: str, wanted_bytes: int) -> int:
        """Take the bytes of a staging extent out of a tenant's share; return how many. Raises BusyError.

        Where there are tenants, all staging together is at most as large as the tier that puts land in, and
        a tenant's at most as large as its quota of that tier. A client gets less than it wants where less is
        left.
        """
        service, tenant = self._service, tenant_of(domain)
        shares, options, put_tier = service.clients.staging, service.options, service.ladder.put_tier
        memory = service.memory(put_tier)
        shares.resize(memory.num_extents * service.facts.extent_bytes, options.num_tenants)
        num_bytes = min(wanted_bytes or self.options.staging_bytes, self.options.staging_bytes)
        least_bytes = min(num_bytes, MIN_STAGING_BYTES)
        quota = options.quotas.get(tenant)
        limit_bytes = quota.memory_bytes.get(put_tier) if quota is not None else None
        while num_bytes >= least_bytes:
            num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
            held_bytes = shares.held(tenant) + num_bytes
            fits = limit_bytes is None or held_bytes <= limit_bytes
            if not options.num_tenants or (fits and shares.may_take(tenant, num_bytes)):
                shares.add(tenant, num_bytes)
                return num_bytes
            num_bytes //= 2
        message = (
            f"staging: the tenant's clients have {shares.held(tenant)} bytes, its share; "
            "close some, let them ask for less, or raise the tenant's quota"
        )
        raise error("TOO_MANY_CLIENTS", message, retry_after_s=1.0)

    def _map_extents(self, connection: LocalConnection, frame: Frame) -> None:
        request = local_pb2.MapExtentsRequest.FromString(frame.payload)
        client = connection.caller.client
        assert client is not None
        if not 0 < len(request.extents) <= MAX_DESCRIPTORS or len(set(request.extents)) < len(
            request.extents
        ):
            raise error("BAD_REQUEST", f"ask for 1 to {MAX_DESCRIPTORS} extents at a time, each once")
        own = self._service.domain_number(client.domain)
        fds = []
        for number in request.extents:
            try:
                fds.append(self._service.residences.descriptor_of(number, own))
            except (CopyError, SharedMemoryError) as problem:  # its memory was to be made, and there is none
                raise error("UNKNOWN_EXTENT", f"extent {number}: {problem}") from problem
        connection.reply(frame, local_pb2.MapExtentsResponse(extents=request.extents), fds=fds)


def _bug(frame: Frame) -> ApplianceError:
    log.exception("local channel: %s failed", frame.method.name)
    return error("BUG", f"{frame.method.name} failed inside the daemon; its log says why")


def _unary_calls(messages: Any, *services: Any) -> dict[Method, tuple[Callable[[bytes], Message], Handler]]:
    """Return parser and handler of each call with one answer that has its request in `messages`, by name.

    `Method.KEEP_ALIVE` is parsed as KeepAliveRequest and handled by `keep_alive` of the service that has it.
    """
    calls = {}
    for method in set(Method) - STREAMED:
        request = getattr(messages, f"{method.name.title().replace('_', '')}Request", None)
        if request is not None:
            (service,) = (one for one in services if hasattr(one, method.name.lower()))
            calls[method] = (request.FromString, getattr(service, method.name.lower()))
    return calls
