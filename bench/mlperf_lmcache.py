"""LMCache's multi-process server as the storage tier of MLPerf's KV-cache workload.

Executed by the interpreter of LMCache's own environment. An entry is written and read in pieces of eight
objects of 6 MiB (256 tokens of the workload's smallest model, LMCache's own size of a chunk), each piece a
prompt of its own, because a prompt must fit the server's memory whole: it holds what a lookup found on disk
until it is retrieved. Two lookups are ahead of each retrieve. Disk is `fs_native` with O_DIRECT, bounded to
the budget and evicted by LRU; KV lies in shared memory, as in `bench.peer_lmcache`.

LMCache acknowledges stores that it then drops for want of room, so a piece counts as written when a lookup
finds it; what is not found is stored again. It makes room once a second: `EVICTION` lets it make much at
once, because with its defaults (from 0.8 on, 0.2 of its memory) that second bounds writing.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench.mlperf_stores import GIB, MIB, Store
from bench.peer_lmcache import CHUNK_TOKENS, TIMEOUT_S, LMCache, Prompt

OBJECT_BYTES = 6 * MIB
PIECE = 8  # objects
MAX_OBJECTS = 104  # of an entry: 25,000 tokens and what was generated
LOOKUPS_AHEAD = 2
WRITTEN_WITHIN_S = 60.0
EVICTION = ["--eviction-trigger-watermark", "0.5", "--eviction-ratio", "0.8"]


class PagedClient(LMCache):
    """One thread's client, with KV memory for an entry to write and one to read."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = self.num_requests = number

    def _request(self) -> str:
        self.num_requests += 1
        return f"{self.number}-{self.num_requests}"

    def put_at(self, names: Prompt, first: int) -> None:
        """Store objects `first` and following of the source."""
        request = self._request()
        blocks = [list(range(1 + first, 1 + first + names.num))]
        event = self.context.create_recorded_event()
        key = self._key(names, request, worker=0)
        self.context.submit_store(request, key, self.kv, blocks, event, 1).result(timeout=TIMEOUT_S)
        self.client.end_session(request).result(timeout=TIMEOUT_S)

    def is_there(self, names: Prompt) -> bool:
        """Return whether a lookup finds a piece whole."""
        found = self.lookup(names)
        self.after_lookup(names)
        return found == names.num

    def begin_lookup(self, names: Prompt) -> str:
        """Ask for a piece to be brought into the server's memory; return the request's name."""
        request = self._request()
        self.client.lookup(self._key(names, request, worker=None), 1).result(timeout=TIMEOUT_S)
        return request

    def finish_lookup(self, request: str) -> int:
        """Return how many objects of it were found."""
        found = self.client.query_prefetch_status(request).result(timeout=TIMEOUT_S)
        while found is None:
            found = self.client.wait_prefetch_status(request, 5.0).result(timeout=TIMEOUT_S)
        return int(found)

    def release(self, names: Prompt, request: str) -> None:
        """Release what a lookup locked."""
        self.client.free_lookup_locks(self._key(names, request, worker=None), 1).result(timeout=TIMEOUT_S)
        self.client.end_session(request).result(timeout=TIMEOUT_S)

    def get_at(self, names: Prompt, request: str, first: int) -> bool:
        """Retrieve a piece that was looked up to objects `first` and following of the target."""
        place = 1 + self.selected[1] + first
        blocks = [list(range(place, place + names.num))]
        event = self.context.create_recorded_event()
        key = self._key(names, request, worker=0)
        sent = self.context.submit_retrieve(request, key, self.kv, blocks, event, 1, skip_first_n_tokens=0)
        done = bool(sent.result(timeout=TIMEOUT_S))
        self.client.end_session(request).result(timeout=TIMEOUT_S)
        return done


