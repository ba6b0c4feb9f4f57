"""A lane: one thread that works off a bounded queue, so that no hook of the engine ever waits for the
appliance.

Stores and loads have a lane (and a connection) each: a load that a request waits for is never behind a
gigabyte of stores. A pool of threads was rejected: copies of one job run at memory speed in one thread
already, and order within a lane is what makes a chunk's parent arrive before it.

Work is bounded by weight (chunks), because what waits pins memory of the engine's pool, not by jobs.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")

_logger = logging.getLogger(__name__)


class WorkerLane(Generic[J, R]):
    """Calls `work(job)` for every job in turn. `failed(job)` makes the result of a job that was not done."""

    def __init__(self, name: str, work: Callable[[J], R], failed: Callable[[J], R], max_weight: int) -> None:
        self._work = work
        self._failed = failed
        self._max_weight = max_weight
        self._waiting: deque[tuple[J, int]] = deque()
        self._weight = 0  # of jobs that wait or run
        self._finished: deque[R] = deque()
        self._changed = threading.Condition()
        self._is_running = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: J, weight: int) -> bool:
        """Queue a job; return False, and finish it as failed, when there is no room. Never blocks for work.

        A job heavier than the whole lane is taken when nothing else waits.
        """
        with self._changed:
            if self._is_stopped or (self._weight and self._weight + weight > self._max_weight):
                self._finished.append(self._failed(job))
                return False
            self._waiting.append((job, weight))
            self._weight += weight
            self._changed.notify_all()
            return True

    def take_finished(self) -> list[R]:
        """Return results not returned before, in the order in which the jobs ended."""
        results = []
        while self._finished:
            results.append(self._finished.popleft())
        return results

    def drain(self) -> None:
        """Fail what waits and wait for the job that runs. Results are there for `take_finished`.

        The wait is as long as one job: its calls have deadlines.
        """
        with self._changed:
            self._cancel()
            self._changed.wait_for(lambda: not self._is_running)

    def stop(self, timeout_s: float) -> bool:
        """Take nothing new, fail what waits, let the running job end; return whether the thread ended."""
        with self._changed:
            self._is_stopped = True
            self._cancel()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check_integrity(self) -> list[str]:
        """Audit: the weight is that of the jobs."""
        with self._changed:
            waiting = sum(weight for _, weight in self._waiting)
            if waiting > self._weight or (not self._is_running and waiting != self._weight):
                return [f"lane {self._thread.name}: weight {self._weight}, jobs weigh {waiting}"]
        return []

    def _cancel(self) -> None:
        while self._waiting:
            job, weight = self._waiting.popleft()
            self._weight -= weight
            self._finished.append(self._failed(job))
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopped)
                if not self._waiting:
                    return
                job, weight = self._waiting.popleft()
                self._is_running = True
            try:
                result = self._work(job)
            except Exception:
                _logger.exception("a job of %s failed; it counts as a miss", self._thread.name)
                result = self._failed(job)
            with self._changed:
                self._finished.append(result)
                self._weight -= weight
                self._is_running = False
                self._changed.notify_all()
