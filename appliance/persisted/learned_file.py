"""What the policies learned, on disk beside the cold store: a restart does not begin as LRU again.

`learned.json` in the directory of `tiers.nvme`; the store's lock guards it too, and its recovery ignores it.
Written whole under another name, flushed and renamed, so a crash leaves the last one. Without a cold store
nothing is kept: nothing else of the daemon outlives it then, either.

It is only ever an advantage. A file that is missing, damaged, of another version or not writable costs what
was learned, a log line and a count; it never fails a start, and writing never holds the event loop. A file
that was not understood is overwritten by the next one.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ...tiers.durable import write_whole
from ...v1.files import read_regular_file
from ..tasks import happens_within

log = logging.getLogger(__name__)

NAME = "learned.json"
NEW_NAME = "learned.json.new"
KEEP_INTERVAL_S = 300.0
MAX_BYTES = 16 << 20  # far more than any learner has; bounds what a foreign file makes us read


def read_learned(directory: Path) -> bytes:
    """Return what was kept in `directory`; empty when there is nothing to be read. Blocks, never raises."""
    return read_whole(directory / NAME, MAX_BYTES)


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Return a file; empty, and said in the log, when there is none to be read. Blocks, never raises."""
    try:
        return read_regular_file(path, max_bytes, os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    except OSError as problem:
        log.warning("%s: %s; what it held is learned anew", path, problem)
        return b""


class LearnedFile:
    """Keeps what `learned` returns: every `interval_s`, when asked, and at the end. Lives on the event loop.

    `directory`: None keeps nothing. `begin` starts the clock; `close` writes once more, and ends it. `stem`
    names the file and the counters.
    """

    def __init__(
        self,
        directory: Path | None,
        learned: Callable[[], bytes],
        interval_s: float = KEEP_INTERVAL_S,
        stem: str = "learned",
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._directory = directory
        self._stem = stem
        self._learned = learned
        self._interval_s = interval_s
        self._kept = b""  # the last one written
        self._writing = threading.Lock()  # an abandoned write may still run when the next one comes
        self._closing = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Keep it from now on."""
        if self._directory is not None:
            self._clock = asyncio.create_task(self._run(), name=f"kvtier-{self._stem}")

    async def keep(self) -> None:
        """Write what is to be kept, unless it is as the last time. Logs and counts failures."""
        if self._directory is None:
            return
        try:
            data = self._learned()
            if data and data != self._kept:
                await asyncio.to_thread(self._write, self._directory, data)
                self._kept = data
                self.counters[f"{self._stem}_kept"] += 1
        except Exception as problem:  # a full disk, or a policy of the administrator's own
            self.counters[f"{self._stem}_not_kept"] += 1
            log.warning("cannot keep %s.json beside the cold store: %s", self._stem, problem)

    async def close(self) -> None:
        """Write the last state. Idempotent."""
        self._closing.set()
        if self._clock is not None:
            await self._clock

    def _write(self, directory: Path, data: bytes) -> None:
        with self._writing:
            write_whole(directory / f"{self._stem}.json", data)

    async def _run(self) -> None:
        while not self._closing.is_set():
            await happens_within(self._closing, self._interval_s)
            await self.keep()
