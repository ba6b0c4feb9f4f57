"""A daemon with something in it, the two ways to talk to it, and the proof that nothing was lost.

Every test of bad input ends with `Scene.assert_unharmed`: the audit is clean, what was stored before is
served byte for byte over both transports, and nothing is held, leased, reserved or under way.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message

from kvtier.appliance.errors import REASONS
from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.errors import DETAIL_KEY
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from kvtier.v1.local import Method

from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused, chain, identity
from ..waiting import until

HEADS = 4  # fragments of 16 KiB: slots without waste
BLOCK_BYTES = 32 << 10
NUM_STORED = 8
WAIT_S = 60.0
STORED_NAME = "stored"

Request: TypeAlias = Message | Iterator[Message]


class Transport(Protocol):
    """One client over one transport."""

    client_id: int

    def call(self, name: str, request: Request) -> Any:
        """Return the (last) answer; raises Refused with the daemon's ErrorDetail."""

    def close(self) -> None:
        """Leave."""


class Local:
    """A client of the local channel."""

    def __init__(self, path: str) -> None:
        self.raw = RawClient(path)
        self.raw.attach()
        self.client_id = self.raw.attached.client_id

    def call(self, name: str, request: Request) -> Any:
        assert isinstance(request, Message)
        method = Method[re.sub("(?<!^)(?=[A-Z])", "_", name).upper()]
        return self.raw.call(method, request, getattr(pb, f"{name}Response"))

    def close(self) -> None:
        self.raw.close()


class Remote:
    """A client over gRPC. Checks that every refusal has the documented status code."""

    def __init__(self, address: str, ttl_ms: int = 0) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = KVCacheServiceStub(self.channel)
        self.client_id = self.stub.OpenClient(pb.OpenClientRequest(name="remote", ttl_ms=ttl_ms)).client_id

    def call(self, name: str, request: Request) -> Any:
        try:
            answer = getattr(self.stub, name)(request, timeout=WAIT_S)
            return [*answer][-1] if name in ("Acquire", "Get") else answer
        except grpc.RpcError as failed:
            beside: Any = failed.trailing_metadata() or ()
            packed = dict(beside).get(DETAIL_KEY)
            if packed is None:  # gRPC's own: it never reached the daemon's handlers
                raise
            detail = types_pb2.ErrorDetail.FromString(packed)
            if failed.code() is not REASONS[detail.reason].code:
                raise AssertionError(f"{detail.reason} came as {failed.code()}") from failed
            raise Refused(detail) from failed

    def close(self) -> None:
        self.stub.CloseClient(pb.CloseClientRequest(client_id=self.client_id))
        self.channel.close()


