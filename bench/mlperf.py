"""`python -m bench.mlperf PATH [--folder DIR]`: MLPerf Storage v3.0's KV-cache workload on other storage.

PATH is the folder `kv_cache_benchmark` of a checkout of github.com/mlcommons/storage (Apache-2.0), at a
commit that has it (f51fe8f of 27 May 2026 was tried). Nothing of it is kept here and nothing in it is
changed. Its storage tier is one class with write, read and delete of an entry; each store is that class by
another way:

    files    the workload's own: numpy files, fsync after each, page cache dropped before each read
    direct   plain files with O_DIRECT, 2 MiB a call, no fsync
    kvtier   a daemon of its own: an entry is a chain of blocks; `dram` is small, so that reads are the disk's

One run each on the same disk with the same budget and seed, and fio with direct I/O before and after. The
workload makes entries, evicts the oldest when the budget is used up, and counts. kvtier acknowledges a put
when it can be read, not when it is on disk; it does not hear what the workload deleted, and evicts by itself,
so a read may miss. What `direct` and `kvtier` read is compared with a hash of what was written, outside of
the time.

The workload's own options are for machines with 128 GiB; here fewer users of its smallest model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench.cold import fio
from bench.compression.cold_gets import start
from bench.machine import ROOT, describe
from bench.table import render
from kvtier.clients import Geometry, NamespaceIdentity

MIB, GIB = 1 << 20, 1 << 30
CALL_BYTES = 2 * MIB
GEOMETRY = Geometry(12, 8, 64, 64, "float16")  # 24 KiB a token, as its tiny-1b: 1.5 MiB a block
STORES = ("files", "direct", "kvtier")
SOURCE = "github.com/mlcommons/storage, folder kv_cache_benchmark, at a commit that has it"


class Buffers(threading.local):
    """Memory of one thread, aligned to pages, which grows."""

    memory: mmap.mmap | None = None

    def of(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return (num_bytes,) uint8 that the next call overwrites."""
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = mmap.mmap(-1, max(num_bytes, 256 * MIB))
        return np.frombuffer(self.memory, np.uint8, num_bytes)


class Checked:
    """What our ways of storing share: the time of each call, and a hash of each entry."""

    def __init__(self, timing: Any) -> None:
        self._timing = timing
        self._known: dict[str, tuple[int, bytes]] = {}
        self._buffers = Buffers()
        self.num_missed = 0

    def write(self, key: str, data: Any) -> Any:
        """Store an entry; return its IOTiming."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        began_at = time.perf_counter()
        self._write(key, flat)
        took_s = time.perf_counter() - began_at
        self._known[key] = flat.size, xxhash.xxh3_128_digest(flat.data)
        return self._timing(total=took_s, device=took_s, host=0.0)

    def read(self, key: str) -> tuple[Any, Any]:
        """Return an entry and its IOTiming. Raises KeyError where it is gone; other bytes end the process."""
        num_bytes, digest = self._known[key]
        began_at = time.perf_counter()
        found = self._read(key, num_bytes)
        took_s = time.perf_counter() - began_at
        if found is None:
            self.num_missed += 1
            raise KeyError(key)
        if xxhash.xxh3_128_digest(found) != digest:
            os.write(2, f"{key}: not what was written\n".encode())
            os._exit(3)
        return found, self._timing(total=took_s, device=took_s, host=0.0)

    def delete(self, key: str) -> None:
        """Forget an entry."""
        self._known.pop(key, None)

    def clear(self) -> None:
        """Forget all entries."""
        for key in list(self._known):
            self.delete(key)

    def _write(self, key: str, data: Any) -> None:
        raise NotImplementedError

    def _read(self, key: str, num_bytes: int) -> Any:
        raise NotImplementedError


class DirectFiles(Checked):
    """A file each, written and read with O_DIRECT."""

    def __init__(self, timing: Any, folder: Path) -> None:
        super().__init__(timing)
        self.base_path = folder

    def _write(self, key: str, data: Any) -> None:
        whole = self._buffers.of(-(-data.size // 4096) * 4096)
        whole[: data.size] = data
        handle = os.open(self.base_path / key, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            for first in range(0, whole.size, CALL_BYTES):
                os.pwrite(handle, whole[first : first + CALL_BYTES].data, first)
        finally:
            os.close(handle)

    def _read(self, key: str, num_bytes: int) -> Any:
        whole = self._buffers.of(-(-num_bytes // 4096) * 4096)
        try:
            handle = os.open(self.base_path / key, os.O_RDONLY | os.O_DIRECT)
        except FileNotFoundError:
            return None
        try:
            for first in range(0, whole.size, CALL_BYTES):
                os.preadv(handle, [whole[first : first + CALL_BYTES].data], first)
        finally:
            os.close(handle)
        return whole[:num_bytes]

    def delete(self, key: str) -> None:
        """Remove an entry's file."""
        super().delete(key)
        (self.base_path / key).unlink(missing_ok=True)


