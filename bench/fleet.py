"""`python -m bench.fleet [--rounds N] [--tls]`: prompts of another host, beside sockets and streams.

Two daemons on loopback; the far one holds the prompts (1,024 tokens of Llama 3 8B, 128 MiB), the near one
reads each once, which fetches it, and once more from its own memory. In turns with that:

    sockets   4 connections, `sendfile` out of a memfd, `recv_into` another one, xxh3-128 of what arrived
    streams   the same prompt read from the far daemon over gRPC, without compression
    NIXL      the same prompt between two more daemons with `peers.transport: nixl`, in the environment of
              `make test-nixl`; UCX_TLS says over what, and its processes count as ends

A fetch has tickets, landing, index entries and replies of which the sockets have nothing; what the near
client has never touched of its daemon's memory would be mapped page by page meanwhile, so other prompts were
there before. With `--tls` the hosts show certificates; sockets stay bare, and there are no streams.
Processor time is of both ends. Every byte is compared. Last, a read of what no host has, beside
a daemon that knows no other.
"""

import argparse
import hashlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity
from kvtier.sources.peers.nixl_process import absence
from tests.daemon import Daemon
from tests.ports import free_port
from tests.waiting import until

from .machine import print_machine

GEOMETRY = Geometry(
    num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=8
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"bench.fleet").digest(), GEOMETRY)
NUM_BLOCKS, NUM_SOCKETS = 64, 4
PROMPT_BYTES = NUM_BLOCKS * GEOMETRY.block_bytes
CHUNK_BYTES = 512 << 10
FIRST_TOUCHED = 10_000
NUM_MISSES, MISS_BLOCKS = 200, 64
START_S = 60.0
HOSTS_NAME = "hosts.fleet"
NIXL_WORDS = "moves blocks between hosts, process "
INSECURE: Mapping[str, str] = {"access.insecure": "true"}


class Timed:
    """Seconds of rounds, and processor seconds of the processes that took part."""

    def __init__(self, *processes: int) -> None:
        self._processes = processes
        self.took: list[float] = []
        self.processor_s = 0.0

    def round(self, task: Callable[[], object]) -> None:
        """Time one round."""
        before, began = self._used(), time.perf_counter()
        task()
        self.took.append(time.perf_counter() - began)
        self.processor_s += self._used() - before

    def _used(self) -> float:
        own = time.process_time()
        fields = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in self._processes]
        return own + sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")

    def line(self, name: str) -> str:
        """Return speed and processor time as a line of the report."""
        median, gb = statistics.median(self.took), PROMPT_BYTES / 1e9
        cost = self.processor_s / len(self.took) / gb
        return f"{name:34}{gb / median:6.2f} GB/s  best {gb / min(self.took):6.2f}  {cost:5.2f} CPU s/GB"


def names_of(prompt: int, num_blocks: int = NUM_BLOCKS) -> list[bytes]:
    return [hashlib.sha256(f"{prompt}/{number}".encode()).digest() for number in range(num_blocks)]


def data_of(prompt: int) -> Any:
    return np.random.default_rng(prompt).integers(0, 256, PROMPT_BYTES, np.uint8)


@contextmanager
def daemon(
    folder: Path, port: int, hosts: list[int], gib: int, access: Mapping[str, str] = INSECURE
) -> Iterator[tuple[str, int]]:
    """Run a daemon; yields the address of its socket, and the process that serves."""
    folder.mkdir()
    known = ", ".join(f"127.0.0.1:{one}" for one in hosts)
    values = {
        **access,
        "compression.codec": "identity",
        "limits.max_pinned": "90%",
        "observe.http": "off",
        "peers.hosts": f"[{known}]",
        "tiers.dram.capacity": f"{gib}GiB",
    }
    with Daemon(folder, settings=values, arguments=("--listen", f"127.0.0.1:{port}")) as running:
        running.wait_for_log("memory in place")
        yield running.target, running.pid


