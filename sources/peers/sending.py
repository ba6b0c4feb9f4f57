"""The holder's end of a data connection: blocking, for threads.

Payloads are copied into the socket. `sendfile` out of the extents was rejected: its pages arrive one by one,
and both ends together take half as much processor time again. `check` raises what ends it. That of
`send_payloads` is called after every wait with False, and with True whenever the fetcher took something.
"""

import socket
import ssl
from collections.abc import Callable, Sequence

from ...native import native
from ...tiers.base import Buffer
from .connection import DONE, HEADER, MAGIC, SLICE_S, WAITED, ConnectionLost


def send_payloads(
    connection: socket.socket, payloads: Sequence[Buffer], check: Callable[[bool], None]
) -> None:
    """Send what a ticket stands for, and return when the fetcher has all of it.

    Raises OSError and ConnectionLost."""
    _send(connection, memoryview(HEADER.pack(MAGIC, len(payloads))), check)
    if native is None or isinstance(connection, ssl.SSLSocket):
        for payload in payloads:
            _send(connection, payload, check)
    else:
        buffers, at = list(payloads), 0
        num_bytes = sum(map(len, buffers))
        while at < num_bytes:
            before, at = at, native.send_many(connection.fileno(), buffers, at, SLICE_S)
            check(at > before)
    if _read(connection, len(DONE), lambda: check(False)) != DONE:
        raise ConnectionLost("the fetcher did not say that all has arrived")


def _send(connection: socket.socket, data: Buffer, check: Callable[[bool], None]) -> None:
    while data:
        try:
            data = data[connection.send(data) :]
            check(True)
        except WAITED:
            check(False)


def _read(connection: socket.socket, num_bytes: int, check: Callable[[], None]) -> bytes:
    found = b""
    while len(found) < num_bytes:
        try:
            part = connection.recv(num_bytes - len(found))
        except WAITED:
            check()
            continue
        if not part:
            raise ConnectionLost("the other end closed the connection")
        found += part
        check()
    return found
