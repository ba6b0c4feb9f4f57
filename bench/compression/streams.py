"""`python -m bench.compression.streams`: streamed gets and puts over links of a given rate, by codec.

One daemon for each codec of `compression.remote`, a relay (relay.py) for each rate, a client without shared
memory; the same blocks, keys and values as a transformer makes them. Rounds alternate between the codecs.
What comes is compared with what was put after the clock has stopped. Daemon, relay, client and the encoding
share the processors of this machine, which on two machines they would not.
"""

from __future__ import annotations

import argparse
import hashlib
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

from bench.compression.cold_gets import GEOMETRY, MIB, WAIT_S, blocks_like_kv
from bench.machine import describe
from bench.table import render
from kvtier import KvtierError
from kvtier.clients import Client, Namespace, NamespaceIdentity

IDENTITY = NamespaceIdentity(hashlib.sha256(b"streams").digest(), GEOMETRY)
CODECS = ("identity", "exponents", "planes", "auto")
#: What 10 and 1 Gbit/s carry.
RATES = {"1.25 GB/s": 1.25e9, "0.125 GB/s": 0.125e9}


@dataclass
class Side:
    """One daemon behind one link."""

    codec: str
    client: Client
    namespace: Namespace
    puts_s: list[float] = field(default_factory=list)
    gets_s: list[float] = field(default_factory=list)


def spawn(stack: ExitStack, *words: str) -> None:
    """Run a module until the stack is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait, WAIT_S)
    stack.callback(process.terminate)


def start(codec: str, folder: Path, dram_bytes: int, rate: float, stack: ExitStack) -> Side:
    """Start a daemon and the link to it."""
    folder.mkdir(parents=True)
    settings = {
        "tiers.dram.capacity": f"{dram_bytes // MIB}MiB",
        "tiers.dram.extent": "16MiB",
        "observe.http": "off",
        "compression.remote": codec,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    spawn(stack, "kvtier.appliance.cli", "serve", "--listen", f"unix://{folder}/daemon.sock", *words)
    deadline_at = time.monotonic() + WAIT_S
    while not (folder / "daemon.sock").exists():
        assert time.monotonic() < deadline_at, "the daemon did not start"
        time.sleep(0.1)
    spawn(stack, "bench.compression.relay", f"{folder}/link.sock", f"{folder}/daemon.sock", str(rate))
    while True:
        try:
            client = stack.enter_context(Client(f"unix://{folder}/link.sock", shared_memory=False))
            return Side(codec, client, client.register(IDENTITY))
        except KvtierError:  # the link is not up yet
            if time.monotonic() > deadline_at:
                raise
            time.sleep(0.1)


def measure(side: Side, round_number: int, data: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    """Put a chain nobody has stored, and get it."""
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


def rows_of(sides: list[Side], num_bytes: int) -> list[list[str]]:
    """Return a line a codec: medians, and the median of the paired ratios to identity."""
    plain = sides[0]
    rows = []
    for side in sides:
        cells = [side.codec]
        for mine, theirs in ((side.gets_s, plain.gets_s), (side.puts_s, plain.puts_s)):
            ratios = [other / own for own, other in zip(mine, theirs, strict=True)]
            cells += [f"{num_bytes / statistics.median(mine) / 1e9:.3f}", f"{statistics.median(ratios):.2f}×"]
        rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--blocks", type=int, default=16, help="blocks of 2 MiB in each put and get")
    parser.add_argument("--rounds", type=int, default=5, help="after two that are not counted")
    arguments = parser.parse_args()
    for label, value in describe({}).items():
        print(f"{label:9}{value}")
    data = blocks_like_kv(arguments.blocks, seed=1)
    into = np.zeros_like(data)
    for name, rate in RATES.items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            dram_bytes = (arguments.rounds + 3) * data.nbytes
            sides = [
                start(codec, Path(folder) / codec, dram_bytes, rate, stack) for codec in arguments.codecs
            ]
            for round_number in range(arguments.rounds + 2):
                for side in sides:
                    measure(side, round_number, data, into)
            for side in sides:  # connections are known and loops compiled from the third on
                del side.gets_s[:2], side.puts_s[:2]
            print(f"\na link of {name}, {data.nbytes // MIB} MiB a call, {arguments.rounds} rounds")
            head = ["codec", "get GB/s", "of identity", "put GB/s", "of identity"]
            print(render(head, rows_of(sides, data.nbytes)))


if __name__ == "__main__":
    main()
