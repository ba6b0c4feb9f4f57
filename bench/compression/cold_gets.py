"""`python -m bench.compression.cold_gets`: gets from nvme, with and without a codec, in turns.

One daemon for each codec, on the same disk, with the same blocks: keys and values as a transformer makes
them (normal values in bfloat16, a scale of its own per layer, a few loud channels). Each holds far less in
dram than was stored, so that every get of a round comes from disk, read with O_DIRECT, decoded, and
compared with what was put. Rounds alternate between the daemons, because the disk of a shared machine
changes its mind from one second to the next; the median of the paired ratios counts.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.machine import print_machine
from bench.table import render
from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity
from tests.daemon import Daemon

MIB = 1 << 20
GEOMETRY = Geometry(32, 8, 128, 16, "bfloat16", layers_per_group=8)  # Llama-3-8B: 2 MiB a block
IDENTITY = NamespaceIdentity(hashlib.sha256(b"cold gets").digest(), GEOMETRY)


@dataclass
class ColdGetSide:
    """One daemon with its client, and what its rounds gave."""

    codec: str
    client: Client
    namespace: Namespace
    chains: list[list[bytes]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def blocks_like_kv(num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Return the bytes of `num_blocks` blocks."""
    rng = np.random.default_rng(seed)
    shape = (
        num_blocks,
        GEOMETRY.num_layers,
        2,
        GEOMETRY.block_tokens,
        GEOMETRY.num_kv_heads,
        GEOMETRY.head_dim,
    )
    scales = np.exp2(rng.uniform(-2, 2, (1, *shape[1:3], 1, 1, 1))).astype(np.float32)
    loud = np.where(rng.random((1, *shape[1:3], 1, *shape[4:])) < 0.02, 6, 1).astype(np.float32)
    values = rng.standard_normal(shape, np.float32) * scales * loud
    return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)


def start(
    codec: str,
    folder: Path,
    dram_bytes: int,
    nvme_bytes: int,
    stack: ExitStack,
    *,
    as_installed: bool = False,
) -> ColdGetSide:
    """Start a daemon that stores with `codec`.
    `as_installed`: with the policy and the way of writing that are kvtier's own defaults."""
    (folder / "cold").mkdir(parents=True)
    settings = {
        "tiers.dram.capacity": f"{dram_bytes // MIB}MiB",
        "tiers.dram.extent": "16MiB",
        "tiers.nvme.path": f"{folder}/cold",
        "tiers.nvme.capacity": f"{nvme_bytes // MIB}MiB",
        "observe.http": "off",
        "compression.codec": codec,
    }
    if not as_installed:  # nothing is written but what is measured, and what was used longest ago is on disk
        settings |= {"tiers.nvme.write": "spill", "policy.eviction": "lru"}
    daemon = stack.enter_context(Daemon(folder, settings=settings))
    client = stack.enter_context(Client(daemon.target))
    return ColdGetSide(codec, client, client.register(IDENTITY))


def fill(side: ColdGetSide, num_chains: int, blocks_per_chain: int, data: NDArray[np.uint8]) -> None:
    """Put chains of blocks; what does not fit dram goes down to nvme meanwhile."""
    for chain in range(num_chains):
        names = [hashlib.sha256(b"%d %d" % (chain, block)).digest() for block in range(blocks_per_chain)]
        assert side.client.put(side.namespace, names, data).complete
        side.chains.append(names)


def measure(
    side: ColdGetSide, data: NDArray[np.uint8], into: NDArray[np.uint8], first: int, count: int
) -> float:
    """Get some chains; return the seconds that took. What came is compared after the clock stopped."""
    seconds = 0.0
    for names in side.chains[first : first + count]:
        began_at = time.perf_counter()
        report = side.client.get(side.namespace, names, into)
        seconds += time.perf_counter() - began_at
        assert report.num_blocks == len(names), f"{side.codec}: {report.num_blocks} of {len(names)} blocks"
        assert np.array_equal(into, data), f"{side.codec}: wrong bytes"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=["exponents", "planes"])
    parser.add_argument("--chains", type=int, default=48, help="stored prompts")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of 2 MiB in each")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    print_machine()
    data = blocks_like_kv(arguments.blocks, seed=1)
    into = np.empty_like(data)
    total = arguments.chains * data.nbytes
    per_round = arguments.chains // arguments.rounds
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        with ExitStack() as stack:
            sides = [
                start(codec, folder / codec, total // 6, 2 * total, stack)
                for codec in ("identity", *arguments.codecs)
            ]
            for side in sides:
                fill(side, arguments.chains, arguments.blocks, data)
            for number in range(arguments.rounds):
                for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                    first = number * per_round
                    side.seconds.append(measure(side, data, into, first, per_round))
            report(sides, per_round * data.nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(sides: list[ColdGetSide], round_bytes: int) -> None:
    """Print one row a codec."""
    plain = sides[0].seconds
    rows = []
    for side in sides:
        ratios = [slow / fast for slow, fast in zip(plain, side.seconds, strict=True)]
        speeds = [round_bytes / seconds / 1e9 for seconds in side.seconds]
        rows.append(
            [
                side.codec,
                f"{statistics.median(speeds):.2f}",
                f"{min(speeds):.2f}",
                f"{max(speeds):.2f}",
                f"{statistics.median(ratios):.2f}×",
            ]
        )
    print(render(["codec", "GB/s p50", "worst", "best", "of identity"], rows))


if __name__ == "__main__":
    main()
