"""What fragments cost the planner: bytes each, microseconds per operation, longest pause, at several sizes.

    python -m bench.catalog [--blocks 1000000,10000000]

Only the pure core runs here: no bytes, no sockets. Puts arrive in chains of 64 blocks; then lookups, acquires
and releases walk over chains of all ages; then a full dram tier evicts one block for every put; and another
planner adopts as many records, as it does after a restart. Each size has a process of its own, one after the
other; `grows` compares the last with the first. Times are the processor's: the planner waits for nothing, so
what neighbours take is no pause of its own.
"""

import argparse
import gc
import hashlib
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import Copy, Instruction, Reply
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.results import AcquireResult
from kvtier.appliance.host.process import COLLECTED_AFTER, keep_freed_memory
from kvtier.tiers.base import CopyOutcome
from kvtier.tiers.block import Geometry, NamespaceIdentity, Tier
from kvtier.tiers.cold.log import SegmentLog, record_bytes
from kvtier.tiers.cold.recovery import RECORD, RecoveredStore, SegmentSummary
from kvtier.tiers.memory.slots import SlotPool
from tests.records import columns

from .machine import print_machine
from .table import render

CHAIN = 64
SLOT_BYTES = 16 << 10
GEOMETRY = Geometry(num_layers=1, num_kv_heads=1, head_dim=1024, block_tokens=16, dtype="int8", num_planes=1)
IDENTITY = NamespaceIdentity(b"m" * 16, GEOMETRY)
SEGMENT_RECORDS = 10_000
MAX_EVICTING = 100_000  # blocks put into a full tier

Figures = dict[str, tuple[int, float, float]]  # by operation: blocks, microseconds each, longest pause in s


