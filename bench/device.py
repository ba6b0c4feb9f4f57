"""What the hot tier makes of a GPU's link: copies between pinned dram and hbm, against one plain copy of as
many bytes.

    python -m bench.device [--device cuda|fake] [--total MIB] [--json FILE]

Goes through the parts a daemon is assembled from (HotTier, its routes, batches as the mover cuts them) and
compares bytes. `neighbours`: fragments in consecutive slots on both sides, which become few pieces.
`scattered`: each fragment is a piece of its own. The ceiling is the best of several copies in one piece on
one stream, so ratios above 1 mean that two streams are worth having. On the fake device it shows that it
runs; its figures mean nothing."""

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.machine import print_machine, write_report
from bench.table import render, size_text
from kvtier.appliance.gpu.hbm_tier import MAX_IN_FLIGHT, HotTier
from kvtier.appliance.transfer.lanes import MAX_BATCH_BYTES, Edge
from kvtier.tiers.base import CopyItem
from kvtier.tiers.block import FragmentLabel, Tier
from kvtier.tiers.gpu.device.contract import CopyPieces, Device, DeviceError
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tiers.payload import checksum
from tests.fakes.gpu.device import FakeDevice

MIB = 1 << 20
EXTENT_BYTES = 64 * MIB
SIZES = (64 << 10, 256 << 10, 2 * MIB, 32 * MIB)
ROUNDS = 5
WAIT_S = 120.0


