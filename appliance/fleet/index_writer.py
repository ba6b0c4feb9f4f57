"""HoldingsWriter: keeps an index in step with the bundles that this host holds.

It watches this host's own holdings, as another host would (holdings.py), and writes what it is told. All
is written anew every REFRESH_S, because what is in the index expires, and at once when the directory had
lost this host: then it may have lost what this host held, too. When the index takes nothing the writer
begins again later, with all that is held then, so nothing that could not be written is remembered. The
pause doubles while nothing is taken, and ends when the directory has this host anew.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Final

from ...sources.directories.addresses import DirectoryError
from ...sources.directories.redis_index import KEY_TTL_S, HolderIndex, bundle_key
from ...sources.peers.inventory import NAME_BYTES, HostInventory
from ...v1 import peer_pb2 as pb
from ..tasks import happens_within

log = logging.getLogger(__name__)

REFRESH_S: Final = KEY_TTL_S / 2
STEP_KEYS: Final = 64  # in one batch: 1 ms or so of the event loop
KEYS_PER_S: Final = 5000
RETRY_S, MAX_RETRY_S = 1.0, 60.0


class HoldingsWriter:
    """Writes until `run` is cancelled. Owned by the event loop.

    `watch` returns what this host holds, of all namespaces and in bundles."""

    def __init__(
        self,
        index: HolderIndex,
        life: int,
        watch: Callable[[], AsyncGenerator[pb.WatchInventoryResponse, None]],
    ) -> None:
        self._index = index
        self._life = life
        self._watch = watch
        self._told = HostInventory()  # what the index has of this host, as far as known
        self._following: asyncio.Task[None] | None = None
        self._is_all_written = False  # by the task that follows now
        self._is_due = asyncio.Event()  # to write all again
        self.is_failing = False
        self.counters: Counter[str] = Counter()

    @property
    def num_told(self) -> int:
        """Return how many bundles the index has of this host, as far as known."""
        return len(self._told)

    def begin_again(self) -> None:
        """Write all that is held, which the index may have lost.

        What is being written is ended first, so that a directory that loses this host again and again does
        not keep the rest from being written."""
        self._is_due.set()
        if self._following is not None and self._is_all_written:
            self._is_all_written = False
            self._following.cancel()

    async def run(self) -> None:
        """Write until cancelled."""
        retry_s = RETRY_S
        while True:
            self._is_all_written = False
            self._following = asyncio.create_task(self._follow())
            try:
                done, _ = await asyncio.wait(
                    [self._following], timeout=REFRESH_S * (0.75 + random.random() / 4)
                )
            finally:
                self._following.cancel()
            if not done:
                await asyncio.wait([self._following])
            failure = None if self._following.cancelled() else self._following.exception()
            if failure is None or not self.is_failing:
                retry_s = RETRY_S
            if failure is None:
                continue
            if not isinstance(failure, DirectoryError):
                log.error("what this host holds was not written into the index", exc_info=failure)
            self.counters["index_writes_failed"] += 1
            self.is_failing = True
            await happens_within(self._is_due, retry_s * (0.5 + random.random() / 2))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _follow(self) -> None:
        """Write what is held, then what changes. Raises DirectoryError."""
        former, told = self._told, HostInventory()
        self._is_due.clear()
        async with aclosing(self._watch()) as messages:
            async for message in messages:
                if message.is_reset:
                    former, told = _joined(former, told), HostInventory()
                for change in message.changes:
                    await self._write(told, change)
                if message.is_complete:
                    for digest, names in former.beyond(told):
                        await self._remove(digest, names)
                    self._told, former = told, HostInventory()
                    self.is_failing, self._is_all_written = False, True
                    if self._is_due.is_set():
                        return

    async def _write(self, told: HostInventory, change: pb.InventoryChange) -> None:
        """Write one change into the index, and what it has now into `told`."""
        digest = change.namespace_digest
        gone = told.among(digest, change.removed)
        to_merge = told.change(digest, change.added, change.removed)
        for keys in _steps(digest, change.added):
            await self._index.add(self._life, keys)
            self.counters["index_bundles_added"] += len(keys)
            await asyncio.sleep(len(keys) / KEYS_PER_S)
        await self._remove(digest, gone)
        for names in to_merge:
            names.adopt(*await asyncio.to_thread(names.merged))

    async def _remove(self, digest: bytes, names: bytes) -> None:
        for keys in _steps(digest, names):
            await self._index.remove(self._life, keys)
            self.counters["index_bundles_removed"] += len(keys)
            await asyncio.sleep(len(keys) / KEYS_PER_S)


def _joined(former: HostInventory, told: HostInventory) -> HostInventory:
    """Return what one or the other has."""
    for digest, names in told.beyond(former):
        former.change(digest, names, b"")
    return former


def _steps(digest: bytes, names: bytes) -> Iterator[list[bytes]]:
    """Yield the keys of packed short names, STEP_KEYS at a time."""
    size = STEP_KEYS * NAME_BYTES
    for start in range(0, len(names), size):
        part = names[start : start + size]
        yield [
            bundle_key(digest, part[at : at + NAME_BYTES])
            for at in range(0, len(part) - NAME_BYTES + 1, NAME_BYTES)
        ]
