"""A real gRPC server whose answers come from FakeAppliance: what remote.py talks to before the daemon does.

Only transport is added here: streams are cut and joined, errors become status and trailing metadata.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import RLock
from typing import Any

import grpc
import numpy as np

from kvtier.clients.errors import DETAIL_KEY, KvtierError, NotFound, PreconditionFailed
from kvtier.clients.fake.link import FakeLink
from kvtier.testing import FakeAppliance
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import types_pb2
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceServicer, add_KVCacheServiceServicer_to_server

CHUNK_BYTES = 5000  # odd on purpose: fragments are cut in the middle


class Bridge(KVCacheServiceServicer):
    """KVCacheService over `appliance`: the methods of its servicer, found by name."""

    def __init__(self, appliance: FakeAppliance) -> None:
        self._appliance = appliance
        self._links: dict[int, FakeLink] = {}
        self._lock = RLock()
        for name in UNARY:
            setattr(self, name, self._unary(name))

    def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetServerInfoResponse(version="bridge", epoch=1, max_blocks_per_request=4096)

    def OpenClient(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock, refusals(context):
            link = FakeLink(self._appliance.server)
            self._links[link.attachment.client_id] = link
            return pb.OpenClientResponse(client_id=link.attachment.client_id, ttl_ms=60_000)

    def CloseClient(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:
            link = self._links.pop(request.client_id, None)
            if link is not None:
                link.close()
        return pb.CloseClientResponse()

    def Acquire(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield from self._answers("Acquire", request, context)

    def Put(self, messages: Iterator[Any], context: Any) -> Any:  # noqa: N802
        header = next(messages).header
        payload = np.frombuffer(b"".join(message.chunk for message in messages), np.uint8)
        num_blocks = len(header.prefix_hashes) // 32
        size = len(payload) // num_blocks
        with self._lock, refusals(context):
            link = self._link(header)
            staging = link.attachment.staging
            assert staging is not None
            staging.memory[: len(payload)] = payload
            spans = [types_pb2.StagingSpan(offset=i * size, length=size) for i in range(num_blocks)]
            request = pb.CommitRequest(client_id=header.client_id, reserve=header, spans=spans)
            (answer,) = self._appliance.server.handle(link.attachment, "Commit", request)
            return pb.PutResponse(outcomes=answer.message.outcomes)

    def Get(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for message in self._answers("Acquire", request.acquire, context):
            ready = message.ready
            for block, group, number in zip(ready.block, ready.group, ready.extent, strict=True):
                with self._lock:
                    extent = self._appliance.server.state.store.extents[number]
                length = ready.length[list(ready.extent).index(number)]
                for start in range(0, length, CHUNK_BYTES):
                    chunk = bytes(extent.data[start : min(start + CHUNK_BYTES, length)])
                    yield pb.GetResponse(block=block, group=group, offset=start, chunk=chunk)
        with self._lock:
            self._appliance.server.let_go(message.lease_id)
        yield pb.GetResponse(num_blocks=message.num_blocks, last=True)

    def _answers(self, call: str, request: Any, context: Any) -> list[Any]:
        with self._lock, refusals(context):
            attachment = self._link(request).attachment
            return [answer.message for answer in self._appliance.server.handle(attachment, call, request)]
        raise AssertionError("refusals() raised")

    def _unary(self, name: str) -> Callable[[Any, Any], Any]:
        return lambda request, context: self._answers(name, request, context)[0]

    def _link(self, request: Any) -> FakeLink:
        if not hasattr(request, "client_id"):
            return next(iter(self._links.values()))
        found = self._links.get(request.client_id)
        if found is None:
            raise PreconditionFailed("open again", reason="UNKNOWN_CLIENT")
        return found


UNARY = (
    "RegisterNamespace",
    "Lookup",
    "Rank",
    "Release",
    "KeepAlive",
    "Touch",
    "Pin",
    "Unpin",
    "Prefetch",
    "UpdateSession",
    "ForkSession",
    "EndSession",
)


@contextmanager
def refusals(context: Any) -> Iterator[None]:
    """Turn a KvtierError into a gRPC status, as the daemon's table does."""
    try:
        yield
    except KvtierError as problem:
        code = {NotFound: grpc.StatusCode.NOT_FOUND, PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION}
        status = code.get(type(problem), grpc.StatusCode.UNAVAILABLE)
        detail = types_pb2.ErrorDetail(
            code=status.value[0], reason=problem.reason, message=problem.message, metadata=problem.metadata
        )
        context.set_trailing_metadata(((DETAIL_KEY, detail.SerializeToString()),))
        context.abort(status, problem.message)


@contextmanager
def grpc_bridge(appliance: FakeAppliance) -> Iterator[str]:
    """Serve `appliance` on a free port of the loopback; yield the target."""
    server = grpc.server(ThreadPoolExecutor(8))
    make: Any = Bridge  # in the stubs its base is abstract
    servicer = make(appliance)
    add_KVCacheServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()
