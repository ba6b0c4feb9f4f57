"""What a million fragments cost the planner: bytes each, microseconds per operation, longest pause.

    python -m bench.catalog [--blocks 1000000]

Only the pure core runs here: no bytes, no sockets. Puts arrive in chains of 64 blocks; then lookups,
acquires and releases walk over all chains; then a full dram tier evicts one block for every put.
"""

import argparse
import gc
import hashlib
import resource
import time
from collections.abc import Iterator

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import Copy, Instruction, Reply
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.results import AcquireResult
from kvtier.appliance.host.process import COLLECTED_AFTER
from kvtier.tiers.base import CopyOutcome
from kvtier.tiers.block import Geometry, NamespaceIdentity, Tier
from kvtier.tiers.memory.slots import SlotPool

from .machine import describe
from .table import render

COMMAND = "python -m bench.catalog"
CHAIN = 64
SLOT_BYTES = 16 << 10
GEOMETRY = Geometry(num_layers=1, num_kv_heads=1, head_dim=1024, block_tokens=16, dtype="int8", num_planes=1)


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
        self.do(ev.NamespaceRegistered(1, NamespaceIdentity(b"m" * 16, GEOMETRY)))

    def do(self, event: ev.Event) -> list[Instruction]:
        """Run one event and its copies; record the longest time the planner took."""
        self.now += 1e-4
        began_at = time.perf_counter()
        instructions = self.planner.handle(event, self.now)
        self.longest_s = max(self.longest_s, time.perf_counter() - began_at)
        for instruction in instructions:
            if isinstance(instruction, Copy):
                outcomes = [CopyOutcome(None, b"\1" * 16)] * len(instruction.items)
                self.do(ev.CopyFinished(instruction.copy, outcomes))
        return instructions

    def put(self, hashes: list[bytes]) -> None:
        """Put one chain."""
        reserve = ev.ReserveRequested(1, 1, "", 1, b"", hashes)
        self.do(ev.CommitRequested(1, 1, "", 0, [(0, GEOMETRY.block_bytes)] * len(hashes), reserve))

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


def measure(name: str, rig: CatalogRig, work: "list[list[bytes]]", act: str) -> list[str]:
    """Return a row of the table: the time of `act` over all chains."""
    rig.longest_s = 0.0
    spent_s = 0.0
    for hashes in work:
        began_at = time.perf_counter()
        if act == "lookup":
            rig.planner.lookup(1, hashes)
        else:
            getattr(rig, act)(hashes)
        spent_s += time.perf_counter() - began_at
    num_blocks = len(work) * CHAIN
    return [name, f"{num_blocks:,}", f"{spent_s / num_blocks * 1e6:.2f}", f"{rig.longest_s * 1e3:.2f}"]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    num_blocks = parser.parse_args().blocks
    print("\n".join(f"{label:9s}{value}" for label, value in {**describe({}), "command": COMMAND}.items()))
    gc.set_threshold(*COLLECTED_AFTER)  # as the daemon does
    rig = CatalogRig(num_blocks)
    stored = list(chains(num_blocks, "stored"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = [measure("put new blocks", rig, stored, "put")]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    some = stored[:: max(1, len(stored) // 2000)]
    rows.append(measure("lookup", rig, some, "lookup"))
    rows.append(measure("acquire and release", rig, some, "acquire"))
    rows.append(measure("put, evicting", rig, list(chains(num_blocks // 10, "more")), "put"))
    print(render(["operation", "blocks", "us a block", "longest ms"], rows))
    num_bytes = (after - before) * 1024 / rig.planner.catalog.num_blocks
    print(
        f"\n{num_bytes:.0f} bytes a block of one fragment (catalog, slots, eviction heap, story; no hashes)"
    )


if __name__ == "__main__":
    main()
