"""Background threads of low priority, in the daemon and in a runtime's own process.

kvtier runs beside an inference engine, and what it does in the background (saving, spilling, copying forward)
is not urgent. A nice value alone does not keep it out of the way: since EEVDF a running thread is
protected until its slice ends, 3 ms, and an engine with threads that meet at a barrier a thousand times a
second waits for it that long each time. So these threads ask for SCHED_BATCH, which never preempts by waking
up, and for a slice so long that a thread that wakes up with an ordinary one goes first (`sched_runtime` of
sched_setattr(2), Linux 6.12; sched(7)).

SCHED_IDLE was rejected: an engine that polls leaves no processor idle, and a starving thread that holds
the interpreter's lock, or a mutex, holds up every thread that wants it. Here the weight stays that of the
nice value, so every thread goes on. Older kernels, other systems and forbidden calls: as far as it goes.
"""

import ctypes
import os
import platform
import struct
import threading
from contextlib import suppress
from pathlib import Path

NICENESS = 5  # of background threads: a third of what an engine's thread gets where both want a processor
SLICE_S = 0.1  # the longest that the kernel grants
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_NAME_BYTES = 15  # of a thread's name, as the kernel keeps it


def lower_thread_priority(name: str, niceness: int = NICENESS) -> None:
    """Lower the priority of the calling thread by `niceness`, and show `name` for it in top and ps.

    Never fails: what is not allowed stays as it was.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        Path(f"/proc/self/task/{thread}/comm").write_text(name[:_NAME_BYTES])
    with suppress(OSError, AttributeError):  # the latter: not Linux
        nice = min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
        os.setpriority(os.PRIO_PROCESS, thread, nice)
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        _ask_for_slice(thread, nice)


def _ask_for_slice(thread: int, nice: int) -> None:
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is not None:
        slice_ns = round(SLICE_S * 1e9)
        attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(number, thread, attributes, 0)  # EINVAL before 6.12: then without
