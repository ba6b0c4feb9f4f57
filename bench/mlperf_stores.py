"""MLPerf's KV-cache workload with one store; a process of `bench.mlperf`, which gives the workload's options.

`lmcache` is run by the interpreter of LMCache's environment, so this module imports no kvtier at its head.
Nothing in the workload is changed: its storage tier is one class with write, read and delete of an entry, and
each store here is that class. When it resets its counters, before the clock starts, ours are reset. The last
line that is printed is JSON: GB/s of writes and reads while at least one was under way, the device's own over
that stretch, and how many entries were not found again.

What comes back is compared with a hash of what was written, after the clock has stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

MIB, GIB = 1 << 20, 1 << 30
CALL_BYTES = 2 * MIB
STORES = ("direct", "kvtier", "lmcache")


class Buffers(threading.local):
    """Memory of one thread, aligned to pages, which grows."""

    memory: mmap.mmap | None = None

    def of(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return (num_bytes,) uint8 that the next call overwrites."""
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = mmap.mmap(-1, max(num_bytes, 256 * MIB))
            np.frombuffer(self.memory, np.uint8)[:: mmap.PAGESIZE] = 1  # the first touch of a page is slow
        return np.frombuffer(self.memory, np.uint8, num_bytes)


class Meter:
    """Bytes of one direction, seconds with at least one call under way, and the device's bytes."""

    def __init__(self, folder: Path, field: int) -> None:
        self._lock = threading.Lock()
        self._device, self._field = os.stat(folder).st_dev, field
        self._num_open = 0
        self._since = self._began_at = self._ended_at = self.busy_s = 0.0
        self.num_bytes = self._first = self._last = 0

    def _device_bytes(self) -> int:
        name = f"/sys/dev/block/{os.major(self._device)}:{os.minor(self._device)}/stat"
        return 512 * int(Path(name).read_text().split()[self._field]) if os.path.exists(name) else 0

    @contextmanager
    def call(self, num_bytes: int) -> Iterator[None]:
        """Count a call; one that raises moved nothing."""
        with self._lock:
            if not self._num_open:
                self._since = time.perf_counter()
            if not self._began_at:
                self._began_at, self._first = time.perf_counter(), self._device_bytes()
            self._num_open += 1
        moved = 0
        try:
            yield
            moved = num_bytes
        finally:
            with self._lock:
                self._num_open -= 1
                self.num_bytes += moved
                self._ended_at, self._last = time.perf_counter(), self._device_bytes()
                if not self._num_open:
                    self.busy_s += self._ended_at - self._since

    def shown(self, name: str) -> dict[str, float]:
        """Return GB/s while a call was under way, and of the device from the first call to the last."""
        took_s = self._ended_at - self._began_at
        busy_s = self.busy_s + (max(0.0, self._ended_at - self._since) if self._num_open else 0.0)
        return {
            f"{name}_gbs": self.num_bytes / busy_s / 1e9 if busy_s else 0.0,
            f"{name}_device_gbs": (self._last - self._first) / took_s / 1e9 if took_s else 0.0,
        }


