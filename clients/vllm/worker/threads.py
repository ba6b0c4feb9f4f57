"""Threads beside an engine: on the processors that the engine has, out of the way of its own.

An engine on CPU pins the thread that creates us to one core, and a new thread inherits that: it would
compete with exactly one of the engine's threads, which then holds up all others at every barrier. So a thread
here may run wherever any thread of the process may, and where no call waits for it, it makes way for the
engine's (v1/threads.py).
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ....v1.threads import lower_thread_priority


def run_aside(name: str, work: Callable[[], None], in_background: bool) -> threading.Thread:
    """Start a daemon thread that runs `work`; `in_background` where no call waits for it."""

    def run() -> None:
        spread_out()
        if in_background:
            lower_thread_priority(name)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def spread_out() -> None:
    """Let the calling thread run on all processors of this process.

    Linux only; elsewhere, and where it is not allowed, nothing changes."""
    with suppress(OSError, AttributeError):
        processors: set[int] = set()
        for task in os.listdir("/proc/self/task"):
            processors |= os.sched_getaffinity(int(task))
        os.sched_setaffinity(0, processors)
