"""LMCache's multi-process server in its fastest form on a host without a GPU: ZMQ for control, shared memory
for KV.

Executed by the interpreter of LMCache's own environment. The engine's paged KV tensors lie in shared memory
that the server maps ("lmcache_driven" transfer with SHM handles), so that store and retrieve are one copy by
the server. An object here is one chunk of 16 tokens of a model of a single layer: the fewest copies a chunk
of that size can need.

Not charged to LMCache: the lookup that must come before every retrieve (it takes the read locks), and
end_session.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.worker import GIB, KIB, Adapter, Gone, Process, free_port, serve, work_directory

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1")
os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")

CHUNK_TOKENS = 16
HEAD_DIM = 128
BYTES_PER_HEAD = 2 * CHUNK_TOKENS * HEAD_DIM * 2  # K and V, two bytes an element
TIMEOUT_S = 60.0


class Prompt(NamedTuple):
    """A chain of objects, as LMCache names it: the tokens themselves."""

    tokens: tuple[int, ...]
    num: int


class LMCache(Adapter):
    def __init__(self) -> None:
        self.server: Process | None = None
        self.context: Any = None
        self.directory = work_directory()
        self.num_requests = 0
        self.selected = (0, 0)
        self.looked_up = ""
        self.disk: dict[str, Any] = {}  # settings of the disk tier beside those below
        self.options: list[str] = []  # of the server, which outdo those below

    def start(self, pool_bytes: int, spill: bool) -> str:
        port, http = free_port(), free_port()
        command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--http-port", str(http), "--l1-size-gb", str(pool_bytes / GIB)]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--max-workers", "2", "--transport", "zmq"]
        # Its default watermark where it shall evict, a high one where it shall not.
        command += ["--eviction-policy", "LRU", "--eviction-trigger-watermark", "0.8" if spill else "0.95"]
        if spill:
            path = f"{self.directory.name}/l2"
            os.mkdir(path)
            disk = {"type": "fs_native", "base_path": path, "num_workers": 4, "use_odirect": True}
            command += ["--l2-adapter", json.dumps(disk | self.disk)]
        command += self.options
        log = Path(self.directory.name) / "server.log"
        self.server = Process(command, log, {"LMCACHE_LOG_LEVEL": "INFO"})
        address = f"127.0.0.1:{port}:{http}"
        self.http = f"http://127.0.0.1:{http}"
        self.server.wait_until(lambda: "cache server is running on" in log.read_text() and self._is_healthy())
        self.connect(address)
        return address

    def connect(self, address: str) -> None:
        host, port, http = address.split(":")
        self.http = f"http://{host}:{http}"
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        zmq = importlib.import_module("zmq")
        transport = importlib.import_module("lmcache.v1.multiprocess.transport.factory")
        self.key_type = importlib.import_module("lmcache.v1.multiprocess.custom_types").IPCCacheServerKey
        self.client: Any = transport.RequestClientFactory.create(
            f"tcp://{host}:{port}", context=zmq.Context()
        )

    def select(self, size: int, batch: int) -> None:
        if (size, batch) == self.selected:
            return
        self._unregister()
        num_heads, rest = divmod(size, BYTES_PER_HEAD)
        assert rest == 0 or size == 4 * KIB, f"an object of {size} bytes is no chunk of {CHUNK_TOKENS} tokens"
        shape = (num_heads, HEAD_DIM) if num_heads else (1, HEAD_DIM // 2)
        num_blocks = 1 + 2 * batch  # block 0 is the engine's null block; then sources, then destinations
        torch = self.torch
        self.kv = {"layer.0": torch.ones((2, num_blocks, CHUNK_TOKENS, *shape), dtype=torch.bfloat16)}
        transfer = importlib.import_module("lmcache.v1.multiprocess.transfer_context")
        groups = importlib.import_module("lmcache.v1.multiprocess.group_view")
        engines = importlib.import_module("lmcache.utils")
        self.instance = os.getpid() * 100 + self.num_requests % 100
        self.model = f"bench-{size}"
        self.context = transfer.create_transfer_context(
            self.kv, mode="lmcache_driven", instance_id=self.instance, req_client=self.client
        )
        group = groups.EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=CHUNK_TOKENS)
        self.context.register(
            self.kv,
            self.model,
            1,
            1,
            TIMEOUT_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=engines.EngineType.VLLM,
        )
        planes = self.kv["layer.0"].view(torch.int16).numpy().reshape(2, num_blocks, -1).view(np.uint64)
        self.source, self.dest = planes[:, 1 : 1 + batch], planes[:, 1 + batch :]
        self.selected = (size, batch)

    def names(self, chain: int, num: int) -> Prompt:
        first = (chain % 2**31, chain // 2**31)
        return Prompt(first + tuple(range(2, num * CHUNK_TOKENS)), num)

    def put(self, names: Prompt, form: str) -> int:
        request = self._request()
        event = self.context.create_recorded_event()
        blocks = [list(range(1, 1 + names.num))]
        key = self._key(names, request, worker=0)
        done = self.context.submit_store(request, key, self.kv, blocks, event, 1).result(timeout=TIMEOUT_S)
        self.client.end_session(request).result(timeout=TIMEOUT_S)
        return names.num if done else 0

    def before_get(self, names: Prompt) -> None:
        if (found := self.lookup(names)) != names.num:
            self.after_lookup(names)  # it locked what it found
            raise Gone(f"a lookup found {found} of {names.num} prepared objects")

    def get(self, names: Prompt) -> int:
        request = self.looked_up
        event = self.context.create_recorded_event()
        first = 1 + self.selected[1]
        blocks = [list(range(first, first + names.num))]
        key = self._key(names, request, worker=0)
        sent = self.context.submit_retrieve(request, key, self.kv, blocks, event, 1, skip_first_n_tokens=0)
        return names.num if sent.result(timeout=TIMEOUT_S) else 0

    def lookup(self, names: Prompt) -> int:
        request = self.looked_up = self._request()
        self.client.lookup(self._key(names, request, worker=None), 1).result(timeout=TIMEOUT_S)
        found = self.client.query_prefetch_status(request).result(timeout=TIMEOUT_S)
        while found is None:
            found = self.client.wait_prefetch_status(request, 5.0).result(timeout=TIMEOUT_S)
        return int(found)

    def after_lookup(self, names: Prompt) -> None:
        key = self._key(names, self.looked_up, worker=None)
        self.client.free_lookup_locks(key, 1).result(timeout=TIMEOUT_S)
        self.client.end_session(self.looked_up).result(timeout=TIMEOUT_S)

    def wipe(self) -> None:
        if self.context is None:
            return
        request = urllib.request.Request(
            f"{self.http}/cache/clear",
            method="POST",
            data=b"{}",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()

    def stop(self) -> None:
        self._unregister()
        if self.server is not None:
            self.server.stop()
        self.directory.cleanup()
        for left_over in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            left_over.unlink()
        os._exit(0)  # its client threads do not end on their own

    def _request(self) -> str:
        self.num_requests += 1
        return f"{os.getpid()}-{self.num_requests}"

    def _key(self, names: Prompt, request: str, worker: int | None) -> Any:
        return self.key_type(
            model_name=self.model,
            world_size=1,
            worker_id=worker,
            token_ids=names.tokens,
            start=0,
            end=len(names.tokens),
            request_id=request,
            num_kv_readers=1,
            cache_salt="",
        )

    def _unregister(self) -> None:
        if self.context is not None:
            done = self.context.unregister()
            if done is not None:
                done.result(timeout=TIMEOUT_S)
            self.context.close()
            self.context = None

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http}/healthcheck", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


if __name__ == "__main__":
    serve(LMCache())
