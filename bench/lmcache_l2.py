"""`python -m bench.lmcache_l2 [--folder DIR]`: LMCache's benchmark of its disk tiers, with kvtier as one.

`lmcache bench l2` stores, looks up and loads chunks through LMCache's interface of an L2 adapter. It runs
here unchanged, in LMCache's environment, for each tier once a round, in turns on the same disk: LMCache's
`fs_native` and `fs`, both with O_DIRECT, and kvtier's plug-in with a daemon of its own, as it is installed,
twice: with memory for a fraction of what is stored, so that most of what is loaded, in the order in which it
was stored, comes from disk, and, `in-memory`, with room for all of it. The benchmark itself compares what it
loads with what it stored.

kvtier ends a store when it can be read; LMCache's tiers end it when the file is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from bench.cold import fio
from bench.compression.cold_gets import start
from bench.machine import ROOT, print_machine
from bench.peers import DEFAULT_DIR, install_line, is_installed, python_of
from bench.table import render

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
IN_MEMORY = "kvtier-in-memory"
TIERS = ("kvtier", IN_MEMORY, "fs_native", "fs")
IN_FLIGHT, NUM_KEYS = 4, 16
#: Columns: heading, LMCache's name of the operation and of the figure.
COLUMNS = (
    ("store MB/s", "Store", "Throughput avg (MB/s)"),
    ("stored", "Store", "Total success"),
    ("lookup keys/s", "Lookup", "Avg ops/s"),
    ("found", "Lookup", "Total success"),
    ("load MB/s", "Load", "Throughput avg (MB/s)"),
    ("loaded", "Load", "Total success"),
)


def spec_of(tier: str, folder: Path, options: argparse.Namespace, stack: ExitStack) -> dict[str, object]:
    """Return the adapter's settings; starts kvtier's daemon where it is the tier."""
    if not tier.startswith("kvtier"):
        return {"type": tier, "base_path": str(folder / "files"), "use_odirect": True}
    dram_mib = 2 * options.mib if tier == IN_MEMORY else options.dram_mib
    start("identity", folder / "daemon", dram_mib * MIB, options.gib * GIB, stack, as_installed=True)
    names = {"module_path": "kvtier.clients.lmcache", "class_name": "KvtierL2Adapter"}
    return {"type": "plugin", **names, "adapter_params": {"target": f"unix://{folder}/daemon/kvtier.sock"}}


def figures(printed: str) -> dict[tuple[str, str], float]:
    """Return what LMCache's benchmark printed, by operation and name."""
    found, operation = {}, ""
    for line in printed.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "Operation":
            operation = value
        elif operation and re.fullmatch(r"[\d.]+", value):
            found[operation, name] = float(value)
    return found


def measure(
    options: argparse.Namespace, tier: str, size_kib: int, folder: Path
) -> dict[tuple[str, str], float]:
    """Run LMCache's benchmark once; return its figures. Raises SystemExit with its output when it failed."""
    (folder / "files").mkdir(parents=True)
    num_rounds = max(2, options.mib * KIB // (IN_FLIGHT * NUM_KEYS * size_kib))
    words = f"--num-keys {NUM_KEYS} --in-flight {IN_FLIGHT} --data-size-kb {size_kib} --rounds {num_rounds}"
    words += " --l1-align-bytes 4096 --warmup-rounds 1 --lookup-max-hit-rate 1 --no-skip-verify"
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "LMCACHE_TRACK_USAGE": "false",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        spec = json.dumps(spec_of(tier, folder, options, stack))
        command = [str(python_of(options.peers, "lmcache").parent / "lmcache"), "bench", "l2"]
        command += ["--l2-adapter", spec, *words.split()]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    shutil.rmtree(folder, ignore_errors=True)
    found = figures(done.stdout)
    if done.returncode or ("Load", "Total success") not in found or "erification failed" in done.stdout:
        raise SystemExit(f"{tier}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 6144], help="of a chunk, KiB")
    parser.add_argument("--mib", type=int, default=1536, help="stored in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dram-mib", type=int, default=256, help="of kvtier's daemon")
    parser.add_argument("--gib", type=int, default=4, help="of its disk")
    parser.add_argument("--peers", type=Path, default=DEFAULT_DIR, help="where the peers' environments are")
    options = parser.parse_args()
    if not is_installed(options.peers, "lmcache"):
        parser.error(f"LMCache is not installed: {install_line(['lmcache'], options.peers)}")
    print_machine()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="lmcache-l2-") as name:
        for size_kib in options.sizes:
            compare(options, size_kib, Path(name))


def compare(options: argparse.Namespace, size_kib: int, folder: Path) -> None:
    """Measure all tiers with chunks of one size; print medians."""
    runs: dict[str, list[dict[tuple[str, str], float]]] = defaultdict(list)
    disk: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        (folder / "fio").mkdir()
        for mode in ("write", "randread"):
            disk[mode].append(fio(folder / "fio", mode, size_kib * KIB, IN_FLIGHT, GIB, turn) * 1e9 / MIB)
        shutil.rmtree(folder / "fio")
        for tier in TIERS[turn % 4 :] + TIERS[: turn % 4]:
            runs[tier].append(measure(options, tier, size_kib, folder / tier))
    rows = []
    for tier in TIERS:
        medians = [
            statistics.median(run[operation, name] for run in runs[tier]) for _, operation, name in COLUMNS
        ]
        rows.append([tier, *(f"{value:,.0f}" for value in medians)])
    shown = {"store MB/s": "write", "load MB/s": "randread"}
    of_disk = [
        f"{statistics.median(disk[shown[head]]):,.0f}" if head in shown else "" for head, *_ in COLUMNS
    ]
    print(
        f"\nchunks of {size_kib} KiB, {NUM_KEYS} a call, {IN_FLIGHT} calls at a time, {options.rounds} rounds"
    )
    print(render(["tier", *(head for head, *_ in COLUMNS)], [*rows, ["fio", *of_disk]]), flush=True)
    for tier in TIERS:
        for head, operation, name in COLUMNS:
            if "/s" in head:
                values = " ".join(f"{run[operation, name]:.0f}" for run in runs[tier])
                print(f"{tier:18}{head:14}{values}")


if __name__ == "__main__":
    main()
