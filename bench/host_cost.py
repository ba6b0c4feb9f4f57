"""What the host pays for a device's copies: building, submitting and settling them, with copies that cost
nothing.

    python -m bench.host_cost [--total MIB] [--rounds N] [--blocks N] [--json FILE] [--profile]

The device is a stand-in whose copies move no byte and whose events are done at once, told by the same watcher
thread that tells CUDA's. No figure says anything about a GPU; they say below which link the host is the
bottleneck. Bytes are therefore not compared here: the tests do that.

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
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.device import MIB, Rig
from bench.free_device import FreeDevice
from bench.machine import describe
from bench.pages import Runtime
from bench.table import render, size_text
from kvtier.appliance.config import Settings
from kvtier.appliance.host.daemon import Daemon
from kvtier.appliance.host.process import tame_garbage_collector
from kvtier.appliance.transfer.lanes import Edge
from kvtier.tiers.block import Tier

SIZES = (64 << 10, 1 * MIB, 2 * MIB)
LAYERS = 32
WAIT_S = 120.0


def copier_rows(total_mib: int, rounds: int) -> list[dict[str, Any]]:
    """Measure both directions of DeviceCopier, without hashing, per size and order of places."""
    rig = Rig(FreeDevice(), total_mib * MIB)
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
    tame_garbage_collector()  # as the daemon's own process does
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
        runtime = Runtime("free", target, num_blocks, LAYERS)
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
    parser.add_argument("--only", choices=("copier", "get"), help="measure one of the two")
    parser.add_argument("--profile", action="store_true", help="of the event loop's thread, during the gets")
    args = parser.parse_args()
    profile = cProfile.Profile(time.thread_time) if args.profile else None
    machine = {**describe({}), "command": f"python -m bench.host_cost {shlex.join(sys.argv[1:])}".strip()}
    copier = copier_rows(args.total, args.rounds) if args.only != "get" else []
    get = [get_row(args.blocks, args.rounds, profile)] if args.only != "copier" else []
    for name, value in machine.items():
        print(f"{name}: {value}")
    print("\ncopies cost nothing here: these are figures of a stand-in, not of a GPU\n")
    if copier:
        header = ["fragment", "places", "best GB/s", "median GB/s", "GB per CPU s", "CPU us each"]
        print(
            render(header, [[size_text(row["length"]), row["places"], *_numbers(row, 2)] for row in copier])
        )
        print()
    if get:
        header = ["fragments", "best ms", "median ms", "daemon CPU ms", "runtime CPU ms"]
        print(render(header, [[str(row["fragments"]), *_numbers(row, 1)] for row in get]))
        for name, cpu_ms in get[0]["threads"].items():
            print(f"  {name}: {cpu_ms:.1f} ms")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "copier": copier, "get": get}, indent=1))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return 0


def _numbers(row: dict[str, Any], skipped: int) -> list[str]:
    return [f"{value:.1f}" for value in list(row.values())[skipped:] if isinstance(value, float)]


if __name__ == "__main__":
    sys.exit(main())
