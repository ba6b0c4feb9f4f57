"""A TCP target that cannot be used: clients and command line give the same diagnosis, with its own reason."""

import asyncio
import contextlib
import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

import kvtier
from kvtier.appliance.cli.app import cli
from kvtier.clients.connector.guard import BREAKER_OPEN, Guard
from kvtier.clients.errors import InvalidRequest, KvtierError, Unavailable
from kvtier.v1.diagnosis import diagnose
from kvtier.v1.unreachable import REASONS

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from .certificates import Authority, Pair, write_server_files

VARIABLES = ("KVTIER_TLS_CA", "KVTIER_TLS_CERTIFICATE", "KVTIER_TLS_KEY", "KVTIER_TOKEN_FILE")
PAST = datetime.timedelta(days=-30)


@dataclass
class Host:
    """Daemons and others on ports of this host, and the authority of those that speak TLS."""

    authority: Authority
    stranger: Authority
    ports: dict[str, str]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    authority, stranger = Authority("ours"), Authority("theirs")
    tls = write_server_files(folder, authority)
    with contextlib.ExitStack() as stack:
        ports = {}
        for name, access in (("mutual TLS", {"tls": tls}), ("plain", {"insecure": True})):
            (folder / name).mkdir()
            settings = small_settings(folder / name, access=access).model_copy(
                update={"listen": ["127.0.0.1:0"]}
            )
            served = stack.enter_context(DaemonThread(settings))
            ports[name] = served.daemon.grpc.addresses[0]
        expired = authority.sign("ip:127.0.0.1", shift=PAST)
        ports["expired"] = stack.enter_context(tls_server(expired))
        ports["other name"] = stack.enter_context(tls_server(authority.sign("dns:elsewhere.example")))
        ports["another service"] = stack.enter_context(tls_server(authority.sign("ip:127.0.0.1")))
        ports["a web server"] = stack.enter_context(replying(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        ports["a shell"] = stack.enter_context(replying(b"SSH-2.0-OpenSSH_9.2\r\n"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports["nothing"] = f"127.0.0.1:{free.getsockname()[1]}"
        yield Host(authority, stranger, ports)


@contextlib.contextmanager
def tls_server(pair: Pair) -> Iterator[str]:
    """A gRPC server without services, over TLS without client certificates."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@contextlib.contextmanager
def replying(text: bytes) -> Iterator[str]:
    """Something that greets every connection with `text` and ends it when the peer has spoken."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(5)
                        connection.sendall(text)
                        connection.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # ends the accept
        thread.join()


@pytest.fixture
def present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what sets this process's variables to files with an authority and a certificate."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def set_up(authority: Authority | None = None, pair: Pair | None = None) -> None:
        parts = {"KVTIER_TLS_CA": authority.certificate if authority else b""}
        if pair is not None:
            parts |= {"KVTIER_TLS_CERTIFICATE": pair.certificate, "KVTIER_TLS_KEY": pair.key}
        for variable, content in parts.items():
            (tmp_path / variable).write_bytes(content)
            if content:
                monkeypatch.setenv(variable, str(tmp_path / variable))

    return set_up


def outcomes(target: str) -> list[tuple[type, str, str]]:
    """Return what a blocking and an asynchronous client raise: class, reason, message."""
    found = []
    for call in (_info, lambda target: asyncio.run(_async_info(target))):
        with pytest.raises(KvtierError) as raised:
            call(target)
        found.append((type(raised.value), raised.value.reason, raised.value.message))
    return found


def _info(target: str) -> str:
    with kvtier.Client(target) as client:
        return client.info.version


async def _async_info(target: str) -> str:
    async with kvtier.AsyncClient(target) as client:
        return (await client.info).version


# authority and certificate that the caller has, what it calls, and what is said
MISTAKES: dict[str, tuple[str, str, str, str, str]] = {
    "wrong authority": ("theirs", "ours", "mutual TLS", "TLS_UNTRUSTED", "leads to no authority"),
    "another name": ("ours", "", "other name", "TLS_WRONG_NAME", "subjectAltName for 127.0.0.1"),
    "the daemon's has expired": ("ours", "", "expired", "TLS_EXPIRED", "out of date"),
    "no client certificate": ("ours", "", "mutual TLS", "TLS_CERTIFICATE_NEEDED", "KVTIER_TLS_KEY"),
    "strange client certificate": ("ours", "theirs", "mutual TLS", "TLS_CERTIFICATE_REFUSED", "client_ca"),
    "old client certificate": ("ours", "expired", "mutual TLS", "TLS_CERTIFICATE_REFUSED", "openssl x509"),
    "no TLS at a TLS port": ("", "", "mutual TLS", "TLS_NEEDED", "set KVTIER_TLS_CA"),
    "TLS at a plain port": ("ours", "ours", "plain", "TLS_NOT_SPOKEN", "access.tls"),
    "a web server": ("", "", "a web server", "NOT_KVTIER", "HTTP/1.1 400"),
    "a shell": ("", "", "a shell", "NOT_KVTIER", "SSH-2.0"),
    "a web server instead of TLS": ("ours", "ours", "a web server", "NOT_KVTIER", "HTTP/1.1 400"),
    "another gRPC service": ("ours", "", "another service", "NOT_KVTIER", "no kvtier daemon"),
    "nobody": ("", "", "nothing", "NOT_RUNNING", "kvtier serve"),
    "nobody with TLS": ("ours", "ours", "nothing", "NOT_RUNNING", "kvtier serve"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_its_name(host: Host, present: Callable[..., None], mistake: str) -> None:
    authority, certificate, port, reason, words = MISTAKES[mistake]
    pairs = {
        "ours": host.authority.sign("dns:rt"),
        "theirs": host.stranger.sign("dns:rt"),
        "expired": host.authority.sign("dns:rt", shift=PAST),
    }
    present({"ours": host.authority, "theirs": host.stranger}.get(authority), pairs.get(certificate))
    target = host.ports[port]
    sync, asynchronous = outcomes(target)
    assert sync == asynchronous
    assert sync[:2] == (Unavailable, reason)
    assert words in sync[2]
    assert target in sync[2]
    command = CliRunner().invoke(cli, ["status", "--target", target])
    assert (command.exit_code, command.stdout) == (3, "")
    assert " ".join(sync[2].split()) in " ".join(command.stderr.split()), "one diagnosis for both"
    assert reason in REASONS


def test_what_is_right_is_left_alone(host: Host, present: Callable[..., None]) -> None:
    present(host.authority, host.authority.sign("dns:rt"))
    target = host.ports["mutual TLS"]
    assert diagnose(target) is None
    assert _info(target) == asyncio.run(_async_info(target)) == kvtier.__version__


def test_plaintext_that_is_right_is_left_alone(host: Host, present: Callable[..., None]) -> None:
    present()
    assert diagnose(host.ports["plain"]) is None
    assert _info(host.ports["plain"]) == kvtier.__version__


def test_files_that_do_not_belong_together(host: Host, present: Callable[..., None], tmp_path: Path) -> None:
    present(host.authority, Pair(host.authority.sign("dns:a").certificate, host.authority.sign("dns:b").key))
    for kind, reason, message in outcomes(host.ports["mutual TLS"]):
        assert (kind, reason) == (InvalidRequest, "BAD_CREDENTIALS")
        assert "KVTIER_TLS_KEY" in message


def test_a_host_that_has_no_address(present: Callable[..., None]) -> None:
    present()
    for kind, reason, message in outcomes("no-such-host.invalid:50051"):
        assert (kind, reason) == (Unavailable, "UNKNOWN_HOST")
        assert "no-such-host.invalid" in message


def test_a_plug_in_warns_once_with_the_diagnosis(
    host: Host, present: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    present(host.authority)
    guard = Guard("plug-in")
    with kvtier.Client(host.ports["mutual TLS"]) as client:
        assert [guard.ask("lookup", lambda: client.info) for _ in range(3)] == [None] * 3
    assert guard.causes == {"TLS_CERTIFICATE_NEEDED": 1, BREAKER_OPEN: 2}
    (warning,) = [record.message for record in caplog.records if record.name == "plug-in"]
    assert "KVTIER_TLS_CERTIFICATE" in warning


def test_no_proxy_is_asked(host: Host, present: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    present()
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, f"http://{host.ports['nothing']}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    assert _info(host.ports["plain"]) == kvtier.__version__