class Scene:
    """A running daemon that has stored one chain of NUM_STORED blocks of random bytes."""

    def __init__(self, served: DaemonThread) -> None:
        self.served = served
        self.daemon = served.daemon
        self.address = self.daemon.grpc.addresses[0]
        self.data = os.urandom(NUM_STORED * BLOCK_BYTES)
        self.blocks = chain(NUM_STORED, STORED_NAME)
        with RawClient(self.local_path) as client:
            client.attach()
            self.namespace = client.register(heads=HEADS)
            outcomes = client.put(self.namespace, self.blocks, self.data)
            assert outcomes == bytes([pb.PUT_OUTCOME_STORED]) * NUM_STORED

    @property
    def local_path(self) -> str:
        return self.daemon.service.facts.local_socket_path

    def client(self, kind: str, ttl_ms: int = 0) -> Transport:
        """Return a new client over `local` or `grpc`."""
        return Local(self.local_path) if kind == "local" else Remote(self.address, ttl_ms)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds on the daemon's loop."""
        until(lambda: self.served.call(holds), lambda: f"never at rest: {self.served.call(self.unrest)}")

    def unrest(self) -> dict[str, int]:
        """Everything that must be zero when nobody wants anything, as far as it is not."""
        planner = self.daemon.planner
        books = planner.statistics()
        found = {name: books[name] for name in ("num_leases", "num_pins", "num_waiting", "overdue_bytes")}
        found["num_copies_in_flight"] = books["num_copies_in_flight"]
        found["num_reservations"] = len(planner.writes._jobs)
        for tier, numbers in books["tiers"].items():
            for name in ("reserved_bytes", "condemned_bytes", "pinned_bytes"):
                found[f"{tier.label}_{name}"] = numbers[name]
        catalog = planner.catalog
        rows = (row for known in catalog.namespaces.values() for row in known.rows.values())
        fragments = itertools.chain.from_iterable(catalog.fragments(row) for row in rows)
        found["num_holds"] = sum(catalog.holds[tier][f] for f in fragments for tier in planner.rooms)
        found["buffer_bytes"] = self.daemon.put_buffers.taken_bytes
        return {name: number for name, number in found.items() if number}

    def lookup(self, blocks: list[bytes]) -> int:
        """Return how much of a chain is stored."""
        request = pb.LookupRequest(namespace_id=self.namespace.namespace_id, prefix_hashes=b"".join(blocks))
        with RawClient(self.local_path) as client:
            client.attach()
            client.register(heads=HEADS)
            return client.call(Method.LOOKUP, request, pb.LookupResponse).num_blocks

    def assert_unharmed(self) -> None:
        """Nothing is held, the audit is clean, what was stored is served over both transports."""
        self.until(lambda: not self.unrest())
        assert not self.daemon.appliance.failed.done()
        with RawClient(self.local_path) as client:
            client.attach()
            assert read_in_place(client, client.register(heads=HEADS), self.blocks) == self.data
        with grpc.insecure_channel(self.address) as channel:
            assert read_over_grpc(channel, self.blocks) == self.data
            admin = AdminServiceStub(channel)
            assert list(admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems) == []
        self.until(lambda: not self.unrest())


def read_in_place(client: RawClient, namespace: pb.RegisterNamespaceResponse, blocks: list[bytes]) -> bytes:
    """Acquire a chain, wait until it is up, read it in place, release it; return the readable prefix."""
    answers = client.acquire(namespace, blocks)
    parts: dict[tuple[int, int], bytes] = {}
    for answer in answers:
        ready = answer.ready
        for row in range(len(ready.block)):
            [extent] = client.map_extents([ready.extent[row]])
            start = ready.offset[row]
            parts[ready.block[row], ready.group[row]] = extent[start : start + ready.length[row]]
    release = pb.ReleaseRequest(lease_ids=[answers[0].lease_id])
    client.call(Method.RELEASE, release, pb.ReleaseResponse)
    num_blocks = answers[-1].num_blocks
    return b"".join(parts[key] for key in sorted(parts) if key[0] < num_blocks)


def read_over_grpc(channel: grpc.Channel, blocks: list[bytes]) -> bytes:
    """Get a chain through gRPC as a client of its own; return the readable prefix."""
    stub = KVCacheServiceStub(channel)
    client_id = stub.OpenClient(pb.OpenClientRequest(name="reader")).client_id
    namespace = stub.RegisterNamespace(pb.RegisterNamespaceRequest(identity=identity(heads=HEADS)))
    acquire = pb.AcquireRequest(
        client_id=client_id, namespace_id=namespace.namespace_id, prefix_hashes=b"".join(blocks)
    )
    found = bytearray(len(blocks) * BLOCK_BYTES)
    num_blocks = 0
    for answer in stub.Get(pb.GetRequest(acquire=acquire), timeout=WAIT_S):
        start = answer.block * BLOCK_BYTES + answer.group * BLOCK_BYTES // 2 + answer.offset
        found[start : start + len(answer.chunk)] = answer.chunk
        num_blocks = answer.num_blocks
    stub.CloseClient(pb.CloseClientRequest(client_id=client_id))
    return bytes(found[: num_blocks * BLOCK_BYTES])


def repository() -> Path:
    """Where a child process must stand to import the tests."""
    return Path(__file__).resolve().parents[2]
