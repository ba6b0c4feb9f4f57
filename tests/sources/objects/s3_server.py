"""An S3 server on loopback that keeps objects, and misbehaves as a test tells it to.

Google's storage differs from S3 in the names of a few headers and in what it says of a delete; it is
answered as well. What a test changes: `refuse` answers a request before anything is done; `change` alters the
answer to what was done, or the object itself; `clock_s` is the server's time. Signatures are not checked.
"""

import contextlib
import hashlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

RESET = struct.pack("ii", 1, 0)  # SO_LINGER with which a close sends RST


class S3Request(NamedTuple):
    """One request. `operation`: get, head, put, copy, list or delete, as in StoreUsage."""

    operation: str
    key: str


@dataclass(frozen=True, slots=True)
class S3Answer:
    """What is sent, after `delay` returned. The connection is reset behind `reset_at` bytes of the body; with
    status 0 at once."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    reset_at: int | None = None
    delay: Callable[[], object] = lambda: None


class StoredObject(NamedTuple):
    """One object."""

    data: bytes
    modified_at_s: float

    @property
    def headers(self) -> dict[str, str]:
        """Return what an answer says of it."""
        etag = hashlib.md5(self.data).hexdigest()
        return {"ETag": f'"{etag}"', "Last-Modified": formatdate(self.modified_at_s, usegmt=True)}


def error(status: int, code: str, **headers: str) -> S3Answer:
    """Return an answer that fails with an S3 error code."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>"
    return S3Answer(status, body.encode(), {name.replace("_", "-"): text for name, text in headers.items()})


class S3Server:
    """One bucket, `bucket`, at `endpoint`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.objects: dict[str, StoredObject] = {}
        self.requests: list[S3Request] = []
        self.credentials: list[str] = []  # what each of them showed
        self.has_bucket = True
        self.clock_s: Callable[[], float] = time.time
        self.refuse: Callable[[S3Request], S3Answer | None] = lambda request: None
        self.change: Callable[[S3Request, S3Answer], S3Answer] = lambda request, answer: answer
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0  # drawn by the first start
        self.start()

    def start(self) -> None:
        """Listen; after `close` with the same objects at the same address."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        self._port = self._server.server_port
        self._server.daemon_threads = True
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Listen no more, and reset every connection, as when the process is killed."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def endpoint(self) -> str:
        """Return the address of the server."""
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._port}"

    def environment(self) -> dict[str, str]:
        """Return what tells a client of it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def heal(self) -> None:
        """Answer rightly from now on."""
        self.has_bucket, self.clock_s = True, time.time
        self.refuse, self.change = lambda request: None, lambda request, answer: answer

    def count(self, operation: str) -> int:
        """Return the number of requests of one kind."""
        return sum(one.operation == operation for one in list(self.requests))

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> S3Answer:
        parts = urlsplit(handler.path)
        query, headers = parse_qs(parts.query, keep_blank_values=True), handler.headers
        key = unquote(parts.path).removeprefix("/bucket").lstrip("/")
        operation = {"GET": "get", "HEAD": "head", "PUT": "put", "POST": "delete", "DELETE": "delete"}[
            handler.command
        ]
        copied = headers.get("x-amz-copy-source") or headers.get("x-goog-copy-source") or ""
        if "list-type" in query:
            operation, key = "list", query.get("prefix", [""])[0]
        elif copied:
            operation = "copy"
        request = S3Request(operation, key)
        is_create = headers.get("If-None-Match") == "*" or headers.get("x-goog-if-generation-match") == "0"
        shown = headers.get("Authorization", "")
        with self._lock:
            self.requests.append(request)
            self.credentials.append(shown)
            refused = self.refuse(request)
            if refused is not None:
                return refused
            if not self.has_bucket:
                return error(404, "NoSuchBucket")
            if operation == "delete" and shown.startswith("Bearer") and key not in self.objects:
                return error(404, "NoSuchKey")  # Google's
            answers: dict[str, Callable[[], S3Answer]] = {
                "get": lambda: self._get(key, headers.get("Range", "")),
                "head": lambda: self._get(key, ""),
                "put": lambda: self._put(key, body, is_create),
                "copy": lambda: self._copy(unquote(copied), key),
                "list": lambda: self._list(key, query),
                "delete": lambda: self._delete(key, body),
            }
            return self.change(request, answers[operation]())

    def _get(self, key: str, span: str) -> S3Answer:
        stored = self.objects.get(key)
        if stored is None:
            return error(404, "NoSuchKey")
        if not span:
            return S3Answer(200, stored.data, stored.headers)
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(stored.data)) + 1, len(stored.data))
        if start >= len(stored.data):
            return error(416, "InvalidRange")
        named = {"Content-Range": f"bytes {start}-{end - 1}/{len(stored.data)}"}
        return S3Answer(206, stored.data[start:end], stored.headers | named)

    def _put(self, key: str, body: bytes, is_create: bool) -> S3Answer:
        if is_create and key in self.objects:
            return error(412, "PreconditionFailed")
        self.objects[key] = StoredObject(body, self.clock_s())
        return S3Answer(200, b"", {"ETag": self.objects[key].headers["ETag"]})

    def _copy(self, source: str, key: str) -> S3Answer:
        stored = self.objects.get(source.lstrip("/").removeprefix("bucket/"))
        if stored is None:
            return error(404, "NoSuchKey")
        self.objects[key] = replace_time(stored, self.clock_s())
        text = f"<CopyObjectResult><ETag>{stored.headers['ETag']}</ETag></CopyObjectResult>"
        return S3Answer(200, text.encode())

    def _list(self, prefix: str, query: dict[str, list[str]]) -> S3Answer:
        after = query.get("start-after", [""])[0]
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        delimiter = query.get("delimiter", [""])[0]
        rows, folders = [], set()
        for key in keys:
            if delimiter and delimiter in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.objects[key].modified_at_s))
            size = len(self.objects[key].data)
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{at}</LastModified>"
                f'<ETag>"x"</ETag><Size>{size}</Size></Contents>'
            )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)
        ]
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        return S3Answer(200, text.encode())

    def _delete(self, key: str, body: bytes) -> S3Answer:
        keys = [part.partition("</Key>")[0] for part in body.decode().split("<Key>")[1:]] or [key]
        for one in keys:
            self.objects.pop(one, None)
        rows = "".join(f"<Deleted><Key>{one}</Key></Deleted>" for one in keys)
        return S3Answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if len(body) < length:  # the client is gone; what came of an object is never stored
                    self.close_connection = True
                    return
                answer = server._answer(self, body)
                answer.delay()
                try:
                    self.write(answer)
                except OSError:
                    self.close_connection = True

            def setup(self) -> None:
                super().setup()
                server._connections.add(self.connection)

            def finish(self) -> None:
                server._connections.discard(self.connection)
                super().finish()

            def write(self, answer: S3Answer) -> None:
                if not answer.status:
                    self.reset()
                    return
                self.send_response(answer.status)
                for name, text in answer.headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body[: answer.reset_at])
                if answer.reset_at is not None:
                    self.reset()

            def reset(self) -> None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                return

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        return Handler


def replace_time(stored: StoredObject, modified_at_s: float) -> StoredObject:
    """Return the same object, written at another time."""
    return StoredObject(stored.data, modified_at_s)


def late(answer: S3Answer, until: threading.Event) -> S3Answer:
    """Return an answer that is not sent before an event."""
    return replace(answer, delay=until.wait)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Yield a server for the time of the block."""
    server = S3Server()
    try:
        yield server
    finally:
        server.close()
