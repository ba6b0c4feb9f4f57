"""Threads beside an engine: on the processors that the engine has, out of the way of its own.

An engine on CPU pins the thread that creates us to one core, and a new thread inherits that: it would
compete with exactly one of the engine's threads, which then holds up all others at every barrier. So a thread
here may run wherever any thread of the process may, and where nobody waits for it, it yields to the engine's
(nice).
"""

import os
import threading
from collections.abc import Callable


def run_aside(name: str, work: Callable[[], None], niceness: int) -> threading.Thread:
    """Start a daemon thread that runs `work`."""

    def run() -> None:
        step_aside(niceness)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def step_aside(niceness: int) -> None:
    """Let the calling thread run on all processors of this process, with lower priority. Linux only;
    elsewhere, and where it is not allowed, nothing changes."""
    try:
        processors: set[int] = set()
        for task in os.listdir("/proc/self/task"):
            processors |= os.sched_getaffinity(int(task))
        os.sched_setaffinity(0, processors)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except (OSError, AttributeError):
        return
