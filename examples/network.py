"""Hosts on one machine, each in a network namespace of its own, at a switch: addresses, links, cuts.

Only `ip`, `tc` and `nsenter` of Debian's iproute2 and util-linux are used, as root. What a link is like is
said in words of `tc qdisc`: `tbf rate 2gbit …` needs nothing; for `netem delay 5ms loss 1%` a kernel without
`netem` is helped out by a switch in user space (slow_switch.py), which knows these two words.
Docker networks were rejected: they need a service, and a link of theirs cannot be cut in one direction.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

#: 250 MB/s; a queue of 20 ms, as a switch has.
LINK = "tbf rate 2gbit burst 1mb latency 20ms"
NETWORK = "10.77.0"
#: A station that no host has: frames to it are lost without a word.
NOWHERE = "02:00:00:00:00:fe"


def free_port() -> int:
    """Return a TCP port on the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


@dataclass(frozen=True, slots=True)
class SlowHost(NetworkHost):
    """One host at a switch in user space."""

    process: "subprocess.Popen[str]"

    def cut(self) -> None:
        self._tell("cut")

    def mend(self) -> None:
        self._tell("mend")

    def _tell(self, verb: str) -> None:
        assert self.process.stdin is not None
        print(verb, int(self.namespace.rpartition("-h")[2]) - 1, file=self.process.stdin, flush=True)


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
        hosts = [NetworkHost(f"{NETWORK}.{n}", f"{name}-h{n}", switch) for n in range(1, num_hosts + 1)]
        for host in hosts:
            _add_namespace(stack, host.namespace)
        if link.startswith("netem ") and not _has_netem(switch):
            process = stack.enter_context(_slow_switch(link, [host.namespace for host in hosts]))
            hosts = [SlowHost(host.address, host.namespace, switch, process) for host in hosts]
        else:
            _wire(hosts, switch)
        for host in hosts:
            inside = ("-n", host.namespace)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", "eth0", "up")
            if not isinstance(host, SlowHost):
                host.link(link)
        yield hosts


def _wire(hosts: list[NetworkHost], switch: str) -> None:
    """Lead a cable from each host to a bridge in the namespace `switch`."""
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for host in hosts:
        port = host.namespace[-8:]
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host.namespace)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")


def _has_netem(namespace: str) -> bool:
    """Whether the kernel can delay and lose frames, tried on the loopback of a namespace."""
    try:
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms")
    except RuntimeError:
        return False
    return True


@contextmanager
def _slow_switch(link: str, namespaces: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a switch that delays and loses frames, with a port in each namespace."""
    known = re.fullmatch(r"netem(?: delay ([\d.]+)ms)?(?: loss ([\d.]+)%)?", link)
    if known is None:
        raise RuntimeError(f"`{link}`: this kernel has no netem; without it only `netem delay 5ms loss 1%`")
    delay_ms, loss_percent = (float(one or 0) for one in known.groups())
    words = ["--delay", str(delay_ms / 1e3), "--loss", str(loss_percent / 1e2), *namespaces]
    with subprocess.Popen(
        [sys.executable, "-m", "examples.slow_switch", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the switch in user space does not run; its words are above")
            for namespace in namespaces:
                _ip("-n", namespace, "link", "set", "eth0", "mtu", "9000")
            yield process
        finally:
            process.terminate()


def _add_namespace(stack: ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: {ended.stderr.strip()}")
