"""The holder's end of a data connection: blocking, for threads. `check` is called after every wait and raises
what ends it."""

import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...tiers.base import Buffer
from .connection import DONE, HEADER, MAGIC, TICKET_BYTES, WAITED, ConnectionLost


class Piece(NamedTuple):
    """Bytes of an extent: its descriptor, where they begin there, and a view of them."""

    descriptor: int
    offset: int
    data: Buffer


def read_ticket(connection: socket.socket, check: Callable[[], None]) -> bytes:
    """Return the ticket that the fetcher sends. Raises ConnectionLost when it leaves instead."""
    return _read(connection, TICKET_BYTES, check)


def send_payloads(
    connection: socket.socket, pieces: Sequence[Piece], num_payloads: int, check: Callable[[], None]
) -> None:
    """Send what a ticket stands for, and return when the fetcher has all of it.

    Raises OSError and ConnectionLost."""
    _send(connection, memoryview(HEADER.pack(MAGIC, num_payloads)), check)
    is_plain = not isinstance(connection, ssl.SSLSocket)
    for piece in pieces:
        if not (is_plain and _send_file(connection, piece, check)):
            _send(connection, piece.data, check)
    if _read(connection, len(DONE), check) != DONE:
        raise ConnectionLost("the fetcher did not say that all has arrived")


def _send_file(connection: socket.socket, piece: Piece, check: Callable[[], None]) -> bool:
    """Send a piece without copying it. False, with nothing sent, where the kernel cannot: huge pages."""
    sent, end = piece.offset, piece.offset + len(piece.data)
    while sent < end:
        try:
            sent += os.sendfile(connection.fileno(), piece.descriptor, sent, end - sent)
        except WAITED:
            check()
        except OSError as problem:
            if problem.errno != errno.EINVAL or sent != piece.offset:
                raise
            return False
    return True


def _send(connection: socket.socket, data: Buffer, check: Callable[[], None]) -> None:
    while data:
        try:
            data = data[connection.send(data) :]
        except WAITED:
            check()


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