class KvtierBlocks(Checked):
    """A chain of blocks each, in a daemon."""

    def __init__(
        self, timing: Any, folder: Path, budget_bytes: int, dram_bytes: int, stack: ExitStack
    ) -> None:
        super().__init__(timing)
        self.base_path = folder
        self._side = start("identity", folder / "daemon", dram_bytes, budget_bytes, stack)
        identity = NamespaceIdentity(hashlib.sha256(b"mlperf").digest(), GEOMETRY)
        self._namespace = self._side.client.register(identity)
        self._block_bytes = sum(GEOMETRY.fragment_bytes)

    def _names(self, key: str, num_bytes: int) -> list[bytes]:
        num_blocks = -(-num_bytes // self._block_bytes)
        return [hashlib.sha256(f"{key} {block}".encode()).digest() for block in range(num_blocks)]

    def _write(self, key: str, data: Any) -> None:
        names = self._names(key, data.size)
        whole = self._buffers.of(len(names) * self._block_bytes)
        whole[: data.size] = data
        self._side.client.put(self._namespace, names, whole.reshape(len(names), -1))

    def _read(self, key: str, num_bytes: int) -> Any:
        names = self._names(key, num_bytes)
        whole = self._buffers.of(len(names) * self._block_bytes)
        report = self._side.client.get(self._namespace, names, into=whole.reshape(len(names), -1))
        return whole[:num_bytes] if report.num_blocks == len(names) else None


def run_one(options: argparse.Namespace, own: list[str]) -> None:
    """Run the workload in this process with one store."""
    sys.path.insert(0, str(options.path))
    import kv_cache.cache as workload  # type: ignore[import-not-found]
    from kv_cache.cli import main as workload_main  # type: ignore[import-not-found]

    folder, timing = options.folder, workload.StorageBackend.IOTiming
    with ExitStack() as stack:
        stores: list[Checked] = []

        def make(base_path: str | None = None) -> Checked:
            del base_path
            if options.store == "direct":
                stores.append(DirectFiles(timing, folder))
            else:
                stores.append(KvtierBlocks(timing, folder, options.budget, options.dram, stack))
            return stores[-1]

        if options.store != "files":
            workload.NVMeBackend = make
        sys.argv = ["kv-cache.py", *own]
        workload_main()
        for store in stores:
            print(f"missed {store.num_missed}", flush=True)


def measure(options: argparse.Namespace, store: str, folder: Path) -> dict[str, float]:
    """Run the workload with one store in a process of its own; return its figures."""
    out = folder / f"{store}.json"
    (folder / store).mkdir()
    own = ["--config", str(options.path / "config.yaml"), "--model", "tiny-1b", "--gpu-mem-gb", "0"]
    own += ["--cpu-mem-gb", "0", "--num-users", str(options.users), "--duration", str(options.seconds)]
    own += ["--max-concurrent-allocs", "2", "--generation-mode", "none", "--seed", "42"]
    own += [
        "--storage-capacity-gb",
        str(options.gib),
        "--cache-dir",
        str(folder / store),
        "--output",
        str(out),
    ]
    command = [sys.executable, "-m", "bench.mlperf", str(options.path), "--store", store]
    command += [
        "--folder",
        str(folder / store),
        "--gib",
        str(options.gib),
        "--dram-mib",
        str(options.dram_mib),
    ]
    done = subprocess.run([*command, "--", *own], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not out.exists():
        raise SystemExit(
            f"{store}: exit status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
    stats = json.loads(out.read_text())["summary"]["cache_stats"]
    missed = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("missed ")]
    return {**stats, "missed": sum(missed)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help=f"the workload: {SOURCE}")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--seconds", type=int, default=40, help="of each run")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--gib", type=int, default=6, help="budget on disk")
    parser.add_argument("--dram-mib", type=int, default=512, help="of kvtier's daemon")
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=STORES)
    parser.add_argument("--store", choices=STORES, help=argparse.SUPPRESS)
    options, own = parser.parse_known_args()
    if not (options.path / "kv_cache" / "cache.py").exists():
        parser.error(f"{options.path} has no kv_cache/cache.py; it is in {SOURCE}")
    options.budget, options.dram = options.gib * GIB, options.dram_mib * MIB
    if options.store:
        run_one(options, [word for word in own if word != "--"])
        return
    print("\n".join(f"{label:9}{value}" for label, value in describe({}).items()))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="mlperf-") as name:
        print_table(options, Path(name))


def print_table(options: argparse.Namespace, folder: Path) -> None:
    """Measure every store and print a row for each, fio's first and last."""
    rows = []

    def disk(turn: int) -> None:
        at = folder / f"fio{turn}"
        at.mkdir()
        speeds = [fio(at, mode, CALL_BYTES, options.users, GIB, turn) for mode in ("write", "randread")]
        rows.append([f"fio, {turn + 1}", f"{speeds[1]:.2f}", f"{speeds[0]:.2f}", *[""] * 5])

    disk(0)
    for store in options.stores:
        found = measure(options, store, folder)
        rows.append(
            [
                store,
                *(
                    f"{found[f'tier_storage_{op}_bandwidth_gbps'] * GIB / 1e9:.2f}"
                    for op in ("read", "write")
                ),
                *(f"{found.get(f'storage_{op}_p95_ms', math.nan):.0f}" for op in ("read", "write")),
                f"{found['storage_tokens_processed'] / options.seconds:,.0f}",
                f"{found['read_iops']:.0f}",
                f"{found['missed']:.0f}",
            ]
        )
    disk(1)
    heads = ["read GB/s", "write GB/s", "read p95 ms", "write p95 ms", "tokens/s", "reads", "missed"]
    print(render(["store", *heads], rows))


if __name__ == "__main__":
    main()
