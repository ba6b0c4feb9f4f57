"""Overload of the sockets: which calls and connections are refused, how, and which are answered."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.appliance.errors import PUSHBACK_KEY, STATUS_KEY
from kvtier.appliance.security.principals import Authenticator
from kvtier.appliance.security.tokens import hash_of
from kvtier.appliance.server import admission, grpc_server, local_server, peer_credential_proxy
from kvtier.clients.options import Retry, service_config
from kvtier.tiers.memory.staging import StagingExtent
from kvtier.v1 import admin_pb2, events_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.errors import DETAIL_KEY
from kvtier.v1.events_pb2_grpc import EventsServiceStub
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused
from ..waiting import until

WAIT_S = 60.0
Record = Callable[[str, object], None]
TOKENS = {"flood": "kvt_flood", "quiet": "kvt_quiet"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text("".join(f"{name} {hash_of(token)}\n" for name, token in TOKENS.items()))
    (tmp_path / "tokens").chmod(0o600)
    return tmp_path


def serve(folder: Path, **sections: Any) -> DaemonThread:
    return DaemonThread(small_settings(folder, access={"tokens": str(folder / "tokens")}, **sections))


@pytest.fixture
def overloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonThread]:
    """A daemon to which every queue is too long."""
    monkeypatch.setattr(admission, "MAX_DELAYS_NS", {0: -1})
    monkeypatch.setattr(admission, "BURST_NS", -1)
    monkeypatch.setattr(admission, "NUM_CALLS_PER_PROBE", 1)
    with serve(folder) as served:
        yield served


@contextlib.contextmanager
def channel_to(served: DaemonThread, *options: tuple[str, Any]) -> Iterator[grpc.Channel]:
    """A connection of its own."""
    target = served.daemon.grpc.addresses[0]
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1), *options]) as channel:
        yield channel


def lookup(channel: grpc.Channel, principal: str) -> grpc.RpcError | None:
    """Make a call that names a namespace that is not there; return its refusal, None when it was handled."""
    request = pb.LookupRequest(namespace_id=1, prefix_hashes=b"h" * 32)
    metadata = (("authorization", f"Bearer {TOKENS[principal]}"),)
    with pytest.raises(grpc.RpcError) as caught:
        KVCacheServiceStub(channel).Lookup(request, timeout=WAIT_S, metadata=metadata)
    is_handled = detail_of(caught.value).reason == "UNKNOWN_NAMESPACE"
    return None if is_handled else caught.value


def beside(problem: Any) -> dict[str, Any]:
    return dict(problem.trailing_metadata() or ())


def detail_of(problem: Any) -> types_pb2.ErrorDetail:
    return types_pb2.ErrorDetail.FromString(beside(problem)[DETAIL_KEY])


def flooded(channel: grpc.Channel) -> grpc.RpcError:
    """Call until a call is refused; return its refusal."""
    for _ in range(10 * admission.NUM_CALLS_PER_PROBE):
        if (refusal := lookup(channel, "flood")) is not None:
            return refusal
    raise AssertionError("nothing was refused")


# ------------------------------------------------------------------------------------- too many calls


def test_a_refusal_has_a_reason_and_says_when_to_come_back(overloaded: DaemonThread) -> None:
    with channel_to(overloaded) as channel:
        refusal: Any = flooded(channel)
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        detail = detail_of(refusal)
        assert detail.reason == "TOO_MANY_IN_FLIGHT"
        assert 0 < detail.retry_after_ms <= 1000
        assert int(beside(refusal)[PUSHBACK_KEY]) == detail.retry_after_ms
        status = status_pb2.Status.FromString(beside(refusal)[STATUS_KEY])
        (retry,) = (one for one in status.details if one.Is(error_details_pb2.RetryInfo.DESCRIPTOR))
        info = error_details_pb2.RetryInfo()
        retry.Unpack(info)
        assert info.retry_delay.ToMilliseconds() == detail.retry_after_ms
        counted = overloaded.daemon.service.call_latencies.histograms
        until(
            lambda: ("Lookup", "grpc", "RESOURCE_EXHAUSTED") in counted, lambda: f"not counted: {[*counted]}"
        )


def test_others_are_answered_while_one_floods(overloaded: DaemonThread, record_property: Record) -> None:
    num_answered = 1
    with channel_to(overloaded) as channel:
        flooded(channel)
        assert lookup(channel, "quiet") is None
        for _ in range(20):
            lookup(channel, "flood")
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=WAIT_S
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
            num_answered += 2
    record_property("answered_beside_a_flood", num_answered)


def test_a_client_that_connects_comes_again_as_it_is_told(overloaded: DaemonThread) -> None:
    options = [("grpc.service_config", service_config(Retry())), ("grpc.enable_retries", 1)]
    request = pb.GetServerInfoRequest()
    with channel_to(overloaded) as impatient, channel_to(overloaded, *options) as patient:
        stub = KVCacheServiceStub(impatient)
        with pytest.raises(grpc.RpcError):
            [stub.GetServerInfo(request, timeout=WAIT_S) for _ in range(20)]
        assert KVCacheServiceStub(patient).GetServerInfo(request, timeout=WAIT_S).epoch


# ---------------------------------------------------------------------------------- too many streams


def test_streams_of_health_leave_room_for_calls(folder: Path, record_property: Record) -> None:
    """256 of them were all calls that the server took."""
    with serve(folder) as served, contextlib.ExitStack() as stack:
        codes: list[Any] = []
        for _ in range(10):
            stub = health_pb2_grpc.HealthStub(stack.enter_context(channel_to(served)))
            for _ in range(30):
                watch = stub.Watch(health_pb2.HealthCheckRequest())
                stack.callback(watch.cancel)
                try:
                    next(watch)
                except grpc.RpcError:
                    codes.append(watch.code())
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * (300 - grpc_server.MAX_OPEN_STREAMS // 2)
        record_property("health_streams", 300 - len(codes))
        channel = stack.enter_context(channel_to(served))
        assert lookup(channel, "quiet") is None
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)


def test_a_caller_has_its_share_of_streams(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 8)
    with serve(folder) as served, channel_to(served) as channel, contextlib.ExitStack() as stack:
        watches: list[Any] = []

        def watch() -> Any:
            watches.append(EventsServiceStub(channel).WatchAccesses(events_pb2.WatchAccessesRequest()))
            stack.callback(watches[-1].cancel)
            return next(watches[-1])

        for _ in range(4):
            watch()
        with pytest.raises(grpc.RpcError) as caught:
            watch()
        assert detail_of(caught.value).reason == "TOO_MANY_IN_FLIGHT"
        AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert lookup(channel, "quiet") is None
        record_property("streams_of_a_caller", len(watches) - 1)


def test_a_call_without_its_request_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "IDLE_S", 0.05)
    with serve(folder) as served, channel_to(served) as channel:
        call: Any = channel.stream_unary("/kvtier.v1.KVCacheService/Lookup")
        silence = threading.Event()
        with pytest.raises(grpc.RpcError) as caught:
            call(iter(lambda: silence.wait(WAIT_S), True), timeout=WAIT_S)
        silence.set()
        assert detail_of(caught.value).reason == "BAD_REQUEST"


# ----------------------------------------------------------------- calls that no admission bounds


NUM_OPEN_CALLS = 300


def check_health(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Check.future(health_pb2.HealthCheckRequest(), timeout=WAIT_S)


def lookup_without_a_tenant(channel: grpc.Channel) -> Any:
    return KVCacheServiceStub(channel).Lookup.future(pb.LookupRequest(namespace_id=1), timeout=WAIT_S)


@pytest.mark.parametrize(
    ("uid", "call"),
    [(4001, check_health), (4002, check_health), (4002, lookup_without_a_tenant)],
    ids=["health checks of a tenant", "health checks of no tenant", "refusals of no tenant"],
)
def test_a_flood_that_no_admission_bounds_is_read_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, call: Any
) -> None:
    """Before: all of them were answered, and everything else waited."""
    monkeypatch.setattr(peer_credential_proxy, "OPEN_CALLS_PER_S", 1e-3)
    monkeypatch.setattr(peer_credential_proxy, "OPEN_BURST_S", 20e3)  # 20 calls
    uids = {"now": uid}
    monkeypatch.setattr(peer_credential_proxy, "peer_of", lambda connection: (1, uids["now"], uids["now"]))
    settings = small_settings(tmp_path, tenants={"acme": {"members": ["uid:4001", "uid:4003"]}})
    with DaemonThread(settings) as served, channel_to(served) as flooding, contextlib.ExitStack() as undo:
        grpc.channel_ready_future(flooding).result(WAIT_S)
        calls = [call(flooding) for _ in range(NUM_OPEN_CALLS)]
        until(lambda: served.call(served.daemon.counters)["grpc_calls_held"], "none was held")
        for other in (4003, 0):  # another user of the tenant; an administrator
            uids["now"] = other
            channel = undo.enter_context(channel_to(served))
            for _ in range(10):
                assert check_health(channel).result().status == health_pb2.HealthCheckResponse.SERVING
        AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        # gRPC itself ends some with REFUSED_STREAM, when one begins before another one's end was written.
        codes = [one.code() for one in calls if one.done()]
        num_answered = sum(code is not grpc.StatusCode.UNAVAILABLE for code in codes)
        assert 20 <= num_answered <= 20 + 32, "those, and what the connection had in progress"
        for one in calls:
            one.cancel()


# ------------------------------------------------------------------------------ too many connections


@contextlib.contextmanager
def busy(served: DaemonThread) -> Iterator[None]:
    """Keep the event loop from accepting anything meanwhile."""
    gate = threading.Event()
    entered = threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(WAIT_S)

    waiting = threading.Thread(target=served.call, args=(hold,))
    waiting.start()
    entered.wait(WAIT_S)
    try:
        yield
    finally:
        gate.set()
        waiting.join()


@pytest.mark.parametrize("suffix", ["", ".local"])
def test_connections_that_come_together_wait(folder: Path, suffix: str, record_property: Record) -> None:
    """The 129th found the queue full, and its client took that for a daemon that is not there."""
    with serve(folder) as served, contextlib.ExitStack() as stack, busy(served):
        for _ in range(300):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            peer.setblocking(False)
            peer.connect(f"{folder}/k.sock{suffix}")
    record_property("connected_at_once", 300)


def test_an_attach_does_not_wait_for_the_staging_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(StagingExtent, "prefault", lambda extent: partial(gate.wait, WAIT_S))
    with serve(folder) as served, contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        path = served.daemon.service.facts.local_socket_path
        for _ in range(12):
            client = stack.enter_context(RawClient(path))
            assert client.attach().client_id


# -------------------------------------------------------------------------------- users of no tenant


@pytest.fixture
def closed_to_us(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonThread]:
    """A daemon with tenants, to which this user is a stranger."""
    monkeypatch.setattr(Authenticator, "is_stranger", lambda self, uid, gid, may_have_token=False: True)
    monkeypatch.setattr(local_server, "ATTACH_TIMEOUT_S", 1e6)
    with serve(folder, tenants={"acme": {"members": ["uid:424242"]}}) as served:
        yield served


def num_taken(path: str, undo: contextlib.ExitStack, num_before: int = 0) -> int:
    """Connect as often as docs/limits.md allows users of no tenant, and once more, which is closed at once.
    Return how many stay."""
    peers = [undo.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(17 - num_before)]
    for peer in peers:
        peer.connect(path)
    peers[-1].settimeout(WAIT_S)
    assert peers[-1].recv(1) == b""
    assert not any(map(is_closed, peers[:-1]))
    return num_before + len(peers) - 1


def test_a_stranger_at_the_local_socket_is_told_so_and_closed(
    closed_to_us: DaemonThread, record_property: Record
) -> None:
    path = closed_to_us.daemon.service.facts.local_socket_path
    with contextlib.ExitStack() as undo, RawClient(path) as first:
        record_property("strangers_at_the_local_socket", num_taken(path, undo, num_before=1))
        with pytest.raises(Refused, match="belongs to no tenant"):
            first.attach()
        assert first.socket.recv(1) == b""
    with RawClient(path) as another, pytest.raises(Refused, match="belongs to no tenant"):
        another.attach()
    assert closed_to_us.call(closed_to_us.daemon.counters)["local_closed_of_no_tenant"] >= 1


def test_a_stranger_at_the_grpc_socket_has_few_connections(
    closed_to_us: DaemonThread, record_property: Record
) -> None:
    path = closed_to_us.daemon.grpc.addresses[0].removeprefix("unix://")
    with channel_to(closed_to_us) as channel, contextlib.ExitStack() as undo:
        with pytest.raises(grpc.RpcError) as caught:
            KVCacheServiceStub(channel).OpenClient(pb.OpenClientRequest(name="x"), timeout=WAIT_S)
        problem: Any = caught.value
        assert problem.code() is grpc.StatusCode.PERMISSION_DENIED
        assert detail_of(problem).reason == "NO_TENANT"
        record_property("strangers_at_the_grpc_socket", num_taken(path, undo, num_before=1))
    assert closed_to_us.call(closed_to_us.daemon.counters)["grpc_closed_of_no_tenant"] == 1


def test_tcp_connections_are_bounded(folder: Path, record_property: Record) -> None:
    """Before: one host opened as many as the daemon had descriptors. 1,025 is what docs/limits.md says."""
    limit, num_beyond = 1025, 8
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4 * limit:
        pytest.skip(f"needs {4 * limit} descriptors in one process, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * limit), hard))
    settings = small_settings(folder, listen=["127.0.0.1:0"], access={"insecure": True})  # type: ignore[arg-type]
    with DaemonThread(settings) as served, contextlib.ExitStack() as undo:
        host, _, port = served.daemon.grpc.addresses[0].rpartition(":")
        peers = [
            undo.enter_context(socket.create_connection((host, int(port)))) for _ in range(limit + num_beyond)
        ]
        deadline_at = time.monotonic() + WAIT_S
        while (num_closed := sum(is_closed(peer) for peer in peers)) < num_beyond:
            assert time.monotonic() < deadline_at, "all were taken"
            time.sleep(0.02)
        record_property("tcp_connections", limit + num_beyond - num_closed)
        assert num_closed == num_beyond


def is_closed(peer: socket.socket) -> bool:
    """Whether the other end was closed; what it sent meanwhile is read and dropped."""
    peer.setblocking(False)
    try:
        while peer.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True
