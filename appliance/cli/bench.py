"""`kvtier bench`: quick figures of a running daemon, against what memory itself can do on this host.

One client, one thread, whole chains per call, as a runtime would use it. The comparison is memcpy out of
memory as large as what is stored, in the order of the gets: GB/s alone say nothing about another machine,
and a memcpy within the cache would say nothing about this one. Peers and long runs belong to bench/ in
the repository; this command answers "is this host set up right?".

What a get brought is compared with what was put, outside the timed part: a fast wrong answer is none.
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table

from ... import Client, KvtierError
from ...clients.values.keys import prefix_hashes
from ...clients.values.namespace import Namespace
from ...v1 import admin_pb2
from ...v1.types import Geometry, NamespaceIdentity, PutOutcome
from ..config.units import about_bytes, count, format_bytes
from .output import console, new_table, print_json, progress_bar, talk
from .quantities import SIZE, SIZES
from .target import TIMEOUT_S, Failed, admin, json_option, resolve, target_option, unreached

BLOCK_TOKENS = 16
DEFAULT_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
OPERATIONS = ("memcpy", "put", "get", "lookup")
MIN_CALLS = 32  # per figure, so that a 99th percentile means something
NUM_ROUNDS = 8
CLEAN_UP_S = 120.0
COPY_S = 5.0  # by then copies that hold blocks have ended
MODEL_DIGEST = hashlib.sha256(b"kvtier bench").digest()
SIZE_STEP_BYTES = 2 * BLOCK_TOKENS
Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result. Latencies are of whole calls of `num_blocks` blocks each."""

    operation: str  # memcpy, put, get, lookup
    block_bytes: int
    num_blocks: int
    num_calls: int
    num_failed: int  # blocks refused by a put, missed by a get
    bytes_per_s: float  # median of the calls'; 0 for lookup, which moves none
    p50_s: float
    p99_s: float
    memcpy_ratio: float  # median of the rounds' speeds over memcpy's in the same rounds


@click.command()
@click.option(
    "--sizes",
    type=SIZES,
    help="Block sizes.  [default: 64KiB,256KiB,1MiB,4MiB, as far as --volume allows]",
)
@click.option(
    "--batch",
    default=16,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Blocks a call; fewer where --volume makes less than 32 calls of them.",
)
@click.option(
    "--volume", default="256MiB", show_default=True, type=SIZE, help="Bytes to store per block size."
)
@click.option("--seed", default=1, show_default=True, help="Order of the gets, and the blocks' contents.")
@click.option("--keep", is_flag=True, help="Leave what was stored, to have something to look at.")
@target_option
@json_option
def bench(
    sizes: tuple[int, ...] | None,
    batch: int,
    volume: int,
    seed: int,
    keep: bool,
    target: str | None,
    as_json: bool,
) -> None:
    """Measure put, get and lookup of a running daemon, and memcpy on this host beside them.

    GB/s are medians of calls; "of memcpy" compares with copies made in the same rounds. Stores blocks in
    namespaces of its own and evicts them afterwards; on a full daemon that costs others their coldest
    blocks.

    \b
    Example:
      kvtier bench
      kvtier bench --sizes 256KiB --batch 32 --json > before.json
      kvtier bench --volume 64MiB
    """
    wanted = _sizes(sizes, volume)
    address = resolve(target)
    figures: list[Figure] = []
    try:
        with Client(address, name="kvtier-bench") as client, progress_bar() as progress:
            transport = client.info.transport
            task = progress.add_task("bench", total=4 * len(wanted))
            for size in wanted:
                namespace = _register(client, size)
                try:
                    for figure in measure(client, namespace, batch, volume, seed):
                        figures.append(figure)
                        progress.advance(task)
                finally:
                    if not keep:
                        clean_up(address, namespace.id)
    except KvtierError as error:
        raise unreached(error.reason, error.message) or Failed(str(error)) from error
    if as_json:
        result = {"target": address, "transport": transport, "seed": seed}
        print_json({**result, "figures": [asdict(figure) for figure in figures]})
    else:
        console().print(_table(figures, f"{address}, {transport}"))


