"""A NIXL process of the test's own, which writes where the test says, in a thread with an event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from kvtier.sources.peers.connection import ConnectionLost
from kvtier.sources.peers.nixl_process import SLOT_BYTES, Destination, NixlProcess, NotBegun

Result = TypeVar("Result")
PATIENCE_S = 120.0


class Writer:
    """Runs until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._copiers = ThreadPoolExecutor(2)
        self.process = self._new()

    def _new(self) -> NixlProcess:
        async def made() -> NixlProcess:
            process = NixlProcess(self._copiers)
            await process.start()
            return process

        return self.run(made())

    def run(self, task: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on its loop."""
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(PATIENCE_S)

    def call(self, function: Callable[..., Result], *values: Any) -> Result:
        """Call a function on its loop."""

        async def called() -> Result:
            return function(*values)

        return self.run(called())

    def write(self, metadata: bytes, address: int, payload: bytes, within_s: float = 10.0) -> str:
        """Write bytes into another process's memory; return what went wrong, empty for nothing."""
        where = Destination(metadata, address, len(payload))
        if self.process.ended.is_set():
            return "NotBegun: closed"
        try:
            self.run(self.process.write([memoryview(payload)], where, within_s))
        except (NotBegun, ConnectionLost) as failure:
            return f"{type(failure).__name__}: {failure}"
        return ""

    def landed(self, slot: int = 0) -> "np.ndarray[Any, Any]":
        """Return a slot of its own landing memory."""
        return np.frombuffer(self.process.landing.view(slot, SLOT_BYTES), np.uint8)

    def close(self) -> None:
        """End the process and the loop."""
        self.run(self.process.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._copiers.shutdown()
        self._loop.close()


def noise(seed: int, num_bytes: int) -> bytes:
    """Return bytes that no other seed has."""
    return np.random.default_rng(seed).bytes(num_bytes)
