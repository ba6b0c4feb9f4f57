"""The holder's end of a data connection: blocking, for threads.

Payloads are copied into the socket. `sendfile` out of the extents was rejected: its pages arrive one by one,
and both ends together take half as much processor time again. `check` raises what ends it. That of
`send_payloads` is called after every wait with False, and with True whenever the fetcher took something.
Encoded payloads are encoded one by one as they are sent, in the same thread; one that does not get shorter
goes as it is.
"""

import socket
import ssl
from collections.abc import Callable, Sequence

from ...native import native
from ...tiers.base import Buffer
from ...tiers.codecs.streaming import Encoded
from .connection import CODED_HEADER, CODED_MAGIC, DONE, HEADER, MAGIC, SLICE_S, WAITED, ConnectionLost


def send_payloads(
    connection: socket.socket,
    payloads: Sequence[Buffer],
    check: Callable[[bool], None],
    encode: Callable[[int], Encoded | None] | None = None,
) -> None:
    """Send what a ticket stands for, and return when the fetcher has all of it.

    `encode` returns the payload of a number encoded, None where that is not shorter. Raises OSError and
    ConnectionLost."""
    magic = MAGIC if encode is None else CODED_MAGIC
    _send(connection, memoryview(HEADER.pack(magic, len(payloads))), check)
    if encode is not None:
        for number, payload in enumerate(payloads):
            coded = encode(number)
            codec_id, stored = (0, payload) if coded is None else (coded.codec_id, memoryview(coded.stored))
            _send(connection, memoryview(CODED_HEADER.pack(codec_id, len(stored))), check)
            _send(connection, stored, check)
    elif native is None or isinstance(connection, ssl.SSLSocket):
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