def _sizes(sizes: tuple[int, ...] | None, volume_bytes: int) -> tuple[int, ...]:
    """Return the block sizes to measure. Raises UsageError for one of which too few fit into the volume."""
    largest = volume_bytes // MIN_CALLS
    if sizes is None:
        sizes = tuple(size for size in DEFAULT_SIZES if size <= largest)
        if not sizes:
            least = format_bytes(MIN_CALLS * DEFAULT_SIZES[0])
            raise click.UsageError(f"--volume {format_bytes(volume_bytes)} is too small: at least {least}")
    for size in sizes:
        if size == 0 or size % SIZE_STEP_BYTES:
            raise click.UsageError(
                f"--sizes {format_bytes(size)}: a block size is a multiple of {SIZE_STEP_BYTES} bytes"
            )
        if size > largest:
            needed = format_bytes(MIN_CALLS * size)
            raise click.UsageError(
                f"--sizes {format_bytes(size)} needs --volume {needed} or more: {MIN_CALLS} calls of a block"
            )
    return sizes


def clean_up(address: str, namespace_id: int) -> None:
    """Evict what was stored. Where that is not allowed, or the daemon is gone, says so and goes on."""
    try:
        with admin(address) as stub:
            tiers = [
                tier.tier for tier in stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S).tiers
            ]
            deadline_at, pause = time.monotonic() + COPY_S, threading.Event()
            while True:  # a block that is being copied down stays until the copy has ended
                kept = 0
                for tier in reversed(tiers):  # what a slower tier continues stays in a faster one
                    request = admin_pb2.EvictRequest(tier=tier, namespace_id=namespace_id)
                    kept += sum(stub.Evict(request, timeout=CLEAN_UP_S).num_kept.values())
                if not kept or time.monotonic() > deadline_at:
                    break
                pause.wait(0.05)
    except Failed as error:
        talk().print(f"what was stored stays until its room is wanted: {error.message}", soft_wrap=True)
        return
    if kept:
        talk().print(f"{count(kept, 'block')} that it stored could not be evicted yet")


