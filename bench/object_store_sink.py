"""An S3 server that keeps nothing, at the rate of a network: what a store on another machine costs this one.

Payloads are taken off their connections without being copied, RATE bytes a second of all together. Every HEAD
finds nothing, every list is empty. The process runs on processor CPU while nothing else does, so that only
the client's side of a store is measured. GET / answers with the bytes taken so far.
"""

import ctypes
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None)


class Sink(ThreadingHTTPServer):
    """Takes `bytes_per_s` of all requests together."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Return when so many more bytes have crossed the network."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
            self.num_bytes += num_bytes
            wait_s = self._free_at - now
        time.sleep(max(0.0, wait_s - 0.001))  # shorter waits are made up for by the next one

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: clients are killed in the middle of their requests."""


class Answers(BaseHTTPRequestHandler):
    """Answers of one connection."""

    protocol_version = "HTTP/1.1"
    server: Sink

    def do_PUT(self) -> None:
        left = int(self.headers["Content-Length"])
        left -= len(self.rfile.read1(left)) if left else 0  # what came with the head
        while left:
            taken = self._throw_away(min(left, PIECE_BYTES))
            if not taken:
                return
            self.server.take(taken)
            left -= taken
        self._answer(200, b"")

    def _throw_away(self, most: int) -> int:
        """Take up to so many bytes of the connection, and return how many there were."""
        connection = self.connection.fileno()
        return int(_LIBC.recv(connection, None, ctypes.c_size_t(most), socket.MSG_TRUNC))

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def do_GET(self) -> None:
        is_list = "list-type" in self.path
        text = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        self._answer(200, (text if is_list else str(self.server.num_bytes)).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", '"sunk"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def main() -> None:
    sink = Sink(float(sys.argv[1]))
    os.sched_setaffinity(0, {int(sys.argv[2])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print(sink.server_port, flush=True)
    sink.serve_forever()


if __name__ == "__main__":
    main()
