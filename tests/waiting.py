"""Waiting for a state of something real, to which no virtual clock leads."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 120.0  # on a busy machine, too: what is late fails, what is slow does not
T = TypeVar("T")


def until(
    holds: Callable[[], T],
    words: "str | Callable[[], object]" = "it never came to that",
    pause_s: float = 0.002,
) -> T:
    """Return what `holds` says once that is true. Fails after WAIT_S with `words`, or what they say then."""
    pause, deadline_at = threading.Event(), time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline_at, words if isinstance(words, str) else words()
        pause.wait(pause_s)
    return found
