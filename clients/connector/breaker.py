"""Breaker: stop asking a daemon that does not answer, and notice by itself when it is back.

A runtime must never wait for kvtier twice. After `max_failures` failed calls in a row (one is enough when
no daemon listens, or the caller is denied) the breaker is open: `allows()` says no, which the caller
turns into a miss without a call. After `pause_s` exactly one caller is let through as a probe; its success
closes the breaker, its failure opens it for twice as long, up to `max_pause_s`. Errors that are answers
(NotFound, Overloaded, InvalidRequest ...) prove that the daemon lives and never open it. A token bucket over
the error rate was rejected: what a connector must bound is the time that requests wait, and that is failures
in a row.

Neutral of any runtime; thread-safe; reads no clock but the one it is given.
"""

import threading
import time
from collections.abc import Callable

from ..errors import REJECTS_CALLER, DeadlineExceeded, KvtierError, ServerBug, Unavailable

OPENS = (Unavailable, DeadlineExceeded, ServerBug)  # an answer that is none


class Breaker:
    """Says whether to ask at all. Report every call's end with `succeeded` or `failed`."""

    def __init__(
        self,
        max_failures: int = 3,
        pause_s: float = 0.5,
        max_pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0  # in a row
        self._pause_s = pause_s  # of the next opening
        self._probe_at: float | None = None  # open until then; None: closed

    @property
    def is_open(self) -> bool:
        """Whether callers are turned away (but for a probe now and then)."""
        return self._probe_at is not None

    def turns_away(self) -> bool:
        """Whether `allows` would return False now. Changes nothing."""
        probe_at = self._probe_at
        return probe_at is not None and self._clock() < probe_at

    def allows(self) -> bool:
        """Whether to make a call now. True while open means: this caller is the probe."""
        if self._probe_at is None:
            return True
        with self._lock:
            if self._probe_at is None:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + self._pause_s  # no other try until this one had its time
            return True

    def succeeded(self) -> None:
        """A call was answered."""
        if self._num_failures or self._probe_at is not None:
            with self._lock:
                self._num_failures = 0
                self._probe_at = None
                self._pause_s = self._first_pause_s

    def failed(self, problem: Exception) -> bool:
        """A call ended in `problem`; return whether that opened the breaker."""
        if isinstance(problem, KvtierError) and not isinstance(problem, OPENS) and not _is_shut_out(problem):
            self.succeeded()
            return False
        with self._lock:
            was_open = self._probe_at is not None
            self._num_failures += 1
            if not was_open and self._num_failures < self._max_failures and not _is_gone(problem):
                return False
            self._probe_at = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            return not was_open


def _is_gone(problem: Exception) -> bool:
    """Whether asking again at once is useless: no daemon, no connection, or no access."""
    return isinstance(problem, Unavailable) or (isinstance(problem, KvtierError) and _is_shut_out(problem))


def _is_shut_out(problem: KvtierError) -> bool:
    """Whether no call of this process can succeed until its rights or the policy change."""
    return problem.reason in REJECTS_CALLER
