"""What exports cost local calls, beside what the same traffic alone costs them.

    python -m bench.object_store_beside [--rounds 24]

The store is a sink (object_store_sink): it keeps nothing, takes 300 MB/s like a network, and runs only when
one processor has nothing else to do, because a store is another machine's. Chains of 128 MiB are put every
half second by one client, while another one puts and gets blocks, one call at a time, in four ways:

    kept       nothing is exported (`share: off`)
    again      the same once more: what differs from `kept` is noise
    traffic    kept, while a process of its own sends the sink as many bytes by sendfile(2), which copies and
               hashes none: what the sink and the kernel's network cost on these processors
    exported   the daemon stores them (`share: eager`); beside `traffic` this is the cost of the export itself

The steps of the daemon's event loop are timed inside it (bench/loop_steps).
"""

import argparse
import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from urllib.request import urlopen

from bench.machine import print_machine
from bench.object_store import (
    BUNDLE_BYTES,
    GEOMETRY,
    IDENTITY,
    LOOP_STEPS,
    Bench,
    Host,
    Row,
    long_steps,
    row,
    shown,
)
from kvtier.clients import Client
from kvtier.sources.objects.store import ObjectStore
from tests.daemon import PATIENT

SECONDS = 0.8  # of local calls in a round
PUT_S = 0.5  # between the puts beside them
NUM_BUNDLES = 4  # of a chain
WAYS = ("kept", "again", "traffic", "exported")
PAIRS = (("again", "kept"), ("traffic", "kept"), ("exported", "kept"), ("exported", "traffic"))

TRAFFIC = f"""
import os, socket, sys, time
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
payload, num_bytes = os.memfd_create("payload"), {NUM_BUNDLES * BUNDLE_BYTES}
os.write(payload, os.urandom(num_bytes))
sink = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    began_at, sent = time.monotonic(), 0
    sink.sendall(b"PUT /bench HTTP/1.1\\r\\nContent-Length: %d\\r\\n\\r\\n" % num_bytes)
    while sent < num_bytes:
        sent += os.sendfile(sink.fileno(), payload, sent, num_bytes - sent)
    sink.recv(4096)
    time.sleep(max(0.0, began_at + {PUT_S} - time.monotonic()))
"""


def local(bench: Bench, chain: int, seconds: float) -> tuple[float, float]:
    """Return microseconds of the median get and put of a block."""
    client, namespace = bench.first.client, bench.first.namespace
    block = bench.payload[: GEOMETRY.block_bytes]
    into = bench.into[: GEOMETRY.block_bytes]
    gets, puts, number = [], [], 0
    ends_at = time.perf_counter() + seconds
    while (now := time.perf_counter()) < ends_at:
        name = [hashlib.sha256(b"local %d %d" % (chain, number)).digest()]
        number += 1
        client.put(namespace, name, block)
        puts.append(time.perf_counter() - now)
        now = time.perf_counter()
        assert client.get(namespace, name, into).num_blocks == 1
        gets.append(time.perf_counter() - now)
    return statistics.median(gets) * 1e6, statistics.median(puts) * 1e6


@contextmanager
def putting(bench: Bench, chains: Iterator[int]) -> Iterator[None]:
    """Put a chain every PUT_S from a client of its own, whatever becomes of it."""
    stop = threading.Event()
    with Client(bench.first.daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)

        def work() -> None:
            while not stop.is_set():
                began_at = time.monotonic()
                client.put(namespace, bench.names(next(chains)), bench.payload)
                stop.wait(max(0.0, began_at + PUT_S - time.monotonic()))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@contextmanager
def traffic(address: str) -> Iterator[None]:
    """Send the sink as many bytes as the exports of `putting` hold, from a process of its own."""
    with subprocess.Popen([sys.executable, "-c", TRAFFIC, address.rpartition(":")[2]]) as alone:
        try:
            time.sleep(0.5)  # it starts, which is not to be measured
            yield
        finally:
            alone.kill()


def num_taken(address: str) -> int:
    """Return the bytes that the sink has taken."""
    return int(urlopen(address).read())


def wait_until_quiet(address: str) -> None:
    """Wait until the exports of an earlier way have ended."""
    before = -1
    while (now := num_taken(address)) != before:
        before = now
        time.sleep(0.1)


@contextmanager
def sink(bytes_per_s: float, processor: int) -> Iterator[str]:
    """Run a store that keeps nothing; yield its address."""
    command = [sys.executable, "-m", "bench.object_store_sink", str(bytes_per_s), str(processor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def measure(bench: Bench, num_rounds: int, address: str) -> list[Row]:
    """Run all four ways in each round, in an order drawn for it."""
    chains, draw = iter(range(1_000_000)), random.Random(1)
    rounds, speeds = [], []
    for _ in range(num_rounds):
        measured, speed = {}, {}
        for way in draw.sample(WAYS, len(WAYS)):
            bench.first.share("eager" if way == "exported" else "off")
            wait_until_quiet(address)
            with putting(bench, chains), traffic(address) if way == "traffic" else nullcontext():
                time.sleep(0.3)
                before, began_at = num_taken(address), time.monotonic()
                measured[way] = local(bench, next(chains), SECONDS)
                speed[way] = (num_taken(address) - before) / (time.monotonic() - began_at) / 1e9
        rounds.append(measured)
        speeds.append((speed["exported"], speed["traffic"]))
    return [
        row("exported, beside the bytes of traffic, GB/s", speeds),
        *(
            row(f"{what}, {way}, us, beside {other}", [(one[way][n], one[other][n]) for one in rounds])
            for n, what in enumerate(("get", "put"))
            for way, other in PAIRS
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.object_store_beside", description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, ExitStack() as stack:
        folder, url = Path(name), "s3://bench/kv"
        address = stack.enter_context(sink(300e6, max(os.sched_getaffinity(0))))
        steps = folder / "steps"
        os.environ |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", "") + os.pathsep + str(LOOP_STEPS),
            "KVTIER_LOOP_STEPS": str(steps),
        }
        first = stack.enter_context(Host(folder / "first", url, "off", 8 * NUM_BUNDLES * BUNDLE_BYTES))
        began_at = time.time()
        rows = measure(Bench(ObjectStore(url), first, first, NUM_BUNDLES), arguments.rounds, address)
        told = long_steps(steps, began_at)
    print("\n" + shown(rows) + f"\n\n{told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
