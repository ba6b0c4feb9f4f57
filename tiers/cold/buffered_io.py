"""The fallback for file systems that refuse O_DIRECT: the same calls through aiofiles and the page cache.

Correct everywhere and never fast: every byte is cached twice. `EngineStatistics.backend` and the log say when
it is in use, because a tier that silently became slow is harder to find than one that is off.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence

from aiofiles.os import wrap

from ..base import Buffer
from .direct_io import DirectIo

_read: Callable[..., Awaitable[int]] = wrap(os.preadv)
_write: Callable[..., Awaitable[int]] = wrap(os.pwritev)


class BufferedIo(DirectIo):
    """`DirectIo` without O_DIRECT. Has a thread of its own, with an event loop; `shut_down` ends it."""

    backend = "aiofiles"
    _direct = 0

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-aiofiles", daemon=True)
        self._thread.start()

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See DirectIo.read."""
        return self._wait(_read(fd, buffers, offset))

    def write(self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False) -> int:
        """See DirectIo.write."""
        return self._wait(_write(fd, buffers, offset, os.RWF_DSYNC if durable else 0))

    def shut_down(self) -> None:
        """End the thread. The files must be closed. Idempotent."""
        if not self._loop.is_closed():
            self._wait(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Awaitable[int] | Awaitable[None]) -> int:
        async def ended() -> int:
            return await work or 0

        return asyncio.run_coroutine_threadsafe(ended(), self._loop).result()
