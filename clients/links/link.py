"""Links for the blocking client: one connection each, over the local channel or over gRPC (remote.py).

A call without an answer within deadline and grace closes the connection: the daemon then gives back
everything the client held, and the staging extent, which a late copy may still read, is never used again
(invariant 6: timeouts quarantine memory).
"""

import os
import select
import socket
import time
from functools import partial
from typing import Any, Protocol

from ...v1.diagnosis import explain_socket
from ...v1.local import MAX_DESCRIPTORS, MAX_PAYLOAD_BYTES
from ...v1.local_pb2 import AttachRequest
from ..errors import CONNECTION_LOST, NO_ANSWER, Unavailable, from_diagnosis
from ..operations.effects import Answer, Attachment
from ..options import Limits, Timeout
from .local import CLOSED, LocalProtocol, attachment_of

RECEIVE_BYTES = 64 << 10
_MAX_LATE_READS = MAX_PAYLOAD_BYTES // RECEIVE_BYTES + 1  # past a deadline: one answer that had arrived
_MAX_LATE_S = 0.5  # from the first of them: a flood of tiny frames takes seconds to look at
ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
CLOEXEC = socket.MSG_CMSG_CLOEXEC


class Connection(Protocol):
    """What links of threads and of event loops have in common.

    After one raised Unavailable it may be `closed`, and is then replaced.
    """

    attachment: Attachment
    closed: bool

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        """Start a call; return its ticket."""
        ...

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        """Send a request without an answer; a hint only where that needs no waiting."""
        ...

    def forget(self, ticket: int) -> None:
        """Stop listening to a call."""
        ...

    def abandon(self) -> None:
        """Close this process's end and send nothing: after a fork the connection is the parent's."""
        ...


class Link(Connection, Protocol):
    """A connection for a thread."""

    def receive(self, ticket: int) -> Answer:
        """Wait for the next message of a call. Raises KvtierError."""
        ...

    def close(self) -> None:
        """End the connection; the daemon gives back what the client held. Idempotent."""
        ...


class LocalLink:
    """The local channel over a blocking Unix socket. Not thread-safe: Client has the lock."""

    attachment: Attachment

    def __init__(self, path: str, name: str, domain: str, limits: Limits, timeout: Timeout) -> None:
        """Connect and attach. Raises Unavailable when no daemon listens or answers, PermissionDenied."""
        self.closed = False
        self._grace_s = timeout.grace_s
        self._protocol = LocalProtocol()
        self._deadlines: dict[int, float] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout.connect_s)
        try:
            self._socket.connect(path)
        except OSError as problem:
            self._socket.close()
            raise from_diagnosis(explain_socket(path, problem)) from None
        request = AttachRequest(name=name, domain=domain, staging_bytes=limits.staging_bytes)
        try:
            self.attachment = attachment_of(self.receive(self.send("Attach", request, timeout.connect_s)))
        except BaseException:
            self.close()
            raise
        self.attachment.is_lost = partial(has_ended, self._socket)

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        """Start a call; return its ticket."""
        number, data = self._protocol.request(call, request)
        self._deadlines[number] = time.monotonic() + timeout_s + self._grace_s
        self._transmit(data, timeout_s + self._grace_s)
        return number

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        """Send a request without an answer; a hint only where that needs no waiting."""
        if is_hint and not select.select((), (self._socket,), (), 0)[1]:
            return
        self._transmit(self._protocol.request(call, request, no_reply=True)[1], self._grace_s)

    def receive(self, ticket: int) -> Answer:
        """Wait for the next message of a call. Raises KvtierError."""
        num_late_reads, late_since = 0, float("inf")
        try:
            while True:
                answer = self._protocol.take(ticket)
                if answer is not None:
                    return answer
                left_s = self._deadlines[ticket] - (now := time.monotonic())
                if left_s <= 0:
                    num_late_reads, late_since = num_late_reads + 1, min(late_since, now)
                if num_late_reads > _MAX_LATE_READS or now - late_since > _MAX_LATE_S:
                    self.close()
                    raise lost(TimeoutError())
                self._fill(left_s)
        finally:
            if not self._protocol.listens(ticket):
                self._deadlines.pop(ticket, None)

    def forget(self, ticket: int) -> None:
        """Stop listening to a call."""
        self._protocol.forget(ticket)
        self._deadlines.pop(ticket, None)
        self._give_back()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.closed = True
        self._socket.close()
        self._protocol.close()

    def abandon(self) -> None:
        """Close this process's end and send nothing."""
        self.close()  # the parent's end stays open

    def _transmit(self, data: bytes, timeout_s: float) -> None:
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(data)
        except OSError as problem:
            self.close()
            raise lost(problem) from None
        except BaseException:  # interrupted in the middle of a frame
            self.close()
            raise

    def _fill(self, timeout_s: float) -> None:
        try:
            self._socket.settimeout(max(timeout_s, 1e-3))
            data, ancillary, _, _ = self._socket.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES, CLOEXEC)
        except OSError as problem:
            self.close()
            raise lost(problem) from None
        if not data:
            self.close()
            raise Unavailable(CLOSED, reason=CONNECTION_LOST)
        try:
            self._protocol.feed(data, descriptors_in(ancillary) if ancillary else [])
        except Unavailable:
            self.close()
            raise
        self._give_back()

    def _give_back(self) -> None:
        """Release leases that were granted to calls which had been given up."""
        if unwanted := self._protocol.unwanted():
            self._transmit(unwanted, self._grace_s)


def has_ended(connection: socket.socket) -> bool:
    """Return whether the daemon ended a connection; any thread may ask.

    Of the socket: a link in a cycle with its attachment keeps memory mapped until Python collects cycles."""
    if (descriptor := connection.fileno()) < 0:
        return True
    hangup = select.poll()  # one that two threads ask at once raises
    hangup.register(descriptor, select.POLLRDHUP)
    return bool(hangup.poll(0))


def lost(problem: OSError) -> Unavailable:
    """Return the error for a socket that failed: silence and breakage are told apart."""
    if isinstance(problem, TimeoutError):
        return Unavailable("the daemon did not answer in time; connection closed", reason=NO_ANSWER)
    return Unavailable(f"{CLOSED} ({os.strerror(problem.errno or 0)})", reason=CONNECTION_LOST)


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors in what recvmsg returned beside the data."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // 4 * 4
            found.extend(memoryview(data)[:whole].cast("i").tolist())
    return found
