"""A tenant watches the blocks of its own isolation domain, and learns nothing of other tenants by it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from kvtier.appliance.event_log import MAX_DOMAIN_EVENTS, EventLog, whole_domain
from kvtier.appliance.server import grpc_server
from kvtier.v1 import admin_pb2, events_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.errors import DETAIL_KEY

from ..appliance.raw_client import chain, identity
from .test_matrix import BLOCK_BYTES, TIMEOUT_S, World, with_tokens

STORED, REMOVED = events_pb2.BLOCK_EVENT_KIND_STORED, events_pb2.BLOCK_EVENT_KIND_REMOVED
ACME, BOLT = "tenant", "other tenant"  # as the channels of World are called


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with with_tokens(tmp_path) as made:
        yield made


class Tenant:
    """A tenant over gRPC: one namespace, the same identity for every tenant."""

    def __init__(self, world: World, caller: str) -> None:
        self._stub = world.stub(caller)
        self._events = world.stub(caller, "EventsService")
        self._client = self._stub.OpenClient(pb.OpenClientRequest(name=caller)).client_id
        request = pb.RegisterNamespaceRequest(identity=identity())
        self.namespace = self._stub.RegisterNamespace(request).namespace_id

    def put(self, names: list[bytes]) -> None:
        header = pb.ReserveRequest(
            client_id=self._client, namespace_id=self.namespace, prefix_hashes=b"".join(names)
        )
        parts = [pb.PutRequest(header=header), pb.PutRequest(chunk=bytes(BLOCK_BYTES * len(names)))]
        assert set(self._stub.Put(iter(parts), timeout=TIMEOUT_S).outcomes) == {pb.PUT_OUTCOME_STORED}

    def watch(self, **fields: int) -> Any:
        """Return a stream that is watching, and the newest number at its begin."""
        stream = self._events.Watch(events_pb2.WatchRequest(**fields), timeout=TIMEOUT_S)
        first = next(stream)
        assert first.kind == events_pb2.BLOCK_EVENT_KIND_UNSPECIFIED
        return stream, first.sequence


def test_a_tenant_sees_its_own_changes_and_no_trace_of_others(world: World) -> None:
    """Numbers, names, namespaces: the stream is the same whether another tenant is busy or not."""
    acme, bolt = Tenant(world, ACME), Tenant(world, BOLT)
    stream, before = acme.watch()
    assert before == 0
    acme.put(chain(1, "a"))
    for i in range(20):
        bolt.put(chain(2, f"b{i}"))
    acme.put(chain(1, "c"))
    told = [next(stream), next(stream)]
    assert [event.sequence for event in told] == [1, 2]
    assert [event.prefix_hashes for event in told] == chain(1, "a") + chain(1, "c")
    assert {event.namespace_id for event in told} == {acme.namespace}
    assert {event.reason for event in told} == {""}
    assert {event.tiers for event in told} == {bytes([types_pb2.TIER_DRAM])}
    again, newest = acme.watch()
    assert newest == 2, "what others did since then is no part of the numbers"
    foreign, newest = bolt.watch(namespace_id=acme.namespace)
    assert newest == 0, "a tenant's numbers begin when it first watches"
    acme.put(chain(1, "d"))
    assert next(again).prefix_hashes == chain(1, "d")[0]
    bolt.put(chain(1, "e"))
    for one in (stream, again, foreign):
        one.cancel()
    mine, _ = bolt.watch(after_sequence=0)
    bolt.put(chain(1, "f"))
    assert next(mine).prefix_hashes == chain(1, "f")[0]
    mine.cancel()
    assert world.served.call(world.served.daemon.check_integrity) == []


def test_an_eviction_says_that_nothing_is_left(world: World) -> None:
    acme = Tenant(world, ACME)
    stream, _ = acme.watch()
    names = chain(2, "gone")
    acme.put(names)
    assert next(stream).kind == STORED
    evict = admin_pb2.EvictRequest(tier=types_pb2.TIER_DRAM, bytes=BLOCK_BYTES * len(names))
    world.stub("admin", "AdminService").Evict(evict)
    removed: list[bytes] = []
    while len(removed) < len(names):
        event = next(stream)
        assert (event.kind, event.reason) == (REMOVED, "")
        assert set(event.tiers) == {0}
        removed += [event.prefix_hashes[i : i + 32] for i in range(0, len(event.prefix_hashes), 32)]
    assert sorted(removed) == sorted(names)
    stream.cancel()


def test_an_administrator_sees_everything_with_reasons(world: World) -> None:
    events = world.stub("admin", "EventsService")
    stream = events.Watch(events_pb2.WatchRequest(), timeout=TIMEOUT_S)
    next(stream)
    tenants = Tenant(world, ACME), Tenant(world, BOLT)
    for i, tenant in enumerate(tenants):
        tenant.put(chain(1, f"x{i}"))
    assert {next(stream).namespace_id for _ in tenants} == {tenant.namespace for tenant in tenants}
    stream.cancel()


def test_what_is_remembered_of_a_tenant_does_not_depend_on_others(world: World) -> None:
    """Another tenant's events push nothing out of the log that a tenant can ask for again."""
    acme, bolt = Tenant(world, ACME), Tenant(world, BOLT)
    stream, _ = acme.watch()
    acme.put(chain(1, "kept"))
    assert next(stream).sequence == 1
    acme.put(chain(1, "missed"))
    assert next(stream).sequence == 2
    stream.cancel()
    events: EventLog = world.served.daemon.events
    mine = world.served.call(lambda: events.of_domain("tenant:acme"))
    bolt.put(chain(3, "loud"))
    assert world.served.call(lambda: [event.sequence for event in mine.after(0)]) == [1, 2]
    assert mine._capacity == MAX_DOMAIN_EVENTS
    resumed, _ = acme.watch(after_sequence=1)
    assert next(resumed).prefix_hashes == chain(1, "missed")[0]
    resumed.cancel()


