"""GrpcLink: the way for callers on another host, or without shared memory. Correct and portable, not fast.

The client is opened by OpenClient and kept alive by a thread, because over gRPC no connection says when its
owner died. Calls are started as futures and streams as iterators, so that sending and receiving are
separate steps here too. Acquires, gets and puts may wait, and a connection carries only so many calls at a
time: they have connections of their own, so that releases, lookups and the sign of life are never behind
them. Puts have one, so that no more of them send at a time than the daemon has buffers for; acquires and
gets, which may wait for blocks to come, have more where they fill one.
"""

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc

from ...v1 import kvcache_pb2 as pb
from ...v1.channels import MAX_CALLS, open_channel
from ...v1.diagnosis import diagnose_call
from ...v1.kvcache_pb2_grpc import KVCacheServiceStub
from ..errors import (
    BAD_CREDENTIALS,
    CONNECTION_LOST,
    DETAIL_KEY,
    InvalidRequest,
    KvtierError,
    Unavailable,
    from_diagnosis,
    from_status,
)
from ..memory.extents import ExtentTable
from ..operations.answers import announced, server_info
from ..operations.base import ClientSettings
from ..operations.effects import Answer, Attachment
from ..options import service_config
from .tracing import trace_metadata

STREAMS = ("Acquire", "Get")
MAX_CONNECTIONS = 4  # of a client's acquires and gets; behind so many calls further ones wait
_MAX_MESSAGE_BYTES = 16 << 20
_MIN_PERIOD_S, _MAX_PERIOD_S = 0.05, 3600.0  # of keep-alives, whatever TTL the daemon names
_abandoned: list[grpc.Channel] = []  # of the parent process; closing one here would wait for its threads


def channel_options(settings: ClientSettings) -> list[tuple[str, Any]]:
    """Return the options of a gRPC channel. It shares its connection with no other one."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", service_config(settings.retry)),
        ("grpc.enable_retries", 1),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def connect(
    settings: ClientSettings,
    environment: Mapping[str, str] = os.environ,
    open_: Callable[..., Any] = open_channel,
) -> Any:
    """Return a channel of grpc, or of what `open_` opens; the environment says what to show.

    Raises InvalidRequest."""
    try:
        return open_(settings.target, channel_options(settings), environment)
    except ValueError as problem:
        raise InvalidRequest(str(problem), reason=BAD_CREDENTIALS) from None


def problem_of(error: grpc.RpcError) -> KvtierError:
    """Return the client's exception for a gRPC one."""
    code: int = error.code().value[0]
    trailing: Any = error.trailing_metadata() or ()  # pairs; of different types in grpc and grpc.aio
    return from_status(code, error.details() or "", dict(tuple(trailing)))


def connect_problem(error: grpc.RpcError, settings: ClientSettings) -> KvtierError:
    """Return the client's exception for a gRPC one that ended the making of a connection.

    What gRPC calls an outage is looked at once more (v1/diagnosis.py), for at most the time that connecting
    may take.
    """
    trailing: Any = error.trailing_metadata() or ()
    code: int = error.code().value[0]
    if DETAIL_KEY not in dict(tuple(trailing)):
        timeout_s = settings.timeout.connect_s / 2
        found = diagnose_call(code, error.details() or "", settings.target, os.environ, timeout_s)
        if found is not None:
            return from_diagnosis(found)
    return problem_of(error)


def remote_attachment(info: pb.GetServerInfoResponse, client: pb.OpenClientResponse) -> Attachment:
    """Return what a gRPC connection is worth: no extents, no staging."""
    server, tiers = server_info(info, "grpc"), announced(info)
    return Attachment(server, client.client_id, False, ExtentTable(0), tiers=tiers)


def open_request(settings: ClientSettings) -> pb.OpenClientRequest:
    """Return the message that makes this client known."""
    return pb.OpenClientRequest(request_id=uuid.uuid4().hex, name=settings.name)


def keep_alive_period_s(client: pb.OpenClientResponse) -> float:
    """Return how often the client says that it lives, three times in its TTL; 0 where it has none."""
    return min(max(client.ttl_ms / 3000, _MIN_PERIOD_S), _MAX_PERIOD_S) if client.ttl_ms else 0.0


