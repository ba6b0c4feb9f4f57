"""`python -m bench.mlperf PATH [--folder DIR]`: MLPerf Storage v3.0's KV-cache workload on other storage.

PATH is the folder `kv_cache_benchmark` of a checkout of github.com/mlcommons/storage (Apache-2.0), at a
commit that has it (f51fe8f of 27 May 2026 was tried). Nothing of it is kept here and nothing in it is
changed. Its storage tier is given by `bench.mlperf_stores` in other ways:

    direct   plain files with O_DIRECT, 2 MiB a call, no fsync
    kvtier   a daemon as it is installed: an entry is a chain of blocks; what is read again is in its memory
    lmcache  LMCache's server with as much memory and as large a disk tier (`bench.mlperf_lmcache`)

Each round has fio with direct I/O, into new files and again into those, and each store in three modes of the
workload: `--prefill-only` (writes, after the budget was written once: `--precondition`), `--decode-only`
(reads of entries written before the clock starts) and both mixed; as many requests for each store, but in
decode, where all entries are of one size, as many seconds. Rounds are interleaved on the same disk with the
same budget and seed; medians count. Reads and writes are GB/s while at least one call was under way: over the
whole time, as the workload counts, prefill is bounded by the making of entries. `device` is what the disk
itself counted over that stretch. kvtier and LMCache acknowledge a put when it can be read, not when it is on
disk; neither hears what the workload deleted, so a read may miss.

The workload's own options are for machines with 128 GiB; here fewer users of its smallest model.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from bench.cold import fio
from bench.machine import ROOT, describe
from bench.mlperf_stores import CALL_BYTES, GIB, MIB, STORES
from bench.peers import DEFAULT_DIR, install_line, is_installed, python_of
from bench.table import render

SOURCE = "github.com/mlcommons/storage, folder kv_cache_benchmark, at a commit that has it"
#: Options of each mode, with {gib}, {users}, {seconds} and {requests}.
MODES = {
    "prefill": "--prefill-only --max-requests {requests} --duration 300 --precondition"
    " --precondition-size-gb {gib} --precondition-threads {users}",
    "decode": "--decode-only --duration {seconds}",
    "mixed": "--max-requests {requests} --duration 300",
}
#: Columns: heading, mode, figure of a run.
COLUMNS = (
    ("write GB/s", "prefill", "write_gbs"),
    ("device", "prefill", "write_device_gbs"),
    ("p95 ms", "prefill", "storage_write_p95_ms"),
    ("read GB/s", "decode", "read_gbs"),
    ("device", "decode", "read_device_gbs"),
    ("p95 ms", "decode", "storage_read_p95_ms"),
    ("tokens/s", "decode", "tokens_s"),
    ("mixed: tokens/s", "mixed", "tokens_s"),
    ("read p95 ms", "mixed", "storage_read_p95_ms"),
    ("write p95 ms", "mixed", "storage_write_p95_ms"),
)


def measure(options: argparse.Namespace, store: str, mode: str, folder: Path) -> dict[str, float]:
    """Run the workload with one store in a process of its own; return its figures."""
    out, own_folder = folder / "out.json", folder / store
    own_folder.mkdir()
    python = python_of(options.peers, "lmcache") if store == "lmcache" else sys.executable
    command = [str(python), "-m", "bench.mlperf_stores", str(options.path), "--store", store]
    command += ["--folder", str(own_folder), "--budget", str(options.gib * GIB)]
    command += ["--dram", str(options.dram_mib * MIB), "--", *MODES[mode].format(**vars(options)).split()]
    command += ["--config", str(options.path / "config.yaml"), "--model", "tiny-1b", "--gpu-mem-gb", "0"]
    command += ["--cpu-mem-gb", "0", "--num-users", str(options.users)]
    command += ["--max-concurrent-allocs", str(options.users), "--generation-mode", "none", "--seed", "42"]
    command += ["--storage-capacity-gb", str(options.gib), "--cache-dir", str(own_folder)]
    done = subprocess.run([*command, "--output", str(out)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not out.exists():
        raise SystemExit(
            f"{store}: exit status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
    stats = json.loads(out.read_text())["summary"]["cache_stats"]
    out.unlink()
    shutil.rmtree(own_folder, ignore_errors=True)
    counted = json.loads([line for line in done.stdout.splitlines() if line.startswith('{"write_gbs"')][-1])
    took_s = (
        stats["total_read_gb"] / stats["tier_storage_read_bandwidth_gbps"] if mode != "prefill" else math.nan
    )
    tokens_s = stats["storage_tokens_processed"] / took_s
    return {**stats, **counted, "tokens_s": tokens_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help=f"the workload: {SOURCE}")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--seconds", type=int, default=8, help="of decode")
    parser.add_argument("--requests", type=int, default=30, help="of prefill and of the mixed mode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=4, help="and as many entries are written at a time")
    parser.add_argument("--gib", type=int, default=4, help="budget on disk")
    parser.add_argument("--dram-mib", type=int, default=512, help="of kvtier's daemon and LMCache's server")
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=STORES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--peers", type=Path, default=DEFAULT_DIR, help="where the peers' environments are")
    options = parser.parse_args()
    if not (options.path / "kv_cache" / "cache.py").exists():
        parser.error(f"{options.path} has no kv_cache/cache.py; it is in {SOURCE}")
    if "lmcache" in options.stores and not is_installed(options.peers, "lmcache"):
        parser.error(f"LMCache is not installed: {install_line(['lmcache'], options.peers)}, or --stores")
    options.path = options.path.resolve()
    machine = describe({}) | {"command": shlex.join(["python", "-m", "bench.mlperf", *sys.argv[1:]])}
    print("\n".join(f"{label:9}{value}" for label, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="mlperf-") as name:
        print_table(options, Path(name))


def print_table(options: argparse.Namespace, folder: Path) -> None:
    """Measure every store in every mode and round; print each run when it ends, then medians."""
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    disk: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for mode in options.modes:
            (folder / "fio").mkdir()
            for name, what in (("new", "write"), ("again", "write"), ("read", "randread")):
                disk[name].append(fio(folder / "fio", what, CALL_BYTES, options.users, 2 * GIB, turn))
            shutil.rmtree(folder / "fio")
            print("fio    ", *(f"{name} {values[-1]:.2f}" for name, values in disk.items()), flush=True)
            for store in options.stores[turn % 2 :] + options.stores[: turn % 2]:
                run = measure(options, store, mode, folder)
                found[store, mode].append(run)
                line = (f"{head} {run.get(at, math.nan):.4g};" for head, of, at in COLUMNS if of == mode)
                print(f"{mode:8}{store:9}", *line, flush=True)
    columns = [column for column in COLUMNS if column[1] in options.modes]

    def median(store: str, mode: str, name: str) -> float:
        return statistics.median(run.get(name, math.nan) for run in found[store, mode])

    rows = []
    for store in options.stores:
        figures = [median(store, mode, name) for _, mode, name in columns]
        missed = sum(run["missed"] for mode in options.modes for run in found[store, mode])
        shown = [f"{figure:.2f}" if figure < 10 else f"{figure:,.0f}" for figure in figures]
        rows.append([store, *shown, f"{missed:.0f}"])
    medians = {name: f"{statistics.median(values):.2f}" for name, values in disk.items()}
    for label, write in (("fio, new files", "new"), ("fio, again", "again")):
        shown_of = {"write_gbs": medians[write], "read_gbs": medians["read"] if write == "again" else ""}
        rows.append([label, *(shown_of.get(name, "") for *_, name in columns), ""])
    print(render(["store", *(head for head, *_ in columns), "missed"], rows))


if __name__ == "__main__":
    main()
