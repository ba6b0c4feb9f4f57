"""Measures what the background verification of tiers costs gets and puts.

    python -m bench.scrub_cost [--calls 3000]

Three daemons with the same blocks in memory and on nvme: one that verifies nothing, one that verifies with
its built-in share, pass after pass without the rest of an hour between two, and one with a share of a half,
which shows that the bench would see a cost. A client asks each of them in turns, in an order that is drawn
anew, so that whatever else the machine does falls on all alike. `put` stores a new chain of 8 blocks, 64 KiB
each, which is written to nvme, too; `get` reads one that was put lately, from memory.
"""

import argparse
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np

from kvtier.appliance import scrubber
from kvtier.appliance.config import Settings
from kvtier.clients import Client, Namespace, NamespaceIdentity, Timeout
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.appliance.loops import DaemonThread
from tests.crash.daemon_loop import CHAIN_BLOCKS, GEOMETRY, names_of, payload_of

from .machine import describe
from .table import milliseconds, render

IDENTITY = NamespaceIdentity(bytes(32), GEOMETRY)
NUM_FIRST = 200  # chains of 512 KiB that are there from the start; gets ask for one of the last so many
SHARES = {"off": 1e-9, "built in": scrubber.SHARE, "a half": 0.5}
TIERS = {"dram": {"capacity": "512MiB", "extent": "16MiB"}}
PERCENTILES = (50, 99)


def serve(folder: Path, share: float) -> None:
    """Run a daemon until stdin ends; prints its address."""
    scrubber.Scrubber.__init__.__kwdefaults__ = {"share": share, "min_pass_s": 0.0}
    nvme = {"path": str(folder / "nvme"), "capacity": "512MiB", "segment": "8MiB", "write": "through"}
    settings = Settings.model_validate(
        {
            "listen": [f"unix://{folder}/k.sock"],
            "tiers": {**TIERS, "nvme": nvme},
            "compression": {"codec": "identity"},
            "observe": {"http": "off"},
        }
    )
    with DaemonThread(settings):
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def daemon(share: float) -> Iterator[str]:
    """Yield the address of a daemon that verifies with this share."""
    with tempfile.TemporaryDirectory(prefix="kvtier-scrub-") as folder:
        command = [sys.executable, "-m", "bench.scrub_cost", "--serve", folder, str(share)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "ready\n"
                yield f"unix://{folder}/k.sock"
            finally:
                process.stdin.close()


def timed_get(client: Client, namespace: Namespace, number: int) -> int | None:
    """Read a chain; return nanoseconds, None when it was not there whole."""
    into = np.empty(CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    began_at = time.perf_counter_ns()
    report = client.get(namespace, names_of(number), into)
    took_ns = time.perf_counter_ns() - began_at
    return took_ns if report.num_blocks == CHAIN_BLOCKS else None


def timed_put(client: Client, namespace: Namespace, number: int) -> int | None:
    """Store a chain; return nanoseconds, None when a part was refused: nvme is written more slowly."""
    names, payload = names_of(number), payload_of(number)
    began_at = time.perf_counter_ns()
    report = client.put(namespace, names, payload)
    took_ns = time.perf_counter_ns() - began_at
    return took_ns if report.complete else None


def verified_bytes(target: str) -> int:
    """Return what a daemon has verified of its tiers, all together."""
    with grpc.insecure_channel(target) as channel:
        status = AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
    return sum(one.bytes for one in status.scrubs)


def on_demand(target: str) -> tuple[int, float]:
    """Have memory verified at once; return its bytes and the seconds that took."""
    with grpc.insecure_channel(target) as channel:
        *_, last = AdminServiceStub(channel).Verify(admin_pb2.VerifyRequest(tier="dram"))
    return last.bytes, last.took_s


def measure(targets: dict[str, str], num_calls: int, seed: int) -> list[tuple[str, ...]]:
    """Return a row for each daemon and call."""
    times: dict[tuple[str, str], list[int]] = {
        (name, call): [] for name in targets for call in ("get", "put")
    }
    dice = random.Random(seed)
    with ExitStack() as stack:
        patient = Timeout(call_s=60.0, connect_s=60.0)
        clients = {
            name: stack.enter_context(Client(target, timeout=patient)) for name, target in targets.items()
        }
        namespaces = {name: client.register(IDENTITY) for name, client in clients.items()}
        for number in range(NUM_FIRST + num_calls):
            asked_for = number - dice.randrange(min(number, NUM_FIRST)) if number else 0
            for name in dice.sample(list(targets), len(targets)):
                put_ns = timed_put(clients[name], namespaces[name], number)
                get_ns = timed_get(clients[name], namespaces[name], asked_for)
                if number >= NUM_FIRST:
                    times[name, "put"] += [put_ns] if put_ns else []
                    times[name, "get"] += [get_ns] if get_ns else []
    read = {name: f"{verified_bytes(target) / (1 << 30):.2f} GiB" for name, target in targets.items()}
    rows = []
    for (name, call), taken in sorted(times.items(), key=lambda item: item[0][1]):
        figures = (float(np.percentile(taken, percent)) for percent in PERCENTILES)
        rows.append(
            (
                f"{call}, verification {name}",
                f"{len(taken):,}",
                *(f"{milliseconds(one)} ms" for one in figures),
                read[name],
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000, help="of each kind, to each daemon")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "SHARE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(Path(chosen.serve[0]), float(chosen.serve[1]))
        return
    labels = describe({}) | {"command": shlex.join(["python", "-m", "bench.scrub_cost", *sys.argv[1:]])}
    for label, value in labels.items():
        print(f"{label:>9}: {value}")
    with ExitStack() as stack:
        targets = {name: stack.enter_context(daemon(share)) for name, share in SHARES.items()}
        rows = measure(targets, chosen.calls, chosen.seed)
        num_bytes, took_s = on_demand(targets["off"])
    print(render(("", "calls", *(f"p{percent}" for percent in PERCENTILES), "verified meanwhile"), rows))
    print(f"`kvtier verify dram` on demand: {num_bytes / took_s / 1e9:.2f} GB/s of {num_bytes >> 20} MiB")


if __name__ == "__main__":
    main()
