"""Copies of one edge between host memory, staging extents and the cold store.

A batch is cut into a few tasks for a shared pool of threads rather than one task per fragment: handing over
a task and hearing of its end costs 55 us, as much as copying half a megabyte.
Cancelling the future has no effect by design: places may be reused when it completes, so it must complete
when the last byte was moved, not earlier.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ..v1.threads import lower_thread_priority
from .base import Cause, CopyItem, CopyOutcome
from .edges import ReadableSource, Run, Viewable, WritableTarget, edge

TASK_BYTES = 2 << 20  # least a task should carry, unless the batch is smaller


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

    `pool` is shared between edges and belongs to the caller; `num_tasks` is how many of its threads one
    batch may use. A programmer's error in an engine (an assertion) ends up as the future's exception,
    after all items have ended; an operating error is a cause in the outcome of its item.
    """

    def __init__(
        self,
        source: Viewable | ReadableSource,
        target: Viewable | WritableTarget,
        pool: ThreadPoolExecutor,
        num_tasks: int = 2,
    ) -> None:
        assert num_tasks > 0
        self._pool = pool
        self._num_tasks = num_tasks
        #: Copies items in the calling thread: for batches too small to be worth a hand-over.
        self.run = edge(source, target)

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order."""
        batch = _BatchCopy(items, self.run)
        for task in _cut(items, self._num_tasks):
            try:
                self._pool.submit(batch.work, task)
            except RuntimeError:  # the pool is shut down: the daemon is going
                batch.refuse(task)
        return batch.future


class _BatchCopy:
    """Outcomes of one batch, filled in by several tasks; the last one completes the future."""

    def __init__(self, items: Sequence[CopyItem], run: Run) -> None:
        self.future: Future[list[CopyOutcome]] = Future()
        self.future.set_running_or_notify_cancel()  # from now on cancel() answers no
        self._items = items
        self._run = run
        self._outcomes = [CopyOutcome(Cause.CANCELLED)] * len(items)
        self._num_open = len(items)
        self._bug: BaseException | None = None
        self._lock = threading.Lock()
        if not items:
            self.future.set_result([])

    def work(self, task: range) -> None:
        """Copy the items of `task`."""
        outcomes: list[CopyOutcome] | None = None
        bug: BaseException | None = None
        try:
            outcomes = self._run(self._items[task.start : task.stop])
        except BaseException as error:  # reaches the caller through the future
            bug = error
        self._finish(task, outcomes, bug)
        # The error holds this frame, which must not hold the error: a dead client's staging would linger.
        del bug, self

    def refuse(self, task: range) -> None:
        """End the items of `task` without having begun."""
        self._finish(task, None, None)

    def _finish(self, task: range, outcomes: list[CopyOutcome] | None, bug: BaseException | None) -> None:
        with self._lock:
            if outcomes is not None:
                self._outcomes[task.start : task.stop] = outcomes
            self._bug = self._bug or bug
            self._num_open -= len(task)
            done = self._num_open == 0
        if done and self._bug is not None:
            self.future.set_exception(self._bug)
            self._bug = None
        elif done:
            self.future.set_result(self._outcomes)


def _cut(items: Sequence[CopyItem], num_tasks: int) -> list[range]:
    """Cut a batch into at most `num_tasks` consecutive parts of about equal bytes."""
    total = sum(item.label.raw_length for item in items)
    share = max(-(-total // num_tasks), TASK_BYTES)
    tasks, start, size = [], 0, 0
    for position, item in enumerate(items):
        size += item.label.raw_length
        if size >= share:
            tasks.append(range(start, position + 1))
            start, size = position + 1, 0
    if start < len(items):
        tasks.append(range(start, len(items)))
    return tasks
