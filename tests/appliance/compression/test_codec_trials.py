"""Compiling codecs is another process's work, and ends when nobody waits for it."""

import asyncio
import contextlib
import sys
import threading
from pathlib import Path

import pytest

from kvtier.appliance.compression.codec_trials import COMMAND, run_apart
from tests.appliance.loops import run, turns

FOREVER = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('up'); time.sleep(600)"


def is_there(path: Path) -> bool:
    return path.exists()


def child_with(argument: str) -> int | None:
    """Return the id of this thread's child process that was given `argument`."""
    for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
        if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return None


async def cancelled_while_it_runs(started: Path) -> int:
    """Run something without end, cancel once it is up; return the process id it had."""
    task = asyncio.create_task(run_apart((sys.executable, "-c", FOREVER, str(started))))
    while not is_there(started):
        assert not task.done()
        await asyncio.sleep(0.01)
    pid = child_with(str(started))
    assert pid is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return pid


def test_who_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    pid = asyncio.run(asyncio.wait_for(cancelled_while_it_runs(tmp_path / "up"), 60))
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("num_turns", range(8))
def test_who_is_cancelled_while_the_process_starts_leaves_none_and_no_complaint(num_turns: int) -> None:
    async def cancelled_early() -> None:
        task = asyncio.create_task(run_apart((sys.executable, "-c", FOREVER, "/dev/null")))
        await turns(num_turns)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run(cancelled_early())
    assert child_with("/dev/null") is None


@pytest.mark.parametrize("command", [("/does/not/exist",), (sys.executable, "-c", "raise SystemExit(3)")])
def test_a_process_that_fails_costs_nothing_but_time(command: tuple[str, ...]) -> None:
    asyncio.run(asyncio.wait_for(run_apart(command), 60))


def test_the_process_apart_does_the_daemons_own_measurement() -> None:
    """With a dtype that no compiled codec takes: what is looked at is that the command runs at all."""

    async def status() -> int:
        process = await asyncio.create_subprocess_exec(*COMMAND, "exponents", "float32")
        return await process.wait()

    assert asyncio.run(asyncio.wait_for(status(), 60)) == 0
