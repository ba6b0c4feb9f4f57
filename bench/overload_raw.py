"""Callers of bench.overload that cost little: HTTP/2 frames made beforehand, over plain sockets.

    python -m bench.overload_raw '{"target": ..., "num_callers": ...}'

Takes the same task as overload_callers.py and prints the same. All callers share one thread, which spends
about a tenth of what gRPC's clients spend on a call: their times are the server's. A call is one HEADERS and
one DATA frame without compression; an answer that is a single HEADERS frame is a refusal, of which only the
time to come back is read.
"""

import contextlib
import heapq
import json
import os
import random
import re
import select
import socket
import struct
import sys
import time
from typing import Any

from kvtier.v1 import kvcache_pb2 as pb

from .overload_callers import LEAST_WAIT_S, METHOD, Tally, result_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
HEADER_TABLE_SIZE = 1
MAX_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65_535
RECEIVE_BYTES = 1 << 16
RETRY = re.compile(rb"grpc-retry-pushback-ms(.)(-?\d+)", re.DOTALL)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """Return a header field that is not indexed (RFC 7541, 6.2.2), of less than 127 bytes each."""
    return b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


class Connection:
    """One connection with some callers."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        settings = struct.pack(">HI", HEADER_TABLE_SIZE, 0)
        window = struct.pack(">I", MAX_WINDOW - FIRST_WINDOW)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window))
        self.calls: dict[int, float] = {}  # when each open stream began
        self._next_stream = 1
        self._received = b""

    def call(self, headers: bytes, message: bytes) -> None:
        """Begin a call."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.calls[stream] = time.monotonic()
        self.socket.sendall(
            frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, message)
        )

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Return the frames that have arrived, as (kind, flags, stream, payload)."""
        data = self._received + self.socket.recv(RECEIVE_BYTES)
        found, at = [], 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + length:
                break
            kind, flags, stream = struct.unpack_from(">BBI", data, at + 3)
            found.append((kind, flags, stream, data[at + 9 : at + 9 + length]))
            at += 9 + length
        self._received = data[at:]
        return found


class Callers:
    """All callers of one process: each has one call in progress, or waits as it was told."""

    def __init__(self, task: dict[str, Any]) -> None:
        path = task["target"].removeprefix("unix://")
        self._task = task
        self._connections = [Connection(path) for _ in range(task["num_channels"])]
        hashes = b"".join(number.to_bytes(32, "little") for number in range(1, task["num_hashes"] + 1))
        request = pb.LookupRequest(namespace_id=task["namespace_id"], prefix_hashes=hashes)
        message = request.SerializeToString()
        self._message = b"\x00" + struct.pack(">I", len(message)) + message
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": METHOD,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            "grpc-timeout": f"{task['deadline_s'] * 1000:.0f}m",
            "authorization": f"Bearer {task['token']}",
        }
        self._headers = b"".join(literal(*field) for field in fields.items())
        self._tally = Tally()
        self._began_at = 0.0
        self._waiting: list[tuple[float, int, Connection]] = []
        self._num_waits = 0

    def run(self) -> dict[str, Any]:
        """Call until the time is over; return what they got."""
        with select.epoll() as poll, contextlib.ExitStack() as sockets:
            for one in self._connections:
                sockets.enter_context(one.socket)
            return self._run(poll)

    def _run(self, poll: select.epoll) -> dict[str, Any]:
        by_number = {one.socket.fileno(): one for one in self._connections}
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        began_at = self._began_at = time.monotonic()
        ends_at = began_at + self._task["seconds"]
        for number in range(self._task["num_callers"]):
            self._wait(began_at, self._connections[number % len(self._connections)])
        while (now := time.monotonic()) < ends_at or any(one.calls for one in self._connections):
            while self._waiting and self._waiting[0][0] <= now < ends_at:
                heapq.heappop(self._waiting)[2].call(self._headers, self._message)
            due_at = min(self._waiting[0][0] if self._waiting else ends_at, ends_at)
            for number, _ in poll.poll(max(0.0, due_at - now) if now < ends_at else 0.01):
                self._receive(by_number[number])
        return result_of(self._tally, time.monotonic() - began_at)

    def _wait(self, until: float, connection: Connection) -> None:
        self._num_waits += 1
        heapq.heappush(self._waiting, (until, self._num_waits, connection))

    def _receive(self, connection: Connection) -> None:
        frames, now = connection.frames(), time.monotonic()
        for kind, flags, stream, payload in frames:
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == GOAWAY:
                raise ConnectionError(f"the server ended a connection: {payload!r}")
            elif kind == DATA and stream in connection.calls:
                self._accepted(connection, stream, now)
            elif kind == HEADERS and flags & END_STREAM and stream in connection.calls:
                self._refused(connection, stream, payload, now)
            elif kind == RST_STREAM and stream in connection.calls:
                self._tally.counts["CANCELLED"] += 1
                del connection.calls[stream]
                self._wait(now, connection)

    def _accepted(self, connection: Connection, stream: int, now: float) -> None:
        began_at = connection.calls.pop(stream)
        self._tally.accepted.append((began_at - self._began_at, (now - began_at) * 1e3))
        self._wait(now, connection)

    def _refused(self, connection: Connection, stream: int, payload: bytes, now: float) -> None:
        began_at = connection.calls.pop(stream)
        wait_s, retry = 0.0, RETRY.search(payload)
        if retry is None:
            self._tally.counts["without a time to retry"] += 1
        else:
            self._tally.refused.append((began_at - self._began_at, (now - began_at) * 1e3))
            told_s = int(retry[2][: retry[1][0]]) / 1000
            self._tally.told_s += told_s
            wait_s = max(told_s, LEAST_WAIT_S) * random.uniform(1.0, 1.2)
        self._wait(now + wait_s, connection)


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    os.nice(task["niceness"])
    print(json.dumps(Callers(task).run()))
