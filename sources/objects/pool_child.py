"""The process that holds Mooncake's client: native code, which may hang or crash, away from the daemon.

Started by pool_lanes.py as a script, so it imports nothing of kvtier. Each *lane* is a socket and a memory
that this process shares with its parent; a thread per lane carries out one request at a time. Mooncake reads
and writes these memories only. When the parent is gone, or lets a lane go, its socket says so.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

REQUEST = struct.Struct("=cqqq")  # operation, offset in the object, length, bytes of the lane's memory; key
ANSWER = struct.Struct("=q")  # a length or 0; negative: an error code of Mooncake's
MAX_MESSAGE_BYTES = 4096
CHECK, SIZE, GET, PUT, REMOVE = b"c", b"s", b"g", b"p", b"r"
MEMORIES: list["LaneMemory"] = []


class LaneMemory:
    """Memory that this process shares with its parent, registered with Mooncake's client."""

    def __init__(self, client: Any, descriptor: int) -> None:
        self._client = client
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._length = 0
        self.address = 0

    def grow(self, length: int) -> None:
        """Map `length` bytes, unless as many are mapped. Raises OSError."""
        if length <= self._length:
            return
        self.close()
        self._memory = mmap.mmap(self._descriptor, length)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._length = length
        if self._client.register_buffer(self.address, length) != 0:
            raise OSError("Mooncake registers no memory")

    def close(self) -> None:
        """Unregister what is mapped."""
        if self._memory is not None:
            self._client.unregister_buffer(self.address)
            self._memory, self._length = None, 0


def carry_out(client: Any, lane: LaneMemory, message: bytes) -> int:
    """Return what Mooncake answers to one request."""
    operation, offset, length, memory_bytes = REQUEST.unpack_from(message)
    key = message[REQUEST.size :].decode()
    lane.grow(memory_bytes)
    if operation == SIZE:
        return int(client.get_size(key))
    if operation == GET:
        ranges = [[[0]]], [[[offset]]], [[[length]]]
        return int(client.get_into_ranges([lane.address], [[key]], *ranges)[0][0][0])
    if operation == PUT:
        return int(client.put_from(key, lane.address, length))
    if operation == REMOVE:
        return int(client.remove(key, True))
    return int(client.is_exist(key))


def serve(client: Any, connection: socket.socket, descriptor: int) -> None:
    """Carry out the requests of a lane until the parent lets it go."""
    lane = LaneMemory(client, descriptor)
    MEMORIES.append(lane)  # mapped for good: Mooncake may still write into one that the parent gave up
    with contextlib.suppress(OSError):
        while message := connection.recv(MAX_MESSAGE_BYTES):
            connection.send(ANSWER.pack(carry_out(client, lane, message)))
    connection.close()


def main(control: socket.socket, setup: dict[str, Any]) -> None:
    """Open Mooncake's client, say how that went, and serve lanes until the parent is gone."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(*setup.values())
    # SIGTERM reaches every process of a service, and the parent still stores what is worth keeping.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control.send(ANSWER.pack(code))
    while code == 0:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            break
        connection, memory = socket.socket(fileno=descriptors[0]), descriptors[1]
        threading.Thread(target=serve, args=(client, connection, memory), daemon=True).start()
    os._exit(0)  # its threads may hang, and nothing here is worth waiting for


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