class CatalogRig:
    """A planner, with hands that finish every copy at once."""

    def __init__(self, num_slots: int) -> None:
        extent_bytes = 64 << 20
        num_extents = -(-num_slots * SLOT_BYTES // extent_bytes)
        rooms = {Tier.DRAM: SlotPool(num_extents, extent_bytes)}
        self.planner = Planner(PlannerOptions(high_watermark=1.0, low_watermark=0.999), rooms)
        self.now = 0.0
        self.longest_s = 0.0
        self.do(ev.ClientOpened(1, "bench", True, ""))
        self.do(ev.NamespaceRegistered(1, IDENTITY))

    def do(self, event: ev.Event) -> list[Instruction]:
        """Run one event and its copies; record the longest time the planner took."""
        self.now += 1e-4
        began_at = time.thread_time()
        instructions = self.planner.handle(event, self.now)
        self.longest_s = max(self.longest_s, time.thread_time() - began_at)
        for instruction in instructions:
            if isinstance(instruction, Copy):
                outcomes = [CopyOutcome(None, b"\1" * 16)] * len(instruction.items)
                self.do(ev.CopyFinished(instruction.copy, outcomes))
        return instructions

    def put(self, hashes: list[bytes]) -> None:
        """Put one chain."""
        reserve = ev.ReserveRequested(1, 1, "", 1, b"", hashes)
        self.do(ev.CommitRequested(1, 1, "", 0, [(0, GEOMETRY.block_bytes)] * len(hashes), reserve))

    def lookup(self, hashes: list[bytes]) -> None:
        """Look one chain up."""
        self.planner.lookup(1, hashes)

    def acquire(self, hashes: list[bytes]) -> None:
        """Run an acquire and a release of one chain."""
        lease_id = 0
        for instruction in self.do(ev.AcquireRequested(2, 1, "", 1, hashes)):
            if isinstance(instruction, Reply) and isinstance(instruction.result, AcquireResult):
                lease_id = instruction.result.lease_id
        self.do(ev.ReleaseRequested(None, 1, [lease_id]))


def chains(num_blocks: int, seed: str) -> Iterator[list[bytes]]:
    """Yield chains of CHAIN prefix hashes."""
    for number in range(num_blocks // CHAIN):
        yield [hashlib.sha256(f"{seed} {number} {i}".encode()).digest() for i in range(CHAIN)]


def measure(rig: CatalogRig, work: "list[list[bytes]]", act: str) -> tuple[int, float, float]:
    """Return blocks, microseconds a block and the longest pause of `act` over chains."""
    rig.longest_s = spent_s = 0.0
    for hashes in work:
        began_at = time.thread_time()
        getattr(rig, act)(hashes)
        spent_s += time.thread_time() - began_at
    return len(work) * CHAIN, spent_s / (len(work) * CHAIN) * 1e6, rig.longest_s


def recovered(num_blocks: int) -> RecoveredStore:
    """Return what a cold store of chains of CHAIN blocks says after a restart, in order of writing."""
    records = np.zeros(num_blocks, RECORD)
    names = np.random.default_rng(1).integers(0, 256, (num_blocks, 32), np.uint8).view("V32").reshape(-1)
    numbers = np.arange(num_blocks)
    records["prefix_hash"], records["position"] = names, numbers % CHAIN
    records["has_parent"] = numbers % CHAIN > 0
    records["parent_hash"][1:] = names[:-1]
    records["raw_length"] = records["stored_length"] = GEOMETRY.block_bytes
    record_pages = record_bytes(GEOMETRY.block_bytes) >> 12
    records["place"] = numbers // SEGMENT_RECORDS << 32 | numbers % SEGMENT_RECORDS * record_pages
    num_live = np.bincount(numbers // SEGMENT_RECORDS).tolist()
    segments = [
        SegmentSummary(number, count * record_pages, count, count * record_pages << 12)
        for number, count in enumerate(num_live)
    ]
    return RecoveredStore([IDENTITY], columns(records), segments, Counter())


def adopt(num_blocks: int) -> tuple[int, float, float]:
    """Return blocks, microseconds a block and the seconds it takes a planner to adopt them."""
    store = recovered(num_blocks)
    segment_bytes = (SEGMENT_RECORDS + 100) * record_bytes(GEOMETRY.block_bytes)
    log = SegmentLog(len(store.segments) + 3, segment_bytes, 1 << 20)
    planner = Planner(PlannerOptions(), {Tier.DRAM: SlotPool(1, 64 << 20), Tier.NVME: log})
    began_at = time.thread_time()
    assert planner.adopt(store, 0.0) == num_blocks
    took_s = time.thread_time() - began_at
    return num_blocks, took_s / num_blocks * 1e6, took_s


def run(num_blocks: int) -> tuple[Figures, float]:
    """Return the figures of one size, and the bytes of a block."""
    gc.set_threshold(*COLLECTED_AFTER)  # as the daemon does
    keep_freed_memory()
    rig = CatalogRig(num_blocks)
    stored = list(chains(num_blocks, "stored"))
    gc.collect()
    gc.freeze()  # what is only the bench's, too
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {"put new blocks": measure(rig, stored, "put")}
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_bytes = (after - before) * 1024 / rig.planner.catalog.num_blocks
    some = stored[:: max(1, len(stored) // 2000)]
    figures["lookup"] = measure(rig, some, "lookup")
    figures["acquire and release"] = measure(rig, some, "acquire")
    more = list(chains(min(MAX_EVICTING, num_blocks // 10), "more"))
    figures["put, evicting"] = measure(rig, more, "put")
    del rig, stored, some, more
    figures["adopt at a start"] = adopt(num_blocks)
    return figures, num_bytes


def main() -> None:
    """Run each size in its own process, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", default="1000000", help="sizes, comma-separated")
    parser.add_argument("--json", action="store_true", help="one size, as numbers")
    args = parser.parse_args()
    sizes = [int(one) for one in args.blocks.split(",")]
    if args.json:
        print(json.dumps(run(sizes[0])))
        return
    print_machine()
    command = [sys.executable, "-m", "bench.catalog", "--json", "--blocks"]
    found = [
        json.loads(subprocess.run([*command, str(size)], check=True, capture_output=True).stdout)
        for size in sizes
    ]
    rows = []
    for name in found[0][0]:
        for figures, _ in found:
            num_blocks, each_us, longest_s = figures[name]
            grows = f"{each_us / found[0][0][name][1]:.2f}×" if figures is not found[0][0] else ""
            rows.append([name, f"{num_blocks:,}", f"{each_us:.2f}", grows, f"{longest_s * 1e3:.2f}"])
    print(render(["operation", "blocks", "us a block", "grows", "longest ms"], rows))
    print("\nbytes a block of one fragment (catalog, slots, eviction heap, story; no hashes):")
    each = (f"{one[1]:.0f} of {size:,}" for size, one in zip(sizes, found, strict=True))
    print(", ".join(each))


if __name__ == "__main__":
    main()
