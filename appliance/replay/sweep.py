"""A sweep: one trace, many setups, side by side in processes.

Setups share nothing, so they run in processes of their own; each gets the trace once. Results come back in
the order of the setups, and are the same whether there is one process or eight.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from .outcomes import Outcome
from .setups import Setup
from .shell import Progress
from .timed import TimedShell
from .traces import Trace
from .untimed import UntimedShell
from .virtual import EdgeSpeed

POLL_S = 0.1

_shared: "tuple[Trace, Mapping[str, EdgeSpeed], Any]"  # of a worker process


def run_setup(
    trace: Trace,
    setup: Setup,
    speeds: Mapping[str, EdgeSpeed] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Replay a trace on one setup."""
    if setup.is_timed:
        return TimedShell(trace, setup, progress, speeds).run()
    return UntimedShell(trace, setup, progress).run()


def run_setups(
    trace: Trace,
    setups: Sequence[Setup],
    num_jobs: int = 1,
    speeds: Mapping[str, EdgeSpeed] | None = None,
    progress: Callable[[Sequence[int]], None] | None = None,
) -> list[Outcome]:
    """Replay a trace on each setup; outcomes in the same order.

    `progress` hears the requests done, per setup.
    """
    report = progress or (lambda _: None)
    if num_jobs <= 1 or len(setups) <= 1:
        done = [0] * len(setups)
        outcomes = []
        for number, setup in enumerate(setups):

            def advance(count: int, number: int = number) -> None:
                done[number] = count
                report(done)

            outcomes.append(run_setup(trace, setup, speeds, advance))
        return outcomes
    # Spawned, not forked: a fork of a process with threads (progress bars, gRPC) may hang.
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", len(setups), lock=False)
    shared = (trace, dict(speeds or {}), counts)
    with ProcessPoolExecutor(min(num_jobs, len(setups)), context, _begin_worker, shared) as pool:
        futures = [pool.submit(_run_in_worker, number, setup) for number, setup in enumerate(setups)]
        _watch(futures, counts, report)
        return [future.result() for future in futures]


def _watch(futures: Sequence[Future[Outcome]], counts: Any, report: Callable[[Sequence[int]], None]) -> None:
    """Report progress until all have ended, or one has failed."""
    while True:
        done, running = wait(futures, POLL_S)
        report(list(counts))
        failed = [future for future in done if future.exception() is not None]
        if failed:
            for future in running:
                future.cancel()
            failed[0].result()
        if not running:
            return


def _begin_worker(trace: Trace, speeds: Mapping[str, EdgeSpeed], counts: Any) -> None:
    global _shared
    _shared = (trace, speeds, counts)


def _run_in_worker(number: int, setup: Setup) -> Outcome:
    trace, speeds, counts = _shared
    last_at = time.monotonic()

    def advance(count: int) -> None:
        nonlocal last_at
        if time.monotonic() - last_at > POLL_S or count == trace.num_requests:
            last_at = time.monotonic()
            counts[number] = count

    return run_setup(trace, setup, speeds, advance)
