"""Event loops for tests: in debug mode, and anything that blocked the loop is a failure."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from kvtier.appliance.config import Loaded, Settings
from kvtier.appliance.host.daemon import Daemon
from kvtier.tiers.gpu.device.contract import Device
from kvtier.tiers.memory.keeper import Keeper

T = TypeVar("T")

#: Generous: on a shared machine a thread may be off its core for seconds. What we look for (a wait for
#: a device, a lock, another thread) blocks for longer, or for ever.
SLOW_CALLBACK_S = 30.0


class SlowCallbacks(logging.Handler):
    """Collects asyncio's complaints about callbacks that held the loop, and about lost exceptions."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.complaints: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.complaints.append(record.getMessage())

    def __enter__(self) -> "SlowCallbacks":
        logging.getLogger("asyncio").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        logging.getLogger("asyncio").removeHandler(self)
        assert kind is not None or not self.complaints, self.complaints


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end; fails when something held the loop."""

    async def watched() -> T:
        asyncio.get_running_loop().slow_callback_duration = SLOW_CALLBACK_S
        return await main

    with SlowCallbacks():
        return asyncio.run(watched(), debug=True)


async def turns(number: int = 3) -> None:
    """Let everything that is ready run."""
    for _ in range(number):
        await asyncio.sleep(0)


async def rest() -> None:
    """Let calls whose callers have their answers come to their own end. Tasks that never end are left to
    complain."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks, timeout=SLOW_CALLBACK_S)


class DaemonThread:
    """A daemon on an event loop of its own, for tests that talk to it with blocking clients.

    Leaving the `with` stops it and audits it first. Clients made with grpc.aio belong on this very loop
    (`wait`): grpc.aio shares one queue between all loops of a process, and a loop that ends first breaks it.
    """

    def __init__(
        self,
        settings: Settings | Loaded,
        device: Device | None = None,
        peers: Sequence[Device] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self.daemon: Daemon
        self._settings = settings
        self._device = device
        self._peers = peers
        self._keeper = keeper
        self._loop = asyncio.new_event_loop()
        self._loop.set_debug(True)
        self._loop.slow_callback_duration = SLOW_CALLBACK_S
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._slow = SlowCallbacks()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the daemon's loop and return what it returns."""

        async def on_loop() -> T:
            return function()

        return self.wait(on_loop())

    def wait(self, main: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Run `main` on the daemon's loop to its end."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(main, self._loop)
        return future.result(timeout_s)

    def __enter__(self) -> "DaemonThread":
        self._slow.__enter__()
        self._thread.start()
        try:
            self.daemon = self.wait(Daemon.start(self._settings, self._device, self._peers, self._keeper))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            problems = self.call(self.daemon.check_integrity)
            self.wait(self.daemon.stop())
            self.wait(rest())
        finally:
            self._end()
        if kind is None:
            assert problems == []
            self._slow.__exit__(None)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.set_debug(False)  # what follows joins threads, and nobody is served any more
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        logging.getLogger("asyncio").removeHandler(self._slow)
