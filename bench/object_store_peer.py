"""Time until a new host has a prompt's KV from an object store: kvtier beside LMCache's S3 connector.

    python -m bench.object_store_peer [--rounds 5] [--tokens 2048,8192] [--lmcache PYTHON] [--json FILE]

Starts Ceph's S3 gateway. Each stores every prompt once; then, in turns, each gets it with nothing in its own
memory, in a new process (LMCache) or by a new daemon (kvtier), into host memory touched before. A
get includes the lookup, and its bytes are compared. Requests and bytes are those that the gateway counted.

LMCache's interpreter has what requirements-lmcache.txt lists (`make .venv-lmcache/.ready`, the default here,
or `python -m bench.peers install lmcache`). Without it, or where its connector fails, its row says why.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.machine import ROOT, print_machine, write_report
from bench.object_store import Host
from bench.object_store_prompts import HEAD_DIM, NUM_HEADS, NUM_LAYERS, TOKEN_BYTES, payload
from bench.table import render
from kvtier.clients import Geometry, NamespaceIdentity
from kvtier.sources.objects.store import ObjectStore
from kvtier.v1.bundles import BUNDLE_TOKENS
from tests.sources.objects.gateway import Gateway, gateway, why_not
from tests.waiting import until

MIB = 1 << 20
GEOMETRY = Geometry(
    num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, block_tokens=64, dtype="bfloat16"
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"bench object store peer").digest(), GEOMETRY)
BUCKET = "localhost"  # LMCache names a bucket by its virtual host only, so that name has to resolve
VIRTUAL_HOSTS = "rgw dns name = gateway.invalid\n"  # with any name, a Host that is no address is a bucket
DEADLINE_S = 300.0


@dataclass
class Row:
    """What one contender needed for a prompt; the lists have an item per round."""

    by: str
    num_tokens: int
    seconds: list[float] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    problem: str = ""  # why there is no figure


class Meter:
    """Requests and bytes sent that the gateway counted."""

    def __init__(self, folder: Path) -> None:
        (self._socket,) = folder.glob("*/run/client.rgw.asok")

    def read(self) -> tuple[int, int]:
        """Return requests and bytes of all GETs up to now."""
        command = ["ceph", "--admin-daemon", str(self._socket), "perf", "dump", "rgw"]
        counted = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        return counted["rgw"]["req"], counted["rgw"]["get_b"]

    def add(self, row: Row, get: Callable[[], float]) -> None:
        """Run `get`, which returns seconds, and add a round to `row`."""
        num_requests, num_bytes = self.read()
        row.seconds.append(get())
        now_requests, now_bytes = self.read()
        row.num_requests.append(now_requests - num_requests)
        row.num_bytes.append(now_bytes - num_bytes)


class Kvtier:
    """Daemons that share the store; each get has a new one."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url, self._number = folder, url, 0

    def _host(self, share: str, num_bytes: int) -> Host:
        self._number += 1
        # Exports hold a small share of the memory at most, and a bundle has to fit into that.
        return Host(self._folder / f"host{self._number}", self._url, share, 2 * num_bytes + 512 * MIB)

    def store(self, num_tokens: int) -> None:
        """Put a prompt and wait until its bundles are stored."""
        data, store, num_bundles = payload(num_tokens), ObjectStore(self._url), num_tokens // BUNDLE_TOKENS
        num_there = len(list(store.objects("v1/b/")))
        with self._host("eager", data.nbytes) as host:
            report = host.client.put(host.client.register(IDENTITY), names(num_tokens), data)
            assert report.complete, report
            until(
                lambda: len(list(store.objects("v1/b/"))) >= num_there + num_bundles,
                "the bundles were not stored",
                pause_s=0.1,
            )

    def get(self, num_tokens: int, meter: Meter, row: Row) -> None:
        """Add what a get takes that begins when a new daemon is ready. Raises AssertionError."""
        expected = payload(num_tokens)
        into = np.ones_like(expected)

        def timed() -> float:
            began_at = time.perf_counter()
            report = host.client.get(namespace, chain, into)
            took_s = time.perf_counter() - began_at
            assert report.num_blocks == len(chain), report
            return took_s

        with self._host("off", expected.nbytes) as host:
            host.daemon.wait_for_log(
                "memory in place"
            )  # LMCache's buffers are made before its clock runs, too
            namespace, chain = host.client.register(IDENTITY), names(num_tokens)
            meter.add(row, timed)
        assert np.array_equal(into, expected), "wrong bytes"


