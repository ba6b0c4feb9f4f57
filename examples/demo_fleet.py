"""`make demo-fleet`: what one host computed, another one reads from its memory, over a network between them.

Three hosts in network namespaces, at a switch, over links like LINK (examples/network.py). They find each
other in Redis, on a fourth one, where that is installed. Without root they share the loopback, and no link is
slow or cut. The second host is asked what the first one computed. Then the
first one is killed and the second one cut off, and the third one computes as if it were alone. When the
second one is back, the third one reads from that.

Each host answers each prompt twice: without kvtier, and with what the fleet holds. Both answers must be the
same, bit for bit. Exit code 1 when any is not, or nothing is read from another host. `--picture FILE` writes
what was printed as an SVG.
"""

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from kvtier.clients import Client

from .daemon import ExampleDaemon
from .demo import Demo, perform
from .directory import directory
from .network import LINK, NetworkHost, free_port, network, why_not
from .screen import MIB, Screen
from .texts import READERS, system_tokens, turn_tokens

NUM_HOSTS = 3
LEFT_OUT = "Redis needs root and Debian's redis-server (apt-get install redis-server)"
PORT = 7070
FOUND_S = 60.0  # within which a host has to learn what another one has
SETTINGS = [
    "tiers.dram.capacity=384MiB",
    "tiers.dram.extent=16MiB",
    "tiers.nvme.capacity=512MiB",
    "tiers.nvme.segment=16MiB",
    "limits.max_pinned=80%",
    "access.insecure=true",  # the network is the demo's own
    "observe.http=off",
]


class FleetDemo(Demo):
    """One host: a model, a daemon, a client of it."""

    def load_again_s(self, number: int) -> float:
        """Return how long the prompt of a reader takes out of this host's own memory."""
        reader = self.readers[number]
        return self.load(first_prompt(reader.name), reader.name)[0]

    @property
    def received_bytes(self) -> int:
        """Bytes that came from other hosts."""
        return self.daemon.status().counters["peer_bytes_received"]


def first_prompt(name: str) -> list[int]:
    """Return the tokens of a reader's first question."""
    return system_tokens() + turn_tokens(READERS[name][0])


def main() -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo_fleet")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write what was printed as an SVG")
    parser.add_argument("link", nargs="*", default=[LINK], help="words of tc qdisc")
    arguments = parser.parse_args()
    link = " ".join(arguments.link)
    return perform(lambda screen: play(screen, link), arguments.picture, "make demo-fleet")


def play(screen: Screen, link: str) -> int:
    """Run the demonstration; return the exit code."""
    why = why_not(link)
    screen.say("kvtier demo: three hosts that read from each other", "bold")
    if why:
        screen.say(f"on the loopback of this host, without links and cuts: {why}", "yellow")
    else:
        screen.say(f"each in a network namespace, over a link of `{link}`", "dim")
    with ExitStack() as stack:
        places: list[NetworkHost | None] = [None] * NUM_HOSTS
        url = ""
        if not why:
            *places, last = stack.enter_context(network(NUM_HOSTS + 1, link))
            url = stack.enter_context(directory("redis", last))
        screen.say(f"they find each other {f'at {url}' if url else f'in a list; {LEFT_OUT}'}", "dim")
        with screen.busy("starting the daemons, importing torch, building the models"):
            first, second, third = (stack.enter_context(host) for host in hosts(screen, places, url))
        return tell(screen, first, second, third, places[1])


def tell(
    screen: Screen, first: FleetDemo, second: FleetDemo, third: FleetDemo, second_place: NetworkHost | None
) -> int:
    """Tell the story; return the exit code."""
    screen.title("1. The first host computes.")
    screen.header()
    for reader in first.readers:
        first.turn(reader)

    screen.title("2. The second host is asked the same, and reads it from the memory of the first.")
    screen.header()
    second.patience_s = FOUND_S
    for reader in second.readers:
        second.turn(reader)
    of_second = second.received_bytes
    own_s = min(second.load_again_s(number) for number in range(len(READERS)))
    screen.say(
        f"{of_second / MIB:.0f} MiB came over the network, what the prompts share once; out of its own "
        f"memory the second host then loads a prompt in {own_s:.2f} s"
    )
    screen.hosts(second.daemon.status())

    first.daemon.stop(signal.SIGKILL)
    anna, boris, clara = third.readers
    if second_place is not None:
        second_place.cut()
        screen.title("3. The first host is killed (kill -9), the second cut off: the third one is alone.")
        screen.header()
        third.turn(anna)
        screen.say("Nothing failed, and what it found nowhere it computed.", "dim")
        second_place.mend()
    act = 3 if second_place is None else 4
    screen.title(f"{act}. The second host is there, and the third one reads from it.")
    screen.header()
    third.patience_s = FOUND_S
    for reader in (boris, clara):
        third.turn(reader)
    of_third = third.received_bytes

    num_different = sum(one.totals.num_different for one in (first, second, third))
    num_turns = sum(one.totals.num_turns for one in (first, second, third))
    screen.title("What it was good for")
    screen.say(
        f"{second.totals.without_s:.1f} s of prefill became {second.totals.with_s:.1f} s on a host that had "
        "never seen the prompts; "
        f"{(of_second + of_third) / MIB:.0f} MiB went between hosts"
    )
    if num_different:
        screen.say(f"{num_different} of {num_turns} answers DIFFER from a run without kvtier", "red")
    else:
        screen.say(f"all {num_turns} answers are those of a run without kvtier, logits bit for bit", "green")
    return 1 if num_different or not (of_second and of_third) else 0


def hosts(
    screen: Screen, places: list[NetworkHost | None], url: str
) -> Iterator[AbstractContextManager[FleetDemo]]:
    """Yield the hosts, which find each other at `url`; where it is empty each has the same list of all."""
    ports = [PORT if place else free_port() for place in places]
    names = [place.address if place else "127.0.0.1" for place in places]
    addresses = [f"{name}:{port}" for name, port in zip(names, ports, strict=True)]
    peers = f"peers.directory.url={url}" if url else f"peers.hosts=[{', '.join(addresses)}]"
    for place, address in zip(places, addresses, strict=True):
        yield host(screen, place, address, peers)


@contextmanager
def host(screen: Screen, place: NetworkHost | None, address: str, peers: str) -> Iterator[FleetDemo]:
    """Run one host with empty memory and an empty disk."""
    settings = [*SETTINGS, peers]
    prefix = place.prefix if place else []
    with ExampleDaemon(settings, [address], prefix) as daemon, Client(daemon.target, name="host") as client:
        daemon.start()
        demo = FleetDemo(screen, daemon, client, min(2, os.cpu_count() or 1))
        demo.model.prefill(turn_tokens("warm up"), demo.model.new_cache())
        yield demo


if __name__ == "__main__":
    raise SystemExit(main())
