"""`python -m bench.compression.streams`: streamed gets and puts over links of a given rate, by codec.

One daemon for each codec of `compression.codec`, a client without shared memory, the same blocks, keys and
values as a transformer makes them; rounds alternate between the codecs, every other one backwards. What comes
is compared with what was put after the clock has stopped. Daemon, client and the encoding share the
processors of this machine, which on two machines they would not.

The link: the loopback of a network namespace of its own, shaped by the kernel (`unshare`, `tc ... tbf`), as
root. All of it asks the scheduler for short slices: beside other work late wake-ups are measured instead of
the codec, and a stream wakes up ten thousand times a second.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.compression.cold_gets import GEOMETRY, MIB, blocks_like_kv
from bench.machine import print_machine
from bench.table import render
from bench.vllm.priority import SHORT_SLICE_S, ask_for_slice
from kvtier.clients import Client, Namespace, NamespaceIdentity
from tests.daemon import Daemon

IDENTITY = NamespaceIdentity(hashlib.sha256(b"streams").digest(), GEOMETRY)
CODECS = ("identity", "exponents", "auto")
RATES = (0.125, 0.5, 1.25, 2.5, 5.0)  # GB/s; a link of 10 Gbit/s carries 1.25
IN_NAMESPACE = "KVTIER_BENCH_NETWORK"  # set: this process has a network of its own
FIRST_PORT = 7000


@dataclass
class StreamSide:
    """One daemon behind one link."""

    codec: str
    client: Client
    namespace: Namespace
    puts_s: list[float] = field(default_factory=list)
    gets_s: list[float] = field(default_factory=list)


def shape(bytes_per_s: float) -> None:
    """Give the loopback of this process's network a rate."""
    rate = f"{int(bytes_per_s * 8e-6)}mbit"
    words = f"tc qdisc replace dev lo root tbf rate {rate} burst 1mb latency 50ms"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(words.split(), check=True)


def start(codec: str, port: int, folder: Path, dram_bytes: int, stack: ExitStack) -> StreamSide:
    """Start a daemon and connect to it."""
    settings = {
        "access.insecure": "true",
        "tiers.dram.capacity": f"{dram_bytes // MIB}MiB",
        "tiers.dram.extent": "16MiB",
        "observe.http": "off",
        "compression.codec": codec,
    }
    target = f"127.0.0.1:{port}"
    folder.mkdir()
    stack.enter_context(Daemon(folder, settings=settings, arguments=("--listen", target)))
    client = stack.enter_context(Client(target, shared_memory=False))
    return StreamSide(codec, client, client.register(IDENTITY))


def measure(side: StreamSide, round_number: int, data: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    """Put a new chain, and get it."""
    num_blocks = data.nbytes // GEOMETRY.block_bytes
    names = [hashlib.sha256(b"%d %d" % (round_number, block)).digest() for block in range(num_blocks)]
    began_at = time.perf_counter()
    report = side.client.put(side.namespace, names, data)
    put_at = time.perf_counter()
    assert report.complete, f"{side.codec}: {report.outcomes}"
    began_get_at = time.perf_counter()
    found = side.client.get(side.namespace, names, into)
    side.gets_s.append(time.perf_counter() - began_get_at)
    side.puts_s.append(put_at - began_at)
    assert found.num_blocks == num_blocks, f"{side.codec}: {found.num_blocks} of {num_blocks} blocks"
    assert np.array_equal(into, data), f"{side.codec}: wrong bytes"
    into[:] = 0


def rows_of(sides: list[StreamSide], num_bytes: int) -> list[list[str]]:
    """Return a line a codec: medians, and the median and quartiles of the paired ratios to identity."""
    plain = sides[0]
    rows = []
    for side in sides:
        cells = [side.codec]
        for mine, theirs in ((side.gets_s, plain.gets_s), (side.puts_s, plain.puts_s)):
            ratios = [other / own for own, other in zip(mine, theirs, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells += [
                f"{num_bytes / statistics.median(mine) / 1e9:.3f}",
                f"{middle:.2f} ({low:.2f} {high:.2f})",
            ]
        rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="GB/s")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of 2 MiB in each put and get")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--warm", type=int, default=8, help="rounds before those, in which `auto` asks most")
    arguments = parser.parse_args()
    if IN_NAMESPACE not in os.environ:
        if os.geteuid() != 0 or shutil.which("tc") is None:
            parser.error("run it as root, with tc of Debian's package iproute2")
        os.environ[IN_NAMESPACE] = "1"
        words = ["unshare", "--net", sys.executable, "-m", "bench.compression.streams", *sys.argv[1:]]
        os.execvp(words[0], words)
    ask_for_slice(0, os.getpriority(os.PRIO_PROCESS, 0), SHORT_SLICE_S)  # its children are born with it
    print_machine()
    data = blocks_like_kv(arguments.blocks, seed=1)
    into = np.zeros_like(data)
    for rate in arguments.rates:
        with ExitStack() as stack:
            dram_bytes = (arguments.warm + arguments.rounds + 1) * data.nbytes
            shape(rate * 1e9)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-streams-")))
            sides = [
                start(codec, FIRST_PORT + number, folder / codec, dram_bytes, stack)
                for number, codec in enumerate(arguments.codecs)
            ]
            for round_number in range(arguments.warm + arguments.rounds):
                for side in sides if round_number % 2 else reversed(sides):
                    measure(side, round_number, data, into)
            for side in sides:
                del side.gets_s[: arguments.warm], side.puts_s[: arguments.warm]
            print(f"\na link of {rate} GB/s, {data.nbytes // MIB} MiB a call, {arguments.rounds} rounds")
            head = ["codec", "get GB/s", "of identity", "put GB/s", "of identity"]
            print(render(head, rows_of(sides, data.nbytes)), flush=True)


if __name__ == "__main__":
    main()
