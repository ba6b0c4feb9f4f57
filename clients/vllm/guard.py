"""No exception ever leaves a hook: the engine treats one as its own death.

`@harmless(default)` on a method of an object that has `counters` and `log`: what goes wrong is counted,
logged once a minute with its trace, and answered with what means "nothing here" to the engine.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from .counters import Counters

F = TypeVar("F", bound=Callable[..., Any])
_LOG_PERIOD_S = 60.0
_last_logged: dict[str, float] = {}


class _Logger(Protocol):
    def exception(self, message: str, *arguments: Any) -> None: ...


class Guarded(Protocol):
    """Who has hooks."""

    counters: Counters
    log: _Logger


def harmless(default: Callable[[], Any]) -> Callable[[F], F]:
    """Return a decorator: the method returns `default()` instead of raising."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception:
                report(self, method.__name__)
                return default()

        return cast(F, guarded)

    return decorate


def report(owner: Guarded, place: str) -> None:
    """Count the exception being handled, and log it unless the same place has just done so."""
    owner.counters.add("hook_errors")
    now = time.monotonic()
    if now - _last_logged.get(place, -_LOG_PERIOD_S) >= _LOG_PERIOD_S:
        _last_logged[place] = now
        owner.log.exception("kvtier: %s failed; the engine goes on without it", place)
