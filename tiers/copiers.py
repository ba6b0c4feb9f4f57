"""Copies of one edge between host memory, staging extents and the cold store.

A batch is one task for a shared pool of threads, not one per fragment: handing over a task and hearing of its
end costs 55 us, as much as copying half a megabyte. Several batches of an edge run at the same time.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ..v1.threads import lower_thread_priority
from .base import Cause, CopyItem, CopyOutcome
from .edges import ReadableSource, Viewable, WritableTarget, edge


def make_pool(num_threads: int, name: str = "kvtier-copy", in_background: bool = False) -> ThreadPoolExecutor:
    """Return threads for the copiers of a daemon to share. The mover bounds their queue.
    Threads `in_background` run at lower priority than an engine beside the daemon: no request waits for their
    copies.

    All of them run when this returns. The executor alone would start each with the first work it gets, the
    event loop waiting for every one: with busy processors that took 80 ms of a first load's 200.
    """
    pool = ThreadPoolExecutor(
        num_threads, name, partial(lower_thread_priority, name) if in_background else None
    )
    all_there = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_there.wait)
    all_there.wait()
    return pool


class HostCopier:
    """Implements `Copier` for the edge from `source` to `target`.

    `pool` is shared between edges and belongs to the caller. A programmer's error in an engine (an assertion)
    ends up as the future's exception; an operating error is a cause in the outcome of its item.
    """

    def __init__(
        self, source: Viewable | ReadableSource, target: Viewable | WritableTarget, pool: ThreadPoolExecutor
    ) -> None:
        self._pool = pool
        #: Copies items in the calling thread: for batches too small to be worth a hand-over.
        self.run = edge(source, target)

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order.

        Cancelling the future has no effect by design: places may be reused when it completes, so it completes
        when the last byte was moved, not earlier.
        """
        future: Future[list[CopyOutcome]] = Future()
        future.set_running_or_notify_cancel()  # from now on cancel() answers no
        try:
            self._pool.submit(self._work, items, future)
        except RuntimeError:  # the pool is shut down: the daemon is going
            future.set_result([CopyOutcome(Cause.CANCELLED)] * len(items))
        return future

    def _work(self, items: Sequence[CopyItem], future: "Future[list[CopyOutcome]]") -> None:
        try:
            future.set_result(self.run(items))
        except BaseException as error:  # reaches the caller through the future
            future.set_exception(error)
            # The error holds this frame, which must not hold the error: a dead client's staging would linger.
            del future
