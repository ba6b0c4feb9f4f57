"""What one tenant's processes can take of connections and staging memory: never what the others need."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from kvtier.appliance.errors import ApplianceError
from kvtier.appliance.fleet import rank_service
from kvtier.appliance.fleet.rank_service import RankService
from kvtier.appliance.server import grpc_server, streams
from kvtier.v1 import events_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.events_pb2_grpc import EventsServiceStub
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused, identity
from ..waiting import until
from .certificates import Authority, write_server_files

MIB = 1 << 20
Record = Callable[[str, object], None]
TENANTS = {"acme": {"members": [f"uid:{os.getuid()}"]}, "bolt": {"members": ["uid:4711"]}}


def attach_until_refused(served: DaemonThread, clients: list[RawClient], staging_bytes: int) -> Refused:
    """Attach as acme; return why no more."""
    while True:
        client = RawClient(served.daemon.service.facts.local_socket_path)
        clients.append(client)
        try:
            client.attach(staging_bytes=staging_bytes)
        except Refused as refused:
            return refused


def test_clients_of_one_tenant_leave_the_others_their_share(tmp_path: Path, record_property: Record) -> None:
    """Before: one tenant opened all 256, and every other caller was refused."""
    settings = small_settings(tmp_path, tenants=TENANTS, limits={"max_clients": 8})
    with DaemonThread(settings) as served:
        clients: list[RawClient] = []
        refused = attach_until_refused(served, clients, 4096)
        assert refused.detail.reason == "TOO_MANY_CLIENTS"
        assert "limits.max_clients: the tenant has 4 clients open" in refused.detail.message
        registry = served.daemon.clients
        record_property("clients_of_a_tenant", len(registry))

        def open_as_bolt() -> int:
            return registry.open_remote("", "", 0.0, {}, "tenant:bolt", "uid 4711").id

        assert len({served.call(open_as_bolt) for _ in range(3)}) == 3
        with pytest.raises(ApplianceError, match="tenant has 3 clients"):
            served.call(open_as_bolt)
        for client in clients:
            client.close()


def test_a_client_too_many_without_tenants_is_told_so(tmp_path: Path) -> None:
    """Before: the channel took as many connections as clients, and closed the next one without a word."""
    with DaemonThread(small_settings(tmp_path, limits={"max_clients": 2})) as served:
        clients: list[RawClient] = []
        refused = attach_until_refused(served, clients, 4096)
        assert (len(clients), refused.detail.reason) == (3, "TOO_MANY_CLIENTS")
        for client in clients:
            client.close()


def test_staging_of_a_tenant_is_at_most_its_quota_of_dram(tmp_path: Path, record_property: Record) -> None:
    """Before: 2.5 GiB by a tenant with a quota of 32 MiB."""
    acme = {**TENANTS["acme"], "quota": {"dram": "6MiB"}}
    settings = small_settings(tmp_path, tenants={**TENANTS, "acme": acme})
    with DaemonThread(settings) as served:
        clients: list[RawClient] = []
        refused = attach_until_refused(served, clients, MIB)
        assert refused.detail.reason == "TOO_MANY_CLIENTS"
        assert "staging: the tenant's clients have" in refused.detail.message
        staging = served.daemon.clients.staging
        # dram is 8 MiB: two for each tenant, and of the rest as much as is left free
        assert served.call(lambda: staging.held("tenant:acme")) == 4 * MIB
        record_property("staging_mib", staging.held("tenant:acme") / MIB)
        clients[0].close()
        again = attach_until_refused(served, clients, MIB)  # what was given back is taken again
        assert again.detail.reason == "TOO_MANY_CLIENTS"
        assert served.call(lambda: staging.held("tenant:acme")) <= 4 * MIB
        for client in clients:
            client.close()


def test_a_client_gets_less_staging_than_it_wants_where_less_is_left(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, tenants=TENANTS)
    with DaemonThread(settings) as served, RawClient(served.daemon.service.facts.local_socket_path) as client:
        assert client.attach(staging_bytes=32 * MIB).staging_bytes == 4 * MIB


def test_without_tenants_every_client_gets_the_staging_it_wants(tmp_path: Path) -> None:
    with DaemonThread(small_settings(tmp_path)) as served:
        clients = [RawClient(served.daemon.service.facts.local_socket_path) for _ in range(4)]
        assert {client.attach(staging_bytes=8 * MIB).staging_bytes for client in clients} == {8 * MIB}
        for client in clients:
            client.close()


class Certified:
    """A daemon and callers with certificates: two of one tenant, and one of another that shares with it."""

    NAMES = ("dns:a.acme.example", "dns:b.acme.example", "dns:bolt.example")

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        authority, sections = Authority("ours"), dict[str, Any]()
        sections["listen"] = [f"unix://{folder}/k.sock", "127.0.0.1:0"]
        sections["access"] = {"tls": write_server_files(folder, authority)}
        sections["tenants"] = {
            "acme": {"members": ["dns:*.acme.example"], "sharing": "group:both"},
            "bolt": {"members": ["dns:bolt.example"], "sharing": "group:both"},
        }
        self.served = stack.enter_context(DaemonThread(small_settings(folder, **sections)))
        address = self.served.daemon.grpc.addresses[1]
        self.channels = [
            stack.enter_context(authority.channel(address, authority.sign(name))) for name in self.NAMES
        ]
        self.ended = Event()
        self._calls: list[Any] = []  # in progress, as long as they are kept
        stack.callback(self._end)

    def _end(self) -> None:
        self.ended.set()
        for call in self._calls:
            call.cancel()

    def watch(self, caller: int) -> None:
        """Begin a stream of block events."""
        stub = EventsServiceStub(self.channels[caller])
        self._calls.append(stub.Watch(events_pb2.WatchRequest(), timeout=60))
        next(self._calls[-1])

    def put(self, caller: int) -> None:
        """Begin a put that is as far as its header, which does not come."""

        def silent() -> Iterator[pb.PutRequest]:
            self.ended.wait()
            yield from ()

        calls = self.served.daemon.put_buffers.calls
        before, put = calls.taken, KVCacheServiceStub(self.channels[caller]).Put.future(silent(), timeout=60)
        self._calls.append(put)
        until(lambda: put.done() or calls.taken > before)
        if put.done():
            put.result()

    def rank(self, caller: int) -> None:
        """Begin a ranking."""
        stub = KVCacheServiceStub(self.channels[caller])
        request = pb.RegisterNamespaceRequest(identity=identity())
        number = stub.RegisterNamespace(request, timeout=60).namespace_id
        before = _Ranking.num
        rank = stub.Rank.future(pb.RankRequest(namespace_id=number, prefix_hashes=bytes(32)), timeout=60)
        self._calls.append(rank)
        until(lambda: rank.done() or _Ranking.num > before)
        if rank.done():
            rank.result()


class _Ranking:
    num = 0


@pytest.mark.parametrize(
    ("module", "limit", "most", "begin", "other"),
    [
        (grpc_server, "MAX_WATCHES", 8, Certified.watch, 2),
        (grpc_server, "MAX_CALLS", 8, Certified.watch, 1),
        (streams, "MAX_STREAM_PUTS", 8, Certified.put, 2),
        (rank_service, "MAX_WAITING", 1, Certified.rank, 2),
    ],
    ids=["watches", "calls", "puts", "rankings"],
)
def test_callers_of_one_isolation_domain_have_one_share(
    module: Any,
    limit: str,
    most: int,
    begin: Callable[[Certified, int], None],
    other: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: one for each tenant of a group, and of calls in progress one for each certificate."""

    async def endless(self: RankService, *asked: object) -> pb.RankResponse:
        _Ranking.num += 1
        return await asyncio.sleep(60, pb.RankResponse())

    monkeypatch.setattr(module, limit, most)
    monkeypatch.setattr(RankService, "_rank", endless)
    monkeypatch.setattr(_Ranking, "num", 0)
    with ExitStack() as stack:
        world = Certified(tmp_path, stack)
        for _ in range(max(1, most // 2)):
            begin(world, 0)
        with pytest.raises(grpc.RpcError) as refused:
            begin(world, other)
        problem: Any = refused.value
        assert problem.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_what_gives_back_has_a_share_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain that reads as much as it may can still end its leases, and put what its reads wait for."""
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 8)
    with ExitStack() as stack:
        world = Certified(tmp_path, stack)
        for _ in range(4):
            world.watch(0)
        stub = KVCacheServiceStub(world.channels[0])
        opened = stub.OpenClient(pb.OpenClientRequest(name="test"), timeout=60)
        stub.Release(pb.ReleaseRequest(client_id=opened.client_id, lease_ids=[1]), timeout=60)
        with pytest.raises(grpc.RpcError, match="streams: too many calls in progress"):
            world.watch(0)
