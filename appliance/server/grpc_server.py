"""The gRPC transport: every method of every service, found by its name, in one loop.

Handlers (cache_service.py, intent_service.py, streams.py; ../admin) know nothing of gRPC; they are
bound to the service descriptors here, and the caller's identity (listeners.py) is checked against the right
that the call needs (rights.py). A method of the .proto without a handler fails at start, not at the first
call. Generated servicer classes were rejected: thirty methods of the same two lines.
"""

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ...v1 import admin_pb2, events_pb2, kvcache_pb2, peer_pb2
from ...v1.channels import MAX_CALLS as MAX_CALLS_OF_CONNECTION
from ...v1.conversions import urgency_to_wire
from ...v1.local import MAX_PAYLOAD_BYTES
from ..core.catalog.catalog import NO_ROW
from ..core.shares import Shares
from ..errors import REASONS, AccessError, ApplianceError, error, trailing_metadata
from ..event_log import BlockEvent, EventLog
from ..security import request_checks as checks
from ..security.callers import Caller, CallRates
from ..security.rights import Right, right_of
from .access_log import AccessLog, BlockAccess
from .admission import Admission
from .cache_service import CacheService
from .call_latency import CallLatencies
from .listeners import Listeners
from .peer_credential_proxy import MAX_CONNECTIONS
from .queue_probe import QueueProbe
from .streams import IDLE_S

log = logging.getLogger(__name__)

