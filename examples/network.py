"""Hosts on one machine, each in a network namespace of its own, at a switch: addresses, links, cuts.

Only `ip`, `tc` and `nsenter` of Debian's iproute2 and util-linux are used, as root. What a link is like is
said in words of `tc qdisc`: `tbf rate 2gbit …` needs nothing, `netem delay 5ms loss 1%` a kernel that has it.
Docker networks were rejected: they need a service, and a link of theirs cannot be cut in one direction.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

#: 250 MB/s; a queue of 20 ms, as a switch has.
LINK = "tbf rate 2gbit burst 1mb latency 20ms"
NETWORK = "10.77.0"
#: A station that no host has: frames to it are lost without a word.
NOWHERE = "02:00:00:00:00:fe"


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """One host. `prefix` is what a command begins with that is to run there."""

    address: str
    namespace: str
    switch: str

    @property
    def prefix(self) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def cut(self) -> None:
        """Pull its cable: nothing leaves, nothing arrives, and no one is told."""
        _ip("-n", self.switch, "link", "set", self.namespace[-8:], "down")

    def mend(self) -> None:
        """Plug it in again."""
        _ip("-n", self.switch, "link", "set", self.namespace[-8:], "up")

    def mute(self, other: "NetworkHost") -> None:
        """Lose all that it sends to another host, which it goes on hearing."""
        _ip(*self._neighbour("replace", other), "lladdr", NOWHERE, "nud", "permanent")

    def unmute(self, other: "NetworkHost") -> None:
        """Undo `mute`."""
        _ip(*self._neighbour("del", other))

    def link(self, words: str) -> None:
        """Make its link to the switch another one: words of `tc qdisc`."""
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", *words.split())

    def _neighbour(self, verb: str, other: "NetworkHost") -> list[str]:
        return ["-n", self.namespace, "neigh", verb, other.address, "dev", "eth0"]


def why_not(link: str = LINK) -> str:
    """Return why no network can be made here; empty when it can."""
    missing = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with network(1, link):
            return ""
    except RuntimeError as problem:  # in a container without the rights, or a kernel without the queue
        return str(problem)


@contextmanager
def network(num_hosts: int, link: str = LINK) -> Iterator[list[NetworkHost]]:
    """Yield hosts that reach each other over links like `link`; they are gone afterwards.

    Raises RuntimeError with what the failing command said.
    """
    name = f"kvt{os.getpid()}"
    switch = f"{name}-switch"
    with ExitStack() as stack:
        _add_namespace(stack, switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        hosts = [NetworkHost(f"{NETWORK}.{n}", f"{name}-h{n}", switch) for n in range(1, num_hosts + 1)]
        for host in hosts:
            _add_namespace(stack, host.namespace)
            port, inside = host.namespace[-8:], ("-n", host.namespace)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", "eth0", "up")
            host.link(link)
        yield hosts


def _add_namespace(stack: ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: {ended.stderr.strip()}")