class LMCache:
    """Its engine, in a process a call."""

    def __init__(self, python: Path, address: str) -> None:
        self._python, self._address = python, address

    def _run(self, what: str, num_tokens: int) -> dict[str, float]:
        """Run the worker; return what it told. Raises RuntimeError with the last line that it printed."""
        command = [str(self._python), "-m", "bench.object_store_lmcache"]
        command += [self._address, what, str(num_tokens)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S)
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            raise RuntimeError((done.stderr or done.stdout).strip().rpartition("\n")[2])
        told: dict[str, float] = json.loads(lines[-1])
        return told

    def store(self, num_tokens: int) -> None:
        """Store a prompt and wait until all its chunks are there."""
        self._run("store", num_tokens)

    def get(self, num_tokens: int, meter: Meter, row: Row) -> None:
        """Add what a new process takes for lookup and retrieve. Raises RuntimeError."""

        def timed() -> float:
            told = self._run("get", num_tokens)
            if told["num_tokens"] != num_tokens or not told["is_right"]:
                raise RuntimeError(f"{told['num_tokens']} of {num_tokens} tokens, right: {told['is_right']}")
            return told["seconds"]

        meter.add(row, timed)


def names(num_tokens: int) -> list[bytes]:
    """Return the names of a prompt's blocks."""
    numbers = range(num_tokens // GEOMETRY.block_tokens)
    return [hashlib.sha256(b"%d %d" % (num_tokens, number)).digest() for number in numbers]


def measure(ours: Kvtier, theirs: LMCache | str, meter: Meter, lengths: list[int], rounds: int) -> list[Row]:
    """Return a row per contender and length. `theirs` is text where LMCache cannot run: why."""
    rows = []
    for num_tokens in lengths:
        ours.store(num_tokens)
        row, other = Row("kvtier", num_tokens), Row("LMCache", num_tokens)
        rows += [row, other]
        turns = [partial(ours.get, num_tokens, meter, row)]
        if isinstance(theirs, str):
            other.problem = theirs
        else:
            try:
                theirs.store(num_tokens)
                turns.append(partial(theirs.get, num_tokens, meter, other))
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                other.problem = f"store: {problem}"
        for number in range(rounds):
            for turn in turns if number % 2 else turns[::-1]:
                try:
                    turn()
                except (RuntimeError, subprocess.TimeoutExpired) as problem:  # of LMCache's process
                    other.problem = f"get: {problem}"
    return rows


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    if row.problem or not row.seconds:
        return [f"{row.num_tokens}", row.by, row.problem or "not run", "", "", ""]
    middle = statistics.median
    return [
        f"{row.num_tokens}",
        row.by,
        f"{middle(row.seconds):.2f}",
        f"{min(row.seconds):.2f} to {max(row.seconds):.2f}",
        f"{middle(row.num_requests):.0f}",
        f"{middle(row.num_bytes) / MIB:.0f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.object_store_peer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="2048,8192", help=f"of each prompt: multiples of {BUNDLE_TOKENS}")
    parser.add_argument("--lmcache", type=Path, default=ROOT / ".venv-lmcache/bin/python", metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows to FILE")
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.tokens.split(",")]
    if bad := [length for length in lengths if length <= 0 or length % BUNDLE_TOKENS]:
        parser.error(f"--tokens {bad[0]}: write multiples of {BUNDLE_TOKENS}")
    if os.environ.pop("KVTIER_S3_ENDPOINT", None) and why_not():
        parser.error("the gateway has to be started here, to count its requests; install ceph and radosgw")
    machine = print_machine(prompts=f"{TOKEN_BYTES >> 10} KiB a token")
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        running: Gateway = stack.enter_context(gateway(folder / "ceph", VIRTUAL_HOSTS))
        os.environ.update(running.environment())
        running.make_bucket(BUCKET)
        theirs: LMCache | str = f"not run: no {arguments.lmcache}; make .venv-lmcache/.ready"
        if arguments.lmcache.exists():
            theirs = LMCache(arguments.lmcache, f"{BUCKET}:{running.endpoint.rpartition(':')[2]}")
        ours = Kvtier(folder, f"s3://{BUCKET}/kv")
        rows = measure(ours, theirs, Meter(folder / "ceph"), lengths, arguments.rounds)
    headings = ["tokens", "by", "seconds", "rounds", "requests", "MiB read"]
    print("\n" + render(headings, [cells(row) for row in rows]))
    write_report(arguments.json, machine=machine, rows=[asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
