"""A server of the local channel that does what a test tells it: the way to daemons that fail.

It attaches clients to a real memory tier (memory.py) and registers namespaces; every other call is
answered by the function that the test put under its method, on a thread of the server's own.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.clients.memory.extents import map_memory
from kvtier.tiers.memory.staging import StagingExtent
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import local_pb2, types_pb2
from kvtier.v1.local import Decoder, Flag, Frame, Method, encode

from ..memory.mapped import DOMAIN, EPOCH, EXTENT_BYTES, Memory

Handler = Callable[["Connection", Frame], None]


class Connection:
    """One accepted client."""

    def __init__(self, server: "ScriptedServer", peer: socket.socket) -> None:
        self.server = server
        self.socket = peer
        self.staging = StagingExtent(server.staging_bytes)
        self.staged = map_memory(os.dup(self.staging.descriptor))

    def reply(self, frame: Frame, message: Any, *, last: bool = True, fds: tuple[int, ...] = ()) -> None:
        """Answer a call."""
        flags = Flag.LAST if last else Flag.NONE
        data = encode(Frame(frame.method, flags, frame.call, message.SerializeToString()))
        socket.send_fds(self.socket, [data], list(fds))

    def refuse(self, frame: Frame, code: int, reason: str, retry_after_ms: int = 0, **metadata: str) -> None:
        """Answer a call with an error."""
        detail = types_pb2.ErrorDetail(
            code=code, reason=reason, message="no", retry_after_ms=retry_after_ms, metadata=metadata
        )
        payload = detail.SerializeToString()
        self.socket.sendall(encode(Frame(frame.method, Flag.LAST | Flag.ERROR, frame.call, payload)))

    def hang_up(self) -> None:
        """Close as a dying daemon would."""
        self.socket.shutdown(socket.SHUT_RDWR)


class ScriptedServer:
    """Listens at `path`. `handlers` are the script; `frames` is what arrived, in order."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self.path = path
        self.memory = memory
        self.staging_bytes = 1 << 20
        self.namespace_id = 1
        self.frames: list[Frame] = []
        self.connections: list[Connection] = []
        self.handlers: dict[Method, Handler] = {
            Method.ATTACH: _attach,
            Method.MAP_EXTENTS: _map_extents,
            Method.REGISTER_NAMESPACE: _register,
            Method.TOUCH: lambda *_: None,
            Method.RELEASE: lambda *_: None,
        }
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def methods(self) -> list[Method]:
        """What was called, without the first handshake of each connection."""
        hidden = (Method.ATTACH, Method.REGISTER_NAMESPACE, Method.MAP_EXTENTS)
        return [frame.method for frame in self.frames if frame.method not in hidden]

    def close(self) -> None:
        """Hang up on everybody and end the threads."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            with suppress(OSError):
                connection.hang_up()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()
        for connection in self.connections:
            connection.socket.close()
            connection.staging.close()
        self.connections.clear()  # their mappings have descriptors

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        decoder = Decoder()
        connection: Connection | None = None
        with suppress(OSError):
            while data := peer.recv(1 << 16):
                if connection is None:  # a probe connects and says nothing
                    connection = Connection(self, peer)
                    self.connections.append(connection)
                for frame in decoder.feed(data):
                    self.frames.append(frame)
                    self.handlers[frame.method](connection, frame)
        if connection is None:
            peer.close()


def _attach(connection: Connection, frame: Frame) -> None:
    memory = connection.server.memory
    response = local_pb2.AttachResponse(
        client_id=len(connection.server.connections),
        epoch=EPOCH,
        staging_bytes=connection.staging.num_bytes,
        extent_bytes=EXTENT_BYTES,
        version="scripted",
        max_blocks_per_request=64,
    )
    descriptors = (connection.staging.descriptor, memory.indexes.of(DOMAIN).descriptor)
    connection.reply(frame, response, fds=descriptors)


def _map_extents(connection: Connection, frame: Frame) -> None:
    numbers = local_pb2.MapExtentsRequest.FromString(frame.payload).extents
    descriptors = tuple(connection.server.memory.engine.descriptor(number) for number in numbers)
    connection.reply(frame, local_pb2.MapExtentsResponse(extents=numbers), fds=descriptors)


def _register(connection: Connection, frame: Frame) -> None:
    g = pb.RegisterNamespaceRequest.FromString(frame.payload).identity.geometry
    response = pb.RegisterNamespaceResponse(
        namespace_id=connection.server.namespace_id,
        digest=bytes(32),
        num_groups=1,
        fragment_bytes=[g.num_layers * g.num_planes * g.num_kv_heads * g.head_dim * g.block_tokens * 2],
    )
    connection.reply(frame, response)


@contextmanager
def scripted(folder: Path) -> Iterator[ScriptedServer]:
    """A server at `folder`/kvtier.sock.local."""
    memory = Memory()
    server = ScriptedServer(folder / "kvtier.sock.local", memory)
    try:
        yield server
    finally:
        server.close()
        memory.close()


def staged_bytes(connection: Connection, span: types_pb2.StagingSpan) -> bytes:
    """What lies in a client's staging extent."""
    array: np.ndarray[Any, Any] = connection.staged[span.offset : span.offset + span.length]
    return array.tobytes()
