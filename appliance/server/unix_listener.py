"""UnixListener: a Unix socket, of which the event loop accepts some connections at a time."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import StartError

log = logging.getLogger(__name__)

BACKLOG = 4096  # at most net.core.somaxconn; a client that finds it full fails at once
MAX_ACCEPTED = 64  # connections accepted before the event loop goes on
REST_S = 1.0  # after a connection could not be accepted


class UnixListener:
    """Listens at `path` and calls `admit` with each accepted connection. Lives on the event loop."""

    def __init__(self, path: Path, admit: Callable[[socket.socket], None]) -> None:
        self.path = path
        self._admit = admit
        self.socket: socket.socket | None = None

    def start(self, mode: int) -> None:
        """Listen. `mode`: permissions of the socket. Raises StartError when that cannot be done there."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with start_errors(self.path):
                remove_stale_socket(self.path)
                listener.bind(str(self.path))
                os.chmod(self.path, mode)
                listener.listen(BACKLOG)
        except StartError:
            listener.close()
            raise
        self.socket = listener
        asyncio.get_running_loop().add_reader(listener, self.accept)

    def stop(self) -> None:
        """Close the socket and remove its path, if it listened. Idempotent."""
        if self.socket is not None:
            asyncio.get_running_loop().remove_reader(self.socket)
            self.socket.close()
            self.socket = None
            self.path.unlink(missing_ok=True)

    def accept(self) -> None:
        """Accept the connections that wait, up to MAX_ACCEPTED of them."""
        assert self.socket is not None
        for _ in range(MAX_ACCEPTED):
            try:
                accepted, _ = self.socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:  # out of descriptors: the peer waits in the backlog
                log.warning("cannot accept a client: %s; raise `ulimit -n`", problem.strerror)
                rest(self.socket, self.accept)
                return
            accepted.setblocking(False)
            self._admit(accepted)


@contextlib.contextmanager
def start_errors(path: Path) -> Iterator[None]:
    """Let what fails inside be a StartError that names the setting."""
    try:
        yield
    except OSError as problem:
        raise StartError(f"cannot listen at {path}: {problem.strerror}; change `listen`") from problem


def rest(listener: socket.socket, accept: Callable[[], None]) -> None:
    """Stop accepting for REST_S.

    A listener with a waiting connection stays readable, and failing to accept it would fill the event loop.
    """
    loop = asyncio.get_running_loop()
    loop.remove_reader(listener)

    def go_on() -> None:
        if listener.fileno() >= 0:  # it was not closed meanwhile
            loop.add_reader(listener, accept)

    loop.call_later(REST_S, go_on)


def is_power_of_two(number: int) -> bool:
    """Return whether an event that happened `number` times is reported again, not to fill the log."""
    return number & (number - 1) == 0


def remove_stale_socket(path: Path) -> None:
    """Remove the socket a dead daemon left at `path`. Raises StartError when a living one listens there."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            try:
                path.unlink()
            except OSError as problem:
                raise StartError(f"cannot remove the dead socket {path}: {problem.strerror}") from problem
            return
        except PermissionError as problem:
            raise StartError(f"{path} is another user's socket; change `listen`") from problem
    raise StartError(f"another daemon listens at {path}; stop it, or change `listen`")