class CopyRig:
    """Both tiers of `total_bytes`, and what runs their copies."""

    def __init__(self, device: Device, total_bytes: int) -> None:
        self.device = device
        self.total_bytes = total_bytes
        self.room, self.hot_room = (SlotPool(total_bytes // EXTENT_BYTES, EXTENT_BYTES) for _ in range(2))
        self.indexes = Indexes(total_bytes // (16 << 10), epoch=1)
        self.dram = ExtentEngine(self.room, self.indexes)
        self.dram.prefault()
        self.hot = HotTier(device, self.hot_room, self.dram, self.room)
        self.hot.pinned.pin_all()
        self.threads = ThreadPoolExecutor(4)
        self.routes = self.hot.routes(self.threads)

    def ceiling(self, is_up: bool) -> float:
        """Return the bytes per second of one copy in one piece, the best of ROUNDS."""
        memory = self.device.allocate(EXTENT_BYTES)
        ends = self.hot.pinned.pin(0), memory.address
        source, target = ends if is_up else reversed(ends)
        stream = self.device.take_stream()
        assert stream is not None
        columns = (
            np.array([source], np.uint64),
            np.array([target], np.uint64),
            np.array([EXTENT_BYTES], np.int64),
        )
        best = 0.0
        for _ in range(ROUNDS):
            is_done = threading.Event()
            began = time.perf_counter()
            stream.copy(CopyPieces(*columns))
            event = stream.record()
            self.device.when_done(event, partial(_tell, is_done))
            assert is_done.wait(WAIT_S)
            best = max(best, EXTENT_BYTES / (time.perf_counter() - began))
            self.device.recycle(event)
        self.device.give_stream(stream)
        self.device.free(memory)
        return best

    def copy(self, edge: Edge, items: Sequence[CopyItem], length: int) -> float:
        """Copy everything, MAX_IN_FLIGHT batches at a time; return bytes per second."""
        route = self.routes[edge]
        copier, step = route.copier, max(1, (route.batch_bytes or MAX_BATCH_BYTES) // length)
        batches = [items[first : first + step] for first in range(0, len(items), step)]
        slots = threading.Semaphore(MAX_IN_FLIGHT)
        futures = []
        began = time.perf_counter()
        for batch in batches:
            slots.acquire()
            future = copier.start(batch)
            future.add_done_callback(lambda _: slots.release())
            futures.append(future)
        causes = {outcome.cause for future in futures for outcome in future.result(WAIT_S)}
        took_s = time.perf_counter() - began
        assert causes == {None}, causes
        return len(items) * length / took_s

    def place(self, length: int, is_scattered: bool) -> tuple[list[CopyItem], list[CopyItem]]:
        """Store fragments of `length` bytes in half of dram; return their copies up and down again."""
        count = self.total_bytes // 2 // length
        payload = self.payload(length)
        digest = checksum(payload)
        warm, hot, back = (
            room.reserve_many(0, [length], count) for room in (self.room, self.hot_room, self.room)
        )
        if is_scattered:
            random.Random(1).shuffle(hot)
        labels = [
            FragmentLabel(bytes(32), 1, bytes([*i.to_bytes(32)]), b"", 0, 0, length, digest)
            for i in range(count)
        ]
        for place, label in zip(warm, labels, strict=True):
            self.dram.write(place, label, payload)
            self.dram.publish_run([place], [label])
        up = [CopyItem(*row) for row in zip(warm, hot, labels, strict=True)]
        down = [CopyItem(*row) for row in zip(hot, back, labels, strict=True)]
        return up, down

    def payload(self, length: int) -> memoryview:
        """Return the bytes of every fragment of this size."""
        return memoryview(np.random.default_rng(length).bytes(length))

    def forget(self, length: int, up: Sequence[CopyItem], down: Sequence[CopyItem]) -> None:
        """Give back what `place` took."""
        warm, hot = [item.source for item in up], [item.target for item in up]
        for place in warm:
            self.dram.retract(place)
        back = [item.target for item in down]
        for room, places in ((self.room, warm), (self.room, back), (self.hot_room, hot)):
            room.release_many(places, [length])

    def measure(self, length: int, is_scattered: bool) -> tuple[float, float]:
        """Return the bytes per second up and down, the best of ROUNDS; the bytes are compared."""
        up, down = self.place(length, is_scattered)
        best = [0.0, 0.0]
        for _ in range(ROUNDS):
            best[0] = max(best[0], self.copy(Edge(Tier.DRAM, Tier.HBM), up, length))
            for item in down:
                self.hot.engine.publish_run([item.source], [replace(item.label)])
            best[1] = max(best[1], self.copy(Edge(Tier.HBM, Tier.DRAM), down, length))
            for item in down:
                self.hot.engine.retract(item.source)
        payload = self.payload(length)
        assert all(self.dram.view(item.target, length) == payload for item in down)
        self.forget(length, up, down)
        return best[0], best[1]

    def close(self) -> None:
        """Give everything back."""
        self.hot.engine.close()
        self.hot.enqueuer.shutdown()
        self.threads.shutdown()
        self.dram.close()
        self.indexes.close()


def _tell(is_done: threading.Event, error: DeviceError | None) -> None:
    assert error is None, error
    is_done.set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.device", description="dram to hbm and back")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument(
        "--total", type=int, default=1024, metavar="MIB", help="of each tier; a multiple of 64"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows to FILE")
    args = parser.parse_args()
    total_bytes = args.total * MIB
    try:
        device: Device = (
            CudaDevice(0)
            if args.device == "cuda"
            else FakeDevice(capacity_bytes=4 * total_bytes, is_live=True)
        )
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 1
    machine = print_machine(device=f"{device.name} {device.uuid}")
    rig = CopyRig(device, total_bytes)
    ceilings = rig.ceiling(True), rig.ceiling(False)
    rows = []
    for length in SIZES:
        for is_scattered in (False, True):
            rates = rig.measure(length, is_scattered)
            shape = "scattered" if is_scattered else "neighbours"
            ratios = [rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)]
            rows.append(
                [size_text(length), shape, *(f"{r / 1e9:.2f}" for r in rates), *(f"{r:.2f}" for r in ratios)]
            )
    rig.close()
    print(
        f"ceiling: up {ceilings[0] / 1e9:.2f} GB/s, down {ceilings[1] / 1e9:.2f} GB/s (one piece of 64 MiB)\n"
    )
    print(render(["fragment", "places", "up GB/s", "down GB/s", "up / ceiling", "down / ceiling"], rows))
    write_report(args.json, machine=machine, ceilings=ceilings, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
