"""The holder's end of a data connection: blocking, for threads.

`check` raises what ends it. That of `send_payloads` is called after every wait with False, and with True
whenever the fetcher took something."""

import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...tiers.base import Buffer
from .connection import DONE, HEADER, MAGIC, WAITED, ConnectionLost


class Piece(NamedTuple):
    """Bytes of an extent: its descriptor, where they begin there, and a view of them."""

    descriptor: int
    offset: int
    data: Buffer


def send_payloads(connection: socket.socket, pieces: Sequence[Piece], check: Callable[[bool], None]) -> None:
    """Send what a ticket stands for, and return when the fetcher has all of it.

    Raises OSError and ConnectionLost."""
    _send(connection, memoryview(HEADER.pack(MAGIC, len(pieces))), check)
    is_plain = not isinstance(connection, ssl.SSLSocket)
    for piece in pieces:
        if not (is_plain and _send_file(connection, piece, check)):
            _send(connection, piece.data, check)
    if _read(connection, len(DONE), lambda: check(False)) != DONE:
        raise ConnectionLost("the fetcher did not say that all has arrived")


def _send_file(connection: socket.socket, piece: Piece, check: Callable[[bool], None]) -> bool:
    """Send a piece without copying it. False, with nothing sent, where the kernel cannot: huge pages."""
    sent, end = piece.offset, piece.offset + len(piece.data)
    while sent < end:
        try:
            sent += os.sendfile(connection.fileno(), piece.descriptor, sent, end - sent)
            check(True)
        except WAITED:
            check(False)
        except OSError as problem:
            if problem.errno != errno.EINVAL or sent != piece.offset:
                raise
            return False
    return True


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
