"""`python -m tests.chaos.fleet --seconds 60`: three hosts in network namespaces, load on each, and faults.

Workers on every host (worker.py) put, and ask for what the others put a moment or a while ago, which comes
from the other host's memory. Faults follow one another in an order that `--seed` decides, each on one host:
its daemon or its supervisor is killed, its daemon stopped, its cable pulled for a while or again and again,
it is not heard by one of the others, its link is slow. It fails when

- a worker read a wrong byte, was told of a defect, or raised anything but KvtierError;
- a call on a host that nothing was done to was refused because its daemon did not answer;
- a host serves nothing of its own while another one is away;
- at the end the hosts do not see each other within a minute, one does not read what another one then puts,
  nothing was fetched, an audit finds something, SIGTERM ends a daemon with an error, or a log has a
  traceback.

`--break NAME` runs it against a copy of the product with a planted defect (breaks.py) and succeeds when that
is seen. It needs root and iproute2 (examples/network.py) and says so.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc

from examples.network import LINK, NetworkHost, network, why_not
from kvtier.clients import Client, KvtierError
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import PATIENT, START_S, Daemon

from .breaks import FLEET_BREAKS, planted
from .content import CHAIN_BLOCKS, IDENTITY, names_of, payload_of, wrong_words
from .load import Load, Role
from .worker import SAID_CALLS

NUM_HOSTS = 3
PORT = 7070
SLOW_LINK = "tbf rate 4mbit burst 64kb latency 50ms"
NUM_FLAPS = 6
AWAY_S = 6.0  # at most; a host is forgotten after three seconds of silence
MEET_S = 60.0
WARM_S = 90.0
LOG_CHARACTERS = 4000
#: A call that ended so found no daemon, or one that did not answer in time.
UNANSWERED = ("NO_ANSWER", "NOT_RUNNING", "TIMEOUT", "DEADLINE_EXCEEDED")
SETTINGS = (
    *("tiers.dram.capacity=96MiB", "tiers.dram.extent=4MiB"),
    *("access.insecure=true", "observe.http=off"),
)


class FleetHost:
    """One host: its place in the network, its daemon, the load on it."""

    def __init__(self, folder: Path, number: int, place: NetworkHost, peers: str, pause_s: float) -> None:
        own = folder / f"host{number}"
        own.mkdir()
        settings = (*SETTINGS, f"peers.hosts={peers}")
        self.place = place
        self.daemon = Daemon(
            own,
            arguments=(
                *("--listen", f"{place.address}:{PORT}"),
                *(word for one in settings for word in ("--set", one)),
            ),
            prefix=place.prefix,
        )
        self.load = Load(folder, self.daemon.target, pause_s=pause_s, first=1 + number * 8)

    def start(self) -> None:
        """Start the daemon and two workers."""
        self.daemon.start()
        for is_grpc in (False, True):
            self.load.start(Role(is_grpc=is_grpc))

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return what `kvtier status` shows."""
        with grpc.insecure_channel(self.daemon.target) as channel:
            return AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=START_S)

    def problems(self) -> list[str]:
        """Audit the daemon."""
        with grpc.insecure_channel(self.daemon.target) as channel:
            stub = AdminServiceStub(channel)
            return list(stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=START_S).problems)

    def is_serving(self) -> bool:
        """Whether it answers."""
        try:
            with Client(self.daemon.target, timeout=PATIENT) as client:
                client.register(IDENTITY)
            return True
        except KvtierError:
            return False

    def put(self, number: int) -> None:
        """Put a chain."""
        with Client(self.daemon.target, timeout=PATIENT) as client:
            report = client.put(client.register(IDENTITY), names_of(number), payload_of(0, number))
        assert report.complete, f"a put on {self.place.address}: {report}"

    def num_read(self, number: int) -> int:
        """Read a chain; return how many of its blocks were there. Raises AssertionError for a wrong byte."""
        with Client(self.daemon.target, timeout=PATIENT) as client:
            report = client.get(client.register(IDENTITY), names_of(number))
        assert not (problem := wrong_words(report.data.view("u8"), 0, number)), problem
        return report.num_blocks

    def troubles(self) -> tuple[int, int]:
        """How many calls of its workers found no daemon, and how many gets took long."""
        counts = self.load.counts()
        return sum(counts[f"refused: {reason}"] for reason in UNANSWERED), counts["gets over 2 s"]


