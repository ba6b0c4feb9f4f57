"""`python -m tests.chaos.directory`: two hosts that meet in a directory, which is made to fail under load.

    redis      an index; killed, stopped, slow, flushed, full, its clock hours ahead and back
    sentinel   an index; failed over, flushed, its master stopped
    cluster    an index; a master failed over to its replica, stopped, all flushed
    etcd       streams; killed, stopped, slow, emptied

The wall clock of the second host is five hours ahead (clock.c). In the directory there are, beside the two,
a host with a valid certificate that says it has what it has not and sends garbage, too much, or nothing,
another trick at every fault; another life at the first one's address; and the life of the second one at an
address where nothing listens (strangers.py). Each host has a worker (worker.py) and a probe, which asks for
what no host has, or only the lying one says it has.

It fails when a worker or a probe read a wrong byte or was refused anything; when from NO_CACHE_AFTER_S after
a fault on probes take longer than NO_CACHE_S at the median; when afterwards a host does not read what the
other one puts; and for what fleet.py fails at the end. Servers that are not installed are left out, in words.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.appliance.config.tenants import Tls
from kvtier.clients import Client, KvtierError, PrefillSpeed
from tests.daemon import PATIENT
from tests.ports import free_port
from tests.security.certificates import Authority
from tests.sources.directories.servers import (
    ETCD,
    REDIS,
    Server,
    etcd_server,
    redis_cluster,
    redis_server,
    sentinel_set,
    stopped,
)

from ..waiting import until
from .content import IDENTITY, names_of
from .hosts import FleetHost, HostsUnderLoad
from .load import Role
from .strangers import FIRST_LIE, NUM_LIES, Strangers

ENGINES = ("redis", "sentinel", "cluster", "etcd")
AWAY_S = 4.0
NO_CACHE_AFTER_S, NO_CACHE_S = 2.0, 0.5
PROBE_PAUSE_S = 0.05
AHEAD_S = 5 * 3600
PREFILL = PrefillSpeed(1000.0)  # tokens/s: half a second for a chain, which is waited for at most
CERTIFICATE_NAME = "hosts.fleet"
LOG_CHARACTERS = 4000


class Directory(NamedTuple):
    """One that runs: where it is, and what can be done to it."""

    url: str
    has_index: bool
    faults: dict[str, Callable[[], None]]


class Probe:
    """Asks one host again and again for what is not there: `times` are (seconds since the epoch, it took)."""

    def __init__(self, host: FleetHost, seed: int) -> None:
        self.times: list[tuple[float, float]] = []
        self.problem = ""
        self._host, self._dice, self._ended = host, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with Client(self._host.daemon.target, timeout=PATIENT) as client:
                namespace = client.register(IDENTITY, PREFILL)
                while not self._ended.wait(PROBE_PAUSE_S):
                    number = FIRST_LIE + self._dice.randrange(2 * NUM_LIES)  # no host has half of them
                    began_at = time.monotonic()
                    report = client.get(namespace, names_of(number))
                    self.times.append((began_at, time.monotonic() - began_at))
                    if report.num_blocks:
                        self.problem = f"{report.num_blocks} blocks of chain {number}, which no host has"
        except Exception as failure:
            self.problem = repr(failure)


class DirectoryChaos(HostsUnderLoad):
    """One run with one directory."""

    def __init__(self, folder: Path, directory: Directory, tls: Tls, clock: list[str], dice: random.Random):
        ports = [free_port(), free_port()]
        parts = {"certificate": tls.certificate, "key": tls.key, "client_ca": tls.client_ca}
        settings = [
            *(f"access.tls.{name}={path}" for name, path in parts.items()),
            f"peers.certificate_name={CERTIFICATE_NAME}",
            f"peers.directory.url={directory.url}",
            f"peers.directory.index={str(directory.has_index).lower()}",
        ]
        super().__init__(
            [
                FleetHost(folder, n, f"127.0.0.1:{port}", settings, 0.05, clock if n else ())
                for n, port in enumerate(ports)
            ]
        )
        self._directory, self._dice = directory, dice
        self._strangers = Strangers(
            directory.url, folder, tls, self.hosts[0].address, has_index=directory.has_index
        )
        self._probes: list[Probe] = []
        self._num_lies = dice.randrange(100)

    def run(self, seconds: float) -> Counter[str]:
        """Return counts of what was done. Raises AssertionError when something was wrong."""
        try:
            for number, host in enumerate(self.hosts):
                host.daemon.start()
                host.load.start(Role(is_grpc=bool(number)))
            self._wait_for_load()
            self._probes = [Probe(host, number) for number, host in enumerate(self.hosts)]
            self._assert_meet()
            self._strangers.doubled = self.hosts[1].status().epoch
            faults, began_at = list[str](), time.monotonic()
            while time.monotonic() < began_at + seconds:
                faults = faults or self._dice.sample(
                    list(self._directory.faults), len(self._directory.faults)
                )
                self._fault(faults.pop(), began_at)
            self._strangers.close()
            self._assert_meet()
            self._judge()
            for probe in self._probes:
                probe.end()
            return self._end()
        finally:
            self._strangers.close()
            self.close()

    def _fault(self, name: str, began_at: float) -> None:
        self._num_lies += 1
        trick = self._strangers.lie(self._num_lies)
        failed_at = time.monotonic()
        self._directory.faults[name]()
        self._pause.wait(max(0.0, failed_at + NO_CACHE_AFTER_S + 1.0 - time.monotonic()))
        self._judge()
        late = [
            took
            for probe in self._probes
            for at, took in list(probe.times)
            if at > failed_at + NO_CACHE_AFTER_S
        ]
        words = f"{name}; the liar: {trick}"
        assert len(late) > 1, f"{words}: a probe stands still"
        median_s, worst_s = statistics.median(late), max(late)
        print(
            f"{failed_at - began_at:6.1f} s  {words}; {len(late)} probes, median {median_s * 1e3:.1f} ms, "
            f"worst {worst_s * 1e3:.0f} ms",
            flush=True,
        )
        assert median_s < NO_CACHE_S, f"{words}: what no host has takes {median_s:.2f} s"

    def _judge(self) -> None:
        """No worker and no probe was refused anything, or has read a wrong byte."""
        for host, probe in zip(self.hosts, self._probes, strict=True):
            host.load.assert_alive()
            assert not probe.problem, f"{host.address}: {probe.problem}"
            refused = {name: n for name, n in host.load.counts().items() if name.startswith("refused") and n}
            assert not refused, f"{host.address}: {refused}"


# --------------------------------------------------------------------------------------------- engines


def _away(server: Server, how: str) -> Callable[[], None]:
    """Return what keeps a server away for AWAY_S: `kill`, `stop` or `slow`."""
    pause = threading.Event()

    def kill() -> None:
        server.stop()
        pause.wait(AWAY_S)
        server.start()

    def stop() -> None:
        with stopped(server):
            pause.wait(AWAY_S)

    def slow() -> None:
        ends_at = time.monotonic() + AWAY_S
        while time.monotonic() < ends_at:
            with stopped(server):
                pause.wait(0.3)
            pause.wait(0.03)

    return {"kill": kill, "stop": stop, "slow": slow}[how]


def _fail_over(master: Server, replica: Server, kind: str) -> Callable[[], None]:
    """Return what kills the one that is the master now, and brings it back as the replica of the other."""
    pair = [master, replica]

    def fail_over() -> None:
        first, second = pair
        first.stop()
        until(lambda: second.info("replication").get("role") == "master", f"{kind}: none takes over")
        first.start()
        until(lambda: first.info("replication").get("role") == "slave", f"{kind}: no replica")
        pair.reverse()

    return fail_over


def _flush(*servers: Server) -> None:
    for server in servers:
        server.ask("FLUSHALL")


@contextmanager
def _redis(folder: Path, clock: Path) -> Iterator[Directory]:
    with redis_server(folder, "--maxmemory-policy", "noeviction") as server:
        server.ask("SADD", "{kvtier:kvtier}:hosts", "nonsense", "12")
        server.ask("SET", "{kvtier:kvtier}:host:12", "[" * 1000)
        pause = threading.Event()

        def fill() -> None:
            server.ask("CONFIG", "SET", "maxmemory", "1")
            pause.wait(AWAY_S)
            server.ask("CONFIG", "SET", "maxmemory", "0")

        def leap() -> None:
            for seconds in (AHEAD_S, -AHEAD_S, 0):
                clock.write_bytes(seconds.to_bytes(8, sys.byteorder, signed=True))
                pause.wait(AWAY_S / 3)

        faults = {how: _away(server, how) for how in ("kill", "stop", "slow")}
        faults |= {
            "flush": lambda: _flush(server),
            "full": fill,
            "its clock leaps": leap,
        }
        yield Directory(f"redis://127.0.0.1:{server.port}", True, faults)


@contextmanager
def _sentinel(folder: Path, clock: Path) -> Iterator[Directory]:
    with sentinel_set(folder) as servers:
        both = (servers.master, servers.replica)
        faults = {
            "fail over": _fail_over(*both, "Sentinel"),
            "flush": lambda: _flush(*both),
        }
        yield Directory(servers.url, True, faults)


@contextmanager
def _cluster(folder: Path, clock: Path) -> Iterator[Directory]:
    with redis_cluster(folder, has_replica=True) as nodes:
        faults = {
            "fail over": _fail_over(nodes[0], nodes[-1], "Cluster"),
            "flush": lambda: _flush(*nodes),
            "stop": _away(nodes[1], "stop"),
        }
        yield Directory(f"redis+cluster://127.0.0.1:{nodes[1].port},127.0.0.1:{nodes[2].port}", True, faults)


@contextmanager
def _etcd(folder: Path, clock: Path) -> Iterator[Directory]:
    with etcd_server(folder) as server:
        faults = {how: _away(server, how) for how in ("kill", "stop", "slow")}

        def empty() -> None:
            words = ["etcdctl", "--endpoints", f"127.0.0.1:{server.port}", "del", "--prefix", "kvtier/"]
            environment = {**os.environ, "ETCDCTL_API": "3"}
            subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)

        yield Directory(f"etcd://127.0.0.1:{server.port}", False, faults | {"empty": empty})


def clock_words(folder: Path, name: str, seconds: int) -> tuple[Path, list[str]]:
    """Return a file that says how far apart a clock is, and what a command that runs by it begins with;
    nothing without a compiler."""
    path, library = folder / name, folder / "clock.so"
    path.write_bytes(seconds.to_bytes(8, sys.byteorder, signed=True))
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("no C compiler: all clocks are right")
        return path, []
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return path, ["env", f"LD_PRELOAD={library}", f"KVTIER_CLOCK={path}"]


def host_files(folder: Path) -> Tls:
    """Write the certificate that all hosts show, the lying one among them."""
    authority = Authority("fleet")
    pair = authority.sign(f"dns:{CERTIFICATE_NAME}")
    files = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.certificate}
    for name, content in files.items():
        (folder / f"{name}.pem").write_bytes(content)
    return Tls(**{name: folder / f"{name}.pem" for name in files})


def run_engine(engine: str, folder: Path, seconds: float, dice: random.Random) -> Counter[str]:
    """Run one directory. Raises AssertionError, KvtierError."""
    opened = {"redis": _redis, "sentinel": _sentinel, "cluster": _cluster, "etcd": _etcd}[engine]
    leaps, words = clock_words(folder, "leaps", 0)
    _, ahead = clock_words(folder, "ahead", AHEAD_S)
    with ExitStack() as stack:
        for word in words[1:] if engine == "redis" else ():  # servers are started with this environment
            name, _, value = word.partition("=")
            os.environ[name] = value
            stack.callback(os.environ.pop, name, None)
        directory = stack.enter_context(opened(folder, leaps))
        for word in words[1:]:
            os.environ.pop(word.partition("=")[0], None)
        return DirectoryChaos(folder, directory, host_files(folder), ahead, dice).run(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.directory",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of faults for each directory")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--drawn", type=int, metavar="N", help="only N directories, which the seed decides")
    parser.add_argument("--only", action="append", choices=ENGINES, help="may be repeated")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    engines = [one for one in arguments.only or ENGINES if (ETCD if one == "etcd" else REDIS)]
    for missing in sorted({*(arguments.only or ENGINES)} - {*engines}):
        print(f"{missing} is not run: its server is not installed (make test-directories installs it)")
    engines = dice.sample(engines, min(len(engines), arguments.drawn or len(engines)))
    print(f"seed {arguments.seed}, {arguments.seconds:g} s each: {', '.join(engines)}", flush=True)
    total: Counter[str] = Counter()
    for engine in engines:
        with tempfile.TemporaryDirectory(prefix="kvtier-directory-") as name:
            print(f"== {engine}", flush=True)
            try:
                total += run_engine(engine, Path(name), arguments.seconds, dice)
            except (AssertionError, KvtierError) as problem:
                for log in sorted(Path(name).glob("host*/daemon.log")):
                    print(f"== {log.parent.name}\n{log.read_text()[-LOG_CHARACTERS:]}", file=sys.stderr)
                print(f"seed {arguments.seed}, {engine}: {problem}", file=sys.stderr)
                return 1
    print(json.dumps(dict(sorted(total.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