@pytest.mark.parametrize(
    ("domain", "whole"),
    [
        ("tenant:acme", "tenant:acme"),
        ("tenant:acme/team", "tenant:acme"),
        ("group:two/x/y", "group:two"),
        ("public:/x", "public:"),
        ("", ""),
        ("a/part", ""),
    ],
)
def test_a_part_belongs_to_its_tenant(domain: str, whole: str) -> None:
    assert whole_domain(domain) == whole


def test_streams_of_one_tenant_leave_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Before: 256, each of which sends every change of the tenant; others' calls waited behind them."""
    monkeypatch.setattr(grpc_server, "MAX_WATCHES", 8)
    with with_tokens(tmp_path) as world:
        acme, bolt = Tenant(world, ACME), Tenant(world, BOLT)
        streams = [acme.watch()[0] for _ in range(4)]
        with pytest.raises(grpc.RpcError) as refused:
            acme.watch()
        problem: Any = refused.value
        detail = dict(problem.trailing_metadata())[DETAIL_KEY]
        assert types_pb2.ErrorDetail.FromString(detail).reason == "TOO_MANY_IN_FLIGHT"
        record_property("watches_of_a_tenant", len(streams))
        streams.pop(0).cancel()
        deadline_at = time.monotonic() + TIMEOUT_S
        while True:  # what has ended is given back, once the daemon hears of it
            try:
                streams.append(acme.watch()[0])
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline_at
                time.sleep(0.01)
        streams.append(bolt.watch()[0])
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("how", ["token", "member", "another tenant"])
def test_a_stream_ends_when_its_caller_is_revoked(world: World, tmp_path: Path, how: str) -> None:
    """It went on without end: with the token out of the file, with the tenant out of the policy."""
    acme, bolt = Tenant(world, ACME), Tenant(world, BOLT)
    (stream, _), (other, _) = acme.watch(), bolt.watch()
    reload = world.served.daemon.reload
    if how == "token":
        file = tmp_path / "tokens"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not line.startswith("acme ")))
    else:
        policy = world.served.daemon.settings.canonical()
        members = policy["tenants"]["acme"]["members"]
        members.remove("token:acme")
        if how == "another tenant":
            policy["tenants"]["third"] = {"members": ["token:acme"]}
        world.served.wait(reload.apply(yaml.safe_dump(policy, sort_keys=False)))
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    code = grpc.StatusCode.UNAUTHENTICATED if how == "token" else grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.code() == code, caught.value.details()
    bolt.put(chain(1, "a"))
    assert next(other).prefix_hashes == chain(1, "a")[0], "others go on"
    other.cancel()
