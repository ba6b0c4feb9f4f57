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
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from examples.network import LINK, NetworkHost, network, why_not
from kvtier.clients import KvtierError

from ..waiting import until
from .breaks import FLEET_BREAKS, planted
from .hosts import FleetHost, HostsUnderLoad

NUM_HOSTS = 3
PORT = 7070
SLOW_LINK = "tbf rate 4mbit burst 64kb latency 50ms"
NUM_FLAPS = 6
AWAY_S = 6.0  # at most; a host is forgotten after three seconds of silence
LOG_CHARACTERS = 4000


class FleetChaos(HostsUnderLoad):
    """One run."""

    def __init__(self, folder: Path, places: list[NetworkHost], seed: int, pause_s: float) -> None:
        peers = f"[{', '.join(f'{place.address}:{PORT}' for place in places)}]"
        settings = ("access.insecure=true", f"peers.hosts={peers}")
        super().__init__(
            [
                FleetHost(folder, number, f"{place.address}:{PORT}", settings, pause_s, place.prefix)
                for number, place in enumerate(places)
            ]
        )
        self._places = {host.address: place for host, place in zip(self.hosts, places, strict=True)}
        self._dice = random.Random(seed)
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
            self.close()

    # ---------------------------------------------------------------------------------- faults

    def _kill_daemon(self, host: FleetHost) -> str:
        former = host.daemon.pid
        os.kill(former, signal.SIGKILL)
        until(lambda: host.daemon.pid not in (0, former) and host.is_serving(), "no daemon serves")
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
        self._places[host.address].cut()
        seconds = self._away(host)
        self._places[host.address].mend()
        return f"{seconds:.1f} s"

    def _flap(self, host: FleetHost) -> str:
        for _ in range(NUM_FLAPS):
            self._places[host.address].cut()
            self._pause.wait(self._dice.random() / 2)
            self._places[host.address].mend()
            self._pause.wait(self._dice.random() / 2)
        return f"{NUM_FLAPS} times"

    def _mute(self, host: FleetHost) -> str:
        other = self._dice.choice([one for one in self.hosts if one is not host])
        self._places[host.address].mute(self._places[other.address])
        seconds = self._away(host)
        self._places[host.address].unmute(self._places[other.address])
        return f"{seconds:.1f} s"

    def _slow_link(self, host: FleetHost) -> str:
        self._places[host.address].link(SLOW_LINK)
        seconds = self._away(host)
        self._places[host.address].link(LINK)
        return f"{seconds:.1f} s"

    def _away(self, host: FleetHost) -> float:
        """Wait a while; the other hosts store and return what is their own meanwhile."""
        began_at, seconds = time.monotonic(), AWAY_S * self._dice.random()
        for other in self.hosts:
            if other is not host:
                self._assert_reads(other, other, began_at + AWAY_S)
        self._pause.wait(max(0.0, began_at + seconds - time.monotonic()))
        return time.monotonic() - began_at


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
