"""PeerCredentialProxy: the Unix socket in front of gRPC, which reads the credentials of each peer.

gRPC for Python listens at Unix sockets but does not report the peer's user. So the public socket is ours: a
connection is accepted here, the kernel gives its user and group (SO_PEERCRED), and it is joined to a new
connection into the real server, which listens at a private path. The inner end is bound to an abstract name
that cannot be guessed; gRPC reports that name with every call (`context.peer()`), and `principal_of` maps it
to the user. A connection made to the private path directly has no such name and is refused.

Rejected: a server per tenant behind a socket per tenant (the permission to open a file is then the only
identity, and every tenant costs a server); tickets fetched over the local channel (grpcurl could not call any
more). The price is one copy of what crosses, which is metadata: a client on this host takes its bytes from
shared memory.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.shares import Shares
from .local_connection import peer_of
from .local_server import MAX_STRANGERS
from .unix_listener import UnixListener, is_power_of_two, remove_stale_socket, start_errors

if TYPE_CHECKING:
    from ..security.principals import Principal

log = logging.getLogger(__name__)

INNER_SUFFIX = ".grpc"
CHUNK_BYTES = 256 << 10
MAX_CONNECTIONS = 1024  # a user may have as many as it leaves free: alone a half
#: Calls of a user that no admission bounds, which users of no tenant have together. A refusal would cost as
#: much as an answer: beyond it nothing is read from the connection, which costs nothing.
OPEN_CALLS_PER_S = 100.0
OPEN_BURST_S = 1.0  # of them may come at once
MAX_HOLD_S = 60.0


class PeerCredentialProxy:
    """Listens at `path`; the server behind it listens at `inner`.

    Of users with `is_stranger(uid, gid)` it takes MAX_STRANGERS connections in all, on which each call
    is answered with the reason; further ones are closed.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        principal_of_user: "Callable[[int, int], Principal]",
        is_stranger: Callable[[int, int], bool] = lambda uid, gid: False,
    ) -> None:
        self.path = path
        self._listener = UnixListener(path, self._admit)
        self.inner = path.with_name(path.name + INNER_SUFFIX)
        self._mode = mode
        self.counters: Counter[str] = Counter()  # connections closed at once, by reason; calls that were held
        self._principal_of_user = principal_of_user
        self._is_stranger = is_stranger
        self._shares = Shares(MAX_CONNECTIONS)
        self._num_strangers = 0
        self._peers: dict[str, tuple[int, int]] = {}  # user and group, by gRPC's name of a connection
        self._connections: dict[str, _ProxiedConnection] = {}  # by the same name
        self._open_calls_end_at: dict[str, float] = {}  # of each user, at OPEN_CALLS_PER_S

    def __len__(self) -> int:
        return len(self._connections)

    def principal_of(self, peer: str) -> "Principal | None":
        """Return the principal of gRPC's connection `peer`; None: it did not come through here."""
        known = self._peers.get(peer)
        return self._principal_of_user(*known) if known is not None else None

    def charge(self, peer: str) -> None:
        """Count a call of gRPC's connection `peer` that no admission bounds: a health check, or a refusal.

        While its user makes more than OPEN_CALLS_PER_S, nothing is read from the connections that make them.
        Calls of administrators do not count.
        """
        connection, (uid, gid) = self._connections.get(peer), self._peers.get(peer, (0, 0))
        if connection is None or self._principal_of_user(uid, gid).is_admin:
            return
        user, now = "of no tenant" if self._is_stranger(uid, gid) else f"uid {uid}", time.monotonic()
        ends_at = self._open_calls_end_at
        if len(ends_at) > MAX_CONNECTIONS:
            ends_at = self._open_calls_end_at = {name: at for name, at in ends_at.items() if at > now}
        ends_at[user] = max(ends_at.get(user, float("-inf")), now - OPEN_BURST_S) + 1 / OPEN_CALLS_PER_S
        if ends_at[user] > now:
            self.counters["calls_held"] += 1
            connection.hold(min(ends_at[user] - now, MAX_HOLD_S))

    def set_mode(self, mode: int) -> None:
        """Change the permissions of the socket."""
        self._mode = mode
        with contextlib.suppress(OSError):  # its file is gone
            os.chmod(self.path, mode)

    def prepare(self) -> None:
        """Remove stale sockets, before the inner server listens. Raises StartError where one is in use."""
        remove_stale_socket(self.path)
        remove_stale_socket(self.inner)

    def start(self) -> None:
        """Listen. The inner server must do so already. Raises StartError."""
        with start_errors(self.path):
            os.chmod(self.inner, 0o600)
        self._listener.start(self._mode)

    def stop(self) -> None:
        """Close the socket and every connection. Idempotent."""
        if self._listener.socket is not None:
            self._listener.stop()
            self.inner.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            connection.close()

    def _admit(self, outer: socket.socket) -> None:
        """Join an accepted connection to the server, or close it when its user may have no more."""
        _, uid, gid = peer_of(outer)
        user, is_stranger = f"uid {uid}", self._is_stranger(uid, gid)
        if is_stranger and self._num_strangers >= MAX_STRANGERS:
            self._turn_away(outer, "closed_of_no_tenant", f"{user} belongs to no tenant")
        elif not self._shares.take(user, 1):
            self._turn_away(outer, "closed_too_many", f"{user} has too many connections")
        else:
            self._num_strangers += is_stranger
            self._join(outer, uid, gid, is_stranger)

    def _turn_away(self, outer: socket.socket, reason: str, why: str) -> None:
        outer.close()
        self.counters[reason] += 1
        if is_power_of_two(self.counters[reason]):
            log.warning("closed a connection to %s: %s (%d such)", self.path, why, self.counters[reason])

    def _leave(self, uid: int, is_stranger: bool) -> None:
        self._shares.give(f"uid {uid}", 1)
        self._num_strangers -= is_stranger

    def _join(self, outer: socket.socket, uid: int, gid: int, is_stranger: bool) -> None:
        inner: socket.socket | None = None
        name = f"kvtier-{secrets.token_hex(16)}"
        try:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            inner.bind(f"\0{name}")
            inner.connect(str(self.inner))
        except OSError as problem:  # the server ends, or its backlog is full
            log.warning("a client was turned away: %s", problem)
            outer.close()
            if inner is not None:
                inner.close()
            self._leave(uid, is_stranger)
            return
        peer = f"unix-abstract:{name}"
        self._peers[peer] = (uid, gid)

        def ended() -> None:
            del self._connections[peer], self._peers[peer]
            self._leave(uid, is_stranger)

        self._connections[peer] = _ProxiedConnection(outer, inner, ended)


