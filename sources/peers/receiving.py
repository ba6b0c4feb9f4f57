"""The fetcher's end of a data connection: blocking, for threads. Trusts nothing of what arrives.

Payloads are read straight into the places where they are to stay, which nothing reads before their
checksums were compared. A holder that sends less, more, other bytes, or nothing ends in an exception.
"""

import math
import socket
import ssl
from collections.abc import Callable, Sequence

from ...native import native
from ...tiers.base import Buffer
from ...tiers.codecs.base import Shape
from ...tiers.codecs.streaming import decoded_checksum
from ...tiers.payload import MIN_NATIVE_BYTES, checksum
from ...v1.shm import CHECKSUM_BYTES
from .connection import (
    CODED_HEADER,
    CODED_MAGIC,
    DONE,
    HEADER,
    MAGIC,
    SLICE_S,
    WAITED,
    ConnectionLost,
    bound_waits,
)


def connect(
    host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None, server_name: str = ""
) -> socket.socket:
    """Return a new data connection. Raises OSError, ssl.SSLError among it."""
    connection = socket.create_connection((host, port), timeout_s)
    try:
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname=server_name)
        bound_waits(connection)
    except OSError:
        connection.close()
        raise
    return connection


class PayloadReader:
    """Reads the payloads of one ticket.

    `check` is called with the seconds since the last byte came, after every wait, and raises what ends it."""

    def __init__(
        self,
        connection: socket.socket,
        clock: Callable[[], float],
        check: Callable[[float], None],
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._check = check
        self._heard_at = clock()
        self.began_at = math.inf  # when payloads began to come
        self.num_bytes = 0  # of them, that have come; of encoded ones those that they become
        self._is_coded = False
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL

    def begin(self, ticket: bytes, num_payloads: int) -> None:
        """Show the ticket. Raises ConnectionLost when the answer is no header, or of other payloads."""
        self._connection.sendall(ticket)
        header = bytearray(HEADER.size)
        self.fill(memoryview(header))
        magic, number = HEADER.unpack(header)
        self._is_coded = magic == CODED_MAGIC
        if magic not in (MAGIC, CODED_MAGIC) or number != num_payloads:
            raise ConnectionLost(f"{number} payloads are announced instead of {num_payloads}")
        self.began_at = self._clock()

    def fill(self, into: Buffer) -> None:
        """Fill `into` with the next bytes. Raises OSError and ConnectionLost."""
        filled, num_bytes = 0, len(into)
        while filled < num_bytes:
            try:
                num_read = self._connection.recv_into(
                    into[filled:] if filled else into, num_bytes - filled, self._flags
                )
            except WAITED:
                self._check(self._clock() - self._heard_at)
                continue
            if not num_read:
                raise ConnectionLost(f"it ends {num_bytes - filled} bytes early")
            filled += num_read
            self.num_bytes += num_read
            self._heard_at = self._clock()
            self._check(0.0)

    def fill_many(self, places: Sequence[Buffer], shape: Shape | None = None) -> list[bytes]:
        """Fill places one after another, and return their checksums. Raises OSError and ConnectionLost.

        `shape`: of the values of each, for payloads that come encoded; None where that was not asked for.
        An encoding that cannot be read has no checksum."""
        if self._is_coded:
            if shape is None:
                raise ConnectionLost("payloads come encoded, which was not asked for")
            return [self._decode(place, shape) for place in places]
        is_small = any(len(place) < MIN_NATIVE_BYTES for place in places)
        if native is None or is_small or isinstance(self._connection, ssl.SSLSocket):
            checksums = []
            for place in places:
                self.fill(place)
                checksums.append(checksum(place))
            return checksums
        buffers, at, digests = list(places), 0, b""
        num_bytes = sum(map(len, buffers))
        while at < num_bytes:
            before = at
            try:
                at, more = native.receive_many(self._connection.fileno(), buffers, at, SLICE_S)
            except EOFError as problem:
                raise ConnectionLost(str(problem)) from problem
            digests += more
            self.num_bytes += at - before
            now = self._clock()
            self._heard_at = now if at > before else self._heard_at
            self._check(now - self._heard_at)
        return [digests[one : one + CHECKSUM_BYTES] for one in range(0, len(digests), CHECKSUM_BYTES)]

    def _decode(self, place: Buffer, shape: Shape) -> bytes:
        """Fill a place with a payload that comes encoded; return its checksum."""
        header = bytearray(CODED_HEADER.size)
        self.fill(memoryview(header))
        codec_id, length = CODED_HEADER.unpack(header)
        if not 0 < length <= len(place) or (not codec_id and length != len(place)):
            raise ConnectionLost(f"a payload of {length} bytes, where there are {len(place)}")
        if not codec_id:
            self.fill(place)
            return checksum(place)
        stored = memoryview(bytearray(length))
        self.fill(stored)
        self.num_bytes += len(place) - length
        return decoded_checksum(codec_id, shape, stored, place)

    def end(self) -> None:
        """Say that all has arrived."""
        self._connection.sendall(DONE)
