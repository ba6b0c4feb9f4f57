"""Mooncake Store in the form closest to ours: master, a store daemon, and a "dummy" client over shared
memory.

Executed by the interpreter of Mooncake's own environment. The client's buffers lie in the memory it shares
with the daemon (`alloc_from_mem_pool`), so `put_from` and `get_into` are one copy by the daemon, as with our
staging extent.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from bench.worker import (
    GIB,
    MAX_BATCH_BYTES,
    MIB,
    Adapter,
    Process,
    free_port,
    listens,
    serve,
    work_directory,
)

Names = list[str]


def binary(name: str) -> str:
    """Return a program of the wheel, made executable: pip drops the mode bits of package data."""
    path = Path(str(importlib.import_module("mooncake").__path__[0])) / name
    path.chmod(0o755)
    return str(path)


class Mooncake(Adapter):
    forms = ("staging", "plain")

    def __init__(self) -> None:
        self.store: Any = None
        self.processes: list[Process] = []
        self.written: Names = []
        self.directory = work_directory()

    def start(self, pool_bytes: int, spill: bool) -> str:
        rpc, metrics, port = free_port(), free_port(), free_port()
        log = Path(self.directory.name)
        master = Process(
            [
                binary("mooncake_master"),
                f"--rpc_port={rpc}",
                f"--metrics_port={metrics}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                "--enable_metric_reporting=false",
                "--default_kv_lease_ttl=1000",
                f"--enable_offload={str(spill).lower()}",
                "--logtostderr",
            ],
            log / "master.log",
        )
        self.processes.append(master)
        master.wait_until(lambda: self._is_ready(metrics))
        daemon = Process(
            [
                binary("mooncake_client"),
                f"--master_server_address=127.0.0.1:{rpc}",
                "--metadata_server=P2PHANDSHAKE",
                "--host=127.0.0.1",
                f"--port={port}",
                "--protocol=tcp",
                f"--global_segment_size={pool_bytes // MIB} MB",
                "--threads=2",
                f"--enable_offload={str(spill).lower()}",
                "--logtostderr",
            ],
            log / "client.log",
            self._disk(log / "disk") if spill else None,
        )
        self.processes.append(daemon)
        daemon.wait_until(lambda: listens(port))
        self.connect(f"127.0.0.1:{port}")
        return f"127.0.0.1:{port}"

    def connect(self, address: str) -> None:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        if code := store.setup_dummy(GIB, GIB // 2, address):
            raise RuntimeError(f"setup_dummy answered {code}")
        self.store = store
        num_bytes = 2 * MAX_BATCH_BYTES
        self.pointer = store.alloc_from_mem_pool(num_bytes)
        assert self.pointer, "alloc_from_mem_pool failed"
        self.shared = np.ctypeslib.as_array((ctypes.c_uint64 * (num_bytes // 8)).from_address(self.pointer))
        self.shared[:] = 1
        store.register_buffer(self.pointer, num_bytes)

    def select(self, size: int, batch: int) -> None:
        words = batch * size // 8
        self.source = self.shared[:words].reshape(1, batch, -1)
        self.dest = self.shared[words : 2 * words].reshape(1, batch, -1)
        self.plain = np.ones_like(self.source)
        self.sizes = [size] * batch
        self.sources = [self.pointer + i * size for i in range(batch)]
        self.dests = [self.pointer + (batch + i) * size for i in range(batch)]

    def names(self, chain: int, num: int) -> Names:
        return [f"{chain}-{i}" for i in range(num)]

    def put(self, names: Names, form: str) -> int:
        num, size = len(names), self.sizes[0]
        self.written += names
        if form == "plain":
            values = [self.plain[0, i].data for i in range(num)]
            if num == 1:
                return int(self.store.put(names[0], values[0]) == 0)
            return num if self.store.put_batch(names, values) == 0 else 0
        if num == 1:
            return int(self.store.put_from(names[0], self.pointer, size) == 0)
        return sum(
            code == 0 for code in self.store.batch_put_from(names, self.sources[:num], self.sizes[:num])
        )

    def get(self, names: Names) -> int:
        num, size = len(names), self.sizes[0]
        if num == 1:
            return int(self.store.get_into(names[0], self.dests[0], size) == size)
        lengths = self.store.batch_get_into(names, self.dests[:num], self.sizes[:num])
        return sum(length == size for length in lengths)

    def lookup(self, names: Names) -> int:
        if len(names) == 1:
            return int(self.store.is_exist(names[0]) == 1)
        return sum(answer == 1 for answer in self.store.batch_is_exist(names))

    def wipe(self) -> None:
        for i in range(0, len(self.written), 1000):
            self.store.batch_remove(self.written[i : i + 1000], True)
        self.written = []

    def stop(self) -> None:
        if self.store is not None:
            self.store.close()
        for process in reversed(self.processes):
            process.stop()

    def _disk(self, path: Path) -> dict[str, str]:
        """Return settings of SSD offload: bucket files through io_uring, small buckets, a beat a second."""
        path.mkdir()
        settings = {
            "FILE_STORAGE_PATH": str(path),
            "STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "LOCAL_BUFFER_SIZE_BYTES": str(GIB // 2),
            "HEARTBEAT_INTERVAL_SECONDS": "1",
            "BUCKET_SIZE_LIMIT_BYTES": str(64 * MIB),
            "TOTAL_SIZE_LIMIT_BYTES": str(8 * GIB),
            "USE_URING": "1",
        }
        return {f"MOONCAKE_OFFLOAD_{name}": value for name, value in settings.items()}

    def _is_ready(self, metrics: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/health", timeout=1) as answer:
                return bool(json.load(answer).get("service_ready"))
        except (urllib.error.URLError, OSError):
            return False


if __name__ == "__main__":
    serve(Mooncake())