def measure(
    client: Client, namespace: Namespace, batch: int, volume_bytes: int, seed: int
) -> Iterator[Figure]:
    """Measure one block size. Yields memcpy, put, get, lookup. Raises Failed on wrong bytes.

    In rounds, because what else a machine does comes and goes: a round's calls are compared with copies of
    the same round, and what is told is the median.
    """
    size = namespace.block_bytes
    batch = min(batch, volume_bytes // (MIN_CALLS * size))
    num_chains = volume_bytes // (batch * size)
    session = client.session(f"kvtier-bench-{random.randbytes(4).hex()}")
    source, into = _filled(batch * size, seed), np.zeros(batch * size, np.uint8)
    chains = _chains(namespace, num_chains, batch)
    order = random.Random(seed).sample(range(num_chains), num_chains)
    pool = np.ones((num_chains, batch * size), np.uint8)
    copied, put, got, looked_up = (Rounds(operation) for operation in OPERATIONS)

    def copy(numbers: Sequence[int]) -> None:
        copied.add([(_timed(partial(np.copyto, into, pool[number])), into.nbytes) for number in numbers])

    rounds: list[list[int]] = [part.tolist() for part in np.array_split(np.arange(num_chains), NUM_ROUNDS)]
    for numbers in rounds:
        copy(numbers)
        put.add([_put(client, namespace, chains[n], n, source, session.session_id) for n in numbers])
    for places in rounds:
        numbers = [order[place] for place in places]
        copy(numbers)
        got.add([_get(client, namespace, chains[n], n, source, into) for n in numbers])
        looked_up.add([(_timed(partial(client.lookup, namespace, chains[n])), 0) for n in numbers])
    session.end(archive=False)
    before, after = copied.speeds[:NUM_ROUNDS], copied.speeds[NUM_ROUNDS:]
    for one, beside in ((copied, copied.speeds), (put, before), (got, after), (looked_up, after)):
        num_calls = len(one.calls)
        num_failed = 0 if one is looked_up else num_calls * batch - one.num_bytes // size
        yield Figure(
            one.operation,
            size,
            batch,
            num_calls,
            num_failed,
            one.speed(),
            float(np.percentile(one.calls, 50)),
            float(np.percentile(one.calls, 99)),
            one.ratio(beside),
        )


class Rounds:
    """Calls of one operation, round by round."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.calls: list[float] = []  # seconds of each
        self.speeds: list[float] = []  # median bytes per second of each round
        self.num_bytes = 0
        self._each: list[float] = []  # bytes per second of each call

    def add(self, calls: Sequence[tuple[float, int]]) -> None:
        """Add a round: seconds and bytes of each call."""
        speeds = [num_bytes / seconds for seconds, num_bytes in calls]
        self.calls += [seconds for seconds, _ in calls]
        self.num_bytes += sum(num_bytes for _, num_bytes in calls)
        self.speeds.append(median(speeds))
        self._each += speeds

    def speed(self) -> float:
        """Return the median of the calls' bytes per second."""
        return median(self._each)

    def ratio(self, others: Sequence[float]) -> float:
        """Return the median of the rounds' speeds over those of others in the same rounds."""
        return median(mine / other for mine, other in zip(self.speeds, others, strict=True))


def _put(
    client: Client, namespace: Namespace, chain: list[bytes], number: int, source: Array, session_id: str
) -> tuple[float, int]:
    """Put a chain. Returns the seconds it took and the bytes that were stored. Raises Failed without room."""
    _stamp(source, namespace.block_bytes, number)
    began = time.perf_counter()
    report = client.put(namespace, chain, source, session=session_id)
    seconds = time.perf_counter() - began
    if set(report.outcomes) == {PutOutcome.NO_ROOM}:  # each further one would wait as long
        raise Failed(
            f"a put of {format_bytes(namespace.block_bytes)} blocks found no room in {seconds:.1f} s: what "
            "is there is held, or is cut for blocks of other sizes (docs/operate/sizing.md)"
        )
    return seconds, (len(chain) - report.num_refused) * namespace.block_bytes


def _get(
    client: Client, namespace: Namespace, chain: list[bytes], number: int, source: Array, into: Array
) -> tuple[float, int]:
    """Get a chain and compare it. Returns the seconds it took and the bytes that came. Raises Failed."""
    began = time.perf_counter()
    report = client.get(namespace, chain, into)
    seconds = time.perf_counter() - began
    _stamp(source, namespace.block_bytes, number)
    if not np.array_equal(into[: report.num_bytes], source[: report.num_bytes]):
        raise Failed(f"chain {number}: the bytes that came are not those that were put; file a bug")
    return seconds, report.num_bytes


def _register(client: Client, size: int) -> Namespace:
    """Register the namespace of blocks of `size` bytes that only this command uses."""
    geometry = Geometry(1, 1, size // SIZE_STEP_BYTES, BLOCK_TOKENS, "int8")
    return client.register(NamespaceIdentity(MODEL_DIGEST, geometry, shard="kvtier bench"))


def _chains(namespace: Namespace, num_chains: int, batch: int) -> list[list[bytes]]:
    """Return the names of the blocks, which no other run has."""
    tokens = np.arange(num_chains * batch * BLOCK_TOKENS).reshape(num_chains, -1)
    run = [random.randbytes(16)]
    return [prefix_hashes(namespace, row, extra_keys=run) for row in tokens]


def _filled(num_bytes: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def _stamp(source: Array, block_bytes: int, number: int) -> None:
    """Make the blocks of chain `number` differ from all others in their first 8 bytes."""
    source.reshape(-1, block_bytes)[:, :8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _table(figures: list[Figure], title: str) -> Table:
    numbers = (">blocks/call", ">calls", ">GB/s", ">of memcpy", ">p50", ">p99", ">failed blocks")
    table = new_table("block", "operation", *numbers, title=title)
    for f in figures:
        moved = f.bytes_per_s > 0
        table.add_row(
            about_bytes(f.block_bytes),
            f.operation,
            str(f.num_blocks),
            str(f.num_calls),
            f"{f.bytes_per_s / 1e9:.2f}" if moved else "–",
            f"{f.memcpy_ratio:.0%}" if moved else "–",
            f"{f.p50_s * 1e3:.3f} ms",
            f"{f.p99_s * 1e3:.3f} ms",
            f"{f.num_failed:,}" if f.num_failed else "–",
        )
    return table
