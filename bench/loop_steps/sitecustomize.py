"""Notes the long steps of event loops, in each Python process that finds this folder in PYTHONPATH.

A line of JSON for each step that held its thread for LEAST_S: when it ended, its seconds, those of the
processor, and what ran; and one now and then with the number of all steps. Into the file KVTIER_LOOP_STEPS.
asyncio's own debug mode has the time of a step too, but makes every call several times as dear.
"""

import json
import os
import time
from asyncio import events
from typing import Any

LEAST_S = 0.002
STEPS_A_LINE = 256


def _watch(path: str) -> None:
    run, num_steps = events.Handle._run, 0

    def say(**line: Any) -> None:
        with open(path, "a") as file:
            print(json.dumps({"at": time.time(), "pid": os.getpid(), **line}), file=file)

    def timed(self: events.Handle) -> None:
        nonlocal num_steps
        began_at, cpu_began_at = time.perf_counter(), time.thread_time()
        run(self)
        num_steps += 1
        seconds = time.perf_counter() - began_at
        if seconds >= LEAST_S:
            say(seconds=seconds, cpu_s=time.thread_time() - cpu_began_at, what=repr(self)[:200])
        if not num_steps % STEPS_A_LINE:
            say(num_steps=num_steps)

    events.Handle._run = timed  # type: ignore[method-assign]


if path := os.environ.get("KVTIER_LOOP_STEPS"):
    _watch(path)
