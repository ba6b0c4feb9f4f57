"""Real directories for tests: Redis or Valkey (alone, behind Sentinel, as a Cluster) and etcd, on loopback.

apt-get install --no-install-recommends redis-server redis-sentinel etcd-server etcd-client
(`make test-directories` does that)
"""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.ports import free_port
from tests.security.certificates import Authority

from ...waiting import until

#: The first that is there; `KVTIER_TEST_REDIS` names another one.
PROGRAMS = (os.environ.get("KVTIER_TEST_REDIS", ""), "redis-server", "valkey-server")
REDIS = next((found for found in map(shutil.which, PROGRAMS) if found), None)
ETCD = shutil.which("etcd") if shutil.which("etcdctl") else None
PASSWORD, OPERATOR = "correct-horse", "operator"
needs_redis = pytest.mark.skipif(REDIS is None, reason="needs Debian's redis-server (make test-directories)")
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="needs Debian's etcd-server and etcd-client (make test-directories)"
)
_QUICK = ("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")


PLAIN: Mapping[str, str] = MappingProxyType({})


class Server:
    """One process of a directory, started anew as often as a test wants. What it knew is gone then.

    `files`: those of `write_certificates` where it speaks TLS."""

    def __init__(
        self, folder: Path, port: int, command: Sequence[str], files: Mapping[str, str] = PLAIN
    ) -> None:
        self.port = port
        self.log = folder / f"{port}.log"
        self.files = files
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
        with ExitStack() as open_:
            connection = open_.enter_context(socket.create_connection(("127.0.0.1", self.port), 10))
            if self.files:
                context = ssl.create_default_context(cafile=self.files["ca"])
                context.load_cert_chain(self.files["certificate"], self.files["key"])
                connection = open_.enter_context(context.wrap_socket(connection, server_hostname="127.0.0.1"))
                _say(connection, "AUTH", OPERATOR, PASSWORD)
            return _say(connection, *words)

    def info(self, section: str) -> dict[str, str]:
        """Return fields of INFO."""
        lines = self.ask("INFO", section).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def _say(connection: socket.socket, *words: str) -> str:
    parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
    connection.sendall(f"*{len(words)}\r\n{parts}".encode())
    return connection.recv(1 << 16).decode(errors="replace")


def redis_options(port: int, files: Mapping[str, str], users: str = "users") -> dict[str, str]:
    """Return what a server or a Sentinel is told: with files TLS only, with certificates on both ends."""
    if not files:
        return {"port": str(port), "bind": "127.0.0.1"}
    options = {"port": "0", "tls-port": str(port), "bind": "127.0.0.1", "tls-replication": "yes"}
    options |= {"tls-cert-file": files["certificate"], "tls-key-file": files["key"]}
    options["tls-ca-cert-file"] = files["ca"]
    return options | ({"aclfile": files[users]} if users in files else {})


@contextmanager
def redis_server(
    folder: Path, *more: str, port: int = 0, files: Mapping[str, str] = PLAIN
) -> Iterator[Server]:
    """Run one server, which keeps nothing on disk."""
    assert REDIS is not None
    port = port or free_port()
    options = redis_options(port, files)
    if files:
        options |= {"tls-cluster": "yes", "masteruser": OPERATOR, "masterauth": PASSWORD}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    server = Server(folder, port, [REDIS, *words, *_QUICK, *more], files)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def write_certificates(folder: Path) -> dict[str, str]:
    """Write an authority, a certificate for 127.0.0.1, a password, users of Redis; return the paths by name.

    The host's users of servers and of Sentinels have the rights that docs/operate/fleet.md names, of fleets
    whose names begin with "test"."""
    authority = Authority("directories")
    pair = authority.sign("ip:127.0.0.1", "dns:localhost")
    page = (Path(__file__).parents[3] / "docs/operate/fleet.md").read_text()
    of_server, of_sentinel = re.findall(r"^user kvtier on >PASSWORD .*", page, re.MULTILINE)
    contents = {
        "ca": ("ca.crt", authority.certificate),
        "certificate": ("tls.crt", pair.certificate),
        "key": ("tls.key", pair.key),
        "password": ("password", f"{PASSWORD}\n".encode()),
        "users": ("users.acl", _users(of_server)),
        "sentinel users": ("sentinels.acl", _users(of_sentinel)),
    }
    for file, content in contents.values():
        (folder / file).write_bytes(content)
    return {name: str(folder / file) for name, (file, _) in contents.items()}


def _users(host: str) -> bytes:
    mine = host.replace(">PASSWORD", f">{PASSWORD}").replace(":FLEET", ":test*")
    return f"{mine}\nuser default off\nuser {OPERATOR} on >{PASSWORD} ~* &* +@all\n".encode()


