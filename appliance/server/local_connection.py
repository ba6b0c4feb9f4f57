"""LocalConnection: one client on the local channel, from its first frame to its end.

A frame that came whole is answered before the next one is looked at, mostly within the same wake-up of
the event loop: receive, decode, plan, encode, send, without a task or a future. That is why raw non-blocking
sockets are used: asyncio's streams cost two more turns of the loop per call. Where there is more to do,
connections take turns (local_turns.py).

The peer is bounded in what it may make us keep: while it does not read its answers, nothing more is read
from it, and answers that arrive meanwhile may gather up to MAX_UNSENT_BYTES. The kernel bounds descriptors
that were sent and not received, by user: with more than MAX_DESCRIPTORS of them nothing is read, either.
"""

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from google.protobuf.message import Message

from ...tiers.block import tenant_of
from ...v1.local import MAX_DESCRIPTORS, MAX_PAYLOAD_BYTES, Decoder, Flag, Frame, Method, encode, untraced
from ..errors import REASONS, ApplianceError, error, to_detail
from ..replies import AnswerQueue
from ..security.callers import Caller
from ..tasks import Tasks
from .call_latency import LOCAL, OK, TRACEPARENT, CallLatencies
from .local_turns import Turns

log = logging.getLogger(__name__)

NAMES = {method: "".join(map(str.capitalize, method.name.split("_"))) for method in Method}

RECEIVE_BYTES = 64 << 10  # malloc may map and unmap larger ones each time: 12 us in a new process, not 1
MAX_UNSENT_BYTES = 2 * MAX_PAYLOAD_BYTES
LOOK_S, MAX_LOOK_S = 0.001, 1.0  # until it is looked whether the peer has read them, twice as long each time
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5; the socket module has no name for it


