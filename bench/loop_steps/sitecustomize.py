"""Notes the long steps of event loops, in each Python process that finds this folder in PYTHONPATH.

A line of JSON for each step that held its thread for LEAST_S: when it ended, its seconds, those of the
processor, those of Python's collector among these, and what ran; and one now and then with the number of
all steps. Into the file KVTIER_LOOP_STEPS. Of main threads only: a put into an object store has a loop of
its own, which holds no caller up. asyncio's own debug mode has the time of a step too, but makes every call
several times as dear.
"""

import gc
import json
import os
import threading
import time
from asyncio import events
from typing import Any

LEAST_S = 0.002
STEPS_A_LINE = 256


def _watch(path: str) -> None:
    run, num_steps = events.Handle._run, 0
    collector_began_at = collector_s = 0.0

    def say(**line: Any) -> None:
        with open(path, "a") as file:
            print(json.dumps({"at": time.time(), "pid": os.getpid(), **line}), file=file)

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal collector_began_at, collector_s
        if threading.current_thread() is not threading.main_thread():
            return
        if phase == "start":
            collector_began_at = time.thread_time()
        else:
            collector_s += time.thread_time() - collector_began_at

    def timed(self: events.Handle) -> None:
        nonlocal num_steps, collector_s
        if threading.current_thread() is not threading.main_thread():
            return run(self)
        collector_s = 0.0
        began_at, cpu_began_at = time.perf_counter(), time.thread_time()
        run(self)
        num_steps += 1
        seconds = time.perf_counter() - began_at
        if seconds >= LEAST_S:
            cpu_s = time.thread_time() - cpu_began_at
            say(seconds=seconds, cpu_s=cpu_s, collector_s=collector_s, what=repr(self)[:200])
        if not num_steps % STEPS_A_LINE:
            say(num_steps=num_steps)
        return None

    gc.callbacks.append(collected)
    events.Handle._run = timed  # type: ignore[method-assign]


if path := os.environ.get("KVTIER_LOOP_STEPS"):
    _watch(path)