class LMCacheChunks(Store):
    """Chunks of entries in LMCache's server."""

    def __init__(self, timing: Any, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(timing, folder)
        tempfile.tempdir = str(folder)  # where the server's disk tier is
        self._server = PagedClient(0)
        self._server.disk = {
            "max_capacity_gb": options.budget / GIB,
            "eviction": {"eviction_policy": "LRU"},
        }
        self._server.options = EVICTION
        self._address = self._server.start(options.dram, spill=True)
        self._mine = threading.local()
        self._clients: list[PagedClient] = []
        self._lock = threading.Lock()

    def _client(self) -> PagedClient:
        client: PagedClient | None = getattr(self._mine, "client", None)
        if client is None:
            with self._lock:
                client = PagedClient(len(self._clients) + 1)
                self._clients.append(client)
                client.connect(self._address)
                client.select(OBJECT_BYTES, MAX_OBJECTS)
            self._mine.client = client
        return client

    def _prepare(self, num_bytes: int) -> None:
        self._client()

    def _pieces(self, key: str, num_bytes: int) -> list[tuple[int, Prompt]]:
        """Return the pieces of an entry: the first object, and the prompt."""
        num_objects = -(-num_bytes // OBJECT_BYTES)
        pieces = []
        for first in range(0, num_objects, PIECE):
            number = int.from_bytes(hashlib.sha256(f"{key} {first}".encode()).digest()[:7], "little")
            tokens = (number % 2**31, number // 2**31)
            num = min(PIECE, num_objects - first)
            pieces.append((first, Prompt(tokens + tuple(range(2, num * CHUNK_TOKENS)), num)))
        return pieces

    def _write(self, key: str, flat: Any) -> None:
        client = self._client()
        source = client.source.view(np.uint8)  # (2, objects, half of an object)
        half = OBJECT_BYTES // 2
        num_whole = flat.size // OBJECT_BYTES
        whole = flat[: num_whole * OBJECT_BYTES].reshape(num_whole, 2, half)
        source[:, :num_whole] = whole.transpose(1, 0, 2)
        rest = flat[num_whole * OBJECT_BYTES :]
        for plane in range(2 if rest.size else 0):
            part = rest[plane * half : (plane + 1) * half]
            source[plane, num_whole, : part.size] = part
        for first, names in self._pieces(key, flat.size):
            self._write_piece(client, first, names)

    def _write_piece(self, client: PagedClient, first: int, names: Prompt) -> None:
        ends_at = time.monotonic() + WRITTEN_WITHIN_S
        while time.monotonic() < ends_at:
            client.put_at(names, first)
            for _ in range(8):
                if client.is_there(names):
                    return
                time.sleep(0.002)
        raise TimeoutError("LMCache did not store a piece")

    def _read(self, key: str, num_bytes: int) -> Any:
        client, pieces = self._client(), self._pieces(key, num_bytes)
        asked: list[str] = []
        for place, (first, names) in enumerate(pieces):
            while len(asked) < min(place + 1 + LOOKUPS_AHEAD, len(pieces)):
                asked.append(client.begin_lookup(pieces[len(asked)][1]))
            if not self._read_piece(client, first, names, asked[place]):
                for later, request in zip(pieces[place + 1 :], asked[place + 1 :], strict=False):
                    client.finish_lookup(request)
                    client.release(later[1], request)
                raise KeyError(key)
        return client.dest, num_bytes

    def _read_piece(self, client: PagedClient, first: int, names: Prompt, request: str) -> bool:
        for _ in range(10):  # the server's memory may be full of what others looked up
            if client.finish_lookup(request) == names.num:
                return client.get_at(names, request, first)
            client.release(names, request)
            time.sleep(0.01)
            request = client.begin_lookup(names)
        client.finish_lookup(request)
        client.release(names, request)
        return False

    def _digest(self, found: Any) -> bytes:
        dest, left = found
        planes, hasher = dest.view(np.uint8), xxhash.xxh3_128()
        for number in range(-(-left // OBJECT_BYTES)):
            for plane in range(2):
                part = planes[plane, number, : max(0, min(left, OBJECT_BYTES // 2))]
                hasher.update(part)
                left -= part.size
        return hasher.digest()

    def close(self) -> None:
        """Stop the server, and end the process: LMCache's client threads do not end on their own."""
        self._server.stop()
