"""`python -m bench.compression.relay SOCKET TARGET BYTES_PER_S`: a network that carries so much and no more.

Stands between a client and the daemon: connections to the Unix socket SOCKET are carried on to the socket
TARGET, each direction through its own token bucket. A link is simulated where there is none, because one
machine has no network that is slow; what a real one adds (latency, loss) is not here. Latency is left out on
purpose: a stream hides it.
"""

import socket
import sys
import threading
import time
from pathlib import Path

CHUNK_BYTES = 256 << 10
BURST_S = 0.002  # of the rate: what may pass at once


class Bucket:
    """A rate that all connections of one direction share. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def pass_through(self, num_bytes: int) -> None:
        """Return when `num_bytes` are on the wire."""
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self._rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


def carry(source: socket.socket, target: socket.socket, bucket: Bucket) -> None:
    """Copy one direction of one connection until its end."""
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        while count := source.recv_into(buffer):
            bucket.pass_through(count)
            target.sendall(view[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            end.close()


def main() -> None:
    listen, target, rate = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    up, down = Bucket(rate), Bucket(rate)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(listen))
        door.listen()
        while True:
            near, _ = door.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(target)
            for ends in ((near, far, up), (far, near, down)):
                threading.Thread(target=carry, args=ends, daemon=True).start()


if __name__ == "__main__":
    main()
