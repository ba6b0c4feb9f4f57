"""The Unix proxy, TLS and tokens at a real daemon: who comes in, as whom, and who cannot."""

import os
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.appliance.observability import metrics_sources
from kvtier.appliance.security.tokens import hash_of, make_token
from kvtier.v1 import admin_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused, identity
from ..waiting import until
from .certificates import Authority, write_server_files

OTHER_UID = 54_321
BLOCK_BYTES = 16_384
CALL_AS_OTHER = """
import os, sys, grpc
from grpc import _channel  # imported when the first channel is made, which is too late for the next user
from kvtier.v1 import admin_pb2, kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
os.setgid({uid}); os.setuid({uid})  # now: it may not read its own libraries any more
channel = grpc.insecure_channel(sys.argv[1])
for call in (lambda: AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=60),
             lambda: KVCacheServiceStub(channel).OpenClient(pb.OpenClientRequest(), timeout=60)):
    try:
        call()
        print("answered")
    except grpc.RpcError as problem:
        print(problem.code().name)
"""


def code_of(call: Any) -> str:
    try:
        call()
    except grpc.RpcError as problem:
        return problem.code().name
    return "answered"


def open_client(channel: grpc.Channel, **options: Any) -> Any:
    return KVCacheServiceStub(channel).OpenClient(pb.OpenClientRequest(), timeout=60, **options)


def get_status(channel: grpc.Channel, **options: Any) -> Any:
    return AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=60, **options)