class LocalConnection:
    """A connected peer. `answer` is the server's dispatch; `on_close` is called once, with the reason."""

    def __init__(
        self,
        connection: socket.socket,
        answer: Callable[["LocalConnection", Frame], None],
        on_close: Callable[["LocalConnection", str], None],
        call_latencies: CallLatencies,
        turns: Turns,
    ) -> None:
        self.caller = Caller()  # without a client until it attached
        self.pid, self.uid, self.gid = peer_of(connection)
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._answer = answer
        self._on_close = on_close
        self._call_latencies = call_latencies
        self._turns = turns
        self.is_waiting = False  # for its turn
        self._is_held = False  # nothing is read until what waits was answered
        self._began: dict[int, float] = {}  # calls that are not answered, by number
        self._decoder = Decoder()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._num_unsent_bytes = 0
        self._num_descriptors = 0  # queued since the peer had read all
        self._is_writing = False
        self._num_pauses = 0  # reasons not to read: unsent answers or descriptors, an attach in progress
        self._streams: Tasks[None] = Tasks()
        self._pidfd = _pidfd(connection, self.pid)
        self._loop.add_reader(connection, self._on_readable)
        if self._pidfd >= 0:
            # A forked child may keep the socket open; this tells when the process itself is gone.
            self._loop.add_reader(self._pidfd, self.close, "process died")

    # ------------------------------------------------------------------------------------- in

    @property
    def lane(self) -> str:
        """Name of the lane in which this connection waits: its tenant; without one, its user id."""
        client = self.caller.client
        return (tenant_of(client.domain) if client is not None else "") or f"uid {self.uid}"

    def _on_readable(self) -> None:
        if self.is_waiting:
            self._is_held = True
            self._loop.remove_reader(self._socket)
            return
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            self.close(f"connection lost ({os.strerror(problem.errno or 0)})")
            return
        if not data:
            self.close("closed")
            return
        self._decoder.append(data)
        self._turns.serve(self)

    def answer_next(self) -> bool:
        """Answer the next frame that arrived whole; return whether there may be another one to answer now."""
        if self._num_pauses or self.closed:
            return False
        try:
            frame = self._decoder.take()
        except ValueError as problem:
            log.warning("local client of pid %d: %s; closing", self.pid, problem)
            self.close("malformed frame")
            return False
        if frame is None:
            return False
        self._began[frame.call] = perf_counter()
        if frame.flags & Flag.TRACED:
            self._answer_traced(frame)
        else:
            self._answer(self, frame)
        return self._decoder.num_bytes > 0

    def end_wait(self) -> None:
        """Take note that nothing waits to be answered any longer; read again."""
        self.is_waiting = False
        if self._is_held:
            self._is_held = False
            if not self._num_pauses and not self.closed:
                self._loop.add_reader(self._socket, self._on_readable)

    def _answer_traced(self, frame: Frame) -> None:
        """Answer a frame that says which trace it belongs to: what is planned meanwhile does, too."""
        frame, context = untraced(frame)
        was = TRACEPARENT.set(context)
        try:
            self._answer(self, frame)
        finally:
            TRACEPARENT.reset(was)

    def pause(self) -> None:
        """Read nothing more for now."""
        self._num_pauses += 1
        if self._num_pauses == 1 and not self.closed:
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        """End one `pause`."""
        self._num_pauses -= 1
        if self._num_pauses == 0 and not self.closed:
            self._loop.add_reader(self._socket, self._on_readable)
            if self._decoder.num_bytes:
                self._loop.call_soon(self._turns.serve, self)

    # ------------------------------------------------------------------------------------ out

    def reply(self, frame: Frame, message: Message, *, last: bool = True, fds: Sequence[int] = ()) -> None:
        """Queue an answer to `frame`; `flush` sends it. Raises BusyError without free descriptors.

        `fds` are duplicated: the peer may read late, and their owner may close them meanwhile, so that their
        numbers name other files.
        """
        flags = Flag.LAST if last else Flag.NONE
        self._queue(frame, flags, message.SerializeToString(), fds)

    def reply_error(self, frame: Frame, problem: ApplianceError) -> None:
        """Queue an error as the last answer to `frame`."""
        code = REASONS[problem.reason].code.name
        self._queue(frame, Flag.LAST | Flag.ERROR, to_detail(problem).SerializeToString(), code=code)

    def _queue(
        self, frame: Frame, flags: int, payload: bytes, fds: Sequence[int] = (), code: str = OK
    ) -> None:
        if flags & Flag.LAST and (began_at := self._began.pop(frame.call, None)) is not None:
            self._call_latencies.ended(NAMES[frame.method], LOCAL, code, perf_counter() - began_at)
        if self.closed or frame.flags & Flag.NO_REPLY:
            return
        if len(payload) > MAX_PAYLOAD_BYTES:
            problem = error("TOO_MANY_BLOCKS", f"the answer has {len(payload)} bytes; ask for fewer blocks")
            flags, payload, fds = Flag.LAST | Flag.ERROR, to_detail(problem).SerializeToString(), ()
        data = encode(Frame(frame.method, flags, frame.call, payload))
        own = _duplicates(fds)
        if own:
            self._count_descriptors(len(own))
        self._unsent.append((memoryview(data), own))
        self._num_unsent_bytes += len(data)

    def _count_descriptors(self, number: int) -> None:
        """Count descriptors of an answer; read nothing more while the peer has too many to receive."""
        before = self._num_descriptors if self._has_unread() else 0
        self._num_descriptors = before + number
        if before <= MAX_DESCRIPTORS < self._num_descriptors:
            self.pause()
            self._loop.call_later(LOOK_S, self._look_received, LOOK_S)

    def _look_received(self, again_s: float) -> None:
        """Read again once the peer has received everything."""
        if self.closed:
            return
        if self._has_unread():
            again_s = min(2 * again_s, MAX_LOOK_S)
            self._loop.call_later(again_s, self._look_received, again_s)
        else:
            self._num_descriptors = 0
            self.resume()

    def _has_unread(self) -> bool:
        """Return whether the peer has something of its answers to receive."""
        return bool(self._unsent) or any(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))

    def flush(self) -> None:
        """Send what is queued, as far as the peer takes it; the rest when it takes more."""
        while self._unsent and not self.closed:
            data, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as problem:
                self.close(f"connection lost ({os.strerror(problem.errno or 0)})")
                return
            self._num_unsent_bytes -= sent
            _close_all(fds)  # they went with the first byte
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], ())
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self.close("did not read its answers")
        elif self._unsent and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._socket, self._on_writable)
            self.pause()

    def _on_writable(self) -> None:
        self.flush()
        if not self._unsent and not self.closed:
            self._is_writing = False
            self._loop.remove_writer(self._socket)
            self.resume()

    def stream(self, frame: Frame, replies: AnswerQueue[Any]) -> None:
        """Send the answers of an acquire, or of a get into pages, as they come."""
        self._streams.start(self._stream(frame, replies))

    async def _stream(self, frame: Frame, replies: AnswerQueue[Any]) -> None:
        try:
            async for answer in replies:
                self.reply(frame, answer, last=replies.is_last)
                self.flush()
        except ApplianceError as problem:
            self.reply_error(frame, problem)
            self.flush()

    # ------------------------------------------------------------------------------------ end

    def close(self, reason: str) -> None:
        """Close the connection; everything its client holds goes back. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._socket.close()
        self._streams.cancel()
        self._began.clear()
        self._decoder = Decoder()
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._num_unsent_bytes = 0
        self._on_close(self, reason)


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Return descriptors of the same files. Raises BusyError, and keeps none, when there are none left."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError as problem:
        _close_all(made)
        message = f"the daemon has no file descriptor left ({problem.strerror}); raise its `ulimit -n`"
        raise error("TOO_MANY_CLIENTS", message, retry_after_s=1.0) from problem
    return made


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group id of the peer, as the kernel knew them when it connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return pid, uid, gid


def _pidfd(connection: socket.socket, pid: int) -> int:
    """Return a descriptor that becomes readable when the peer's process has ended, -1 where there is none."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # before Linux 6.5: by number, which may have been reused since the peer connected
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:  # another pid namespace, or gone already: the socket's end must do
        return -1
