"""What an object store brings, beside its client library alone on the same objects.

    python -m bench.object_store [--url s3://BUCKET/PREFIX | --gateway] [--rounds 9] [--bundles 8]

Without an address it is a folder. `--gateway` starts Ceph's, where that is installed. Two daemons share the
store; chains are new in every round, and the contenders take turns.

    export   blocks put until all their bundles are stored, against obstore's `put` of as many bytes
    fetch    one get of blocks that only the store has, into the caller's memory, against obstore's `get` of
             the same objects with as many threads, after the store had read them once
    first    when the first layer group of all blocks could be read, as a share of the time to the last

The steps of the daemons' event loops are timed inside them (bench/loop_steps), from the first export on. What
exports cost local calls is measured by bench.object_store_beside.
"""

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGHUP
from typing import Any

import numpy as np

from bench.machine import print_machine
from bench.table import render
from kvtier.appliance.transfer.object_edge import EPOCH_DAYS
from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity
from kvtier.sources.objects.keys import Epochs, bundle_key
from kvtier.sources.objects.store import ObjectStore, StoreLimits
from kvtier.v1.bundles import blocks_per_bundle
from tests.daemon import PATIENT, Daemon
from tests.sources.objects.gateway import gateway
from tests.waiting import until

LOOP_STEPS = Path(__file__).parent / "loop_steps"
NUM_THREADS = 8  # requests in flight of a daemon, too
#: As a model of 8 billion parameters has it: 128 KiB a token. Bundles of 32 MiB, 16 layer groups of 2 MiB.
GEOMETRY = Geometry(
    num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=64, dtype="float16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"bench object store").digest(), GEOMETRY)
BUNDLE_BLOCKS = blocks_per_bundle(GEOMETRY)
BUNDLE_BYTES = BUNDLE_BLOCKS * GEOMETRY.block_bytes
DEADLINE_S = 120.0
LARGE_DISK = "[osd]\nbluestore block size = 17179869184\n"  # nothing is deleted between rounds
HOLD_S = 0.005  # no step may take longer


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; `ratio` is the median of the rounds' own ratios."""

    what: str
    ours: float
    theirs: float
    ratio: float
    lowest: float
    highest: float
    num_rounds: int


def row(what: str, rounds: list[tuple[float, float]]) -> Row:
    """Return the row of rounds that gave (ours, theirs)."""
    ours, theirs = zip(*rounds, strict=True)
    ratios = [a / b for a, b in rounds]
    middle = statistics.median
    return Row(what, middle(ours), middle(theirs), middle(ratios), min(ratios), max(ratios), len(ratios))


class Host:
    """A daemon that uses the store, and a client of it."""

    def __init__(self, folder: Path, url: str, share: str, pool_bytes: int) -> None:
        folder.mkdir()
        self._policy = folder / "policy.yaml"
        self._url, self._share, self._generation = url, share, 1
        self._values = {
            "tiers": {"dram": {"capacity": f"{pool_bytes >> 20}MiB"}},
            "observe": {"http": "off"},
        }
        self._write(share)
        self.daemon = Daemon(folder, self._policy)

    def __enter__(self) -> "Host":
        self.daemon.start()
        self.daemon.wait_for_log(f"object store {self._url}: in use")
        self.client = Client(self.daemon.target, timeout=PATIENT)
        self.namespace: Namespace = self.client.register(IDENTITY)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.daemon.close()

    def _write(self, share: str) -> None:
        self._policy.write_text(json.dumps({**self._values, "object": {"url": self._url, "share": share}}))

    def share(self, share: str) -> None:
        """Change `object.share`, which is live."""
        if share == self._share:
            return
        self._share = share
        self._write(share)
        self.daemon.signal(SIGHUP)
        self._generation += 1
        self.daemon.wait_for_log(f"policy generation {self._generation}:")


class Bench:
    """Two hosts, one store, and obstore on the same store."""

    def __init__(self, store: ObjectStore, first: Host, second: Host, num_bundles: int) -> None:
        self.store, self.first, self.second = store, first, second
        self.num_bundles = num_bundles
        self.num_blocks = num_bundles * BUNDLE_BLOCKS
        self.payload = np.random.default_rng(1).integers(
            0, 256, self.num_blocks * GEOMETRY.block_bytes, np.uint8
        )
        self.into = np.empty_like(self.payload)
        self.into.fill(0)
        self.pool = ThreadPoolExecutor(NUM_THREADS)

    def names(self, chain: int) -> list[bytes]:
        return [hashlib.sha256(b"%d %d" % (chain, number)).digest() for number in range(self.num_blocks)]

    def keys(self, chain: int) -> list[str]:
        """Return the keys of a chain's bundles, once they are all stored."""
        names, epoch = self.names(chain)[BUNDLE_BLOCKS - 1 :: BUNDLE_BLOCKS], Epochs(EPOCH_DAYS)
        of_epoch = partial(bundle_key, epoch.present(time.time()), "", IDENTITY.digest)
        return self.await_stored([str(of_epoch(name)) for name in names])

    def await_stored(self, keys: list[str]) -> list[str]:
        """Return keys once there is an object under each. By HEADs: a listing takes what exports need."""
        for key in keys:
            until(partial(self.store.size, key), "it was not stored", 0.005)
        return keys

    def put(self, chain: int) -> None:
        self.payload[:8] = np.frombuffer(chain.to_bytes(8, "little"), np.uint8)
        report = self.first.client.put(self.first.namespace, self.names(chain), self.payload)
        assert report.complete, report

    def export(self, chain: int) -> float:
        """Return seconds from the end of a put to its last stored bundle."""
        self.put(chain)
        began_at = time.perf_counter()
        self.keys(chain)
        return time.perf_counter() - began_at

    def export_alone(self, round_: int) -> float:
        """Return seconds until the client library has stored as much, as seen by the same HEADs."""
        keys = [f"v1/bench/{os.getpid()}-{round_}-{n}" for n in range(self.num_bundles)]
        began_at = time.perf_counter()
        for n, key in enumerate(keys):
            self.pool.submit(self.store.create, key, self.payload[n * BUNDLE_BYTES :][:BUNDLE_BYTES].data)
        self.await_stored(keys)
        return time.perf_counter() - began_at

    def fetch(self, chain: int) -> float:
        began_at = time.perf_counter()
        report = self.second.client.get(self.second.namespace, self.names(chain), self.into)
        took_s = time.perf_counter() - began_at
        assert report.num_blocks == self.num_blocks, report
        self.payload[:8] = np.frombuffer(chain.to_bytes(8, "little"), np.uint8)
        assert np.array_equal(self.into, self.payload), "wrong bytes"
        return took_s

    def fetch_alone(self, keys: list[str]) -> float:
        from obstore import get

        inner: Any = self.store._store
        began_at = time.perf_counter()
        num_bytes = sum(self.pool.map(lambda key: len(get(inner, key).bytes()), keys))
        took_s = time.perf_counter() - began_at
        assert num_bytes >= self.payload.nbytes
        return took_s

    def first_layers(self, chain: int) -> float:
        """Return when the first layer group of all blocks was readable, as a share of the whole time."""
        began_at, num_first, first_s = time.perf_counter(), 0, 0.0
        with self.second.client.acquire(self.second.namespace, self.names(chain)) as lease:
            for fragment in lease:
                num_first += fragment.group == 0
                if num_first == self.num_blocks and not first_s:
                    first_s = time.perf_counter() - began_at
        assert num_first == self.num_blocks
        return first_s / (time.perf_counter() - began_at)


def measure(bench: Bench, num_rounds: int) -> list[Row]:
    """Run all parts; each round has chains of its own."""
    chains = iter(range(1_000_000))
    bench.export(next(chains))  # threads and connections are made
    exports, fetches, firsts = [], [], []
    for number in range(num_rounds):
        chain = next(chains)
        exports.append(in_turn(number, partial(bench.export, chain), partial(bench.export_alone, number)))
        keys = bench.keys(chain)
        bench.fetch_alone(keys)  # the store has them in its memory now
        fetches.append(in_turn(number, partial(bench.fetch, chain), partial(bench.fetch_alone, keys)))
        bench.put(chain := next(chains))
        bench.keys(chain)
        firsts.append((bench.first_layers(chain), 1.0))
    num_gb = bench.payload.nbytes / 1e9
    return [
        row("export, GB/s", [(num_gb / ours, num_gb / theirs) for ours, theirs in exports]),
        row("fetch, GB/s", [(num_gb / ours, num_gb / theirs) for ours, theirs in fetches]),
        row("first layer group readable, of the whole", firsts),
    ]


def long_steps(path: Path, since: float) -> str:
    """Return what steps of the daemons' event loops after `since` say, in words."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    num_steps = {line["pid"]: line["num_steps"] for line in lines if "num_steps" in line}
    steps = sorted(
        (one for one in lines if "cpu_s" in one and one["at"] > since), key=lambda one: -one["cpu_s"]
    )
    num_long = sum(one["cpu_s"] > HOLD_S for one in steps)
    words = [
        "{:.1f} ms ({:.1f}, {:.1f}) ".format(*(one[of] * 1e3 for of in ("cpu_s", "seconds", "collector_s")))
        + one["what"]
        for one in steps[:5]
    ]
    told = f"{num_long} of {sum(num_steps.values())} steps of the event loops took the processor above 5 ms"
    return "\n  ".join([f"{told}; the longest, their time on the clock and in Python's collector:", *words])


def shown(rows: Sequence[Row]) -> str:
    """Return rows as a table."""
    cells = [
        [
            one.what,
            f"{one.ours:.3g}",
            f"{one.theirs:.3g}",
            f"{one.ratio:.2f}",
            f"{one.lowest:.2f} to {one.highest:.2f}",
        ]
        for one in rows
    ]
    return render(["what", "kvtier", "beside it", "ratio", "rounds"], cells)


def in_turn(number: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """Run both, the other one first in every second round."""
    if number % 2:
        return ours(), theirs()
    second = theirs()
    return ours(), second


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.object_store", description=__doc__)
    parser.add_argument("--url", help="of a store that is there, as object.url has it; default: a folder")
    parser.add_argument("--gateway", action="store_true", help="start Ceph's S3 gateway")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bundles", type=int, default=8, help=f"of a chain, {BUNDLE_BYTES >> 20} MiB each")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        url = arguments.url
        if arguments.gateway:
            running = stack.enter_context(gateway(folder / "ceph", LARGE_DISK))
            os.environ.update(running.environment())
            running.make_bucket("bench")
            url = "s3://bench/kv"
        elif url is None:
            (folder / "store").mkdir()
            url = f"file://{folder}/store"
        patient = StoreLimits(connect_s=10.0, idle_s=60.0, request_s=DEADLINE_S)
        store = ObjectStore(url, limits=patient)  # a busy gateway is slow, not gone
        pool_bytes = 8 * arguments.bundles * BUNDLE_BYTES  # of which an eighth may be on its way to the store
        steps = folder / "steps"
        os.environ |= {"PYTHONPATH": str(LOOP_STEPS), "KVTIER_LOOP_STEPS": str(steps)}
        first = stack.enter_context(Host(folder / "first", url, "eager", pool_bytes))
        second = stack.enter_context(Host(folder / "second", url, "off", pool_bytes))
        began_at = time.time()
        rows = measure(Bench(store, first, second, arguments.bundles), arguments.rounds)
        told = long_steps(steps, began_at)
    print("\n" + shown(rows) + f"\n\n{told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