#: Calls in progress, streams included. A caller may have as many of a kind as are left free: alone a half.
MAX_CALLS = 512
#: Streams of health and reflection, which no admission bounds; a caller may have a half.
MAX_OPEN_STREAMS = 64
#: Streams of block events; a tenant may have as many as it leaves free. Each sends every change: beside 250
#: of them and puts, other tenants' calls took 12 ms where they take 0.1.
MAX_WATCHES = 64
#: Streams of chains that other hosts await (PeerService.AwaitBlocks); a host may have as many as it leaves
#: free. Apart from MAX_CALLS: all hosts may be one principal, and none may push out another's inventory.
MAX_AWAITED = 64
HEADROOM_BYTES = 64 << 10  # a message may be a payload's limit and its own framing
SERVICES = (
    kvcache_pb2.DESCRIPTOR.services_by_name["KVCacheService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    events_pb2.DESCRIPTOR.services_by_name["EventsService"],
    peer_pb2.DESCRIPTOR.services_by_name["PeerService"],
)

OPTIONS: Final = {
    "grpc.max_receive_message_length": MAX_PAYLOAD_BYTES + HEADROOM_BYTES,
    "grpc.max_send_message_length": MAX_PAYLOAD_BYTES + HEADROOM_BYTES,
    "grpc.so_reuseport": 0,
    "grpc.max_concurrent_streams": MAX_CALLS_OF_CONNECTION,
    # Of a listener; more are closed. The Unix socket's proxy refuses earlier, and by user.
    "grpc.max_allowed_incoming_connections": MAX_CONNECTIONS + 1,  # and the probe's
    # Calls in gRPC's queue. It ends some beyond the first limit, all beyond the other, with a bare CANCELLED.
    "grpc.server.max_pending_requests": 4096,
    "grpc.server.max_pending_requests_hard_limit": 4096,
    # A host that lost its power says no goodbye: without these its streams, and what they hold, would stay.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,  # as many as it takes: a stream may wait for hours
}

AWAITS: Final = ", awaited chains"  # the kind of calls that `MAX_AWAITED` bounds, by the host that calls
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler = Callable[[Caller, Any], Any]


class EventsService:
    """Handler of EventsService."""

    def __init__(self, events: EventLog, accesses: AccessLog, service: CacheService) -> None:
        self._events = events
        self._accesses = accesses
        self._service = service
        self._watches = Shares(MAX_WATCHES)

    async def watch(
        self, caller: Caller, request: events_pb2.WatchRequest
    ) -> AsyncIterator[events_pb2.WatchResponse]:
        """Yield block events after `after_sequence`, of one namespace or of all that the caller may watch.

        The first message says that watching has begun. Raises BusyError beyond the caller's share of streams.
        """
        is_admin = caller.principal.is_admin
        watcher = "administrators" if is_admin else caller.principal.lane
        if not self._watches.take(watcher, 1):
            held = self._watches.held(watcher)
            raise error(
                "TOO_MANY_IN_FLIGHT", f"{held} streams of events are watched for the tenant; end some", 1.0
            )
        try:
            log = self._events if is_admin else self._events.of_domain(caller.tenancy.domain)
            async with contextlib.aclosing(self._watch(log, request, is_admin)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._watches.give(watcher, 1)

    async def _watch(
        self, log: EventLog, request: events_pb2.WatchRequest, is_admin: bool
    ) -> AsyncGenerator[events_pb2.WatchResponse, None]:
        newest, watching = log.last_sequence, log.watch(request.after_sequence)
        yield events_pb2.WatchResponse(sequence=newest, epoch=self._service.facts.epoch)
        async for event in watching:
            if request.namespace_id in (0, event.namespace_id):
                yield events_pb2.WatchResponse(
                    sequence=event.sequence,
                    epoch=self._service.facts.epoch,
                    kind=events_pb2.BlockEventKind.ValueType(event.change.value),
                    namespace_id=event.namespace_id,
                    tier=self._service.tiers.number(event.tier),
                    prefix_hashes=event.packed_hashes,
                    reason=event.reason if is_admin else "",
                    tiers=self._tiers_now(event),
                )

    def _tiers_now(self, event: BlockEvent) -> bytes:
        """Return for each block of an event the number of the tier that it is read from now, or 0."""
        catalog = self._service.planner.catalog
        namespace = catalog.namespaces.get(event.namespace_id)
        if namespace is None:
            return bytes(len(event.prefix_hashes))
        rows = namespace.rows.find(event.prefix_hashes)
        tiers = [None if row == NO_ROW else catalog.tier_of(row) for row in rows]
        return bytes(0 if tier is None else self._service.tiers.number(tier) for tier in tiers)

    async def watch_accesses(
        self, caller: Caller, request: events_pb2.WatchAccessesRequest
    ) -> AsyncIterator[events_pb2.WatchAccessesResponse]:
        """Yield requests of clients as they happen, after one empty message that says it began."""
        watcher = self._accesses.join()
        try:
            yield events_pb2.WatchAccessesResponse()  # a reader of this message misses nothing from here on
            async for access in watcher:
                yield self._wire_access(access)
        finally:
            self._accesses.leave(watcher)

    def _wire_access(self, access: BlockAccess) -> events_pb2.WatchAccessesResponse:
        message = events_pb2.WatchAccessesResponse(
            at_s=access.at_s,
            kind=events_pb2.AccessKind.ValueType(access.kind.value),
            namespace_id=access.namespace_id,
            session_id=access.session_id,
            parent_hash=access.parent_hash,
            prefix_hashes=b"".join(access.prefix_hashes),
            num_found=access.num_found,
            num_lost=access.num_lost,
        )
        namespace = self._service.planner.catalog.namespaces.get(access.namespace_id)
        if namespace is not None:
            geometry = namespace.identity.geometry
            message.block_tokens, message.block_bytes = geometry.block_tokens, geometry.block_bytes
        if access.word is not None:
            urgency, num_decoded, back_in_s, ended = access.word
            message.session.urgency = urgency_to_wire(urgency)
            message.session.num_decoded_tokens = num_decoded
            message.session.back_in_ms = round(back_in_s * 1000)
            message.session.ended = ended
        return message


class GrpcServer:
    """One grpc.aio server for all services at `addresses`.

    `handlers`: for each service of the .proto the objects with a method for each of its calls.
    """

    def __init__(
        self,
        handlers: Mapping[str, Sequence[object]],
        listeners: Listeners,
        rates: CallRates,
        call_latencies: CallLatencies,
        clock: Callable[[], float],
        *,
        with_reflection: bool,
    ) -> None:
        self._clock = clock
        self._call_latencies = call_latencies
        self._listeners = listeners
        self._rates = rates
        self._server = grpc.aio.server(options=list(OPTIONS.items()))
        self._admission = Admission()
        self._probe = QueueProbe(self._server, self._admission)
        self._calls = Shares(MAX_CALLS)
        self._open_streams = Shares(MAX_OPEN_STREAMS)
        self._awaited = Shares(MAX_AWAITED)
        #: By task: what says why a stream of answers may not go on, if it may not; and those that end for it.
        self._streams: dict[asyncio.Task[Any], Callable[[], ApplianceError | None]] = {}
        self._revoked: dict[asyncio.Task[Any], ApplianceError] = {}
        for descriptor in SERVICES:
            self._serve(descriptor, handlers[descriptor.name])
        self._is_leaving = False
        self._health = health.aio.HealthServicer()
        self._serve_openly(health_pb2.DESCRIPTOR.services_by_name["Health"], self._health)
        if with_reflection:
            names = [descriptor.full_name for descriptor in SERVICES]
            shown = reflection.aio.ReflectionServicer([*names, health.SERVICE_NAME, reflection.SERVICE_NAME])
            self._serve_openly(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"], shown)

    @property
    def addresses(self) -> list[str]:
        """Addresses to call, with ports that the kernel chose."""
        return self._listeners.addresses

    async def start(self) -> None:
        """Listen at every address and report SERVING. Raises StartError."""
        self._listeners.add_to(self._server)
        await self._server.start()
        self._listeners.open()
        if (inner := self._listeners.inner_address) is not None:
            await self._probe.start(inner)
        for name in ("", *(descriptor.full_name for descriptor in SERVICES)):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop_serving(self) -> None:
        """Report every service as NOT_SERVING from now on; calls are still answered.

        The process as such ("") stays SERVING: a supervisor that restarts it would cut off the drain.
        """
        self._is_leaving = True
        for descriptor in SERVICES:
            await self._health.set(descriptor.full_name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def report(self, is_ready: bool) -> None:
        """Set the health of KVCacheService. AdminService and EventsService are served either way."""
        if not self._is_leaving:
            answers = health_pb2.HealthCheckResponse
            status = answers.SERVING if is_ready else answers.NOT_SERVING
            await self._health.set(SERVICES[0].full_name, status)

    def end_revoked(self) -> None:
        """End the streams of callers that are others now, or have no right to them any more."""
        for task, refusal in self._streams.items():
            if (failure := refusal()) is not None:
                self._revoked[task] = failure
                task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Wait `grace_s` seconds for calls in progress, then cancel them."""
        await self._probe.stop()
        await self._server.stop(grace_s)
        self._listeners.close()

    # ------------------------------------------------------------------------------------- private

    def _serve(self, descriptor: ServiceDescriptor, handlers: Sequence[object]) -> None:
        methods = {}
        for method in descriptor.methods:
            name = snake_case(method.name)
            found = [getattr(handler, name) for handler in handlers if hasattr(handler, name)]
            assert len(found) == 1, f"{method.full_name} has {len(found)} handlers"
            methods[method.name] = self._adapt(method, found[0])
        generic = grpc.method_handlers_generic_handler(descriptor.full_name, methods)
        self._server.add_generic_rpc_handlers((generic,))

    def _serve_openly(self, descriptor: ServiceDescriptor, servicer: Any) -> None:
        """Serve a service of gRPC's own. Every connection is answered, and streams count, by caller.

        A health check costs as little as its refusal would, so none is refused: a user that makes too many
        of them is read from no longer.
        """
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in descriptor.methods:
            takes, gives = _codecs(method)
            handler = getattr(servicer, method.name)
            serve, wrap = grpc.unary_stream_rpc_method_handler, self._bounded
            if method.client_streaming:
                serve = grpc.stream_stream_rpc_method_handler
            elif not method.server_streaming:
                serve, wrap = grpc.unary_unary_rpc_method_handler, self._charged
            methods[method.name] = serve(wrap(handler), takes, gives)
        generic = grpc.method_handlers_generic_handler(descriptor.full_name, methods)
        self._server.add_generic_rpc_handlers((generic,))

    def _charged(self, handler: Handler) -> Handler:
        """Wrap a handler of unary calls that no admission bounds."""

        async def unary(request: Any, context: Context) -> Any:
            self._listeners.charge(context)
            return await handler(request, context)

        return unary

    def _bounded(self, handler: Handler) -> Handler:
        """Wrap a handler of streams: their number is bounded, and each caller has a share."""

        async def stream(request: Any, context: Context) -> None:
            self._listeners.charge(context)
            caller = self._listeners.peer_of(context)
            if not self._open_streams.take(caller, 1):
                message = f"{caller} has too many streams of health and reflection; end some"
                await _abort(context, error("TOO_MANY_IN_FLIGHT", message, retry_after_s=1.0))
            try:
                answers = handler(request, context)
                if inspect.isawaitable(answers):
                    await answers  # writes its answers itself
                    return
                async for answer in answers:
                    await context.write(answer)
            finally:
                self._open_streams.give(caller, 1)

        return stream

    def _adapt(self, method: MethodDescriptor, handler: Handler) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a handler: caller in, errors out.

        Every method is served as one that takes a stream, also one with a single request: gRPC then calls the
        handler before it has read the request, and most of the cost of a refused call is saved.
        """
        right = right_of(method.containing_service.name, method.name)
        takes, gives = _codecs(method)
        kind = AWAITS if method.name == "AwaitBlocks" else ", streams"

        async def unary(requests: Any, context: Context) -> Any:
            try:
                with self._admitted(context, right) as caller:
                    request = requests if method.client_streaming else takes(await _message(context))
                    answer = handler(caller, request)
                    return await answer if inspect.isawaitable(answer) else answer
            except Exception as problem:
                failure = _known(problem, method)
            await _abort(context, failure)

        async def stream(requests: Any, context: Context) -> AsyncIterator[Any]:
            task = asyncio.current_task()
            assert task is not None
            try:
                with self._admitted(context, right, kind) as caller:
                    refusal = partial(self._listeners.revocation, context, right, caller.principal)
                    self._streams[task] = refusal
                    answers = handler(caller, takes(await _message(context)))
                    async with contextlib.aclosing(answers):
                        async for answer in answers:
                            yield answer
                return
            except asyncio.CancelledError:
                if task not in self._revoked:
                    raise
                task.uncancel()
                failure = self._revoked[task]
            except Exception as problem:
                failure = _known(problem, method)
            finally:
                self._streams.pop(task, None)
                self._revoked.pop(task, None)
            await _abort(context, failure)

        if method.server_streaming:
            streamed = self._call_latencies.timed_stream(method.name, stream)
            return grpc.stream_stream_rpc_method_handler(streamed, None, gives)
        timed = self._call_latencies.timed(method.name, unary)
        return grpc.stream_unary_rpc_method_handler(timed, None, gives)

    @contextlib.contextmanager
    def _admitted(self, context: Context, right: Right, kind: str = "") -> Iterator[Caller]:
        """Yield the caller of a call, which is in progress meanwhile, beside others of its `kind`.

        Raises AccessError without an identity, or without the right; BusyError under overload, which an
        administrator's calls are not subject to, or when the caller has too many calls of the kind.
        """
        try:
            principal = self._listeners.principal_of(context)
            right.require(principal)
        except AccessError:
            self._listeners.charge(context)
            raise
        remaining_s, lane, now_ns = context.time_remaining(), right.lane(principal), monotonic_ns()
        if not right.is_administrative(principal):
            self._admission.admit(
                lane, now_ns + (math.inf if remaining_s is None else remaining_s * 1e9), now_ns
            )
            self._probe.send_if_due()
        calls, holder = self._calls, lane + kind
        if kind == AWAITS:
            calls, holder = self._awaited, self._listeners.peer_of(context)
        if not calls.take(holder, 1):
            message = f"{lane}{kind}: too many calls in progress; end some"
            raise self._admission.refusal(lane, message, now_ns)
        try:
            deadline_at = math.inf if remaining_s is None else self._clock() + remaining_s
            caller = Caller(None, deadline_at, principal)
            if right.is_limited and not right.is_administrative(principal):
                self._rates.charge(caller, self._clock())
            yield caller
        finally:
            calls.give(holder, 1)


def snake_case(name: str) -> str:
    """Return the handler's name of an rpc: `GetServerInfo` -> `get_server_info`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _codecs(method: MethodDescriptor) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    """Return what decodes the requests of a method, and what encodes its answers."""
    parse = message_factory.GetMessageClass(method.input_type).FromString
    gives = message_factory.GetMessageClass(method.output_type).SerializeToString
    return lambda request: parse(checks.encoded(method.name, request)), gives


async def _message(context: Context) -> bytes:
    """Return the encoded request of a call that has one. Raises CallerError where it does not come."""
    try:
        async with asyncio.timeout(IDLE_S):
            message = await context.read()
    except TimeoutError:
        raise error("BAD_REQUEST", f"no request within {IDLE_S:g} s; send it with the call") from None
    if not isinstance(message, bytes):
        raise error("BAD_REQUEST", "the call ended without a request; send one")
    return message


def _known(problem: Exception, method: MethodDescriptor) -> ApplianceError:
    """Return `problem` where it is an error of the table, else the error BUG."""
    if isinstance(problem, ApplianceError):
        return problem
    if isinstance(problem, DecodeError):
        return error("BAD_REQUEST", f"{method.name}: undecodable message")
    log.error("%s failed", method.full_name, exc_info=problem)
    return error("BUG", f"{method.name} failed inside the daemon; its log says why")


async def _abort(context: Context, problem: ApplianceError) -> None:
    await context.abort(REASONS[problem.reason].code, problem.message, trailing_metadata(problem))
