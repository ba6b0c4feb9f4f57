"""Real directories for tests: Redis or Valkey (alone, behind Sentinel, as a Cluster) and etcd, on loopback.

apt-get install --no-install-recommends redis-server redis-sentinel etcd-server etcd-client
(`make test-directories` does that)
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.security.certificates import Authority

from ...waiting import until

#: The first that is there; `KVTIER_TEST_REDIS` names another one.
PROGRAMS = (os.environ.get("KVTIER_TEST_REDIS", ""), "redis-server", "valkey-server")
REDIS = next((found for found in map(shutil.which, PROGRAMS) if found), None)
ETCD = shutil.which("etcd") if shutil.which("etcdctl") else None
PASSWORD = "correct-horse"
needs_redis = pytest.mark.skipif(REDIS is None, reason="needs Debian's redis-server (make test-directories)")
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="needs Debian's etcd-server and etcd-client (make test-directories)"
)
_QUICK = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0")


class Server:
    """One process of a directory, started anew as often as a test wants. What it knew is gone then."""

    def __init__(self, folder: Path, port: int, command: Sequence[str]) -> None:
        self.port = port
        self.log = folder / f"{port}.log"
        self._folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._folder)
        until(self._accepts, f"{self._command[0]} does not start: {self.log.read_text()[-2000:]}")

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Kill it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, *words: str) -> str:
        """Return what Redis answers to a command, as it comes over the wire."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(f"*{len(words)}\r\n{parts}".encode())
            return connection.recv(1 << 16).decode(errors="replace")

    def info(self, section: str) -> dict[str, str]:
        """Return fields of INFO."""
        lines = self.ask("INFO", section).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def redis_command(port: int, *more: str) -> list[str]:
    """Return the command of a server that keeps nothing on disk."""
    assert REDIS is not None
    return [REDIS, "--port", str(port), *_QUICK, *more]


@contextmanager
def redis_server(folder: Path, *more: str, port: int = 0) -> Iterator[Server]:
    """Run one server."""
    port = port or free_port()
    server = Server(folder, port, redis_command(port, *more))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def write_certificates(folder: Path) -> dict[str, str]:
    """Write an authority, and a certificate for 127.0.0.1; return the paths by name."""
    authority = Authority("directories")
    pair = authority.sign("ip:127.0.0.1", "dns:localhost")
    files = {"ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}
    for name, content in zip(files, (authority.certificate, pair.certificate, pair.key), strict=True):
        (folder / files[name]).write_bytes(content)
    return {name: str(folder / file) for name, file in files.items()}


def write_password(folder: Path) -> None:
    """Write PASSWORD into the file that `credentials` has for it."""
    (folder / "password").write_text(f"{PASSWORD}\n")


def tls_words(files: dict[str, str], port: int) -> list[str]:
    """Return the arguments with which a server speaks TLS only, with certificates on both ends."""
    return [
        *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes"),
        *("--tls-cert-file", files["certificate"], "--tls-key-file", files["key"]),
        *("--tls-ca-cert-file", files["ca"]),
    ]


class SentinelSet:
    """A master, a replica, and three Sentinels that watch them."""

    def __init__(self, master: Server, replica: Server, sentinels: list[Server]) -> None:
        self.master, self.replica, self.sentinels = master, replica, sentinels

    @property
    def url(self) -> str:
        """What a host is told."""
        nodes = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return f"redis+sentinel://{nodes}/main"

    def fail_over(self) -> None:
        """Kill the master; wait until the replica has taken over."""
        self.master.stop()
        until(lambda: self.replica.info("replication").get("role") == "master", "nobody takes over")


@contextmanager
def sentinel_set(folder: Path) -> Iterator[SentinelSet]:
    """Run a master with a replica behind Sentinel."""
    with ExitStack() as running:
        master = running.enter_context(redis_server(folder))
        replica = running.enter_context(redis_server(folder, "--replicaof", "127.0.0.1", str(master.port)))
        sentinels = []
        for _ in range(3):
            port = free_port()
            file = folder / f"sentinel{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\n"
                f"sentinel monitor main 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 3000\n"
            )
            assert REDIS is not None
            one = Server(folder, port, [REDIS, str(file), "--sentinel"])
            running.callback(one.stop)
            one.start()
            sentinels.append(one)
        until(lambda: replica.info("replication").get("master_link_status") == "up", "no replica")
        until(
            lambda: all(
                "slaves=1,sentinels=3" in one.info("sentinel").get("master0", "") for one in sentinels
            ),
            "the Sentinels do not meet",
        )
        yield SentinelSet(master, replica, sentinels)


@contextmanager
def redis_cluster(folder: Path, num_nodes: int = 3, *, has_replica: bool = False) -> Iterator[list[Server]]:
    """Run a Cluster of masters; the first one may have a replica, which is the last node then."""
    with ExitStack() as running:
        nodes = []
        for _ in range(num_nodes + has_replica):
            port = free_port()
            more = ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes{port}.conf"]
            more += ["--cluster-port", str(free_port()), "--cluster-require-full-coverage", "no"]
            more += ["--cluster-node-timeout", "1000"] * has_replica
            nodes.append(running.enter_context(redis_server(folder, *more, port=port)))
        step = 16384 // num_nodes + 1
        for number, node in enumerate(nodes[:num_nodes]):
            first, last = number * step, min(16384, (number + 1) * step) - 1
            assert "OK" in node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            bus = node.ask("CLUSTER", "MYID") and node.ask("CONFIG", "GET", "cluster-port").split("\r\n")[4]
            for other in nodes:
                assert "OK" in other.ask("CLUSTER", "MEET", "127.0.0.1", str(node.port), bus)
        until(lambda: all("cluster_state:ok" in one.ask("CLUSTER", "INFO") for one in nodes), "no cluster")
        until(
            lambda: all(f"cluster_known_nodes:{len(nodes)}" in one.ask("CLUSTER", "INFO") for one in nodes),
            "the nodes do not meet",
        )
        if has_replica:
            first_id = nodes[0].ask("CLUSTER", "MYID").split("\r\n")[1]
            until(lambda: "OK" in nodes[-1].ask("CLUSTER", "REPLICATE", first_id), "no replica")
            until(lambda: nodes[-1].info("replication").get("master_link_status") == "up", "no replica")
        yield nodes


@contextmanager
def etcd_server(folder: Path, files: dict[str, str] | None = None) -> Iterator[Server]:
    """Run one etcd; with `files` it speaks TLS, with certificates on both ends."""
    assert ETCD is not None
    port, peer = free_port(), free_port()
    scheme = "https" if files else "http"
    client, own = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [
        *(ETCD, "--data-dir", str(folder / f"etcd{port}"), "--unsafe-no-fsync"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", own, "--initial-advertise-peer-urls", own),
        *("--initial-cluster", f"default={own}"),
    ]
    if files:
        command += ["--cert-file", files["certificate"], "--key-file", files["key"], "--client-cert-auth"]
        command += ["--trusted-ca-file", files["ca"]]
    etcd = Server(folder, port, command)
    etcd.start()
    until(lambda: "ready to serve client requests" in etcd.log.read_text(), "etcd elects nobody")
    try:
        yield etcd
    finally:
        etcd.stop()


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Let a server stand still."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
