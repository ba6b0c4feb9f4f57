"""Every call times every kind of caller, over real gRPC with real certificates or tokens, as docs/security.md
says."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.appliance.errors import REASONS
from kvtier.appliance.security.rights import RIGHTS, Role
from kvtier.appliance.security.tokens import hash_of, make_token
from kvtier.appliance.server.grpc_server import SERVICES
from kvtier.v1 import admin_pb2, events_pb2, peer_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.errors import DETAIL_KEY
from kvtier.v1.events_pb2_grpc import EventsServiceStub
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from kvtier.v1.peer_pb2_grpc import PeerServiceStub

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import chain, identity
from .certificates import Authority, write_server_files

STUBS: dict[str, Any] = {
    "KVCacheService": KVCacheServiceStub,
    "AdminService": AdminServiceStub,
    "EventsService": EventsServiceStub,
    "PeerService": PeerServiceStub,
}
BLOCKS = chain(2, "acme")
BLOCK_BYTES = 16384
TIMEOUT_S = 60.0
#: In this order: the administrator's row ends with a drain.
CALLERS = ("no proof", "wrong proof", "other tenant", "tenant", "admin")
#: How a daemon knows its callers over TCP: by their certificates, or by tokens alone.
PROOFS = ("certificate", "token")


@dataclass
class World:
    """A daemon with two tenants and an administrator, and a channel for each kind of caller."""

    proof: str
    served: DaemonThread
    channels: dict[str, grpc.Channel]

    def stub(self, caller: str, service: str = "KVCacheService") -> Any:
        return STUBS[service](self.channels[caller])


@dataclass
class Victim:
    """What acme has, for others to name."""

    client: int
    namespace: int
    lease: int
    pin: int
    session: str = "conversation"


@pytest.fixture(scope="module", params=PROOFS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("matrix")
    make = _with_certificates if request.param == "certificate" else with_tokens
    with make(folder) as made:
        yield made


@contextmanager
def _with_certificates(folder: Path) -> Iterator[World]:
    authority, stranger = Authority("ours"), Authority("theirs")
    settings = small_settings(
        folder,
        access={"tls": write_server_files(folder, authority), "admin": ["dns:ops.example"]},
        tenants={
            "acme": {"members": ["dns:*.acme.example"]},
            "bolt": {"members": ["uri:spiffe://kv/bolt/*"]},
        },
    ).model_copy(update={"listen": [f"unix://{folder}/k.sock", "127.0.0.1:0"]})
    with DaemonThread(settings) as served:
        address = served.daemon.grpc.addresses[1]
        pairs = {
            "no proof": None,
            "wrong proof": stranger.sign("dns:rt.acme.example"),
            "other tenant": authority.sign("uri:spiffe://kv/bolt/rt"),
            "tenant": authority.sign("dns:rt.acme.example"),
            "admin": authority.sign("dns:ops.example"),
        }
        channels = {caller: authority.channel(address, pair) for caller, pair in pairs.items()}
        yield World("certificate", served, channels)
        for channel in channels.values():
            channel.close()


@contextmanager
def with_tokens(folder: Path) -> Iterator[World]:
    """A daemon that asks for no certificates: who calls follows from the token alone."""
    authority = Authority("ours")
    tokens = {name: make_token() for name in ("ops", "acme", "bolt")}
    lines = [f"{name} {hash_of(token)}\n" for name, token in tokens.items()]
    (folder / "tokens").write_text("".join(lines))
    settings = small_settings(
        folder,
        access={
            "tls": write_server_files(folder, authority, client_ca=False),
            "tokens": str(folder / "tokens"),
            "admin": ["token:ops"],
        },
        tenants={
            "acme": {"members": ["token:acme", "dns:*.acme.example"]},
            "bolt": {"members": ["token:bolt"]},
        },
    ).model_copy(update={"listen": [f"unix://{folder}/k.sock", "127.0.0.1:0"]})
    with DaemonThread(settings) as served:
        address = served.daemon.grpc.addresses[1]
        # A certificate that would be acme's is worth nothing here, whoever signed it.
        pair = authority.sign("dns:rt.acme.example")
        channels = {
            "no proof": authority.channel(address, pair),
            "wrong proof": authority.channel(address, None, make_token()),
            "other tenant": authority.channel(address, None, tokens["bolt"]),
            "tenant": authority.channel(address, None, tokens["acme"]),
            "admin": authority.channel(address, None, tokens["ops"]),
        }
        yield World("token", served, channels)
        for channel in channels.values():
            channel.close()


@pytest.fixture
def victim(world: World) -> Iterator[Victim]:
    """acme stores two blocks, reads them under a lease, pins them, and has a session."""
    stub = world.stub("tenant")
    client = stub.OpenClient(pb.OpenClientRequest(name="acme")).client_id
    namespace = stub.RegisterNamespace(pb.RegisterNamespaceRequest(identity=identity())).namespace_id
    stub.Put(put_parts(client, namespace))
    acquire = pb.AcquireRequest(
        client_id=client,
        namespace_id=namespace,
        prefix_hashes=b"".join(BLOCKS),
        session_id=Victim.session,
        load_anyway=True,
    )
    lease = [answer.lease_id for answer in stub.Acquire(acquire)][-1]
    pin = stub.Pin(
        pb.PinRequest(client_id=client, namespace_id=namespace, prefix_hashes=BLOCKS[0], ttl_ms=60_000)
    ).pin_id
    yield Victim(client, namespace, lease, pin)
    with contextlib.suppress(grpc.RpcError):  # one that the call under test has closed
        stub.CloseClient(pb.CloseClientRequest(client_id=client))


def put_parts(client: int, namespace: int) -> Iterator[pb.PutRequest]:
    header = pb.ReserveRequest(client_id=client, namespace_id=namespace, prefix_hashes=b"".join(BLOCKS))
    yield pb.PutRequest(header=header)
    yield pb.PutRequest(chunk=b"a" * BLOCK_BYTES * len(BLOCKS))


def requests(v: Victim) -> dict[str, Callable[[], Any]]:
    """One request per call that names what belongs to the victim, wherever the call names anything."""
    mine: dict[str, Any] = {"client_id": v.client, "namespace_id": v.namespace, "prefix_hashes": BLOCKS[0]}
    reserve = pb.ReserveRequest(**mine)
    return {
        "GetServerInfo": pb.GetServerInfoRequest,
        "OpenClient": pb.OpenClientRequest,
        "CloseClient": lambda: pb.CloseClientRequest(client_id=v.client),
        "RegisterNamespace": lambda: pb.RegisterNamespaceRequest(identity=identity()),
        "Lookup": lambda: pb.LookupRequest(namespace_id=v.namespace, prefix_hashes=BLOCKS[0]),
        "Rank": lambda: pb.RankRequest(namespace_id=v.namespace, prefix_hashes=BLOCKS[0]),
        "Acquire": lambda: pb.AcquireRequest(**mine),
        "Release": lambda: pb.ReleaseRequest(client_id=v.client, lease_ids=[v.lease]),
        "KeepAlive": lambda: pb.KeepAliveRequest(client_id=v.client, lease_ids=[v.lease]),
        "Touch": lambda: pb.TouchRequest(**mine),
        "Reserve": lambda: reserve,
        "Commit": lambda: pb.CommitRequest(client_id=v.client, reserve=reserve),
        "Abort": lambda: pb.AbortRequest(client_id=v.client, reservation_id=1),
        "Pin": lambda: pb.PinRequest(**mine),
        "Unpin": lambda: pb.UnpinRequest(pin_id=v.pin),
        "Prefetch": lambda: pb.PrefetchRequest(**mine),
        "UpdateSession": lambda: pb.UpdateSessionRequest(client_id=v.client, session_id=v.session),
        "ForkSession": lambda: pb.ForkSessionRequest(
            client_id=v.client, session_id=v.session, new_session_id="fork"
        ),
        "EndSession": lambda: pb.EndSessionRequest(client_id=v.client, session_id=v.session),
        "Put": lambda: put_parts(v.client, v.namespace),
        "Get": lambda: pb.GetRequest(acquire=pb.AcquireRequest(**mine)),
        "GetStatus": admin_pb2.GetStatusRequest,
        "Inspect": lambda: admin_pb2.InspectRequest(lease_id=v.lease),
        "Explain": lambda: admin_pb2.ExplainRequest(
            block=admin_pb2.BlockName(namespace_id=v.namespace, prefix_hash=BLOCKS[0])
        ),
        "GetSnapshot": admin_pb2.GetSnapshotRequest,
        "GetStory": lambda: admin_pb2.GetStoryRequest(
            block=admin_pb2.BlockName(namespace_id=v.namespace, prefix_hash=BLOCKS[0])
        ),
        "Evict": lambda: admin_pb2.EvictRequest(tier=types_pb2.TIER_DRAM, bytes=1),
        "Drain": admin_pb2.DrainRequest,
        "ListTenants": admin_pb2.ListTenantsRequest,
        "EraseTenant": lambda: admin_pb2.EraseTenantRequest(name="bolt"),
        "Verify": lambda: admin_pb2.VerifyRequest(tier="dram"),
        "CheckIntegrity": admin_pb2.CheckIntegrityRequest,
        "GetPolicy": admin_pb2.GetPolicyRequest,
        "ApplyPolicy": lambda: admin_pb2.ApplyPolicyRequest(dry_run=True),
        "Watch": lambda: events_pb2.WatchRequest(after_sequence=1),
        "WatchAccesses": events_pb2.WatchAccessesRequest,
        "WatchInventory": peer_pb2.WatchInventoryRequest,
        "FetchBlocks": lambda: peer_pb2.FetchBlocksRequest(prefix_hashes=BLOCKS[0]),
        "PushBlocks": lambda: peer_pb2.PushBlocksRequest(ticket=bytes(32)),
        "AwaitBlocks": lambda: peer_pb2.AwaitBlocksRequest(prefix_hashes=BLOCKS[0]),
    }


def outcome(stub: Any, method: str, request: Any) -> str:
    """Return "answered", the reason of the daemon's refusal, or gRPC's own status."""
    try:
        answer = getattr(stub, method)(request, timeout=TIMEOUT_S)
        if method in ("Watch", "WatchAccesses", "WatchInventory"):
            next(answer)
            answer.cancel()
        elif method in ("Acquire", "Get", "Verify", "AwaitBlocks"):
            list(answer)
    except grpc.RpcError as failed:
        beside: Any = failed.trailing_metadata() or ()
        packed = dict(beside).get(DETAIL_KEY)
        if packed is None:
            return failed.code().name
        detail = types_pb2.ErrorDetail.FromString(packed)
        is_documented = failed.code() is REASONS[detail.reason].code
        return detail.reason if is_documented else f"{detail.reason} as {failed.code()}"
    return "answered"


def expected(proof: str, caller: str, name: str) -> str:
    right = RIGHTS[name]
    if caller in ("no proof", "wrong proof"):
        return "UNAVAILABLE" if proof == "certificate" else "NOT_AUTHENTICATED"
    if right.role is Role.HOST:
        return "NOT_A_HOST"  # there is no fleet
    if caller == "admin":
        reached = "BAD_POLICY" if name.endswith("ApplyPolicy") else "answered"  # an empty one
        return "NO_TENANT" if right.role is Role.TENANT else reached
    if right.role is Role.ADMIN:
        return "NOT_ADMIN"
    if caller == "other tenant":
        return right.foreign or "answered"
    return {"Commit": "BAD_SPAN"}.get(name.partition("/")[2], "answered")  # no staging over gRPC


def test_the_table_has_every_call() -> None:
    described = {f"{service.name}/{method.name}" for service in SERVICES for method in service.methods}
    assert described == set(RIGHTS)
    assert {name.partition("/")[2] for name in RIGHTS} == set(requests(Victim(0, 0, 0, 0)))


@pytest.mark.parametrize("name", RIGHTS)
@pytest.mark.parametrize("caller", CALLERS)
def test_call(world: World, request: pytest.FixtureRequest, caller: str, name: str) -> None:
    service, _, method = name.partition("/")
    is_draining = world.served.daemon.service.draining
    victim = Victim(1, 1, 1, 1) if is_draining else request.getfixturevalue("victim")
    found = outcome(world.stub(caller, service), method, requests(victim)[method]())
    if is_draining and method in ("Inspect", "GetStory", "Watch"):
        assert found in ("answered", "NOTHING_THERE")
        return
    assert found == expected(world.proof, caller, name)
    if caller not in ("tenant", "admin"):
        assert_unharmed(world, victim)
    assert world.served.call(world.served.daemon.check_integrity) == []


def assert_unharmed(world: World, victim: Victim) -> None:
    """What the victim had before a stranger's call, it has after it."""
    kept = world.stub("tenant").KeepAlive(
        pb.KeepAliveRequest(client_id=victim.client, lease_ids=[victim.lease])
    )
    assert list(kept.expired_lease_ids) == []
    planner = world.served.daemon.planner
    assert world.served.call(lambda: planner.pins.domain_of(victim.pin)) == "tenant:acme"
    assert world.served.call(lambda: planner.inspection.session(f"acme\t{victim.session}")) is not None
