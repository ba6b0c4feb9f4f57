"""Raises the priority of a sample's processes over all others of the machine.

A nice value alone gives none to threads that meet at a barrier a thousand times a second: since EEVDF
a running thread keeps the processor until its slice ends, and every barrier waits for that. A leg of 7 s
took 34 s at niceness -12 beside twenty processes at 15. So a sample's threads also ask for the shortest
slice there is: a waking thread with a shorter slice than the running one's preempts it (`sched_runtime` of
sched_setattr(2), Linux 6.12). Threads of kvtier that make way by themselves keep their long ones.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHORT_SLICE_S = 0.0001  # the least that the kernel grants
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period

_niceness: int | None = None
_joined: list[int] = []  # sessions that began during the sample under way


def use_priority(niceness: int | None) -> None:
    """Take samples at this niceness, with short slices, from now on; None leaves processes as they are."""
    global _niceness
    _niceness = niceness


@contextmanager
def sampling(*sessions: int) -> Iterator[None]:
    """Take a sample: the sessions' threads run at the chosen priority meanwhile, if one was chosen."""
    if _niceness is None:
        yield
        return
    change = _niceness - os.getpriority(os.PRIO_PROCESS, 0)
    _shift(sessions, change, SHORT_SLICE_S)
    try:
        yield
    finally:
        _shift((*sessions, *_joined), -change, 0.0)
        _joined.clear()


def join_sample(session: int) -> None:
    """Give a process that was started during a sample the priority of the others, until its end."""
    if _niceness is not None:
        _joined.append(session)
        _shift((session,), _niceness - os.getpriority(os.PRIO_PROCESS, 0), SHORT_SLICE_S)


def _shift(sessions: tuple[int, ...], change: int, slice_s: float) -> None:
    """Shift all threads by the same amount: one that made itself less urgent than its engine stays so."""
    for session in sessions:
        if _has_autogroups():  # then niceness of threads counts within the session only
            group = Path(f"/proc/{session}/autogroup")
            group.write_text(str(int(group.read_text().rpartition(" ")[2]) + change))
        for thread in threads_of(session):
            with suppress(ProcessLookupError):  # ended meanwhile
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                if not _has_autogroups():
                    nice += change
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    ask_for_slice(thread, nice, slice_s)


def ask_for_slice(thread: int, nice: int, slice_s: float) -> None:
    """Set the slice of a thread (0: this one). 0 s: the kernel's own choice. A kernel may refuse."""
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is not None:
        slice_ns = round(slice_s * 1e9)
        attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(number, thread, attributes, 0)


def _has_autogroups() -> bool:
    """Return whether the scheduler groups by session. The groups' files are there even where it does not."""
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return switch.exists() and switch.read_text().strip() == "1"


def threads_of(session: int) -> Iterator[int]:
    """Yield the threads of all processes of a session."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(process.name)) == session:
                yield from (int(thread.name) for thread in (process / "task").iterdir())
