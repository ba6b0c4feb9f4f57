"""The data connection: what it carries, and bounds of every wait.

    fetcher                                holder
    connect, TLS 1.3 where it is set  ->
    ticket, 32 bytes                  ->
                                      <-   8 bytes: b"kvtr", or b"kvtc" for encoded; number of payloads as u32
                                      <-   the payloads, one after another, as FetchBlocks has told them;
                                           encoded, each behind 8 bytes: its codec, 0 for none, and its length
    1 byte                            ->   the holder lets go of the blocks
    another ticket ...                ->

The last byte says that all has arrived and is what its checksums say; without it the ticket counts as broken.
A connection waits for its next ticket for IDLE_S; a fetcher uses none that was idle for half as long, so that
none ends while its ticket is on its way.
"""

import asyncio
import select
import socket
import ssl
import struct
from contextlib import suppress
from typing import Final

TICKET_BYTES: Final = 32
HEADER: Final = struct.Struct("<4sI")
MAGIC, CODED_MAGIC = b"kvtr", b"kvtc"
CODED_HEADER: Final = struct.Struct("<II")  # codec and length of one payload
DONE: Final = b"\x01"
IDLE_S: Final = 60.0
SLICE_S: Final = 0.25  # of one wait in the kernel, between two looks at the clock
#: What a socket raises when a wait is over; the rest of OSError ends the connection.
WAITED: Final = (BlockingIOError, InterruptedError, TimeoutError)


class ConnectionLost(Exception):
    """The other end closed, broke or stopped; the message says which."""


async def settled(running: "asyncio.Future[None]") -> None:
    """Wait for a thread's work: in any case, also cancelled, until it reads and writes nothing more."""
    try:
        await asyncio.shield(running)
    finally:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])


def bound_waits(connection: socket.socket) -> None:
    """Let every wait on a socket end after SLICE_S. The sizes of its buffers are the kernel's to choose.

    In the kernel where there is no TLS: with a timeout of Python's own MSG_WAITALL would not wait for all,
    and each call would poll first."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(SLICE_S)
        return
    connection.settimeout(None)
    wait = struct.pack("ll", int(SLICE_S), int(SLICE_S % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, wait)


def break_off(connection: socket.socket) -> None:
    """Close a connection at once: what the kernel has still to send is dropped."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_quiet(connection: socket.socket) -> bool:
    """Return whether nothing waits to be read.

    An idle connection that has something was closed, or its other end sends what was not asked for."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return False
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
