"""An S3 server on loopback that answers what a test tells it to: errors that a real one makes rarely."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ScriptedStore:
    """Answers request `n` with `answers[n]`, later ones with the last. An empty answer is never sent."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.requests: list[str] = []  # first lines
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every connection."""
        for one in (self._listener, *self._connections):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (line := _request(connection)) is not None:
                with self._lock:
                    answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
                    self.requests.append(line)
                if answer:
                    connection.sendall(answer)
                if b"Connection: close" in answer:
                    connection.close()
                    return
        except OSError:
            return


def _request(connection: socket.socket) -> str | None:
    """Read one request with its body; return its first line, None when the connection ended."""
    head = b""
    while b"\r\n\r\n" not in head:
        some = connection.recv(65_536)
        if not some:
            return None
        head += some
    head, _, body = head.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    lengths = [int(one.partition(":")[2]) for one in lines if one.lower().startswith("content-length")]
    missing = sum(lengths) - len(body)
    while missing > 0:
        missing -= len(connection.recv(65_536))
    return lines[0]


@contextmanager
def scripted(*answers: bytes) -> Iterator[ScriptedStore]:
    """Yield a server for the time of the block."""
    store = ScriptedStore(answers)
    try:
        yield store
    finally:
        store.close()


def failure(status: str, code: str = "") -> bytes:
    """Return an answer that fails, `503 Slow Down`, with an S3 error code."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>" if code else ""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def part(body: bytes, first: int, total: int, *, length: int | None = None) -> bytes:
    """Return an answer to a ranged get. `length`: what it announces, if not what it has."""
    announced = len(body) if length is None else length
    closing = "" if length is None else "Connection: close\r\n"
    head = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Length: {announced}\r\n{closing}"
        f"Content-Range: bytes {first}-{first + announced - 1}/{total}\r\n"
        'ETag: "x"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n'
    )
    return head.encode() + body


OK = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n'
HEAD_OK = OK.replace(b"Length: 0\r\n", b"Length: 3\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n")
