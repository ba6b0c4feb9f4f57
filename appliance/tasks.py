"""Tasks that run beside what began them. An event loop keeps no task from being collected: these are held."""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Tasks(Generic[Result]):
    """Tasks that have not ended. Owned by the event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Result]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` as a task; return it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in self._running:
            task.cancel()

    async def settle(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel all, and wait until they have ended. Idempotent."""
        await end(self._running)


async def end(tasks: Iterable[asyncio.Future[Any] | None]) -> None:
    """Cancel tasks (None is none), and wait until they have ended."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, `seconds` at most. Returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