class _ProxiedConnection:
    """Two connected sockets; what comes in at one goes out at the other, until either ends."""

    def __init__(self, outer: socket.socket, inner: socket.socket, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = (outer, inner)
        self._ended = ended
        self._is_closed = False
        self._unread: Counter[socket.socket] = Counter()  # reasons not to read: the target is full, a hold
        self._held_until = 0.0
        for source, target in ((outer, inner), (inner, outer)):
            self._loop.add_reader(source, self._carry, source, target)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for end in self._sockets:
            self._loop.remove_reader(end)
            self._loop.remove_writer(end)
            end.close()
        self._ended()

    def hold(self, seconds: float) -> None:
        """Read nothing from the outer end for `seconds` from now, or longer if that was said before."""
        is_held, self._held_until = self._held_until > 0, max(self._held_until, self._loop.time() + seconds)
        if not is_held and not self._is_closed:
            self._pause(self._sockets[0])
            self._loop.call_later(seconds, self._end_hold)

    def _end_hold(self) -> None:
        left_s = self._held_until - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._end_hold)
        else:
            self._held_until = 0.0
            self._go_on(*self._sockets)

    def _pause(self, source: socket.socket) -> None:
        self._unread[source] += 1
        self._loop.remove_reader(source)

    def _go_on(self, source: socket.socket, target: socket.socket) -> None:
        """End one `_pause`."""
        self._unread[source] -= 1
        if not self._unread[source] and not self._is_closed:
            self._loop.add_reader(source, self._carry, source, target)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        """Forward what can be read; while the target's buffer is full, stop reading."""
        try:
            data = source.recv(CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._pass_on(memoryview(data), source, target)
        else:  # HTTP/2 has no use for a half that is still open
            self.close()

    def _pass_on(self, data: memoryview, source: socket.socket, target: socket.socket) -> None:
        try:
            sent = target.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._pause(source)
            self._loop.add_writer(target, self._resume, data[sent:], source, target)

    def _resume(self, data: memoryview, source: socket.socket, target: socket.socket) -> None:
        self._loop.remove_writer(target)
        self._go_on(source, target)
        self._pass_on(data, source, target)