class FleetChaos:
    """One run."""

    def __init__(self, folder: Path, places: list[NetworkHost], seed: int, pause_s: float) -> None:
        peers = f"[{', '.join(f'{place.address}:{PORT}' for place in places)}]"
        self.hosts = [FleetHost(folder, n, place, peers, pause_s) for n, place in enumerate(places)]
        self._dice, self._pause = random.Random(seed), threading.Event()
        self._next = 1 << 40  # numbers of chains that no worker puts
        self.kinds: dict[str, Callable[[FleetHost], str]] = {
            "kill the daemon": self._kill_daemon,
            "kill the supervisor": self._kill_supervisor,
            "stop the daemon": self._stop_daemon,
            "pull the cable": self._pull_cable,
            "a loose cable": self._flap,
            "is not heard by one host": self._mute,
            "a slow link": self._slow_link,
        }

    def run(self, seconds: float, only: list[str]) -> Counter[str]:
        """Return counts of what was done. Raises AssertionError when something was wrong."""
        began_at = time.monotonic()
        try:
            for host in self.hosts:
                host.start()
            self._wait_for_load()
            kinds: list[str] = []
            while time.monotonic() < began_at + seconds:
                kinds = kinds or self._dice.sample(only or list(self.kinds), len(only or self.kinds))
                kind, host = kinds.pop(), self._dice.choice(self.hosts)
                before = [one.troubles() for one in self.hosts]
                said = self.kinds[kind](host)
                number = self.hosts.index(host)
                num_slow = self._assert_unharmed(number, before)
                said = f"{said and ', '}{said}{(num_slow and f'; elsewhere {num_slow} gets over 2 s') or ''}"
                print(f"{time.monotonic() - began_at:6.1f} s  host {number + 1}: {kind}{said}", flush=True)
                self._wait_for_calls(host)
                self._pause.wait(2 * self._dice.random())
            self._assert_meet()
            return self._end()
        finally:
            for host in self.hosts:
                host.load.kill_all()
                host.daemon.close()

    # ---------------------------------------------------------------------------------- faults

    def _kill_daemon(self, host: FleetHost) -> str:
        former = host.daemon.pid
        os.kill(former, signal.SIGKILL)
        ends_at = time.monotonic() + START_S
        while host.daemon.pid in (0, former) or not host.is_serving():
            assert time.monotonic() < ends_at, "no daemon serves after a kill"
            self._pause.wait(0.02)
        return ""

    def _kill_supervisor(self, host: FleetHost) -> str:
        host.daemon.stop(signal.SIGKILL)
        host.daemon.start()
        return ""

    def _stop_daemon(self, host: FleetHost) -> str:
        pid = host.daemon.pid
        os.kill(pid, signal.SIGSTOP)
        seconds = self._away(host)
        os.kill(pid, signal.SIGCONT)
        return f"{seconds:.1f} s"

    def _pull_cable(self, host: FleetHost) -> str:
        host.place.cut()
        seconds = self._away(host)
        host.place.mend()
        return f"{seconds:.1f} s"

    def _flap(self, host: FleetHost) -> str:
        for _ in range(NUM_FLAPS):
            host.place.cut()
            self._pause.wait(self._dice.random() / 2)
            host.place.mend()
            self._pause.wait(self._dice.random() / 2)
        return f"{NUM_FLAPS} times"

    def _mute(self, host: FleetHost) -> str:
        other = self._dice.choice([one for one in self.hosts if one is not host])
        host.place.mute(other.place)
        seconds = self._away(host)
        host.place.unmute(other.place)
        return f"{seconds:.1f} s"

    def _slow_link(self, host: FleetHost) -> str:
        host.place.link(SLOW_LINK)
        seconds = self._away(host)
        host.place.link(LINK)
        return f"{seconds:.1f} s"

    def _away(self, host: FleetHost) -> float:
        """Wait a while; the other hosts store and return what is their own meanwhile."""
        began_at, seconds = time.monotonic(), AWAY_S * self._dice.random()
        for other in self.hosts:
            if other is not host:
                self._next += 1
                other.put(self._next)
                assert other.num_read(self._next) == CHAIN_BLOCKS, "what was just put is not served"
        self._pause.wait(max(0.0, began_at + seconds - time.monotonic()))
        return time.monotonic() - began_at

    # ---------------------------------------------------------------------------------- judging

    def _wait_for_load(self) -> None:
        """Wait until every worker has read something and found it right."""
        ends_at = time.monotonic() + WARM_S
        workers = [worker for host in self.hosts for worker in host.load.running]
        while not all(worker.counts()["blocks verified"] for worker in workers):
            for worker in workers:
                worker.assert_alive()
            assert time.monotonic() < ends_at, "workers read nothing"
            self._pause.wait(0.1)

    def _wait_for_calls(self, host: FleetHost) -> None:
        """Wait until the workers of a host have said how their latest calls ended, after a fault of that."""
        num_calls = {id(worker): worker.counts()["calls"] for worker in host.load.running}
        ends_at = time.monotonic() + WARM_S
        while any(one.counts()["calls"] < num_calls[id(one)] + 2 * SAID_CALLS for one in host.load.running):
            host.load.assert_alive()
            assert time.monotonic() < ends_at, f"workers on {host.place.address} stand still"
            self._pause.wait(0.05)

    def _assert_unharmed(self, number: int, before: list[tuple[int, int]]) -> int:
        """All workers live, and on hosts that nothing was done to every call was answered; return how many
        gets there took long."""
        num_all_slow = 0
        for host, (num_unanswered, num_slow) in zip(self.hosts, before, strict=True):
            host.load.assert_alive()
            if host is not self.hosts[number]:
                now = host.troubles()
                assert now[0] == num_unanswered, f"{host.place.address} did not answer: {host.load.counts()}"
                num_all_slow += now[1] - num_slow
        return num_all_slow

    def _assert_meet(self) -> None:
        """Each host sees the others, and reads what each of them puts now."""
        ends_at = time.monotonic() + MEET_S
        for reader in self.hosts:
            for writer in self.hosts:
                self._next += 1
                writer.put(self._next)
                while reader.num_read(self._next) < CHAIN_BLOCKS:
                    assert time.monotonic() < ends_at, (
                        f"{reader.place.address} does not read what {writer.place.address} puts: "
                        f"{reader.status().hosts}"
                    )
                    self._pause.wait(0.1)

    def _end(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for host in self.hosts:
            host.load.end_all()
            total.update(host.load.counts())
            counters = host.status().counters
            total.update({name: counters[name] for name in counters if name.startswith("peer_")})
            assert (problems := host.problems()) == [], problems
            assert host.daemon.stop() == 0, "SIGTERM ended a daemon with an error"
            log = host.daemon.log.read_text()
            assert "Traceback" not in log, log[log.find("Traceback") - 300 :][:3000]
        assert total["peer_bytes_received"], f"nothing was read from another host: {total}"
        return total


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.fleet", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two calls of a worker")
    parser.add_argument(
        "--break", dest="planted", choices=[b.name for b in FLEET_BREAKS], help="plant this defect first"
    )
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="may be repeated")
    arguments = parser.parse_args()
    if why := why_not():
        print(f"not run: {why}")
        return 0
    print(f"seed {arguments.seed}, {arguments.seconds:g} s", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-fleet-")))
        stack.enter_context(planted(arguments.planted, folder))
        places = list(stack.enter_context(network(NUM_HOSTS)))
        try:
            counts = FleetChaos(folder, places, arguments.seed, arguments.pause).run(
                arguments.seconds, arguments.only
            )
        except (AssertionError, KvtierError) as problem:
            for log in sorted(folder.glob("host*/daemon.log")):
                print(f"== {log.parent.name}\n{log.read_text()[-LOG_CHARACTERS:]}", file=sys.stderr)
            print(f"seed {arguments.seed}: {problem}", file=sys.stderr)
            return 0 if arguments.planted else 1
    counts["seconds"] = round(arguments.seconds)
    print(json.dumps({name: number for name, number in sorted(counts.items()) if number}))
    if arguments.planted:
        print(f"the planted defect {arguments.planted} was not seen", file=sys.stderr)
    return 1 if arguments.planted else 0


if __name__ == "__main__":
    sys.exit(main())