class WaitingCalls:
    """Acquires and gets, and their connections, each made when all others carry MAX_CALLS.

    The connection with the fewest calls takes the next one."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.channels: list[Any] = []
        self._connect = connect
        self._stubs: list[tuple[KVCacheServiceStub, set[Any]]] = []  # and the calls that it has in progress

    def begin(self, name: str, request: Any, **options: Any) -> Any:
        """Start a call. Raises InvalidRequest."""
        if len(self._stubs) < MAX_CONNECTIONS and all(len(calls) >= MAX_CALLS for _, calls in self._stubs):
            self.channels.append(self._connect())
            self._stubs.append((KVCacheServiceStub(self.channels[-1]), set()))
        stub, in_progress = min(self._stubs, key=lambda one: len(one[1]))
        call = getattr(stub, name)(request, **options)
        in_progress.add(call)
        call.add_done_callback(in_progress.discard)
        return call


class GrpcCalls:
    """The connections of one client over gRPC, and its calls in progress, by ticket.

    `connect` makes a channel of grpc or grpc.aio, with what an environment says to show."""

    attachment: Attachment

    def __init__(self, settings: ClientSettings, connect: Callable[..., Any]) -> None:
        self.closed = False
        self._grace_s = settings.timeout.grace_s
        self._tickets = itertools.count(1)
        self._calls: dict[int, Any] = {}
        self._channels = connect(settings), connect(settings)  # each connects with its first call
        self._stub: Any
        self._stub, self._put_stub = map(KVCacheServiceStub, self._channels)
        # Later connections show what the first one does: to the daemon the client is of one caller.
        self._waiting = WaitingCalls(partial(connect, settings, dict(os.environ)))

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        """Start a call; return its ticket."""
        ticket = next(self._tickets)
        options = {"timeout": timeout_s + self._grace_s, "metadata": trace_metadata()}
        if call in STREAMS:
            begun = self._waiting.begin(call, request, **options)
        else:
            begun = self._begin(
                getattr(self._put_stub if call == "Put" else self._stub, call), request, options
            )
        self._calls[ticket] = call, begun
        return ticket

    def _begin(self, method: Any, request: Any, options: dict[str, Any]) -> Any:
        """Start a call with one answer."""
        return method(request, **options)

    def forget(self, ticket: int) -> None:
        """Cancel a call."""
        _, call = self._calls.pop(ticket, (None, None))
        if call is not None:
            call.cancel()


class GrpcLink(GrpcCalls):
    """A gRPC channel and the client opened on it. Not thread-safe: Client has the lock."""

    def __init__(self, settings: ClientSettings) -> None:
        """Connect and open. Raises Unavailable."""
        super().__init__(settings, connect)
        self._stop = threading.Event()
        timeout_s = settings.timeout.connect_s
        try:
            info = self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)
            client = self._stub.OpenClient(open_request(settings), timeout=timeout_s)
        except grpc.RpcError as error:
            self.close()
            raise connect_problem(error, settings) from None
        except BaseException:
            self.close()
            raise
        self.attachment = remote_attachment(info, client)
        if period_s := keep_alive_period_s(client):
            threading.Thread(
                target=self._keep_alive, args=(period_s,), name="kvtier-keep-alive", daemon=True
            ).start()

    def _begin(self, method: Any, request: Any, options: dict[str, Any]) -> Any:
        return method.future(request, **options)

    def receive(self, ticket: int) -> Answer:
        """Wait for the next message of a call. Raises KvtierError."""
        name, call = self._calls[ticket]
        try:
            if name not in STREAMS:
                del self._calls[ticket]
                return Answer(call.result())
            message = next(call)
            if message.last:
                del self._calls[ticket]
                for _ in call:  # to its end: a call dropped earlier would count as cancelled
                    pass
            return Answer(message)
        except StopIteration:
            self._calls.pop(ticket, None)
            raise Unavailable("the stream ended too early", reason=CONNECTION_LOST) from None
        except grpc.RpcError as error:
            self._calls.pop(ticket, None)
            raise problem_of(error) from None

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        """Send a request and read no answer."""
        getattr(self._stub, call).future(
            request, timeout=self._grace_s
        )  # best effort: the result is not read

    def close(self) -> None:
        """Close the client at the daemon, then the channel. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._stop.set()
        if hasattr(self, "attachment"):
            request = pb.CloseClientRequest(client_id=self.attachment.client_id)
            try:
                self._stub.CloseClient(request, timeout=self._grace_s)
            except grpc.RpcError:
                self._stop.set()  # it is gone; its TTL ends what we held
        for channel in (*self._channels, *self._waiting.channels):
            channel.close()

    def abandon(self) -> None:
        """Leave the channel to the parent process."""
        self.closed = True
        self._stop.set()
        _abandoned.extend((*self._channels, *self._waiting.channels))

    def _keep_alive(self, period_s: float) -> None:
        request = pb.KeepAliveRequest(client_id=self.attachment.client_id)
        while not self._stop.wait(period_s):
            try:
                self._stub.KeepAlive(request, timeout=period_s)
            except grpc.RpcError:
                continue  # the next call finds out and says so


def local_socket_path(settings: ClientSettings) -> str:
    """Ask the daemon where its local channel is; empty when it has none. Raises Unavailable."""
    with connect(settings) as channel:
        try:
            stub = KVCacheServiceStub(channel)
            info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=settings.timeout.connect_s)
        except grpc.RpcError as error:
            raise connect_problem(error, settings) from None
        return str(info.local_socket_path)
