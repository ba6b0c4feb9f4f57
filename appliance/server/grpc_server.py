"""The gRPC transport: every method of every service, found by its name, in one loop.

Handlers (cache_service.py, intent_service.py, streams.py, admin_service.py) know nothing of gRPC; they are
bound to the service descriptors here, and the caller's identity (listeners.py) is checked against the right
that the call needs (rights.py).
A method of the .proto without a handler fails at start, not at the first call. Generated servicer
classes were rejected: thirty methods of the same two lines.
"""

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...v1 import admin_pb2, events_pb2, kvcache_pb2
from ...v1.conversions import urgency_to_wire
from ...v1.local import MAX_PAYLOAD_BYTES
from ..errors import REASONS, ApplianceError, error, trailing_metadata
from ..event_log import EventLog
from ..security.callers import Caller, CallRates
from ..security.rights import Right, right_of
from .access_log import AccessLog, BlockAccess
from .cache_service import CacheService
from .call_latency import CallLatencies
from .listeners import Listeners

log = logging.getLogger(__name__)

#: gRPC calls in progress, streams of watchers included; further calls get RESOURCE_EXHAUSTED at once. As many
#: as clients by default: a client makes one call at a time, and the local channel does not count.
MAX_CONCURRENT_RPCS = 256
HEADROOM_BYTES = 64 << 10  # a message may be a payload's limit and its own framing
SERVICES = (
    kvcache_pb2.DESCRIPTOR.services_by_name["KVCacheService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    events_pb2.DESCRIPTOR.services_by_name["EventsService"],
)

OPTIONS: Final = {
    "grpc.max_receive_message_length": MAX_PAYLOAD_BYTES + HEADROOM_BYTES,
    "grpc.max_send_message_length": MAX_PAYLOAD_BYTES + HEADROOM_BYTES,
    "grpc.so_reuseport": 0,
    # A host that lost its power says no goodbye: without these its streams, and what they hold, would stay.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,  # as many as it takes: a stream may wait for hours
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler = Callable[[Caller, Any], Any]


class EventsService:
    """Handler of EventsService."""

    def __init__(self, events: EventLog, accesses: AccessLog, service: CacheService) -> None:
        self._events = events
        self._accesses = accesses
        self._service = service

    async def watch(
        self, caller: Caller, request: events_pb2.WatchRequest
    ) -> AsyncIterator[events_pb2.WatchResponse]:
        """Yield block events after `after_sequence`, of one namespace or all."""
        async for event in self._events.watch(request.after_sequence):
            if request.namespace_id in (0, event.namespace_id):
                yield events_pb2.WatchResponse(
                    sequence=event.sequence,
                    epoch=self._service.facts.epoch,
                    kind=events_pb2.BlockEventKind.ValueType(event.change.value),
                    namespace_id=event.namespace_id,
                    tier=self._service.tiers.number(event.tier),
                    prefix_hashes=b"".join(event.prefix_hashes),
                    reason=event.reason,
                )

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
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
            options=list(OPTIONS.items()),
        )
        for descriptor in SERVICES:
            self._serve(descriptor, handlers[descriptor.name])
        self._is_leaving = False
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if with_reflection:
            names = [descriptor.full_name for descriptor in SERVICES]
            reflection.enable_server_reflection(
                [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
            )

    @property
    def addresses(self) -> list[str]:
        """Addresses to call, with ports that the kernel chose."""
        return self._listeners.addresses

    async def start(self) -> None:
        """Listen at every address and report SERVING. Raises StartError."""
        self._listeners.add_to(self._server)
        await self._server.start()
        self._listeners.open()
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

    async def stop(self, grace_s: float) -> None:
        """Wait `grace_s` seconds for calls in progress, then cancel them."""
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

    def _adapt(self, method: MethodDescriptor, handler: Handler) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a handler: caller in, errors out."""
        right = right_of(method.containing_service.name, method.name)

        async def unary(request: Any, context: Context) -> Any:
            try:
                answer = handler(self._caller(context, right), request)
                return await answer if inspect.isawaitable(answer) else answer
            except Exception as problem:
                failure = _known(problem, method)
            await _abort(context, failure)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                answers = handler(self._caller(context, right), request)
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        yield answer
                return
            except Exception as problem:
                failure = _known(problem, method)
            await _abort(context, failure)

        takes = message_factory.GetMessageClass(method.input_type).FromString
        gives = message_factory.GetMessageClass(method.output_type).SerializeToString
        if method.server_streaming:
            streamed = self._call_latencies.timed_stream(method.name, stream)
            return grpc.unary_stream_rpc_method_handler(streamed, takes, gives)
        timed = self._call_latencies.timed(method.name, unary)
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(timed, takes, gives)
        return grpc.unary_unary_rpc_method_handler(timed, takes, gives)

    def _caller(self, context: Context, right: Right) -> Caller:
        """Return the caller of a request. Raises AccessError without an identity, or without the right."""
        principal = self._listeners.principal_of(context)
        right.require(principal)
        remaining_s = context.time_remaining()
        deadline_at = float("inf") if remaining_s is None else self._clock() + remaining_s
        caller = Caller(None, deadline_at, principal)
        if right.is_limited:
            self._rates.charge(caller, self._clock())
        return caller


def snake_case(name: str) -> str:
    """Return the handler's name of an rpc: `GetServerInfo` -> `get_server_info`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _known(problem: Exception, method: MethodDescriptor) -> ApplianceError:
    """Return `problem` where it is an error of the table, else the error BUG."""
    if isinstance(problem, ApplianceError):
        return problem
    log.error("%s failed", method.full_name, exc_info=problem)
    return error("BUG", f"{method.name} failed inside the daemon; its log says why")


async def _abort(context: Context, problem: ApplianceError) -> None:
    await context.abort(REASONS[problem.reason].code, problem.message, trailing_metadata(problem))
