"""HttpServer: the one HTTP listener of the daemon. It answers GET, and on some paths POST of a question.

h11 reads and writes HTTP/1.1 (it is sans-IO, pure Python, and one package); asyncio moves the bytes. aiohttp
and uvicorn with starlette were rejected: eight and five packages for six read-only paths that share the
planner's loop. Everything is bounded: connections (http_connections.py), size of a request, the time it may
take to come, and what a slow reader makes us keep.

Callers have no identity here, unless `refusal` (http_access.py) asks for one. So the listener is for this
host by default, nothing can be changed through it, also not by POST, and a request that names another host
than an address of ours is refused: a page from elsewhere could otherwise read us through the visitor's
browser (DNS rebinding).
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11

from ...v1.addresses import join_port
from ..errors import StartError
from .http_access import OPEN_PATHS
from .http_connections import HttpConnections

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0  # to come whole; also how long an idle connection stays
WRITE_TIMEOUT_S = 10.0  # for a reader to take what was sent
RECEIVE_BYTES = 16 << 10
MAX_BODY_BYTES = 256 << 10  # of a POST: 4,096 names and 1,024 hosts
TEXT = "text/plain; charset=utf-8"
HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    # Nothing but files of ours, and no text that becomes markup: what the page shows was named by strangers.
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'",
    ),
)

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a path answers: a body, or with `stream` parts that come as they happen."""

    body: bytes = b""
    content_type: str = TEXT
    status: int = 200
    stream: AsyncIterator[bytes] | None = field(default=None)
    headers: tuple[tuple[str, str], ...] = ()


Path = Callable[[Query], HttpResponse]
Post = Callable[[bytes], Awaitable[HttpResponse]]


class BadRequest(ValueError):
    """Answered with 400 and its sentence."""


