"""A client of the local channel made of nothing but a socket: what abuse and first principles need."""

import mmap
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import local_pb2, types_pb2
from kvtier.v1.local import Decoder, Flag, Frame, Method, encode

M = TypeVar("M", bound=Message)

TIMEOUT_S = 60.0


class Refused(Exception):
    """An error frame."""

    def __init__(self, detail: types_pb2.ErrorDetail) -> None:
        super().__init__(f"{detail.reason}: {detail.message}")
        self.detail = detail


class RawClient:
    """One connection. `call` blocks; descriptors that came are in `descriptors`."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(path))
        self.descriptors: list[int] = []
        self.attached = local_pb2.AttachResponse()
        self.staging: mmap.mmap | None = None
        self._decoder = Decoder()
        self._frames: list[Frame] = []
        self._number = 0

    def attach(self, domain: str = "", staging_bytes: int = 1 << 20) -> local_pb2.AttachResponse:
        request = local_pb2.AttachRequest(name="raw", domain=domain, staging_bytes=staging_bytes)
        self.attached = self.call(Method.ATTACH, request, local_pb2.AttachResponse)
        self.staging = mmap.mmap(self.descriptors[0], self.attached.staging_bytes)
        return self.attached

    def send(self, method: Method, request: Message, flags: int = Flag.NONE) -> int:
        self._number += 1
        self.socket.sendall(encode(Frame(method, flags, self._number, request.SerializeToString())))
        return self._number

    def receive(self) -> Frame:
        while not self._frames:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 64)
            self.descriptors += descriptors
            if not data:
                raise ConnectionError("closed by the daemon")
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def call(self, method: Method, request: Message, response: type[M]) -> M:
        number = self.send(method, request)
        frame = self.receive()
        assert (frame.call, frame.method) == (number, method)
        if frame.flags & Flag.ERROR:
            raise Refused(types_pb2.ErrorDetail.FromString(frame.payload))
        return response.FromString(frame.payload)

    def register(self, **changes: Any) -> pb.RegisterNamespaceResponse:
        return self.call(
            Method.REGISTER_NAMESPACE,
            pb.RegisterNamespaceRequest(identity=identity(**changes)),
            pb.RegisterNamespaceResponse,
        )

    def put(self, namespace: pb.RegisterNamespaceResponse, chain: list[bytes], data: bytes) -> bytes:
        """Put a chain from its start through the staging extent; return the outcomes."""
        assert self.staging is not None
        self.staging[: len(data)] = data
        block_bytes = sum(namespace.fragment_bytes)
        return self.call(
            Method.COMMIT,
            pb.CommitRequest(
                reserve=pb.ReserveRequest(namespace_id=namespace.namespace_id, prefix_hashes=b"".join(chain)),
                spans=[
                    types_pb2.StagingSpan(offset=block * block_bytes, length=block_bytes)
                    for block in range(len(chain))
                ],
            ),
            pb.CommitResponse,
        ).outcomes

    def acquire(
        self, namespace: pb.RegisterNamespaceResponse, chain: list[bytes]
    ) -> list[pb.AcquireResponse]:
        self.send(
            Method.ACQUIRE,
            pb.AcquireRequest(namespace_id=namespace.namespace_id, prefix_hashes=b"".join(chain)),
        )
        answers = []
        while True:
            frame = self.receive()
            if frame.flags & Flag.ERROR:
                raise Refused(types_pb2.ErrorDetail.FromString(frame.payload))
            answers.append(pb.AcquireResponse.FromString(frame.payload))
            if frame.flags & Flag.LAST:
                return answers

    def map_extents(self, numbers: list[int]) -> list[mmap.mmap]:
        before = len(self.descriptors)
        request = local_pb2.MapExtentsRequest(extents=numbers)
        self.call(Method.MAP_EXTENTS, request, local_pb2.MapExtentsResponse)
        return [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in self.descriptors[before:]]

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def identity(
    *,
    layers: int = 2,
    layers_per_group: int = 1,
    model: bytes = b"m" * 16,
    heads: int = 2,
    profile: bytes = b"",
) -> types_pb2.NamespaceIdentity:
    """A small model: 8 KiB a fragment, two fragments a block."""
    return types_pb2.NamespaceIdentity(
        model_digest=model,
        profile_digest=profile,
        geometry=types_pb2.Geometry(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=64,
            block_tokens=16,
            dtype="float16",
            layers_per_group=layers_per_group,
        ),
    )


def chain(num_blocks: int, name: str = "") -> list[bytes]:
    """Prefix hashes of a chain."""
    return [f"{name}/{block}".encode().ljust(32, b".") for block in range(num_blocks)]
