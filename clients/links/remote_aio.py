"""AsyncGrpcLink: the twin of remote.py on an event loop."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ...v1 import kvcache_pb2 as pb
from ...v1.channels import open_aio_channel
from ..errors import CONNECTION_LOST, Unavailable, broken_answer
from ..operations.base import ClientSettings
from ..operations.effects import Answer
from . import remote

_abandoned: list["AsyncGrpcLink"] = []  # of the parent process; closing one here would wait for its loop


class AsyncGrpcLink(remote.GrpcCalls):
    """A grpc.aio channel and the client opened on it."""

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings, partial(remote.connect, open_=open_aio_channel))
        self._process = os.getpid()
        self._posts: set[asyncio.Future[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def attach(self, settings: ClientSettings) -> None:
        """Open the client. Raises Unavailable."""
        timeout_s = settings.timeout.connect_s
        try:
            info = _read(await self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s))
            client = _read(await self._stub.OpenClient(remote.open_request(settings), timeout=timeout_s))
        except grpc.RpcError as error:
            raise await asyncio.to_thread(remote.connect_problem, error, settings) from None
        self.attachment = remote.remote_attachment(info, client)
        if period_s := remote.keep_alive_period_s(client):
            self._keeper = asyncio.create_task(self._keep_alive(period_s))

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        """Start a call; return its ticket."""
        return super().send(call, _in_a_thread(request) if call == "Put" else request, timeout_s)

    async def receive(self, ticket: int) -> Answer:
        """Wait for the next message of a call. Raises KvtierError."""
        name, call = self._calls[ticket]
        try:
            if name not in remote.STREAMS:
                del self._calls[ticket]
                return Answer(_read(await call))
            message = await call.read()
            if message is grpc.aio.EOF:
                raise Unavailable("the stream ended too early", reason=CONNECTION_LOST)
            _read(message)
            if message.last:
                del self._calls[ticket]
                while await call.read() is not grpc.aio.EOF:
                    pass  # to its end: a call dropped earlier would count as cancelled
            return Answer(message)
        except grpc.RpcError as error:
            self._calls.pop(ticket, None)
            raise remote.problem_of(error) from None
        except asyncio.CancelledError:
            self._calls.pop(ticket, None)
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Unavailable("another task has ended this call", reason=CONNECTION_LOST) from None

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        """Send a request and read no answer."""
        posted = asyncio.ensure_future(self._deliver(call, request))
        self._posts.add(posted)
        posted.add_done_callback(self._posts.discard)

    async def close(self) -> None:
        """Close the client at the daemon, then the channel. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        if self._posts:
            await asyncio.wait(self._posts)
        if hasattr(self, "attachment"):
            request = pb.CloseClientRequest(client_id=self.attachment.client_id)
            with suppress(grpc.RpcError):  # it is gone; its TTL ends what we held
                await self._stub.CloseClient(request, timeout=self._grace_s)
        for channel in (*self._channels, *self._waiting.channels):
            await channel.close()

    def abandon(self) -> None:
        """Leave the channels to the parent process, or, where the event loop has ended, to the collector."""
        self.closed = True
        if os.getpid() != self._process:
            _abandoned.append(self)

    async def _deliver(self, call: str, request: Any) -> None:
        with suppress(grpc.RpcError):  # best effort, as for every post
            await getattr(self._stub, call)(request, timeout=self._grace_s)

    async def _keep_alive(self, period_s: float) -> None:
        request = pb.KeepAliveRequest(client_id=self.attachment.client_id)
        while True:
            await asyncio.sleep(period_s)
            with suppress(grpc.RpcError):  # the next call finds out and says so
                await self._stub.KeepAlive(request, timeout=period_s)


def _read(message: Any) -> Any:
    """Return an answer. Raises Unavailable for one that could not be read: grpc.aio makes None of it."""
    if message is None:
        raise broken_answer("bytes that are no message")
    return message


async def _in_a_thread(messages: Iterable[Any]) -> AsyncIterator[Any]:
    """Yield the messages of a put. Making one may encode for a moment, while the loop goes on."""
    iterator = iter(messages)
    while (message := await asyncio.to_thread(next, iterator, None)) is not None:
        yield message