# --------------------------------------------------------------------------------------- Unix sockets


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_the_kernel_says_whose_process_calls(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    settings = small_settings(tmp_path, tenants={"acme": {"members": [f"uid:{OTHER_UID}"]}})
    with DaemonThread(settings) as served, grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
        assert code_of(lambda: get_status(channel)) == "answered"
        assert code_of(lambda: open_client(channel)) == "PERMISSION_DENIED", "root is admin and no tenant"
        found = subprocess.run(
            [sys.executable, "-c", CALL_AS_OTHER.format(uid=OTHER_UID), served.daemon.grpc.addresses[0]],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert found.stdout.split() == ["PERMISSION_DENIED", "answered"]


def test_who_goes_around_the_gate_is_nobody(tmp_path: Path) -> None:
    with DaemonThread(small_settings(tmp_path)) as served:
        path = f"{tmp_path}/k.sock.grpc"
        assert os.stat(path).st_mode & 0o777 == 0o600
        with grpc.insecure_channel(f"unix://{path}") as channel:
            assert code_of(lambda: get_status(channel)) == "UNAUTHENTICATED"
            assert code_of(lambda: open_client(channel)) == "UNAUTHENTICATED"
        with grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
            assert code_of(lambda: get_status(channel)) == "answered"
    assert list(tmp_path.iterdir()) == [], "both sockets went with the daemon"


def test_large_messages_and_many_calls_pass_the_gate(tmp_path: Path) -> None:
    """Both ways, more than a socket buffers, three calls at once on one connection."""
    data = os.urandom(60 * BLOCK_BYTES)
    hashes = [bytes([block]) * 32 for block in range(60)]
    with DaemonThread(small_settings(tmp_path)) as served:
        with grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
            stub = KVCacheServiceStub(channel)
            client = open_client(channel).client_id
            namespace = stub.RegisterNamespace(pb.RegisterNamespaceRequest(identity=identity())).namespace_id
            header = pb.ReserveRequest(
                client_id=client, namespace_id=namespace, prefix_hashes=b"".join(hashes)
            )
            outcomes = stub.Put(iter([pb.PutRequest(header=header), pb.PutRequest(chunk=data)])).outcomes
            assert outcomes == bytes([pb.PUT_OUTCOME_STORED]) * 60
            acquire = pb.AcquireRequest(
                client_id=client, namespace_id=namespace, prefix_hashes=b"".join(hashes), load_anyway=True
            )
            streams = [stub.Get(pb.GetRequest(acquire=acquire)) for _ in range(3)]
            for stream in streams:
                parts = {(part.block, part.group): part.chunk for part in stream if part.chunk}
                assert b"".join(parts[key] for key in sorted(parts)) == data
        proxies = served.daemon.listeners._proxies
        while sum(served.call(lambda: [len(proxy) for proxy in proxies])):
            pass  # the channel is closed; the proxy hears of it in its own time


def test_a_local_connection_is_in_its_users_domain_whatever_it_says(tmp_path: Path) -> None:
    tenants = {"acme": {"members": [f"uid:{os.getuid()}"]}, "bolt": {"members": [f"uid:{OTHER_UID}"]}}
    with DaemonThread(small_settings(tmp_path, tenants=tenants)) as served:
        path = served.daemon.service.facts.local_socket_path
        for wanted, domain in (("", "tenant:acme"), ("bolt", "tenant:acme/bolt")):
            with RawClient(path) as client:
                client.attach(wanted)
                client.register()
                assert {c.domain for c in served.call(lambda: [*served.daemon.clients])} == {domain}
        with RawClient(path) as client, pytest.raises(Refused, match="may not have a ':'"):
            client.attach("tenant:bolt")


def test_a_local_connection_of_no_tenant_is_refused(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, tenants={"bolt": {"members": [f"uid:{OTHER_UID}"]}})
    with DaemonThread(settings) as served, RawClient(f"{tmp_path}/k.sock.local") as client:
        with pytest.raises(Refused, match="belongs to no tenant"):
            client.attach()
        assert len(served.call(lambda: [*served.daemon.clients])) == 0


# -------------------------------------------------------------------------------------------- tokens


def test_without_a_client_authority_only_a_token_proves_who_calls(tmp_path: Path) -> None:
    """Also where there are no tenants, and everybody who gets in would be the common one."""
    token, authority = make_token(), Authority("ours")
    (tmp_path / "tokens").write_text(f"rt {hash_of(token)}\n")
    tls = write_server_files(tmp_path, authority, client_ca=False)
    settings = small_settings(tmp_path, access={"tls": tls, "tokens": str(tmp_path / "tokens")}).model_copy(
        update={"listen": ["127.0.0.1:0"]}
    )
    with DaemonThread(settings) as served:
        address = served.daemon.grpc.addresses[0]
        pairs = (None, authority.sign("dns:rt"))
        for channel in (authority.channel(address, pair) for pair in pairs):
            with channel:
                assert code_of(lambda channel=channel: open_client(channel)) == "UNAUTHENTICATED"
                assert code_of(lambda channel=channel: get_status(channel)) == "UNAUTHENTICATED"
                health = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=60
                )
                assert health.status == health.SERVING, "as docs/security.md says"
        with authority.channel(address, None, token) as channel:
            assert code_of(lambda: open_client(channel)) == "answered"
            assert code_of(lambda: get_status(channel)) == "PERMISSION_DENIED", "nobody over TCP is root"
        with grpc.insecure_channel(address) as channel:
            assert code_of(lambda: open_client(channel)) == "UNAVAILABLE"


def test_a_token_goes_before_the_door_and_a_wrong_one_is_never_overlooked(tmp_path: Path) -> None:
    token = make_token()
    (tmp_path / "tokens").write_text(f"ci {hash_of(token)}\n")
    settings = small_settings(
        tmp_path, access={"tokens": str(tmp_path / "tokens")}, tenants={"acme": {"members": ["token:ci"]}}
    )
    with DaemonThread(settings) as served, grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
        bearer = [("authorization", f"Bearer {token}")]
        assert code_of(lambda: open_client(channel, metadata=bearer)) == "answered"
        assert code_of(lambda: get_status(channel, metadata=bearer)) == "PERMISSION_DENIED"
        assert code_of(lambda: get_status(channel)) == "answered", "the daemon's user, without a token"
        for wrong in ("Bearer kvt_wrong", "Bearer", "Basic YTpi", token, ""):
            metadata = [("authorization", wrong)]
            assert code_of(lambda m=metadata: get_status(channel, metadata=m)) == "UNAUTHENTICATED"


# ----------------------------------------------------------------------------------------------- TLS


@contextmanager
def relay(address: str, context: ssl.SSLContext) -> Iterator[str]:
    """Listen in the clear, go on with TLS as `context` has it: gRPC's own client cannot be held at 1.2."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        plain, _ = listener.accept()
        raw = socket.create_connection((host, int(port)))
        with plain, context.wrap_socket(raw, server_hostname=host) as secure:
            while True:
                ready = [secure] if secure.pending() else select.select([plain, secure], [], [])[0]
                for source in ready:
                    if not (data := source.recv(65_536)):
                        return
                    (secure if source is plain else plain).sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(60)
        listener.close()


@pytest.fixture
def authority() -> Authority:
    return Authority("ours")


@pytest.fixture
def secured(tmp_path: Path, authority: Authority) -> Iterator[DaemonThread]:
    """A daemon on TCP with TLS; `ops` is its administrator."""
    tls = write_server_files(tmp_path, authority)
    settings = small_settings(tmp_path, access={"tls": tls, "admin": ["dns:ops"]})
    with DaemonThread(settings.model_copy(update={"listen": ["127.0.0.1:0"]})) as served:
        yield served


@pytest.mark.parametrize(("version", "code"), [("TLSv1_2", "UNAUTHENTICATED"), ("TLSv1_3", "answered")])
def test_calls_need_tls_1_3(
    secured: DaemonThread, authority: Authority, tmp_path: Path, version: str, code: str
) -> None:
    pair = authority.sign("dns:ops")
    (tmp_path / "client.pem").write_bytes(pair.certificate + pair.key)
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    context.load_cert_chain(tmp_path / "client.pem")
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.set_alpn_protocols(["h2"])
    address = secured.daemon.grpc.addresses[0]
    with relay(address, context) as way, grpc.insecure_channel(way) as channel:
        assert code_of(lambda: get_status(channel)) == code


def test_certificates_are_read_again_without_a_restart(
    secured: DaemonThread, authority: Authority, tmp_path: Path
) -> None:
    address = secured.daemon.grpc.addresses[0]
    successor = Authority("the next one")

    def seen(trusted: Authority, signer: Authority) -> str:
        with trusted.channel(address, signer.sign("dns:ops")) as channel:
            return code_of(lambda: get_status(channel))

    with authority.channel(address, authority.sign("dns:ops")) as standing:
        assert code_of(lambda: get_status(standing)) == "answered"
        write_server_files(tmp_path, successor)
        until(lambda: seen(successor, successor) == "answered", "the files are watched")
        assert seen(authority, authority) == "UNAVAILABLE", "the daemon shows the new certificate"
        view = secured.daemon.observability.view
        until(lambda: len(dict(metrics_sources.tls_ends(view))) == 2)
        assert seen(successor, authority) == "UNAVAILABLE", "and trusts the new authority only"
        assert code_of(lambda: get_status(standing)) == "answered", "what is connected stays so"
    (tmp_path / "certificate.pem").write_bytes(b"-----BEGIN nonsense")
    certificates = secured.daemon.listeners.certificates
    assert certificates is not None
    certificates.read_again()
    assert seen(successor, successor) == "answered", "what cannot be used changes nothing"


def test_a_mail_address_is_no_host(secured: DaemonThread, authority: Authority) -> None:
    with authority.channel(secured.daemon.grpc.addresses[0], authority.sign("mail:ops@ops")) as channel:
        assert code_of(lambda: get_status(channel)) == "PERMISSION_DENIED"
        assert code_of(lambda: open_client(channel)) == "answered", "there are no tenants: there is one"


def test_plain_tcp_is_a_caller_and_no_admin(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, access={"insecure": True})
    settings = settings.model_copy(update={"listen": ["127.0.0.1:0"]})
    with DaemonThread(settings) as served, grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
        assert code_of(lambda: open_client(channel)) == "answered"
        assert code_of(lambda: get_status(channel)) == "PERMISSION_DENIED"


def test_clients_of_one_identity_are_no_others(tmp_path: Path) -> None:
    """Two tokens, one tenant: they share blocks, and cannot speak for each other's clients."""
    tokens = {name: make_token() for name in ("one", "two")}
    (tmp_path / "tokens").write_text("".join(f"{name} {hash_of(t)}\n" for name, t in tokens.items()))
    settings = small_settings(
        tmp_path,
        access={"tokens": str(tmp_path / "tokens")},
        tenants={"acme": {"members": ["token:one", "token:two"]}},
    )
    with DaemonThread(settings) as served, grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
        one, two = ((("authorization", f"Bearer {token}"),) for token in tokens.values())
        stub: Any = KVCacheServiceStub(channel)
        request = pb.OpenClientRequest(request_id="same")
        mine = stub.OpenClient(request, metadata=one).client_id
        assert stub.OpenClient(request, metadata=one).client_id == mine, "a retry is the same request"
        assert stub.OpenClient(request, metadata=two).client_id != mine, "another's is not"
        keep = pb.KeepAliveRequest(client_id=mine)
        assert code_of(lambda: stub.KeepAlive(keep, metadata=two)) == "FAILED_PRECONDITION"
        assert code_of(lambda: stub.KeepAlive(keep, metadata=one)) == "answered"


# --------------------------------------------------------------------------------- quotas and changes


def test_a_tenants_calls_have_a_rate_over_both_transports_and_giving_back_has_none(tmp_path: Path) -> None:
    tenants = {"acme": {"members": [f"uid:{os.getuid()}"], "quota": {"requests_per_s": 3}}}
    with DaemonThread(small_settings(tmp_path, tenants=tenants)) as served:
        at_s = served.daemon.appliance.clock()
        served.daemon.appliance.clock = lambda: at_s
        served.daemon.grpc._clock = lambda: at_s
        with (
            grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel,
            RawClient(f"{tmp_path}/k.sock.local") as local,
        ):
            client = open_client(channel).client_id
            local.attach()
            namespace = local.register()
            lookup = pb.LookupRequest(namespace_id=namespace.namespace_id, prefix_hashes=bytes(32))
            stub: Any = KVCacheServiceStub(channel)
            assert code_of(lambda: stub.Lookup(lookup)) == "answered"
            assert code_of(lambda: stub.Lookup(lookup)) == "RESOURCE_EXHAUSTED"
            with pytest.raises(Refused, match="more than 3 calls a second") as refused:
                local.register()
            assert 0 < refused.value.detail.retry_after_ms <= 334
            for _ in range(10):
                keep = pb.KeepAliveRequest(client_id=client)
                assert code_of(lambda keep=keep: stub.KeepAlive(keep)) == "answered"
            at_s += 0.4
            assert code_of(lambda: stub.Lookup(lookup)) == "answered"


def test_tenants_change_while_the_daemon_runs(tmp_path: Path) -> None:
    """Who belongs to whom, at the next call even of a connection that stands; who may open the sockets."""
    settings = small_settings(tmp_path)
    mode = 0o777
    with DaemonThread(settings) as served, grpc.insecure_channel(served.daemon.grpc.addresses[0]) as channel:
        assert code_of(lambda: open_client(channel)) == "answered"
        for uid, code in ((OTHER_UID, "PERMISSION_DENIED"), (os.getuid(), "answered")):
            changed = small_settings(tmp_path, tenants={"acme": {"members": [f"uid:{uid}"]}})
            served.call(partial(served.daemon._adopt, changed))
            assert code_of(lambda: open_client(channel)) == code
            assert {os.stat(path).st_mode & mode for path in tmp_path.glob("*.sock")} == {0o666}
            assert os.stat(f"{tmp_path}/k.sock.grpc").st_mode & mode == 0o600
        served.call(lambda: served.daemon._adopt(settings))
        assert os.stat(f"{tmp_path}/k.sock.local").st_mode & mode == 0o660
