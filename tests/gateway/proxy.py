"""A TCP proxy before an S3 endpoint that spoils requests and answers on the way."""

import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_REQUEST = re.compile(rb"(GET|PUT|HEAD|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
CHUNK_BYTES: Final = 64 << 10


class Answer:
    """What becomes of one request: it is forwarded, and its answer sent back, unless this says otherwise."""

    def __init__(
        self, *, instead: bytes | None = None, reset_at: int | None = None, flip_at: int | None = None
    ) -> None:
        self.instead = instead  # sent in place of forwarding; empty: the connection is reset
        self.reset_at = reset_at  # bytes of the answer that are sent before the connection is reset
        self.flip_at = flip_at  # byte of the answer with a bit inverted


class Proxy:
    """Forwards connections to `port` of this host. `on_request` is asked with (operation, path) before each
    request is forwarded, in a thread of its connection."""

    def __init__(self, port: int) -> None:
        self.on_request: Callable[[str, str], Answer | None] = lambda operation, path: None
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """Forward everything as it is from now on."""
        self.on_request = lambda operation, path: None

    def close(self) -> None:
        """Take no connection any more."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                _Connection(self, client, self._target)


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, port: int) -> None:
        self._proxy, self._client = proxy, client
        self._answer = Answer()
        self._num_answered = 0  # bytes of the answer under way
        try:
            self._server = socket.create_connection(("127.0.0.1", port), 5)
        except OSError:
            reset(client)
            return
        self._server.settimeout(None)
        for work in (self._forward, self._reply):
            threading.Thread(target=work, daemon=True).start()

    def _forward(self) -> None:
        with suppress(OSError):
            while chunk := self._client.recv(CHUNK_BYTES):
                if match := _REQUEST.match(chunk):
                    operation = operation_of(match[1].decode(), chunk)
                    self._num_answered = 0
                    self._answer = self._proxy.on_request(operation, match[2].decode()) or Answer()
                    if self._answer.instead is not None:
                        if self._answer.instead:
                            self._refuse(self._answer.instead)
                        break
                self._server.sendall(chunk)
        self._end()

    def _reply(self) -> None:
        with suppress(OSError):
            while chunk := self._server.recv(CHUNK_BYTES):
                answer, start = self._answer, self._num_answered
                self._num_answered += len(chunk)
                if answer.flip_at is not None and start <= answer.flip_at < self._num_answered:
                    spoiled = bytearray(chunk)
                    spoiled[answer.flip_at - start] ^= 1
                    chunk = bytes(spoiled)
                if answer.reset_at is not None and self._num_answered > answer.reset_at:
                    self._client.sendall(chunk[: max(0, answer.reset_at - start)])
                    break
                self._client.sendall(chunk)
        self._end()

    def _end(self) -> None:
        if not self._answer.instead:
            reset(self._client)
        reset(self._server)

    def _refuse(self, answer: bytes) -> None:
        """Send an answer, and close when the client has read it."""
        self._client.sendall(answer)
        self._client.shutdown(socket.SHUT_WR)
        self._client.settimeout(5)
        with suppress(OSError):
            while self._client.recv(CHUNK_BYTES):
                pass
        self._client.close()


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset, and wake up what waits for it."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.shutdown(socket.SHUT_RD)
    connection.close()


def operation_of(method: str, head: bytes) -> str:
    """Return list, get, head, put, copy or delete."""
    if method == "GET":
        return "list" if b"list-type=2" in head.split(b"\r\n", 1)[0] else "get"
    if method == "PUT":
        return "copy" if b"\r\nx-amz-copy-source" in head.lower() else "put"
    return {"HEAD": "head"}.get(method, "delete")
