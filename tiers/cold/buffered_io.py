"""The fallback for file systems that refuse O_DIRECT: the same calls through aiofiles and the page cache.

Correct everywhere and never fast: every byte is cached twice and one file does one transfer at a time.
`EngineStatistics.backend` and the log say when it is in use, because a tier that silently became slow is
harder to find than one that is off.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiofiles

from ..base import Buffer
from .direct_io import DirectIo

T = TypeVar("T")


@dataclass(slots=True)
class _File:
    """An open file of aiofiles, with the lock of its position."""

    handle: Any  # aiofiles' unbuffered file
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # position and transfer belong together


class BufferedIo(DirectIo):
    """`DirectIo` without O_DIRECT. Has a thread of its own, with an event loop; `shut_down` ends it."""

    backend = "aiofiles"

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-aiofiles", daemon=True)
        self._thread.start()

    def open(self, path: Path, *, direct: bool = True) -> int:
        """See DirectIo.open; with `direct`, reads and writes go through the event loop."""
        fd = super().open(path, direct=False)
        if direct:  # the manifest and other plain files need no detour
            handle = self._wait(_open(fd))
            self._files[fd] = _File(handle)
        return fd

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See DirectIo.read."""
        if fd not in self._files:
            return super().read(fd, buffers, offset)
        return self._wait(_read(self._files[fd], buffers, offset))

    def write(self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False) -> int:
        """See DirectIo.write."""
        if fd not in self._files:
            return super().write(fd, buffers, offset, durable=durable)
        written = self._wait(_write(self._files[fd], buffers, offset))
        if durable:
            self.sync(fd)
        return written

    def close(self, fd: int) -> None:
        """See DirectIo.close."""
        file = self._files.pop(fd, None)
        if file is not None:
            self._wait(file.handle.close())
        os.close(fd)

    def shut_down(self) -> None:
        """End the thread. The files must be closed. Idempotent."""
        if not self._loop.is_closed():
            self._wait(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _open(fd: int) -> Any:
    return await aiofiles.open(fd, "r+b", buffering=0, closefd=False)


async def _read(file: _File, buffers: Sequence[Buffer], offset: int) -> int:
    total = 0
    async with file.lock:
        await file.handle.seek(offset)
        for buffer in buffers:
            num_read = await file.handle.readinto(buffer)
            total += num_read
            if num_read < len(buffer):
                break
    return total


async def _write(file: _File, buffers: Sequence[Buffer | bytes], offset: int) -> int:
    total = 0
    async with file.lock:
        await file.handle.seek(offset)
        for buffer in buffers:
            written = await file.handle.write(buffer)
            total += written
            if written < len(buffer):
                break
    return total
