"""MooncakePool: Mooncake Store, memory that hosts pool, as an object store.

It forgets what was used longest ago when it is full, so there are no epochs; it lists nothing and copies
nothing. It answers a second create like the first, so that what was stored is read back. What it evicts
while it is read, or has lost with the host that held it, is missing, not wrong: bytes are verified where
they land. Nothing protects a pool: no rights, no TLS. Measured with version 0.3.13
(docs/decisions/0022-object-store.md).
"""

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Lock
from typing import Final, NoReturn
from urllib.parse import urlsplit

from ...tiers.base import Buffer
from ...tiers.payload import copy
from .pool_child import CHECK, GET, PUT, REMOVE, SIZE
from .pool_lanes import Lane, PoolProcess
from .problems import StoreError, StoreProblem
from .store import ObjectInfo, ObjectStore, StoreLimits

PART_BYTES: Final = 4 << 20  # read by one request
_COMPARED_BYTES: Final = 64 << 10  # of what was stored: enough to tell it from another host's
_LOOK_S: Final = 0.02  # between looks at what another host is storing
_ANSWER_S: Final = 1.0  # that Mooncake's own limits may be late
#: Error codes of Mooncake's that mean that there is no object, or none any more.
_MISSING = frozenset({-703, -704, -705, -707})  # not ready, not found, (of a put) there, lease expired
_TRANSFER_FAILED: Final = -800
_PROBLEMS = {
    -200: (StoreProblem.FULL, "no memory is free; it evicts a little later, or no host lends it any"),
    -600: (StoreProblem.SHORT, ""),
    _TRANSFER_FAILED: (StoreProblem.BUSY, "a host that lends it memory does not answer"),
    -900: (StoreProblem.UNREACHABLE, "its master does not answer"),
    -901: (StoreProblem.UNREACHABLE, "its master does not answer in time"),
}


