"""DataListener: accepts data connections of other hosts, and sends what their tickets stand for.

The event loop only waits for connections and for what comes over them; TLS, tickets and bytes are handled in
threads, one connection at a time each, bounded in time. An idle connection takes no thread.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from ...sources.peers.connection import ConnectionLost, bound_waits, break_off
from ...sources.peers.sending import read_ticket, send_payloads
from ..errors import StartError
from .fleet_tls import FleetTls
from .tickets import DataTicket, PeerService

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512  # further ones are closed at once
MAX_SENDING: Final = 8
READ_S: Final = 2.0  # for a ticket, from its first byte on


class DataListener:
    """Listens at `host`:`port` (0: a port that the kernel chooses). Owned by the event loop.

    Without `tls` every connection is plain. Raises StartError when it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        tickets: PeerService,
        tls: FleetTls | None,
        clock: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tickets = tickets
        self._tls = tls
        self._clock = clock
        self._pool = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="kvtier-send")
        self._connections: set[socket.socket] = set()
        self._is_stopping = False
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as problem:
            raise StartError(
                f"peers.data_port: cannot listen at {host}:{port}: {problem.strerror}"
            ) from problem
        self._listener.setblocking(False)
        tickets.data_port = self.port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Close every connection; nothing is read from memory afterwards. Idempotent."""
        self._is_stopping = True
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        await asyncio.to_thread(self._pool.shutdown)
        for connection in list(self._connections):
            self._close(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors: the next one is asked for later
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        self._wait(connection)

    def _wait(self, connection: socket.socket) -> None:
        self._loop.add_reader(connection, self._readable, connection)

    def _readable(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        if self._is_stopping:
            connection.close()
            return
        self._pool.submit(self._serve, connection).add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._served, future)
        )

    def _served(self, future: "Future[socket.socket | None]") -> None:
        connection = future.result()
        if connection is None:
            return
        self._connections.add(connection)
        if self._is_stopping:
            self._close(connection)
        else:
            self._wait(connection)

    def _close(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        if connection.fileno() >= 0:
            self._loop.remove_reader(connection)
            connection.close()

    # ------------------------------------------------------------------------------------- threads

    def _serve(self, connection: socket.socket) -> socket.socket | None:
        """Answer one ticket. Returns the connection for the next one; None when it is closed."""
        ends_at = self._clock() + READ_S

        def check() -> None:
            if self._is_stopping or self._clock() >= ends_at:
                raise ConnectionLost("time is over")

        ticket, is_sent = None, False
        try:
            if self._tls is not None and not hasattr(connection, "getpeercert"):
                connection = self._tls.accept(connection)
            bound_waits(connection)
            ticket = self._tickets.take(read_ticket(connection, check))
            if ticket is None:
                raise ConnectionLost("the ticket is not known")
            ends_at = ticket.ends_at
            send_payloads(connection, ticket.pieces, len(ticket.pieces), check)
            is_sent = True
        except (OSError, ConnectionLost) as problem:
            log.debug("data connection: %s", problem)
            break_off(connection)  # before its ticket ends: the kernel may still hold pages
        finally:
            if ticket is not None:
                self._loop.call_soon_threadsafe(self._end, ticket, is_sent)
        return connection if connection.fileno() >= 0 else None

    def _end(self, ticket: DataTicket, is_sent: bool) -> None:
        self._tickets.end(ticket, is_sent)
