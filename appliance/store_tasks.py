"""StoreTasks: calls of the cold store that block, in threads.

What is done to namespaces and files is done by one thread, in the order it was asked for, and so is what is
done to one segment. Several are sealed and freed at a time, because each waits for flushes, and the device
does many in the time of one: one after the other they held a flood of writes at half its speed. A store that
cannot write its metadata takes no records until it can, and is read on: the call that failed is repeated,
ever more rarely. Whatever waited for it meanwhile fails by itself, which is how the planner learns of each
copy. After a defect, which is not repeated, the store is lost.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..tiers.base import CopyError

log = logging.getLogger(__name__)

STORE_RETRY_S, MAX_STORE_RETRY_S = 1.0, 60.0  # between two tries of a call that failed
NUM_SEGMENT_THREADS = 4

R = TypeVar("R")
T = TypeVar("T")


class StoreTasks:
    """Owned by the event loop.

    `on_refused` is called with the failure when the disk fails a call for the first time, `on_back` when the
    last of those has succeeded, `on_lost` with the reason when a call fails of a defect.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        counters: Counter[str],
        on_lost: Callable[[str], None],
        on_refused: Callable[[CopyError], None],
        on_back: Callable[[], None],
    ) -> None:
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix="kvtier-store") for _ in range(1 + NUM_SEGMENT_THREADS)
        ]
        self.num_running = 0  # calls that have not ended
        self.num_done = 0  # that have
        self.is_stopped = False
        self._loop = loop
        self._counters = counters
        self._on_lost, self._on_refused, self._on_back = on_lost, on_refused, on_back
        self._num_failures = 0  # calls that have not succeeded since

    async def keep(self, call: Callable[[], T]) -> T:
        """Run a call after what was asked before, but for segments. Raises what the call raises."""
        return await asyncio.wrap_future(self._threads[0].submit(call))

    async def ended(self) -> None:
        """Wait until every call that was asked for has ended, but for those to be repeated."""
        await asyncio.gather(*(asyncio.wrap_future(one.submit(lambda: None)) for one in self._threads))

    def shut_down(self) -> None:
        """Wait for the calls under way, and end the threads."""
        for thread in self._threads:
            thread.shutdown()

    def run_for_segment(
        self, verb: str, function: Callable[[int], R], segment: int, then: Callable[[R], None]
    ) -> None:
        """Run a call after what was asked for this segment, `then` the rest on the loop."""
        self.run(verb, function, segment, then, thread=1 + segment % NUM_SEGMENT_THREADS)

    def run(
        self,
        verb: str,
        function: Callable[[T], R],
        argument: T,
        then: Callable[[R], None],
        *,
        thread: int = 0,
    ) -> None:
        """Run a call in a thread, `then` the rest on the loop."""
        delay_s = STORE_RETRY_S
        is_repeated = False

        def begin() -> None:
            if self.is_stopped:
                return
            self.num_running += 1
            future = self._threads[thread].submit(function, argument)
            future.add_done_callback(lambda future: self._loop.call_soon_threadsafe(done, future))

        def done(future: "Future[R]") -> None:
            nonlocal delay_s, is_repeated
            self.num_running -= 1
            self.num_done += 1
            failure = future.exception()
            if failure is None:
                then(future.result())
                if is_repeated:
                    self._repeated_well()
                return
            log.error("cold store: %s(%s) failed", verb, argument, exc_info=failure)
            self._counters[f"{verb}_failed"] += 1
            if not isinstance(failure, CopyError):
                self._on_lost(f"{verb} failed: {failure}")
            else:
                if not is_repeated:
                    self._num_failures += 1
                    self._on_refused(failure)
                is_repeated = True
                self._loop.call_later(delay_s, begin)
                delay_s = min(2 * delay_s, MAX_STORE_RETRY_S)

        begin()

    def _repeated_well(self) -> None:
        self._num_failures -= 1
        if self._num_failures == 0:
            self._on_back()
