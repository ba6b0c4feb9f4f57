"""EtcdDirectory: records of hosts as keys of etcd under a lease.

Over etcd's v3 gRPC API with grpcio, which is here anyway, and with those of etcd's messages that are needed
(proto/etcd). Rejected: a client library (`etcd3` does not import beside protobuf 4 and later, the others are
little used), and the JSON gateway on the same port: once etcd has users it refuses every client certificate
with a common name.

The calls block, in a thread of their own. Polled, not watched: a host that was started is known three seconds
later at most, and that a host is gone its own connection says sooner than a lease.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from ...v1.addresses import join_port
from ...v1.files import read_regular_file
from . import etcd_pb2 as pb
from .addresses import DirectoryAccess, DirectoryAddress, DirectoryError
from .records import CALL_S, MAX_RECORDS, TTL_S, HostRecord, Met, read_records

MAX_FILE_BYTES: Final = 1 << 20
T = TypeVar("T", bound=Message)


class EtcdDirectory:
    """A fleet's records in etcd."""

    def __init__(self, address: DirectoryAddress, access: DirectoryAccess) -> None:
        self._address = address
        self._access = access
        self._prefix = f"kvtier/{address.fleet}/hosts/".encode()
        self._lease = 0
        self._token = ""
        self._node = 0
        self._channel: grpc.Channel | None = None  # to that node
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-etcd")

    async def meet(self, own: HostRecord) -> Met:
        """See HostDirectory."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._meet, own)

    async def leave(self, own: HostRecord) -> None:
        """See HostDirectory."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._leave)

    async def close(self) -> None:
        """See HostDirectory."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._hang_up()

    # -------------------------------------------------------------------------------------- thread

    def _meet(self, own: HostRecord) -> Met:
        key = self._prefix + str(own.epoch).encode()
        is_new = not self._renew()
        if is_new:
            self._register(key, own)
        values = self._values()
        if values.get(key) != own.text():  # it was deleted, or another host says it lives this life
            is_new = True
            self._register(key, own)
            values[key] = own.text()
        records, num_unreadable = read_records(values.values())
        return Met(records, num_unreadable, is_new)

    def _renew(self) -> bool:
        """Prolong the lease; False when there is none any more."""
        if not self._lease:
            return False
        asked = pb.LeaseKeepAliveRequest(ID=self._lease)
        return self._call("Lease/LeaseKeepAlive", asked, pb.LeaseKeepAliveResponse).TTL > 0

    def _register(self, key: bytes, own: HostRecord) -> None:
        asked = pb.LeaseGrantRequest(TTL=round(TTL_S))
        self._lease = self._call("Lease/LeaseGrant", asked, pb.LeaseGrantResponse).ID
        self._call("KV/Put", pb.PutRequest(key=key, value=own.text(), lease=self._lease), pb.PutResponse)

    def _values(self) -> dict[bytes, bytes]:
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        asked = pb.RangeRequest(key=self._prefix, range_end=end, limit=MAX_RECORDS)
        return {one.key: one.value for one in self._call("KV/Range", asked, pb.RangeResponse).kvs}

    def _leave(self) -> None:
        if self._lease:
            self._call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=self._lease), pb.LeaseRevokeResponse)
            self._lease = 0

    def _call(self, method: str, request: Message, kind: type[T]) -> T:
        """Return etcd's answer, of the first node that gives one. Raises DirectoryError."""
        problem = ""
        for _ in range(len(self._address.nodes)):
            try:
                if self._address.username and not self._token:
                    self._log_in()
                return self._ask(method, request, kind)
            except grpc.RpcError as failure:
                problem = _words_of(failure)
                if "auth" in problem:
                    self._token = ""  # it has ended, or users have changed; the next call gets another one
            except (OSError, ValueError) as failure:
                problem = str(failure)
            host, port = self._address.nodes[self._node]
            problem = f"{host}:{port}: {problem}"
            self._hang_up()
            self._node = (self._node + 1) % len(self._address.nodes)
        raise DirectoryError(problem)

    def _log_in(self) -> None:
        asked = pb.AuthenticateRequest(name=self._address.username, password=self._access.password())
        self._token = self._ask("Auth/Authenticate", asked, pb.AuthenticateResponse).token

    def _ask(self, method: str, request: Message, kind: type[T]) -> T:
        """Return the answer of this node. Raises grpc.RpcError, OSError, ValueError."""
        channel = self._channel = self._channel or self._open()
        path, metadata = f"/etcdserverpb.{method}", (("token", self._token),) if self._token else ()
        encode: Any = type(request).SerializeToString
        decode: Any = kind.FromString
        if method == "Lease/LeaseKeepAlive":
            stream = channel.stream_stream(path, encode, decode)(
                iter([request]), timeout=CALL_S, metadata=metadata
            )
            answers: Iterator[T] = iter(stream)
            if (told := next(answers, None)) is None:
                raise OSError("no answer")
            return told
        answer: T = channel.unary_unary(path, encode, decode)(request, timeout=CALL_S, metadata=metadata)
        return answer

    def _open(self) -> grpc.Channel:
        host, port = self._address.nodes[self._node]
        target = join_port(host, port)
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if not self._address.is_tls:
            return grpc.insecure_channel(target, options)
        files = (self._access.ca, self._access.key, self._access.certificate)
        parts = [read_regular_file(path, MAX_FILE_BYTES) if path is not None else None for path in files]
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(*parts), options)

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _words_of(failure: grpc.RpcError) -> str:
    code, details = getattr(failure, "code", None), getattr(failure, "details", None)
    return f"{code().name}: {details()}"[:200] if code and details else type(failure).__name__