class Store:
    """What all ways of storing share: the time of each call, and a hash of each entry."""

    def __init__(self, timing: Any, folder: Path) -> None:
        self.base_path = folder
        self._timing = timing
        self._known: dict[str, tuple[int, bytes]] = {}
        self._buffers = Buffers()
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self._writes, self._reads = Meter(self.base_path, 6), Meter(self.base_path, 2)
        self.num_missed = 0

    def write(self, key: str, data: Any) -> Any:
        """Store an entry; return its IOTiming."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._prepare(flat.size)
        began_at = time.perf_counter()
        with self._writes.call(flat.size):
            self._write(key, flat)
        took_s = time.perf_counter() - began_at
        self._known[key] = flat.size, xxhash.xxh3_128_digest(flat.data)
        return self._timing(total=took_s, device=took_s, host=0.0)

    def read(self, key: str) -> tuple[Any, Any]:
        """Return an entry and its IOTiming. Raises KeyError where it is gone; other bytes end the process."""
        num_bytes, digest = self._known[key]
        self._prepare(num_bytes)
        began_at = time.perf_counter()
        try:
            with self._reads.call(num_bytes):
                found = self._read(key, num_bytes)
        except KeyError:
            self.num_missed += 1
            raise
        took_s = time.perf_counter() - began_at
        if self._digest(found) != digest:
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

    def shown(self) -> dict[str, float]:
        """Return what was counted."""
        return {**self._writes.shown("write"), **self._reads.shown("read"), "missed": self.num_missed}

    def close(self) -> None:
        """Stop what was started."""

    def _prepare(self, num_bytes: int) -> None:
        """Make this thread's memory ready, as an engine's is, before the clock starts."""
        self._buffers.of(num_bytes + 2 * MIB)

    def _digest(self, found: Any) -> bytes:
        return xxhash.xxh3_128_digest(found)

    def _write(self, key: str, flat: Any) -> None:
        raise NotImplementedError

    def _read(self, key: str, num_bytes: int) -> Any:
        raise NotImplementedError


class DirectFiles(Store):
    """A file each, written and read with O_DIRECT, 2 MiB a call, no fsync."""

    def _write(self, key: str, flat: Any) -> None:
        whole = self._buffers.of(-(-flat.size // 4096) * 4096)
        whole[: flat.size] = flat
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
            raise KeyError(key) from None
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


class KvtierBlocks(Store):
    """A chain of blocks of 64 tokens each, in a daemon; each thread has a client, as one serialises calls."""

    def __init__(self, timing: Any, folder: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        super().__init__(timing, folder)
        from bench.compression.cold_gets import start
        from kvtier.clients import Geometry, NamespaceIdentity

        geometry = Geometry(12, 8, 64, 64, "float16")  # 24 KiB a token, as the workload's tiny-1b
        start("identity", folder / "daemon", options.dram, options.budget, stack, as_installed=True)
        self._target = f"unix://{folder}/daemon/kvtier.sock"
        self._identity = NamespaceIdentity(hashlib.sha256(b"mlperf").digest(), geometry)
        self._block_bytes = sum(geometry.fragment_bytes)
        self._mine = threading.local()

    def _prepare(self, num_bytes: int) -> None:
        super()._prepare(num_bytes)
        if not hasattr(self._mine, "client"):
            from kvtier.clients import Client

            self._mine.client = Client(self._target)
            self._mine.namespace = self._mine.client.register(self._identity)

    def _names(self, key: str, num_bytes: int) -> list[bytes]:
        num_blocks = -(-num_bytes // self._block_bytes)
        return [hashlib.sha256(f"{key} {block}".encode()).digest() for block in range(num_blocks)]

    def _write(self, key: str, flat: Any) -> None:
        names = self._names(key, flat.size)
        num_whole = flat.size // self._block_bytes * self._block_bytes
        blocks = list(flat[:num_whole].reshape(-1, self._block_bytes))
        if num_whole < flat.size:
            blocks.append(self._buffers.of(self._block_bytes))
            blocks[-1][: flat.size - num_whole] = flat[num_whole:]
        self._mine.client.put(self._mine.namespace, names, blocks)

    def _read(self, key: str, num_bytes: int) -> Any:
        names = self._names(key, num_bytes)
        whole = self._buffers.of(len(names) * self._block_bytes)
        into = whole.reshape(len(names), -1)
        report = self._mine.client.get(self._mine.namespace, names, into=into)
        if report.num_blocks != len(names):
            raise KeyError(key)
        return whole[:num_bytes]


def make_store(options: argparse.Namespace, workload: Any, stack: ExitStack) -> Store:
    """Return the store that `options` name."""
    timing = workload.StorageBackend.IOTiming
    if options.store == "direct":
        return DirectFiles(timing, options.folder)
    if options.store == "kvtier":
        return KvtierBlocks(timing, options.folder, options, stack)
    from bench.mlperf_lmcache import LMCacheChunks

    return LMCacheChunks(timing, options.folder, options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mlperf_stores")
    parser.add_argument("path", type=Path)
    parser.add_argument("--store", choices=STORES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget", type=int, required=True, help="bytes on disk")
    parser.add_argument("--dram", type=int, required=True, help="bytes of memory that the store may hold")
    options, own = parser.parse_known_args()
    sys.path.insert(0, str(options.path))
    import kv_cache.cache as workload  # type: ignore[import-not-found]
    from kv_cache.cli import main as workload_main  # type: ignore[import-not-found]

    with ExitStack() as stack:
        stores: list[Store] = []

        def make(base_path: str | None = None) -> Store:
            del base_path
            stores.append(make_store(options, workload, stack))
            return stores[-1]

        own_reset = workload.MultiTierCache.reset_stats

        def reset(cache: Any) -> None:
            own_reset(cache)
            stores[0].reset()

        workload.NVMeBackend, workload.MultiTierCache.reset_stats = make, reset
        sys.argv = ["kv-cache.py", *(word for word in own if word != "--")]
        workload_main()
        print(json.dumps(stores[0].shown()), flush=True)
        stores[0].close()


if __name__ == "__main__":
    main()
