"""HttpConnections: which connections of the HTTP listener are kept, and which are closed for a new one.

Supervisors restart a daemon if `/healthz` does not answer, so a connection is always accepted: for the one
that waits longest for its request, of the same peer if that peer has its share, else of any. Answers of
ordinary paths can take long (streams, slow readers) and are never interrupted; they take at most
MAX_ANSWERS, so that some connection can always be closed. Answers of the open paths are a word: a connection
that does not read them can be closed like one that waits.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeAlias

MAX_CONNECTIONS = 64
MAX_CONNECTIONS_PER_PEER = 32
MAX_ANSWERS = 48
MAX_ANSWERS_PER_PEER = 24

Connection: TypeAlias = asyncio.Task[Any]


class HttpConnections:
    """The tasks of open connections with the addresses of their peers. Owned by the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, str] = {}  # the longest first
        self._answering: dict[Connection, str] = {}
        self._closing: set[Connection] = set()

    @property
    def tasks(self) -> set[Connection]:
        """All that have not ended."""
        return self._closing.union(self._waiting, self._answering)

    def add(self, connection: Connection, peer: str) -> None:
        """Add a connection that waits for a request; cancel the one it takes the place of, if any."""
        if self._num_of(peer) >= MAX_CONNECTIONS_PER_PEER:
            self._close(next(task for task, address in self._waiting.items() if address == peer))
        elif len(self._waiting) + len(self._answering) >= MAX_CONNECTIONS:
            self._close(next(iter(self._waiting)))
        self._waiting[connection] = peer

    def begin_answer(self, connection: Connection) -> bool:
        """Protect a connection while it answers; False, and no protection, when too many do."""
        peer = self._waiting[connection]
        if len(self._answering) >= MAX_ANSWERS or _count(self._answering, peer) >= MAX_ANSWERS_PER_PEER:
            return False
        self._answering[connection] = self._waiting.pop(connection)
        return True

    def wait_again(self, connection: Connection) -> None:
        """Count a connection as waiting from now on: its answer was sent."""
        among = self._answering if connection in self._answering else self._waiting
        self._waiting[connection] = among.pop(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)
        self._answering.pop(connection, None)
        self._closing.discard(connection)

    def _num_of(self, peer: str) -> int:
        return _count(self._waiting, peer) + _count(self._answering, peer)

    def _close(self, connection: Connection) -> None:
        del self._waiting[connection]  # now: the next one added before it ends takes another's place
        self._closing.add(connection)
        connection.cancel()


def _count(connections: Mapping[Connection, str], peer: str) -> int:
    return sum(address == peer for address in connections.values())
