"""`kvtier bench`: quick figures of a running daemon, against what memory itself can do on this host.

One client, one thread, whole chains per call, as a runtime would use it. The comparison is memcpy out of
memory as large as what is stored, in the order of the gets: GB/s alone say nothing about another machine,
and a memcpy within the cache would say nothing about this one. Peers and long runs belong to bench/ in
the repository; this command answers "is this host set up right?".

What a get brought is compared with what was put, outside the timed part: a fast wrong answer is none.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.progress import Progress
from rich.table import Table

from ... import Client, KvtierError
from ...clients.keys import prefix_hashes
from ...clients.namespace import Geometry, Namespace, NamespaceIdentity
from ..units import about_bytes, parse_bytes
from .bench_codec import codec
from .output import console, print_json, talk
from .target import Failed, json_option, resolve, target_option, unreached

BLOCK_TOKENS = 16
MIN_CALLS = 32  # per figure, so that a 99th percentile means something
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
    bytes_per_s: float  # 0 for lookup, which moves none
    p50_s: float
    p99_s: float
    memcpy_ratio: float  # bytes_per_s over memcpy's


@click.group(invoke_without_command=True)
@click.option("--sizes", default="64KiB,256KiB,1MiB,4MiB", show_default=True, help="Block sizes.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1, 1024), help="Blocks a call.")
@click.option("--volume", default="256MiB", show_default=True, help="Bytes to store per block size.")
@click.option("--seed", default=1, show_default=True, help="Order of the gets, and the blocks' contents.")
@target_option
@json_option
@click.pass_context
def bench(
    context: click.Context, sizes: str, batch: int, volume: str, seed: int, target: str | None, as_json: bool
) -> None:
    """Measure put, get and lookup of a running daemon, and memcpy on this host beside them.

    Stores blocks in a namespace of its own; on a full daemon that evicts others' coldest blocks.

    \b
    Example:
      kvtier bench
      kvtier bench --sizes 1MiB --batch 32 --json > before.json
    """
    if context.invoked_subcommand is not None:
        return
    try:
        wanted = [parse_bytes(size.strip()) for size in sizes.split(",")]
        volume_bytes = parse_bytes(volume)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for size in wanted:
        if size == 0 or size % SIZE_STEP_BYTES or size * MIN_CALLS > volume_bytes:
            raise click.UsageError(
                f"{size} bytes: a block size is a multiple of {SIZE_STEP_BYTES} and at most "
                f"1/{MIN_CALLS} of --volume"
            )
    address = resolve(target)
    figures: list[Figure] = []
    try:
        with Client(address, name="kvtier-bench") as client, _progress() as progress:
            transport = client.info.transport
            task = progress.add_task("bench", total=4 * len(wanted))
            for size in wanted:
                for figure in measure(client, size, batch, volume_bytes, seed):
                    figures.append(figure)
                    progress.advance(task)
    except KvtierError as error:
        raise unreached(error.reason, error.message) or Failed(str(error)) from error
    if as_json:
        result = {"target": address, "transport": transport, "seed": seed}
        print_json({**result, "figures": [asdict(figure) for figure in figures]})
    else:
        console().print(_table(figures, f"{address}, {transport}"))


def measure(client: Client, size: int, batch: int, volume_bytes: int, seed: int) -> Iterator[Figure]:
    """Measure one block size. Yields memcpy, put, get, lookup. Raises Failed on wrong bytes."""
    batch = min(batch, volume_bytes // (MIN_CALLS * size))
    num_chains = volume_bytes // (batch * size)
    session = client.session(f"kvtier-bench-{random.randbytes(4).hex()}")
    source, into = _filled(batch * size, seed), np.zeros(batch * size, np.uint8)
    namespace = _register(client, size)
    chains = _chains(namespace, num_chains, batch)
    order = random.Random(seed).sample(range(num_chains), num_chains)

    pool = np.ones((num_chains, batch * size), np.uint8)
    copied = [_timed(partial(np.copyto, into, pool[number])) for number in order]
    memcpy_bytes_per_s = num_chains * batch * size / sum(copied)
    del pool

    def figure(operation: str, samples: list[float], num_failed: int, num_bytes: int) -> Figure:
        speed = num_bytes / sum(samples)
        return Figure(
            operation,
            size,
            batch,
            len(samples),
            num_failed,
            speed,
            float(np.percentile(samples, 50)),
            float(np.percentile(samples, 99)),
            speed / memcpy_bytes_per_s,
        )

    yield figure("memcpy", copied, 0, num_chains * batch * size)
    put_s, num_refused = _put(client, namespace, chains, source, session.session_id)
    yield figure("put", put_s, num_refused, (num_chains * batch - num_refused) * size)
    get_s, num_missed = _get(client, namespace, chains, order, source, into)
    yield figure("get", get_s, num_missed, (num_chains * batch - num_missed) * size)
    looked_up = [_timed(partial(client.lookup, namespace, chains[number])) for number in order]
    yield figure("lookup", looked_up, 0, 0)
    session.end(archive=False)


def _put(
    client: Client, namespace: Namespace, chains: list[list[bytes]], source: Array, session_id: str
) -> tuple[list[float], int]:
    samples, num_refused = [], 0
    for number, chain in enumerate(chains):
        _stamp(source, namespace.block_bytes, number)
        began = time.perf_counter()
        report = client.put(namespace, chain, source, session=session_id)
        samples.append(time.perf_counter() - began)
        num_refused += report.num_refused
    return samples, num_refused


def _get(
    client: Client,
    namespace: Namespace,
    chains: list[list[bytes]],
    order: list[int],
    source: Array,
    into: Array,
) -> tuple[list[float], int]:
    samples, num_missed = [], 0
    for number in order:
        began = time.perf_counter()
        report = client.get(namespace, chains[number], into)
        samples.append(time.perf_counter() - began)
        num_missed += len(chains[number]) - report.num_loaded
        _stamp(source, namespace.block_bytes, number)
        if not np.array_equal(into[: report.num_bytes], source[: report.num_bytes]):
            raise Failed(f"chain {number}: the bytes that came are not those that were put; file a bug")
    return samples, num_missed


def _register(client: Client, size: int) -> Namespace:
    """Register a namespace of blocks of `size` bytes that nobody else has, in this run or another."""
    geometry = Geometry(1, 1, size // SIZE_STEP_BYTES, BLOCK_TOKENS, "int8")
    return client.register(NamespaceIdentity(random.randbytes(32), geometry, shard="kvtier bench"))


def _chains(namespace: Namespace, num_chains: int, batch: int) -> list[list[bytes]]:
    tokens = np.arange(num_chains * batch * BLOCK_TOKENS).reshape(num_chains, -1)
    return [prefix_hashes(namespace, row) for row in tokens]


def _filled(num_bytes: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def _stamp(source: Array, block_bytes: int, number: int) -> None:
    """Make the blocks of chain `number` differ from all others in their first 8 bytes."""
    source.reshape(-1, block_bytes)[:, :8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _progress() -> Progress:
    return Progress(console=talk(), transient=True, disable=not sys.stderr.isatty())


def _table(figures: list[Figure], title: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("block")
    table.add_column("operation")
    for name in ("blocks/call", "calls", "GB/s", "of memcpy", "p50", "p99", "failed blocks"):
        table.add_column(name, justify="right", no_wrap=True)
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


bench.add_command(codec)