def access_of(folder: Path) -> dict[str, str]:
    """Write the certificate of all hosts; return the settings that show it."""
    from tests.security.certificates import Authority  # not in every environment that imports this

    authority = Authority("fleet")
    pair = authority.sign(f"dns:{HOSTS_NAME}")
    files = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.certificate}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {
        **{f"access.tls.{name}": str(folder / name) for name in files},
        "peers.certificate_name": HOSTS_NAME,
    }


def hold() -> None:
    """In another process: send a part of a memfd for each byte that comes over a connection."""
    memory = os.memfd_create("bare")
    os.write(memory, bytes(PROMPT_BYTES))
    part = PROMPT_BYTES // NUM_SOCKETS
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)

        def serve(connection: socket.socket, start: int) -> None:
            while connection.recv(1):
                sent = start
                while sent < start + part:
                    sent += os.sendfile(connection.fileno(), memory, sent, start + part - sent)

        accepted = [listener.accept()[0] for _ in range(NUM_SOCKETS)]
        threads = [
            threading.Thread(target=serve, args=(one, number * part)) for number, one in enumerate(accepted)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class BareSockets:
    """The fetcher's end of bare sockets."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from bench.fleet import hold; hold()"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_SOCKETS)]
        memory = os.memfd_create("landing")
        os.truncate(memory, PROMPT_BYTES)
        self._view = memoryview(mmap.mmap(memory, PROMPT_BYTES))

    def fetch(self) -> None:
        """Read a prompt over all connections."""
        part = PROMPT_BYTES // NUM_SOCKETS

        def read(number: int) -> None:
            connection = self._connections[number]
            connection.sendall(b"x")
            for start in range(number * part, (number + 1) * part, CHUNK_BYTES):
                into = self._view[start : start + CHUNK_BYTES]
                connection.recv_into(into, CHUNK_BYTES, socket.MSG_WAITALL)
                xxhash.xxh3_128_digest(into)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(NUM_SOCKETS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.process.wait()


class Pushing:
    """Two hosts that push by NIXL, and their clients."""

    def __init__(self, stack: ExitStack, folder: Path, gib: int, access: Mapping[str, str]) -> None:
        ports, more = [free_port(), free_port()], {**access, "peers.transport": "nixl"}
        names = "near-nixl", "far-nixl"
        started = [daemon(folder / names[end], ports[end], ports, gib, more) for end in range(2)]
        hosts = [stack.enter_context(one) for one in started]
        self.near, self.far = (stack.enter_context(Client(path)) for path, _ in hosts)
        self.target, processes = hosts[0][0], [pid for _, pid in hosts]
        for name in names:
            log = folder / name / "daemon.log"
            until(lambda log=log: NIXL_WORDS in log.read_text())  # type: ignore[misc]
            processes.append(int(log.read_text().partition(NIXL_WORDS)[2].split()[0]))
        self.timed = Timed(*processes)

    def check(self) -> None:
        """Raise AssertionError unless every fetch was pushed."""
        command = [sys.executable, "-m", "kvtier", "status", "--json", "--target", self.target]
        counters = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["counters"]
        assert counters["peer_pushes_arrived"] == counters["peer_fetches_arrived"], counters


def prepare(here: Client, there: Client, target: str, num_rounds: int, into: Any) -> Namespace:
    """Put the prompts at the far end, and wait until the near one finds what is there."""
    near, far = (one.register(IDENTITY) for one in (here, there))
    for prompt in range(num_rounds + 1):
        assert there.put(far, names_of(prompt), data_of(prompt)).complete
    until(
        lambda: here.get(near, names_of(num_rounds), into=into).num_blocks == NUM_BLOCKS,
        "the hosts did not find each other",
    )
    touch(here, target, near, num_rounds)
    return near


def touch(client: Client, target: str, namespace: Namespace, num_prompts: int) -> None:
    """Let a client see the memory that as many prompts will land in."""
    for prompt in range(FIRST_TOUCHED, FIRST_TOUCHED + num_prompts):
        assert client.put(namespace, names_of(prompt), data_of(prompt)).complete
        client.get(namespace, names_of(prompt))
    command = [sys.executable, "-m", "kvtier", "evict", "dram", "all", "--target", target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def misses(client: Client, first: int) -> float:
    """Return the median seconds of reads of what is nowhere."""
    namespace, took = client.register(IDENTITY), []
    for number in range(NUM_MISSES):
        names = names_of(first + number, MISS_BLOCKS)
        began = time.perf_counter()
        client.get(namespace, names)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet")
    parser.add_argument("--rounds", type=int, default=6, help="prompts that are fetched")
    parser.add_argument("--tls", action="store_true", help="between the hosts")
    arguments = parser.parse_args()
    num_rounds, has_tls = arguments.rounds, arguments.tls
    print_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-fleet")))
        ports, gib = [free_port() for _ in range(3)], max(1, -(-num_rounds * PROMPT_BYTES * 3 // 2 >> 30))
        access = access_of(folder) if has_tls else INSECURE
        near, far, alone = (
            stack.enter_context(daemon(folder / name, port, hosts, size, access))
            for name, port, hosts, size in (
                ("near", ports[0], ports[:2], gib),
                ("far", ports[1], ports[:2], gib),
                ("alone", ports[2], [], 1),
            )
        )
        here, there, lone = (stack.enter_context(Client(one[0])) for one in (near, far, alone))
        remote = there if has_tls else stack.enter_context(Client(f"127.0.0.1:{ports[1]}"))
        into = np.ones(PROMPT_BYTES, np.uint8)
        namespace = prepare(here, there, near[0], num_rounds, into)
        pushing = Pushing(stack, folder, gib, access) if not absence() else None
        bare = BareSockets()
        stack.callback(bare.close)
        fetched, local = Timed(near[1], far[1]), Timed(near[1], far[1])
        sockets, streams = Timed(bare.process.pid), Timed(far[1])
        bare.fetch()
        turns = [(fetched, here, namespace), (local, here, namespace)]
        if not has_tls:
            turns.append((streams, remote, remote.register(IDENTITY)))
        if pushing is not None:
            known = prepare(pushing.near, pushing.far, pushing.target, num_rounds, into)
            turns.append((pushing.timed, pushing.near, known))
        for prompt in range(num_rounds):
            sockets.round(bare.fetch)
            for timed, client, known in turns:
                into[:] = 1

                def read(client: Client = client, known: Namespace = known, prompt: int = prompt) -> None:
                    got = client.get(known, names_of(prompt), into=into)
                    assert got.num_blocks == NUM_BLOCKS

                timed.round(read)
                assert (into == data_of(prompt)).all(), "wrong bytes"
        # What the caller copies out of memory is no part of the fetch.
        copies = statistics.median(local.took)
        fetches = {"fetched from the other host": fetched}
        if pushing is not None:
            pushing.check()
            fetches[f"pushed by NIXL, UCX_TLS={os.environ.get('UCX_TLS', '')}"] = pushing.timed
        for timed in fetches.values():
            timed.took = [one - copies for one in timed.took]
            timed.processor_s -= local.processor_s
        print(sockets.line("4 bare sockets, checksum"))
        for name, timed in fetches.items():
            print(timed.line(name))
            ratio = statistics.median(sockets.took) / statistics.median(timed.took)
            print(f"beside bare sockets {ratio:.2f} x")
        if not has_tls:
            print(streams.line("gRPC streams"))
            ratio = statistics.median(streams.took) / statistics.median(fetched.took)
            print(f"beside gRPC streams {ratio:.2f} x")
        beside, apart = misses(here, 1000), misses(lone, 1000)
        print(f"a read of what is nowhere: {beside * 1e3:.3f} ms beside a host, {apart * 1e3:.3f} ms alone")


if __name__ == "__main__":
    main()