class HttpServer:
    """Serves `paths`, and `posts`, at `host`:`port`.

    `refusal` says of a path and an Authorization header why the request is refused, nothing when it is not;
    `challenge` is what a client gets then. Owned by the event loop.
    """

    def __init__(
        self,
        host: str,
        port: int,
        paths: Mapping[str, Path],
        posts: Mapping[str, Post],
        refusal: Callable[[str, str], str],
        challenge: str,
    ) -> None:
        self.host = host
        self.port = port  # of the listener once it listens: 0 asks for a free one
        self._paths = paths
        self._posts = posts
        self._refusal = refusal
        self._challenge = challenge
        self._server: asyncio.Server | None = None
        self._connections = HttpConnections()

    @property
    def address(self) -> str:
        """The address as text, for people."""
        return f"http://{join_port(self.host, self.port)}"

    async def start(self) -> None:
        """Listen. Raises StartError, naming the setting."""
        try:
            self._server = await asyncio.start_server(self._serve, self.host, self.port)
        except OSError as problem:
            raise StartError(
                f"cannot listen at {self.host}:{self.port} ({os.strerror(problem.errno or 0)}); "
                "change `observe.http`"
            ) from problem
        self.port = self._server.sockets[0].getsockname()[1]

    def close_connections(self) -> None:
        """Close every connection: a reader that comes again is checked again."""
        for task in self._connections.tasks:
            task.cancel()

    async def stop(self) -> None:
        """Close the listener and every connection. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self.close_connections()
        await asyncio.gather(*self._connections.tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    # ------------------------------------------------------------------------------ one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        address = writer.get_extra_info("peername")  # None when the peer has gone already
        self._connections.add(task, address[0] if address else "")
        try:
            await self._talk(h11.Connection(h11.SERVER), reader, writer, task)
        except (TimeoutError, ConnectionError, h11.LocalProtocolError):
            pass  # gone, or too slow: their loss
        except asyncio.CancelledError:
            pass  # closed from here; asyncio of 3.11 would complain about a connection that ended so
        finally:
            self._connections.remove(task)
            writer.close()

    async def _talk(
        self,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[Any],
    ) -> None:
        """Answer requests until one side has had enough."""
        while True:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    request, body = await self._next_request(http, reader, writer)
            except h11.RemoteProtocolError as problem:
                if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await _send(
                        http, writer, _error(problem.error_status_hint or 400, "no HTTP request"), False
                    )
                return
            if request is None:
                return
            is_head = request.method == b"HEAD"
            await _send(http, writer, await self._answer(request, body, task), is_head)
            if http.our_state is h11.MUST_CLOSE or http.their_state is not h11.DONE:
                return
            http.start_next_cycle()
            self._connections.wait_again(task)

    async def _next_request(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[h11.Request | None, bytes]:
        """Return the next request once it came whole, None when the peer has finished. Of a body as much is
        kept as a reader may send, and one byte more."""
        request: h11.Request | None = None
        body = bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                if http.they_are_waiting_for_100_continue:
                    await _write(writer, http.send(h11.InformationalResponse(status_code=100, headers=[])))
                http.receive_data(await reader.read(RECEIVE_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data) and request is not None and self._is_kept(request):
                body += event.data[: MAX_BODY_BYTES + 1 - len(body)]
            elif isinstance(event, h11.EndOfMessage):
                return request, bytes(body)
            elif isinstance(event, h11.ConnectionClosed):
                return None, b""

    def _is_kept(self, request: h11.Request) -> bool:
        """Return whether the body of a request is wanted, of this caller."""
        path = request.target.decode("latin-1").partition("?")[0]
        authorization = dict(request.headers).get(b"authorization", b"").decode("latin-1")
        return path in self._posts and not self._refusal(path, authorization)

    async def _answer(self, request: h11.Request, body: bytes, task: asyncio.Task[Any]) -> HttpResponse:
        headers = dict(request.headers)
        if not is_own_name(headers.get(b"host", b"").decode("latin-1")):
            return _error(421, "name this host by its address or as localhost")
        try:
            parts = urlsplit(request.target.decode("latin-1"))
        except ValueError:
            return _error(400, "the target is no address")
        path, post = self._paths.get(parts.path), self._posts.get(parts.path)
        if path is None and post is None:
            return _error(404, f"nothing here; try {', '.join(sorted([*self._paths, *self._posts]))}")
        if request.method not in ((b"GET", b"HEAD") if path is not None else (b"POST",)):
            return _error(405, "only GET: this is for looking" if path is not None else "only POST, of JSON")
        if reason := self._refusal(parts.path, headers.get(b"authorization", b"").decode("latin-1")):
            answer = _error(401, reason)
            return replace(answer, headers=(("WWW-Authenticate", self._challenge),))
        if parts.path not in OPEN_PATHS and not self._connections.begin_answer(task):
            return replace(
                _error(503, "too many answers are being read; ask again"), headers=(("Retry-After", "1"),)
            )
        if len(body) > MAX_BODY_BYTES:
            return _error(413, f"the body may have {MAX_BODY_BYTES} bytes; name fewer blocks")
        try:
            if path is None:
                assert post is not None
                return await post(body)
            return path({key: values[-1] for key, values in parse_qs(parts.query).items()})
        except BadRequest as problem:
            return _error(400, str(problem))
        except Exception:
            log.exception("http: %s failed", parts.path)
            return _error(500, "failed inside the daemon; its log says why")


def is_own_name(host: str) -> bool:
    """Whether the Host of a request cannot be another site's: an address, or localhost."""
    with contextlib.suppress(ValueError):  # no address, or no host at all
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost":
            ipaddress.ip_address(name)
        return True
    return False


def _error(status: int, sentence: str) -> HttpResponse:
    return HttpResponse(f"{sentence}\n".encode(), status=status)


async def _send(
    http: h11.Connection, writer: asyncio.StreamWriter, answer: HttpResponse, is_head: bool
) -> None:
    headers = [("Content-Type", answer.content_type), *HEADERS, *answer.headers]
    if answer.stream is None:
        headers.append(("Content-Length", str(len(answer.body))))
    else:
        headers.append(("Connection", "close"))
    await _write(writer, http.send(h11.Response(status_code=answer.status, headers=headers)))
    if answer.stream is not None and not is_head:
        async with contextlib.aclosing(answer.stream) as parts:  # type: ignore[type-var]
            async for part in parts:
                await _write(writer, http.send(h11.Data(data=part)))
    elif not is_head:
        await _write(writer, http.send(h11.Data(data=answer.body)))
    await _write(writer, http.send(h11.EndOfMessage()))


async def _write(writer: asyncio.StreamWriter, data: bytes | None) -> None:
    if data:
        writer.write(data)
        # Not wait_for: that of Python 3.11 loses a cancellation that comes just when what it waits for ended.
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writer.drain()
