"""What the host pays for a device's copies: building, submitting and settling them, with copies that cost
nothing.

    python -m bench.host_cost [--total MIB] [--rounds N] [--blocks N] [--json FILE] [--profile]

The device is a stand-in that copies no bytes and ends its events at once, told by the same watcher
thread that tells CUDA's. No figure says anything about a GPU; they say below which link the host is the
bottleneck. Bytes are therefore not compared here: the tests do that.

`put`: GatherCopier, puts out of a runtime's pages, without the hashing of what landed.
`copier`: DeviceCopier between dram and hbm, as `bench.device` drives it; GB/s by the clock and by the
processor time of all threads. `get`: a warm get of BLOCKS blocks of 32 fragments from pinned dram into the
pages of a runtime in another process; milliseconds by the runtime's clock, and the daemon's and the runtime's
processor time.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from bench.device import MIB, CopyRig
from bench.free_device import FreeDevice
from bench.machine import describe
from bench.pages import RuntimeProcess
from bench.table import render, size_text
from kvtier.appliance.config import Settings
from kvtier.appliance.host.daemon import Daemon
from kvtier.appliance.host.process import tune_garbage_collector
from kvtier.appliance.transfer.lanes import MAX_BATCH_BYTES, Edge
from kvtier.tiers.base import CopyItem, MemoryEngine
from kvtier.tiers.block import FragmentLabel, Geometry, Tier
from kvtier.tiers.gpu.pages.gather import GatherCopier, PageLane
from kvtier.tiers.gpu.pages.kernels import PieceCopier
from kvtier.tiers.gpu.pages.layouts import PageLayout, PageTensor, check_layout, page_table
from kvtier.tiers.gpu.pages.pages import RegisteredPages

SIZES = (64 << 10, 1 * MIB, 2 * MIB)
LAYERS = 32
WAIT_S = 120.0


def copier_rows(total_mib: int, rounds: int) -> list[dict[str, Any]]:
    """Measure both directions of DeviceCopier, without hashing, per size and order of places."""
    rig = CopyRig(FreeDevice(), total_mib * MIB)
    rows = []
    for length in SIZES:
        for is_scattered in (False, True):
            up, down = rig.place(length, is_scattered)
            num_bytes = len(up) * length
            wall_s, cpu_s = [], []
            for _ in range(rounds):
                began_at = time.process_time()
                wall_s.append(num_bytes / rig.copy(Edge(Tier.DRAM, Tier.HBM), up, length))
                cpu_s.append(time.process_time() - began_at)
            rig.forget(length, up, down)
            rows.append(
                {
                    "length": length,
                    "places": "scattered" if is_scattered else "neighbours",
                    "best_gb_per_s": num_bytes / min(wall_s) / 1e9,
                    "median_gb_per_s": num_bytes / median(wall_s) / 1e9,
                    "gb_per_cpu_s": num_bytes / median(cpu_s) / 1e9,
                    "cpu_us_per_fragment": median(cpu_s) / len(up) * 1e6,
                }
            )
    rig.close()
    return rows


def put_rows(total_mib: int, rounds: int) -> list[dict[str, Any]]:
    """Measure GatherCopier: fragments of 64 KiB of blocks of 32 layer groups, out of pages of one piece each
    into dram. Hashing the slots is not counted: that is what the bytes cost."""
    geometry = Geometry(LAYERS, 8, 128, 16, "bfloat16", layers_per_group=1)
    length = geometry.block_bytes // LAYERS
    num_blocks = total_mib * MIB // geometry.block_bytes
    rig = CopyRig(FreeDevice(), total_mib * MIB)
    layer_bytes = num_blocks * length  # K and V of a block are neighbours in every layer
    tensor = PageTensor(0, 0, 0, LAYERS, layer_bytes, num_planes=2, plane_stride=length // 2)
    layout = PageLayout(num_blocks, 16, length, 2048, 256, (tensor,))
    check_layout(layout, geometry, [LAYERS * layer_bytes])
    pages = RegisteredPages(page_table(layout, geometry, [1 << 45]))
    stream = rig.device.take_stream()
    assert stream is not None
    threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    gather = GatherCopier(
        pages,
        PageLane(rig.device, threads[0], {Tier.DRAM: rig.hot.pinned.addresses_of}, PieceCopier()),
        stream,
        cast(MemoryEngine, _NotHashed()),
        threads[1],
        lambda problem: None,
    )
    places = rig.room.reserve_many(0, [length], num_blocks * LAYERS)
    ids = np.random.default_rng(1).permutation(num_blocks)[:, None]
    first = gather.open_put(ids)
    items = []
    for number, place in enumerate(places):
        block, group = divmod(number, LAYERS)
        label = FragmentLabel(bytes(32), 1, bytes(32), b"", block, group, length)
        items.append(CopyItem(first + block * geometry.block_bytes + group * length, place, label))
    step = MAX_BATCH_BYTES // length
    batches = [items[at : at + step] for at in range(0, len(items), step)]
    wall_s, cpu_s = [], []
    for _ in range(rounds):
        began_at, began_cpu = time.perf_counter(), time.process_time()
        for future in [gather.start(batch) for batch in batches]:
            assert {outcome.cause for outcome in future.result(WAIT_S)} == {None}
        wall_s.append(time.perf_counter() - began_at)
        cpu_s.append(time.process_time() - began_cpu)
    for thread in threads:
        thread.shutdown()
    rig.close()
    num_bytes = len(items) * length
    return [
        {
            "length": length,
            "best_gb_per_s": num_bytes / min(wall_s) / 1e9,
            "median_gb_per_s": num_bytes / median(wall_s) / 1e9,
            "gb_per_cpu_s": num_bytes / median(cpu_s) / 1e9,
            "cpu_us_per_fragment": median(cpu_s) / len(items) * 1e6,
        }
    ]


class _NotHashed:
    """Memory of which every slot has no bytes."""

    def view(self, place: int, length: int) -> bytes:
        """Return a view, as MemoryEngine.view does."""
        return b""


@contextmanager
def daemon(folder: Path, profile: cProfile.Profile | None) -> Iterator[str]:
    """Run a daemon on a free device, its loop on a thread of its own; give its target."""
    tiers = {"hbm": {"capacity": "64MiB"}, "dram": {"capacity": "2GiB"}}
    target = f"unix://{folder}/k.sock"
    settings = Settings.model_validate({"listen": [target], "tiers": tiers, "observe": {"http": "off"}})
    loop = asyncio.new_event_loop()

    def run() -> None:
        if profile is not None:
            profile.enable()
        loop.run_forever()
        if profile is not None:
            profile.disable()

    thread = threading.Thread(target=run, name="event loop")
    thread.start()
    served = asyncio.run_coroutine_threadsafe(Daemon.start(settings, FreeDevice()), loop).result(WAIT_S)
    tune_garbage_collector()  # as the daemon's own process does
    try:
        yield target
        asyncio.run_coroutine_threadsafe(served.stop(), loop).result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def get_row(num_blocks: int, rounds: int, profile: cProfile.Profile | None) -> dict[str, Any]:
    """Measure warm gets of `num_blocks` blocks into pages. `daemon_cpu_ms` counts all threads."""
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder), profile) as target:
        runtime = RuntimeProcess("free", target, num_blocks, LAYERS)
        try:
            put = runtime.ask("put")
            assert put["num_stored"] == num_blocks, put
            runtime.ask("get 2")
            before = cpu_of_threads()
            found = runtime.ask(f"get {rounds}")
            after = cpu_of_threads()
            threads = {name: (after[name] - before.get(name, 0.0)) / rounds for name in after}
            assert found["num_loaded"] == num_blocks, found
        finally:
            runtime.close()
    return {
        "fragments": num_blocks * LAYERS,
        "best_ms": min(found["seconds"]) * 1e3,
        "median_ms": median(found["seconds"]) * 1e3,
        "daemon_cpu_ms": sum(threads.values()) * 1e3,
        "runtime_cpu_ms": found["cpu_s"] / rounds * 1e3,
        "threads": {name: cpu_s * 1e3 for name, cpu_s in threads.items() if cpu_s > 1e-4},
    }


def cpu_of_threads() -> dict[str, float]:
    """Return the seconds of processor time of every thread of this process but those that prefault memory, by
    name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and not thread.name.startswith("asyncio_"):
            clock = time.pthread_getcpuclockid(thread.ident)
            found[thread.name] = found.get(thread.name, 0.0) + time.clock_gettime(clock)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host_cost", description="the host's part of copies"
    )
    parser.add_argument(
        "--total", type=int, default=512, metavar="MIB", help="of each tier; a multiple of 64"
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--blocks", type=int, default=256, metavar="N", help="of the get; default: 256")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows to FILE")
    parser.add_argument("--only", choices=("copier", "put", "get"), help="measure one of them")
    parser.add_argument("--profile", action="store_true", help="of the event loop's thread, during the gets")
    args = parser.parse_args()
    profile = cProfile.Profile(time.thread_time) if args.profile else None
    machine = {**describe({}), "command": f"python -m bench.host_cost {shlex.join(sys.argv[1:])}".strip()}
    copier = copier_rows(args.total, args.rounds) if args.only in (None, "copier") else []
    put = put_rows(args.total, args.rounds) if args.only in (None, "put") else []
    get = [get_row(args.blocks, args.rounds, profile)] if args.only in (None, "get") else []
    for name, value in machine.items():
        print(f"{name}: {value}")
    print("\ncopies cost nothing here: these are figures of a stand-in, not of a GPU\n")
    if copier:
        header = ["fragment", "places", "best GB/s", "median GB/s", "GB per CPU s", "CPU us each"]
        print(
            render(header, [[size_text(row["length"]), row["places"], *_numbers(row, 2)] for row in copier])
        )
        print()
    if put:
        header = ["put from pages", "best GB/s", "median GB/s", "GB per CPU s", "CPU us each"]
        print(render(header, [[size_text(row["length"]), *_numbers(row, 1)] for row in put]))
        print()
    if get:
        header = ["fragments", "best ms", "median ms", "daemon CPU ms", "runtime CPU ms"]
        print(render(header, [[str(row["fragments"]), *_numbers(row, 1)] for row in get]))
        for name, cpu_ms in get[0]["threads"].items():
            print(f"  {name}: {cpu_ms:.1f} ms")
    if args.json:
        found = {"machine": machine, "copier": copier, "put": put, "get": get}
        args.json.write_text(json.dumps(found, indent=1))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return 0


def _numbers(row: dict[str, Any], skipped: int) -> list[str]:
    return [f"{value:.1f}" for value in list(row.values())[skipped:] if isinstance(value, float)]


if __name__ == "__main__":
    sys.exit(main())
