"""Runs functions that may block for ever, such as reading a file of a network that is gone.

Threads of an executor are joined before the process ends; these are daemon threads, which the end does not
wait for.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def apart(function: Callable[[], Result], name: str = "kvtier-read") -> "Future[Result]":
    """Return what `function` will return, or raise; it runs in a daemon thread of its own."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as problem:
            future.set_exception(problem)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def detached(function: Callable[[], Result]) -> Result:
    """Return what `function` returns, or raise what it raises; it runs in a daemon thread.

    Cancelling this leaves the thread behind, and what it returns is dropped.
    """
    return await asyncio.wrap_future(apart(function))
