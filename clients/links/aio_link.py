"""The local channel for AsyncClient: the twin of link.py.

The socket is read in a loop callback with recvmsg, because asyncio's streams cannot carry file
descriptors. Frames are handed to the socket or to a buffer in one step that cannot be cancelled: half a
frame would spoil the connection.
"""

import asyncio
import socket
from functools import partial
from typing import Any, Protocol

from ...v1.diagnosis import explain_socket
from ...v1.local_pb2 import AttachRequest
from ..errors import CONNECTION_LOST, NotFound, Unavailable, from_diagnosis
from ..operations.base import ClientSettings
from ..operations.effects import Answer, Attachment
from .connect import local_path
from .link import ANCILLARY_BYTES, CLOEXEC, RECEIVE_BYTES, Connection, descriptors_in, has_ended, lost
from .local import CLOSED, LocalProtocol, attachment_of


class AsyncLink(Connection, Protocol):
    """A connection for an event loop: `attach` it first."""

    async def attach(self, settings: ClientSettings) -> None:
        """Connect, and learn what the connection offers. Raises Unavailable."""
        ...

    async def receive(self, ticket: int) -> Answer:
        """Wait for the next message of a call. Raises KvtierError."""
        ...

    async def close(self) -> None:
        """End the connection; the daemon gives back what the client held. Idempotent."""
        ...


async def open_link(settings: ClientSettings) -> AsyncLink:
    """Connect. Raises Unavailable when no daemon listens."""
    path = await asyncio.to_thread(local_path, settings)
    link: AsyncLink
    if path is None:
        from .remote_aio import AsyncGrpcLink

        link = AsyncGrpcLink(settings)
    else:
        link = AsyncLocalLink(path, settings)
    try:
        await link.attach(settings)
    except BaseException:
        await link.close()
        raise
    return link


class AsyncLocalLink:
    """The local channel on an event loop."""

    attachment: Attachment

    def __init__(self, path: str, settings: ClientSettings) -> None:
        self.closed = False
        self._path = path
        self._grace_s = settings.timeout.grace_s
        self._protocol = LocalProtocol()
        self._deadlines: dict[int, float] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._unsent = bytearray()
        self._problem: Unavailable | None = None
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    async def attach(self, settings: ClientSettings) -> None:
        """Connect and map what the daemon gives. Raises Unavailable."""
        try:
            async with asyncio.timeout(settings.timeout.connect_s):
                await self._loop.sock_connect(self._socket, self._path)
        except OSError as problem:
            raise from_diagnosis(explain_socket(self._path, problem)) from None
        self._loop.add_reader(self._socket, self._on_readable)
        request = AttachRequest(
            name=settings.name, domain=settings.domain, staging_bytes=settings.limits.staging_bytes
        )
        answer = await self.receive(self.send("Attach", request, settings.timeout.connect_s))
        self.attachment = await asyncio.to_thread(attachment_of, answer)
        self.attachment.is_lost = partial(has_ended, self._socket)

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        """Start a call; return its ticket."""
        number, data = self._protocol.request(call, request)
        self._deadlines[number] = self._loop.time() + timeout_s + self._grace_s
        self._transmit(data)
        return number

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        """Send a request without an answer; a hint only where that needs no waiting."""
        if not (is_hint and self._unsent):
            self._transmit(self._protocol.request(call, request, no_reply=True)[1])

    async def receive(self, ticket: int) -> Answer:
        """Wait for the next message of a call. Raises KvtierError."""
        try:
            while (answer := self._protocol.take(ticket)) is None:
                if self._problem is not None:
                    raise self._problem
                if not self._protocol.listens(ticket):
                    raise NotFound("another task has ended this call", reason="GIVEN_UP")
                await self._arrival(ticket)
            return answer
        finally:
            if not self._protocol.listens(ticket):
                self._deadlines.pop(ticket, None)

    def forget(self, ticket: int) -> None:
        """Stop listening to a call."""
        self._protocol.forget(ticket)
        self._deadlines.pop(ticket, None)
        self._wake(self._waiting.get(ticket))
        self._give_back()

    async def close(self) -> None:
        """End the connection. Idempotent."""
        self._break(Unavailable("the client was closed during the call", reason=CONNECTION_LOST))

    def abandon(self) -> None:
        """Close this process's end and send nothing."""
        self.closed = True  # the loop is the parent's: what it watches must not change
        self._socket.close()
        self._protocol.close()

    async def _arrival(self, ticket: int) -> None:
        """Wait until something arrived for a call. Closes the connection when its time is over."""
        future = self._waiting[ticket] = self._loop.create_future()
        try:
            async with asyncio.timeout_at(self._deadlines[ticket]):
                await future
        except TimeoutError:
            self._break(lost(TimeoutError()))
        finally:
            self._waiting.pop(ticket, None)

    def _transmit(self, data: bytes) -> None:
        if self._problem is not None:
            raise self._problem
        self._unsent += data
        if len(self._unsent) == len(data):
            self._on_writable()

    def _on_writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
            del self._unsent[:sent]
        except BlockingIOError:
            pass  # the loop says when there is room again
        except OSError as problem:
            self._break(lost(problem))
            return
        if self._unsent:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES, CLOEXEC)
            if not data:
                raise Unavailable(CLOSED, reason=CONNECTION_LOST)
            self._protocol.feed(data, descriptors_in(ancillary))
        except BlockingIOError:
            return
        except OSError as problem:
            self._break(lost(problem))
        except Unavailable as problem:
            self._break(problem)
        for ticket, future in self._waiting.items():
            if self._protocol.has_answer(ticket):
                self._wake(future)
        self._give_back()

    @staticmethod
    def _wake(future: "asyncio.Future[None] | None") -> None:
        if future is not None and not future.done():
            future.set_result(None)

    def _give_back(self) -> None:
        """Release leases that were granted to calls which had been given up."""
        if not self.closed and (unwanted := self._protocol.unwanted()):
            self._transmit(unwanted)

    def _break(self, problem: Unavailable) -> None:
        """End the connection and wake every waiting call."""
        if self.closed:
            return
        self.closed = True
        self._problem = problem
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._protocol.close()
        for future in self._waiting.values():
            self._wake(future)
