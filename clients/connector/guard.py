"""Guard: how a plug-in calls kvtier from inside a runtime: with a breaker, counting every miss with its
cause.

A runtime's hooks may not raise, and must not care why a block is not there. So a plug-in asks through a
guard, gets None for whatever went wrong, and treats it as a miss; the guard remembers the cause for the
metrics and logs changes of the weather: one line when the daemon is lost, one when it is back, never one
per request.

    guard = Guard("kvtier.clients.sglang")
    found = guard.ask("lookup", lambda: client.lookup(namespace, hashes))
"""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import KvtierError
from .breaker import Breaker

T = TypeVar("T")

BREAKER_OPEN = "BREAKER_OPEN"  # cause of a miss: not asked, because recent calls had no answer
LOG_PERIOD_S = 60.0
PLUGIN_BUG = "PLUGIN_BUG"  # cause of a miss: the plug-in itself is wrong; the log has the trace


def harmless(default: Callable[..., Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a hook return `default(*its arguments)` instead of raising.

    Its object has a `guard`: a Guard, or Defects. The last net under a plug-in: what is expected to go wrong
    never gets that far.
    """

    def decorate(hook: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(hook)
        def guarded(self: Any, *arguments: Any, **named: Any) -> T:
            try:
                return hook(self, *arguments, **named)
            except Exception:
                self.guard.defect(hook.__name__)
                return default(*arguments, **named)  # type: ignore[no-any-return]

        return guarded

    return decorate


class Defects:
    """Defects of a plug-in itself: `count` is called for each, the log gets one trace a minute per place."""

    def __init__(
        self, log: logging.Logger, count: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._count = count
        self._clock = clock
        self._silent_until: dict[str, float] = {}

    def defect(self, what: str) -> None:
        """Note the exception being handled."""
        self._count()
        now = self._clock()
        if now >= self._silent_until.get(what, now):
            self._silent_until[what] = now + LOG_PERIOD_S
            self._log.exception("%s failed; going on as if kvtier had nothing", what)


class Guard:
    """Asks on behalf of a plug-in. Thread-safe. `causes` counts what went wrong, by reason."""

    def __init__(
        self, name: str, breaker: Breaker | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breaker = breaker or Breaker()
        self._logger = logging.getLogger(name)
        self._defects = Defects(self._logger, lambda: self.count(PLUGIN_BUG), clock)
        self._causes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def ask(self, what: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; None when it raised or was not made. Never raises an Exception."""
        if not self.breaker.allows():
            self.count(BREAKER_OPEN)
            return None
        was_open = self.breaker.is_open
        try:
            answer = call()
        except KvtierError as problem:
            self.count(problem.reason)
            self._note(what, problem)
        except Exception as problem:
            self.defect(what)
            self._note(what, problem)
        else:
            self.breaker.succeeded()
            self._tell_if_back(was_open)
            return answer
        self._tell_if_back(was_open)
        return None

    def give_back(self, what: str, call: Callable[[], object]) -> None:
        """Make a call that gives back what this process holds, also while the daemon does not answer.

        It may fail: the daemon ends what a client held when the connection is gone. Never raises an
        Exception.
        """
        try:
            call()
        except KvtierError as problem:
            self._logger.debug("%s: %s", what, problem)
        except Exception:
            self.defect(what)

    def defect(self, what: str) -> None:
        """Note the exception being handled: a defect of the plug-in itself. Told once a minute per place."""
        self._defects.defect(what)

    def count(self, cause: str, number: int = 1) -> None:
        """Note that something was lost, and why."""
        if number:
            with self._lock:
                self._causes[cause] += number

    def take_causes(self) -> dict[str, int]:
        """Return how often each cause occurred since the last call, and forget it."""
        with self._lock:
            causes, self._causes = dict(self._causes), Counter()
        return causes

    @property
    def causes(self) -> dict[str, int]:
        """How often each cause occurred since the last `take_causes`."""
        with self._lock:
            return dict(self._causes)

    def _note(self, what: str, problem: Exception) -> None:
        if self.breaker.failed(problem):
            self._logger.warning("%s: %s; going on without kvtier until it answers again", what, problem)
        else:
            self._logger.debug("%s: %s", what, problem)

    def _tell_if_back(self, was_open: bool) -> None:
        if was_open and not self.breaker.is_open:
            self._logger.warning("kvtier answers again")