class MooncakePool(ObjectStore):
    """Objects in the pool of one master, `mooncake://HOST:PORT/PREFIX`. Thread-safe.

    Methods raise StoreError. Nothing is started before the first call. A client that has ended is started
    again by `check_bucket`, so that no other call waits for a start.
    """

    has_listing = False
    evicts = True

    def __init__(self, address: str, *, limits: StoreLimits | None = None) -> None:
        super().__init__(address, limits=limits)
        parts = urlsplit(address)
        self._master, path = parts.netloc, parts.path.strip("/")
        self._prefix = f"{path}/" if path else ""
        self._start_lock = Lock()
        self._process: PoolProcess | None = None

    def _open(self, endpoint: str) -> None:
        return None

    def _explained(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing here raises what needs it

    def check_bucket(self) -> None:
        """Raise StoreError unless the master answers. Starts the client where none runs."""
        with self._start_lock:
            former = self._process
            if former is not None and not former.is_running:
                self._process = self._started()
                former.close()
        with self._request("head"), self._lane(is_look=True) as lane:
            self._call(lane, CHECK, "v1", 0, 0)

    def create(self, key: str, payload: Buffer) -> bool:
        """Store an object; return False, and leave it as it is, when there is one of that name.
        True as well when another host stores the same bytes at the same time."""
        if self._is_abandoned:
            raise StoreError(StoreProblem.FAILED, f"{key}: given up")
        if self.size(key) is not None:
            return False
        with self._request("put") as request, self._lane(len(payload)) as lane:
            copy(lane.memory[: len(payload)], payload)
            self._call(lane, PUT, key, 0, len(payload), self._limits.request_s)
            length = min(len(payload), _COMPARED_BYTES)
            ends_at, pause = time.monotonic() + self._limits.idle_s, Event()
            # Not there: another create of it is under way, or it is gone again.
            while self._call(lane, GET, key, 0, length) < 0:
                if time.monotonic() >= ends_at:
                    raise StoreError(StoreProblem.BUSY, f"{key}: another create of it is under way")
                pause.wait(_LOOK_S)
            if lane.memory[:length] == payload[:length]:
                request.sent_bytes = len(payload)
                return True
            request.outcome = "exists"
            return False

    def abandon(self) -> None:
        """End every `create` that is under way with a StoreError, and those that come: ends the client."""
        self._is_abandoned = True
        if self._process is not None:
            self._process.kill()

    def read(self, key: str, parts: Sequence[tuple[int, Buffer]]) -> bool:
        """Fill each buffer of `parts` with bytes of an object from an offset on; False when there is none.
        Buffers are undefined after False or an error."""
        return all(self._read(key, start, into) for start, into in parts)

    def _read(self, key: str, start: int, into: Buffer) -> bool:
        filled = 0
        for chunk in self._parts(key, start, start + len(into)):
            copy(into[filled : filled + len(chunk)], chunk)
            filled += len(chunk)
        return filled == len(into)

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield bytes `start` to `end` of an object in chunks; each is valid until the next is taken.
        Yields fewer when the object ends before that, or is evicted, and none when there is no object."""
        size = self.size(key)
        if size is not None and start < size:
            yield from self._parts(key, start, min(end, size))

    def _parts(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield what an object has from `start` to `end`, nothing more once it is missing."""
        with self._request("get") as request, self._lane(min(PART_BYTES, end - start)) as lane:
            for first in range(start, end, PART_BYTES):
                length = min(PART_BYTES, end - first)
                if self._call(lane, GET, key, first, length) < 0:
                    request.outcome = "missing"
                    return
                request.received_bytes += length
                yield lane.memory[:length]

    def size(self, key: str) -> int | None:
        """Return the length of an object in bytes; None when there is none."""
        with self._request("head") as request, self._lane() as lane:
            found = self._call(lane, SIZE, key, 0, 0)
            if found < 0:
                request.outcome = "missing"
                return None
            return found

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise StoreError(UNSUPPORTED)."""
        _refuse("lists no objects")

    def folders(self, prefix: str) -> list[str]:
        """Raise StoreError(UNSUPPORTED)."""
        _refuse("lists no objects")

    def copy(self, source: str, target: str) -> bool:
        """Raise StoreError(UNSUPPORTED)."""
        _refuse("copies no objects")

    def delete(self, keys: Iterable[str]) -> int:
        """Delete objects, and return how many keys there were; those that are not there do not matter."""
        num_keys = 0
        for key in keys:
            num_keys += 1
            with self._request("delete"), self._lane() as lane:
                self._call(lane, REMOVE, key, 0, 0)
        return num_keys

    def _lane(self, num_bytes: int = 0, *, is_look: bool = False) -> AbstractContextManager[Lane]:
        """Return what lends a lane of the client, which is started when none was yet."""
        if self._process is None:
            with self._start_lock:
                self._process = self._process or self._started()
        return self._process.lane(num_bytes, is_look=is_look)

    def _started(self) -> PoolProcess:
        limits = self._limits
        process = PoolProcess(
            self._master, rpc_s=limits.idle_s, connect_s=limits.connect_s, start_s=limits.request_s
        )
        weakref.finalize(self, process.close)
        return process

    def _call(
        self, lane: Lane, operation: bytes, key: str, offset: int, length: int, seconds: float = 0.0
    ) -> int:
        """Return a length, 0, or below 0 when there is no such object; within `seconds`, or about `idle_s`.
        Raises StoreError; OSError, which `PoolProcess.lane` explains, when the lane is lost."""
        code = lane.call(
            operation, self._prefix + key, offset, length, seconds or self._limits.idle_s + _ANSWER_S
        )
        is_gone = code in _MISSING or (code == _TRANSFER_FAILED and operation == GET)
        if code >= 0 or is_gone:
            return code
        problem, words = _PROBLEMS.get(code, (StoreProblem.FAILED, ""))
        raise StoreError(problem, f"{key}: code {code} of Mooncake{': ' if words else ''}{words}")


def _refuse(what: str) -> NoReturn:
    raise StoreError(StoreProblem.UNSUPPORTED, f"a pool of Mooncake {what}")