def write_password(folder: Path) -> None:
    """Write PASSWORD into the file that `credentials` has for it."""
    (folder / "password").write_text(f"{PASSWORD}\n")


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
def sentinel_set(folder: Path, files: Mapping[str, str] = PLAIN) -> Iterator[SentinelSet]:
    """Run a master with a replica behind Sentinel."""
    with ExitStack() as running:
        master = running.enter_context(redis_server(folder, files=files))
        follow = ("--replicaof", "127.0.0.1", str(master.port))
        replica = running.enter_context(redis_server(folder, *follow, files=files))
        sentinels = []
        for _ in range(3):
            port = free_port()
            file = folder / f"sentinel{port}.conf"
            options = redis_options(port, files, "sentinel users")
            lines = [f"{name} {value}" for name, value in options.items()]
            lines.append(f"sentinel monitor main 127.0.0.1 {master.port} 2")
            lines += ["sentinel down-after-milliseconds main 1000", "sentinel failover-timeout main 3000"]
            if files:
                lines += [f"sentinel auth-user main {OPERATOR}", f"sentinel auth-pass main {PASSWORD}"]
            if "sentinel users" in files:
                lines += [f"sentinel sentinel-user {OPERATOR}", f"sentinel sentinel-pass {PASSWORD}"]
            file.write_text("".join(f"{line}\n" for line in lines))
            assert REDIS is not None
            one = Server(folder, port, [REDIS, str(file), "--sentinel"], files)
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
def redis_cluster(
    folder: Path, num_nodes: int = 3, *, has_replica: bool = False, files: Mapping[str, str] = PLAIN
) -> Iterator[list[Server]]:
    """Run a Cluster of masters; the first one may have a replica, which is the last node then."""
    with ExitStack() as running:
        nodes = []
        for _ in range(num_nodes + has_replica):
            port = free_port()
            more = ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes{port}.conf"]
            more += ["--cluster-port", str(free_port()), "--cluster-require-full-coverage", "no"]
            more += ["--cluster-node-timeout", "1000"] * has_replica
            nodes.append(running.enter_context(redis_server(folder, *more, port=port, files=files)))
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
def etcd_cluster(
    folder: Path, num_members: int = 3, files: Mapping[str, str] = PLAIN, *more: str
) -> Iterator[list[Server]]:
    """Run members of one etcd; with `files` they speak TLS, with certificates on both ends."""
    assert ETCD is not None
    scheme = "https" if files else "http"
    peers = {f"m{number}": f"{scheme}://127.0.0.1:{free_port()}" for number in range(num_members)}
    members = []
    with ExitStack() as running:
        for name, own in peers.items():
            port = free_port()
            client = f"{scheme}://127.0.0.1:{port}"
            command = [
                *(ETCD, "--name", name, "--data-dir", str(folder / f"etcd{port}"), "--unsafe-no-fsync"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", own, "--initial-advertise-peer-urls", own),
                *("--initial-cluster", ",".join(f"{one}={url}" for one, url in peers.items())),
                *("--heartbeat-interval", "100", "--election-timeout", "500", *more),
            ]
            for kind in ("", "peer-") if files else ():
                command += [f"--{kind}cert-file", files["certificate"], f"--{kind}key-file", files["key"]]
                command += [f"--{kind}trusted-ca-file", files["ca"], f"--{kind}client-cert-auth"]
            members.append(Server(folder, port, command, files))
            running.callback(members[-1].stop)
            members[-1].start()
        ready = "ready to serve client requests"
        until(lambda: all(ready in member.log.read_text() for member in members), "etcd elects nobody")
        yield members


@contextmanager
def etcd_server(folder: Path, files: Mapping[str, str] = PLAIN) -> Iterator[Server]:
    """Run one etcd."""
    with etcd_cluster(folder, 1, files) as members:
        yield members[0]


def etcd_control(members: Sequence[Server], *words: str, user: str = "") -> str:
    """Return what etcdctl prints."""
    files = members[0].files
    words = (*words, *(("--user", f"{user}:{PASSWORD}") if user else ()))
    scheme = "https" if files else "http"
    command = ["etcdctl", "--endpoints", ",".join(f"{scheme}://127.0.0.1:{one.port}" for one in members)]
    if files:
        command += ["--cacert", files["ca"], "--cert", files["certificate"], "--key", files["key"]]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    return subprocess.run(
        [*command, *words], check=True, env=environment, capture_output=True, text=True
    ).stdout


def etcd_leader(members: Sequence[Server]) -> Server:
    """Return which of the members is the leader; waits until there is one."""

    def leads(member: Server) -> bool:
        with suppress(subprocess.CalledProcessError):  # it has just been started
            (told,) = json.loads(etcd_control([member], "endpoint", "status", "--write-out", "json"))
            return bool(told["Status"]["header"]["member_id"] == told["Status"].get("leader"))
        return False

    return until(lambda: [one for one in members if leads(one)], "no member leads")[0]


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Let a server stand still."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
